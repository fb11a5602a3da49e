"""A model split over the devices of a mesh with the axes `data`, `tensor`, `context` and `expert`.

Each device runs a smaller model, the `device_part` of the model, inside one `jax.shard_map` around the step. It has
some of the heads and of the hidden columns of each layer. The output of a layer is the sum of the outputs of all
devices: `DecoderLayer` adds them up once after attention and once after the feed-forward layer. All other code is the
same as on one device. The axes:

- `tensor` splits heads, hidden columns of dense layers and of each expert, and the vocabulary.
- `expert` splits whole experts, and all other weights like `tensor`. The devices along this axis have the same tokens.
  Each device applies its experts to the tokens that selected them, and the sum after the layer adds up the results.
- `context` splits the cached tokens of every page (see `contexts`). Devices along this axis compute queries and cache
  entries of the same heads. Output projections, hidden columns and the vocabulary are split. In layers of Gemma 4 with
  a window, it splits the cached heads instead of the tokens.
- `data` splits the requests. Each index along `data` is a data rank with its own requests and pages. All weights are
  copied to every rank, except experts, which are split over the ranks. Each rank gathers the tokens of all ranks for
  its experts; with many ranks, tokens are sent only to the ranks of their experts (`pallas_attn.models.moe.exchange`).

Weights:

- The slice of a weight on a device follows from its shape in the smaller model (`slices_of_device`). If there are fewer
  KV heads than devices, several devices have the same KV head. MLA's projections to latents, routers, indexers, and
  compressors and hyper-connections of DeepSeek-V4 are the same on all devices.
- The vocabulary is split if the number of devices divides its size, because reading all weights of the output head
  takes longer than gathering the logits of a step. Each device samples from the logits of all devices, so the samples
  are the same as on one device.
- A split weight is stored as one array, the concatenation of the devices' slices along the first axis, whichever axis
  of the weight is split. Only code inside `jax.shard_map` reads it, where each device has its slice.
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
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from pallas_attn import CacheSpec, HeadWindow, parallel
from pallas_attn.models.config import (
    DeepSeekConfig,
    DeepseekV4Config,
    Gemma4Config,
    HeadsConfig,
    HeadWindows,
    LayerWindow,
    ModelConfig,
)
from pallas_attn.models.decoder.caches import allocate_compressed, allocate_heads, allocate_latents

DATA, TENSOR, CONTEXT, EXPERT = "data", "tensor", "context", "expert"

AXES = (DATA, TENSOR, CONTEXT, EXPERT)
"""Names of the axes of a mesh, in the order of `Mesh.devices`."""

HEADS = (TENSOR, EXPERT)
"""Axes over which heads are split."""

COLUMNS = (*HEADS, CONTEXT)
"""Axes over which outputs of heads, hidden columns of dense layers and the vocabulary are split."""

EXPERT_COLUMNS = (TENSOR, CONTEXT)
"""Axes over which the hidden columns of each expert are split."""

EXPERTS = (DATA, EXPERT)
"""Axes over which whole experts are split."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the first devices of `jax.devices()`. With several processes, it must have all devices.

    `sizes` has the meaning of the option --mesh of the scripts, which differs from the sizes of the returned mesh:

    - In `sizes`, the number of devices is data · tensor · context. `expert` is the number of groups that the experts
      are divided into: a multiple of `data` that divides data · tensor. The hidden columns of each expert are split
      over the remaining factor data · tensor / expert, and over `context`.
    - In the returned mesh, the number of devices is the product of the sizes of all axes. Heads are split over `tensor`
      x `expert`, and experts over `data` x `expert`.

    Example: sizes {data: 2, tensor: 4, expert: 4} give a mesh of data 2, tensor 2 and expert 2.

    Args:
      sizes: sizes by name of the axis. Axes that are left out have size 1, except that `expert` defaults to `data`, and
        `tensor` to `expert` / `data`.

    Raises:
      ValueError: unknown axis, size below 1, more devices than available, not all devices with several processes, or
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
    """Convert the argument of `make_mesh` to the sizes of the axes of its result."""
    data = sizes.get(DATA, 1)
    experts = sizes.get(EXPERT, data)
    tensor = sizes.get(TENSOR, max(experts // data, 1))
    if experts % data or tensor * data % experts:
        reach = f"a multiple of {DATA}={data} that divides" if data > 1 else "a divisor of"
        raise ValueError(f"mesh: {EXPERT}: expected {reach} {DATA} x {TENSOR} = {data * tensor}, got {experts}")
    return {**sizes, TENSOR: tensor * data // experts, EXPERT: experts // data}


def normal_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices that has all `AXES` in order. Missing axes are added with size 1.

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
    """Return `jax.shard_map` of a step function, with `check_vma=False`.

    The check that replicated outputs are equal on all devices is off, because Pallas kernels do not declare how their
    outputs vary over the mesh. The outputs are equal: they follow from `psum` and gathers, which give the same bits on
    all devices.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def specs_of(arrays: Any) -> Any:
    """Return the `PartitionSpec` of each array on a mesh. Arrays without one are replicated."""
    return jax.tree.map(lambda x: getattr(x.sharding, "spec", PartitionSpec()), arrays)


def bytes_on_device(array: Array) -> int:
    """Return the number of bytes of an array on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of devices along several axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


# --- the part of a model on one device


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
    """Numbers of devices that the experts of a layer are split over.

    All devices have the same number of experts. If it does not divide the number of experts of the layer, the last
    devices have experts with zero weights, which no token selects.

    Attributes:
      data: number of devices along the mesh axis `data`.
      expert: number of devices along the mesh axis `expert`.
    """

    data: int = 1
    expert: int = 1

    @staticmethod
    def over(mesh: Mesh | None) -> ExpertSplit:
        """Return the numbers of devices that a mesh splits experts over; 1 along both axes if `mesh` is None."""
        return ExpertSplit() if mesh is None else ExpertSplit(*(mesh.shape[axis] for axis in EXPERTS))

    @property
    def devices(self) -> int:
        return self.data * self.expert

    def num_own(self, num_experts: int) -> int:
        """Return the number of experts of each device, including padding."""
        return -(-num_experts // self.devices)

    def own(self, num_experts: int, device: int) -> range:
        """Return the experts of one device, without padding. `device` is its index along both axes together: index
        along `data` · size of `expert` + index along `expert`."""
        each = self.num_own(num_experts)
        return range(min(device * each, num_experts), min((device + 1) * each, num_experts))


@dataclasses.dataclass(frozen=True)
class SplitHeadWindows(HeadWindows):
    """Attention windows of one layer's KV heads that are split over devices. Each device has n of the heads.

    The engine has one block table for the i-th heads of all devices, so their pages are released together. Therefore
    the fields of the base class, from which released pages are computed, have n entries: entry i of `window` and of
    `sink_tokens` is the maximum over the i-th heads of all devices.

    Attributes:
      devices: windows of the n heads of each device.
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


def device_part[Config: ModelConfig](config: Config, mesh: Mesh | None) -> Config:
    """Return the configuration of the smaller model on each device: fewer heads, hidden columns and vocabulary entries.

    Without a mesh, return `config`. The result has the number of experts of the whole model, because routers select
    among all experts. `ExpertSplit` has the number of experts on a device.

    Raises:
      ValueError: the number of devices does not divide the heads (`pallas_attn.parallel.head_split`) or a hidden width,
        or the mesh splits experts of a model without experts.
      NotImplementedError: the axis `context` is larger than 1, and the model has windows or sparse attention.
    """
    if mesh is None:
        return config
    devices, columns = num_devices(mesh, COLUMNS), num_devices(mesh, EXPERT_COLUMNS)
    vocab_size = config.vocab_size if config.vocab_size % devices else config.vocab_size // devices
    heads = split_heads(config, num_devices(mesh, HEADS))
    if mesh.shape[CONTEXT] > 1:
        for kv_heads in _numbers_of_kv_heads(config):
            _check_contexts(config, split_heads(config, heads.devices, kv_heads), mesh.shape[CONTEXT])
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
    elif isinstance(config, DeepseekV4Config):
        widths = {"moe_intermediate_size": columns, "o_groups": devices}
        shared = config.moe_intermediate_size
    elif isinstance(config, Gemma4Config):
        widths = {"intermediate_size": devices} | ({} if all(is_dense) else {"moe_intermediate_size": columns})
        last = config.num_hidden_layers - 1  # is global
        rows = config.vocab_size_per_layer_input
        changes = {
            "num_key_value_heads": split_heads(config, heads.devices, config.num_key_value_heads).kv_heads,
            "num_global_key_value_heads": split_heads(config, heads.devices, config.kv_heads(last).num_heads).kv_heads,
            "vocab_size_per_layer_input": rows
            if rows % devices or vocab_size == config.vocab_size
            else rows // devices,
        }
    else:
        widths = widths or {"intermediate_size": columns}
        changes = {
            "num_key_value_heads": heads.kv_heads,
            "windows": config.windows and tuple(_split_window(window, heads) for window in config.windows),
            "mxfp4_experts": False,  # describes the files of the checkpoint, not the model on the devices
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


def _numbers_of_kv_heads(config: ModelConfig) -> set[int | None]:
    """Return the different numbers of KV heads of layers, as arguments of `split_heads`."""
    if not isinstance(config, Gemma4Config):
        return {None}
    return {config.kv_heads(layer).num_heads for layer in config.cached_layers}


def splits_heads(config: ModelConfig, layer: int, contexts: int) -> bool:
    """Return whether the mesh axis `context`, which has `contexts` devices, splits the cached heads of a layer, as it
    does in local layers of Gemma 4. In other layers it splits the tokens of each page."""
    return contexts > 1 and isinstance(config, Gemma4Config) and not config.is_global(layer)


def cached_part[Config: ModelConfig](part: Config, contexts: int) -> Config:
    """Return the configuration of one device's part with the numbers of KV heads that the device caches."""
    if contexts == 1 or not isinstance(part, Gemma4Config):
        return part
    split = parallel.head_split(part.num_attention_heads, part.num_key_value_heads, contexts)
    return dataclasses.replace(part, num_key_value_heads=split.kv_heads)


def split_heads(config: ModelConfig, devices: int, kv_heads: int | None = None) -> parallel.HeadSplit:
    """Return the split of query and KV heads over devices.

    Args:
      config: configuration of the whole model.
      devices: number of devices.
      kv_heads: number of KV heads of a layer; None for `num_key_value_heads`, or 1 for MLA: the latent.

    Raises:
      ValueError: the heads cannot be split over this number of devices.
    """
    if kv_heads is None:
        kv_heads = 1 if isinstance(config, DeepSeekConfig | DeepseekV4Config) else config.num_key_value_heads
    try:
        return parallel.head_split(config.num_attention_heads, kv_heads, devices)
    except ValueError as error:
        raise ValueError(f"mesh: {TENSOR}: {error}") from error


def _among(mesh: Mesh) -> str:
    """Return the names of the axes that split hidden columns, for error messages."""
    return TENSOR if mesh.shape[CONTEXT] == 1 else f"{TENSOR} x {CONTEXT}"


def _check_contexts(config: ModelConfig, heads: parallel.HeadSplit, contexts: int) -> None:
    """Raise the errors of `device_part` unless the axis `context` can have this size: it must divide the heads, and
    every token must attend to all earlier tokens."""
    try:
        parallel.head_split(heads.q_heads, heads.kv_heads, contexts)
    except ValueError as error:
        raise ValueError(f"mesh: {CONTEXT}: {error}") from error
    if isinstance(config, DeepseekV4Config):
        raise NotImplementedError(
            f"mesh: {CONTEXT}: expected 1, windows and selected entries of a {config.model_type} cannot be split by"
            " tokens"
        )
    if isinstance(config, DeepSeekConfig) and config.is_sparse:
        raise NotImplementedError(
            f"mesh: {CONTEXT}: expected 1, a {config.model_type} selects among keys of all devices"
        )
    if isinstance(config, Gemma4Config):
        return
    if not isinstance(config, DeepSeekConfig) and any(window is not None for window in config.windows or ()):
        raise NotImplementedError(
            f"mesh: {CONTEXT}: expected 1, windows hide different numbers of tokens on each device"
        )


def _split_window(window: LayerWindow, heads: parallel.HeadSplit) -> LayerWindow:
    """Return a layer's window for one device: `SplitHeadWindows` if the heads have different windows, else `window`."""
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
    """Return the slice of a weight that a device has, one slice object per axis.

    If the weight has fewer different slices than devices, neighbouring devices have the same slice.

    Args:
      whole: shape of the weight in the whole model.
      part: shape of the weight in the `device_part`.
      device: index of the device.
      devices: number of devices that the weight is split over.

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
    """Copy a weight to the devices, one slice at a time, so that the host needs memory for one slice only.

    Args:
      values: function from the index of a device along each of `axes` (dict by axis name) to the slice of this device.
      mesh: the devices.
      axes: mesh axes that the weight is split over; devices that differ only along other axes get the same slice.

    Returns:
      The slices as one array, concatenated along the first axis.
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
    """Return the size of the mesh axis `context`: the number of devices that the tokens of each page are split over."""
    return 1 if mesh is None else mesh.shape[CONTEXT]


def number_along(axes: Sequence[str], mesh: Mesh, at: Mapping[str, int]) -> int:
    """Return a device's index along several axes together, in row-major order of `axes`.

    Args:
      axes: names of the axes.
      mesh: the mesh.
      at: the device's index along each axis; 0 for missing axes.
    """
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + at.get(axis, 0)
    return number


def cache_partition(config: ModelConfig, specs: Sequence[CacheSpec], contexts: int) -> tuple[Any, ...]:
    """Return the `PartitionSpec` of the caches of all layers.

    Args:
      config, specs: one device's part of the model, and the shapes of its caches.
      contexts: size of the mesh axis `context`.
    """
    if isinstance(config, DeepSeekConfig | DeepseekV4Config):
        allocate: Callable[[CacheSpec], Any] = (
            allocate_latents if isinstance(config, DeepSeekConfig) else allocate_compressed
        )
        latents = [jax.eval_shape(functools.partial(allocate, spec)) for spec in specs]
        return tuple(jax.tree.map(lambda _: PartitionSpec((DATA, CONTEXT)), latent) for latent in latents)
    caches = [jax.eval_shape(functools.partial(allocate_heads, spec)) for spec in specs]
    axes = [
        (DATA, COLUMNS) if splits_heads(config, layer, contexts) else ((DATA, CONTEXT), HEADS)
        for layer in range(len(specs))
    ]
    of_layers = zip(caches, axes, strict=True)
    return tuple(kv and parallel.kv_partition(kv, pages=pages, heads=heads) for kv, (pages, heads) in of_layers)


def own_kv_heads(config: HeadsConfig, devices: int) -> Callable[[int, Array], Array]:
    """Return a function (layer, x) for use inside `jax.shard_map` that selects from an array [Hkv, ...] of a layer the
    KV heads of the device that runs it.

    Args:
      config: configuration of the whole model.
      devices: number of devices that heads are split over.
    """

    def own(layer: int, x: Array) -> Array:
        split = split_heads(config, devices, config.kv_heads(layer).num_heads)
        heads = np.array([[*split.kv_heads_of(i)] for i in range(devices)], np.int32)
        return x[jnp.asarray(heads)[lax.axis_index(HEADS)]]

    return own


def embed(tokens: Int32[Array, "T"], embed_tokens: nnx.Param, vocab_size: int) -> Float[Array, "T D"]:
    """Return the embeddings of tokens.

    On a mesh that splits the vocabulary, each device has a part of the `vocab_size` rows of the embedding and uses
    zeros for the tokens of other devices. The result is the sum over the devices. It is exact, because all terms except
    one are zero.
    """
    weight = embed_tokens[...]
    if weight.shape[0] == vocab_size:
        return weight[tokens]
    rows = tokens - jax.lax.axis_index(COLUMNS) * weight.shape[0]
    is_own = (rows >= 0) & (rows < weight.shape[0])
    own = weight[jnp.where(is_own, rows, 0)]
    return jax.lax.psum(jnp.where(is_own[:, None], own, jnp.zeros_like(own)), COLUMNS)


def sum_over(x: Float[Array, "T D"], axes: tuple[str, ...]) -> Float[Array, "T D"]:
    """Return the sum of x over the devices along `axes`; x if `axes` is empty."""
    return lax.psum(x, axes) if axes else x
