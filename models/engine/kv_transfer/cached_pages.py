"""Exported cache pages: transferred to another engine, or stored in a file and imported after a restart.

Terms:

- Page: the keys and values of `page_size` consecutive tokens, in all layers.
- Cache group: a set of layers with equal windows. A page has the same row numbers in all layers of a group.
- Page row: the part of a page in one cache array, for example `k` of one layer. It contains all KV heads. If heads have
  different windows, the group is head-wise: a page row contains one head, and a page has one row per head.
- Row number: index of a page row in its cache array: the page id. In head-wise groups, it is an index along the merged
  page and head axes, and any head may use any row.
- Data rank: a group of devices with its own requests and pages.
- "layer.array": key of an array, the layer's index and the array's field name, for example "3.k".
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Int32

from pallas_attn import PAGE_NONE
from pallas_attn.models.config.json_files import parse_json, shown
from pallas_attn.models.decoder import Caches, LayerCache, cache_arrays, with_arrays
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.fields import (
    DTYPES,
    UNLIMITED,
    Array,
    Integer,
    Kind,
    ListOf,
    ObjectOf,
    OneOf,
    TextUpTo,
    check_field,
)

FORMAT = 1
"""Version of the serialised format."""

_MAX_ABOUT = 2**24
"""Maximum size of the JSON in a file in bytes. Parsed JSON may need about 40 times the memory of its text."""


@dataclasses.dataclass(frozen=True)
class CachedSequence:
    """Leading full pages of a token sequence.

    Attributes:
      tokens: token ids; their number is a multiple of the page size.
      salt: salt of the request that computed the pages.
      rows: for each cache group, int32 [heads, pages]: the index of each page row along the first axis of the arrays in
        `CachedPages.groups`. PAGE_NONE for pages that no later token attends to. `heads` is 1 unless the group is
        head-wise.
    """

    tokens: tuple[int, ...]
    salt: str
    rows: tuple[Int32[np.ndarray, "heads pages"], ...]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Shapes and dtypes of a page row of a cache group.

    Attributes:
      num_heads: number of page rows per page.
      arrays: shape and dtype of one page row, by "layer.array".
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
        """Encode the pages as a safetensors file with a digest of its contents. Tokens and salts are not encrypted.

        Raises:
          ValueError: the description of the sequences needs more than `_MAX_ABOUT` bytes of JSON.
        """
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
        text = json.dumps(about).encode()
        if len(text) > _MAX_ABOUT:
            raise ValueError(f"sequences: expected at most {_MAX_ABOUT} bytes of JSON, got {len(text)}")
        tensors["about"] = np.frombuffer(text, np.uint8)
        tensors["digest"] = np.frombuffer(_digest(tensors).encode(), np.uint8)
        return safetensors.numpy.save(tensors)

    def check(self, page_size: int, vocab_size: int, groups: Sequence[RowFormat]) -> None:
        """Check the pages before an import.

        Args:
          page_size: tokens per page of the importing engine.
          vocab_size: token ids must be smaller than this number.
          groups: format of the page rows of each cache group of the importing engine.

        Raises:
          ValueError: a sequence does not consist of whole pages, a token id or a row index is out of range, or page
            rows have another format.
        """
        if len(self.groups) != len(groups):
            raise ValueError(f"pages: expected {len(groups)} cache groups, got {len(self.groups)}")
        num_rows = []
        for number, (of_group, contents) in enumerate(zip(groups, self.groups, strict=True)):
            if not isinstance(contents, Mapping):
                raise ValueError(f"pages.groups[{number}]: expected arrays by name, got a {type(contents).__name__}")
            got = {name: (a.shape[1:], a.dtype) if isinstance(a, np.ndarray) else None for name, a in contents.items()}
            if got != of_group.arrays or len({len(array) for array in contents.values()}) != 1:
                raise ValueError(f"pages: contents of group {number} have other shapes or dtypes than the cache's rows")
            num_rows.append(len(next(iter(contents.values()))))
        for i, sequence in enumerate(self.sequences):
            name = f"pages.sequences[{i}]"
            if not isinstance(sequence, CachedSequence) or not isinstance(sequence.tokens, tuple):
                raise ValueError(f"{name}: expected a CachedSequence with a tuple of tokens, got {sequence!r:.100}")
            check_field(f"{name}.salt", sequence.salt, TextUpTo(UNLIMITED))
            num_pages, rest = divmod(len(sequence.tokens), page_size)
            if rest or len(sequence.rows) != len(groups):
                raise ValueError(f"pages: a sequence of {len(sequence.tokens)} tokens has not just its whole pages")
            check_field(f"{name}.tokens", list(sequence.tokens), ListOf(Integer(0, vocab_size - 1), most=UNLIMITED))
            for group, (rows, of_group, most) in enumerate(zip(sequence.rows, groups, num_rows, strict=True)):
                check_field(f"{name}.rows[{group}]", rows, Array("int32", (of_group.num_heads, num_pages)))
                if rows.size and not PAGE_NONE <= rows.min() <= rows.max() < most:
                    raise ValueError(
                        f"pages: expected rows from {PAGE_NONE} to {most - 1}, got {rows.min()} to {rows.max()}"
                    )

    @staticmethod
    def from_bytes(data: bytes) -> CachedPages:
        """Decode the result of `to_bytes`. The data may come from an untrusted file.

        Raises:
          ValueError: the data has another format or version, or is damaged. The message names the field.
        """
        try:
            try:
                tensors = safetensors.numpy.load(data)
            except (safetensors.SafetensorError, LookupError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"not a safetensors file: {error}") from error
            return _decoded(tensors)
        except ValueError as error:
            raise ValueError(f"data: no cached pages in these {len(data)} bytes: {str(error)[:300]}") from error


def _decoded(tensors: dict[str, np.ndarray]) -> CachedPages:
    """Decode the tensors of a file.

    Raises:
      ValueError: a tensor or a field of the JSON is missing or malformed, or the digest differs.
    """
    uint8 = Array("uint8", (None,))
    text: Any = tensors.get("about")
    check_field("about", text, uint8)
    if len(text) > _MAX_ABOUT:
        raise ValueError(f"about: expected at most {_MAX_ABOUT} bytes, got {len(text)}")
    about = parse_json(text.tobytes())
    check_field("about", about, ObjectOf())
    check_field("about.format", about.get("format"), Integer(FORMAT, FORMAT))
    digest: Any = tensors.pop("digest", None)
    check_field("digest", digest, uint8)
    if digest.tobytes() != _digest(tensors).encode():
        raise ValueError("digest: the file is damaged, its digest differs")
    pages = {name.removeprefix("pages."): array for name, array in tensors.items() if name.startswith("pages.")}
    check_field("about", about, _about(len(pages)))
    check_field("tokens", tensors.get("tokens"), Array("int64", (None,)))
    lengths = [length for length, _ in about["sequences"]]
    if sum(lengths) != len(tensors["tokens"]):
        raise ValueError(f"about.sequences: expected {len(tensors['tokens'])} tokens together, got {sum(lengths)}")
    groups = _decoded_groups(about, pages)
    rows = {name: array for name, array in tensors.items() if name.startswith("rows.")}
    if len(rows) != (num_rows := len(lengths) * len(groups)):  # before a list of `num_rows` names is made
        raise ValueError(f"rows: expected {num_rows} tensors, got {len(rows)}")
    names = (f"rows.{i}.{group}" for i in range(len(lengths)) for group in range(len(groups)))
    check_field("rows", rows, dict.fromkeys(names, Array("int32", (None, None))))
    ends = itertools.accumulate(lengths)
    sequences = tuple(
        CachedSequence(
            tuple(tensors["tokens"][end - length : end].tolist()),
            salt,
            tuple(tensors[f"rows.{i}.{group}"] for group in range(len(groups))),
        )
        for i, ((length, salt), end) in enumerate(zip(about["sequences"], ends, strict=True))
    )
    return CachedPages(about["made_for"], sequences, groups)


def _about(num_arrays: int) -> dict[str, Kind]:
    """Return the expected fields of the JSON in a file that has `num_arrays` arrays with contents of page rows."""
    return {
        "format": Integer(FORMAT, FORMAT),
        "made_for": ObjectOf(),
        "sequences": ListOf((Integer(), TextUpTo(_MAX_ABOUT)), most=_MAX_ABOUT),
        "groups": Integer(0, num_arrays),  # each cache group has at least one array
        "dtypes": ObjectOf(OneOf(tuple(DTYPES))),
    }


def _decoded_groups(about: Mapping[str, Any], pages: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], ...]:
    """Return the contents of the page rows of each cache group.

    Args:
      about: the checked JSON of the file.
      pages: contents as bytes, by "group.layer.array".
    """
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(about["groups"])]
    if pages.keys() != about["dtypes"].keys():
        names = shown(sorted(pages.keys() ^ about["dtypes"].keys()))
        raise ValueError(f"about.dtypes: expected the names of the tensors with pages, got a difference in {names}")
    numbers = {str(number): number for number in range(len(groups))}
    for name, dtype_name in about["dtypes"].items():  # in the order of the exporting engine
        group, _, array_name = name.partition(".")
        array, dtype = pages[name], DTYPES[dtype_name]
        if group not in numbers:
            raise ValueError(f"pages.{shown(name)}: expected a cache group from 0 to {len(groups) - 1}")
        if array.dtype != np.uint8 or array.ndim < 2 or array.shape[-1] % dtype.itemsize:
            expected = f"an array uint8 [rows, ...] with a multiple of {dtype.itemsize} bytes in its last axis"
            raise ValueError(f"pages.{shown(name)}: expected {expected}, got {array.dtype} {list(array.shape)}")
        groups[numbers[group]][array_name] = array.view(dtype)
    return tuple(groups)


def numbered(
    sequences: Sequence[CachedSequence], num_groups: int
) -> tuple[tuple[CachedSequence, ...], tuple[Int32[np.ndarray, "n"], ...]]:
    """Replace the row numbers in sequences by consecutive numbers from 0, separately for each cache group.

    Returns:
      The sequences with the new numbers; and for each cache group the old row number of each new number, int32 [n].
    """
    of_groups = [numbered_rows([s.rows[group] for s in sequences]) for group in range(num_groups)]
    renumbered = (
        dataclasses.replace(s, rows=tuple(numbers[i] for _, numbers in of_groups)) for i, s in enumerate(sequences)
    )
    return tuple(renumbered), tuple(held for held, _ in of_groups)


def joined(
    parts: Sequence[tuple[Sequence[CachedSequence], Sequence[Mapping[str, np.ndarray]]]],
) -> tuple[tuple[CachedSequence, ...], tuple[Mapping[str, np.ndarray], ...]]:
    """Concatenate exported pages of several data ranks.

    Args:
      parts: for each data rank its sequences, and the contents of the page rows of each cache group. The row numbers of
        every data rank start at 0.

    Returns:
      `sequences` and `groups` of a `CachedPages`, with renumbered rows.
    """
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
    """Give consecutive numbers from 0 to the page rows that appear in tables of one pool.

    Returns:
      The distinct row numbers of the tables in ascending order; and the tables with each row number replaced by its
      index in this array. PAGE_NONE stays unchanged.
    """
    held = np.unique(np.concatenate([np.zeros((0,), np.int32), *(table.ravel() for table in tables)]))
    held = held[held != PAGE_NONE].astype(np.int32)
    numbers = [np.where(t == PAGE_NONE, PAGE_NONE, np.searchsorted(held, t)).astype(np.int32) for t in tables]
    return held, numbers


def difference(made_for: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return one line that describes the first setting in which two cache formats differ; None if they are equal.

    Args:
      made_for: cache format of the other engine or of a file (`Engine.cache_format`).
      wanted: cache format of this engine.
    """
    for name in dict.fromkeys([*wanted, *made_for]):
        if made_for.get(name) != wanted.get(name):
            shown_name = name if name in wanted else shown(name)
            return f"{shown_name} of {shown(made_for.get(name))}, this engine's is {shown(wanted.get(name))}"
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


def read_rows(caches: Caches, group: GroupSizes, rows: Int32[np.ndarray, "n"]) -> dict[str, np.ndarray]:
    """Copy page rows of a cache group from one device to the host.

    Args:
      caches: caches of all layers.
      group: the cache group.
      rows: row numbers.

    Returns:
      Contents of the rows, [n, ...], by "layer.array".
    """
    arrays, head_wise = paged(caches, group), group.head_wise
    chunks = [_gather(arrays, chunk, head_wise) for chunk in in_chunks(rows, 0)]  # start all copies before reading one
    read = [jax.device_get(chunk) for chunk in chunks] or [
        {name: np.zeros((0, *a.shape[2 if head_wise else 1 :]), a.dtype) for name, a in arrays.items()}
    ]
    return {name: np.concatenate([chunk[name] for chunk in read])[: len(rows)] for name in arrays}


def write_rows(
    caches: Caches, group: GroupSizes, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
) -> Caches:
    """Write page rows of a cache group in place, and return the new caches.

    Args:
      caches, group, rows: see `read_rows`.
      contents: contents of the rows, in the format that `read_rows` returns.
    """
    arrays = paged(caches, group)
    for start, chunk in zip(range(0, len(rows), ROWS_PER_COPY), in_chunks(rows, np.iinfo(np.int32).max), strict=True):
        new = {name: padded(contents[name][start : start + ROWS_PER_COPY]) for name in arrays}
        arrays = _scatter(arrays, chunk, new, group.head_wise)
    return with_paged(caches, group.layers, arrays)


def write_layer(
    cache: LayerCache, head_wise: bool, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
) -> LayerCache:
    """Write page rows of one layer in place, and return the new cache.

    Args:
      cache: cache of the layer.
      head_wise: whether a page row holds one head.
      rows: row numbers.
      contents: contents of the rows, [n, ...], by name of the array, for example "k".
    """
    arrays = paged_arrays(cache)
    for start, chunk in by_size(rows, np.iinfo(np.int32).max):
        new = {name: padded(contents[name][start : start + len(chunk)], len(chunk)) for name in arrays}
        arrays = _scatter(arrays, chunk, new, head_wise)
    return with_arrays(cache, arrays)


def by_size(rows: Int32[np.ndarray, "n"], padding: int) -> Iterator[tuple[int, Int32[np.ndarray, "m"]]]:
    """Split row numbers into chunks of ROWS_PER_COPY. Yield the index of the first row of each chunk, and the chunk.

    The last chunk is padded with `padding` to a power of two, so that few programs are compiled.
    """
    for start in range(0, len(rows), ROWS_PER_COPY):
        chunk = rows[start : start + ROWS_PER_COPY]
        size = 1 << (len(chunk) - 1).bit_length()
        yield start, np.pad(chunk, (0, size - len(chunk)), constant_values=padding).astype(np.int32)


def paged_arrays(cache: LayerCache) -> dict[str, jax.Array]:
    """Return the arrays of a layer that consist of page rows, by name. Static scales are left out."""
    return {name: array for name, array in cache_arrays(cache).items() if array.ndim > 2}


def paged(caches: Caches, group: GroupSizes) -> dict[str, jax.Array]:
    """Return the arrays of a cache group that consist of page rows, by "layer.array"."""
    of_layers = {layer: paged_arrays(caches[layer]) for layer in group.layers}
    return {f"{i}.{name}": a for i, arrays in of_layers.items() for name, a in arrays.items() if group.has_array(name)}


def with_paged(caches: Caches, layers: Sequence[int], arrays: Mapping[str, jax.Array]) -> Caches:
    """Return the caches with the arrays of some layers replaced by `arrays`, which has the format of `paged`."""
    written = list(caches)
    for layer in layers:
        fields = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{layer}.")}
        written[layer] = with_arrays(written[layer], fields)
    return tuple(written)


def in_chunks(rows: Int32[np.ndarray, "n"], padding: int) -> list[Int32[np.ndarray, "m"]]:
    """Split row numbers into chunks of ROWS_PER_COPY. The last chunk is padded with `padding` to this size."""
    whole = np.pad(rows, (0, -len(rows) % ROWS_PER_COPY), constant_values=padding)
    return list(whole.reshape(-1, ROWS_PER_COPY))


def padded(contents: np.ndarray, size: int = ROWS_PER_COPY) -> np.ndarray:
    """Pad contents with zeros to `size` rows."""
    return np.pad(contents, [(0, size - len(contents))] + [(0, 0)] * (contents.ndim - 1))


def _rows_of(array: jax.Array, head_wise: bool) -> jax.Array:
    """Return a cache array with one page row per entry of the first axis. Head-wise, merge the page and head axes."""
    return array.reshape(-1, *array.shape[2:]) if head_wise else array


def gather_rows(arrays: dict[str, jax.Array], rows: jax.Array, head_wise: bool) -> dict[str, jax.Array]:
    """Read page rows on the device."""
    return {name: _rows_of(array, head_wise)[rows] for name, array in arrays.items()}


def gather_stacked(arrays: Sequence[jax.Array], rows: jax.Array, head_wise: bool) -> jax.Array:
    """Read page rows of cache arrays of equal shapes on the device, [arrays, rows, ...]."""
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
