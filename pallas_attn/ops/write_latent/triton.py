"""`write_latent` in Triton, for any card from Ampere (sm80) on.

A program takes some tokens and as many columns as are contiguous: it looks up the tokens' slots and copies their
columns there. For an 8-bit cache a program takes one group of 128 columns of each token, whose largest magnitude is its
scale, and stores both; rotated keys are copied by a launch of their own. No two programs write the same bytes, because
slots are distinct.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton.language as tl

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.triton.launch import block_columns, kernel, launch
from pallas_attn.triton.pieces import amax_scale, e4m3_from_f32
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP, QMAX, PagedLatent

TILE_ELEMENTS = 2048
"""Elements that a program copies: 16 for each of its 128 threads, two accesses of 16 bytes in 16 bits."""


def write_latent(call: WriteLatentCall) -> PagedLatent:
    cache, latent, slots = call.cache, call.latent, call.slots
    if cache.scale is None or cache.rope is None:
        return PagedLatent(_copied(latent, slots, cache.pages, first_column=0))
    latent_dim = cache.pages.shape[-1]
    num_tokens, groups = latent.shape[0], latent_dim // LATENT_GROUP
    tokens = TILE_ELEMENTS // LATENT_GROUP
    pages, scale = launch(
        _quantise_rows,
        *(latent, slots, cache.pages, cache.scale, num_tokens),
        outputs=[cache.pages, cache.scale],
        grid=(-(-num_tokens // tokens), groups),
        constants={
            "NUM_SLOTS": _num_slots(cache.pages),
            "SOURCE_WIDTH": latent.shape[-1],
            "GROUPS": groups,
            "GROUP": LATENT_GROUP,
            "TOKENS": tokens,
            "QMAX": float(QMAX[LATENT_8BIT]),
        },
        aliases={2: 0, 3: 1},
        bytes_accessed=num_tokens * latent_dim * (latent.dtype.itemsize + 1),
    )
    rope = _copied(latent, slots, cache.rope, first_column=latent_dim)
    return dataclasses.replace(cache, pages=pages, scale=scale, rope=rope)


def _copied(latent: jax.Array, slots: jax.Array, pages: jax.Array, first_column: int) -> jax.Array:
    """Pages with the tokens' columns, from the first one on, in their slots."""
    num_tokens, source_width = latent.shape
    width = pages.shape[-1]
    columns = block_columns(width)
    tokens = max(1, TILE_ELEMENTS // columns)
    (pages,) = launch(
        _copy_rows,
        *(latent, slots, pages, num_tokens),
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
        bytes_accessed=num_tokens * width * (latent.dtype.itemsize + pages.dtype.itemsize),
    )
    return pages


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
    latent_ptr,  # [T, SOURCE_WIDTH]
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
    source = latent_ptr + (token.to(tl.int64) * SOURCE_WIDTH + FIRST_COLUMN)[:, None] + column[None, :]
    values = tl.load(source, mask=copied)
    tl.store(pages_ptr + (slot * WIDTH)[:, None] + column[None, :], values.to(pages_ptr.dtype.element_ty), mask=copied)


@kernel
def _quantise_rows(
    latent_ptr,  # [T, SOURCE_WIDTH]
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
    TOKENS: tl.constexpr,
    QMAX: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    slot, written = _slots_of(slots_ptr, token, num_tokens, NUM_SLOTS)
    source = latent_ptr + (token.to(tl.int64) * SOURCE_WIDTH)[:, None] + column[None, :]
    values = tl.load(source, mask=written[:, None], other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), 1)
    is_nan = tl.max((values != values).to(tl.int32), 1) > 0  # which a maximum leaves out
    scale = amax_scale(tl.where(is_nan, float("nan"), amax), QMAX)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], [TOKENS, GROUP]))
    clipped = tl.where(quotient > QMAX, QMAX, tl.where(quotient < -QMAX, -QMAX, quotient))
    at = pages_ptr + (slot * (GROUPS * GROUP))[:, None] + column[None, :]
    tl.store(at, e4m3_from_f32(clipped), mask=written[:, None])
    tl.store(scale_ptr + slot * GROUPS + group, scale, mask=written)
