"""Splits of sequences as Hopper's kernels for many query rows attend to them: their pages, what rows see of them, their
results and how these are merged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper.seesaw import ROWS, add_partial_rows, empty_rows, halves, log_sum_exp, normalise
from pallas_attn.mosaic.merge import FRAGMENT_COLUMNS, PartialLoader, PartialStates, num_fragments
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.tile_scheduler import (
    ABSENT,
    WorkTile,
    for_each_merged,
    for_each_work_tile,
    merge_programs,
)
from pallas_attn.ops.mla_decode.mosaic_rows import (
    DEAD,
    FULL,
    NEVER_BIT,
    OLDER_BIT,
    PARTIAL,
    TOKENS,
    LatentTiles,
    RowInputs,
)
from pallas_attn.types import DecodePlan

MERGE_COLUMNS = 64
"""Columns of the latent that one program of the merge takes, at most."""


@dataclasses.dataclass(frozen=True)
class PairedTiles(LatentTiles):
    """Compile-time facts of a kernel that takes tiles in pairs.

    Attributes:
      pairs: of tiles, at most, that copies are ahead.
    """

    pairs: int

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the latent that each warpgroup accumulates."""
        return halves(self.latent_dim)


class PageMemory(Protocol):
    """Shared memory of a program, of which a producer needs:

    Attributes:
      page_ids: int32 [pairs + 1, 2, pages]: the pages of either tile of a pair, looked up before there is room for
        them; negative where there is none.
    """

    @property
    def page_ids(self) -> Any: ...


class SplitResults(NamedTuple):
    """Results in global memory.

    Attributes:
      out: [B, blocks·ROWS, L], rows in one split.
      lse: [blocks, B, ROWS], rows in one split.
      partials: states of the others.
    """

    out: Any
    lse: Any
    partials: PartialStates


class LatentSplit(NamedTuple):
    """Pages `start` to `stop` of a sequence, as one program attends to them.

    Attributes:
      row: the sequence.
      state: index of the partial state, where the sequence is in several splits.
      is_whole_row: whether no other program has pages of the sequence.
      pair: pairs of tiles that the program took before.
    """

    row: Any
    start: Any
    stop: Any
    state: Any
    is_whole_row: Any
    pair: Any

    def queries(self, static: LatentTiles, x: RowInputs) -> Any:
        """Number of queries."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: LatentTiles, x: RowInputs) -> Any:
        """Position of the first query."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_pairs(self, static: LatentTiles) -> Any:
        num_tiles = pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page
        return pl.cdiv(num_tiles, 2)


def for_each_split(static: LatentTiles, plan: DecodePlan, attend: Callable[[LatentSplit], None]) -> None:
    """Call attend(split) for each split of this program."""

    def step(work: WorkTile, pair: Any) -> Any:
        split = LatentSplit(work.row, work.start, work.stop, work.split, work.is_whole_row, pair)
        attend(split)
        return pair + split.num_pairs(static)

    for_each_work_tile(plan, step, jnp.int32(0))


# --- visibility


def token_bits(static: LatentTiles, x: RowInputs, split: LatentSplit, meta: Ref, token: Any) -> Any:
    """Index of the bit that says whether a row sees each token of a tile with this metadata."""
    position = token + meta[1]
    for j in range(1, static.pages):
        first = j * static.page_tokens
        position = jnp.where(token >= first, token + (meta[1 + j] - first), position)
    draft = position - split.oldest_query(static, x)
    return jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))


def seen_bits(static: LatentTiles, x: RowInputs, split: LatentSplit, row: Any, block: Any, layout: Any) -> Any:
    """Bits [ROWS] of what each row of a block sees, in a layout; `row` are their indices among all blocks' in it."""
    if x.seen is not None:
        return basics.load(x.seen.at[split.row, pl.ds(block * ROWS, ROWS)], layout)
    newer = static.queries - 1 - lax.div(row, static.heads)  # drafts that the row does not see
    bits = lax.shift_right_logical(jnp.full_like(row, static.draft_bits), jnp.maximum(newer, 0))
    return jnp.where(newer >= 0, bits | jnp.int32(-(2**OLDER_BIT)), 0)


# --- the warpgroup that copies


@dataclasses.dataclass(frozen=True)
class PageProducer[Static: PairedTiles, Memory: PageMemory]:
    """The warpgroup that starts all copies."""

    static: Static
    x: RowInputs
    mem: Memory
    block: Any

    # What a kernel defines

    def await_end(self) -> None:
        """Wait for the last phases of what consumers free."""
        raise NotImplementedError

    def copy_query(self, split: LatentSplit) -> None:
        """Start the copies of a split's query, once the one before may be overwritten."""
        raise NotImplementedError

    def copy_pair(self, split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Start the copies of a split's i-th pair of tiles, as there is room for them."""
        raise NotImplementedError

    def copy_page(self, slot: Any, parts: tuple[int, ...], j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of parts of the j-th page of a tile. An absent page arrives at once."""
        raise NotImplementedError

    def tile_meta(self, pair: Any, tile: int) -> Ref:
        """Metadata of a tile of a pair."""
        raise NotImplementedError

    # Splits

    def run(self) -> None:
        """Start the copies of all splits."""
        for_each_split(self.static, self.x.plan, self.copy_split)
        self.await_end()

    def copy_split(self, split: LatentSplit) -> None:
        """Start the copies of one split. Its query comes after the first pair, for which there is room earlier, except
        in the first split.
        """
        oldest_query = split.oldest_query(self.static, self.x)

        def copy(i: Any, _: None) -> None:
            self.copy_pair(split, i, oldest_query)
            self.look_up_pages(split, i + 1)
            pl.when((i == 0) & (split.pair > 0))(lambda: self.copy_query(split))

        self.look_up_pages(split, jnp.int32(0))
        pl.when(split.pair == 0)(lambda: self.copy_query(split))
        lax.fori_loop(0, split.num_pairs(self.static), copy, None)

    def page_ids(self, split: LatentSplit, i: Any, tile: int) -> Ref:
        """Pages of a tile in shared memory. Each thread reads what it has written itself."""
        return self.mem.page_ids.at[lax.rem(split.pair + i, self.static.pairs + 1), tile]

    def look_up_pages(self, split: LatentSplit, i: Any) -> None:
        """Store the pages of a pair of tiles, while the pair before is attended to."""
        tables, static, num_pages = self.x.block_tables, self.static, self.x.pages.shape[0]
        for tile in (0, 1):
            first, _ = static.first_page(2 * i + tile)
            entries = [split.start + first + j for j in range(static.pages)]
            pages = [tables[split.row, jnp.minimum(entry, tables.shape[1] - 1)] for entry in entries]
            for j, (entry, page) in enumerate(zip(entries, pages, strict=True)):
                is_page = (entry < split.stop) & basics.in_pool(page, num_pages)
                basics.store_scalar(self.page_ids(split, i, tile).at[j], jnp.where(is_page, page, -1))

    def store_meta(self, split: LatentSplit, i: Any, tile: int, oldest_query: Any, origin: Any = 0) -> None:
        """Store visibility and positions, counted from an origin, of a tile for the consumers, before the tile's last
        copies are started.

        All rows see what is older than their queries, and under a causal mask the newest one sees everything. The
        oldest query itself is seen by all then.
        """
        static, ids = self.static, self.page_ids(split, i, tile)
        meta = self.tile_meta(split.pair + i, tile)
        first, tile_of_page = static.first_page(2 * i + tile)
        first_token = (split.start + first) * static.page_size + tile_of_page * TOKENS
        newer = first_token + TOKENS - oldest_query  # tokens of the tile that are no older than the oldest query
        visibility = jnp.where(newer <= (1 if static.causal else 0), FULL, DEAD)
        if static.causal:
            visibility = jnp.where(newer <= split.queries(static, self.x), jnp.maximum(visibility, PARTIAL), visibility)
        for j in range(static.pages):
            exists = ids[j] >= 0
            visibility = jnp.where(exists, visibility, DEAD)
            place = jnp.where(exists, first_token + j * static.page_tokens - origin, ABSENT)
            basics.store_scalar(meta.at[1 + j], place)
        basics.store_scalar(meta.at[0], visibility)

    def copy_pages(self, slot: Any, parts: tuple[int, ...], ids: Ref, page: Any, tile_of_page: Any) -> None:
        """Start the copies of parts of a tile, of which `page` is the first page."""

        def step(j: Any, page: Any) -> Any:
            self.copy_page(slot, parts, j, page, tile_of_page)
            return ids[jnp.minimum(j + 1, self.static.pages - 1)]

        lax.fori_loop(0, self.static.pages, step, page)


# --- the merge


def merge_splits(
    out: Float[Array, "B rows L"],
    lse: Float[Array, "blocks B ROWS"],
    partials: PartialStates,
    plan: DecodePlan,
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Finish, in place, the sequences that `out` and `lse` lack: those of several splits, and those that see nothing.

    Splits are merged in their order, whichever programs they came from.
    """
    (blocks, batch, _), latent_dim = lse.shape, out.shape[2]
    columns = MERGE_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * blocks * batch * (latent_dim // columns) <= basics.multiprocessors():
        columns //= 2  # to keep all multiprocessors busy
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, columns),
        grid=(merge_programs(latent_dim // columns * blocks * batch),),
        grid_names=("program",),
        scratch_types=[
            PartialLoader.types(partials, blocks * batch, ROWS, num_fragments(ROWS * columns)),
            _merged_tile(columns, out.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        kernel_name="merge_rows",
    )(*refs, *basics.materialize((partials, plan)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _merged_tile(columns: int, dtype: Any) -> Any:
    """Scratch type of the merged columns of a block of rows, swizzled if its rows have 32 bytes or more."""
    row_bytes = min(register_tiles.ROW_BYTES, columns * jnp.dtype(dtype).itemsize)
    shape = (ROWS, columns)
    return plgpu.SMEM(shape, dtype) if row_bytes < 32 else register_tiles.operand(shape, dtype, row_bytes=row_bytes)


def _merge_kernel(
    columns: int, out: Ref, lse: Ref, partials: PartialStates, plan: DecodePlan, loader: PartialLoader, tile: Ref
) -> None:
    """Merge some columns of the latent of blocks of rows, one after the other."""
    blocks, slices, slice_fragments = lse.shape[0], out.shape[2] // columns, num_fragments(ROWS * columns)

    def merge(index: Any, item: Any) -> None:
        block, column_slice = lax.div(item, slices), lax.rem(item, slices)
        row, first_split = plan.row_order[index], plan.split_indptr[index]
        first = partials.state_index(block, blocks, first_split)
        count = plan.split_indptr[index + 1] - first_split
        fragments = pl.ds(column_slice * slice_fragments, slice_fragments)
        merged = loader.for_each(partials, first, count, slice(None), fragments, add_partial_rows, empty_rows(columns))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # an earlier copy may still read the tile
        tile[...] = normalise(merged.acc, merged.l).astype(tile.dtype)
        plgpu.commit_smem()
        to = out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(column_slice * columns, columns)]
        plgpu.copy_smem_to_gmem(tile, to)

        @pl.when(column_slice == 0)
        def _store_lse() -> None:
            lse[block, row] = log_sum_exp(merged.m * LOG2E, merged.l)

    for_each_merged(plan, slices * blocks, merge)
    plgpu.wait_smem_to_gmem(0)
