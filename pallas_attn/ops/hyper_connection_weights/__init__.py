"""Compute the weights with which a sublayer reads and writes residual streams (DeepSeek-V4's hyper-connections)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_attn import checks
from pallas_attn.ops.hyper_connection_weights.call import HyperConnectionWeightsCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation


def hyper_connection_weights(
    logits: Float32[Array, "T columns"],
    inverse_rms: Float32[Array, "T"],
    scale: Float32[Array, "3"],
    base: Float32[Array, "columns"],
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    implementation: Implementation = None,
) -> tuple[Float32[Array, "T n"], Float32[Array, "T n"], Float32[Array, "T n n"]]:
    """Return the weights of n residual streams for each token.

    A sublayer of a model with hyper-connections reads a weighted sum of the streams X[i], and its output y is added
    to all streams:

      x = sum_i pre[i] · X[i]
      X'[j] = post[j] · y + sum_i mix[i, j] · X[i]

    The logits have (2 + n) · n columns: n for `pre`, n for `post`, and n · n for `mix`.

      z = logits · inverse_rms · scale + base          # scale[0], scale[1], scale[2] for the three groups of columns
      pre = sigmoid(z) + eps
      post = 2 · sigmoid(z)
      mix = softmax(z as [n, n], over the columns of each row) + eps
      mix = mix / (column sums + eps)
      repeat iterations - 1 times:  mix = mix / (row sums + eps);  mix = mix / (column sums + eps)

    The sums of rows and columns of `mix` approach 1 (Sinkhorn and Knopp). Everything is computed in float32.

    Args:
      logits: projection of the flattened streams of each token, before the division by their root mean square.
      inverse_rms: 1 / root mean square of the flattened streams of each token.
      scale, base: factors and biases of the logits.
      iterations: number of normalisations by columns.
      eps: number that is added to weights and sums; at least 0.
      implementation: None, a name, or names to try in order.

    Returns:
      `pre`, `post` and `mix`. Entry [t, i, j] of `mix` is the weight of old stream i in new stream j.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> logits = jnp.zeros((3, 8))  # three tokens, n = 2
      >>> pre, post, mix = pallas_attn.hyper_connection_weights(logits, jnp.ones(3), jnp.ones(3), jnp.arange(8.0))
      >>> [round(x, 3) for x in post[0].tolist()]
      [1.762, 1.905]
      >>> [[round(x, 3) for x in row] for row in mix[0].tolist()]
      [[0.5, 0.5], [0.5, 0.5]]
    """
    call = HyperConnectionWeightsCall(
        logits,
        inverse_rms,
        scale,
        base,
        iterations=checks.size("iterations", iterations),
        eps=checks.number_or_zero("eps", eps),
    )
    call.validate()
    if logits.shape[0]:
        return dispatch.run(call, implementation)
    n = call.num_streams
    return jnp.zeros((0, n)), jnp.zeros((0, n)), jnp.zeros((0, n, n))
