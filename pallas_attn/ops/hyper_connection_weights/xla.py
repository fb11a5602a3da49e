"""`hyper_connection_weights` in plain JAX, for any device: a loop that normalises rows and columns of all tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_attn.ops.hyper_connection_weights.call import HyperConnectionWeightsCall


def hyper_connection_weights(
    call: HyperConnectionWeightsCall,
) -> tuple[Float32[Array, "T n"], Float32[Array, "T n"], Float32[Array, "T n n"]]:
    n = call.num_streams
    scale = jnp.repeat(call.scale, jnp.asarray([n, n, n * n]), total_repeat_length=call.logits.shape[1])
    z = call.logits * call.inverse_rms[:, None] * scale[None] + call.base[None]
    pre, post = jax.nn.sigmoid(z[:, :n]) + call.eps, 2 * jax.nn.sigmoid(z[:, n : 2 * n])

    def normalised(mix: Array, axis: int) -> Array:
        return mix / (jnp.sum(mix, axis=axis, keepdims=True) + call.eps)

    mix = normalised(jax.nn.softmax(z[:, 2 * n :].reshape(-1, n, n), axis=2) + call.eps, 1)
    mix = jax.lax.fori_loop(1, call.iterations, lambda _, mix: normalised(normalised(mix, 2), 1), mix)
    return pre, post, mix
