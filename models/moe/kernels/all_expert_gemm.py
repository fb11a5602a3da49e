"""Products of few rows with every expert of a mixture, shared ones among them, on Hopper: decode steps in which nearly
every routed expert has a row.

    hidden[expert, row] = silu(X[row] @ gate columns) · (X[row] @ up columns)        every row, whoever chose the expert
    Y[pair]             = hidden[expert of pair, row of pair] @ W[expert]            and of shared experts every row

The first product does not know who chose whom, so it need not wait for the router: that and the choice run beside it.
Weights are what takes time, and they are read once for all rows; what the first product makes of rows that did not
choose an expert nobody looks at. A shared expert as wide as several routed ones is so many more. Weights are the left
operand, so that rows may be few, and a program takes two times 64 columns of one expert at a time:

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

from models.moe.kernels.grouped_gemm import PROGRAMS, Slots, operand_type, silu

COLUMNS, DEPTH, PARTS = 64, 64, 2
ROWS = 8
"""Rows are multiplied in multiples of this many."""

STAGES = 4
"""Slots of shared memory. Their 64 KB of weights on each multiprocessor are as much as memory needs to be asked for. A
step of 64 rows takes 1% longer with six and 5% with three (H100; benchmarks/log/117)."""


class Chains(NamedTuple):
    """Pairs of a row and an expert, those of an expert in a chain. Pairs with an expert one past the last are in none.

    Attributes:
      first: first pair of each expert; the number of pairs for one that has none.
      next: for each pair the next one with its expert; the number of pairs for the last.
    """

    first: Int32[Array, "E"]
    next: Int32[Array, "P"]

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Chains:
        """Finds pairs that share an expert by comparing all with all: there are few."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        is_own = expert[None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None]
        is_later = (expert[:, None] == expert[None]) & (pair[None] > pair[:, None])
        return Chains(*(jnp.min(jnp.where(own, pair[None], len(pair)), axis=1) for own in (is_own, is_later)))


class FullProduct(NamedTuple):
    """A call of `full_product`, the first product of a step's rows with all experts or, of its results, the second one.

    Attributes:
      x: 16 bits. Of the first product the rows, `padded_rows(...)` of them; of the second what the first returned.
      weights: of each routed expert, gates in the first half of the columns of the first ones. K and the columns are
        multiples of 64 and 128.
      shared: those of the shared experts joined: the first ones side by side, all gates in the first half of the
        columns, the second ones one below the other. None if there are none.
      num_rows: rows of each expert, `padded_rows(...)`.
      chains: of the second product; None of the first.
      copies: pairs of each row, in the second product.
    """

    x: Float[Array, "rows K"]
    weights: Float[Array, "E K N"]
    shared: Float[Array, "shared_K shared_N"] | None
    num_rows: int
    chains: Chains | None = None
    copies: int = 1

    @property
    def num_experts(self) -> int:
        """Routed and shared ones, each as wide as a routed one."""
        routed = self.weights.shape[0]
        return routed if self.shared is None else routed + self.shared.size * routed // self.weights.size


def padded_rows(num_rows: int) -> int:
    """Rows that operands and results have for so many."""
    return -(-num_rows // ROWS) * ROWS


def takes(gate_up: Float[Array, "E D F2"], down: Float[Array, "E F D"]) -> bool:
    """Whether programs' columns divide those of these weights."""
    return gate_up.shape[2] % (PARTS * COLUMNS) == 0 and down.shape[2] % (PARTS * COLUMNS) == 0


def full_product(call: FullProduct) -> Float[Array, "results N_out"]:
    """Multiplies rows with the weights of all experts, in float32.

    Returns:
      Of `call.x`'s dtype. The first product: all rows of each routed expert, then of each shared one. The second one:
      the pairs, padded to a multiple of 8, then all rows of each shared expert, whose sum is meant. Those of pairs
      without an expert, and of padding, hold anything.
    """
    x, weights, columns, second = call.x, call.weights, call.weights.shape[2], call.chains is not None
    num_shared = call.num_experts - weights.shape[0]
    results = call.num_experts * call.num_rows
    if call.chains is not None:
        results = padded_rows(call.chains.next.shape[0]) + num_shared * call.num_rows
    operand = functools.partial(operand_type, dtype=x.dtype)
    scratch = FullScratch(
        x=operand((STAGES, call.num_rows, DEPTH)),
        weights=operand((STAGES, PARTS, DEPTH, COLUMNS)),
        out=operand((call.num_rows, COLUMNS)),
        landed=plgpu.Barrier(num_arrivals=1 + PARTS, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
    )
    return plgpu.kernel(
        functools.partial(_kernel, call.num_experts, call.copies),
        out_type=jax.ShapeDtypeStruct((results, columns if second else columns // 2), x.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name="full_product",
    )(x, weights, call.shared, call.chains)


class FullScratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    out: Any
    landed: Any
    free: Any


def _kernel(
    num_experts: int,
    copies: int,
    x: Any,
    weights: Any,
    shared: Any,
    chains: Chains | None,
    out: Any,
    scratch: FullScratch,
) -> None:
    program, num_rows = lax.axis_index("program"), scratch.x.shape[1]
    (num_routed, depth, _), width = weights.shape, out.shape[1]
    steps, stride = depth // DEPTH, COLUMNS if chains is None else PARTS * COLUMNS
    tiles = width // stride
    own_items = lax.div(jnp.maximum(num_experts * tiles - program + (PROGRAMS - 1), 0), PROGRAMS)
    slots = Slots(scratch.landed, scratch.free, STAGES, steps)

    def item(number: Any) -> tuple[Any, Any]:
        """Its expert, and the first column of the result."""
        index = program + number * PROGRAMS
        return lax.div(index, tiles), lax.rem(index, tiles) * stride

    def rows_of(expert: Any) -> Any:
        """Rows of the first product's results that an expert has."""
        return pl.ds(pl.multiple_of(expert * num_rows, ROWS), num_rows)

    def copy_all() -> None:
        def copy_item(number: Any, _: None) -> None:
            expert, column = item(number)
            rows = pl.ds(0, num_rows) if chains is None else rows_of(expert)

            def copy(slot: Any, step: Any) -> None:
                landed, own_depth = scratch.landed.at[slot], pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x.at[rows, own_depth], scratch.x.at[slot], landed)

                def copy_weights(source: Any, depth: Any, first: Any, between: int) -> None:
                    for part in range(PARTS):
                        columns = pl.ds(first + part * between, COLUMNS)
                        plgpu.copy_gmem_to_smem(source.at[depth, columns], scratch.weights.at[slot, part], landed)

                def copy_routed() -> None:
                    copy_weights(weights.at[expert], own_depth, column, width if chains is None else COLUMNS)

                def copy_shared() -> None:
                    before = expert - num_routed
                    if chains is None:
                        copy_weights(shared, own_depth, before * width + column, shared.shape[1] // 2)
                    else:
                        copy_weights(shared, pl.ds(before * depth + step * DEPTH, DEPTH), column, COLUMNS)

                copy_routed() if shared is None else lax.cond(expert < num_routed, copy_routed, copy_shared)

            slots.fill(number, copy)

        lax.fori_loop(0, own_items, copy_item, None)
        slots.await_last(own_items)

    def store_rows(result: Any, rows: Any, column: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.out.transpose((1, 0))[...] = result.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out, out.at[rows, pl.ds(column, COLUMNS)])

    def store_pairs(chains: Chains, expert: Any, column: Any, results: list[Any]) -> None:
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (COLUMNS, num_rows), 1), plgpu.Layout.WGMMA)

        def store(pair: Any) -> Any:
            following = chains.next[pair]  # arrives while this one is stored
            for part, result in enumerate(results):
                own = jnp.where(row == lax.div(pair, copies), result, jnp.zeros_like(result))
                out[pair, pl.ds(column + part * COLUMNS, COLUMNS)] = jnp.sum(own, axis=1).astype(out.dtype)
            return following

        lax.while_loop(lambda pair: pair < chains.next.shape[0], store, chains.first[expert])

    def store_shared(chains: Chains, expert: Any, column: Any, results: list[Any]) -> None:
        begin = padded_rows(chains.next.shape[0]) + (expert - num_routed) * num_rows
        for part, result in enumerate(results):
            rows = pl.ds(pl.multiple_of(begin, ROWS), num_rows)
            store_rows(result, rows, column + part * COLUMNS)

    def store(expert: Any, column: Any, results: list[Any]) -> None:
        if chains is None:
            gate, up = results
            store_rows(silu(gate) * up, rows_of(expert), column)
        elif shared is None:
            store_pairs(chains, expert, column, results)
        else:
            ways = (functools.partial(way, chains, expert, column, results) for way in (store_pairs, store_shared))
            lax.cond(expert < num_routed, *ways)

    def start_product(total: Any, slot: Any, part: int) -> None:
        own = scratch.weights.at[slot, part].transpose((1, 0))
        plgpu.wgmma(total, own, scratch.x.at[slot].transpose((1, 0)))

    def compute_all() -> None:
        def multiply_item(number: Any, _: None) -> None:
            results = slots.multiply(number, (COLUMNS, num_rows), PARTS, start_product)
            slots.free_last(number)
            store(*item(number), results)

        lax.fori_loop(0, own_items, multiply_item, None)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(lax.axis_index("warpgroup") == 0, compute_all, copy_all)
