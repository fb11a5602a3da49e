"""Fixture that compiles an engine's steps once for all tests of a process, and a patch that shares the sampling.

A step is the compiled program of an engine for one bucket (numbers of decode rows and prompt tokens). `Runner` compiles
and runs the steps. `verify.PlainRun` is the recomputation of a sequence without a cache, which tests compare with; it
has a compiled program, too.

A test module requests the sharing with `pytest.mark.usefixtures("shared_steps")`. It must not do this if one of its
tests patches code of a model, because the test would run a step that was compiled before the patch, and later tests
would run the patched step. The conftest.py of the module's folder imports the fixture.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import pytest

from pallas_attn.models.engine import verify
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.step import plain
from pallas_attn.models.engine.step.compiler import RunnerState, StepCompiler

ALIKE: weakref.WeakKeyDictionary[Runner, str] = weakref.WeakKeyDictionary()
"""Description of each runner that may share steps: everything that its compiled steps depend on. The keys are weak,
because some runners live longer than the test that made them.
"""


COMPILED: dict[Any, Any] = {}
"""Compiled programs, by the description of everything that they depend on. `jax.clear_caches` keeps them. Modules use
the same small models, so the programs of a module are useful in the next.
"""


@pytest.fixture
def shared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share compiled steps during a test."""
    share_steps(monkeypatch)


def description(model: Any, *rest: Any) -> str:
    """Describe everything that the compiled programs of a model depend on."""
    weights = jax.tree.map(lambda w: (w.shape, str(w.dtype)), verify.split_model(model)[1])
    return repr((model.config, model.settings, model.mesh, weights, rest))


def share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `Runner` and `PlainRun`: an instance with the description of an earlier one reuses its compiled
    programs.
    """
    make_runner, compile_steps, make_plain = Runner.__init__, Runner.compile, verify.PlainRun.__init__
    compile_layers = Runner.compile_layers

    def runner(self: Runner, model: Any, config: Any, processes: Any = None) -> None:
        make_runner(self, model, config, processes)
        # The description has no weights of proposers, no functions and no processes.
        if config.speculate is None and config.logits_processor is None and processes is None:
            ALIKE[self] = description(model, config)
            _, self._programs.shared = COMPILED.setdefault(ALIKE[self], ({}, {}))

    def compiling(self: Runner, buckets: Sequence[Bucket], *rest: Any) -> None:
        known, _ = COMPILED[ALIKE[self]] if self in ALIKE else ({}, {})
        self._programs.forward |= {bucket: known[bucket] for bucket in buckets if bucket in known}
        compile_steps(self, buckets, *rest)
        known |= self._programs.forward

    def compiling_layers(self: Runner, buckets: Sequence[Bucket]) -> Any:
        layered = self._layered
        if layered is None or self not in ALIKE:
            return compile_layers(self, buckets)
        known = COMPILED.setdefault(("layers", layered.num_programs, ALIKE[self]), {})
        layered.compiled |= known
        compile_layers(self, buckets)
        known |= layered.compiled
        return layered

    def plain(self: Any, model: Any, max_output: int, cache_dtype: Any = None, kv_scales: Any = None) -> None:
        make_plain(self, model, max_output, cache_dtype, kv_scales)
        if kv_scales is None:  # the values of scales are constants of the compiled program
            key = f"plain {description(model, max_output, cache_dtype)}"
            self._choose = COMPILED.setdefault(key, self._choose)

    monkeypatch.setattr(Runner, "__init__", runner)
    monkeypatch.setattr(Runner, "compile", compiling)
    monkeypatch.setattr(Runner, "compile_layers", compiling_layers)
    monkeypatch.setattr(verify.PlainRun, "__init__", plain)


class LoweredOnce:
    """Replacement of `jax.stages.Lowered`: a program is lowered and compiled only if `COMPILED` does not have it."""

    def __init__(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]):
        self._key, self._lower = key, lower

    def compile(self, options: Any = None) -> Any:
        if self._key not in COMPILED:
            COMPILED[self._key] = self._lower().compile(options)
        return COMPILED[self._key]


def share_sampling() -> None:
    """Patch `StepCompiler` and `Runner` for the rest of the process: engines share the programs `sample` and
    `write_slot`. The compilation of `sample` takes as long as the compilation of `forward` of a tiny model. Without
    speculation and without a mesh, `sample` depends on the shapes of its arguments, on `max_logprobs` and on the logits
    processor; `write_slot` depends on the shapes of its arguments.
    """
    lower, compile_writes = StepCompiler.lower, Runner.compile_writes

    def lower_once(self: StepCompiler, name: Any, bucket: Any, state: RunnerState) -> Any:
        config = self._config
        if name != "sample" or config.speculate is not None or self._mesh is not None:
            return lower(self, name, bucket, state)
        arrays = jax.tree.leaves((state.last_tokens, state.edits, state.no_masks[self.mask_shape(bucket)]))
        of_arrays = tuple((array.shape, array.dtype, array.sharding) for array in arrays)
        functions = plain.sample, plain.draw, config.logits_processor  # tests replace them
        key = name, bucket, config.max_logprobs, self._model.config.vocab_size, of_arrays, functions
        return LoweredOnce(key, functools.partial(lower, self, name, bucket, state))

    def compile_writes_once(self: Runner) -> None:
        if self._mesh is None and self._processes is None:
            self._allocate()
            key = "write_slot", *((array.shape, array.sharding) for array in jax.tree.leaves(self._edits))
            self._write_slot = self._write_slot or COMPILED.get(key)
            compile_writes(self)
            COMPILED[key] = self._write_slot
        else:
            compile_writes(self)

    setattr(StepCompiler, "lower", lower_once)  # noqa: B010 - type checkers allow no assignment to a method
    setattr(Runner, "compile_writes", compile_writes_once)  # noqa: B010


share_sampling()
