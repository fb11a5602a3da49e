"""Write one row of columns per new token into a paged pool, in Triton, either as a cast copy or quantised.

A slot is the place of a token in the pool: page·ps + offset, where ps is the number of tokens per page. A program
handles a block of tokens and a block of columns. If rows are quantised, the block of columns is one scale group: the
columns of a token that share a scale, which is their largest magnitude / QMAX.

    slot = slots[token]
    values = rows[token, columns]                        # [tokens, columns]
    pages[slot, columns] = values                        # copy
    pages[slot, columns] = quantise(values, scale)       # quantised
    scales[slot, group] = scale                          # float32, or the exponent of a power of two

Slots are distinct, so no two programs write the same bytes, and no barriers are needed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl

from pallas_attn.triton.launch import block_columns, kernel, launch
from pallas_attn.triton.quantise import amax_scale, f32_from_power_of_two, latent_exponents, quantise, row_amax
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import LATENT_8BIT, QMAX

TILE_ELEMENTS = 2048
"""Elements that a program writes: 16 for each of its 128 threads, which is two 16-byte stores for a 16-bit dtype."""


def scatter_rows(rows: jax.Array, slots: jax.Array, pages: jax.Array, *, first_column: int = 0) -> jax.Array:
    """Copy columns of each token's row into the token's slot, cast to the dtype of the pages. Return the pages.

    Args:
      rows: [T, at least first_column + D].
      slots: int32 [T]. A slot outside the pool is not written.
      pages: [N, ps, D], updated in place.
      first_column: first copied column.
    """
    num_tokens, source_width = rows.shape
    width = pages.shape[-1]
    columns = block_columns(width)
    tokens = max(1, TILE_ELEMENTS // columns)
    (pages,) = launch(
        _copy,
        *(rows, slots, pages, num_tokens),
        outputs=[pages],
        grid=(-(-num_tokens // tokens), -(-width // columns)),
        constants={
            "NUM_SLOTS": _num_slots(pages),
            "SOURCE_WIDTH": source_width,
            "FIRST_COLUMN": first_column,
            "WIDTH": width,
            "TOKENS": tokens,
            "COLUMNS": columns,
        },
        aliases={2: 0},
        bytes_accessed=num_tokens * width * (rows.dtype.itemsize + pages.dtype.itemsize),
    )
    return pages


def quantise_rows(rows: jax.Array, slots: jax.Array, pages: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise the first D columns of each token's row into the token's slot, with a scale per group of columns.

    Args:
      rows: [T, at least D].
      slots: int32 [T]. A slot outside the pool is not written.
      pages: float8_e4m3fn [N, ps, D], updated in place.
      scale: float32 or float8_e8m0fnu [N, ps, groups], updated in place; D is a multiple of groups.

    Returns:
      The pages and scales.
    """
    num_tokens, width, groups = rows.shape[0], pages.shape[-1], scale.shape[-1]
    columns = power_of_two(width // groups)
    tokens = max(1, TILE_ELEMENTS // columns)
    pages, scale = launch(
        _quantise,
        *(rows, slots, pages, scale, num_tokens),
        outputs=[pages, scale],
        grid=(-(-num_tokens // tokens), groups),
        constants={
            "NUM_SLOTS": _num_slots(pages),
            "SOURCE_WIDTH": rows.shape[-1],
            "GROUPS": groups,
            "GROUP": width // groups,
            "COLUMNS": columns,
            "TOKENS": tokens,
            "QMAX": float(QMAX[LATENT_8BIT]),
        },
        aliases={2: 0, 3: 1},
        bytes_accessed=num_tokens * width * (rows.dtype.itemsize + 1),
    )
    return pages, scale


def _num_slots(pages: jax.Array) -> int:
    """Return the number of slots of the pool, or the largest int32 if the pool is larger: slots are int32."""
    return min(pages.shape[0] * pages.shape[1], jnp.iinfo(jnp.int32).max)


@kernel
def _slots_of(slots_ptr, token, num_tokens, NUM_SLOTS: tl.constexpr):
    """Return the slots of tokens (int64 [tokens]), and whether the token exists and its slot is in the pool."""
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    return slot.to(tl.int64), (slot >= 0) & (slot < NUM_SLOTS)


@kernel
def _copy(
    rows_ptr,  # [T, SOURCE_WIDTH]
    slots_ptr,  # [T]
    _aliased_ptr,  # same memory as pages_ptr
    num_tokens,
    pages_ptr,  # [NUM_SLOTS, WIDTH]
    NUM_SLOTS: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, written = _slots_of(slots_ptr, token, num_tokens, NUM_SLOTS)
    copied = written[:, None] & (column < WIDTH)[None, :]
    source = rows_ptr + (token.to(tl.int64) * SOURCE_WIDTH + FIRST_COLUMN)[:, None] + column[None, :]
    values = tl.load(source, mask=copied)
    tl.store(pages_ptr + (slot * WIDTH)[:, None] + column[None, :], values.to(pages_ptr.dtype.element_ty), mask=copied)


@kernel
def _quantise(
    rows_ptr,  # [T, SOURCE_WIDTH]
    slots_ptr,  # [T]
    _aliased_pages_ptr,  # same memory as pages_ptr
    _aliased_scale_ptr,  # same memory as scale_ptr
    num_tokens,
    pages_ptr,  # [NUM_SLOTS, GROUPS * GROUP]
    scale_ptr,  # [NUM_SLOTS, GROUPS]
    NUM_SLOTS: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    QMAX: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, COLUMNS)
    slot, written = _slots_of(slots_ptr, token, num_tokens, NUM_SLOTS)
    held = tl.broadcast_to(written[:, None], [TOKENS, COLUMNS])
    if COLUMNS > GROUP:
        held = held & (tl.arange(0, COLUMNS) < GROUP)[None, :]
    source = rows_ptr + (token.to(tl.int64) * SOURCE_WIDTH)[:, None] + column[None, :]
    values = tl.load(source, mask=held, other=0.0).to(tl.float32)
    amax = row_amax((values,))
    if scale_ptr.dtype.element_ty == tl.uint8:
        stored = latent_exponents(amax, QMAX)
        scale = f32_from_power_of_two(stored)
    else:
        scale = amax_scale(amax, QMAX)
        stored = scale
    at = pages_ptr + (slot * (GROUPS * GROUP))[:, None] + column[None, :]
    tl.store(at, quantise(values, scale[:, None], tl.uint8, QMAX), mask=held)
    tl.store(scale_ptr + slot * GROUPS + group, stored.to(scale_ptr.dtype.element_ty), mask=written)
