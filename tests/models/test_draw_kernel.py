"""The Triton kernel that draws tokens selects the same tokens as the sampler without Triton."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from pallas_attn.models.engine import sampler
from pallas_attn.models.engine.draw_kernel import draw_rows
from pallas_attn.models.engine.request import NONFINITE
from pallas_attn.models.engine.sampler import SamplingRows
from tests.kit.slow_cases import slow_cases


@jax.jit
def without_triton(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    tokens = jnp.argmax(sampler._perturbed(logits, rows), axis=-1).astype(jnp.int32)
    return jnp.where(jnp.max(logits, axis=-1) > -jnp.inf, tokens, NONFINITE)


def with_kernel(logits: jax.Array, rows: SamplingRows, **sizes: int) -> jax.Array:
    noise = sampler._noise(rows, logits.shape[1])
    return draw_rows(logits, noise, rows.temperature, rows.top_k, rows.top_p, rows.min_p, **sizes)


def random_rows(rng: np.random.Generator, n: int, vocab_size: int) -> SamplingRows:
    """Return rows in which each limit is off, low or high."""
    return SamplingRows(
        jnp.asarray(rng.choice([0, 0.5, 1, 2], n), jnp.float32),
        jnp.asarray(rng.choice([0, 1, 2, 50, 300, vocab_size + 1], n), jnp.int32),
        jnp.asarray(rng.choice([1, 0.9, 0.5, 0.1, 1e-6], n), jnp.float32),
        jnp.asarray(rng.choice([0, 0, 0.05, 0.5], n), jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, n), jnp.uint32),
        jnp.arange(n, dtype=jnp.int32),
    )


def random_logits(rng: np.random.Generator, kind: str, n: int, vocab_size: int) -> jax.Array:
    logits = rng.standard_normal((n, vocab_size)) * 3
    if kind == "ties":
        logits = np.round(logits)
    if kind == "excluded":
        logits[rng.random((n, vocab_size)) < 0.4] = -np.inf
        logits[0] = -np.inf
        logits[1, 7:] = -np.inf
    return jnp.asarray(logits, jnp.float32)


@slow_cases("excluded-300", "different-300", "ties-300")
@pytest.mark.parametrize("vocab_size", [300, 777])
@pytest.mark.parametrize("kind", ["different", "ties", "excluded"])
def test_tokens_equal_the_tokens_without_triton(kind, vocab_size, rng):
    rows, logits = random_rows(rng, 12, vocab_size), random_logits(rng, kind, 12, vocab_size)
    np.testing.assert_array_equal(with_kernel(logits, rows, block=256), without_triton(logits, rows))


@pytest.mark.slow
def test_top_k_of_equal_logits_selects_the_first_tokens():
    n = 12
    logits = jnp.zeros((n, 600)).at[:, 300].set(1.0)
    rows = SamplingRows(
        *(jnp.full(n, 1.0), jnp.full(n, 3, jnp.int32), jnp.full(n, 1.0), jnp.zeros(n)),
        *(jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.int32)),
    )
    tokens = np.asarray(with_kernel(logits, rows, block=256))
    assert set(tokens.tolist()) == {0, 1, 300}


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1000, 32000, 102400, 262144])
@pytest.mark.parametrize("n", [1, 64, 300])
def test_tokens_equal_the_tokens_without_triton_on_a_gpu(n, vocab_size, rng):
    for kind in ("different", "ties", "excluded") if n > 1 else ("different", "ties"):
        rows, logits = random_rows(rng, n, vocab_size), random_logits(rng, kind, n, vocab_size)
        np.testing.assert_array_equal(with_kernel(logits, rows), without_triton(logits, rows))
        valid = jnp.where(logits == -jnp.inf, -1e9, logits)
        np.testing.assert_array_equal(jax.jit(sampler.draw)(valid, rows), without_triton(valid, rows))
