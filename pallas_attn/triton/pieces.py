"""Device functions that Triton kernels share: what a query sees, where tokens lie, softmax, the order of scores, 8-bit
numbers, plans.

Softmax is in base 2: weights are 2**(score * BASE - top), one multiply-add and one instruction each. Times log2(e), a
score of 5e5 is rounded by up to 1/32; only `top` is, by which all weights of a row are divided, and so is their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# --- visibility


@triton.jit
def in_window(token, position, window, sink_tokens):
    """Whether a query at `position` has a token within its window or among the sink tokens."""
    return (token < sink_tokens) | (token > position - window)  # window <= 2**31 - 1 and position >= 0: no overflow


@triton.jit
def draft_visible(token, first, query, q_len, tree_ptr, QUERIES: tl.constexpr):
    """Whether query i, at position first + i, sees a token: causally or, among the tokens of the draft, by a tree.

    Args:
      token: [tokens] positions, below kv_len.
      first: kv_len - q_len.
      query: [rows] index of each row's query.
      tree_ptr: the sequence's draft mask [QUERIES, QUERIES], or None.

    Returns:
      [rows, tokens].
    """
    column = token - first
    if tree_ptr is None:
        shown = column[None, :] <= query[:, None]
    else:
        drafted = (column >= 0) & (column < QUERIES)
        at = tree_ptr + query[:, None] * QUERIES + column[None, :]
        in_tree = tl.load(at, mask=drafted[None, :] & (query < QUERIES)[:, None], other=0) != 0
        shown = (column < 0)[None, :] | in_tree
    return shown & (query < q_len)[:, None]


# --- pages


@triton.jit
def walked_token(n, sink_pages, first_page, PAGE: tl.constexpr):
    """Table entry and position of the n-th token of a row's visible pages: those of sink tokens, then the window's."""
    page = n // PAGE
    entry = tl.where(page < sink_pages, page, page - sink_pages + first_page)
    return entry, entry * PAGE + n % PAGE


@triton.jit
def pool_rows(page_id, head, NUM_HEADS: tl.constexpr, HEAD_WISE: tl.constexpr):
    """int64 rows of the pool (a page of one head) that table entries name: ids of pages or, head-wise, of rows."""
    row = page_id.to(tl.int64)
    return row if HEAD_WISE else row * NUM_HEADS + head


@triton.jit
def places(row_start, held, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of columns, from the first one on, of rows that start at offsets; and which exist, in rows held."""
    column = FIRST + tl.arange(0, COLUMNS)
    is_held = tl.broadcast_to(held[:, None], [held.shape[0], COLUMNS])
    if FIRST + COLUMNS > WIDTH:
        is_held = is_held & (column < WIDTH)[None, :]
    return row_start[:, None] + column[None, :], is_held


@triton.jit
def columns(ptr, row_start, FIRST: tl.constexpr, held, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Values at `places`, 0 for others."""
    at, is_held = places(row_start, held, FIRST, WIDTH, COLUMNS)
    return tl.load(ptr + at, mask=is_held, other=0)


# --- softmax


@triton.jit
def finite_or_zero(top):
    """A maximum to subtract: 0 for -inf, that of a row which has seen nothing."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def softmax_step(scores, top, total, BASE: tl.constexpr):
    """One step of an online softmax over scores [rows, tokens], -inf where not visible.

    Args:
      top: [rows], the largest score so far, times BASE.
      total: [rows], the sum of 2**(score * BASE - top).
      BASE: positive; log2(e) times what scores are still to be multiplied by.

    Returns:
      The new top and total, the factor for what was accumulated before [rows], and weights [rows, tokens].
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * BASE)
    shift = finite_or_zero(new_top)
    keep = tl.exp2(top - shift)
    # One rounding: a product near 5e5 by itself is off by up to 0.03, which differs among the tokens of a row.
    weights = tl.exp2(tl.fma(scores, BASE, -shift[:, None]))
    return new_top, total * keep + tl.sum(weights, 1), keep, weights


SMALLEST_UNIT = tl.constexpr(1e-30)
"""Initial unit of `weights_in_units`."""


@triton.jit
def weights_in_units(weights, keep, unit):
    """Weights that scales of values are multiplied into, as shares of the row's largest, which float16 holds.

    Args:
      weights: [rows, tokens].
      keep: [rows], factor for what was accumulated before.
      unit: [rows], what accumulated values are to be multiplied by; `SMALLEST_UNIT` at first.

    Returns:
      All three, with the new unit.
    """
    new_unit = tl.maximum(unit * keep, tl.maximum(tl.max(weights, 1), SMALLEST_UNIT))
    inverse = 1.0 / new_unit
    return weights * inverse[:, None], unit * keep * inverse, new_unit


@triton.jit
def merge_step(other_top, other_total, top, total):
    """The top and total of two states, and the factors for what each accumulated; all [rows]."""
    new_top = tl.maximum(top, other_top)
    shift = finite_or_zero(new_top)
    keep, others = tl.exp2(top - shift), tl.exp2(other_top - shift)
    return new_top, total * keep + other_total * others, keep, others


@triton.jit
def softmax_result(top, total, sink):
    """The factor that normalises what was accumulated, and the LSE; 0 and -inf for rows that have seen nothing.

    Args:
      top, total: [rows] of a state, in base 2.
      sink: learned logits [rows], which enter the denominator only; -inf for none.
    """
    seen = total != 0  # also NaN
    shift = finite_or_zero(top)
    inverse = 1.0 / tl.where(seen, total + tl.exp2(sink * LOG2E - shift), 1.0)
    lse = tl.where(seen, (shift + tl.log2(tl.where(seen, total, 1.0))) / LOG2E, float("-inf"))
    return tl.where(seen, inverse, 0.0), lse


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """CAP · tanh(scores / CAP), with an error of 2e-7 times the smaller of |scores| and CAP."""
    x = scores / CAP
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    large = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    return CAP * tl.where(square < 0.0625, small, large)


# --- scores in order


@triton.jit
def ordered_score(score):
    """Scores as unsigned integers in their order, zeros of either sign being equal and NaN as +inf; 0 for -inf."""
    score = tl.where(score == score, score, float("inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    number = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), number, 0).to(tl.uint32)


SCORE_BINS, BIN_SHIFT = tl.constexpr(4096), tl.constexpr(20)
"""Values of the leading bits of a score, and the bits that follow."""


@triton.jit
def score_bin(number):
    """Leading bits of an ordered score."""
    return (number >> BIN_SHIFT).to(tl.int32)


@triton.jit
def count_scores(bins_ptr, row, number):
    """Counts ordered scores of a row by their leading bits, but for -inf."""
    tl.atomic_add(bins_ptr + row * SCORE_BINS + score_bin(number), 1, mask=number > 0, sem="relaxed")


# --- 8-bit numbers: kernels get float8_e4m3fn as bytes, uint8


@triton.jit
def e4m3_from_f32(x):
    """float8_e4m3fn bytes of float32 up to ±448 or NaN, rounded to nearest even; by integers, on every card alike."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half a unit in the last place of 3 bits, and its parity; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Units of 2**-9 below 2**-6: 2**14 is the float32 whose last place that is.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def f16_from_e4m3(byte, NATIVE: tl.constexpr):
    """float16 of bytes of float8_e4m3fn, exactly; by integers where the card has no instruction (before sm89)."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = byte.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0  # the exponent's bias goes from 7 to 15; exact for subnormals
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def tensor_core_operand(stored, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Values of a cache in a 16-bit dtype, exactly: int8 and float8 fit both, 16-bit caches are of that dtype."""
    return f16_from_e4m3(stored, NATIVE).to(dtype) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def amax_scale(amax, QMAX: tl.constexpr, at_least=0.0):
    """Scale that lets 8 bits hold values up to `amax`: amax / QMAX, correctly rounded, or more; 1 if subnormal."""
    scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
    scale = tl.maximum(scale, at_least, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(scale < 1.1754943508222875e-38, 1.0, scale)


# --- plans


@triton.jit
def split_end(page, num_pages, is_last, end_page, SPLIT_PAGES: tl.constexpr):
    """Page at which the split that starts at `page` of a row ends.

    Args:
      is_last: whether this row is the one that the program ends in, at `end_page`.
      SPLIT_PAGES: of the plan.
    """
    stop = tl.where(is_last, tl.minimum(end_page, num_pages), num_pages)
    if SPLIT_PAGES:
        stop = tl.minimum(stop, (page // SPLIT_PAGES + 1) * SPLIT_PAGES)
    return stop
