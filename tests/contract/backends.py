"""The one table of the contract suites: every implementation, how it runs there, and which cases it refuses.

A backend is added by an entry in `BACKENDS`; the suites find the operations that it has, hold it to all of their cases,
and expect NotImplementedError, for the reason given here, where the table says that it refuses one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_attn import plan_decode
from pallas_attn.mosaic.sm90 import decode_config
from pallas_attn.mosaic.sm90.flash import config as flash_config
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.mla_decode import config as mla_config
from pallas_attn.ops.plan_decode.config import PlanConfig
from pallas_attn.portable.online_softmax import XlaConfig
from tests.ops import harness
from tests.ops.harness import Jitted, Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """An implementation as the contract suites run it.

    Attributes:
      name: of the implementation.
      configs: taken in place of tuned or heuristic configurations, whichever of their types an operation looks up.
      dtype: of queries, in cases that name none.
      dense: memory grows with queries times keys, so that no large case is run.
      kernels: it runs kernels of its own: on a GPU compiled, elsewhere in an interpreter, with races looked for. There
        inputs are poisoned only, but for one case an operation, calls are repeated less often, and nothing is said of
        what XLA compiles; the compile gate says that of kernels.
      plans: in `fixed` mode a row of a decode has the same bits in any batch and order.
      refuses: for each operation the cases that are refused, as patterns of their names, and why, as a pattern of the
        error's message.
      slow: for each operation the cases, as patterns of names, that the interpreter leaves to the slow run.
    """

    name: str
    configs: tuple[Any, ...] = ()
    dtype: str = "float32"
    dense: bool = False
    kernels: bool = False
    plans: bool = False
    refuses: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    slow: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @functools.cached_property
    def variant(self) -> Variant:
        """With the configurations of the suites, under which small inputs make many tiles."""
        return Variant(self.name, self.configs, honours_plans=self.plans)

    @property
    def interpreted(self) -> bool:
        """Whether its calls run in an interpreter here."""
        return self.kernels and jax.default_backend() != "gpu"

    @property
    def repeats(self) -> int:
        """Times that a call is repeated to see whether its bits stay."""
        return 3 if self.interpreted else 100

    def refusal(self, op: str, case: str) -> str | None:
        """Why a case is refused, as a pattern of the message; None if it has to run."""
        reasons = [why for name, why in self.refuses.get(op, {}).items() if fnmatch.fnmatchcase(case, name)]
        return reasons[0] if reasons else None

    def is_slow(self, op: str, case: str) -> bool:
        return self.interpreted and any(fnmatch.fnmatchcase(case, name) for name in self.slow.get(op, ()))

    @contextlib.contextmanager
    def running(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Within it the backend's calls run as they do here."""
        with harness.interpreting(capsys) if self.interpreted else contextlib.nullcontext():
            yield


CUT_SHORT_ROWS = PlanConfig(row_overhead_pages=1, cut_pages=0)

PAGED_REFUSALS = {
    "float32*": "takes bfloat16 and float16 queries, got float32",
    "* over *": "takes queries and an unquantised cache of one dtype",
    "page of 1 token": "takes pages of 16, 32, 64 or 128 tokens, got 1",
    "page of 8 tokens": "takes pages of 16, 32, 64 or 128 tokens, got 8",
    "heads of 16": "takes heads of width 64, 128 or 256, got 16",
    "large soft cap": "takes a soft cap of up to 4096, got 5000",
}

BACKENDS = (
    Backend("reference", dense=True),
    # Tiles so small that small inputs make many of them, groups that do not divide the rows.
    Backend("xla", configs=(XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4),)),
    Backend(
        "mosaic",
        configs=(
            decode_config.MosaicConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1),
            mla_config.MosaicConfig(pairs=1, cluster=1),
            flash_config.MosaicConfig(tile_keys=64, stages=2, consumers=1),
            CUT_SHORT_ROWS,
        ),
        dtype="bfloat16",
        kernels=True,
        plans=True,
        refuses={
            "paged_decode": PAGED_REFUSALS | {"G 67": "67 have no such divisor"},
            "paged_prefill": PAGED_REFUSALS,
        },
    ),
)


# --- what suites are parametrised by


def implementations(op: str) -> Iterable[str]:
    """Names of an operation's implementations."""
    return importlib.import_module(f"pallas_attn.ops.{op}").IMPLEMENTATIONS


def backends_of(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> list[Backend]:
    """Those of an operation, of the wanted kind."""
    return [backend for backend in BACKENDS if backend.name in implementations(op) and wanted(backend)]


def every_backend(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend`, with each backend of an operation, of the wanted kind."""
    params = [pytest.param(backend, id=backend.name) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("backend", params, indirect=True)


def every_case(op: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend` and a case's `name`, with each case and backend of an operation."""
    params = [
        pytest.param(backend, name, id=f"{backend.name}-{name}", marks=_marks(backend, op, name))
        for backend in backends_of(op)
        for name in cases
    ]
    return pytest.mark.parametrize(("backend", "name"), params, indirect=["backend"])


def _marks(backend: Backend, op: str, case: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if backend.is_slow(op, case) else []


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


@functools.partial(jax.jit, static_argnames=("page_size", "num_q_heads", "num_kv_heads", "num_programs", "mode"))
def plan_of(
    kv_lens: Any,
    q_lens: Any,
    window: Any,
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_programs: int,
    mode: str,
) -> Any:
    """A decode plan, made by XLA: the plans' kernel has tests of its own, and is slow to interpret.

    Rows of few pages are cut, which would pay only if they were long.
    """
    with Variant("xla", CUT_SHORT_ROWS).settings(), mock.patch.object(plan_module, "FIXED_PIECE_TOKENS", 32):
        return plan_decode(
            kv_lens,
            q_lens=q_lens,
            window=window,
            page_size=page_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            num_programs=num_programs,
            mode=mode,  # pyrefly: ignore[bad-argument-type]
            implementation="xla",
        )
