"""Pages that leave one engine's cache for another's: to a second engine, or to a file and back after a restart."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Int32

from models.decoder import Caches, LayerCache, cache_arrays, with_arrays
from models.engine.group_sizes import GroupSizes
from pallas_attn import PAGE_NONE

FORMAT = 1
"""Version of the bytes."""


@dataclasses.dataclass(frozen=True)
class CachedSequence:
    """Leading full pages of a token sequence.

    Attributes:
      tokens: token ids, whole pages of them.
      salt: of the request that computed them.
      rows: for each cache group int32 [heads, pages], which of the group's rows a page is; PAGE_NONE where no token
        after the sequence sees it.
    """

    tokens: tuple[int, ...]
    salt: str
    rows: tuple[Int32[np.ndarray, "heads pages"], ...]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Arrays that a row of a cache group consists of.

    Attributes:
      num_heads: rows of a page.
      arrays: shape and dtype of its share of every layer's arrays, by layer and array.
    """

    num_heads: int
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]

    def of_layers(self) -> dict[int, dict[str, tuple[tuple[int, ...], np.dtype]]]:
        """Shapes and dtypes by array for each layer."""
        layers: dict[int, dict[str, tuple[tuple[int, ...], np.dtype]]] = {}
        for name, array in self.arrays.items():
            layer, _, name = name.partition(".")
            layers.setdefault(int(layer), {})[name] = array
        return layers


@dataclasses.dataclass(frozen=True, eq=False)
class CachedPages:
    """Contents of pages, and the sequences that they spell.

    Attributes:
      made_for: what an engine must have in common with the one they are from: configuration and weights of its model,
        sizes and dtypes of its caches, windows, static scales. JSON, by name.
      sequences: those that the pages belong to. They may share pages.
      groups: for each cache group the contents of its rows: by layer and array, [rows, ...].
    """

    made_for: Mapping[str, Any]
    sequences: tuple[CachedSequence, ...]
    groups: tuple[Mapping[str, np.ndarray], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the contents."""
        return sum(array.nbytes for group in self.groups for array in group.values())

    def to_bytes(self) -> bytes:
        """Encodes them as a safetensors file, with a digest of all that is in it."""
        tokens = [np.array(sequence.tokens, np.int64) for sequence in self.sequences]
        tensors: dict[str, np.ndarray] = {"tokens": np.concatenate([np.zeros(0, np.int64), *tokens])}
        for i, sequence in enumerate(self.sequences):
            tensors |= {f"rows.{i}.{group}": rows for group, rows in enumerate(sequence.rows)}
        dtypes = {}
        for i, group in enumerate(self.groups):
            for name, array in group.items():
                tensors[f"pages.{i}.{name}"] = np.ascontiguousarray(array).view(np.uint8)
                dtypes[f"{i}.{name}"] = array.dtype.name
        about = {
            "format": FORMAT,
            "made_for": self.made_for,
            "sequences": [[len(sequence.tokens), sequence.salt] for sequence in self.sequences],
            "groups": len(self.groups),
            "dtypes": dtypes,
        }
        tensors["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        tensors["digest"] = np.frombuffer(_digest(tensors).encode(), np.uint8)
        return safetensors.numpy.save(tensors)

    def check(self, page_size: int, vocab_size: int, groups: Sequence[RowFormat]) -> None:
        """Checks that they are what `made_for` says: whole pages of sequences, and rows of these formats.

        Raises:
          ValueError: they are not.
        """
        if len(self.groups) != len(groups):
            raise ValueError(f"pages: expected {len(groups)} cache groups, got {len(self.groups)}")
        for number, (of_group, contents) in enumerate(zip(groups, self.groups, strict=True)):
            got = {name: (array.shape[1:], array.dtype) for name, array in contents.items()}
            if got != of_group.arrays or len({len(array) for array in contents.values()}) != 1:
                raise ValueError(f"pages: contents of group {number} have other shapes or dtypes than the cache's rows")
        for sequence in self.sequences:
            num_pages, rest = divmod(len(sequence.tokens), page_size)
            if rest or [rows.shape for rows in sequence.rows] != [(group.num_heads, num_pages) for group in groups]:
                raise ValueError(f"pages: a sequence of {len(sequence.tokens)} tokens has not just its whole pages")
            if not all(0 <= token < vocab_size for token in sequence.tokens):
                raise ValueError(f"pages: expected token ids from 0 to {vocab_size - 1}, a sequence has others")
            for rows, contents in zip(sequence.rows, self.groups, strict=True):
                most = len(next(iter(contents.values())))
                if rows.dtype != np.int32 or (rows.size and not PAGE_NONE <= rows.min() <= rows.max() < most):
                    raise ValueError(f"pages: expected rows from {PAGE_NONE} to {most - 1}, a sequence has others")

    @staticmethod
    def from_bytes(data: bytes) -> CachedPages:
        """Decodes what `to_bytes` made.

        Raises:
          ValueError: other bytes, of another version, or damaged ones.
        """
        try:
            tensors = safetensors.numpy.load(data)
            digest, about = tensors.pop("digest").tobytes().decode(), json.loads(tensors["about"].tobytes())
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']!r}, expected {FORMAT}")
            if digest != _digest(tensors):
                raise ValueError("damaged, the digest is another")
            return _decoded(about, tensors)
        except (
            safetensors.SafetensorError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            reason = str(error)[:200] or type(error).__name__
            raise ValueError(f"data: no cached pages in these {len(data)} bytes: {reason}") from error


def _decoded(about: Any, tensors: Mapping[str, np.ndarray]) -> CachedPages:
    ends = np.cumsum([0, *(length for length, _ in about["sequences"])])
    sequences = tuple(
        CachedSequence(
            tuple(tensors["tokens"][ends[i] : ends[i + 1]].tolist()),
            str(salt),
            tuple(tensors[f"rows.{i}.{group}"] for group in range(about["groups"])),
        )
        for i, (_, salt) in enumerate(about["sequences"])
    )
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(about["groups"])]
    for name, dtype in about["dtypes"].items():
        group, _, array = name.partition(".")
        groups[int(group)][array] = tensors[f"pages.{name}"].view(jnp.dtype(dtype))
    return CachedPages(dict(about["made_for"]), sequences, tuple(groups))


def numbered(
    sequences: Sequence[CachedSequence], num_groups: int
) -> tuple[tuple[CachedSequence, ...], tuple[Int32[np.ndarray, "n"], ...]]:
    """Numbers the rows of an engine's pools that sequences hold.

    Returns:
      The sequences with the numbers in place of the pools' rows; and for each group the pool's row of each number.
    """
    of_groups = [numbered_rows([s.rows[group] for s in sequences]) for group in range(num_groups)]
    renumbered = (
        dataclasses.replace(s, rows=tuple(numbers[i] for _, numbers in of_groups)) for i, s in enumerate(sequences)
    )
    return tuple(renumbered), tuple(held for held, _ in of_groups)


def joined(
    parts: Sequence[tuple[Sequence[CachedSequence], Sequence[Mapping[str, np.ndarray]]]],
) -> tuple[tuple[CachedSequence, ...], tuple[Mapping[str, np.ndarray], ...]]:
    """Joins sequences and contents of pages, whose rows are numbered in each part, to those of `CachedPages`."""
    sequences: list[CachedSequence] = []
    num_rows = [0] * len(parts[0][1])
    for of_part, groups in parts:
        for each in of_part:
            rows = (np.where(r == PAGE_NONE, r, r + first) for r, first in zip(each.rows, num_rows, strict=True))
            sequences.append(dataclasses.replace(each, rows=tuple(r.astype(np.int32) for r in rows)))
        num_rows = [n + len(next(iter(arrays.values()))) for n, arrays in zip(num_rows, groups, strict=True)]
    of_groups = zip(*(groups for _, groups in parts), strict=True)
    contents = ({name: np.concatenate([part[name] for part in each]) for name in each[0]} for each in of_groups)
    return tuple(sequences), tuple(contents)


def numbered_rows(
    tables: Sequence[Int32[np.ndarray, "heads pages"]],
) -> tuple[Int32[np.ndarray, "n"], list[Int32[np.ndarray, "heads pages"]]]:
    """Numbers the rows of one pool that tables hold.

    Returns:
      The rows in ascending order, each once; and the tables with the numbers in place of rows, PAGE_NONE where they
      have none.
    """
    held = np.unique(np.concatenate([np.zeros((0,), np.int32), *(table.ravel() for table in tables)]))
    held = held[held != PAGE_NONE].astype(np.int32)
    numbers = [np.where(t == PAGE_NONE, PAGE_NONE, np.searchsorted(held, t)).astype(np.int32) for t in tables]
    return held, numbers


def difference(made_for: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Says in one line what of two `made_for` is unlike first; None if nothing is."""
    for name in dict.fromkeys([*wanted, *made_for]):
        if made_for.get(name) != wanted.get(name):
            return f"{name} of {made_for.get(name)}, this engine's is {wanted.get(name)}"
    return None


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """Digest of dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    names = np.frombuffer("\n".join(sorted(tensors)).encode(), np.uint8)
    return digest_of([names, *(tensors[name] for name in sorted(tensors))])


# --- rows on their way from the device and to it


ROWS_AT_ONCE = 128
"""Rows that one call copies, so that any number of them compiles once."""


def read_rows(
    caches: Caches, layers: Sequence[int], head_wise: bool, rows: Int32[np.ndarray, "n"]
) -> dict[str, np.ndarray]:
    """Copies rows of these layers to the host: [n, ...] by layer and array."""
    arrays = paged(caches, layers)
    parts = [_gather(arrays, part, head_wise) for part in in_parts(rows, 0)]  # all start before one is read
    read = [jax.device_get(part) for part in parts] or [
        {name: np.zeros((0, *a.shape[2 if head_wise else 1 :]), a.dtype) for name, a in arrays.items()}
    ]
    return {name: np.concatenate([part[name] for part in read])[: len(rows)] for name in arrays}


def write_rows(
    caches: Caches,
    layers: Sequence[int],
    head_wise: bool,
    rows: Int32[np.ndarray, "n"],
    contents: Mapping[str, np.ndarray],
) -> Caches:
    """Writes rows of these layers in place; contents as `read_rows` returns them."""
    arrays = paged(caches, layers)
    for start, part in zip(range(0, len(rows), ROWS_AT_ONCE), in_parts(rows, np.iinfo(np.int32).max), strict=True):
        new = {name: padded(contents[name][start : start + ROWS_AT_ONCE]) for name in arrays}
        arrays = _scatter(arrays, part, new, head_wise)
    return with_paged(caches, layers, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedRows:
    """Rows of one array of a layer, on their way to the host with those of other layers.

    Attributes:
      stacked: [layers, at least `count` rows, ...].
      place: of the layer among these.
      count: number of rows.
    """

    stacked: jax.Array
    place: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer's part."""
        return self.stacked.nbytes // self.stacked.shape[0]

    def read(self) -> np.ndarray:
        """Waits for the rows; returns them as a view of all layers'."""
        return np.asarray(self.stacked)[self.place, : self.count]


type RowParts = list[dict[str, CopiedRows]]
"""Copies of a layer's rows, in parts, by array."""


type DeviceRows = list[tuple[int, jax.Array]]
"""Rows on the device, in parts: a number of rows, and int32 [at least so many]."""


def rows_on_device(rows: Int32[np.ndarray, "n"]) -> DeviceRows:
    """Sends rows to the device, for all layers of a cache group."""
    parts = list(_by_size(rows, 0))
    on_device = jax.device_put([part for _, part in parts])
    return [(min(len(part), len(rows) - start), sent) for (start, part), sent in zip(parts, on_device, strict=True)]


def gather_layers(caches: Sequence[LayerCache], of_layers: Sequence[tuple[DeviceRows, bool]]) -> list[RowParts]:
    """Starts copies of rows of some layers, which later steps do not change, and sends them to the host as they are
    made: one array of all layers, since each costs the host as much as a launch.

    Args:
      caches: of the layers.
      of_layers: for each layer its cache group's rows, the same list for all layers of the group, and whether the group
        is head-wise.

    Returns:
      Copies by layer.
    """
    copies: list[RowParts] = [[{} for _ in rows] for rows, _ in of_layers]
    groups: dict[tuple[int, str], list[int]] = {}
    for place, ((rows, _), cache) in enumerate(zip(of_layers, caches, strict=True)):
        for name in _paged_arrays(cache):
            groups.setdefault((id(rows), name), []).append(place)
    for (_, name), places in groups.items():
        rows, head_wise = of_layers[places[0]]
        arrays = [_paged_arrays(caches[place])[name] for place in places]
        for part, (count, numbers) in enumerate(rows):
            stacked = _sent_to_host(_gather_stacked(arrays, numbers, head_wise))
            for n, place in enumerate(places):
                copies[place][part][name] = CopiedRows(stacked, n, count)
    return copies


def _sent_to_host(array: jax.Array) -> jax.Array:
    """Starts a copy to pinned memory of the host, which the device writes by itself and several times as fast as other
    memory."""
    kinds = {memory.kind for device in array.devices() for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        array.copy_to_host_async()
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def write_layer(
    cache: LayerCache, head_wise: bool, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
) -> LayerCache:
    """Writes rows of one layer in place; contents [n, ...] by array."""
    arrays = _paged_arrays(cache)
    for start, part in _by_size(rows, np.iinfo(np.int32).max):
        new = {name: padded(contents[name][start : start + len(part)], len(part)) for name in arrays}
        arrays = _scatter(arrays, part, new, head_wise)
    return with_arrays(cache, arrays)


def warm_up_rows(caches: Caches, groups: Sequence[GroupSizes], pieces: Sequence[range]) -> None:
    """Compiles `gather_layers` for all numbers of rows, for layers that are copied together."""
    for size in (2**n for n in range(ROWS_AT_ONCE.bit_length())):
        of_layers = {}
        for group in groups:
            rows = rows_on_device(np.zeros((size,), np.int32))
            of_layers |= dict.fromkeys(group.layers, (rows, group.head_wise))
        for piece in pieces:
            gather_layers(caches[piece.start : piece.stop], [of_layers[layer] for layer in piece])


def _by_size(rows: Int32[np.ndarray, "n"], padding: int) -> Iterator[tuple[int, Int32[np.ndarray, "m"]]]:
    """Cuts rows into parts of ROWS_AT_ONCE and a last one padded to a power of two; yields each with its start."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        size = 1 << (len(part) - 1).bit_length()
        yield start, np.pad(part, (0, size - len(part)), constant_values=padding).astype(np.int32)


def _paged_arrays(cache: LayerCache) -> dict[str, jax.Array]:
    """The arrays of a layer that have pages, by name; static scales have none."""
    return {name: array for name, array in cache_arrays(cache).items() if array.ndim > 2}


def paged(caches: Caches, layers: Sequence[int]) -> dict[str, jax.Array]:
    """The arrays of layers that have pages, by layer and name."""
    return {f"{layer}.{name}": a for layer in layers for name, a in _paged_arrays(caches[layer]).items()}


def with_paged(caches: Caches, layers: Sequence[int], arrays: Mapping[str, jax.Array]) -> Caches:
    """Caches with other arrays of these layers, as `paged` names them."""
    written = list(caches)
    for layer in layers:
        fields = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{layer}.")}
        written[layer] = with_arrays(written[layer], fields)
    return tuple(written)


def in_parts(rows: Int32[np.ndarray, "n"], padding: int) -> list[Int32[np.ndarray, "m"]]:
    """Cuts rows into parts of ROWS_AT_ONCE, the last one padded."""
    whole = np.pad(rows, (0, -len(rows) % ROWS_AT_ONCE), constant_values=padding)
    return list(whole.reshape(-1, ROWS_AT_ONCE))


def padded(contents: np.ndarray, size: int = ROWS_AT_ONCE) -> np.ndarray:
    """Contents of so many rows; zeros after those that there are."""
    return np.pad(contents, [(0, size - len(contents))] + [(0, 0)] * (contents.ndim - 1))


def _rows_of(array: jax.Array, head_wise: bool) -> jax.Array:
    """An array with a page, or with a page of one head, in each row."""
    return array.reshape(-1, *array.shape[2:]) if head_wise else array


def gather_rows(arrays: dict[str, jax.Array], rows: jax.Array, head_wise: bool) -> dict[str, jax.Array]:
    """Contents of rows, on the device that has them."""
    return {name: _rows_of(array, head_wise)[rows] for name, array in arrays.items()}


@functools.partial(jax.jit, static_argnames="head_wise")
def _gather_stacked(arrays: Sequence[jax.Array], rows: jax.Array, head_wise: bool) -> jax.Array:
    return jnp.stack([_rows_of(array, head_wise)[rows] for array in arrays])


def scatter_rows(
    arrays: dict[str, jax.Array], rows: jax.Array, contents: dict[str, jax.Array], head_wise: bool
) -> dict[str, jax.Array]:
    """Arrays with other contents of rows; rows past the end are dropped."""

    def written(array: jax.Array, new: jax.Array) -> jax.Array:
        return _rows_of(array, head_wise).at[rows].set(new, mode="drop").reshape(array.shape)

    return {name: written(array, contents[name]) for name, array in arrays.items()}


_gather = jax.jit(gather_rows, static_argnames="head_wise")
_scatter = jax.jit(scatter_rows, static_argnames="head_wise", donate_argnums=0)
