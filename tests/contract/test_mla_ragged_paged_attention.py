"""Contract of `mla_ragged_paged_attention`, which writes new latents and computes attention to all latents of each
sequence.

A step may have any mix of decode tokens and prompt chunks. The operation divides the new tokens of a sequence into rows
of up to 8 query tokens for the MLA decode kernels; with many heads, a row has fewer tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn import (
    PagedLatent,
    explain,
    latent_cache_spec,
    mla_decode,
    mla_ragged_paged_attention,
    write_latent,
)
from tests.contract import backends, naive, tpu_inference, transformations
from tests.contract.backends import BACKENDS, Backend, all_but, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

S, P, PS, N, T, L, R = 5, 4, 16, 24, 40, 128, 32
REFERENCE, XLA = (next(backend for backend in BACKENDS if backend.name == name) for name in ("reference", "xla"))
every_backend = functools.partial(backends.every_backend, "mla_decode")
HEADS = {"rows of 8": 3, "rows of 3": 20, "rows of 1": 40}  # query tokens per row, and the number of heads


@dataclasses.dataclass(frozen=True)
class Step:
    """Random inputs of one call.

    Attributes:
      new, lens: numbers of new tokens and of all tokens of each sequence. The call has S sequences; the rest are
        padding.
      q: queries [T, Hq, L + R]. Padding tokens have NaN or infinities.
      latents: latents of the new tokens, [T, L + R]. Padding tokens have NaN or infinities.
      pages: pages before the call. Cache slots without a token have NaN or infinities.
      tables: [S, P]. Entries of pages without a token are invalid page ids.
    """

    new: tuple[int, ...]
    lens: tuple[int, ...]
    q: np.ndarray
    latents: np.ndarray
    pages: np.ndarray
    tables: np.ndarray

    @staticmethod
    def draw(new: tuple[int, ...], lens: tuple[int, ...], heads: int, dtype: str, rng: np.random.Generator) -> Step:
        def drawn(scale: float, *shape: int, dead: np.ndarray) -> np.ndarray:
            return harness.poison(rng, (scale * rng.standard_normal(shape)).astype(dtype), dead)

        tables = rng.permutation(N)[: S * P].reshape(S, P).astype(np.int32)
        held = np.zeros((N, PS), bool)
        for s, (row, count, length) in enumerate(zip(tables, new, lens, strict=False)):
            token = np.arange(length - count)
            held[row[token // PS], token % PS] = True
            tables[s, -(-length // PS) :] = harness.GARBAGE
        tables[len(new) :] = harness.GARBAGE
        padding, size = np.arange(T) >= sum(new), harness.HALF_SCALE
        return Step(
            new,
            lens,
            drawn(8 * size, T, heads, L + R, dead=padding),
            drawn(size, T, L + R, dead=padding),
            drawn(size, N, PS, L + R, dead=~held),
            tables,
        )

    def arguments(self, behind: str = "zeros", *, distribution: bool = False) -> dict[str, Any]:
        """Return the arguments of the call, padded to S sequences.

        Prefix sums and lengths of padding are zeros, the last sum ("ends"), or invalid numbers ("garbage"). Engines use
        all of these paddings.
        """
        sums, missing = np.cumsum((0, *self.new), dtype=np.int32), S - len(self.new)
        fill = {"zeros": 0, "ends": sums[-1], "garbage": harness.GARBAGE}[behind]
        arguments = {
            "q_latent": self.q[..., :L],
            "q_rope": self.q[..., L:],
            "new_latent": self.latents[:, :L],
            "new_rope": self.latents[:, L:],
            "cache": PagedLatent(jnp.asarray(self.pages)),
            "kv_lens": np.concatenate([self.lens, np.full(missing, 0 if behind == "zeros" else fill)]).astype(np.int32),
            "page_indices": self.tables.reshape(-1),
            "cu_q_lens": np.concatenate([sums, np.full(missing, fill)]).astype(np.int32),
        }
        return arguments | ({"distribution": np.array([0, 0, len(self.new)], np.int32)} if distribution else {})

    def slots(self) -> np.ndarray:
        """Return the cache slots of the new tokens in packed order."""
        position = [np.arange(length - count, length) for count, length in zip(self.new, self.lens, strict=True)]
        return np.concatenate(
            [row[at // PS] * PS + at % PS for row, at in zip(self.tables, position, strict=False)] or [[]]
        ).astype(int)

    def written(self) -> np.ndarray:
        """Return the expected pages after the call."""
        pages, slots = self.pages.copy(), self.slots()
        pages.reshape(-1, L + R)[slots] = self.latents[: len(slots)]
        return pages

    def expected(self, pages: np.ndarray, window: int = T + P * PS, soft_cap: float | None = None) -> np.ndarray:
        """Return the attention output [T, Hq, L] over the latents in `pages`, computed in float64."""
        out, start = np.zeros((*self.q.shape[:2], L)), 0
        for row, count, length in zip(self.tables, self.new, self.lens, strict=False):
            token = np.arange(length)
            keys = pages[row[token // PS], token % PS][:, None]
            for i in range(count):
                end = length - count + i + 1
                seen = keys[max(0, end - window) : end]
                out[start + i], _ = naive.attend(self.q[start + i], seen, seen[..., :L], 0.2, soft_cap=soft_cap)
            start += count
        return out


MIXES = {
    "decodes, then chunks": ((1, 1, 9, 16), (33, 1, 9, 64)),
    "a decode between chunks": ((7, 1, 12, 1, 3), (20, 17, 12, 64, 35)),
    "decodes alone": ((1, 1, 1, 1, 1), (1, 16, 17, 64, 40)),
    "idle between": ((0, 8, 0, 6), (9, 30, 0, 38)),
    "no sequence": ((), ()),
    "no padding": ((T,), (T + 3,)),
    "a row more than a sequence fills": ((9, 9, 9, 9, 4), (9, 9, 9, 9, 9)),
}
MIXED = MIXES["a decode between chunks"]


def run(backend: Backend, arguments: dict[str, Any], **static: Any) -> Any:
    return backends.call(mla_ragged_paged_attention, backend, arguments, sm_scale=0.2, **static)


def check(backend: Backend, step: Step, got: tuple[Any, Any]) -> None:
    """Check the output, and that the call wrote the new tokens and changed nothing else in the cache."""
    out, cache = got
    harness.assert_same_bits(cache, PagedLatent(jnp.asarray(step.written())))
    assert out.dtype == step.q.dtype
    assert not np.asarray(out)[sum(step.new) :].any()
    harness.assert_close("output", out, step.expected(step.written()), backend.variant.tolerance(step.q.dtype)[0])


# --- results of a step


@slow_cases(
    "xla-decodes, then chunks-rows of 1", "triton-a decode between chunks-rows of 8",
    "triton-a decode between chunks-rows of 3",
)  # fmt: skip
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", MIXES)
@every_backend()
@in_every_run(
    xla=all_but(
        "decodes, then chunks-rows of 8", "decodes, then chunks-rows of 3",
        "a decode between chunks-rows of 8", "a decode between chunks-rows of 1",
    ),
    triton=["a decode between chunks-rows of 8", "a decode between chunks-rows of 3"],
)  # fmt: skip
def test_mixes(backend: Backend, name: str, heads: int) -> None:
    step = Step.draw(*MIXES[name], heads, backend.dtype, harness.fresh_rng())
    check(backend, step, run(backend, step.arguments("garbage", distribution=True)))


@slow_cases("rows of 8", "rows of 1")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_windows_and_soft_caps(heads: int) -> None:
    step = Step.draw(*MIXED, heads, "float32", harness.fresh_rng())
    out, cache = run(XLA, step.arguments(), sliding_window=9, soft_cap=3.0)
    harness.assert_same_bits(cache.pages, step.written())
    harness.assert_close("output", out, step.expected(step.written(), 9, 3.0), harness.F32_OUT)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the numbers of new tokens and of all tokens of up to S sequences. Many sequences have one new token."""
    new = draw(st.lists(st.one_of(st.just(1), st.integers(0, T // S)), max_size=S))
    return tuple(new), tuple(count + draw(st.integers(0, P * PS - count)) for count in new)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(mix=traffic(), seed=st.integers(0, 2**32 - 1), behind=st.sampled_from(["zeros", "ends", "garbage"]))
def test_any_traffic(heads: int, mix: tuple[tuple[int, ...], tuple[int, ...]], seed: int, behind: str) -> None:
    """The result equals attention in NumPy and the result of `reference`, for random steps."""
    step = Step.draw(*mix, heads, "float32", np.random.default_rng(seed))
    got, reference = (run(backend, step.arguments(behind, distribution=True)) for backend in (XLA, REFERENCE))
    harness.assert_same_bits(got[1], reference[1])
    harness.assert_close("output", got[0], reference[0], harness.F32_OUT)
    check(XLA, step, got)


@pytest.mark.slow
@slow_cases("rows of 1", "rows of 3")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_padding_changes_no_bit(heads: int) -> None:
    step = Step.draw((1, 9, 1, 3), (33, 9, 64, 20), heads, "float32", harness.fresh_rng())
    want = run(XLA, step.arguments())
    for behind, distribution in (("ends", False), ("garbage", True)):
        harness.assert_same_bits(run(XLA, step.arguments(behind, distribution=distribution)), want)
    harness.assert_same_bits(run(XLA, step.arguments() | {"page_indices": step.tables}), want)


@pytest.mark.slow
def test_tokens_before_the_first_sum_are_padding() -> None:
    for heads in HEADS.values():
        step = Step.draw(*MIXED, heads, "float32", harness.fresh_rng())
        sums = np.array([3, 7, 8, 20, 21, 24], np.int32)
        lens = (17, *MIXED[1][1:])
        out, cache = run(XLA, step.arguments() | {"cu_q_lens": sums, "kv_lens": np.array(lens, np.int32)})
        moved = dataclasses.replace(step, new=(4, *MIXED[0][1:]), lens=lens, q=step.q[3:], latents=step.latents[3:])
        assert not np.asarray(out)[:3].any()
        harness.assert_same_bits(cache.pages, moved.written())
        harness.assert_close("output", out[3:], moved.expected(moved.written()), harness.F32_OUT)


@pytest.mark.slow
def test_decodes_alone_have_the_bits_of_mla_decode() -> None:
    """With many heads, each row has one query token, so a step of decode tokens equals `mla_decode` bit for bit."""
    new, lens = MIXES["decodes alone"]
    step = Step.draw(new, lens, HEADS["rows of 1"], "float32", harness.fresh_rng())
    arguments = step.arguments()
    names = ("q_latent", "q_rope", "new_latent", "new_rope")
    arguments |= {name: arguments[name][:S] for name in names}
    out, cache = run(XLA, arguments)
    queries = {name: arguments[name][:, None] for name in names[:2]}
    arrays = queries | {"cache": cache, "block_tables": step.tables, "kv_lens": arguments["kv_lens"]}
    harness.assert_same_bits(out, backends.call(mla_decode, XLA, arrays, sm_scale=0.2)[:, 0])


# --- the cache


def test_without_an_update_the_pages_hold_the_new_tokens() -> None:
    step = Step.draw(*MIXED, 3, "float32", harness.fresh_rng())
    out, cache = run(XLA, step.arguments())
    arguments = step.arguments() | {"cache": cache, "new_latent": None, "new_rope": None}
    harness.assert_same_bits(run(XLA, arguments, update_kv_cache=False), (out, cache))


@pytest.mark.slow
def test_latents_in_8_bits() -> None:
    step = Step.draw(*MIXED, 3, "float32", harness.fresh_rng())
    spec = latent_cache_spec(num_pages=N, page_size=PS, latent_dim=L, rope_dim=R, dtype=jnp.float8_e4m3fn)
    held = np.nan_to_num(step.pages, posinf=0, neginf=0).reshape(N * PS, L + R)
    arrays = {"cache": PagedLatent.allocate(spec), "latent": held, "slots": np.arange(N * PS, dtype=np.int32)}
    cache = backends.call(write_latent, XLA, arrays)
    out, after = run(XLA, step.arguments() | {"cache": cache})
    slots = np.full(T, -1, np.int32)
    slots[: sum(step.new)] = step.slots()
    written = {"cache": cache, "latent": step.latents, "slots": slots}
    harness.assert_same_bits(after, backends.call(write_latent, XLA, written))
    pages = np.concatenate([after.pages.astype(jnp.float32) * after.scale, after.rope.astype(jnp.float32)], axis=-1)
    harness.assert_close("output", out, step.expected(pages), harness.F32_OUT)


@slow_cases("xla-float8_e5m2-rows of 1", "xla-float8_e5m2-rows of 3", "triton-float8_e4m3fn-rows of 3")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@every_backend()
@in_every_run(
    xla=["float8_e5m2-rows of 8", "float8_e5m2-rows of 3", "float8_e5m2-rows of 1"],
    triton=["float8_e4m3fn-rows of 3"],
)  # fmt: skip
@unsupported(
    mosaic="takes no quantised latents",
    triton={
        "float8_e5m2-rows of 8": "takes latents of 8 bits in float8_e4m3fn, got float8_e5m2",
        "float8_e5m2-rows of 3": "takes latents of 8 bits in float8_e4m3fn, got float8_e5m2",
        "float8_e5m2-rows of 1": "takes latents of 8 bits in float8_e4m3fn, got float8_e5m2",
    },
)  # fmt: skip
def test_one_scale_for_8_bits(backend: Backend, dtype: str, heads: int) -> None:
    """Test queries, latents and rope columns of 8 bits without arrays of scales, as in caches for TPUs. The call has
    one scale for all queries, one for all keys and one for all values.
    """
    step, coarse, scales = _coarse(heads, dtype)
    out, cache = run(backend, coarse.arguments("garbage", distribution=True), **scales, out_dtype=jnp.float32)
    harness.assert_same_bits(cache, PagedLatent(jnp.asarray(coarse.written())))
    assert out.dtype == jnp.float32
    harness.assert_close("output", out, step.expected(step.written()), backend.variant.tolerance(backend.dtype)[0])


def _coarse(heads: int, dtype: str) -> tuple[Step, Step, dict[str, float]]:
    """Return a float32 step with numbers that 8 bits represent exactly, the same step in 8 bits, and its scales."""
    rng, scales = harness.fresh_rng(), {"q_scale": 0.5, "k_scale": 0.25, "v_scale": 0.25}
    drawn = Step.draw(*MIXED, heads, "float32", rng)
    parts = {"q": drawn.q / scales["q_scale"], "latents": drawn.latents / scales["k_scale"]}
    parts |= {"pages": drawn.pages / scales["k_scale"]}
    in_8_bits: dict[str, Any] = {name: np.asarray(jnp.asarray(x).astype(dtype)) for name, x in parts.items()}
    coarse = dataclasses.replace(drawn, **in_8_bits)
    factors = {"q": scales["q_scale"], "latents": scales["k_scale"], "pages": scales["k_scale"]}
    meant = {name: getattr(coarse, name).astype(np.float32) * factor for name, factor in factors.items()}
    return dataclasses.replace(coarse, **meant), coarse, scales


@pytest.mark.slow
def test_values_have_a_scale_of_their_own() -> None:
    """The output is proportional to `v_scale`, which may differ from `k_scale`. float32 queries are multiplied by
    `q_scale`.
    """
    step, coarse, scales = _coarse(3, "float8_e4m3fn")
    arguments = coarse.arguments() | {"q_latent": step.q[..., :L] / 3, "q_rope": step.q[..., L:] / 3}
    changed = scales | {"q_scale": 3.0, "v_scale": 7 * scales["v_scale"]}
    out, _ = run(XLA, arguments, **changed)
    assert out.dtype == jnp.float32
    harness.assert_close("output", out / 7, step.expected(step.written()), harness.F32_OUT)


def test_new_latents_of_more_bits_are_divided_by_their_scale() -> None:
    """float32 latents are divided by `k_scale` before they are stored in 8 bits. Large values saturate."""
    step, coarse, scales = _coarse(3, "float8_e4m3fn")
    new = {"new_latent": step.latents[:, :L], "new_rope": step.latents[:, L:]}
    _, cache = run(XLA, coarse.arguments() | new, **scales, out_dtype=jnp.float32)
    harness.assert_same_bits(cache.pages, coarse.written())
    large = {"new_latent": np.full((T, L), 1e6, np.float32), "new_rope": np.full((T, R), -1e6, np.float32)}
    _, cache = run(XLA, coarse.arguments() | large, **scales, out_dtype=jnp.float32)
    written = np.asarray(cache.pages).reshape(-1, L + R)[coarse.slots()].astype(np.float32)
    assert (written[:, :L] == 448).all()
    assert (written[:, L:] == -448).all()


@slow_cases("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_cache_stays_where_it_is(dtype: Any) -> None:
    """A compiled loop over steps does not copy the donated cache. `distribution` is an array on the device."""
    spec = latent_cache_spec(num_pages=4096, page_size=PS, latent_dim=L, rope_dim=R, dtype=dtype)
    cache = jax.eval_shape(lambda: PagedLatent.allocate(spec))
    rest = Step.draw(*MIXED, 3, "float32", harness.fresh_rng()).arguments("garbage", distribution=True)
    rest = jax.tree.map(jnp.asarray, {name: x for name, x in rest.items() if name != "cache"})

    def steps(cache: PagedLatent, rest: dict[str, Any]) -> Any:
        def one(cache: PagedLatent, distribution: jax.Array) -> Any:
            with XLA.variant.settings():
                changed: dict[str, Any] = rest | {"distribution": distribution}
                return mla_ragged_paged_attention(**changed, cache=cache, sm_scale=0.2, implementation="xla")[::-1]

        return jax.lax.scan(one, cache, jnp.stack([rest["distribution"], rest["distribution"] - 1]))

    harness.assert_stays_put(jax.jit(steps, donate_argnums=0), cache.pages, cache, rest)


# --- transformations, errors and empty inputs


@slow_cases("own1-3")
@pytest.mark.parametrize("heads", [3, 40])
@pytest.mark.parametrize("own", [("q_latent", "q_rope"), ("cache",), ("page_indices",), ("kv_lens", "distribution")])
def test_inside_a_shard_map(own: tuple[str, ...], heads: int) -> None:
    """Tracing succeeds inside `jax.shard_map` with its default check of varying axes. The arguments `own` are split."""
    step = Step.draw((1, 9, 1, 3, 5), (33, 9, 64, 20, 5), heads, "float32", harness.fresh_rng())
    arrays = jax.tree.map(jnp.asarray, step.arguments() | {"distribution": np.array([1, 1, S], np.int32)})

    def function(arrays: dict[str, Any]) -> Any:
        with XLA.variant.settings():
            return mla_ragged_paged_attention(**arrays, sm_scale=0.2, implementation="xla")

    split = transformations.inside_a_shard_map(function, arrays, own)
    if heads == 3 and own == ("cache",):
        harness.assert_same_bits(jax.jit(split)(arrays), jax.jit(function)(arrays))


@pytest.mark.usefixtures("unchecked_shapes")
def test_without_tokens_or_sequences() -> None:
    step = Step.draw(*MIXED, 3, "float32", harness.fresh_rng()).arguments()
    names = ("q_latent", "q_rope", "new_latent", "new_rope")
    no_tokens = step | {name: step[name][:0] for name in names} | {"cu_q_lens": np.zeros(S + 1, np.int32)}
    no_sequences = step | {"kv_lens": np.zeros(0, np.int32), "page_indices": [], "cu_q_lens": np.zeros(1, np.int32)}
    for arguments in (no_tokens, no_sequences):
        out, cache = mla_ragged_paged_attention(**arguments, sm_scale=0.2)
        assert not np.asarray(out).any()
        harness.assert_same_bits(cache, step["cache"])


def test_gradients_are_refused() -> None:
    arrays = jax.tree.map(jnp.asarray, Step.draw(*MIXED, 3, "float32", harness.fresh_rng()).arguments())

    def loss(q: jax.Array) -> jax.Array:
        return mla_ragged_paged_attention(**(arrays | {"q_latent": q}), sm_scale=0.2)[0].sum()

    with pytest.raises(NotImplementedError, match="mla_ragged_paged_attention has no gradient"):
        jax.grad(loss)(arrays["q_latent"])


def test_explanation() -> None:
    arguments = Step.draw(*MIXED, 3, "float32", harness.fresh_rng()).arguments()
    explanation = explain("mla_ragged_paged_attention", **jax.tree.map(jnp.asarray, arguments), sm_scale=0.2)
    assert (explanation.op, explanation.chosen) == ("mla_ragged_paged_attention", "xla")


FP8 = jnp.zeros((N, PS, L + R), jnp.float8_e4m3fn)
GROUPED = latent_cache_spec(num_pages=N, page_size=PS, latent_dim=L, rope_dim=R, dtype=jnp.float8_e4m3fn)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q_rope": (
        {"q_rope": np.zeros((T, 2, R), np.float32)},
        r"q_rope: expected shape \[T=40, Hq=3, R\], got \[40, 2, 32\]",
    ),
    "new_latent": (
        {"new_latent": np.zeros((T, R), np.float32)},
        r"new_latent: expected shape \[T=40, L=128\], got \[40, 32\]",
    ),
    "no new_rope": ({"new_rope": None}, "new_rope: expected the new tokens, or update_kv_cache=False; got None"),
    "cache": ({"cache": PagedLatent(jnp.zeros((N, PS, L)))}, "cache.pages: expected L . R = 128 . 32 columns, got 128"),
    "page_indices": ({"page_indices": np.zeros((S, 2, P), np.int32)}, r"page_indices: expected shape \[S=5, P\]"),
    "distribution": ({"distribution": [1, 2]}, r"distribution: expected shape \[3\], got \[2\]"),
    "sm_scale": ({"sm_scale": None}, "sm_scale: expected a positive finite number, got None"),
    "update": ({"update_kv_cache": 1}, "update_kv_cache: expected True or False"),
    "k_scale": ({"k_scale": 0.5}, "k_scale: expected None with a float32 cache that is not quantised"),
    "v_scale of groups": (
        {"cache": jax.eval_shape(lambda: PagedLatent.allocate(GROUPED)), "v_scale": 0.5},
        "v_scale: expected None with a float8_e4m3fn cache that has scales",
    ),
    "scale without rope": (
        {"cache": PagedLatent(FP8, jnp.ones((N, PS, 1)))},
        "cache.rope: expected an array with float8_e4m3fn pages, got None",
    ),
    "new latents of other 8 bits": (
        {"cache": PagedLatent(FP8), "new_rope": jnp.zeros((T, R), jnp.float8_e5m2)},
        "new_rope: expected dtype .* got float8_e5m2",
    ),
    "queries of 8 bits": ({"q_latent": jnp.zeros((T, 3, L), jnp.float8_e4m3fn)}, "q_latent: expected dtype"),
    "output of 8 bits": (
        {name: jnp.zeros((T, 3, n), jnp.float8_e4m3fn) for name, n in (("q_latent", L), ("q_rope", R))}
        | {"q_scale": 1.0},
        "out_dtype: expected .* got float8_e4m3fn",
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    changed, message = ERRORS[name]
    arguments = Step.draw(*MIXED, 3, "float32", harness.fresh_rng()).arguments() | {"sm_scale": 0.2}
    with pytest.raises(ValueError, match=f"^{message}"):
        mla_ragged_paged_attention(**(arguments | changed))


# --- comparison with tpu-inference


@pytest.mark.slow
@pytest.mark.parametrize("heads", [*HEADS.values(), 16])
@pytest.mark.parametrize("name", ["decodes, then chunks", "a decode between chunks"])
def test_the_reference_of_tpu_inference(name: str, heads: int) -> None:
    """Results equal the reference of tpu-inference. Its cache pads latents and rope columns to multiples of 128
    columns.
    """
    theirs = tpu_inference.module("tpu_inference/kernels/mla/v1/kernel")
    step = Step.draw(*MIXES[name], heads, "float32", harness.fresh_rng())
    arguments = step.arguments(distribution=True)
    arguments["page_indices"] = np.where(step.tables < N, step.tables, -1).reshape(-1)
    pages = np.zeros((N, PS, 1, 256), np.float32)
    pages[:, :, 0, :L], pages[:, :, 0, 128 : 128 + R] = step.pages[..., :L], step.pages[..., L:]
    arrays = [jnp.asarray(x) for name, x in arguments.items() if name != "cache"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want, cache = theirs.ref_mla_ragged_paged_attention(*arrays[:4], jnp.asarray(pages), *arrays[4:], sm_scale=0.2)
    out, after = run(XLA, arguments)
    count = sum(step.new)
    harness.assert_close("output", out[:count], want[..., :L], harness.F32_OUT)
    cache = np.concatenate([cache[:, :, 0, :L], cache[:, :, 0, 128 : 128 + R]], axis=-1)
    harness.assert_same_bits(np.asarray(after.pages), cache)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_the_reference_of_tpu_inference_in_8_bits(heads: int, dtype: str) -> None:
    """Results with 8-bit caches equal the reference of tpu-inference.

    The reference rounds weights and outputs to the dtype of its cache, so it runs in float32. Its cache pads rope keys
    to 128 columns. Our operation reads the padded cache with queries that are padded in the same way.
    """
    theirs = tpu_inference.module("tpu_inference/kernels/mla/v1/kernel")
    _, step, scales = _coarse(heads, dtype)
    scales["v_scale"] *= 3
    arguments = step.arguments(distribution=True)
    arguments["page_indices"] = np.where(step.tables < N, step.tables, -1).reshape(-1)
    padding = ((0, 0), (0, 0), (0, 128 - R))
    pages = jnp.pad(jnp.asarray(step.pages), padding)
    arrays = [jnp.asarray(x) for name, x in arguments.items() if name != "cache"]
    wide = [x.astype(jnp.float32) for x in arrays[:4]]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want, cache = theirs.ref_mla_ragged_paged_attention(
            *wide, pages.astype(jnp.float32)[:, :, None], *arrays[4:], sm_scale=0.2, **scales
        )
    arguments |= {"q_rope": jnp.pad(arrays[1], padding), "new_rope": jnp.pad(arrays[3], padding[1:])}
    out, after = run(XLA, arguments | {"cache": PagedLatent(pages)}, **scales, out_dtype=jnp.float32)
    harness.assert_close("output", out[: sum(step.new)], want, harness.F32_OUT)
    harness.assert_same_bits(after.pages.astype(jnp.float32), cache[:, :, 0])
