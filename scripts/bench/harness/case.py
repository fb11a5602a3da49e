"""Types of a benchmark of one operation: cases, and the functions that measure implementations and baselines.

The benchmark of an operation is the `BENCH` of its module in `scripts.bench.ops`. `session.OPERATIONS` lists the
modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax

from pallas_attn.runtime import tuning
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.timing import Stopwatch, Timing


class Case(Protocol):
    """Sizes of the arguments of a call: a frozen dataclass whose fields are written to the report."""

    @property
    def name(self) -> str:
        """Name of the case, unique in its grid."""
        ...

    @property
    def num_bytes(self) -> int:
        """Minimum bytes that a call reads and writes, for the roofline."""
        ...

    @property
    def flops(self) -> int:
        """Minimum number of multiplications and additions of a call, for the roofline."""
        ...


type Contender = Callable[[Any, Any, Stopwatch], Timing]
"""contender(case, inputs, stopwatch) times one implementation: ours, or another project's as a baseline.

It raises NotImplementedError if the implementation does not support the case, and ImportError if it is not installed.
Any other exception is reported as a failure.
"""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Benchmark of one operation.

    Attributes:
      grids: cases by name of the grid.
      contenders: our implementations and baselines, by name.
      inputs: inputs(case, pools) makes the arguments of a case on the device. All contenders use the same arguments. It
      raises MemoryError if they do not fit.
    """

    grids: Mapping[str, Sequence[Any]]
    contenders: Mapping[str, Contender]
    inputs: Callable[[Any, Pools], Any]


def by_name(ours: Callable[[str, Any, Any, Stopwatch], Timing]) -> dict[str, Contender]:
    """Make a contender for each of our implementations. The first argument of `ours` is the implementation's name."""
    return {name: functools.partial(ours, name) for name in ("mosaic", "triton", "xla")}


@contextlib.contextmanager
def noting_configs() -> Iterator[dict[str, Any]]:
    """Record the kernel configurations that are looked up inside the `with` block, by their name in `tuning`.

    The kernel cache is not used within `tuning.deciding`. JAX then lowers Mosaic kernels together with the chain. On a
    GPU, `faster_lowering` is therefore active inside the `with` block, as it is when the cache lowers a kernel.
    """
    noted: dict[str, Any] = {}

    def note(op: str, key: Mapping[str, Any], config: Any) -> Any:
        noted[op] = config
        return config

    with tuning.deciding(note), _lowering():
        yield noted


def _lowering() -> contextlib.AbstractContextManager[Any]:
    """Return `faster_lowering()` on a GPU, else an empty context. `faster_lowering` imports Mosaic."""
    if jax.default_backend() != "gpu":
        return contextlib.nullcontext()
    from pallas_attn.jax_patches.faster_lowering import faster_lowering

    return faster_lowering()
