"""Hyper-connections of DeepSeek-V4: N residual streams, which each sublayer reads and writes with learned weights.

    x = sum_n pre[n] · X[n]
    X'[j] = post[j] · sublayer(x) + sum_i mix[i, j] · X[i]

The weights are computed from the streams of the token. `mix` is close to doubly stochastic: the sums of its rows and of
its columns are close to 1, by alternate normalisation (Sinkhorn and Knopp).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder.layers import project, rms_scaled


class StreamWeights(NamedTuple):
    """Weights with which the output of a sublayer is added to the streams of each token.

    Attributes:
      post: float32 [T, N], factor of the output in each stream.
      mix: float32 [T, N, N]; entry [t, i, j] is the weight of old stream i in new stream j.
    """

    post: Float32[Array, "T N"]
    mix: Float32[Array, "T N N"]


class HyperConnection(nnx.Module):
    """Weights of one sublayer. All parameters are float32, independent of the model's dtype."""

    def __init__(self, config: DeepseekV4Config):
        streams = config.hc_mult
        self.streams, self.iterations = streams, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        outputs = (2 + streams) * streams
        self.fn = nnx.Param(jnp.zeros((streams * config.hidden_size, outputs), jnp.float32))
        self.base = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.scale = nnx.Param(jnp.ones(3, jnp.float32))

    def __call__(self, streams: Float[Array, "T N D"]) -> tuple[Float[Array, "T D"], StreamWeights]:
        """Return the input of the sublayer, and the weights with which `merge` adds its output."""
        count = self.streams
        z = project(flat_streams(streams, self.norm_eps), self.fn[...])
        scale = jnp.repeat(self.scale[...], jnp.asarray([count, count, count**2]), total_repeat_length=z.shape[1])
        z = z * scale[None] + self.base[...][None]
        pre, post = jax.nn.sigmoid(z[:, :count]) + self.eps, 2 * jax.nn.sigmoid(z[:, count : 2 * count])
        mix = self._doubly_stochastic(z[:, 2 * count :].reshape(-1, count, count))
        return weighted_streams(streams, pre), StreamWeights(post, mix)

    def _doubly_stochastic(self, logits: Float32[Array, "T N N"]) -> Float32[Array, "T N N"]:
        """Return the softmax of each row, then normalised by columns and rows in turn, columns first and last."""

        def normalised(mix: Array, axis: int) -> Array:
            return mix / (jnp.sum(mix, axis=axis, keepdims=True) + self.eps)

        mix = normalised(jax.nn.softmax(logits, axis=2) + self.eps, 1)
        return jax.lax.fori_loop(1, self.iterations, lambda _, mix: normalised(normalised(mix, 2), 1), mix)


def merge(streams: Float[Array, "T N D"], output: Float[Array, "T D"], weights: StreamWeights) -> Float[Array, "T N D"]:
    """Return the streams after a sublayer with this output, computed in float32."""
    old, new = streams.astype(jnp.float32), output.astype(jnp.float32)
    mixed = jnp.sum(weights.mix[..., None] * old[:, :, None], axis=1)
    return (weights.post[..., None] * new[:, None] + mixed).astype(streams.dtype)


class StreamHead(nnx.Module):
    """Sum of the streams after the last layer, with weights computed from the streams. Parameters are float32."""

    def __init__(self, config: DeepseekV4Config):
        streams = config.hc_mult
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.fn = nnx.Param(jnp.zeros((streams * config.hidden_size, streams), jnp.float32))
        self.base = nnx.Param(jnp.zeros(streams, jnp.float32))
        self.scale = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(self, streams: Float[Array, "T N D"]) -> Float[Array, "T D"]:
        z = project(flat_streams(streams, self.norm_eps), self.fn[...])
        weights = jax.nn.sigmoid(z * self.scale[...][None] + self.base[...][None]) + self.eps
        return weighted_streams(streams, weights)


def flat_streams(streams: Float[Array, "T N D"], eps: float) -> Float32[Array, "T ND"]:
    """Return all streams of each token as one row, divided by its root mean square."""
    return rms_scaled(streams.reshape(streams.shape[0], -1), eps)


def weighted_streams(streams: Float[Array, "T N D"], weights: Float32[Array, "T N"]) -> Float[Array, "T D"]:
    """Return the weighted sum of the streams of each token, computed in float32. The weights are not normalised."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)
