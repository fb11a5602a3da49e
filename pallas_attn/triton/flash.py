"""Attention of many queries over pages or over contiguous keys, in Triton, for cards from Ampere (sm80) on.

A program computes a tile: neighbouring queries of one sequence, for the heads of a group that share a KV head. The
queries times heads are the rows of its matrix products:

    sequence, queries = work_of(tile)
    for step in steps whose keys all queries see:             # unmasked; only if BARE_STEPS
        s = q k^T;  top, total, weights = softmax_step(s);  acc = acc * keep + weights v
    for step in sink-token steps, then the remaining steps of the window:
        the same, with a mask
    out, lse = acc / total, top + log2(total)

Programs do not wait for one another, and there are no barriers between them. Each query row belongs to one program.

The grid depends on shapes only, because each program finds the sequence of its tile in cu_q_lens by bisection. With n
queries per tile, the tiles of sequence s start at number cu_q_lens[s] // n + s + 1. A sequence therefore has at most
one tile more than it needs:

    padding before  |  sequence 0  |  sequence 1  |  ...  |  padding after
    0                  cu[0]//n + 1   cu[1]//n + 2          cu[S]//n + S + 1

Padding tokens are treated as a sequence without keys. Their result is 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn.triton import tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.page_access import load_columns, pool_rows, token_scales
from pallas_attn.triton.quantise import tensor_core_operand
from pallas_attn.triton.softmax import SMALLEST_UNIT, bfloat16_parts, soft_capped, softmax_step, weights_in_units
from pallas_attn.triton.split_states import store_result
from pallas_attn.triton.tiles import FlashTile
from pallas_attn.triton.visibility import in_window
from pallas_attn.types import HeadWindow


def attend(
    q: Float[Array, "T Hq Dk"],
    k: Array,
    v: Array,
    *,
    cu_q_lens: Array,
    kv_lens: Array | None = None,
    cu_kv_lens: Array | None = None,
    block_tables: Array | None = None,
    scales: tuple[Array | None, Array | None] = (None, None),
    groups: int | str | None = None,
    value_columns: slice | None = None,
    draft_mask: Array | None = None,
    window: HeadWindow | None,
    sinks: Array | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    out_dtype: jnp.dtype,
    tile: FlashTile,
    native: bool,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Return output and LSE.

    Args:
      k, v: pages [N, Hkv, ps, D], or [N, 1, ps, D] with head-wise tables, for `block_tables` and `kv_lens`; or
        contiguous [U, Hkv, Dk] and [U, Hkv, Dv] for `cu_kv_lens`. Keys are the first Dk columns.
      scales: scales of 8-bit keys and values.
      groups: layout of the scales, from `caches.scale_groups`.
      value_columns: columns of v that are values; None for all.
      draft_mask: [T, M], which new tokens of its sequence each token sees; replaces causality among new tokens.
      native: whether the card has instructions for float8_e4m3fn.
    """
    num_tokens, q_heads, key_dim = q.shape
    of_values = value_columns or slice(0, v.shape[-1])
    kv_heads, value_dim = k.shape[1], of_values.stop - of_values.start
    group, num_sequences = q_heads // kv_heads, cu_q_lens.shape[0] - 1
    heads = tile.heads(group)
    queries = tile.rows // heads
    paged = block_tables is not None
    head_wise = paged and block_tables.ndim == 3
    num_ids = min(k.shape[0] * (kv_heads if head_wise else 1), jnp.iinfo(jnp.int32).max)
    of_queries = tl.bfloat16 if q.dtype == jnp.bfloat16 else tl.float16
    first_columns = 1 << (key_dim.bit_length() - 1)
    rest = key_dim - first_columns
    constants: dict[str, Any] = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "DK": key_dim,
        "DV": value_dim,
        "K_STRIDE": k.shape[-1],
        "V_STRIDE": v.shape[-1],
        "V_FIRST": of_values.start,
        "K_COLUMNS": max(16, first_columns),
        "K_REST": tiles.power_of_two(rest) if rest else 0,
        "V_COLUMNS": tiles.power_of_two(value_dim),
        "PAGE": k.shape[2] if paged else 0,
        "ROWS": tile.rows,
        "HEADS": heads,
        "QUERIES": queries,
        "TOKENS": tile.tokens,
        "BARE_STEPS": tile.bare_steps,
        "SEARCH_STEPS": (num_sequences + 1).bit_length(),
        "CAUSAL": causal,
        "MASK_COLUMNS": 0 if draft_mask is None else draft_mask.shape[1],
        "SCALE": scale,
        "CAP": soft_cap,
        "HEAD_WISE": head_wise,
        "GROUPS": groups,
        "BY_TOKEN": isinstance(groups, int),
        "QUERY_DTYPE": tl.bfloat16 if groups == "channel" else of_queries,
        "VALUE_DTYPE": of_queries if groups is None else tl.float16,
        "NATIVE": native,
    }
    out, lse = launch(
        _attend,
        *(q, k, v, *scales, block_tables, cu_q_lens, kv_lens, cu_kv_lens),
        *((None, None) if window is None else (window.window, window.sink_tokens)),
        *(draft_mask, sinks, num_tokens, num_sequences, block_tables.shape[-1] if paged else 0, num_ids),
        outputs=[
            jax.ShapeDtypeStruct((num_tokens, q_heads, value_dim), out_dtype),
            jax.ShapeDtypeStruct((num_tokens, q_heads), jnp.float32),
        ],
        grid=(num_tokens // queries + num_sequences + 2, kv_heads * -(-group // heads)),
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
    )
    return out, lse


@kernel
def _attend(
    q_ptr,  # [T, Q_HEADS, DK]
    k_ptr,  # [pool rows, PAGE, K_STRIDE] or [U, KV_HEADS, K_STRIDE], keys from column 0
    v_ptr,  # like k_ptr with V_STRIDE, values from column V_FIRST; may be the same array
    k_scale_ptr,  # [KV_HEADS], [KV_HEADS, DK], [pool rows, GROUPS] or None
    v_scale_ptr,
    tables_ptr,  # [S, table_pages], [S, KV_HEADS, table_pages] or None
    cu_q_lens_ptr,  # [S + 1]
    kv_lens_ptr,  # [S] or None
    cu_kv_lens_ptr,  # [S + 1] or None
    window_ptr,  # [KV_HEADS] or None
    sink_tokens_ptr,
    draft_ptr,  # [T, MASK_COLUMNS] or None
    sinks_ptr,  # [Q_HEADS] or None
    num_tokens,
    num_sequences,
    table_pages,
    num_ids,
    out_ptr,  # [T, Q_HEADS, DV]
    lse_ptr,  # [T, Q_HEADS]
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    K_REST: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    BARE_STEPS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HEAD_WISE: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    QUERY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    SCORE_SCALE: tl.constexpr = tl.constexpr(1.0) if CAP is not None else SCALE  # soft-capped scores are scaled already
    IS_PAGED: tl.constexpr = tl.constexpr(tables_ptr is not None)
    IN_ONE_PAGE: tl.constexpr = IS_PAGED and PAGE % TOKENS == 0
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    tile = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    )  # tiles at the end of a causal sequence take longest, so they start first
    sequence, first_token, q_len, first = work_of(cu_q_lens_ptr, tile, num_tokens, num_sequences, QUERIES, SEARCH_STEPS)
    if first < q_len:
        kv_len, first_key = 0, 0
        if (sequence >= 0) & (sequence < num_sequences):
            if IS_PAGED:
                kv_len = tl.load(kv_lens_ptr + sequence)
            else:
                first_key = tl.load(cu_kv_lens_ptr + sequence)
                kv_len = tl.load(cu_kv_lens_ptr + sequence + 1) - first_key
        r = tl.arange(0, ROWS)
        query, head_in_group = first + r // HEADS, block * HEADS + r % HEADS
        real_row = (r < QUERIES * HEADS) & (query < q_len) & (head_in_group < GROUP)
        q_head = head * GROUP + head_in_group
        out_row = (first_token + query).to(tl.int64) * Q_HEADS + q_head

        # position: position of each row's query. The queries see keys in [oldest, end) and sink tokens.
        first_position = kv_len - q_len + first
        if CAUSAL:
            position = first_position + r // HEADS
            end = tl.maximum(tl.minimum(first_position + QUERIES, kv_len), 0)
            bare_end = first_position + 1
            newest = end
            if draft_ptr is not None:  # the mask may show any new token
                end, bare_end = kv_len, tl.minimum(bare_end, kv_len - q_len)
        else:
            position = kv_len - 1 + tl.zeros([ROWS], tl.int32)
            end = kv_len
            bare_end, newest = end, end
        position = tl.where(real_row, tl.maximum(position, -1), -1)
        oldest, window, sink_tokens, bare = 0, 0, 0, 0
        if window_ptr is not None:
            window, sink_tokens = tl.load(window_ptr + head), tl.load(sink_tokens_ptr + head)
            oldest = tl.maximum(tl.maximum(first_position, 0) - window + 1, 0)
            bare = tl.maximum(newest - window, 0)
        # Number steps of TOKENS keys. All queries see the keys of steps in [bare, bare_end), which run first, without a
        # mask. Then follow the steps with sink tokens, and the steps in [begin, bare) and [bare_end, end_step).
        begin, end_step = oldest // TOKENS, (end + TOKENS - 1) // TOKENS
        sink_steps = tl.minimum((tl.minimum(sink_tokens, end) + TOKENS - 1) // TOKENS, begin)
        bare_end = tl.maximum(tl.maximum(bare_end, 0) // TOKENS, begin)
        bare = tl.minimum(tl.maximum((bare + TOKENS - 1) // TOKENS, begin), bare_end)
        table_ptr = tables_ptr
        if IS_PAGED:
            table_row = sequence.to(tl.int64)
            if HEAD_WISE:
                table_row = table_row * KV_HEADS + head
            table_ptr = tables_ptr + table_row * table_pages

        q = load_columns(q_ptr, out_row * DK, 0, real_row, DK, K_COLUMNS)  # [query_rows, key columns]
        q_more, k_scale, q_error, q_more_error = q, 1.0, q, q
        if K_REST:
            q_more = load_columns(q_ptr, out_row * DK, K_COLUMNS, real_row, DK, K_REST)
        if GROUPS == "head":
            k_scale = tl.load(k_scale_ptr + head)
        if GROUPS == "channel":
            q, q_error = _scaled(q, k_scale_ptr + head * DK, 0, DK, K_COLUMNS)
            if K_REST:
                q_more, q_more_error = _scaled(q_more, k_scale_ptr + head * DK, K_COLUMNS, DK, K_REST)
        top = tl.full([ROWS], float("-inf"), tl.float32)  # [query_rows]
        total = tl.zeros([ROWS], tl.float32)  # [query_rows]
        acc = tl.zeros([ROWS, V_COLUMNS], tl.float32)  # [query_rows, value columns]
        unit = tl.full([ROWS], SMALLEST_UNIT, tl.float32)  # [query_rows]
        if not BARE_STEPS:
            bare, bare_end = begin, begin
        for masked in tl.static_range(0 if BARE_STEPS else 1, 2):
            steps = bare_end - bare
            if masked:
                steps = sink_steps + bare - begin + end_step - bare_end
            next_id = 0  # page id, loaded one step ahead if all tokens of a step are in one page
            if IN_ONE_PAGE:
                step = _nth_step(0, masked, sink_steps, begin, bare, bare_end)
                next_id = tl.load(table_ptr + step * TOKENS // PAGE, mask=steps > 0, other=-1)
            for i in range(steps):
                step = _nth_step(i, masked, sink_steps, begin, bare, bare_end)
                token = step * TOKENS + tl.arange(0, TOKENS)
                seen = tl.full([TOKENS], True, tl.int1)
                if masked:
                    seen = token < end
                    if window_ptr is not None:
                        seen = seen & ((token < sink_tokens) | (token >= oldest))
                page_id, row = next_id, 0
                # Row offsets are relative to first_row, so that they fit 32 bits, which saves registers.
                if not IS_PAGED:
                    first_row = (first_key + step * TOKENS).to(tl.int64) * KV_HEADS + head
                    place = tl.arange(0, TOKENS) * KV_HEADS
                elif IN_ONE_PAGE:
                    next_step = _nth_step(i + 1, masked, sink_steps, begin, bare, bare_end)
                    next_id = tl.load(table_ptr + next_step * TOKENS // PAGE, mask=i + 1 < steps, other=-1)
                    row = pool_rows(page_id, head, KV_HEADS, HEAD_WISE)
                    first_row = row * PAGE + step * TOKENS % PAGE
                    place = tl.arange(0, TOKENS)
                else:
                    page_id = tl.load(table_ptr + token // PAGE, mask=seen, other=-1)
                    row = pool_rows(page_id, head, KV_HEADS, HEAD_WISE)
                    first_row = tl.full([], 0, tl.int64)
                    place = row * PAGE + token % PAGE
                if IS_PAGED:
                    seen = seen & (page_id >= 0) & (page_id < num_ids)
                visible = seen[None, :]
                if masked and draft_ptr is not None:
                    visible = _shown(draft_ptr, token, kv_len - q_len, first_token + query, real_row, MASK_COLUMNS)
                    visible = visible & seen[None, :]
                    if window_ptr is not None:
                        visible = visible & in_window(token[None, :], position[:, None], window, sink_tokens)
                    seen = tl.max(visible.to(tl.int32), 0) > 0  # the mask may hide a token from all queries
                k = load_columns(k_ptr + first_row * K_STRIDE, place * K_STRIDE, 0, seen, DK, K_COLUMNS)
                k = tl.trans(tensor_core_operand(k, QUERY_DTYPE, NATIVE))  # [key columns, tokens]
                scores = tl.dot(q, k)  # [query_rows, tokens]
                if GROUPS == "channel":
                    scores = tl.dot(q_error, k, scores)
                if K_REST:
                    k = load_columns(k_ptr + first_row * K_STRIDE, place * K_STRIDE, K_COLUMNS, seen, DK, K_REST)
                    k = tl.trans(tensor_core_operand(k, QUERY_DTYPE, NATIVE))
                    scores = tl.dot(q_more, k, scores)
                    if GROUPS == "channel":
                        scores = tl.dot(q_more_error, k, scores)
                if GROUPS == "head":
                    scores = scores * k_scale
                if BY_TOKEN:
                    scores = scores * token_scales(k_scale_ptr, row, token, seen, GROUPS, PAGE)[None, :]
                if CAP is not None:
                    scores = soft_capped(scores * SCALE, CAP)
                if masked:
                    if draft_ptr is None:
                        # Absent keys get the largest position, so that one comparison checks presence and causality.
                        visible = tl.where(seen, token, 2147483647)[None, :] <= position[:, None]
                        if window_ptr is not None:
                            visible = visible & in_window(token[None, :], position[:, None], window, sink_tokens)
                    scores = tl.where(visible, scores, float("-inf"))  # pyrefly: ignore[unbound-name]
                elif IS_PAGED:  # a page can be absent
                    scores = tl.where(seen[None, :], scores, float("-inf"))
                top, total, keep, weights = softmax_step(scores, top, total, SCORE_SCALE)
                if BY_TOKEN:
                    weights = weights * token_scales(v_scale_ptr, row, token, seen, GROUPS, PAGE)[None, :]
                    weights, keep, unit = weights_in_units(weights, keep, unit)
                v = load_columns(v_ptr + (first_row * V_STRIDE + V_FIRST), place * V_STRIDE, 0, seen, DV, V_COLUMNS)
                v = tensor_core_operand(v, VALUE_DTYPE, NATIVE)  # [tokens, value columns]
                acc = tl.dot(weights.to(VALUE_DTYPE), v, acc * keep[:, None])

        if BY_TOKEN:
            acc = acc * unit[:, None]
        if GROUPS == "head":
            acc = acc * tl.load(v_scale_ptr + head)
        d = tl.arange(0, V_COLUMNS)
        if GROUPS == "channel":
            acc = acc * tl.load(v_scale_ptr + head * DV + d, mask=d < DV, other=0.0)[None, :]
        held = real_row[:, None] & (d < DV)[None, :]
        store_result(
            *(acc, top, total, out_row, q_head, held, real_row, real_row),
            *(sinks_ptr, out_ptr, lse_ptr, d, DV, SCORE_SCALE),
        )


@kernel
def _shown(draft_ptr, token, num_cached, row, real_row, MASK_COLUMNS: tl.constexpr):
    """Whether each row sees a token [rows, tokens]: all cached tokens, and new tokens according to the draft mask."""
    column = token - num_cached
    at = draft_ptr + (row.to(tl.int64) * MASK_COLUMNS)[:, None] + column[None, :]
    drafted = (column >= 0) & (column < MASK_COLUMNS)
    in_mask = tl.load(at, mask=drafted[None, :] & real_row[:, None], other=0) != 0
    return ((column < 0)[None, :] | in_mask) & real_row[:, None]


@kernel
def _scaled(q, scale_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Query times the scales of the key columns, as the sum of two bfloat16 tiles."""
    column = FIRST + tl.arange(0, COLUMNS)
    return bfloat16_parts(q.to(tl.float32) * tl.load(scale_ptr + column, mask=column < WIDTH, other=0.0)[None, :])


@kernel
def _nth_step(i, masked: tl.constexpr, sink_steps, begin, bare, bare_end):
    """Number of the i-th unmasked step or, if `masked`, of the i-th masked step."""
    step = bare + i
    if masked:
        i_before, i_after = i - sink_steps, i - sink_steps - (bare - begin)
        step = tl.where(i_before < 0, i, tl.where(i_after < 0, begin + i_before, bare_end + i_after))
    return step


@kernel
def work_of(cu_q_lens_ptr, tile, num_tokens, num_sequences, QUERIES: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """Return the sequence of a tile, the sequence's first token and number of queries, and the tile's first query.

    Sequences -1 and `num_sequences` are the padding before and after the sequences. The first query of a tile can be
    past the end of the sequence.
    """
    low, high = -1, num_sequences  # bounds of the last sequence whose first tile is at or before this tile
    for _ in range(SEARCH_STEPS):
        middle = tl.maximum((low + high + 1) // 2, 0)
        begins = tl.load(cu_q_lens_ptr + middle) // QUERIES + middle + 1
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    begin, begins, end = 0, 0, num_tokens
    if low >= 0:
        begin = tl.load(cu_q_lens_ptr + low)
        begins = begin // QUERIES + low + 1
    if low < num_sequences:
        end = tl.load(cu_q_lens_ptr + low + 1)
    return low, begin, end - begin, (tile - begins) * QUERIES
