"""Choosing the highest scores of rows in Triton, exactly: a radix selection over the bits of float32.

A program takes a row and walks it five times. Numbers are compared as unsigned integers of 32 bits that are in the same
order: four walks count how often each value of 8 bits occurs, from the highest bits on, among those whose higher bits
are the ones sought, until the lowest score that is chosen is known to the bit. The fifth writes the positions of what
is above it, and of as many of its equals as are wanted, in order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.tiles import power_of_two

MOST_SCORES = 4096
"""Scores that a program takes at a time, 8 for each of up to 512 threads."""


def highest(scores: Float32[Array, "T K"], counts: Int32[Array, "T"] | None, top_k: int) -> Int32[Array, "T top_k"]:
    """Positions of each row's highest scores, as `select_top_k` gives them.

    Args:
      counts: of each row, how many scores it has, the others being undefined; None for all.
    """
    num_rows, width = scores.shape
    block = min(power_of_two(width, 256), MOST_SCORES)
    (chosen,) = launch(
        _choose,
        *(scores, counts),
        outputs=[jax.ShapeDtypeStruct((num_rows, top_k), jnp.int32)],
        grid=(num_rows,),
        constants={"WIDTH": width, "TOP_K": top_k, "BLOCK": block},
        num_warps=max(4, block // 256),
        bytes_accessed=4 * num_rows * (width + top_k),
    )
    return chosen


@kernel
def _choose(
    scores_ptr,  # [T, WIDTH]
    counts_ptr,  # [T] or None
    out_ptr,  # [T, TOP_K]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_ptr = scores_ptr + row * WIDTH, out_ptr + row * TOP_K
    end = WIDTH
    if counts_ptr is not None:
        end = tl.load(counts_ptr + row)

    # The least number chosen, from the highest digit on, and how many of its equals so far are wanted.
    least, wanted = tl.full([], 0, tl.uint32), TOP_K
    digits = tl.arange(0, 256)
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        found = tl.zeros([256], tl.int32)
        for start in range(0, end, BLOCK):
            number, held = _numbers(row_ptr, start, end, BLOCK)
            if digit:
                held = held & (((number ^ least) >> (shift + 8)) == 0)
            found += tl.histogram(((number >> shift) & 255).to(tl.int32), 256, held)
        total = tl.sum(found, 0)
        wanted = tl.minimum(wanted, total)
        or_above = total - tl.cumsum(found, 0) + found  # how many have this digit or a higher one
        sought = tl.maximum(tl.sum((or_above >= wanted).to(tl.int32), 0) - 1, 0)
        wanted -= tl.sum(tl.where(digits > sought, found, 0), 0)
        least |= sought.to(tl.uint32) << shift

    place = 0
    for start in range(0, end, BLOCK):
        number, held = _numbers(row_ptr, start, end, BLOCK)
        is_equal = held & (number == least)
        before = tl.cumsum(is_equal.to(tl.int32), 0)
        chosen = (held & (number > least)) | (is_equal & (before <= wanted))
        wanted -= tl.minimum(tl.sum(is_equal.to(tl.int32), 0), wanted)
        at = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out_ptr + at, start + tl.arange(0, BLOCK), mask=chosen)
        place += tl.sum(chosen.to(tl.int32), 0)
    for start in range(0, TOP_K, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= place) & (at < TOP_K))


@kernel
def _numbers(row_ptr, start, end, BLOCK: tl.constexpr):
    """Scores as unsigned integers in their order, and which may be chosen: those above -inf; NaN counts as +inf."""
    at = start + tl.arange(0, BLOCK)
    score = tl.load(row_ptr + at, mask=at < end, other=float("-inf"))
    score = tl.where(score == score, score, float("inf"))
    held = score > float("-inf")
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # zeros of either sign are equal
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True), held
