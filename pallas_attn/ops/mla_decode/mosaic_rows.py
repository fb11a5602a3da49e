"""Inputs of the `mla_decode` kernels for many query rows, on Hopper and Blackwell: blocks of query rows, and tiles."""

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
"""Indices of visibility bits above the bits of draft keys: all older keys; a bit that is never set."""

INITIAL_MAX = -1e30
"""Initial running maximum: smaller than any score, and finite, so that no difference of maxima is NaN."""

FULL, PARTIAL, DEAD = 2, 1, 0
"""Visibility of a tile: every row sees every token; every token is seen by some row; some token may be unseen."""


@dataclasses.dataclass(frozen=True)
class LatentTiles:
    """Compile-time parameters of a call and of its tiles.

    Attributes:
      latent_dim, rope_dim: L, R.
      queries, heads: queries of a sequence, and heads of a query. Query row = query · heads + head.
      page_size: tokens of a page.
      causal: whether a query sees the drafts up to its own token; otherwise `RowInputs.seen` defines the visibility.
      sm_scale: factor of the scores.
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
        """Bytes of a swizzled row, equal for all parts of a tile: TMA swizzles whole rows of the pool."""
        return 64 if (self.latent_dim + self.rope_dim) % 64 else 128

    @property
    def pages(self) -> int:
        """Pages per tile; 1 if a page holds several tiles."""
        return max(1, TOKENS // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens of a tile that are in one page."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        """Tiles per page; 1 if a tile holds several pages."""
        return max(1, self.page_size // TOKENS)

    @property
    def draft_bits(self) -> int:
        """Mask with one bit for each draft key."""
        return (1 << self.queries) - 1

    def first_page(self, tile: Any) -> tuple[Any, Any]:
        """Return a tile's first page, counted from the start of the split, and the index of the tile in that page."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)


class RowInputs(NamedTuple):
    """Arrays of a call with query rows in blocks, or references to them in a kernel.

    Attributes:
      q_latent, q_rope: [B, blocks·rows, L or R].
      pages: [N, ps, L + R]; fp8 [N, ps, L].
      scale: float32 [N, ps, L / LATENT_GROUP] for quantised latents, else None.
      rope: [N, ps, R] for quantised latents, else None.
      block_tables: int32 [B, P].
      kv_lens: int32 [B], tokens.
      q_lens: int32 [B], number of queries; None if every sequence has `queries` queries.
      plan: work of each CTA.
      seen: int32 [B, blocks·rows], visibility bits of each row: bit j for draft key j, bit OLDER_BIT for all older
        keys. None if the mask is causal and every sequence has all queries.
      seen_by_any: int32 [B], bitwise or of `seen` over the rows of a sequence; None if `seen` is None.
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
    """Arrange a call's query rows in blocks of `rows` rows, with a padded last block."""
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
    """Convert output and LSE of blocks of query rows to the shapes of the call's results."""
    lse = lse.swapaxes(0, 1).reshape(len(out), -1)[:, : call.query_rows]
    return out[:, : call.query_rows].reshape(call.q_latent.shape), lse.reshape(call.q_latent.shape[:-1])


def visible_bits(
    q_lens: Int32[Array, "B"], num_queries: int, draft_mask: Bool[Array, "B Q Q"] | None
) -> Int32[Array, "B Q"]:
    """Pack the visibility of each query into bits: bit j for draft key j, bit `OLDER_BIT` for all older keys."""
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if draft_mask is None:
        draft_mask = (index[:, None] >= index[None])[None]
    real = index[None] < q_lens[:, None]
    shown = draft_mask & real[:, None, :] & real[:, :, None]
    bits = jnp.sum(jnp.where(shown, jnp.left_shift(1, index)[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(real, bits | jnp.int32(-(2**OLDER_BIT)), 0)
