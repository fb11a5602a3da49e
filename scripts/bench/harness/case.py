"""Benchmarks of one operation: cases, their minimum work, and baselines.

An operation is a module in `bench.ops` with a `BENCH`, listed in `session.OPERATIONS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pallas_attn.runtime import tuning
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.timing import Stopwatch, Timing


class Case(Protocol):
    """One set of arguments: a frozen dataclass whose fields are written to the report."""

    @property
    def name(self) -> str:
        """Name of the case, unique in its grid."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read or written."""
        ...

    @property
    def flops(self) -> int:
        """Multiplications and additions that must be done."""
        ...


type Contender = Callable[[Any, Any, Stopwatch], Timing]
"""contender(case, inputs, stopwatch) times one implementation, ours or a baseline. It raises NotImplementedError or
ImportError with the reason if it does not support the case; any other exception is a failure.
"""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Benchmark of one operation.

    Attributes:
      grids: cases by name of the grid.
      contenders: our implementations and baselines, by name.
      inputs: inputs(case, pools) returns the arguments of a case on the device, shared by all contenders. Raises
        MemoryError with the reason if they do not fit.
    """

    grids: Mapping[str, Sequence[Any]]
    contenders: Mapping[str, Contender]
    inputs: Callable[[Any, Pools], Any]


def by_name(ours: Callable[[str, Any, Any, Stopwatch], Timing]) -> dict[str, Contender]:
    """Make contenders of our implementations from a function whose first argument is the name of the implementation."""
    return {name: functools.partial(ours, name) for name in ("mosaic", "triton", "xla")}


@contextlib.contextmanager
def noting_configs() -> Iterator[dict[str, Any]]:
    """Record the configurations that are looked up in the block, by operation and backend."""
    noted: dict[str, Any] = {}

    def note(op: str, key: Mapping[str, Any], config: Any) -> Any:
        noted[op] = config
        return config

    with tuning.deciding(note):
        yield noted
