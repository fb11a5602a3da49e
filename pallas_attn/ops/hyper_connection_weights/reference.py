"""Definition of `hyper_connection_weights`: token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_attn.ops.hyper_connection_weights.call import HyperConnectionWeightsCall


def hyper_connection_weights(
    call: HyperConnectionWeightsCall,
) -> tuple[Float32[Array, "T n"], Float32[Array, "T n"], Float32[Array, "T n n"]]:
    of_token = functools.partial(_weights, call)
    return jax.vmap(of_token)(call.logits * call.inverse_rms[:, None])


def _weights(
    call: HyperConnectionWeightsCall, logits: Float32[Array, "columns"]
) -> tuple[Float32[Array, "n"], Float32[Array, "n"], Float32[Array, "n n"]]:
    """Return the weights of a token whose logits are already divided by the root mean square."""
    n, scale, base, eps = call.num_streams, call.scale, call.base, call.eps
    pre = jax.nn.sigmoid(logits[:n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(logits[n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = jax.nn.softmax((logits[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n), axis=1) + eps
    mix = mix / (jnp.sum(mix, axis=0, keepdims=True) + eps)
    for _ in range(call.iterations - 1):
        mix = mix / (jnp.sum(mix, axis=1, keepdims=True) + eps)
        mix = mix / (jnp.sum(mix, axis=0, keepdims=True) + eps)
    return pre, post, mix
