"""Structure shared by the expert GEMM kernels for Hopper: persistent CTAs with one producer and one or two consumers.

Each CTA computes every `num_ctas()`-th work item, a tile of the output. The producer warpgroup copies operand tiles by
TMA into a ring of pipeline stages in shared memory. The consumer warpgroups multiply the tiles with `wgmma`:

    for item in the work items of this CTA:                    # all warpgroups, in the same order
        for step in range(K / DEPTH):                          # stage = (item * steps + step) % num_stages
            producer:   wait for empty[stage]; start the TMA copies of x and the weights, which arrive at full[stage]
            consumers:  wait for full[stage]; start the wgmma of this stage;
                        wait for the wgmma of the previous stage; arrive at empty[previous stage]
        consumers:      wait for the last wgmma; arrive at empty[last stage]; compute and store the output tile

    barrier         arrives                        waits                                       arrivals per phase
    full[stage]     the TMA copies of the stage    consumers                                   1 + weight tiles
    empty[stage]    each consumer                  producer, from the second use of a stage    consumers

Deadlock freedom: all warpgroups of a CTA visit the same steps in the same order. Before step n, the producer waits for
consumers to release step n - num_stages. Consumers release it after they start the wgmma of the next step, at the
latest step n - num_stages + 1, or at the end of the item. With at least two stages the producer has already issued
these copies, so neither side waits for an event that depends on its own wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import capability

DEPTH = 64
"""Columns of x, and rows of the weights, in one pipeline stage. A step multiplies this many of the K columns of x."""

ROW_ALIGNMENT = 8
"""The row ranges of TMA copies start at a multiple of this number: a swizzled tile of shared memory has 8 rows."""

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers per thread of the consumers and of the producer if there are two consumer warpgroups. With one consumer,
the registers are not changed."""

DEFAULT_CTAS = 132
"""Number of CTAs if the number of multiprocessors of the device is unknown: the number of an H100 SXM. Results are
correct for any number of CTAs."""


def num_ctas() -> int:
    """Number of CTAs of a kernel: one per multiprocessor of the device that the call is compiled for."""
    return capability().num_multiprocessors or DEFAULT_CTAS


def round_up(num_rows: int) -> int:
    """Round a number of rows up to a multiple of `ROW_ALIGNMENT`."""
    return -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def first_dividing(splits: Iterable[tuple[int, int]], columns: int, width: int = 1, *, gated: bool) -> tuple[int, int]:
    """Return the first split (m, n) with which a work item of m * n * width columns divides the columns.

    Raises:
      NotImplementedError: there is none.
    """
    for m, n in splits:
        if columns % (m * n * width) == 0:
            return m, n
    raise NotImplementedError(f"expected a number of columns divisible by {128 if gated else 64}, got {columns}")


class Scratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      x: row tiles, one per stage, [num_stages, rows, DEPTH].
      weights: weight tiles, one or more per stage, [num_stages, *tiles, DEPTH, columns].
      out: output tiles that TMA copies to global memory; None if a kernel stores from registers.
      full: one barrier per stage, at which the TMA copies of the stage arrive.
      empty: one barrier per stage, at which each consumer arrives after it has read the stage.
    """

    x: Any
    weights: Any
    out: Any
    full: Any
    empty: Any

    @staticmethod
    def types(
        dtype: Any,
        *,
        num_stages: int,
        num_consumers: int,
        rows: int,
        weight_tiles: tuple[int, ...],
        columns: int,
        out: tuple[int, ...] | None,
    ) -> Scratch:
        """Return the types to allocate for tiles of this 16-bit dtype.

        Args:
          dtype: dtype of the operands and of the output tiles.
          num_stages: number of pipeline stages.
          num_consumers: number of consumer warpgroups.
          rows: rows of a tile of x.
          weight_tiles: numbers of weight tiles per stage, one entry per array axis.
          columns: columns of a weight tile.
          out: shape of the output tiles, or None.
        """
        return Scratch(
            x=_operand((num_stages, rows, DEPTH), dtype),
            weights=_operand((num_stages, *weight_tiles, DEPTH, columns), dtype),
            out=None if out is None else _operand(out, dtype),
            full=plgpu.Barrier(num_arrivals=1 + math.prod(weight_tiles), num_barriers=num_stages),
            empty=plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
        )


def _operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit tiles in the layout that wgmma reads: rows of 64 values, swizzled by 128 bytes."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def persistent_kernel(
    body: Callable[..., None], out_type: jax.ShapeDtypeStruct, scratch: Scratch, *, num_consumers: int, name: str
) -> Callable[..., Any]:
    """Return a kernel with one CTA per multiprocessor, each with `num_consumers` consumers and one producer.

    `body` receives the references of the kernel's arguments, of its output and of the scratch memory.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_ctas(),),
        grid_names=("cta",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name=name,
    )


class Items(NamedTuple):
    """Work items of one CTA: `cta`, `cta + stride`, `cta + 2 * stride`, ...

    Attributes:
      cta: index of the CTA in the grid.
      stride: number of CTAs of the grid.
      count: number of work items of this CTA.
    """

    cta: Any
    stride: int
    count: Any

    @staticmethod
    def of_cta(total: Any) -> Items:
        """Return the work items of this CTA, if `total` items are divided among the CTAs. Call it inside the kernel."""
        cta, stride = lax.axis_index("cta"), lax.axis_size("cta")
        return Items(cta, stride, lax.div(jnp.maximum(total - cta + (stride - 1), 0), stride))

    def global_index(self, number: Any) -> Any:
        """Index of this CTA's work item `number` among all work items."""
        return self.cta + number * self.stride


class Ring(NamedTuple):
    """Pipeline stages that the producer fills and the consumers release in the same order.

    Attributes:
      full, empty: the barriers of `Scratch`.
      num_stages: number of stages, at least 2.
      steps: number of steps per work item; each step fills one stage.
    """

    full: Any
    empty: Any
    num_stages: int
    steps: int

    def stage(self, number: Any, step: Any) -> Any:
        """Stage of a step of work item `number`."""
        return lax.rem(number * self.steps + step, self.num_stages)

    def fill(self, number: Any, copy: Callable[[Any, Any], None]) -> None:
        """Producer: call `copy(stage, step)` for each step of a work item, after consumers have released the stage."""

        def fill_stage(step: Any, _: None) -> None:
            stage = self.stage(number, step)

            @pl.when(number * self.steps + step >= self.num_stages)
            def _wait() -> None:
                plgpu.barrier_wait(self.empty.at[stage])

            copy(stage, step)

        lax.fori_loop(0, self.steps, fill_stage, None)

    def wait_until_empty(self, num_items: Any) -> None:
        """Producer: wait, after `num_items` work items, until consumers have released every stage.

        A warpgroup that waits on a Pallas barrier has to wait for every phase of the barrier, including the last one.
        """
        for stage in range(self.num_stages):

            @pl.when(num_items * self.steps > stage)
            def _wait(stage: int = stage) -> None:
                plgpu.barrier_wait(self.empty.at[stage])

    def read(self, number: Any, use: Callable[[Any], None]) -> None:
        """Consumer: call `use(stage)` for each step of a work item once the stage is full.

        `use` has to complete the reads of the previous stage, which is then released. `release_last` releases the last
        stage of the work item.
        """

        def read_stage(step: Any, _: None) -> None:
            stage = self.stage(number, step)
            plgpu.barrier_wait(self.full.at[stage])
            use(stage)

            @pl.when(step > 0)
            def _release() -> None:
                plgpu.barrier_arrive(self.empty.at[self.stage(number, step - 1)])

        lax.fori_loop(0, self.steps, read_stage, None)

    def multiply(
        self, number: Any, shape: tuple[int, int], num_tiles: int, start: Callable[[Any, Any, int], None]
    ) -> list[Any]:
        """Consumer: accumulate the products of all steps of a work item, one accumulator per weight tile.

        Args:
          number: number of the work item.
          shape: shape of an accumulator; see `plgpu.ACC`.
          num_tiles: number of weight tiles per stage that this consumer multiplies.
          start: `start(accumulator, stage, tile)` starts the wgmma of one weight tile.

        Returns:
          Accumulators in float32. `release_last` has to be called afterwards.
        """

        def accumulate(*accumulators: Any) -> list[Any]:
            def start_all(stage: Any) -> None:
                for tile, accumulator in enumerate(accumulators):
                    start(accumulator, stage, tile)
                plgpu.wgmma_wait(num_tiles)

            self.read(number, start_all)
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(accumulate, *[plgpu.ACC(shape)] * num_tiles)

    def release_last(self, number: Any) -> None:
        """Consumer: release the last stage of a work item."""
        plgpu.barrier_arrive(self.empty.at[self.stage(number, self.steps - 1)])


def run_warpgroups(
    ring: Ring,
    items: Items,
    copies: Callable[[Any], Callable[[Any, Any], None]],
    compute: Callable[[Any], None],
    *,
    is_consumer: Any,
    num_consumers: int,
    stores_by_tma: bool,
) -> None:
    """Run the producer and the consumers of a CTA.

    Args:
      ring: the pipeline stages.
      items: work items of this CTA.
      copies: function that takes the number of a work item and returns a function `copy(stage, step)`. This function
        starts the TMA copies of one step.
      compute: function that takes the number of a work item, and computes and stores the item.
      is_consumer: whether this warpgroup is a consumer; the last warpgroup is the producer.
      num_consumers: number of consumer warpgroups.
      stores_by_tma: whether `compute` stores by TMA, so that the stores have to complete before the kernel ends.
    """

    def produce() -> None:
        if num_consumers > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        lax.fori_loop(0, items.count, lambda number, _: ring.fill(number, copies(number)), None)
        ring.wait_until_empty(items.count)

    def consume() -> None:
        if num_consumers > 1:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        lax.fori_loop(0, items.count, lambda number, _: compute(number), None)
        if stores_by_tma:
            plgpu.wait_smem_to_gmem(0)

    lax.cond(is_consumer, consume, produce)


def wgmma_swap_ab(accumulator: Any, weights: Any, x: Any) -> None:
    """Start accumulator += weightsᵀ @ xᵀ. The 64 weight columns are M of the wgmma, and the rows of x are N."""
    plgpu.wgmma(accumulator, weights.transpose((1, 0)), x.transpose((1, 0)))


def silu(x: Any) -> Any:
    """x · sigmoid(x), inside a kernel."""
    return x / (1 + jnp.exp(-x))


def activate(results: list[Any], *, gated: bool) -> list[Any]:
    """Return silu(gate) · up of a gate tile and an up tile if `gated`, else the tiles unchanged."""
    if not gated:
        return results
    gate, up = results
    return [silu(gate) * up]


def write_out_tile(tile: Any, values: Any) -> None:
    """Write values to an output tile in shared memory, after the previous TMA store has read the tile."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = values
    plgpu.commit_smem()


def store_rows(tile: Any, out: Any, start: Any, rows: Any) -> None:
    """Store the first `rows` rows of an output tile to rows `start` to `start + rows` of `out`.

    `start` and `rows` are multiples of `ROW_ALIGNMENT`. The size of a TMA copy is a compile-time constant, so a partial
    tile is stored by several copies, each of a power of two of rows.
    """
    tile_rows = tile.shape[0]

    @pl.when(rows >= tile_rows)
    def _whole_tile() -> None:
        plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(pl.multiple_of(start, ROW_ALIGNMENT), tile_rows)])

    @pl.when(rows < tile_rows)
    def _partial_tile() -> None:
        size = 1 << (tile_rows - 1).bit_length() - 1
        while size >= ROW_ALIGNMENT:

            @pl.when(rows & size != 0)
            def _store(size: int = size) -> None:
                first = pl.multiple_of(rows & -(2 * size), ROW_ALIGNMENT)
                at = pl.multiple_of(start + first, ROW_ALIGNMENT)
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, size)], out.at[pl.ds(at, size)])

            size //= 2


def column_indices(shape: tuple[int, int]) -> Any:
    """Column index of each element of an accumulator."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA)


def take_column(accumulator: Any, columns: Any, column: Any) -> Any:
    """Return one column of an accumulator; `columns` is `column_indices` of its shape."""
    return jnp.sum(jnp.where(columns == column, accumulator, jnp.zeros_like(accumulator)), axis=1)
