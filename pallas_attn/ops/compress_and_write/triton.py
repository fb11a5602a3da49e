"""`compress_and_write` in Triton, for GPUs from Ampere (sm80) on.

A program handles some new tokens. It copies their compressor rows to the state, and for each token that completes a
block, it computes the block's entry:

    row = rows[tokens]                                     # [tokens, ROW]
    state[slots of the tokens] = row
    for token in tokens, if the token completes a block:
        for tile of the block's rows:                      # new rows from `rows`, older rows from the state
            gates, contents = load(tile)                   # [rows, columns]
            top, total, pooled = online softmax over the rows, for each column
        entry = rotate(rmsnorm(pooled / total))            # [columns]
        entries[slot of the entry] = cast or quantise(entry)

The rows are loaded before their slots. Finding the slot of a token takes several dependent loads (sequence, position,
page), which otherwise would delay the row.

From the state, a program reads only rows of earlier calls, which no program of this call overwrites. Entries of
different programs have different slots. So programs do not wait for each other.
"""

from __future__ import annotations

import triton.language as tl

from pallas_attn.ops.compress_and_write.call import CompressAndWriteCall
from pallas_attn.ops.compress_and_write.config import CompressConfig
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.quantise import amax_scale, f32_from_power_of_two, latent_exponents, quantise, row_amax
from pallas_attn.triton.softmax import LOG2E, finite_or_zero
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import LATENT_8BIT, POWER_OF_TWO, QMAX, SMALL_LATENT_GROUP, PagedIndexKeys, PagedLatent

GROUP = tl.constexpr(SMALL_LATENT_GROUP)
"""Columns that share a scale that is a power of two."""

MAX_WIDTH = 1024
"""Maximum width of an entry. A tile of wider rows does not fit into registers."""


def compress_and_write(call: CompressAndWriteCall) -> tuple[PagedLatent, PagedLatent | PagedIndexKeys]:
    (num_tokens, columns), (num_pages, page_size, _) = call.rows.shape, call.state.pages.shape
    width, half = call.norm.shape[0], call.cos.shape[1]
    if width % 2 or width > MAX_WIDTH:
        raise NotImplementedError(f"takes an even number of columns up to {MAX_WIDTH}, got {width}")
    scale, rope = call.entries.scale, None if isinstance(call.entries, PagedIndexKeys) else call.entries.rope
    if rope is not None and scale is not None and scale.dtype != POWER_OF_TWO:
        raise NotImplementedError(f"writes latents with scales that are powers of two, got {scale.dtype.name}")
    entries = call.entry_pages
    block = power_of_two(width)
    pooled = call.halves * call.ratio
    config = CompressConfig.of(num_tokens=num_tokens, width=block, pooled=pooled)
    state, *written = launch(
        _compress,
        *(call.rows, call.norm, call.cos, call.sin, call.state_tables, call.entry_tables),
        *(call.cu_q_lens, call.kv_lens, num_tokens, call.kv_lens.shape[0], call.state.pages, entries, scale, rope),
        outputs=[call.state.pages, entries, *(array for array in (scale, rope) if array is not None)],
        grid=(-(-num_tokens // config.tokens),),
        constants=({"entry_scale_ptr": None} if scale is None else {})
        | ({"entry_rope_ptr": None} if rope is None else {})
        | {
            "RATIO": call.ratio,
            "POOLED": pooled,
            "D": width,
            "STORED": entries.shape[2],
            "HALF": half,
            "ROW": columns,
            "PAGE": page_size,
            "NUM_PAGES": num_pages,
            "TABLE_PAGES": call.state_tables.shape[1],
            "ENTRY_PAGE": call.entries.page_size,
            "NUM_ENTRY_PAGES": entries.shape[0],
            "ENTRY_TABLE_PAGES": call.entry_tables.shape[1],
            "SEARCH_STEPS": call.kv_lens.shape[0].bit_length(),
            "TOKENS": config.tokens,
            "ROWS": config.rows,
            "BLOCK": block,
            "COPIED": power_of_two(columns),
            "EPS": call.norm_eps,
            "QMAX": float(QMAX[LATENT_8BIT]),
        },
        num_warps=config.warps,
        aliases={10: 0, 11: 1} | ({} if scale is None else {12: 2}) | ({} if rope is None else {13: 3}),
        bytes_accessed=num_tokens * columns * 12,
    )
    return PagedLatent(state), type(call.entries)(*written)


@kernel
def _compress(
    rows_ptr,  # [T, ROW]
    norm_ptr,  # [D]
    cos_ptr,  # [T, HALF]
    sin_ptr,  # [T, HALF]
    tables_ptr,  # [S, TABLE_PAGES]
    entry_tables_ptr,  # [S, ENTRY_TABLE_PAGES]
    cu_q_lens_ptr,  # [S + 1]
    kv_lens_ptr,  # [S]
    num_tokens,
    num_sequences,
    _aliased_state_ptr,  # same memory as state_ptr
    _aliased_entries_ptr,  # same memory as entries_ptr
    _aliased_scale_ptr,  # same memory as entry_scale_ptr, or None
    _aliased_rope_ptr,  # same memory as entry_rope_ptr, or None
    state_ptr,  # [NUM_PAGES, PAGE, ROW]
    entries_ptr,  # [NUM_ENTRY_PAGES, ENTRY_PAGE, STORED]
    entry_scale_ptr,  # [NUM_ENTRY_PAGES, ENTRY_PAGE], with entry_rope_ptr [.., STORED / GROUP] powers of two, or None
    entry_rope_ptr,  # [NUM_ENTRY_PAGES, ENTRY_PAGE, D - STORED] or None
    RATIO: tl.constexpr,
    POOLED: tl.constexpr,
    D: tl.constexpr,
    STORED: tl.constexpr,
    HALF: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TABLE_PAGES: tl.constexpr,
    ENTRY_PAGE: tl.constexpr,
    NUM_ENTRY_PAGES: tl.constexpr,
    ENTRY_TABLE_PAGES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    EPS: tl.constexpr,
    QMAX: tl.constexpr,
):
    number = tl.arange(0, TOKENS)
    token = tl.program_id(0) * TOKENS + number
    row_column = tl.arange(0, COPIED)
    held = (token < num_tokens)[:, None] & (row_column < ROW)[None, :]
    row = tl.load(rows_ptr + (token.to(tl.int64) * ROW)[:, None] + row_column[None, :], mask=held)  # [TOKENS, COPIED]
    tl.debug_barrier()  # else ptxas moves the load behind the search for the sequence
    sequence = _sequence_of(cu_q_lens_ptr, token, num_sequences, SEARCH_STEPS)
    known = (token < num_tokens) & (sequence < num_sequences) & (token >= tl.load(cu_q_lens_ptr))
    first_token = tl.load(cu_q_lens_ptr + sequence, mask=known, other=0)
    end = tl.load(cu_q_lens_ptr + sequence + 1, mask=known, other=0)
    kv_len = tl.load(kv_lens_ptr + sequence, mask=known, other=0)
    position = tl.where(known, kv_len - end + token, -1)
    table_ptr = tables_ptr + sequence.to(tl.int64) * TABLE_PAGES
    page = tl.load(table_ptr + position // PAGE, mask=position >= 0, other=-1)
    in_pool = (page >= 0) & (page < NUM_PAGES)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(state_ptr + (slot * ROW)[:, None] + row_column[None, :], row, mask=held & in_pool[:, None])
    for i in range(TOKENS):
        last = _element(position, number, i)
        if (last >= 0) & (last % RATIO == RATIO - 1):
            entry, of_sequence = last // RATIO, _element(sequence, number, i).to(tl.int64)
            in_table = entry // ENTRY_PAGE < ENTRY_TABLE_PAGES
            entry_table_ptr = entry_tables_ptr + of_sequence * ENTRY_TABLE_PAGES
            entry_page = tl.load(entry_table_ptr + entry // ENTRY_PAGE, mask=in_table, other=-1)
            if (entry_page >= 0) & (entry_page < NUM_ENTRY_PAGES):
                last_token = tl.program_id(0) * TOKENS + i
                values = _pooled(
                    *(rows_ptr, state_ptr, tables_ptr + of_sequence * TABLE_PAGES, last_token),
                    *(_element(first_token, number, i), last, POOLED, RATIO, D, ROW, PAGE, NUM_PAGES, ROWS, BLOCK),
                )
                values = _normed_and_rotated(values, norm_ptr, cos_ptr, sin_ptr, last_token, D, HALF, BLOCK, EPS)
                entry_slot = entry_page.to(tl.int64) * ENTRY_PAGE + entry % ENTRY_PAGE
                _store(*(values, entry_slot, entries_ptr, entry_scale_ptr, entry_rope_ptr, D, STORED, BLOCK, QMAX))


@kernel
def _element(vector, number, i):
    """Return element i of an int32 vector whose elements have the indices `number`."""
    return tl.sum(tl.where(number == i, vector, 0), 0)


@kernel
def _store(
    values,
    slot,
    entries_ptr,
    scale_ptr,
    rope_ptr,
    D: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    QMAX: tl.constexpr,
):
    """Convert an entry, float32 [BLOCK], to the dtype of the cache, and store its first D columns.

    Args:
      scale_ptr: None; one float32 scale per entry; or if `rope_ptr` is not None, powers of two for GROUP columns each.
      rope_ptr: columns STORED to D - 1 of the entries, which are cast, or None.
    """
    column = tl.arange(0, BLOCK)
    at = entries_ptr + slot * STORED + column
    if scale_ptr is None:
        tl.store(at, values.to(entries_ptr.dtype.element_ty), mask=column < D)
    elif rope_ptr is None:
        scale = amax_scale(row_amax((values[None, :],)), QMAX)
        quantised = tl.reshape(quantise(values[None, :], scale[:, None], tl.uint8, QMAX), [BLOCK])
        tl.store(at, quantised, mask=column < D)
        tl.store(scale_ptr + slot + tl.arange(0, 1), scale)
    else:
        groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
        exponent = latent_exponents(row_amax((groups,)), QMAX)
        scale = f32_from_power_of_two(exponent)
        tl.store(at, tl.reshape(quantise(groups, scale[:, None], tl.uint8, QMAX), [BLOCK]), mask=column < STORED)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + slot * (STORED // GROUP) + group, exponent.to(tl.uint8), mask=group < STORED // GROUP)
        rotated = (column >= STORED) & (column < D)
        rope_at = rope_ptr + slot * (D - STORED) + column - STORED
        tl.store(rope_at, values.to(rope_ptr.dtype.element_ty), mask=rotated)


@kernel
def _sequence_of(cu_q_lens_ptr, token, num_sequences, SEARCH_STEPS: tl.constexpr):
    """Return the number of sequences that end at or before packed tokens, which is the index of their sequence."""
    low = tl.zeros_like(token)
    high = low + num_sequences
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_before = (middle < num_sequences) & (
            tl.load(cu_q_lens_ptr + middle + 1, mask=middle < num_sequences, other=0) <= token
        )
        low, high = tl.where(is_before, middle + 1, low), tl.where(is_before, high, middle)
    return low


@kernel
def _pooled(
    rows_ptr,
    state_ptr,
    table_ptr,
    token,
    first_token,
    position,
    POOLED: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the pooled contents of the POOLED rows that end with a token, float32 [BLOCK]; 0 in padding columns.

    Args:
      table_ptr: block table of the token's sequence.
      token, position: packed index and position of the last row.
      first_token: packed index of the first new token of the sequence. Earlier rows are in the state.
    """
    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total, pooled = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, POOLED, ROWS):
        number = first + tl.arange(0, ROWS)
        before = POOLED - 1 - number
        there = (number < POOLED) & (before <= position)
        is_new = there & (token - before >= first_token)
        is_old = there & (token - before < first_token)
        page = tl.load(table_ptr + (position - before) // PAGE, mask=is_old, other=-1)
        is_old = is_old & (page >= 0) & (page < NUM_PAGES)
        # Rows of the block before contribute their first half, rows of the block itself their last half.
        half = tl.where(number < POOLED - RATIO, 0, (POOLED // RATIO - 1) * D)
        new_at = (token - before).to(tl.int64) * ROW + half
        old_at = (page.to(tl.int64) * PAGE + (position - before) % PAGE) * ROW + half
        shown = (is_new | is_old)[:, None]
        gates = _rows_of(rows_ptr, new_at, is_new, state_ptr, old_at, is_old, column, ROW // 2, D)  # [ROWS, BLOCK]
        gates = tl.where(shown, gates, float("-inf"))
        contents = _rows_of(rows_ptr, new_at, is_new, state_ptr, old_at, is_old, column, 0, D)
        new_top = tl.maximum(top, tl.max(gates, 0))
        shift = finite_or_zero(new_top)
        keep = tl.exp2((top - shift) * LOG2E)
        weights = tl.exp2((gates - shift[None, :]) * LOG2E)
        total = total * keep + tl.sum(weights, 0)
        pooled = pooled * keep + tl.sum(tl.where(shown, weights * contents, 0.0), 0)
        top = new_top
    return tl.where(column < D, pooled / total, 0.0)


@kernel
def _rows_of(new_ptr, new_at, is_new, old_ptr, old_at, is_old, column, FIRST: tl.constexpr, D: tl.constexpr):
    """Load D columns from FIRST on of new and of old rows, [rows, columns]; 0 where neither mask is true."""
    inside = (column < D)[None, :]
    new = tl.load(new_ptr + (new_at + FIRST)[:, None] + column[None, :], mask=is_new[:, None] & inside, other=0.0)
    old = tl.load(old_ptr + (old_at + FIRST)[:, None] + column[None, :], mask=is_old[:, None] & inside, other=0.0)
    return tl.where(is_new[:, None], new, old)


@kernel
def _normed_and_rotated(
    values,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    token,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):
    """Normalize values [BLOCK], and rotate the last 2·HALF of D columns in pairs of adjacent columns."""
    column = tl.arange(0, BLOCK)
    norm = tl.load(norm_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * norm
    even, odd = tl.split(tl.reshape(values, [BLOCK // 2, 2]))
    angle = tl.arange(0, BLOCK // 2) - (D // 2 - HALF)
    rotated = (angle >= 0) & (angle < HALF)
    at = token.to(tl.int64) * HALF + angle
    cos = tl.load(cos_ptr + at, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + at, mask=rotated, other=0.0)
    first = tl.where(rotated, even * cos - odd * sin, even)
    second = tl.where(rotated, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(first, second), [BLOCK])
