"""Products of up to 64 rows with all experts of a mixture, shared ones among them, on Hopper: decode steps of so many
rows that nearly every expert has one.

    hidden[expert, row] = silu(X[row] @ gate columns) · (X[row] @ up columns)        all experts, all rows
    Y[pair]             = hidden[expert of pair, row of pair] @ W[expert]            and of shared experts every row

The first product knows nothing of who chose whom, so the router and the choice run beside it. What it makes of rows
that did not choose an expert costs no more weights, which are what takes time, and nobody looks at it. Shared experts
are further ones, each as wide as a routed one. Weights are the left operand, so that rows may be few, and a program
takes two times 64 columns of one expert at a time:

    (W[:, columns])ᵀ  [64, K]   @   Xᵀ  [K, rows]   ->   [64, rows]

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

from models.decoder.group_product import PROGRAMS, Slots, operand_type, silu

COLUMNS, DEPTH, PARTS = 64, 64, 2
ROWS = 8
"""Rows are multiplied in multiples of this many."""

MOST_ROWS = 64

STAGES = 6
"""Slots of shared memory, which leave room for the router's product on the same multiprocessor."""


class Choices(NamedTuple):
    """Pairs of each expert, as chains.

    Attributes:
      first: first pair of each expert; the number of pairs for one without any.
      next: for each pair the next one with its expert; the number of pairs for the last.
    """

    first: Int32[Array, "E"]
    next: Int32[Array, "P"]

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Choices:
        """Finds pairs that share an expert by comparing all with all: there are few."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        is_next = (expert[:, None] == expert[None]) & (pair[None] > pair[:, None])
        is_own = expert[None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None]
        first, following = (jnp.min(jnp.where(own, pair[None], len(pair)), axis=1) for own in (is_own, is_next))
        return Choices(first, following)


class HiddenProduct(NamedTuple):
    """A call of `hidden_product`.

    Attributes:
      x: rows, 16 bits, `padded_rows(...)` of them.
      weights: of each expert, gates in the first half of the columns.
      shared: of the shared experts, all gates in the first half of the columns; None if there are none.
    """

    x: Float[Array, "R D"]
    weights: Float[Array, "E D F2"]
    shared: Float[Array, "D SF2"] | None = None
    after: tuple = ()
    stages: int = STAGES
    hint: int = 0
    ahead: Any = None
    ahead_steps: int = 0


class PairProduct(NamedTuple):
    """A call of `pair_product`.

    Attributes:
      hidden: what `hidden_product` returned.
      weights: of each expert.
      shared: of the shared experts, one below the other; None if there are none.
      choices: `Choices.of(...)`.
      num_rows: rows of each expert.
      copies: pairs of each row.
    """

    hidden: Float[Array, "all_R F"]
    weights: Float[Array, "E F D"]
    shared: Float[Array, "SF D"] | None
    choices: Choices
    num_rows: int
    copies: int
    stages: int = STAGES
    early_next: bool = False
    hint: int = 0


def padded_rows(num_rows: int) -> int:
    """Rows that operands have for so many."""
    return -(-num_rows // ROWS) * ROWS


def hidden_product(call: HiddenProduct) -> Float[Array, "all_R F"]:
    """Multiplies all rows with all experts' gates and up projections, in float32.

    Returns:
      Products of routed experts, then of shared ones, the rows of one below those of another.
    """
    from models.decoder import weights_ahead

    weights_ahead.hinted(call.hint)
    x, weights, shared = call.x, call.weights, call.shared
    num_rows, width = x.shape[0], weights.shape[2] // 2
    num_experts = weights.shape[0] + (0 if shared is None else shared.shape[1] // weights.shape[2])
    return plgpu.kernel(
        functools.partial(_hidden_kernel, num_experts, call.ahead_steps),
        out_type=jax.ShapeDtypeStruct((num_experts * num_rows, width), x.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(_scratch(num_rows, x.dtype, call.stages),),
        kernel_name="hidden_product",
    )(x, weights, [] if shared is None else [shared], list(call.after), [] if call.ahead is None else [call.ahead])


def pair_product(call: PairProduct) -> Float[Array, "P_and_shared D"]:
    """Multiplies what the experts' rows became with the experts' second weights, in float32.

    Returns:
      Products of the pairs, padded to a multiple of 8, and below them all rows of each shared expert.
    """
    from models.decoder import weights_ahead

    weights_ahead.hinted(call.hint)
    hidden, weights, shared = call.hidden, call.weights, call.shared
    num_experts, num_pairs = hidden.shape[0] // call.num_rows, call.choices.next.shape[0]
    num_shared = num_experts - weights.shape[0]
    shape = padded_rows(num_pairs) + num_shared * call.num_rows, weights.shape[2]
    return plgpu.kernel(
        functools.partial(_pair_kernel, num_experts, call.copies, call.early_next),
        out_type=jax.ShapeDtypeStruct(shape, hidden.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(_scratch(call.num_rows, hidden.dtype, call.stages),),
        kernel_name="pair_product",
    )(hidden, weights, [] if shared is None else [shared], call.choices)


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    out: Any
    landed: Any
    free: Any


def _scratch(num_rows: int, dtype: Any, stages: int) -> Scratch:
    operand = functools.partial(operand_type, dtype=dtype)
    return Scratch(
        x=operand((stages, num_rows, DEPTH)),
        weights=operand((stages, PARTS, DEPTH, COLUMNS)),
        out=operand((num_rows, COLUMNS)),
        landed=plgpu.Barrier(num_arrivals=1 + PARTS, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )


def _hidden_kernel(
    num_experts: int, ahead_steps: int, x: Any, weights: Any, shared: Any, after: Any, ahead: Any, out: Any, scratch: Scratch
) -> None:
    num_rows, width = x.shape[0], out.shape[1]
    num_routed = weights.shape[0]

    def copy(expert: Any, column: Any, step: Any, slot: Any) -> None:
        landed, depth = scratch.landed.at[slot], pl.ds(step * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(x.at[:, depth], scratch.x.at[slot], landed)

        def routed() -> None:
            for part in range(PARTS):
                source = weights.at[expert, depth, pl.ds(column + part * width, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

        def of_shared() -> None:
            for part in range(PARTS):
                first = (expert - num_routed) * width + column + part * (shared[0].shape[1] // 2)
                source = shared[0].at[depth, pl.ds(first, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

        lax.cond(expert < num_routed, routed, of_shared) if shared else routed()

    def store(expert: Any, column: Any, results: list[Any]) -> None:
        gate, up = results
        to = pl.ds(pl.multiple_of(expert * num_rows, ROWS), num_rows)
        _store_all(silu(gate) * up, out.at[to, pl.ds(column, COLUMNS)], scratch)

    def at_end() -> None:
        if not ahead:
            return
        program = lax.axis_index("program")
        across = ahead[0].shape[2] // (2 * COLUMNS)
        expert, column = lax.div(program, across), lax.rem(program, across) * (2 * COLUMNS)

        def ask(step: Any, _: None) -> None:
            plgpu.async_prefetch(ahead[0].at[expert, pl.ds(step * DEPTH, DEPTH), pl.ds(column, 2 * COLUMNS)])

        lax.fori_loop(0, ahead_steps, ask, None)

    _run(num_experts, width // COLUMNS, COLUMNS, weights.shape[1] // DEPTH, copy, store, scratch, at_end)


def _pair_kernel(
    num_experts: int,
    copies: int,
    early_next: bool,
    hidden: Any,
    weights: Any,
    shared: Any,
    choices: Choices,
    out: Any,
    scratch: Scratch,
) -> None:
    num_rows, num_pairs, num_routed = scratch.x.shape[1], choices.next.shape[0], weights.shape[0]

    def copy(expert: Any, column: Any, step: Any, slot: Any) -> None:
        landed, depth = scratch.landed.at[slot], pl.ds(step * DEPTH, DEPTH)
        rows = pl.ds(pl.multiple_of(expert * num_rows, ROWS), num_rows)
        plgpu.copy_gmem_to_smem(hidden.at[rows, depth], scratch.x.at[slot], landed)

        def routed() -> None:
            for part in range(PARTS):
                source = weights.at[expert, depth, pl.ds(column + part * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

        def of_shared() -> None:
            for part in range(PARTS):
                rows = pl.ds((expert - num_routed) * weights.shape[1] + step * DEPTH, DEPTH)
                source = shared[0].at[rows, pl.ds(column + part * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

        lax.cond(expert < num_routed, routed, of_shared) if shared else routed()

    def store(expert: Any, column: Any, results: list[Any]) -> None:
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (COLUMNS, num_rows), 1), plgpu.Layout.WGMMA)

        def store_pair(pair: Any) -> Any:
            following = choices.next[pair] if early_next else None
            own = row == lax.div(pair, copies)
            for part, result in enumerate(results):
                values = jnp.sum(jnp.where(own, result, jnp.zeros_like(result)), axis=1)
                out[pair, pl.ds(column + part * COLUMNS, COLUMNS)] = values.astype(out.dtype)
            return following if early_next else choices.next[pair]

        def routed() -> None:
            lax.while_loop(lambda pair: pair < num_pairs, store_pair, choices.first[expert])

        def of_shared() -> None:
            begin = padded_rows(num_pairs) + (expert - num_routed) * num_rows
            to = pl.ds(pl.multiple_of(begin, ROWS), num_rows)
            for part, result in enumerate(results):
                _store_all(result, out.at[to, pl.ds(column + part * COLUMNS, COLUMNS)], scratch)

        lax.cond(expert < num_routed, routed, of_shared) if shared else routed()

    tiles, width = weights.shape[2] // (PARTS * COLUMNS), PARTS * COLUMNS
    _run(num_experts, tiles, width, weights.shape[1] // DEPTH, copy, store, scratch)


def _store_all(result: Any, to: Any, scratch: Scratch) -> None:
    """Stores columns of all rows."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scratch.out.transpose((1, 0))[...] = result.astype(to.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out, to)


def _run(num_experts: int, tiles: int, width: int, steps: int, copy: Any, store: Any, scratch: Scratch, at_end: Any = None) -> None:
    """Goes through a program's tiles: `copy` brings operands of a step, `store` takes the products of a tile."""
    program, (stages, _, num_rows) = lax.axis_index("program"), (*scratch.weights.shape[:2], scratch.x.shape[1])
    own_items = lax.div(jnp.maximum(num_experts * tiles - program + (PROGRAMS - 1), 0), PROGRAMS)
    slots = Slots(scratch.landed, scratch.free, stages, steps)

    def item(number: Any) -> tuple[Any, Any]:
        """Expert, and first column of the results. Neighbouring programs take the columns of one expert."""
        index = program + number * PROGRAMS
        return lax.div(index, tiles), lax.rem(index, tiles) * width

    def copy_all() -> None:
        def copy_item(number: Any, _: None) -> None:
            expert, column = item(number)
            slots.fill(number, lambda slot, step: copy(expert, column, step, slot))

        lax.fori_loop(0, own_items, copy_item, None)
        if at_end is not None:
            at_end()
        slots.await_last(own_items)

    def compute_all() -> None:
        def multiply_item(number: Any, _: None) -> None:
            def multiply(*sums: Any) -> list[Any]:
                def products(slot: Any) -> None:
                    rows = scratch.x.at[slot].transpose((1, 0))
                    for part, total in enumerate(sums):
                        plgpu.wgmma(total, scratch.weights.at[slot, part].transpose((1, 0)), rows)
                    plgpu.wgmma_wait(PARTS)

                slots.empty(number, products)
                plgpu.wgmma_wait(0)
                return [total[...] for total in sums]

            results = pl.run_scoped(multiply, *[plgpu.ACC((COLUMNS, num_rows))] * PARTS)
            slots.free_last(number)
            store(*item(number), results)

        lax.fori_loop(0, own_items, multiply_item, None)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(lax.axis_index("warpgroup") == 0, compute_all, copy_all)
