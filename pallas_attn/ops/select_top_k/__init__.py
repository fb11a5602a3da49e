"""Select the positions of the highest scores of each token, for sparse attention."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.select_top_k.call import SelectTopKCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation


def select_top_k(
    scores: Float32[Array, "T K"], *, top_k: int, implementation: Implementation = None
) -> Int32[Array, "T top_k"]:
    """Return the positions of the `top_k` highest scores of each token. The selection is exact.

    Args:
      scores: scores of K positions for each token, for example from `index_scores`. -inf is never selected, and NaN
        counts as +inf. Of equal scores, the lower position is selected.
      top_k: number of positions per token. May exceed K.
      implementation: None, a name, or names to try in order.

    Returns:
      Positions in ascending order, then -1 if a token has fewer than `top_k` scores above -inf.

    Raises:
      ValueError: `scores` is not float32 [T, K], or `top_k` is below 1.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> scores = jnp.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.5, -jnp.inf, -2.0, -jnp.inf, -jnp.inf]])
      >>> pallas_attn.select_top_k(scores, top_k=3).tolist()
      [[1, 2, 4], [0, 2, -1]]
    """
    call = SelectTopKCall(scores, top_k=checks.size("top_k", top_k))
    call.validate()
    return dispatch.run(call, implementation) if scores.shape[0] else jnp.zeros((0, call.top_k), jnp.int32)
