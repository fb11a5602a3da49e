"""The contract of `paged_prefill`: every implementation, every awkward input."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL, PagedKV, dispatch, kv_cache_spec, paged_decode, paged_prefill
from tests.ops import harness, transformations
from tests.ops.harness import VARIANTS, Variant
from tests.ops.paged_case import Inputs, PagedCase

PORTABLE = [
    name for name in dispatch.implementations("paged_prefill") if name != "mosaic"
]  # see test_paged_prefill_mosaic.py
every_variant = harness.variants(PORTABLE)
lean_variants = harness.variants(name for name in PORTABLE if name != "reference")  # which is dense

PS = 8
TOKENS = 48


def packed(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], **changes: Any) -> PagedCase:
    """A case of TOKENS packed rows, so that many lengths share a compilation."""
    return PagedCase(kv_lens, q_lens, padding=TOKENS - sum(q_lens), **changes)


BASE = packed((0, 1, PS - 1, PS, PS + 1, 37, 64, 64), (0, 1, PS - 1, 3, 1, 5, 20, 1))


def windowed(*per_head: tuple[int, int], **changes: Any) -> PagedCase:
    return replace(BASE, head_windows=per_head, **changes)


# Cases with equal structure and shapes share a compilation; only their values differ.
CHUNKS = {
    "first chunks, later chunks and none": BASE,
    "all idle": packed((0,) * 8, (0,) * 8),
    "no new tokens": packed((5, 64, 8, 0, 1, 9, 16, 33), (0,) * 8),
    "whole prompts": packed((7, 8, 9, 1, 0, 2, 16, 5), (7, 8, 9, 1, 0, 2, 16, 5)),
    "one token each": packed((1, 2, 7, 8, 9, 63, 64, 17), (1,) * 8),
    "one sequence has them all": packed((0, 0, 60, 0, 0, 0, 0, 0), (0, 0, 48, 0, 0, 0, 0, 0)),
    "empty sequences around": packed((3, 64, 3, 64, 3, 64, 3, 9), (0, 13, 0, 0, 2, 11, 0, 9)),
    "a page at a time": packed((8, 16, 64, 24, 8, 16, 0, 0), (8, 8, 8, 8, 8, 8, 0, 0)),
    "absent pages": replace(BASE, absent_pages=True),
}
HEAD_WINDOWS = {
    **{f"window {w}": windowed((w, 0), (w, 0)) for w in (1, PS - 1, PS, PS + 1, 100)},
    **{f"window 3, {n} sink tokens": windowed((3, n), (3, n)) for n in (1, PS, PS + 5, 1000)},
    "all heads full": windowed((FULL, 0), (FULL, 0)),
    "heads interleaved": windowed((FULL, 0), (2, 1)),
    "windows and absent pages": windowed((20, 2), (5, 0), absent_pages=True),
}
SEQUENCES = {
    "a single sequence": PagedCase((61,), (21,), window=10, sinks="ordinary"),
    "no padding": PagedCase((30, 64), (30, 1), padding=0, soft_cap=4.0),
    "a single token": PagedCase((64,), (1,), head_windows=((5, 1), (FULL, 0))),
    "more sequences than tokens": PagedCase((3, 9, 64, 1), (0, 1, 1, 0), padding=1),
}
INT_WINDOWS = {
    "int window 1": replace(BASE, window=1),
    "int window ps, head-wise": replace(BASE, window=PS, head_wise=True),
    "int window ps + 1, sinks": replace(BASE, window=PS + 1, sinks="mixed"),
}
HEAD_WISE = {
    "head-wise tables": replace(BASE, head_wise=True, absent_pages=True),
    "head-wise windows": windowed((9, 0), (FULL, 0), head_wise=True),
    "head-wise windows and sink tokens, absent pages": windowed((4, 9), (FULL, 3), head_wise=True, absent_pages=True),
}
SINKS = {f"sinks {kind}": windowed((FULL, 0), (3, 1), sinks=kind) for kind in ("ordinary", "large", "-inf", "mixed")}
SCORES = {
    "soft cap": replace(BASE, soft_cap=2.0),
    "scores to 5e5": replace(BASE, exact=True, head_dim=64, sm_scale=1.0),
    "scores to 5e5, float16": replace(BASE, exact=True, head_dim=64, sm_scale=1.0, dtype="float16"),
}


def shape(group: int, kv_heads: int, head_dim: int, page_size: int, **changes: Any) -> PagedCase:
    case = PagedCase(
        (0, page_size, 3 * page_size + 1),
        (0, page_size, 5),
        padding=2,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_row=4,
        num_pages=16,
    )
    return replace(case, **changes)


SHAPES = {
    "G 1": shape(1, 3, 64, 16),
    "G 3": shape(3, 2, 64, 4, sinks="ordinary"),
    "G 4": shape(4, 2, 128, 8, dtype="bfloat16", window=7),
    "G 5": shape(5, 1, 64, 8, soft_cap=10.0),
    "G 7": shape(7, 2, 64, 8, dtype="float16", head_wise=True),
    "G 8": shape(8, 1, 256, 8, dtype="bfloat16"),
    "G 12": shape(12, 1, 64, 4),
    "G 14": shape(14, 2, 128, 4, head_windows=((6, 1), (FULL, 0))),
    "G 16": shape(16, 1, 128, 8),
    "page of 1 token": shape(1, 2, 16, 1, pages_per_row=8, num_pages=20),
    "page of 64 tokens": shape(2, 2, 16, 64, window=40),
}
FP8 = "float8_e4m3fn"
QUANTISED = {
    "float32 over bfloat16": replace(BASE, cache_dtype="bfloat16"),
    "int8 per head, head-wise": replace(BASE, cache_dtype="int8", scales="head", head_wise=True),
    "int8 per channel, windows": windowed((9, 1), (FULL, 0), cache_dtype="int8", scales="channel"),
    "int8 per token": replace(BASE, cache_dtype="int8", scales=PS, absent_pages=True),
    "fp8 per head, bfloat16": replace(BASE, cache_dtype=FP8, scales="head", dtype="bfloat16"),
    "fp8 per channel": replace(BASE, cache_dtype=FP8, scales="channel", window=5),
    "fp8 in 4 groups, head-wise windows": windowed((7, 3), (FULL, 0), cache_dtype=FP8, scales=4, head_wise=True),
}
CASES = {
    **CHUNKS,
    **HEAD_WINDOWS,
    **SEQUENCES,
    **INT_WINDOWS,
    **HEAD_WISE,
    **SINKS,
    **SCORES,
    **SHAPES,
    **QUANTISED,
}
SAMPLE = windowed((9, 1), (FULL, 0), sinks="mixed")


def call(variant: Variant, case: PagedCase, arrays: dict[str, Any], **static: Any) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(paged_prefill, variant, return_lse=True, **case.static, **static)(**arrays)


def draw(case: PagedCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


# --- numbers


@every_variant
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_reference_and_reads_no_poison(variant: Variant, case: PagedCase) -> None:
    """`reference` itself is held to what is spelt out in numpy."""
    inputs = draw(case)
    is_reference = variant.implementation == "reference"
    static = {"out_dtype": "float32"} if is_reference else {}
    got = call(variant, case, inputs.prefill(), **static)
    harness.assert_same_bits(got, call(variant, case, inputs.prefill(poisoned=False), **static))
    if is_reference:
        want, dtype = inputs.expected_prefill(), "float32"
    else:
        want, dtype = call(VARIANTS["reference"], case, inputs.prefill(), out_dtype="float32"), case.dtype
    harness.assert_attention_close(got, want, variant.tolerance(dtype))


def check_queries_that_see_nothing(variant: Variant, case: PagedCase) -> None:
    """They are 0, whatever others of their sequence see."""
    inputs = draw(case)
    empty = np.isneginf(inputs.expected_prefill()[1])
    inputs.make_live_values_infinite()
    harness.assert_empty(call(variant, case, inputs.prefill()), empty)


@every_variant
def test_queries_that_see_nothing_beside_infinite_values(variant: Variant) -> None:
    check_queries_that_see_nothing(variant, replace(BASE, kv_lens=(3, 5, 2, 0), q_lens=(5, 4, 3, 2)))


@every_variant
def test_output_dtype(variant: Variant) -> None:
    inputs = draw(SHAPES["G 4"])
    rounded = call(variant, inputs.case, inputs.prefill())
    exact = call(variant, inputs.case, inputs.prefill(), out_dtype="float32")
    assert (rounded[0].dtype, exact[0].dtype) == (jnp.bfloat16, jnp.float32)
    assert rounded[1].dtype == exact[1].dtype == jnp.float32
    harness.assert_same_bits(rounded[0], exact[0].astype(jnp.bfloat16))


@every_variant
def test_no_tokens_at_all(variant: Variant) -> None:
    inputs = draw(PagedCase((5, 0), (0, 0)))
    out, lse = call(variant, inputs.case, inputs.prefill())
    assert out.shape == (0, inputs.case.q_heads, inputs.case.head_dim)
    assert lse.shape == (0, inputs.case.q_heads)


@every_variant
def test_chunks_give_what_the_whole_prompt_gives(variant: Variant) -> None:
    """A prompt at once, and the same prompt cut anywhere, over the same pages."""
    whole = draw(packed((48, 0, 0, 0), (48, 0, 0, 0), sinks="mixed"))
    arrays = whole.prefill(poisoned=False)
    want, want_lse = (np.asarray(x) for x in call(variant, whole.case, arrays))
    for start, end in ((0, 1), (0, 13), (13, 16), (16, 17), (17, 48)):
        q = np.zeros_like(arrays["q"])
        q[: end - start] = arrays["q"][start:end]
        cu_q_lens = np.array([0, *[end - start] * 4], np.int32)
        kv_lens = np.array([end, 0, 0, 0], np.int32)
        chunk = arrays | {"q": q, "cu_q_lens": cu_q_lens, "kv_lens": kv_lens}
        out, lse = (np.asarray(x)[: end - start] for x in call(variant, whole.case, chunk))
        expected = (want[start:end], want_lse[start:end])
        harness.assert_attention_close((out, lse), expected, variant.tolerance(whole.case.dtype))


@every_variant
def test_agrees_with_decode(variant: Variant) -> None:
    """The same queries as a draft of three tokens a sequence."""
    inputs = draw(PagedCase((3, 8, 9, 64), queries=3, head_windows=((9, 1), (FULL, 0)), sinks="mixed"))
    out, lse = call(variant, inputs.case, inputs.prefill())
    decode = harness.compiled(paged_decode, VARIANTS[variant.implementation], return_lse=True)
    want = [np.asarray(x).reshape(12, *x.shape[2:]) for x in decode(**inputs.decode())]
    harness.assert_attention_close((out, lse), (want[0], want[1]), variant.tolerance(inputs.case.dtype))


@every_variant
def test_a_sequence_does_not_depend_on_its_batch(variant: Variant) -> None:
    """Each sequence alone, among empty ones."""
    inputs = draw(SAMPLE)
    arrays = inputs.prefill()
    out, lse = (np.asarray(x) for x in call(variant, SAMPLE, arrays))
    for s, (start, end) in enumerate(zip(arrays["cu_q_lens"], arrays["cu_q_lens"][1:], strict=False)):
        alone = np.arange(8) == s
        cu_q_lens = np.cumsum([0, *np.where(alone, end - start, 0)], dtype=np.int32)
        q = np.roll(arrays["q"], -start, axis=0)
        kv_lens = np.where(alone, arrays["kv_lens"], 0)
        got = call(variant, SAMPLE, arrays | {"q": q, "cu_q_lens": cu_q_lens, "kv_lens": kv_lens})
        got_out, got_lse = (np.asarray(x)[: end - start] for x in got)
        tolerance = variant.tolerance(SAMPLE.dtype)
        harness.assert_attention_close((got_out, got_lse), (out[start:end], lse[start:end]), tolerance)


@lean_variants
def test_large_tiles(variant: Variant) -> None:
    """The configuration users get, on chunks long enough to need several of its tiles and groups."""
    case = PagedCase(
        (900, 0, 300, 33),
        (200, 0, 300, 1),
        padding=11,
        page_size=16,
        pages_per_row=64,
        num_pages=120,
        head_windows=((FULL, 0), (400, 20)),
    )
    inputs = draw(case)
    got = call(replace(variant, config=None), case, inputs.prefill())
    want = call(VARIANTS["reference"], case, inputs.prefill())
    harness.assert_attention_close(got, want, variant.tolerance(case.dtype))


@lean_variants
def test_seventy_thousand_tokens(variant: Variant) -> None:
    """More query tokens than a grid dimension of a GPU holds, in sequences with and without a cached prefix."""
    rng, window, page_size, head_dim = harness.fresh_rng(), 16, 16, 8
    kv_lens, q_lens = (60_010, 9_000, 1_500), (60_000, 9_000, 1_000)
    num_pages = [-(-n // page_size) for n in kv_lens]
    ids = np.split(rng.permutation(np.arange(1, sum(num_pages) + 1)).astype(np.int32), np.cumsum(num_pages)[:-1])
    tables = np.stack([np.pad(row, (0, max(num_pages) - row.size), constant_values=harness.GARBAGE) for row in ids])
    k, v = (harness.normal(rng, (sum(num_pages) + 1, 1, page_size, head_dim), np.float32) for _ in "kv")
    q = harness.normal(rng, (sum(q_lens), 2, head_dim), np.float32)
    got = harness.compiled(paged_prefill, replace(variant, config=None), return_lse=True, window=window)(
        q=q,
        kv=PagedKV(jnp.asarray(k), jnp.asarray(v)),
        block_tables=tables,
        cu_q_lens=np.cumsum([0, *q_lens], dtype=np.int32),
        kv_lens=np.array(kv_lens, np.int32),
    )
    want = []
    for row, kv_len, new in zip(ids, kv_lens, np.split(q, np.cumsum(q_lens)[:-1]), strict=True):
        keys, values = (x[row, 0].reshape(-1, head_dim)[:kv_len].astype(np.float64) for x in (k, v))
        want.append(windowed_attention(new.astype(np.float64), keys, values, window))
    out, lse = (np.concatenate(x) for x in zip(*want, strict=True))
    harness.assert_attention_close(got, (out, lse), variant.tolerance(np.float32))


def windowed_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The newest queries [n, H, D] of one sequence, each over the last `window` of its keys [K, D]."""
    position = np.arange(len(k) - len(q), len(k))
    seen = position[:, None] - np.arange(window)  # [n, window], newest first
    scores = np.einsum("nhd,nwd->nhw", q, k[np.maximum(seen, 0)]) * q.shape[-1] ** -0.5
    scores = np.where((seen >= 0)[:, None], scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("nhw,nwd->nhd", weights / total, v[np.maximum(seen, 0)]), (highest + np.log(total))[..., 0]


# --- transformations


@every_variant
def test_repeats_are_bitwise_equal(variant: Variant) -> None:
    transformations.assert_repeats(harness.compiled(paged_prefill, variant, return_lse=True), draw(SAMPLE).prefill())


@every_variant
def test_scan_with_a_donated_cache(variant: Variant) -> None:
    transformations.assert_scans(
        harness.compiled(paged_prefill, variant, return_lse=True),
        draw(SAMPLE).prefill(),
        variant.tolerance(SAMPLE.dtype),
    )


@every_variant
def test_vmap(variant: Variant) -> None:
    transformations.assert_vmaps(
        harness.compiled(paged_prefill, variant, return_lse=True),
        [draw(SAMPLE).prefill(), draw(SAMPLE).prefill()],
        variant.tolerance(SAMPLE.dtype),
        over="q",
    )


@every_variant
def test_export_round_trip(variant: Variant) -> None:
    transformations.assert_exports(harness.compiled(paged_prefill, variant, return_lse=True), draw(SAMPLE).prefill())


@every_variant
def test_values_do_not_retrace(variant: Variant) -> None:
    calls = [draw(case).prefill() for case in HEAD_WINDOWS.values()]
    transformations.assert_traced_once(paged_prefill, variant, calls)


# --- what is compiled


def big(dtype: Any, scales: Any = None) -> dict[str, Any]:
    """Shapes of a call over a pool larger than everything else in it."""
    spec = kv_cache_spec(num_pages=8192, page_size=16, num_kv_heads=2, head_dim=32, dtype=dtype, scales=scales)
    return {
        "q": jax.ShapeDtypeStruct((64, 4, 32), jnp.float32 if scales else dtype),
        "kv": jax.eval_shape(lambda: PagedKV.allocate(spec)),
        "block_tables": jax.ShapeDtypeStruct((4, 64), jnp.int32),
        "cu_q_lens": jax.ShapeDtypeStruct((5,), jnp.int32),
        "kv_lens": jax.ShapeDtypeStruct((4,), jnp.int32),
    }


@lean_variants
@pytest.mark.parametrize(
    ("dtype", "scales"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.int8, 4), (jnp.float8_e4m3fn, 16)]
)
def test_no_copy_of_the_cache(variant: Variant, dtype: Any, scales: Any) -> None:
    """As one step of a loop that carries the donated cache."""

    def loop(kv: PagedKV, **arrays: Any) -> Any:
        def step(kv: PagedKV, _: None) -> Any:
            return kv, paged_prefill(kv=kv, **arrays, implementation=variant.implementation)

        return jax.lax.scan(step, kv, length=3)

    shapes = big(dtype, scales)
    harness.assert_stays_put(jax.jit(loop, donate_argnames="kv"), shapes["kv"].k, **shapes)


@lean_variants
def test_no_host_callbacks_and_a_named_scope(variant: Variant) -> None:
    prefill = harness.compiled(paged_prefill, variant)
    harness.assert_no_host_callbacks(prefill, **big(jnp.float32))
    assert "paged_prefill" in harness.scope_names(prefill, **big(jnp.float32))
