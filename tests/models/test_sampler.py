"""Sampling: tokens that top-k and top-p allow, distribution of samples, and samples that depend only on the request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.sampler import SamplingRows, _is_allowed, sample
from tests.kit.slow_cases import slow_cases

sample_rows, is_kept = jax.jit(sample), jax.jit(_is_allowed)


def rows(n: int, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=0) -> SamplingRows:
    def fill(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (n,)))

    return SamplingRows(
        fill(temperature, np.float32),
        fill(top_k, np.int32),
        fill(top_p, np.float32),
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


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 7, 256, 300]),
    top_k=st.sampled_from([0, 1, 2, 5, 256, 400]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    levels=st.sampled_from([3, 1000]),
)
def test_allowed_tokens_match_a_reference_with_sort(seed, size, top_k, top_p, levels):
    """The allowed tokens equal a reference that sorts the logits.

    Logits have ties and both signs, and vocabulary sizes are not multiples of a chunk. Tokens whose logit equals the
    lowest allowed logit are also allowed.
    """
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-levels, levels + 1, (2, size)) * (4 / levels)).astype(np.float32)
    kept = np.asarray(is_kept(logits, np.full(2, top_k, np.int32), np.full(2, top_p, np.float32)))
    for row, of_row in zip(logits.astype(np.float64), kept, strict=True):
        least = np.sort(row)[::-1][: top_k or size][-1]
        probability = np.where(row >= least, np.exp(row - row.max()), 0) / np.sum(np.exp(row[row >= least] - row.max()))
        before = np.array([probability[row > x].sum() for x in row])
        wanted = (row >= least) & ((before < top_p) | (top_p == 1))
        sure = np.abs(before - top_p) > 1e-5  # rounding may change the result of other entries
        np.testing.assert_array_equal(of_row[sure], wanted[sure])
        assert of_row[np.argmax(row)]


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
