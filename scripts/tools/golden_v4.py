"""Goldens of DeepSeek-V4: random weights, the published checkpoint format, cache contents and mutations.

make_goldens.py uses these functions for models with model_type deepseek_v4. Their modules differ from other DeepSeek
models: residual streams, compressors, hash routing.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel  # pyrefly: ignore[missing-import]

NORM_SPREAD = 0.3

FP8_BLOCK = 128
FP8_MAX = 448.0

FP4_GROUP = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FP8_NAMES = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|shared_experts\.w[123]\.weight$|\.[eh]_proj\.weight$"
)
"""Names of the tensors that published checkpoints store in fp8."""

FP4_NAMES = re.compile(r"\.experts\.[0-9]+\.w[123]\.weight$")
"""Names of the tensors that published checkpoints store in fp4."""

FP32_NAMES = re.compile(r"attn_sink$|\.ape$|hc_(attn|ffn|head)_\w+$|\.gate\.bias$")

RENAMED = (
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.", ""),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""Names of `save_pretrained` that differ from the published names, and the published names."""


def is_v4(config: PreTrainedConfig) -> bool:
    return config.model_type == "deepseek_v4"


def layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    yield from model.model.layers


def compressors(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (layer.self_attn.compressor for layer in layers(model) if layer.self_attn.compressor is not None)


def indexers(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (compressor.indexer for compressor in compressors(model) if hasattr(compressor, "indexer"))


def spread_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw the weights and buffers for which the general rule of make_goldens.py is unsuitable."""

    def noise(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    for name, parameter in sorted(model.named_parameters()):
        if name.endswith(("position_bias", "_hc.base", ".hc_base")):
            parameter.data = noise(parameter)
        elif name.endswith(".hc_scale"):
            parameter.data = 1 + NORM_SPREAD * noise(parameter)
    for layer in layers(model):
        table = getattr(layer.mlp.gate, "tid2eid", None)
        if table is not None:
            scores = torch.rand((table.shape[0], layer.mlp.gate.num_experts), generator=generator)
            layer.mlp.gate.tid2eid = scores.topk(table.shape[1], -1).indices


# --- published checkpoints


def published_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of `save_pretrained` with their published names."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, published in RENAMED:
            name = re.sub(pattern, published, name)
        renamed[name] = tensor
    return renamed


def prediction_module(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw the multi-token prediction module `mtp.0`: a layer with a window and score-routed experts, and the tensors
    around it."""
    window = next(layer_prefix(n) for n in tensors if n.endswith("attn_sink") and not has_compressor(tensors, n))
    scored = next(layer_prefix(name) for name in tensors if name.endswith("ffn.gate.bias"))
    parts = {n: t for n, t in tensors.items() if n.startswith(window) and ".ffn." not in n}
    parts |= {n: t for n, t in tensors.items() if n.startswith(f"{scored}ffn.")}
    shapes = {f"mtp.0.{name.split('.', 2)[2]}": tensor.shape for name, tensor in parts.items()}
    width = tensors["norm.weight"].shape[0]
    shapes |= {f"mtp.0.{name}.weight": (width, width) for name in ("e_proj", "h_proj")}
    shapes |= {f"mtp.0.{name}.weight": (width,) for name in ("enorm", "hnorm", "norm")}
    shapes |= {f"mtp.0.{n}": t.shape for n, t in tensors.items() if n.startswith("hc_head_")}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
    near_one = ("norm.weight", "_scale")
    return {n: 1 + NORM_SPREAD * t if n.endswith(near_one) else 0.15 * t for n, t in drawn.items()}


def layer_prefix(name: str) -> str:
    return ".".join(name.split(".")[:2]) + "."


def has_compressor(tensors: dict[str, torch.Tensor], name: str) -> bool:
    return f"{layer_prefix(name)}attn.compressor.ape" in tensors


def quantise_fp8(weight: torch.Tensor, gains: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply blocks of 128 x 128 by `gains`, and return them in fp8 with power-of-two scales."""
    wide = weight * expand_blocks(gains, weight.shape)
    largest = torch.nn.functional.max_pool2d(wide.abs()[None], FP8_BLOCK, ceil_mode=True)[0]
    scales = (largest / FP8_MAX).log2().ceil().exp2()
    return (wide / expand_blocks(scales, wide.shape)).to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu)


def expand_blocks(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = shape
    return scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def quantise_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in fp4, two values per byte with the first in the low half, and its scales."""
    groups = weight.unflatten(-1, (-1, FP4_GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / max(FP4_VALUES)).log2().ceil().exp2()
    magnitudes = (groups / scales).abs()[..., None] - torch.tensor(FP4_VALUES)
    codes = (magnitudes.abs().argmin(-1) + 8 * (groups < 0)).to(torch.uint8).flatten(1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scales[..., 0].to(torch.float8_e8m0fnu)


def dequantise_fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = packed.view(torch.uint8)
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(1)
    return (pairs.unflatten(-1, (-1, FP4_GROUP)) * scales.float()[..., None]).flatten(1)


def quantise_published(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return a published checkpoint, given unquantised tensors with published names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors | prediction_module(tensors, generator)
    stored = {}
    for name, tensor in sorted(tensors.items()):
        scale = name.removesuffix(".weight") + ".scale"
        if FP8_NAMES.search(name):
            blocks = [math.ceil(size / FP8_BLOCK) for size in tensor.shape]
            gains = (0.5 * torch.randn(blocks, generator=generator)).exp()
            stored[name], stored[scale] = quantise_fp8(tensor, gains)
        elif FP4_NAMES.search(name):
            stored[name], stored[scale] = quantise_fp4(tensor)
        else:
            keeps = FP32_NAMES.search(name) or not tensor.is_floating_point()
            stored[name] = tensor.clone() if keeps else tensor.bfloat16()
    return stored


def dequantise_published(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the model, without the prediction module, in float32."""
    twin = {}
    for name, tensor in stored.items():
        if name.startswith("mtp.") or name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix(".weight") + ".scale")
        if tensor.dtype == torch.int8:
            twin[name] = dequantise_fp4(tensor, scale)
        elif scale is not None:
            twin[name] = tensor.float() * expand_blocks(scale.float(), tensor.shape)
        else:
            twin[name] = tensor.float() if tensor.is_floating_point() else tensor
    return twin


def published_keys(config: PreTrainedConfig) -> dict[str, object]:
    """Return the flat published config.json."""
    rates = {"sliding_attention": 0, **config.compress_rates}
    yarn = config.rope_parameters["compress"]
    names = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " head_dim q_lora_rank num_experts_per_tok n_routed_experts n_shared_experts scoring_func norm_topk_prob"
        " routed_scaling_factor max_position_embeddings rope_theta compress_rope_theta hc_mult hc_sinkhorn_iters hc_eps"
        " swiglu_limit sliding_window o_groups o_lora_rank index_n_heads index_head_dim index_topk"
        " num_nextn_predict_layers hidden_act initializer_range rms_norm_eps bos_token_id eos_token_id"
        " tie_word_embeddings attention_bias attention_dropout model_type qk_rope_head_dim"
    )
    return {
        **{name: getattr(config, name) for name in names.split()},
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [*(rates[kind] for kind in config.layer_types), 0],
        "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        "rope_theta": int(config.rope_theta),
        "rope_scaling": {
            "type": "yarn",
            **{n: yarn[n] for n in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")},
        },
        "topk_method": "noaux_tc",
        "expert_dtype": "fp4",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
    }


# --- cache contents and margins


def cached_entries(config: PreTrainedConfig, cache: DynamicCache) -> dict[str, np.ndarray]:
    """Return compressed entries [layers, entries, D] of CSA and of HCA layers, and index keys [CSA layers, entries,
    Di]."""
    found: dict[str, list[torch.Tensor]] = {"csa_entries": [], "hca_entries": [], "index_keys": []}
    for kind, layer in zip(config.layer_types, cache.layers, strict=True):
        if kind == "sliding_attention":
            continue
        is_csa = kind == "compressed_sparse_attention"
        found["csa_entries" if is_csa else "hca_entries"].append(layer.compressed_kv["compressor"][0])
        if is_csa:
            found["index_keys"].append(layer.compressed_kv["indexer"][0])
    return {name: torch.stack(entries).numpy() for name, entries in found.items()}


def routing_margin(gate: nn.Module, hidden: torch.Tensor) -> float:
    """Return the smallest gap between the worst selected and the best unselected expert of a score-routed layer."""
    if hasattr(gate, "tid2eid"):
        return math.inf
    scores = gate.score_fn(nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight))
    best = (scores + gate.e_score_correction_bias).topk(gate.top_k + 1).values
    return (best[:, -2] - best[:, -1]).min().item()


def closest_entries(model: PreTrainedModel, sequences: list[list[int]]) -> float:
    """Return the smallest gap between the worst selected and the best unselected entry, divided by the standard
    deviation of the token's scores, over all layers and tokens."""
    margins = []

    def measure(indexer: nn.Module, _scorer: nn.Module, _arguments: object, scores: torch.Tensor) -> None:
        for position, row in enumerate(scores[0]):
            seen = row[: (position + 1) // indexer.compress_rate]
            if len(seen) > indexer.index_topk:
                best = seen.topk(indexer.index_topk + 1).values
                margins.append(((best[-2] - best[-1]) / seen.std()).item())

    hooks = [indexer.scorer.register_forward_hook(partial(measure, indexer)) for indexer in indexers(model)]
    for sequence in sequences:
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return min(margins)


# --- mutations, each of which a golden must detect


def change_modules(modules: Callable[[PreTrainedModel], Iterator[nn.Module]], **attributes: object) -> Callable:
    """Return a mutation that sets attributes of modules."""

    def mutate(model: PreTrainedModel) -> None:
        for module in modules(model):
            for name, value in attributes.items():
                setattr(module, name, value)

    return mutate


def attentions(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (layer.self_attn for layer in layers(model))


def connections(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (site for layer in layers(model) for site in (layer.attn_hc, layer.ffn_hc))


def gates(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (layer.mlp.gate for layer in layers(model))


def drop_sinks(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.sinks.data = torch.full_like(attention.sinks, -1e9)


def drop_position_biases(model: PreTrainedModel) -> None:
    for module in (*compressors(model), *indexers(model)):
        module.position_bias.data = torch.zeros_like(module.position_bias)


def drop_query_norms(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.q_b_norm = nn.Identity()


def see_one_more(model: PreTrainedModel) -> None:
    model.config.sliding_window += 1


def route_other_tokens(model: PreTrainedModel) -> None:
    for gate in gates(model):
        if hasattr(gate, "tid2eid"):
            gate.tid2eid = gate.tid2eid.roll(1, 0)


def drop_router_biases(model: PreTrainedModel) -> None:
    for gate in gates(model):
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias = torch.zeros_like(gate.e_score_correction_bias)


def drop_yarn(model: PreTrainedModel) -> None:
    for module in (model.model, *compressors(model), *indexers(model)):
        base, rotary = model.config.rope_parameters["compress"]["rope_theta"], module.rotary_emb
        exponents = torch.arange(0, 2 * len(rotary.compress_inv_freq), 2) / (2 * len(rotary.compress_inv_freq))
        rotary.compress_inv_freq = base**-exponents


def drop_limits(model: PreTrainedModel) -> None:
    for layer in layers(model):
        layer.mlp.experts.limit = layer.mlp.shared_experts.limit = math.inf


def v4_mutations(config: PreTrainedConfig) -> dict[str, Callable[[PreTrainedModel], None]]:
    return {
        "sinks_dropped": drop_sinks,
        "position_biases_dropped": drop_position_biases,
        "query_norms_dropped": drop_query_norms,
        "windows_one_wider": see_one_more,
        "hash_table_of_other_tokens": route_other_tokens,
        "bias_dropped": drop_router_biases,
        "compressed_yarn_dropped": drop_yarn,
        "gates_not_clamped": drop_limits,
        "routed_scale_dropped": change_modules(gates, routed_scaling_factor=1.0),
        "one_sinkhorn_iteration": change_modules(connections, hc_sinkhorn_iters=1),
        "hc_eps_dropped": change_modules(connections, hc_eps=0.0),
        "all_entries_attended": change_modules(indexers, index_topk=10**6),
        "one_entry_more": change_modules(indexers, index_topk=config.index_topk + 1),
    }
