"""`mla_sparse` in Triton, for cards from Ampere (sm80) on.

A program computes a block of heads of one token over one split of the token's slots:

    for step in the split's slots:                                   # of the first cache, then of the second cache
        c, r = latents and rotated keys, gathered from the slots     # loaded once, used as key and value
        s = q_latent c^T + q_rope r^T                                # [heads, tokens]
        top, total, weights = softmax_step(s)
        acc = acc * keep + weights c                                 # [heads, latent columns]
    store the output, or with several splits a partial state
    merge_splits                                                     # second kernel, only with several splits

The slots of the second cache follow the padded slots of the first cache, so that the slots of a step are in one cache.
Caches without rotated keys (R = 0) have no product with q_rope.

The slots of a token have several splits if fewer programs would leave multiprocessors idle. The number of splits
depends on shapes only. Programs do not wait for one another, and no two programs write the same split or output row.

If the slots of a token are a `SlotRange`, a step computes them from the block table. This form has not run on a GPU.

8-bit latents have a scale for each token and group of 128 columns. Each group (chunk of columns) is converted to 16
bits exactly. The scales multiply the group's part of the scores, and the weights of the group's values. Scaled
weights are bfloat16, because float16 would lose weights with small scales. If the scales are powers of two, for groups
of 64 columns, number times scale is exact in bfloat16, and the loop is that of 16-bit latents.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.mla_sparse.call import NO_PAGE, MlaSparseCall
from pallas_attn.runtime import device
from pallas_attn.triton import caches, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.page_access import load_columns
from pallas_attn.triton.quantise import dequantise, f32_from_power_of_two, tensor_core_operand
from pallas_attn.triton.softmax import softmax_step
from pallas_attn.triton.split_states import EvenSplits, merge_splits, state_shapes, store_chunked_state
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import PagedLatent, latent_group

ABSENT = tl.constexpr(NO_PAGE)

MIN_STEPS = 4
"""Minimum number of steps of a split. With fewer steps, the merge costs more than the split saves."""


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    num_tokens, num_heads, latent_dim = call.q_latent.shape
    rope_dim, (top_k, *extra_k), ranges = call.rope_dim, call.max_slots, call.ranges
    card, cache, extra = device.triton_card(), call.cache, call.extra_cache
    if call.small_groups:
        _require_small_groups(call)
    else:
        caches.require_latents(call.q_latent, cache, rope_dim)
        if extra is not None and cache.is_quantised:
            raise NotImplementedError("does not take two caches with float32 scales in one call")
    options = {"quantised": cache.is_quantised, "small_groups": call.small_groups}
    tile = tiles.sparse_tile(card, num_heads, latent_dim, rope_dim, **options)
    first_extra = -(-top_k // tile.tokens) * tile.tokens
    num_slots = first_extra + extra_k[0] if extra_k else top_k
    blocks, steps = -(-num_heads // tile.rows), -(-num_slots // tile.tokens)
    splits = _num_splits(tile.concurrent_programs(card, num_heads) // num_tokens, steps)
    pages_width = cache.pages.shape[2]
    chunk = latent_group(cache.scale.dtype) if cache.scale is not None else tile.width
    slots: Any = call.slots if ranges is None else ranges.first_slots
    extra_slots: Any = call.extra_slots if ranges is None else None
    out, lse, *partial = launch(
        _attend,
        *(call.q_latent, call.q_rope, cache.pages, cache.scale, cache.rope, slots, call.sinks),
        *((None, None, None) if extra is None else (extra.pages, extra.scale, extra.rope)),
        *(extra_slots, None if ranges is None else ranges.keys),
        *(_pool_slots(cache), None if extra is None else _pool_slots(extra)),
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
            "FIRST_EXTRA": first_extra,
            "NUM_SLOTS": num_slots,
            "PAGES_WIDTH": pages_width,
            "SMALL_GROUPS": call.small_groups,
            "ROWS": tile.rows,
            "BLOCKS": blocks,
            "SPLITS": splits,
            "SPLIT_SLOTS": -(-steps // splits) * tile.tokens,
            "PAGE_SIZE": 0 if ranges is None else cache.page_size,
            "EXTRA_PAGE_SIZE": 0 if ranges is None or extra is None else extra.page_size,
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
        flops=2 * num_tokens * num_heads * num_slots * (2 * latent_dim + rope_dim),
    )
    if splits > 1:
        out, lse = merge_splits(
            *(out[:, None], lse[:, None], partial, EvenSplits.of(num_tokens, splits), call.sinks), scale=call.sm_scale
        )
        out, lse = out[:, 0], lse[:, 0]
    return out, lse


def _require_small_groups(call: MlaSparseCall) -> None:
    """Raise NotImplementedError if the kernel does not support a cache with scales that are powers of two."""
    if call.q_rope is not None:
        raise NotImplementedError("takes scales that are powers of two only if rotated keys are values, too")
    rope_dtype = call.cache.pages.dtype if call.cache.rope is None else call.cache.rope.dtype
    if call.q_latent.dtype != jnp.bfloat16 or rope_dtype != jnp.bfloat16:
        raise NotImplementedError(
            "takes bfloat16 queries and rotated keys with scales that are powers of two,"
            f" got {call.q_latent.dtype.name} and {rope_dtype.name}"
        )
    if call.q_latent.shape[2] > caches.MAX_LATENT_DIM:
        raise NotImplementedError(f"takes latents of up to {caches.MAX_LATENT_DIM} columns, got {call.cache.width}")


def _pool_slots(cache: PagedLatent) -> int:
    """Return the number of slots of a pool, or the largest int32 if the pool is larger: slots are int32."""
    num_pages, page_size, _ = cache.pages.shape
    return min(num_pages * page_size, jnp.iinfo(jnp.int32).max)


def _num_splits(programs: int, steps: int) -> int:
    """Return the number of splits of a token's slots.

    It is the number of programs per token that run concurrently, limited so that a split has at least `MIN_STEPS`
    steps.

    Args:
      programs: number of programs per block and token that run concurrently.
      steps: number of steps over all slots of a token.
    """
    wanted = max(1, min(programs, steps // MIN_STEPS))
    return -(-steps // -(-steps // wanted))  # no split is empty


@kernel
def _attend(
    q_latent_ptr,  # [T, HEADS, L]
    q_rope_ptr,  # [T, HEADS, R], or None if R is 0
    pages_ptr,  # [pool slots, PAGES_WIDTH]
    scale_ptr,  # float32 [pool slots, CHUNKS], powers of two [pool slots, PAGES_WIDTH / CHUNK], or None
    rope_ptr,  # [pool slots, R], with SMALL_GROUPS [pool slots, L - PAGES_WIDTH], or None
    slots_ptr,  # [T, TOP_K], or `SlotRangeInputs.first_slots`
    sinks_ptr,  # [HEADS] or None
    extra_pages_ptr,  # [extra_pool_slots, PAGES_WIDTH] or None; extra_scale_ptr and extra_rope_ptr in the same way
    extra_scale_ptr,
    extra_rope_ptr,
    extra_slots_ptr,  # [T, NUM_SLOTS - FIRST_EXTRA] or None
    ranges_ptr,  # [T, caches, 3], `SlotRangeInputs.keys`, or None for lists of slots
    pool_slots,
    extra_pool_slots,  # None without a second cache
    out_ptr,  # [T, HEADS, L]
    lse_ptr,  # [T, HEADS]
    part_ptr,  # [T * SPLITS, HEADS, L], unused for one split
    part_top_ptr,  # [T * SPLITS, HEADS] each
    part_total_ptr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST_EXTRA: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PAGES_WIDTH: tl.constexpr,
    SMALL_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0 for lists of slots
    EXTRA_PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    q_dtype: tl.constexpr = q_latent_ptr.dtype.element_ty
    SCALED: tl.constexpr = scale_ptr is not None and not SMALL_GROUPS  # pyrefly: ignore[bad-assignment]
    block, split = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % SPLITS
    token = (tl.program_id(0) // (BLOCKS * SPLITS)).to(tl.int64)
    head, real_row = block * ROWS + tl.arange(0, ROWS), tl.full([ROWS], True, tl.int1)
    if HEADS % ROWS:
        real_row = head < HEADS
    first_row = token * HEADS
    first = split * SPLIT_SLOTS
    if PAGE_SIZE:
        table_ptr, shift, count = _load_range(ranges_ptr + token * (3 if extra_pages_ptr is None else 6), slots_ptr)
        extra_table_ptr, extra_shift = table_ptr, shift
        end = tl.minimum(first + SPLIT_SLOTS, count)
        if extra_pages_ptr is not None:  # key i of the second range is slot FIRST_EXTRA + i
            extra_table_ptr, extra_shift, extra_count = _load_range(ranges_ptr + token * 6 + 3, slots_ptr)
            extra_shift -= FIRST_EXTRA
            extra_end = tl.minimum(first + SPLIT_SLOTS, FIRST_EXTRA + extra_count)
            end = tl.where(extra_end > tl.maximum(first, FIRST_EXTRA), extra_end, end)
    else:
        chosen_ptr = slots_ptr + token * TOP_K
        end = _end_of_chosen(chosen_ptr, first, tl.minimum(first + SPLIT_SLOTS, TOP_K), pool_slots)
        if extra_slots_ptr is not None:  # slot i of the second list is slot FIRST_EXTRA + i
            extra_ptr = extra_slots_ptr + token * (NUM_SLOTS - FIRST_EXTRA) - FIRST_EXTRA
            begin = tl.maximum(first, FIRST_EXTRA)
            extra_end = _end_of_chosen(extra_ptr, begin, tl.minimum(first + SPLIT_SLOTS, NUM_SLOTS), extra_pool_slots)
            end = tl.where(extra_end > begin, extra_end, end)

    q_latent, acc = (), ()  # for each chunk of columns: [heads, CHUNK]
    for chunk in tl.static_range(CHUNKS):
        q_latent += (load_columns(q_latent_ptr + first_row * L, head * L, chunk * CHUNK, real_row, L, CHUNK),)
        acc += (tl.zeros([ROWS, CHUNK], tl.float32),)
    if R:
        q_rope = load_columns(q_rope_ptr + first_row * R, head * R, 0, real_row, R, ROPE_WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Slots are loaded one step ahead.
    if PAGE_SIZE:
        next_slot = _slots_of_range(
            *(table_ptr, extra_table_ptr, shift, extra_shift, count, first, end),  # pyrefly: ignore[unbound-name]
            *(FIRST_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE, TOKENS),
        )
    else:
        next_slot = _slots_of_step(
            *(chosen_ptr, extra_slots_ptr, token, first, end),  # pyrefly: ignore[unbound-name]
            *(TOP_K, FIRST_EXTRA, NUM_SLOTS, TOKENS),
        )
    for start in range(first, end, TOKENS):
        slot, page_ptr, num_slots = next_slot.to(tl.int64), pages_ptr, pool_slots
        group_scale_ptr, last_ptr = scale_ptr, rope_ptr
        if extra_pages_ptr is not None:
            page_ptr = tl.where(start >= FIRST_EXTRA, extra_pages_ptr, pages_ptr)
            if SMALL_GROUPS:
                group_scale_ptr = tl.where(start >= FIRST_EXTRA, extra_scale_ptr, scale_ptr)
                last_ptr = tl.where(start >= FIRST_EXTRA, extra_rope_ptr, rope_ptr)
            num_slots = tl.where(start >= FIRST_EXTRA, extra_pool_slots, pool_slots)
        seen = (next_slot >= 0) & (next_slot < num_slots)
        if PAGE_SIZE:
            next_slot = _slots_of_range(
                *(table_ptr, extra_table_ptr, shift, extra_shift, count, start + TOKENS, end),
                *(FIRST_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE, TOKENS),
            )
        else:
            next_slot = _slots_of_step(
                *(chosen_ptr, extra_slots_ptr, token, start + TOKENS, end),  # pyrefly: ignore[unbound-name]
                *(TOP_K, FIRST_EXTRA, NUM_SLOTS, TOKENS),
            )
        scores = tl.zeros([ROWS, TOKENS], tl.float32)  # [heads, tokens]
        if R:
            if rope_ptr is None:
                k_rope = load_columns(page_ptr + L, slot * PAGES_WIDTH, 0, seen, R, ROPE_WIDTH)
            else:
                k_rope = load_columns(rope_ptr, slot * R, 0, seen, R, ROPE_WIDTH)
            scores = tl.dot(q_rope, tl.trans(k_rope))  # pyrefly: ignore[unbound-name]
        latent, scales = (), ()
        for chunk in tl.static_range(CHUNKS):
            if SMALL_GROUPS:
                stored = _small_group(
                    *(page_ptr, group_scale_ptr, last_ptr, slot, seen, chunk * CHUNK),
                    *(L, PAGES_WIDTH, CHUNK, q_dtype, NATIVE),
                )
            else:
                stored = load_columns(page_ptr, slot * PAGES_WIDTH, chunk * CHUNK, seen, L, CHUNK)
            latent += (stored,)
            k = tl.trans(tensor_core_operand(stored, q_dtype, NATIVE))
            if not SCALED:
                scores = tl.dot(q_latent[chunk], k, scores)
            else:
                scale = tl.load(scale_ptr + slot * CHUNKS + chunk, mask=seen, other=0.0)
                scales += (scale,)
                scores += tl.dot(q_latent[chunk], k) * scale[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))  # a select, not an addition: a hidden score can be NaN
        top, total, keep, weights = softmax_step(scores, top, total, SCALE)
        new_acc = ()
        for chunk in tl.static_range(CHUNKS):
            kept = acc[chunk] * keep[:, None]
            if not SCALED:
                kept = tl.dot(weights.to(q_dtype), latent[chunk], kept)
            else:
                scaled = (weights * scales[chunk][None, :]).to(tl.bfloat16)
                kept = tl.dot(scaled, tensor_core_operand(latent[chunk], tl.bfloat16, NATIVE), kept)
            new_acc += (kept,)
        acc = new_acc

    store_chunked_state(
        *(acc, top, total, head, real_row, SPLITS == 1, first_row, out_ptr, lse_ptr),
        *((token * SPLITS + split) * HEADS, part_ptr, part_top_ptr, part_total_ptr, L, CHUNK, CHUNKS, SCALE, sinks_ptr),
    )


@kernel
def _small_group(
    pages_ptr,
    scale_ptr,
    rope_ptr,
    slot,
    seen,
    FIRST: tl.constexpr,
    L: tl.constexpr,
    PAGES_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    q_dtype: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load columns FIRST to FIRST + CHUNK - 1 of latents with a power of two per CHUNK columns, [tokens, CHUNK].

    Columns from PAGES_WIDTH on are in `rope_ptr`, in 16 bits. Elements with a false mask are 0.
    """
    if FIRST < PAGES_WIDTH:
        stored = load_columns(pages_ptr, slot * PAGES_WIDTH, FIRST, seen, PAGES_WIDTH, CHUNK)
        scale = tl.load(scale_ptr + slot * (PAGES_WIDTH // CHUNK) + FIRST // CHUNK, mask=seen, other=0)
        values = dequantise(stored, f32_from_power_of_two(scale)[:, None], NATIVE).to(q_dtype)
    else:
        values = load_columns(rope_ptr, slot * (L - PAGES_WIDTH), FIRST - PAGES_WIDTH, seen, L - PAGES_WIDTH, CHUNK)
    return values


@kernel
def _slots_of_step(
    chosen_ptr,
    extra_slots_ptr,
    token,
    start,
    end,
    TOP_K: tl.constexpr,
    FIRST_EXTRA: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Load slots `start` to `start` + TOKENS - 1 of a token, below `end`; -1 for padding of the first cache's slots.

    Args:
      chosen_ptr: the token's slots in the first cache.
      extra_slots_ptr: slots in the second cache, [T, NUM_SLOTS - FIRST_EXTRA], or None.
    """
    place = start + tl.arange(0, TOKENS)
    if extra_slots_ptr is None:
        slot = tl.load(chosen_ptr + place, mask=place < end, other=-1)
    else:
        is_extra = start >= FIRST_EXTRA
        extra_ptr = extra_slots_ptr + token * (NUM_SLOTS - FIRST_EXTRA) - FIRST_EXTRA
        limit = tl.where(is_extra, end, tl.minimum(end, TOP_K))
        slot = tl.load(tl.where(is_extra, extra_ptr, chosen_ptr) + place, mask=place < limit, other=-1)
    return slot


@kernel
def _load_range(range_ptr, slots_ptr):
    """Return a pointer to the first slots of the pages of a sequence, the position of the first key, and the number of
    keys.
    """
    return slots_ptr + tl.load(range_ptr), tl.load(range_ptr + 1), tl.load(range_ptr + 2)


@kernel
def _slots_of_range(
    table_ptr,
    extra_table_ptr,
    shift,
    extra_shift,
    count,
    start,
    end,
    FIRST_EXTRA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute slots `start` to `start` + TOKENS - 1 of a token, below `end`; negative for padding of the first cache.

    Args:
      table_ptr, extra_table_ptr: the first slots of the pages of the token's sequence in each cache.
      shift, extra_shift: position of the key in slot 0; of the second cache, whose first slot is FIRST_EXTRA.
      count: number of keys in the first cache.
      EXTRA_PAGE_SIZE: 0 for one cache.
    """
    place = start + tl.arange(0, TOKENS)
    if EXTRA_PAGE_SIZE:
        is_extra = start >= FIRST_EXTRA
        table_ptr = tl.where(is_extra, extra_table_ptr, table_ptr)
        position = place + tl.where(is_extra, extra_shift, shift)
        number = tl.where(is_extra, position // EXTRA_PAGE_SIZE, position // PAGE_SIZE)
        offset = tl.where(is_extra, position % EXTRA_PAGE_SIZE, position % PAGE_SIZE)
        end = tl.where(is_extra, end, tl.minimum(end, count))
    else:
        number, offset = (place + shift) // PAGE_SIZE, (place + shift) % PAGE_SIZE
    return tl.load(table_ptr + number, mask=place < end, other=ABSENT) + offset


@kernel
def _end_of_chosen(chosen_ptr, first, end, pool_slots):
    """Return the end of the slots from `first` to `end` without trailing slots outside the pool.

    Many tokens have trailing slots of -1, because fewer keys than TOP_K are visible.
    """
    last = first
    for start in range(first, end, 1024):
        place = start + tl.arange(0, 1024)
        slot = tl.load(chosen_ptr + place, mask=place < end, other=-1)
        held = (slot >= 0) & (slot < pool_slots)
        last = tl.maximum(last, tl.max(tl.where(held, place + 1, 0), 0))
    return last
