"""Query rows as columns of tiles, and how the partial states of rows that were cut into pieces become one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.split_states import Arrivals, Partials, blocks_of, keep, kept
from pallas_attn.mosaic.sm90.tiles import PER_COLUMN, over_columns
from pallas_attn.mosaic.tile_scheduler import for_each_merged, merge_programs
from pallas_attn.types import DecodePlan

MERGE_ROWS = 64
"""Rows of the transposed output that one program of the merge takes."""

OUTPUT_BYTES = 32 * 1024
"""Of output, at most, that a program holds while copies of it go out."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the query rows of a KV head, `group` heads of each of `queries` queries, become at most `limit` columns.

    A block holds `block_heads` heads of each of `block_queries` queries, query by query, then columns that mean nothing
    up to a multiple of 8. Columns never mix, so what a meaningless one holds, be it NaN, stays in it.
    """

    group: int
    queries: int
    limit: int

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
        """All blocks; those of the same queries follow one another."""
        return self.query_blocks * self.head_blocks

    @property
    def used(self) -> int:
        return self.block_queries * self.block_heads

    @property
    def width(self) -> int:
        """N of wgmma."""
        return -(-self.used // 8) * 8

    @property
    def packs_freely(self) -> bool:
        """Whether `pack` takes no copy."""
        return self.queries == 1 and self.head_blocks == 1 and self.used == self.width

    def pack(self, q: Float[Array, "B Q Hq D"]) -> Float[Array, "blocks rows width D"]:
        """Queries as columns."""
        batch, _, heads, head_dim = q.shape
        q = jnp.pad(q, ((0, 0), (0, self.query_blocks * self.block_queries - self.queries), (0, 0), (0, 0)))
        kv_heads = heads // self.group
        q = q.reshape(
            batch, self.query_blocks, self.block_queries, kv_heads, self.head_blocks, self.block_heads, head_dim
        )
        q = q.transpose(1, 4, 0, 3, 2, 5, 6).reshape(self.blocks, batch * kv_heads, self.used, head_dim)
        return jnp.pad(q, ((0, 0), (0, 0), (0, self.width - self.used), (0, 0)))

    def per_head(self, x: Float[Array, "Hq"]) -> Float[Array, "head_blocks Hkv width"]:
        """A value of each query head, for each column."""
        x = x.reshape(-1, self.head_blocks, self.block_heads).swapaxes(0, 1)
        return jnp.pad(jnp.tile(x, (1, 1, self.block_queries)), ((0, 0), (0, 0), (0, self.width - self.used)))

    def per_query(self, x: Int32[Array, "B Q"]) -> Int32[Array, "query_blocks B width"]:
        """A value of each query, for each column; 0 for columns that mean nothing."""
        x = jnp.pad(x, ((0, 0), (0, self.query_blocks * self.block_queries - self.queries)))
        x = x.reshape(-1, self.query_blocks, self.block_queries).swapaxes(0, 1)
        x = jnp.repeat(x, self.block_heads, axis=2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.width - self.used)))

    def drafts(self, draft_mask: Bool[Array, "B Q Q"]) -> Int32[Array, "query_blocks B width"]:
        """For each column, the draft keys its query sees: bit j for key j."""
        bit = jnp.left_shift(1, jnp.arange(draft_mask.shape[-1], dtype=jnp.int32))
        return self.per_query(jnp.sum(jnp.where(draft_mask, bit[None, None], 0), axis=-1, dtype=jnp.int32))

    def unpack(self, x: Float[Array, "blocks rows width"], kv_heads: int) -> Float[Array, "B Q Hq"]:
        """A value of each column, back in the order of query rows."""
        x = x[..., : self.used].reshape(
            self.query_blocks, self.head_blocks, -1, kv_heads, self.block_queries, self.block_heads
        )
        x = x.transpose(2, 0, 4, 3, 1, 5).reshape(x.shape[2], -1, kv_heads * self.group)
        return x[:, : self.queries]

    def head_block(self, block: Any) -> Any:
        """In a kernel: which heads of the group a block holds."""
        return lax.rem(block, self.head_blocks)

    def query_block(self, block: Any) -> Any:
        """In a kernel: which queries a block holds."""
        return lax.div(block, self.head_blocks)

    def first_head(self, block: Any, kv_head: Any) -> Any:
        """In a kernel: the first of the query heads that a block of a KV head holds."""
        return kv_head * self.group + self.head_block(block) * self.block_heads

    def query(self, block: Any) -> Any:
        """In a kernel: int32 [width], the query of each column."""
        first = self.query_block(block) * self.block_queries
        return first + lax.div(tiles.column_iota(self.width), jnp.int32(self.block_heads))

    def sink(self, sinks: Ref | None, block: Any, kv_head: Any, some: Any = slice(None)) -> Any:
        """In a kernel: [width], the learned sink of each column's head, or of some columns'; or None."""
        return None if sinks is None else basics.load(sinks.at[self.head_block(block), kv_head, some], PER_COLUMN)

    def keep(self, partials: Partials, block: Any, piece: Any, state: State) -> None:
        """In a kernel: writes that state."""
        number = partials.number(block, self.blocks, piece)
        partials.stats[number, 0] = state.m
        partials.stats[number, 1] = state.l
        keep(state.acc, partials.acc.at[number])

    def narrowed(self, programs: int) -> Columns:
        """Parts of these blocks, in their order, of as few columns as keep the multiprocessors busy where so many
        programs would have a block each.
        """
        width = self.width
        if self.block_queries == 1 and self.used == width:
            while width % 16 == 0 and 2 * programs <= basics.multiprocessors():
                width, programs = width // 2, 2 * programs
        return dataclasses.replace(self, limit=width) if width < self.width else self


class State(NamedTuple):
    """Attention of a tile's columns over some keys, as `sm90.split_states` has it.

    Attributes:
      m, l: [width].
      acc: [values, width].
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any

    @staticmethod
    def empty(values: int, width: int) -> State:
        """Over no keys."""
        return State(
            tiles.filled(-jnp.inf, (width,), PER_COLUMN),
            tiles.filled(0.0, (width,), PER_COLUMN),
            tiles.filled(0.0, (values, width), tiles.TILE),
        )

    def merge(self, other: State, spread: Callable[[Any, tuple[int, ...]], Any] = over_columns) -> State:
        """Attention over the keys of both. `spread` makes values of query rows values of a tile, if these are no
        columns.
        """
        m = jnp.maximum(self.m, other.m)
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        weights = [jnp.exp2((state.m - shift) * LOG2E) for state in (self, other)]
        mine, others = (spread(weight, self.acc.shape) for weight in weights)
        return State(m, self.l * weights[0] + other.l * weights[1], self.acc * mine + other.acc * others)


class Output(NamedTuple):
    """Where a finished row goes: to out [B, Q, Hq, D] and lse [width] in global memory, by a tile in shared."""

    out: Ref
    lse: Ref
    tile: Ref

    @staticmethod
    def tile_type(width: int, values: int, dtype: jax.typing.DTypeLike) -> Any:
        """Shared memory for so many values of each column, in parts, [parts, width, values of a part]: a copy takes at
        most 256, from an array of their own. There may be fewer parts, which take turns.
        """
        fitting = OUTPUT_BYTES // (width * jnp.dtype(dtype).itemsize)
        part = max(n for n in range(64, min(fitting, 256) + 1, 64) if values % n == 0)
        return plgpu.SMEM((min(values, fitting) // part, width, part), dtype)

    def write(self, columns: Columns, block: Any, row: Any, state: State, sink: Any = None, values: Any = 0) -> None:
        """Normalises a state and writes it, the values from `values` on. `sink`: [width] learned logits, or None."""
        seen = state.l != 0
        shift = jnp.where(state.m == -jnp.inf, 0.0, state.m)
        denominator = state.l if sink is None else state.l + jnp.exp2((sink - shift) * LOG2E)
        inverse = jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)
        at_once = self.tile.shape[0] * self.tile.shape[2]
        for i in range(0, state.acc.shape[0], at_once):
            out = state.acc[i : i + at_once]
            # Rows that see nothing may hold 0 times an infinite value.
            out = jnp.where(over_columns(seen, out.shape), out * over_columns(inverse, out.shape), 0.0)
            self._copy_out(columns, block, row, out, values + i)
        lse = jnp.where(seen, shift + jnp.log2(jnp.where(seen, state.l, 1.0)) * (1 / LOG2E), -jnp.inf)

        @pl.when(values == 0)
        def _store_lse() -> None:
            self.lse[...] = lse

    def _copy_out(self, columns: Columns, block: Any, row: Any, out: Any, values: Any) -> None:
        """Starts the copies of some values, as many as the tile holds or fewer."""
        out = out.astype(self.tile.dtype)
        if out.dtype == jnp.float32:  # only 16-bit tiles are transposed on their way
            out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        kv_heads, part = self.out.shape[2] // columns.group, self.tile.shape[2]
        batch, kv_head = lax.div(row, kv_heads), lax.rem(row, kv_heads)
        heads = pl.ds(columns.first_head(block, kv_head), columns.block_heads)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile may still be on its way out, for another row even
        for j in range(out.shape[0] // part):
            self.tile.at[j].transpose((1, 0))[...] = out[j * part : (j + 1) * part]
        plgpu.commit_smem()
        for i in range(columns.block_queries):
            query = columns.query_block(block) * columns.block_queries + i

            @pl.when(query < columns.queries)
            def _store(i: int = i, query: Any = query) -> None:
                rows = pl.ds(i * columns.block_heads, columns.block_heads)
                for j in range(out.shape[0] // part):
                    place = self.out.at[batch, query, heads, pl.ds(values + j * part, part)]
                    plgpu.copy_smem_to_gmem(self.tile.at[j, rows], place)


def merge_pieces(
    out: Float[Array, "B Q Hq D"],
    lse: Float[Array, "blocks rows width"],
    partials: Partials,
    plan: DecodePlan,
    sinks: Float[Array, "head_blocks Hkv width"] | None,
    columns: Columns,
) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "blocks rows width"]]:
    """Finishes the rows that `out` and `lse` still lack, in place: those of several pieces and those of none.

    Pieces are merged in their order, whichever programs made them.
    """
    rows, head_dim = lse.shape[1], out.shape[3]
    parts = head_dim // MERGE_ROWS
    narrow = columns.narrowed(parts * columns.blocks * rows)
    width = narrow.width
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, columns, narrow),
        grid=(merge_programs(parts * narrow.blocks * rows),),
        grid_names=("program",),
        scratch_types=[
            Arrivals.types(partials, columns.blocks * rows, width, blocks_of(MERGE_ROWS * width)),
            Output.tile_type(width, MERGE_ROWS, out.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_pieces",
    )(*refs, *basics.materialize((partials, plan, sinks)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _merge_kernel(
    columns: Columns,
    narrow: Columns,
    out: Ref,
    lse: Ref,
    partials: Partials,
    plan: DecodePlan,
    sinks: Ref | None,
    arrivals: Arrivals,
    tile: Ref,
) -> None:
    """Some values of some columns of rows, one after the other."""
    width, slices, parts = narrow.width, columns.width // narrow.width, out.shape[3] // MERGE_ROWS
    here = blocks_of(MERGE_ROWS * width)

    def add(stats: Ref, acc: Ref, merged: State) -> State:
        m, l = (basics.load(stats.at[i], PER_COLUMN) for i in range(2))  # noqa: E741
        return merged.merge(State(m, l, kept(acc, (MERGE_ROWS, width))))

    def merge(place: Any, number: Any) -> None:
        narrow_block, part = lax.div(number, parts), lax.rem(number, parts)
        block, some_of_block = lax.div(narrow_block, slices), lax.rem(narrow_block, slices)
        row, first_piece = plan.row_order[place], plan.split_indptr[place]
        some, blocks = pl.ds(some_of_block * width, width), pl.ds((part * slices + some_of_block) * here, here)
        first, count = partials.number(block, columns.blocks, first_piece), plan.split_indptr[place + 1] - first_piece
        merged = arrivals.for_each(partials, first, count, some, blocks, add, State.empty(MERGE_ROWS, width))
        sink = columns.sink(sinks, block, lax.rem(row, out.shape[2] // columns.group), some)
        output = Output(out, lse.at[block, row, some], tile)
        output.write(narrow, narrow_block, row, merged, sink, part * MERGE_ROWS)

    for_each_merged(plan, parts * narrow.blocks, merge)
    plgpu.wait_smem_to_gmem(0)
