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
      name: of the implementation.
      architecture: that its kernels are for, where the implementation has others for other cards.
      configs: taken in place of tuned or heuristic configurations, whichever of their types an operation looks up.
      dtype: of queries, in cases that name none.
      dense: memory grows with queries times keys, so that no large case is run.
      kernels: it runs kernels of its own: on a GPU compiled, elsewhere in an interpreter, with races looked for. There
        inputs are poisoned only, but for one case an operation, calls are repeated less often, and nothing is said of
        what XLA compiles; the compile gate says that of kernels.
      interpreter: what the calls of kernels run within where there is no GPU.
      plans: in `fixed` mode a row of a decode has the same bits in any batch and order.
      tree_tiles: latents take tiles of their own where drafts have a mask, so that a mask changes bits.
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
        """Name in the ids of tests."""
        return f"{self.name}_sm100" if self.architecture == (10, 0) else self.name

    @functools.cached_property
    def variant(self) -> Variant:
        """With the configurations of the suites, under which small inputs make many tiles."""
        return Variant(self.name, self.configs, self.architecture, honours_plans=self.plans)

    def implements(self, op: str) -> bool:
        """Whether the operation has it, for cards that are here or interpreted."""
        if self.architecture is None:
            return self.name in dispatch.implementations(op)
        runs_here = self.interpreted or device.current().capability == self.architecture
        return runs_here and (self.name, self.architecture) in dispatch.MODULES[op]

    @property
    def interpreted(self) -> bool:
        """Whether its calls run in an interpreter here."""
        return self.kernels and jax.default_backend() != "gpu"

    @property
    def repeats(self) -> int:
        """Times that a call is repeated to see whether its bits stay."""
        return 3 if self.interpreted else 100

    def alone(self, batch: int) -> range:
        """Rows of a batch, of which the first is idle, that are tried without the others: one where that takes long."""
        return range(1, 2 if self.interpreted else batch)

    @contextlib.contextmanager
    def running(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Within it the backend's calls run as they do here."""
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
    # Tiles so small that small inputs make many of them, groups that do not divide the rows.
    Backend("xla", configs=(XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4),)),
    Backend(
        "mosaic",
        (9, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1),
            mla_config.SeesawConfig(pairs=1, cluster=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            # So few entries a program that the inputs make many, and groups that several of them touch.
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
    # Interpreted wherever there is no GPU (tests/conftest.py).
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
    """All cases of a test except some."""

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
    """Backends of an operation, of the wanted kind."""
    return [backend for backend in BACKENDS if backend.implements(op) and wanted(backend)]


def every_backend(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend`, with each backend of an operation, of the wanted kind."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("backend", params, indirect=True)


def every_case(op: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend` and a case's `name`, with each case and backend of an operation."""
    params = [pytest.param(backend, name, id=f"{backend.id}-{name}") for backend in backends_of(op) for name in cases]
    return pytest.mark.parametrize(("backend", "name"), params, indirect=["backend"])


def every_variant(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Do as `every_backend`, for a test that takes no more of a backend than its `variant`."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("variant", params, indirect=True)


def is_lean(backend: Backend) -> bool:
    return not backend.dense


def is_compiled(backend: Backend) -> bool:
    """Whether what XLA compiles for it says something."""
    return not backend.kernels


def is_compiled_and_lean(backend: Backend) -> bool:
    return is_compiled(backend) and is_lean(backend)


# --- calls


def call(op: Callable[..., Any], backend: Backend, arrays: Mapping[str, Any], **static: Any) -> Any:
    """An operation's result, compiled once for each backend and set of static arguments."""
    return compiled(op, backend, **static)(**arrays)


def compiled(op: Callable[..., Any], backend: Backend, **static: Any) -> Jitted:
    return harness.compiled(op, backend.variant, **static)


def as_users_get(backend: Backend) -> Backend:
    """With the configurations that users get."""
    return dataclasses.replace(backend, configs=())


def plan_of(
    backend: Backend, arrays: Mapping[str, Any], *, window: int | None = None, num_programs: int, mode: str
) -> DecodePlan:
    """A plan for a decode call of these arguments, `window` if it is no array.

    XLA makes it: the kernel that plans has tests of its own, and is slow to interpret. Rows of few pages are cut, which
    would pay only if they were long.
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
