"""Select the highest scores of rows in Triton, exactly. A row has the scores of one token.

A program holds the scores of a row in registers, as uint32 numbers that compare in the same order (`ordered_scores`).
It finds the lowest selected score bit by bit:

    least = 0
    for bit from the highest to the lowest:
        n = number of scores >= least | bit
        if n > wanted:   least = least | bit
        if n == wanted:  least = (least | bit) - 1, and stop
    write the positions of the scores above least, and of the first scores equal to least, in order

The search usually stops after about log2(number of scores) bits.

A row that does not fit into registers takes several rounds. A round divides the row into segments, one per program,
and the selected scores of all segments are the row of the next round. For few long rows, `shared_top_k` is used
instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.triton import shared_top_k
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.ordered_scores import ordered_score, store_chosen
from pallas_attn.triton.tiles import power_of_two

MOST_HELD = 32768
"""Maximum number of scores that a program holds in registers: 32 in each of 1,024 threads."""
SEGMENT = 8192
"""Minimum number of scores per segment, if a row takes several rounds. A segment also has at least 4 · top_k scores, so
that a round reduces the row to a quarter or less.
"""
PER_THREAD = 32
"""Number of scores that a thread holds in registers."""

LEAST_SHARED, MOST_SHARED_ROWS = 16384, 32
"""`shared_top_k` is used for rows of at least LEAST_SHARED scores, if there are at most MOST_SHARED_ROWS rows.

With more rows, one program per row keeps enough multiprocessors busy.
"""
MOST_SHARED = 2**21
"""Maximum number of scores in all rows for `shared_top_k`."""
SHARES = 256
"""Approximate number of programs of `shared_top_k`: two per multiprocessor of a large GPU."""


def is_shared(num_rows: int, width: int) -> bool:
    """Return whether `shared_top_k` selects from rows [num_rows, width]."""
    return width >= LEAST_SHARED and num_rows <= MOST_SHARED_ROWS and num_rows * width <= MOST_SHARED


def shared_sizes(num_rows: int, width: int) -> dict[str, int]:
    """Return the arguments `segment` (scores per program) and `warps` of `shared_top_k`."""
    segment = min(8192, power_of_two(-(-num_rows * width // SHARES), 1024))
    return {"segment": segment, "warps": max(8, segment // 512)}


def require_supported(num_rows: int, width: int, top_k: int) -> None:
    """Raise NotImplementedError if a row takes several rounds and its segments of 4 · top_k scores do not fit into
    registers.
    """
    if width > MOST_HELD and 4 * top_k > MOST_HELD and not is_shared(num_rows, width):
        raise NotImplementedError(
            f"takes a top_k of up to {MOST_HELD // 4} for rows of more than {MOST_HELD} scores, got {top_k}"
        )


def highest(
    scores: Float32[Array, "T K"],
    counts: Int32[Array, "T"] | None,
    top_k: int,
    bins: Int32[Array, "T bins"] | None = None,
) -> Int32[Array, "T top_k"]:
    """Return the positions of each row's highest scores, in the form of `select_top_k`: ascending, then -1.

    Args:
      counts: number of valid scores of each row; later scores are undefined. None if all scores are valid.
      top_k: number of positions per row.
      bins: for `shared_top_k`: the number of scores in each bin, if another kernel has counted them.
    """
    num_rows, row_width = scores.shape
    if is_shared(num_rows, row_width):
        sizes = shared_sizes(num_rows, row_width)
        if bins is None:
            bins = shared_top_k.counted(scores, counts, **sizes)
        return shared_top_k.highest(scores, counts, top_k, bins=bins, **sizes)
    candidates, width = None, row_width
    while True:
        segment = width if width <= MOST_HELD else max(SEGMENT, 4 * power_of_two(top_k))
        segments, block = -(-width // segment), power_of_two(segment, 256)
        (candidates,) = launch(
            _choose,
            *(scores, counts, candidates),
            outputs=[jax.ShapeDtypeStruct((num_rows, segments * top_k), jnp.int32)],
            grid=(num_rows, segments),
            constants={
                "ROW_WIDTH": row_width,
                "WIDTH": width,
                "SEGMENT": segment,
                "TOP_K": top_k,
                "BLOCK": block,
                "STEP": min(block, 4096),
            },
            num_warps=min(32, max(4, block // (32 * PER_THREAD))),
            bytes_accessed=4 * num_rows * (width + segments * top_k),
        )
        if segments == 1:
            return candidates
        width = segments * top_k


@kernel
def _choose(
    scores_ptr,  # [T, ROW_WIDTH]
    counts_ptr,  # [T] or None
    candidates_ptr,  # [T, WIDTH] positions selected in the previous round, ascending, some -1; None in the first round
    out_ptr,  # [T, segments, TOP_K]
    ROW_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = scores_ptr + row * ROW_WIDTH
    out_ptr += (row * tl.num_programs(1) + segment) * TOP_K
    end = WIDTH
    if candidates_ptr is not None:
        candidates_ptr += row * WIDTH
    elif counts_ptr is not None:
        end = tl.load(counts_ptr + row)
    first = segment * SEGMENT
    end = tl.minimum(first + SEGMENT, end)

    place = 0  # number of positions written
    if first < end:
        _, number = _numbers(row_ptr, candidates_ptr, first + tl.arange(0, BLOCK), end)
        found = tl.sum((number > 0).to(tl.int32), 0)
        wanted = tl.minimum(found, TOP_K)
        least = tl.full([], 0, tl.uint32)
        bit = tl.full([], 0x80000000, tl.uint32)
        if found == wanted:  # select all scores
            bit = tl.full([], 0, tl.uint32)
        while bit > 0:
            tried = least | bit
            at_least = tl.sum((number >= tried).to(tl.int32), 0)
            least = tl.where(at_least > wanted, tried, tl.where(at_least == wanted, tried - 1, least))
            bit = tl.where(at_least == wanted, 0, bit >> 1).to(tl.uint32)
        equals = wanted - tl.sum((number > least).to(tl.int32), 0)

        above_before, equal_before = 0, 0
        for start in range(first, end, STEP):
            position, some = _numbers(row_ptr, candidates_ptr, start + tl.arange(0, STEP), end)
            above, equal = store_chosen(out_ptr, position, some, least, equals, above_before, equal_before)
            above_before, equal_before = tl.max(above, 0), tl.max(equal, 0)
        place = wanted
    for start in range(0, TOP_K, STEP):
        at = start + tl.arange(0, STEP)
        tl.store(out_ptr + at, tl.full([STEP], -1, tl.int32), mask=(at >= place) & (at < TOP_K))


@kernel
def _numbers(row_ptr, candidates_ptr, place, end):
    """Return the positions of the scores at `place` of the round's row, and the ordered scores.

    The ordered score is 0 for a place past `end`, and for a candidate -1.
    """
    held = place < end
    position = place
    if candidates_ptr is not None:
        position = tl.load(candidates_ptr + place, mask=held, other=-1)
        held = position >= 0
    score = tl.load(row_ptr + position, mask=held, other=float("-inf"))
    return position, ordered_score(score)
