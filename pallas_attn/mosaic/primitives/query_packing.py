"""Arrangement of query rows as the columns of decode tiles.

A query row is one query head of one query token. The decode kernel computes scores as K qᵀ [tokens, query_rows], with
tokens as dimension M and query rows as dimension N of the tensor cores. All query rows of a KV head share its keys, so
they are columns of the same tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN


@dataclasses.dataclass(frozen=True)
class QueryPacking:
    """Assignment of the group·queries query rows of a KV head of one sequence to blocks of columns.

    A block has the columns of one tile. It holds `block_heads` heads of each of `block_queries` queries: first the
    heads of the first query, then the heads of the next query. Padding columns follow, up to a multiple of `step`.
    Columns are computed independently, so a NaN in a padding column does not reach other columns.

    Attributes:
      group: query heads per KV head.
      queries: query tokens of a sequence.
      limit: maximum number of query rows of a block, without padding.
      step: the number of columns of a block is a multiple of it.
    """

    group: int
    queries: int
    limit: int
    step: int = 8

    @property
    def block_heads(self) -> int:
        return max(n for n in range(1, min(self.group, self.limit) + 1) if self.group % n == 0)

    @property
    def block_queries(self) -> int:
        return min(self.queries, self.limit // self.block_heads)

    @property
    def head_blocks(self) -> int:
        return self.group // self.block_heads

    @property
    def query_blocks(self) -> int:
        return -(-self.queries // self.block_queries)

    @property
    def blocks(self) -> int:
        """Number of blocks. Blocks of the same queries are adjacent."""
        return self.query_blocks * self.head_blocks

    @property
    def used(self) -> int:
        """Columns of a block without padding."""
        return self.block_queries * self.block_heads

    @property
    def width(self) -> int:
        """Columns of a block with padding, N of the tensor cores."""
        return -(-self.used // self.step) * self.step

    @property
    def packs_freely(self) -> bool:
        """Whether `pack` is a reshape without a copy."""
        return self.queries == 1 and self.head_blocks == 1 and self.used == self.width

    def pack(self, q: Float[Array, "B Q Hq D"]) -> Float[Array, "blocks rows width D"]:
        """Arrange queries as columns. A row of the result is one KV head of one sequence, b·Hkv + h."""
        batch, _, heads, head_dim = q.shape
        q = jnp.pad(q, ((0, 0), (0, self.query_blocks * self.block_queries - self.queries), (0, 0), (0, 0)))
        kv_heads = heads // self.group
        q = q.reshape(
            batch, self.query_blocks, self.block_queries, kv_heads, self.head_blocks, self.block_heads, head_dim
        )
        q = q.transpose(1, 4, 0, 3, 2, 5, 6).reshape(self.blocks, batch * kv_heads, self.used, head_dim)
        return jnp.pad(q, ((0, 0), (0, 0), (0, self.width - self.used), (0, 0)))

    def per_head(self, x: Float[Array, "Hq"]) -> Float[Array, "head_blocks Hkv width"]:
        """Repeat a value of each query head for all columns of this head; 0 for padding columns."""
        x = x.reshape(-1, self.head_blocks, self.block_heads).swapaxes(0, 1)
        return jnp.pad(jnp.tile(x, (1, 1, self.block_queries)), ((0, 0), (0, 0), (0, self.width - self.used)))

    def per_query(self, x: Int32[Array, "B Q"]) -> Int32[Array, "query_blocks B width"]:
        """Repeat a value of each query for all columns of this query; 0 for padding columns."""
        x = jnp.pad(x, ((0, 0), (0, self.query_blocks * self.block_queries - self.queries)))
        x = x.reshape(-1, self.query_blocks, self.block_queries).swapaxes(0, 1)
        x = jnp.repeat(x, self.block_heads, axis=2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.width - self.used)))

    def drafts(self, draft_mask: Bool[Array, "B Q Q"]) -> Int32[Array, "query_blocks B width"]:
        """Return the draft mask of each column as bits: bit j is set if the query of the column sees draft key j.

        Args:
          draft_mask: draft_mask[b, i, j] is True if query i of sequence b sees the key of its query j.
        """
        bit = jnp.left_shift(1, jnp.arange(draft_mask.shape[-1], dtype=jnp.int32))
        return self.per_query(jnp.sum(jnp.where(draft_mask, bit[None, None], 0), axis=-1, dtype=jnp.int32))

    def unpack(self, x: Float[Array, "blocks rows width"], kv_heads: int) -> Float[Array, "B Q Hq"]:
        """Rearrange a value per column, for example the LSE, to [B, Q, Hq]. Inverse of `pack`; drops padding."""
        x = x[..., : self.used].reshape(
            self.query_blocks, self.head_blocks, -1, kv_heads, self.block_queries, self.block_heads
        )
        x = x.transpose(2, 0, 4, 3, 1, 5).reshape(x.shape[2], -1, kv_heads * self.group)
        return x[:, : self.queries]

    def head_block(self, block: Any) -> Any:
        """In a kernel, return which of the `head_blocks` sets of heads a block has, given the index of the block."""
        return lax.rem(block, self.head_blocks)

    def query_block(self, block: Any) -> Any:
        """In a kernel, return which of the `query_blocks` sets of queries a block has, given the index of the block."""
        return lax.div(block, self.head_blocks)

    def first_head(self, block: Any, kv_head: Any) -> Any:
        """In a kernel, first query head in a block, given the index of the KV head."""
        return kv_head * self.group + self.head_block(block) * self.block_heads

    def query(self, block: Any) -> Any:
        """In a kernel, index of the query token of each column, int32 [width]."""
        first = self.query_block(block) * self.block_queries
        return first + lax.div(register_tiles.column_iota(self.width), jnp.int32(self.block_heads))

    def load_sinks(self, sinks: Ref | None, block: Any, kv_head: Any, columns: Any = slice(None)) -> Any:
        """In a kernel, load the sink logit of each column of a block, or return None if the call has no sinks.

        Args:
          sinks: float32 [head_blocks, Hkv, width], from `per_head`; or None.
          columns: slice of the block's columns.
        """
        return None if sinks is None else basics.load(sinks.at[self.head_block(block), kv_head, columns], PER_COLUMN)

    def split_width(self, ctas: int) -> QueryPacking:
        """Return a packing with narrower blocks, of at least 8 columns, so that more multiprocessors have work.

        The width is halved while the doubled number of CTAs does not exceed the number of multiprocessors.

        Args:
          ctas: number of CTAs with the present width. Halving the width doubles it.
        """
        width = self.width
        if self.block_queries == 1 and self.used == width:
            while width % 16 == 0 and 2 * ctas <= basics.multiprocessors():
                width, ctas = width // 2, 2 * ctas
        return dataclasses.replace(self, limit=width, step=8) if width < self.width else self
