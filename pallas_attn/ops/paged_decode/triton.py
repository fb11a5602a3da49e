"""`paged_decode` in Triton, for cards from Ampere (sm80) on.

A plan row is one KV head of one sequence. Its query rows are the (query, query head) pairs that read this KV head. The
plan assigns splits, which are ranges of visible pages of plan rows, to programs. A program computes a block of query
rows of each of its splits, so that a page is read once for the whole block:

    for split in the program's splits:
        for step in the tokens of the split's visible pages:
            k, v = rows of the step's tokens                         # [tokens, columns]
            s = q k^T                                                # [query_rows, tokens]
            top, total, weights = softmax_step(s)
            acc = acc * keep + weights v                             # [query_rows, value columns]
        store the output if the split covers all pages of the plan row, otherwise a partial state
    merge_splits            # second kernel, `triton.split_states`; also writes 0 for plan rows without visible keys

Programs do not wait for one another. No two programs write the same split or output row. The merge is a second kernel.

A step can span several pages, or be a part of one page. 8-bit k and v, or only one of both, are converted to 16 bits
exactly:

- Scales per head multiply the scores and the accumulator.
- Scales per channel multiply the query and the accumulator. The scaled query is the sum of two bfloat16 numbers.
- Scales per token multiply the scores and the weights. A scaled weight is the sum of two bfloat16 numbers.
- Without token scales, weights over 8-bit values are float16, which is more accurate than bfloat16. Float16 would
  underflow for weights times small token scales.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.ops.plan_decode import planned
from pallas_attn.runtime import device
from pallas_attn.triton import caches, plans, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.page_access import nth_visible_token, pool_rows, token_scales
from pallas_attn.triton.plans import split_end
from pallas_attn.triton.quantise import load_operand
from pallas_attn.triton.softmax import bfloat16_parts, soft_capped, softmax_step
from pallas_attn.triton.split_states import merge_splits, partial_states, sequence_and_head, store_result
from pallas_attn.triton.tiles import TritonTile
from pallas_attn.triton.visibility import draft_visible, in_window
from pallas_attn.types import HeadWindow


def paged_decode(call: PagedDecodeCall) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "triton", num_programs(call))
    card, tile = _card_and_tile(call)
    _, num_queries, q_heads, head_dim = call.q.shape
    (v, first_column), value_dim = call.kv.values, call.value_dim
    num_pages, kv_heads, page_size, _ = call.kv.k.shape
    table_entries, table_pages = call.block_tables.shape[-1], call.plan_key.table_pages
    rows, blocks = call.group * num_queries, -(-call.group * num_queries // tile.rows)
    window, groups = call.window, caches.scale_groups(call.kv)
    by_token, q_dtype = isinstance(groups, int), tl.bfloat16 if call.q.dtype == jnp.bfloat16 else tl.float16
    out, lse, *partial = launch(
        _attend,
        *(call.out, call.q, call.q_scale, call.kv.k, v, call.kv.k_scale, call.kv.v_scale),
        *(call.block_tables, call.kv_lens, call.q_lens),
        *((window.window, window.sink_tokens) if isinstance(window, HeadWindow) else (None, None)),
        *(call.draft_mask, call.sinks, *plans.plan_arrays(plan)),
        *(table_entries, min(num_pages * kv_heads, jnp.iinfo(jnp.int32).max)),
        outputs=[
            jax.ShapeDtypeStruct((*call.q.shape[:3], value_dim), call.output_dtype) if call.out is None else call.out,
            jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32),
            *partial_states(plan, table_pages, rows, value_dim),
        ],
        grid=(plans.num_programs(plan), blocks),
        constants={
            "QUERIES": num_queries,
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "DK": head_dim,
            "DV": value_dim,
            "K_STRIDE": call.kv.k.shape[-1],
            "V_STRIDE": v.shape[-1],
            "V_FIRST": first_column,
            "ROWS": tile.rows,
            "K_WIDTH": tiles.power_of_two(head_dim),
            "V_WIDTH": tiles.power_of_two(value_dim),
            "PAGE": page_size,
            "PLAN_PAGE": call.plan_page_size,
            "TOKENS": tile.tokens,
            "SCALE": call.scale,
            "CAP": call.soft_cap,
            "WINDOW": window if isinstance(window, int) else None,
            "HEAD_WISE": call.block_tables.ndim == 3,
            "GROUPS": groups,
            "BY_TOKEN": by_token,
            "QUERY_DTYPE": tl.bfloat16 if groups == "channel" and call.kv.k_scale is not None else q_dtype,
            "VALUE_DTYPE": q_dtype if call.kv.v_scale is None else tl.bfloat16 if by_token else tl.float16,
            "SPLIT_PAGES": plan.split_pages,
            "NATIVE": tiles.has_e4m3(card),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
        aliases={} if call.out is None else {0: 0},
    )
    scale = call.scale if call.soft_cap is None else 1.0
    return merge_splits(out, lse, partial, plan, call.sinks, scale=scale)


def num_programs(call: PagedDecodeCall) -> int:
    """Return the number of programs of a plan for this call: the number that run at the same time on the GPU."""
    caches.require_supported(call.q, call.kv)
    caches.require_head_dim(call.value_dim)
    card, tile = _card_and_tile(call)
    return tile.concurrent_programs(card, call.group * call.num_queries)


def _card_and_tile(call: PagedDecodeCall) -> tuple[device.Device, TritonTile]:
    card, rows, tree = device.triton_card(), call.group * call.num_queries, call.draft_mask is not None
    width = max(call.head_dim, call.value_dim)
    cache_bytes = min(call.kv.k.dtype.itemsize, call.kv.values[0].dtype.itemsize)
    return card, tiles.decode_tile(card, rows, width, cache_bytes, tree=tree)


@kernel
def _attend(
    _aliased_out_ptr,  # [T, Q_HEADS, DV] or None
    q_ptr,  # [B, QUERIES, Q_HEADS, DK]
    q_scale_ptr,  # [B, QUERIES, Q_HEADS] or None
    k_ptr,  # [pool rows, PAGE, K_STRIDE], keys from column 0
    v_ptr,  # [pool rows, PAGE, V_STRIDE], values from column V_FIRST; may be the same array
    k_scale_ptr,  # [KV_HEADS], [KV_HEADS, DK], [pool rows, GROUPS] or None
    v_scale_ptr,  # None if only k has scales
    tables_ptr,  # [B, table_entries] or [B, KV_HEADS, table_entries]
    kv_lens_ptr,  # [B]
    q_lens_ptr,  # [B] or None
    window_ptr,  # [KV_HEADS] or None
    sink_tokens_ptr,
    draft_ptr,  # [B, QUERIES, QUERIES] or None
    sinks_ptr,  # [Q_HEADS] or None
    row_order_ptr,  # [B * KV_HEADS] each
    sink_pages_ptr,
    first_page_ptr,
    num_pages_ptr,
    next_row_ptr,
    cta_row_ptr,  # [programs + 1] each
    cta_page_ptr,
    cta_split_ptr,
    table_entries,
    num_rows,
    out_ptr,  # [B, QUERIES, Q_HEADS, DV]
    lse_ptr,  # [B, QUERIES, Q_HEADS]
    part_ptr,  # [splits, group * QUERIES, DV]
    part_top_ptr,  # [splits, group * QUERIES] each
    part_total_ptr,
    QUERIES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,  # tokens per page of the pool
    PLAN_PAGE: tl.constexpr,  # tokens per page of the plan, PAGE or, for pages of one token, a multiple
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_WISE: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    QUERY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    SCORE_SCALE: tl.constexpr = tl.constexpr(1.0) if CAP is not None else SCALE  # soft-capped scores are scaled already
    program = tl.program_id(0)
    row_in_group = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # query-major: the heads of a query are neighbours
    query, head_in_group = row_in_group // GROUP, row_in_group % GROUP
    real_row = row_in_group < QUERIES * GROUP
    d, dv = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    real_d, real_dv = d < DK, dv < DV

    place, page = tl.load(cta_row_ptr + program), tl.load(cta_page_ptr + program)
    end_place, end_page = tl.load(cta_row_ptr + program + 1), tl.load(cta_page_ptr + program + 1)
    split = tl.load(cta_split_ptr + program)
    while (place < end_place) | ((place == end_place) & (page < end_page)):
        num_pages = tl.load(num_pages_ptr + place)
        stop = split_end(page, num_pages, place == end_place, end_page, SPLIT_PAGES)
        sequence, head = sequence_and_head(row_order_ptr, place, KV_HEADS)
        sink_pages, first_page = tl.load(sink_pages_ptr + place), tl.load(first_page_ptr + place)
        kv_len = tl.load(kv_lens_ptr + sequence)
        q_len = QUERIES
        if q_lens_ptr is not None:
            q_len = tl.load(q_lens_ptr + sequence)
        first = kv_len - q_len
        window, sink_tokens = 0, 0
        if window_ptr is not None:
            window, sink_tokens = tl.load(window_ptr + head), tl.load(sink_tokens_ptr + head)
        elif WINDOW is not None:
            window = WINDOW
        table_row = sequence.to(tl.int64)
        if HEAD_WISE:
            table_row = table_row * KV_HEADS + head
        tree_ptr = None
        if draft_ptr is not None:
            tree_ptr = draft_ptr + sequence.to(tl.int64) * (QUERIES * QUERIES)

        q_head = head * GROUP + head_in_group
        out_row = (sequence.to(tl.int64) * QUERIES + query) * Q_HEADS + q_head
        held = real_row[:, None] & real_dv[None, :]
        q = tl.load(q_ptr + out_row[:, None] * DK + d[None, :], mask=real_row[:, None] & real_d[None, :], other=0.0)
        q_rest = q
        q_scale = 1.0
        if q_scale_ptr is not None:
            q_scale = tl.load(q_scale_ptr + out_row, mask=real_row, other=0.0)[:, None]
        k_scale = 1.0
        if GROUPS == "head" and k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr + head)
        if GROUPS == "channel" and k_scale_ptr is not None:
            channel_scales = tl.load(k_scale_ptr + head * DK + d, mask=real_d, other=0.0)
            q, q_rest = bfloat16_parts(q.to(tl.float32) * channel_scales[None, :])

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_WIDTH], tl.float32)  # [query_rows, value columns]
        for start in range(page * PLAN_PAGE, stop * PLAN_PAGE, TOKENS):
            n = start + tl.arange(0, TOKENS)
            entry, token = nth_visible_token(n, sink_pages, first_page, PLAN_PAGE)
            if PLAN_PAGE != PAGE:
                entry = token // PAGE
            seen = (n < stop * PLAN_PAGE) & (token < kv_len) & (entry < table_entries)
            if window_ptr is not None or WINDOW is not None:  # window of the first query, which sees the oldest tokens
                seen = seen & in_window(token, tl.maximum(first, 0), window, sink_tokens)
            page_id = tl.load(tables_ptr + table_row * table_entries + entry, mask=seen, other=-1)
            row = pool_rows(page_id, head, KV_HEADS, HEAD_WISE)
            seen = seen & (page_id >= 0) & (row < num_rows)
            visible = tl.broadcast_to(seen[None, :], [ROWS, TOKENS])
            if QUERIES > 1 or q_lens_ptr is not None:
                visible = visible & draft_visible(token, first, query, q_len, tree_ptr, QUERIES)
                if window_ptr is not None or WINDOW is not None:
                    position = tl.maximum(first + query, 0)
                    visible = visible & in_window(token[None, :], position[:, None], window, sink_tokens)
                if draft_ptr is not None:  # the draft mask may hide a token from all queries
                    seen = tl.max(visible.to(tl.int32), 0) > 0
            cell = row * PAGE + n % PAGE
            k = load_operand(k_ptr, cell * K_STRIDE, seen, DK, K_WIDTH, K_STRIDE, 0, QUERY_DTYPE, NATIVE)
            scores = tl.dot(q, tl.trans(k))  # [query_rows, tokens]
            if GROUPS == "channel" and k_scale_ptr is not None:
                scores = tl.dot(q_rest, tl.trans(k), scores)
            if GROUPS == "head" and k_scale_ptr is not None:
                scores = scores * k_scale
            if BY_TOKEN and k_scale_ptr is not None:
                scores = scores * token_scales(k_scale_ptr, row, n, seen, GROUPS, PAGE)[None, :]
            if q_scale_ptr is not None:
                scores = scores * q_scale
            if CAP is not None:
                scores = soft_capped(scores * SCALE, CAP)
            scores = tl.where(visible, scores, float("-inf"))
            top, total, keep, weights = softmax_step(scores, top, total, SCORE_SCALE)
            if BY_TOKEN and v_scale_ptr is not None:
                weights = weights * token_scales(v_scale_ptr, row, n, seen, GROUPS, PAGE)[None, :]
            v = load_operand(v_ptr, cell * V_STRIDE, seen, DV, V_WIDTH, V_STRIDE, V_FIRST, VALUE_DTYPE, NATIVE)
            if BY_TOKEN and v_scale_ptr is not None:
                rounded, rest = bfloat16_parts(weights)
                acc = tl.dot(rounded, v, acc * keep[:, None])
                acc = tl.dot(rest, v, acc)
            else:
                acc = tl.dot(weights.to(VALUE_DTYPE), v, acc * keep[:, None])

        if GROUPS == "head" and v_scale_ptr is not None:
            acc = acc * tl.load(v_scale_ptr + head)
        if GROUPS == "channel" and v_scale_ptr is not None:
            acc = acc * tl.load(v_scale_ptr + head * DV + dv, mask=real_dv, other=0.0)[None, :]
        if (page == 0) & (stop >= num_pages):
            store_result(
                *(acc, top, total, out_row, q_head, held, real_row, real_row),
                *(sinks_ptr, out_ptr, lse_ptr, dv, DV, SCORE_SCALE),
            )
        else:
            state = split.to(tl.int64) * (QUERIES * GROUP) + row_in_group
            tl.store(part_ptr + state[:, None] * DV + dv[None, :], acc, mask=held)
            tl.store(part_top_ptr + state, top, mask=real_row)
            tl.store(part_total_ptr + state, total, mask=real_row)
        split += 1
        row_ends = stop >= num_pages
        place = tl.where(row_ends, tl.load(next_row_ptr + place), place)
        page = tl.where(row_ends, 0, stop)
