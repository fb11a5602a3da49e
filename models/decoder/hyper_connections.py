"""Hyper-connections of DeepSeek-V4: N residual streams, which each sublayer reads and writes with learned weights.

    x = sum_n pre[n] · X[n]
    X'[j] = post[j] · sublayer(x) + sum_i mix[i, j] · X[i]

The weights are computed from the streams of the token, by a matrix product and `pallas_attn.hyper_connection_weights`.
The sums over streams are elementwise and left to XLA.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_attn import hyper_connection_weights
from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder.layers import project, sum_of_parts
from pallas_attn.models.decoder.settings import AttentionSettings


class StreamWeights(NamedTuple):
    """Weights with which the output of a sublayer is added to the streams of each token.

    Attributes:
      post: float32 [T, N], factor of the output in each stream.
      mix: float32 [T, N, N]; entry [t, i, j] is the weight of old stream i in new stream j.
    """

    post: Float32[Array, "T N"]
    mix: Float32[Array, "T N N"]


class HyperConnection(nnx.Module):
    """Weights of one sublayer. All parameters have the accuracy of float32, independent of the model's dtype."""

    def __init__(self, config: DeepseekV4Config, settings: AttentionSettings, dtype: DTypeLike):
        streams = config.hc_mult
        self.iterations, self.implementation = config.hc_sinkhorn_iters, settings.implementation
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        outputs = (2 + streams) * streams
        self.fn = _matrix(streams * config.hidden_size, outputs, dtype)
        self.base = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.scale = nnx.Param(jnp.ones(3, jnp.float32))

    def __call__(self, streams: Float[Array, "T N D"]) -> tuple[Float[Array, "T D"], StreamWeights]:
        """Return the input of the sublayer, and the weights with which `merge` adds its output."""
        flat = flat_streams(streams)
        pre, post, mix = hyper_connection_weights(
            _logits(flat, self.fn[...], self.base.shape[0]),
            inverse_rms(flat, self.norm_eps),
            self.scale[...],
            self.base[...],
            iterations=self.iterations,
            eps=self.eps,
            implementation=self.implementation,
        )
        return weighted_streams(streams, pre), StreamWeights(post, mix)


def merge(streams: Float[Array, "T N D"], output: Float[Array, "T D"], weights: StreamWeights) -> Float[Array, "T N D"]:
    """Return the streams after a sublayer with this output, computed in float32."""
    old, new = streams.astype(jnp.float32), output.astype(jnp.float32)
    mixed = jnp.sum(weights.mix[..., None] * old[:, :, None], axis=1)
    return (weights.post[..., None] * new[:, None] + mixed).astype(streams.dtype)


class StreamHead(nnx.Module):
    """Sum of the streams after the last layer, with weights computed from the streams. Parameters have the accuracy of
    float32."""

    def __init__(self, config: DeepseekV4Config, dtype: DTypeLike):
        streams = config.hc_mult
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.fn = _matrix(streams * config.hidden_size, streams, dtype)
        self.base = nnx.Param(jnp.zeros(streams, jnp.float32))
        self.scale = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(self, streams: Float[Array, "T N D"]) -> Float[Array, "T D"]:
        flat = flat_streams(streams)
        z = _logits(flat, self.fn[...], self.base.shape[0]) * inverse_rms(flat, self.norm_eps)[:, None]
        weights = jax.nn.sigmoid(z * self.scale[...][None] + self.base[...][None]) + self.eps
        return weighted_streams(streams, weights)


def _matrix(rows: int, columns: int, dtype: DTypeLike) -> nnx.Param:
    """Return a matrix for a model of this dtype: float32 [rows, columns]; or bfloat16 [rows, 3 · columns], the result
    of `split_weights`, which steps would otherwise compute in every call."""
    return nnx.Param(jnp.zeros((rows, columns if jnp.dtype(dtype) == jnp.float32 else 3 * columns), dtype))


def _logits(rows: Float[Array, "T ND"], fn: Float[Array, "ND F"], columns: int) -> Float32[Array, "T columns"]:
    """Return the product of rows and a matrix of `_matrix`."""
    products = project(rows, fn, jnp.float32)
    return products if fn.shape[1] == columns else sum_of_parts(products)


def flat_streams(streams: Float[Array, "T N D"]) -> Float[Array, "T ND"]:
    """Return all streams of each token as one row.

    The logits, not the row, are divided by the row's root mean square. `project` can then read rows in bfloat16.
    """
    return streams.reshape(streams.shape[0], -1)


def inverse_rms(rows: Float[Array, "T ND"], eps: float) -> Float32[Array, "T"]:
    """Return 1 / sqrt(mean(x²) + eps) of each row x, computed in float32."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(rows.astype(jnp.float32)), axis=-1) + eps)


def weighted_streams(streams: Float[Array, "T N D"], weights: Float32[Array, "T N"]) -> Float[Array, "T D"]:
    """Return the weighted sum of the streams of each token, computed in float32. The weights are not normalised."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)
