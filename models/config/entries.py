"""Entries of a config.json that several families have, with validation of their types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

type Json = Mapping[str, Any]


def at_least(least: int, values: Mapping[str, int]) -> None:
    """Raises ValueError, naming the first value below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def read_fields(cls: type, entries: Json) -> dict[str, Any]:
    """Reads the dataclass's fields of plain types from the entries, validating each against its annotation.

    Raises:
      ValueError: an entry of another type.
    """
    read: dict[Any, Any] = {
        "int": _integer,
        "int | None": _integer,
        "float": number,
        "float | None": number,
        "bool": _flag,
    }
    given = [f for f in dataclasses.fields(cls) if f.type in read and f.name in entries]
    fields = {f.name: read[f.type](f.name, entries[f.name]) for f in given if entries[f.name] is not None}
    return fields | {f.name: None for f in given if entries[f.name] is None and f.type == "int | None"}


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return value


def number(name: str, value: Any) -> float:
    """Validates a finite number; raises ValueError for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Reads token ids as config.json and generation_config.json give them: absent, one, or a list.

    Raises:
      ValueError: anything else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{name}: expected an id or a list of ids, got {value!r}")
    return tuple(ids)


def dtype_of(config: Json, default: str = "float32") -> str:
    """Dtype that the checkpoint is stored in, by its old or new entry; raises ValueError for an unsupported one."""
    names = {str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)}
    if len(names) > 1:
        raise ValueError(f"dtype and torch_dtype contradict each other: {', '.join(sorted(names))}")
    name = names.pop() if names else default
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {name!r}")
    return name


def json_object(config: Json, name: str) -> Json:
    """Reads an entry that is an object, empty if absent; raises ValueError for anything else."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected an object, got {value!r}")
    return value


def fp8_block(config: Json) -> tuple[int, int] | None:
    """Rows and columns per scale of a block-quantised checkpoint, None for an unquantised one.

    Raises:
      ValueError: a malformed entry.
      NotImplementedError: another kind of quantisation.
    """
    quantization = json_object(config, "quantization_config")
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block is None or quantization.get("fmt", "e4m3") != "e4m3":
        raise NotImplementedError(
            f"quantization_config: expected quant_method fp8 in e4m3 with a weight_block_size, got {dict(quantization)}"
        )
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"weight_block_size: expected rows and columns, got {block!r}")
    return (block[0], block[1])


def quantization_entry(fp8_block: tuple[int, int]) -> dict[str, Any]:
    """Makes the quantization_config that `fp8_block` reads."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fp8_block),
    }


def refuse_unsupported(config: Json) -> None:
    """Raises NotImplementedError for unimplemented features, of any family, that would change the model's results."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act {config['hidden_act']!r}: expected 'silu'")
    if config.get("mlp_bias"):
        raise NotImplementedError("mlp_bias: biases in the feed-forward layers are not supported")
