"""Gather GEMM on Hopper, for decode steps with few rows: computes (row, expert) pairs without sorting them by expert.

A row is the hidden vector of one token. A pair is a row and an expert that the router selected for it.

    Y[pair] = X[row of pair] @ W[expert of pair]                                        plain
    Y[pair] = silu(X[row] @ gate columns of W[expert]) · (X[row] @ up columns)          gated

Reading weights takes most of the time. The kernel reads the weights of each selected expert once and does not read the
other experts. It multiplies the weights of an expert with all rows of the step, because tensor cores compute eight rows
in the time of one, and 64 rows in less time than reading the weights takes. Each pair then stores its own row.

A layer calls the kernel twice. GEMM1 (gate and up) multiplies the rows of the step. GEMM2 (down) multiplies the results
of GEMM1. If there are few pairs, these results are stored per pair [pairs, N], and GEMM2 multiplies the weights of an
expert by the results of all pairs. Otherwise they are stored per expert [E, rows, N], and GEMM2 multiplies the weights
of an expert by the results of this expert. Results of rows that GEMM1 did not write are ignored.

The operands are swapped. Weight columns fill the 64 rows of a wgmma, so that few rows of X waste no tensor-core time:

    (W[:, 64 columns])ᵀ  [64, K]   @   Xᵀ  [K, rows]   ->   [64, rows]; a pair stores one of these columns

A work item is one expert and one or two blocks of 64 columns. With split-K, it is one expert, one block and half of K:

    for (expert, columns, half of K) in the work items of this CTA:
        for k in range(steps):
            producer: x[rows, k], W[expert, k, block] for each block  ->  stage
            consumer: accumulator[block] += W[expert, k, block]ᵀ @ x[rows, k]ᵀ
        consumer:     activate; for each pair of the expert: store its column of each accumulator as a row of Y

    barrier         arrives                        waits                                       arrivals per phase
    full[stage]     the TMA copies of the stage    consumer                                    1 + number of blocks
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
    activate,
    column_indices,
    first_dividing,
    num_ctas,
    persistent_kernel,
    round_up,
    run_warpgroups,
    take_column,
    wgmma_swap_ab,
)

COLUMNS = 64
"""Weight columns of a block: the rows of a wgmma."""

MAX_ROWS = 128
"""Maximum rows of x in a work item: the accumulators of two blocks then take 128 registers per thread."""

MAX_STAGES, OPERAND_BYTES = 8, 200 * 1024
"""Maximum number of pipeline stages, and maximum shared memory of all of them."""


class Pairs(NamedTuple):
    """(row, expert) pairs as one linked list per expert.

    E is the number of experts. A pair with expert E selects no expert, and is in no list. `next`, `first` and `count`
    are None if no two pairs have the same expert.

    Attributes:
      expert: expert of each pair.
      next: next pair with the same expert; P, the number of pairs, at the end of a list.
      first: first pair of each expert that has pairs, in ascending order. Entries from `count` on are unused.
      count: number of experts that have pairs, in an array of one element.
    """

    expert: Int32[Array, "P"]
    next: Int32[Array, "P"] | None = None
    first: Int32[Array, "P"] | None = None
    count: Int32[Array, "1"] | None = None

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Pairs:
        """Link pairs with the same expert. All pairs are compared with all pairs, which is fast for few pairs."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        same = expert[:, None] == expert[None]  # [P, P]
        following = jnp.min(jnp.where(same & (pair[None] > pair[:, None]), pair[None], len(pair)), axis=1)
        is_first = ~jnp.any(same & (pair[None] < pair[:, None]), axis=1) & (expert < num_experts)
        place = jnp.sum(is_first[None] & (pair[None] < pair[:, None]), axis=1, dtype=jnp.int32)
        first = jnp.sum(jnp.where(is_first[None] & (place[None] == pair[:, None]), pair[None], 0), axis=1)
        return Pairs(expert, following, first, jnp.sum(is_first, dtype=jnp.int32)[None])


class GatherGemm(NamedTuple):
    """Arguments of `gather_gemm`: GEMM1 of (row, expert) pairs, or GEMM2 of the results of GEMM1.

    Attributes:
      x: 16-bit dtype. GEMM1: the rows of the step, padded to `round_up(num_rows)`; pair p has row p // pairs_per_row.
        GEMM2: the output of GEMM1, in which rows that belong to no pair may be undefined.
      weights: weights of each expert. K is a multiple of 64, the columns as `column_blocks` requires.
      pairs: `Pairs.of(...)`, or `Pairs(expert)` if no two pairs have the same expert.
      num_rows: number of rows of the step. A row has each expert at most once.
      pairs_per_row: number of pairs of each row.
      second: whether this is GEMM2.
      per_expert: whether the results of GEMM1 are stored per expert [E, rows, N] instead of per pair.
      gated: compute silu(left half of the columns) · right half, N / 2 columns. Otherwise compute all N columns.
      split_k: split K in two halves, so that few pairs give more work items. The halves are returned separately.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "E K N"]
    pairs: Pairs
    num_rows: int
    pairs_per_row: int
    second: bool = False
    per_expert: bool = False
    gated: bool = False
    split_k: bool = False

    @property
    def num_results(self) -> int:
        """Number of rows of the output."""
        if self.per_expert and not self.second:
            return self.weights.shape[0] * round_up(self.num_rows)
        return round_up(self.pairs.expert.shape[0])


def column_blocks(columns: int, *, gated: bool) -> int:
    """Return the number of blocks of 64 columns in a work item.

    Raises:
      NotImplementedError: `columns` is not a multiple of 128 if gated, or of 64 otherwise.
    """
    return first_dividing(((1, 2),) if gated else ((1, 2), (1, 1)), columns, COLUMNS, gated=gated)[1]


def split_k_helps(num_pairs: int, shape: tuple[int, ...], are_distinct: bool) -> bool:
    """Return whether GEMM2 finishes earlier if work items take half of K and 64 columns instead of K and 128 columns.

    The busiest CTA determines the time: its number of work items times the size of an item.

    Args:
      num_pairs: number of pairs.
      shape: (K, N) of the weights.
      are_distinct: whether no two pairs have the same expert.
    """
    depth, columns = shape
    if not are_distinct or depth % (2 * DEPTH) or columns % (2 * COLUMNS):
        return False
    items, ctas = num_pairs * (columns // (2 * COLUMNS)), num_ctas()
    return -(-4 * items // ctas) < 4 * -(-items // ctas)


def gather_gemm(call: GatherGemm) -> Float[Array, "*halves results N_out"]:
    """Multiply the row of each pair with the weights of its expert, accumulating in float32.

    Returns:
      Results in the dtype of `call.x`. GEMM1: the input of GEMM2. GEMM2: one row per pair, padded to a multiple of 8
      rows; with split-K [2, results, N_out] in float32, to be added up. Rows without a pair, and rows of pairs without
      an expert, are undefined.

    Raises:
      NotImplementedError: unsupported number of columns, more than `MAX_ROWS` rows, or unsupported split-K.
    """
    x, weights, columns = call.x, call.weights, call.weights.shape[2]
    num_rows = round_up(call.num_rows) if call.per_expert else x.shape[0]
    if num_rows > MAX_ROWS:
        raise NotImplementedError(f"expected at most {MAX_ROWS} rows, got {num_rows}")
    if call.split_k and (call.gated or weights.shape[1] % (2 * DEPTH)):
        raise NotImplementedError(f"split_k: expected gated=False and K divisible by 128, got K={weights.shape[1]}")
    blocks = 1 if call.split_k else column_blocks(columns, gated=call.gated)
    scratch = Scratch.types(
        x.dtype,
        num_stages=min(MAX_STAGES, OPERAND_BYTES // ((blocks * COLUMNS + num_rows) * DEPTH * x.dtype.itemsize)),
        num_consumers=1,
        rows=num_rows,
        weight_tiles=(blocks,),
        columns=COLUMNS,
        out=None,
    )
    shape = call.num_results, columns // 2 if call.gated else columns
    out_type = jax.ShapeDtypeStruct((2, *shape), jnp.float32) if call.split_k else jax.ShapeDtypeStruct(shape, x.dtype)
    static = round_up(call.num_rows), call.pairs_per_row, call.second, call.per_expert, call.gated
    return persistent_kernel(
        functools.partial(_kernel, *static), out_type, scratch, num_consumers=1, name="gather_gemm"
    )(x, weights, call.pairs)


def _kernel(
    expert_rows: int,
    pairs_per_row: int,
    second: bool,
    per_expert: bool,
    gated: bool,
    x: Any,
    weights: Any,
    pairs: Pairs,
    out: Any,
    scratch: Scratch,
) -> None:
    num_stages, blocks = scratch.weights.shape[:2]
    k_parts, tile_rows, num_pairs = len(out.shape) - 1, scratch.x.shape[1], pairs.expert.shape[0]
    steps = weights.shape[1] // DEPTH // k_parts
    column_tiles = out.shape[-1] // (COLUMNS if gated else blocks * COLUMNS)
    num_experts = num_pairs if pairs.count is None else pairs.count[0]
    items = Items.of_cta(num_experts * column_tiles * k_parts)
    ring = Ring(scratch.full, scratch.empty, num_stages, steps)

    def k_part_of(number: Any) -> Any:
        """Part of K of a work item: 0, or 1 with split-K."""
        return lax.rem(items.global_index(number), k_parts)

    def tile_of(number: Any) -> tuple[Any, Any, Any]:
        """Expert of a work item, first pair of the expert, and first column of the output."""
        index = lax.div(items.global_index(number), k_parts)
        place, width = lax.div(index, column_tiles), COLUMNS if gated else blocks * COLUMNS
        first = place if pairs.first is None else pairs.first[place]
        return pairs.expert[first], first, lax.rem(index, column_tiles) * width

    def first_row_of(expert: Any) -> Any:
        """First row of an expert in the results of GEMM1."""
        return pl.multiple_of(expert * expert_rows, ROW_ALIGNMENT) if per_expert else 0

    def copies(number: Any) -> Any:
        expert, _, column = tile_of(number)
        rows = pl.ds(first_row_of(expert) if second else 0, tile_rows)
        firsts = [column + block * (out.shape[-1] if gated else COLUMNS) for block in range(blocks)]

        def copy(stage: Any, step: Any) -> None:
            full, depth = scratch.full.at[stage], pl.ds((k_part_of(number) * steps + step) * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[rows, depth], scratch.x.at[stage], full)
            for block, first in enumerate(firsts):
                source = weights.at[expert, depth, pl.ds(first, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[stage, block], full)

        return copy

    def start_wgmma(accumulator: Any, stage: Any, block: int) -> None:
        wgmma_swap_ab(accumulator, scratch.weights.at[stage, block], scratch.x.at[stage])

    def compute(number: Any) -> None:
        expert, first, column = tile_of(number)
        target = out.at[k_part_of(number)] if k_parts == 2 else out  # [results, N_out]
        accumulators = ring.multiply(number, (COLUMNS, tile_rows), blocks, start_wgmma)
        ring.release_last(number)
        results = activate(accumulators, gated=gated)  # each [COLUMNS, tile_rows]
        columns = column_indices((COLUMNS, tile_rows))
        first_row = first_row_of(expert)

        def store(pair: Any) -> Any:
            """Store the results of a pair, and return the next pair of the expert."""
            row = lax.div(pair, pairs_per_row) if per_expert or not second else pair
            out_row = first_row + lax.div(pair, pairs_per_row) if per_expert and not second else pair
            for block, result in enumerate(results):
                values = take_column(result, columns, row)  # [COLUMNS]
                target[out_row, pl.ds(column + block * COLUMNS, COLUMNS)] = values.astype(out.dtype)
            return None if pairs.next is None else pairs.next[pair]

        if pairs.next is None:
            store(first)
        else:
            lax.while_loop(lambda pair: pair < num_pairs, store, first)

    is_consumer = lax.axis_index("warpgroup") == 0
    run_warpgroups(ring, items, copies, compute, is_consumer=is_consumer, num_consumers=1, stores_by_tma=False)
