"""`mla_decode` in Triton, for any card from Ampere (sm80) on.

All heads of all queries of a sequence are query rows, and read the same latents; a program takes a block of them as the
rows of a tile, tokens are its columns:

    S [rows, tokens] = q_latent Cᵀ + q_rope Rᵀ      O [rows, L] += P C      m, l [rows]

so a latent that was loaded once is key and value. Programs follow the plan as those of `paged_decode` do, with one KV
head: a row that one program has to itself is written right away, others are merged (`triton.split_states`).

Latents in 8 bits come in groups of 128 columns with a scale for each token. They are multiplied as 16-bit numbers that
hold them exactly, group by group: scales multiply the group's part of the scores, and the weights of its values, which
are the sum of two bfloat16 numbers, since float16 would lose what a scale makes small. Those without scales are
multiplied as 16-bit latents are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import plan_of
from pallas_attn.runtime import device
from pallas_attn.triton import caches, plans, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.pieces import (
    LOG2E,
    columns,
    draft_visible,
    in_window,
    places,
    soft_capped,
    softmax_result,
    softmax_step,
    split_end,
    tensor_core_operand,
)
from pallas_attn.triton.split_states import merge_splits, partial_states, store_values
from pallas_attn.triton.tiles import TritonTile, power_of_two
from pallas_attn.types import LATENT_GROUP


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    plan = plan_of(call, "triton", num_programs(call))
    card, tile = _card_and_tile(call)
    cache, table_pages = call.cache, call.block_tables.shape[-1]
    num_pages, page_size, pages_width = cache.pages.shape
    chunk = tile.width if cache.scale is None else LATENT_GROUP
    out, lse, *partial = launch(
        _attend,
        *(call.q_latent, call.q_rope, cache.pages, cache.scale, cache.rope),
        *(call.block_tables, call.kv_lens, call.q_lens, call.draft_mask, *plans.followed(plan)),
        *(table_pages, num_pages),
        outputs=[
            jax.ShapeDtypeStruct(call.q_latent.shape, call.output_dtype),
            jax.ShapeDtypeStruct(call.q_latent.shape[:3], jnp.float32),
            *partial_states(plan, table_pages, call.query_rows, call.latent_dim),
        ],
        grid=(plans.num_programs(plan), -(-call.query_rows // tile.rows)),
        constants={
            "QUERIES": call.num_queries,
            "HEADS": call.num_heads,
            "L": call.latent_dim,
            "R": call.rope_dim,
            "PAGES_WIDTH": pages_width,
            "ROWS": tile.rows,
            "CHUNK": chunk,
            "CHUNKS": -(-call.latent_dim // chunk),
            "ROPE_WIDTH": power_of_two(call.rope_dim),
            "PAGE": page_size,
            "TOKENS": tile.tokens,
            "BARE_STEPS": tile.bare_steps and call.window is None,
            "SCALE": call.sm_scale,
            "CAP": call.soft_cap,
            "WINDOW": call.window,
            "SPLIT_PAGES": plan.split_pages,
            "NATIVE": tiles.has_e4m3(card),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
    )
    return merge_splits(out, lse, partial, plan)


def num_programs(call: MlaDecodeCall) -> int:
    """Number of programs for plans of such calls: as many as run side by side on the card."""
    caches.refuse_latents(call.q_latent, call.cache, call.rope_dim)
    card, tile = _card_and_tile(call)
    return tile.programs_side_by_side(card, call.query_rows)


def _card_and_tile(call: MlaDecodeCall) -> tuple[device.Device, TritonTile]:
    card, widths = device.triton_card(), (call.latent_dim, call.rope_dim)
    quantised = call.cache.pages.dtype.itemsize == 1  # with scales or without, conversions take registers
    # A window and a cap take registers, as a tree does.
    demanding = not (call.draft_mask is call.window is call.soft_cap is None)
    return card, tiles.latent_tile(card, call.query_rows, *widths, quantised=quantised, tree=demanding)


@kernel
def _attend(
    q_latent_ptr,  # [B, QUERIES, HEADS, L]
    q_rope_ptr,  # [B, QUERIES, HEADS, R]
    pages_ptr,  # [pool pages, PAGE, PAGES_WIDTH]
    scale_ptr,  # [pool pages, PAGE, CHUNKS] or None
    rope_ptr,  # [pool pages, PAGE, R] or None
    tables_ptr,  # [B, table_pages]
    kv_lens_ptr,  # [B]
    q_lens_ptr,  # [B] or None
    draft_ptr,  # [B, QUERIES, QUERIES] or None
    row_order_ptr,  # [B] each
    _sink_pages_ptr,
    first_page_ptr,
    num_pages_ptr,
    next_row_ptr,
    cta_row_ptr,  # [programs + 1] each
    cta_page_ptr,
    cta_split_ptr,
    table_pages,
    pool_pages,
    out_ptr,  # [B, QUERIES, HEADS, L]
    lse_ptr,  # [B, QUERIES, HEADS]
    part_ptr,  # [splits, QUERIES * HEADS, L]
    part_top_ptr,  # [splits, QUERIES * HEADS] each
    part_total_ptr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PAGES_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    BARE_STEPS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    q_dtype: tl.constexpr = q_latent_ptr.dtype.element_ty
    BASE: tl.constexpr = LOG2E if CAP is not None else SCALE * LOG2E
    HAS_DRAFTS: tl.constexpr = tl.constexpr(QUERIES > 1 or q_lens_ptr is not None or draft_ptr is not None)
    IN_ONE_PAGE: tl.constexpr = PAGE % TOKENS == 0
    program = tl.program_id(0)
    query_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # of the sequence: all heads of a query are neighbours
    query, real_row = query_row // HEADS, tl.full([ROWS], True, tl.int1)
    if QUERIES * HEADS % ROWS:
        real_row = query_row < QUERIES * HEADS

    place, page = tl.load(cta_row_ptr + program), tl.load(cta_page_ptr + program)
    split, end_place = tl.load(cta_split_ptr + program), tl.load(cta_row_ptr + program + 1)
    # What is needed once a row is loaded once a row, since an accumulator leaves few registers.
    while (place < end_place) | ((place == end_place) & (page < tl.load(cta_page_ptr + program + 1))):
        end_page = tl.load(cta_page_ptr + program + 1)
        num_pages = tl.load(num_pages_ptr + place)
        stop = split_end(page, num_pages, place == end_place, end_page, SPLIT_PAGES)
        sequence = tl.load(row_order_ptr + place).to(tl.int64)
        kv_len = tl.load(kv_lens_ptr + sequence)
        q_len = QUERIES
        if q_lens_ptr is not None:
            q_len = tl.load(q_lens_ptr + sequence)
        table_ptr = tables_ptr + sequence * table_pages
        if WINDOW is not None:  # tokens are counted from the first page that any query sees
            first_page = tl.load(first_page_ptr + place)
            table_ptr += first_page
            kv_len -= first_page * PAGE
        tree_ptr = None
        if draft_ptr is not None:
            tree_ptr = draft_ptr + sequence * (QUERIES * QUERIES)

        first_row = sequence * (QUERIES * HEADS)  # of the queries, and of the output
        q_latent, acc = (), ()  # by chunk
        for chunk in tl.static_range(CHUNKS):
            q_latent += (columns(q_latent_ptr + first_row * L, query_row * L, chunk * CHUNK, real_row, L, CHUNK),)
            acc += (tl.zeros([ROWS, CHUNK], tl.float32),)
        q_rope = columns(q_rope_ptr + first_row * R, query_row * R, 0, real_row, R, ROPE_WIDTH)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        end = tl.minimum(stop * PAGE, kv_len)  # for which the table has entries
        bare_end = end  # tokens before are seen by all queries, and need no mask
        if HAS_DRAFTS:
            bare_end = tl.minimum(end, kv_len - q_len + (0 if draft_ptr is not None else 1))
        bare_end = page * PAGE + tl.maximum(bare_end - page * PAGE, 0) // TOKENS * TOKENS
        if not BARE_STEPS:
            bare_end = page * PAGE
        for masked in tl.static_range(0 if BARE_STEPS else 1, 2):
            first, last = page * PAGE, bare_end
            if masked:
                first, last = bare_end, end
            next_id = 0  # of a page, loaded a step ahead where a page has all tokens of a step
            if IN_ONE_PAGE:
                next_id = tl.load(table_ptr + first // PAGE, mask=first < last, other=-1)
            for start in range(first, last, TOKENS):
                token = start + tl.arange(0, TOKENS)
                seen = tl.full([TOKENS], True, tl.int1)
                if masked:
                    seen = token < end
                if IN_ONE_PAGE:
                    page_id = next_id
                    next_id = tl.load(table_ptr + (start + TOKENS) // PAGE, mask=start + TOKENS < last, other=-1)
                    base = tl.cast(page_id, tl.int64) * PAGE + tl.cast(start, tl.int64) % PAGE
                    slot = tl.arange(0, TOKENS)  # counted from the base
                else:
                    page_id = tl.load(table_ptr + token // PAGE, mask=seen, other=-1)
                    base = tl.full([], 0, tl.int64)
                    slot = page_id.to(tl.int64) * PAGE + token % PAGE
                seen = seen & (page_id >= 0) & (page_id < pool_pages)
                if WINDOW is not None:  # of the oldest query, which sees the most
                    seen = seen & in_window(token, tl.maximum(kv_len - q_len, 0), WINDOW, 0)
                visible = tl.broadcast_to(seen[None, :], [ROWS, TOKENS])
                if masked and HAS_DRAFTS:
                    visible = visible & draft_visible(token, kv_len - q_len, query, q_len, tree_ptr, QUERIES)
                    if WINDOW is not None:
                        position = tl.maximum(kv_len - q_len + query, 0)
                        visible = visible & in_window(token[None, :], position[:, None], WINDOW, 0)
                    if draft_ptr is not None:  # a tree may hide a token from all queries
                        seen = tl.max(visible.to(tl.int32), 0) > 0
                if rope_ptr is None:
                    k_rope = columns(pages_ptr + base * PAGES_WIDTH + L, slot * PAGES_WIDTH, 0, seen, R, ROPE_WIDTH)
                else:
                    k_rope = columns(rope_ptr + base * R, slot * R, 0, seen, R, ROPE_WIDTH)
                scores = tl.dot(q_rope, tl.trans(tensor_core_operand(k_rope, q_dtype, NATIVE)))
                latent, scales = (), ()
                for chunk in tl.static_range(CHUNKS):
                    stored = columns(pages_ptr + base * PAGES_WIDTH, slot * PAGES_WIDTH, chunk * CHUNK, seen, L, CHUNK)
                    latent += (stored,)
                    k = tl.trans(tensor_core_operand(stored, q_dtype, NATIVE))
                    if scale_ptr is None:
                        scores = tl.dot(q_latent[chunk], k, scores)
                    else:
                        scale = tl.load(scale_ptr + base * CHUNKS + slot * CHUNKS + chunk, mask=seen, other=0.0)
                        scales += (scale,)
                        scores += tl.dot(q_latent[chunk], k) * scale[None, :]
                if CAP is not None:
                    scores = soft_capped(scores * SCALE, CAP)
                scores = tl.where(visible, scores, float("-inf"))  # no addition: a score may be NaN
                top, total, keep, weights = softmax_step(scores, top, total, BASE)
                new_acc = ()
                for chunk in tl.static_range(CHUNKS):
                    kept = acc[chunk] * keep[:, None]
                    if scale_ptr is None:
                        kept = tl.dot(weights.to(q_dtype), tensor_core_operand(latent[chunk], q_dtype, NATIVE), kept)
                    else:
                        scaled = weights * scales[chunk][None, :]
                        rounded = scaled.to(tl.bfloat16)
                        v = tensor_core_operand(latent[chunk], tl.bfloat16, NATIVE)
                        kept = tl.dot(rounded, v, kept)
                        kept = tl.dot((scaled - rounded.to(tl.float32)).to(tl.bfloat16), v, kept)
                    new_acc += (kept,)
                acc = new_acc

        if HAS_DRAFTS:
            real_query = query < q_len
            top, total = tl.where(real_query, top, float("-inf")), tl.where(real_query, total, 0.0)
        is_whole_row = (page == 0) & (stop >= tl.load(num_pages_ptr + place))
        first_state = split.to(tl.int64) * (QUERIES * HEADS)
        inverse, lse = softmax_result(top, total, tl.full([ROWS], float("-inf"), tl.float32))
        for chunk in tl.static_range(CHUNKS):
            at, held = places(query_row * L, real_row, chunk * CHUNK, L, CHUNK)
            if is_whole_row:
                store_values(out_ptr + first_row * L + at, acc[chunk], inverse, total, held)
            else:
                tl.store(part_ptr + first_state * L + at, acc[chunk], mask=held)
        if is_whole_row:
            tl.store(lse_ptr + first_row + query_row, lse, mask=real_row)
        else:
            tl.store(part_top_ptr + first_state + query_row, top, mask=real_row)
            tl.store(part_total_ptr + first_state + query_row, total, mask=real_row)
        split += 1
        row_ends = stop >= tl.load(num_pages_ptr + place)
        place = tl.where(row_ends, tl.load(next_row_ptr + place), place)
        page = tl.where(row_ends, 0, stop)
