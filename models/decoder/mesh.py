"""A model split over the devices of a mesh: heads and hidden widths, whole experts, and requests.

Each device runs the layers of a smaller model, `device_part` of the whole one, inside one `jax.shard_map` around the
step. What its heads and hidden columns give is a part of a sum, so `DecoderLayer` adds up over the devices once after
attention and once after the feed-forward layer; all else is the code of one device.

- A weight's slice follows from its shape in the smaller model (`slices_of_device`), so there is no table of them. KV
  heads that are fewer than the devices are copied, latents of MLA and routers are the same on all.
- The vocabulary is split, too, where the devices divide it: reading the head's weights takes longer than gathering a
  step's logits. Each device looks up its own rows of the embedding, and draws from all logits, so that the draw
  is that of one device.
- Experts are split by their hidden columns over `tensor`, and whole over `expert`, whose devices share heads and all
  else as those of `tensor` do. Such devices have the same tokens, so each applies its own experts to those that chose
  them, and the sum after the layer, which there is anyway, brings the results together: nothing else is exchanged.
- Over `context`, each device has a share of the tokens of every page (`contexts`), computes queries and what is cached
  for all heads of its place along the other axes, and has a share of all other columns.
- Over `data`, each rank has tokens and pages of its own, and all weights but experts, which ranks share: they gather
  one another's tokens, or, of very many ranks, send each token to those of its experts (`expert_exchange`).
- An array that is split holds the devices' slices one after the other along its first axis, whichever axis of the
  weight they are slices of: no code outside `jax.shard_map` reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from models.config import DeepSeekConfig, GQAConfig, HeadWindows, LayerWindow, ModelConfig
from models.decoder.caches import allocate_latents
from pallas_attn import CacheSpec, HeadWindow, PagedKV, parallel

DATA, TENSOR, CONTEXT, EXPERT = "data", "tensor", "context", "expert"

AXES = (DATA, TENSOR, CONTEXT, EXPERT)
"""Names of a mesh's axes, in their order."""

HEADS = (TENSOR, EXPERT)
"""Axes over which heads are split."""

COLUMNS = (*HEADS, CONTEXT)
"""Axes over which outputs of heads, hidden columns of dense layers and the vocabulary are split."""

EXPERT_COLUMNS = (TENSOR, CONTEXT)
"""Axes over which the hidden columns of each expert are split."""

EXPERTS = (DATA, EXPERT)
"""Axes over which whole experts are split."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Makes a mesh of the first devices; of several processes, of all of theirs.

    Args:
      sizes: number of devices along each axis; an axis left out has one. Devices of `expert` are those of `data` and
        `tensor`: so many of them share the experts, at least those of `data`, and the others the hidden columns of each
        expert. If `tensor` is left out, heads are split over the devices that `expert` has beyond `data`. Axes of the
        mesh that is returned have devices of their own: there `tensor` and `expert` together are those that share
        the heads, and `data` and `expert` those that share the experts.

    Raises:
      ValueError: an unknown axis, a size below 1, more devices than there are, fewer than several processes have, or
        devices of `expert` that are not those of the other axes.
    """
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"mesh: expected axes among {', '.join(AXES)}, got {axis!r}")
        if size < 1:
            raise ValueError(f"mesh: expected at least 1 device along {axis}, got {size}")
    sizes, devices = _with_experts(sizes), jax.devices()
    shape = [sizes.get(axis, 1) for axis in AXES]
    count = int(np.prod(shape, dtype=object))
    if count > len(devices):
        raise ValueError(f"mesh: expected at most the {len(devices)} devices that are here, got {count}")
    if count < len(devices) and jax.process_count() > 1:
        raise ValueError(f"mesh: expected all {len(devices)} devices of {jax.process_count()} processes, got {count}")
    return normal_mesh(Mesh(np.array(devices[:count]).reshape(shape), AXES))


def _with_experts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a mesh's axes, given those of `make_mesh`."""
    data = sizes.get(DATA, 1)
    experts = sizes.get(EXPERT, data)
    tensor = sizes.get(TENSOR, max(experts // data, 1))
    if experts % data or tensor * data % experts:
        reach = f"a multiple of {DATA}={data} that divides" if data > 1 else "a divisor of"
        raise ValueError(f"mesh: {EXPERT}: expected {reach} {DATA} x {TENSOR} = {data * tensor}, got {experts}")
    return {**sizes, TENSOR: tensor * data // experts, EXPERT: experts // data}


def normal_mesh(mesh: Mesh) -> Mesh:
    """The mesh with all `AXES`, in their order; those that it lacks have one device.

    Raises:
      ValueError: it has other axes, or is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: expected a jax.sharding.Mesh or None, got {mesh!r}")
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise ValueError(f"mesh: expected axes among {', '.join(AXES)}, got {unknown[0]!r}")
    given = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    devices = np.transpose(mesh.devices, given).reshape([mesh.shape.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def over_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` of a step. Values are not checked to be equal where a spec says so, since kernels that jax brings
    along do not declare how they vary; `psum` and gathers give the same bits on all devices."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def specs_of(arrays: Any) -> Any:
    """`PartitionSpec` of each array on a mesh; arrays that are not placed on one are the same on all devices."""
    return jax.tree.map(lambda x: getattr(x.sharding, "spec", PartitionSpec()), arrays)


def bytes_on_device(array: Array) -> int:
    """Bytes of an array on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """Number of devices along several axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


# --- what a device has of a model


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
    """Devices that share a layer's experts. All have equally many; where the devices do not divide the experts, the
    last ones have experts of zeros, which no token chooses.

    Attributes:
      data: devices along `data`.
      expert: devices along `expert`.
    """

    data: int = 1
    expert: int = 1

    @staticmethod
    def over(mesh: Mesh | None) -> ExpertSplit:
        """Devices of a mesh; one without."""
        return ExpertSplit() if mesh is None else ExpertSplit(*(mesh.shape[axis] for axis in EXPERTS))

    @property
    def devices(self) -> int:
        return self.data * self.expert

    def num_own(self, num_experts: int) -> int:
        """Experts of each device, with those of zeros."""
        return -(-num_experts // self.devices)

    def own(self, num_experts: int, device: int) -> range:
        """Experts of one device, by its number along both axes; without those of zeros."""
        each = self.num_own(num_experts)
        return range(min(device * each, num_experts), min((device + 1) * each, num_experts))


@dataclasses.dataclass(frozen=True)
class SplitHeadWindows(HeadWindows):
    """Windows of KV heads that are split over devices.

    The fields of the base class are those that pages are kept by, the same on all devices: a device's head i keeps what
    any device's head i sees.

    Attributes:
      devices: windows of each device's heads.
    """

    devices: tuple[HeadWindows, ...] = ()

    def array(self) -> HeadWindow:
        """Windows of this device's heads; inside `jax.shard_map`."""
        device = lax.axis_index(HEADS)
        window, sink_tokens = (
            jnp.asarray([getattr(heads, name) for heads in self.devices], jnp.int32)
            for name in ("window", "sink_tokens")
        )
        return HeadWindow(window[device], sink_tokens[device])


def device_part[Config: DeepSeekConfig | GQAConfig](config: Config, mesh: Mesh | None) -> Config:
    """The model that each device of a mesh runs: its share of the heads, hidden columns and vocabulary. All of it
    without a mesh. Experts are counted as in the whole model, since routers choose among all; `ExpertSplit` has their
    number on a device.

    Raises:
      ValueError: the devices do not divide the heads as `pallas_attn.parallel.head_split` says, or a hidden width; or
        the mesh splits experts and the model has none.
      NotImplementedError: the mesh splits contexts, of a model that has windows or chooses what it attends to.
    """
    if mesh is None:
        return config
    devices, columns = num_devices(mesh, COLUMNS), num_devices(mesh, EXPERT_COLUMNS)
    vocab_size = config.vocab_size if config.vocab_size % devices else config.vocab_size // devices
    heads = _split_heads(config, num_devices(mesh, HEADS))
    if mesh.shape[CONTEXT] > 1:
        _check_contexts(config, heads, mesh.shape[CONTEXT])
    is_dense = [*map(config.is_dense, (*range(config.num_hidden_layers), *config.mtp_layers))]
    if all(is_dense) and mesh.shape[EXPERT] > 1:
        raise ValueError(f"mesh: {EXPERT}: expected 1, a {config.model_type} without experts has none to split")
    widths: dict[str, int] = {"intermediate_size": devices} if any(is_dense) else {}
    changes: dict[str, Any] = {}
    shared = 0
    if isinstance(config, DeepSeekConfig):
        if not all(is_dense):
            widths["moe_intermediate_size"] = columns
            shared = config.n_shared_experts * config.moe_intermediate_size
    else:
        widths = widths or {"intermediate_size": columns}
        changes = {
            "num_key_value_heads": heads.kv_heads,
            "windows": config.windows and tuple(_split_window(window, heads) for window in config.windows),
            "mxfp4_experts": False,  # how they are stored, which does not concern a part
        }
    for name, over in widths.items():
        if getattr(config, name) % over:
            raise ValueError(
                f"mesh: {_among(mesh)}: expected a divisor of {name}={getattr(config, name)}, got {over} devices"
            )
        changes[name] = getattr(config, name) // over
    if shared % devices:
        raise ValueError(f"mesh: {_among(mesh)}: expected a divisor of {shared} shared columns, got {devices} devices")
    return dataclasses.replace(config, vocab_size=vocab_size, num_attention_heads=heads.q_heads, **changes)


def _split_heads(config: ModelConfig, devices: int) -> parallel.HeadSplit:
    kv_heads = 1 if isinstance(config, DeepSeekConfig) else config.num_key_value_heads
    try:
        return parallel.head_split(config.num_attention_heads, kv_heads, devices)
    except ValueError as error:
        raise ValueError(f"mesh: {TENSOR}: {error}") from error


def _among(mesh: Mesh) -> str:
    """Axes that an error about columns is about."""
    return TENSOR if mesh.shape[CONTEXT] == 1 else f"{TENSOR} x {CONTEXT}"


def _check_contexts(config: ModelConfig, heads: parallel.HeadSplit, contexts: int) -> None:
    """Raises as `device_part` unless heads can be split once more, and all tokens are attended to."""
    try:
        parallel.head_split(heads.q_heads, heads.kv_heads, contexts)
    except ValueError as error:
        raise ValueError(f"mesh: {CONTEXT}: {error}") from error
    if isinstance(config, DeepSeekConfig) and config.is_sparse:
        raise NotImplementedError(f"mesh: {CONTEXT}: tokens of a {config.model_type} choose among all keys")
    if isinstance(config, GQAConfig) and any(window is not None for window in config.windows or ()):
        raise NotImplementedError(f"mesh: {CONTEXT}: windows hide different numbers of tokens on each device")


def _split_window(window: LayerWindow, heads: parallel.HeadSplit) -> LayerWindow:
    if not isinstance(window, HeadWindows):
        return window

    def own(of_all: tuple[int, ...], device: int) -> tuple[int, ...]:
        return tuple(of_all[head] for head in heads.kv_heads_of(device))

    devices = range(heads.devices)
    parts = tuple(HeadWindows(own(window.window, i), own(window.sink_tokens, i)) for i in devices)
    widest = tuple(map(max, zip(*(part.window for part in parts), strict=True)))
    most_sinks = tuple(map(max, zip(*(part.sink_tokens for part in parts), strict=True)))
    return SplitHeadWindows(widest, most_sinks, parts)


def slices_of_device(whole: Sequence[int], part: Sequence[int], device: int, devices: int) -> tuple[slice, ...]:
    """Slices of a tensor that a device has, by its shape in the whole model and in `device_part` of it. Where there are
    fewer slices than devices, neighbours share one.

    >>> slices_of_device((8, 32), (4, 32), device=2, devices=4)
    (slice(4, 8, None), slice(None, None, None))
    """

    def along(size: int, own: int) -> slice:
        if size == own:
            return slice(None)
        index = device * (size // own) // devices
        return slice(index * own, (index + 1) * own)

    return tuple(map(along, whole, part))


def place(values: Callable[[Mapping[str, int]], np.ndarray], mesh: Mesh, axes: Sequence[str] = ()) -> jax.Array:
    """Puts a weight on the devices, one slice after the other.

    Args:
      values: its slice for a device's place along each of `axes`.
      mesh: the devices.
      axes: those along which the slices differ.
    """
    if not axes:
        return replicated(values({}), mesh)
    by_slice = np.moveaxis(mesh.devices, [*map(AXES.index, axes)], range(len(axes)))
    places = by_slice.shape[: len(axes)]
    arrays, here = [], jax.process_index()
    for at in np.ndindex(places):
        devices = [device for device in np.atleast_1d(by_slice[at]).flat if device.process_index == here]
        if devices:
            own = values(dict(zip(axes, at, strict=True)))
            arrays += [jnp.array(own, device=device) for device in devices]
    rows, *rest = arrays[0].shape
    sharding = NamedSharding(mesh, PartitionSpec(tuple(axes)))
    return jax.make_array_from_single_device_arrays((rows * math.prod(places), *rest), sharding, arrays)


def replicated(values: ArrayLike, mesh: Mesh) -> jax.Array:
    """Puts the same values on all devices, of which a process reaches its own."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if sharding.is_fully_addressable:
        return jnp.array(values, device=sharding)
    arrays = [jnp.array(values, device=device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays(np.shape(values), sharding, arrays)


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether devices of a mesh are of several processes, each of which reaches its own alone."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def num_contexts(mesh: Mesh | None) -> int:
    """Number of devices that contexts are split over."""
    return 1 if mesh is None else mesh.shape[CONTEXT]


def number_along(axes: Sequence[str], mesh: Mesh, at: Mapping[str, int]) -> int:
    """A device's number along several axes together, given its place along each; 0 along those left out."""
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + at.get(axis, 0)
    return number


def cache_partition(config: ModelConfig, specs: Sequence[CacheSpec]) -> tuple[Any, ...]:
    """`PartitionSpec` of the caches of all layers, whose shapes on one device are given."""
    if isinstance(config, DeepSeekConfig):
        latents = [jax.eval_shape(functools.partial(allocate_latents, spec)) for spec in specs]
        return tuple(jax.tree.map(lambda _: PartitionSpec((DATA, CONTEXT)), latent) for latent in latents)
    caches = [jax.eval_shape(functools.partial(PagedKV.allocate, spec)) for spec in specs]
    return tuple(parallel.kv_partition(kv, pages=(DATA, CONTEXT), heads=HEADS) for kv in caches)


def own_kv_heads(config: ModelConfig, devices: int) -> Callable[[Array], Array]:
    """A function that takes an array of all KV heads [Hkv, ...] to those of this device, inside `jax.shard_map`."""
    split = _split_heads(config, devices)
    heads = np.array([[*split.kv_heads_of(i)] for i in range(devices)], np.int32)
    return lambda x: x[jnp.asarray(heads)[lax.axis_index(HEADS)]]
