"""Application of experts to the rows (tokens) of a step on one device.

Each row selects k experts, so T rows have T · k pairs (row, expert). `apply_experts` computes the result of each pair
and sums the results of each row by their weights. For few rows it uses a method that takes the pairs in any order
(`few_rows_method`). Otherwise it sorts the pairs by expert, so that each expert is applied to one contiguous group of
rows. The methods are in `expert_gemms`. GEMM1 is the gate and up projections of an expert, GEMM2 is the down
projection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import capability
from pallas_attn.models.decoder.layers import swiglu
from pallas_attn.models.moe.expert_gemms import (
    blockwise,
    hopper_all_experts,
    hopper_gather,
    hopper_grouped,
    hopper_grouped_pairs,
    hopper_supports,
    row_by_row,
)
from pallas_attn.models.moe.experts import Experts

MAX_COUNTED_PAIRS = 4096
"""Maximum number of pairs that are sorted by counting, which compares every pair with every pair twice: 2 · 17 million
comparisons for 4,096 pairs. XLA's sort takes six kernels instead."""

MAX_UNSPLIT_PAIRS = 1024
"""Maximum number of pairs that are multiplied without splitting them into chunks, on a device that has only some of the
experts of the layer."""

UNUSED_ROWS = 512
"""Number of result rows for pairs whose expert is on another device. Each of these pairs reads one of the rows, and
ignores the contents. A small number of rows stays in the L2 cache. A single row would be too few: all reads would go to
the same part of the cache, which took 676 us per layer on four H200s instead of about 60.
"""

MAX_FEW_ROWS = 64
"""Maximum number of rows for which a Hopper method for few rows takes any number of pairs, if the experts have the
SwiGLU activation and no biases. GEMM2 then multiplies the weights of an expert only by the results of this expert, at
most one per row. In other cases GEMM2 may multiply the weights by the results of all pairs, so a method for few rows
takes at most `gather_gemm.MAX_ROWS` pairs."""

MIN_PAIRS_PER_EXPERT = 3.5
"""Minimum average number of pairs per expert for which a kernel that reads the weights of all experts is used
(`hopper_all_experts`). This kernel also reads the weights of experts without a pair, but its GEMM1 can start before the
router has selected experts.

With 3.5 pairs per expert, 97% of the experts have a pair if all experts are equally likely. On an H100, reading all
experts makes steps of DeepSeek-V2-Lite 1.4% slower with 3 pairs per expert, and 1.9% faster with 3.75.
"""


def few_rows_method(
    num_rows: int, num_pairs: int, experts: Experts, *, expected: int | None = None, are_distinct: bool = False
) -> Callable[[Array, Experts, Int32[Array, "M"]], Float[Array, "M D"]] | None:
    """Return a method for few rows: a function (rows, experts, expert of each pair) -> result of each pair, which takes
    the pairs unsorted. Return None if there are too many rows or pairs, or the device is not a GPU.

    On an H100, the experts of a layer of DeepSeek-V2-Lite take 163 us for 30 pairs with `hopper_gather` and 196 us with
    `row_by_row`. For 96 pairs they take 301 us with `hopper_gather`, and 392 us with JAX's Pallas kernel `ragged_dot`.

    Args:
      num_rows, num_pairs: number of rows and of pairs.
      experts: weights of the experts on this device.
      expected: expected number of pairs whose expert is on this device; None if all experts are on this device.
      are_distinct: whether no two pairs have the same expert.
    """
    if capability().platform != "gpu":
        return None
    if hopper_supports(experts):
        from pallas_attn.models.moe.kernels import all_expert_gemm
        from pallas_attn.models.moe.kernels.gather_gemm import MAX_ROWS

        is_plain = experts.activation is swiglu and experts.gate_up_bias is None and experts.down_bias is None
        per_expert = num_rows <= MAX_FEW_ROWS and is_plain
        pairs_per_expert = (num_pairs if expected is None else expected) / experts.down.shape[0]
        reads_all = per_expert and pairs_per_expert >= MIN_PAIRS_PER_EXPERT
        if reads_all and all_expert_gemm.supports(experts.gate_up, experts.down):
            return hopper_all_experts
        if num_pairs <= MAX_ROWS or per_expert:
            return functools.partial(hopper_gather, are_distinct=True) if are_distinct else hopper_gather
    return row_by_row if num_pairs <= experts.gate_up.shape[0] else None


def apply_experts(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    expected: int | None = None,
) -> Float[Array, "T D"]:
    """Return for each row the sum of weight · expert(row) over its selected experts that are on this device.

    Args:
      x: rows.
      chosen: selected experts of each row, numbered from 0 to E - 1; E for an expert that is not on this device.
      weights: weight of each selected expert.
      experts: weights of the E experts on this device.
      expected: expected number of pairs whose expert is on this device; None if all experts are on this device. If a
        number is given, and there are more than `MAX_UNSPLIT_PAIRS` pairs, the pairs whose expert is on this device are
        multiplied in chunks of 1.25 times this number. Usually one chunk is enough.
    """
    num_experts, copies = experts.gate_up.shape[0], chosen.shape[1]
    num_pairs = chosen.size
    has_expert = None if expected is None else chosen < num_experts
    are_distinct = x.shape[0] == 1 and has_expert is None
    multiply_rows = few_rows_method(x.shape[0], num_pairs, experts, expected=expected, are_distinct=are_distinct)
    if multiply_rows is not None:
        y = multiply_rows(x, experts, chosen.reshape(-1))
        return weighted_sum(y, weights, x.dtype, has_expert)
    groups = ExpertGroups.of(chosen.reshape(-1), num_experts)
    on_hopper = hopper_supports(experts)
    multiply = hopper_grouped if on_hopper else blockwise
    source, place = groups.row // copies, groups.place
    chunk = num_pairs if expected is None or num_pairs <= MAX_UNSPLIT_PAIRS else -(-5 * expected // 4 // 64) * 64
    if chunk >= num_pairs:
        if on_hopper:
            own = jnp.arange(num_pairs, dtype=jnp.int32) // copies
            y, row = hopper_grouped_pairs(x, own, chosen.reshape(-1), place, experts, groups.sizes)
        else:
            y, row = multiply(x, source, experts, groups.sizes)
            row = row[place]
        return weighted_sum(y[row], weights, x.dtype, has_expert)
    # Pairs whose expert is on this device come first in the sorted order. Usually the first chunk has all of them. All
    # other pairs read an arbitrary row of the results, which `weighted_sum` ignores.
    ends = jnp.cumsum(groups.sizes)
    source = jnp.pad(source, (0, -num_pairs % chunk))
    place = jnp.where(place < ends[-1], place, place % min(chunk, UNUSED_ROWS))

    def one_chunk() -> Array:
        y, row = multiply(x, source[:chunk], experts, groups.sizes)
        return weighted_sum(y[row[place]], weights, x.dtype, has_expert)

    def several_chunks() -> Array:
        def multiply_chunk(i: ArrayLike, out: Array) -> Array:
            start = jnp.asarray(i, jnp.int32) * chunk
            own = jnp.diff(jnp.clip(ends - start, 0, chunk), prepend=jnp.zeros(1, jnp.int32))
            y, row = multiply(x, jax.lax.dynamic_slice_in_dim(source, start, chunk), experts, own)
            return jax.lax.dynamic_update_slice_in_dim(out, y[row], start, axis=0)

        empty = jnp.zeros((source.shape[0], experts.down.shape[2]), x.dtype)
        y = jax.lax.fori_loop(0, (ends[-1] + chunk - 1) // chunk, multiply_chunk, empty)
        return weighted_sum(y[place], weights, x.dtype, has_expert)

    return jax.lax.cond(ends[-1] <= chunk, one_chunk, several_chunks)


class ExpertGroups(NamedTuple):
    """Order of M (row, expert) pairs sorted by expert. Pairs with expert E (no expert on this device) come last.

    Attributes:
      row: index (in the unsorted order) of the pair at each place of the sorted order.
      place: place of each pair in the sorted order.
      sizes: number of pairs of each expert from 0 to E - 1.
    """

    row: Int32[Array, "M"]
    place: Int32[Array, "M"]
    sizes: Int32[Array, "E"]

    @staticmethod
    def of(expert: Int32[Array, "M"], num_experts: int) -> ExpertGroups:
        """Sort pairs by expert, stably. Up to `MAX_COUNTED_PAIRS` pairs are sorted by counting the pairs before each
        pair.

        Counting takes three kernels, including the sizes. Sorting twice takes seven, which is slow in decode steps,
        whose time depends on the number of small kernels.

        Args:
          expert: expert of each pair, from 0 to E.
          num_experts: E.
        """
        sizes = jnp.sum(expert[None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
        if expert.shape[0] > MAX_COUNTED_PAIRS:
            row = jnp.argsort(expert).astype(jnp.int32)
            return ExpertGroups(row, jnp.argsort(row).astype(jnp.int32), sizes)
        number = jnp.arange(expert.shape[0], dtype=jnp.int32)
        # Combined keys need one comparison instead of two (of experts, then of indices). Comparisons take most of the
        # time.
        key = expert * expert.shape[0] + number
        comes_after = key[None] < key[:, None]
        place = jnp.sum(comes_after, axis=1, dtype=jnp.int32)
        return ExpertGroups(jnp.sum(jnp.where(place[None] == number[:, None], number[None], 0), axis=1), place, sizes)


def weighted_sum(
    y: Float[Array, "M D"],
    weights: Float32[Array, "T k"],
    dtype: DTypeLike,
    counted: Bool[Array, "T k"] | None = None,
) -> Float[Array, "T D"]:
    """Return the weighted sum of the k results of each row, computed in float32.

    Args:
      y: result of each pair.
      weights: weight of each pair.
      dtype: dtype of the sums.
      counted: False for results that are ignored and may have any value; None if all count.
    """
    y = y.reshape(*weights.shape, -1).astype(jnp.float32)
    if counted is not None:
        y = jnp.where(counted[:, :, None], y, jnp.zeros_like(y))
    return jnp.sum(y * weights[:, :, None], axis=1).astype(dtype)


def sum_with_shared(
    y: Float[Array, "results D"], weights: Float32[Array, "T k"], dtype: DTypeLike
) -> Float[Array, "T D"]:
    """Return the weighted sum of the results of each row plus the results of shared experts. `y` has the format that
    `hopper_all_experts` returns with shared experts."""
    from pallas_attn.models.moe.kernels.pipeline import round_up

    num_rows, num_pairs = weights.shape[0], weights.size
    total = weighted_sum(y[:num_pairs], weights, jnp.float32)
    shared = y[round_up(num_pairs) :].reshape(-1, round_up(num_rows), y.shape[1])[:, :num_rows]
    return (total + jnp.sum(shared.astype(jnp.float32), axis=0)).astype(dtype)
