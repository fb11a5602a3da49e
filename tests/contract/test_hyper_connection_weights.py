"""Contract of `hyper_connection_weights`: every backend is compared with NumPy in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import hyper_connection_weights
from tests.contract import backends, transformations
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.kit import harness

every_backend = backends.every_backend("hyper_connection_weights")
TOLERANCE = harness.Tolerance(5e-7, 5e-6, 1e-10)


@dataclass(frozen=True)
class StreamCase:
    """One call. Logits have a standard deviation of `spread`: with 6, some sums are as small as eps = 1e-6, and the
    last of 20 iterations still changes the result.
    """

    tokens: int = 9
    streams: int = 4
    iterations: int = 20
    eps: float = 1e-6
    spread: float = 6.0

    @property
    def columns(self) -> int:
        return (2 + self.streams) * self.streams

    @property
    def static(self) -> dict[str, Any]:
        return {"iterations": self.iterations, "eps": self.eps}

    def draw(self, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Draw the arrays with `rng`, or with the seed of the test run if it is None."""
        rng = rng or harness.fresh_rng()
        inverse_rms = rng.uniform(0.2, 3, self.tokens)
        arrays = {
            "logits": self.spread * rng.standard_normal((self.tokens, self.columns)) / inverse_rms[:, None],
            "inverse_rms": inverse_rms,
            "scale": np.array([0.5, 0.8, 1.2]),
            "base": rng.standard_normal(self.columns),
        }
        return {name: array.astype(np.float32) for name, array in arrays.items()}


BASE = StreamCase()
CASES = {
    "4 streams": BASE,
    "one iteration": replace(BASE, iterations=1),
    "two iterations": replace(BASE, iterations=2, spread=2.0),
    "no epsilon": replace(BASE, eps=0.0, spread=1.0),
    "large epsilon": replace(BASE, eps=0.03),
    "one token": replace(BASE, tokens=1),
    "65 tokens": replace(BASE, tokens=65, spread=1.0),
    "1 stream": replace(BASE, streams=1),
    "2 streams": replace(BASE, streams=2),
    "3 streams": replace(BASE, streams=3),
    "8 streams": replace(BASE, streams=8, spread=3.0),
    "16 streams": replace(BASE, streams=16, tokens=3, spread=3.0),
    "32 streams": replace(BASE, streams=32, tokens=2, spread=1.0),
}
FEW_STREAMS = unsupported(triton=dict.fromkeys(("3 streams", "32 streams"), "takes a power of two of streams"))


def divided_by_sums(mix: np.ndarray, axis: int, eps: float) -> np.ndarray:
    return mix / (mix.sum(axis=axis, keepdims=True) + eps)


def naive(
    case: StreamCase,
    logits: np.ndarray,
    inverse_rms: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    *,
    first: int = 1,
    eps_of_sums: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `pre`, `post` and `mix` in float64.

    Args:
      first: axis whose sums are divided by first and last: 1 for the sums of columns.
      eps_of_sums: epsilon that is added to sums, if it is not the epsilon of the case.
    """
    n, eps = case.streams, case.eps if eps_of_sums is None else eps_of_sums
    factors = np.repeat(scale.astype(np.float64), [n, n, n * n])
    z = logits.astype(np.float64) * inverse_rms[:, None] * factors + base
    read, write = (1 / (1 + np.exp(-part)) for part in (z[:, :n], z[:, n : 2 * n]))
    mix = z[:, 2 * n :].reshape(-1, n, n)
    mix = np.exp(mix - mix.max(axis=2, keepdims=True))
    mix = divided_by_sums(mix / mix.sum(axis=2, keepdims=True) + case.eps, first, eps)
    for _ in range(case.iterations - 1):
        mix = divided_by_sums(divided_by_sums(mix, 3 - first, eps), first, eps)
    return read + case.eps, 2 * write, mix


def weights(backend: Backend, case: StreamCase = BASE) -> harness.Jitted:
    return backends.compiled(hyper_connection_weights, backend, **case.static)


def assert_weights(got: Any, want: Any) -> None:
    for name, result, expected in zip(("pre", "post", "mix"), got, want, strict=True):
        harness.assert_close(name, result, expected, TOLERANCE)


@backends.every_case("hyper_connection_weights", CASES)
@FEW_STREAMS
@in_every_run(
    reference=["4 streams", "one iteration", "large epsilon"],
    xla=["one iteration", "large epsilon", "65 tokens", "2 streams", "32 streams"],
    triton=all_but("16 streams", "two iterations", "no epsilon"),
)  # fmt: skip
def test_values(backend: Backend, name: str) -> None:
    case, arrays = CASES[name], CASES[name].draw()
    got = weights(backend, case)(**arrays)
    assert [array.dtype for array in got] == [jnp.float32] * 3
    assert_weights(got, naive(case, **arrays))


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an iteration fewer": lambda arrays: naive(replace(BASE, iterations=19), **arrays),
    "rows before columns": lambda arrays: naive(BASE, first=2, **arrays),
    "no epsilon at all": lambda arrays: naive(replace(BASE, eps=0.0), **arrays),
    "no epsilon in sums": lambda arrays: naive(BASE, eps_of_sums=0.0, **arrays),
    "transposed": lambda arrays: (*(of := naive(BASE, **arrays))[:2], of[2].swapaxes(1, 2)),
    "not divided by the RMS": lambda arrays: naive(BASE, **arrays | {"inverse_rms": np.ones(BASE.tokens)}),
    "scales exchanged": lambda arrays: naive(BASE, **arrays | {"scale": arrays["scale"][::-1]}),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_values_notice_mistakes(mistake: Callable[[dict[str, Any]], Any]) -> None:
    """The inputs and the tolerance of `test_values` distinguish these mistakes from rounding."""
    arrays = BASE.draw(np.random.default_rng(0))
    with pytest.raises(AssertionError, match="above the tolerance"):
        assert_weights(mistake(arrays), naive(BASE, **arrays))


@every_backend
@in_every_run("xla", "triton")
def test_large_logits(backend: Backend) -> None:
    """Sigmoids are exactly 0 or 1, and each row of `mix` selects a stream. Nothing overflows."""
    sign = np.where(np.arange(BASE.columns) % 2, np.float32(-1), np.float32(1))
    order = 1e30 * np.eye(4, dtype=np.float32)[[2, 0, 3, 1]]
    logits = np.concatenate([1e30 * sign[:8], order.ravel()])[None]
    ones = {"inverse_rms": np.ones(1, np.float32), "scale": np.ones(3, np.float32)}
    pre, post, mix = weights(backend)(logits=logits, base=np.zeros(24, np.float32), **ones)
    harness.assert_close("pre", pre[0], BASE.eps + np.array([1, 0, 1, 0]), TOLERANCE)
    harness.assert_close("post", post[0], [2, 0, 2, 0], TOLERANCE)
    harness.assert_close("mix", mix[0], order / 1e30, harness.Tolerance(1e-5, 1e-5, 1e-9))


@every_backend
@in_every_run("xla", "triton")
def test_tokens_are_independent(backend: Backend) -> None:
    """A token with NaN changes no other token, and a token has the same bits alone."""
    arrays, call = BASE.draw(), weights(backend)
    want = call(**arrays)
    broken = arrays | {"logits": arrays["logits"].copy(), "inverse_rms": arrays["inverse_rms"].copy()}
    broken["logits"][3], broken["inverse_rms"][6] = np.nan, np.inf
    rest = np.delete(np.arange(BASE.tokens), [3, 6])
    for got, right in zip(call(**broken), want, strict=True):
        harness.assert_same_bits(got[rest], right[rest])
        assert np.isnan(got[3]).all()
    for token in (0, 8):
        alone = arrays | {name: arrays[name][token : token + 1] for name in ("logits", "inverse_rms")}
        harness.assert_same_bits(call(**alone), tuple(right[token : token + 1] for right in want))


# --- transformations and compiled programs


@every_backend
@in_every_run("xla")
def test_under_vmap(backend: Backend) -> None:
    drawn, call = BASE.draw(), weights(backend)
    stacked = {name: np.stack([array, array[::-1]]) for name, array in drawn.items()}
    got = jax.jit(jax.vmap(lambda each: call(**each)))(jax.tree.map(jnp.asarray, stacked))
    for i in range(2):
        each = {name: array[i] for name, array in stacked.items()}
        assert_weights(tuple(array[i] for array in got), call(**each))


@backends.every_backend("hyper_connection_weights", backends.is_compiled)
@in_every_run("xla")
def test_exported(backend: Backend) -> None:
    transformations.assert_exports(weights(backend), BASE.draw())


@backends.every_backend("hyper_connection_weights", backends.is_compiled)
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    calls = [BASE.draw(), replace(BASE, spread=1.0).draw()]
    transformations.assert_traced_once(
        functools.partial(hyper_connection_weights, **BASE.static), backend.variant, calls
    )
    harness.assert_no_host_callbacks(weights(backend), **calls[0])
    assert "hyper_connection_weights" in harness.scope_names(weights(backend), **calls[0])


# --- bad arguments

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "16-bit logits": ("logits: expected dtype float32", {"logits": jnp.zeros((9, 24), jnp.bfloat16)}),
    "23 columns": ("logits: expected .* columns for n streams, got 23", {"logits": jnp.zeros((9, 23))}),
    "no columns": ("logits: expected columns of at least 1", {"logits": jnp.zeros((9, 0))}),
    "other tokens": ("inverse_rms: expected shape", {"inverse_rms": jnp.zeros(8)}),
    "two scales": ("scale: expected shape", {"scale": jnp.zeros(2)}),
    "another base": ("base: expected shape", {"base": jnp.zeros(8)}),
    "no iteration": ("iterations: expected at least 1", {"iterations": 0}),
    "negative epsilon": ("eps: expected a finite number of at least 0", {"eps": -1e-6}),
    "infinite epsilon": ("eps: expected a finite number of at least 0", {"eps": float("inf")}),
    "epsilon None": ("eps: expected a finite number of at least 0", {"eps": None}),
    "boolean epsilon": ("eps: expected a finite number of at least 0", {"eps": False}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("message", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(message: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {name: jnp.asarray(array) for name, array in BASE.draw().items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        hyper_connection_weights(**arguments | change)


def test_no_tokens() -> None:
    arguments: dict[str, Any] = {name: jnp.asarray(array) for name, array in BASE.draw().items()}
    empty = arguments | {name: arguments[name][:0] for name in ("logits", "inverse_rms")}
    assert [array.shape for array in hyper_connection_weights(**empty)] == [(0, 4), (0, 4), (0, 4, 4)]
