"""Rotary embedding entries of a config.json: the base, and scaling to longer contexts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from models.config.entries import Json, json_object, number, read_fields
from models.config.json_files import shown

LENGTH = "original_max_position_embeddings"


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
    """Read base and scaling from `rope_parameters` or the older `rope_scaling` and `rope_theta`.

    Args:
      config: contents of a config.json.
      kinds: supported rope types of the family, including "default".

    Raises:
      ValueError: an entry is missing, malformed or contradicts another entry.
      NotImplementedError: unsupported rope type.
    """
    old, new = json_object(config, "rope_scaling"), json_object(config, "rope_parameters")
    if clashes := [k for k in old.keys() & new.keys() if old[k] != new[k]]:
        raise ValueError(f"rope_scaling and rope_parameters contradict each other in {', '.join(sorted(clashes))}")
    rope = {**old, **new}
    thetas = {number("rope_theta", r["rope_theta"]) for r in (config, rope) if r.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta: config.json gives {' and '.join(map(str, sorted(thetas)))}")
    found = {str(rope[key]) for key in ("type", "rope_type") if rope.get(key)} or {"default"}
    if len(found) > 1:
        raise ValueError(f"rope type and rope_type contradict each other: {', '.join(sorted(found))}")
    kind = found.pop()
    if kind not in kinds:
        raise NotImplementedError(f"rope type {shown(kind)}: expected {' or '.join(kinds)}")
    return thetas.pop() if thetas else 10000.0, _SCALINGS[kind](config, rope)


def rope_entry(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the `rope_scaling` entry that `read_rope` reads."""
    if scaling is None:
        return None
    given = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"type": "yarn" if isinstance(scaling, YarnConfig) else "llama3", **given}


def _plain(config: Json, rope: Json) -> None:
    return None


def _yarn(config: Json, rope: Json) -> YarnConfig:
    if rope.get("factor") is None:
        raise ValueError("rope type yarn: factor is missing")
    original = config.get(LENGTH) or rope.get(LENGTH) or config["max_position_embeddings"]
    return YarnConfig(**read_fields(YarnConfig, {**rope, LENGTH: original}))


def _llama3(config: Json, rope: Json) -> Llama3RopeConfig:
    entries = {LENGTH: config.get(LENGTH), **{name: value for name, value in rope.items() if value is not None}}
    if missing := [f.name for f in dataclasses.fields(Llama3RopeConfig) if entries.get(f.name) is None]:
        raise ValueError(f"rope type llama3: {', '.join(missing)} missing")
    return Llama3RopeConfig(**read_fields(Llama3RopeConfig, entries))


_SCALINGS = {"default": _plain, "yarn": _yarn, "llama3": _llama3}
