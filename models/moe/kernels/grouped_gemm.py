"""Products of groups of rows with a matrix of weights each, on Hopper: the experts of a mixture, many rows at a time.

    Y[rows of group g] = X[rows of group g] @ W[g]        or silu(X @ gate columns of W[g]) · (X @ up columns)

A program takes tiles of 128 rows of one group and some parts of the columns, two of 128 where they divide them; in the
second form these are columns of the gate and the same ones of the up projection, so that the activation needs no pass
of its own. One warpgroup copies, two compute, 64 rows each:

    producer    X0 W0  X1 W1  X2 W2  ···        into `STAGES` slots, as they become free
    consumers          X0 W0  X1 W1  ···        a product is started before the one before is waited for

    barrier         arrivals            who waits
    landed[slot]    the copies          consumers
    free[slot]      both consumers      the producer, from the second use of a slot on

No warpgroup waits for what comes later: the producer waits for slots that consumers free one product after it used
them, consumers for tiles that the producer brings in the order in which they are used. All go through the same tiles.

jax's own ragged product has one warpgroup a program, tiles that begin anywhere in a group and are multiplied once for
each group they touch, and no activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

TILE_ROWS, TILE_DEPTH, STAGES = 128, 64, 4
CONSUMERS, CONSUMER_ROWS = 2, 64
ALIGNMENT = 8
"""Groups begin at multiples of this many rows: copies to shared memory move tiles of 8 rows."""

PROGRAMS = 132
"""Multiprocessors of H100 and H200 as they are sold in servers; right on others, too."""

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


class RowTiles(NamedTuple):
    """Tiles of rows that do not cross groups.

    Attributes:
      group: of each tile.
      start: first row of each tile, a multiple of `ALIGNMENT`.
      rows: rows of each tile, up to the next multiple of `ALIGNMENT`.
      count: number of tiles, in an array of one; entries after them mean nothing.
    """

    group: Int32[Array, "tiles"]
    start: Int32[Array, "tiles"]
    rows: Int32[Array, "tiles"]
    count: Int32[Array, "1"]

    @staticmethod
    def of(sizes: Int32[Array, "groups"], num_rows: int, tile_rows: int = TILE_ROWS) -> RowTiles:
        """Tiles of groups of these sizes, at most `num_rows` in all, each of which begins at `first_rows(sizes)`."""
        aligned = _align(sizes)
        tiles = (aligned + (tile_rows - 1)) // tile_rows
        first_tile, index = sums_before(tiles), jnp.arange(num_rows // tile_rows + sizes.shape[0], dtype=jnp.int32)
        within = index[:, None] - first_tile[None]  # [tiles, groups]
        is_own = (within >= 0) & (within < tiles[None])
        within *= tile_rows

        def of_group(values: Int32[Array, "tiles groups"]) -> Int32[Array, "tiles"]:
            return jnp.sum(jnp.where(is_own, values, 0), axis=1)

        number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
        return RowTiles(
            of_group(jnp.broadcast_to(number[None], within.shape)),
            of_group(first_rows(sizes)[None] + within),
            of_group(jnp.clip(aligned[None] - within, 0, tile_rows)),
            jnp.sum(tiles, keepdims=True),
        )


def _align(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    return (sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def first_rows(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    """Row at which each group begins."""
    return sums_before(_align(sizes))


def sums_before(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    """Sum of the sizes before each group. All are compared with all, which is one kernel for several such sums."""
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number[None] < number[:, None], sizes[None], 0), axis=1)


def padded_rows(num_rows: int, num_groups: int, tile_rows: int = TILE_ROWS) -> int:
    """Rows of the operand: those of all groups, and what copies of the last tile read beyond them."""
    return num_rows // ALIGNMENT * ALIGNMENT + num_groups * ALIGNMENT + tile_rows


def column_parts(columns: int, *, gated: bool) -> tuple[int, int]:
    """Number of parts of the columns that a program takes, and columns of a part, a multiple of 64.

    Raises:
      NotImplementedError: none divides the columns.
    """
    shapes = ((2, 128), (2, 64)) if gated else ((2, 128), (3, 64), (2, 64), (1, 64))
    for parts, width in shapes:
        if columns % (parts * width) == 0:
            return parts, width
    raise NotImplementedError(f"takes columns that are a multiple of {128 if gated else 64}, got {columns}")


class GroupProduct(NamedTuple):
    """A call of `group_product`.

    Attributes:
      x: rows, 16 bits, `padded_rows(...)` of them; groups begin at `first_rows(sizes)`.
      weights: of each group; K is a multiple of 64.
      tiles: `RowTiles.of(sizes, ...)`.
      gated: silu(left half of the columns) · right half is wanted, N / 2 columns; else all N columns.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "groups K N"]
    tiles: RowTiles
    gated: bool


def group_product(call: GroupProduct) -> Float[Array, "M N_out"]:
    """Multiplies each group's rows with its weights, in float32.

    Returns:
      Products in the order of `call.x` and of its dtype. Rows of no group hold anything.

    Raises:
      NotImplementedError: columns that no tile divides.
    """
    x, weights, tiles, gated = call
    depth, columns = weights.shape[1:]
    parts, part_columns = column_parts(columns, gated=gated)
    width = columns // 2 if gated else columns

    operand = functools.partial(operand_type, dtype=x.dtype)
    scratch = Scratch(
        x=operand((STAGES, TILE_ROWS, TILE_DEPTH)),
        weights=operand((STAGES, parts, TILE_DEPTH, part_columns)),
        out=operand((CONSUMERS, CONSUMER_ROWS, part_columns)),
        landed=plgpu.Barrier(num_arrivals=1 + parts, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
    )
    return plgpu.kernel(
        functools.partial(_kernel, gated, depth // TILE_DEPTH),
        out_type=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name="group_product",
    )(x, weights, tiles)


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    out: Any
    landed: Any
    free: Any


class Slots(NamedTuple):
    """Slots of shared memory that a producer fills and consumers empty in turn, `steps` of them for each item of work.

    Attributes:
      landed: a barrier for each, where its copies arrive.
      free: a barrier for each, where every consumer arrives that has read it.
      count: number of slots.
      steps: for each item.
    """

    landed: Any
    free: Any
    count: int
    steps: int

    def of(self, number: Any, step: Any) -> Any:
        """Slot of a step of an item."""
        return lax.rem(number * self.steps + step, self.count)

    def fill(self, number: Any, copy: Callable[[Any, Any], None]) -> None:
        """Calls `copy(slot, step)`, which starts the copies of a slot, for each step of an item once it is free."""

        def fill_one(step: Any, _: None) -> None:
            slot = self.of(number, step)

            @pl.when(number * self.steps + step >= self.count)
            def _wait() -> None:
                plgpu.barrier_wait(self.free.at[slot])

            copy(slot, step)

        lax.fori_loop(0, self.steps, fill_one, None)

    def await_last(self, items: Any) -> None:
        """Waits, after so many items, until all is read: a thread that waits for a barrier has to see all that arrive
        there."""
        for slot in range(self.count):

            @pl.when(items * self.steps > slot)
            def _see_last(slot: int = slot) -> None:
                plgpu.barrier_wait(self.free.at[slot])

    def empty(self, number: Any, use: Callable[[Any], None]) -> None:
        """Calls `use(slot)` for each step of an item once the slot is full, and frees the one before, whose products
        are done by then; `free_last` frees the item's last."""

        def use_one(step: Any, _: None) -> None:
            slot = self.of(number, step)
            plgpu.barrier_wait(self.landed.at[slot])
            use(slot)

            @pl.when(step > 0)
            def _free() -> None:
                plgpu.barrier_arrive(self.free.at[self.of(number, step - 1)])

        lax.fori_loop(0, self.steps, use_one, None)

    def multiply(
        self, number: Any, shape: tuple[int, int], parts: int, start: Callable[[Any, Any, int], None]
    ) -> list[Any]:
        """Sums, float32 of this shape, of the products of an item's steps for each part; `start(total, slot, part)`
        starts one. The last slot is left to free."""

        def sum_all(*sums: Any) -> list[Any]:
            def products(slot: Any) -> None:
                for part, total in enumerate(sums):
                    start(total, slot, part)
                plgpu.wgmma_wait(parts)

            self.empty(number, products)
            plgpu.wgmma_wait(0)
            return [total[...] for total in sums]

        return pl.run_scoped(sum_all, *[plgpu.ACC(shape)] * parts)

    def free_last(self, number: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.of(number, self.steps - 1)])


class Item(NamedTuple):
    """A tile of rows and parts of the columns.

    Attributes:
      tile: index among the tiles of rows.
      columns: first column of the weights of each part.
      to: first column of the output of each part; of one alone if they are gated.
    """

    tile: Any
    columns: list[Any]
    to: list[Any]


def _kernel(gated: bool, steps: int, x: Any, weights: Any, tiles: RowTiles, out: Any, scratch: Scratch) -> None:
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    parts, part_columns = scratch.weights.shape[1], scratch.weights.shape[3]
    column_tiles = weights.shape[2] // (parts * part_columns)
    items = tiles.count[0] * column_tiles

    def item(number: Any) -> Item:
        """Neighbouring programs take the columns of one tile of rows, and tiles of one group: both stay in L2."""
        index = program + number * PROGRAMS
        tile, first = lax.div(index, column_tiles), lax.rem(index, column_tiles) * part_columns
        if gated:
            return Item(tile, [first, out.shape[1] + first], [first])
        columns = [first * parts + part * part_columns for part in range(parts)]
        return Item(tile, columns, columns)

    own_items = lax.div(jnp.maximum(items - program + (PROGRAMS - 1), 0), PROGRAMS)
    slots = Slots(scratch.landed, scratch.free, STAGES, steps)

    def produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def copy_item(number: Any, _: None) -> None:
            this = item(number)
            group = tiles.group[this.tile]
            start = pl.multiple_of(tiles.start[this.tile], ALIGNMENT)

            def copy(slot: Any, step: Any) -> None:
                landed, depth = scratch.landed.at[slot], pl.ds(step * TILE_DEPTH, TILE_DEPTH)
                plgpu.copy_gmem_to_smem(x.at[pl.ds(start, TILE_ROWS), depth], scratch.x.at[slot], landed)
                for part, column in enumerate(this.columns):
                    source = weights.at[group, depth, pl.ds(column, part_columns)]
                    plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

            slots.fill(number, copy)

        lax.fori_loop(0, own_items, copy_item, None)
        slots.await_last(own_items)

    def consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def multiply_item(number: Any, _: None) -> None:
            this = item(number)
            start = pl.multiple_of(tiles.start[this.tile], ALIGNMENT) + warpgroup * CONSUMER_ROWS
            rows = tiles.rows[this.tile] - warpgroup * CONSUMER_ROWS

            def start_product(total: Any, slot: Any, part: int) -> None:
                own = scratch.x.at[slot, pl.ds(warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)]
                plgpu.wgmma(total, own, scratch.weights.at[slot, part])

            def result() -> None:
                results = slots.multiply(number, (CONSUMER_ROWS, part_columns), parts, start_product)
                if gated:
                    gate, up = results
                    results = [silu(gate) * up]
                for values, column in zip(results, this.to, strict=True):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    scratch.out[warpgroup] = values.astype(x.dtype)
                    plgpu.commit_smem()
                    store_rows(scratch.out.at[warpgroup], out.at[:, pl.ds(column, part_columns)], start, rows)

            # A tile of few rows has none for the second consumer.
            lax.cond(rows > 0, result, lambda: slots.empty(number, lambda _: None))
            slots.free_last(number)

        lax.fori_loop(0, own_items, multiply_item, None)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup < CONSUMERS, consume, produce)


def operand_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of 16-bit tiles as tensor cores read them, rows of 64 numbers."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def silu(x: Any) -> Any:
    """x · sigmoid(x), in a kernel."""
    return x / (1 + jnp.exp(-x))


def store_rows(tile: Any, out: Any, start: Any, rows: Any) -> None:
    """Copies the first rows of a tile, a multiple of `ALIGNMENT`, to `out` from `start` on. A copy has a size that the
    compiler knows, so fewer rows than the tile has are put together of powers of two."""
    tile_rows = tile.shape[0]

    @pl.when(rows >= tile_rows)
    def _all() -> None:
        plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(pl.multiple_of(start, ALIGNMENT), tile_rows)])

    @pl.when(rows < tile_rows)
    def _some() -> None:
        size = 1 << (tile_rows - 1).bit_length() - 1
        while size >= ALIGNMENT:

            @pl.when(rows & size != 0)
            def _piece(size: int = size) -> None:
                first = pl.multiple_of(rows & -(2 * size), ALIGNMENT)
                at = pl.multiple_of(start + first, ALIGNMENT)
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, size)], out.at[pl.ds(at, size)])

            size //= 2
