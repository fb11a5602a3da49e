"""Reads and writes page rows of the device's caches as NumPy arrays, the format in which engines exchange pages.

A cache group is a set of layers with equal windows. A page has the same row numbers in all layers of its group.

A page row is the part of a page in one cache array, for example `k` of one layer. It normally contains all KV heads,
and its number is the page id. If the heads of a group have different windows, the group is head-wise: a page row
contains one head, and row numbers count along the merged page and head axes of the array. Any head may use any row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from pallas_attn import CacheSpec
from pallas_attn.models.config import cache_groups
from pallas_attn.models.decoder import Caches, Decoder
from pallas_attn.models.decoder.caches import cache_spec
from pallas_attn.models.engine.config import RunnerConfig
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cached_pages import RowFormat, digest_of, read_rows, write_layer, write_rows
from pallas_attn.models.engine.kv_transfer.row_copies import GroupRows
from pallas_attn.models.engine.kv_transfer.split_rows import SplitRows
from pallas_attn.models.engine.kv_transfer.weight_digest import weight_digest


class CacheRows:
    """Copies page rows between the device and the host.

    Except in head-wise groups, a row on the host has all KV heads and all tokens of its page. On a mesh each device has
    some of the heads or tokens. `SplitRows` joins them when rows are read, and splits rows when they are written.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, specs: Sequence[CacheSpec]):
        """Store shapes and dtypes of the caches.

        Args:
          model: the model that uses the caches.
          config: page size, cache dtype and static scales of the caches.
          specs: shapes and dtypes of the cache arrays of each layer, as allocated on one device.
        """
        self._model_config, self._dtype = model.config, config.cache_dtype or model.embed_tokens.dtype
        self._index_topk = model.settings.index_topk
        self._config, self._specs = config, specs
        self._split_rows: dict[int, SplitRows] = {}  # by the first layer of the cache group; empty without a mesh
        if model.mesh is not None:
            for group in cache_groups(model.config):
                self._split_rows[group.layers[0]] = SplitRows(model.config, model.mesh, group.layers[0])

    def row_format(self, group: GroupSizes) -> RowFormat:
        """Return shapes and dtypes of one page row of a cache group on the host."""

        def shape(a: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            of_device = tuple(a.shape[2 if group.head_wise else 1 :])
            split = self._split_of(group)
            return of_device if split is None else split.shape(of_device, group.head_wise)

        paged = {
            f"{layer}.{name}": (shape(a), np.dtype(a.dtype))
            for layer in group.layers
            for name, a in self._specs[layer].arrays.items()
            if len(a.shape) > 2 and group.has_array(name)  # static scales have no pages
        }
        return RowFormat(group.num_heads, paged)

    def read(self, caches: Caches, group: GroupSizes, rows: Int32[np.ndarray, "n"], rank: int) -> dict[str, np.ndarray]:
        """Copy page rows to the host.

        Args:
          caches: caches of all layers.
          group: cache group of the rows.
          rows: row numbers.
          rank: data-parallel rank whose devices have the rows; 0 without a mesh.

        Returns:
          Contents of the rows, [n, ...]. A key is the layer and the name of the array, for example "3.k".
        """
        split = self._split_of(group)
        if split is not None:
            return split.read(caches, group, rows, rank)
        return read_rows(caches, group, rows)

    def write(
        self,
        caches: Caches,
        group: GroupSizes,
        rows: Int32[np.ndarray, "n"],
        contents: Mapping[str, np.ndarray],
        rank: int,
    ) -> Caches:
        """Write page rows in place, and return the new caches.

        Args:
          caches, group, rows, rank: see `read`.
          contents: contents of the rows, in the format that `read` returns.
        """
        split = self._split_of(group)
        if split is None:
            return write_rows(caches, group, rows, contents)
        return split.write(caches, group, rows, contents, rank)

    def write_layer(
        self,
        caches: Caches,
        group: GroupSizes,
        layer: int,
        rows: Int32[np.ndarray, "n"],
        contents: Mapping[str, np.ndarray],
        rank: int,
    ) -> Caches:
        """Write page rows of one layer in place, and return the new caches.

        Args:
          caches: caches of all layers.
          group: cache group of the layer.
          layer: index of the layer.
          rows: row numbers.
          contents: contents of the rows, [n, ...], by name of the array, for example "k".
          rank: see `read`.
        """
        split = self._split_of(group)
        if split is None:
            cache = write_layer(caches[layer], group.head_wise, rows, contents)
        else:
            cache = split.write_layer(caches[layer], group.head_wise, rows, contents, rank)
        return (*caches[:layer], cache, *caches[layer + 1 :])

    def on_devices(self, rows: Sequence[Sequence[Int32[np.ndarray, "_"]]]) -> dict[int, GroupRows]:
        """Copy row numbers to the devices, for copies of page rows to the host.

        Args:
          rows: for each cache group and each data rank, row numbers.

        Returns:
          For each layer with a cache, the rows of its cache group.
        """
        of_layers: dict[int, GroupRows] = {}
        for group, of_ranks in zip(self._config.groups or (), rows, strict=True):
            on_devices = GroupRows.of(of_ranks, head_wise=group.head_wise, split=self._split_of(group))
            of_layers |= dict.fromkeys(group.layers, on_devices)
        return of_layers

    def _split_of(self, group: GroupSizes) -> SplitRows | None:
        """Return the conversion of the rows of a cache group; None without a mesh. Groups may differ in KV heads."""
        return self._split_rows.get(group.layers[0])

    def cache_format(self, model: Decoder) -> dict[str, Any]:
        """Return the settings, by name, that must be equal in two engines that exchange pages.

        The settings are the page size, the model's configuration, the shapes and dtypes of its pages, a digest of the
        static scales, `index_topk`, and a digest of all bits of all weights. They do not depend on the mesh.
        """
        scales = self._config.kv_scales
        pages = functools.partial(cache_spec, self._model_config, 1, self._config.page_size, self._dtype, scales)
        arrays = {
            str(layer): {name: [list(a.shape[1:]), a.dtype.name] for name, a in pages(layer=layer).arrays.items()}
            for layer in range(len(self._specs))
        }
        return {
            "page_size": self._config.page_size,
            **{f"config.{name}": value for name, value in dataclasses.asdict(self._model_config).items()},
            "arrays": arrays,
            "index_topk": self._index_topk,
            "kv_scales": None if scales is None else digest_of([*scales.k, *scales.v]),
            "weights": weight_digest(model),
        }
