"""Reads and writes files with static scales of quantised keys and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from pallas_attn.models.config.json_files import is_present
from pallas_attn.models.decoder import KVScales

_KINDS = ("k_scale", "v_scale")


def load_kv_scales(path: Path) -> KVScales:
    """Read a safetensors file with the float32 tensors `k_scale` and `v_scale`, both [layers, Hkv] or [layers, Hkv, D].

    If the shapes of layers differ, the file has the tensors `k_scale.i` and `v_scale.i` of each layer i with a cache,
    both [Hkv] or [Hkv, D].

    Raises:
      ValueError: the file is missing, has other contents, or has scales that are not positive and finite.
      OSError: the file cannot be read.
    """
    try:
        if not is_present(path):  # opening a pipe would block
            raise FileNotFoundError("there is no such file")
        tensors = load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
    layers = range(len(tensors) // len(_KINDS))
    of_layers = [[f"{kind}.{layer}" for layer in layers] for kind in _KINDS]
    is_float32 = all(tensor.dtype == np.float32 for tensor in tensors.values())
    if is_float32 and tensors.keys() == {*_KINDS}:
        return KVScales(*(tuple(tensors[kind]) for kind in _KINDS))
    if is_float32 and layers and tensors.keys() == {name for names in of_layers for name in names}:
        return KVScales(*(tuple(tensors[name] for name in names) for names in of_layers))
    found = ", ".join(f"{name} ({t.dtype})" for name, t in sorted(tensors.items()))
    raise ValueError(f"{path}: expected k_scale and v_scale in float32, found {found or 'nothing'}")


def kv_scales_content(scales: KVScales) -> bytes:
    """Return the contents of a file for `load_kv_scales`."""
    tensors: dict[str, np.ndarray] = {}
    for kind, of_layers in zip(_KINDS, (scales.k, scales.v), strict=True):
        if len({scale.shape for scale in of_layers}) == 1:
            tensors[kind] = np.stack(of_layers)
        else:
            tensors |= {f"{kind}.{layer}": scale for layer, scale in enumerate(of_layers)}
    return save(tensors)


def save_kv_scales(path: Path, scales: KVScales) -> None:
    """Write a file for `load_kv_scales`.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_bytes(kv_scales_content(scales))
