"""`mla_sparse` in Triton, for any card from Ampere (sm80) on.

A token's heads are the rows of a tile, the latents in the slots that it names are gathered as its columns:

    S [heads, slots] = q_latent Cᵀ + q_rope Rᵀ      O [heads, L] += P C      m, l [heads]

so a latent that was loaded once is key and value. A program takes a block of heads of one token, and all its slots, or
where that would leave multiprocessors idle a share of them; shares are merged (`triton.split_states`). How many there
are depends on shapes only.

Latents in 8 bits come in groups of 128 columns with a scale for each token. They are multiplied as 16-bit numbers that
hold them exactly, group by group: scales multiply the group's part of the scores, and the weights of its values, which
then are bfloat16 numbers, since float16 would lose what a scale makes small.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.runtime import device
from pallas_attn.triton import caches, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.pieces import LOG2E, columns, places, softmax_result, softmax_step, tensor_core_operand
from pallas_attn.triton.split_states import EvenSplits, merge_splits, state_shapes, store_values
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import LATENT_GROUP

LEAST_STEPS = 4
"""Steps of a share, at least: for fewer, merging costs more than what runs beside it saves."""


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    num_tokens, num_heads, latent_dim = call.q_latent.shape
    rope_dim, top_k = call.q_rope.shape[2], call.slots.shape[1]
    caches.refuse_latents(call.q_latent, call.cache, rope_dim)
    card, cache = device.triton_card(), call.cache
    tile = tiles.sparse_tile(card, num_heads, latent_dim, rope_dim, quantised=cache.is_quantised)
    blocks, steps = -(-num_heads // tile.rows), -(-top_k // tile.tokens)
    splits = _num_splits(tile.programs_side_by_side(card, num_heads) // num_tokens, steps)
    num_pages, page_size, pages_width = cache.pages.shape
    chunk = LATENT_GROUP if cache.is_quantised else tile.width
    out, lse, *partial = launch(
        _attend,
        *(call.q_latent, call.q_rope, cache.pages, cache.scale, cache.rope, call.slots),
        min(num_pages * page_size, jnp.iinfo(jnp.int32).max),
        outputs=[
            jax.ShapeDtypeStruct(call.q_latent.shape, call.output_dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
            *state_shapes(num_tokens * splits if splits > 1 else 1, num_heads, latent_dim),
        ],
        grid=(num_tokens * blocks * splits,),
        constants={
            "HEADS": num_heads,
            "L": latent_dim,
            "R": rope_dim,
            "TOP_K": top_k,
            "PAGES_WIDTH": pages_width,
            "ROWS": tile.rows,
            "BLOCKS": blocks,
            "SPLITS": splits,
            "SPLIT_SLOTS": -(-steps // splits) * tile.tokens,
            "CHUNK": chunk,
            "CHUNKS": -(-latent_dim // chunk),
            "ROPE_WIDTH": power_of_two(rope_dim),
            "TOKENS": tile.tokens,
            "SCALE": call.sm_scale,
            "NATIVE": tiles.has_e4m3(card),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
        flops=2 * num_tokens * num_heads * top_k * (2 * latent_dim + rope_dim),
    )
    if splits > 1:
        out, lse = merge_splits(out[:, None], lse[:, None], partial, EvenSplits.of(num_tokens, splits))
        out, lse = out[:, 0], lse[:, 0]
    return out, lse


def _num_splits(programs: int, steps: int) -> int:
    """Shares of a token's slots: as many as run side by side, if each has some steps."""
    wanted = max(1, min(programs, steps // LEAST_STEPS))
    return -(-steps // -(-steps // wanted))  # none without a step


@kernel
def _attend(
    q_latent_ptr,  # [T, HEADS, L]
    q_rope_ptr,  # [T, HEADS, R]
    pages_ptr,  # [pool slots, PAGES_WIDTH]
    scale_ptr,  # [pool slots, CHUNKS] or None
    rope_ptr,  # [pool slots, R] or None
    slots_ptr,  # [T, TOP_K]
    pool_slots,
    out_ptr,  # [T, HEADS, L]
    lse_ptr,  # [T, HEADS]
    part_ptr,  # [T * SPLITS, HEADS, L], unused for one split
    part_top_ptr,  # [T * SPLITS, HEADS] each
    part_total_ptr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    PAGES_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    q_dtype: tl.constexpr = q_latent_ptr.dtype.element_ty
    block, split = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % SPLITS
    token = (tl.program_id(0) // (BLOCKS * SPLITS)).to(tl.int64)
    head, real_row = block * ROWS + tl.arange(0, ROWS), tl.full([ROWS], True, tl.int1)
    if HEADS % ROWS:
        real_row = head < HEADS
    first_row = token * HEADS
    chosen_ptr = slots_ptr + token * TOP_K
    first = split * SPLIT_SLOTS
    end = _end_of_chosen(chosen_ptr, first, tl.minimum(first + SPLIT_SLOTS, TOP_K), pool_slots)

    q_latent, acc = (), ()  # by chunk
    for chunk in tl.static_range(CHUNKS):
        q_latent += (columns(q_latent_ptr + first_row * L, head * L, chunk * CHUNK, real_row, L, CHUNK),)
        acc += (tl.zeros([ROWS, CHUNK], tl.float32),)
    q_rope = columns(q_rope_ptr + first_row * R, head * R, 0, real_row, R, ROPE_WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    place = first + tl.arange(0, TOKENS)
    next_slot = tl.load(chosen_ptr + place, mask=place < end, other=-1)  # loaded a step ahead
    for start in range(first, end, TOKENS):
        place = start + TOKENS + tl.arange(0, TOKENS)
        slot = next_slot.to(tl.int64)
        seen = (next_slot >= 0) & (next_slot < pool_slots)
        next_slot = tl.load(chosen_ptr + place, mask=place < end, other=-1)
        if rope_ptr is None:
            k_rope = columns(pages_ptr + L, slot * PAGES_WIDTH, 0, seen, R, ROPE_WIDTH)
        else:
            k_rope = columns(rope_ptr, slot * R, 0, seen, R, ROPE_WIDTH)
        scores = tl.dot(q_rope, tl.trans(k_rope))
        latent, scales = (), ()
        for chunk in tl.static_range(CHUNKS):
            stored = columns(pages_ptr, slot * PAGES_WIDTH, chunk * CHUNK, seen, L, CHUNK)
            latent += (stored,)
            k = tl.trans(tensor_core_operand(stored, q_dtype, NATIVE))
            if scale_ptr is None:
                scores = tl.dot(q_latent[chunk], k, scores)
            else:
                scale = tl.load(scale_ptr + slot * CHUNKS + chunk, mask=seen, other=0.0)
                scales += (scale,)
                scores += tl.dot(q_latent[chunk], k) * scale[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))  # no addition: a score may be NaN
        top, total, keep, weights = softmax_step(scores, top, total, SCALE * LOG2E)
        new_acc = ()
        for chunk in tl.static_range(CHUNKS):
            kept = acc[chunk] * keep[:, None]
            if scale_ptr is None:
                kept = tl.dot(weights.to(q_dtype), latent[chunk], kept)
            else:
                scaled = (weights * scales[chunk][None, :]).to(tl.bfloat16)
                kept = tl.dot(scaled, tensor_core_operand(latent[chunk], tl.bfloat16, NATIVE), kept)
            new_acc += (kept,)
        acc = new_acc

    state = (token * SPLITS + split) * HEADS
    inverse, lse = softmax_result(top, total, tl.full([ROWS], float("-inf"), tl.float32))
    for chunk in tl.static_range(CHUNKS):
        at, held = places(head * L, real_row, chunk * CHUNK, L, CHUNK)
        if SPLITS == 1:
            store_values(out_ptr + first_row * L + at, acc[chunk], inverse, total, held)
        else:
            tl.store(part_ptr + state * L + at, acc[chunk], mask=held)
    if SPLITS == 1:
        tl.store(lse_ptr + first_row + head, lse, mask=real_row)
    else:
        tl.store(part_top_ptr + state + head, top, mask=real_row)
        tl.store(part_total_ptr + state + head, total, mask=real_row)


@kernel
def _end_of_chosen(chosen_ptr, first, end, pool_slots):
    """End of the slots from `first` to `end` that are in the pool: most often, the last ones are none."""
    last = first
    for start in range(first, end, 1024):
        place = start + tl.arange(0, 1024)
        slot = tl.load(chosen_ptr + place, mask=place < end, other=-1)
        held = (slot >= 0) & (slot < pool_slots)
        last = tl.maximum(last, tl.max(tl.where(held, place + 1, 0), 0))
    return last
