"""Contract of `cascade_decode`: it returns the result of `paged_decode` for any number of shared pages."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn import (
    PagedKV,
    cascade_decode,
    count_shared_pages,
    explain,
    paged_decode,
    to_nhd,
    token_tables,
    view_nhd,
)
from pallas_attn.ops import cascade_decode as room
from tests.contract import backends, transformations
from tests.contract.backends import BACKENDS, Backend, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

B, Q, P, PS, N, HQ, HKV, D = 4, 2, 4, 16, 24, 4, 2, 64
ALWAYS: dict[str, Any] = {"min_saved_bytes": 0}
"""Argument with which every call runs a cascade."""
XLA = next(backend for backend in BACKENDS if backend.name == "xla")
every_backend = functools.partial(backends.every_backend, "paged_prefill")


def draw(
    lens: tuple[int, ...],
    alike: int,
    dtype: str,
    rng: np.random.Generator,
    q_lens: tuple[int, ...] | None = None,
    *,
    head_dim: int = D,
) -> dict[str, Any]:
    """Return arguments whose tables share the first `alike` columns. Cache slots without a token have NaN or
    infinities.
    """
    tables = rng.permutation(N)[: B * P].reshape(B, P).astype(np.int32)
    tables[:, :alike] = tables[0, :alike]
    held = np.zeros((N, PS), bool)
    for row, length in zip(tables, lens, strict=True):
        token = np.arange(length)
        held[row[token // PS], token % PS] = True
        row[-(-length // PS) :] = harness.GARBAGE
    pages = (harness.HALF_SCALE * rng.standard_normal((2, N, PS, HKV, head_dim))).astype(dtype)
    kv = PagedKV(*(jnp.asarray(np.moveaxis(harness.poison(rng, x, ~held), 1, 2)) for x in pages))
    count = np.array([Q] * B if q_lens is None else q_lens)
    q = harness.poison(rng, rng.standard_normal((B, Q, HQ, head_dim)).astype(dtype), np.arange(Q) >= count[:, None])
    arguments = {"q": q, "kv": kv, "block_tables": tables, "kv_lens": np.array(lens, np.int32)}
    return arguments if q_lens is None else arguments | {"q_lens": np.array(q_lens, np.int32)}


def check(backend: Backend, arguments: dict[str, Any], changed: Any = None, **options: Any) -> None:
    """Compare `cascade_decode` with some arguments `changed` to `paged_decode` with the original arguments."""
    got = backends.call(cascade_decode, backend, arguments | (changed or {}), return_lse=True, **ALWAYS, **options)
    want = backends.call(paged_decode, backends.BACKENDS[0], arguments, return_lse=True, out_dtype="float32", **options)
    assert got[0].dtype == arguments["q"].dtype
    harness.assert_attention_close(got, want, backend.variant.tolerance(arguments["q"].dtype))


CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "two pages": ((40, 64, 34, 50), 2),
    "nothing": ((40, 64, 17, 50), 0),
    "all but the last page": ((64, 60, 50, 51), 3),
    "more than a sequence has": ((64, 60, 5, 51), 3),
    "up to the queries": ((34, 40, 34, 34), 3),
    "idle rows": ((0, 40, 0, 64), 2),
    "all idle": ((0, 0, 0, 0), 4),
    "shorter than its queries": ((40, 1, 34, 50), 2),
}


@slow_cases("xla-nothing")
@slow_cases("xla-two pages", "triton-two pages")
@pytest.mark.parametrize("name", CASES)
@every_backend()
@in_every_run("xla", triton=["two pages"])
def test_what_is_shared(backend: Backend, name: str) -> None:
    check(backend, draw(*CASES[name], backend.dtype, harness.fresh_rng()))


@every_backend(wanted=lambda backend: backend.id != "mosaic_sm100")
@in_every_run("mosaic")
def test_view_of_pages_with_tokens_before_heads(backend: Backend) -> None:
    """The tables of a view have an entry per token. 39 tokens are shared, which ends within a page of the plan."""
    arguments = draw((60, 64, 41, 50), 3, backend.dtype, harness.fresh_rng())
    tables = token_tables(jnp.asarray(arguments["block_tables"]), page_size=PS)
    check(backend, arguments | {"kv": view_nhd(*to_nhd(arguments["kv"])), "block_tables": np.asarray(tables)})


@every_backend()
@in_every_run("xla")
def test_options(backend: Backend) -> None:
    rng = harness.fresh_rng()
    sinks = {"sinks": rng.standard_normal(HQ).astype(np.float32)}
    arguments = draw(*CASES["two pages"], backend.dtype, rng, q_lens=(2, 1, 0, 2)) | sinks
    check(backend, arguments, soft_cap=2.0, sm_scale=0.3)


@every_backend()
@in_every_run()
@unsupported(mosaic_sm100="takes heads of width")
def test_wide_heads(backend: Backend) -> None:
    backend = backends.for_width(backend, 512)
    check(backend, draw(*CASES["two pages"], backend.dtype, harness.fresh_rng(), head_dim=512), sm_scale=0.05)


any_rows = hypothesis.given(
    lens=st.tuples(*[st.integers(0, P * PS)] * B),
    q_lens=st.tuples(*[st.integers(0, Q)] * B),
    alike=st.integers(0, P),
    seed=st.integers(0, 2**32 - 1),
)


@hypothesis.settings(max_examples=25, deadline=None)
@any_rows
def test_any_lengths(lens: tuple[int, ...], q_lens: tuple[int, ...], alike: int, seed: int) -> None:
    check(XLA, draw(lens, alike, "float32", np.random.default_rng(seed), q_lens))


@hypothesis.settings(max_examples=50, deadline=None)
@any_rows
def test_the_host_counts_what_the_device_finds(
    lens: tuple[int, ...], q_lens: tuple[int, ...], alike: int, seed: int
) -> None:
    drawn = draw(lens, alike, "float32", np.random.default_rng(seed), q_lens)
    kv, tables, new = drawn["kv"], drawn["block_tables"], drawn["q_lens"]
    count = count_shared_pages(kv, tables, drawn["kv_lens"], q_lens=new, **ALWAYS)
    real = np.minimum(new, drawn["kv_lens"])
    cached = np.where((real > 0), drawn["kv_lens"] - real, -1)
    table, found = room._shared_part(jnp.asarray(tables), jnp.asarray(cached), None, PS)
    assert count == int(found)
    if (real > 0).any():
        np.testing.assert_array_equal(table[:count], tables[np.argmax(real > 0)][:count])


def test_the_host_counts_nothing_that_would_not_pay() -> None:
    kv: Any = jax.ShapeDtypeStruct((512, 8, 64, 128), jnp.bfloat16)
    tables, lens = np.zeros((16, 128), np.int64), np.full(16, 128 * 64)
    assert count_shared_pages(PagedKV(kv, kv), tables, lens) == 127  # not the last page, which has the new token
    assert count_shared_pages(PagedKV(kv, kv), tables[:, :32], np.full(16, 32 * 64)) == 0
    saved = 15 * 31 * 2**18
    for least, pages in ((saved, 31), (saved + 1, 0)):
        assert count_shared_pages(PagedKV(kv, kv), tables[:, :32], np.full(16, 32 * 64), min_saved_bytes=least) == pages
    assert count_shared_pages(PagedKV(kv, kv), tables, np.where(np.arange(16) < 2, lens, 0)) == 0
    assert count_shared_pages(PagedKV(kv, kv), tables, np.zeros(16, int)) == 0


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv": None}, "kv: expected a PagedKV"),
        ({"block_tables": np.zeros((B, HKV, P), np.int32)}, r"block_tables: expected integers of 2 axes, got int32"),
        ({"kv_lens": np.zeros(B)}, r"kv_lens: expected integers of 1 axes, got float64 \[4\]"),
        ({"kv_lens": np.zeros(3, int)}, "kv_lens: expected one for each of 4 sequences, got 3"),
        ({"q_lens": np.zeros(3, int)}, "q_lens: expected one for each of 4 sequences, got 3"),
        ({"min_saved_bytes": 0.5}, "min_saved_bytes: expected an int of at least 0, or None; got 0.5"),
    ],
)
def test_errors_of_the_count(changed: dict[str, Any], message: str) -> None:
    kv = draw(*CASES["two pages"], "float32", harness.fresh_rng())["kv"]
    arguments: dict[str, Any] = {"kv": kv, "q_lens": 1}
    arguments |= {"block_tables": np.zeros((B, P), int), "kv_lens": np.full(B, 9)} | changed
    with pytest.raises(ValueError, match=f"^{message}"):
        count_shared_pages(**arguments)


@slow_cases("0")
@pytest.mark.parametrize("given", [0, 1, 2, 100])
def test_columns_that_are_given(given: int) -> None:
    """`shared_pages` may be less than the number of pages that all sequences share, and more than the number of pages
    that queries see. Of the first `given` columns (at most two), only the table of sequence 0 has
    valid entries.
    """
    arguments = draw((40, 64, 34, 50), 4, "float32", harness.fresh_rng())
    tables = arguments["block_tables"].copy()
    tables[1:, : min(given, 2)] = harness.GARBAGE
    check(XLA, arguments, {"shared_pages": np.int32(given), "block_tables": tables})


@pytest.mark.parametrize("own", [("q",), ("kv",), ("block_tables",), ("kv_lens",)])
def test_inside_a_shard_map(own: tuple[str, ...]) -> None:
    """Tracing succeeds inside `jax.shard_map` with its default check of varying axes. The arguments `own` are split."""
    arrays = jax.tree.map(jnp.asarray, draw(*CASES["two pages"], "float32", harness.fresh_rng()))
    transformations.inside_a_shard_map(
        lambda arrays: cascade_decode(**arrays, **ALWAYS, implementation="xla"), arrays, own
    )


@pytest.mark.parametrize(
    ("batch", "columns", "given", "least", "prefills"),
    [
        (16, 36, None, None, 0),
        (16, 36, None, 120 * 2**20, 1),
        (16, 256, None, None, 1),
        (16, 256, 32, None, 0),
        (16, 256, 128, None, 1),
        (16, 256, 128, 481 * 2**20, 0),
        (1, 256, None, None, 0),
        (16, 36, 900, None, 0),
    ],
)
def test_what_cannot_pay_is_plain_decode(
    batch: int, columns: int, given: int | None, least: int | None, prefills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cascade runs a prefill over the shared pages if it saves at least `min_saved_bytes` of page reads, by default
    192 MiB.

    A page has 256 KiB. For 16 sequences, 32 shared pages save 120 MiB, and 128 shared pages save 480 MiB.
    """
    calls, prefill = [], room.paged_prefill
    monkeypatch.setattr(room, "paged_prefill", lambda *args, **options: calls.append(1) or prefill(*args, **options))
    kv: Any = jax.ShapeDtypeStruct((512, 8, 64, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((batch, 1, 32, 128), jnp.bfloat16)
    metadata = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, columns), (batch,))]
    options: dict[str, Any] = {
        "shared_pages": given,
        "min_saved_bytes": least,
        "return_lse": True,
        "implementation": "xla",
    }
    call = functools.partial(cascade_decode, **options)
    out, lse = jax.eval_shape(call, q, PagedKV(kv, kv), *metadata)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, jnp.bfloat16, q.shape[:3], jnp.float32)
    assert len(calls) == prefills


def test_explanation_and_gradients() -> None:
    arrays = jax.tree.map(jnp.asarray, draw(*CASES["two pages"], "float32", harness.fresh_rng()))
    assert explain("cascade_decode", **arrays, **ALWAYS).chosen == "xla"
    with pytest.raises(NotImplementedError, match="cascade_decode has no gradient"):
        jax.grad(lambda q: jnp.sum(jnp.asarray(cascade_decode(**(arrays | ALWAYS | {"q": q})))))(arrays["q"])


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a window": ({"window": 5}, NotImplementedError, "window: takes None"),
    "tables of heads": (
        {"block_tables": np.zeros((B, HKV, P), np.int32)},
        NotImplementedError,
        "block_tables: takes page",
    ),
    "kv_lens": ({"kv_lens": np.zeros(3, np.int32)}, ValueError, r"kv_lens: expected shape \[B=4\]"),
    "shared_pages": ({"shared_pages": np.zeros(2, np.int32)}, ValueError, r"shared_pages: expected one number, got"),
    "no pages": ({"shared_pages": -1}, ValueError, "shared_pages: expected at least 0, got -1"),
    "fewer than no bytes": ({"min_saved_bytes": -1}, ValueError, "min_saved_bytes: expected an int of at least 0, or"),
    "half a page": ({"shared_pages": np.float32(0.5)}, ValueError, "shared_pages: expected dtype int32"),
    "sinks": ({"sinks": np.zeros(3, np.float32)}, ValueError, r"sinks: expected shape \[Hq=4\]"),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    changed, error, message = ERRORS[name]
    arguments = draw(*CASES["two pages"], "float32", harness.fresh_rng())
    with pytest.raises(error, match=f"^{message}"):
        cascade_decode(**(arguments | changed))


@pytest.mark.usefixtures("unchecked_shapes")
def test_without_queries() -> None:
    arguments = draw(*CASES["two pages"], "float32", harness.fresh_rng())
    out, lse = cascade_decode(**(arguments | {"q": arguments["q"][:, :0]}), return_lse=True)
    assert (out.shape, lse.shape) == ((B, 0, HQ, D), (B, 0, HQ))
