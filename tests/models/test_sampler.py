"""Sampling: tokens that top-k and top-p allow, distribution of samples, and samples that depend only on the request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.request import NONFINITE
from pallas_attn.models.engine.sampler import LogitEdit, SamplingRows, _is_allowed, draw, sample
from tests.kit.slow_cases import slow_cases

sample_rows, is_kept = jax.jit(sample), jax.jit(_is_allowed)


def rows(n: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> SamplingRows:
    def fill(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (n,)))

    return SamplingRows(
        fill(temperature, np.float32),
        fill(top_k, np.int32),
        fill(top_p, np.float32),
        fill(min_p, np.float32),
        fill(seed, np.uint32),
        fill(position, np.int32),
    )


@pytest.fixture
def logits(rng) -> jax.Array:
    return jnp.asarray(rng.standard_normal((6, 40)) * 2, jnp.float32)


def test_temperature_zero_selects_the_likeliest_token_and_returns_its_margin(logits):
    tokens, margins = sample_rows(logits, rows(6, temperature=0.0))
    best = np.sort(np.asarray(logits), axis=1)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_allclose(margins, best[:, -1] - best[:, -2], rtol=1e-6)


def test_greedy_rows_in_a_batch_with_drawn_rows(logits):
    mixed = rows(6, temperature=[0.0, 1.0, 0.0, 2.0, 0.0, 1.0])
    tokens, _ = sample_rows(logits, mixed)
    np.testing.assert_array_equal(tokens[::2], np.argmax(logits, axis=1)[::2])


def test_a_draw_depends_on_seed_and_position_only(logits):
    seeds, positions = np.arange(6) + 2**31, np.arange(6) * 7
    together, _ = sample_rows(logits, rows(6, seed=seeds, position=positions))
    order = np.array([3, 0, 5, 1, 4, 2])
    shuffled, _ = sample_rows(logits[order], rows(6, seed=seeds[order], position=positions[order]))
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(6):
        alone, _ = sample_rows(logits[i : i + 1], rows(1, seed=seeds[i], position=positions[i]))
        assert alone[0] == together[i]


@slow_cases("seed")
@pytest.mark.parametrize("changed", ["seed", "position"])
def test_other_seed_or_position_gives_another_draw(changed):
    flat = jnp.zeros((64, 1000))
    tokens, _ = sample_rows(flat, rows(64, **{changed: np.arange(64)}))
    assert len(np.unique(tokens)) > 50


def test_draws_follow_the_softmax():
    logits = jnp.asarray([0.0, 1.0, 2.0, -1.0])
    n = 4000
    tokens, _ = sample_rows(jnp.broadcast_to(logits, (n, 4)), rows(n, temperature=0.7, position=np.arange(n)))
    frequency = np.bincount(np.asarray(tokens), minlength=4) / n
    np.testing.assert_allclose(frequency, jax.nn.softmax(logits / 0.7), atol=4 * 0.5 / np.sqrt(n))


def test_top_k_allows_the_k_likeliest():
    logits = jnp.asarray([3.0, 2.9, 2.8, 2.7, 2.6])
    tokens, _ = sample_rows(jnp.broadcast_to(logits, (300, 5)), rows(300, top_k=2, position=np.arange(300)))
    assert set(np.asarray(tokens).tolist()) == {0, 1}


def test_top_p_allows_the_smallest_set_that_reaches_p():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    for top_p, kept in ((0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = rows(400, top_p=top_p, position=np.arange(400))
        tokens, _ = sample_rows(jnp.broadcast_to(logits, (400, 4)), drawn)
        assert set(np.asarray(tokens).tolist()) == kept, top_p


def test_top_p_is_applied_after_top_k():
    # With top_k=2, token 0 has probability 0.4 / 0.7 = 0.57, which is more than top_p.
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1]))
    both = rows(300, top_k=2, top_p=0.5, position=np.arange(300))
    assert set(np.asarray(sample_rows(jnp.broadcast_to(logits, (300, 4)), both)[0]).tolist()) == {0}


def allowed_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that min-p, top-k and top-p allow, computed in float64 with a sort, and the tokens for which
    rounding in float32 cannot change the result."""
    x = logits.astype(np.float64)
    share = np.exp(x - x.max())
    order = np.lexsort((np.arange(x.size), -x))  # by descending logit, then by ascending id
    order = order[share[order] >= min_p][: top_k or x.size]
    before = np.cumsum(share[order]) - share[order]
    before /= share[order].sum()
    allowed, sure = np.zeros(x.size, bool), np.ones(x.size, bool)
    allowed[order[(before < top_p) | (top_p == 1)]] = True
    sure[order] = np.abs(before - top_p) > 1e-5
    return allowed, sure & (np.abs(share - min_p) > 1e-5)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([7, 300]),
    top_k=st.sampled_from([0, 1, 2, 5, 256, 400]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.6, 1.0]),
    levels=st.sampled_from([0, 3, 1000]),
)
def test_allowed_tokens_match_a_reference_with_sort(seed, size, top_k, top_p, min_p, levels):
    """The allowed tokens equal a reference that sorts the logits.

    Logits have ties and both signs, or are all equal, and vocabulary sizes are not multiples of a chunk.
    """
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-levels, levels + 1, (2, size)) * (4 / max(levels, 1))).astype(np.float32)
    given = (np.full(2, top_k, np.int32), np.full(2, top_p, np.float32), np.full(2, min_p, np.float32))
    for row, of_row in zip(logits, np.asarray(is_kept(logits, *given)), strict=True):
        wanted, sure = allowed_by_sorting(row, top_k, top_p, min_p)
        np.testing.assert_array_equal(of_row[sure], wanted[sure])
        assert of_row[np.argmax(row)]


@pytest.mark.parametrize(("limit", "number"), [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 0.0049}, 5)])
def test_equal_logits_allow_lower_ids_first(limit: dict[str, float], number: int):
    """Logits of 999 of 1,000 tokens are equal; half of them are -0.0."""
    logits = jnp.where(jnp.arange(1000) % 2 == 1, -0.0, 0.0)[None].at[:, -1].set(-1.0)
    allowed = is_kept(
        -0.0 * logits + logits, *(getattr(rows(1, **limit), name) for name in ("top_k", "top_p", "min_p"))
    )
    np.testing.assert_array_equal(np.flatnonzero(allowed), np.arange(number))
    tokens, _ = sample_rows(jnp.broadcast_to(logits, (64, 1000)), rows(64, **limit, position=np.arange(64)))
    assert set(np.asarray(tokens).tolist()) <= set(range(number))
    assert len(set(np.asarray(tokens).tolist())) == number


def test_min_p_allows_tokens_relative_to_the_likeliest():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (0.7, {0}), (1.0, {0})):
        tokens, _ = sample_rows(jnp.broadcast_to(logits, (400, 4)), rows(400, min_p=min_p, position=np.arange(400)))
        assert set(np.asarray(tokens).tolist()) == kept, min_p


def test_edited_logits_are_used_only_if_needed(logits):
    """A row in which all tokens are excluded gives NONFINITE."""

    @jax.jit
    def tokens_of(is_used):
        edit = LogitEdit(
            lambda logits: jnp.where(jnp.arange(40)[None] < 38, -jnp.inf, logits).at[0].set(-jnp.inf), is_used
        )
        return draw(logits, rows(6, temperature=[0.0, 1.0] * 3, position=np.arange(6)), edit)

    unused, used = tokens_of(False), tokens_of(True)
    np.testing.assert_array_equal(unused, draw(logits, rows(6, temperature=[0.0, 1.0] * 3, position=np.arange(6))))
    assert used[0] == NONFINITE
    assert set(np.asarray(used[1:]).tolist()) == {38, 39}


def test_likeliest_token_is_allowed_at_any_top_p():
    tokens, _ = sample_rows(jnp.zeros((2, 8)).at[:, 3].set(9.0), rows(2, top_p=1e-9))
    np.testing.assert_array_equal(tokens, [3, 3])


def test_sampling_uses_no_sort():
    """`sample` has no sort operation.

    On a GPU, XLA implements sorts of long rows with kernels that it does not record in CUDA graphs, so the host would
    wait for the device.
    """
    text = str(jax.make_jaxpr(sample)(jnp.zeros((2, 500)), rows(2)))
    assert "top_k" in text
    assert "sort" not in text


def test_low_temperatures_do_not_overflow(logits):
    tokens, margins = sample_rows(logits * 1e4, rows(6, temperature=1e-3))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert np.all(np.asarray(margins) > 0)


def test_high_temperatures_do_not_overflow(logits):
    """At the highest temperature, samples depend only on the noise, as if all logits were equal."""
    highest = SamplingParams(temperature=1e6).temperature
    tokens, margins = sample_rows(logits, rows(6, temperature=highest, position=np.arange(6)))
    noise, of_noise = sample_rows(jnp.zeros_like(logits), rows(6, position=np.arange(6)))
    np.testing.assert_array_equal(tokens, noise)
    np.testing.assert_allclose(margins, of_noise * highest, rtol=1e-3)
