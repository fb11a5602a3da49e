"""Tables of cases of `paged_decode` (`DECODE`) and `paged_prefill` (`PREFILL`). `SHARED` are cases of both.

Most cases have no dtype; each backend then uses `Backend.dtype`. Most cases are variations of `CARRIER` with other
lengths, windows, sink logits or absent pages. These are values of arrays, so the cases share one compiled function.
Options that require another compilation are combined, so that each option occurs with most of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pallas_attn import FULL
from tests.contract.paged_case import PagedCase

PS = 16
TOKENS = 40
"""Number of queries T of prefill calls, including padding. Most cases have the same T, so that they share a compiled
function.
"""
FP8, E5M2 = "float8_e4m3fn", "float8_e5m2"

PLAIN = PagedCase(
    kv_lens=(0, 1, PS - 1, PS, PS + 1, 65, 128),
    q_lens=(0, 1, 1, 1, 1, 1, 1),
    head_dim=64,
    page_size=PS,
    pages_per_row=8,
    num_pages=64,
    dtype=None,
    tokens=TOKENS,
)
CARRIER = replace(PLAIN, head_windows=((FULL, 0), (FULL, 0)), sinks="mixed")
DRAFTS = replace(CARRIER, kv_lens=(0, 20, 37, 66, 128), q_lens=(0, 4, 1, 3, 4), queries=4)


def windowed(*per_head: tuple[int, int], **changes: Any) -> PagedCase:
    return replace(CARRIER, head_windows=per_head, **changes)


VALUES = {
    "mixed lengths": CARRIER,
    "all idle": replace(CARRIER, kv_lens=(0,) * 7, q_lens=(0,) * 7),
    "tokens cached, none new": replace(CARRIER, q_lens=(0,) * 7),
    "all of length 1": replace(CARRIER, kv_lens=(1,) * 7, q_lens=(1,) * 7),
    "all of maximum length": replace(CARRIER, kv_lens=(128,) * 7, q_lens=(1,) * 7),
    "absent pages": replace(CARRIER, absent_pages=True, sinks="ordinary"),
    "windows 1 and ps - 1": windowed((1, 0), (PS - 1, 0), sinks="large"),
    "windows ps and ps + 1, a sink token": windowed((PS, 0), (PS + 1, 1), sinks="ordinary"),
    "a window longer than any sequence, many sink tokens": windowed((200, 0), (3, 1000), sinks="-inf"),
    "sink tokens of a full head, and past a window's start": windowed((FULL, 9), (12, PS + 5)),
    "a page of sink tokens, heads interleaved": windowed((3, PS), (FULL, 0)),
    "windows and absent pages": windowed((20, 2), (5, 0), absent_pages=True),
}
"""Cases that differ in values of arrays only and share a compiled function."""

DRAFT_VALUES = {
    "drafts, ragged": DRAFTS,
    "tiles that end with the first draft": replace(DRAFTS, kv_lens=(0, 67, 64, 66, 65)),
    "no keys but the draft's": replace(DRAFTS, kv_lens=(0, 4, 1, 3, 4)),
    "drafts, windows, absent pages": replace(DRAFTS, head_windows=((3, 0), (18, 2)), absent_pages=True),
}

OPTIONS = {
    "no option": PLAIN,
    "int window ps - 1, head-wise": replace(PLAIN, window=PS - 1, head_wise=True),
    "int window ps + 1, drafts, sinks": replace(DRAFTS, head_windows=None, window=PS + 1, sinks="ordinary"),
    "int window longer than any sequence, soft cap": replace(PLAIN, window=200, soft_cap=5.0),
    "head-wise windows and sink tokens, absent pages": windowed((4, 18), (FULL, 3), head_wise=True, absent_pages=True),
    "head-wise drafts, float16": replace(DRAFTS, head_wise=True, dtype="float16", head_windows=((9, 1), (FULL, 0))),
    "soft cap, sinks, scale": replace(PLAIN, soft_cap=30.0, sinks="mixed", sm_scale=2.0),
    "scores to 5e5": replace(PLAIN, exact=True, sm_scale=1.0),
    "large soft cap": replace(PLAIN, soft_cap=5000.0),
    "small scale": replace(PLAIN, sm_scale=1e-3),
}


def shape(group: int, kv_heads: int, head_dim: int, page_size: int, **changes: Any) -> PagedCase:
    case = PagedCase(
        kv_lens=(0, 1, page_size, 3 * page_size + 1),
        q_lens=(0, 1, 1, 1),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_row=4,
        num_pages=20,
        dtype=None,
        tokens=8,
    )
    return replace(case, **changes)


SHAPES = {
    "G 1, three KV heads": shape(1, 3, 64, 16),
    "G 2, width 128": shape(2, 1, 128, 16, window=5),
    "G 3, pages of 64": shape(3, 2, 64, 64, sinks="ordinary"),
    "G 4, width 256": shape(4, 2, 256, 16),
    "G 5": shape(5, 1, 64, 16, soft_cap=10.0),
    "G 7, four KV heads, float16": shape(7, 4, 64, 32, dtype="float16", window=9),
    "G 8, width 128": shape(8, 1, 128, 16, sinks="mixed"),
    "G 12, head-wise": shape(12, 1, 64, 16, head_wise=True),
    "G 14, head windows": shape(14, 2, 128, 16, head_windows=((6, 1), (FULL, 0))),
    "G 16, width 256, pages of 128": shape(16, 1, 256, 128, kv_lens=(0, 1, 130), q_lens=(0, 1, 1), pages_per_row=2),
    "G 67": shape(67, 1, 64, 16),
    "page of 1 token": shape(1, 2, 64, 1, pages_per_row=40, num_pages=90),
    "page of 8 tokens": shape(1, 2, 64, 8),
    "heads of 16": shape(2, 2, 16, 16),
}
DTYPES = {
    "float32": replace(PLAIN, dtype="float32"),
    "float16, windows": windowed((FULL, 0), (5, 2), dtype="float16"),
    "bfloat16": replace(CARRIER, dtype="bfloat16"),
    "float32 over bfloat16": replace(PLAIN, dtype="float32", cache_dtype="bfloat16"),
    "bfloat16 over float32": replace(PLAIN, dtype="bfloat16", cache_dtype="float32"),
    "bfloat16 over float16": replace(PLAIN, dtype="bfloat16", cache_dtype="float16"),
}
LONG_PAGES = replace(
    PLAIN, kv_lens=(0, 63, 64, 200), q_lens=(0, 1, 1, 1), page_size=64, pages_per_row=4, num_pages=14, tokens=8
)
QUANTISED = {
    "int8 per head, odd group, int window, soft cap": replace(
        LONG_PAGES, q_heads=3, kv_heads=1, head_dim=128, cache_dtype="int8", scales="head", window=90, soft_cap=3.0
    ),
    "int8 per head, head-wise": replace(PLAIN, cache_dtype="int8", scales="head", head_wise=True),
    "int8 per channel, windows, float16": windowed(
        (9, 1), (FULL, 0), cache_dtype="int8", scales="channel", dtype="float16"
    ),
    "int8 in 4 groups, absent pages": replace(PLAIN, cache_dtype="int8", scales=4, absent_pages=True),
    "fp8 per head, drafts": replace(
        DRAFTS, cache_dtype=FP8, scales="head", q_heads=6, kv_heads=1, head_windows=None, sinks=None
    ),
    "fp8 per channel, head-wise": replace(PLAIN, cache_dtype=FP8, scales="channel", head_wise=True),
    "fp8 per token, windows": windowed((9, 17), (FULL, 0), cache_dtype=FP8, scales=PS),
    "fp8 in 1 group, int window": replace(PLAIN, cache_dtype=FP8, scales=1, sinks="ordinary", window=12),
    "e5m2 per head, sinks": replace(PLAIN, cache_dtype=E5M2, scales="head", sinks="ordinary"),
    "e5m2 in 4 groups, head-wise": replace(PLAIN, cache_dtype=E5M2, scales=4, head_wise=True),
    "fp8 in 4 groups of pages of two tiles": replace(
        PLAIN, kv_lens=(100, 129, 256), q_lens=(1, 1, 1), cache_dtype=FP8, scales=4, page_size=128, pages_per_row=2,
        num_pages=8,
    ),
}  # fmt: skip
WIDTHS = {
    "keys of 48, values of 80, sinks": replace(PLAIN, head_dim=48, value_dim=80, sinks="ordinary", soft_cap=5.0),
    "values narrower, int8 per channel, windows": windowed(
        (9, 1), (FULL, 0), value_dim=16, cache_dtype="int8", scales="channel", dtype="float16"
    ),
    "fused, drafts": replace(DRAFTS, fused=64),
    "fused in lanes, fp8 per token, pages of 1 token": shape(
        2, 2, 16, 1, pages_per_row=40, num_pages=90, cache_dtype=FP8, scales=1, fused=24
    ),
    "fused in lanes, int8 per channel, head-wise": replace(
        PLAIN, cache_dtype="int8", scales="channel", head_wise=True, fused=80, absent_pages=True
    ),
}
WIDE = {
    "G 8, width 512, sinks": shape(8, 2, 512, 16, sinks="mixed"),
    "width 512, drafts, windows, absent pages, soft cap": replace(
        DRAFTS, head_dim=512, soft_cap=20.0, head_windows=((9, 1), (FULL, 0)), absent_pages=True
    ),
    "G 12, width 512, head-wise, int window": shape(
        12, 1, 512, 64, kv_lens=(0, 1, 150), q_lens=(0, 1, 1), window=90, head_wise=True
    ),
    "width 448, float16": shape(4, 1, 448, 32, dtype="float16", window=40),
    "width 384": shape(2, 2, 384, 16, sinks="ordinary"),
    "width 320, pages of 128": shape(5, 1, 320, 128, kv_lens=(0, 1, 130), q_lens=(0, 1, 1), pages_per_row=2),
    "keys of 512, values of 320": shape(2, 2, 512, 16, value_dim=320, window=20),
    "width 512, int8 per channel, windows": replace(
        DRAFTS, head_dim=512, cache_dtype="int8", scales="channel", head_windows=((9, 1), (FULL, 0)), sinks=None
    ),
    "width 512, int8 per head, soft cap": shape(8, 1, 512, 64, cache_dtype="int8", scales="head", soft_cap=3.0),
    "width 512, fp8 per token, absent pages": shape(
        4, 2, 512, 16, cache_dtype=FP8, scales=16, absent_pages=True, kv_lens=(0, 1, 61), q_lens=(0, 1, 1)
    ),
    "width 384, fp8 in 4 groups": shape(16, 1, 384, 64, cache_dtype=FP8, scales=4),
}
"""Heads of more than 256 columns."""

LAYOUTS = {
    "tokens first": replace(CARRIER, tokens_first=True),
    "tokens first, drafts, windows, absent pages": replace(
        DRAFTS, tokens_first=True, head_windows=((3, 0), (18, 2)), absent_pages=True, q_heads=6
    ),
    "tokens first, pages of 192, int window, soft cap": shape(
        4, 2, 128, 192, kv_lens=(0, 1, 195, 330), pages_per_row=2, tokens_first=True, window=150, soft_cap=9.0
    ),
    "tokens first, int8 per head, pages of 32": shape(
        8, 2, 128, 32, tokens_first=True, cache_dtype="int8", scales="head", sinks="ordinary"
    ),
    "tokens first, fp8 per channel": shape(2, 2, 128, 16, tokens_first=True, cache_dtype=FP8, scales="channel"),
    "tokens first, fp8 per token": shape(2, 2, 128, 16, tokens_first=True, cache_dtype=FP8, scales=16),
    "tokens first, int8 heads of 64": shape(2, 2, 64, 16, tokens_first=True, cache_dtype="int8", scales="head"),
    "tokens first, width 512, int8 per head": shape(
        4, 2, 512, 64, tokens_first=True, kv_lens=(0, 1, 150), q_lens=(0, 1, 1), cache_dtype="int8", scales="head"
    ),
    "fused, fp8 per token": shape(2, 2, 128, 16, fused=128, cache_dtype=FP8, scales=16),
    "tokens first, pages of 24": shape(2, 2, 64, 24, tokens_first=True),
    "tokens first, width 512": shape(4, 2, 512, 64, tokens_first=True, kv_lens=(0, 1, 150), q_lens=(0, 1, 1)),
    "fused, tokens first": replace(CARRIER, tokens_first=True, fused=64),
    "fused in lanes, tokens first, pages of 64, float16": replace(
        LONG_PAGES, tokens_first=True, fused=128, dtype="float16", window=70, sinks="mixed"
    ),
    "fused, tokens first, fp8 per head": replace(
        DRAFTS, tokens_first=True, fused=128, head_dim=128, cache_dtype=FP8, scales="head"
    ),
    "fused in lanes": replace(CARRIER, fused=128, absent_pages=True),
}
"""Caches with tokens before heads, and fused caches."""

SHARED = VALUES | DRAFT_VALUES | OPTIONS | SHAPES | DTYPES | QUANTISED | WIDTHS | WIDE | LAYOUTS

TREE = replace(DRAFTS, tree=True, head_wise=True, dtype="float16")
Q_LENS = {2: (0, 1, 2, 1, 2, 0, 2), 3: (0, 1, 2, 3, 0, 3, 1), 8: (0, 1, 7, 8, 2, 5, 0)}
MIXED = {
    "int8 keys per token, 16-bit values, windows": windowed(
        (9, 17), (FULL, 0), dtype="float16", cache_dtype="int8", value_dtype="float16", scales=PS
    ),
    "fp8 values in 4 groups, 16-bit keys, head-wise": replace(
        PLAIN, dtype="bfloat16", value_dtype=FP8, scales=4, head_wise=True
    ),
    "int8 values per token, 16-bit keys, soft cap": replace(
        PLAIN, dtype="float16", value_dtype="int8", scales=PS, soft_cap=5.0
    ),
    "int8 keys per head, 16-bit values, drafts": replace(
        DRAFTS, dtype="float16", cache_dtype="int8", value_dtype="float16", scales="head"
    ),
    "fp8 values per head, 16-bit keys": replace(PLAIN, dtype="float16", value_dtype=FP8, scales="head"),
    "fp8 keys per channel, 16-bit values": replace(
        PLAIN, dtype="float16", cache_dtype=FP8, value_dtype="float16", scales="channel"
    ),
    "int8 values per channel, 16-bit keys": replace(PLAIN, dtype="float16", value_dtype="int8", scales="channel"),
    "int8 keys, fp8 values": replace(PLAIN, dtype="float16", cache_dtype="int8", value_dtype=FP8, scales=PS),
    "fp8 queries and keys, 16-bit values": replace(
        PLAIN, dtype="float16", q_scales="token", cache_dtype=FP8, value_dtype="float16", scales=PS
    ),
    "bfloat16 keys, float16 values": replace(PLAIN, dtype="bfloat16", value_dtype="float16"),
    "int8 keys, float32 values": replace(PLAIN, dtype="float32", cache_dtype="int8", value_dtype="float32", scales=4),
    "int8 keys, e5m2 values": replace(PLAIN, dtype="float16", cache_dtype="int8", value_dtype=E5M2, scales="head"),
}
"""Keys and values of different dtypes, which only `paged_decode` supports."""

DECODE = (
    SHARED
    | MIXED
    | {
        "fp8 queries of heads, sinks": replace(
            PLAIN, q_scales="head", cache_dtype=FP8, scales="head", sinks="ordinary", dtype="float16"
        ),
        "fp8 queries of tokens, tree, cap": replace(
            DRAFTS,
            q_scales="token",
            cache_dtype=FP8,
            scales=4,
            q_heads=6,
            kv_heads=2,
            head_windows=((9, 1), (FULL, 0)),
            sinks=None,
            tree=True,
            soft_cap=20.0,
        ),
        "fp8 queries of tokens, head-wise, over fp8 per channel": replace(
            PLAIN, q_scales="token", cache_dtype=FP8, scales="channel", head_wise=True
        ),
        "one scale of e5m2 queries, drafts": replace(
            DRAFTS, one_q_scale=5e-5, cache_dtype=E5M2, scales="head", soft_cap=9.0
        ),
        "draft trees over any head's rows": TREE,
        "draft trees that start tiles": replace(TREE, kv_lens=(0, 67, 64, 66, 65)),
        "draft trees, windows, absent pages": replace(TREE, head_windows=((3, 0), (18, 2)), absent_pages=True),
        "draft trees alone": replace(TREE, kv_lens=(0, 4, 1, 3, 4)),
        **{
            f"tree of {q}, {name}": replace(
                PLAIN,
                kv_lens=(0, 1, 9, 16, 37, 65, 128),
                queries=q,
                q_lens=lens,
                tree=True,
                head_windows=windows,
                sinks=sinks,
            )
            for q, lens in Q_LENS.items()
            for name, windows, sinks in (("full", None, None), ("windowed", ((3, 0), (12, 2)), "mixed"))
        },
        "width 512, a tree over windows": replace(TREE, head_dim=512, head_windows=((3, 0), (18, 2)), q_heads=6),
        "8 queries each, no q_lens": replace(PLAIN, kv_lens=(8, 16, 65), q_lens=None, queries=8),
        "drafts in blocks, pages of 32": replace(
            PLAIN, kv_lens=(3, 129, 64), q_lens=(5, 3, 2), queries=5, q_heads=12, kv_heads=1, page_size=32, num_pages=14
        ),
    }
)


def packed(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], **changes: Any) -> PagedCase:
    return replace(CARRIER, kv_lens=kv_lens, q_lens=q_lens, **changes)


CHUNK = packed((0, 20, 90, 65), (0, 3, 31, 1))
PREFILL = SHARED | {
    "first chunks, later chunks and none": CHUNK,
    "whole prompts": packed((16, 15, 8, 1), (16, 15, 8, 1)),
    "one sequence has them all": packed((0, 0, 90, 0), (0, 0, TOKENS, 0)),
    "empty sequences around": packed((3, 128, 3, 33), (0, 13, 0, 9)),
    "a page at a time": packed((16, 128, 32, 0), (16, 16, 8, 0)),
    "chunks, windows 1 and past a page": replace(CHUNK, head_windows=((1, 0), (70, 17)), sinks="ordinary"),
    "chunks, windows about as long as a page": replace(CHUNK, head_windows=((PS, 1), (PS + 1, 100)), sinks="large"),
    "chunks, absent pages of any head's rows": replace(
        CHUNK, head_wise=True, absent_pages=True, head_windows=((FULL, 0), (90, 5)), dtype="float16", sinks=None
    ),
    # In float16, because rounding probabilities and outputs to bfloat16 alone makes 1 - cosine 2e-6 to 5e-6.
    "chunks, scores to 5e5": replace(
        CHUNK, exact=True, sm_scale=1.0, head_windows=None, sinks=None, dtype="float16"
    ),
    "chunks, parts of pages, int window, soft cap": packed(
        (130, 200), (3, 9), page_size=128, pages_per_row=2, num_pages=8, q_heads=3, kv_heads=1, head_dim=128,
        head_windows=None, sinks=None, soft_cap=5.0, window=150,
    ),
    "chunks, int8 per token": replace(CHUNK, cache_dtype="int8", scales=PS, head_windows=((FULL, 0), (60, 5))),
    "chunks, one scale of fp8 queries, soft cap": replace(
        CHUNK, one_q_scale=0.007, cache_dtype=FP8, scales="head", soft_cap=20.0, sinks="ordinary"
    ),
    "chunks, one scale of e5m2 queries": replace(CHUNK, one_q_scale=5e-5, cache_dtype=E5M2, scales="channel"),
    # Without the causal mask, every block of queries reads all keys, also if a sequence has fewer keys than queries.
    "full, sinks, soft cap": replace(CHUNK, causal=False, head_windows=None, soft_cap=4.0),
    "full, more queries than keys": packed(
        (3, 128, 0, 5), (9, 13, 6, 9), causal=False, head_windows=None, soft_cap=4.0
    ),
    "full, absent pages of any head's rows, int8 per token": replace(
        CHUNK, causal=False, head_windows=None, head_wise=True, absent_pages=True, cache_dtype="int8", scales=PS
    ),
    "chunks, a tree": replace(CHUNK, tree=True, sinks="ordinary", head_windows=None),
    "chunks, a tree over windows and absent pages": replace(
        CHUNK, tree=True, absent_pages=True, head_windows=((7, 3), (FULL, 0))
    ),
    "chunks, a tree, int8 per token, head-wise": replace(
        CHUNK, tree=True, head_wise=True, cache_dtype="int8", scales=PS, head_windows=None, sinks=None, soft_cap=4.0
    ),
    "chunks, a tree, more new tokens than keys": packed((3, 128, 0, 5), (9, 13, 6, 9), tree=True),
    "chunks, width 512, windows": packed(
        (70, 20), (3, 20), head_dim=512, pages_per_row=5, num_pages=14, head_windows=((9, 1), (FULL, 0))
    ),
    "chunks, width 512, a tree, fp8 per token": packed(
        (37, 20), (3, 8), head_dim=512, tree=True, cache_dtype=FP8, scales=PS, pages_per_row=3, num_pages=9, tokens=12,
        head_windows=None, sinks=None,
    ),
    "a single sequence": packed((61,), (21,), head_windows=None, window=10, sinks="ordinary"),
    "no padding": packed((30, 64), (30, 1), tokens=31, head_windows=None, soft_cap=4.0),
    "a single token": packed((64,), (1,), tokens=1, head_windows=((5, 1), (FULL, 0))),
    "more sequences than tokens": packed((3, 9, 64, 1), (0, 1, 1, 0), tokens=3, sinks=None, head_windows=None),
}  # fmt: skip

SAMPLE = windowed((9, 1), (FULL, 0))
"""Case for tests of jax transformations, repeated calls and the order of sequences."""

UNSUPPORTED = {
    "mosaic": {
        "large soft cap": "takes a soft cap of up to 4096, got 5000",
        "page of 1 token": "takes pages of 16, 32, 64 or 128 tokens, got 1",
        "page of 8 tokens": "takes pages of 16, 32, 64 or 128 tokens, got 8",
        "heads of 16": "takes heads of width 64, 128.*, got 16",
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "bfloat16 over float32": "takes queries and an unquantised cache of one dtype",
        "bfloat16 over float16": "takes queries and an unquantised cache of one dtype",
        "e5m2 per head, sinks": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "e5m2 in 4 groups, head-wise": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "keys of 48, values of 80, sinks": "takes pages of keys and values of one width",
        "values narrower, int8 per channel, windows": "takes pages of keys and values of one width",
        "fused in lanes, fp8 per token, pages of 1 token": "takes fused keys and values of a multiple of 128 bytes",
        "fused in lanes, int8 per channel, head-wise": "takes fused keys and values of a multiple of 128 bytes",
        "tokens first, fp8 per token": "takes scales per head or channel with tokens before heads, got a scale per",
        "tokens first, int8 heads of 64": "takes 8-bit heads of at least 128 columns .* got 64",
        "tokens first, pages of 24": "takes views of pages of a multiple of 16 tokens, got 24",
        "one scale of e5m2 queries, drafts": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "chunks, one scale of e5m2 queries": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "chunks, a tree": "takes no draft mask",
        "chunks, a tree over windows and absent pages": "takes no draft mask",
        "chunks, a tree, int8 per token, head-wise": "takes no draft mask",
        "chunks, a tree, more new tokens than keys": "takes no draft mask",
        "chunks, width 512, a tree, fp8 per token": "takes no draft mask",
        "keys of 512, values of 320": "takes pages of keys and values of one width",
        **dict.fromkeys(MIXED, "takes keys and values of one dtype"),
    },
    "triton": {
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "bfloat16 over float32": "takes queries and an unquantised cache of one dtype",
        "bfloat16 over float16": "takes queries and an unquantised cache of one dtype",
        "e5m2 per head, sinks": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "e5m2 in 4 groups, head-wise": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "one scale of e5m2 queries, drafts": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "chunks, one scale of e5m2 queries": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
        "bfloat16 keys, float16 values": "takes queries and an unquantised cache of one dtype",
        "int8 keys, float32 values": "takes bfloat16 and float16 queries, got float32",
        "int8 keys, e5m2 values": "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2",
    },
}
"""By backend: names of the cases that it does not support, and a pattern of the error message of each."""


def other_layouts(cases: Mapping[str, PagedCase]) -> dict[str, str]:
    """Return the error messages of the cases in other layouts, for kernels that do not support them."""
    reasons = {}
    for name, case in cases.items():
        if case.fused is not None:
            reasons[name] = "takes keys and values in arrays of their own, got them fused"
        elif case.tokens_first:
            reasons[name] = "takes pages with heads before tokens, got a view"
    return reasons


def too_wide(cases: Mapping[str, PagedCase], supported: tuple[int, ...] = ()) -> dict[str, str]:
    """Return the error messages of the cases with wide heads, for kernels that do not support them.

    Args:
      supported: widths above 256 that the kernels support.
    """
    wide = {name: case for name, case in cases.items() if case.head_dim > 256 and name not in UNSUPPORTED["mosaic"]}
    return {name: "takes heads of width 64, 128" for name, case in wide.items() if case.head_dim not in supported}


def unsupported(cases: Mapping[str, PagedCase]) -> dict[str, dict[str, str]]:
    """Return the entries of `UNSUPPORTED` whose names are in `cases`, the cases of one operation."""
    return {
        backend: {name: reason for name, reason in reasons.items() if name in cases}
        for backend, reasons in UNSUPPORTED.items()
    }
