"""Forward pass of a model with grouped-query attention in float64 numpy, for expected logits.

The weights are tensors with the names of a checkpoint. The visible keys of each KV head are an explicit mask, computed
from the definition of windows. Of the package `models`, the module uses only the configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pallas_attn.models.config import GQAConfig, HeadWindows, LayerWindow
from tests.models.oracle import linear, mlp

type Tensors = Mapping[str, np.ndarray]


def forward(config: GQAConfig, tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """Return the logits of all positions, [len(tokens), vocab]."""
    t = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    x = t["model.embed_tokens.weight"][tokens]
    for layer, window in enumerate(config.windows or [None] * config.num_hidden_layers):
        name = f"model.layers.{layer}"
        mask = visible(window, config.num_key_value_heads, len(tokens))
        x = x + attention(config, t, f"{name}.self_attn", norm(config, t, f"{name}.input_layernorm", x), mask)
        x = x + mlp(t, f"{name}.mlp", norm(config, t, f"{name}.post_attention_layernorm", x))
    x = norm(config, t, "model.norm", x)
    return x @ t["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"].T


def visible(window: LayerWindow, kv_heads: int, length: int) -> np.ndarray:
    """Return the mask bool [Hkv, length, length]: whether a query sees a key, by KV head, query and key."""
    mask = np.zeros((kv_heads, length, length), bool)
    for head, query, key in np.ndindex(mask.shape):
        match window:
            case HeadWindows():
                recent = key > query - window.window[head] or key < window.sink_tokens[head]
            case int():
                recent = key > query - window
            case None:
                recent = True
        mask[head, query, key] = key <= query and recent
    return mask


def norm(config: GQAConfig, t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * t[f"{name}.weight"]


def attention(config: GQAConfig, t: Tensors, name: str, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    q, k, v = (linear(t, f"{name}.{part}_proj", x).reshape(len(x), -1, config.head_dim) for part in "qkv")
    if config.qk_norm:
        q, k = norm(config, t, f"{name}.q_norm", q), norm(config, t, f"{name}.k_norm", k)
    q, k = turn(config, q), turn(config, k)
    out = np.empty_like(q)
    for head in range(config.num_attention_heads):
        of_kv = head * config.num_key_value_heads // config.num_attention_heads
        scores = q[:, head] @ k[:, of_kv].T * config.head_dim**-0.5
        weights = np.exp(np.where(mask[of_kv], scores, -np.inf) - scores.max())
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, of_kv]
    return linear(t, f"{name}.o_proj", out.reshape(len(x), -1))


def turn(config: GQAConfig, x: np.ndarray) -> np.ndarray:
    """Apply RoPE to x [T, heads, D]: columns i and i + D/2 are a complex number that is multiplied by exp(1j * position
    * frequency). RoPE scaling such as YaRN is not supported.
    """
    assert config.rope_scaling is None
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)
