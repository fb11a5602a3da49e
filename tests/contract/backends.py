"""Implementations under test in the contract suites, and the decorators that parametrise tests by them.

To add a backend, add an entry to `BACKENDS`. The suites find the operations that the backend implements and run all of
their cases with it. Two decorators at a test describe exceptions: `unsupported` names the cases for which a backend
raises NotImplementedError, and `in_every_run` names the cases that `make test` runs; the rest runs in `make test-slow`.
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
    """An implementation as the contract suites run it.

    Attributes:
      name: name of the implementation.
      architecture: compute capability of the kernels, or None if the implementation has one set of kernels.
      configs: configurations that replace the tuned or heuristic configuration of the same type.
      dtype: dtype of the queries in cases without a dtype.
      dense: whether memory grows with queries times keys. Large cases are left out.
      kernels: whether the implementation has its own kernels. They run compiled on a GPU, and in an interpreter with
        race detection elsewhere. Interpreted, inputs are poisoned in all but one case per operation, calls are repeated
        less often, and tests of the compiled XLA program are left out: the compile gate has them.
      interpreter: context manager in which kernels run without a GPU.
      plans: whether a batch row of a decode has the same bits in any batch and order in `fixed` mode.
      tree_tiles: whether latents with a draft mask use other tiles, so that a mask changes bits.
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
        """Name of the backend in test ids."""
        return f"{self.name}_sm100" if self.architecture == (10, 0) else self.name

    @functools.cached_property
    def variant(self) -> Variant:
        """Variant with the configurations of the suites: small tiles, so that small inputs have many tiles."""
        return Variant(self.name, self.configs, self.architecture, honours_plans=self.plans)

    def implements(self, op: str) -> bool:
        """Return whether the operation has this backend, on the GPU of this machine or interpreted."""
        if self.architecture is None:
            return self.name in dispatch.implementations(op)
        runs_here = self.interpreted or device.current().capability == self.architecture
        return runs_here and (self.name, self.architecture) in dispatch.MODULES[op]

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in an interpreter on this machine."""
        return self.kernels and jax.default_backend() != "gpu"

    @property
    def repeats(self) -> int:
        """Number of repetitions in tests for bitwise equal results."""
        return 3 if self.interpreted else 100

    def alone(self, batch: int) -> range:
        """Return the batch rows that a test runs alone: only one if the kernel is interpreted. Row 0 is idle."""
        return range(1, 2 if self.interpreted else batch)

    @contextlib.contextmanager
    def running(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Return a context in which calls of the backend run on this machine: compiled or interpreted."""
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
    # Small tiles, so that small inputs have many tiles. The group size does not divide the number of rows.
    Backend("xla", configs=(XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4),)),
    Backend(
        "mosaic",
        (9, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1),
            mla_config.TwoWarpgroupConfig(pairs=1, cluster=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            # Few entries per CTA, so that the inputs need many CTAs and several CTAs touch one scale group.
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
    # Interpreted on machines without a GPU (tests/conftest.py).
    Backend(
        "triton",
        configs=(CUT_SHORT_ROWS, FlashTile(rows=16, tokens=32, warps=4, stages=2, bare_steps=True)),
        dtype="bfloat16",
        kernels=True,
        plans=True,
        tree_tiles=True,
    ),
)


MOSAIC = next(backend for backend in BACKENDS if backend.name == "mosaic")


# --- which cases run in `make test`, and which a backend does not support


@dataclasses.dataclass(frozen=True)
class AllBut:
    """Set of all cases of a test except the named ones."""

    names: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name not in self.names


def all_but(*names: str) -> AllBut:
    """Select all cases of a test except the named ones."""
    return AllBut(frozenset(names))


def in_every_run(*backends: str, **cases: Collection[str] | AllBut) -> pytest.MarkDecorator:
    """Mark a test: `make test` runs it with these backends, and with these cases of the backends named by keyword.

    The rest is marked `slow` and runs in `make test-slow`. On a GPU, kernels run all cases. A case is named by the part
    of the test's id in brackets without the backend. A test without this mark runs with every backend.

    Example:
      >>> @every_backend("paged_decode")
      ... @in_every_run("xla", mosaic=["one page", "no pages"], triton=all_but("many pages"))
      ... def test_lengths(backend, name): ...
    """
    return pytest.mark.in_every_run(**dict.fromkeys(backends, all_but()), **cases)


def unsupported(**reasons: str | Mapping[str, str]) -> pytest.MarkDecorator:
    """Mark a test: a backend raises NotImplementedError whose message matches the reason.

    Args:
      reasons: for each backend, one pattern for all cases, or a pattern for each unsupported case. The patterns of
        "mosaic" also apply to "mosaic_sm100".
    """
    return pytest.mark.unsupported(**reasons)


# --- parametrisation of the suites


def backends_of(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> list[Backend]:
    """Return the backends of an operation for which `wanted` is true."""
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
    """Run a test with argument `variant`, the variant of a backend, for each backend like `every_backend`."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("variant", params, indirect=True)


def is_lean(backend: Backend) -> bool:
    return not backend.dense


def is_compiled(backend: Backend) -> bool:
    """Return whether tests inspect the XLA program: backends without kernels of their own."""
    return not backend.kernels


def is_compiled_and_lean(backend: Backend) -> bool:
    return is_compiled(backend) and is_lean(backend)


# --- calls


def call(op: Callable[..., Any], backend: Backend, arrays: Mapping[str, Any], **static: Any) -> Any:
    """Return the result of an operation. It is compiled once for each backend and set of static arguments."""
    return compiled(op, backend, **static)(**arrays)


def compiled(op: Callable[..., Any], backend: Backend, **static: Any) -> Jitted:
    return harness.compiled(op, backend.variant, **static)


def as_users_get(backend: Backend) -> Backend:
    """Return the backend with the configurations that users get."""
    return dataclasses.replace(backend, configs=())


def plan_of(
    backend: Backend, arrays: Mapping[str, Any], *, window: int | None = None, num_programs: int, mode: str
) -> DecodePlan:
    """Return a plan for a decode call. `window` is the window if it is not among the arrays.

    The XLA implementation computes the plan, because the planner kernel is slow to interpret and has other tests. Rows
    of few pages are split too, so that small inputs have splits.
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
            mock.patch.object(plan_module, "FIXED_PIECE_TOKENS", 32),
            mock.patch.dict(dispatch.MODULES, by_xla),
        ):
            return harness.plan_for(shown, num_programs=num_programs, mode=mode, implementation=backend.name)

    return plan
