"""Scores from 1e2 to 1e30 of either sign, and scores that overflow float32, in every attention operation.

Each query and key has one element that is not 0, so a score is one product, which float32 represents exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_attn import (
    PagedKV,
    PagedLatent,
    mla_decode,
    mla_sparse,
    paged_decode,
    paged_prefill,
    ragged_attention,
)
from tests.contract import backends, naive
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.kit import harness

# Some scores overflow float32 on purpose, and NumPy warns about overflows.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")

SM_SCALE = 0.75
PS, PAGES_PER_ROW = 16, 8
D, LATENT, ROPE = 64, 128, 64
Q_HEADS, KV_HEADS = 4, 2
HEAD_FACTORS = np.array([1, -1, 0.75, -0.5])  # per query head: gives every score both signs
FEW, MANY = 4, 40
"""Numbers of query heads of MLA calls. Mosaic has one kernel for few query rows (heads times query tokens) and one for
many.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A query and its keys. The score of key t is query · keys[t] · SM_SCALE, times the factor of the head."""

    query: float
    keys: np.ndarray


def draw_row(kind: str, size: float, rng: np.random.Generator) -> Row:
    """Draw a query and its keys. The largest scores are near `size` times SM_SCALE."""
    exponent = round(np.log2(abs(size)))
    query = rng.integers(128, 256) / 128 * 2.0 ** (exponent // 2)
    mantissa, unit = rng.integers(130, 256), 2.0 ** (exponent - exponent // 2 - 8) * np.sign(size)
    count = {"one key": 1}.get(kind, 40)
    keys = np.full(count, mantissa * unit)
    if kind == "one key dominates":
        keys[rng.permutation(count)[1:]] = (mantissa - 1) * unit
    if kind == "all magnitudes":  # the largest score differs from tile to tile
        keys = np.concatenate([keys * 2.0 ** -rng.integers(0, exponent // 2, count) * sign for sign in (1, -1)])
        rng.shuffle(keys)
    return Row(query, keys)


KINDS = ("one key", "all equal", "one key dominates", "all magnitudes")
SIZES = {"bfloat16": (1e2, 1e5, 3e8, 5e9, 1e20, 1e30), "float16": (1e2, 1e5, 1e8, 3e8, 9e8)}
SIZES["float32"] = SIZES["bfloat16"]


def draw_rows(name: str, dtype: str) -> list[Row]:
    rng, sizes = harness.fresh_rng(), SIZES[dtype]
    if name == "few":
        chosen = [("one key", sizes[-2]), ("one key", -sizes[-2]), ("all equal", sizes[2])]
        chosen += [("one key dominates", sizes[-1]), ("all magnitudes", sizes[-1])]
    else:
        chosen = [(kind, sign * size) for kind in KINDS for size in sizes for sign in (1, -1)]
    return [draw_row(kind, size, rng) for kind, size in chosen]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arrays of B rows: q [B, Hq, D], and for each row k [K, Hkv, D] and v [K, Hkv, Dv] with its K keys and values."""

    q: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]

    @staticmethod
    def draw(rows: list[Row], dtype: str, heads: int, kv_heads: int, widths: tuple[int, int]) -> Problem:
        """Draw values, and write the numbers of the rows to column 0 of queries and keys. Other columns are 0."""
        rng, (key_dim, value_dim) = harness.fresh_rng(), widths
        q = np.zeros((len(rows), heads, key_dim))
        q[..., 0] = np.array([row.query for row in rows])[:, None] * np.resize(HEAD_FACTORS, heads)
        k = [np.zeros((len(row.keys), kv_heads, key_dim)) for row in rows]
        for keys, row in zip(k, rows, strict=True):
            keys[..., 0] = row.keys[:, None]
        v = [0.1 * rng.standard_normal((len(row.keys), kv_heads, value_dim)) for row in rows]
        return Problem(q.astype(dtype), [x.astype(dtype) for x in k], [x.astype(dtype) for x in v])

    @property
    def lens(self) -> np.ndarray:
        return np.array([len(k) for k in self.k], np.int32)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        rows = [naive.attend(*row, SM_SCALE) for row in zip(self.q, self.k, self.v, strict=True)]
        out, lse = zip(*rows, strict=True)
        return np.stack(out), np.stack(lse)

    def paged(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Return the tokens of all rows in pages [B · P, Hkv, ps, D]. Row b has the pages b · P to (b + 1) · P - 1."""
        pages = np.zeros((len(arrays), PAGES_PER_ROW * PS, *arrays[0].shape[1:]), arrays[0].dtype)
        for row, tokens in zip(pages, arrays, strict=True):
            row[: len(tokens)] = tokens
        return pages.reshape(-1, PS, *pages.shape[2:]).swapaxes(1, 2)

    @property
    def tables(self) -> np.ndarray:
        return np.arange(len(self.k) * PAGES_PER_ROW, dtype=np.int32).reshape(-1, PAGES_PER_ROW)

    @property
    def cu_lens(self) -> np.ndarray:
        return np.concatenate([[0], self.lens.cumsum()]).astype(np.int32)


type Result = tuple[np.ndarray, np.ndarray]
Run = Callable[[Backend, list[Row], str], tuple[Any, Problem]]


def with_plan(backend: Backend, arrays: dict[str, Any]) -> dict[str, Any]:
    plan = {"plan": backends.plan_of(backend, arrays, num_programs=5, mode="balanced")} if backend.plans else {}
    return arrays | plan


def run_paged_decode(backend: Backend, rows: list[Row], dtype: str) -> tuple[Any, Problem]:
    problem = Problem.draw(rows, dtype, Q_HEADS, KV_HEADS, (D, D))
    kv = PagedKV(*(jnp.asarray(problem.paged(x)) for x in (problem.k, problem.v)))
    arrays = {"q": problem.q[:, None], "kv": kv, "block_tables": problem.tables, "kv_lens": problem.lens}
    out, lse = backends.call(
        paged_decode, backend, with_plan(backend, arrays), return_lse=True, sm_scale=SM_SCALE, out_dtype="float32"
    )
    return (out[:, 0], lse[:, 0]), problem


def run_paged_prefill(backend: Backend, rows: list[Row], dtype: str) -> tuple[Any, Problem]:
    problem = Problem.draw(rows, dtype, Q_HEADS, KV_HEADS, (D, D))
    kv = PagedKV(*(jnp.asarray(problem.paged(x)) for x in (problem.k, problem.v)))
    one_each = np.arange(len(rows) + 1, dtype=np.int32)
    arrays = {"q": problem.q, "kv": kv, "block_tables": problem.tables, "cu_q_lens": one_each, "kv_lens": problem.lens}
    return backends.call(paged_prefill, backend, arrays, return_lse=True, sm_scale=SM_SCALE), problem


def run_ragged(backend: Backend, rows: list[Row], dtype: str) -> tuple[Any, Problem]:
    problem = Problem.draw(rows, dtype, Q_HEADS, KV_HEADS, (D, D))
    one_each = np.arange(len(rows) + 1, dtype=np.int32)
    arrays = {"q": problem.q, "k": np.concatenate(problem.k), "v": np.concatenate(problem.v)}
    arrays |= {"cu_q_lens": one_each, "cu_kv_lens": problem.cu_lens}
    return backends.call(ragged_attention, backend, arrays, causal=True, return_lse=True, sm_scale=SM_SCALE), problem


def latents(rows: list[Row], dtype: str, heads: int, *, fp8: bool = False) -> tuple[Problem, dict[str, Any]]:
    """Return a problem, and the arrays of an MLA call with the same scores: keys are rope columns, values are latents,
    and the latent part of queries is 0.
    """
    problem = Problem.draw(rows, dtype, heads, 1, (ROPE, LATENT))
    if fp8:
        v = [x.astype(ml_dtypes.float8_e4m3fn) for x in problem.v]
        rope_dtype = "bfloat16" if dtype == "float32" else dtype
        pages, rope = (problem.paged(x)[:, 0] for x in (v, [x.astype(rope_dtype) for x in problem.k]))
        parts = [pages, np.ones((*pages.shape[:2], LATENT // 128), np.float32), rope]
        problem = replace(problem, v=v)
    else:
        parts = [np.concatenate([problem.paged(x)[:, 0] for x in (problem.v, problem.k)], axis=-1)]
    q_latent = np.zeros((*problem.q.shape[:2], LATENT), dtype)
    cache = PagedLatent(*map(jnp.asarray, parts))
    return problem, {"q_latent": q_latent, "q_rope": problem.q, "cache": cache}


def run_mla_decode(heads: int, *, fp8: bool = False) -> Run:
    def run(backend: Backend, rows: list[Row], dtype: str) -> tuple[Any, Problem]:
        problem, arrays = latents(rows, dtype, heads, fp8=fp8)
        arrays |= {name: arrays[name][:, None] for name in ("q_latent", "q_rope")}
        arrays = with_plan(backend, arrays | {"block_tables": problem.tables, "kv_lens": problem.lens})
        out, lse = backends.call(mla_decode, backend, arrays, return_lse=True, sm_scale=SM_SCALE, out_dtype="float32")
        return (out[:, 0], lse[:, 0]), problem

    return run


def run_mla_sparse(backend: Backend, rows: list[Row], dtype: str) -> tuple[Any, Problem]:
    problem, arrays = latents(rows, dtype, FEW)
    place = np.arange(PAGES_PER_ROW * PS, dtype=np.int32)
    first = PAGES_PER_ROW * PS * np.arange(len(rows), dtype=np.int32)
    arrays["slots"] = np.where(place < problem.lens[:, None], first[:, None] + place, -1).astype(np.int32)
    return backends.call(mla_sparse, backend, arrays, return_lse=True, sm_scale=SM_SCALE), problem


RUNS: dict[str, tuple[str, Run]] = {
    "paged_decode": ("paged_decode", run_paged_decode),
    "paged_prefill": ("paged_prefill", run_paged_prefill),
    "ragged_attention": ("ragged_attention", run_ragged),
    "mla_decode": ("mla_decode", run_mla_decode(FEW)),
    "mla_decode of many heads": ("mla_decode", run_mla_decode(MANY)),
    "mla_decode of fp8 latents": ("mla_decode", run_mla_decode(FEW, fp8=True)),
    "mla_decode of fp8 latents, many heads": ("mla_decode", run_mla_decode(MANY, fp8=True)),
    "mla_sparse": ("mla_sparse", run_mla_sparse),
}
every_operation = pytest.mark.parametrize(
    ("backend", "operation"),
    [
        pytest.param(backend, name, id=f"{backend.id}-{name}")
        for name, (op, _) in RUNS.items()
        for backend in backends.backends_of(op)
    ],
    indirect=["backend"],
)


def check(backend: Backend, operation: str, rows: list[Row], dtype: str) -> None:
    (out, lse), problem = RUNS[operation][1](backend, rows, dtype)
    want_out, want_lse = problem.expected()
    tolerance, _ = backend.variant.tolerance(dtype)
    harness.assert_close("output", np.asarray(out, np.float32), want_out, tolerance)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=3e-6, atol=1e-4)


NO_FP8 = dict.fromkeys((name for name in RUNS if "fp8" in name), "takes no quantised latents")


@every_operation
@in_every_run(
    reference=all_but("paged_prefill", "mla_decode of many heads", "mla_decode of fp8 latents"),
    xla=all_but(
        "mla_decode of many heads", "mla_decode of fp8 latents", "mla_decode of fp8 latents, many heads",
    ),
    triton=all_but("mla_decode of many heads", "mla_decode of fp8 latents, many heads"),
    mosaic=all_but("paged_prefill", "mla_decode of fp8 latents", "mla_decode of fp8 latents, many heads"),
)  # fmt: skip
@unsupported(mosaic_sm100=NO_FP8)
def test_large_scores(backend: Backend, operation: str) -> None:
    check(backend, operation, draw_rows("few", backend.dtype), backend.dtype)


NO_FLOAT32 = dict.fromkeys((f"{name}-float32" for name in RUNS), "takes bfloat16 and float16 queries, got float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIZES)
@every_operation
@unsupported(
    mosaic=NO_FLOAT32 | {"mla_decode of fp8 latents, many heads-float16": "takes bfloat16 queries"},
    triton=NO_FLOAT32,
    mosaic_sm100=NO_FLOAT32 | {f"{name}-{dtype}": reason for name, reason in NO_FP8.items() for dtype in SIZES},
)
def test_large_scores_of_every_kind(backend: Backend, operation: str, dtype: str) -> None:
    """Test all kinds of rows and sizes of scores. `make test` runs `test_large_scores` instead, with five rows."""
    check(backend, operation, draw_rows("every kind", dtype), dtype)


@every_operation
@in_every_run(
    reference=["paged_decode", "paged_prefill", "ragged_attention"],
    xla=all_but(
        "mla_decode of many heads", "mla_decode of fp8 latents", "mla_decode of fp8 latents, many heads",
    ),
    triton=all_but("mla_decode", "mla_decode of many heads", "mla_decode of fp8 latents"),
    mosaic=["paged_decode", "mla_decode of many heads"],
)  # fmt: skip
@unsupported(mosaic_sm100=NO_FP8)
def test_scores_that_overflow(backend: Backend, operation: str) -> None:
    """A key whose score overflows to -inf has weight 0. A score of +inf makes the row's output and LSE NaN."""
    large = float(ml_dtypes.bfloat16(2.0**65))
    rows = [
        Row(large, np.array([-large, -large])),
        Row(large, np.array([-large, 2.0**-65, -large])),
        Row(large, np.array([2.0**-65, large, 0.0])),
        *[Row(1.0, np.zeros(77))] * 2,  # with these rows, the shapes are the shapes of `test_large_scores`
    ]
    (out, lse), problem = RUNS[operation][1](backend, rows, backend.dtype)
    out, lse = np.asarray(out, np.float32), np.asarray(lse)
    positive = np.resize(HEAD_FACTORS, out.shape[1]) > 0  # scores of the other heads have the opposite sign
    for b, sign in ((0, positive), (1, positive), (2, ~positive)):
        assert not np.isnan(lse[b, sign]).any()
        assert np.isnan(lse[b, ~sign]).all()
        assert np.isnan(out[b, ~sign]).all()
    np.testing.assert_array_equal(lse[0, positive], -np.inf)
    np.testing.assert_array_equal(out[0, positive], 0)
    np.testing.assert_allclose(lse[1, positive], SM_SCALE * np.resize(HEAD_FACTORS, out.shape[1])[positive], rtol=1e-5)
    group = out.shape[1] // problem.v[1].shape[1]
    np.testing.assert_allclose(
        out[1, positive], np.repeat(problem.v[1][1].astype(np.float32), group, axis=0)[positive], rtol=1e-2, atol=1e-6
    )
