"""Copies to the host of the page rows that a step has written, layer by layer while the step runs.

A page row is the part of a page in one cache array. On a mesh, each data rank has its own page rows, and each device of
the rank has some of their heads or tokens. The devices copy their parts, and the host joins the parts to whole rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int32

from pallas_attn.models.decoder import LayerCache
from pallas_attn.models.engine.kv_transfer.cached_pages import (
    ROWS_PER_COPY,
    by_size,
    gather_stacked,
    paged_arrays,
)
from pallas_attn.models.engine.kv_transfer.split_rows import SplitRows


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedRows:
    """A running copy to the host of page rows of one cache array and one data rank. One transfer contains several
    layers.

    Attributes:
      shards: contents of all layers of the transfer, each [layers, padded rows, ...], of the devices whose parts `join`
        joins; a single array without a mesh.
      place: index of the layer in each shard.
      count: number of rows without padding.
      join: function from the parts of a layer on each device, [count, ...], to the whole rows.
    """

    shards: Sequence[jax.Array]
    place: int
    count: int
    join: Callable[[Sequence[np.ndarray]], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Size of the layer's rows in bytes, including padding."""
        return sum(shard.nbytes // shard.shape[0] for shard in self.shards)

    def read(self) -> np.ndarray:
        """Wait for the copy and return the layer's rows; without a mesh a view of the shard."""
        return self.join([np.asarray(shard)[self.place, : self.count] for shard in self.shards])


type RowCopies = list[dict[str, CopiedRows]]
"""Copies of a layer's page rows: for each chunk of rows, the copies by name of the array, in the order of the data
ranks."""


@dataclasses.dataclass(frozen=True, eq=False)
class GroupRows:
    """Numbers of the page rows of a cache group to copy, on the devices.

    Attributes:
      chunks: row numbers int32 [data ranks · padded rows], with the number of rows of each data rank without padding.
      head_wise: whether a page row holds one head.
      split: conversion of the rows of the mesh; None without a mesh.
    """

    chunks: Sequence[tuple[Sequence[int], jax.Array]]
    head_wise: bool
    split: SplitRows | None

    @staticmethod
    def of(rows: Sequence[Int32[np.ndarray, "_"]], *, head_wise: bool, split: SplitRows | None) -> GroupRows:
        """Copy row numbers to the devices.

        Args:
          rows: row numbers of each data rank.
          head_wise, split: see the attributes.
        """
        most = max(map(len, rows))
        padded = [np.pad(of_rank, (0, most - len(of_rank))) for of_rank in rows]
        starts, chunks = [], []
        for of_ranks in zip(*(by_size(of_rank, 0) for of_rank in padded), strict=True):
            starts.append(of_ranks[0][0])
            chunks.append(np.concatenate([chunk for _, chunk in of_ranks]))
        on_devices = jax.device_put(chunks, None if split is None else split.of_ranks)
        size = len(chunks[0]) // len(rows) if chunks else 0
        counts = [[min(max(len(of_rank) - start, 0), size) for of_rank in rows] for start in starts]
        return GroupRows([*zip(counts, on_devices, strict=True)], head_wise, split)

    def gather(self, arrays: Sequence[jax.Array], numbers: jax.Array) -> jax.Array:
        """Start the copies on the devices of page rows of arrays with equal shapes."""
        if self.split is None:
            return _gather_stacked(arrays, numbers, self.head_wise)
        return self.split.gather_stacked(arrays, numbers, self.head_wise)

    def shards(self, stacked: jax.Array, rank: int) -> Sequence[jax.Array]:
        """Return the parts of the result of `gather` that `join` joins to the rows of a data rank."""
        return [stacked] if self.split is None else self.split.shards(stacked, rank)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the parts of page rows on the devices of a data rank."""
        return parts[0] if self.split is None else self.split.join(parts, self.head_wise)


def gather_layers(caches: Sequence[LayerCache], of_layers: Sequence[GroupRows]) -> list[RowCopies]:
    """Copy page rows of some layers on the devices, and start the transfer of the copies to the host.

    Later steps do not affect the copies. The layers of a cache group are stacked in one array, because starting a
    transfer takes the host as long as launching a kernel.

    Args:
      caches: caches of the layers.
      of_layers: for each layer, the row numbers of its cache group. All layers of a group must have the same object.

    Returns:
      The copies of each layer.
    """
    groups: dict[tuple[GroupRows, str], list[int]] = {}
    for place, (rows, cache) in enumerate(zip(of_layers, caches, strict=True)):
        for name in paged_arrays(cache):
            groups.setdefault((rows, name), []).append(place)
    copies: list[dict[tuple[int, int], dict[str, CopiedRows]]] = [{} for _ in of_layers]
    for (rows, name), places in groups.items():
        arrays = [paged_arrays(caches[place])[name] for place in places]
        for chunk, (counts, numbers) in enumerate(rows.chunks):
            stacked = rows.gather(arrays, numbers)
            for rank, count in enumerate(counts):
                if count:
                    shards = [_sent_to_host(shard) for shard in rows.shards(stacked, rank)]
                    for n, place in enumerate(places):
                        copied = CopiedRows(shards, n, count, rows.join)
                        copies[place].setdefault((rank, chunk), {})[name] = copied
    return [[of_layer[key] for key in sorted(of_layer)] for of_layer in copies]


def warm_up_rows(
    caches: Sequence[LayerCache],
    rows_of_layers: Callable[[int], Mapping[int, GroupRows]],
    layer_ranges: Sequence[range],
) -> None:
    """Compile `gather_layers` for all padded numbers of rows and for all ranges of layers that are copied together.

    Args:
      caches: caches of all layers.
      rows_of_layers: function from a number of rows to row numbers of each layer.
      layer_ranges: layers that are copied together.
    """
    for size in (2**n for n in range(ROWS_PER_COPY.bit_length())):
        of_layers = rows_of_layers(size)
        for layers in (layers for layers in layer_ranges if layers.start in of_layers):
            gather_layers(caches[layers.start : layers.stop], [of_layers[layer] for layer in layers])


def _sent_to_host(array: jax.Array) -> jax.Array:
    """Start a copy to the host and return the array that will hold it.

    The copy goes to pinned host memory if the device has it: writing pinned memory by DMA is several times as fast as
    writing pageable memory.
    """
    kinds = {memory.kind for device in array.devices() for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        array.copy_to_host_async()
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


_gather_stacked = jax.jit(gather_stacked, static_argnames="head_wise")
