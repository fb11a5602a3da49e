"""Compile steps once for all engines and plain runs of a test module.

A module uses `pytest.mark.usefixtures("shared_steps")` if none of its tests changes how a model computes. The
conftest.py of its folder imports both fixtures.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from models.engine import verify
from models.engine.config import Bucket
from models.engine.runner import Runner

ALIKE: weakref.WeakKeyDictionary[Runner, str] = weakref.WeakKeyDictionary()
"""Description of each runner made with the fixture. Some runners live longer than the test that made them."""


@pytest.fixture(scope="module")
def compiled_steps() -> dict[str, Any]:
    """Compiled steps, by a description of everything that they depend on."""
    return {}


@pytest.fixture
def shared_steps(compiled_steps: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners and plain runs of equal models and sizes reuse the compiled steps of the first one."""
    make_runner, compile_steps, make_plain = Runner.__init__, Runner.compile, verify.PlainRun.__init__

    def description(model: Any, *rest: Any) -> str:
        weights = jax.tree.map(lambda w: (w.shape, str(w.dtype)), verify.split_model(model)[1])
        return repr((model.config, model.settings, model.mesh, weights, rest))

    def runner(self: Runner, model: Any, config: Any, processes: Any = None) -> None:
        make_runner(self, model, config, processes)
        if config.speculate is None:  # a proposer may have weights, which the description does not cover
            ALIKE[self] = description(model, config)

    def compiling(self: Runner, buckets: Sequence[Bucket]) -> None:
        known = compiled_steps.setdefault(ALIKE[self], {}) if self in ALIKE else {}
        self._compiled |= {bucket: known[bucket] for bucket in buckets if bucket in known}
        compile_steps(self, buckets)
        known |= self._compiled

    def plain(self: Any, model: Any, max_output: int, cache_dtype: Any = None, kv_scales: Any = None) -> None:
        make_plain(self, model, max_output, cache_dtype, kv_scales)
        if kv_scales is None:  # scales are constants of the compiled program
            key = f"plain {description(model, max_output, cache_dtype)}"
            self._choose = compiled_steps.setdefault(key, self._choose)

    monkeypatch.setattr(Runner, "__init__", runner)
    monkeypatch.setattr(Runner, "compile", compiling)
    monkeypatch.setattr(verify.PlainRun, "__init__", plain)
