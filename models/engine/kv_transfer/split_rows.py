"""Conversion of page rows between the format of a mesh and the format of one device.

A page row is the part of a page in one cache array. It contains all KV heads of the page, or one head if the heads of
the layer have different windows (a head-wise group). A data rank is a group of devices with its own requests and pages.

 mesh axis          page row on a device                          page row on the host
 tensor             the KV heads that the device has              all KV heads, each once
 context            the tokens of the page that the device has,   all tokens of the page, all KV heads
                    or the KV heads (local layers of Gemma 4)
 data               a page of the device's data rank              a page of one data rank

Two engines with different meshes can therefore exchange pages. Head-wise groups are an exception: a page row on a
device contains one head, which is a different head on each device, and the row on the host contains the heads of all
devices. Engines with head-wise groups can exchange pages only if they have the same number of heads per device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from pallas_attn import parallel
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, ModelConfig
from pallas_attn.models.decoder import Caches, over_mesh, specs_of
from pallas_attn.models.decoder.mesh import AXES, COLUMNS, CONTEXT, DATA, HEADS, num_devices, splits_heads
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cached_pages import (
    ROWS_PER_COPY,
    gather_rows,
    in_chunks,
    padded,
    paged,
    scatter_rows,
    with_paged,
)


class SplitRows:
    """Reads and writes page rows of a cache group on a mesh. All devices must belong to this process."""

    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int = 0):
        """Prepare for a model and a mesh.

        Args:
          config: configuration of the whole model.
          mesh: devices with the caches.
          layer: index of a layer of the cache group.
        """
        self._mesh, self._ranks, self._contexts = mesh, mesh.shape[DATA], mesh.shape[CONTEXT]
        self._splits_heads = splits_heads(config, layer, self._contexts)
        self._contexts = 1 if self._splits_heads else self._contexts
        self._devices = num_devices(mesh, COLUMNS if self._splits_heads else HEADS)
        self._heads = None  # for latents, which have no head axis: devices along `HEADS` have equal copies
        if not isinstance(config, DeepSeekConfig | DeepseekV4Config):
            devices, kv_heads = self._devices, config.kv_heads(layer).num_heads
            self._heads = parallel.head_split(config.num_attention_heads, kv_heads, devices)
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @property
    def _owners(self) -> range:
        """Indices, among the devices that heads are split over, of devices that together have every KV head once."""
        return range(1) if self._heads is None else range(0, self._heads.devices, self._heads.copies)

    def shape(self, of_device: Sequence[int], head_wise: bool) -> tuple[int, ...]:
        """Shape of a page row on the host, given its shape on a device."""
        shape = list(of_device)
        shape[self._token_axis(head_wise)] *= self._contexts
        if self._heads is None:
            return tuple(shape)
        if not head_wise:
            return (shape[0] * len(self._owners), *shape[1:])
        return (len(self._owners), *shape) if len(self._owners) > 1 else tuple(shape)

    def read(self, caches: Caches, group: GroupSizes, rows: Int32[np.ndarray, "n"], rank: int) -> dict[str, np.ndarray]:
        """Copy page rows of a data rank to the host. Arguments and result are as in `cached_pages.read_rows`."""
        arrays, head_wise = paged(caches, group), group.head_wise
        chunks = in_chunks(rows, 0) or [np.zeros(ROWS_PER_COPY, np.int32)]
        gather = self._over_devices(gather_rows, arrays, head_wise)
        gathered = [gather(arrays, chunk) for chunk in chunks]  # start all copies before reading one
        joined = [{name: self._joined(array, head_wise, rank) for name, array in chunk.items()} for chunk in gathered]
        return {name: np.concatenate([chunk[name] for chunk in joined])[: len(rows)] for name in arrays}

    def write(
        self,
        caches: Caches,
        group: GroupSizes,
        rows: Int32[np.ndarray, "n"],
        contents: Mapping[str, np.ndarray],
        rank: int,
    ) -> Caches:
        """Write page rows of a data rank in place. Arguments and result are as in `cached_pages.write_rows`."""
        arrays, head_wise, none = paged(caches, group), group.head_wise, np.iinfo(np.int32).max
        scatter = self._over_devices(scatter_rows, arrays, head_wise)
        for number, chunk in enumerate(in_chunks(rows, none)):
            start = number * ROWS_PER_COPY
            of_ranks = np.full((self._ranks, ROWS_PER_COPY), none, np.int32)
            of_ranks[rank] = chunk
            new = {name: padded(contents[name][start : start + ROWS_PER_COPY]) for name in arrays}
            cut = {name: self._cut(array, head_wise, rank) for name, array in new.items()}
            arrays = scatter(arrays, of_ranks.reshape(-1), cut)
        return with_paged(caches, group.layers, arrays)

    def _over_devices(
        self, function: Callable[..., Any], arrays: Mapping[str, jax.Array], head_wise: bool
    ) -> Callable[..., Any]:
        """Return a jitted function that applies `gather_rows` or `scatter_rows` on every device.

        Contents of page rows are concatenated along the first axis, device after device.
        """
        key = function, tuple(arrays), head_wise
        if key not in self._functions:
            specs = specs_of(arrays)
            each, run = PartitionSpec(AXES), functools.partial(function, head_wise=head_wise)
            if function is gather_rows:
                split = over_mesh(run, self._mesh, (specs, PartitionSpec()), each)
                self._functions[key] = jax.jit(split)
            else:
                split = over_mesh(run, self._mesh, (specs, PartitionSpec(DATA), each), specs)
                self._functions[key] = jax.jit(split, donate_argnums=0)
        return self._functions[key]

    def _token_axis(self, head_wise: bool) -> int:
        """Token axis of a page row on a device."""
        return 0 if head_wise or self._heads is None else 1

    def _number(self, rank: int, head: int, context: int) -> int:
        """Index of a device in the mesh, given its data rank and its indices along `HEADS` and `CONTEXT`. If heads are
        split over `CONTEXT` too, `head` is the index along both, and `context` is 0."""
        if self._splits_heads:
            head, context = divmod(head, self._mesh.shape[CONTEXT])
        experts = self._mesh.shape[HEADS[1]]
        return np.ravel_multi_index(
            (rank, head // experts, context, head % experts), [self._mesh.shape[axis] for axis in AXES]
        ).item()

    def _joined(self, of_devices: jax.Array, head_wise: bool, rank: int) -> np.ndarray:
        """Join the page rows of the devices of one data rank on the host."""
        devices = [*self._mesh.devices.flat]
        shards = {devices.index(shard.device): shard.data for shard in of_devices.addressable_shards}
        wanted = [[shards[self._number(rank, head, c)] for c in range(self._contexts)] for head in self._owners]
        for shard in (shard for contexts in wanted for shard in contexts):
            shard.copy_to_host_async()
        axis = 1 + self._token_axis(head_wise)
        heads = [np.concatenate([np.asarray(shard) for shard in contexts], axis=axis) for contexts in wanted]
        if len(heads) == 1:
            return heads[0]
        return np.stack(heads, axis=1) if head_wise else np.concatenate(heads, axis=1)

    def _cut(self, rows: np.ndarray, head_wise: bool, rank: int) -> jax.Array:
        """Split page rows on the host into the rows of the devices of one data rank, and copy them to the devices.

        Devices of other data ranks receive zeros, which they do not write.
        """
        owners, devices = len(self._owners), self._devices
        heads = np.split(rows, owners, axis=1) if owners > 1 else [rows]
        if head_wise and owners > 1:
            heads = [head[:, 0] for head in heads]
        by_device: dict[int, np.ndarray] = {}
        for head in range(devices):
            of_head = heads[head * owners // devices]
            shards = np.split(of_head, self._contexts, axis=1 + self._token_axis(head_wise))
            by_device |= {self._number(rank, head, context): shard for context, shard in enumerate(shards)}
        nothing = np.zeros_like(by_device[self._number(rank, 0, 0)])
        whole = np.concatenate([by_device.get(number, nothing) for number in range(self._mesh.size)])
        return jax.device_put(whole, NamedSharding(self._mesh, PartitionSpec(AXES)))
