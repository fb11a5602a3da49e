"""One call of a function, on shapes, that the gate compiles, and requirements on the result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedIndexKeys, PagedKV, PagedLatent


@dataclasses.dataclass(frozen=True)
class Tile:
    """Work of one iteration of a kernel's main loop, over all warpgroups that share it.

    Attributes:
      num_bytes: bytes of the cache.
      multiply_adds: multiply-adds on the tensor cores.
    """

    num_bytes: int
    multiply_adds: int


@dataclasses.dataclass(frozen=True)
class Case:
    """Call that has to compile, and requirements that its report has to meet.

    Attributes:
      function: takes `arguments` by name.
      arguments: pytrees of shapes.
      cache: name of the argument that holds a cache: it must not be copied.
      donated: whether the cache is donated, and has to be updated in place.
      kernels: whether there have to be Mosaic GPU kernels in it.
      tensor_cores: whether one of them has to use the tensor cores.
      temporaries: bytes it may use beside arguments and results.
      scratch_bytes: shared memory of one of its kernels, computed from scratch types; 0 where that is not compared.
      tile: for the instruction budget; None where there is no tile of a cache.
      blocks: thread blocks of its kernel that have to fit a multiprocessor.
      one_graph: whether XLA has to record all of it as one CUDA graph.
      card: of `device.CARDS`, that it is compiled for.
      output: shape of a step's attention output, which kernels have to write without XLA joining or copying it.
      options: options of the compiler.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    cache: str | None = None
    donated: bool = False
    kernels: bool = True
    tensor_cores: bool = True
    temporaries: int = 0
    scratch_bytes: int = 0
    tile: Tile | None = None
    blocks: int = 1
    one_graph: bool = False
    card: str = "H200"
    output: tuple[int, ...] = ()
    options: dict[str, str | bool] | None = None

    @property
    def donated_bytes(self) -> int:
        """Bytes of donated arguments, which results have to take the place of."""
        leaves = jax.tree.leaves(self.arguments[self.cache]) if self.donated and self.cache else []
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)

    @property
    def cache_elements(self) -> int:
        """Elements of the cache's largest array, 0 without a cache."""
        leaves = jax.tree.leaves(self.arguments[self.cache]) if self.cache else []
        return max((math.prod(a.shape) for a in leaves), default=0)


class DeferredCase:
    """A case that is made when it is asked for: there are thousands, of which a process compiles a few."""

    def __init__(self, make: Callable[[], Case | DeferredCase]):
        self._make = make

    @functools.cached_property
    def made(self) -> Case:
        """The case."""
        case = self._make()
        return case if isinstance(case, Case) else case.made

    def replace(self, **changes: Any) -> DeferredCase:
        """The case with other attributes."""
        return DeferredCase(lambda: dataclasses.replace(self.made, **changes))


def deferred[**P](make: Callable[P, Case | DeferredCase]) -> Callable[P, DeferredCase]:
    """A function that makes a case, whose calls wait until their cases are asked for."""

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> DeferredCase:
        return DeferredCase(functools.partial(make, *args, **kwargs))

    return call


class Cases(Mapping[str, Case]):
    """Cases by name, each made when it is taken."""

    def __init__(self, cases: Mapping[str, Case | DeferredCase]):
        self._cases = cases

    def __getitem__(self, name: str) -> Case:
        case = self._cases[name]
        return case if isinstance(case, Case) else case.made

    def __iter__(self) -> Iterator[str]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)


def on_b200(cases: Mapping[str, DeferredCase]) -> dict[str, DeferredCase]:
    """The same calls compiled for a B200, under names that say so."""
    return {f"sm100-{name}": case.replace(card="B200") for name, case in cases.items()}


_ALLOCATED: dict[tuple[type, str], Any] = {}


def allocated(cache: type[PagedKV] | type[PagedLatent] | type[PagedIndexKeys], spec: Any) -> Any:
    """Shapes of a cache; none is traced twice."""
    key = cache, repr(spec)
    if key not in _ALLOCATED:
        _ALLOCATED[key] = jax.eval_shape(lambda: cache.allocate(spec))
    return _ALLOCATED[key]


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)
