"""Scores of index keys (DeepSeek-V3.2's lightning indexer) in Triton, for GPUs from Ampere (sm80) on.

A step is a block of TOKENS consecutive keys of one sequence. In the matrix product of a step, rows are keys and columns
are the index heads of one query, so the sum over heads stays within a row of the result:

    for step in the program's steps:
        k = keys of the step                                   # [tokens, columns]
        for query in the tile:
            s = k q^T                                          # [tokens, heads]
            score = scale * sum over heads of weight * relu(s) # [tokens]

A tile is one query or several adjacent queries of one sequence, which share the loaded keys.

- Tiles of several queries (prefill): n programs process a tile, and each of them computes every n-th step.
- Tiles of one query (decode): the steps of all queries form one list, and every program computes an equal share of the
  list. A share can start in the middle of one query's steps and continue with the next queries.

Programs do not wait for one another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.portable.index_tiles import IndexCall
from pallas_attn.portable.quantise import QUERY_SCALE, float16_queries
from pallas_attn.runtime import device
from pallas_attn.triton import caches, tiles
from pallas_attn.triton.flash import work_of
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.ordered_scores import count_scores, ordered_score
from pallas_attn.triton.page_access import load_columns
from pallas_attn.triton.quantise import tensor_core_operand

MOST_SHARED = 1024
"""Maximum number of sequences for equal shares: each program finds its share by a prefix sum over all sequences."""


def require_supported(call: IndexCall) -> None:
    """Raise NotImplementedError if the kernel does not support the index queries and keys."""
    caches.require_queries(call.q)
    keys = call.index.keys
    if call.index.scale is None and keys.dtype != call.q.dtype:
        raise NotImplementedError(
            f"takes index queries and unquantised keys of one dtype, got {call.q.dtype.name} over {keys.dtype.name}"
        )
    caches.require_head_dim(call.q.shape[-1])


def paged_scores(
    call: IndexCall, *, fill: bool, bins: Int32[Array, "T bins"] | None = None
) -> tuple[Float32[Array, "T K"], Int32[Array, "T"], Int32[Array, "T bins"] | None]:
    """Score the keys at all K = P·ps positions of each token's sequence.

    Args:
      call: arguments of `index_scores`.
      fill: True to write -inf for keys after the token's own position, False to leave these scores undefined.
      bins: int32 [T, 4096] zeros, or None. The kernel counts each token's scores, up to its own position, by their
        leading 12 bits (`ordered_scores`).

    Returns:
      The scores, with -inf for invisible keys; the number of keys up to each token's own position, int32 [T];
      and the counts, or None without `bins`.
    """
    num_tokens, num_heads, dim = call.q.shape
    num_sequences, table_pages = call.block_tables.shape
    num_pages, page_size, _ = call.index.keys.shape
    card, width = device.triton_card(), table_pages * page_size
    options = {"quantised": call.index.scale is not None, "tree": call.draft_mask is not None}
    tile = tiles.index_tile(card, num_tokens, num_sequences, num_heads, dim, **options)
    steps = -(-width // tile.tokens)
    in_shares = tile.queries == 1 and num_sequences <= MOST_SHARED
    q, factor = (call.q, 1.0) if call.index.scale is None or in_shares else float16_queries(call.q)
    converts = call.index.scale is not None and q.dtype != jnp.float16
    if in_shares:
        grid = (max(1, min(num_tokens * steps, tile.concurrent_programs(card))), 1)
    else:
        num_tiles = num_tokens // tile.queries + num_sequences + 2
        grid = (num_tiles, max(1, min(steps, -(-tile.programs_of_tiles(card) // -(-num_tokens // tile.queries)))))
    scores, counts, *counted = launch(
        _score,
        *(q, call.weights, call.index.keys, call.index.scale),
        *(call.block_tables, call.cu_q_lens, call.kv_lens, call.draft_mask, bins),
        *(num_tokens, num_sequences, table_pages, num_pages),
        outputs=[
            jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
            *([] if bins is None else [bins]),
        ],
        grid=grid,
        aliases={} if bins is None else {8: 2},
        constants=({"bins_ptr": None} if bins is None else {})
        | {
            "HEADS": num_heads,
            "D": dim,
            "WIDTH": width,
            "PAGE": page_size,
            "QUERIES": tile.queries,
            "TOKENS": tile.tokens,
            "BLOCK": tile.heads,
            "BLOCKS": -(-num_heads // tile.heads),
            "COLUMNS": tiles.power_of_two(dim),
            "GROUPS": tiles.power_of_two(num_sequences + 2) if in_shares else 0,
            "SEARCH_STEPS": (num_sequences + 1).bit_length(),
            "DRAFTS": 0 if call.draft_mask is None else call.draft_mask.shape[1],
            "RATIO": call.ratio,
            "SCALE": call.scale / (QUERY_SCALE if converts else factor),
            "Q_SCALE": QUERY_SCALE if converts else None,
            "FILL": fill,
            "NATIVE": tiles.has_e4m3(card),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
        flops=2 * num_tokens * num_heads * dim * width,
    )
    return scores, counts, counted[0] if counted else None


@kernel
def _score(
    q_ptr,  # [T, HEADS, D]
    weights_ptr,  # [T, HEADS]
    keys_ptr,  # [pool_pages, PAGE, D]
    scale_ptr,  # [pool_pages, PAGE] or None
    tables_ptr,  # [S, table_pages]
    cu_q_lens_ptr,  # [S + 1]
    kv_lens_ptr,  # [S]
    mask_ptr,  # [T, DRAFTS] or None
    _bins_ptr,  # same memory as bins_ptr
    num_tokens,
    num_sequences,
    table_pages,
    pool_pages,
    out_ptr,  # [T, WIDTH]
    counts_ptr,  # [T]
    bins_ptr,  # [T, SCORE_BINS] or None
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    DRAFTS: tl.constexpr,
    RATIO: tl.constexpr,
    SCALE: tl.constexpr,
    Q_SCALE: tl.constexpr,
    FILL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Groups of packed tokens: group 0 is the padding before the first sequence, group s + 1 is sequence s, and the last
    # group is the padding after the last sequence.
    if GROUPS:  # tiles of one query: an equal share of the steps of all queries
        group = tl.arange(0, GROUPS)
        _, q_lens, kv_lens = _group(cu_q_lens_ptr, kv_lens_ptr, group, num_tokens, num_sequences)
        work = q_lens * _steps_of(kv_lens // RATIO, WIDTH, TOKENS, FILL)
        ends = tl.cumsum(work, 0)
        total = tl.sum(work, 0)
        share = tl.cdiv(total, tl.num_programs(0))
        at = tl.program_id(0) * share
        stop = tl.minimum(at + share, total)
        while at < stop:
            done = ends <= at
            this = tl.sum(done.to(tl.int32), 0)
            within = at - tl.sum(tl.where(done, work, 0), 0)
            begin, q_len, kv_len = _group(cu_q_lens_ptr, kv_lens_ptr, this, num_tokens, num_sequences)
            steps = _steps_of(kv_len // RATIO, WIDTH, TOKENS, FILL)
            first = within % steps
            last = tl.minimum(first + stop - at, steps)
            query = within // steps
            _score_tile(
                *(q_ptr, weights_ptr, keys_ptr, scale_ptr, tables_ptr, mask_ptr, out_ptr, counts_ptr, bins_ptr),
                *(this - 1, begin + query, 1, kv_len - q_len + query, first, last, 1, table_pages, pool_pages),
                *(HEADS, D, WIDTH, PAGE, QUERIES, TOKENS, BLOCK, BLOCKS, COLUMNS, DRAFTS, RATIO),
                *(SCALE, Q_SCALE, FILL, NATIVE),
            )
            at += last - first
    else:  # tiles of several queries: of n programs per tile, program i computes steps i, i + n, ...
        sequence, first_token, q_len, first = work_of(
            cu_q_lens_ptr, tl.program_id(0), num_tokens, num_sequences, QUERIES, SEARCH_STEPS
        )
        if first < q_len:
            kv_len = 0  # padding has no keys
            if (sequence >= 0) & (sequence < num_sequences):
                kv_len = tl.load(kv_lens_ptr + sequence)
            queries = tl.minimum(QUERIES, q_len - first)
            steps = _steps_of(kv_len // RATIO, WIDTH, TOKENS, FILL)
            _score_tile(
                *(q_ptr, weights_ptr, keys_ptr, scale_ptr, tables_ptr, mask_ptr, out_ptr, counts_ptr, bins_ptr),
                *(sequence, first_token + first, queries, kv_len - q_len + first),
                *(tl.program_id(1), steps, tl.num_programs(1), table_pages, pool_pages),
                *(HEADS, D, WIDTH, PAGE, QUERIES, TOKENS, BLOCK, BLOCKS, COLUMNS, DRAFTS, RATIO),
                *(SCALE, Q_SCALE, FILL, NATIVE),
            )


@kernel
def _group(cu_q_lens_ptr, kv_lens_ptr, group, num_tokens, num_sequences):
    """Return the first packed token, the number of queries and the number of keys of groups of packed tokens.

    Group 0 is the padding before the first sequence, group s + 1 is sequence s, and group `num_sequences` + 1 is the
    padding after the last sequence. Padding has no keys. Later groups have no queries.
    """
    begin = tl.load(cu_q_lens_ptr + group - 1, mask=(group >= 1) & (group <= num_sequences + 1), other=0)
    end = tl.load(cu_q_lens_ptr + group, mask=group <= num_sequences, other=num_tokens)
    kv_len = tl.load(kv_lens_ptr + group - 1, mask=(group >= 1) & (group <= num_sequences), other=0)
    return begin, tl.where(group <= num_sequences + 1, end - begin, 0), kv_len


@kernel
def _steps_of(num_keys, WIDTH: tl.constexpr, TOKENS: tl.constexpr, FILL: tl.constexpr):
    """Return the number of steps of each query of a sequence with `num_keys` keys.

    It is at least 1, because the first step also writes counts_ptr. With FILL, steps cover all WIDTH positions.
    """
    steps = tl.maximum((num_keys + TOKENS - 1) // TOKENS, 1)
    return tl.full(steps.shape, (WIDTH + TOKENS - 1) // TOKENS, tl.int32) if FILL else steps


@kernel
def _score_tile(
    q_ptr,
    weights_ptr,
    keys_ptr,
    scale_ptr,
    tables_ptr,
    mask_ptr,
    out_ptr,
    counts_ptr,
    bins_ptr,
    sequence,
    row,
    queries,
    first_position,
    first,
    last,
    stride,
    table_pages,
    pool_pages,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DRAFTS: tl.constexpr,
    RATIO: tl.constexpr,
    SCALE: tl.constexpr,
    Q_SCALE: tl.constexpr,
    FILL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Compute the scores of a tile for the steps first, first + stride, ... below `last`.

    Args:
      sequence: index of the sequence; -1 or the number of sequences for padding, which has no keys.
      row: packed index of the tile's first query.
      queries: number of queries of the tile.
      first_position: position of the first query in the sequence, in tokens.
    """
    q_dtype: tl.constexpr = q_ptr.dtype.element_ty if Q_SCALE is None else tl.float16  # pyrefly: ignore[bad-assignment]
    WHOLE: tl.constexpr = PAGE % TOKENS == 0  # the keys of a step are in one page
    end = _num_seen(first_position + queries - 1, RATIO)
    row = row.to(tl.int64)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_pages
    if first == 0:
        query = tl.arange(0, QUERIES)
        count = _num_seen(first_position + query, RATIO)
        tl.store(counts_ptr + row + query, count, mask=query < queries)

    walked = tl.minimum(last, (end + TOKENS - 1) // TOKENS)
    token = tl.arange(0, TOKENS)
    next_key = first * TOKENS if WHOLE else first * TOKENS + token
    next_id = tl.load(table_ptr + next_key // PAGE, mask=next_key < end, other=-1)  # page ids of the next step
    q, weights = (), ()  # for each block of heads, the query and its weights; loaded once if the tile has one query
    if QUERIES == 1:
        for block in tl.static_range(BLOCKS):
            q += (_queries(q_ptr, row, block, HEADS, D, BLOCK, COLUMNS, Q_SCALE),)
            weights += (_weights(weights_ptr, row, block, HEADS, BLOCK),)
    for step in range(first, walked, stride):
        key = step * TOKENS + token
        page_id = next_id
        next_key = (step + stride) * TOKENS if WHOLE else (step + stride) * TOKENS + token
        next_id = tl.load(table_ptr + next_key // PAGE, mask=next_key < end, other=-1)
        in_pool = (page_id >= 0) & (page_id < pool_pages)
        if WHOLE:  # loads whole blocks, including keys after the end of the sequence, whose scores are masked below
            slot = page_id.to(tl.int64) * PAGE + step * TOKENS % PAGE
            seen = (token >= 0) & in_pool
            k = load_columns(keys_ptr + slot * D, token * D, 0, seen, D, COLUMNS)
        else:
            slot = page_id.to(tl.int64) * PAGE + key % PAGE
            seen = in_pool
            k = load_columns(keys_ptr, slot * D, 0, seen, D, COLUMNS)
        k = tensor_core_operand(k, q_dtype, NATIVE)
        k_scale = tl.full([TOKENS], SCALE, tl.float32)
        if scale_ptr is not None:
            k_scale *= tl.load(scale_ptr + (slot + token if WHOLE else slot), mask=seen, other=0.0)
        if QUERIES == 1:
            score = tl.zeros([TOKENS], tl.float32)
            for block in tl.static_range(BLOCKS):
                score += _weighted(k, q[block], weights[block])
            shown = seen & _in_draft_mask(mask_ptr, row, key, first_position, DRAFTS)
            at = out_ptr + row * WIDTH
            newest = _num_seen(first_position, RATIO) - 1
            _store_scores(at, bins_ptr, row, score * k_scale, key, shown, newest, WIDTH, FILL)
        else:
            for i in range(queries):
                score = tl.zeros([TOKENS], tl.float32)
                for block in tl.static_range(BLOCKS):
                    q_i = _queries(q_ptr, row + i, block, HEADS, D, BLOCK, COLUMNS, Q_SCALE)
                    score += _weighted(k, q_i, _weights(weights_ptr, row + i, block, HEADS, BLOCK))
                at = out_ptr + (row + i) * WIDTH
                shown = seen & _in_draft_mask(mask_ptr, row + i, key, first_position + i, DRAFTS)
                newest = _num_seen(first_position + i, RATIO) - 1
                _store_scores(at, bins_ptr, row + i, score * k_scale, key, shown, newest, WIDTH, FILL)
    if FILL:  # write -inf in the remaining steps, which have no keys
        done = (tl.maximum(walked - first, 0) + stride - 1) // stride
        for step in range(first + done * stride, last, stride):
            key = step * TOKENS + token
            for i in range(queries):
                at = out_ptr + (row + i) * WIDTH + key
                tl.store(at, tl.full([TOKENS], float("-inf"), tl.float32), mask=key < WIDTH)


@kernel
def _num_seen(position, RATIO: tl.constexpr):
    """Return the number of keys that a token at a position sees, if the index has a key per RATIO tokens."""
    return tl.maximum(position + 1, 0) // RATIO


@kernel
def _queries(
    q_ptr,
    row,
    block,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q_SCALE: tl.constexpr,
):
    """Load the index queries of a token for a block of heads, [COLUMNS, BLOCK].

    Args:
      Q_SCALE: None to use the queries in their dtype. Otherwise bfloat16 queries are multiplied by this factor, which
        prevents most overflows, and converted to float16, the dtype of converted 8-bit keys.
    """
    head = block * BLOCK + tl.arange(0, BLOCK)
    q = load_columns(q_ptr + row * (HEADS * D), head * D, 0, head < HEADS, D, COLUMNS)
    if Q_SCALE is not None:
        q = tl.clamp(q.to(tl.float32) * Q_SCALE, -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    return tl.trans(q)


@kernel
def _weights(weights_ptr, row, block, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the weights of a token for a block of index heads, [BLOCK]; 0 past the last head."""
    head = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)


@kernel
def _weighted(k, q, weights):
    """Return the sum over a block of heads of weight · relu(key · query) for each key, float32 [tokens].

    Args:
      k: keys [tokens, columns].
      q: queries [columns, heads].
      weights: [heads].
    """
    positive = tl.maximum(tl.dot(k, q), 0.0, propagate_nan=tl.PropagateNan.ALL)  # a NaN key has a NaN score
    return tl.sum(positive * weights[None, :], 1)


@kernel
def _in_draft_mask(mask_ptr, row, key, position, DRAFTS: tl.constexpr):
    """Return whether the draft mask shows keys to the token at `position`, bool [tokens].

    The mask of a token covers the DRAFTS positions up to and including its own. Earlier keys are shown.
    """
    if mask_ptr is None:
        shown = key == key
    else:
        column = key - position + DRAFTS - 1
        at = mask_ptr + row * DRAFTS + column
        shown = tl.load(at, mask=(column >= 0) & (column < DRAFTS), other=1) != 0
    return shown


@kernel
def _store_scores(at, bins_ptr, row, score, key, seen, newest, WIDTH: tl.constexpr, FILL: tl.constexpr):
    """Store the scores of keys for a query, -inf for invisible keys, and count them in the bins.

    Args:
      at: pointer to the query's scores, [WIDTH].
      key: [tokens], positions of the keys.
      seen: [tokens], whether the key is visible apart from causality.
      newest: position of the last key that causality shows to the query.
      FILL: whether scores of keys after `newest` are also stored.
    """
    score = tl.where(seen & (key <= newest), score + 0.0, float("-inf"))
    tl.store(at + key, score, mask=key < WIDTH if FILL else key <= newest)
    if bins_ptr is not None:
        count_scores(bins_ptr, row, ordered_score(score))
