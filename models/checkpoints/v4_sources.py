"""Sources of the parameters of DeepSeek-V4, with the published names of tensors.

Projections are transposed to [in, out]. Contents and gates of a compressor are joined. The output projection of each
group of heads is a matrix of its own. Experts are stacked, with gates (w1) joined with up projections (w3).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from pallas_attn.models.checkpoints.files import V4_TABLE, CheckpointError
from pallas_attn.models.checkpoints.sources import Source, linear, norm, under
from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder.mesh import ExpertSplit

V4_EMBEDDING = "embed.weight"
"""Name of the input embedding."""


def v4_sources(
    config: DeepseekV4Config, split: ExpertSplit, device: int, vocab_size: int | None = None
) -> dict[str, Source]:
    """Return the source of every parameter by its dotted path in `Decoder`.

    Args:
      config, split, device: as in `weights.weight_sources`.
      vocab_size: size of the vocabulary of the whole model; None for the size in `config`.
    """
    vocabulary, width, streams = config.vocab_size, config.hidden_size, config.hc_mult
    sources = {
        "embed_tokens": Source({V4_EMBEDDING: (vocabulary, width)}),
        "norm.weight": norm("norm", width),
        "lm_head.weight": linear("head", vocabulary, width),
        **under("stream_head", _connection("hc_head", streams, streams * width, 1)),
    }
    for i in range(config.num_hidden_layers):
        sources |= under(f"layers.{i}", _layer(config, i, f"layers.{i}", split, device, vocab_size))
    return sources


def v4_mtp_sources(config: DeepseekV4Config, split: ExpertSplit, device: int) -> dict[str, Source]:
    """Return the source of every parameter of prediction modules by its path in a list of `V4MTPModule`.

    Arguments as in `v4_sources`.
    """
    width, streams, sources = config.hidden_size, config.hc_mult, {}
    for k in range(config.num_nextn_predict_layers):
        name = f"mtp.{k}"
        module = {
            **{f"{part}.weight": norm(f"{name}.{part}", width) for part in ("enorm", "hnorm", "norm")},
            **{f"{part}.weight": linear(f"{name}.{part}", width, width) for part in ("e_proj", "h_proj")},
            **under("stream_head", _connection(f"{name}.hc_head", streams, streams * width, 1)),
            **under("layer", _layer(config.of_module, 0, name, split, device)),
        }
        sources |= under(str(k), module)
    return sources


def _layer(
    config: DeepseekV4Config, index: int, name: str, split: ExpertSplit, device: int, vocab_size: int | None = None
) -> dict[str, Source]:
    width, streams = config.hidden_size, config.hc_mult
    sizes = ((2 + streams) * streams, streams * width, 3)
    return {
        "attn_norm.weight": norm(f"{name}.attn_norm", width),
        "ffn_norm.weight": norm(f"{name}.ffn_norm", width),
        **under("hc_attn", _connection(f"{name}.hc_attn", *sizes)),
        **under("hc_ffn", _connection(f"{name}.hc_ffn", *sizes)),
        **under("attn", _attention(config, index, f"{name}.attn")),
        **under("ffn", _experts(config, index, f"{name}.ffn", split, device, vocab_size)),
    }


def _connection(name: str, outputs: int, inputs: int, scales: int) -> dict[str, Source]:
    """Return the sources of a hyper-connection or of the weights of the final sum of streams."""
    return {
        "fn": Source({f"{name}_fn": (outputs, inputs)}, lambda t: next(t).T, in_f32=True),
        "base": Source({f"{name}_base": (outputs,)}, in_f32=True),
        "scale": Source({f"{name}_scale": (scales,)}, in_f32=True),
    }


def _attention(config: DeepseekV4Config, index: int, name: str) -> dict[str, Source]:
    heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
    groups, group_width = config.o_groups, heads * width // config.o_groups

    def of_groups(tensors: Iterator[np.ndarray]) -> np.ndarray:
        return next(tensors).reshape(groups, config.o_lora_rank, group_width).swapaxes(1, 2)

    sources = {
        "wq_a.weight": linear(f"{name}.wq_a", rank, config.hidden_size),
        "q_norm.weight": norm(f"{name}.q_norm", rank),
        "wq_b.weight": linear(f"{name}.wq_b", heads * width, rank),
        "wkv.weight": linear(f"{name}.wkv", width, config.hidden_size),
        "kv_norm.weight": norm(f"{name}.kv_norm", width),
        "sinks": Source({f"{name}.attn_sink": (heads,)}, in_f32=True),
        "wo_a": Source({f"{name}.wo_a.weight": (groups * config.o_lora_rank, group_width)}, of_groups),
        "wo_b.weight": linear(f"{name}.wo_b", config.hidden_size, groups * config.o_lora_rank),
    }
    if config.rate(index):
        sources |= under("compressor", _compressor(config, index, f"{name}.compressor", width))
    if config.has_indexer(index):
        heads, width = config.index_n_heads, config.index_head_dim
        of_indexer = {
            "wq_b.weight": linear(f"{name}.indexer.wq_b", heads * width, rank),
            "weights_proj.weight": dataclasses.replace(
                linear(f"{name}.indexer.weights_proj", heads, config.hidden_size), in_f32=True
            ),
            **under("compressor", _compressor(config, index, f"{name}.indexer.compressor", width)),
        }
        sources |= under("indexer", of_indexer)
    return sources


def _compressor(config: DeepseekV4Config, index: int, name: str, width: int) -> dict[str, Source]:
    columns = (2 if config.has_indexer(index) else 1) * width
    joined = {f"{name}.{part}.weight": (columns, config.hidden_size) for part in ("wkv", "wgate")}
    return {
        "kv_gate_proj.weight": Source(joined, lambda t: np.concatenate([w.T for w in t], axis=1)),
        "gate_bias": Source({f"{name}.ape": (config.rate(index), columns)}, in_f32=True),
        "norm": norm(f"{name}.norm", width),
    }


def _experts(
    config: DeepseekV4Config, index: int, name: str, split: ExpertSplit, device: int, vocab_size: int | None
) -> dict[str, Source]:
    """Return the sources of a layer's experts. Every device has the whole router, for all token ids."""
    experts, width, hidden = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    prefixes = [f"{name}.experts.{e}" for e in split.own(experts, device)]

    def join(tensors: Iterator[np.ndarray]) -> np.ndarray:
        return np.stack([np.concatenate([gate.T, up.T], axis=1) for gate, up in itertools.batched(tensors, 2)])

    def table(tensors: Iterator[np.ndarray]) -> np.ndarray:
        chosen = next(tensors)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts:
            wanted = f"experts from 0 to {experts - 1}"
            raise CheckpointError(f"{name}{V4_TABLE}: expected {wanted}, got {chosen.min()} to {chosen.max()}")
        return chosen

    gate_up = {f"{prefix}.{part}.weight": (hidden, width) for prefix in prefixes for part in ("w1", "w3")}
    down = {f"{prefix}.w2.weight": (width, hidden) for prefix in prefixes}
    shared, shared_hidden = f"{name}.shared_experts", hidden // split.expert
    sources = {
        "gate.weight": dataclasses.replace(linear(f"{name}.gate", experts, width), in_f32=True, keeps_bf16=True),
        "gate_up_proj": Source(gate_up, join, of_experts=True),
        "down_proj": Source(down, lambda t: np.stack([w.T for w in t]), of_experts=True),
        "shared_experts.gate_up_proj.weight": Source(
            {f"{shared}.{part}.weight": (shared_hidden, width) for part in ("w1", "w3")},
            lambda t: np.concatenate([w.T for w in t], axis=1),
        ),
        "shared_experts.down_proj.weight": linear(f"{shared}.w2", width, shared_hidden),
    }
    if config.is_hashed(index):
        of_tokens = {f"{name}{V4_TABLE}": (vocab_size or config.vocab_size, config.num_experts_per_tok)}
        return sources | {"gate.experts_of_tokens": Source(of_tokens, table, in_int32=True)}
    return sources | {"gate.bias": Source({f"{name}.gate.bias": (experts,)}, in_f32=True)}
