"""Contract of `ragged_attention`: every backend is tested with unusual inputs.

Poisoned inputs have NaN, infinities or garbage in all elements that must not affect the result.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import HeadWindow, ragged_attention
from pallas_attn.portable import page_tiles
from tests.contract import backends, naive, transformations
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

every_backend = backends.every_backend("ragged_attention")
compiled_backend = backends.every_backend("ragged_attention", backends.is_compiled)
bounded_backend = backends.every_backend("ragged_attention", backends.is_compiled_and_lean)
both_masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@dataclasses.dataclass(frozen=True)
class RaggedCase:
    """One call of `ragged_attention`.

    Attributes:
      q_lens, kv_lens: numbers of queries and keys of each sequence.
      tokens, keys: numbers of packed queries and of packed keys, including padding after the last sequence.
      dtype: dtype of the arrays, or None for `Backend.dtype`.
      exact: whether inputs are integers with exact dot products, near +5e5 in some sequences and near -5e5 in others.
      sinks: whether the call has sink logits, some of ordinary size, some +40 and some -inf.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    tokens: int = 40
    keys: int = 56
    q_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    causal: bool = True
    dtype: str | None = None
    exact: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def static(self) -> dict[str, Any]:
        """Return the arguments of the call that are not arrays."""
        static = {"causal": self.causal, "window": self.window, "soft_cap": self.soft_cap}
        return {name: value for name, value in static.items() if value is not None}

    @property
    def value_scale(self) -> float:
        """Return the factor of random keys and values. Queries are divided by the same factor."""
        return 1.0 if self.dtype == "float32" else harness.HALF_SCALE


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random inputs of a case. `visible`, bool [T, U], is true if the query of a token sees a key."""

    case: RaggedCase
    rng: np.random.Generator
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray
    sinks: np.ndarray | None

    @staticmethod
    def draw(case: RaggedCase, rng: np.random.Generator) -> Inputs:
        visible = np.zeros((case.tokens, case.keys), bool)
        q_start = kv_start = 0
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
            for i in range(q_len):
                seen = max(0, kv_len - (q_len - 1 - i)) if case.causal else kv_len
                oldest = 0 if case.window is None else max(0, seen - case.window)
                visible[q_start + i, kv_start + oldest : kv_start + seen] = True
            q_start, kv_start = q_start + q_len, kv_start + kv_len
        assert q_start <= case.tokens
        assert kv_start <= case.keys
        q = rng.standard_normal((case.tokens, case.q_heads, case.key_dim)) / case.value_scale
        k = rng.standard_normal((case.keys, case.kv_heads, case.key_dim)) * case.value_scale
        v = rng.standard_normal((case.keys, case.kv_heads, case.value_dim)) * case.value_scale
        if case.exact:
            q, k = _exact(case, rng)
        ordinary = rng.standard_normal(case.q_heads)
        of_each_kind = [ordinary, np.full_like(ordinary, 40), np.full_like(ordinary, -np.inf)]
        sinks = np.choose(np.arange(case.q_heads) % 3, of_each_kind).astype(np.float32) if case.sinks else None
        return Inputs(case, rng, q.astype(case.dtype), k.astype(case.dtype), v.astype(case.dtype), visible, sinks)

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments. Padding and invisible keys are poisoned if `poisoned`, else 0."""
        fill = harness.poison if poisoned else lambda _, *arrays: harness.zero(*arrays)
        padding, unseen = np.arange(self.case.tokens) >= sum(self.case.q_lens), ~self.visible.any(axis=0)
        return {
            "q": fill(self.rng, self.q, padding),
            "k": fill(self.rng, self.k, unseen),
            "v": fill(self.rng, self.v, unseen),
            "cu_q_lens": np.cumsum((0, *self.case.q_lens), dtype=np.int32),
            "cu_kv_lens": np.cumsum((0, *self.case.kv_lens), dtype=np.int32),
            "sinks": self.sinks,
        }

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        options = {"soft_cap": self.case.soft_cap, "sinks": self.sinks}
        return naive.attend_all(self.q, self.k, self.v, self.visible, self.case.key_dim**-0.5, **options)


def _exact(case: RaggedCase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw integer inputs with exact scores near +5e5 and -5e5.

    All keys are one vector whose square is near 5e5. Queries are this vector, or its negative in every other sequence.
    The last column differs between keys.
    """
    u = rng.integers(0, 5, case.key_dim) + int((5e5 / case.key_dim) ** 0.5)
    q = np.tile(u, (case.tokens, case.q_heads, 1))
    sequence = np.searchsorted(np.cumsum(case.q_lens), np.arange(case.tokens), side="right")
    q[sequence % 2 == 1] *= -1
    k = np.tile(u, (case.keys, case.kv_heads, 1))
    q[..., -1] = rng.integers(1, 4, q.shape[:-1])
    k[..., -1] = rng.integers(-8, 9, k.shape[:-1])
    return q, k


def attend(backend: Backend, causal: bool = True, **static: Any) -> harness.Jitted:
    return backends.compiled(ragged_attention, backend, causal=causal, **static)


def draw(backend: Backend, case: RaggedCase, rng: np.random.Generator | None = None) -> Inputs:
    return Inputs.draw(replace(case, dtype=case.dtype or backend.dtype), rng or harness.fresh_rng())


def run(backend: Backend, case: RaggedCase, arguments: dict[str, Any], **static: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = attend(backend, return_lse=True, **case.static, **static)(**arguments)
    return np.asarray(out), np.asarray(lse)


def check(backend: Backend, case: RaggedCase, *, clean: bool | None = None) -> None:
    """Check that the result for poisoned inputs equals attention in NumPy.

    If `clean`, check that inputs without poison give the same bits. The default is True, except for interpreted
    kernels, which are slow.
    """
    inputs = draw(backend, case)
    # The reference computes in float32 and rounds only its result, so the float32 tolerances apply to all dtypes.
    exact = {"out_dtype": "float32"} if backend.name == "reference" else {}
    got = run(backend, case, inputs.arguments(), **exact)
    tolerances = backend.variant.tolerance("float32" if exact else inputs.case.dtype)
    harness.assert_attention_close(got, inputs.expected(), tolerances)
    if not backend.interpreted if clean is None else clean:
        harness.assert_same_bits(got, run(backend, case, inputs.arguments(poisoned=False), **exact))


LENGTHS = {
    "new tokens of a cached prefix": ((3, 1, 8, 5), (20, 1, 9, 17)),
    "as many queries as keys": ((5, 16, 1, 10), (5, 16, 1, 10)),
    "more queries than keys": ((9, 4, 12, 7), (2, 3, 11, 1)),
    "no queries, no keys, neither": ((0, 6, 0, 5), (13, 0, 0, 7)),
    "the last sequence has no queries": ((7, 0, 3, 0), (7, 9, 21, 16)),
    "the first sequence has no keys": ((7, 2, 3, 1), (0, 9, 21, 16)),
    "all idle": ((0, 0, 0, 0), (0, 0, 0, 0)),
    "no padding": ((10, 10, 1, 19), (17, 16, 15, 8)),
    "one sequence has it all": ((0, 40, 0, 0), (0, 56, 0, 0)),
}
# Sequences that need several blocks of queries and several tiles of keys.
LONG = RaggedCase((3, 0, 141, 20), (70, 9, 150, 5), tokens=173, keys=243, q_heads=1, kv_heads=1)
LONG_LENGTHS = {
    "prefixes, no queries, more queries than keys, padding": (LONG.q_lens, LONG.kv_lens),
    "all in one, at the end of the arrays": ((0, 0, 0, 173), (0, 0, 0, 243)),
    "tiles and blocks that are full": ((128, 0, 16, 8), (64, 0, 128, 8)),
    "no keys at all": ((50, 0, 50, 73), (0, 0, 0, 0)),
    "single queries": ((1, 1, 1, 1), (1, 63, 64, 65)),
}
BASE = RaggedCase(*LENGTHS["new tokens of a cached prefix"])
FEW = RaggedCase((5, 0, 6), (9, 2, 6), tokens=12, keys=19)


@slow_cases(
    "mosaic-more queries than keys-causal", "mosaic-more queries than keys-full",
    "mosaic-as many queries as keys-causal", "triton-new tokens of a cached prefix-causal",
)  # fmt: skip
@both_masks
@pytest.mark.parametrize(("q_lens", "kv_lens"), LENGTHS.values(), ids=LENGTHS)
@every_backend
@in_every_run(
    reference=all_but("new tokens of a cached prefix-full"),
    xla=all_but("new tokens of a cached prefix-full"),
    mosaic=[
        "as many queries as keys-causal", "more queries than keys-causal", "more queries than keys-full",
        "no queries, no keys, neither-causal", "the last sequence has no queries-full", "all idle-causal",
        "no padding-full", "one sequence has it all-full",
    ],
    triton=[
        "new tokens of a cached prefix-causal", "new tokens of a cached prefix-full",
        "more queries than keys-causal", "no padding-full",
    ],
)  # fmt: skip
def test_lengths(backend: Backend, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], causal: bool) -> None:
    check(backend, replace(BASE, q_lens=q_lens, kv_lens=kv_lens, causal=causal))


@slow_cases("mosaic-all in one, at the end of the arrays")
@pytest.mark.parametrize(("q_lens", "kv_lens"), LONG_LENGTHS.values(), ids=LONG_LENGTHS)
@every_backend
@in_every_run(
    "xla",
    reference=all_but("prefixes, no queries, more queries than keys, padding"),
    mosaic=all_but("prefixes, no queries, more queries than keys, padding"),
)  # fmt: skip
def test_long_lengths(backend: Backend, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
    check(backend, replace(LONG, q_lens=q_lens, kv_lens=kv_lens))


@backends.every_backend("ragged_attention", lambda backend: backend.kernels)
@in_every_run("mosaic")
def test_poison_changes_no_bit(backend: Backend) -> None:
    """Poisoned and clean inputs give the same bits. Interpreted kernels run the other tests on poisoned inputs only."""
    check(backend, LONG, clean=True)


@both_masks
@every_backend
@in_every_run("xla")
def test_any_lengths(backend: Backend, causal: bool) -> None:
    rng = harness.fresh_rng()
    for _ in range(5 if backend.interpreted else 20):
        q_lens = rng.multinomial(rng.integers(41), [0.25] * 4)
        kv_lens = rng.multinomial(rng.integers(57), rng.dirichlet([1.0] * 4))
        check(backend, replace(BASE, q_lens=tuple(q_lens.tolist()), kv_lens=tuple(kv_lens.tolist()), causal=causal))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@every_backend
@in_every_run("reference", "xla", mosaic=["causal"])
def test_large_scores_of_either_sign(backend: Backend, causal: bool) -> None:
    """Detect a kernel that masks scores with -1e5 instead of -inf. In odd sequences, all visible scores are near -5e5,
    so masked keys would have the largest weights.
    """
    check(backend, replace(BASE, exact=True, causal=causal))


NO_WIDE_HEADS = "takes keys and values of width"
UNSUPPORTED_WIDTHS = dict.fromkeys(
    ("GQA of 16", "one head, narrow keys", "width 320", "keys of 448, values of 384"), NO_WIDE_HEADS
)
WIDTHS = {  # (Dk, Dv, Hq, Hkv)
    "DeepSeek": (192, 128, 4, 4),
    "GQA of 4": (128, 128, 8, 2),
    "GQA of 14": (64, 64, 14, 1),
    "GQA of 2": (256, 256, 4, 2),
    "MHA of odd heads": (64, 64, 5, 5),
    "GQA of 3": (64, 64, 9, 3),
    "GQA of 16": (128, 64, 16, 1),
    "one head, narrow keys": (64, 128, 1, 1),
    "GQA of 8, width 512": (512, 512, 8, 1),
    "width 320": (320, 320, 2, 2),
    "keys of 448, values of 384": (448, 384, 4, 2),
}


@slow_cases("xla-DeepSeek", "mosaic-DeepSeek", "mosaic_sm100-DeepSeek")
@pytest.mark.parametrize(("key_dim", "value_dim", "q_heads", "kv_heads"), WIDTHS.values(), ids=WIDTHS)
@every_backend
@in_every_run(
    xla=["DeepSeek", "one head, narrow keys"],
    mosaic=["DeepSeek", "GQA of 16", "one head, narrow keys", "GQA of 8, width 512"],
    mosaic_sm100=["DeepSeek"],
    triton=["DeepSeek", "keys of 448, values of 384"],
)  # fmt: skip
@unsupported(
    mosaic=UNSUPPORTED_WIDTHS, mosaic_sm100=UNSUPPORTED_WIDTHS | {"GQA of 8, width 512": NO_WIDE_HEADS}
)  # fmt: skip
def test_widths_and_heads(backend: Backend, key_dim: int, value_dim: int, q_heads: int, kv_heads: int) -> None:
    few = replace(FEW, key_dim=key_dim, value_dim=value_dim)
    check(backends.for_width(backend, key_dim), replace(few, q_heads=q_heads, kv_heads=kv_heads))


@every_backend
@in_every_run("xla", "triton")
@unsupported(mosaic_sm100=NO_WIDE_HEADS)
def test_columns_of_wide_values_keep_their_place(backend: Backend) -> None:
    """All keys of a head have the same value, so the output of a query equals it. Its columns differ."""
    backend = backends.for_width(backend, 512)
    inputs = draw(backend, replace(FEW, key_dim=512, value_dim=512))
    value = inputs.rng.standard_normal(512).astype(inputs.v.dtype).astype(np.float32)
    inputs.v[:] = value * np.array([[1], [-1]])
    out, _ = run(backend, inputs.case, inputs.arguments())
    seen = inputs.visible.any(axis=1)
    want = np.broadcast_to(np.repeat([value, -value], 2, axis=0), out[seen].shape)
    np.testing.assert_allclose(out[seen].astype(np.float32), want, rtol=2 / 128)


WINDOWED = replace(LONG, window=70, soft_cap=5.0, sinks=True, q_heads=3)
OPTIONS = {
    "a window of 1": replace(BASE, window=1),
    "a window of several tiles, soft cap, sinks": WINDOWED,
    "the same window, all in one": replace(WINDOWED, q_lens=(0, 0, 0, 173), kv_lens=(0, 0, 0, 243)),
    "a window longer than any sequence, sinks": replace(BASE, window=30, sinks=True),
    "a window of as many keys as there are": replace(BASE, window=BASE.keys),
    "the longest window": replace(BASE, window=2**31 - 1),
    "a window, more queries than keys": replace(BASE, q_lens=(9, 4, 12, 7), kv_lens=(2, 3, 11, 1), window=2),
    "a soft cap, DeepSeek's widths": replace(BASE, key_dim=192, value_dim=128, soft_cap=3.0),
    "full, soft cap, sinks": replace(FEW, q_heads=3, kv_heads=1, causal=False, soft_cap=3.0, sinks=True),
    "scores of either sign to 5e5, a window": replace(BASE, exact=True, window=6),
    "large soft cap": replace(BASE, soft_cap=5000.0),
    "width 512, a window, soft cap, sinks": replace(
        WINDOWED, q_lens=(3, 0, 41, 20), kv_lens=(40, 9, 80, 5), tokens=66, keys=135, key_dim=512, value_dim=512
    ),
}
LARGE_SOFT_CAP = "takes a soft cap of up to 4096, got 5000"


@slow_cases("mosaic-the same window, all in one")
@backends.every_case("ragged_attention", OPTIONS)
@in_every_run(
    xla=["a window of 1", "the same window, all in one", "the longest window", "full, soft cap, sinks"],
    mosaic=["the same window, all in one", "large soft cap"],
    triton=["full, soft cap, sinks"],
)  # fmt: skip
@unsupported(
    mosaic={"large soft cap": LARGE_SOFT_CAP},
    mosaic_sm100={"large soft cap": LARGE_SOFT_CAP, "width 512, a window, soft cap, sinks": NO_WIDE_HEADS},
)
def test_options(backend: Backend, name: str) -> None:
    check(backends.for_width(backend, OPTIONS[name].key_dim), OPTIONS[name])


@backends.every_backend("ragged_attention", lambda backend: backend.name == "xla")
@in_every_run()
def test_keys_before_every_window_cost_nothing(backend: Backend) -> None:
    """The number of tiles of 16 keys that a block of queries visits depends on the window (20), not on the length
    (1000).
    """
    case = replace(BASE, q_lens=(0, 40, 0, 0), kv_lens=(0, 1000, 0, 0), keys=1000, window=20)
    inputs = draw(backend, case)
    watched = mock.patch.object(page_tiles, "attend_rows", wraps=page_tiles.attend_rows)
    with watched as walk, backend.variant.settings():
        ragged_attention(**jax.tree.map(jnp.asarray, inputs.arguments()), **case.static, implementation="xla")
    assert 0 < walk.call_args.args[1].max() <= 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_backend
@in_every_run(xla=all_but("float16"), mosaic=all_but("float16"))
@unsupported(
    mosaic={"float32": "takes bfloat16 and float16 queries, got float32"},
    triton={"float32": "takes bfloat16 and float16 queries, got float32"},
)  # fmt: skip
def test_dtypes(backend: Backend, dtype: str) -> None:
    check(backend, replace(BASE, dtype=dtype))


@bounded_backend
def test_the_configuration_a_user_gets(backend: Backend) -> None:
    check(backends.as_users_get(backend), replace(BASE, q_lens=(0, 40, 0, 0), kv_lens=(0, 56, 0, 0)))
    check(backends.as_users_get(backend), BASE)


@pytest.mark.slow
@every_backend
@in_every_run("xla")
def test_scale_output_dtype_and_lse_are_as_asked(backend: Backend) -> None:
    arguments = draw(backend, replace(BASE, dtype="bfloat16")).arguments()
    out, lse = attend(backend, True, return_lse=True)(**arguments)
    alone = attend(backend, True)(**arguments)
    wide = attend(backend, True, out_dtype="float32")(**arguments)
    chex.assert_type([out, alone, wide, lse], [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32])
    harness.assert_same_bits([alone, wide.astype(jnp.bfloat16)], [out, out])
    harness.assert_same_bits(attend(backend, True, sm_scale=64**-0.5)(**arguments), out)
    halved = attend(backend, True, sm_scale=64**-0.5 / 2)(**(arguments | {"q": 2 * arguments["q"]}))
    harness.assert_same_bits(halved, out)


# --- NaNs and infinities must not spread


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_later_keys_change_no_bit_of_earlier_queries(backend: Backend) -> None:
    inputs = draw(backend, replace(BASE, q_lens=(16, 0, 8, 0), kv_lens=(30, 0, 11, 0)))
    arguments = inputs.arguments()
    want = run(backend, inputs.case, arguments)
    for key in (29, 25, 20, 40, 33):
        changed = {name: arguments[name].copy() for name in ("k", "v")}
        for array in changed.values():
            array[key] = 1e3 * inputs.rng.standard_normal(array[key].shape)
        got = run(backend, inputs.case, arguments | changed)
        blind = ~inputs.visible[:, key]
        harness.assert_same_bits([x[blind] for x in got], [x[blind] for x in want])
        assert (got[0][~blind] != want[0][~blind]).any(axis=(1, 2)).all()


@slow_cases("mosaic-causal")
@both_masks
@every_backend
@in_every_run("xla", mosaic=["causal"])
def test_a_visible_nan_shows_in_its_own_sequence_only(backend: Backend, causal: bool) -> None:
    case = replace(BASE, causal=causal)
    inputs = draw(backend, case)
    want = run(backend, case, inputs.arguments())
    inputs.k[22, :, 3] = np.nan  # second key of the third sequence
    got = run(backend, case, inputs.arguments())
    third = np.isin(np.arange(case.tokens), range(4, 12))
    for g, w in zip(got, want, strict=True):
        assert np.isnan(g[inputs.visible[:, 22]]).all()
        harness.assert_same_bits(g[~third], w[~third])


def check_queries_that_see_nothing(backend: Backend, case: RaggedCase) -> None:
    """Check that queries without visible keys have output 0 if the values that other queries see are infinite."""
    inputs = draw(backend, case)
    inputs.v[inputs.visible.any(axis=0)] = np.inf
    empty = ~inputs.visible.any(axis=1)
    assert empty[: sum(case.q_lens)].any()
    harness.assert_empty(run(backend, case, inputs.arguments()), np.repeat(empty[:, None], case.q_heads, axis=1))


@every_backend
@in_every_run("reference", "xla", "mosaic")
def test_queries_that_see_nothing_beside_infinite_values(backend: Backend) -> None:
    check_queries_that_see_nothing(backend, replace(BASE, q_lens=(16, 0, 8, 3), kv_lens=(10, 0, 2, 3)))


# --- sizes


@pytest.mark.parametrize(("tokens", "keys"), [(0, 7), (7, 0), (0, 0)])
@every_backend
@in_every_run("xla", "mosaic", "triton")
def test_empty_arrays(backend: Backend, tokens: int, keys: int) -> None:
    case = replace(BASE, q_lens=(0, tokens), kv_lens=(keys, 0), tokens=tokens, keys=keys)
    inputs = draw(backend, case)
    out, lse = run(backend, case, inputs.arguments())
    chex.assert_shape([out, lse], [(tokens, 4, 64), (tokens, 4)])
    harness.assert_attention_close((out, lse), inputs.expected(), backend.variant.tolerance(inputs.case.dtype))


@bounded_backend
@in_every_run()
def test_more_query_tokens_than_a_grid_axis_holds(backend: Backend) -> None:
    """A call may have 70,000 query tokens, which exceeds 65,535, the maximum of the second and third dimension of a GPU
    grid. The tokens are in one or in many sequences.
    """
    rng = harness.fresh_rng()
    q = harness.normal(rng, (70_000, 1, 4), "float32")
    k, v = (harness.normal(rng, (140, 1, 4), "float32") for _ in range(2))
    for lens in ([69_000, 0, 900], [500] * 139 + [400]):
        cu_q_lens = np.cumsum([0, *lens], dtype=np.int32)
        kv_lens = np.array([100, 10, 30] if len(lens) == 3 else [1] * 140)
        arguments = {"q": q, "k": k, "v": v, "cu_q_lens": cu_q_lens}
        arguments["cu_kv_lens"] = np.cumsum([0, *kv_lens], dtype=np.int32)
        got = attend(backends.as_users_get(backend), False, return_lse=True)(**arguments)
        sequence_of_key = np.repeat(np.arange(len(lens)), kv_lens)
        sequence = np.searchsorted(cu_q_lens[1:], np.arange(70_000), side="right")
        scores = np.einsum("tc,uc->tu", q[:, 0], k[:, 0], dtype=np.float64) / 2
        weights = np.where(sequence[:, None] == sequence_of_key, np.exp(scores), 0)
        total = weights.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            want = weights @ v[:, 0] / np.where(total > 0, total, 1), np.log(total)
        harness.assert_attention_close(got, (want[0][:, None], want[1]), backend.variant.tolerance("float32"))


@pytest.mark.slow
@both_masks
@bounded_backend
@in_every_run(xla=["causal"])
def test_memory_grows_with_the_queries_and_not_with_the_keys(backend: Backend, causal: bool) -> None:
    call = attend(backends.as_users_get(backend), causal)

    def temp_bytes(tokens: int, num_keys: int) -> int:
        queries, keys = (jax.ShapeDtypeStruct((n, 2, 16), jnp.float32) for n in (tokens, num_keys))
        lens = jax.ShapeDtypeStruct((5,), jnp.int32)
        return harness.temp_bytes(call, q=queries, k=keys, v=keys, cu_q_lens=lens, cu_kv_lens=lens)

    small = temp_bytes(4096, 4096)
    assert temp_bytes(16384, 4096) < 5 * small
    assert temp_bytes(4096, 65536) <= small + 4096


# --- order and number of sequences, transformations and compiled programs


@every_backend
@in_every_run("xla")
def test_a_sequence_does_not_depend_on_the_batch(backend: Backend) -> None:
    inputs = draw(backend, BASE)
    case, arguments = inputs.case, inputs.arguments()
    want = run(backend, case, arguments)
    q_starts, kv_starts = arguments["cu_q_lens"], arguments["cu_kv_lens"]
    order = inputs.rng.permutation(4)
    tokens, keys = (
        np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order]) for starts in (q_starts, kv_starts)
    )
    rest = np.arange(tokens.size, case.tokens), np.arange(keys.size, case.keys)
    shuffled = {
        "q": arguments["q"][np.concatenate([tokens, rest[0]])],
        "k": arguments["k"][np.concatenate([keys, rest[1]])],
        "v": arguments["v"][np.concatenate([keys, rest[1]])],
        "cu_q_lens": np.cumsum([0, *np.diff(q_starts)[order]], dtype=np.int32),
        "cu_kv_lens": np.cumsum([0, *np.diff(kv_starts)[order]], dtype=np.int32),
    }
    got = run(backend, case, shuffled)
    tolerances = backend.variant.tolerance(inputs.case.dtype)
    harness.assert_attention_close(
        (got[0][: tokens.size], got[1][: tokens.size]), (want[0][tokens], want[1][tokens]), tolerances
    )
    for s in range(4):
        alone = arguments | {
            "cu_q_lens": np.array([0, *[q_starts[s + 1] - q_starts[s]] * 4], np.int32),
            "cu_kv_lens": np.array([0, *[kv_starts[s + 1] - kv_starts[s]] * 4], np.int32),
        }
        alone |= {"q": np.roll(alone["q"], -q_starts[s], axis=0)}
        alone |= {name: np.roll(alone[name], -kv_starts[s], axis=0) for name in ("k", "v")}
        got, size = run(backend, case, alone), case.q_lens[s]
        of_s = slice(q_starts[s], q_starts[s + 1])
        harness.assert_attention_close((got[0][:size], got[1][:size]), (want[0][of_s], want[1][of_s]), tolerances)


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_repeats_are_equal_bit_for_bit(backend: Backend) -> None:
    arguments = draw(backend, BASE).arguments()
    transformations.assert_repeats(attend(backend, True, return_lse=True), arguments, backend.repeats)


@every_backend
@in_every_run("xla")
def test_under_vmap(backend: Backend) -> None:
    rng = harness.fresh_rng()
    other = replace(BASE, q_lens=(0, 9, 4, 2), kv_lens=(1, 9, 30, 16))
    # Inputs are not poisoned, because under vmap, a token that is padding in one call may have keys in the other call.
    calls = [draw(backend, case, rng).arguments(poisoned=False) for case in (BASE, other)]
    call = attend(backend, True, return_lse=True)
    transformations.assert_vmaps(call, calls, backend.variant.tolerance(backend.dtype), over="q")


@compiled_backend
@in_every_run("xla")
def test_exported(backend: Backend) -> None:
    arguments = draw(backend, BASE).arguments()
    transformations.assert_exports(attend(backend, True, return_lse=True), arguments)


@every_backend
@in_every_run("xla")
def test_inside_a_scan(backend: Backend) -> None:
    """A scan over three layers equals three calls. Layers have separate queries, keys and values,
    and the same lengths.
    """
    inputs = [draw(backend, BASE) for _ in range(3)]
    calls = [i.arguments() for i in inputs]
    layers = {name: jnp.stack([call[name] for call in calls]) for name in ("q", "k", "v")}
    lens = {name: jnp.asarray(calls[0][name]) for name in ("cu_q_lens", "cu_kv_lens")}
    call = attend(backend, True, return_lse=True)
    _, (out, lse) = jax.jit(lambda layers: jax.lax.scan(lambda _, layer: (None, call(**layer, **lens)), None, layers))(
        layers
    )
    for i in range(3):
        harness.assert_attention_close((out[i], lse[i]), inputs[i].expected(), backend.variant.tolerance(backend.dtype))


@compiled_backend
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    rng = harness.fresh_rng()
    calls = [draw(backend, replace(BASE, q_lens=q, kv_lens=kv), rng).arguments() for q, kv in LENGTHS.values()]
    transformations.assert_traced_once(ragged_attention, backend.variant, calls)
    harness.assert_no_host_callbacks(attend(backend, True), **calls[0])
    assert "ragged_attention" in harness.scope_names(attend(backend, True), **calls[0])


# --- bad arguments

ZEROS, LENS = functools.partial(jnp.zeros, dtype=jnp.float32), functools.partial(jnp.zeros, dtype=jnp.int32)
GOOD: dict[str, Any] = {
    "q": ZEROS((6, 4, 24)),
    "k": ZEROS((9, 2, 24)),
    "v": ZEROS((9, 2, 16)),
    "cu_q_lens": LENS((3,)),
    "cu_kv_lens": LENS((3,)),
}
BAD = {
    "q of rank 4": ("q", {"q": ZEROS((1, 6, 4, 24))}),
    "an integer q": ("q", {"q": LENS((6, 4, 24))}),
    "k of another width": ("k", {"k": ZEROS((9, 2, 16))}),
    "k of another dtype": ("k", {"k": ZEROS((9, 2, 24)).astype(jnp.bfloat16)}),
    "v of other keys": ("v", {"v": ZEROS((8, 2, 16))}),
    "v of other heads": ("v", {"v": ZEROS((9, 4, 16))}),
    "v of another dtype": ("v", {"v": ZEROS((9, 2, 16)).astype(jnp.float16)}),
    "heads that do not divide": ("q", {"q": ZEROS((6, 3, 24))}),
    "fewer query heads than KV heads": ("q", {"q": ZEROS((6, 1, 24))}),
    "no KV heads": ("k", {"k": ZEROS((9, 0, 24)), "v": ZEROS((9, 0, 16))}),
    "cu_q_lens of rank 2": ("cu_q_lens", {"cu_q_lens": LENS((1, 3))}),
    "sums of nothing": ("cu_q_lens", {"cu_q_lens": jnp.zeros((0,), jnp.int32)}),
    "float cu_q_lens": ("cu_q_lens", {"cu_q_lens": ZEROS((3,))}),
    "cu_kv_lens of another batch": ("cu_kv_lens", {"cu_kv_lens": LENS((4,))}),
    "float cu_kv_lens": ("cu_kv_lens", {"cu_kv_lens": ZEROS((3,))}),
    "sm_scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "infinite sm_scale": ("sm_scale", {"sm_scale": float("inf")}),
    "a window of 0": ("window", {"window": 0}),
    "a window of no int": ("window", {"window": 5.0}),
    "windows of heads": ("window", {"window": HeadWindow(LENS((2,)), LENS((2,)))}),
    "a window without causality": ("window", {"window": 5, "causal": False}),
    "a number for causal": ("causal", {"causal": 1}),
    "an array for causal": ("causal", {"causal": jnp.bool_(True)}),
    "a soft cap of 0": ("soft_cap", {"soft_cap": 0.0}),
    "sinks of other heads": ("sinks", {"sinks": ZEROS((2,))}),
    "sinks of rank 2": ("sinks", {"sinks": ZEROS((1, 4))}),
    "half-precision sinks": ("sinks", {"sinks": ZEROS((4,)).astype(jnp.bfloat16)}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    jax.eval_shape(ragged_attention, **GOOD)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        ragged_attention(**(GOOD | change))
