"""Contract of `ragged_paged_attention`, which writes the keys and values of new tokens and computes attention to all
tokens of each sequence.

A step may have any mix of decode tokens and prompt chunks, and its arrays may be padded in several ways.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn import (
    HeadWindow,
    PagedKV,
    explain,
    from_nhd,
    kv_cache_spec,
    paged_decode,
    paged_prefill,
    ragged_paged_attention,
    slot_mapping,
    to_nhd,
    token_tables,
    view_fused,
    view_nhd,
    write_kv,
)
from pallas_attn.types import QMAX
from tests.contract import backends, naive, tpu_inference, transformations
from tests.contract.backends import BACKENDS, Backend, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

S, P, PS, N, T, HQ, HKV, D = 5, 4, 16, 24, 40, 4, 2, 64
REFERENCE, XLA = (next(backend for backend in BACKENDS if backend.name == name) for name in ("reference", "xla"))
every_backend = functools.partial(backends.every_backend, "paged_prefill")


@dataclasses.dataclass(frozen=True)
class Step:
    """Random inputs of one call.

    Attributes:
      new, lens: numbers of new tokens and of all tokens of each sequence. The call has S sequences; the rest are
        padding.
      k, v: keys and values of the new tokens. Padding tokens have NaN or infinities.
      pages: pages of keys and of values before the call. Cache slots without a token have NaN or infinities.
      tables: [S, P]. Entries of pages without a token are invalid page ids.
    """

    new: tuple[int, ...]
    lens: tuple[int, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: tuple[np.ndarray, ...]
    tables: np.ndarray

    @staticmethod
    def draw(
        new: tuple[int, ...], lens: tuple[int, ...], dtype: str, rng: np.random.Generator, head_dim: int = D
    ) -> Step:
        def packed(heads: int) -> np.ndarray:
            x = (harness.HALF_SCALE * rng.standard_normal((T, heads, head_dim))).astype(dtype)
            return harness.poison(rng, x, np.arange(T) >= sum(new))

        tables = rng.permutation(N)[: S * P].reshape(S, P).astype(np.int32)
        held = np.zeros((N, PS), bool)
        for s, (row, count, length) in enumerate(zip(tables, new, lens, strict=False)):
            token = np.arange(length - count)
            held[row[token // PS], token % PS] = True
            tables[s, -(-length // PS) :] = harness.GARBAGE
        tables[len(new) :] = harness.GARBAGE
        x = (harness.HALF_SCALE * rng.standard_normal((2, N, PS, HKV, head_dim))).astype(dtype)
        k, v = (np.moveaxis(harness.poison(rng, pages, ~held), 1, 2) for pages in x)
        return Step(new, lens, (8 * packed(HQ)).astype(dtype), packed(HKV), packed(HKV), (k, v), tables)

    def arguments(self, behind: str = "zeros", *, distribution: bool = False) -> dict[str, Any]:
        """Return the arguments of the call, padded to S sequences.

        Prefix sums and lengths of padding are zeros, the last sum ("ends"), or invalid numbers ("garbage"). Engines use
        all of these paddings.
        """
        sums, missing = np.cumsum((0, *self.new), dtype=np.int32), S - len(self.new)
        fill = {"zeros": 0, "ends": sums[-1], "garbage": harness.GARBAGE}[behind]
        arguments = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "kv": PagedKV(*(jnp.asarray(x) for x in self.pages)),
            "kv_lens": np.concatenate([self.lens, np.full(missing, 0 if behind == "zeros" else fill)]).astype(np.int32),
            "page_indices": self.tables.reshape(-1),
            "cu_q_lens": np.concatenate([sums, np.full(missing, fill)]).astype(np.int32),
        }
        if distribution:
            decodes = next((s for s, n in enumerate(self.new) if n != 1), len(self.new))
            arguments["distribution"] = np.array([decodes, decodes, len(self.new)], np.int32)
        return arguments

    def written(self) -> tuple[np.ndarray, ...]:
        """Return the expected pages after the call."""
        pages, start = tuple(x.copy() for x in self.pages), 0
        for row, count, length in zip(self.tables, self.new, self.lens, strict=False):
            token = np.arange(length - count, length)
            for x, new in zip(pages, (self.k, self.v), strict=True):
                x[row[token // PS], :, token % PS] = new[start : start + count]
            start += count
        return pages

    def expected(self, *, causal: bool = True, window: int | None = None, **options: Any) -> np.ndarray:
        """Return the attention output [T, Hq, D] over the pages after the call, computed in float64."""
        out, start, pages = np.zeros(self.q.shape), 0, self.written()
        for row, count, length in zip(self.tables, self.new, self.lens, strict=False):
            token = np.arange(length)
            k, v = (x[row[token // PS], :, token % PS] for x in pages)
            for i in range(count):
                end = length - count + i + 1 if causal else length
                seen = slice(max(0, end - window) if window else 0, end)
                out[start + i], _ = naive.attend(self.q[start + i], k[seen], v[seen], **options)
            start += count
        return out


MIXES = {
    "decodes, then chunks": ((1, 1, 9, 16), (33, 1, 9, 64)),
    "a decode between chunks": ((7, 1, 12, 1, 3), (20, 17, 12, 64, 35)),
    "decodes alone": ((1, 1, 1, 1, 1), (1, 16, 17, 64, 40)),
    "chunks alone": ((5, 16, 19), (64, 16, 20)),
    "idle between": ((0, 1, 0, 6), (9, 30, 0, 38)),
    "no sequence": ((), ()),
    "one token": ((1,), (1,)),
    "no padding": ((T,), (T + 3,)),
}
MIXED = MIXES["a decode between chunks"]
OPTIONS: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 11},
    "a soft cap": {"soft_cap": 2.0},
    "a sink": {"attention_sink": np.linspace(-3, 3, HQ, dtype=np.float32)},
    "all keys": {"causal": False},
}


def run(backend: Backend, arguments: dict[str, Any], **static: Any) -> Any:
    return backends.call(ragged_paged_attention, backend, arguments, **{"sm_scale": 0.2} | static)


def check(backend: Backend, step: Step, got: tuple[Any, Any], **options: Any) -> None:
    """Check the output, and that the call wrote the new tokens and changed nothing else in the cache."""
    out, kv = got
    harness.assert_same_bits((kv.k, kv.v), step.written())
    assert out.dtype == step.q.dtype
    assert not np.asarray(out)[sum(step.new) :].any()
    options.setdefault("sm_scale", 0.2)
    want = step.expected(**options)
    harness.assert_close("output", out, want, backend.variant.tolerance(step.q.dtype)[0])


# --- results of a step


@slow_cases("xla-a decode between chunks")
@slow_cases("xla-decodes, then chunks", "triton-a decode between chunks")
@pytest.mark.parametrize("name", MIXES)
@every_backend()
@in_every_run("xla", triton=["a decode between chunks"])
def test_mixes(backend: Backend, name: str) -> None:
    step = Step.draw(*MIXES[name], backend.dtype, harness.fresh_rng())
    check(backend, step, run(backend, step.arguments("garbage", distribution=True)))


@every_backend()
@in_every_run()
@unsupported(mosaic_sm100="takes heads of width")
def test_wide_heads(backend: Backend) -> None:
    backend = backends.for_width(backend, 512)
    step = Step.draw(*MIXED, backend.dtype, harness.fresh_rng(), head_dim=512)
    got = run(backend, step.arguments("garbage", distribution=True), sliding_window=30, sm_scale=0.05)
    check(backend, step, got, window=30, sm_scale=0.05)


@pytest.mark.slow
@every_backend()
@unsupported(mosaic_sm100={"separate": "takes pages with heads before tokens", "fused": "arrays of their own"})
@pytest.mark.parametrize("kind", ["separate", "fused"])
def test_tokens_before_heads(backend: Backend, kind: str) -> None:
    """Pages of layout [N, ps, Hkv, D] work without a copy, as pages of one token each."""
    step = Step.draw(*MIXED, backend.dtype, harness.fresh_rng())
    arguments = step.arguments("garbage", distribution=True)
    pages = [jnp.asarray(np.moveaxis(x, 1, 2)) for x in step.pages]
    fused = kind == "fused"
    arguments["kv"] = view_fused(jnp.concatenate(pages, axis=-1), HKV) if fused else view_nhd(*pages)
    arguments["page_indices"] = token_tables(jnp.asarray(step.tables), page_size=PS)
    out, kv = run(backend, arguments)
    written = (kv.k[..., :D], kv.k[..., D:]) if fused else (kv.k, kv.v)
    check(backend, step, (out, PagedKV(*(jnp.moveaxis(x.reshape(N, PS, HKV, D), 2, 1) for x in written))))


@pytest.mark.slow
def test_pages_with_tokens_before_heads_are_not_copied() -> None:
    """A step over pages of layout [N, ps, Hkv, D] needs less temporary memory than the keys, so it
    does not copy pages.
    """
    pages = jnp.zeros((1024, PS, HKV, D), jnp.bfloat16)
    tables, lens = jnp.zeros((2, 4), jnp.int32), jnp.array([33, 9], jnp.int32)
    new = jnp.ones((2, HKV, D), jnp.bfloat16)

    def step(k: Any, v: Any, *, view: bool) -> Any:
        kv = view_nhd(k, v) if view else from_nhd(k, v)
        entries = token_tables(tables, page_size=PS) if view else tables
        out, kv = ragged_paged_attention(
            new, new, new, kv, lens, entries, jnp.array([0, 1, 2], jnp.int32), implementation="xla"
        )
        return out, *((kv.k.reshape(k.shape), kv.v.reshape(v.shape)) if view else to_nhd(kv)[:2])

    def beside(*, view: bool) -> int:
        jitted = jax.jit(functools.partial(step, view=view), donate_argnums=(0, 1))
        analysis: Any = jitted.lower(pages, pages).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert beside(view=True) < pages.nbytes <= beside(view=False)


@pytest.mark.slow
@slow_cases("xla-all keys")
@pytest.mark.parametrize("name", OPTIONS)
@every_backend()
@in_every_run(xla=["a soft cap", "all keys"])
def test_options(backend: Backend, name: str) -> None:
    step, options = Step.draw(*MIXED, backend.dtype, harness.fresh_rng()), dict(OPTIONS[name])
    arrays = {key: options.pop(key) for key in ("attention_sink",) if key in options}
    got = run(backend, step.arguments() | arrays, **options)
    names = {"sliding_window": "window", "attention_sink": "sinks"}
    check(backend, step, got, **{names.get(key, key): value for key, value in OPTIONS[name].items()})


@pytest.mark.slow
@every_backend()
@in_every_run("xla")
def test_bfloat16(backend: Backend) -> None:
    step = Step.draw(*MIXED, "bfloat16", harness.fresh_rng())
    check(backend, step, run(backend, step.arguments()))
    assert run(backend, step.arguments(), out_dtype=jnp.float32)[0].dtype == jnp.float32


@pytest.mark.slow
def test_padding_changes_no_bit() -> None:
    step = Step.draw((1, 9, 1, 3), (33, 9, 64, 20), "float32", harness.fresh_rng())
    want = run(XLA, step.arguments())
    for behind, distribution in (("zeros", True), ("ends", False), ("ends", True), ("garbage", True)):
        harness.assert_same_bits(run(XLA, step.arguments(behind, distribution=distribution)), want)
    tables = {"page_indices": step.tables}
    harness.assert_same_bits(run(XLA, step.arguments() | tables), want)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the numbers of new tokens and of all tokens of up to S sequences. Many sequences have one new token."""
    new = draw(st.lists(st.one_of(st.just(1), st.integers(0, T // S)), max_size=S))
    return tuple(new), tuple(count + draw(st.integers(0, P * PS - count)) for count in new)


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(mix=traffic(), seed=st.integers(0, 2**32 - 1), behind=st.sampled_from(["zeros", "ends", "garbage"]))
def test_any_traffic(mix: tuple[tuple[int, ...], tuple[int, ...]], seed: int, behind: str) -> None:
    """The result equals attention in NumPy and the result of `reference`, for random steps."""
    step = Step.draw(*mix, "float32", np.random.default_rng(seed))
    reference = run(REFERENCE, step.arguments(behind, distribution=True))
    got = run(XLA, step.arguments(behind, distribution=True))
    harness.assert_same_bits(got[1], reference[1])
    harness.assert_close("output", got[0], reference[0], harness.F32_OUT)
    check(XLA, step, got)


@pytest.mark.slow
def test_decodes_have_the_bits_of_paged_decode() -> None:
    new, lens = MIXED
    step = Step.draw(new, lens, "float32", harness.fresh_rng())
    out, kv = run(XLA, step.arguments())
    single, first = np.array(new) == 1, np.cumsum((0, *new))[:-1]
    want = backends.call(
        paged_decode,
        XLA,
        {
            "q": step.q[first][:, None],
            "kv": kv,
            "block_tables": step.tables,
            "kv_lens": np.where(single, lens, 0).astype(np.int32),
        },
        sm_scale=0.2,
    )
    harness.assert_same_bits(np.asarray(out)[first[single]], np.asarray(want)[single, 0])


@slow_cases("shape0", "shape1")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_number_of_sequences_alone(shape: tuple[int, ...]) -> None:
    step = Step.draw(*MIXED, "float32", harness.fresh_rng())
    arguments = step.arguments("garbage", distribution=True)
    alone = arguments | {"distribution": np.reshape(arguments["distribution"][2], shape)}
    harness.assert_same_bits(run(XLA, alone), run(XLA, arguments))


def test_distribution_makes_prefills_of_single_tokens() -> None:
    new, lens = MIXED
    step = Step.draw(new, lens, "float32", harness.fresh_rng())
    arguments = step.arguments() | {"distribution": np.array([0, S, S], np.int32)}
    out, kv = run(XLA, arguments)
    names = {"q": "q", "cu_q_lens": "cu_q_lens", "kv_lens": "kv_lens"}
    arrays = {name: arguments[key] for name, key in names.items()} | {"kv": kv, "block_tables": step.tables}
    harness.assert_same_bits(out, backends.call(paged_prefill, XLA, arrays, sm_scale=0.2))


# --- the cache


def test_without_an_update_the_pages_hold_the_new_tokens() -> None:
    step = Step.draw(*MIXED, "float32", harness.fresh_rng())
    out, kv = run(XLA, step.arguments())
    arguments = step.arguments() | {"kv": kv, "k": None, "v": None}
    harness.assert_same_bits(run(XLA, arguments, update_kv_cache=False), (out, kv))


SCALES = {"a number": (0.5, 0.25), "an array": (np.float32(0.5), np.float32(0.25)), "heads": ([0.5, 2.0], [0.25, 1.0])}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
@every_backend()
@in_every_run(xla=["float8_e4m3fn-an array"])
def test_quantised_tokens(backend: Backend, dtype: Any, name: str) -> None:
    """Keys and values that are 8-bit already are stored unchanged. Attention multiplies them by `k_scale` and
    `v_scale`.
    """
    rng = harness.fresh_rng()
    plain, scales = Step.draw(*MIXED, backend.dtype, rng), [np.asarray(scale, np.float32) for scale in SCALES[name]]
    count = sum(plain.new)
    drawn = [rng.integers(-127, 128, (count, HKV, D)).astype(dtype) for _ in range(2)]
    k, v = (np.concatenate([x, np.zeros((T - count, HKV, D), dtype)]) for x in drawn)
    pools = tuple(rng.integers(-127, 128, (N, HKV, PS, D)).astype(dtype) for _ in range(2))
    step = dataclasses.replace(plain, k=k, v=v, pages=pools)
    kv = PagedKV(*map(jnp.asarray, pools), *(jnp.full((HKV,), np.nan, jnp.float32) for _ in range(2)))
    arrays, static = step.arguments() | {"kv": kv}, {}
    (static if name == "a number" else arrays).update(
        zip(("k_scale", "v_scale"), SCALES[name] if name == "a number" else scales, strict=True)
    )
    out, after = run(backend, arrays, sm_scale=0.002, **static)
    harness.assert_same_bits((after.k, after.v), step.written())
    harness.assert_same_bits((after.k_scale, after.v_scale), (kv.k_scale, kv.v_scale))

    def meant(x: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
        shape = [1] * x.ndim
        shape[axis] = -1
        return x.astype(np.float32) * scale.reshape(shape)

    of_values = dataclasses.replace(
        step,
        k=meant(k, scales[0], 1),
        v=meant(v, scales[1], 1),
        pages=tuple(meant(pool, scale, 1) for pool, scale in zip(pools, scales, strict=True)),
    )
    absolute = 1e-3 if step.q.dtype == np.float32 else 0.5  # values are up to 127, so errors are larger
    tolerance = dataclasses.replace(backend.variant.tolerance(step.q.dtype)[0], absolute=absolute)
    harness.assert_close("output", out, of_values.expected(sm_scale=0.002), tolerance)


@pytest.mark.slow
def test_plain_tokens_are_quantised_by_the_cache_s_own_scales() -> None:
    rng = harness.fresh_rng()
    step = Step.draw(*MIXED, "float32", rng)
    sizes = {"num_pages": N, "page_size": PS, "num_kv_heads": HKV, "head_dim": D}
    arguments = step.arguments() | {"kv": PagedKV.allocate(kv_cache_spec(**sizes, dtype=jnp.int8, scales=4))}
    lengths = {name: jnp.asarray(arguments[name]) for name in ("cu_q_lens", "kv_lens")}
    slots = slot_mapping(jnp.asarray(step.tables), **lengths, page_size=PS, length=T)
    arrays = {"kv": arguments["kv"], "k": step.k, "v": step.v, "slots": slots}
    want = backends.call(write_kv, XLA, arrays)
    _, kv = run(XLA, arguments)
    harness.assert_same_bits(kv, want)


@pytest.mark.slow
def test_tables_of_heads() -> None:
    """Test head-wise tables [S, Hkv, P], whose entries are the ids of page rows (one page of one KV head), together
    with a window per head.
    """
    step = Step.draw(*MIXED, "float32", harness.fresh_rng())
    rows = np.where(step.tables < N, step.tables, -1)[:, None] * HKV + np.arange(HKV)[:, None]
    window = HeadWindow(jnp.full((HKV,), 11, jnp.int32), jnp.zeros((HKV,), jnp.int32))
    heads = {"page_indices": rows.astype(np.int32), "sliding_window": window}
    out, kv = run(XLA, step.arguments() | heads)
    check(XLA, step, (out, kv), window=11)


@slow_cases("int8")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_donated_cache_stays_where_it_is(dtype: Any) -> None:
    """A compiled loop over steps does not copy the donated cache. `distribution` is an array on the device."""
    spec = kv_cache_spec(
        num_pages=4096,
        page_size=PS,
        num_kv_heads=HKV,
        head_dim=D,
        dtype=dtype,
        scales="head" if dtype == jnp.int8 else None,
    )
    kv = jax.eval_shape(lambda: PagedKV.allocate(spec))
    rest = Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments("garbage", distribution=True)
    rest = jax.tree.map(jnp.asarray, {name: x for name, x in rest.items() if name != "kv"})

    def steps(kv: PagedKV, rest: dict[str, Any]) -> Any:
        def one(kv: PagedKV, distribution: jax.Array) -> Any:
            with XLA.variant.settings():
                changed = rest | {"distribution": distribution}
                return ragged_paged_attention(**changed, kv=kv, implementation="xla")[::-1]

        return jax.lax.scan(one, kv, jnp.stack([rest["distribution"], rest["distribution"] - 1]))

    harness.assert_stays_put(jax.jit(steps, donate_argnums=0), kv.k, kv, rest)


# --- transformations, errors and empty inputs


@slow_cases("own1")
@pytest.mark.parametrize("own", [("q", "k", "v"), ("kv",), ("page_indices",), ("kv_lens", "distribution")])
def test_inside_a_shard_map(own: tuple[str, ...]) -> None:
    """Tracing succeeds inside `jax.shard_map` with its default check of varying axes. The arguments `own` are split."""
    step = Step.draw((1, 9, 1, 3, 5), (33, 9, 64, 20, 5), "float32", harness.fresh_rng())
    arrays = jax.tree.map(jnp.asarray, step.arguments() | {"distribution": np.array([1, 1, S], np.int32)})

    def function(arrays: dict[str, Any]) -> Any:
        with XLA.variant.settings():
            return ragged_paged_attention(**arrays, sm_scale=0.2, implementation="xla")

    split = transformations.inside_a_shard_map(function, arrays, own)
    if own == ("kv",):
        harness.assert_same_bits(jax.jit(split)(arrays), jax.jit(function)(arrays))


def test_steps_of_one_shape_are_traced_once() -> None:
    traces = []

    @jax.jit
    def call(arrays: dict[str, Any]) -> Any:
        traces.append(None)
        return ragged_paged_attention(**arrays, implementation="xla")

    for name in ("decodes alone", "chunks alone", "no sequence"):
        call(Step.draw(*MIXES[name], "float32", harness.fresh_rng()).arguments("garbage", distribution=True))
    assert len(traces) == 1


@pytest.mark.usefixtures("unchecked_shapes")
def test_without_tokens_or_sequences() -> None:
    step = Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments()
    no_tokens = step | {name: step[name][:0] for name in ("q", "k", "v")} | {"cu_q_lens": np.zeros(S + 1, np.int32)}
    no_sequences = step | {"kv_lens": np.zeros(0, np.int32), "page_indices": [], "cu_q_lens": np.zeros(1, np.int32)}
    for arguments in (no_tokens, no_sequences):
        out, kv = ragged_paged_attention(**arguments)
        assert not np.asarray(out).any()
        harness.assert_same_bits(kv, step["kv"])


def test_gradients_are_refused() -> None:
    arrays = jax.tree.map(jnp.asarray, Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments())
    with pytest.raises(NotImplementedError, match="ragged_paged_attention has no gradient"):
        jax.grad(lambda q: ragged_paged_attention(**(arrays | {"q": q}))[0].sum())(arrays["q"])


def test_explanation() -> None:
    arguments = Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments()
    explanation = explain("ragged_paged_attention", **jax.tree.map(jnp.asarray, arguments))
    assert (explanation.op, explanation.chosen) == ("ragged_paged_attention", "xla")


E5M2 = jnp.zeros((N, HKV, PS, D), jnp.float8_e5m2)
FP8 = jnp.zeros((N, HKV, PS, D), jnp.float8_e4m3fn)
GROUPS = jnp.ones((N, HKV, 4), jnp.float32)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q": ({"q": np.zeros((T, HQ, D), np.int32)}, "q: expected dtype"),
    "k": ({"k": np.zeros((T, 1, D), np.float32)}, r"k: expected shape \[T=40, Hkv=2, D=64\], got \[40, 1, 64\]"),
    "no v": ({"v": None}, "v: expected the new tokens, or update_kv_cache=False; got None"),
    "quantised k": ({"k": np.zeros((T, HKV, D), np.int8)}, "k: expected dtype .*, got int8"),
    "e5m2": ({"kv": PagedKV(E5M2, E5M2)}, "kv.k_scale: a float8_e5m2 cache needs scales, got None"),
    "kv_lens": ({"kv_lens": np.zeros(S, np.float32)}, "kv_lens: expected dtype int32"),
    "page_indices": (
        {"page_indices": np.zeros(S * P + 1, np.int32)},
        r"page_indices: expected \[S·P\] with S=5 and P of at least 1, or \[S, P\]; got \[21\]",
    ),
    "flat page_indices": ({"page_indices": np.zeros(S * P)}, "page_indices: expected dtype int32, got float64"),
    "cu_q_lens": ({"cu_q_lens": np.zeros(S, np.int32)}, r"cu_q_lens: expected shape \[S\+1=6\], got \[5\]"),
    "distribution": ({"distribution": [1, 2]}, r"distribution: expected shape \[3\], got \[2\]"),
    "distribution of ranks": ({"distribution": [[1]]}, r"distribution: expected shape \[1\], got \[1, 1\]"),
    "sm_scale": ({"sm_scale": None}, "sm_scale: expected a positive finite number, got None"),
    "causal": ({"causal": 1}, "causal: expected True or False"),
    "update": ({"update_kv_cache": None}, "update_kv_cache: expected True or False"),
    "sliding_window": ({"sliding_window": 0}, "sliding_window: expected an int from 1"),
    "a window without causality": (
        {"sliding_window": 3, "causal": False},
        "sliding_window: expected None with causal=False",
    ),
    "soft_cap": ({"soft_cap": -1}, "soft_cap: expected a positive finite number"),
    "attention_sink": ({"attention_sink": np.zeros(3, np.float32)}, r"attention_sink: expected shape \[Hq=4\]"),
    "k_scale of a plain cache": ({"k_scale": 0.5}, "k_scale: expected None with a float32 cache, which has no scales"),
    "v_scale beside groups": (
        {"kv": PagedKV(FP8, FP8, GROUPS, GROUPS), "v_scale": 0.5},
        "v_scale: expected None, because kv has scales of token groups",
    ),
    "quantised tokens beside groups": (
        {"kv": PagedKV(FP8, FP8, GROUPS, GROUPS), "k": np.zeros((T, HKV, D), FP8.dtype)},
        "k: expected 16-bit or 32-bit values for a cache with scales of token groups, got float8_e4m3fn",
    ),
    "k_scale": ({"kv": PagedKV(FP8, FP8), "k_scale": -1.0, "v_scale": 1.0}, "k_scale: expected a positive finite"),
    "no scale": ({"kv": PagedKV(FP8, FP8), "k_scale": 1.0}, "kv.v_scale: a float8_e4m3fn cache needs scales, got None"),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    changed, message = ERRORS[name]
    arguments = Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments()
    with pytest.raises(ValueError, match=f"^{message}"):
        ragged_paged_attention(**(arguments | changed))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_queries_of_8_bits(dtype: Any) -> None:
    """A call with `q_scale` divides queries by the scale and rounds them to 8 bits. The result equals a call with
    queries that the caller has rounded. The step has decode tokens and prompt chunks.
    """
    arguments = jax.tree.map(jnp.asarray, Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments())
    pages = [jnp.nan_to_num(x, posinf=1, neginf=1).astype(dtype) for x in (arguments["kv"].k, arguments["kv"].v)]
    arguments["kv"] = PagedKV(*pages, *[jnp.full((HKV,), 0.02, jnp.float32)] * 2)
    limit, q_scale = QMAX[jnp.dtype(dtype)], np.float32(0.01 if dtype == jnp.float8_e4m3fn else 1e-4)
    rounded = (np.asarray(arguments["q"]) / q_scale).clip(-limit, limit).astype(dtype)
    got, kv = ragged_paged_attention(**arguments, q_scale=float(q_scale))
    meant = jnp.asarray(rounded.astype(np.float32) * q_scale)
    harness.assert_close("output", got, ragged_paged_attention(**arguments | {"q": meant})[0], harness.F32_OUT)
    given = arguments | {"q": jnp.asarray(rounded), "kv": kv, "update_kv_cache": False}
    again, _ = ragged_paged_attention(**given, q_scale=float(q_scale), out_dtype="float32")
    harness.assert_close("output", again, got, harness.F32_OUT)


@pytest.mark.slow
def test_a_scale_of_queries_needs_a_cache_of_8_bits() -> None:
    """`q_scale` has no effect with a cache of 16 or 32 bits, and is not supported with an int8 cache."""
    arguments = jax.tree.map(jnp.asarray, Step.draw(*MIXED, "float32", harness.fresh_rng()).arguments())
    harness.assert_same_bits(ragged_paged_attention(**arguments, q_scale=0.5), ragged_paged_attention(**arguments))
    pages = jnp.zeros(arguments["kv"].k.shape, jnp.int8)
    arguments["kv"] = PagedKV(pages, pages, *[jnp.ones((HKV,), jnp.float32)] * 2)
    with pytest.raises(NotImplementedError, match="q_scale: takes a cache in float8"):
        ragged_paged_attention(**arguments, q_scale=0.5)


# --- comparison with tpu-inference


UNUSED = ("m_block_sizes", "num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")


def theirs(
    queries: Any, keys: Any, values: Any, kv_cache: Any, *rest: Any, use_causal_mask: bool = True, **options: Any
) -> Any:
    """Call `ragged_paged_attention` with the arguments of tpu-inference, which include the cache as one array.

    tpu-inference also writes the columns that pad a head, with zeros, so new tokens are padded with zeros.
    """
    options = {name: x for name, x in options.items() if name not in UNUSED}
    options |= {"causal": use_causal_mask, "attention_sink": rest[4] if len(rest) > 4 else None}
    width = queries.shape[-1]
    missing = 0 if width == 64 else kv_cache.shape[-1] - width
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for x in (queries, keys, values))
    metadata = rest[:4]
    out, kv_cache = ragged_paged_attention(q, k, v, kv_cache, *metadata, implementation="xla", **options)
    return out[..., :width], kv_cache


def theirs_of_64(queries: Any, keys: Any, values: Any, kv_cache: Any, *rest: Any, **options: Any) -> Any:
    """Call `theirs` for heads of 64 columns, whose cache may have padded heads. One head with one padded head has the
    shape of keys and values that alternate, so heads of zeros are appended.
    """
    heads, given = math.prod(kv_cache.shape[2:4]), queries.shape[1]
    missing = heads - keys.shape[1] if heads == 2 * keys.shape[1] else 0
    queries, keys, values = (
        jnp.pad(x, ((0, 0), (0, missing * x.shape[1] // keys.shape[1]), (0, 0))) for x in (queries, keys, values)
    )
    if missing and len(rest) > 4 and rest[4] is not None:
        rest = (*rest[:4], jnp.pad(rest[4], (0, given)))
    out, kv_cache = theirs(queries, keys, values, kv_cache, *rest, **options)
    return out[:, :given], kv_cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "case", "call"),
    [
        ("v3", "ragged_paged_attention", "RaggedPagedAttentionKernelTest", theirs),
        ("v3_hd64", "ragged_paged_attention_hd64", "RaggedPagedAttentionHeadDim64KernelTest", theirs_of_64),
    ],
)
def test_the_grid_of_tpu_inference(file: str, name: str, case: str, call: Callable[..., Any]) -> None:
    """Run the tests of tpu-inference with its kernel replaced by our operation. They compare it
    with their reference.
    """
    module = tpu_inference.module(f"tests/kernels/ragged_paged_attention_kernel_{file}_test")
    with mock.patch.object(module, name, call):
        refused = tpu_inference.run(getattr(module, case), "test_ragged_paged_attention_")
    assert not refused, refused
