"""One call of a function, on shapes, that the gate compiles, and requirements on the result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
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
      scratch_bytes: shared memory of its greediest kernel, computed from scratch types; 0 where that is not compared.
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


def on_b200(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The same calls compiled for a B200, under names that say so."""
    return {f"sm100-{name}": dataclasses.replace(case, card="B200") for name, case in cases.items()}


_ALLOCATED: dict[tuple[type, str], Any] = {}


def allocated(cache: type[PagedKV] | type[PagedLatent] | type[PagedIndexKeys], spec: Any) -> Any:
    """Shapes of a cache. Every process of the gate makes all cases, so none is traced twice."""
    key = cache, repr(spec)
    if key not in _ALLOCATED:
        _ALLOCATED[key] = jax.eval_shape(lambda: cache.allocate(spec))
    return _ALLOCATED[key]


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)
