"""Online softmax: device functions that update, merge and normalise attention states.

The state of a query row consists of:

    top      float32, the largest score so far, before multiplication by SCALE; -inf before the first visible key
    total    float32, sum over keys of 2**((score - top) * SCALE * log2(e))
    acc      float32 [columns], sum over keys of 2**((score - top) * SCALE * log2(e)) * value

SCALE is the softmax scale, or 1 if the scores are scaled already. The maximum is subtracted before the multiplication,
so the key with the largest score has weight 1 at any magnitude. 2**(score * c - top * c) would save one instruction per
score. But a multiply-add rounds only once, and `top * c` is rounded separately. From 2**31 on, half a unit in the last
place of `top * c` is 128 or more, and the weight of every key would be 0 or infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(top):
    """Return `top` with -inf replaced by 0, so that subtracting it from -inf does not give NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def softmax_step(scores, top, total, SCALE: tl.constexpr):
    """Update a softmax state with scores [rows, tokens].

    Args:
      scores: -inf where the key is not visible.
      top: [rows], largest score so far.
      total: [rows], sum of weights.
      SCALE: softmax scale if `scores` are not scaled yet, else 1; positive.

    Returns:
      The new top and total, the factor [rows] for the previous accumulator, and the weights [rows, tokens].
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = finite_or_zero(new_top)
    keep = tl.exp2((top - shift) * (SCALE * LOG2E))
    weights = tl.exp2((scores - shift[:, None]) * (SCALE * LOG2E))
    return new_top, total * keep + tl.sum(weights, 1), keep, weights


SMALLEST_UNIT = tl.constexpr(1e-30)
"""Initial unit of `weights_in_units`."""


@triton.jit
def weights_in_units(weights, keep, unit):
    """Divide weights by the largest weight of their row, so that float16 can represent weights times value scales.

    Args:
      weights: [rows, tokens], times the scales of the values.
      keep: [rows], factor for the previous accumulator.
      unit: [rows], factor that converts the accumulator to true values; initially `SMALLEST_UNIT`.

    Returns:
      New weights, keep and unit.
    """
    new_unit = tl.maximum(unit * keep, tl.maximum(tl.max(weights, 1), SMALLEST_UNIT))
    inverse = 1.0 / new_unit
    return weights * inverse[:, None], unit * keep * inverse, new_unit


@triton.jit
def bfloat16_parts(x):
    """Split float32 into two bfloat16 numbers whose sum has about 16 significant bits."""
    rounded = x.to(tl.bfloat16)
    return rounded, (x - rounded.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def merge_step(other_top, other_total, top, total, SCALE: tl.constexpr):
    """Merge two states; return the new top and total, and the factors for both accumulators, all [rows].

    The factor for (top, total) is the third result, the factor for the other state the fourth.

    Args:
      SCALE: as in `softmax_step`.
    """
    new_top = tl.maximum(top, other_top)
    shift = finite_or_zero(new_top)
    keep, others = tl.exp2((top - shift) * (SCALE * LOG2E)), tl.exp2((other_top - shift) * (SCALE * LOG2E))
    return new_top, total * keep + other_total * others, keep, others


@triton.jit
def softmax_result(top, total, sink, SCALE: tl.constexpr):
    """Return the factor [rows] that normalises the accumulator, and the natural-log LSE [rows].

    Rows without visible keys have factor 0 and LSE -inf.

    Args:
      top, total: [rows] of a state.
      sink: learned sink logits [rows], which enter only the denominator of the output; -inf for none.
      SCALE: as in `softmax_step`.
    """
    seen = total != 0  # true for NaN
    shift = finite_or_zero(top) * SCALE
    inverse = 1.0 / tl.where(seen, total + tl.exp2((sink - shift) * LOG2E), 1.0)
    lse = tl.where(seen, shift + tl.log2(tl.where(seen, total, 1.0)) / LOG2E, float("-inf"))
    return tl.where(seen, inverse, 0.0), lse


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """CAP · tanh(scores / CAP), with an error of at most 2e-7 · min(|scores|, CAP)."""
    x = scores / CAP
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    large = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    return CAP * tl.where(square < 0.0625, small, large)
