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
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from pallas_attn import parallel
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, ModelConfig
from pallas_attn.models.decoder import Caches, LayerCache, over_mesh, specs_of, with_arrays
from pallas_attn.models.decoder.mesh import AXES, COLUMNS, CONTEXT, DATA, HEADS, num_devices, splits_heads
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cached_pages import (
    ROWS_PER_COPY,
    by_size,
    gather_rows,
    gather_stacked,
    in_chunks,
    padded,
    paged,
    paged_arrays,
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
    def of_ranks(self) -> NamedSharding:
        """Placement of arrays with a part for each data rank."""
        return NamedSharding(self._mesh, PartitionSpec(DATA))

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
        of_rank = [{name: self.shards(array, rank) for name, array in chunk.items()} for chunk in gathered]
        for shard in itertools.chain.from_iterable(shards for chunk in of_rank for shards in chunk.values()):
            shard.copy_to_host_async()
        joined = [
            {name: self.join([np.asarray(shard) for shard in shards], head_wise) for name, shards in chunk.items()}
            for chunk in of_rank
        ]
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
        chunks = enumerate(in_chunks(rows, np.iinfo(np.int32).max))
        placed = ((number * ROWS_PER_COPY, chunk) for number, chunk in chunks)
        arrays = self._written(paged(caches, group), group.head_wise, placed, contents, rank)
        return with_paged(caches, group.layers, arrays)

    def write_layer(
        self,
        cache: LayerCache,
        head_wise: bool,
        rows: Int32[np.ndarray, "n"],
        contents: Mapping[str, np.ndarray],
        rank: int,
    ) -> LayerCache:
        """Write page rows of one layer of a data rank in place. Arguments and result are as in
        `cached_pages.write_layer`."""
        chunks = by_size(rows, np.iinfo(np.int32).max)
        return with_arrays(cache, self._written(paged_arrays(cache), head_wise, chunks, contents, rank))

    def _written(
        self,
        arrays: dict[str, jax.Array],
        head_wise: bool,
        chunks: Iterable[tuple[int, Int32[np.ndarray, "m"]]],
        contents: Mapping[str, np.ndarray],
        rank: int,
    ) -> dict[str, jax.Array]:
        """Write page rows of a data rank in place, and return the new arrays.

        Args:
          arrays: cache arrays by name.
          head_wise: whether a page row holds one head.
          chunks: padded row numbers, each with the index of its first row in `contents`.
          contents: contents of the rows, [n, ...], by the same names.
          rank: the data rank.
        """
        scatter = self._over_devices(scatter_rows, arrays, head_wise)
        for start, chunk in chunks:
            of_ranks = np.full((self._ranks, len(chunk)), np.iinfo(np.int32).max, np.int32)
            of_ranks[rank] = chunk
            new = {name: padded(contents[name][start : start + len(chunk)], len(chunk)) for name in arrays}
            cut = {name: self._cut(array, head_wise, rank) for name, array in new.items()}
            arrays = scatter(arrays, of_ranks.reshape(-1), cut)
        return arrays

    def gather_stacked(self, arrays: Sequence[jax.Array], rows: jax.Array, head_wise: bool) -> jax.Array:
        """Copy page rows of all data ranks on their devices.

        Args:
          arrays: cache arrays of several layers with equal shapes.
          rows: row numbers, int32 [data ranks · padded rows].
          head_wise: whether a page row holds one head.

        Returns:
          Contents of the rows of each device, [layers, devices · padded rows, ...].
        """
        return self._over_devices(gather_stacked, arrays, head_wise)(arrays, rows)

    def _over_devices(
        self,
        function: Callable[..., Any],
        arrays: Mapping[str, jax.Array] | Sequence[jax.Array],
        head_wise: bool,
    ) -> Callable[..., Any]:
        """Return a jitted function that applies `gather_rows`, `gather_stacked` or `scatter_rows` on every device.

        Contents of page rows are concatenated along the axis of rows, device after device. For `gather_stacked`, each
        data rank has its own row numbers.
        """
        specs = specs_of(arrays)
        leaves, structure = jax.tree.flatten(specs)
        key = function, structure, tuple(leaves), head_wise
        if key not in self._functions:
            each, run = PartitionSpec(AXES), functools.partial(function, head_wise=head_wise)
            if function is gather_rows:
                split = over_mesh(run, self._mesh, (specs, PartitionSpec()), each)
                self._functions[key] = jax.jit(split)
            elif function is gather_stacked:
                split = over_mesh(run, self._mesh, (specs, PartitionSpec(DATA)), PartitionSpec(None, AXES))
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

    def shards(self, of_devices: jax.Array, rank: int) -> list[jax.Array]:
        """Return the parts of an array of the devices of one data rank that together have whole page rows."""
        devices = [*self._mesh.devices.flat]
        shards = {devices.index(shard.device): shard.data for shard in of_devices.addressable_shards}
        return [shards[self._number(rank, head, c)] for head in self._owners for c in range(self._contexts)]

    def join(self, shards: Sequence[np.ndarray], head_wise: bool) -> np.ndarray:
        """Join the page rows of the devices of one data rank, [n, ...], in the order of `shards`."""
        axis = 1 + self._token_axis(head_wise)
        of_heads = itertools.batched(shards, self._contexts)
        heads = [contexts[0] if len(contexts) == 1 else np.concatenate(contexts, axis=axis) for contexts in of_heads]
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
