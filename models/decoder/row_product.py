"""Products of few rows with their experts' weights, on Hopper: a mixture's decode steps, where reading weights is all.

    Y[pair] = X[row of pair] @ W[expert of pair]        or silu(· @ gate columns) · (· @ up columns)

An expert that several pairs have is read once, and one that none has is not read. A program takes the columns of one
expert, 64 or two times 64, and multiplies them with all rows, since on the tensor cores eight rows cost what one does;
each pair then takes its own row of the result. Weights are the left operand, so that rows may be few:

    (W[:, columns])ᵀ  [64, K]   @   Xᵀ  [K, rows]   ->   [64, rows], of which pair p takes column `row of p`

    warpgroup 0, computes        W0·X0  W1·X1  W2·X2  ···        64 of K each
    warpgroup 1, copies      W0 X0  W1 X1  W2 X2  ···            into slots, as they become free

    barrier         arrivals                    who waits
    landed[slot]    the copies                  warpgroup 0
    free[slot]      warpgroup 0                 warpgroup 1, from the second use of a slot on

Neither waits for what comes later: both go through the same tiles in the same order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from models.decoder.group_product import PROGRAMS, operand_type, silu

COLUMNS, DEPTH = 64, 64
ROWS = 8
"""Rows are multiplied in multiples of this many."""

MOST_ROWS = 128
"""Rows up to which the kernel is meant: their products are as many registers as a thread has for sums."""

MOST_STAGES, OPERAND_BYTES = 8, 200 * 1024
"""Slots of shared memory, and what all of them may take."""


class Pairs(NamedTuple):
    """Pairs of a row and an expert, and what they share. Pairs with an expert one past the last have none.

    Attributes:
      expert: of each pair.
      first: the first pair of each expert that has any, in the order of the pairs.
      count: number of those, in an array of one.
      next: for each pair the next one with its expert; the number of pairs for the last.

    The last three are None where every pair has an expert of its own.
    """

    expert: Int32[Array, "P"]
    first: Int32[Array, "P"] | None = None
    count: Int32[Array, "1"] | None = None
    next: Int32[Array, "P"] | None = None

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Pairs:
        """Finds pairs that share an expert by comparing all with all: there are few."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        same = expert[:, None] == expert[None]
        is_first = ~jnp.any(same & (pair[None] < pair[:, None]), axis=1) & (expert < num_experts)
        following = jnp.min(jnp.where(same & (pair[None] > pair[:, None]), pair[None], len(pair)), axis=1)
        place = jnp.sum(is_first[None] & (pair[None] < pair[:, None]), axis=1, dtype=jnp.int32)
        first = jnp.sum(jnp.where(is_first[None] & (place[None] == pair[:, None]), pair[None], 0), axis=1)
        return Pairs(expert, first, jnp.sum(is_first, dtype=jnp.int32)[None], following)


class RowProduct(NamedTuple):
    """A call of `row_product`.

    Attributes:
      x: rows, 16 bits, `padded_rows(...)` of them; those of no pair may hold anything.
      weights: of each expert; K and the columns that a program takes divide it, see `column_parts`.
      pairs: `Pairs.of(...)`.
      copies: pairs of each row: pair p takes row p // copies.
      gated: silu(left half of the columns) · right half is wanted, N / 2 columns; else all N columns.
      halved: a program takes 64 columns and half of K, for a better balance where all pairs are few. Both halves'
        products are returned, to be added up.
      shared: weights of S experts that all rows have, as of one that is S times as wide: if gated [K, S · N], the gates
        of all before their up columns; else [S · K, N]. None for no such experts.
      num_rows: number of rows that shared experts have. Their pairs come after the others, `num_rows` for each expert.
        If gated, these take the first rows of `x`; else, as all pairs do then, rows of their own.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "E K N"]
    pairs: Pairs
    copies: int
    gated: bool
    halved: bool = False
    shared: Float[Array, "K SN"] | Float[Array, "SK N"] | None = None
    num_rows: int = 0

    @property
    def num_shared(self) -> int:
        """S."""
        return 0 if self.shared is None else self.shared.size // (self.weights.shape[1] * self.weights.shape[2])

    @property
    def num_pairs(self) -> int:
        """Pairs with shared experts included."""
        return self.pairs.expert.shape[0] + self.num_shared * self.num_rows


def padded_rows(num_rows: int) -> int:
    """Rows that operands and results have for so many."""
    return -(-num_rows // ROWS) * ROWS


def column_parts(columns: int, *, gated: bool) -> int:
    """Number of parts of 64 columns that a program takes.

    Raises:
      NotImplementedError: they do not divide the columns.
    """
    if columns % (2 * COLUMNS) == 0:
        return 2
    if not gated and columns % COLUMNS == 0:
        return 1
    raise NotImplementedError(f"takes columns that are a multiple of {128 if gated else 64}, got {columns}")


def row_product(call: RowProduct) -> Float[Array, "*halves P_padded N_out"]:
    """Multiplies each pair's row with its expert's weights, in float32.

    Returns:
      Products in the order of the pairs and of `call.x`'s dtype; if halved, [2, P_padded, N_out] of float32. Those of
      pairs without an expert, and of padding, hold anything.

    Raises:
      NotImplementedError: columns that a program's do not divide, or more than `MOST_ROWS` rows.
    """
    x, weights, pairs, copies, gated, halved, shared, shared_rows = call
    num_rows, columns = x.shape[0], weights.shape[2]
    if num_rows > MOST_ROWS:
        raise NotImplementedError(f"takes {MOST_ROWS} rows at most, got {num_rows}")
    if halved and (gated or weights.shape[1] % (2 * DEPTH)):
        raise NotImplementedError(f"halved: takes no gates and a K that is a multiple of 128, got {weights.shape[1]}")
    parts = 1 if halved else column_parts(columns, gated=gated)
    stages = min(MOST_STAGES, OPERAND_BYTES // ((parts * COLUMNS + num_rows) * DEPTH * x.dtype.itemsize))

    operand = functools.partial(operand_type, dtype=x.dtype)
    scratch = RowScratch(
        x=operand((stages, num_rows, DEPTH)),
        weights=operand((stages, parts, DEPTH, COLUMNS)),
        landed=plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )
    shape = (padded_rows(call.num_pairs), columns // 2 if gated else columns)
    out_type = jax.ShapeDtypeStruct((2, *shape), jnp.float32) if halved else jax.ShapeDtypeStruct(shape, x.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, copies, gated, call.num_shared, shared_rows),
        out_type=out_type,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name="row_product",
    )(x, weights, shared, pairs)


class RowScratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    landed: Any
    free: Any


def _kernel(
    copies: int,
    gated: bool,
    num_shared: int,
    shared_rows: int,
    x: Any,
    weights: Any,
    shared: Any,
    pairs: Pairs,
    out: Any,
    scratch: RowScratch,
) -> None:
    program, (stages, parts) = lax.axis_index("program"), scratch.weights.shape[:2]
    halves, num_pairs = len(out.shape) - 1, pairs.expert.shape[0]
    end = num_pairs + num_shared * shared_rows
    steps = weights.shape[1] // DEPTH // halves
    tiles = out.shape[-1] // (COLUMNS if gated else parts * COLUMNS)
    count = (num_pairs if pairs.count is None else pairs.count[0]) + num_shared
    own_items = lax.div(jnp.maximum(count * tiles * halves - program + (PROGRAMS - 1), 0), PROGRAMS)

    def half_of(number: Any) -> Any:
        """Which part of K an item is of."""
        return lax.rem(program + number * PROGRAMS, halves)

    def item(number: Any) -> tuple[Any, Any]:
        """First pair of its expert, and first column of the result. Shared experts come first."""
        index = lax.div(program + number * PROGRAMS, halves)
        width = COLUMNS if gated else parts * COLUMNS
        of_expert = lax.div(index, tiles) - num_shared
        pair = of_expert if pairs.first is None else pairs.first[jnp.maximum(of_expert, 0)]
        if num_shared:
            pair = jnp.where(of_expert < 0, num_pairs + (of_expert + num_shared) * shared_rows, pair)
        return pair, lax.rem(index, tiles) * width

    def row_of(pair: Any) -> Any:
        row = lax.div(pair, copies)
        if num_shared and gated:
            row = jnp.where(pair < num_pairs, row, lax.rem(pair - num_pairs, shared_rows))
        return row

    def next_of(pair: Any) -> Any:
        """Next pair of an expert; `end` after its last."""
        following = pairs.next[jnp.minimum(pair, num_pairs - 1)]
        if num_shared:
            following = jnp.where(following == num_pairs, end, following)
            is_last = lax.rem(pair - num_pairs + 1, shared_rows) == 0
            following = jnp.where(pair < num_pairs, following, jnp.where(is_last, end, pair + 1))
        return following

    def slot_of(number: Any, step: Any) -> Any:
        return lax.rem(number * steps + step, stages)

    def copy_all() -> None:
        def copy_item(number: Any, _: None) -> None:
            pair, column = item(number)
            expert = pairs.expert[jnp.minimum(pair, num_pairs - 1)]
            firsts = [column + part * (out.shape[-1] if gated else COLUMNS) for part in range(parts)]

            def copy(step: Any, _: None) -> None:
                slot, depth = slot_of(number, step), pl.ds((half_of(number) * steps + step) * DEPTH, DEPTH)

                @pl.when(number * steps + step >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(scratch.free.at[slot])

                landed = scratch.landed.at[slot]
                plgpu.copy_gmem_to_smem(x.at[:, depth], scratch.x.at[slot], landed)

                def copy_routed() -> None:
                    for part, first in enumerate(firsts):
                        source = weights.at[expert, depth, pl.ds(first, COLUMNS)]
                        plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

                def copy_shared() -> None:
                    number = lax.div(pair - num_pairs, shared_rows)
                    down = depth if gated else pl.ds(number * weights.shape[1] + depth.start, DEPTH)
                    for part, first in enumerate(firsts):
                        across = first
                        if gated:  # its own columns among the gates of all, or among the up columns of all
                            across = number * out.shape[-1] + column + part * (shared.shape[1] // 2)
                        source = shared.at[down, pl.ds(across, COLUMNS)]
                        plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

                if num_shared:
                    lax.cond(pair < num_pairs, copy_routed, copy_shared)
                else:
                    copy_routed()

            lax.fori_loop(0, steps, copy, None)

        lax.fori_loop(0, own_items, copy_item, None)
        for slot in range(stages):  # a thread that waits for a barrier has to see all that arrive there

            @pl.when(own_items * steps > slot)
            def _see_last(slot: int = slot) -> None:
                plgpu.barrier_wait(scratch.free.at[slot])

    def compute_all() -> None:
        def multiply_item(number: Any, _: None) -> None:
            pair, column = item(number)

            def multiply(*sums: Any) -> list[Any]:
                def step_on(step: Any, _: None) -> None:
                    slot = slot_of(number, step)
                    plgpu.barrier_wait(scratch.landed.at[slot])
                    rows = scratch.x.at[slot].transpose((1, 0))
                    for part, total in enumerate(sums):
                        plgpu.wgmma(total, scratch.weights.at[slot, part].transpose((1, 0)), rows)
                    plgpu.wgmma_wait(parts)

                    @pl.when(step > 0)
                    def _free() -> None:
                        plgpu.barrier_arrive(scratch.free.at[slot_of(number, step - 1)])

                lax.fori_loop(0, steps, step_on, None)
                plgpu.wgmma_wait(0)
                return [total[...] for total in sums]

            target = out.at[half_of(number)] if halves == 2 else out
            results = pl.run_scoped(multiply, *[plgpu.ACC((COLUMNS, x.shape[0]))] * parts)
            plgpu.barrier_arrive(scratch.free.at[slot_of(number, steps - 1)])
            if gated:
                gate, up = results
                results = [silu(gate) * up]
            row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (COLUMNS, x.shape[0]), 1), plgpu.Layout.WGMMA)

            def store(pair: Any) -> Any:
                own = row == row_of(pair)
                for part, result in enumerate(results):
                    values = jnp.sum(jnp.where(own, result, jnp.zeros_like(result)), axis=1)
                    target[pair, pl.ds(column + part * COLUMNS, COLUMNS)] = values.astype(out.dtype)
                return None if pairs.next is None else next_of(pair)

            if pairs.next is None:
                store(pair)
            else:
                lax.while_loop(lambda pair: pair < end, store, pair)

        lax.fori_loop(0, own_items, multiply_item, None)

    lax.cond(lax.axis_index("warpgroup") == 0, compute_all, copy_all)
