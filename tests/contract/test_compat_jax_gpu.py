"""Contract of `pallas_attn.compat.jax_gpu`: the cases of jax's tests (tests/pallas/gpu_paged_attention_test.py and
gpu_attention_test.py) with every backend, compared with attention in NumPy, and comparisons with jax's functions.

The environment variable JAX_SOURCE names a checkout of jax. Without it, the test that runs jax's files is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import os
import unittest
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util
from jax.experimental.pallas.ops import gpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_attn.compat.jax_gpu import arguments, decode_attention, paged_attention
from pallas_attn.types import QMAX
from tests.contract import backends
from tests.contract.backends import BACKENDS, Backend, all_but, every_backend, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

XLA = next(backend for backend in BACKENDS if backend.name == "xla")
LOWEST = np.finfo(np.float32).min


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, end: int, scale: float, cap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return output [Hq, D] and LSE [Hq] in float64 for q [Hq, D] and k, v [S, Hkv, D], of which tokens `start` to
    `end` are visible.
    """
    heads, group = k.shape[1], len(q) // k.shape[1]
    if start >= end:
        return np.zeros(q.shape), np.full(len(q), -np.inf)
    k, v = (x[start:end].astype(np.float64) for x in (k, v))
    scores = scale * np.einsum("hgd,shd->hgs", q.astype(np.float64).reshape(heads, group, -1), k)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("hgs,shd->hgd", weights / total, v)
    return out.reshape(q.shape), (top + np.log(total)).reshape(-1)


# --- paged_attention

LENGTHS = (3, 256, 513, 1023, 2048)
"""Lengths of jax's tests; the last fills its tables."""

FEW_LENGTHS = (3, 0, 65, 128)
"""Lengths for interpreted kernels, which are slow. jax's tests have no sequence of length 0."""


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Arguments of `paged_attention`.

    Attributes:
      dtype: dtype of q; None for the backend's dtype.
      quantised: dtype of 8-bit pages; None for pages in the dtype of q.
      in_8_bits: arrays that are quantised, "k", "v" or "kv".
      lengths: tokens of the sequences; None for the argument None.
    """

    page_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: str | None = "float16"
    quantised: str | None = None
    in_8_bits: str = "kv"
    scale_dtype: str = "float32"
    lengths: tuple[int, ...] | None = LENGTHS
    cap: float | None = None


GRID = {
    f"{page_size}, {kv_heads} of {group}, {head_dim}": PagedCase(page_size, kv_heads, group, head_dim)
    for page_size, kv_heads, group, head_dim in itertools.product((8, 16, 32), (1, 2), (2, 16, 20), (32, 64))
} | {
    f"{page_size}, {dtype} {arrays}": PagedCase(page_size, quantised=dtype, in_8_bits=arrays, scale_dtype=scale_dtype)
    for page_size in (8, 16, 32)
    for arrays in ("kv", "k", "v")
    for dtype, scale_dtype in (("int8", "float32"), ("float8_e4m3fn", "float16"), ("float8_e5m2", "float32"))
}
"""Cases of jax's tests. Only one combination of the other sizes has quantised pages."""

CASES = {
    "pages of 8, heads of 32": GRID["8, 1 of 2, 32"],
    "pages of 16": GRID["16, 2 of 2, 64"],
    "pages of 32, 20 heads in a group": GRID["32, 2 of 20, 64"],
    "int8": GRID["16, int8 kv"],
    "int8, pages of 32": GRID["32, int8 kv"],
    "int8 keys": GRID["16, int8 k"],
    "float8_e4m3fn": GRID["16, float8_e4m3fn kv"],
    "float8_e4m3fn values": GRID["16, float8_e4m3fn v"],
    "float8_e5m2": GRID["16, float8_e5m2 kv"],
    "backend's dtype": PagedCase(head_dim=128, group=4, dtype=None),
    "no lengths": PagedCase(lengths=None),
    "soft cap": PagedCase(cap=2.0, group=4),
    "soft cap, int8, one head": PagedCase(cap=2.0, quantised="int8", kv_heads=1),
    "lengths outside the tables": PagedCase(lengths=(-3, 500, 64, 128)),
}


def runs_grid(backend: Backend) -> bool:
    """Return whether a backend runs all cases of jax's tests. The interpreter of Mosaic kernels would take minutes."""
    return not backend.dense and not (backend.name == "mosaic" and backend.interpreted)


def paged_arrays(case: PagedCase, lengths: tuple[int, ...] | None) -> dict[str, Any]:
    """Return arguments with permuted tables. Pages that no sequence sees hold NaN or random numbers, and table entries
    after the end of a sequence are invalid.
    """
    rng = harness.fresh_rng()
    ends = np.clip((128,) * 3 if lengths is None else lengths, 0, (lengths or (128,))[-1])
    table_pages = ends.max() // case.page_size
    num_pages = len(ends) * table_pages
    shape = case.kv_heads, num_pages, case.page_size, case.head_dim
    tables = rng.permutation(num_pages).reshape(len(ends), table_pages).astype(np.int32)
    dead = np.ones(shape[1:3], bool)
    for row, end in zip(tables, ends, strict=True):
        page, offset = np.divmod(np.arange(end), case.page_size)
        dead[row[page], offset] = False
        row[-(-end // case.page_size) :] = harness.GARBAGE
    q = harness.normal(rng, (len(ends), case.kv_heads * case.group, case.head_dim), case.dtype)
    arrays: dict[str, Any] = {"q": q * np.asarray(case.head_dim**-0.5, q.dtype), "block_tables": tables}
    arrays["lengths"] = None if lengths is None else np.array(lengths, np.int32)
    for name, size in (("k", 1), ("v", harness.HALF_SCALE)):
        pages = size * rng.standard_normal(shape, np.float32)
        if case.quantised and name in case.in_8_bits:
            scales = (np.abs(pages).max(-1) / (0.95 * QMAX[np.dtype(case.quantised)])).astype(case.scale_dtype)
            arrays[f"{name}_scales_pages"] = scales
            pages = pages / scales[..., None].astype(np.float32)
            pages = np.rint(pages) if case.quantised == "int8" else pages
            pages = pages.astype(case.quantised)
        else:
            pages = pages.astype(case.dtype)
        arrays[f"{name}_pages"] = harness.poison(rng, pages, np.broadcast_to(dead, shape[:3]))
    return arrays


def expected_paged(case: PagedCase, arrays: dict[str, Any]) -> np.ndarray:
    """Return the output of `paged_attention` in float64."""
    pages = []
    for name in ("k", "v"):
        scales = arrays.get(f"{name}_scales_pages", np.ones(()))
        pages.append(arrays[f"{name}_pages"].astype(np.float64) * scales[..., None].astype(np.float64))
    out = []
    for b, row in enumerate(arrays["block_tables"]):
        full = len(row) * case.page_size
        end = full if arrays["lengths"] is None else int(np.clip(arrays["lengths"][b], 0, full))
        used = row[: -(-end // case.page_size)]
        k, v = (x[:, used].reshape(case.kv_heads, -1, case.head_dim).swapaxes(0, 1) for x in pages)
        out.append(attention(arrays["q"][b], k, v, 0, end, 1.0, case.cap)[0])
    return np.stack(out)


def check_paged(backend: Backend, case: PagedCase) -> None:
    case = dataclasses.replace(case, dtype=case.dtype or backend.dtype)
    arrays = paged_arrays(case, FEW_LENGTHS if backend.interpreted and case.lengths == LENGTHS else case.lengths)
    out = backends.call(paged_attention.paged_attention, backend, arrays, attn_logits_soft_cap=case.cap)
    assert out.dtype == case.dtype
    harness.assert_close("output", out, expected_paged(case, arrays), backend.variant.tolerance(case.dtype)[0])


def unsupported_paged(cases: Mapping[str, PagedCase]) -> dict[str, dict[str, str]]:
    """Return the reasons why kernels do not support cases, for `unsupported`."""
    of_mosaic = {
        name: "takes (heads|pages|caches|keys and values of one dtype)"
        for name, case in cases.items()
        if case.page_size < 16 or case.head_dim < 64 or case.quantised == "float8_e5m2" or case.in_8_bits != "kv"
    }
    return {
        "mosaic": of_mosaic,
        "triton": {name: "e5m2" for name, case in cases.items() if case.quantised == "float8_e5m2"},
    }


@backends.every_case("paged_decode", CASES)
@in_every_run(
    xla=[
        "pages of 16", "int8", "int8 keys", "float8_e4m3fn values", "no lengths", "soft cap",
        "lengths outside the tables",
    ],
    reference=["pages of 16"],
    mosaic=["float8_e5m2", "int8 keys", "pages of 8, heads of 32"],
    triton=["float8_e4m3fn values", "pages of 16"],
)  # fmt: skip
@unsupported(**unsupported_paged(CASES))
def test_paged_attention(backend: Backend, name: str) -> None:
    check_paged(backend, CASES[name])


@every_backend("paged_decode", runs_grid)
@pytest.mark.parametrize("name", GRID)
@in_every_run()
@unsupported(**unsupported_paged(GRID))
def test_paged_attention_with_cases_of_jax(backend: Backend, name: str) -> None:
    check_paged(backend, GRID[name])


@slow_cases("int8-xla", "int8 k-xla", "int8 v-xla")
@every_backend("paged_decode", backends.is_compiled_and_lean)
@pytest.mark.parametrize("quantised", [None, "int8", "int8 k", "int8 v"])
def test_paged_attention_does_not_copy_pages(backend: Backend, quantised: str | None) -> None:
    dtype, _, of_arrays = (quantised or "").partition(" ")
    case = PagedCase(dtype="float32", quantised=dtype or None, in_8_bits=of_arrays or "kv", lengths=(2048,) * 4)
    arrays = paged_arrays(case, case.lengths)
    call = backends.compiled(paged_attention.paged_attention, backend)
    harness.assert_stays_put(call, arrays["k_pages"], **arrays)


@every_backend("paged_decode", backends.is_lean)
@unsupported(mosaic="takes keys and values of one dtype")
def test_float16_values_next_to_int8_keys_are_not_rounded(backend: Backend) -> None:
    case = PagedCase(quantised="int8", in_8_bits="k", kv_heads=1, lengths=(1, 16))
    arrays = paged_arrays(case, case.lengths)
    out = np.asarray(backends.call(paged_attention.paged_attention, backend, arrays))[0]
    value = arrays["v_pages"][0, arrays["block_tables"][0, 0], 0]
    np.testing.assert_array_equal(out, np.broadcast_to(value, out.shape))


def small_paged() -> dict[str, Any]:
    return paged_arrays(PagedCase(dtype="float32"), FEW_LENGTHS)


@pytest.mark.parametrize("page", [-1, 32, 10**9])
def test_page_outside_the_pool_is_invisible(page: int) -> None:
    arrays = small_paged()
    assert arrays["k_pages"].shape[1] == 32
    without = {name: arrays[name].copy() for name in ("block_tables", "lengths")}
    without["block_tables"][3, :-1] = arrays["block_tables"][3, 1:]
    without["lengths"][3] -= 16
    arrays["block_tables"][3, 0] = page  # page 32 of head 0 would be the first page of head 1
    got = paged_attention.paged_attention(**arrays)
    np.testing.assert_allclose(got, paged_attention.paged_attention(**arrays | without), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": np.ones((4, 3, 64), np.float32)}, ValueError, "q: its 3 heads"),
        ({"q": np.ones((4, 4, 32), np.float32)}, ValueError, r"k_pages: expected shape \[Hkv, N, ps, D=32\]"),
        ({"v_pages": np.ones((2, 9, 16, 64), np.float32)}, ValueError, r"v_pages: expected shape \[Hkv=2, N=32"),
        ({"block_tables": np.ones((3, 8), np.int32)}, ValueError, r"block_tables: expected shape \[B=4, P\]"),
        ({"lengths": np.ones(3, np.int32)}, ValueError, r"lengths: expected shape \[B=4\]"),
        ({"lengths": np.ones(4, np.float32)}, ValueError, "lengths: expected dtype int32"),
        ({"k_scales_pages": np.ones((2, 32, 16), np.float32)}, ValueError, "k_scales_pages: expected None for float32"),
        ({"v_pages": np.ones((2, 32, 16, 64), np.int8)}, ValueError, "v_scales_pages: expected scales for int8 pages"),
        ({"attn_logits_soft_cap": 0.0}, ValueError, "attn_logits_soft_cap: expected a positive"),
        ({"mask_value": -1.0}, NotImplementedError, "mask_value: takes numbers of at most -10000"),
    ],
)
def test_paged_attention_with_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paged_attention.paged_attention(**small_paged() | changes)


# --- mqa and gqa


@dataclasses.dataclass(frozen=True)
class DenseCase:
    """Arguments of `gqa`, or of `mqa` if `kv_heads` is None."""

    batch: int
    q_heads: int
    kv_heads: int | None
    tokens: int = 1024
    start: int | tuple[int, ...] | None = None
    end: int | tuple[int, ...] | None = None
    residuals: bool = False
    dtype: str | None = "float16"
    scale: float | None = None


SIZES = ((1, 1, None), (2, 2, None), (1, 8, None), (1, 16, 4), (1, 16, 16), (1, 32, 32))
DENSE_GRID = {
    f"{'mqa' if size[2] is None else 'gqa'} {size[1]} of {size[2] or 1}, {start} to {end}{', residuals' * residuals}": (
        DenseCase(*size, start=start, end=end, residuals=residuals)
    )
    for size in SIZES
    for start, end, residuals in itertools.product((None, 123), (None, 250), (False, True))
}
"""Cases of jax's tests."""

DENSE = {
    "mqa": DENSE_GRID["mqa 8 of 1, None to 250, residuals"],
    "mqa with a start": DENSE_GRID["mqa 2 of 1, 123 to None"],
    "gqa": DENSE_GRID["gqa 16 of 4, None to 250"],
    "gqa with a start": DENSE_GRID["gqa 16 of 4, 123 to 250, residuals"],
    "empty ranges": DenseCase(4, 4, 2, 96, start=(0, 70, 5, -2), end=(0, 50, 96, 400), residuals=True),
    "odd number of tokens": DenseCase(2, 4, None, 33, end=(33, 20), residuals=True),
    "scale": DenseCase(2, 4, 2, 64, scale=1.0),
    "several heads, backend's dtype": DenseCase(2, 4, 2, 80, end=(70, 7), residuals=True, dtype=None),
    "one head, backend's dtype": DenseCase(2, 4, 1, 64, end=(64, 7), residuals=True, dtype=None),
}


def bounds_of(case: DenseCase) -> list[np.ndarray]:
    """Return the first visible token and the end of the visible tokens of each sequence, [B] each."""
    bounds = case.start or 0, case.tokens if case.end is None else case.end
    return [np.clip(np.broadcast_to(bound, case.batch), 0, case.tokens) for bound in bounds]


def dense_arrays(case: DenseCase) -> dict[str, Any]:
    """Return arguments; tokens that no query sees have NaN or infinities."""
    rng = harness.fresh_rng()
    heads = () if case.kv_heads is None else (case.kv_heads,)
    position = np.arange(case.tokens)
    start, end = (
        np.broadcast_to(x, case.batch)[:, None]
        for x in (case.start or 0, case.tokens if case.end is None else case.end)
    )
    dead = (position < start) | (position >= end)
    arrays: dict[str, Any] = {"q": harness.normal(rng, (case.batch, case.q_heads, 64), case.dtype)}
    for name, size in (("k", 1), ("v", harness.HALF_SCALE)):
        x = (size * rng.standard_normal((case.batch, case.tokens, *heads, 64))).astype(case.dtype)
        arrays[name] = harness.poison(rng, x, dead)
    for name, bound in (("start_idx", case.start), ("kv_seq_len", case.end)):
        arrays[name] = None if bound is None else np.array(bound, np.int32)
    return arrays


def expected_dense(case: DenseCase, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return output and LSE in float64."""
    starts, ends = bounds_of(case)
    k, v = (arrays[name].reshape(case.batch, case.tokens, -1, 64) for name in ("k", "v"))
    scale = 64**-0.5 if case.scale is None else case.scale
    rows = [attention(arrays["q"][b], k[b], v[b], starts[b], ends[b], scale) for b in range(case.batch)]
    out, lse = zip(*rows, strict=True)
    return np.stack(out), np.stack(lse)


def lse_of(residuals: tuple[Any, Any]) -> np.ndarray:
    """Return the LSE of residuals (l, m): -inf for l = 0 and the smallest m."""
    total, top = (np.asarray(x, np.float64) for x in residuals)
    np.testing.assert_array_equal(total == 0, top == LOWEST)
    return np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1, total)))


def check_dense(backend: Backend, case: DenseCase) -> None:
    case = dataclasses.replace(case, dtype=case.dtype or backend.dtype)
    arrays = dense_arrays(case)
    function = decode_attention.mqa if case.kv_heads is None else decode_attention.gqa
    static = {"sm_scale": case.scale, "return_residuals": case.residuals, "normalize_output": not case.residuals}
    result = backends.call(function, backend, arrays, **static)
    want, lse = expected_dense(case, arrays)
    of_output, of_lse = backend.variant.tolerance(case.dtype)
    out = result
    if case.residuals:
        out, residuals = result
        harness.assert_close("LSE", lse_of(residuals), lse, of_lse)
        out = np.asarray(out, np.float64) / np.maximum(residuals[0], 1e-30)[..., None]
    assert jax.tree.leaves(result)[0].dtype == case.dtype
    harness.assert_close("output", out, want, of_output)


def unsupported_dense(cases: Mapping[str, DenseCase]) -> dict[str, dict[str, str]]:
    """Return the reasons why Mosaic kernels do not support cases, for `unsupported`: their pages have one token."""
    names = [name for name, case in cases.items() if case.start is not None or case.tokens % 16]
    several = [name for name, case in cases.items() if (case.kv_heads or 1) > 1 and name not in names]
    return {
        "mosaic": dict.fromkeys(names, "takes pages of|takes views of pages of a multiple of 16 tokens"),
        "mosaic_sm100": dict.fromkeys(names, "takes pages of")
        | dict.fromkeys(several, "takes pages with heads before"),
    }


@backends.every_case("paged_decode", DENSE)
@in_every_run(
    xla=all_but("mqa with a start", "gqa", "several heads, backend's dtype", "one head, backend's dtype"),
    reference=["empty ranges"],
    mosaic=["several heads, backend's dtype", "empty ranges"],
    triton=["empty ranges", "one head, backend's dtype"],
)  # fmt: skip
@unsupported(**unsupported_dense(DENSE))
def test_decode_attention(backend: Backend, name: str) -> None:
    check_dense(backend, DENSE[name])


@every_backend("paged_decode", runs_grid)
@pytest.mark.parametrize("name", DENSE_GRID)
@in_every_run()
@unsupported(**unsupported_dense(DENSE_GRID))
def test_decode_attention_with_cases_of_jax(backend: Backend, name: str) -> None:
    check_dense(backend, DENSE_GRID[name])


@every_backend("paged_decode", backends.is_compiled_and_lean)
@pytest.mark.parametrize("start", [None, (5, 5, 0, 100)])
def test_gqa_does_not_copy_the_cache(backend: Backend, start: Any) -> None:
    arrays = dense_arrays(DenseCase(4, 4, 2, 512, start=start, end=400, dtype="float32"))
    harness.assert_stays_put(backends.compiled(decode_attention.gqa, backend), arrays["k"], **arrays)


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        ("gqa", {"q": np.ones((2, 3, 64), np.float32)}, ValueError, "q: its 3 heads"),
        ("gqa", {"v": np.ones((2, 32, 2, 32), np.float32)}, ValueError, r"v: expected shape \[B=2, S=32, Hkv=2, D=64"),
        ("mqa", {}, ValueError, r"k: expected shape \[B=2, S, D=64\]"),
        ("gqa", {"start_idx": np.ones(3, np.int32)}, ValueError, r"start_idx: expected shape \[B=2\]"),
        ("gqa", {"kv_seq_len": 2.5}, ValueError, "kv_seq_len: expected an array, got 2.5"),
        ("gqa", {"normalize_output": False}, NotImplementedError, "normalize_output: takes False only with"),
        ("gqa", {"sm_scale": -1.0}, ValueError, "sm_scale: expected a positive"),
    ],
)
def test_gqa_with_wrong_arguments(function: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arrays = dense_arrays(DenseCase(2, 4, 2, 32, dtype="float32"))
    with pytest.raises(error, match=message):
        getattr(decode_attention, function)(**arrays | changes)


# --- comparison with jax's functions, which an interpreter runs


@pytest.fixture(scope="module")
def jax_modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """jax's modules `paged_attention` and `decode_attention`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention as dense
        from jax.experimental.pallas.ops.gpu import paged_attention as paged
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield paged, dense


@slow_cases("bfloat16", "int8", "fp8", "int8 keys", "fp8 values")
@pytest.mark.parametrize(
    "case",
    [
        PagedCase(group=4, dtype="bfloat16"),
        PagedCase(cap=2.0),
        PagedCase(lengths=None, kv_heads=1),
        PagedCase(quantised="int8", scale_dtype="float16"),
        PagedCase(quantised="float8_e4m3fn", dtype="float32"),
        PagedCase(quantised="int8", in_8_bits="k"),
        PagedCase(quantised="float8_e4m3fn", in_8_bits="v", scale_dtype="float16"),
    ],
    ids=["bfloat16", "soft cap", "no lengths", "int8", "fp8", "int8 keys", "fp8 values"],
)
def test_paged_attention_equals_jax(jax_modules: tuple[ModuleType, ModuleType], case: PagedCase) -> None:
    # jax's function returns NaN for length 0 and float16 on CPUs, because it divides by a subnormal number.
    lengths = None if case.lengths is None else (3, 65, 128)
    arrays = {name: zero_if_nan(x) for name, x in paged_arrays(case, lengths).items()}
    arrays["block_tables"] = arrays["block_tables"].clip(0, 23)  # jax's kernel reads all pages of a block
    static = {"attn_logits_soft_cap": case.cap}
    want = jax_modules[0].paged_attention(**arrays, **static, k_splits=2, pages_per_compute_block=2, interpret=True)
    got = paged_attention.paged_attention(**arrays, **static)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-3, rtol=2e-2)


def zero_if_nan(x: Any) -> Any:
    """Return the array with 0 where it is not finite: jax's kernels multiply masked values by 0."""
    return (
        x if x is None or x.dtype.kind == "i" else np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), x.dtype))
    )


# jax's kernels take longest to compile. The cases that are not slow have each kind of bound.
@slow_cases(
    *("gqa-None-None", "gqa-37-None", "gqa-start3-end3"),
    *("mqa-None-None", "mqa-None-end2", "mqa-start4-end4"),
)
@pytest.mark.parametrize(
    ("start", "end"),
    [(None, None), (37, None), (None, (0, 256, 101)), ((0, 3, 100), (256, 250, 101)), ((9, 250, 3), (9, 20, 300))],
)
@pytest.mark.parametrize(("kv_heads", "normalised"), [(2, False), (None, True)], ids=["gqa", "mqa"])
def test_decode_attention_equals_jax(
    jax_modules: tuple[ModuleType, ModuleType], kv_heads: int | None, start: Any, end: Any, normalised: bool
) -> None:
    name = "gqa" if kv_heads else "mqa"
    arrays = dense_arrays(DenseCase(3, 4, kv_heads, 256, start=start, end=end, dtype="float32"))
    arrays = {name: zero_if_nan(x) for name, x in arrays.items()}
    static: dict[str, Any] = {"return_residuals": True, "normalize_output": normalised}
    want, of_want = getattr(jax_modules[1], name)(**arrays, **static, block_k=32, k_splits=4, interpret=True)
    got, of_got = getattr(decode_attention, name)(**arrays, **static)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (got, of_got)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (want, of_want)
    )
    harness.assert_close("LSE", lse_of(of_got), lse_of(of_want), harness.Tolerance(1e-5, 1e-5, 1e-9))
    if not normalised:
        want, got = (x / np.maximum(total, 1e-30)[..., None] for x, (total, _) in ((want, of_want), (got, of_got)))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["empty ranges", "gqa with a start", "mqa", "scale"])
def test_references_of_decode_attention(name: str) -> None:
    case = dataclasses.replace(DENSE[name], dtype="float32", residuals=True)
    arrays = dense_arrays(case)
    function = decode_attention.gqa_reference if case.kv_heads else decode_attention.mqa_reference
    out, residuals = function(**arrays, sm_scale=case.scale, return_residuals=True)
    want, lse = expected_dense(case, arrays)
    np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-5)
    harness.assert_close("LSE", lse_of(residuals), lse, harness.Tolerance(1e-5, 1e-5, 1e-9))
    if case.kv_heads:
        arrays |= {name: np.repeat(arrays[name], case.q_heads // case.kv_heads, axis=2) for name in ("k", "v")}
        np.testing.assert_allclose(decode_attention.mha_reference(**arrays, sm_scale=case.scale), want, atol=1e-5)


@pytest.mark.parametrize("name", ["pages of 16", "no lengths", "soft cap"])
def test_paged_attention_reference(name: str) -> None:
    case = dataclasses.replace(CASES[name], dtype="float32", lengths=CASES[name].lengths and FEW_LENGTHS)
    arrays = paged_arrays(case, case.lengths)
    tables = arrays["block_tables"].clip(0, arrays["k_pages"].shape[1] - 1)
    k, v = (
        arrays[f"{x}_pages"][:, tables].reshape(case.kv_heads, len(tables), -1, case.head_dim).transpose(1, 2, 0, 3)
        for x in ("k", "v")
    )
    out = paged_attention.paged_attention_reference(arrays["q"], k, v, arrays["lengths"], attn_logits_soft_cap=case.cap)
    np.testing.assert_allclose(out, expected_paged(case, arrays), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        ("gqa_reference", {"q": np.ones((2, 3, 64), np.float32)}, ValueError, "q: its 3 heads"),
        ("gqa_reference", {"normalize_output": False}, NotImplementedError, "normalize_output: takes False only with"),
        ("gqa_reference", {"sm_scale": 0.0}, ValueError, "sm_scale: expected a positive"),
        ("mqa_reference", {}, ValueError, r"k: expected shape \[B=2, S, D=64\]"),
        ("mha_reference", {}, ValueError, r"k: expected shape \[B=2, S, Hq=4, D=64\]"),
        ("paged_attention_reference", {"lengths": np.ones(3, np.int32)}, ValueError, r"lengths: expected shape"),
        ("paged_attention_reference", {"mask_value": 0.0}, NotImplementedError, "mask_value: takes numbers of at most"),
        ("paged_attention_reference", {"attn_logits_soft_cap": -1.0}, ValueError, "attn_logits_soft_cap: expected"),
    ],
)
def test_references_with_wrong_arguments(
    function: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays = {name: x for name, x in dense_arrays(DenseCase(2, 4, 2, 32, dtype="float32")).items() if x is not None}
    paged = function.startswith("paged")
    with pytest.raises(error, match=message):
        getattr(paged_attention if paged else decode_attention, function)(
            **({"lengths": None} if paged else {}) | arrays | changes
        )


def test_merged_parts_of_a_cache_equal_the_whole() -> None:
    """MaxText and others merge parts by their residuals: sum of exp(m - max) · output and of exp(m - max) · l."""
    arrays = dense_arrays(DenseCase(2, 4, 2, 64, dtype="float32"))
    outs, totals, tops = [], [], []
    for first, end in ((0, (32, 32)), (32, (32, 0))):
        part = arrays | {name: arrays[name][:, first : first + 32] for name in ("k", "v")}
        part["kv_seq_len"] = np.array(end, np.int32)
        out, (total, top) = decode_attention.gqa(**part, return_residuals=True, normalize_output=False)
        for results, result in ((outs, out), (totals, total), (tops, top)):
            results.append(np.asarray(result))
    factor = np.exp(np.stack(tops) - np.max(tops, axis=0))
    merged = (factor[..., None] * outs).sum(0) / (factor * totals).sum(0)[..., None]
    whole = decode_attention.gqa(**arrays | {"kv_seq_len": np.array([64, 32], np.int32)})
    np.testing.assert_allclose(merged, whole, atol=1e-5, rtol=1e-5)


# --- transformations and warnings


def test_vmap() -> None:
    cases = [small_paged() for _ in range(2)]
    call = functools.partial(paged_attention.paged_attention, implementation="xla")
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    got = jax.jit(jax.vmap(lambda arrays: call(**arrays)))(stacked)
    np.testing.assert_allclose(got, np.stack([call(**each) for each in cases]), atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_shard_map_over_heads() -> None:
    arrays = paged_arrays(PagedCase(dtype="float32", quantised="int8"), FEW_LENGTHS)
    heads = {name: P("x") if "pages" in name else P(None, "x") if name == "q" else P() for name in arrays}
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    def call(arrays: dict[str, Any]) -> Any:
        return paged_attention.paged_attention(**arrays, implementation=XLA.name)

    split = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(heads,), out_specs=P(None, "x")))
    np.testing.assert_allclose(split(arrays), call(arrays), atol=1e-6, rtol=1e-6)


def test_gradients_are_refused() -> None:
    arrays = small_paged()
    with pytest.raises(NotImplementedError, match="paged_decode"):
        jax.grad(lambda q: jnp.sum(paged_attention.paged_attention(**arrays | {"q": q})))(arrays["q"])


def test_tuning_arguments_warn_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_warned", False)
    small, dense = small_paged(), dense_arrays(DenseCase(2, 4, 2, 32, dtype="float32"))
    paged_attention.paged_attention(**small, k_splits=16, interpret=True)  # the default
    with pytest.warns(UserWarning, match="paged_attention: pallas_attn ignores block_h, k_splits"):
        paged_attention.paged_attention(**small, block_h=32, k_splits=1)
    decode_attention.gqa(**dense, block_k=64, grid=(1, 1))


@pytest.mark.parametrize(
    "name",
    ["gqa", "gqa_reference", "mha_reference", "mqa", "mqa_reference", "paged_attention", "paged_attention_reference"],
)
def test_signature_equals_jax(jax_modules: tuple[ModuleType, ModuleType], name: str) -> None:
    paged = name.startswith("paged")
    ours, theirs = paged_attention if paged else decode_attention, jax_modules[0 if paged else 1]
    got = {p.name: (p.kind, p.default) for p in inspect.signature(getattr(ours, name)).parameters.values()}
    want = {p.name: (p.kind, p.default) for p in inspect.signature(getattr(theirs, name)).parameters.values()}
    if not name.endswith("_reference"):
        assert got.pop("implementation")[1] is None
    assert list(got.items()) == list(want.items())


# --- jax's test files


def jax_test_suite(file: str, imported: str, replacement: Any) -> unittest.TestSuite:
    """Return the tests of a file in tests/pallas of jax which JAX runs on CPUs, too. They call the functions of
    `replacement` instead of the functions of the module `jax.experimental.pallas.ops.gpu.<imported>`.
    """
    root = os.environ.get("JAX_SOURCE")
    if not root:
        pytest.skip("the environment variable JAX_SOURCE names no checkout of jax")
    path = Path(root, "tests", "pallas", f"{file}.py")
    spec = importlib.util.spec_from_file_location(file, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"JAX_SOURCE: expected a checkout of jax with {path.relative_to(root)}, got {root}")
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.object(gpu, imported, replacement, create=True):
        spec.loader.exec_module(loaded)
    cases = [x for name, x in vars(loaded).items() if name.endswith("InterpretTest")]
    return unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))


@every_backend("paged_decode", lambda backend: runs_grid(backend) and not backend.interpreted)
@pytest.mark.parametrize("ours", [paged_attention, decode_attention], ids=["paged_attention", "decode_attention"])
@in_every_run()
def test_jax_source(backend: Backend, ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of jax pass, except calls that a kernel does not support. jax draws a few cases from a grid: all cases
    run with the environment variable JAX_NUM_GENERATED_CASES=4000.

    jax skips float8_e4m3fn if the GPU, or the CPU, does not support it. These cases run here, too.
    """
    monkeypatch.setattr(arguments, "_warned", True)
    monkeypatch.setattr(test_util, "is_cuda_compute_capability_at_least", lambda _: True)
    names = ("paged_attention",) if ours is paged_attention else ("mqa", "gqa")
    calls = {name: functools.partial(getattr(ours, name), implementation=backend.name) for name in names}
    file = "gpu_paged_attention_test" if ours is paged_attention else "gpu_attention_test"
    jax.jit(jnp.sin)(1.0)  # creates the compilation cache, which jax's tests must not change
    result = unittest.TestResult()
    jax_test_suite(file, ours.__name__.rpartition(".")[2], SimpleNamespace(**vars(ours) | calls)).run(result)
    assert not result.failures, result.failures[0][1]
    assert {reason for _, reason in result.skipped} <= {"Skipping since neither (k, v) quantization requested."}, (
        result.skipped
    )
    for _, trouble in result.errors:
        assert backend.kernels, trouble
        assert trouble.strip().splitlines()[-1].startswith("NotImplementedError"), trouble
    ran = result.testsRun - len(result.skipped) - len(result.errors)
    assert ran > 0
    print(f"{ran} passed, {len(result.errors)} unsupported")
