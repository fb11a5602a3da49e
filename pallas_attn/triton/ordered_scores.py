"""Ordered scores: float32 scores as unsigned integers that compare in the same order, for exact top-k selection.

A bin contains the ordered scores with equal leading 12 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCORE_BINS, BIN_SHIFT = tl.constexpr(4096), tl.constexpr(20)
"""Number of bins (2**12), and number of bits of an ordered score below the bin's 12 bits."""


@triton.jit
def ordered_score(score):
    """Map float32 scores to uint32 numbers that compare in the same order.

    0 and -0 get the same number, NaN the number of +inf, and -inf the number 0. All numbers of other scores are above
    0.
    """
    score = tl.where(score == score, score, float("inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    number = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), number, 0).to(tl.uint32)


@triton.jit
def score_bin(number):
    """Return the bin of an ordered score, its leading 12 bits, as int32."""
    return (number >> BIN_SHIFT).to(tl.int32)


@triton.jit
def count_scores(bins_ptr, row, number):
    """Count the ordered scores `number` of a row in bins_ptr [rows, SCORE_BINS]. Scores of -inf are not counted."""
    tl.atomic_add(bins_ptr + row * SCORE_BINS + score_bin(number), 1, mask=number > 0, sem="relaxed")


@triton.jit
def store_chosen(out_ptr, position, number, least, equals, above_before, equal_before):
    """Append the positions of the chosen scores to a row of the result, in order of position.

    A score is chosen if it is above `least`, or if it equals `least` and fewer than `equals` earlier scores of the row
    equal `least`.

    Args:
      out_ptr: the row of the result, int32.
      position, number: [scores], positions and ordered scores of consecutive scores; fewer than 2**15.
      least, equals: scalars, see above.
      above_before, equal_before: numbers of scores of the row before the first of these scores that are above `least`,
        and that equal `least`.

    Returns:
      Two int32 [scores] arrays: for each score, how often a score is above `least`, and equal to `least`, among this
      score and all earlier scores of the row.
    """
    is_above, is_equal = number > least, number == least
    # One cumulative sum counts both: the low 16 bits count scores above `least`, the high 16 bits count equal scores.
    # The high bits of an int32 are signed, so they can count up to 2**15 - 1.
    counted = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), 0)
    above, equal = above_before + (counted & 0xFFFF), equal_before + (counted >> 16)
    chosen = is_above | (is_equal & (equal <= equals))
    tl.store(out_ptr + above + tl.minimum(equal, equals) - 1, position, mask=chosen)
    return above, equal
