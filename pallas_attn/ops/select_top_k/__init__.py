"""Choosing the best-scored keys of each token."""

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
    """Positions of each row's `top_k` highest scores, exactly; of equal scores the lower positions are chosen.

    Args:
      scores: as `index_scores` gives them. -inf is never chosen; NaN counts as +inf.
      top_k: positions wanted, which may be more than there are.
      implementation: None, a name, or names to try in order.

    Returns:
      Positions in rising order, then -1 where a row has fewer than `top_k`.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.

    Example:
      >>> scores = jnp.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.5, -jnp.inf, -2.0, -jnp.inf, -jnp.inf]])
      >>> pallas_attn.select_top_k(scores, top_k=3).tolist()
      [[1, 2, 4], [0, 2, -1]]
    """
    call = SelectTopKCall(scores, top_k=checks.size("top_k", top_k))
    call.validate()
    return dispatch.run(call, implementation) if scores.shape[0] else jnp.zeros((0, call.top_k), jnp.int32)
