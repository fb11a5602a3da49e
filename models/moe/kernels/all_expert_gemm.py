"""All-expert GEMM on Hopper, for decode steps in which nearly every routed expert is selected by some row.

A row is the hidden vector of one token. A pair is a row and a routed expert that the router selected for it.

    GEMM1: hidden[expert, row] = silu(X[row] @ gate columns) · (X[row] @ up columns)    for all experts and all rows
    GEMM2: Y[pair]             = hidden[expert of pair, row of pair] @ W[expert]        for each selected pair
           Y[shared, row]      = hidden[shared, row] @ W[shared]                        for shared experts and all rows

GEMM1 does not depend on the router, so the router runs concurrently with it. Reading weights takes most of the time;
the kernel reads them once for all rows. Both GEMMs multiply every row with every expert. GEMM2 stores only the results
of pairs. A shared expert that is S times as wide as a routed expert is computed as S more experts.

The operands are swapped. Weight columns fill the 64 rows of a wgmma, so that few rows of X waste no tensor-core time:

    (W[:, 64 columns])ᵀ  [64, K]   @   Xᵀ  [K, rows]   ->   [64, rows]

A work item is one expert and two blocks of 64 weight columns; in GEMM1 a gate block and an up block:

    for (expert, columns) in the work items of this CTA:
        for k in range(K / DEPTH):
            producer: x[rows, k], W[expert, k, block] for each block  ->  stage
            consumer: accumulator[block] += W[expert, k, block]ᵀ @ x[rows, k]ᵀ
        consumer:     GEMM1, and shared experts in GEMM2: store the transposed tile by TMA
                      routed experts in GEMM2: for each pair of the expert: store its column as a row of Y

    barrier         arrives                        waits                                       arrivals per phase
    full[stage]     the TMA copies of the stage    consumer                                    1 + BLOCKS
    empty[stage]    consumer                       producer, from the second use of a stage    1

Deadlock freedom: as for every kernel of `pipeline.py`.
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

from pallas_attn.models.moe.kernels.pipeline import (
    DEPTH,
    ROW_ALIGNMENT,
    Items,
    Ring,
    Scratch,
    column_indices,
    persistent_kernel,
    round_up,
    run_warpgroups,
    silu,
    take_column,
    wgmma_swap_ab,
    write_out_tile,
)

COLUMNS, BLOCKS = 64, 2
"""Weight columns of a block, and blocks of a work item."""

STAGES = 4
"""Pipeline stages. Their 64 KB of weights per multiprocessor saturate the memory: on an H100, a step of 64 rows takes
1% longer with six stages and 5% longer with three."""


class Chains(NamedTuple):
    """(row, expert) pairs as one linked list per expert.

    E is the number of routed experts, P the number of pairs. A pair with expert E selects no expert, and is in no list.

    Attributes:
      first: first pair of each expert; P for an expert without pairs.
      next: next pair with the same expert; P at the end of a list.
    """

    first: Int32[Array, "E"]
    next: Int32[Array, "P"]

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Chains:
        """Link pairs with the same expert. All pairs are compared with all pairs, which is fast for few pairs."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        is_own = expert[None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None]  # [E, P]
        is_later = (expert[:, None] == expert[None]) & (pair[None] > pair[:, None])  # [P, P]
        return Chains(*(jnp.min(jnp.where(own, pair[None], len(pair)), axis=1) for own in (is_own, is_later)))


class AllExpertGemm(NamedTuple):
    """Arguments of `all_expert_gemm`: GEMM1 of the rows of a step, or GEMM2 of the results of GEMM1.

    Attributes:
      x: 16-bit dtype. GEMM1: the rows of the step, padded to `num_rows`. GEMM2: the output of GEMM1.
      weights: weights of each routed expert. In GEMM1 the first half of the columns are gate columns. K is a multiple
        of 64, N is a multiple of 128.
      shared: weights of all shared experts in one array; None if the layer has none. GEMM1: the columns of the experts
        are next to each other, all gate columns in the first half. GEMM2: the rows of the experts follow each other.
      num_rows: number of rows that each expert multiplies: the rows of the step, rounded up to a multiple of 8.
      chains: pairs of each expert in GEMM2; None in GEMM1.
      pairs_per_row: number of pairs of each row, used in GEMM2.
    """

    x: Float[Array, "rows K"]
    weights: Float[Array, "E K N"]
    shared: Float[Array, "shared_K shared_N"] | None
    num_rows: int
    chains: Chains | None = None
    pairs_per_row: int = 1

    @property
    def num_experts(self) -> int:
        """Number of routed and shared experts. Shared experts count as (their joined width) / (width of a routed
        expert)."""
        routed = self.weights.shape[0]
        return routed if self.shared is None else routed + self.shared.size * routed // self.weights.size


def supports(gate_up: Float[Array, "E D F2"], down: Float[Array, "E F D"]) -> bool:
    """Return whether the kernel supports these weights: their numbers of columns must be multiples of 128."""
    return gate_up.shape[2] % (BLOCKS * COLUMNS) == 0 and down.shape[2] % (BLOCKS * COLUMNS) == 0


def all_expert_gemm(call: AllExpertGemm) -> Float[Array, "results N_out"]:
    """Multiply rows with the weights of all experts, accumulating in float32.

    Returns:
      Results in the dtype of `call.x`. GEMM1: all rows of each routed expert, then all rows of each shared expert.
      GEMM2: one row per pair, padded to a multiple of 8 rows, then all rows of each shared expert. The caller adds up
      the results of each token. Padding rows, and rows of pairs without an expert, are undefined.
    """
    x, weights, columns, second = call.x, call.weights, call.weights.shape[2], call.chains is not None
    num_shared = call.num_experts - weights.shape[0]
    results = call.num_experts * call.num_rows
    if call.chains is not None:
        results = round_up(call.chains.next.shape[0]) + num_shared * call.num_rows
    scratch = Scratch.types(
        x.dtype,
        num_stages=STAGES,
        num_consumers=1,
        rows=call.num_rows,
        weight_tiles=(BLOCKS,),
        columns=COLUMNS,
        out=(call.num_rows, COLUMNS),
    )
    return persistent_kernel(
        functools.partial(_kernel, call.num_experts, call.pairs_per_row),
        jax.ShapeDtypeStruct((results, columns if second else columns // 2), x.dtype),
        scratch,
        num_consumers=1,
        name="all_expert_gemm",
    )(x, weights, call.shared, call.chains)


def _kernel(
    num_experts: int,
    pairs_per_row: int,
    x: Any,
    weights: Any,
    shared: Any,
    chains: Chains | None,
    out: Any,
    scratch: Scratch,
) -> None:
    num_rows = scratch.x.shape[1]
    (num_routed, depth, _), width = weights.shape, out.shape[1]
    item_width = COLUMNS if chains is None else BLOCKS * COLUMNS  # output columns of a work item
    column_tiles = width // item_width
    items = Items.of_cta(num_experts * column_tiles)
    ring = Ring(scratch.full, scratch.empty, STAGES, depth // DEPTH)

    def tile_of(number: Any) -> tuple[Any, Any]:
        """Expert of a work item, and first column of the output."""
        index = items.global_index(number)
        return lax.div(index, column_tiles), lax.rem(index, column_tiles) * item_width

    def rows_of(expert: Any) -> Any:
        """Rows of an expert in the results of GEMM1."""
        return pl.ds(pl.multiple_of(expert * num_rows, ROW_ALIGNMENT), num_rows)

    def copies(number: Any) -> Any:
        expert, column = tile_of(number)
        rows = pl.ds(0, num_rows) if chains is None else rows_of(expert)

        def copy(stage: Any, step: Any) -> None:
            full, own_depth = scratch.full.at[stage], pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[rows, own_depth], scratch.x.at[stage], full)

            def copy_weights(source: Any, depth: Any, first: Any, between: int) -> None:
                """Copy blocks of `source` [K, N]. The first columns of two blocks are `between` columns apart."""
                for block in range(BLOCKS):
                    columns = pl.ds(first + block * between, COLUMNS)
                    plgpu.copy_gmem_to_smem(source.at[depth, columns], scratch.weights.at[stage, block], full)

            def copy_routed() -> None:
                copy_weights(weights.at[expert], own_depth, column, width if chains is None else COLUMNS)

            def copy_shared() -> None:
                index = expert - num_routed
                if chains is None:
                    copy_weights(shared, own_depth, index * width + column, shared.shape[1] // 2)
                else:
                    copy_weights(shared, pl.ds(index * depth + step * DEPTH, DEPTH), column, COLUMNS)

            copy_routed() if shared is None else lax.cond(expert < num_routed, copy_routed, copy_shared)

        return copy

    def store_tile(result: Any, rows: Any, column: Any) -> None:
        """Store a result [COLUMNS, num_rows] as its transpose."""
        write_out_tile(scratch.out.transpose((1, 0)), result.astype(out.dtype))
        plgpu.copy_smem_to_gmem(scratch.out, out.at[rows, pl.ds(column, COLUMNS)])

    def store_pairs(chains: Chains, expert: Any, column: Any, results: list[Any]) -> None:
        columns = column_indices((COLUMNS, num_rows))

        def store(pair: Any) -> Any:
            following = chains.next[pair]  # loaded before the stores, which hide its latency
            for block, result in enumerate(results):
                values = take_column(result, columns, lax.div(pair, pairs_per_row))  # [COLUMNS]
                out[pair, pl.ds(column + block * COLUMNS, COLUMNS)] = values.astype(out.dtype)
            return following

        lax.while_loop(lambda pair: pair < chains.next.shape[0], store, chains.first[expert])

    def store_shared(chains: Chains, expert: Any, column: Any, results: list[Any]) -> None:
        start = round_up(chains.next.shape[0]) + (expert - num_routed) * num_rows
        for block, result in enumerate(results):
            rows = pl.ds(pl.multiple_of(start, ROW_ALIGNMENT), num_rows)
            store_tile(result, rows, column + block * COLUMNS)

    def store(expert: Any, column: Any, results: list[Any]) -> None:
        if chains is None:
            gate, up = results
            store_tile(silu(gate) * up, rows_of(expert), column)
        elif shared is None:
            store_pairs(chains, expert, column, results)
        else:
            stores = (functools.partial(f, chains, expert, column, results) for f in (store_pairs, store_shared))
            lax.cond(expert < num_routed, *stores)

    def start_wgmma(accumulator: Any, stage: Any, block: int) -> None:
        wgmma_swap_ab(accumulator, scratch.weights.at[stage, block], scratch.x.at[stage])

    def compute(number: Any) -> None:
        results = ring.multiply(number, (COLUMNS, num_rows), BLOCKS, start_wgmma)  # each [COLUMNS, num_rows]
        ring.release_last(number)
        store(*tile_of(number), results)

    is_consumer = lax.axis_index("warpgroup") == 0
    run_warpgroups(ring, items, copies, compute, is_consumer=is_consumer, num_consumers=1, stores_by_tma=True)
