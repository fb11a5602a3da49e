"""Operations on arrays that are split over devices, outside `jax.shard_map`: each device runs its part of a call.

Heads may be split, and also the sequences of decode. Results are then split in the same way, and devices exchange
nothing. Other splits, for example of a cache's pages, raise NotImplementedError. Without this module, XLA would copy
the whole cache to each device in every step, because XLA cannot partition a kernel.

If the mesh has `AxisType.Explicit` axes, the splits are part of the array types and known while a call is traced. The
call then runs in `jax.shard_map`. Otherwise only XLA knows the splits. The call is then one
`jax.experimental.custom_partitioning` operation: XLA's partitioner calls back to get each device's part, and
unsupported splits raise NotImplementedError when the program is compiled. Calls on one device and calls inside
`jax.shard_map` do not use this module.

The meaning of an array axis comes from the annotation of the argument, for example `Float[Array, "B Q Hq D"]`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler  # JAX has no public way to replace an error of XLA's partitioner
from jax.experimental import custom_partitioning as partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_attn import checks
from pallas_attn.portable.arguments import Rest, is_array, meshes_of, split_arrays
from pallas_attn.runtime import device
from pallas_attn.types import DecodePlan, PagedIndexKeys, PagedKV, PagedLatent

type Axes = tuple[str, ...]
"""Mesh axes that an array axis is split over; empty if the array axis is not split."""


@dataclasses.dataclass(frozen=True)
class Splittable:
    """Array axes of an operation that may be split.

    Attributes:
      along: symbols of the axes that may be split.
      results: symbols of the axes of each result; "|" separates alternatives of different rank. "" for a result that
        is not an array; the annotations of its dataclass give the axes of its arrays.
    """

    along: tuple[str, ...]
    results: tuple[str, ...] = ()


OPERATIONS: dict[str, Splittable] = {
    "paged_decode": Splittable(("B", "Hq", "Hkv"), ("B Q Hq Dv | T Hq Dv", "B Q Hq")),
    "cascade_decode": Splittable(("B", "Hq", "Hkv"), ("B Q Hq D", "B Q Hq")),
    "mla_decode": Splittable(("B", "Hq"), ("B Q Hq L", "B Q Hq")),
    "paged_prefill": Splittable(("Hq", "Hkv"), ("T Hq Dv", "T Hq")),
    "ragged_attention": Splittable(("Hq", "Hkv"), ("T Hq Dv", "T Hq")),
    "ragged_paged_attention": Splittable(("Hq", "Hkv"), ("T Hq D",)),
    "mla_prefill": Splittable(("Hq",), ("T Hq v", "T Hq")),
    "mla_ragged_paged_attention": Splittable(("Hq",), ("T Hq L",)),
    "mla_sparse": Splittable(("T", "Hq"), ("T Hq L", "T Hq")),
    "select_top_k": Splittable(("T",), ("T top_k",)),
    "index_scores": Splittable((), ("T K",)),
    "index_top_k": Splittable((), ("T top_k",)),
    "write_kv": Splittable(("Hq", "Hkv"), ("", "T Hq D")),
    "write_latent": Splittable(()),
    "write_index_keys": Splittable(()),
    "compress_and_write": Splittable((), ("", "")),
    "hyper_connection_weights": Splittable(("T",), ("T n", "T n", "T n n")),
    "gather_latent": Splittable((), ("length LR",)),
    "plan_decode": Splittable(()),
}
"""Splits of each operation. The sequences of a packed operation cannot be split, because they share the token axis."""

ROW_IDS = ("block_tables", "page_indices", "slots")
"""Arguments that contain ids of page rows or slots if they have an axis of KV heads.

A page row is one page of one KV head. Its id page · Hkv + head counts all KV heads of the cache, so it is wrong on a
device that has only some of the heads.
"""

_INSIDE: contextvars.ContextVar[AxisType | None] = contextvars.ContextVar("meshes of the split call", default=None)


def run(
    mesh: AbstractMesh,
    op: str,
    function: Callable[[Any], Any],
    arrays: Sequence[Any],
    rest: Rest,
    annotations: Mapping[str, str] | None = None,
) -> Any:
    """Return `function(rest.join(arrays))`. If arrays are split over several devices, each device computes a part.

    Args:
      mesh: from `mesh_of`.
      op: name of the operation, one of `OPERATIONS`.
      function: function of the joined arguments. It must be hashable, and equal for equal calls.
      arrays: the arrays of the arguments.
      rest: the arguments without their arrays: a dataclass, or a dict by name.
      annotations: shape annotation of each name of a dict; None for a dataclass, which has annotations.

    Raises:
      NotImplementedError: arrays are split in a way that the operation does not support. If the mesh is not explicit
        and the call is traced, the compilation of the program raises it.
    """
    call = _SplitCall.of(op, function, arrays, rest, annotations)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return call.run(mesh, arrays)
    return _compiled(call, mesh, os.environ.get("PALLAS_ATTN_IMPLEMENTATION"))(arrays)


def over_devices[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an operation that calls other operations: each device runs the whole operation on its part of the
    arrays."""
    signature = inspect.signature(function)
    annotations = {name: str(parameter.annotation) for name, parameter in signature.parameters.items()}
    on_dict = _ByName(function)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = mesh_of(meshes_of(jax.tree.leaves((args, kwargs))))
        if mesh is None:
            return function(*args, **kwargs)
        named = signature.bind(*args, **kwargs).arguments
        for name, value in named.items():
            if "Int32" in annotations[name]:
                (named[name],) = checks.int32(**{name: value})
            elif name == "implementation" and isinstance(value, list):
                named[name] = tuple(value)
        return run(mesh, function.__name__, on_dict, *split_arrays(named), annotations)

    return wrapped


@dataclasses.dataclass(frozen=True)
class _ByName:
    """Wrapper that calls a function of keyword arguments with a dict."""

    function: Callable[..., Any]

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        return self.function(**arguments)


def refuse_callbacks() -> None:
    """Raise NotImplementedError inside a `custom_partitioning` operation.

    Interpreted kernels use Python callbacks, which crash there.
    """
    if _INSIDE.get() is AxisType.Auto:
        raise NotImplementedError(
            "runs interpreted; interpreted kernels support arrays that are split over devices only inside "
            "jax.shard_map or on a mesh of AxisType.Explicit"
        )


# --- meshes


def mesh_of(meshes: Sequence[AbstractMesh]) -> AbstractMesh | None:
    """Return the first mesh with several devices, among the meshes of the arrays and then the mesh of the context.

    Return None if there is no such mesh, inside `jax.shard_map`, and inside a call that is already split.
    """
    if _INSIDE.get():
        return None
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if _axes_of(mesh, AxisType.Auto, AxisType.Explicit):
            return mesh
    return None


def _axes_of(mesh: AbstractMesh, *types: AxisType) -> Axes:
    """Return the names of the mesh axes of these types that have several devices."""
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in named if kind in types and mesh.shape[name] > 1)


@contextlib.contextmanager
def _inside(kind: AxisType) -> Iterator[None]:
    """Within this context, traced operations are parts of a call that is already split."""
    token = _INSIDE.set(kind)
    try:
        yield
    finally:
        _INSIDE.reset(token)


# --- what axes mean


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An array among the arguments or results of a call.

    Attributes:
      name: for example "kv.k".
      dims: symbol of each axis.
      owner: the class whose field the array is, for example PagedKV; None if the array itself is an argument.
    """

    name: str
    dims: tuple[str, ...]
    owner: type | None

    @property
    def is_pool(self) -> bool:
        """Whether the array contains pages of a cache or the scales of pages."""
        return self.owner in (PagedKV, PagedLatent, PagedIndexKeys) and "N" in self.dims


def _operands(tree: Any, annotations: Mapping[str, str]) -> list[_Operand]:
    """Return the arrays of a pytree in order.

    Args:
      tree: dict, dataclass or tuple of arrays and of dataclasses with arrays.
      annotations: shape annotation of each top-level name. The fields of dataclasses in the tree have annotations.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(leaf):
            continue
        value, owner, annotation, names = tree, None, "", []
        for depth, key in enumerate(path):
            name = str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))))
            if depth:
                owner = type(value)
                annotation = str(next((f.type for f in dataclasses.fields(owner) if f.name == name), ""))
            else:
                annotation = annotations.get(name, "")
            names.append(name)
            value = getattr(value, name) if hasattr(value, name) else value[getattr(key, "key", getattr(key, "idx", 0))]
        found.append(_Operand(".".join(names), _dims(annotation, len(leaf.shape)), owner))
    return found


def _dims(annotation: str, ndim: int) -> tuple[str, ...]:
    """Return the axis symbols of the first quoted shape of rank `ndim` in an annotation; "?" for each axis without one.

    For example, "Float[Array, 'B P'] | Float[Array, 'B Hkv P']" and rank 2 give ("B", "P").
    """
    alternatives = [quoted.split() for quoted in re.findall(r"'([^']*)'", annotation.replace('"', "'"))]
    return next((tuple(dims) for dims in alternatives if len(dims) == ndim), ("?",) * ndim)


def _result_annotations(splits: Splittable) -> dict[str, str]:
    """Return the shape annotation of each result for `_operands`. The key is the index of the result as a str."""
    return {str(i): " | ".join(f'"{dims.strip()}"' for dims in one.split("|")) for i, one in enumerate(splits.results)}


# --- a call


@dataclasses.dataclass(frozen=True)
class _SplitCall:
    """A call as a function of its arrays. Equal objects are traced once.

    Attributes:
      op, function: see `run`.
      rest: the arguments without their arrays.
      operands: name and axes of each array.
      vmaps: for each `jax.vmap` around the call, innermost first, which arrays are batched.
    """

    op: str
    function: Callable[[Any], Any]
    rest: Rest
    operands: tuple[_Operand, ...]
    vmaps: tuple[tuple[bool, ...], ...] = ()

    @staticmethod
    def of(
        op: str,
        function: Callable[[Any], Any],
        arrays: Sequence[Any],
        rest: Rest,
        annotations: Mapping[str, str] | None,
    ) -> _SplitCall:
        arguments = rest.join(arrays)
        if annotations is None:
            annotations = {field.name: str(field.type) for field in dataclasses.fields(arguments)}
        return _SplitCall(op, function, rest, tuple(_operands(arguments, annotations)))

    @property
    def splits(self) -> Splittable:
        batches = tuple(f"V{i}" for i in range(len(self.vmaps)))
        return dataclasses.replace(OPERATIONS[self.op], along=(*OPERATIONS[self.op].along, *batches))

    def result(self, *arrays: Any) -> Any:
        """Return the result of the function without any `jax.vmap`."""
        return self.function(self.rest.join(arrays))

    def batched(self, flags: tuple[bool, ...]) -> _SplitCall:
        """Return the same call under one more `jax.vmap`."""
        axis = f"V{len(self.vmaps)}"
        operands = tuple(
            dataclasses.replace(operand, dims=(axis, *operand.dims)) if flag else operand
            for operand, flag in zip(self.operands, flags, strict=True)
        )
        return dataclasses.replace(self, operands=operands, vmaps=(*self.vmaps, flags))

    def run(self, mesh: AbstractMesh, arrays: Sequence[Any]) -> Any:
        if _axes_of(mesh, AxisType.Explicit):
            return _run_typed(self, mesh, arrays)
        return _run_partitioned(self, mesh, arrays)


@functools.lru_cache(maxsize=256)
def _compiled(call: _SplitCall, mesh: AbstractMesh, environment: str | None) -> Callable[[Sequence[Any]], Any]:
    """Return the jitted call for concrete arrays.

    Args:
      environment: value of the environment variable that selects implementations. It is only part of the cache key.
    """
    return jax.jit(functools.partial(call.run, mesh))


class _Results:
    """Function that computes the flat results of a call.

    Attributes:
      tree: pytree structure of the results; known after `flat` was traced.
      operands: name and axes of each flat result; known after `flat` was traced.
    """

    def __init__(self, call: _SplitCall):
        self._call = call
        self.tree: Any = None
        self.operands: tuple[_Operand, ...] = ()

    def flat(self, *arrays: Any) -> tuple[Any, ...]:
        def one(*arrays: Any) -> tuple[Any, ...]:
            result = self._call.result(*arrays)
            leaves, self.tree = jax.tree.flatten(result)
            several = result if isinstance(result, tuple) else (result,)
            self.operands = tuple(_operands(several, _result_annotations(self._call.splits)))
            return tuple(leaves)

        function = one
        for flags in self._call.vmaps:
            function = jax.vmap(function, in_axes=tuple(0 if flag else None for flag in flags))
        out = function(*arrays)
        for i in range(len(self._call.vmaps)):
            self.operands = tuple(dataclasses.replace(o, dims=(f"V{i}", *o.dims)) for o in self.operands)
        return out


def _run_typed(call: _SplitCall, mesh: AbstractMesh, arrays: Sequence[Any]) -> Any:
    """Run the call in `jax.shard_map`. The shardings in the types of the arrays determine each device's part."""
    if auto := _axes_of(mesh, AxisType.Auto):
        raise NotImplementedError(
            f"{call.op}: the mesh axes {_words(auto)} are AxisType.Auto and others are Explicit; "
            "call it inside jax.shard_map over all of them"
        )
    results = _Results(call)
    with device.on_one_device(mesh), _inside(AxisType.Explicit):
        jax.eval_shape(results.flat, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    shardings = [jax.typeof(x).sharding for x in arrays]
    if any(sharding.spec.unreduced for sharding in shardings):
        raise NotImplementedError(f"{call.op}: does not support unreduced arrays, whose parts must still be summed")
    specs = [_axes_by_dim(sharding.spec, x.ndim) for sharding, x in zip(shardings, arrays, strict=True)]
    split = _Split.of(call, [x.shape for x in arrays], specs, dict(mesh.shape))
    in_specs = tuple(map(split.spec, call.operands))
    mapped = jax.shard_map(
        _Results(call).flat,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(map(split.spec, results.operands)),
        check_vma=False,
    )
    placed = (jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, in_specs, strict=True))
    return jax.tree.unflatten(results.tree, mapped(*placed))


def _run_partitioned(call: _SplitCall, mesh: AbstractMesh, arrays: Sequence[Any]) -> Any:
    """Run the call as one XLA operation that XLA's partitioner splits."""
    if manual := _axes_of(mesh, AxisType.Manual):
        raise NotImplementedError(
            f"{call.op}: is inside jax.shard_map over {_words(manual)} only; name all axes of the mesh that have "
            "several devices"
        )
    results = _Results(call)
    out = _partitioned(call, mesh, results)(*arrays)
    return jax.tree.unflatten(results.tree, out)


def _partitioned(call: _SplitCall, mesh: AbstractMesh, results: _Results) -> Callable[..., Any]:
    @partitioning.custom_partitioning
    def whole(*arrays: Any) -> Any:
        known = not jax.sharding.get_abstract_mesh().empty
        with contextlib.nullcontext() if known else jax.sharding.use_abstract_mesh(mesh), _inside(AxisType.Auto):
            return jax.jit(results.flat)(*arrays)  # jit hides constants, which custom_partitioning does not support

    def local(mesh: AbstractMesh, *arrays: Any) -> Any:
        with device.on_one_device(mesh), _inside(AxisType.Auto):
            return _Results(call).flat(*arrays)

    def partition(named: Any, given: Sequence[Any], wanted: Any) -> Any:
        found = [PartitionSpec() if x.sharding.is_fully_replicated else x.sharding for x in given]
        if isinstance(given[0].sharding, NamedSharding):
            found = [x.sharding.spec for x in given]
        elif all(isinstance(spec, PartitionSpec) for spec in found):  # all arrays are replicated
            devices = np.array(list(given[0].sharding.devices_indices_map(given[0].shape)))
            named = Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)
        else:
            raise NotImplementedError(f"{call.op}: axes of the mesh have no names here; run under jax.set_mesh(mesh)")
        specs = [_axes_by_dim(spec, len(x.shape)) for spec, x in zip(found, given, strict=True)]
        split = _Split.of(call, [x.shape for x in given], specs, dict(named.shape))
        del wanted  # the partitioner reshards the results
        return (
            named,
            functools.partial(local, named.abstract_mesh),
            tuple(NamedSharding(named, split.spec(operand)) for operand in results.operands),
            tuple(NamedSharding(named, split.spec(operand)) for operand in call.operands),
        )

    def rule(mesh: Any, given: Any, returned: Any) -> Any:
        del mesh, returned
        shapes = [x.shape for x in given]
        return _sharding_rule(call, shapes, results.operands)

    whole.def_partition(partition, sharding_rule=rule)
    batchable = jax.custom_batching.custom_vmap(lambda *arrays: whole(*arrays))

    @batchable.def_vmap
    def _batched(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> Any:
        del axis_size  # the size on a device differs if the batch axis is split
        more = call.batched(tuple(in_batched))
        out = _partitioned(more, mesh, _Results(more))(*arrays)
        return out, tuple(True for _ in out)

    return batchable


def _raise_refusal(error: Exception) -> None:
    """Raise the NotImplementedError that `_partitioned` raised inside XLA's partitioner. Ignore all other errors.

    XLA reports an exception of its partitioner as an internal error whose message contains the Python stack. JAX would
    raise a returned exception from this error and print both, so the handler raises instead of returning.
    """
    message = str(error)
    # A chained traceback prints the causes first.
    last = re.split(r"^(?:The above exception was|During handling of the above)", message, flags=re.MULTILINE)[-1]
    found = re.search(r"^NotImplementedError: (.*)$", last, re.MULTILINE)
    if found and message.startswith("INTERNAL: custom_partitioner:") and f'File "{__file__}"' in message:
        raise NotImplementedError(found[1]) from None


compiler.register_xla_runtime_error_handler(_raise_refusal)


# --- how it is split


def _axes_by_dim(spec: PartitionSpec, ndim: int) -> list[Axes]:
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _sizes(call: _SplitCall, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the size of each axis symbol of the arguments."""
    return {
        dim: size
        for operand, shape in zip(call.operands, shapes, strict=True)
        for dim, size in zip(operand.dims, shape, strict=True)
    }


def _words(axes: Axes) -> str:
    return ", ".join(map(repr, axes))


@dataclasses.dataclass(frozen=True)
class _Split:
    """Mesh axes that each axis symbol of a call is split over."""

    axes: Mapping[str, Axes]

    def spec(self, operand: _Operand) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(dim) or None for dim in operand.dims))

    @staticmethod
    def of(
        call: _SplitCall, shapes: Sequence[Sequence[int]], specs: Sequence[Sequence[Axes]], mesh: Mapping[str, int]
    ) -> _Split:
        """Return the split of a call.

        If any array is split along a symbol, all arrays with this symbol are split in the same way. Pools (arrays with
        pages) must have this split already, because resharding would copy the cache.

        Raises:
          NotImplementedError: the operation does not support the split.
        """
        refuse = functools.partial(_refuse, call.op)
        axes: dict[str, Axes] = {}
        for operand, spec in zip(call.operands, specs, strict=True):
            for dim, over in zip(operand.dims, spec, strict=True):
                held = axes.get(dim, ())
                if over and dim not in call.splits.along:
                    along = ", ".join(call.splits.along) or "no axis"
                    refuse(
                        f"{operand.name} [{', '.join(operand.dims)}] is split over {_words(over)} along {dim}; it may "
                        f"be split along {along}"
                    )
                if over[: len(held)] != held[: len(over)]:
                    refuse(f"{operand.name} is split over {_words(over)} along {dim}, others over {_words(held)}")
                axes[dim] = max(held, over, key=len)
        sizes = _sizes(call, shapes)
        if "Hkv" in sizes and "Hq" in sizes:
            _match_heads(axes, sizes, mesh, refuse)
        apart = [dim for dim in axes if axes[dim] and (dim != "Hkv" or "Hq" not in sizes)]
        used = [axis for dim in apart for axis in axes[dim]]
        if len(used) != len(set(used)):
            refuse(f"one axis of the mesh splits several of {', '.join(apart)}")
        for dim, over in axes.items():
            if sizes[dim] % _count(over, mesh):
                refuse(f"{_count(over, mesh)} devices of {_words(over)} do not divide {sizes[dim]} along {dim}")
        for operand, spec in zip(call.operands, specs, strict=True):
            _check_follows(operand, spec, axes, refuse)
        return _Split(axes)


def _match_heads(
    axes: dict[str, Axes], sizes: Mapping[str, int], mesh: Mapping[str, int], refuse: Callable[[str], None]
) -> None:
    """Split query heads like KV heads.

    Query heads may be split over more mesh axes than KV heads if each device has only one KV head.
    """
    of_q, of_kv = axes.get("Hq", ()), axes.get("Hkv", ())
    if of_q[: len(of_kv)] != of_kv[: len(of_q)]:
        refuse(f"query heads are split over {_words(of_q)}, KV heads over {_words(of_kv)}")
    axes["Hq"] = max(of_q, of_kv, key=len)
    if len(of_q) > len(of_kv) and sizes["Hkv"] > _count(of_kv, mesh):
        whole = f"split over {_words(of_kv)} only" if of_kv else "replicated"
        refuse(f"query heads are split over {_words(of_q)}, and {sizes['Hkv']} KV heads are {whole}")


def _check_follows(
    operand: _Operand, spec: Sequence[Axes], axes: Mapping[str, Axes], refuse: Callable[[str], None]
) -> None:
    """Raise NotImplementedError if an array cannot follow the split of the other arrays."""
    split = [dim for dim, over in axes.items() if over and not dim.startswith("V")]
    if operand.is_pool and any(axes[dim] != over for dim, over in zip(operand.dims, spec, strict=True)):
        refuse(f"{operand.name} is replicated, and other arrays are split along {', '.join(split)}")
    if operand.owner is DecodePlan and split:
        refuse("plan is for one device: make it inside jax.shard_map, or omit it")
    if operand.name in ROW_IDS and axes.get("Hkv") and "Hkv" in operand.dims:
        refuse(f"{operand.name} has row ids of all KV heads, which are split over {_words(axes['Hkv'])}")
    if operand.name == "out" and axes.get("B"):
        refuse("out is packed and cannot be split like the sequences")


def _count(axes: Axes, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _refuse(op: str, why: str) -> None:
    raise NotImplementedError(
        f"{op} on arrays that are split over devices: {why}. Call it inside jax.shard_map, which can also split "
        "contexts and packed sequences (pallas_attn.parallel), or change the sharding of the array"
    )


def _sharding_rule(
    call: _SplitCall, shapes: Sequence[Sequence[int]], results: Sequence[_Operand]
) -> partitioning.SdyShardingRule:
    """Return the axes that arguments and results share and that may be split, for XLA's partitioner.

    An axis that may not be split has a separate factor. The partitioner then leaves a split of this axis unchanged, and
    `_Split.of` rejects it.
    """
    sizes = _sizes(call, shapes)
    heads, groups = sizes.get("Hkv", 1), 1
    if "Hq" in sizes and heads > 1:
        groups = sizes["Hq"] // heads
    factors: dict[str, Any] = {"G": groups} if groups > 1 else {}
    numbers = iter(range(10_000))

    def factor(dim: str) -> Any:
        if dim == "Hq" and heads > 1:
            return partitioning.CompoundFactor("Hkv", "G") if groups > 1 else "Hkv"
        return dim if dim in call.splits.along else f"own{next(numbers)}"

    mappings = (
        tuple(partitioning.ArrayMapping(*map(factor, operand.dims)) for operand in operands)
        for operands in (call.operands, results)
    )
    return partitioning.SdyShardingRule(*mappings, **factors)
