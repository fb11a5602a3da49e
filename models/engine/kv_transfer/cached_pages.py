"""Exported cache pages: transferred to another engine, or stored in a file and imported after a restart."""

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
"""Version of the serialised format."""


@dataclasses.dataclass(frozen=True)
class CachedSequence:
    """Leading full pages of a token sequence.

    Attributes:
      tokens: token ids; their number is a multiple of the page size.
      salt: salt of the request that computed the pages.
      rows: int32 [heads, pages] for each cache group, index of each page in the group's page rows; PAGE_NONE for pages
        that no later token attends to.
    """

    tokens: tuple[int, ...]
    salt: str
    rows: tuple[Int32[np.ndarray, "heads pages"], ...]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Arrays in one page row of a cache group.

    Attributes:
      num_heads: page rows per page.
      arrays: shape and dtype of the row in each array; keys are "layer.array".
    """

    num_heads: int
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]

    def of_layers(self) -> dict[int, dict[str, tuple[tuple[int, ...], np.dtype]]]:
        """Return shapes and dtypes by layer, then by array."""
        layers: dict[int, dict[str, tuple[tuple[int, ...], np.dtype]]] = {}
        for name, array in self.arrays.items():
            layer, _, name = name.partition(".")
            layers.setdefault(int(layer), {})[name] = array
        return layers


@dataclasses.dataclass(frozen=True, eq=False)
class CachedPages:
    """Contents of pages, and their token sequences.

    Attributes:
      made_for: `cache_format` of the exporting engine, JSON values by name: configuration and weights of its model,
        sizes and dtypes of its caches, windows, static scales. An importing engine must have equal values.
      sequences: token sequences of the pages. Sequences may share pages.
      groups: contents of the page rows of each cache group, [rows, ...] by "layer.array".
    """

    made_for: Mapping[str, Any]
    sequences: tuple[CachedSequence, ...]
    groups: tuple[Mapping[str, np.ndarray], ...]

    @property
    def num_bytes(self) -> int:
        """Size of the contents in bytes."""
        return sum(array.nbytes for group in self.groups for array in group.values())

    def to_bytes(self) -> bytes:
        """Encode the pages as a safetensors file with a digest of its contents."""
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
        """Check that sequences consist of whole pages, and that rows have the given formats.

        Raises:
          ValueError: a check failed.
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
        """Decode the result of `to_bytes`.

        Raises:
          ValueError: the data has another format or version, or is damaged.
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
    """Number the page rows of the given sequences from 0.

    Returns:
      The sequences with these numbers instead of the pools' page rows; and for each group the page row of each number.
    """
    of_groups = [numbered_rows([s.rows[group] for s in sequences]) for group in range(num_groups)]
    renumbered = (
        dataclasses.replace(s, rows=tuple(numbers[i] for _, numbers in of_groups)) for i, s in enumerate(sequences)
    )
    return tuple(renumbered), tuple(held for held, _ in of_groups)


def joined(
    parts: Sequence[tuple[Sequence[CachedSequence], Sequence[Mapping[str, np.ndarray]]]],
) -> tuple[tuple[CachedSequence, ...], tuple[Mapping[str, np.ndarray], ...]]:
    """Concatenate parts of (sequences, contents of page rows). Rows are numbered from 0 in each part and renumbered in
    the result, whose fields are those of `CachedPages`."""
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
    """Number the page rows of one pool that appear in tables.

    Returns:
      The distinct page rows in ascending order; and the tables with indices into them, PAGE_NONE unchanged.
    """
    held = np.unique(np.concatenate([np.zeros((0,), np.int32), *(table.ravel() for table in tables)]))
    held = held[held != PAGE_NONE].astype(np.int32)
    numbers = [np.where(t == PAGE_NONE, PAGE_NONE, np.searchsorted(held, t)).astype(np.int32) for t in tables]
    return held, numbers


def difference(made_for: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Describe the first difference of two `made_for` in one line; None if they are equal."""
    for name in dict.fromkeys([*wanted, *made_for]):
        if made_for.get(name) != wanted.get(name):
            return f"{name} of {made_for.get(name)}, this engine's is {wanted.get(name)}"
    return None


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """SHA-256 digest of dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    names = np.frombuffer("\n".join(sorted(tensors)).encode(), np.uint8)
    return digest_of([names, *(tensors[name] for name in sorted(tensors))])


# --- copies of page rows between device and host


ROWS_PER_COPY = 128
"""Number of page rows per copy. The size is fixed so that copies of any number of rows use one compiled program."""


def read_rows(
    caches: Caches, layers: Sequence[int], head_wise: bool, rows: Int32[np.ndarray, "n"]
) -> dict[str, np.ndarray]:
    """Copy page rows of some layers to the host: [n, ...] by "layer.array"."""
    arrays = paged(caches, layers)
    chunks = [_gather(arrays, chunk, head_wise) for chunk in in_chunks(rows, 0)]  # start all copies before reading one
    read = [jax.device_get(chunk) for chunk in chunks] or [
        {name: np.zeros((0, *a.shape[2 if head_wise else 1 :]), a.dtype) for name, a in arrays.items()}
    ]
    return {name: np.concatenate([chunk[name] for chunk in read])[: len(rows)] for name in arrays}


def write_rows(
    caches: Caches,
    layers: Sequence[int],
    head_wise: bool,
    rows: Int32[np.ndarray, "n"],
    contents: Mapping[str, np.ndarray],
) -> Caches:
    """Write page rows of some layers in place; contents as returned by `read_rows`."""
    arrays = paged(caches, layers)
    for start, chunk in zip(range(0, len(rows), ROWS_PER_COPY), in_chunks(rows, np.iinfo(np.int32).max), strict=True):
        new = {name: padded(contents[name][start : start + ROWS_PER_COPY]) for name in arrays}
        arrays = _scatter(arrays, chunk, new, head_wise)
    return with_paged(caches, layers, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedRows:
    """Page rows of one array of a layer, which are being copied to the host together with other layers.

    Attributes:
      stacked: [layers, padded rows, ...].
      place: index of the layer in `stacked`.
      count: number of rows without padding.
    """

    stacked: jax.Array
    place: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Size of the layer's rows in bytes, including padding."""
        return self.stacked.nbytes // self.stacked.shape[0]

    def read(self) -> np.ndarray:
        """Wait for the copy and return the layer's rows, a view of `stacked`."""
        return np.asarray(self.stacked)[self.place, : self.count]


type RowCopies = list[dict[str, CopiedRows]]
"""Copies of a layer's page rows: for each chunk of rows, copies by array."""


type DeviceRows = list[tuple[int, jax.Array]]
"""Page rows on the device, in chunks: number of rows, and int32 [padded rows]."""


def rows_on_device(rows: Int32[np.ndarray, "n"]) -> DeviceRows:
    """Send the page rows of a cache group to the device."""
    chunks = list(_by_size(rows, 0))
    on_device = jax.device_put([chunk for _, chunk in chunks])
    return [(min(len(chunk), len(rows) - start), sent) for (start, chunk), sent in zip(chunks, on_device, strict=True)]


def gather_layers(caches: Sequence[LayerCache], of_layers: Sequence[tuple[DeviceRows, bool]]) -> list[RowCopies]:
    """Copy page rows of some layers on the device and start their transfer to the host. Later steps do not affect the
    copies. The layers of a group are stacked in one array, because each transfer costs the host as much as a launch.

    Args:
      caches: caches of the layers.
      of_layers: for each layer (page rows of its cache group, whether the group is head-wise). All layers of a group
        have the same list object.

    Returns:
      Copies by layer.
    """
    copies: list[RowCopies] = [[{} for _ in rows] for rows, _ in of_layers]
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
    """Start a copy to pinned host memory, which the device writes by DMA, several times as fast as pageable memory."""
    kinds = {memory.kind for device in array.devices() for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        array.copy_to_host_async()
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def write_layer(
    cache: LayerCache, head_wise: bool, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
) -> LayerCache:
    """Write page rows of one layer in place; contents [n, ...] by array."""
    arrays = _paged_arrays(cache)
    for start, chunk in _by_size(rows, np.iinfo(np.int32).max):
        new = {name: padded(contents[name][start : start + len(chunk)], len(chunk)) for name in arrays}
        arrays = _scatter(arrays, chunk, new, head_wise)
    return with_arrays(cache, arrays)


def warm_up_rows(caches: Caches, groups: Sequence[GroupSizes], layer_ranges: Sequence[range]) -> None:
    """Compile `gather_layers` for all padded numbers of rows and for all ranges of layers that are copied together."""
    for size in (2**n for n in range(ROWS_PER_COPY.bit_length())):
        of_layers = {}
        for group in groups:
            rows = rows_on_device(np.zeros((size,), np.int32))
            of_layers |= dict.fromkeys(group.layers, (rows, group.head_wise))
        for layers in layer_ranges:
            gather_layers(caches[layers.start : layers.stop], [of_layers[layer] for layer in layers])


def _by_size(rows: Int32[np.ndarray, "n"], padding: int) -> Iterator[tuple[int, Int32[np.ndarray, "m"]]]:
    """Split rows into chunks of ROWS_PER_COPY, the last one padded to a power of two. Yield (start, chunk)."""
    for start in range(0, len(rows), ROWS_PER_COPY):
        chunk = rows[start : start + ROWS_PER_COPY]
        size = 1 << (len(chunk) - 1).bit_length()
        yield start, np.pad(chunk, (0, size - len(chunk)), constant_values=padding).astype(np.int32)


def _paged_arrays(cache: LayerCache) -> dict[str, jax.Array]:
    """Arrays of a layer that have pages, by name. Static scales have no pages."""
    return {name: array for name, array in cache_arrays(cache).items() if array.ndim > 2}


def paged(caches: Caches, layers: Sequence[int]) -> dict[str, jax.Array]:
    """Arrays of some layers that have pages, by "layer.array"."""
    return {f"{layer}.{name}": a for layer in layers for name, a in _paged_arrays(caches[layer]).items()}


def with_paged(caches: Caches, layers: Sequence[int], arrays: Mapping[str, jax.Array]) -> Caches:
    """Replace arrays of some layers; `arrays` as returned by `paged`."""
    written = list(caches)
    for layer in layers:
        fields = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{layer}.")}
        written[layer] = with_arrays(written[layer], fields)
    return tuple(written)


def in_chunks(rows: Int32[np.ndarray, "n"], padding: int) -> list[Int32[np.ndarray, "m"]]:
    """Split rows into chunks of ROWS_PER_COPY, the last one padded."""
    whole = np.pad(rows, (0, -len(rows) % ROWS_PER_COPY), constant_values=padding)
    return list(whole.reshape(-1, ROWS_PER_COPY))


def padded(contents: np.ndarray, size: int = ROWS_PER_COPY) -> np.ndarray:
    """Pad contents with zeros to `size` rows."""
    return np.pad(contents, [(0, size - len(contents))] + [(0, 0)] * (contents.ndim - 1))


def _rows_of(array: jax.Array, head_wise: bool) -> jax.Array:
    """Reshape an array so that its first axis is the page row: a page, or a page of one head."""
    return array.reshape(-1, *array.shape[2:]) if head_wise else array


def gather_rows(arrays: dict[str, jax.Array], rows: jax.Array, head_wise: bool) -> dict[str, jax.Array]:
    """Read page rows on the device."""
    return {name: _rows_of(array, head_wise)[rows] for name, array in arrays.items()}


@functools.partial(jax.jit, static_argnames="head_wise")
def _gather_stacked(arrays: Sequence[jax.Array], rows: jax.Array, head_wise: bool) -> jax.Array:
    return jnp.stack([_rows_of(array, head_wise)[rows] for array in arrays])


def scatter_rows(
    arrays: dict[str, jax.Array], rows: jax.Array, contents: dict[str, jax.Array], head_wise: bool
) -> dict[str, jax.Array]:
    """Write page rows on the device. Rows past the end of the arrays are ignored."""

    def written(array: jax.Array, new: jax.Array) -> jax.Array:
        return _rows_of(array, head_wise).at[rows].set(new, mode="drop").reshape(array.shape)

    return {name: written(array, contents[name]) for name, array in arrays.items()}


_gather = jax.jit(gather_rows, static_argnames="head_wise")
_scatter = jax.jit(scatter_rows, static_argnames="head_wise", donate_argnums=0)
