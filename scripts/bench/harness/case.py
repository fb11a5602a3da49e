"""Benchmarks of one operation: cases, their least work, and contenders.

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
    """One set of arguments: a frozen dataclass, whose fields go into the report."""

    @property
    def name(self) -> str:
        """Name of the case, unique in its grid."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that have to be read or written."""
        ...

    @property
    def flops(self) -> int:
        """Multiplications and additions that have to be done."""
        ...


type Contender = Callable[[Any, Any, Stopwatch], Timing]
"""contender(case, inputs, stopwatch): times one implementation. Raises NotImplementedError or ImportError, with the
reason, if it cannot take part; any other exception is a failure."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Benchmark of one operation.

    Attributes:
      grids: cases by name of the grid.
      contenders: our implementations and peers, by name.
      inputs: inputs(case, pools), the arguments of a case on the device, shared by all contenders. Raises MemoryError,
        with the reason, if they do not fit.
    """

    grids: Mapping[str, Sequence[Any]]
    contenders: Mapping[str, Contender]
    inputs: Callable[[Any, Pools], Any]


def by_name(ours: Callable[[str, Any, Any, Stopwatch], Timing]) -> dict[str, Contender]:
    """Makes contenders of our implementations, given a function that takes an implementation's name first."""
    return {name: functools.partial(ours, name) for name in ("mosaic", "triton", "xla")}


@contextlib.contextmanager
def noting_configs() -> Iterator[dict[str, Any]]:
    """Records, within its context, the configurations that are looked up, by operation and backend."""
    noted: dict[str, Any] = {}

    def note(op: str, key: Mapping[str, Any], config: Any) -> Any:
        noted[op] = config
        return config

    with tuning.deciding(note):
        yield noted
