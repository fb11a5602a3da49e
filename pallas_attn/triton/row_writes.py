"""Writing rows of new tokens into their slots of a paged pool, in Triton: copied, or in 8 bits with a scale a group.

A program takes some tokens and as many columns as are contiguous: it looks up the tokens' slots and writes their
columns there. In 8 bits a program takes one group of columns of each token, whose largest magnitude is its scale, and
stores both. No two programs write the same bytes, because slots are distinct.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl

from pallas_attn.triton.launch import block_columns, kernel, launch
from pallas_attn.triton.pieces import amax_scale, e4m3_from_f32
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import LATENT_8BIT, QMAX

TILE_ELEMENTS = 2048
"""Elements that a program writes: 16 for each of its 128 threads, two accesses of 16 bytes in 16 bits."""


def copied(rows: jax.Array, slots: jax.Array, pages: jax.Array, *, first_column: int = 0) -> jax.Array:
    """Pages with the tokens' columns, from the first one on, in their slots."""
    num_tokens, source_width = rows.shape
    width = pages.shape[-1]
    columns = block_columns(width)
    tokens = max(1, TILE_ELEMENTS // columns)
    (pages,) = launch(
        _copy_rows,
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


def quantised(rows: jax.Array, slots: jax.Array, pages: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pages [N, ps, D] in float8_e4m3fn and their scales [N, ps, groups] with the tokens' first D columns in their
    slots.
    """
    num_tokens, width, groups = rows.shape[0], pages.shape[-1], scale.shape[-1]
    columns = power_of_two(width // groups)
    tokens = max(1, TILE_ELEMENTS // columns)
    pages, scale = launch(
        _quantise_rows,
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
    """Slots of the pool that an int32 names."""
    return min(pages.shape[0] * pages.shape[1], jnp.iinfo(jnp.int32).max)


@kernel
def _slots_of(slots_ptr, token, num_tokens, NUM_SLOTS: tl.constexpr):
    """Slots of tokens, and which of them are written."""
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    return slot.to(tl.int64), (slot >= 0) & (slot < NUM_SLOTS)


@kernel
def _copy_rows(
    rows_ptr,  # [T, SOURCE_WIDTH]
    slots_ptr,  # [T]
    _aliased_ptr,
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
def _quantise_rows(
    rows_ptr,  # [T, SOURCE_WIDTH]
    slots_ptr,  # [T]
    _aliased_pages_ptr,
    _aliased_scale_ptr,
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
    amax = tl.max(tl.abs(values), 1)
    is_nan = tl.max((values != values).to(tl.int32), 1) > 0  # which a maximum leaves out
    scale = amax_scale(tl.where(is_nan, float("nan"), amax), QMAX)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], [TOKENS, COLUMNS]))
    clipped = tl.where(quotient > QMAX, QMAX, tl.where(quotient < -QMAX, -QMAX, quotient))
    at = pages_ptr + (slot * (GROUPS * GROUP))[:, None] + column[None, :]
    tl.store(at, e4m3_from_f32(clipped), mask=held)
    tl.store(scale_ptr + slot * GROUPS + group, scale, mask=written)
