"""Conversion of the tensors of a checkpoint to the weights of a model, and random models.

The tables `weight_sources` and `mtp_sources` list, for every parameter by its path in the module, the Hugging Face
tensors that it is made from and the change of layout. Projections are transposed to [in, out]. Gate projections are
joined with up projections, and queries with keys and values. Experts are stacked. `kv_b_proj` is split into W_UK and
W_UV. Rotary columns are reordered from pairs to halves (`rope`). Gate columns of gpt-oss, every second column, become
the first half. Experts of Gemma 4, which have rows of gates before rows of up projections, are transposed. The tables
of DeepSeek-V4 are in `v4_sources`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from pallas_attn.models.checkpoints.files import (
    EMBEDDING,
    HEAD,
    MTP_COPIES,
    V4_TABLE,
    CheckpointError,
    Slices,
    open_checkpoint,
)
from pallas_attn.models.checkpoints.sources import Order, Read, Shape, Source, linear, norm, ordered, under
from pallas_attn.models.checkpoints.v4_sources import V4_EMBEDDING, v4_mtp_sources, v4_sources
from pallas_attn.models.config import (
    INDEX_ROPE_INTERLEAVE,
    DeepSeekConfig,
    DeepseekV4Config,
    Gemma4Config,
    GQAConfig,
    ModelConfig,
    Windows,
    require_mtp,
    with_windows,
)
from pallas_attn.models.decoder import (
    MTP,
    V4MTP,
    AttentionSettings,
    Decoder,
    MTPModule,
    V4MTPModule,
    device_part,
    normal_mesh,
)
from pallas_attn.models.decoder.layers import split_weights
from pallas_attn.models.decoder.mesh import (
    COLUMNS,
    EXPERT_COLUMNS,
    EXPERTS,
    HEADS,
    ExpertSplit,
    num_contexts,
    num_devices,
    number_along,
    place,
    slices_of_device,
)
from pallas_attn.models.decoder.rope import halves_order

_log = logging.getLogger(__name__)

_NEAR_ONE = (
    *("norm.weight", "norm_1.weight", "norm_2.weight"),
    *(".layer_scalar", ".router.scale", ".per_expert_scale", "_attn_scale", "_ffn_scale", "_head_scale"),
)
"""Suffixes of the names of tensors whose values are near 1: norms and factors."""


def weight_sources(
    config: ModelConfig,
    split: ExpertSplit = ExpertSplit(),
    device: int = 0,
    contexts: int = 1,
    *,
    vocab_size: int | None = None,
) -> dict[str, Source]:
    """Return the source of every parameter by its dotted path in `Decoder`.

    Args:
      config: the model, or the part of it on a device.
      split: devices that the experts are split over.
      device: index of the device in `split`.
      contexts: number of devices that contexts are split over.
      vocab_size: size of the vocabulary of the whole model; None for the size in `config`. Only the tables from token
        ids to experts of DeepSeek-V4 use it.
    """
    if isinstance(config, DeepseekV4Config):
        return v4_sources(config, split, device, vocab_size)
    embedding = (config.vocab_size, config.hidden_size)
    sources = {
        "embed_tokens": Source({EMBEDDING: embedding}),
        "norm.weight": norm("model.norm", config.hidden_size),
    }
    if not config.tie_word_embeddings:
        sources["lm_head.weight"] = linear("lm_head", *embedding)
    if isinstance(config, Gemma4Config) and config.hidden_size_per_layer_input:
        sources |= under("per_layer_inputs", _per_layer_inputs(config))
    for i in range(config.num_hidden_layers):
        sources |= under(f"layers.{i}", _layer(config, i, split, device, contexts))
    return sources


def mtp_sources(
    config: DeepSeekConfig | DeepseekV4Config, split: ExpertSplit = ExpertSplit(), device: int = 0, contexts: int = 1
) -> dict[str, Source]:
    """Return the source of every parameter of multi-token prediction modules by its path in a list of `MTPModule` or
    `V4MTPModule`.

    Arguments as for `weight_sources`.
    """
    if isinstance(config, DeepseekV4Config):
        return v4_mtp_sources(config, split, device)
    width, sources = config.hidden_size, {}
    for k, i in enumerate(config.mtp_layers):
        name = f"model.layers.{i}"
        module = {
            "enorm.weight": norm(f"{name}.enorm", width),
            "hnorm.weight": norm(f"{name}.hnorm", width),
            "eh_proj.weight": linear(f"{name}.eh_proj", width, 2 * width),
            "norm.weight": norm(f"{name}.shared_head.norm", width),
            **under("layer", _layer(config, i, split, device, contexts)),
        }
        sources |= under(str(k), module)
    return sources


def checkpoint_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of the unquantised tensors of a model, without multi-token prediction layers.

    Scales and packed forms of quantised checkpoints are not included; `Checkpoint.inspect` derives them.
    """
    return _shapes(weight_sources(config))


def _shapes(sources: Mapping[str, Source]) -> dict[str, Shape]:
    return {name: shape for source in sources.values() for name, shape in source.tensors.items()}


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model, without allocating it."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in checkpoint_shapes(config).values())


def _layer(
    config: DeepSeekConfig | GQAConfig | Gemma4Config,
    index: int,
    split: ExpertSplit = ExpertSplit(),
    device: int = 0,
    contexts: int = 1,
) -> dict[str, Source]:
    name = f"model.layers.{index}"
    if isinstance(config, Gemma4Config):
        return _gemma_layer(config, index, name, split, device, contexts)
    return {
        "input_layernorm.weight": norm(f"{name}.input_layernorm", config.hidden_size),
        "post_attention_layernorm.weight": norm(f"{name}.post_attention_layernorm", config.hidden_size),
        **under("self_attn", _attention(config, index, f"{name}.self_attn", contexts)),
        **under("mlp", _feed_forward(config, index, f"{name}.mlp", split, device)),
    }


def _gemma_layer(
    config: Gemma4Config, index: int, name: str, split: ExpertSplit, device: int, contexts: int
) -> dict[str, Source]:
    width, ple = config.hidden_size, config.hidden_size_per_layer_input
    norms = [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    sources = {
        **under("self_attn", _gemma_attention(config, index, f"{name}.self_attn", contexts)),
        **under("mlp", _mlp(config, f"{name}.mlp", config.mlp_width(index))),
        "layer_scalar": Source({f"{name}.layer_scalar": (1,)}),
    }
    if not config.is_dense(index):
        norms += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"]
        sources |= under("experts", _scaled_moe(config, name, split, device))
    if ple:
        norms.append("post_per_layer_input_norm")
        sources["per_layer_input_gate.weight"] = linear(f"{name}.per_layer_input_gate", ple, width)
        sources["per_layer_projection.weight"] = linear(f"{name}.per_layer_projection", width, ple)
    return sources | {f"{part}.weight": norm(f"{name}.{part}", width) for part in norms}


def _gemma_attention(config: Gemma4Config, index: int, name: str, contexts: int) -> dict[str, Source]:
    """Return the sources of a layer's attention. The output projection has the heads that a device merges. A layer
    without a cache has no keys and values. A layer whose values are made from the projection of keys has no projection
    of values."""
    heads, (kv_heads, width) = config.num_attention_heads, config.kv_heads(index)
    has_cache = index in config.cached_layers
    widths = {"q_proj": heads * width}
    if has_cache:
        k_eq_v = config.attention_k_eq_v and config.is_global(index)
        widths |= dict.fromkeys(("k_proj",) if k_eq_v else ("k_proj", "v_proj"), kv_heads * width)
    norms = ("q_norm", "k_norm") if has_cache else ("q_norm",)
    joined = {f"{name}.{projection}.weight": (out, config.hidden_size) for projection, out in widths.items()}
    return {
        "qkv_proj.weight": Source(joined, lambda t: np.concatenate([w.T for w in t], axis=1), of_heads=True),
        "o_proj.weight": linear(f"{name}.o_proj", config.hidden_size, heads // contexts * width),
        **{f"{part}.weight": norm(f"{name}.{part}", width) for part in norms},
    }


def _per_layer_inputs(config: Gemma4Config) -> dict[str, Source]:
    columns = config.num_hidden_layers * config.hidden_size_per_layer_input
    table = {"model.embed_tokens_per_layer.weight": (config.vocab_size_per_layer_input, columns)}
    return {
        "embed_tokens": Source(table),
        "projection.weight": linear("model.per_layer_model_projection", columns, config.hidden_size),
        "norm.weight": norm("model.per_layer_projection_norm", config.hidden_size_per_layer_input),
    }


def _bias(name: str, width: int, order: Order | None = None, *, added_once: bool = False) -> Source:
    return Source({f"{name}.bias": (width,)}, lambda t: ordered(next(t), order), added_once=added_once)


def _attention(config: DeepSeekConfig | GQAConfig, index: int, name: str, contexts: int) -> dict[str, Source]:
    """Return the sources of a layer's attention. The output projection has the heads that a device merges."""
    is_mla = isinstance(config, DeepSeekConfig)
    sources = _mla(config, index, name, contexts) if is_mla else _gqa(config, name, contexts)
    of_heads = ("q_proj.weight", "q_b_proj.weight", "w_uk", "w_uv", "qkv_proj.weight", "qkv_proj.bias", "sinks")
    return {path: dataclasses.replace(source, of_heads=path in of_heads) for path, source in sources.items()}


def _mla(config: DeepSeekConfig, index: int, name: str, contexts: int) -> dict[str, Source]:
    heads, rank, width = config.num_attention_heads, config.kv_lora_rank, config.hidden_size
    nope, value = config.qk_nope_head_dim, config.v_head_dim

    def before_rotary(plain: int) -> np.ndarray:
        """Return the order of `plain` columns that are not rotated, followed by the rotary columns."""
        rotary = halves_order(config.qk_rope_head_dim) if config.rope_interleave else np.arange(config.qk_rope_head_dim)
        return np.concatenate([np.arange(plain), plain + rotary])

    def query_order() -> np.ndarray:
        return (np.arange(heads)[:, None] * config.qk_head_dim + before_rotary(nope)[None, :]).reshape(-1)

    def latent_order() -> np.ndarray:
        return before_rotary(rank)

    expand = {f"{name}.kv_b_proj.weight": (heads * (nope + value), rank)}
    sources = {
        "kv_a_proj_with_mqa.weight": linear(f"{name}.kv_a_proj_with_mqa", config.latent_width, width, latent_order),
        "kv_a_layernorm.weight": norm(f"{name}.kv_a_layernorm", rank),
        "w_uk": Source(expand, lambda t: next(t).reshape(heads, nope + value, rank)[:, :nope]),
        "w_uv": Source(expand, lambda t: next(t).reshape(heads, nope + value, rank)[:, nope:]),
        "o_proj.weight": linear(f"{name}.o_proj", width, heads // contexts * value),
    }
    query_width = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        sources["q_proj.weight"] = linear(f"{name}.q_proj", query_width, width, query_order)
    else:
        sources["q_a_proj.weight"] = linear(f"{name}.q_a_proj", config.q_lora_rank, width)
        sources["q_a_layernorm.weight"] = norm(f"{name}.q_a_layernorm", config.q_lora_rank)
        sources["q_b_proj.weight"] = linear(f"{name}.q_b_proj", query_width, config.q_lora_rank, query_order)
    if config.attention_bias:
        sources["kv_a_proj_with_mqa.bias"] = _bias(f"{name}.kv_a_proj_with_mqa", config.latent_width, latent_order)
        sources["o_proj.bias"] = _bias(f"{name}.o_proj", width, added_once=True)
        if config.q_lora_rank is not None:
            sources["q_a_proj.bias"] = _bias(f"{name}.q_a_proj", config.q_lora_rank)
    if config.has_indexer(index):
        sources |= under("indexer", _indexer(config, f"{name}.indexer"))
    return sources


def _indexer(config: DeepSeekConfig, name: str) -> dict[str, Source]:
    """Return the sources of an indexer. The first columns of its queries and keys are rotary."""
    heads, width, rotary = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim

    def key_order() -> np.ndarray:
        first = halves_order(rotary) if INDEX_ROPE_INTERLEAVE[config.model_type] else np.arange(rotary)
        return np.concatenate([first, np.arange(rotary, width)])

    def query_order() -> np.ndarray:
        return (np.arange(heads)[:, None] * width + key_order()[None, :]).reshape(-1)

    return {
        "wq_b.weight": linear(f"{name}.wq_b", heads * width, config.q_lora_rank or 0, query_order),
        "wk.weight": linear(f"{name}.wk", width, config.hidden_size, key_order),
        "k_norm.weight": Source({f"{name}.k_norm.weight": (width,)}, lambda t: ordered(next(t), key_order)),
        "k_norm.bias": _bias(f"{name}.k_norm", width, key_order),
        "weights_proj.weight": dataclasses.replace(
            linear(f"{name}.weights_proj", heads, config.hidden_size), in_f32=True
        ),
    }


def _gqa(config: GQAConfig, name: str, contexts: int) -> dict[str, Source]:
    query_width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    widths = {f"{name}.q_proj": query_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
    joined = {f"{projection}.weight": (out, config.hidden_size) for projection, out in widths.items()}
    sources = {
        "qkv_proj.weight": Source(joined, lambda t: np.concatenate([w.T for w in t], axis=1)),
        "o_proj.weight": linear(f"{name}.o_proj", config.hidden_size, query_width // contexts),
    }
    if config.attention_bias:
        biases = {f"{projection}.bias": (out,) for projection, out in widths.items()}
        sources["qkv_proj.bias"] = Source(biases, lambda t: np.concatenate(list(t)))
        sources["o_proj.bias"] = _bias(f"{name}.o_proj", config.hidden_size, added_once=True)
    if config.learned_sinks:
        sources["sinks"] = Source({f"{name}.sinks": (config.num_attention_heads,)}, in_f32=True)
    if config.qk_norm:
        sources |= {f"{part}.weight": norm(f"{name}.{part}", config.head_dim) for part in ("q_norm", "k_norm")}
    return sources


def _feed_forward(
    config: DeepSeekConfig | GQAConfig, index: int, name: str, split: ExpertSplit, device: int
) -> dict[str, Source]:
    if config.is_dense(index):
        return _mlp(config, name)
    if isinstance(config, DeepSeekConfig):
        return _moe(config, name, split, device)
    return _biased_moe(config, name, split, device)


def _mlp(config: DeepSeekConfig | GQAConfig | Gemma4Config, name: str, hidden: int | None = None) -> dict[str, Source]:
    width, hidden = config.hidden_size, hidden or config.intermediate_size
    gate_up = {f"{name}.{part}_proj.weight": (hidden, width) for part in ("gate", "up")}
    return {
        "gate_up_proj.weight": Source(gate_up, lambda t: np.concatenate([w.T for w in t], axis=1)),
        "down_proj.weight": linear(f"{name}.down_proj", width, hidden),
    }


def _moe(config: DeepSeekConfig, name: str, split: ExpertSplit, device: int) -> dict[str, Source]:
    experts, width, hidden = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    prefixes = [f"{name}.experts.{e}" for e in split.own(experts, device)]
    gate_up = {f"{p}.{part}_proj.weight": (hidden, width) for p in prefixes for part in ("gate", "up")}
    down = {f"{p}.down_proj.weight": (width, hidden) for p in prefixes}

    def join(tensors: Iterator[np.ndarray]) -> np.ndarray:
        return np.stack([np.concatenate([gate.T, up.T], axis=1) for gate, up in itertools.batched(tensors, 2)])

    sources = {
        "gate.weight": dataclasses.replace(linear(f"{name}.gate", experts, width), in_f32=True),
        "gate_up_proj": Source(gate_up, join, of_experts=True),
        "down_proj": Source(down, lambda t: np.stack([w.T for w in t]), of_experts=True),
    }
    if config.topk_method == "noaux_tc":
        bias = {f"{name}.gate.e_score_correction_bias": (experts,)}
        sources["gate.e_score_correction_bias"] = Source(bias, in_f32=True)
    if config.n_shared_experts:
        shared = _mlp(config, f"{name}.shared_experts", hidden * config.n_shared_experts // split.expert)
        sources |= under("shared_experts", shared)
    return sources


def _biased_moe(config: GQAConfig, name: str, split: ExpertSplit, device: int) -> dict[str, Source]:
    """Return the sources of the experts of gpt-oss.

    Its checkpoints store all experts of a layer in one tensor, with alternating gate and up columns.
    """
    experts, width, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size

    def halves(tensors: Iterator[np.ndarray]) -> np.ndarray:
        gate_up = next(tensors)
        return np.concatenate([gate_up[..., ::2], gate_up[..., 1::2]], axis=-1)

    of = functools.partial(_of_all_experts, f"{name}.experts", split.own(experts, device))
    return {
        "router.weight": dataclasses.replace(linear(f"{name}.router", experts, width), in_f32=True),
        "router.bias": dataclasses.replace(_bias(f"{name}.router", experts), in_f32=True),
        "gate_up_proj": of("gate_up_proj", width, 2 * hidden, pack=halves),
        "gate_up_proj_bias": of("gate_up_proj_bias", 2 * hidden, pack=halves),
        "down_proj": of("down_proj", hidden, width),
        "down_proj_bias": of("down_proj_bias", width, added_once=True),
    }


def _scaled_moe(config: Gemma4Config, name: str, split: ExpertSplit, device: int) -> dict[str, Source]:
    """Return the sources of router and experts of a Gemma 4 layer, with all experts of the layer in one tensor."""
    experts, width, hidden = config.num_experts, config.hidden_size, config.moe_intermediate_size
    of = functools.partial(_of_all_experts, f"{name}.experts", split.own(experts, device))
    return {
        "router.scale": Source({f"{name}.router.scale": (width,)}, in_f32=True),
        "router.weight": dataclasses.replace(linear(f"{name}.router.proj", experts, width), in_f32=True),
        "router.per_expert_scale": Source({f"{name}.router.per_expert_scale": (experts,)}, in_f32=True),
        "gate_up_proj": of(
            "gate_up_proj",
            2 * hidden,
            width,
            pack=lambda t: np.concatenate(list(t), axis=1).swapaxes(1, 2),
            in_halves=True,
        ),
        "down_proj": of("down_proj", width, hidden, pack=lambda t: next(t).swapaxes(1, 2)),
    }


def _of_all_experts(name: str, own: range, tensor: str, *shape: int, **options: Any) -> Source:
    """Return the source of a parameter of the experts `own`, from a tensor that contains all experts of a layer."""
    tensors = {f"{name}.{tensor}": (len(own), *shape)} if own else {}
    return Source(tensors, **options, of_experts=True, experts=own)


def load_model(
    directory: str | Path,
    dtype: DTypeLike | None = None,
    settings: AttentionSettings = AttentionSettings(),
    windows: Windows | None = None,
    mesh: Mesh | None = None,
) -> Decoder:
    """Load a model from a Hugging Face directory: config.json, and model.safetensors or the shards of its index.

    All headers are compared with config.json before a weight is allocated. Then one parameter is made at a time. On a
    mesh, one slice of a parameter is read at a time. If the files have a head that differs from the embedding, the
    model has this head, whatever `tie_word_embeddings` says.

    Args:
      directory: the directory.
      dtype: float32 or bfloat16; None for the dtype of the checkpoint, with bfloat16 for float16.
      settings: settings of attention.
      windows: windows of all layers, which replace the windows of config.json.
      mesh: devices that the model is split over, as in `EngineConfig`; None for the default device.

    Raises:
      CheckpointError: a file or tensor is missing, extra, misshaped or unreadable.
      ValueError, NotImplementedError: as `read_config`, `with_windows`, `normal_mesh` and `device_part`.
    """
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config if windows is None else with_windows(checkpoint.config, windows)
    mesh, part = _split(config, mesh)
    for name, why in checkpoint.inspect(checkpoint_shapes(config)).items():
        _log.info("%s is not loaded: it %s", name, why)
    if dtype is None:
        dtype = jnp.float32 if config.dtype == "float32" else jnp.bfloat16
    make = lambda: Decoder(config, settings, dtype, mesh)  # noqa: E731
    sources = _sources_on(mesh, functools.partial(weight_sources, part, vocab_size=config.vocab_size))
    return _assemble(make, sources, checkpoint.read, dtype, mesh, checkpoint_shapes(config))


def load_mtp(directory: str | Path, model: Decoder) -> MTP | V4MTP:
    """Load the multi-token prediction modules of a model from its directory, in the dtype of the model.

    Raises:
      CheckpointError: as `load_model`, or the embedding or head stored with a module differs from the model's.
      ValueError: the directory has a different config.json, or no modules.
      NotImplementedError: the family has no such modules.
    """
    config, checkpoint = require_mtp(model.config), open_checkpoint(directory)
    if checkpoint.config != config:
        raise ValueError(f"model: expected the one of {directory}, whose config.json differs from the model's")
    sources = mtp_sources(config)
    for name in checkpoint.inspect(checkpoint_shapes(config) | _shapes(sources)):
        own = EMBEDDING if "embed_tokens" in name or config.tie_word_embeddings else HEAD
        if name.endswith(MTP_COPIES) and not checkpoint.tensors[name].equals(checkpoint.tensors[own]):
            raise CheckpointError(f"{name}: expected a copy of {own}, which multi-token prediction shares")
    return _assemble_mtp(model, checkpoint.read)


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    settings: AttentionSettings = AttentionSettings(),
    mesh: Mesh | None = None,
) -> Decoder:
    """Return the model that `save_random_checkpoint` writes for this seed, split over the mesh if given."""
    mesh, part = _split(config, mesh)
    shapes = checkpoint_shapes(config)
    make = lambda: Decoder(config, settings, dtype, mesh)  # noqa: E731
    sources = _sources_on(mesh, functools.partial(weight_sources, part, vocab_size=config.vocab_size))
    return _assemble(make, sources, _random_reader(config, shapes, seed), dtype, mesh, shapes)


def _split(config: ModelConfig, mesh: Mesh | None) -> tuple[Mesh | None, ModelConfig]:
    """Return the mesh with all its axes, and the part of the model on one of its devices."""
    mesh = mesh and normal_mesh(mesh)
    return mesh, device_part(config, mesh)


def _sources_on(
    mesh: Mesh | None, sources: Callable[[ExpertSplit, int, int], dict[str, Source]]
) -> list[dict[str, Source]]:
    """Return the sources of a device's part, for each of the devices that the experts are split over."""
    split, contexts = ExpertSplit.over(mesh), num_contexts(mesh)
    return [sources(split, device, contexts) for device in range(split.devices)]


def random_mtp(model: Decoder, seed: int = 0) -> MTP | V4MTP:
    """Return the multi-token prediction modules that `save_random_checkpoint` writes for this seed.

    Raises:
      ValueError, NotImplementedError: the configuration of the model has no such modules.
    """
    return _assemble_mtp(model, _random_reader(model.config, _shapes(mtp_sources(require_mtp(model.config))), seed))


def _random_reader(config: ModelConfig, shapes: Mapping[str, Shape], seed: int) -> Read:
    deviation, experts = _embedding_deviation(config), _hashed_experts(config)
    return lambda name, part: random_tensor(name, shapes[name], seed, deviation, experts)[part]


def _hashed_experts(config: ModelConfig) -> int:
    """Return the number of experts in tables of the experts of each token; 0 without such tables."""
    return config.n_routed_experts if isinstance(config, DeepseekV4Config) else 0


def _embedding_deviation(config: ModelConfig) -> float:
    """Return the standard deviation of random embeddings, with which activations begin near 1. Gemma 4 multiplies
    embeddings by the square root of the hidden size."""
    return config.hidden_size**-0.5 if isinstance(config, Gemma4Config) else 1.0


def save_random_checkpoint(directory: str | Path, config: ModelConfig, seed: int = 0) -> None:
    """Write a random model and its multi-token prediction modules as a Hugging Face directory in float32."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    unquantised = dataclasses.replace(config, dtype="float32")
    if not isinstance(unquantised, Gemma4Config):
        unquantised = dataclasses.replace(unquantised, fp8_block=None)
    if isinstance(unquantised, GQAConfig):
        unquantised = dataclasses.replace(unquantised, mxfp4_experts=False)
    (directory / "config.json").write_text(json.dumps(unquantised.to_hf(), indent=2))
    shapes = checkpoint_shapes(config)
    if config.mtp_layers or (isinstance(config, DeepseekV4Config) and config.num_nextn_predict_layers):
        shapes |= _shapes(mtp_sources(require_mtp(config)))
    deviation, experts = _embedding_deviation(config), _hashed_experts(config)
    tensors = {name: random_tensor(name, shape, seed, deviation, experts) for name, shape in shapes.items()}
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    for i in config.mtp_layers:
        for copy, own in zip(MTP_COPIES, (EMBEDDING, head), strict=True):
            tensors[f"model.layers.{i}{copy}"] = tensors[own]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def random_tensor(
    name: str, shape: Shape, seed: int, embedding_deviation: float = 1.0, num_experts: int = 0
) -> np.ndarray:
    """Return random float32 values. Activations remain near 1, so that generated tokens depend on the whole context.
    `embedding_deviation` is the standard deviation of embeddings, `num_experts` the number of experts in tables of the
    experts of each token, which are integers."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(V4_TABLE):
        return np.ascontiguousarray(np.argsort(rng.random((shape[0], num_experts)), axis=1)[:, : shape[1]])
    values = rng.standard_normal(shape, np.float32)
    if name.endswith(_NEAR_ONE):
        return 1 + 0.3 * values
    if name.endswith((".sinks", ".attn_sink")):
        return 2 * values
    if name.endswith(".ape"):
        return values
    if len(shape) == 1 or name.endswith("_bias"):
        return 0.1 * values
    if name in (EMBEDDING, V4_EMBEDDING):
        return np.float32(embedding_deviation) * values
    return values * np.float32(1.5 * shape[1] ** -0.5)


def _assemble_mtp(model: Decoder, read: Read) -> MTP | V4MTP:
    part, mesh, dtype = require_mtp(model.part), model.mesh, model.embed_tokens[...].dtype
    whole = _shapes(mtp_sources(require_mtp(model.config)))
    sources = _sources_on(mesh, functools.partial(mtp_sources, part))
    if isinstance(part, DeepseekV4Config):
        depths = range(part.num_nextn_predict_layers)
        modules = lambda: nnx.List([V4MTPModule(part, model.settings, dtype, mesh) for _ in depths])  # noqa: E731
        return V4MTP(model, [*_assemble(modules, sources, read, dtype, mesh, whole)])
    make = lambda: nnx.List([MTPModule(part, i, model.settings, dtype, mesh) for i in part.mtp_layers])  # noqa: E731
    return MTP(model, [*_assemble(make, sources, read, dtype, mesh, whole)])


def _assemble[Module: nnx.Module](
    make: Callable[[], Module],
    sources: Sequence[Mapping[str, Source]],
    read: Read,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    whole: Mapping[str, Shape] | None = None,
) -> Module:
    """Make a module, one parameter at a time.

    Args:
      make: makes the module with arbitrary values; on a mesh, one device's part of it.
      sources: sources of its parameters in the shapes of this part, for each device that experts are split over.
      read: reads a part of a tensor.
      dtype: float32 or bfloat16.
      mesh: the devices; None for the default device.
      whole: shapes of the whole tensors; required on a mesh.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype: expected float32 or bfloat16, got {jnp.dtype(dtype).name}")
    graph, state = nnx.split(nnx.eval_shape(make))
    shapes = whole or _shapes(sources[0])

    def slices(source: Source, name: str, axes: Sequence[str], at: Mapping[str, int]) -> list[Slices]:
        """Return the part of a tensor that a device has, or the parts of its two halves."""
        device, devices = (0, 1) if mesh is None else (number_along(axes, mesh, at), num_devices(mesh, axes))
        whole, own = shapes[name], source.tensors[name]
        if source.in_halves:
            whole, own = ((shape[0], shape[1] // 2, *shape[2:]) for shape in (whole, own))
        first, *rest = slices_of_device(whole, own, device, devices)
        if mesh is not None and source.experts is not None:
            first = slice(source.experts.start, source.experts.stop)
        if not source.in_halves:
            return [(first, *rest)]
        start, stop, _ = rest[0].indices(whole[1])
        return [(first, slice(start + half, stop + half), *rest[1:]) for half in (0, whole[1])]

    def fill(path: tuple[Any, ...], parameter: nnx.Variable) -> nnx.Variable:
        name = ".".join(map(str, path))
        first = sources[0][name]
        kind = np.int32 if first.in_int32 else np.float32 if first.in_f32 else jnp.dtype(dtype)
        keeps_bf16 = first.keeps_bf16 and jnp.dtype(dtype) == jnp.bfloat16
        shared_by = _shared_by(first)

        def converted(tensor: np.ndarray) -> np.ndarray:
            return tensor if keeps_bf16 and tensor.dtype == jnp.bfloat16 else tensor.astype(kind, copy=False)

        def values(at: Mapping[str, int]) -> np.ndarray:
            source = first if mesh is None or not first.of_experts else sources[number_along(EXPERTS, mesh, at)][name]
            if not source.tensors or (source.added_once and mesh is not None and number_along(shared_by, mesh, at)):
                return np.zeros(parameter.shape, kind)
            parts = [(tensor, part) for tensor in source.tensors for part in slices(source, tensor, shared_by, at)]
            packed = source.pack(converted(read(*part)) for part in parts)
            if source.in_f32 and not source.keeps_bf16 and parameter.dtype == jnp.bfloat16:
                packed = np.asarray(split_weights(jnp.asarray(packed)))
            missing = parameter.shape[0] - packed.shape[0] if source.of_experts else 0
            return np.pad(packed, [(0, missing)] + [(0, 0)] * (packed.ndim - 1)) if missing else packed

        if mesh is None:
            return parameter.replace(jnp.array(values({})))
        return parameter.replace(place(values, mesh, _split_over(first, shapes)))

    return nnx.merge(graph, nnx.map_state(fill, state))


def _shared_by(source: Source) -> tuple[str, ...]:
    """Return the axes along which devices have different slices of the same tensors."""
    return EXPERT_COLUMNS if source.of_experts else HEADS if source.of_heads else COLUMNS


def _split_over(source: Source, whole: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return the axes along which the slices of a parameter differ, given the shapes of the whole tensors."""
    if source.of_experts:
        return (*EXPERTS, *EXPERT_COLUMNS)
    differs = source.added_once or any(whole[tensor] != own for tensor, own in source.tensors.items())
    return _shared_by(source) if differs else ()


def weight_axes(config: ModelConfig, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes along which the slices of each parameter differ, to make random weights on the devices.

    Raises:
      ValueError, NotImplementedError: as `normal_mesh` and `device_part`.
    """
    normal, part = _split(config, mesh)
    whole = checkpoint_shapes(config)
    sources = _sources_on(normal, functools.partial(weight_sources, part, vocab_size=config.vocab_size))
    return {name: _split_over(source, whole) for name, source in sources[0].items()}
