"""Rotary position embedding (Su et al., arXiv:2104.09864): plain, stretched by YaRN, or by Llama 3's rule.

Columns i and i + R/2 turn together, as two contiguous slices. The rotary columns of a DeepSeek checkpoint are
interleaved pairs, columns 2i and 2i + 1 turning by angle i; `weights` moves them to two halves when it loads
(`halves_order`). A permutation of columns that queries and keys share changes no score; only the cached rotated key
shows it.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from models.config import ModelConfig, YarnConfig
from models.config.rope import RopeScaling

type CosSin = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]
"""Cosines and sines of each token's angles."""


def inverse_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Angle per position, in radians, of each rotated pair: [R / 2]."""
    width = config.rotary_dim
    frequencies = config.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if config.rope_scaling is not None:
        kept = _kept_share(config.rope_scaling, config.rope_theta, width)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_scaling.factor)
    return frequencies.astype(np.float32)


def _kept_share(scaling: RopeScaling, theta: float, width: int) -> np.ndarray:
    """Share of each frequency that is kept instead of interpolated: 1 for fast ones, down to 0."""
    if isinstance(scaling, YarnConfig):
        return _kept_by_yarn(scaling, theta, width)
    turns = scaling.original_max_position_embeddings / (2 * math.pi) * theta ** -(np.arange(0, width, 2) / width)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _kept_by_yarn(yarn: YarnConfig, theta: float, width: int) -> np.ndarray:
    """Linear ramp over the pairs' indices (arXiv:2309.00071, 3.2)."""

    def pair_turning(turns: float) -> float:
        """Index of the pair that turns this many times within the original context."""
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    return 1 - np.clip((np.arange(width // 2) - low) / span, 0, 1)


def rope_table(config: ModelConfig, positions: Int32[Array, "T"]) -> CosSin:
    """Cosines and sines of each token's angles, YaRN's temperature included."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(config))[None, :]
    scale = config.rope_scaling.rotary_scale if config.rope_scaling else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "T *heads R"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T *heads R"]:
    """Rotates columns i and i + R/2 of every token by its angle i; computed in float32, returned in x's dtype."""
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def halves_order(width: int) -> np.ndarray:
    """Permutation from interleaved pairs to halves: `interleaved[halves_order(width)]` has pair i at i and i + R/2."""
    return np.arange(width).reshape(-1, 2).T.reshape(-1)
