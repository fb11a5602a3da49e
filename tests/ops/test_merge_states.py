"""Tests of `merge_states`: merging attention over the parts of any partition of the keys equals attention over all
keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn import lse_from_base2, lse_to_base2, merge_states, ragged_attention
from tests.contract import naive
from tests.kit.harness import F32_LSE, F32_OUT, HALF_OUT, Tolerance, assert_close, assert_same_bits, fresh_rng

QUERIES, HEADS, WIDTH, KEYS, PARTS = 3, 4, 8, 12, 5
MERGE = jax.jit(merge_states)


def queries_and_keys(
    rng: np.random.Generator, num_keys: int = KEYS, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw q [QUERIES, HEADS, WIDTH] and k, v [num_keys, HEADS, WIDTH]. Scores have a standard deviation of about
    `spread`.
    """
    q = rng.standard_normal((QUERIES, HEADS, WIDTH)) * spread / np.sqrt(WIDTH)
    return q, rng.standard_normal((num_keys, HEADS, WIDTH)), rng.standard_normal((num_keys, HEADS, WIDTH))


def split_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, part_of_key: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention over the keys of each part, in float32: outputs [n, QUERIES, HEADS, WIDTH] and LSEs."""
    states = [
        naive.attend_all(q, k, v, np.broadcast_to(part_of_key == part, (q.shape[0], k.shape[0])), 1.0)
        for part in range(num_parts)
    ]
    outs, lses = zip(*states, strict=True)
    return np.stack(outs).astype(np.float32), np.stack(lses).astype(np.float32)


def unsplit(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention over all keys. A sink logit is the score of an additional key with value 0."""
    out, lse = naive.attend_all(q, k, v, np.ones((q.shape[0], k.shape[0]), bool), 1.0)
    if sinks is not None:
        out = out * np.exp(lse - np.logaddexp(lse, sinks))[..., None]
    return out, lse


@settings(deadline=None)
@given(
    st.lists(st.integers(0, PARTS - 1), min_size=KEYS, max_size=KEYS),
    st.permutations(range(PARTS)),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.integers(0, 2**32 - 1),
)
def test_any_partition_in_any_order(part_of_key: list[int], order: tuple[int, ...], spread: float, seed: int) -> None:
    q, k, v = queries_and_keys(np.random.default_rng(seed), spread=spread)
    outs, lses = (x[list(order)] for x in split_attention(q, k, v, np.array(part_of_key), PARTS))
    out, lse = MERGE(outs, lses)
    want_out, want_lse = unsplit(q, k, v)
    assert_close("output", out, want_out, F32_OUT)
    assert_close("LSE", lse, want_lse, F32_LSE)


@pytest.mark.parametrize("empty", [[1], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_lse_of_inf_means_no_keys(empty: list[int]) -> None:
    """A part with LSE +inf is ignored like a part with LSE -inf, whatever its output is."""
    outs, lses = split_attention(*queries_and_keys(np.random.default_rng(0)), np.arange(KEYS) % PARTS, PARTS)
    marked = []
    for mark in (-np.inf, np.inf):
        lses[empty], outs[empty] = mark, np.nan
        marked.append(MERGE(outs, lses))
    assert_same_bits(*marked)
    assert not np.isnan(marked[0][0]).any()
    assert np.array_equal(np.isneginf(marked[0][1]).all(), len(empty) == PARTS)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, PARTS - 1), min_size=KEYS, max_size=KEYS),
    st.lists(st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 2.5, 40.0]), min_size=HEADS, max_size=HEADS),
    st.integers(0, 2**32 - 1),
)
def test_sinks_count_once_however_the_keys_are_split(part_of_key: list[int], sinks: list[float], seed: int) -> None:
    q, k, v = queries_and_keys(np.random.default_rng(seed))
    learned = np.array(sinks, np.float32)
    out, lse = MERGE(*split_attention(q, k, v, np.array(part_of_key), PARTS), learned)
    want_out, want_lse = unsplit(q, k, v, learned)
    assert_close("output", out, want_out, F32_OUT)
    assert_close("LSE, which leaves the sinks out", lse, want_lse, F32_LSE)


def test_parts_without_a_visible_key_change_no_bit() -> None:
    """The output of a part without a visible key may have any value."""
    rng = fresh_rng()
    part_of_key = rng.choice([1, 3], KEYS)
    outs, lses = split_attention(*queries_and_keys(rng), part_of_key, PARTS)
    empty = np.isneginf(lses)
    assert empty[[0, 2, 4]].all()
    clean = MERGE(outs, lses)
    for worst in (np.nan, np.inf, -np.inf):
        assert_same_bits(MERGE(np.where(empty[..., None], np.float32(worst), outs), lses), clean)


@pytest.mark.parametrize("sinks", [None, np.array([-np.inf, -1.0, 0.0, 40.0], np.float32)], ids=["no sinks", "sinks"])
def test_rows_that_see_nothing(sinks: np.ndarray | None) -> None:
    """The output of a query without a visible key is exactly 0 and its LSE -inf, also next to queries with visible
    keys.
    """
    outs = np.full((PARTS, QUERIES, HEADS, WIDTH), np.nan, np.float32)
    lses = np.full(outs.shape[:-1], -np.inf, np.float32)
    outs[2, 1], lses[2, 1] = 1.0, 0.0
    out, lse = (np.asarray(x) for x in MERGE(outs, lses, sinks))
    assert (out[[0, 2]] == 0).all()
    assert np.isneginf(lse[[0, 2]]).all()
    want = 1.0 if sinks is None else 1 / (1 + np.exp(sinks.astype(np.float64)))
    assert_close("output", out[1], np.broadcast_to(np.reshape(want, (-1, 1)), out[1].shape), F32_OUT)
    assert (lse[1] == 0).all()


def test_visible_nan_stays_nan() -> None:
    """NaN in a part makes the merged query NaN and no other query. An overflow in a model then remains visible, instead
    of looking like a query without visible keys.
    """
    outs, lses = split_attention(*queries_and_keys(fresh_rng()), np.arange(KEYS) % PARTS, PARTS)
    clean = [np.asarray(x) for x in MERGE(outs, lses)]
    outs[1, 0, 0], lses[1, 0, 0] = np.nan, np.nan  # the state after a key that is NaN
    outs[3, 2, 1] = np.nan  # the output after a value that is NaN
    out, lse = (np.asarray(x) for x in MERGE(outs, lses))
    nan_out, nan_lse = np.zeros(out.shape[:-1], bool), np.zeros(lse.shape, bool)
    nan_out[0, 0] = nan_out[2, 1] = nan_lse[0, 0] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(nan_out[..., None], out.shape))
    np.testing.assert_array_equal(np.isnan(lse), nan_lse)
    assert_same_bits(out[~nan_out], clean[0][~nan_out])


@pytest.mark.parametrize("offset", [-5e5, 5e5])
def test_scores_far_from_zero(offset: float) -> None:
    """The merge must use exp of differences of LSEs, because exp of these LSEs is 0 or infinite."""
    outs = np.array([[[1.0]], [[3.0]]], np.float32)
    out, lse = MERGE(outs, np.full((2, 1), offset, np.float32))
    np.testing.assert_array_equal(out, [[2.0]])
    np.testing.assert_allclose(lse, [offset + np.log(2)], rtol=1e-7)


@pytest.mark.parametrize("num_parts", [1, 4, 64, 1024])
def test_error_does_not_grow_with_the_number_of_parts(num_parts: int) -> None:
    rng = fresh_rng()
    q, k, v = queries_and_keys(rng, num_keys=1024)
    out, lse = MERGE(*split_attention(q, k, v, np.arange(1024) * num_parts // 1024, num_parts))
    want_out, want_lse = unsplit(q, k, v)
    assert_close("output", out, want_out, Tolerance(5e-7, 1e-6, 1e-9))
    assert_close("LSE", lse, want_lse, Tolerance(1e-6, 1e-6, 1e-9))


def test_error_does_not_grow_along_a_chain_of_merges() -> None:
    """256 parts are merged into one state, one after another, as in `mla_prefill`."""
    rng = fresh_rng()
    q, k, v = queries_and_keys(rng, num_keys=256)
    outs, lses = split_attention(q, k, v, np.arange(256), 256)
    state = functools.reduce(
        lambda state, part: MERGE(*(jnp.stack(pair) for pair in zip(state, part, strict=True))),
        zip(outs, lses, strict=True),
    )
    want_out, want_lse = unsplit(q, k, v)
    assert_close("output", state[0], want_out, Tolerance(2e-6, 2e-6, 1e-9))
    assert_close("LSE", state[1], want_lse, Tolerance(4e-6, 1e-6, 1e-9))


def test_half_precision_parts_are_merged_in_float32() -> None:
    rng = fresh_rng()
    q, k, v = queries_and_keys(rng, num_keys=64)
    outs, lses = split_attention(q, k, v, np.arange(64), 64)
    out, lse = MERGE(outs.astype(jnp.bfloat16), lses)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    weights = np.exp(lses.astype(np.float64) - unsplit(q, k, v)[1])[..., None]
    want = (outs.astype(jnp.bfloat16).astype(np.float64) * weights).sum(0)
    assert_close("output", out, want, HALF_OUT)
    assert_close("LSE", lse, unsplit(q, k, v)[1], F32_LSE)


@pytest.mark.slow
def test_parts_of_packed_sequences() -> None:
    """For packed sequences: merging attention to new tokens and attention to prefixes equals attention to both."""
    rng = fresh_rng()
    q_lens, prefix_lens = (3, 4, 2), (5, 0, 2)
    q, k, v = (rng.standard_normal((n, heads, 8), np.float32) for n, heads in ((9, 4), (16, 2), (16, 2)))
    cu_q_lens, cu_prefix_lens = (np.cumsum((0, *lens), dtype=np.int32) for lens in (q_lens, prefix_lens))
    is_prefix = np.concatenate([np.arange(p + n) < p for p, n in zip(prefix_lens, q_lens, strict=True)])
    sinks = jnp.asarray([0.5, -np.inf, 2.0, -1.0], jnp.float32)

    def attend(keys: np.ndarray, cu_kv_lens: np.ndarray, **options: Any) -> Any:
        arrays = (jnp.asarray(x) for x in (q, k[keys], v[keys], cu_q_lens, cu_kv_lens))
        return ragged_attention(*arrays, return_lse=True, **options)

    own = attend(~is_prefix, cu_q_lens)
    prefix = attend(is_prefix, cu_prefix_lens, causal=False)
    assert np.isneginf(prefix[1][3:7]).all(), "of a sequence without a prefix"
    out, lse = MERGE(*(jnp.stack(parts) for parts in zip(own, prefix, strict=True)), sinks)
    want_out, want_lse = attend(np.ones(16, bool), cu_q_lens + cu_prefix_lens, sinks=sinks)
    assert_close("output", out, want_out, F32_OUT)
    assert_close("LSE", lse, want_lse, F32_LSE)


def test_lses_of_base_2_convert_both_ways() -> None:
    """With LSEs of base 2, as in FlashInfer, the weights of parts are powers of 2. Infinite LSEs do not change."""
    outs, lses = split_attention(*queries_and_keys(fresh_rng()), np.arange(KEYS) % 2, 2)
    lses[0, 0], lses[1, 1] = -np.inf, np.inf
    base2 = np.asarray(lse_to_base2(jnp.asarray(lses)))
    out, lse = MERGE(outs, lse_from_base2(jnp.asarray(base2)))
    weights = np.where(np.isinf(base2), 0, np.exp2(base2.astype(np.float64)))
    assert_close("output", out, (outs * weights[..., None]).sum(0) / weights.sum(0)[..., None], F32_OUT)
    assert_close("LSE", lse_to_base2(lse), np.log2(weights.sum(0)), F32_LSE)
    np.testing.assert_array_equal(base2[[0, 1], [0, 1]], lses[[0, 1], [0, 1]])
    for convert in (lse_from_base2, lse_to_base2):
        with pytest.raises(ValueError, match=r"^lse: expected dtype float32, got bfloat16"):
            convert(jnp.zeros(3, jnp.bfloat16))


@pytest.mark.slow
def test_rows_may_have_any_axes() -> None:
    outs, lses = split_attention(*queries_and_keys(fresh_rng()), np.arange(KEYS) % PARTS, PARTS)
    want_out, want_lse = MERGE(outs, lses)
    flat = MERGE(outs.reshape(PARTS, -1, WIDTH), lses.reshape(PARTS, -1))
    mapped = jax.vmap(merge_states, in_axes=1)(jnp.asarray(outs), jnp.asarray(lses))
    for out, lse in (flat, mapped):
        assert_close("output", out.reshape(want_out.shape), want_out, F32_OUT)
        assert_close("LSE", lse.reshape(want_lse.shape), want_lse, F32_LSE)
    out, lse = MERGE(outs[:, 0, 0], lses[:, 0, 0])
    assert_close("output", out, want_out[0, 0], F32_OUT)
    assert_close("LSE", lse, want_lse[0, 0], F32_LSE)


GOOD = {
    "outs": np.zeros((PARTS, QUERIES, HEADS, WIDTH), np.float32),
    "lses": np.zeros((PARTS, QUERIES, HEADS), np.float32),
    "sinks": np.zeros((HEADS,), np.float32),
}
BAD = {
    "no parts": ("outs", {"outs": GOOD["outs"][:0], "lses": GOOD["lses"][:0]}),
    "outs without rows": ("outs", {"outs": np.zeros((), np.float32), "lses": np.zeros((), np.float32)}),
    "lses of another shape": ("lses", {"lses": GOOD["lses"][:-1]}),
    "lses with outs' last axis": ("lses", {"lses": GOOD["outs"]}),
    "half-precision lses": ("lses", {"lses": GOOD["lses"].astype(jnp.bfloat16)}),
    "sinks of other heads": ("sinks", {"sinks": np.zeros((HEADS + 1,), np.float32)}),
    "sinks of rank 2": ("sinks", {"sinks": np.zeros((1, HEADS), np.float32)}),
    "half-precision sinks": ("sinks", {"sinks": np.zeros((HEADS,), np.float16)}),
    "sinks without heads": ("sinks", {"outs": GOOD["outs"][:, 0, 0], "lses": GOOD["lses"][:, 0, 0]}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_error_names_the_bad_argument(argument: str, change: dict[str, np.ndarray]) -> None:
    arrays = {name: jnp.asarray(array) for name, array in (GOOD | change).items()}
    merge_states(**{name: jnp.asarray(array) for name, array in GOOD.items()})
    with pytest.raises(ValueError, match=f"^{argument}:"):
        merge_states(**arrays)
