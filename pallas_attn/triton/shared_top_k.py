"""Choosing the highest scores of few rows in Triton, exactly, by several programs for each row.

Three launches, each with a program for every segment of every row, but that the kernel of scores does the first one's:

    _count   how many scores of the row have each value of their leading 12 bits
    _list    which value is that of the lowest score chosen; the scores that have it are the row's candidates
    _write   the lowest score chosen, found bit by bit among the candidates; then the segment's positions, in order

Programs wait for one another only between launches. In `_write` each program of a row searches the candidates, a few
hundred of 32k scores of an ordinary distribution, for itself. Where they are more than registers hold, because most
scores share their leading bits, it reads them again for each bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.pieces import BIN_SHIFT, SCORE_BINS, count_scores, ordered_score, score_bin

LOW, TOP_LOW = tl.constexpr(2**20 - 1), tl.constexpr(2**19)  # the bits that follow those of bins, and the first of them
FEW, MANY = tl.constexpr(2048), tl.constexpr(4096)
"""Candidates that a program holds in registers, if there are no more than the first, and otherwise."""

# The lowest finite score is in bin 8. The bins below hold what programs tell those of the next launch.
CANDIDATES, BOUND, WANTED, EQUALS, FREE = (tl.constexpr(i) for i in range(5))


def empty_bins(num_rows: int) -> Int32[Array, "T bins"]:
    """Counts of the scores of so many rows by their leading bits, before there is one."""
    return jnp.zeros((num_rows, SCORE_BINS.value), jnp.int32)


def counted(
    scores: Float32[Array, "T K"], counts: Int32[Array, "T"] | None, *, segment: int, warps: int
) -> Int32[Array, "T bins"]:
    """Counts of scores by their leading bits. Arguments are those of `highest`."""
    num_rows, width = scores.shape
    return launch(
        _count,
        *(scores, counts, empty_bins(num_rows)),
        outputs=[jax.ShapeDtypeStruct((num_rows, SCORE_BINS.value), jnp.int32)],
        aliases={2: 0},
        grid=(num_rows, -(-width // segment)),
        constants={"WIDTH": width, "SEGMENT": segment},
        num_warps=warps,
        bytes_accessed=4 * num_rows * width,
    )[0]


def highest(
    scores: Float32[Array, "T K"],
    counts: Int32[Array, "T"] | None,
    top_k: int,
    *,
    bins: Int32[Array, "T bins"],
    segment: int,
    warps: int,
) -> Int32[Array, "T top_k"]:
    """Positions of each row's highest scores, as `select_top_k` gives them.

    Args:
      counts: of each row, how many scores it has, the others being undefined; None for all.
      bins: counts of scores by their leading bits.
      segment: scores of a program, a power of two.
    """
    num_rows, width = scores.shape
    segments = -(-width // segment)
    candidates = jax.ShapeDtypeStruct((num_rows, width), jnp.int32)
    options = {"grid": (num_rows, segments), "num_warps": warps, "bytes_accessed": 4 * num_rows * width}
    constants = {"WIDTH": width, "SEGMENT": segment}
    bins, above, numbers, positions = launch(
        _list,
        *(scores, counts, bins),
        outputs=[bins, jax.ShapeDtypeStruct((num_rows, segments), jnp.int32), candidates, candidates],
        aliases={2: 0},
        constants=constants | {"TOP_K": top_k},
        **options,
    )
    constants |= {"TOP_K": top_k, "SEGMENTS": 1 << (segments - 1).bit_length()}
    outputs = [jax.ShapeDtypeStruct((num_rows, top_k), jnp.int32)]
    operands = scores, counts, bins, above, numbers, positions
    # Registers for two programs of 8 warps on a multiprocessor.
    return launch(_write, *operands, outputs=outputs, constants=constants, max_registers=128, **options)[0]


@kernel
def _count(
    scores_ptr,  # [T, WIDTH]
    counts_ptr,  # [T] or None
    _bins_ptr,
    bins_ptr,  # [T, SCORE_BINS]
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, number = _segment(scores_ptr, counts_ptr, row, WIDTH, SEGMENT)
    count_scores(bins_ptr, row, number)


@kernel
def _list(
    scores_ptr,  # [T, WIDTH]
    counts_ptr,  # [T] or None
    _bins_ptr,
    bins_ptr,  # [T, SCORE_BINS]
    above_ptr,  # [T, segments] scores of the segment in higher bins than the candidates
    numbers_ptr,  # [T, WIDTH] candidates in any order
    positions_ptr,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, number = _segment(scores_ptr, counts_ptr, row, WIDTH, SEGMENT)
    bins_ptr += row * SCORE_BINS
    place = tl.arange(0, SCORE_BINS)
    held = tl.load(bins_ptr + place, mask=place >= FREE, other=0)
    found = tl.sum(held, 0)
    wanted = tl.minimum(found, TOP_K)
    at_least = found - tl.cumsum(held, 0) + held  # scores in this bin and those above
    enough = at_least >= wanted
    bound = tl.sum(enough.to(tl.int32), 0) - 1
    reached = tl.min(tl.where(enough, at_least, found), 0)
    above = tl.max(tl.where(enough, 0, at_least), 0)
    if reached == wanted:  # all of that bin are chosen: there are no candidates
        bound -= 1
        above = wanted
    equals = wanted - above  # of the candidates

    own = score_bin(number)
    tl.store(above_ptr + row * tl.num_programs(1) + segment, tl.sum((own > bound).to(tl.int32), 0))
    if segment == 0:
        tl.store(bins_ptr + BOUND, bound)
        tl.store(bins_ptr + WANTED, wanted)
        tl.store(bins_ptr + EQUALS, equals)
    if equals > 0:
        listed = own == bound
        before = tl.cumsum(listed.to(tl.int32), 0) - 1
        number_listed = tl.max(before, 0) + 1
        if number_listed > 0:
            first = tl.atomic_add(bins_ptr + CANDIDATES, number_listed, sem="relaxed")
            at = row * WIDTH + first + before
            tl.store(numbers_ptr + at, number.to(tl.int32, bitcast=True), mask=listed)
            tl.store(positions_ptr + at, position, mask=listed)


@kernel
def _write(
    scores_ptr,  # [T, WIDTH]
    counts_ptr,  # [T] or None
    bins_ptr,  # [T, SCORE_BINS]
    above_ptr,  # [T, segments]
    numbers_ptr,  # [T, WIDTH]
    positions_ptr,  # [T, WIDTH]
    out_ptr,  # [T, TOP_K]
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bins_ptr += row * SCORE_BINS
    numbers_ptr += row * WIDTH
    positions_ptr += row * WIDTH
    out_ptr += row * TOP_K
    # As many candidates as registers hold are loaded before it is known how many there are.
    place = tl.arange(0, FEW)
    candidate = tl.load(numbers_ptr + place, mask=place < WIDTH, other=0).to(tl.uint32, bitcast=True)
    candidate_position = tl.load(positions_ptr + place, mask=place < WIDTH, other=0)
    bound, wanted = tl.load(bins_ptr + BOUND), tl.load(bins_ptr + WANTED)
    equals, candidates = tl.load(bins_ptr + EQUALS), tl.load(bins_ptr + CANDIDATES)
    position, number = _segment(scores_ptr, counts_ptr, row, WIDTH, SEGMENT)
    other = tl.arange(0, SEGMENTS)
    before = tl.load(above_ptr + row * tl.num_programs(1) + other, mask=other < segment, other=0)
    above_before, equal_before = tl.sum(before, 0), 0

    least = (bound.to(tl.uint32) << BIN_SHIFT) | tl.full([], LOW, tl.uint32)  # where there are no candidates
    if equals > 0:
        candidate = tl.where(place < candidates, candidate, 0).to(tl.uint32)
        if candidates <= FEW:
            least = bound.to(tl.uint32) << BIN_SHIFT
            least = _lowest(candidate, least, TOP_LOW, numbers_ptr, candidates, equals, FEW)
        else:
            least, top_bit, held = _common(numbers_ptr, candidates, MANY)
            least = _lowest(held, least, top_bit, numbers_ptr, candidates, equals, MANY)
        first = segment * SEGMENT
        above = (candidate > least).to(tl.int32)
        earlier_above = ((candidate > least) & (candidate_position < first)).to(tl.int32)
        earlier_equal = ((candidate == least) & (candidate_position < first)).to(tl.int32)
        for start in range(FEW, candidates, FEW):
            further = _candidates(numbers_ptr, start + place, candidates)
            is_held = start + place < candidates
            is_earlier = tl.load(positions_ptr + start + place, mask=is_held, other=WIDTH) < first
            above += (further > least).to(tl.int32)
            earlier_above += (is_earlier & (further > least)).to(tl.int32)
            earlier_equal += (is_earlier & (further == least)).to(tl.int32)
        equals -= tl.sum(above, 0)
        above_before += tl.sum(earlier_above, 0)
        equal_before = tl.sum(earlier_equal, 0)

    is_above, is_equal = number > least, number == least
    # Counts of both in one sum: SEGMENT is below 2**15.
    counted = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), 0)
    above, equal = above_before + (counted & 0xFFFF), equal_before + (counted >> 16)
    chosen = is_above | (is_equal & (equal <= equals))
    tl.store(out_ptr + above + tl.minimum(equal, equals) - 1, position, mask=chosen)
    for start in range(segment * SEGMENT, TOP_K, tl.num_programs(1) * SEGMENT):
        at = start + tl.arange(0, SEGMENT)
        tl.store(out_ptr + at, tl.full([SEGMENT], -1, tl.int32), mask=(at >= wanted) & (at < TOP_K))


@kernel
def _lowest(held, least, top_bit, numbers_ptr, candidates, equals, HELD: tl.constexpr):
    """The lowest of the `equals` highest candidates, or a number between it and the next.

    Args:
      held: the first HELD candidates.
      least: their common leading bits, and zeros.
      top_bit: the bit that follows those; 0 if all are equal.
    """
    bit = tl.full([], 1, tl.uint32) * top_bit
    while bit > 0:
        tried = least | bit
        counted = (held >= tried).to(tl.int32)
        for start in range(HELD, candidates, HELD):
            counted += (_candidates(numbers_ptr, start + tl.arange(0, HELD), candidates) >= tried).to(tl.int32)
        at_least = tl.sum(counted, 0)
        least = tl.where(at_least > equals, tried, tl.where(at_least == equals, tried - 1, least))
        bit = tl.where(at_least == equals, 0, bit >> 1).to(tl.uint32)
    return least


@kernel
def _common(numbers_ptr, candidates, HELD: tl.constexpr):
    """Leading bits that all candidates have, the bit that follows, and the first HELD candidates."""
    held = _candidates(numbers_ptr, tl.arange(0, HELD), candidates)
    high, low = held, tl.where(tl.arange(0, HELD) < candidates, held, 0xFFFFFFFF).to(tl.uint32)
    for start in range(HELD, candidates, HELD):
        place = start + tl.arange(0, HELD)
        further = _candidates(numbers_ptr, place, candidates)
        high = tl.maximum(high, further)
        low = tl.minimum(low, tl.where(place < candidates, further, 0xFFFFFFFF).to(tl.uint32))
    highest = tl.max(high, 0)
    differ = highest ^ tl.min(low, 0)
    for shift in tl.static_range(5):
        differ |= differ >> (1 << shift)
    return highest ^ (highest & differ), ((differ + 1) >> 1).to(tl.uint32), held


@kernel
def _segment(scores_ptr, counts_ptr, row, WIDTH: tl.constexpr, SEGMENT: tl.constexpr):
    """Positions of the program's segment of a row, and the scores there as ordered integers; 0 for none."""
    position = tl.program_id(1) * SEGMENT + tl.arange(0, SEGMENT)
    end = WIDTH
    if counts_ptr is not None:
        end = tl.load(counts_ptr + row)
    # All are loaded, those that are undefined, too: so this load waits for no other one.
    score = tl.load(scores_ptr + row * WIDTH + position, mask=position < WIDTH, other=float("-inf"))
    return position, tl.where(position < end, ordered_score(score), 0).to(tl.uint32)


@kernel
def _candidates(numbers_ptr, place, candidates):
    """Candidates at places; 0 for none."""
    return tl.load(numbers_ptr + place, mask=place < candidates, other=0).to(tl.uint32, bitcast=True)
