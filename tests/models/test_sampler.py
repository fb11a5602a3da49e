"""Sampling: what is kept, what is drawn, and that a draw is the request's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampler import SamplingRows, sample

sample_rows = jax.jit(sample)


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


def test_temperature_zero_takes_the_likeliest_and_says_by_how_much(logits):
    tokens, margins = sample_rows(logits, rows(6, temperature=0.0))
    best = np.sort(np.asarray(logits), axis=1)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_allclose(margins, best[:, -1] - best[:, -2], rtol=1e-6)


def test_greedy_rows_are_greedy_beside_drawn_ones(logits):
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


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_another_seed_or_position_is_another_draw(changed):
    flat = jnp.zeros((64, 1000))
    tokens, _ = sample_rows(flat, rows(64, **{changed: np.arange(64)}))
    assert len(np.unique(tokens)) > 50


def test_draws_follow_the_softmax():
    logits = jnp.asarray([0.0, 1.0, 2.0, -1.0])
    n = 4000
    tokens, _ = sample_rows(jnp.broadcast_to(logits, (n, 4)), rows(n, temperature=0.7, position=np.arange(n)))
    frequency = np.bincount(np.asarray(tokens), minlength=4) / n
    np.testing.assert_allclose(frequency, jax.nn.softmax(logits / 0.7), atol=4 * 0.5 / np.sqrt(n))


def test_top_k_keeps_the_k_likeliest():
    logits = jnp.asarray([3.0, 2.9, 2.8, 2.7, 2.6])
    tokens, _ = sample_rows(jnp.broadcast_to(logits, (300, 5)), rows(300, top_k=2, position=np.arange(300)))
    assert set(np.asarray(tokens).tolist()) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    for top_p, kept in ((0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = rows(400, top_p=top_p, position=np.arange(400))
        tokens, _ = sample_rows(jnp.broadcast_to(logits, (400, 4)), drawn)
        assert set(np.asarray(tokens).tolist()) == kept, top_p


def test_top_p_counts_among_what_top_k_left():
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1]))  # of the first two, the first has 0.57
    both = rows(300, top_k=2, top_p=0.5, position=np.arange(300))
    assert set(np.asarray(sample_rows(jnp.broadcast_to(logits, (300, 4)), both)[0]).tolist()) == {0}


def test_the_likeliest_token_survives_any_top_p():
    tokens, _ = sample_rows(jnp.zeros((2, 8)).at[:, 3].set(9.0), rows(2, top_p=1e-9))
    np.testing.assert_array_equal(tokens, [3, 3])


def test_high_temperatures_do_not_overflow(logits):
    tokens, margins = sample_rows(logits * 1e4, rows(6, temperature=1e-3))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert np.all(np.asarray(margins) > 0)
