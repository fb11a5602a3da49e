"""`gather_latent` in Triton, for cards from Ampere (sm80) on.

A program copies a block of rows of the result:

    sequence, position = position of each result row, from one pass over the lengths of all sequences
    cached rows: page = block_tables[sequence, position // page size]; source = pool slot
    new rows:    source = row of the new latents
    for block of columns:
        values = load(source); dequantise 8-bit values
        result[row, columns] = values                    # [rows, columns]

The pass over the lengths is cheaper than a separate kernel for their prefix sums. Blocks of columns of an 8-bit cache
are the scale groups of 128 columns, followed by the rotated keys. No two programs write the same row, and there are no
barriers.
"""

from __future__ import annotations

import jax
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.gather_latent.call import GatherLatentCall
from pallas_attn.runtime import device
from pallas_attn.triton import tiles
from pallas_attn.triton.launch import block_columns, kernel, launch
from pallas_attn.triton.quantise import dequantise
from pallas_attn.types import LATENT_GROUP

TILE_ELEMENTS = 2048
"""Elements of a block: 16 for each of 128 threads, two 16-byte accesses for a 16-bit dtype."""

MAX_ROWS = 32
"""Maximum number of rows of a program. A program compares its rows with `SEQUENCES` ends of sequences in registers."""

SEQUENCES = 32
"""Number of sequences whose lengths a program reads at a time."""


def gather_latent(call: GatherLatentCall) -> Float[Array, "length LR"]:
    cache, new = call.cache, call.latent_new
    num_pages, page_size, pages_width = cache.pages.shape
    width = new.shape[1]
    columns = block_columns(width) if cache.scale is None else LATENT_GROUP
    rows = min(TILE_ELEMENTS // columns, MAX_ROWS)
    (out,) = launch(
        _gather_rows,
        *(cache.pages, cache.scale, cache.rope, new if call.num_new else None),
        *(call.block_tables, call.cu_q_lens, call.kv_lens, call.num_sequences, call.length),
        outputs=[jax.ShapeDtypeStruct((call.length, width), new.dtype)],
        grid=(-(-call.length // rows),),
        constants={
            "NUM_PAGES": num_pages,
            "PAGE_SIZE": page_size,
            "TABLE_PAGES": call.block_tables.shape[1],
            "PAGES_WIDTH": pages_width,
            "WIDTH": width,
            "NATIVE": tiles.has_e4m3(device.triton_card()),
            "SEQUENCES": SEQUENCES,
            "ROWS": rows,
            "COLUMNS": columns,
        },
        bytes_accessed=call.length * width * (cache.pages.dtype.itemsize + new.dtype.itemsize),
    )
    return out


@kernel
def _gather_rows(
    pages_ptr,  # [NUM_PAGES, PAGE_SIZE, PAGES_WIDTH]
    scale_ptr,  # [NUM_PAGES, PAGE_SIZE, PAGES_WIDTH / COLUMNS] or None
    rope_ptr,  # [NUM_PAGES, PAGE_SIZE, WIDTH - PAGES_WIDTH] or None
    new_ptr,  # [T, WIDTH] or None
    tables_ptr,  # [S, TABLE_PAGES]
    cu_q_lens_ptr,  # [S + 1]
    kv_lens_ptr,  # [S]
    num_sequences,
    length,
    out_ptr,  # [length, WIDTH]
    NUM_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_PAGES: tl.constexpr,
    PAGES_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < length
    sequence, start = _sequence_of(kv_lens_ptr, row, num_sequences, length, SEQUENCES)
    held = there & (sequence < num_sequences)
    position = row - start
    first_new = tl.load(cu_q_lens_ptr + sequence, mask=held, other=0)
    num_new = tl.load(cu_q_lens_ptr + sequence + 1, mask=held, other=0) - first_new
    num_cached = tl.load(kv_lens_ptr + sequence, mask=held, other=0) - num_new
    is_cached, is_new = held & (position < num_cached), held & (position >= num_cached)
    entry = sequence.to(tl.int64) * TABLE_PAGES + position // PAGE_SIZE
    page = tl.load(tables_ptr + entry, mask=is_cached, other=-1)
    is_cached = is_cached & (page >= 0) & (page < NUM_PAGES)  # absent pages are zeros
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    new_row = (first_new + position - num_cached).to(tl.int64)
    for first_column in tl.static_range(0, WIDTH, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        inside = (column < WIDTH)[None, :]
        if scale_ptr is None:
            at = pages_ptr + (slot * PAGES_WIDTH)[:, None] + column[None, :]
            values = tl.load(at, mask=is_cached[:, None] & inside, other=0.0)
        elif first_column < PAGES_WIDTH:
            at = pages_ptr + (slot * PAGES_WIDTH)[:, None] + column[None, :]
            stored = tl.load(at, mask=is_cached[:, None], other=0)
            scale_at = slot * (PAGES_WIDTH // COLUMNS) + first_column // COLUMNS
            scale = tl.load(scale_ptr + scale_at, mask=is_cached, other=0.0)
            values = dequantise(stored, scale[:, None], NATIVE).to(out_ptr.dtype.element_ty)
        else:
            at = rope_ptr + (slot * (WIDTH - PAGES_WIDTH) - PAGES_WIDTH)[:, None] + column[None, :]
            values = tl.load(at, mask=is_cached[:, None] & inside, other=0.0).to(out_ptr.dtype.element_ty)
        if new_ptr is not None:
            at = new_ptr + (new_row * WIDTH)[:, None] + column[None, :]
            values = tl.where(is_new[:, None], tl.load(at, mask=is_new[:, None] & inside, other=0.0), values)
        at = out_ptr + (row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
        tl.store(at, values, mask=there[:, None] & inside)


@kernel
def _sequence_of(kv_lens_ptr, row, num_sequences, length, SEQUENCES: tl.constexpr):
    """Return the sequence of each result row and the row at which the sequence starts.

    The sequence is `num_sequences` for rows after the last sequence. Ends of sequences do not decrease. The number of
    ends at or before a row is therefore its sequence, and the largest of these ends is the start of the sequence.
    """
    sequence, start = tl.zeros_like(row), tl.zeros_like(row)
    total = tl.full([], 0, tl.int64)  # tokens of the previous sequences; may exceed int32
    for first in range(0, num_sequences, SEQUENCES):
        number = first + tl.arange(0, SEQUENCES)
        kv_len = tl.load(kv_lens_ptr + number, mask=number < num_sequences, other=0).to(tl.int64)
        end = tl.minimum(total + tl.cumsum(kv_len), length).to(tl.int32)
        end = tl.where(number < num_sequences, end, length)
        is_before = end[None, :] <= row[:, None]
        sequence += tl.sum(is_before.to(tl.int32), 1)
        start = tl.maximum(start, tl.max(tl.where(is_before, end[None, :], 0), 1))
        total += tl.sum(kv_len)
    return sequence, start
