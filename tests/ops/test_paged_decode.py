"""The contract of `paged_decode`: every implementation, every awkward input."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL, PagedKV, dispatch, kv_cache_spec, paged_decode
from tests.ops import harness, transformations
from tests.ops.harness import VARIANTS, Variant
from tests.ops.paged_case import Inputs, PagedCase

PORTABLE = [
    name for name in dispatch.implementations("paged_decode") if name != "mosaic"
]  # see test_paged_decode_mosaic.py
every_variant = harness.variants(PORTABLE)
lean_variants = harness.variants(name for name in PORTABLE if name != "reference")  # which is dense

PS = 8
BASE = PagedCase(kv_lens=(0, 1, PS - 1, PS, PS + 1, 37, 64, 64))  # of 64 at most: 8 pages a row
DRAFTS = replace(BASE, kv_lens=(0, 1, 7, 9, 16, 37, 64, 64))
WINDOWS = (1, PS - 1, PS, PS + 1, 100)


def windowed(*per_head: tuple[int, int], **changes: Any) -> PagedCase:
    return replace(BASE, head_windows=per_head, **changes)


# Cases with equal structure and shapes share a compilation; only their values differ.
LENGTHS = {
    "mixed lengths": BASE,
    "all idle": replace(BASE, kv_lens=(0,) * 8),
    "all of length 1": replace(BASE, kv_lens=(1,) * 8),
    "all of maximum length": replace(BASE, kv_lens=(64,) * 8),
    "absent pages": replace(BASE, absent_pages=True),
}
HEAD_WINDOWS = {
    **{f"window {w}": windowed((w, 0), (w, 0)) for w in WINDOWS},
    **{f"window 3, {n} sink tokens": windowed((3, n), (3, n)) for n in (1, PS, PS + 5, 1000)},
    "all heads full": windowed((FULL, 0), (FULL, 0)),
    "heads interleaved": windowed((FULL, 0), (2, 1)),
    "sink tokens of full heads": windowed((FULL, 9), (12, 0)),
    "windows and absent pages": windowed((20, 2), (5, 0), absent_pages=True),
    "windows, all idle": windowed((3, 1), (FULL, 0), kv_lens=(0,) * 8),
}
INT_WINDOWS = {
    "int window 1": replace(BASE, window=1),
    "int window ps - 1, head-wise": replace(BASE, window=PS - 1, head_wise=True),
    "int window ps, sinks": replace(BASE, window=PS, sinks="ordinary"),
    "int window ps + 1, drafts": replace(DRAFTS, window=PS + 1, queries=3),
    "int window longer than any sequence": replace(BASE, window=100, soft_cap=5.0),
}
HEAD_WISE = {
    "head-wise tables": replace(BASE, head_wise=True),
    "head-wise, absent pages": replace(BASE, head_wise=True, absent_pages=True),
    "head-wise windows": windowed((9, 0), (FULL, 0), head_wise=True),
    "head-wise windows and sink tokens, absent pages": windowed((4, 9), (FULL, 3), head_wise=True, absent_pages=True),
}
SINKS = {
    f"sinks {kind}, {name}": windowed(*windows, sinks=kind)
    for kind in ("ordinary", "large", "-inf", "mixed")
    for name, windows in {"full": ((FULL, 0), (FULL, 0)), "windowed": ((1, 0), (20, 3))}.items()
}
SCORES = {
    "soft cap": replace(BASE, soft_cap=2.0),
    "soft cap, sinks": replace(BASE, soft_cap=30.0, sinks="mixed", sm_scale=2.0),
    "scores to 5e5": replace(BASE, exact=True, head_dim=64, sm_scale=1.0),
    "scores to 5e5, bfloat16": replace(BASE, exact=True, head_dim=64, sm_scale=1.0, dtype="bfloat16"),
    "small scale": replace(BASE, sm_scale=1e-3),
}
Q_LENS = {
    2: (0, 1, 2, 1, 2, 0, 2, 1),
    3: (0, 1, 2, 3, 0, 3, 3, 1),
    4: (0, 1, 4, 3, 2, 0, 4, 1),
    8: (0, 1, 7, 8, 2, 5, 8, 0),
}
QUERIES = {
    **{f"{q} queries": replace(DRAFTS, queries=q) for q in (2, 4)},
    **{f"{q} queries, ragged": replace(DRAFTS, queries=q, q_lens=lens) for q, lens in Q_LENS.items()},
    **{
        f"tree of {q}, ragged, {name}": replace(DRAFTS, queries=q, q_lens=lens, tree=True, head_windows=windows)
        for q, lens in Q_LENS.items()
        for name, windows in {"full": ((FULL, 0), (FULL, 0)), "windowed": ((3, 0), (12, 2))}.items()
    },
    "tree, no window": replace(DRAFTS, queries=3, q_lens=Q_LENS[3], tree=True, absent_pages=True, sinks="mixed"),
    "tree, head-wise tables": replace(DRAFTS, queries=4, q_lens=Q_LENS[4], tree=True, head_wise=True),
    "draft longer than a page": replace(
        DRAFTS, page_size=2, num_pages=272, pages_per_row=32, queries=8, q_lens=Q_LENS[8], tree=True
    ),
}


def shape(group: int, kv_heads: int, head_dim: int, page_size: int, **changes: Any) -> PagedCase:
    case = PagedCase(
        (0, 1, page_size, 3 * page_size + 1),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_row=4,
        num_pages=24,
    )
    return replace(case, **changes)


SHAPES = {
    "G 1": shape(1, 3, 64, 16),
    "G 2": shape(2, 1, 128, 8, window=5),
    "G 3": shape(3, 2, 64, 4, sinks="ordinary"),
    "G 4": shape(4, 2, 256, 8, dtype="bfloat16"),
    "G 5": shape(5, 1, 64, 16, soft_cap=10.0),
    "G 7": shape(7, 4, 64, 8, dtype="float16", window=9),
    "G 8": shape(8, 1, 128, 16, dtype="bfloat16", sinks="mixed"),
    "G 12": shape(12, 1, 64, 8, head_wise=True),
    "G 14": shape(14, 2, 128, 4, head_windows=((6, 1), (FULL, 0))),
    "G 16": shape(16, 1, 256, 8),
    "page of 1 token": shape(1, 2, 16, 1, pages_per_row=40, num_pages=90),
    "page of 64 tokens": shape(2, 2, 16, 64, num_pages=12, window=40),
}
DTYPES = {
    "float16": replace(BASE, dtype="float16"),
    "bfloat16, windows": windowed((FULL, 0), (5, 2), dtype="bfloat16"),
    "float32 over bfloat16": replace(BASE, cache_dtype="bfloat16"),
    "bfloat16 over float32": replace(BASE, dtype="bfloat16", cache_dtype="float32"),
}
FP8 = "float8_e4m3fn"
QUANTISED = {
    "int8 per head": replace(BASE, cache_dtype="int8", scales="head"),
    "int8 per head, head-wise": replace(BASE, cache_dtype="int8", scales="head", head_wise=True),
    "int8 per channel, windows": windowed((9, 1), (FULL, 0), cache_dtype="int8", scales="channel"),
    "int8 in 4 groups": replace(BASE, cache_dtype="int8", scales=4, absent_pages=True),
    "fp8 per head, bfloat16": replace(BASE, cache_dtype=FP8, scales="head", dtype="bfloat16"),
    "fp8 per channel, head-wise": replace(BASE, cache_dtype=FP8, scales="channel", head_wise=True),
    "fp8 per token, int window": replace(BASE, cache_dtype=FP8, scales=PS, window=12),
    "fp8 in 1 group": replace(BASE, cache_dtype=FP8, scales=1, sinks="ordinary"),
    "fp8 in 4 groups, head-wise windows": windowed((7, 3), (FULL, 0), cache_dtype=FP8, scales=4, head_wise=True),
}
SAMPLE = windowed((9, 1), (FULL, 0), sinks="mixed")
CASES = {
    **LENGTHS,
    **HEAD_WINDOWS,
    **INT_WINDOWS,
    **HEAD_WISE,
    **SINKS,
    **SCORES,
    **QUERIES,
    **SHAPES,
    **DTYPES,
    **QUANTISED,
}


def call(variant: Variant, case: PagedCase, arrays: dict[str, Any], **static: Any) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(paged_decode, variant, return_lse=True, **case.static, **static)(**arrays)


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
    got = call(variant, case, inputs.decode(), **static)
    harness.assert_same_bits(got, call(variant, case, inputs.decode(poisoned=False), **static))
    if is_reference:
        want, dtype = inputs.expected_decode(), "float32"
    else:
        want, dtype = call(VARIANTS["reference"], case, inputs.decode(), out_dtype="float32"), case.dtype
    harness.assert_attention_close(got, want, variant.tolerance(dtype))


def check_queries_that_see_nothing(variant: Variant, case: PagedCase) -> None:
    """They are 0, whatever others of their sequence see."""
    inputs = draw(case)
    empty = np.isneginf(inputs.expected_decode()[1])
    inputs.make_live_values_infinite()
    harness.assert_empty(call(variant, case, inputs.decode()), empty)


@every_variant
def test_queries_that_see_nothing_beside_infinite_values(variant: Variant) -> None:
    check_queries_that_see_nothing(variant, replace(BASE, kv_lens=(3, 5, 2, 1, 0, 9, 4, 6), queries=4))


@every_variant
def test_output_dtype(variant: Variant) -> None:
    inputs = draw(DTYPES["bfloat16, windows"])
    rounded = call(variant, inputs.case, inputs.decode())
    exact = call(variant, inputs.case, inputs.decode(), out_dtype="float32")
    assert (rounded[0].dtype, exact[0].dtype) == (jnp.bfloat16, jnp.float32)
    assert rounded[1].dtype == exact[1].dtype == jnp.float32
    harness.assert_same_bits(rounded[0], exact[0].astype(jnp.bfloat16))


@every_variant
def test_a_row_does_not_depend_on_its_batch(variant: Variant) -> None:
    """Shuffled, and alone among idle rows: bit for bit in `fixed` mode where plans are honoured, else closely."""
    inputs = draw(SAMPLE)
    case, arrays = inputs.case, inputs.decode()

    def rows(rows: np.ndarray, alone: bool = False) -> tuple[np.ndarray, np.ndarray]:
        picked = {name: arrays[name][rows] for name in ("q", "block_tables", "kv_lens")}
        if alone:
            picked["kv_lens"] = np.where(np.arange(8) == 0, picked["kv_lens"], 0)
        shown = arrays | picked | {"window": case.window or arrays["window"]}
        plan = harness.plan_for(shown, num_programs=4, mode="fixed", implementation=variant.implementation)
        out, lse = call(variant, case, arrays | picked | {"plan": plan})
        return np.asarray(out), np.asarray(lse)

    same = harness.assert_same_bits
    if not variant.honours_plans:

        def same(got: Any, want: Any) -> None:
            harness.assert_attention_close(got, want, variant.tolerance(case.dtype))

    out, lse = rows(np.arange(8))
    order = inputs.rng.permutation(8)
    same(rows(order), (out[order], lse[order]))
    for row in range(8):
        alone = rows(np.roll(np.arange(8), -row), alone=True)
        same((alone[0][:1], alone[1][:1]), (out[row : row + 1], lse[row : row + 1]))


@every_variant
@pytest.mark.parametrize("mode", ["balanced", "fixed"])
def test_a_plan_changes_no_meaning(variant: Variant, mode: Any) -> None:
    inputs = draw(SAMPLE)
    arrays = inputs.decode()
    shown = arrays | {"window": inputs.case.window or arrays["window"]}
    plan = harness.plan_for(shown, num_programs=5, mode=mode, implementation=variant.implementation)
    planned = call(variant, inputs.case, arrays | {"plan": plan})
    harness.assert_attention_close(planned, inputs.expected_decode(), variant.tolerance(inputs.case.dtype))


@lean_variants
def test_large_tiles(variant: Variant) -> None:
    """The configuration users get, on rows long enough to need several of its tiles and groups."""
    case = PagedCase(
        tuple(range(0, 2200, 240)), page_size=16, pages_per_row=136, num_pages=800, head_windows=((FULL, 0), (900, 20))
    )
    inputs = draw(case)
    got = call(replace(variant, config=None), case, inputs.decode())
    want = call(VARIANTS["reference"], case, inputs.decode())
    harness.assert_attention_close(got, want, variant.tolerance(case.dtype))


# --- transformations


@every_variant
def test_repeats_are_bitwise_equal(variant: Variant) -> None:
    transformations.assert_repeats(harness.compiled(paged_decode, variant, return_lse=True), draw(SAMPLE).decode())


@every_variant
def test_scan_with_a_donated_cache(variant: Variant) -> None:
    transformations.assert_scans(
        harness.compiled(paged_decode, variant, return_lse=True),
        draw(SAMPLE).decode(),
        variant.tolerance(SAMPLE.dtype),
    )


@every_variant
def test_vmap(variant: Variant) -> None:
    transformations.assert_vmaps(
        harness.compiled(paged_decode, variant, return_lse=True),
        [draw(SAMPLE).decode(), draw(SAMPLE).decode()],
        variant.tolerance(SAMPLE.dtype),
        over="q",
    )


@every_variant
def test_export_round_trip(variant: Variant) -> None:
    transformations.assert_exports(harness.compiled(paged_decode, variant, return_lse=True), draw(SAMPLE).decode())


@every_variant
def test_values_do_not_retrace(variant: Variant) -> None:
    calls = [draw(case).decode() for case in HEAD_WINDOWS.values()]
    transformations.assert_traced_once(paged_decode, variant, calls)


# --- what is compiled


def big(dtype: Any, scales: Any = None) -> dict[str, Any]:
    """Shapes of a call over a pool larger than everything else in it."""
    spec = kv_cache_spec(num_pages=4096, page_size=16, num_kv_heads=2, head_dim=32, dtype=dtype, scales=scales)
    return {
        "q": jax.ShapeDtypeStruct((4, 1, 4, 32), jnp.float32 if scales else dtype),
        "kv": jax.eval_shape(lambda: PagedKV.allocate(spec)),
        "block_tables": jax.ShapeDtypeStruct((4, 64), jnp.int32),
        "kv_lens": jax.ShapeDtypeStruct((4,), jnp.int32),
    }


@lean_variants
@pytest.mark.parametrize(
    ("dtype", "scales"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.int8, 4), (jnp.float8_e4m3fn, 16)]
)
def test_no_copy_of_the_cache(variant: Variant, dtype: Any, scales: Any) -> None:
    """Alone and as one step of a loop that carries the donated cache."""

    def loop(kv: PagedKV, **arrays: Any) -> Any:
        def step(kv: PagedKV, _: None) -> Any:
            return kv, paged_decode(kv=kv, **arrays, implementation=variant.implementation)

        return jax.lax.scan(step, kv, length=3)

    shapes = big(dtype, scales)
    harness.assert_stays_put(jax.jit(loop, donate_argnames="kv"), shapes["kv"].k, **shapes)


@lean_variants
def test_no_host_callbacks_and_a_named_scope(variant: Variant) -> None:
    decode = harness.compiled(paged_decode, variant)
    harness.assert_no_host_callbacks(decode, **big(jnp.float32))
    assert "paged_decode" in harness.scope_names(decode, **big(jnp.float32))
