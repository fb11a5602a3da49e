"""Backends of the contract suites, and the decorators that run a test with each backend.

A contract suite is the test module of an operation. It runs the same cases with every backend, which is an
implementation of operations ("reference", "xla", "mosaic", "triton") with its settings in the tests. To add a backend,
add an entry to `BACKENDS`. The suites of all operations that the backend implements then run with it.

Two decorators of a test describe exceptions. `unsupported` names the cases for which a backend raises
NotImplementedError. `in_every_run` names the cases that `make test` runs; the others run in `make test-slow`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_attn import DecodePlan
from pallas_attn.mosaic import decode_config
from pallas_attn.mosaic.prefill import config as flash_config
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.compress_and_write.config import CompressConfig
from pallas_attn.ops.mla_decode import config as mla_config
from pallas_attn.ops.plan_decode.config import PlanConfig
from pallas_attn.ops.write_kv import config as write_config
from pallas_attn.portable.online_softmax import XlaConfig
from pallas_attn.runtime import device, dispatch
from pallas_attn.runtime.device import Architecture
from pallas_attn.triton.tiles import FlashTile
from tests.kit import harness
from tests.kit.harness import Jitted, Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """An implementation with its settings in the contract suites.

    Attributes:
      name: name of the implementation.
      architecture: compute capability of the GPU that the kernels are for; None if the implementation has the same
      kernels for all GPUs.
      configs: configurations that replace the tuned or heuristic configuration of the same type.
      dtype: dtype of the queries in cases that name no dtype.
      dense: whether the implementation stores all scores, so that its memory grows with queries times keys. Tests with
      large inputs leave it out.
      kernels: whether the implementation has Mosaic or Triton kernels. On a GPU they are compiled; on other machines an
      interpreter runs them. Interpreted kernels are slow, so tests repeat calls less often. Tests of the compiled XLA
      program leave these backends out, because the compile gate (tests/aot) has such tests.
      interpreter: function that returns the context in which kernels are interpreted; None if they need no context.
      plans: whether, with a plan in `fixed` mode, the result of a sequence has the same bits in any batch.
      tree_tiles: whether `mla_decode` uses other tiles with a draft mask, so that a mask that hides nothing may change
      bits.
    """

    name: str
    architecture: Architecture | None = None
    configs: tuple[Any, ...] = ()
    dtype: str = "float32"
    dense: bool = False
    kernels: bool = False
    interpreter: Callable[[pytest.CaptureFixture[str]], contextlib.AbstractContextManager[None]] | None = None
    plans: bool = False
    tree_tiles: bool = False

    @property
    def id(self) -> str:
        """Name of the backend in the ids of tests."""
        return f"{self.name}_sm100" if self.architecture == (10, 0) else self.name

    @functools.cached_property
    def variant(self) -> Variant:
        """The backend in the form that `tests.kit.harness` uses."""
        return Variant(self.name, self.configs, self.architecture, honours_plans=self.plans)

    def implements(self, op: str) -> bool:
        """Return whether the backend implements an operation and can run on this machine, compiled or interpreted."""
        if self.architecture is None:
            return self.name in dispatch.implementations(op)
        runs_here = self.interpreted or device.current().capability == self.architecture
        return runs_here and (self.name, self.architecture) in dispatch.MODULES[op]

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted on this machine."""
        return self.kernels and jax.default_backend() != "gpu"

    @property
    def repeats(self) -> int:
        """Number of calls in a test which asserts that repeated calls return the same bits."""
        return 3 if self.interpreted else 100

    def alone(self, batch: int) -> range:
        """Return the sequences of a batch that a test also computes alone: one if the kernel is interpreted, otherwise
        all except sequence 0, which has no tokens in these tests.
        """
        return range(1, 2 if self.interpreted else batch)

    @contextlib.contextmanager
    def running(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Return a context in which calls of the backend run on this machine, compiled or interpreted. Skip the test if
        this version of jax is too old for the backend.
        """
        if self.name == "mosaic" and jax.__version_info__ < dispatch.MOSAIC_JAX:
            pytest.skip(f"mosaic does not run with jax {jax.__version__}")
        with contextlib.ExitStack() as stack:
            if self.interpreter and self.interpreted:
                if self.architecture:
                    named = ".".join(map(str, self.architecture))
                    stack.enter_context(mock.patch.dict(os.environ, {device.INTERPRET_VARIABLE: named}))
                stack.enter_context(self.interpreter(capsys))
            yield


CUT_SHORT_ROWS = PlanConfig(row_overhead_pages=1, cut_pages=0)

BACKENDS = (
    Backend("reference", dense=True),
    # With these small tiles, the small inputs have many tiles. group_rows does not divide the number of rows.
    Backend("xla", configs=(XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4),)),
    Backend(
        "mosaic",
        (9, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1),
            mla_config.TwoWarpgroupConfig(pairs=1, cluster=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            # Each CTA writes few entries, so that a call has many CTAs, and several CTAs write to one group of a scale.
            write_config.WriteKVConfig(row_threads=32, scan_tokens=2),
            CUT_SHORT_ROWS,
        ),
        dtype="bfloat16",
        kernels=True,
        interpreter=harness.interpreting,
        plans=True,
    ),
    Backend(
        "mosaic",
        (10, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=128, stages=2, programs_per_multiprocessor=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            write_config.WriteKVConfig(row_threads=32, scan_tokens=2),
            CUT_SHORT_ROWS,
        ),
        dtype="bfloat16",
        kernels=True,
        interpreter=harness.interpreting,
        plans=True,
    ),
    # Triton kernels need no context: tests/conftest.py sets the interpreter's variable on machines without a GPU.
    Backend(
        "triton",
        # Programs of `compress_and_write` have several tokens, and pool the rows of a block in several steps.
        configs=(
            CUT_SHORT_ROWS,
            CompressConfig(tokens=4, rows=4, warps=4),
            FlashTile(rows=16, tokens=32, warps=4, stages=2, bare_steps=True),
        ),
        dtype="bfloat16",
        kernels=True,
        plans=True,
        tree_tiles=True,
    ),
)


MOSAIC = next(backend for backend in BACKENDS if backend.name == "mosaic")


# --- cases of `make test`, and unsupported cases


@dataclasses.dataclass(frozen=True)
class AllBut:
    """Set of all cases of a test except the cases `names`."""

    names: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name not in self.names


def all_but(*names: str) -> AllBut:
    """Return the set of all cases of a test except the cases `names`, for `in_every_run`."""
    return AllBut(frozenset(names))


def in_every_run(*backends: str, **cases: Collection[str] | AllBut) -> pytest.MarkDecorator:
    """Select the cases of a test that `make test` runs.

    Positional arguments are ids of backends that run all cases. A keyword argument is the id of a backend with the
    names of its cases. All other cases are marked `slow` and run in `make test-slow`. The name of a case is the part of
    the test id in brackets, without the backend. On a GPU, backends with kernels run all cases. `make test` runs all
    cases of a test without this decorator.


    Example:
      >>> @every_backend("paged_decode")
      ... @in_every_run("xla", mosaic=["one page", "no pages"], triton=all_but("many pages"))
      ... def test_lengths(backend, name): ...
    """
    return pytest.mark.in_every_run(**dict.fromkeys(backends, all_but()), **cases)


def unsupported(**reasons: str | Mapping[str, str]) -> pytest.MarkDecorator:
    """Declare cases of a test that a backend does not support. They pass if the call raises NotImplementedError.

    Args:
      reasons: by backend, a pattern of the error message for all cases, or a mapping of the names of unsupported cases
      to patterns. The entry of "mosaic" also applies to "mosaic_sm100", unless it has an entry.
    """
    return pytest.mark.unsupported(**reasons)


# --- parametrisation of the suites


def backends_of(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> list[Backend]:
    """Return the backends of an operation that run on this machine and for which `wanted` is true."""
    return [backend for backend in BACKENDS if backend.implements(op) and wanted(backend)]


def every_backend(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Run a test with argument `backend` for each backend of an operation for which `wanted` is true."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("backend", params, indirect=True)


def every_case(op: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run a test with arguments `backend` and `name` for each backend of an operation and each case."""
    params = [pytest.param(backend, name, id=f"{backend.id}-{name}") for backend in backends_of(op) for name in cases]
    return pytest.mark.parametrize(("backend", "name"), params, indirect=["backend"])


def every_variant(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Run a test with argument `variant`, the `Variant` of a backend, for each backend that `every_backend` would
    select.
    """
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("variant", params, indirect=True)


def is_lean(backend: Backend) -> bool:
    return not backend.dense


def is_compiled(backend: Backend) -> bool:
    """Return whether a backend has no kernels. Tests that inspect the compiled XLA program run with these backends."""
    return not backend.kernels


def is_compiled_and_lean(backend: Backend) -> bool:
    return is_compiled(backend) and is_lean(backend)


# --- calls


def call(op: Callable[..., Any], backend: Backend, arrays: Mapping[str, Any], **static: Any) -> Any:
    """Run an operation with a backend. It is compiled once for each backend, set of static arguments, and shapes."""
    return compiled(op, backend, **static)(**arrays)


def compiled(op: Callable[..., Any], backend: Backend, **static: Any) -> Jitted:
    return harness.compiled(op, backend.variant, **static)


def as_users_get(backend: Backend) -> Backend:
    """Return the backend without `configs`, that is with the tuned or heuristic configurations that users get."""
    return dataclasses.replace(backend, configs=())


def for_width(backend: Backend, head_dim: int) -> Backend:
    """Return the backend without settings of Mosaic kernels for wide heads: two stages of them do not fit shared
    memory."""
    if head_dim <= 256:
        return backend
    settings = decode_config.DecodeConfig | flash_config.FlashConfig
    kept = (config for config in backend.configs if not isinstance(config, settings))
    return dataclasses.replace(backend, configs=tuple(kept))


def plan_of(
    backend: Backend, arrays: Mapping[str, Any], *, window: int | None = None, num_programs: int, mode: str
) -> DecodePlan:
    """Return a plan for the arguments of a decode call.

    The XLA implementation computes the plan, because the Mosaic kernel of `plan_decode` is slow to interpret; it has
    separate tests. The plan also splits sequences with few pages, so that small inputs have KV splits.

    Args:
      window: window of the call if it is an int. A `HeadWindow` is in `arrays`.
    """
    return _planner(backend, window, num_programs, mode)(dict(arrays))


@functools.cache
def _planner(backend: Backend, window: int | None, num_programs: int, mode: str) -> Jitted:
    @jax.jit
    def plan(arrays: dict[str, Any]) -> DecodePlan:
        by_xla = {"plan_decode": {("xla", None): "xla"}}
        shown = arrays if window is None else arrays | {"window": window}
        with (
            Variant("xla", CUT_SHORT_ROWS).settings(),
            mock.patch.object(plan_module, "FIXED_SPLIT_TOKENS", 32),
            mock.patch.dict(dispatch.MODULES, by_xla),
        ):
            return harness.plan_for(shown, num_programs=num_programs, mode=mode, implementation=backend.name)

    return plan
