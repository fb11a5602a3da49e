"""Rotary position embedding (Su et al., arXiv:2104.09864), optionally scaled by YaRN or by Llama 3's rule.

R is the number of rotated columns of a head. Columns i and i + R/2 form pair i, which is rotated by position ·
frequency i.

In DeepSeek checkpoints, pair i is in columns 2i and 2i + 1 instead. `checkpoints.weights` reorders the columns of the
weights when it loads them (`halves_order`). Queries and keys are reordered in the same way, so their products do not
change. The cached rotated keys have the new order.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn.models.config import ModelConfig, YarnConfig
from pallas_attn.models.config.rope import RopeScaling

type CosSin = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]
"""Cosines and sines, float32 [T, R / 2] each, of the rotation angle of each token and pair."""


def inverse_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Return the frequency of each rotated pair: its angle per position in radians, float32 [R / 2]. For Gemma 4, the
    pairs are columns of local layers."""
    return scaled_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)


def scaled_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> Float32[np.ndarray, "half"]:
    """Return the frequency of each pair of R = `width` rotated columns, float32 [R / 2], given the base and the scaling
    of the rotary embedding."""
    frequencies = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling is not None:
        unscaled = _unscaled_share(scaling, theta, width)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling.factor)
    return frequencies.astype(np.float32)


def _unscaled_share(scaling: RopeScaling, theta: float, width: int) -> np.ndarray:
    """Return the weight [R / 2] of each unscaled frequency in its interpolation with the scaled frequency. It is 1 for
    high frequencies, which stay unscaled, and 0 for low frequencies."""
    if isinstance(scaling, YarnConfig):
        return _yarn_share(scaling, theta, width)
    turns = scaling.original_max_position_embeddings / (2 * math.pi) * theta ** -(np.arange(0, width, 2) / width)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(yarn: YarnConfig, theta: float, width: int) -> np.ndarray:
    """Return YaRN's linear ramp over the indices of the pairs (arXiv:2309.00071, 3.2)."""

    def pair_turning(turns: float) -> float:
        """Return the index of the pair that makes this many full rotations within the original context."""
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    return 1 - np.clip((np.arange(width // 2) - low) / span, 0, 1)


def rope_table(config: ModelConfig, positions: Int32[Array, "T"]) -> CosSin:
    """Return cosines and sines of the angles of each token. With YaRN, both are multiplied by its attention scale."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(config))[None, :]
    scale = config.rope_scaling.rotary_scale if config.rope_scaling else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "T *heads R"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T *heads R"]:
    """Rotate pair i (columns i and i + R/2) of every token and head by the token's angle i. It is computed in float32;
    the result has the dtype of x."""
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_pairs(
    x: Float[Array, "T *heads D"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T *heads D"]:
    """Rotate the last R columns of every token and head in interleaved pairs: pair i is columns 2i and 2i + 1 of these
    R columns. Other columns do not change. It is computed in float32; the result has the dtype of x."""
    plain, rotated = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    pairs = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([plain, turned.reshape(rotated.shape).astype(x.dtype)], axis=-1)


def halves_order(width: int) -> np.ndarray:
    """Return the permutation from interleaved pairs to halves, int [width]: if `x` has pair i in columns 2i and 2i + 1,
    `x[halves_order(width)]` has it in columns i and i + width/2."""
    return np.arange(width).reshape(-1, 2).T.reshape(-1)
