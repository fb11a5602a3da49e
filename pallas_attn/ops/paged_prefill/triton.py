"""`paged_prefill` in Triton, for any card from Ampere (sm80) on.

A program takes a tile: some neighbouring queries of one sequence, for the heads of a group that share a KV head, as the
rows of one product. It walks the keys that any of them sees, tokens of sinks first, then those of the window, with an
online softmax; pages are looked up for each key.

Which sequence a tile is of, programs find in cu_q_lens by themselves, so the grid depends on shapes only. Tiles of
sequence s begin at number cu_q_lens[s] // queries + s + 1, which leaves each as many as it needs, and one more at most:

    padding before  |  sequence 0  |  sequence 1  |  ...  |  padding after
    0                  cu[0]//n + 1   cu[1]//n + 2          cu[S]//n + S + 1

Padding is a sequence without keys, whose result is zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float

from pallas_attn import device
from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.portable.visibility import head_windows
from pallas_attn.triton import caches, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.pieces import (
    SMALLEST_UNIT,
    in_window,
    pool_rows,
    soft_capped,
    softmax_result,
    softmax_step,
    tensor_core_operand,
    weights_in_units,
)


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    caches.refuse(call.q, call.kv)
    card = device.triton_card()
    num_tokens, q_heads, head_dim = call.q.shape
    num_pages, kv_heads, page_size, _ = call.kv.k.shape
    rows = call.group * -(-num_tokens // call.num_sequences)
    demanding = call.kv.k_scale is not None or call.soft_cap is not None
    tile = config.triton_tile(card, rows, head_dim, demanding=demanding)
    heads = tile.heads(call.group)
    groups = caches.scale_groups(call.kv)
    of_queries = tl.bfloat16 if call.q.dtype == jnp.bfloat16 else tl.float16
    queries = tile.rows // heads
    head_wise = call.block_tables.ndim == 3
    windows = None if call.window is None else head_windows(call.window, kv_heads)
    out, lse = launch(
        _attend,
        *(call.q, call.kv.k, call.kv.v, call.kv.k_scale, call.kv.v_scale),
        *(call.block_tables, call.cu_q_lens, call.kv_lens),
        *((None, None) if windows is None else (windows.window, windows.sink_tokens)),
        *(call.sinks, num_tokens, call.num_sequences, call.block_tables.shape[-1]),
        min(num_pages * (kv_heads if head_wise else 1), jnp.iinfo(jnp.int32).max),
        outputs=[
            jax.ShapeDtypeStruct(call.q.shape, call.output_dtype),
            jax.ShapeDtypeStruct(call.q.shape[:2], jnp.float32),
        ],
        grid=(num_tokens // queries + call.num_sequences + 2, kv_heads * -(-call.group // heads)),
        constants={
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "D": head_dim,
            "WIDTH": tiles.power_of_two(head_dim),
            "PAGE": page_size,
            "ROWS": tile.rows,
            "HEADS": heads,
            "QUERIES": queries,
            "TOKENS": tile.tokens,
            "SEARCH_STEPS": (call.num_sequences + 1).bit_length(),
            "CAUSAL": call.causal,
            "SCALE": call.scale,
            "CAP": call.soft_cap,
            "HEAD_WISE": head_wise,
            "GROUPS": groups,
            "BY_TOKEN": isinstance(groups, int),
            "QUERY_DTYPE": tl.bfloat16 if groups == "channel" else of_queries,
            "VALUE_DTYPE": of_queries if groups is None else tl.float16,
            "NATIVE": tiles.has_e4m3(card),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, lse


@kernel
def _attend(
    q_ptr,  # [T, Q_HEADS, D]
    k_ptr,  # [pool rows, PAGE, D]
    v_ptr,
    k_scale_ptr,  # [KV_HEADS], [KV_HEADS, D], [pool rows, GROUPS] or None
    v_scale_ptr,
    tables_ptr,  # [S, table_pages] or [S, KV_HEADS, table_pages]
    cu_q_lens_ptr,  # [S + 1]
    kv_lens_ptr,  # [S]
    window_ptr,  # [KV_HEADS] or None
    sink_tokens_ptr,
    sinks_ptr,  # [Q_HEADS] or None
    num_tokens,
    num_sequences,
    table_pages,
    num_ids,
    out_ptr,  # [T, Q_HEADS, D]
    lse_ptr,  # [T, Q_HEADS]
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    CAUSAL: tl.constexpr,
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
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # causal tiles at a sequence's end take longest: they start first
    sequence, first_token, q_len, first = _work_of(
        cu_q_lens_ptr, tile, num_tokens, num_sequences, QUERIES, SEARCH_STEPS
    )
    if first < q_len:
        kv_len = 0
        if (sequence >= 0) & (sequence < num_sequences):
            kv_len = tl.load(kv_lens_ptr + sequence)
        r = tl.arange(0, ROWS)
        query, head_in_group = first + r // HEADS, block * HEADS + r % HEADS
        real_row = (r < QUERIES * HEADS) & (query < q_len) & (head_in_group < GROUP)
        q_head = head * GROUP + head_in_group
        d = tl.arange(0, WIDTH)
        real_d = d < D
        held = real_row[:, None] & real_d[None, :]
        out_row = (first_token + query).to(tl.int64) * Q_HEADS + q_head
        q = tl.load(q_ptr + out_row[:, None] * D + d[None, :], mask=held, other=0.0)

        # Position of each row's query, and the keys that any of them sees: [oldest, end), and those of sink tokens.
        if CAUSAL:
            position = kv_len - q_len + query
            end = tl.minimum(kv_len - q_len + first + QUERIES, kv_len)
        else:
            position = tl.broadcast_to(kv_len - 1, [ROWS])
            end = kv_len
        position = tl.where(real_row, tl.maximum(position, -1), -1)
        oldest, window, sink_tokens = 0, 0, 0
        if window_ptr is not None:
            window, sink_tokens = tl.load(window_ptr + head), tl.load(sink_tokens_ptr + head)
            oldest = tl.maximum(tl.maximum(kv_len - q_len + first, 0) - window + 1, 0)
        first_step = oldest // TOKENS
        sink_steps = tl.minimum((tl.minimum(sink_tokens, end) + TOKENS - 1) // TOKENS, first_step)
        steps = sink_steps + tl.maximum((end + TOKENS - 1) // TOKENS - first_step, 0)
        table_row = sequence.to(tl.int64)
        if HEAD_WISE:
            table_row = table_row * KV_HEADS + head

        q_rest = q
        score_scale = SCALE
        if GROUPS == "head":
            score_scale = SCALE * tl.load(k_scale_ptr + head)
        if GROUPS == "channel":
            wide = q.to(tl.float32) * tl.load(k_scale_ptr + head * D + d, mask=real_d, other=0.0)[None, :]
            q = wide.to(tl.bfloat16)
            q_rest = (wide - q.to(tl.float32)).to(tl.bfloat16)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        unit = tl.full([ROWS], SMALLEST_UNIT, tl.float32)
        for i in range(steps):
            token = tl.where(i < sink_steps, i, i - sink_steps + first_step) * TOKENS + tl.arange(0, TOKENS)
            seen = token < end
            if window_ptr is not None:
                seen = seen & ((token < sink_tokens) | (token >= oldest))
            page_id = tl.load(tables_ptr + table_row * table_pages + token // PAGE, mask=seen, other=-1)
            seen = seen & (page_id >= 0) & (page_id < num_ids)
            row = pool_rows(page_id, head, KV_HEADS, HEAD_WISE)
            at = (row * PAGE + token % PAGE) * D
            loaded = seen[:, None] & real_d[None, :]
            k = tensor_core_operand(
                tl.load(k_ptr + at[:, None] + d[None, :], mask=loaded, other=0), QUERY_DTYPE, NATIVE
            )
            scores = tl.dot(q, tl.trans(k))
            if GROUPS == "channel":
                scores = tl.dot(q_rest, tl.trans(k), scores)
            scores = scores * score_scale
            if BY_TOKEN:
                scores = scores * _token_scales(k_scale_ptr, row, token, seen, GROUPS, PAGE)[None, :]
            if CAP is not None:
                scores = soft_capped(scores, CAP)
            # One comparison says both whether a key is there and whether it is past the query.
            visible = tl.where(seen, token, 2147483647)[None, :] <= position[:, None]
            if window_ptr is not None:
                visible = visible & in_window(token[None, :], position[:, None], window, sink_tokens)
            scores = tl.where(visible, scores, float("-inf"))
            top, total, keep, weights = softmax_step(scores, top, total)
            if BY_TOKEN:
                weights = weights * _token_scales(v_scale_ptr, row, token, seen, GROUPS, PAGE)[None, :]
                weights, keep, unit = weights_in_units(weights, keep, unit)
            v = tensor_core_operand(
                tl.load(v_ptr + at[:, None] + d[None, :], mask=loaded, other=0), VALUE_DTYPE, NATIVE
            )
            acc = tl.dot(weights.to(VALUE_DTYPE), v, acc * keep[:, None])

        if BY_TOKEN:
            acc = acc * unit[:, None]
        if GROUPS == "head":
            acc = acc * tl.load(v_scale_ptr + head)
        if GROUPS == "channel":
            acc = acc * tl.load(v_scale_ptr + head * D + d, mask=real_d, other=0.0)[None, :]
        sink = tl.full(top.shape, float("-inf"), tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + q_head, mask=real_row, other=float("-inf"))
        inverse, lse = softmax_result(top, total, sink)
        # A row that sees nothing may have added 0 times an infinite value.
        out = tl.where((total != 0)[:, None], acc * inverse[:, None], 0.0)
        tl.store(out_ptr + out_row[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=held)
        tl.store(lse_ptr + out_row, lse, mask=real_row)


@kernel
def _token_scales(scale_ptr, row, token, seen, GROUPS: tl.constexpr, PAGE: tl.constexpr):
    """Scales [tokens] of tokens whose pages have GROUPS of them each."""
    return tl.load(scale_ptr + row * GROUPS + token % PAGE // (PAGE // GROUPS), mask=seen, other=0.0)


@kernel
def _work_of(cu_q_lens_ptr, tile, num_tokens, num_sequences, QUERIES: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """Sequence of a tile, its first token and number of queries, and the tile's first query.

    Sequences -1 and `num_sequences` are the padding before and after the others. The first query may be past the last.
    """
    low, high = -1, num_sequences  # the last sequence whose tiles begin at or before this one is among these
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
