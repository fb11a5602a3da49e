"""Reads and writes files with static scales of quantised keys and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from pallas_attn.models.config.json_files import is_present
from pallas_attn.models.decoder import KVScales


def load_kv_scales(path: Path) -> KVScales:
    """Read a safetensors file with the float32 tensors `k_scale` and `v_scale`, both [layers, Hkv] or [layers, Hkv, D].

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
    if tensors.keys() != {"k_scale", "v_scale"} or any(t.dtype != np.float32 for t in tensors.values()):
        found = ", ".join(f"{name} ({t.dtype})" for name, t in sorted(tensors.items()))
        raise ValueError(f"{path}: expected k_scale and v_scale in float32, found {found or 'nothing'}")
    return KVScales(tensors["k_scale"], tensors["v_scale"])


def kv_scales_content(scales: KVScales) -> bytes:
    """Return the contents of a file for `load_kv_scales`."""
    return save({"k_scale": scales.k, "v_scale": scales.v})


def save_kv_scales(path: Path, scales: KVScales) -> None:
    """Write a file for `load_kv_scales`.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_bytes(kv_scales_content(scales))
