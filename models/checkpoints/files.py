"""Hugging Face checkpoint directories: config.json and safetensors files.

All headers are checked before a tensor is read. No code of a directory is executed: pickles are rejected, and Python
files are not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from pallas_attn.models.checkpoints import mxfp4
from pallas_attn.models.config import (
    DeepSeekConfig,
    DeepseekV4Config,
    Gemma4Config,
    GQAConfig,
    ModelConfig,
    read_config,
)
from pallas_attn.models.config.entries import is_integer, token_ids
from pallas_attn.models.config.gqa import MXFP4_GROUP
from pallas_attn.models.config.json_files import is_present, parse_json, read_json, shown

_log = logging.getLogger(__name__)

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}

_FLOATS = ("F32", "F16", "BF16")
"""Names of dtypes of unquantised weights."""

_PACKABLE = (".experts.gate_up_proj", ".experts.down_proj")
"""Suffixes of the names of tensors that may be packed as MXFP4."""

MTP_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Suffixes of the names of tensors that a multi-token prediction layer shares with the model."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the input embedding and of the head."""

_HEADER_LIMIT = 100_000_000
"""Maximum size of a header in the safetensors format, in bytes."""

_PIECE = 1 << 24
"""Bytes of two tensors that are compared at a time."""

_TEXT_MODEL, _MODEL = "model.language_model.", "model."
"""Prefix of the names of the tensors of a text model in a Gemma 4 checkpoint with towers, and the prefix under which
`Checkpoint` has them."""

_TOWERS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
"""Prefixes of the names of tensors for images and audio in a Gemma 4 checkpoint."""

_V4_NAMES = (
    (re.compile(r"model\.hc_head\.hc_"), "hc_head_"),
    (re.compile(r"model\.embed_tokens\."), "embed."),
    (re.compile(r"lm_head\."), "head."),
    (re.compile(r"model\."), ""),
)
"""Prefixes of the names of tensors in DeepSeek-V4 checkpoints that transformers writes, and the published prefixes."""

_V4_MTP = "mtp."
"""Prefix of the names of multi-token prediction modules in DeepSeek-V4 checkpoints."""

V4_TABLE, _V4_EXPERT = ".gate.tid2eid", re.compile(r"\.experts\.[0-9]+\.w[123]\.weight$")
"""Suffix of the name of a table with the experts of each token id, and suffixes of the names of expert weights, which
may be packed as FP4."""

_KEYS_AND_VALUES = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")

_ENTRY = ("dtype", "shape", "data_offsets")
"""Keys of a tensor's entry in a header."""

type Slices = tuple[slice, ...]
"""A part of a tensor: a slice along each of its first axes. Other axes are complete."""


class CheckpointError(ValueError):
    """Error of a checkpoint directory. The message is one line."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a safetensors file.

    Attributes:
      path: safetensors file.
      dtype: dtype as named in the file: "BF16", "F8_E4M3", ...
      shape: shape of the tensor.
      start, stop: byte range in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, part: Slices = ()) -> np.ndarray:
        """Return the tensor, or a part of it, as stored. The file is mapped into memory, not copied."""
        raw = np.memmap(self.path, np.uint8, "r")[self.start : self.stop]
        return raw.view(_DTYPES[self.dtype]).reshape(self.shape)[part]

    def equals(self, other: StoredTensor) -> bool:
        """Return whether two tensors have the same bits. Large tensors are compared in pieces."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        mine, others = (np.memmap(t.path, np.uint8, "r")[t.start : t.stop] for t in (self, other))
        return all(np.array_equal(mine[i : i + _PIECE], others[i : i + _PIECE]) for i in range(0, len(mine), _PIECE))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory with parsed headers.

    Attributes:
      config: configuration from config.json. `tie_word_embeddings` is true only if the files have no head, or a head
        with the bits of the embedding.
      tensors: location of each tensor by name.
    """

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """Read and dequantise a tensor: FP8 to float32, FP4 to bfloat16. Other tensors are returned as stored.

        Args:
          name: name of the tensor.
          part: a slice along each axis; () for the whole tensor. Only this part is read, rounded to whole quantisation
            blocks.
        """
        if name in self._packed([name]):
            return self._read_packed(name, part)
        stored = self.tensors[name]
        if stored.dtype == "I8":
            return self._read_fp4(name, part)
        if stored.dtype != "F8_E4M3":
            return stored.read(part)
        if self.config.fp8_block is None:
            raise CheckpointError(f"{name} is stored in FP8, but config.json has no quantization_config")
        cuts = [_whole_blocks(*cut) for cut in zip(_along(part, stored.shape), self.config.fp8_block, strict=True)]
        weight = stored.read(tuple(cut.outer for cut in cuts))
        scale = self.tensors[self._scale_name(name)].read(tuple(cut.blocks for cut in cuts))
        return dequantise(weight, scale, self.config.fp8_block)[tuple(cut.inner for cut in cuts)]

    def _read_fp4(self, name: str, part: Slices) -> np.ndarray:
        """Read a part of an FP4 weight [out, in], which is stored as [out, in / 2] with one scale per 32 columns."""
        rows, packed = self.tensors[name].shape
        of_rows, columns = _along(part, (rows, 2 * packed))
        cut = _whole_blocks(columns, MXFP4_GROUP)
        nibbles = self.tensors[name].read((of_rows, slice(cut.outer.start // 2, cut.outer.stop // 2)))
        scales = self.tensors[self._scale_name(name)].read((of_rows, cut.blocks))
        return mxfp4.dequantise_rows(nibbles, scales)[:, cut.inner]

    def _scale_name(self, name: str) -> str:
        """Return the name of the scales of a quantised weight."""
        if isinstance(self.config, DeepseekV4Config):
            return f"{name.removesuffix('.weight')}.scale"
        return scale_name(name)

    def _read_packed(self, name: str, part: Slices) -> np.ndarray:
        """Read a part of MXFP4 experts [E, in, out]. They are stored as [E, out, groups of in, ...]."""
        experts, out_width, groups, _ = self.tensors[f"{name}{mxfp4.PARTS[0]}"].shape
        of_experts, rows, columns = _along(part, (experts, groups * MXFP4_GROUP, out_width))
        cut = _whole_blocks(rows, MXFP4_GROUP)
        stored = (self.tensors[f"{name}{end}"].read((of_experts, columns, cut.blocks)) for end in mxfp4.PARTS)
        return mxfp4.dequantise(*stored)[:, cut.inner]

    def inspect(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Compare the headers of the stored tensors with the wanted names and shapes.

        Returns:
          Names of unused tensors, with the reason.

        Raises:
          CheckpointError: tensors are missing, unknown, misshaped or have an unsupported dtype.
        """
        bytes_of = {f"{name}{part}" for name in self._packed(wanted) for part in mxfp4.PARTS}
        wanted = self._stored_shapes(wanted)
        with_mtp = any(self._is_of_mtp(name) for name in wanted)
        ignored = {n: why for n in self.tensors.keys() - wanted.keys() if (why := self._why_ignored(n, with_mtp))}
        present = [(name, self.tensors[name]) for name in wanted if name in self.tensors]
        wanted |= {name: (shape[0], shape[1] // 2) for name, shape in wanted.items() if self._is_fp4(name)}
        problems = {
            "missing": [name for name in wanted if name not in self.tensors],
            "not part of the model": sorted(self.tensors.keys() - wanted.keys() - ignored.keys()),
            "misshaped": [f"{n} {list(t.shape)} for {list(wanted[n])}" for n, t in present if t.shape != wanted[n]],
            "of an unsupported dtype": [
                f"{n} {t.dtype}" for n, t in present if not self._readable(n, t, n in bytes_of)
            ],
        }
        found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        if found:
            raise CheckpointError(f"tensors do not fit config.json; {'; '.join(found)}")
        return ignored

    def _stored_shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes as stored, including scales and the parts of packed experts."""
        packed = self._packed(wanted)
        stored = {name: shape for name, shape in wanted.items() if name not in packed}
        for name in packed:
            shapes = mxfp4.packed_shapes(wanted[name])
            stored |= {f"{name}{part}": shape for part, shape in zip(mxfp4.PARTS, shapes, strict=True)}
        return stored | self._wanted_scales(stored)

    def _packed(self, names: Iterable[str]) -> set[str]:
        """Return the names of tensors that are packed as MXFP4. Only experts can be packed."""
        if not isinstance(self.config, GQAConfig) or not self.config.mxfp4_experts:
            return set()
        return {name for name in names if name.endswith(_PACKABLE) and f"{name}_blocks" in self.tensors}

    def _is_fp4(self, name: str) -> bool:
        """Return whether a tensor is an expert weight of DeepSeek-V4 that is packed as FP4."""
        is_expert = isinstance(self.config, DeepseekV4Config) and _V4_EXPERT.search(name) is not None
        return is_expert and name in self.tensors and self.tensors[name].dtype == "I8"

    def _wanted_scales(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        of_fp4: dict[str, tuple[int, ...]] = {
            self._scale_name(name): (shape[0], -(-shape[1] // MXFP4_GROUP))
            for name, shape in wanted.items()
            if self._is_fp4(name)
        }
        if self.config.fp8_block is None:
            return of_fp4
        return of_fp4 | {
            self._scale_name(name): tuple(-(-n // b) for n, b in zip(wanted[name], self.config.fp8_block, strict=True))
            for name in wanted
            if name in self.tensors and self.tensors[name].dtype == "F8_E4M3" and len(wanted[name]) == 2
        }

    def _readable(self, name: str, tensor: StoredTensor, of_bytes: bool) -> bool:
        if tensor.dtype == "F8_E4M3":
            return self.config.fp8_block is not None and len(tensor.shape) == 2
        if isinstance(self.config, DeepseekV4Config):
            if name.endswith(V4_TABLE):
                return tensor.dtype in ("I32", "I64")
            if name.endswith(".scale"):
                of_fp4 = self._is_fp4(f"{name.removesuffix('.scale')}.weight")
                return tensor.dtype == "F8_E8M0" or (tensor.dtype == "F32" and not of_fp4)
            if tensor.dtype == "I8":
                return self._is_fp4(name)
        return tensor.dtype == "U8" if of_bytes else tensor.dtype in _FLOATS

    def _is_of_mtp(self, name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) in self.config.mtp_layers

    def _is_of_unused_indexer(self, name: str) -> bool:
        """Return whether a tensor belongs to an indexer of a layer that config.json declares as shared."""
        layer = _LAYER.match(name)
        if layer is None or not name[layer.end() :].startswith("self_attn.indexer."):
            return False
        return isinstance(self.config, DeepSeekConfig) and self.config.shares_choice(int(layer[1]))

    def _is_of_unused_cache(self, name: str) -> bool:
        """Return whether a tensor computes keys or values of a layer that has no cache."""
        layer = _LAYER.match(name)
        if layer is None or not isinstance(self.config, Gemma4Config) or not _KEYS_AND_VALUES.match(name, layer.end()):
            return False
        return int(layer[1]) in range(len(self.config.cached_layers), self.config.num_hidden_layers)

    def _why_ignored(self, name: str, with_mtp: bool) -> str | None:
        if self._is_of_mtp(name):
            if not with_mtp:
                return "belongs to a multi-token prediction layer"
            if name.endswith(MTP_COPIES):
                return "is a copy of the embedding or the head of the model"
        if isinstance(self.config, DeepseekV4Config) and name.startswith(_V4_MTP):
            return "belongs to a multi-token prediction module"
        if self._is_of_unused_indexer(name):
            return "belongs to an indexer of a layer that attends to the keys selected by an earlier layer"
        if self._is_of_unused_cache(name):
            return "belongs to a layer that attends to the cache of an earlier layer"
        if isinstance(self.config, Gemma4Config) and name.startswith(_TOWERS):
            return "belongs to a tower for images or audio"
        if name.endswith(".rotary_emb.inv_freq"):
            return "follows from the rope parameters"
        if name == HEAD and self.config.tie_word_embeddings:
            return "is a copy of the embeddings"
        return None


class _Cut(NamedTuple):
    """A slice, and the whole quantisation blocks that contain it.

    Attributes:
      outer: slice of the elements of these blocks.
      blocks: slice of the indices of these blocks.
      inner: the slice relative to the start of `outer`.
    """

    outer: slice
    blocks: slice
    inner: slice


def _whole_blocks(cut: slice, size: int) -> _Cut:
    first, last = cut.start // size, -(-cut.stop // size)
    blocks = slice(first, last)
    return _Cut(slice(first * size, last * size), blocks, slice(cut.start - first * size, cut.stop - first * size))


def _along(part: Slices, shape: tuple[int, ...]) -> list[slice]:
    """Return a slice with start and stop along each axis."""
    given = [*part, *[slice(None)] * (len(shape) - len(part))]
    return [slice(*cut.indices(size)[:2]) for cut, size in zip(given, shape, strict=True)]


def scale_name(name: str) -> str:
    """Return the name of the block scales of an FP8 weight."""
    return f"{name}_scale_inv"


def dequantise(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return weight · scale in float32.

    Args:
      weight: [out, in].
      scale: scales of the blocks, [ceil(out / rows), ceil(in / columns)].
      block: rows and columns of a block. Blocks at the end of an axis may be smaller.
    """
    height, width = (min(of_block, of_weight) for of_block, of_weight in zip(block, weight.shape, strict=True))
    rows = np.repeat(scale.astype(np.float32), height, axis=0)[: weight.shape[0]]
    return weight.astype(np.float32) * np.repeat(rows, width, axis=1)[:, : weight.shape[1]]


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read config.json and the headers of all safetensors files.

    Raises:
      CheckpointError: a file is missing or malformed, or the directory has only pickles.
      ValueError, NotImplementedError: as `read_config`.
    """
    directory = Path(directory)
    config = load_config(directory)
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if _is_present(single):
        return _checkpoint(config, _read_header(single))
    if _is_present(index):
        return _checkpoint(config, _read_sharded(directory, read_json_object(index)))
    if pickles := sorted(p.name for end in ("bin", "pt", "pth") for p in directory.glob(f"*.{end}")):
        raise CheckpointError(
            f"{directory}: {_some(pickles)} may run code when read; convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{directory}: neither {single.name} nor {index.name} is there")


def _checkpoint(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> Checkpoint:
    """Return the checkpoint, with `tie_word_embeddings` false if the files have a head unlike the embedding.

    transformers uses this head, too, whatever config.json says.
    """
    if isinstance(config, Gemma4Config):
        tensors = _of_text_model(tensors)
    if isinstance(config, DeepseekV4Config):
        return Checkpoint(config, _with_published_names(tensors))
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if config.tie_word_embeddings and head is not None and embedding is not None and not head.equals(embedding):
        _log.warning("%s is used, although config.json ties it to %s: the stored tensors differ", HEAD, EMBEDDING)
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return Checkpoint(config, tensors)


def _of_text_model(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with the names that they have in a checkpoint of a text model only."""
    prefix = _TEXT_MODEL if any(name.startswith(_TEXT_MODEL) for name in tensors) else _MODEL
    renamed = {
        f"{_MODEL}{name.removeprefix(prefix)}" if name.startswith(prefix) else name: tensor
        for name, tensor in tensors.items()
    }
    if len(renamed) < len(tensors):
        raise CheckpointError(f"tensors have the prefixes {_TEXT_MODEL} and {_MODEL}: expected one of them")
    return renamed


def _with_published_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a DeepSeek-V4 checkpoint with their published names."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        published = name
        for pattern, prefix in _V4_NAMES:
            if found := pattern.match(name):
                published = prefix + name[found.end() :]
                break
        published = published.replace(".attn.norm.", ".attn.kv_norm.")
        if published in renamed:
            raise CheckpointError(f"tensors: expected one {published}, got two with different prefixes")
        renamed[published] = tensor
    return renamed


def load_config(directory: str | Path) -> ModelConfig:
    """Read the configuration of a directory. The tensors are not read, see `Checkpoint.config`.

    End-of-sequence ids of generation_config.json override the ids of config.json.

    Raises:
      CheckpointError: config.json is missing or malformed.
      NotImplementedError: as `read_config`; the message starts with the file name.
    """
    path = Path(directory) / "config.json"
    if not _is_present(path):
        raise CheckpointError(f"{directory}: there is no config.json")
    with _naming(path):
        config = read_config(read_json_object(path))
    generation = path.with_name("generation_config.json")
    if not _is_present(generation):
        return config
    with _naming(generation):
        given = read_json_object(generation).get("eos_token_id")
        return config if given is None else dataclasses.replace(config, eos_token_ids=token_ids("eos_token_id", given))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix error messages with the name of a file, and turn ValueError into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, NotImplementedError) as error:
        kind = CheckpointError if isinstance(error, ValueError) else NotImplementedError
        raise kind(f"{path}: {error}") from error


def _is_present(path: Path) -> bool:
    try:
        return is_present(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_json_object(path: Path, error_type: type[ValueError] = CheckpointError) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Raises:
      ValueError: the file is not a JSON object. It is raised as `error_type`.
    """
    try:
        content = read_json(path)
    except ValueError as error:
        raise error_type(str(error)) from error
    if not isinstance(content, dict):
        raise error_type(f"{path}: expected a JSON object")
    return content


def _read_sharded(directory: Path, index: Mapping[str, Any]) -> dict[str, StoredTensor]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise CheckpointError(f"{directory}: the safetensors index has no weight_map of tensor names to file names")
    if outside := sorted({f for f in places.values() if Path(f).name != f or not f.endswith(".safetensors")}):
        raise CheckpointError(f"{directory}: the index names {_some(outside)}, not safetensors files of the directory")
    headers = {file: _read_header(directory / file) for file in sorted(set(places.values()))}
    if wrong := sorted(name for name, file in places.items() if name not in headers[file]):
        raise CheckpointError(f"{directory}: the index promises tensors their files do not hold: {_some(wrong)}")
    if unlisted := {name for header in headers.values() for name in header} - places.keys():
        raise CheckpointError(f"{directory}: files hold tensors the index does not list: {_some(unlisted)}")
    return {name: headers[file][name] for name, file in places.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    if not _is_present(path):
        raise CheckpointError(f"{path}: there is no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file: its header would be {length} bytes of {size}")
        header = file.read(length)
    try:
        entries = parse_json(header)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file: in its header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: not a safetensors file: expected its header to be a JSON object")
    tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    return {name: _stored_tensor(path, 8 + length, name, entry, size) for name, entry in tensors.items()}


def _stored_tensor(path: Path, data: int, name: str, entry: Any, size: int) -> StoredTensor:
    """Parse the header entry of one tensor. Tensor data starts at byte `data` of a file of `size` bytes."""
    what = f"{path}: not a safetensors file: {shown(name)}"
    dtype, shape, offsets = ((entry if isinstance(entry, dict) else {}).get(key) for key in _ENTRY)
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{what}: expected a dtype, a shape and two data_offsets, got {shown(entry)}")
    start, stop = offsets
    if not start <= stop <= size - data:
        raise CheckpointError(f"{what} lies outside the file: data_offsets {shown(offsets)} of {size - data} bytes")
    if dtype in _DTYPES and stop - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise CheckpointError(f"{what} of shape {shown(shape)} in {dtype} has {stop - start} bytes")
    return StoredTensor(path, dtype, tuple(shape), data + start, data + stop)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most 32 integers from 0 to 2**63 - 1."""
    return isinstance(value, list) and len(value) <= 32 and all(is_integer(n) and 0 <= n < 2**63 for n in value)


def _some(names: Iterable[str], most: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
