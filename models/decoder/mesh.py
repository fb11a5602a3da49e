"""A model split over the devices of a mesh: heads and hidden columns, whole experts, contexts and requests.

Each device runs the layers of a smaller model, the `device_part` of the model, inside one `jax.shard_map` around the
step. The outputs of its heads and hidden columns are terms of a sum. `DecoderLayer` sums over the devices once after
attention and once after the feed-forward layer. All other code is the same as on one device.

- The slice of a weight follows from its shape in the smaller model (`slices_of_device`). If there are fewer KV heads
  than devices, KV heads are copied. Latents of MLA and routers are the same on all devices.
- The vocabulary is split if the number of devices divides it, because reading the weights of the head takes longer than
  gathering the logits of a step. Each device looks up its own rows of the embedding. Each device samples from all
  logits, so the samples are the same as on one device.
- Over `tensor`, the hidden columns of experts are split. Over `expert`, whole experts are split, and all other weights
  as over `tensor`. These devices have the same tokens. Each applies its own experts to the tokens that selected them,
  and the sum after the layer adds up the results, so no other exchange is necessary.
- Over `context`, each device caches a part of the tokens of every page (`contexts`). It computes queries and cache
  entries for all heads of its position along the other axes, and has a part of all other columns.
- Over `data`, each rank has different requests and pages, and all weights except experts, which are split over the
  ranks. Ranks gather the tokens of all ranks; with many ranks, they send tokens to the ranks of their experts
  (`models.moe.exchange`).
- A split array is the concatenation of the devices' slices along its first axis, whichever axis of the weight is split.
  No code outside `jax.shard_map` reads it.
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
"""Names of the axes of a mesh, in order."""

HEADS = (TENSOR, EXPERT)
"""Axes over which heads are split."""

COLUMNS = (*HEADS, CONTEXT)
"""Axes over which outputs of heads, hidden columns of dense layers and the vocabulary are split."""

EXPERT_COLUMNS = (TENSOR, CONTEXT)
"""Axes over which the hidden columns of each expert are split."""

EXPERTS = (DATA, EXPERT)
"""Axes over which whole experts are split."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the first devices, or with several processes of all their devices.

    In `sizes`, `expert` counts devices of `data` x `tensor`: the number of devices that whole experts are split over, a
    multiple of `data`. The remaining factor of `data` x `tensor` splits the hidden columns of each expert. In the
    returned mesh, the axes are independent: heads are split over `tensor` x `expert`, experts over `data` x `expert`.

    Args:
      sizes: number of devices along each axis; 1 for axes that are left out, except that `expert` defaults to `data`,
        and `tensor` to `expert` / `data`.

    Raises:
      ValueError: unknown axis, size below 1, more devices than available, fewer devices than several processes have, or
        `expert` is not a multiple of `data` that divides `data` x `tensor`.
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
    """Return the sizes of the axes of the mesh, given the argument of `make_mesh`."""
    data = sizes.get(DATA, 1)
    experts = sizes.get(EXPERT, data)
    tensor = sizes.get(TENSOR, max(experts // data, 1))
    if experts % data or tensor * data % experts:
        reach = f"a multiple of {DATA}={data} that divides" if data > 1 else "a divisor of"
        raise ValueError(f"mesh: {EXPERT}: expected {reach} {DATA} x {TENSOR} = {data * tensor}, got {experts}")
    return {**sizes, TENSOR: tensor * data // experts, EXPERT: experts // data}


def normal_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh with all `AXES` in order. Missing axes are added with one device.

    Raises:
      ValueError: unknown axes, or not a mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: expected a jax.sharding.Mesh or None, got {mesh!r}")
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise ValueError(f"mesh: expected axes among {', '.join(AXES)}, got {unknown[0]!r}")
    given = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    devices = np.transpose(mesh.devices, given).reshape([mesh.shape.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def over_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `jax.shard_map` of a step.

    Replication is not checked, because kernels of jax do not declare how their outputs vary over the mesh. `psum` and
    gathers give the same bits on all devices.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def specs_of(arrays: Any) -> Any:
    """Return the `PartitionSpec` of each array on a mesh. Arrays without one are replicated."""
    return jax.tree.map(lambda x: getattr(x.sharding, "spec", PartitionSpec()), arrays)


def bytes_on_device(array: Array) -> int:
    """Return the bytes of an array on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of devices along several axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


# --- the part of a model on one device


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
    """Numbers of devices that the experts of a layer are split over.

    All devices have equally many experts. The last devices are padded with zero experts, which no token selects.

    Attributes:
      data: devices along `data`.
      expert: devices along `expert`.
    """

    data: int = 1
    expert: int = 1

    @staticmethod
    def over(mesh: Mesh | None) -> ExpertSplit:
        """Return the split over a mesh; one device without a mesh."""
        return ExpertSplit() if mesh is None else ExpertSplit(*(mesh.shape[axis] for axis in EXPERTS))

    @property
    def devices(self) -> int:
        return self.data * self.expert

    def num_own(self, num_experts: int) -> int:
        """Return the number of experts of each device, including padding."""
        return -(-num_experts // self.devices)

    def own(self, num_experts: int, device: int) -> range:
        """Return the experts of one device, without padding. `device` is its index along both axes."""
        each = self.num_own(num_experts)
        return range(min(device * each, num_experts), min((device + 1) * each, num_experts))


@dataclasses.dataclass(frozen=True)
class SplitHeadWindows(HeadWindows):
    """Windows of KV heads that are split over devices.

    The fields of the base class determine which pages are retained, and are the same on all devices: head i of a device
    retains the tokens that head i of any device sees.

    Attributes:
      devices: windows of the heads of each device.
    """

    devices: tuple[HeadWindows, ...] = ()

    def array(self) -> HeadWindow:
        """Return the windows of the heads of this device. Call it inside `jax.shard_map`."""
        device = lax.axis_index(HEADS)
        window, sink_tokens = (
            jnp.asarray([getattr(heads, name) for heads in self.devices], jnp.int32)
            for name in ("window", "sink_tokens")
        )
        return HeadWindow(window[device], sink_tokens[device])


def device_part[Config: DeepSeekConfig | GQAConfig](config: Config, mesh: Mesh | None) -> Config:
    """Return the configuration of one device's part of a model: its heads, hidden columns and vocabulary.

    Without a mesh, it is the configuration of the model. The number of experts is not divided, because routers
    select among all experts; `ExpertSplit` has the number of experts on a device.

    Raises:
      ValueError: the number of devices does not divide the heads (`pallas_attn.parallel.head_split`) or a hidden width,
        or the mesh splits experts of a model without experts.
      NotImplementedError: the mesh splits contexts of a model with windows or sparse attention.
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
            "mxfp4_experts": False,  # the checkpoint's storage format, irrelevant for a part
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
    """Return the axes that an error message about columns names."""
    return TENSOR if mesh.shape[CONTEXT] == 1 else f"{TENSOR} x {CONTEXT}"


def _check_contexts(config: ModelConfig, heads: parallel.HeadSplit, contexts: int) -> None:
    """Raise the errors of `device_part` unless heads can be split over contexts and all tokens are attended to."""
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
    """Return the slices of a tensor on a device, given its shapes in the model and in the `device_part`.

    If there are fewer slices than devices, neighbouring devices have the same slice.

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
    """Copy a weight to the devices, one slice at a time.

    Args:
      values: returns the slice for a device's index along each of `axes`.
      mesh: the devices.
      axes: mesh axes along which the slices differ.
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
    """Copy the same values to all devices. Each process copies them to its own devices."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if sharding.is_fully_addressable:
        return jnp.array(values, device=sharding)
    arrays = [jnp.array(values, device=device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays(np.shape(values), sharding, arrays)


def spans_processes(mesh: Mesh | None) -> bool:
    """Return whether the devices of a mesh belong to several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def num_contexts(mesh: Mesh | None) -> int:
    """Return the number of devices that contexts are split over."""
    return 1 if mesh is None else mesh.shape[CONTEXT]


def number_along(axes: Sequence[str], mesh: Mesh, at: Mapping[str, int]) -> int:
    """Return a device's index along several axes together, given its index along each axis; 0 for missing axes."""
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + at.get(axis, 0)
    return number


def cache_partition(config: ModelConfig, specs: Sequence[CacheSpec]) -> tuple[Any, ...]:
    """Return the `PartitionSpec` of the caches of all layers, given their shapes on one device."""
    if isinstance(config, DeepSeekConfig):
        latents = [jax.eval_shape(functools.partial(allocate_latents, spec)) for spec in specs]
        return tuple(jax.tree.map(lambda _: PartitionSpec((DATA, CONTEXT)), latent) for latent in latents)
    caches = [jax.eval_shape(functools.partial(PagedKV.allocate, spec)) for spec in specs]
    return tuple(parallel.kv_partition(kv, pages=(DATA, CONTEXT), heads=HEADS) for kv in caches)


def own_kv_heads(config: ModelConfig, devices: int) -> Callable[[Array], Array]:
    """Return a function that selects this device's KV heads of an array [Hkv, ...], inside `jax.shard_map`."""
    split = _split_heads(config, devices)
    heads = np.array([[*split.kv_heads_of(i)] for i in range(devices)], np.int32)
    return lambda x: x[jnp.asarray(heads)[lax.axis_index(HEADS)]]
