"""Write the goldens in tests/goldens: small checkpoints with the outputs of Hugging Face transformers.

    pip install torch==2.13.0 transformers==5.23.0
    python -m scripts.tools.make_goldens [--out tests/goldens] [NAME ...]

Each golden is a folder with a checkpoint, prompts, their logits, greedy tokens and cache contents, and a table of
mutations. tests/goldens/README.md describes the files. Everything is computed in float32 with eager attention on one
thread, from fixed seeds.

A golden is useful only if a wrong model fails the comparison with it. With the usual initialization (standard deviation
0.02, norm weights of 1), a model that ignores YaRN's mscale changes the logits by only 1e-3. The weights are therefore
drawn with a large standard deviation, and each golden is checked against mutations: the typical mistakes of
golden_mutations.py, each made in a copy of the model. The tool stops with an error if a mutation changes the logits by
no more than MIN_MUTATION, if the greedy tokens repeat in a loop, or if rounding could change a token.
"""

import argparse
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]
from safetensors.torch import load_file, save_file
from transformers import (  # pyrefly: ignore[missing-import]
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors  # pyrefly: ignore[missing-import]

from scripts.tools.golden_models import GOLDENS, NORM_SPREAD, Golden
from scripts.tools.golden_mutations import (
    change_indexing,
    change_routing,
    closest_routing,
    closest_selection,
    gates,
    is_gemma,
    is_latent,
    is_sparse,
    is_v3,
    mutations,
    routers,
    scaled_routers,
    text_model,
)
from scripts.tools.golden_v4 import (
    cached_entries,
    dequantise_published,
    is_v4,
    published_keys,
    published_tensors,
    quantise_published,
    spread_weights,
)

NEW_TOKENS = 24
SHARED_PREFIX = 32  # number of common first tokens of the two longest prompts, for tests of prefix caching

SINK_SPREAD = 2.0  # standard deviation of learned sinks, about the magnitude of scores

EMBEDDING_GAIN = 0.4  # factor of Gemma's tied embeddings: with larger ones, a token is often followed by itself

GATE_GAIN = 2.0  # factor of router weights: some experts of a selected group score less than experts of other groups

MIN_MUTATION = 1e-2  # minimum change of the logits by a mutation: 100 times the tolerance of the parity tests
MIN_TOKEN_MARGIN = 1e-3  # minimum gap between the best and the second-best logit of each generated token
MIN_ROUTING_MARGIN = 5e-4  # minimum gap between the worst selected and the best unselected expert or group
MIN_SELECTION_MARGIN = 2e-4  # the same for selected keys, divided by the deviation of their scores
MIN_DISTINCT_TOKENS = 12
MAX_ROUNDING = 2e-5

FP8_BLOCK = 128
FP8_MAX = 448.0  # maximum of float8_e4m3fn

MXFP4_GROUP = 32

EAGER = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}


def require(condition: bool, complaint: str) -> None:
    if not condition:
        raise SystemExit(complaint)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# --- the model and its checkpoint


def random_model(golden: Golden) -> PreTrainedModel:
    """Make the model of a golden, with weights so large that every part of the model affects the logits."""
    model = AutoModelForCausalLM.from_config(golden.config, **EAGER).eval()
    generator = torch.Generator().manual_seed(golden.seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        spread = SINK_SPREAD if name.endswith(".sinks") else golden.config.get_text_config().initializer_range
        near_one = ("norm" in name and not name.endswith(".bias")) or name.endswith((".scale", ".per_expert_scale"))
        parameter.data = 1 + NORM_SPREAD * noise if near_one else spread * noise
    for layer in text_model(model).layers:
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar.data = 1 + NORM_SPREAD * torch.randn(1, generator=generator)
    if is_gemma(golden.config):
        text_model(model).embed_tokens.weight.data *= EMBEDDING_GAIN
    for router in scaled_routers(model):
        router.proj.weight.data *= GATE_GAIN / router.scalar_root_size
    for router in routers(model):
        router.weight.data *= GATE_GAIN
    for gate in gates(model):
        gate.weight.data *= GATE_GAIN
        if is_v3(gate):
            gate.e_score_correction_bias = 0.1 * torch.randn(gate.num_experts, generator=generator)
    if is_v4(golden.config):
        spread_weights(model, generator)
    return model


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **EAGER)


def load_tensors(tensors: dict[str, torch.Tensor], config: PreTrainedConfig) -> PreTrainedModel:
    """Load a model from tensors with the names that they have in a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        save_file(tensors, Path(directory, "model.safetensors"), metadata={"format": "pt"})
        return load(Path(directory))


def published_config(model: PreTrainedModel) -> dict[str, object]:
    """Return the configuration with the keys of the published config.json, which transformers before version 5
    wrote.
    """
    keys = model.config.to_diff_dict()
    newer_keys = ("dtype", "qk_head_dim", "output_router_logits", "rope_interleave", "layer_types", "mlp_layer_types")
    for newer in newer_keys if is_latent(model.config) else newer_keys[:4]:
        keys.pop(newer, None)
    if is_latent(model.config):
        keys.pop("head_dim", None)
    rope = keys.pop("rope_parameters")
    latent = is_latent(model.config)
    keys |= {
        "architectures": [type(model).__name__],
        "rope_theta": int(rope.pop("rope_theta")),
        "rope_scaling": {"type" if latent else "rope_type": rope.pop("rope_type"), **rope},
        "torch_dtype": "float32",
        "transformers_version": "4.33.1" if latent else "4.43.0",
    }
    if model.config.model_type == "gpt_oss":
        keys |= {
            "attention_bias": model.config.attention_bias,
            "experts_per_token": model.config.num_experts_per_tok,
            "initial_context_length": rope["original_max_position_embeddings"],
        }
    if latent:
        v3 = model.config.model_type != "deepseek_v2"
        keys |= {
            "ep_size": 1,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid" if v3 else "softmax",
            "topk_method": "noaux_tc" if v3 else model.config.topk_method,
        }
    return dict(sorted(keys.items()))


def write_checkpoint(golden: Golden, prompts: list[list[int]], directory: Path) -> PreTrainedModel:
    """Write the checkpoint. Return the model that is loaded from it, so that the outputs belong to the written
    files.
    """
    model = random_model(golden)
    model.save_pretrained(directory, max_shard_size=golden.max_shard_size)
    reloaded = load(directory)
    require(largest_change(model, reloaded, prompts) < MAX_ROUNDING, "the checkpoint is not that of its model")
    if golden.published_config:
        write_json(directory / "config_published.json", published_config(model))
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(directory, other, dirs_exist_ok=True)
            shutil.copy(directory / "config_published.json", Path(other, "config.json"))
            require(largest_change(model, load(Path(other)), prompts) < MAX_ROUNDING, "the published keys differ")
    return reloaded


# --- block-quantized checkpoints


def expand_blocks(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand scales [ceil(rows / 128), ceil(columns / 128)] of blocks to the shape [rows, columns] of the weight. The
    last block of a row or column may be smaller than 128.
    """
    rows, columns = shape
    return scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def quantise(weight: torch.Tensor, powers_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [rows, columns]. Return it in float8_e4m3fn, and `weight_scale_inv`, the factors per block with
    which it is dequantised.
    """
    scale_inv = F.max_pool2d(weight.abs()[None], FP8_BLOCK, ceil_mode=True)[0] / FP8_MAX
    if powers_of_two:
        scale_inv = scale_inv.log2().ceil().exp2()
    return (weight / expand_blocks(scale_inv, weight.shape)).to(torch.float8_e4m3fn), scale_inv


def quantise_checkpoint(tensors: dict[str, torch.Tensor], seed: int, powers_of_two: bool) -> dict[str, torch.Tensor]:
    """Quantise like the published DeepSeek-V3 and V3.2.

    Projections, including the indexer's projections of queries and keys, become fp8 with scales. The router's bias
    stays float32. Everything else becomes bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    quantised = {}
    for name, tensor in sorted(tensors.items()):
        if re.search(r"\.(self_attn|mlp)\.(?!indexer).*_proj\w*\.weight$|\.indexer\.w(q_b|k)\.weight$", name):
            # Blocks must differ in magnitude, otherwise a test would not detect the scale of a wrong block.
            blocks = [math.ceil(size / FP8_BLOCK) for size in tensor.shape]
            gains = (0.5 * torch.randn(blocks, generator=generator)).exp()
            wide = tensor * expand_blocks(gains, tensor.shape)
            quantised[name], quantised[f"{name}_scale_inv"] = quantise(wide, powers_of_two)
        else:
            quantised[name] = tensor.clone() if name.endswith("e_score_correction_bias") else tensor.bfloat16()
    return quantised


def dequantise_checkpoint(
    tensors: dict[str, torch.Tensor], expand: Callable[[torch.Tensor, torch.Size], torch.Tensor] = expand_blocks
) -> dict[str, torch.Tensor]:
    """Return all tensors dequantised to float32. `expand` expands scales to the shape of their tensor; mutations
    replace it.
    """
    twin = {name: tensor.float() for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name, tensor in twin.items():
        if f"{name}_scale_inv" in tensors:
            twin[name] = tensor * expand(tensors[f"{name}_scale_inv"], tensor.shape)
    return twin


def prediction_layer(tensors: dict[str, torch.Tensor], golden: Golden) -> dict[str, torch.Tensor]:
    """Draw the multi-token prediction layer that checkpoints of DeepSeek-V3 have after the last layer.

    Plain decoding does not use this layer. Its embedding and LM head are copies of the model's tensors.
    """
    config, generator = golden.config, torch.Generator().manual_seed(golden.seed + 1)
    last, extra = (f"model.layers.{config.num_hidden_layers + offset}." for offset in (-1, 0))
    shapes = {name.replace(last, extra): tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    width = config.hidden_size
    shapes |= {f"{extra}{norm}.weight": (width,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{extra}eh_proj.weight"] = (width, 2 * width)
    layer = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        layer[name] = 1 + NORM_SPREAD * noise if "norm" in name else config.initializer_range * noise
        if name.endswith("gate.weight"):
            layer[name] *= GATE_GAIN
    return layer | {
        f"{extra}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{extra}shared_head.head.weight": tensors["lm_head.weight"],
    }


def write_fp8_checkpoint(golden: Golden, directory: Path) -> PreTrainedModel:
    """Write an fp8 checkpoint with a published configuration. Return the model of the dequantised tensors."""
    model = random_model(golden)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    sparse = is_sparse(golden.config)
    tensors = quantise_checkpoint(tensors | prediction_layer(tensors, golden), golden.seed, powers_of_two=sparse)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = published_config(model) | {
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            **({"scale_fmt": "ue8m0"} if sparse else {}),
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
    }
    write_json(directory / "config.json", dict(sorted(config.items())))
    return load_tensors(dequantise_checkpoint(tensors), golden.config)


# --- checkpoints with experts in MXFP4


def pack_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise experts [E, in, out] to MXFP4: blocks uint8 [E, out, in / 32, 16], with two values per byte, and
    exponents uint8 [E, out, in / 32].
    """
    groups = weight.transpose(1, 2).unflatten(-1, (-1, MXFP4_GROUP))
    exponents = (groups.abs().amax(-1, keepdim=True) / max(FP4_VALUES)).log2().ceil()
    distances = (groups * 2.0**-exponents)[..., None] - torch.tensor(FP4_VALUES)
    codes = distances.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


def unpack_checkpoint(
    tensors: dict[str, torch.Tensor], change: Callable[..., tuple[torch.Tensor, ...]] = lambda *packed: packed
) -> dict[str, torch.Tensor]:
    """Return all tensors dequantised to float32. transformers unpacks the experts. Mutations use `change`, which
    modifies blocks and scales before they are unpacked.
    """
    twin = {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype != torch.uint8}
    for name in tensors:
        if name.endswith("_blocks"):
            experts = name.removesuffix("_blocks")
            parts = change(tensors[name], tensors[f"{experts}_scales"])
            twin[experts] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    return twin


def write_mxfp4_checkpoint(golden: Golden, directory: Path) -> PreTrainedModel:
    """Write an MXFP4 checkpoint with a published configuration. Return the model of the dequantised tensors."""
    model = random_model(golden)
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if re.search(r"\.experts\.\w+_proj$", name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack_experts(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = published_config(model) | {
        "quantization_config": {"modules_to_not_convert": left, "quant_method": "mxfp4"},
    }
    del config["torch_dtype"]
    write_json(directory / "config.json", dict(sorted(config.items())))
    return load_tensors(unpack_checkpoint(tensors), golden.config)


def mxfp4_mutation_table(directory: Path, model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Return the largest change of a logit by each mistake in unpacking MXFP4."""
    mistakes = {
        "mxfp4_scales_dropped": lambda blocks, scales: (blocks, torch.full_like(scales, 127)),
        "mxfp4_halves_of_bytes_swapped": lambda blocks, scales: (blocks >> 4 | blocks << 4, scales),
    }
    tensors = load_file(directory / "model.safetensors")
    return {
        name: largest_change(model, load_tensors(unpack_checkpoint(tensors, change), model.config), prompts)
        for name, change in mistakes.items()
    }


# --- computation of the model


def draw_prompts(golden: Golden) -> list[list[int]]:
    generator = torch.Generator().manual_seed(golden.seed)
    config = golden.config.get_text_config()
    ordinary = (config.eos_token_id + 1, config.vocab_size)
    prompts = [torch.randint(*ordinary, [length], generator=generator).tolist() for length in golden.prompt_lengths]
    prompts[-1][:SHARED_PREFIX] = prompts[-2][:SHARED_PREFIX]
    return prompts


def largest_change(model: PreTrainedModel, other: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Return the largest difference between the logits of two models, over all prompts."""
    batches = [torch.tensor([prompt]) for prompt in prompts]
    return max((model(batch).logits - other(batch).logits).abs().max().item() for batch in batches)


def decode(model: PreTrainedModel, prompt: list[int]) -> dict[str, np.ndarray]:
    """Compute the logits and cache contents of a prompt, and NEW_TOKENS greedy tokens. The margin of a token is its
    logit minus the second-best logit.
    """
    # With a configuration, DynamicCache drops tokens outside the window; without one, it has no index keys.
    cache = DynamicCache(config=model.config) if is_sparse(model.config) else DynamicCache()
    logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0]
    cached = cached_arrays(model.config, cache)
    tops = [logits[-1].topk(2)]
    while len(tops) < NEW_TOKENS:
        newest = tops[-1].indices[:1]
        tops.append(model(newest[None], past_key_values=cache).logits[0, -1].topk(2))
    return {
        "logits": logits.numpy(),
        "tokens": np.array([top.indices[0] for top in tops], np.int32),
        "margins": np.array([top.values[0] - top.values[1] for top in tops], np.float32),
        **cached,
    }


def cached_arrays(config: PreTrainedConfig, cache: DynamicCache) -> dict[str, np.ndarray]:
    """Return the cache contents of a prompt of T tokens: latents [layers, T, L + R] and index keys [layers with an
    indexer, T, Di], or keys and values [layers, Hkv, T, D]. For Gemma 4, layers without a cache are left out, and local
    and global layers, whose shapes differ, have separate arrays.
    """
    if is_v4(config):
        return cached_entries(config, cache)
    if is_gemma(config):
        kinds = zip(config.get_text_config().layer_types, cache.layers, strict=False)
        of_kinds = {"local": [], "global": []}
        for kind, layer in kinds:
            of_kinds["global" if kind == "full_attention" else "local"].append(layer)
        return {
            f"{name}_{kind}": torch.stack([getattr(layer, kind)[0] for layer in layers]).numpy()
            for name, layers in of_kinds.items()
            for kind in ("keys", "values")
        }
    if is_latent(config):
        # transformers stores the normed latent as keys and the rotated key as values, both with shape [1, 1, T, width].
        rows = [torch.cat((layer.keys, layer.values), -1)[0, 0] for layer in cache.layers]
        indexed = [layer for layer in cache.layers if getattr(layer, "indexer_keys", None) is not None]
        index = [layer.indexer_keys[0] for layer in indexed]
        return {"latents": torch.stack(rows).numpy()} | ({"index_keys": torch.stack(index).numpy()} if index else {})
    return {
        kind: torch.stack([getattr(layer, kind)[0] for layer in cache.layers]).numpy() for kind in ("keys", "values")
    }


def mutation_table(model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Return the largest change of a logit by each mutation of this model."""
    if is_v4(model.config):
        return mistakes(model, prompts)
    control = deepcopy(model)
    change_routing(control)
    require(largest_change(model, control, prompts) < MAX_ROUNDING, "this routing differs from transformers")
    change_indexing(control)
    require(largest_change(model, control, prompts) < MAX_ROUNDING, "this indexer differs from transformers")
    return mistakes(model, prompts)


def mistakes(model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Return the largest change of a logit by each entry of `mutations`."""
    table = {}
    for name, mutate in mutations(model.config).items():
        mutant = deepcopy(model)
        mutate(mutant)
        table[name] = largest_change(model, mutant, prompts)
    return table


def fp8_mutation_table(directory: Path, model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Return the largest change of a logit by each mistake in applying the scales of an fp8 checkpoint."""
    mistakes = {
        "fp8_scales_dropped": lambda scales, shape: torch.ones(shape),
        "fp8_scales_divide": lambda scales, shape: 1 / expand_blocks(scales, shape),
        "fp8_blocks_of_equal_size": lambda scales, shape: F.interpolate(scales[None, None], size=shape)[0, 0],
    }
    tensors = load_file(directory / "model.safetensors")
    return {
        name: largest_change(model, load_tensors(dequantise_checkpoint(tensors, expand), model.config), prompts)
        for name, expand in mistakes.items()
    }


# --- published checkpoints of DeepSeek-V4


def write_v4_checkpoint(golden: Golden, directory: Path) -> PreTrainedModel:
    """Write a checkpoint in the published format of DeepSeek-V4. Return the model of the dequantised tensors."""
    random_model(golden).save_pretrained(directory)
    tensors = published_tensors(load_file(directory / "model.safetensors"))
    stored = quantise_published(tensors, golden.seed)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", dict(sorted(published_keys(golden.config).items())))
    return load_tensors(dequantise_published(stored), golden.config)


# --- the golden


def check_decoding(
    model: PreTrainedModel, prompts: list[list[int]], runs: list[dict[str, np.ndarray]]
) -> dict[str, float]:
    """Exit with an error if tokens repeat in a loop or if rounding could change a decision. Return the smallest margins
    of the decisions of routers and indexers, if the model has any.
    """
    for prompt, run in zip(prompts, runs, strict=True):
        tokens = run["tokens"].tolist()
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :]
        require(tokens == generated.tolist(), "generate() gives other tokens, or stops at the end-of-sequence token")
        require(len(set(tokens)) >= MIN_DISTINCT_TOKENS, f"the prompt of {len(prompt)} tokens is continued in a loop")
        require(run["margins"].min() > MIN_TOKEN_MARGIN, "a token is chosen by too little")
    sequences = [prompt + run["tokens"].tolist() for prompt, run in zip(prompts, runs, strict=True)]
    closest = closest_routing(model, sequences)
    require(closest is None or closest > MIN_ROUTING_MARGIN, f"a routing decision is as close as {closest}")
    selection = closest_selection(model, sequences)
    require(selection is None or selection > MIN_SELECTION_MARGIN, f"a choice of keys is as close as {selection}")
    rounding = largest_change(model, deepcopy(model).double(), prompts)
    require(rounding < MAX_ROUNDING, f"float32 costs {rounding} of the logits")
    decisions = {"closest_routing": closest, "closest_selection": selection}
    return {name: margin for name, margin in decisions.items() if margin is not None}


def mistakes_of(golden: Golden, directory: Path, model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Return the largest change of a logit by each mistake that the golden must detect."""
    if golden.mxfp4:
        return mxfp4_mutation_table(directory, model, prompts)  # the golden "gpt-oss" detects the other mistakes
    quantised = fp8_mutation_table(directory, model, prompts) if golden.fp8 and not is_v4(golden.config) else {}
    return mutation_table(model, prompts) | quantised


def write_golden(golden: Golden, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    prompts = draw_prompts(golden)
    if golden.fp8:
        is_of_v4 = is_v4(golden.config)
        model = (write_v4_checkpoint if is_of_v4 else write_fp8_checkpoint)(golden, directory)
    elif golden.mxfp4:
        model = write_mxfp4_checkpoint(golden, directory)
    else:
        model = write_checkpoint(golden, prompts, directory)
    runs = [decode(model, prompt) for prompt in prompts]
    closest = check_decoding(model, prompts, runs)
    table = mistakes_of(golden, directory, model, prompts)
    for name, change in table.items():
        require(change > MIN_MUTATION, f"{name} moves the logits by no more than {change}")
    (directory / "prompts.json").write_text(json.dumps(prompts) + "\n")
    arrays = {f"{key}_{i}": value for i, run in enumerate(runs) for key, value in run.items()}
    np.savez_compressed(directory / "golden.npz", **arrays)  # pyrefly: ignore[bad-argument-type]
    summary = {
        "written_by": {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__},
        "rope_columns": "interleaved" if golden.config.model_type in ("deepseek_v2", "deepseek_v4") else "halves",
        **closest,
        "mutations": dict(sorted(table.items(), key=lambda item: item[1])),
    }
    write_json(directory / "golden.json", summary)


def print_golden(directory: Path) -> None:
    arrays = np.load(directory / "golden.npz")
    summary = json.loads((directory / "golden.json").read_text())
    of_prompts = range(len(json.loads((directory / "prompts.json").read_text())))
    margins = np.concatenate([arrays[f"margins_{i}"] for i in of_prompts])
    distinct = [len(set(arrays[f"tokens_{i}"].tolist())) for i in of_prompts]
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory.name}: {size / 1e6:.2f} MB")
    print(f"  token margins: least {margins.min():.1e}, median {np.median(margins):.2f}; distinct tokens {distinct}")
    closest = {name: margin for name, margin in summary.items() if name.startswith("closest")}
    print(f"  closest decisions: {closest or '(none)'}; logits move by, under")
    for mistake, change in summary["mutations"].items():
        print(f"    {mistake:<36}{change:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GOLDENS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("tests/goldens"))
    args = parser.parse_args()
    if unknown := set(args.names) - set(GOLDENS):
        parser.error(f"no golden is called {', '.join(sorted(unknown))}")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in args.names or GOLDENS:
        write_golden(GOLDENS[name], args.out / name)
        print_golden(args.out / name)


if __name__ == "__main__":
    main()
