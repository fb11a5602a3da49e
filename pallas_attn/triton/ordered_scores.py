"""Scores as unsigned integers of the same order, and writing the positions of the highest scores."""

from __future__ import annotations

import triton
import triton.language as tl

SCORE_BINS, BIN_SHIFT = tl.constexpr(4096), tl.constexpr(20)
"""Number of bins, which are the leading 12 bits of an ordered score, and number of bits below them."""


@triton.jit
def ordered_score(score):
    """Map float32 scores to uint32 in the same order.

    Zeros of both signs are equal, NaN counts as +inf, and -inf becomes 0. Every other score is positive.
    """
    score = tl.where(score == score, score, float("inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    number = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), number, 0).to(tl.uint32)


@triton.jit
def score_bin(number):
    """Bin of an ordered score: its leading 12 bits."""
    return (number >> BIN_SHIFT).to(tl.int32)


@triton.jit
def count_scores(bins_ptr, row, number):
    """Add ordered scores of a row to the row's bin counts [SCORE_BINS]. Scores of -inf are not counted."""
    tl.atomic_add(bins_ptr + row * SCORE_BINS + score_bin(number), 1, mask=number > 0, sem="relaxed")


@triton.jit
def store_chosen(out_ptr, position, number, least, equals, above_before, equal_before):
    """Append the positions of the chosen scores to a row of the result, in order of position.

    A score is chosen if it is above `least`, or one of the first `equals` scores of the row that are equal to `least`.

    Args:
      position, number: [scores], positions and ordered scores; at most 2**15 scores.
      above_before, equal_before: number of earlier scores of the row above `least`, and equal to it.

    Returns:
      above_before and equal_before after each score [scores].
    """
    is_above, is_equal = number > least, number == least
    # One cumulative sum counts both: the low 16 bits count scores above, the high 16 bits count equal scores.
    counted = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), 0)
    above, equal = above_before + (counted & 0xFFFF), equal_before + (counted >> 16)
    chosen = is_above | (is_equal & (equal <= equals))
    tl.store(out_ptr + above + tl.minimum(equal, equals) - 1, position, mask=chosen)
    return above, equal
