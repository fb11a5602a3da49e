"""Functions on splits of sequences for Hopper's `mla_decode` kernels with many query rows.

They iterate over splits, look up pages, compute which tokens a query row sees, and merge partial states. The kernels
for bf16 and fp8 latents share them. Terms:

    query row       one head of one query of a sequence; up to 64 query rows form a block
    split           a range of consecutive pages of a sequence, which one CTA processes (`LatentSplit`)
    tile, pair      a tile is 64 cached tokens of a split; the CTA processes tiles in pairs
    oldest query    the first of the queries of a sequence, which has the smallest position
    draft key       a key at or after the position of the oldest query; some queries of the sequence may not see it
    absent page     a page outside the range of the split, or a table entry outside the pool; its tokens are invisible
    partial state   result of one split of a sequence with several splits; `merge_splits` merges partial states
"""

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
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper.mla_rows import EIGHT_ROWS, ROWS, merge_columns, merge_scratch_types, merge_slice
from pallas_attn.mosaic.latent_tiles import DEAD, FULL, NEVER_BIT, OLDER_BIT, PARTIAL, TOKENS, LatentTiles, RowInputs
from pallas_attn.mosaic.partial_states import PartialLoader, PartialStates
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.tile_scheduler import (
    ABSENT,
    MergeItem,
    WorkTile,
    for_each_merged,
    for_each_work_tile,
    merge_programs,
)
from pallas_attn.portable.schedule import most_splits
from pallas_attn.types import DecodePlan


def num_blocks(query_rows: int) -> int:
    """Return the number of blocks of the query rows of a sequence."""
    return -(-query_rows // ROWS)


@dataclasses.dataclass(frozen=True)
class BlockTiles(LatentTiles):
    """Compile-time parameters of a call whose query rows are processed in blocks.

    The blocks are as few as possible, and have the same number of rows, a multiple of 8. Query rows are padded only if
    they do not fill such blocks. The tile of a kernel may have more rows than a block.
    """

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return num_blocks(self.queries * self.heads)

    @property
    def rows(self) -> int:
        """Query rows of a block, at most ROWS."""
        return -(-self.queries * self.heads // (self.blocks * EIGHT_ROWS)) * EIGHT_ROWS

    def block(self, block: Any) -> Any:
        """Slice of the query rows of a block."""
        return pl.ds(block * self.rows, self.rows)


class SplitResults(NamedTuple):
    """Results in global memory.

    Attributes:
      out: [B, blocks·rows, L], output of sequences that have one split.
      lse: float32 [blocks, B, ROWS], LSE of sequences that have one split. Entries after the rows of a block have any
        value, also in `partials`.
      partials: partial states of sequences that have several splits, each of ROWS query rows.
    """

    out: Any
    lse: Any
    partials: PartialStates

    @staticmethod
    def types(x: RowInputs, out_dtype: jax.typing.DTypeLike) -> SplitResults:
        """Return the types of the results of a kernel with these inputs."""
        batch, rows, latent_dim = x.q_latent.shape
        blocks = num_blocks(rows)
        return SplitResults(
            jax.ShapeDtypeStruct((batch, rows, latent_dim), out_dtype),
            jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
            PartialStates.types(blocks * most_splits(x.plan, x.block_tables.shape[1]), ROWS, latent_dim),
        )


class LatentSplit(NamedTuple):
    """A split: pages `start` to `stop` of a sequence, which one CTA processes.

    Attributes:
      row: index of the sequence.
      start, stop: range of entries of the sequence's block table.
      state: index of the split among all splits of the plan, from which `PartialStates.state_index` computes the index
        of the partial state. Unused if the sequence has one split.
      is_whole_row: whether the sequence has one split.
      pair: number of pairs of tiles that the CTA processed before this split.
    """

    row: Any
    start: Any
    stop: Any
    state: Any
    is_whole_row: Any
    pair: Any

    def queries(self, static: LatentTiles, x: RowInputs) -> Any:
        """Return the number of queries of the sequence."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: LatentTiles, x: RowInputs) -> Any:
        """Return the position of the oldest query."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_pairs(self, static: LatentTiles) -> Any:
        """Return the number of pairs of tiles of the split."""
        num_tiles = pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page
        return pl.cdiv(num_tiles, 2)


def for_each_split(static: LatentTiles, plan: DecodePlan, attend: Callable[[LatentSplit], None]) -> None:
    """Call attend(split) for each split of this CTA."""

    def step(work: WorkTile, pair: Any) -> Any:
        split = LatentSplit(work.row, work.start, work.stop, work.split, work.is_whole_row, pair)
        attend(split)
        return pair + split.num_pairs(static)

    for_each_work_tile(plan, step, jnp.int32(0))


# --- visibility


def token_positions(static: LatentTiles, meta: Ref, token: Any) -> Any:
    """Return the positions of tokens of a tile, minus the `origin` that was passed to `PageLookup.store_meta`.

    Args:
      meta: metadata of the tile, as stored by `PageLookup.store_meta`.
      token: int32, indices of tokens in the tile.
    """
    position = token + meta[1]
    for j in range(1, static.pages):
        first = j * static.page_tokens
        position = jnp.where(token >= first, token + (meta[1 + j] - first), position)
    return position


def bit_index(draft: Any) -> Any:
    """Return the index of the bit of `RowInputs.seen` that is 1 if a query row sees a token.

    Args:
      draft: int32, position of the token minus the position of the oldest query.
    """
    return jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))


def live_tokens(static: LatentTiles, x: RowInputs, row: Any, bit: Any) -> Any:
    """Return for each token of a tile whether any query row of a sequence sees it, bool [TOKENS].

    Args:
      row: index of the sequence.
      bit: int32 [TOKENS], result of `bit_index` for each token.
    """
    every = jnp.int32(static.draft_bits - 2**OLDER_BIT)
    any_row = every if x.seen_by_any is None else x.seen_by_any[row]
    return (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1


def seen_bits(
    static: BlockTiles, x: RowInputs, split: LatentSplit, row: Any, block: Any, count: int, layout: Any
) -> Any:
    """Return the visibility bits of the query rows of a tile, int32 [count]; see `bit_index`.

    Args:
      row: int32 [count], indices of the query rows in the sequence. Not needed if `RowInputs.seen` is given.
      block: index of the block, whose first row is the first row of the tile.
      layout: register layout of the result.
    """
    if x.seen is not None:
        return basics.load(x.seen.at[split.row, pl.ds(block * static.rows, count)], layout)
    newer = static.queries - 1 - lax.div(row, static.heads)  # number of draft keys that the row does not see
    bits = lax.shift_right_logical(jnp.full_like(row, static.draft_bits), jnp.maximum(newer, 0))
    return jnp.where(newer >= 0, bits | jnp.int32(-(2**OLDER_BIT)), 0)


# --- the producer warpgroup


@dataclasses.dataclass(frozen=True)
class PageLookup:
    """Page ids of the tiles of splits. The producer looks them up one pair of tiles ahead.

    The page ids are in shared memory, because the producer has too few registers for the pages of a pair, up to 4 per
    tile.

    Attributes:
      static: tile sizes.
      x: inputs of the kernel.
      ref: int32 [pairs + 1, 2, pages], page indices of the tiles of each pair; -1 for an absent page.
    """

    static: LatentTiles
    x: RowInputs
    ref: Ref

    def ids(self, split: LatentSplit, i: Any, tile: int) -> Ref:
        """Page indices [pages] of a tile of a split's i-th pair. Each thread reads what the same thread has written."""
        return self.ref.at[lax.rem(split.pair + i, self.ref.shape[0]), tile]

    def look_up(self, split: LatentSplit, i: Any) -> None:
        """Store the page indices of a split's i-th pair of tiles."""
        tables, static, num_pages = self.x.block_tables, self.static, self.x.pages.shape[0]
        for tile in (0, 1):
            first, _ = static.first_page(2 * i + tile)
            entries = [split.start + first + j for j in range(static.pages)]
            pages = [tables[split.row, jnp.minimum(entry, tables.shape[1] - 1)] for entry in entries]
            for j, (entry, page) in enumerate(zip(entries, pages, strict=True)):
                is_page = (entry < split.stop) & basics.in_pool(page, num_pages)
                basics.store_scalar(self.ids(split, i, tile).at[j], jnp.where(is_page, page, -1))

    def first_page(self, split: LatentSplit, i: Any, tile: int) -> tuple[Any, Any]:
        """Return the index of a tile's first page, and the index of the tile in that page."""
        return self.ids(split, i, tile)[0], self.static.first_page(2 * i + tile)[1]

    def copy_tile(
        self, split: LatentSplit, i: Any, tile: int, first: tuple[Any, Any], copy_page: Callable[[Any, Any, Any], None]
    ) -> None:
        """Call copy_page(j, page, tile_of_page) for each page j of a tile.

        Args:
          first: result of `first_page`. The caller loads it before its last wait, so that the wait hides the latency.
        """
        ids, (page, tile_of_page) = self.ids(split, i, tile), first

        def step(j: Any, page: Any) -> Any:
            copy_page(j, page, tile_of_page)
            return ids[jnp.minimum(j + 1, self.static.pages - 1)]

        lax.fori_loop(0, self.static.pages, step, page)

    def store_meta(
        self, split: LatentSplit, i: Any, tile: int, meta: Ref, oldest_query: Any, *, origin: Any = 0
    ) -> None:
        """Store the metadata of a tile for the consumers, before the tile's last copies start.

        All query rows see tokens before the oldest query. Under a causal mask, all rows also see the token of the
        oldest query, and the newest query sees every token of the sequence.

        Args:
          meta: int32 [1 + pages], receives the metadata: the visibility of the tile (FULL, PARTIAL or DEAD), then for
            each page the position of its first token minus `origin`, or ABSENT.
          oldest_query: position of the oldest query.
          origin: number that is subtracted from positions.
        """
        static, ids = self.static, self.ids(split, i, tile)
        first, tile_of_page = static.first_page(2 * i + tile)
        first_token = (split.start + first) * static.page_size + tile_of_page * TOKENS
        newer = first_token + TOKENS - oldest_query  # number of tokens of the tile from the oldest query on
        visibility = jnp.where(newer <= (1 if static.causal else 0), FULL, DEAD)
        if static.causal:
            visibility = jnp.where(newer <= split.queries(static, self.x), jnp.maximum(visibility, PARTIAL), visibility)
        for j in range(static.pages):
            exists = ids[j] >= 0
            visibility = jnp.where(exists, visibility, DEAD)
            place = jnp.where(exists, first_token + j * static.page_tokens - origin, ABSENT)
            basics.store_scalar(meta.at[1 + j], place)
        basics.store_scalar(meta.at[0], visibility)


def copy_splits(
    pages: PageLookup,
    copy_query: Callable[[LatentSplit], None],
    copy_pair: Callable[[LatentSplit, Any, Any], None],
) -> None:
    """Start the copies of all splits of this CTA.

    At the end of a split, consumers release the memory of its last tiles before the memory of its query. The query of
    the next split is therefore copied after the first pair of tiles. The query of the CTA's first split is copied
    first.

    Args:
      pages: page ids of tiles.
      copy_query: (split) -> None. Wait until the query's memory is free, then start the copies of a split's query.
      copy_pair: (split, i, oldest_query) -> None. Start the copies of a split's i-th pair as its memory becomes free.
    """

    def copy_split(split: LatentSplit) -> None:
        oldest_query = split.oldest_query(pages.static, pages.x)

        def copy(i: Any, _: None) -> None:
            copy_pair(split, i, oldest_query)
            pages.look_up(split, i + 1)
            pl.when((i == 0) & (split.pair > 0))(lambda: copy_query(split))

        pages.look_up(split, jnp.int32(0))
        pl.when(split.pair == 0)(lambda: copy_query(split))
        lax.fori_loop(0, split.num_pairs(pages.static), copy, None)

    for_each_split(pages.static, pages.x.plan, copy_split)


# --- the merge


def merge_splits(
    out: Float[Array, "B rows L"],
    lse: Float[Array, "blocks B ROWS"],
    partials: PartialStates,
    plan: DecodePlan,
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Write output and LSE of sequences with several splits, and of sequences without visible keys, in place.

    The attention kernel has written all other sequences. The splits of a sequence are merged in order, so the result
    does not depend on the CTAs that computed them.
    """
    (blocks, batch, _), latent_dim = lse.shape, out.shape[2]
    columns = merge_columns(blocks * batch, latent_dim)
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, columns),
        grid=(merge_programs(latent_dim // columns * blocks * batch),),
        grid_names=("program",),
        scratch_types=merge_scratch_types(partials, blocks * batch, columns, _merged_tile(columns, out.dtype)),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        kernel_name="merge_rows",
    )(*refs, *basics.materialize((partials, plan)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _merged_tile(columns: int, dtype: Any) -> Any:
    """Return the scratch type of an output slice [ROWS, columns]. It is swizzled if a row has at least 32 bytes."""
    row_bytes = min(register_tiles.ROW_BYTES, columns * jnp.dtype(dtype).itemsize)
    shape = (ROWS, columns)
    return plgpu.SMEM(shape, dtype) if row_bytes < 32 else register_tiles.operand(shape, dtype, row_bytes=row_bytes)


def _merge_kernel(
    columns: int, out: Ref, lse: Ref, partials: PartialStates, plan: DecodePlan, loader: PartialLoader, tile: Ref
) -> None:
    """Merge the partial states of one block of query rows and one slice of latent columns after the other."""
    blocks, slices = lse.shape[0], out.shape[2] // columns
    rows = out.shape[1] // blocks

    def merge(item: MergeItem) -> None:
        block, column_slice = lax.div(item.slice, slices), lax.rem(item.slice, slices)
        first = partials.state_index(block, blocks, item.first_split)
        to = out.at[item.row, pl.ds(block * rows, rows)]
        merge_slice(loader, partials, first, item.splits, column_slice, tile, to, lse.at[block, item.row])

    for_each_merged(plan, slices * blocks, merge)
    plgpu.wait_smem_to_gmem(0)
