"""Entries of a config.json that several families have, with validation of their types and ranges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from pallas_attn.models.config.json_files import shown

type Json = Mapping[str, Any]

LARGEST = {
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 10_000,
    "n_routed_experts": 100_000,
    "n_shared_experts": 100_000,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
    "num_kv_shared_layers": 10_000,
    "max_position_embeddings": 100_000_000,
    **dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size"), 10_000_000),
    "vocab_size_per_layer_input": 10_000_000,
    **dict.fromkeys(("hidden_size", "kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input"), 1_000_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), 10_000),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 10_000),
    **dict.fromkeys(("index_n_heads", "index_head_dim"), 10_000),
    "index_topk": 10_000_000,
    **dict.fromkeys(("hc_mult", "hc_sinkhorn_iters"), 1_000),
    **dict.fromkeys(("o_groups", "o_lora_rank"), 1_000_000),
}
"""Maximum values of sizes that determine loops or tables before a weight has been read. They are at least ten times
the sizes of published models."""

LARGEST_INTEGER = 2**31 - 1
"""Maximum value of all other integers. Shapes and kernels use 32-bit integers."""

LARGEST_NUMBER = 1e30
"""Maximum magnitude of numbers, far below overflow in float32."""

LAYERS_BY_EXPERTS = 500_000
"""Maximum number of experts in all layers of a model together."""


def at_least(least: int, values: Mapping[str, int]) -> None:
    """Raise ValueError if a value is below `least` or above its maximum."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
        _at_most(name, value)


def check_scalars(rope_theta: float, rms_norm_eps: float) -> None:
    """Raise ValueError for an impossible rotary base or epsilon of norms."""
    if rope_theta <= 1:
        raise ValueError(f"rope_theta: expected more than 1, got {rope_theta:g}")
    if rms_norm_eps < 0:
        raise ValueError(f"rms_norm_eps: expected at least 0, got {rms_norm_eps:g}")


def check_kv_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int, prefix: str = "") -> None:
    """Raise ValueError unless KV heads divide the query heads and the columns of a head form pairs. `prefix` is the
    start of the names in messages."""
    if num_attention_heads % num_key_value_heads:
        wanted = f"a divisor of num_attention_heads={num_attention_heads}"
        raise ValueError(f"num_{prefix}key_value_heads: expected {wanted}, got {num_key_value_heads}")
    if head_dim % 2:
        raise ValueError(f"{prefix}head_dim: expected an even number, got {head_dim}")


def check_experts_of_all_layers(layers: int, name: str, experts: int) -> None:
    """Raise ValueError if all layers together have too many experts."""
    if layers * experts > LAYERS_BY_EXPERTS:
        wanted = f"at most {LAYERS_BY_EXPERTS} in all layers"
        raise ValueError(f"{name}: expected {wanted}, got {experts} in each of {layers}")


def check_chosen_experts(layers: int, experts: tuple[str, int], chosen: tuple[str, int]) -> None:
    """Raise ValueError for an impossible number of experts of a layer, or of experts that a token selects. Both are
    given with their names, for messages."""
    (name, number), (name_of_chosen, number_of_chosen) = experts, chosen
    at_least(1, dict((experts, chosen)))
    check_experts_of_all_layers(layers, name, number)
    if number_of_chosen > number:
        raise ValueError(f"{name_of_chosen}: expected at most {name}={number}, got {number_of_chosen}")


def _at_most(name: str, value: int) -> None:
    most = LARGEST.get(name, LARGEST_INTEGER)
    if abs(value) > most:
        raise ValueError(f"{name}: expected at most {most}, got {shown(value)}")


def read_fields(cls: type, entries: Json) -> dict[str, Any]:
    """Read the fields of simple types of a dataclass, and validate each against its annotation.

    Raises:
      ValueError: an entry has another type.
    """
    read: dict[Any, Any] = {
        "int": integer,
        "int | None": integer,
        "float": number,
        "float | None": number,
        "bool": _flag,
    }
    given = [f for f in dataclasses.fields(cls) if f.type in read and f.name in entries]
    fields = {f.name: read[f.type](f.name, entries[f.name]) for f in given if entries[f.name] is not None}
    return fields | {f.name: None for f in given if entries[f.name] is None and f.type == "int | None"}


def integer(name: str, value: Any) -> int:
    """Return an integer of at most the maximum for this name. Raises ValueError for any other value."""
    if not is_integer(value):
        raise ValueError(f"{name}: expected an integer, got {shown(value)}")
    _at_most(name, value)
    return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer. true and false are not integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(name: str, value: Any) -> float:
    """Return a finite number of at most LARGEST_NUMBER. Raises ValueError for any other value."""
    if not is_integer(value) and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
    if abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{name}: expected at most {LARGEST_NUMBER:g}, got {shown(value)}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {shown(value)}")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Read token ids of config.json or generation_config.json: absent, one id, or a list.

    Raises:
      ValueError: any other value.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(i) and 0 <= i <= LARGEST_INTEGER for i in ids):
        raise ValueError(f"{name}: expected an id or a list of ids, got {shown(value)}")
    return tuple(ids)


def dtype_of(config: Json, default: str = "float32") -> str:
    """Return the dtype of the checkpoint from its old or new entry. Raises ValueError for an unsupported dtype."""
    names = {str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)}
    if len(names) > 1:
        raise ValueError(f"dtype and torch_dtype contradict each other: {', '.join(sorted(names))}")
    name = names.pop() if names else default
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {shown(name)}")
    return name


def json_object(config: Json, name: str) -> Json:
    """Return an entry that is an object, empty if absent. Raises ValueError for any other value."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected an object, got {shown(value)}")
    return value


def fp8_block(config: Json) -> tuple[int, int] | None:
    """Return the rows and columns per scale of a block-quantised checkpoint; None for an unquantised checkpoint.

    Raises:
      ValueError: malformed entry.
      NotImplementedError: unsupported quantisation.
    """
    quantization = json_object(config, "quantization_config")
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block is None or quantization.get("fmt", "e4m3") != "e4m3":
        raise NotImplementedError(
            f"quantization_config: expected quant_method fp8 in e4m3 with a weight_block_size,"
            f" got {shown(dict(quantization))}"
        )
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(is_integer(size) and 0 < size <= LARGEST_INTEGER for size in sizes):
        raise ValueError(f"weight_block_size: expected rows and columns, got {shown(block)}")
    return (sizes[0], sizes[1])


def quantization_entry(fp8_block: tuple[int, int]) -> dict[str, Any]:
    """Return a quantization_config that `fp8_block` reads."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fp8_block),
    }


def refuse_unsupported(config: Json, **of_family: Any) -> None:
    """Raise NotImplementedError for features of other models that would change the results.

    Args:
      config: contents of a config.json.
      of_family: the only supported value of further entries; None if the entry must be absent.
    """
    for name, supported in (_SUPPORTED | of_family).items():
        value = config.get(name)
        if value is not None and value != supported:
            wanted = "no such entry" if supported is None else shown(supported)
            raise NotImplementedError(
                f"{name} {shown(value)}: expected {wanted}, this variant of a model is not supported"
            )


_SUPPORTED: dict[str, Any] = {
    "alibi": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "is_causal": True,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "no_rope_layer_interval": None,
    "no_rope_layers": [],
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "rope_local_base_freq": None,
    "use_bidirectional_attention": False,
    "use_mla": True,
    "use_parallel_residual": False,
}
"""The only supported value of entries that change the results in some families of transformers; None if the entry must
be absent. An entry that is null counts as absent."""


def with_names(config: Json, aliases: Mapping[str, str]) -> Json:
    """Return a config.json with the entries of `aliases` (alias: name) under their names.

    Raises:
      ValueError: an alias contradicts the entry with the name.
    """
    for alias, name in aliases.items():
        value, named = config.get(alias), config.get(name)
        if value is None:
            continue
        if named is not None and named != value:
            raise ValueError(f"{alias}: expected the value of {name}, {shown(named)}, got {shown(value)}")
        config = {**config, name: value}
    return config
