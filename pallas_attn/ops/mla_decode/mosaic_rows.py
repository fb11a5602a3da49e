"""Many query rows of a sequence and tiles of its latents, as the kernels of Hopper and Blackwell take them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan

TOKENS = 64
"""Latents of a tile."""

OLDER_BIT, NEVER_BIT = 31, 30
"""Bits of what a query row sees, above those of the draft keys: all older keys, and none."""

INITIAL_MAX = -1e30
"""Initial running maximum: finite, so that no difference is NaN, and smaller than any score."""

FULL, PARTIAL, DEAD = 2, 1, 0
"""Visibility of a tile: every row sees all tokens; each token is seen by some row; or one may be seen by no row."""


@dataclasses.dataclass(frozen=True)
class LatentTiles:
    """Compile-time facts of a call and of its tiles, beside shapes and dtypes of its arrays.

    Attributes:
      queries, heads: of which rows are made, query by query.
      causal: a query sees all drafts up to itself; else those of `RowInputs.seen`.
      sm_scale: multiplies the scores.
    """

    latent_dim: int
    rope_dim: int
    queries: int
    heads: int
    page_size: int
    causal: bool
    sm_scale: float

    @property
    def row_bytes(self) -> int:
        """Bytes of a swizzled row. A copy swizzles whole rows of the pool, so all parts of a tile have the same."""
        return 64 if (self.latent_dim + self.rope_dim) % 64 else 128

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 if a page is several tiles."""
        return max(1, TOKENS // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens that a tile takes of a page."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // TOKENS)

    @property
    def draft_bits(self) -> int:
        """A bit for each draft key."""
        return (1 << self.queries) - 1

    def first_page(self, tile: Any) -> tuple[Any, Any]:
        """First page of a tile, counted from the start of the split, and which of the tiles of that page it is."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)


class RowInputs(NamedTuple):
    """Arrays of a call in blocks of query rows, or in a kernel references to them.

    Attributes:
      q_latent, q_rope: [B, blocks·rows, L or R].
      pages: [N, ps, L + R], or [N, ps, L] of 8 bits.
      scale: float32 [N, ps, L / LATENT_GROUP], or None.
      rope: [N, ps, R], or None.
      q_lens: int32 [B], or None where every sequence has all queries.
      seen: int32 [B, blocks·rows], what each row sees: bit j for draft key j, bit OLDER_BIT for all older keys. None
        where every sequence has all queries, and each query sees what is not newer.
      seen_by_any: int32 [B], by some row of the sequence; None like `seen`.
    """

    q_latent: Any
    q_rope: Any
    pages: Any
    scale: Any
    rope: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    seen: Any
    seen_by_any: Any


def in_blocks(call: MlaDecodeCall, plan: DecodePlan, rows: int) -> RowInputs:
    """The arrays of a call in blocks of so many query rows, the last of them padded."""
    batch, num_queries = call.q_latent.shape[:2]
    padding = -call.query_rows % rows

    def as_rows(x: Array) -> Array:
        x = x.reshape(batch, call.query_rows, *x.shape[3:])
        return jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))

    seen = None
    if call.q_lens is not None or call.draft_mask is not None:
        real = real_queries(call.q_lens, call.kv_lens, num_queries)
        seen = visible_bits(real, num_queries, call.draft_mask)
    return RowInputs(
        q_latent=as_rows(call.q_latent),
        q_rope=as_rows(call.q_rope),
        pages=call.cache.pages,
        scale=call.cache.scale,
        rope=call.cache.rope,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        seen=None if seen is None else as_rows(jnp.broadcast_to(seen[..., None], call.q_latent.shape[:-1])),
        seen_by_any=None if seen is None else lax.reduce(seen, jnp.int32(0), lax.bitwise_or, (1,)),
    )


def out_of_blocks(
    call: MlaDecodeCall, out: Float[Array, "B rows L"], lse: Float[Array, "blocks B block"]
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Output and LSE of a call, from those of blocks of its query rows."""
    lse = lse.swapaxes(0, 1).reshape(len(out), -1)[:, : call.query_rows]
    return out[:, : call.query_rows].reshape(call.q_latent.shape), lse.reshape(call.q_latent.shape[:-1])


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
