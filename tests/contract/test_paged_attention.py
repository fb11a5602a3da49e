"""Contract of `paged_decode` and `paged_prefill`: every backend is tested with unusual inputs.

Poisoned inputs have NaN, infinities or garbage in all elements that must not affect the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL, PAGE_NONE, DecodePlan, PagedKV, kv_cache_spec, paged_decode, paged_prefill
from tests.contract import backends, paged_cases, transformations
from tests.contract.backends import Backend, every_backend, in_every_run, unsupported
from tests.contract.paged_case import Inputs, PagedCase, in_8_bits
from tests.contract.paged_cases import CARRIER, CHUNK, PS, SAMPLE, packed, windowed
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

type Result = tuple[np.ndarray, np.ndarray]

PROGRAMS = 5
"""Number of CTAs of all plans (assignments of pages to CTAs). With one number, tests share compiled calls."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """`paged_decode` or `paged_prefill`, with its test cases and its expected results.

    Attributes:
      arguments: function that returns the array arguments of a call for the inputs of a case.
      expected: function that returns output and LSE for the inputs of a case, computed in NumPy.
    """

    name: str
    function: Callable[..., Any]
    cases: Mapping[str, PagedCase]
    arguments: Callable[..., dict[str, Any]]
    expected: Callable[[Inputs], Result]

    def run(self, backend: Backend, case: PagedCase, arrays: dict[str, Any], **static: Any) -> Result:
        out, lse = backends.call(self.function, backend, arrays, return_lse=True, **case.static, **static)
        return np.asarray(out), np.asarray(lse)


DECODE = Operation("paged_decode", paged_decode, paged_cases.DECODE, Inputs.decode, Inputs.expected_decode)
PREFILL = Operation("paged_prefill", paged_prefill, paged_cases.PREFILL, Inputs.prefill, Inputs.expected_prefill)


def both(wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Parametrize a test over both operations and their `wanted` backends, as arguments `operation` and `backend`."""
    return pytest.mark.parametrize(
        ("operation", "backend"),
        [
            pytest.param(operation, backend, id=f"{operation.name}-{backend.id}")
            for operation in (DECODE, PREFILL)
            for backend in backends.backends_of(operation.name, wanted)
        ],
        indirect=["backend"],
    )


def draw(backend: Backend, case: PagedCase) -> Inputs:
    return Inputs.draw(replace(case, dtype=case.dtype or backend.dtype), harness.fresh_rng())


def planned(backend: Backend, case: PagedCase, arrays: dict[str, Any], mode: str = "balanced") -> dict[str, Any]:
    """Return the arguments of a decode call, with a plan if the backend uses plans."""
    return arrays | {"plan": plan_for(backend, case, arrays, mode)} if backend.plans else arrays


def plan_for(backend: Backend, case: PagedCase, arrays: dict[str, Any], mode: str) -> DecodePlan:
    return backends.plan_of(backend, arrays, window=case.window, num_programs=PROGRAMS, mode=mode)


def check(operation: Operation, backend: Backend, inputs: Inputs, *, clean: bool | None = None) -> None:
    """Check that the result for poisoned inputs equals attention in NumPy.

    If `clean`, check that inputs without poison give the same bits. The default is True, except for interpreted
    kernels, which are slow.
    """
    case = inputs.case
    # The reference computes in float32 and rounds only its result, so the float32 tolerances apply to all dtypes.
    exact = {"out_dtype": "float32"} if backend.name == "reference" else {}

    def result(poisoned: bool) -> Result:
        arrays = operation.arguments(inputs, poisoned=poisoned)
        arrays = planned(backend, case, arrays) if operation is DECODE else arrays
        return operation.run(backend, case, arrays, **exact)

    got = result(poisoned=True)
    of_output, of_lse = backend.variant.tolerance("float32" if exact else case.dtype)
    if case.exact and case.dtype == "bfloat16" and not exact:
        # Scores differ so much that few keys have a weight above 0. These weights are often equal and have equal
        # rounding errors, which do not average out.
        of_output = replace(of_output, cosine=harness.ROUNDED_TWICE)
    harness.assert_attention_close(got, operation.expected(inputs), (of_output, of_lse))
    if not backend.interpreted if clean is None else clean:
        harness.assert_same_bits(got, result(poisoned=False))


# --- values of outputs


@slow_cases("mosaic-all idle", "mosaic-draft trees, windows, absent pages")
@slow_cases(
    "triton-soft cap, sinks, scale", "triton-fp8 queries of tokens, tree, cap", "triton-fp8 per token, windows",
    "mosaic-G 16, width 256, pages of 128", "mosaic-int8 per channel, windows, float16", "triton-tree of 3, windowed",
    "mosaic-scores to 5e5", "mosaic-drafts in blocks, pages of 32",
    "mosaic-int8 per head, odd group, int window, soft cap", "mosaic-drafts, windows, absent pages",
    "mosaic-soft cap, sinks, scale", "mosaic-draft trees that start tiles", "mosaic-mixed lengths",
    "mosaic-fp8 queries of tokens, tree, cap", "mosaic-draft trees over any head's rows",
    "mosaic_sm100-head-wise windows and sink tokens, absent pages",
    "triton-head-wise windows and sink tokens, absent pages",
)  # fmt: skip
@backends.every_case("paged_decode", paged_cases.DECODE)
@in_every_run(
    reference=[
        "all idle", "all of length 1", "all of maximum length", "absent pages", "windows 1 and ps - 1",
        "windows ps and ps + 1, a sink token", "a window longer than any sequence, many sink tokens",
        "sink tokens of a full head, and past a window's start", "a page of sink tokens, heads interleaved",
        "windows and absent pages", "no keys but the draft's", "drafts, windows, absent pages",
        "int window ps + 1, drafts, sinks", "scores to 5e5", "G 5", "page of 1 token", "float32",
        "float32 over bfloat16", "e5m2 per head, sinks", "e5m2 in 4 groups, head-wise",
        "fused in lanes, int8 per channel, head-wise", "fp8 queries of heads, sinks",
        "draft trees over any head's rows", "draft trees that start tiles",
        "draft trees, windows, absent pages", "draft trees alone", "keys of 512, values of 320",
        "fp8 per token, windows",
    ],
    xla=[
        "all idle", "all of length 1", "all of maximum length", "absent pages", "windows 1 and ps - 1",
        "windows ps and ps + 1, a sink token", "a window longer than any sequence, many sink tokens",
        "sink tokens of a full head, and past a window's start", "a page of sink tokens, heads interleaved",
        "windows and absent pages", "tiles that end with the first draft", "no keys but the draft's",
        "drafts, windows, absent pages", "no option", "int window ps + 1, drafts, sinks",
        "head-wise windows and sink tokens, absent pages", "float32", "e5m2 per head, sinks",
        "values narrower, int8 per channel, windows", "fused in lanes, fp8 per token, pages of 1 token",
        "fp8 queries of tokens, tree, cap", "draft trees over any head's rows",
        "draft trees that start tiles", "tree of 8, full", "8 queries each, no q_lens",
        "G 8, width 512, sinks", "keys of 512, values of 320",
        "tokens first, drafts, windows, absent pages", "int8 keys per token, 16-bit values, windows",
        "fp8 values in 4 groups, 16-bit keys, head-wise",
        "fused, drafts",
    ],
    mosaic=[
        "mixed lengths", "all idle", "windows 1 and ps - 1", "windows ps and ps + 1, a sink token",
        "sink tokens of a full head, and past a window's start", "windows and absent pages",
        "drafts, windows, absent pages", "soft cap, sinks, scale", "scores to 5e5", "large soft cap",
        "G 16, width 256, pages of 128", "page of 1 token", "page of 8 tokens", "heads of 16", "float32",
        "float32 over bfloat16", "bfloat16 over float32", "bfloat16 over float16",
        "int8 per head, odd group, int window, soft cap", "int8 per channel, windows, float16",
        "e5m2 per head, sinks", "e5m2 in 4 groups, head-wise", "keys of 48, values of 80, sinks",
        "values narrower, int8 per channel, windows", "fused in lanes, fp8 per token, pages of 1 token",
        "fused in lanes, int8 per channel, head-wise", "fp8 queries of tokens, tree, cap",
        "one scale of e5m2 queries, drafts", "draft trees over any head's rows",
        "draft trees that start tiles", "draft trees, windows, absent pages", "draft trees alone",
        "drafts in blocks, pages of 32", "tokens first, drafts, windows, absent pages",
        "tokens first, fp8 per token", "tokens first, int8 heads of 64", "tokens first, pages of 24",
        "fused in lanes, tokens first, pages of 64, float16", "int8 keys per token, 16-bit values, windows",
    ],
    mosaic_sm100=["drafts, ragged"],
    triton=[
        "head-wise windows and sink tokens, absent pages", "soft cap, sinks, scale", "float32",
        "float32 over bfloat16", "int8 per head, odd group, int window, soft cap", "fp8 per token, windows",
        "fused in lanes, fp8 per token, pages of 1 token", "fp8 queries of tokens, tree, cap",
        "tree of 3, windowed", "G 8, width 512, sinks", "keys of 512, values of 320",
        "tokens first, pages of 192, int window, soft cap",
        "fp8 values in 4 groups, 16-bit keys, head-wise", "int8 values per channel, 16-bit keys",
    ],
)  # fmt: skip
@unsupported(**paged_cases.unsupported(paged_cases.DECODE))
@unsupported(mosaic={"G 67": "67 have no such divisor"})  # the prefill kernel supports any number of heads
@unsupported(mosaic_sm100=paged_cases.too_wide(paged_cases.DECODE))
@unsupported(mosaic_sm100=paged_cases.other_layouts(paged_cases.DECODE))
def test_decode(backend: Backend, name: str) -> None:
    case = DECODE.cases[name]
    check(DECODE, backends.for_width(backend, case.head_dim), draw(backend, case))


@slow_cases("mosaic-absent pages")
@slow_cases(
    "xla-all idle", "xla-head-wise drafts, float16", "xla-int8 in 4 groups, absent pages",
    "xla-int8 per head, odd group, int window, soft cap", "xla-keys of 48, values of 80, sinks",
    "xla-chunks, a tree over windows and absent pages", "xla-full, sinks, soft cap",
    "xla-G 7, four KV heads, float16", "xla-first chunks, later chunks and none", "xla-large soft cap",
    "xla-G 2, width 128", "mosaic-bfloat16", "mosaic-sink tokens of a full head, and past a window's start",
    "xla-page of 8 tokens", "mosaic-first chunks, later chunks and none", "mosaic-drafts, windows, absent pages",
    "mosaic-int8 per head, odd group, int window, soft cap", "mosaic-all idle", "mosaic-full, sinks, soft cap",
    "mosaic-scores to 5e5", "mosaic-chunks, absent pages of any head's rows", "mosaic-G 7, four KV heads, float16",
    "mosaic-chunks, one scale of fp8 queries, soft cap", "mosaic-G 16, width 256, pages of 128",
    "mosaic-mixed lengths", "mosaic_sm100-chunks, int8 per token", "triton-first chunks, later chunks and none",
)  # fmt: skip
@backends.every_case("paged_prefill", paged_cases.PREFILL)
@in_every_run(
    reference=[
        "all idle", "tokens cached, none new", "all of length 1", "all of maximum length", "absent pages",
        "windows 1 and ps - 1", "windows ps and ps + 1, a sink token",
        "a window longer than any sequence, many sink tokens",
        "sink tokens of a full head, and past a window's start", "a page of sink tokens, heads interleaved",
        "windows and absent pages", "tiles that end with the first draft", "no keys but the draft's",
        "drafts, windows, absent pages", "e5m2 per head, sinks", "one sequence has them all",
        "empty sequences around", "a page at a time", "chunks, windows 1 and past a page",
        "chunks, windows about as long as a page", "chunks, absent pages of any head's rows",
    ],
    xla=[
        "all idle", "all of length 1", "all of maximum length", "absent pages", "windows 1 and ps - 1",
        "windows ps and ps + 1, a sink token", "a window longer than any sequence, many sink tokens",
        "sink tokens of a full head, and past a window's start", "a page of sink tokens, heads interleaved",
        "windows and absent pages", "drafts, ragged", "tiles that end with the first draft",
        "no keys but the draft's", "drafts, windows, absent pages", "head-wise drafts, float16",
        "large soft cap", "G 2, width 128", "G 7, four KV heads, float16", "page of 8 tokens",
        "int8 per head, odd group, int window, soft cap", "int8 in 4 groups, absent pages",
        "e5m2 per head, sinks", "keys of 48, values of 80, sinks", "first chunks, later chunks and none",
        "one sequence has them all", "empty sequences around", "a page at a time",
        "chunks, windows 1 and past a page", "chunks, windows about as long as a page",
        "chunks, int8 per token", "full, sinks, soft cap", "full, more queries than keys",
        "chunks, a tree over windows and absent pages", "more sequences than tokens",
        "keys of 512, values of 320",
    ],
    mosaic=[
        "mixed lengths", "all idle", "absent pages", "windows ps and ps + 1, a sink token",
        "sink tokens of a full head, and past a window's start", "windows and absent pages",
        "drafts, windows, absent pages", "scores to 5e5", "large soft cap", "G 7, four KV heads, float16",
        "G 16, width 256, pages of 128", "page of 1 token", "page of 8 tokens", "heads of 16", "float32",
        "bfloat16", "float32 over bfloat16", "bfloat16 over float32", "bfloat16 over float16",
        "int8 per head, odd group, int window, soft cap", "e5m2 per head, sinks",
        "e5m2 in 4 groups, head-wise", "keys of 48, values of 80, sinks",
        "values narrower, int8 per channel, windows", "fused in lanes, fp8 per token, pages of 1 token",
        "fused in lanes, int8 per channel, head-wise", "first chunks, later chunks and none",
        "empty sequences around", "chunks, absent pages of any head's rows",
        "chunks, one scale of fp8 queries, soft cap", "chunks, one scale of e5m2 queries",
        "full, sinks, soft cap", "full, more queries than keys", "chunks, a tree",
        "chunks, a tree over windows and absent pages", "chunks, a tree, int8 per token, head-wise",
        "chunks, a tree, more new tokens than keys", "tokens first, pages of 192, int window, soft cap",
        "fused, tokens first, fp8 per head", "tokens first, fp8 per token",
        "tokens first, int8 heads of 64", "tokens first, pages of 24",
    ],
    mosaic_sm100=["chunks, int8 per token"],
    triton=[
        "float32", "float32 over bfloat16", "bfloat16 over float32", "bfloat16 over float16",
        "first chunks, later chunks and none", "full, absent pages of any head's rows, int8 per token",
        "chunks, width 512, windows",
    ],
)  # fmt: skip
@unsupported(**paged_cases.unsupported(paged_cases.PREFILL))
@unsupported(
    mosaic={
        **paged_cases.too_wide(paged_cases.PREFILL, (512,)),
        "width 512, int8 per channel, windows": "takes scales per head, token or token group",
    },
    mosaic_sm100=paged_cases.too_wide(paged_cases.PREFILL) | paged_cases.other_layouts(paged_cases.PREFILL),
)
def test_prefill(backend: Backend, name: str) -> None:
    case = PREFILL.cases[name]
    check(PREFILL, backends.for_width(backend, case.head_dim), draw(backend, case))


@both()
@pytest.mark.parametrize("width", [320, 512])
@in_every_run(
    xla=["512-paged_prefill"],
    mosaic=["512-paged_decode"],
    mosaic_sm100=["512-paged_decode"],
    triton=["512-paged_decode", "512-paged_prefill"],
)  # fmt: skip
@unsupported(
    mosaic={"320-paged_prefill": "takes heads of width"},
    mosaic_sm100="takes heads of width",
)
def test_columns_of_wide_values_keep_their_place(operation: Operation, backend: Backend, width: int) -> None:
    """All tokens of a KV head have the same value, so the output of a query equals it. Its columns differ."""
    case, backend = paged_cases.shape(2, 2, width, 16), backends.for_width(backend, width)
    inputs = draw(backend, case)
    value = inputs.rng.standard_normal(width).astype(inputs.case.dtype).astype(np.float32)
    inputs.kv["v"][:] = np.stack([value, -value])[:, None]
    arrays = operation.arguments(inputs)
    arrays = planned(backend, inputs.case, arrays) if operation is DECODE else arrays
    out, lse = operation.run(backend, inputs.case, arrays)
    want = np.where(np.isneginf(lse)[..., None], 0, np.repeat(np.stack([value, -value]), 2, axis=0))
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2 / 128)


POISONED = {
    "head windows": windowed((9, 1), (FULL, 0), absent_pages=True),
    "8 bits, scales of groups": paged_cases.QUANTISED["fp8 per token, windows"],
}


@pytest.mark.slow
@slow_cases("8 bits, scales of groups-paged_decode-mosaic")
@both(lambda backend: backend.kernels)
@pytest.mark.parametrize("name", POISONED)
@in_every_run(mosaic=["head windows-paged_prefill", "8 bits, scales of groups-paged_decode"])
def test_poison_changes_no_bit(operation: Operation, backend: Backend, name: str) -> None:
    """Poisoned and clean inputs give the same bits. Interpreted kernels run the other tests on poisoned inputs only."""
    check(operation, backend, draw(backend, POISONED[name]), clean=True)


@slow_cases("paged_prefill-mosaic")
@both()
@in_every_run("reference", "xla", mosaic=["paged_prefill"])
def test_queries_that_see_nothing_beside_infinite_values(operation: Operation, backend: Backend) -> None:
    """Queries without visible keys have output 0, also if the values that other queries see are infinite."""
    case = replace(paged_cases.DRAFTS, kv_lens=(3, 5, 2, 1, 9), q_lens=(4,) * 5, sinks="-inf")
    inputs = draw(backend, case)
    empty = np.isneginf(operation.expected(inputs)[1])
    inputs.make_live_values_infinite()
    arrays = operation.arguments(inputs)
    arrays = planned(backend, case, arrays) if operation is DECODE else arrays
    harness.assert_empty(operation.run(backend, case, arrays), empty)


@both()
@in_every_run(xla=["paged_decode"])
def test_output_dtype(operation: Operation, backend: Backend) -> None:
    inputs = draw(backend, paged_cases.DTYPES["bfloat16"])
    arrays = operation.arguments(inputs)
    rounded = operation.run(backend, inputs.case, arrays)
    exact = operation.run(backend, inputs.case, arrays, out_dtype="float32")
    assert (rounded[0].dtype, exact[0].dtype) == (jnp.bfloat16, jnp.float32)
    assert rounded[1].dtype == exact[1].dtype == jnp.float32
    harness.assert_same_bits(rounded[0], exact[0].astype(jnp.bfloat16))


@every_backend("paged_prefill")
@in_every_run("xla", "mosaic", "triton")
def test_no_tokens_at_all(backend: Backend) -> None:
    inputs = draw(backend, replace(CARRIER, kv_lens=(5, 0), q_lens=(0, 0), tokens=None))
    out, lse = PREFILL.run(backend, inputs.case, inputs.prefill())
    assert out.shape == (0, inputs.case.q_heads, inputs.case.head_dim)
    assert lse.shape == (0, inputs.case.q_heads)


@every_backend("paged_prefill")
@in_every_run("xla")
def test_chunks_give_what_the_whole_prompt_gives(backend: Backend) -> None:
    """Each chunk of a prompt has the result of the same tokens in a prefill of the whole prompt."""
    whole = draw(backend, packed((40, 0, 0, 0), (40, 0, 0, 0)))
    arrays = whole.prefill(poisoned=False)
    want, want_lse = PREFILL.run(backend, whole.case, arrays)
    for start, end in ((0, 1), (0, 13), (13, 16), (16, 17), (17, 40)):
        q = np.zeros_like(arrays["q"])
        q[: end - start] = arrays["q"][start:end]
        cu_q_lens = np.array([0, *[end - start] * 4], np.int32)
        chunk = arrays | {"q": q, "cu_q_lens": cu_q_lens, "kv_lens": np.array([end, 0, 0, 0], np.int32)}
        out, lse = (x[: end - start] for x in PREFILL.run(backend, whole.case, chunk))
        expected = (want[start:end], want_lse[start:end])
        harness.assert_attention_close((out, lse), expected, backend.variant.tolerance(whole.case.dtype))


@pytest.mark.slow
@every_backend("paged_prefill")
@in_every_run("xla")
def test_agrees_with_decode(backend: Backend) -> None:
    """Prefill and decode return the same result for three new tokens per sequence."""
    case = replace(SAMPLE, kv_lens=(3, 16, 17, 128), q_lens=(3,) * 4, queries=3, tokens=12)
    inputs = draw(backend, case)
    got = PREFILL.run(backend, case, inputs.prefill())
    decoded = DECODE.run(backend, case, planned(backend, inputs.case, inputs.decode()))
    out, lse = (x.reshape(12, *x.shape[2:]) for x in decoded)
    harness.assert_attention_close(got, (out, lse), backend.variant.tolerance(inputs.case.dtype))


@slow_cases("xla", "triton", "mosaic")
@every_backend("paged_decode")
@in_every_run("reference", "xla", "mosaic", "triton")
def test_queries_that_come_in_8_bits(backend: Backend) -> None:
    """Queries that the caller rounds to 8 bits give the same bits as queries that the call rounds."""
    case = replace(paged_cases.DECODE["fp8 queries of heads, sinks"], kv_lens=(5,) * 7, q_lens=(1,) * 7)
    inputs = draw(backend, case)
    arrays = inputs.decode()
    rounded = DECODE.run(backend, inputs.case, arrays)
    came = arrays | {"q": in_8_bits(arrays["q"], np.broadcast_to(arrays["q_scale"], arrays["q"].shape[:3]))}
    harness.assert_same_bits(rounded, DECODE.run(backend, inputs.case, came, out_dtype="float16"))


# --- order and number of sequences, plans


@slow_cases("triton", "mosaic")
@every_backend("paged_decode")
@in_every_run("xla", "mosaic", "triton")
def test_a_row_does_not_depend_on_its_batch(backend: Backend) -> None:
    """A sequence has the same result in a shuffled batch and among idle sequences. With plans of `fixed` mode, the bits
    are equal; without plans, results are close.
    """
    inputs = draw(backend, replace(SAMPLE, kv_lens=(0, 128, 40, 100, 1, 0, 65)))
    case, arrays = inputs.case, inputs.decode()
    batch = len(case.kv_lens)

    def rows(order: np.ndarray, kept: int = batch) -> Result:
        picked = {name: arrays[name][order] for name in ("q", "block_tables", "kv_lens")}
        picked["kv_lens"] = np.where(np.arange(batch) < kept, picked["kv_lens"], 0)
        return DECODE.run(backend, case, planned(backend, case, arrays | picked, "fixed"))

    def same(got: Result, want: Result) -> None:
        if backend.plans:
            harness.assert_same_bits(got, want)
        else:
            harness.assert_attention_close(got, want, backend.variant.tolerance(case.dtype))

    out, lse = rows(np.arange(batch))
    harness.assert_attention_close((out, lse), inputs.expected_decode(), backend.variant.tolerance(case.dtype))
    order = inputs.rng.permutation(batch)
    same(rows(order), (out[order], lse[order]))
    for row in backend.alone(batch):
        alone = rows(np.roll(np.arange(batch), -row), kept=1)
        same((alone[0][:1], alone[1][:1]), (out[row : row + 1], lse[row : row + 1]))


@slow_cases("fixed-xla", "fixed-mosaic")
@every_backend("paged_decode")
@pytest.mark.parametrize("mode", ["balanced", "fixed"])
@in_every_run("xla", mosaic=["fixed"])
def test_a_plan_changes_no_meaning(backend: Backend, mode: str) -> None:
    """Results are correct with plans that split the pages of a KV head between CTAs, assign several KV heads or
    sequences to one CTA, and leave CTAs without work.
    """
    inputs = draw(backend, replace(SAMPLE, kv_lens=(0, 128, 1, 40, 0, 0, 128)))
    arrays = inputs.decode()
    plan = plan_for(backend, inputs.case, arrays, mode)
    assert np.diff(plan.split_indptr).max() > 1
    got = DECODE.run(backend, inputs.case, arrays | {"plan": plan})
    harness.assert_attention_close(got, inputs.expected_decode(), backend.variant.tolerance(inputs.case.dtype))


@slow_cases("mosaic", "triton")
@every_backend("paged_decode")
@in_every_run("xla", "mosaic", "triton")
def test_tokens_of_a_mixed_step(backend: Backend) -> None:
    """`out` is an output [T, Hq, D] of packed tokens, of which the first B · Q are decode tokens. A decode call writes
    these tokens with the same bits as without `out`, and changes no other token.
    """
    inputs = draw(backend, replace(SAMPLE, kv_lens=(0, 128, 1, 40, 0, 0, 128)))
    arrays = planned(backend, inputs.case, inputs.decode())
    out, lse = DECODE.run(backend, inputs.case, arrays)
    own = out.reshape(-1, *out.shape[2:])
    packed = inputs.rng.standard_normal((len(own) + 5, *own.shape[1:])).astype(out.dtype)
    got = DECODE.run(backend, inputs.case, arrays | {"out": packed})
    harness.assert_same_bits(got, (np.concatenate([own, packed[len(own) :]]), lse))


@slow_cases("mosaic")
@every_backend("paged_decode")
@in_every_run("xla", "mosaic")
def test_without_a_plan(backend: Backend) -> None:
    """A call without the argument `plan` makes its own plan."""
    inputs = draw(backend, SAMPLE)
    got = DECODE.run(backend, inputs.case, inputs.decode())
    harness.assert_attention_close(got, inputs.expected_decode(), backend.variant.tolerance(inputs.case.dtype))


@slow_cases("mosaic")
@every_backend("paged_prefill")
@in_every_run("xla", "mosaic")
def test_a_sequence_does_not_depend_on_its_batch(backend: Backend) -> None:
    """A sequence has the same result in the full batch and in a batch whose other sequences are empty."""
    inputs = draw(backend, CHUNK)
    arrays = inputs.prefill()
    out, lse = PREFILL.run(backend, inputs.case, arrays)
    for s, (start, end) in enumerate(zip(arrays["cu_q_lens"], arrays["cu_q_lens"][1:], strict=False)):
        alone = np.arange(len(inputs.q)) == s
        cu_q_lens = np.cumsum([0, *np.where(alone, end - start, 0)], dtype=np.int32)
        q = np.roll(arrays["q"], -start, axis=0)
        kv_lens = np.where(alone, arrays["kv_lens"], 0).astype(np.int32)
        got = PREFILL.run(backend, inputs.case, arrays | {"q": q, "cu_q_lens": cu_q_lens, "kv_lens": kv_lens})
        got_out, got_lse = (x[: end - start] for x in got)
        tolerance = backend.variant.tolerance(inputs.case.dtype)
        harness.assert_attention_close((got_out, got_lse), (out[start:end], lse[start:end]), tolerance)


@slow_cases("mosaic")
@every_backend("paged_decode")
@in_every_run("xla", "mosaic")
def test_a_query_of_nan_spoils_no_other_head(backend: Backend) -> None:
    """A kernel may omit the mask for a tile of keys that all queries see. NaN queries of one head must not change the
    results of other heads.
    """
    inputs = draw(backend, paged_cases.TREE)
    arrays = planned(backend, inputs.case, inputs.decode())
    clean = DECODE.run(backend, inputs.case, arrays)
    q = arrays["q"].copy()
    q[:, :, 0] = np.nan
    got = DECODE.run(backend, inputs.case, arrays | {"q": q})
    harness.assert_same_bits([x[:, :, 1:] for x in got], [x[:, :, 1:] for x in clean])


@slow_cases("paged_prefill-xla", "paged_decode-mosaic")
@both()
@in_every_run("reference", "xla", mosaic=["paged_decode"])
def test_queries_of_nan_that_see_nothing(operation: Operation, backend: Backend) -> None:
    """NaN queries without visible keys have output 0 and LSE -inf. All entries of the tables are PAGE_NONE."""
    inputs = draw(backend, replace(CARRIER, kv_lens=(128,) * 7, q_lens=(1,) * 7))
    inputs.tables[:] = PAGE_NONE
    arrays = operation.arguments(inputs, poisoned=True)
    arrays = planned(backend, inputs.case, arrays) if operation is DECODE else arrays
    out, lse = operation.run(backend, inputs.case, arrays | {"q": np.full_like(arrays["q"], np.nan)})
    assert not np.count_nonzero(out)
    assert np.isneginf(lse).all()


@slow_cases("paged_decode-mosaic")
@both()
@in_every_run("xla", mosaic=["paged_decode"])
def test_an_absent_page_between_others_of_a_tile(operation: Operation, backend: Backend) -> None:
    inputs = draw(backend, replace(CARRIER, kv_lens=(128,) * 7, q_lens=(1,) * 7))
    inputs.tables[..., 1] = PAGE_NONE
    inputs.visible[..., PS : 2 * PS] = False
    check(operation, backend, inputs, clean=False)


# --- sizes


LARGE_DECODE = PagedCase(
    tuple(range(0, 2200, 240)), page_size=16, pages_per_row=136, num_pages=800, head_windows=((FULL, 0), (900, 20))
)
LARGE_PREFILL = PagedCase(
    (900, 0, 300, 33),
    (200, 0, 300, 1),
    tokens=512,
    page_size=16,
    pages_per_row=64,
    num_pages=120,
    head_windows=((FULL, 0), (400, 20)),
)


@both(backends.is_compiled_and_lean)
@in_every_run(xla=["paged_decode"])
def test_large_tiles(operation: Operation, backend: Backend) -> None:
    """Results of the default configuration equal `reference`.

    The default configuration (tuned or heuristic) has larger tiles of tokens and larger groups of sequences than the
    configuration of other tests. Sequences are long enough for several of these tiles.
    """
    inputs = draw(backend, LARGE_DECODE if operation is DECODE else LARGE_PREFILL)
    arrays = operation.arguments(inputs)
    got = operation.run(backends.as_users_get(backend), inputs.case, arrays)
    want = operation.run(backends.BACKENDS[0], inputs.case, arrays)
    harness.assert_attention_close(got, want, backend.variant.tolerance(inputs.case.dtype))


@every_backend("paged_prefill", backends.is_compiled_and_lean)
@in_every_run()
def test_seventy_thousand_tokens(backend: Backend) -> None:
    """A call may have more query tokens than 65,535, the maximum of the second and third dimension of a GPU grid. The
    sequences are prompts with and without a cached prefix.
    """
    rng, window, page_size, head_dim = harness.fresh_rng(), 16, 16, 8
    kv_lens, q_lens = (60_010, 9_000, 1_500), (60_000, 9_000, 1_000)
    num_pages = [-(-n // page_size) for n in kv_lens]
    ids = np.split(rng.permutation(np.arange(1, sum(num_pages) + 1)).astype(np.int32), np.cumsum(num_pages)[:-1])
    tables = np.stack([np.pad(row, (0, max(num_pages) - row.size), constant_values=harness.GARBAGE) for row in ids])
    k, v = (harness.normal(rng, (sum(num_pages) + 1, 1, page_size, head_dim), np.float32) for _ in "kv")
    q = harness.normal(rng, (sum(q_lens), 2, head_dim), np.float32)
    arrays = {
        "q": q,
        "kv": PagedKV(jnp.asarray(k), jnp.asarray(v)),
        "block_tables": tables,
        "cu_q_lens": np.cumsum([0, *q_lens], dtype=np.int32),
        "kv_lens": np.array(kv_lens, np.int32),
    }
    got = backends.call(paged_prefill, backends.as_users_get(backend), arrays, return_lse=True, window=window)
    want = []
    for row, kv_len, new in zip(ids, kv_lens, np.split(q, np.cumsum(q_lens)[:-1]), strict=True):
        keys, values = (x[row, 0].reshape(-1, head_dim)[:kv_len].astype(np.float64) for x in (k, v))
        want.append(windowed_attention(new.astype(np.float64), keys, values, window))
    out, lse = (np.concatenate(x) for x in zip(*want, strict=True))
    harness.assert_attention_close(got, (out, lse), backend.variant.tolerance(np.float32))


def windowed_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> Result:
    """Return output and LSE of the queries [n, H, D] of the newest tokens of one sequence, whose keys and values are
    [K, D]. Each query sees `window` keys.
    """
    position = np.arange(len(k) - len(q), len(k))
    seen = position[:, None] - np.arange(window)  # [n, window], positions of visible keys, newest first
    scores = np.einsum("nhd,nwd->nhw", q, k[np.maximum(seen, 0)]) * q.shape[-1] ** -0.5
    scores = np.where((seen >= 0)[:, None], scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("nhw,nwd->nhd", weights / total, v[np.maximum(seen, 0)]), (highest + np.log(total))[..., 0]


# --- transformations


SMALL = replace(SAMPLE, kv_lens=(0, 37), q_lens=(0, 1), pages_per_row=4, num_pages=9, kv_heads=1, q_heads=2, tokens=4)
SMALL = replace(SMALL, head_windows=((9, 1),))


def transformed(operation: Operation, backend: Backend) -> tuple[harness.Jitted, dict[str, Any], Any]:
    """Return the call, its arguments and the tolerances."""
    inputs = draw(backend, SMALL)
    arrays = operation.arguments(inputs)
    arrays = planned(backend, inputs.case, arrays) if operation is DECODE else arrays
    tolerances = backend.variant.tolerance(inputs.case.dtype)
    return backends.compiled(operation.function, backend, return_lse=True), arrays, tolerances


@both()
@in_every_run(xla=["paged_decode"])
def test_repeats_are_bitwise_equal(operation: Operation, backend: Backend) -> None:
    inputs = draw(backend, SAMPLE)
    arrays = operation.arguments(inputs)
    arrays = planned(backend, inputs.case, arrays) if operation is DECODE else arrays
    call = backends.compiled(operation.function, backend, return_lse=True, **inputs.case.static)
    transformations.assert_repeats(call, arrays, backend.repeats)


@pytest.mark.slow
@both()
@in_every_run(xla=["paged_prefill"])
def test_scan_with_a_donated_cache(operation: Operation, backend: Backend) -> None:
    transformations.assert_scans(*transformed(operation, backend))


@pytest.mark.slow
@slow_cases("paged_decode-mosaic")
@both()
@in_every_run(xla=["paged_decode"], mosaic=["paged_decode"])
def test_vmap(operation: Operation, backend: Backend) -> None:
    call, arrays, tolerances = transformed(operation, backend)
    _, others, _ = transformed(operation, backend)
    transformations.assert_vmaps(call, [arrays, others], tolerances, over="q")


@both(backends.is_compiled)
@in_every_run("xla")
def test_export_round_trip(operation: Operation, backend: Backend) -> None:
    call, arrays, _ = transformed(operation, backend)
    transformations.assert_exports(call, arrays)


@slow_cases("paged_prefill-xla")
@both()
@in_every_run("reference", "xla")
def test_values_do_not_retrace(operation: Operation, backend: Backend) -> None:
    cases = [paged_cases.VALUES[name] for name in ("mixed lengths", "all idle", "windows and absent pages")]
    calls = [operation.arguments(draw(backend, case)) for case in cases]
    transformations.assert_traced_once(operation.function, backend.variant, calls)


# --- compiled programs


def big(operation: Operation, dtype: Any, scales: Any = None) -> dict[str, Any]:
    """Return the shapes of a call whose pool is larger than all other arrays."""
    spec = kv_cache_spec(num_pages=8192, page_size=16, num_kv_heads=2, head_dim=32, dtype=dtype, scales=scales)
    packed = operation is PREFILL
    arrays = {
        "q": jax.ShapeDtypeStruct((64, 4, 32) if packed else (4, 1, 4, 32), jnp.float32 if scales else dtype),
        "kv": jax.eval_shape(lambda: PagedKV.allocate(spec)),
        "block_tables": jax.ShapeDtypeStruct((4, 64), jnp.int32),
        "kv_lens": jax.ShapeDtypeStruct((4,), jnp.int32),
    }
    return arrays | ({"cu_q_lens": jax.ShapeDtypeStruct((5,), jnp.int32)} if packed else {})


@slow_cases("int8-4-paged_prefill-xla")
@both(backends.is_compiled_and_lean)
@pytest.mark.parametrize(
    ("dtype", "scales"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.int8, 4), (jnp.float8_e4m3fn, 16)]
)
@in_every_run(xla=["float32-None-paged_decode", "int8-4-paged_decode", "int8-4-paged_prefill"])
def test_no_copy_of_the_cache(operation: Operation, backend: Backend, dtype: Any, scales: Any) -> None:
    """A compiled loop of decode or prefill calls does not copy the donated cache, which is the carry of the loop."""

    def loop(kv: PagedKV, **arrays: Any) -> Any:
        def step(kv: PagedKV, _: None) -> Any:
            return kv, operation.function(kv=kv, **arrays, implementation=backend.name)

        return jax.lax.scan(step, kv, length=3)

    shapes = big(operation, dtype, scales)
    harness.assert_stays_put(jax.jit(loop, donate_argnames="kv"), shapes["kv"].k, **shapes)


@both(backends.is_compiled_and_lean)
@in_every_run(xla=["paged_decode"])
def test_no_host_callbacks_and_a_named_scope(operation: Operation, backend: Backend) -> None:
    call = backends.compiled(operation.function, backend)
    harness.assert_no_host_callbacks(call, **big(operation, jnp.float32))
    assert operation.name in harness.scope_names(call, **big(operation, jnp.float32))
