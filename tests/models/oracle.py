"""Forward pass of a DeepSeek model in float64 numpy, for expected logits.

The weights are tensors with the names and layouts of a checkpoint. The code follows the papers and the checkpoint
format. Of the package `models`, the module uses only the configuration class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pallas_attn.models.config import DeepSeekConfig

type Tensors = Mapping[str, np.ndarray]


def forward(config: DeepSeekConfig, tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """Return the logits of all positions, [len(tokens), vocab]."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return hidden_states(config, tensors, tokens) @ np.asarray(tensors[head], np.float64).T


def hidden_states(config: DeepSeekConfig, tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """Return the input of the LM head at all positions, [len(tokens), hidden size]."""
    t = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    x = t["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        x = layer(config, t, i, x)
    return norm(x, t["model.norm.weight"], config)


def predict(
    config: DeepSeekConfig, tensors: Tensors, module: int, hidden: np.ndarray, next_tokens: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits and hidden states of multi-token prediction module `module` at all positions.

    `hidden` are hidden states of the model at the positions, and `next_tokens` the token after each position.
    """
    index = config.num_hidden_layers + module
    name = f"model.layers.{index}"
    t = {key: np.asarray(tensor, np.float64) for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    embedded = norm(t[f"{name}.embed_tokens.weight"][next_tokens], t[f"{name}.enorm.weight"], config)
    previous = norm(hidden, t[f"{name}.hnorm.weight"], config)
    x = layer(config, t, index, linear(t, f"{name}.eh_proj", np.concatenate([embedded, previous], axis=-1)))
    x = norm(x, t[f"{name}.shared_head.norm.weight"], config)
    return linear(t, f"{name}.shared_head.head", x), x


def layer(config: DeepSeekConfig, t: Tensors, index: int, x: np.ndarray) -> np.ndarray:
    name = f"model.layers.{index}"
    x = x + attention(config, t, f"{name}.self_attn", norm(x, t[f"{name}.input_layernorm.weight"], config))
    normed = norm(x, t[f"{name}.post_attention_layernorm.weight"], config)
    dense = index < config.first_k_dense_replace
    return x + (mlp(t, f"{name}.mlp", normed) if dense else mixture(config, t, f"{name}.mlp", normed))


def norm(x: np.ndarray, weight: np.ndarray, config: DeepSeekConfig | None) -> np.ndarray:
    eps = config.rms_norm_eps if config else 1e-6
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def linear(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)


def mlp(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate, up = linear(t, f"{name}.gate_proj", x), linear(t, f"{name}.up_proj", x)
    return linear(t, f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)


def attention(config: DeepSeekConfig, t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    if config.q_lora_rank is None:
        q = linear(t, f"{name}.q_proj", x)
    else:
        rank = norm(linear(t, f"{name}.q_a_proj", x), t[f"{name}.q_a_layernorm.weight"], None)
        q = linear(t, f"{name}.q_b_proj", rank)
    q = q.reshape(len(x), heads, nope + rope)
    compressed = linear(t, f"{name}.kv_a_proj_with_mqa", x)
    latent = norm(compressed[:, : config.kv_lora_rank], t[f"{name}.kv_a_layernorm.weight"], None)
    kv = linear(t, f"{name}.kv_b_proj", latent).reshape(len(x), heads, nope + config.v_head_dim)
    key_rope = turn(config, compressed[:, None, config.kv_lora_rank :])
    query_rope = turn(config, q[..., nope:])
    scores = np.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope])
    scores = scores + np.einsum("qhd,kd->hqk", query_rope, key_rope[:, 0])
    scores = scores * (nope + rope) ** -0.5 * temperature(config, "mscale_all_dim") ** 2
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights, kv[..., nope:])
    return linear(t, f"{name}.o_proj", out.reshape(len(x), -1))


def temperature(config: DeepSeekConfig, which: str) -> float:
    strength = getattr(config.yarn, which) if config.yarn else 0.0
    return 0.1 * strength * math.log(config.yarn.factor) + 1 if config.yarn and config.yarn.factor > 1 else 1.0


def turn(config: DeepSeekConfig, x: np.ndarray) -> np.ndarray:
    """Apply RoPE to x [T, heads, R]: each pair of columns is a complex number that is multiplied by exp(1j * position *
    frequency), and by YaRN's mscale ratio.
    """
    half = x.shape[-1] // 2
    if config.rope_interleave:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    angles = np.arange(len(x))[:, None] * frequencies(config)
    scale = temperature(config, "mscale") / temperature(config, "mscale_all_dim")
    turned = (first + 1j * second) * (scale * np.exp(1j * angles))[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def frequencies(config: DeepSeekConfig) -> np.ndarray:
    width, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    result = []
    for i in range(width // 2):
        frequency = theta ** (-2 * i / width)
        if yarn:
            turns_at = [
                width * math.log(yarn.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (yarn.beta_fast, yarn.beta_slow)
            ]
            low, high = (math.floor(turns_at[0]), math.ceil(turns_at[1])) if yarn.truncate else turns_at
            low, high = max(low, 0), min(high, width - 1)
            interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
            frequency = frequency * (1 - interpolated) + frequency / yarn.factor * interpolated
        result.append(frequency)
    return np.array(result)


def mixture(config: DeepSeekConfig, t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    out = mlp(t, f"{name}.shared_experts", x) if config.n_shared_experts else np.zeros_like(x)
    for row, token in enumerate(x):
        chosen = route(config, t[f"{name}.gate.weight"] @ token, t.get(f"{name}.gate.e_score_correction_bias"))
        for expert, weight in chosen.items():
            out[row] += weight * mlp(t, f"{name}.experts.{expert}", token)
    return out


def route(config: DeepSeekConfig, logits: np.ndarray, bias: np.ndarray | None) -> dict[int, float]:
    """Return the weight of each expert that the router selects for one token, by index of the expert."""
    if config.scoring_func == "softmax":
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    candidates = list(range(len(choice)))
    if config.topk_method != "greedy":
        size, counted = len(choice) // config.n_group, 2 if config.topk_method == "noaux_tc" else 1
        groups = choice.reshape(config.n_group, size)
        value = [sum(sorted(group)[-counted:]) for group in groups]
        kept = sorted(range(config.n_group), key=lambda g: (-value[g], g))[: config.topk_group]
        candidates = [e for e in candidates if e // size in kept]
    best = sorted(candidates, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    total = sum(scores[e] for e in best) + 1e-20 if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in best}
