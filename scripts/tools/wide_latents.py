"""Widen the latents of DeepSeek goldens (tests/goldens) to 128 columns.

A quantised latent cache has a scale per 128 columns, and the latents of the goldens have only 32. This module adds zero
columns to the latent, and zeros for them to W_UK and W_UV. The norm of the latent then divides by a smaller root mean
square; its weight is reduced to compensate. The only remaining effect is that the norm's epsilon has four times the
weight, which changes logits by about 1e-6.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pallas_attn.models.checkpoints.files import open_checkpoint

LATENT_DIM = 128


def save_wide(golden: Path, directory: Path) -> None:
    """Write the checkpoint of a golden with kv_lora_rank = 128, dequantised to float32."""
    directory.mkdir(exist_ok=True)
    config = json.loads((golden / "config.json").read_text())
    rank = config.pop("kv_lora_rank")
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config | {"kv_lora_rank": LATENT_DIM}))
    checkpoint = open_checkpoint(golden)
    weights = [name for name in checkpoint.tensors if not name.endswith("_scale_inv")]
    tensors = {name: _widened(name, checkpoint.read(name).astype(np.float32), rank) for name in weights}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _widened(name: str, tensor: np.ndarray, rank: int) -> np.ndarray:
    more = LATENT_DIM - rank
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return np.concatenate([tensor[:rank], np.zeros((more, tensor.shape[1]), tensor.dtype), tensor[rank:]])
    if name.endswith("kv_a_layernorm.weight"):
        return np.pad(tensor * np.float32(rank / LATENT_DIM) ** 0.5, (0, more)).astype(tensor.dtype)
    if name.endswith("kv_b_proj.weight"):
        return np.pad(tensor, ((0, 0), (0, more)))
    return tensor
