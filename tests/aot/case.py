"""Cases of the compile gate: a function, the shapes of its arguments, and requirements on the compiled program.

The compile gate compiles calls for GPUs on a machine without a GPU, and checks the compiled kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedIndexKeys, PagedKV, PagedLatent, SlotRange


@dataclasses.dataclass(frozen=True)
class Tile:
    """Size of the part of the cache that a kernel's main loop processes per iteration (before loop unrolling).

    Attributes:
      num_bytes: bytes that a CTA reads from the cache.
      multiply_adds: multiply-adds of the CTA's tensor-core instructions.
    """

    num_bytes: int
    multiply_adds: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that must compile, and the requirements on its report (`report.Report`).

    Attributes:
      function: the function to compile. It takes `arguments` by keyword.
      arguments: pytrees of shapes and dtypes, by argument name.
      cache: name of the argument that is the cache. The compiled program must not copy it. None without a cache.
      donated: whether the cache is donated. A donated cache must be updated in place.
      kernels: whether the compiled program must contain a Mosaic GPU kernel.
      tensor_cores: whether at least one kernel must use the tensor cores.
      temporaries: maximum bytes of temporary memory, in addition to arguments and results.
      scratch_bytes: expected shared memory of a kernel, computed from its scratch types; 0 to skip the comparison.
      tile: tile of the main loop, for `make tile-budget`; None if the kernel has no loop over a cache.
        blocks: minimum number of thread blocks that must fit on a multiprocessor at the same time.
        one_graph: whether XLA must run the whole program as one CUDA graph.
      launches: number of operations that the host must launch; 0 to skip the check. Operations of a CUDA graph are not
        counted, and XLA builds no graph of fewer than five operations.
        card: GPU to compile for, a key of `device.CARDS`.
        output: shape of an engine step's attention output, which XLA must not concatenate or copy; () to skip the
        check.
      options: XLA compiler options.
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
    launches: int = 0
    card: str = "H200"
    output: tuple[int, ...] = ()
    options: dict[str, str | bool] | None = None

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donated cache, all of which results must reuse; 0 if the cache is not donated."""
        leaves = jax.tree.leaves(self.arguments[self.cache]) if self.donated and self.cache else []
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)

    @property
    def cache_elements(self) -> int:
        """Number of elements of the largest cache array; 0 without a cache."""
        leaves = jax.tree.leaves(self.arguments[self.cache]) if self.cache else []
        return max((math.prod(a.shape) for a in leaves), default=0)


class DeferredCase:
    """Case that is built when it is first needed. There are thousands of cases, and a process compiles few of them."""

    def __init__(self, make: Callable[[], Case | DeferredCase]):
        self._make = make

    @functools.cached_property
    def made(self) -> Case:
        """The built case."""
        case = self._make()
        return case if isinstance(case, Case) else case.made

    def replace(self, **changes: Any) -> DeferredCase:
        """Return a copy of the case with changed attributes."""
        return DeferredCase(lambda: dataclasses.replace(self.made, **changes))


def deferred[**P](make: Callable[P, Case | DeferredCase]) -> Callable[P, DeferredCase]:
    """Decorate a function that builds a case. A call then returns a `DeferredCase`, which runs the function when it is
    first needed.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> DeferredCase:
        return DeferredCase(functools.partial(make, *args, **kwargs))

    return call


class Cases(Mapping[str, Case]):
    """Mapping of names to cases. A lookup builds a deferred case."""

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
    """Return copies of the cases that are compiled for a B200, with names that start with "sm100-"."""
    return {f"sm100-{name}": case.replace(card="B200") for name, case in cases.items()}


_ALLOCATED: dict[tuple[type, str], Any] = {}


def in_layout(arguments: Mapping[str, Any], *, fused: bool = False, tokens_first: bool = False) -> dict[str, Any]:
    """Return the shapes of a call with a fused cache, or with a view of pages with tokens before heads."""
    tables, page_size = arguments["block_tables"], arguments["kv"].page_size
    if tokens_first:
        tables = shape(*tables.shape[:-1], tables.shape[-1] * page_size, dtype=tables.dtype)
    kv = cache_in_layout(arguments["kv"], fused=fused, tokens_first=tokens_first)
    return dict(arguments) | {"kv": kv, "block_tables": tables}


def cache_in_layout(kv: PagedKV, *, fused: bool = False, tokens_first: bool = False) -> PagedKV:
    """Return the shapes of a fused cache, or of a view of pages with tokens before heads. Dynamic scales of a view
    belong to one token.
    """
    pages, heads, page_size, columns = kv.k.shape
    arrays: dict[str, Any] = {name: getattr(kv, name) for name in ("k", "v", "k_scale", "v_scale")}
    if fused:
        arrays |= {"k": shape(pages, heads, page_size, 2 * columns, dtype=kv.k.dtype), "v": None}
    if not tokens_first:
        return PagedKV(**arrays)
    for name, a in arrays.items():
        if a is not None and a.ndim > 2:
            arrays[name] = shape(pages * page_size, heads, 1, *a.shape[3:], dtype=a.dtype)
    return PagedKV(**arrays, view_page_size=page_size)


def allocated(cache: type[PagedKV] | type[PagedLatent] | type[PagedIndexKeys], spec: Any) -> Any:
    """Return the shapes and dtypes of a cache for a spec. Equal specs are traced once."""
    key = cache, repr(spec)
    if key not in _ALLOCATED:
        _ALLOCATED[key] = jax.eval_shape(lambda: cache.allocate(spec))
    return _ALLOCATED[key]


def slots_of_tokens(tokens: int, size: int, page_size: int | None) -> Any:
    """Return the shapes of `size` slots of each token: a list, or for a page size a range of keys. Each token is a
    sequence.
    """
    ints = functools.partial(shape, tokens, dtype=jnp.int32)
    if page_size is None:
        return ints(size)
    tables: Any = ints(-(-size // page_size))
    each: Any = ints()
    return SlotRange(tables, each, each, each, size)


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)
