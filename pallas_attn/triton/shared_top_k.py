"""Select the highest scores of few long rows in Triton, exactly, with several programs per row.

A row has the scores of one token. It is divided into segments, one per program. `ordered_scores` maps scores to uint32
numbers of the same order, and a bin contains the numbers with equal leading 12 bits. Three kernels run in order, each
with one program per segment:

    _count   count the scores of each bin of the row; the kernel of index scores can do this instead
    _list    find the bin of the lowest selected score. Bins above are selected, bins below are not.
             The scores in this bin are the candidates. List them
    _write   find the lowest selected score among the candidates, bit by bit
             write the selected positions of the segment, in order

There are no barriers: programs exchange data only between kernels. In `_write`, every program of a row does the same
search among the candidates. Typical rows of 32k scores have a few hundred candidates. If most scores share their
leading bits, the candidates do not fit into registers, and the program reads them again for each bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.ordered_scores import (
    BIN_SHIFT,
    SCORE_BINS,
    count_scores,
    ordered_score,
    score_bin,
    store_chosen,
)

LOW, TOP_LOW = tl.constexpr(2**20 - 1), tl.constexpr(2**19)
"""Mask of the 20 bits of an ordered score below its bin, and the highest of these bits."""
FEW, MANY = tl.constexpr(2048), tl.constexpr(4096)
"""If a row has at most FEW candidates, a program holds all of them in registers. Otherwise it holds the first MANY, and
reads the other candidates from memory for each bit.
"""

# The lowest finite score is in bin 8, so the first entries of a row's bin counts are free. Entries 0 to 3 pass four
# numbers of the row from `_list` to `_write`:
#   CANDIDATES  number of candidates
#   BOUND       bin of the candidates; scores in higher bins are selected
#   WANTED      number of selected scores
#   EQUALS      number of selected candidates
# Counts are read from entry FREE on.
CANDIDATES, BOUND, WANTED, EQUALS, FREE = (tl.constexpr(i) for i in range(5))


def empty_bins(num_rows: int) -> Int32[Array, "T bins"]:
    """Return bin counts of zero."""
    return jnp.zeros((num_rows, SCORE_BINS.value), jnp.int32)


def counted(
    scores: Float32[Array, "T K"], counts: Int32[Array, "T"] | None, *, segment: int, warps: int
) -> Int32[Array, "T bins"]:
    """Return the number of scores of each row in each bin. For the arguments see `highest`."""
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
    """Return the positions of each row's highest scores, in the form of `select_top_k`: ascending, then -1.

    Args:
      counts: number of valid scores of each row; later scores are undefined. None if all scores are valid.
      top_k: number of positions per row.
      bins: bin counts, from `counted` or from the kernel of index scores.
      segment: scores per segment, a power of two below 2**15.
      warps: warps of a program.
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
    # With 128 registers per thread, two programs of 8 warps fit on a multiprocessor.
    return launch(_write, *operands, outputs=outputs, constants=constants, max_registers=128, **options)[0]


@kernel
def _count(
    scores_ptr,  # [T, WIDTH]
    counts_ptr,  # [T] or None
    _bins_ptr,  # same memory as bins_ptr
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
    _bins_ptr,  # same memory as bins_ptr
    bins_ptr,  # [T, SCORE_BINS]
    above_ptr,  # [T, segments] number of scores of the segment in bins above the candidates' bin
    numbers_ptr,  # [T, WIDTH] ordered scores of the candidates, in any order
    positions_ptr,  # [T, WIDTH] positions of the candidates
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
    at_least = found - tl.cumsum(held, 0) + held  # [bins], number of scores in this bin and above
    enough = at_least >= wanted
    bound = tl.sum(enough.to(tl.int32), 0) - 1
    reached = tl.min(tl.where(enough, at_least, found), 0)
    above = tl.max(tl.where(enough, 0, at_least), 0)
    if reached == wanted:  # all scores of the bin are selected, so no candidates are listed
        bound -= 1
        above = wanted
    equals = wanted - above  # number of candidates to select

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
    # Load FEW candidates without waiting for their number, which is another load.
    place = tl.arange(0, FEW)
    candidate = tl.load(numbers_ptr + place, mask=place < WIDTH, other=0).to(tl.uint32, bitcast=True)
    candidate_position = tl.load(positions_ptr + place, mask=place < WIDTH, other=0)
    bound, wanted = tl.load(bins_ptr + BOUND), tl.load(bins_ptr + WANTED)
    equals, candidates = tl.load(bins_ptr + EQUALS), tl.load(bins_ptr + CANDIDATES)
    position, number = _segment(scores_ptr, counts_ptr, row, WIDTH, SEGMENT)
    other = tl.arange(0, SEGMENTS)
    before = tl.load(above_ptr + row * tl.num_programs(1) + other, mask=other < segment, other=0)
    above_before, equal_before = tl.sum(before, 0), 0

    # Without candidates, the lowest selected score is above all numbers of the bin `bound`.
    least = (bound.to(tl.uint32) << BIN_SHIFT) | tl.full([], LOW, tl.uint32)
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

    store_chosen(out_ptr, position, number, least, equals, above_before, equal_before)
    for start in range(segment * SEGMENT, TOP_K, tl.num_programs(1) * SEGMENT):
        at = start + tl.arange(0, SEGMENT)
        tl.store(out_ptr + at, tl.full([SEGMENT], -1, tl.int32), mask=(at >= wanted) & (at < TOP_K))


@kernel
def _lowest(held, least, top_bit, numbers_ptr, candidates, equals, HELD: tl.constexpr):
    """Return a threshold (uint32) for the `equals` highest candidates: they are all candidates above the threshold, and
    as many candidates equal to the threshold as are still missing.

    Args:
      held: [HELD], the first candidates, 0 if fewer exist; the others are loaded from numbers_ptr.
      least: common leading bits of all candidates, followed by zeros.
      top_bit: highest bit below the common bits; 0 if all candidates are equal.
      candidates: number of candidates.
      equals: number of candidates to select.
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
    """Return arguments of `_lowest` for the candidates of a row.

    Returns:
      least: the leading bits that all candidates have in common, followed by zeros.
      top_bit: the highest bit in which candidates differ; 0 if all candidates are equal.
      held: [HELD], the first candidates, 0 if fewer exist.
    """
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
    """Return the positions of the program's segment, and their ordered scores; 0 for positions without a valid score.

    Both are [SEGMENT].
    """
    position = tl.program_id(1) * SEGMENT + tl.arange(0, SEGMENT)
    end = WIDTH
    if counts_ptr is not None:
        end = tl.load(counts_ptr + row)
    # The mask does not depend on `end`, so this load does not wait for the load of `end`. Undefined scores become 0.
    score = tl.load(scores_ptr + row * WIDTH + position, mask=position < WIDTH, other=float("-inf"))
    return position, tl.where(position < end, ordered_score(score), 0).to(tl.uint32)


@kernel
def _candidates(numbers_ptr, place, candidates):
    """Load the ordered scores of candidates; 0 for a `place` past the last candidate."""
    return tl.load(numbers_ptr + place, mask=place < candidates, other=0).to(tl.uint32, bitcast=True)
