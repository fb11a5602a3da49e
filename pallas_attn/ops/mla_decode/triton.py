"""`mla_decode` in Triton, for cards from Ampere (sm80) on.

A query row is one head of one query token. All query rows of a sequence attend to the same latents. The plan assigns
splits, which are ranges of pages of sequences, to programs. A program computes a block of query rows of each split:

    for split in the program's splits:
        for step in the split's tokens:
            c, r = latents, rotated keys of the step                 # loaded once, used as key and value
            s = q_latent c^T + q_rope r^T                            # [query_rows, tokens]
            top, total, weights = softmax_step(s)
            acc = acc * keep + weights c                             # [query_rows, latent columns]
        store the output if the split covers all keys of the sequence, otherwise a partial state
    merge_splits                                                     # second kernel, `triton.split_states`

Programs do not wait for one another. No two programs write the same split or output row. The merge is a second kernel.

8-bit latents have a scale for each token and group of 128 columns. Each group (chunk of columns) is converted to 16
bits exactly. The scales multiply the group's part of the scores, and the weights of the group's values. Scaled
weights are the sum of two bfloat16 numbers, because float16 would lose weights with small scales. 8-bit latents without
scales are treated like 16-bit latents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import planned
from pallas_attn.runtime import device
from pallas_attn.triton import caches, plans, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.page_access import load_columns
from pallas_attn.triton.plans import split_end
from pallas_attn.triton.quantise import tensor_core_operand
from pallas_attn.triton.softmax import bfloat16_parts, soft_capped, softmax_step
from pallas_attn.triton.split_states import merge_splits, partial_states, store_chunked_state
from pallas_attn.triton.tiles import TritonTile, power_of_two
from pallas_attn.triton.visibility import draft_visible, in_window
from pallas_attn.types import LATENT_GROUP


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "triton", num_programs(call))
    card, tile = _card_and_tile(call)
    cache, table_pages = call.cache, call.block_tables.shape[-1]
    num_pages, page_size, pages_width = cache.pages.shape
    chunk = tile.width if cache.scale is None else LATENT_GROUP
    out, lse, *partial = launch(
        _attend,
        *(call.q_latent, call.q_rope, cache.pages, cache.scale, cache.rope),
        *(call.block_tables, call.kv_lens, call.q_lens, call.draft_mask, *plans.plan_arrays(plan)),
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
    return merge_splits(out, lse, partial, plan, scale=call.sm_scale if call.soft_cap is None else 1.0)


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of programs of a plan for this call: the number that run at the same time on the GPU."""
    caches.require_latents(call.q_latent, call.cache, call.rope_dim)
    card, tile = _card_and_tile(call)
    return tile.concurrent_programs(card, call.query_rows)


def _card_and_tile(call: MlaDecodeCall) -> tuple[device.Device, TritonTile]:
    card, widths = device.triton_card(), (call.latent_dim, call.rope_dim)
    quantised = call.cache.pages.dtype.itemsize == 1  # conversion needs registers, with or without scales
    # A window and a soft cap need registers, like a draft mask.
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
    SCORE_SCALE: tl.constexpr = tl.constexpr(1.0) if CAP is not None else SCALE  # soft-capped scores are scaled already
    HAS_DRAFTS: tl.constexpr = tl.constexpr(QUERIES > 1 or q_lens_ptr is not None or draft_ptr is not None)
    IN_ONE_PAGE: tl.constexpr = PAGE % TOKENS == 0
    program = tl.program_id(0)
    query_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # within the sequence; query-major
    query, real_row = query_row // HEADS, tl.full([ROWS], True, tl.int1)
    if QUERIES * HEADS % ROWS:
        real_row = query_row < QUERIES * HEADS

    place, page = tl.load(cta_row_ptr + program), tl.load(cta_page_ptr + program)
    split, end_place = tl.load(cta_split_ptr + program), tl.load(cta_row_ptr + program + 1)
    # Load values that are used once per row again for each row, because the accumulator leaves few registers.
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
        if WINDOW is not None:  # token numbers start at the first page that any query sees
            first_page = tl.load(first_page_ptr + place)
            table_ptr += first_page
            kv_len -= first_page * PAGE
        tree_ptr = None
        if draft_ptr is not None:
            tree_ptr = draft_ptr + sequence * (QUERIES * QUERIES)

        first_row = sequence * (QUERIES * HEADS)  # first row of the sequence in queries and output
        q_latent, acc = (), ()  # for each chunk of columns: [query_rows, CHUNK]
        for chunk in tl.static_range(CHUNKS):
            q_latent += (load_columns(q_latent_ptr + first_row * L, query_row * L, chunk * CHUNK, real_row, L, CHUNK),)
            acc += (tl.zeros([ROWS, CHUNK], tl.float32),)
        q_rope = load_columns(q_rope_ptr + first_row * R, query_row * R, 0, real_row, R, ROPE_WIDTH)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        end = tl.minimum(stop * PAGE, kv_len)  # end of the tokens that have table entries
        bare_end = end  # all queries see the tokens before bare_end, so they need no mask
        if HAS_DRAFTS:
            bare_end = tl.minimum(end, kv_len - q_len + (0 if draft_ptr is not None else 1))
        bare_end = page * PAGE + tl.maximum(bare_end - page * PAGE, 0) // TOKENS * TOKENS
        if not BARE_STEPS:
            bare_end = page * PAGE
        for masked in tl.static_range(0 if BARE_STEPS else 1, 2):
            first, last = page * PAGE, bare_end
            if masked:
                first, last = bare_end, end
            next_id = 0  # page id, loaded one step ahead if all tokens of a step are in one page
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
                    slot = tl.arange(0, TOKENS)  # relative to base
                else:
                    page_id = tl.load(table_ptr + token // PAGE, mask=seen, other=-1)
                    base = tl.full([], 0, tl.int64)
                    slot = page_id.to(tl.int64) * PAGE + token % PAGE
                seen = seen & (page_id >= 0) & (page_id < pool_pages)
                if WINDOW is not None:  # window of the first query, which sees the oldest tokens
                    seen = seen & in_window(token, tl.maximum(kv_len - q_len, 0), WINDOW, 0)
                visible = tl.broadcast_to(seen[None, :], [ROWS, TOKENS])
                if masked and HAS_DRAFTS:
                    visible = visible & draft_visible(token, kv_len - q_len, query, q_len, tree_ptr, QUERIES)
                    if WINDOW is not None:
                        position = tl.maximum(kv_len - q_len + query, 0)
                        visible = visible & in_window(token[None, :], position[:, None], WINDOW, 0)
                    if draft_ptr is not None:  # the draft mask may hide a token from all queries
                        seen = tl.max(visible.to(tl.int32), 0) > 0
                if rope_ptr is None:
                    k_rope = load_columns(
                        pages_ptr + base * PAGES_WIDTH + L, slot * PAGES_WIDTH, 0, seen, R, ROPE_WIDTH
                    )
                else:
                    k_rope = load_columns(rope_ptr + base * R, slot * R, 0, seen, R, ROPE_WIDTH)
                scores = tl.dot(q_rope, tl.trans(tensor_core_operand(k_rope, q_dtype, NATIVE)))  # [query_rows, tokens]
                latent, scales = (), ()
                for chunk in tl.static_range(CHUNKS):
                    stored = load_columns(
                        pages_ptr + base * PAGES_WIDTH, slot * PAGES_WIDTH, chunk * CHUNK, seen, L, CHUNK
                    )
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
                scores = tl.where(
                    visible, scores, float("-inf")
                )  # a select, not an addition: a hidden score can be NaN
                top, total, keep, weights = softmax_step(scores, top, total, SCORE_SCALE)
                new_acc = ()
                for chunk in tl.static_range(CHUNKS):
                    kept = acc[chunk] * keep[:, None]
                    if scale_ptr is None:
                        kept = tl.dot(weights.to(q_dtype), tensor_core_operand(latent[chunk], q_dtype, NATIVE), kept)
                    else:
                        rounded, rest = bfloat16_parts(weights * scales[chunk][None, :])
                        v = tensor_core_operand(latent[chunk], tl.bfloat16, NATIVE)
                        kept = tl.dot(rounded, v, kept)
                        kept = tl.dot(rest, v, kept)
                    new_acc += (kept,)
                acc = new_acc

        if HAS_DRAFTS:
            real_query = query < q_len
            top, total = tl.where(real_query, top, float("-inf")), tl.where(real_query, total, 0.0)
        is_whole_row = (page == 0) & (stop >= tl.load(num_pages_ptr + place))
        first_state = split.to(tl.int64) * (QUERIES * HEADS)
        store_chunked_state(
            *(acc, top, total, query_row, real_row, is_whole_row, first_row, out_ptr, lse_ptr),
            *(first_state, part_ptr, part_top_ptr, part_total_ptr, L, CHUNK, CHUNKS, SCORE_SCALE),
        )
        split += 1
        row_ends = stop >= tl.load(num_pages_ptr + place)
        place = tl.where(row_ends, tl.load(next_row_ptr + place), place)
        page = tl.where(row_ends, 0, stop)
