"""What programs that attend over pages are compiled for, what they are given, and what each holds in shared memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.query_packing import Columns, Output
from pallas_attn.types import DecodePlan, HeadWindow, ScaleLayout


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for, beside shapes and dtypes.

    Attributes:
      raw_queries: queries come as the call has them, and not as columns.
      tokens: of a tile.
      stages: tiles in shared memory.
      score_scale: multiplies K qᵀ.
    """

    columns: Columns
    raw_queries: bool
    tokens: int
    stages: int
    page_size: int
    num_kv_heads: int
    score_scale: float
    soft_cap: float | None
    window: int | None
    scales: ScaleLayout

    @property
    def shape(self) -> tuple[int, int]:
        """Of a tile of scores."""
        return self.tokens, self.columns.width

    @property
    def pages(self) -> int:
        """Pages, or parts of one, that make up a tile."""
        return max(1, self.tokens // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens of each of them."""
        return min(self.tokens, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // self.tokens)

    def page_and_part(self, tile: Any) -> tuple[Any, Any]:
        """The first page of a tile among those of a piece, and which part of it, if that takes several tiles."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)

    @property
    def groups(self) -> int:
        """Groups of tokens in a page that have a scale each; 0 if scales do not come with the tokens."""
        return self.scales if isinstance(self.scales, int) else 0

    @property
    def group_tokens(self) -> int:
        """Tokens of a group, as far as they are in one part of a page."""
        return min(self.page_tokens, self.page_size // self.groups)

    @property
    def part_groups(self) -> int:
        """Groups of tokens in a page, or in the part of one that is in a tile."""
        return self.page_tokens // self.group_tokens

    def rows(self, pool: Ref, tokens: int) -> int:
        """Rows of a page, or of a tile, that hold so many tokens."""
        return tokens * pool.shape[1] // self.page_size


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them; see `Columns`.

    Attributes:
      q: for each part of a key [terms, blocks·rows, width, columns of the part]; queries are the sum of their terms. Or
        one of [B, Q, Hq, D] (`Static.raw_queries`).
      k, v: [N·Hkv, ps, D], or with several tokens in a row (`dequantise.tokens_per_smem_row`). A v of None: the first
        part of a key is the value, too.
      k_scale, v_scale: [Hkv], [Hkv, D] (k_scale is None then, being part of q), [N·Hkv·g] or None.
      window: a `HeadWindow` or None.
      q_lens: int32 [B], or None where all queries are real.
      drafts: [query_blocks, B, width], the draft keys that a column's query sees, as bits; None if causal.
      sinks: [head_blocks, Hkv, width] or None.
    """

    q: tuple[Any, ...]
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    window: HeadWindow | None
    drafts: Any
    sinks: Any

    @property
    def value_dim(self) -> int:
        return self.q[0].shape[-1]

    @property
    def key_parts(self) -> list[tuple[int, int]]:
        """Where each part of a key begins in a row of k, and how many columns it has."""
        columns = [q.shape[-1] for q in self.q] if len(self.q) > 1 else [self.k.shape[2]]
        return list(zip(itertools.accumulate(columns, initial=0), columns, strict=False))

    @property
    def row_bytes(self) -> int:
        """Of a row of a swizzled tile: a copy looks at whole rows of the pool."""
        return 64 if self.k.shape[2] * self.k.dtype.itemsize % 128 else 128

    def looks_ahead(self, static: Static) -> bool:
        """Whether the pages of a tile are looked up before its slot is free. They wait in registers, of which sums of
        many columns leave few.
        """
        return static.pages * static.columns.width * max(self.value_dim, 256) <= 2**15

    def copies(self, static: Static) -> int:
        """That bring a page of a tile."""
        return len(self.q) + (self.v is not None) + (2 if static.groups else 0)


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: for each part of a key [terms, width, columns of the part].
      raw_q: [width, D], as copied if not in columns yet; else None.
      k: for each part of a key [stages, tokens, columns of the part], as cached, with as many tokens in a row.
      v: as k; None if the first part of a key is the value.
      p: [width, tokens], probabilities.
      out: as `Output.tile_type`.
      notes: int32 [2 · stages + 2, at least pages and width]. A row for each stage: position of each page's first
        token, or NOWHERE. Then, for each column, the newest position it sees, and the newest that its window hides.
        Then, for each stage, where in `scales` those of each page begin, if they may begin in the middle.
      scales: [stages, 2, pages, at least 32], of keys and values, or None. A copy starts at a multiple of 128 bytes.
      landed: a barrier a stage: its tile is there.
      q_landed: the queries are.
    """

    q: tuple[Any, ...]
    raw_q: Any
    k: tuple[Any, ...]
    v: Any
    p: Any
    out: Any
    notes: Any
    scales: Any
    landed: Any
    q_landed: Any

    @staticmethod
    def types(x: Inputs, static: Static, out_dtype: jax.typing.DTypeLike) -> Memory:
        stages, (tokens, width), q_dtype = static.stages, static.shape, x.q[0].dtype
        terms = [1 if static.raw_queries else q.shape[0] for q in x.q]
        operand = functools.partial(tiles.operand, row_bytes=x.row_bytes)
        shapes = [(stages, static.rows(x.k, tokens), columns) for _, columns in x.key_parts]
        scales = (stages, 2, static.pages, max(32, static.groups))
        return Memory(
            q=tuple(operand((n, width, q.shape[-1]), q_dtype) for n, q in zip(terms, x.q, strict=True)),
            raw_q=plgpu.SMEM((width, x.value_dim), q_dtype) if static.raw_queries else None,
            k=tuple(operand(shape, x.k.dtype) for shape in shapes),
            v=None if x.v is None else operand(shapes[0], x.k.dtype),
            p=operand((width, tokens), q_dtype),
            out=Output.tile_type(width, x.value_dim, out_dtype),
            notes=plgpu.SMEM((2 * stages + 2, max(static.pages, width)), jnp.int32),
            scales=plgpu.SMEM(scales, jnp.float32) if static.groups else None,
            landed=plgpu.Barrier(num_barriers=stages, num_arrivals=static.pages * x.copies(static)),
            q_landed=plgpu.Barrier(num_arrivals=static.columns.block_queries if static.raw_queries else sum(terms)),
        )

    def values(self, slot: Any) -> Ref:
        return (self.k[0] if self.v is None else self.v).at[slot]
