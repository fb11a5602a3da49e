"""Which latents a query row sees, as kernels take it: bits of draft keys, and the visibility of whole tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

OLDER_BIT, NEVER_BIT = 31, 30
"""Bits of what a query row sees, above those of the draft keys: all older keys, and none."""

INITIAL_MAX = -1e30
"""Initial running maximum: finite, so that no difference is NaN, and smaller than any score."""

FULL, PARTIAL, DEAD = 2, 1, 0
"""Visibility of a tile: every row sees all tokens; each token is seen by some row; or one may be seen by no row."""


def visible_bits(
    q_lens: Int32[Array, "B"], num_queries: int, draft_mask: Bool[Array, "B Q Q"] | None
) -> Int32[Array, "B Q"]:
    """Pack what each query sees into bits: j for draft key j, `OLDER_BIT` for all older keys."""
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if draft_mask is None:
        draft_mask = (index[:, None] >= index[None])[None]
    real = index[None] < q_lens[:, None]
    shown = draft_mask & real[:, None, :] & real[:, :, None]
    bits = jnp.sum(jnp.where(shown, jnp.left_shift(1, index)[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(real, bits | jnp.int32(-(2**OLDER_BIT)), 0)
