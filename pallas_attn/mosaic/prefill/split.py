"""KV splits: the keys of query blocks cut into parts, where there are fewer blocks than multiprocessors (split-KV).

The keys of all blocks are cut into equally many splits, and each split of a block is a work tile of its own, which
leaves partial states (`RowState`) for a kernel to merge. The number of splits is chosen on the device, by the kernel
that lists the blocks (`flash.schedule`), from the number of blocks and of the tiles of keys that they see; there is
room for the partial states of as many splits as a call of these shapes can have. Where none is cut, rows are written
finished, and the merge has nothing to do.

As in decode (`mosaic.merge`), partial states keep maximum and sum apart, and are merged by their maxima: an LSE of
5e5, rounded to float32, would change the weight of a split by up to 1.6%.
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

from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.block_scan import Lanes
from pallas_attn.mosaic.primitives.register_tiles import over_tokens
from pallas_attn.mosaic.primitives.row_io import RowLayout

WORK_TILE_OVERHEAD = 2
"""Cost of a work tile beside its tiles of keys, in tiles: its first scores, which overlap nothing, and its output."""

MERGE_OVERHEAD = 4
"""Cost of merging splits, in tiles, beside what is moved. Both costs are estimates from the times of a launch and of a
tile.
"""

PARTIALS_PER_CTA = 8
"""Partial states that there is room for, at most, of a block for each program."""

BYTES_OF_A_TILE = 1.1
"""Bytes that are moved in the time of a multiply-add of a tile: 3 TB/s beside 132 programs that together do 710
TFLOP/s.
"""


@dataclasses.dataclass(frozen=True)
class KvSplits:
    """Limits within which keys of blocks may be cut.

    Attributes:
      most: number of splits that there is room for; 1 if keys are not cut.
      heads: heads, or groups of heads that share a block, that blocks are done for.
      most_tiles: tiles of keys that a block can see.
      programs: programs that run at a time.
      rows: rows of the output.
      rows_of_a_tile: rows whose partial states are written and read in the time of a tile of keys.
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
        """Limits with room for as many splits as can be the best choice.

        Args:
          heads, most_tiles, rows, rows_of_a_tile: see the class.
          num_blocks: the least and the largest number of blocks of a head.
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
        """Time of so many work tiles before they are cut into splits, in tiles of keys.

        Args:
          xp: numpy or jax.numpy.
        """
        cdiv: Any = pl.cdiv if xp is jnp else lambda x, y: -(-x // y)
        rounds = cdiv(work_tiles * splits, self.num_ctas)
        merging = MERGE_OVERHEAD + cdiv(splits * self.rows, self.rows_of_a_tile)
        return rounds * (cdiv(kv_tiles, splits) + WORK_TILE_OVERHEAD) + xp.where(splits > 1, merging, 0)

    def choose(self, lanes: Lanes, num_blocks: Any, kv_tiles: Any) -> Any:
        """Choose the number of splits that takes the least time: in the listing kernel, where each thread computes the
        time of one number.

        Args:
          num_blocks: blocks of a head.
          kv_tiles: tiles of keys that a block sees at most.
        """
        # The least time and the thread that found it are one number: the time above, the thread below.
        power = 1 << self.most.bit_length()
        longest = (1 << 31) // power - 1
        splits = lanes.number() + 1
        time = self.time(num_blocks * self.heads, splits, jnp.minimum(kv_tiles, self.most_tiles))
        time = jnp.where(splits <= self.most, jnp.minimum(time, longest), longest)
        least = -lanes.max(-(time * power + lanes.number() % power))
        return least % power + 1


# --- partial states


class RowState(NamedTuple):
    """Attention of query rows over some of the keys, not normalised: arrays, or references to them.

    Attributes:
      o: [n, Dv] float32, values weighted with 2**(score - m).
      m: [n] float32, the largest score times log2 e, or less than that by at most the threshold below which nothing is
        rescaled; -inf where no key is seen.
      l: [n] float32, sums of 2**(score - m).
    """

    o: Any
    m: Any
    l: Any  # noqa: E741

    @staticmethod
    def types(rows: int, value_dim: int) -> RowState:
        """Shapes of the states of so many rows."""
        each = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return RowState(jax.ShapeDtypeStruct((rows, value_dim), jnp.float32), each, each)

    @property
    def seen(self) -> Any:
        """bool [n], whether a row sees a key; true of a row that saw NaN."""
        return self.l != 0

    def output(self, sink: Any = None) -> Any:
        """Normalised output [n, Dv], 0 where no key is seen.

        Args:
          sink: [n] learned logits of the rows.
        """
        # Rows that see nothing may hold 0 times an infinite value.
        inverse = over_tokens(self.inverse(sink), self.o.shape)
        return jnp.where(over_tokens(self.seen, self.o.shape), self.o * inverse, 0.0)

    def inverse(self, sink: Any = None) -> Any:
        """Inverse of the denominator [n], 0 where no key is seen.

        Args:
          sink: [n] learned logits of the rows.
        """
        seen, shift = self.seen, jnp.where(self.seen, self.m, 0.0)
        denominator = self.l if sink is None else self.l + jnp.exp2(sink * LOG2E - shift)
        return jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)

    def lse(self) -> Any:
        """Natural logarithm of the denominator without sinks, [n]; -inf where no key is seen."""
        log2 = jnp.where(self.seen, self.m, 0.0) + jnp.log2(jnp.where(self.seen, self.l, 1.0))
        return jnp.where(self.seen, log2 * (1 / LOG2E), -jnp.inf)


class OutputRows(NamedTuple):
    """Finished rows: out [n, Dv] and lse [n], arrays or references to them; lse is None where it is not returned."""

    out: Any
    lse: Any

    @staticmethod
    def types(rows: int, value_dim: int, dtype: jax.typing.DTypeLike, *, lse: bool) -> OutputRows:
        """Shapes of so many rows."""
        each = jax.ShapeDtypeStruct((rows,), jnp.float32) if lse else None
        return OutputRows(jax.ShapeDtypeStruct((rows, value_dim), dtype), each)


# --- merging

MERGED_ROWS = 16
"""Rows that a program merges: four loads of 16 bytes a thread for each split, at a width of 128."""


def merge_splits(
    partials: RowState, finished: OutputRows, counts: Int32[Array, "3"], sinks: Float[Array, "Hq"] | None
) -> OutputRows:
    """Merge the partial states of the splits of n rows into the finished rows, by a kernel that reads what was written.

    Where keys were not cut after all it leaves the finished rows as they are.

    Args:
      partials: [room · n, ...], split after split. Those from `counts[2]` on were not written.
      counts: of the `WorkList`.
      sinks: learned logits of the heads of the rows, which alternate.
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
    (n, value_dim), num_splits = out.shape, counts[2]
    row = layout.iota(MERGED_ROWS) + lax.axis_index("cta") * MERGED_ROWS
    place = jnp.where(row < n, row, -1)

    def add(split: Any, merged: RowState) -> RowState:
        at = jnp.where(row < n, row + split * n, -1)
        o = layout.load(partials.o, at, 0, value_dim)
        m, l = (layout.take(x, jnp.maximum(at, 0)) for x in (partials.m, partials.l))  # noqa: E741
        m = jnp.where(l != 0, m, -jnp.inf)
        highest = jnp.maximum(merged.m, m)
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        before, more = jnp.exp2(merged.m - shift), jnp.exp2(m - shift)
        # A state that saw nothing may hold 0 times an infinite value.
        o = jnp.where(layout.spread(l != 0, value_dim), o * layout.spread(more, value_dim), 0.0)
        return RowState(merged.o * layout.spread(before, value_dim) + o, highest, merged.l * before + l * more)

    @pl.when(num_splits > 1)
    def _merge() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((MERGED_ROWS, value_dim), jnp.float32), layout.tile)
        empty = RowState(nothing, layout.filled(-jnp.inf, MERGED_ROWS), layout.filled(0.0, MERGED_ROWS))
        state = lax.fori_loop(0, num_splits, add, empty)
        sink = None
        if sinks is not None:
            heads = sinks.shape[0]  # of a remainder by 1 Mosaic's compiler makes nothing that it can lower
            head = (
                lax.rem(jnp.maximum(place, 0), jnp.int32(heads))
                if heads > 1
                else layout.filled(jnp.int32(0), MERGED_ROWS)
            )
            sink = layout.take(sinks, head)
        layout.store(out, place, 0, state.output(sink).astype(out.dtype))
        if lse is not None:
            layout.put(lse, place, state.lse())
