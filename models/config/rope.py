"""Rotary embedding entries of a config.json: the base, and scaling to longer contexts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pallas_attn.models.config.entries import Json, json_object, number, read_fields
from pallas_attn.models.config.json_files import shown

LENGTH, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Context extension by YaRN (Peng et al., arXiv:2309.00071), with DeepSeek's two temperatures.

    Attributes:
      factor: ratio of the extended context length to the original length.
      original_max_position_embeddings: context length of pretraining, in tokens.
      beta_fast, beta_slow: rotations within the original context. Frequencies above beta_fast are unchanged,
        frequencies below beta_slow are interpolated, and frequencies between them are blended.
      mscale, mscale_all_dim: strengths of the temperatures of the rotary part and of all scores.
      attention_factor: factor of cos and sin; None to compute it from mscale and mscale_all_dim.
      truncate: whether the blend starts and ends at whole frequency indices.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"yarn factor: expected at least 1, got {self.factor}")
        if self.original_max_position_embeddings < 1:
            got = self.original_max_position_embeddings
            raise ValueError(f"original_max_position_embeddings: expected at least 1, got {got}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"expected beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}")
        if min(self.mscale, self.mscale_all_dim) < 0:
            raise ValueError(
                f"mscale, mscale_all_dim: expected at least 0, got {self.mscale} and {self.mscale_all_dim}"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"attention_factor: expected more than 0, got {self.attention_factor}")

    @property
    def rotary_scale(self) -> float:
        """Factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """Factor of all attention scores: the square of the temperature, for queries and keys."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclasses.dataclass(frozen=True)
class Llama3RopeConfig:
    """Context extension of Llama 3.1 (Grattafiori et al., arXiv:2407.21783, 3.4.2).

    Attributes:
      factor: divisor of low frequencies.
      original_max_position_embeddings: context length of pretraining, in tokens.
      low_freq_factor, high_freq_factor: rotations within the original context. Frequencies below low_freq_factor are
        interpolated, frequencies above high_freq_factor are unchanged, and frequencies between them are blended.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"llama3 factor: expected at least 1, got {self.factor}")
        if self.original_max_position_embeddings < 1:
            raise ValueError(f"{LENGTH}: expected at least 1, got {self.original_max_position_embeddings}")
        if not self.high_freq_factor > self.low_freq_factor > 0:
            got = f"{self.high_freq_factor} and {self.low_freq_factor}"
            raise ValueError(f"expected high_freq_factor > low_freq_factor > 0, got {got}")

    @property
    def rotary_scale(self) -> float:
        """Factor of cos and sin: 1."""
        return 1.0


type RopeScaling = YarnConfig | Llama3RopeConfig


def read_rope(config: Json, kinds: tuple[str, ...]) -> tuple[float, RopeScaling | None]:
    """Read the base and the scaling of the rotary embedding, with the precedence of transformers 5.23.

    - The type of the scaling and its parameters are entries of the object `rope_parameters`, or of the older object
      `rope_scaling`. If config.json has both objects, their entries must be equal. An entry with the value null counts
      as absent. An entry that the rope type does not use is an error.
    - `rope_theta` is an entry of these objects or of config.json itself. All given values must be equal. The default is
      10000.
    - `original_max_position_embeddings` of config.json itself overrides the entry of these objects, for all rope types.
      The default is `max_position_embeddings`.
    - `partial_rotary_factor`, in any of these places, must be 1.

    Args:
      config: contents of a config.json.
      kinds: supported rope types of the family, including "default".

    Raises:
      ValueError: an entry is missing, malformed or unknown, or contradicts another entry.
      NotImplementedError: unsupported rope type, rotation of a part of the columns, or different parameters for
        different kinds of layers.
    """
    old, new = (_scaling_entries(config, name) for name in ("rope_scaling", "rope_parameters"))
    theta = _theta(config, old, new)
    if old and new and old != new:
        names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        values = "; ".join(f"{name}: {shown(old.get(name))} and {shown(new.get(name))}" for name in names)
        raise ValueError(f"rope_scaling and rope_parameters: expected equal entries, got {values}")
    rope = new or old
    for entries in (config, rope):
        if (partial := entries.get(PARTIAL)) is not None and number(PARTIAL, partial) != 1:
            raise NotImplementedError(f"{PARTIAL} {shown(partial)}: expected 1, rotation of all rotary columns")
    kind = rope.get("rope_type", "default")
    if kind not in kinds:
        raise NotImplementedError(f"rope type {shown(kind)}: expected {' or '.join(kinds)}")
    return theta, _read_scaling(kind, config, rope)


def _scaling_entries(config: Json, name: str) -> dict[str, Any]:
    """Return the entries of `rope_scaling` or `rope_parameters` that are not null, with `rope_type` for `type`."""
    rope = {key: value for key, value in json_object(config, name).items() if value is not None}
    if nested := sorted(key for key, value in rope.items() if isinstance(value, Mapping)):
        raise NotImplementedError(f"{name}: expected entries for all layers together, got entries for {shown(nested)}")
    found = {str(rope.pop(key)) for key in ("type", "rope_type") if key in rope}
    if len(found) > 1:
        raise ValueError(f"{name}: type and rope_type contradict each other: {', '.join(sorted(found))}")
    return rope | ({"rope_type": found.pop()} if found else {})


def _theta(config: Json, *ropes: dict[str, Any]) -> float:
    """Read rope_theta from config.json, and remove it from `rope_scaling` and `rope_parameters`."""
    given = [config.get("rope_theta"), *(rope.pop("rope_theta", None) for rope in ropes)]
    thetas = {number("rope_theta", value) for value in given if value is not None}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta: config.json gives {' and '.join(map(str, sorted(thetas)))}, expected one value")
    return thetas.pop() if thetas else 10000.0


def _read_scaling(kind: str, config: Json, rope: Json) -> RopeScaling | None:
    """Read the entries of a rope type, and raise ValueError for missing and unknown entries."""
    scaling = _SCALINGS[kind]
    known = [] if scaling is None else [field.name for field in dataclasses.fields(scaling)]
    for name, value in rope.items():
        if name not in (*known, "rope_type", PARTIAL):
            wanted = f"one of {', '.join(known)}" if known else "no further entry"
            raise ValueError(f"rope type {kind}: expected {wanted}, got {name}: {shown(value)}")
    if scaling is None:
        return None
    lengths = (config.get(LENGTH), rope.get(LENGTH), config["max_position_embeddings"])
    entries = {**rope, LENGTH: next(length for length in lengths if length is not None)}
    required = [field.name for field in dataclasses.fields(scaling) if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in entries]:
        raise ValueError(f"rope type {kind}: {', '.join(missing)} missing")
    return scaling(**read_fields(scaling, entries))


def rope_entry(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the `rope_scaling` entry that `read_rope` reads."""
    if scaling is None:
        return None
    given = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"type": "yarn" if isinstance(scaling, YarnConfig) else "llama3", **given}


_SCALINGS: Mapping[str, type[YarnConfig | Llama3RopeConfig] | None] = {
    "default": None,
    "yarn": YarnConfig,
    "llama3": Llama3RopeConfig,
}
"""Class of the scaling of each rope type; None without scaling."""
