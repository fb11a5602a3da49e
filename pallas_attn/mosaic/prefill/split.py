"""Split-KV in prefill: several CTAs share the keys of a block when there are fewer blocks than multiprocessors.

A query row is one query head of one token. A block is the query rows that a CTA processes together, for example 64 per
consumer warpgroup on Hopper. The keys of every block are divided into the same number of splits, in tiles of keys. One
split of one block is a work tile: a CTA attends with the rows of the block to the keys of the split, and stores a
partial state (`RowState`), which is attention that is not normalised. A second kernel, `merge_splits`, merges the
partial states.

- `KvSplits.of` computes the largest number of splits for the shapes of a call, and so the number of partial states.
- `KvSplits.choose` chooses the number of splits on the device, in the kernel that lists the blocks (`schedule.py`),
  from the number of blocks and their tiles of keys.
- With one split, the attention kernel stores finished rows, and the merge does nothing.

A partial state stores maximum and sum separately (see `mosaic/merge.py`). One LSE per row would not be accurate enough:
rounding an LSE of 5e5 to float32 changes the weight of a split by up to 1.6%.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_attn.mosaic.merge import AttentionState, StateForm, merge_in_order
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.block_scan import Lanes
from pallas_attn.mosaic.primitives.row_io import RowLayout

WORK_TILE_OVERHEAD = 2
"""Fixed time of a work tile, in units of the time of a tile of keys: the computation of the first scores, which does
not overlap with other work, and the store of the output."""

MERGE_OVERHEAD = 4
"""Fixed time of a merge, in units of the time of a tile of keys. Both fixed times are estimates."""

PARTIALS_PER_CTA = 8
"""Largest number of work tiles per CTA after splitting. It bounds the memory for partial states."""

BYTES_OF_A_TILE = 1.1
"""Bytes that memory moves in the time in which one CTA computes one multiply-add, on an H100: 3 TB/s, and 132 CTAs with
710 TFLOP/s together.
"""


@dataclasses.dataclass(frozen=True)
class KvSplits:
    """Bounds of the number of splits, and the cost model that chooses it.

    Attributes:
      most: maximum number of splits; 1 if keys are never split.
      heads: number of heads, or of sets of heads that share a block.
      most_tiles: largest number of tiles of keys that a block can see.
      num_ctas: CTAs that run at the same time.
      rows: rows of the output.
      rows_of_a_tile: number of rows whose partial states are written and read in the time of a tile of keys.
    """

    most: int
    heads: int
    most_tiles: int
    num_ctas: int
    rows: int = 0
    rows_of_a_tile: int = 1

    @staticmethod
    def of(
        *, heads: int, num_blocks: tuple[int, int], most_tiles: int, rows: int = 0, rows_of_a_tile: int = 1
    ) -> KvSplits:
        """Return bounds that include the best number of splits for all possible lengths of sequences.

        Args:
          heads, most_tiles, rows, rows_of_a_tile: see the class.
          num_blocks: smallest and largest possible number of blocks of a head.
        """
        num_ctas = basics.multiprocessors()
        fewest, largest = (n * heads for n in num_blocks)
        room = max(1, min(PARTIALS_PER_CTA * num_ctas // fewest, most_tiles))
        limits = KvSplits(1, heads, most_tiles, num_ctas, rows, rows_of_a_tile)
        splits = np.arange(1, room + 1)
        work_tiles = np.arange(fewest, max(min(largest, PARTIALS_PER_CTA * num_ctas), fewest) + 1)
        best = np.argmin(limits.time(work_tiles[:, None], splits, most_tiles, np), axis=1)
        most = int(best.max()) + 1
        return dataclasses.replace(limits, most=most)

    def time(self, work_tiles: Any, splits: Any, kv_tiles: Any, xp: Any = jnp) -> Any:
        """Estimate the time of a call, in units of the time of a tile of keys.

        Args:
          work_tiles: number of work tiles before splitting.
          splits: number of splits.
          kv_tiles: tiles of keys of each work tile before splitting.
          xp: numpy or jax.numpy.
        """
        cdiv: Any = pl.cdiv if xp is jnp else lambda x, y: -(-x // y)
        rounds = cdiv(work_tiles * splits, self.num_ctas)
        merging = MERGE_OVERHEAD + cdiv(splits * self.rows, self.rows_of_a_tile)
        return rounds * (cdiv(kv_tiles, splits) + WORK_TILE_OVERHEAD) + xp.where(splits > 1, merging, 0)

    def choose(self, lanes: Lanes, num_blocks: Any, kv_tiles: Any) -> Any:
        """Choose the number of splits with the least estimated time.

        Runs in the kernel that lists the blocks (`schedule.list_blocks`). Thread i estimates the time of i + 1 splits.

        Args:
          lanes: operations on one value per thread.
          num_blocks: blocks of a head.
          kv_tiles: largest number of tiles of keys that a block sees.
        """
        # Time and thread are packed into one integer, time in the upper bits, for one reduction over threads.
        power = 1 << self.most.bit_length()
        longest = (1 << 31) // power - 1
        splits = lanes.number() + 1
        time = self.time(num_blocks * self.heads, splits, jnp.minimum(kv_tiles, self.most_tiles))
        time = jnp.where(splits <= self.most, jnp.minimum(time, longest), longest)
        least = -lanes.max(-(time * power + lanes.number() % power))
        return least % power + 1


# --- partial states


ROW_STATES = StateForm(query_axis=0, log2=True)
"""Form of prefill's attention states: `acc` [query_rows, Dv], m in units of log2."""


class RowState(NamedTuple):
    """Attention state of n query rows (see `mosaic.merge`); arrays, or references to them.

    Attributes:
      o: [n, Dv] float32, sum of values weighted with 2**(score - m). It may hold NaN in rows that see no key: 0 times
        an infinite value.
      m: [n] float32, reference of the exponents, in units of log2; -inf for rows that see no key. It is the largest
        score times log2(e). In kernels that rescale lazily, it may be smaller by up to their rescaling threshold.
      l: [n] float32, sum of 2**(score - m).
    """

    o: Any
    m: Any
    l: Any  # noqa: E741

    @staticmethod
    def types(rows: int, value_dim: int) -> RowState:
        """Return the shapes of the states of `rows` rows."""
        each = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return RowState(jax.ShapeDtypeStruct((rows, value_dim), jnp.float32), each, each)

    def output(self, sink: Any = None) -> Any:
        """Return the normalised output [n, Dv], 0 for rows that see no key.

        Args:
          sink: sink logits [n], or None.
        """
        return ROW_STATES.output(AttentionState(self.m, self.l, self.o), sink)

    def inverse(self, sink: Any = None) -> Any:
        """Return 1 / (l + sink term), [n], 0 for rows that see no key.

        Args:
          sink: sink logits [n], or None.
        """
        return ROW_STATES.inverse(self.m, self.l, sink)

    def lse(self) -> Any:
        """Return the natural-log LSE without sinks, [n], -inf for rows that see no key."""
        return ROW_STATES.lse(self.m, self.l)


class OutputRows(NamedTuple):
    """Finished rows: out [n, Dv], and lse [n] or None if it is not returned; arrays, or references to them."""

    out: Any
    lse: Any

    @staticmethod
    def types(rows: int, value_dim: int, dtype: jax.typing.DTypeLike, *, lse: bool) -> OutputRows:
        """Return the shapes of `rows` rows."""
        each = jax.ShapeDtypeStruct((rows,), jnp.float32) if lse else None
        return OutputRows(jax.ShapeDtypeStruct((rows, value_dim), dtype), each)


# --- merging

MERGED_ROWS = 16
"""Number of query rows that a CTA of the merge kernel merges. With Dv = 128, a thread loads 4 times 16 bytes per split.
"""


def merge_splits(
    partials: RowState, finished: OutputRows, counts: Int32[Array, "3"], sinks: Float[Array, "Hq"] | None
) -> OutputRows:
    """Merge the partial states of n rows into the finished rows, in place. With one split, do nothing.

    Args:
      partials: [splits · n, ...], the states of all rows for the first split, then for the second, and so on. States
        of splits from `counts[2]` on were not written.
      finished: rows that the attention kernel stored. They are valid if there is one split, and are overwritten
        otherwise.
      counts: array of the `WorkList`; `counts[2]` is the number of splits.
      sinks: sink logits [Hq], or None. Row i belongs to head i modulo Hq.
    """
    out, lse = (None if x is None else basics.alias_in_place(x) for x in finished)
    n, value_dim = finished.out.shape
    layout = RowLayout(min(32, value_dim // 4), 4)
    plgpu.kernel(
        functools.partial(_merge_kernel, layout),
        out_type=(),
        grid=(pl.cdiv(n, MERGED_ROWS),),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_prefill_splits",
    )(*basics.materialize((partials, counts, sinks)), out, lse)
    return OutputRows(*(None if x is None else basics.read_back(x) for x in (out, lse)))


def _merge_kernel(
    layout: RowLayout, partials: RowState, counts: Ref, sinks: Ref | None, out: Ref, lse: Ref | None
) -> None:
    """Merge `MERGED_ROWS` query rows: each thread loads its values of every split from global memory."""
    (n, value_dim), num_splits = out.shape, counts[2]
    row = layout.iota(MERGED_ROWS) + lax.axis_index("cta") * MERGED_ROWS
    place = jnp.where(row < n, row, -1)

    def load(split: Any) -> AttentionState:
        at = jnp.where(row < n, row + split * n, -1)
        o = layout.load(partials.o, at, 0, value_dim)  # [MERGED_ROWS, Dv]
        m, l = (layout.take(x, jnp.maximum(at, 0)) for x in (partials.m, partials.l))  # noqa: E741
        seen = l != 0
        return AttentionState(jnp.where(seen, m, -jnp.inf), l, jnp.where(layout.spread(seen, value_dim), o, 0.0))

    @pl.when(num_splits > 1)
    def _merge() -> None:
        empty = ROW_STATES.empty((MERGED_ROWS, value_dim), layout.per_row, layout.tile)
        state = merge_in_order(ROW_STATES, load, 0, num_splits, empty)
        sink = None
        if sinks is not None:
            heads = sinks.shape[0]  # Mosaic cannot lower a remainder by 1
            head = (
                lax.rem(jnp.maximum(place, 0), jnp.int32(heads))
                if heads > 1
                else layout.filled(jnp.int32(0), MERGED_ROWS)
            )
            sink = layout.take(sinks, head)
        layout.store(out, place, 0, ROW_STATES.output(state, sink).astype(out.dtype))
        if lse is not None:
            layout.put(lse, place, ROW_STATES.lse(state.m, state.l))
