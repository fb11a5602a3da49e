"""The committed goldens are complete, consistent, and match tests/goldens/README.md."""

import json
from math import ceil, log
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

GOLDENS = Path(__file__).parent.parent / "goldens"
SPARSE = ("v32", "v32-fp8", "glm-dsa", "glm-shared")
LATENT = ("v2-greedy", "v2-group", "v3", "v3-fp8", *SPARSE)
GQA = ("qwen3", "qwen3-yarn", "qwen3-window", "llama", "gpt-oss", "gpt-oss-mxfp4")
NAMES = (*LATENT, *GQA)
GEMMA = ("gemma4", "gemma4-k-eq-v", "gemma4-moe")
V4 = {"v4": (4, 8), "v4-published": (4, 128)}
"""Goldens of DeepSeek-V4, and the tokens per entry of CSA and of HCA layers."""
NEW_TOKENS = 24
SHARED_PREFIX = 32

YARN_MUTATIONS = {"softmax_mscale_dropped", "yarn_interpolation_dropped", "yarn_interpolates_all_frequencies"}
WINDOW_MUTATIONS = {"windows_dropped", "windows_on_the_other_layers", "windows_one_wider"}
V3_MUTATIONS = {"groups_ignored", "bias_dropped", "bias_in_weights", "masked_groups_score_zero", "topk_not_normalised"}
FP8_MUTATIONS = {"fp8_scales_dropped", "fp8_scales_divide", "fp8_blocks_of_equal_size"}
SPARSE_MUTATIONS = {
    "all_keys_attended",
    "one_key_more",
    "worst_keys_chosen",
    "index_rope_dropped",
    "index_rope_of_the_last_columns",
    "index_rope_of_the_other_family",
    "index_relu_dropped",
    "index_weights_dropped",
    "index_keys_not_centred",
    "choice_of_the_first_layer",
    "choice_of_the_last_token",
}
MUTATIONS = {
    "glm-dsa": SPARSE_MUTATIONS | {"bias_dropped", "bias_in_weights", "topk_not_normalised"},
    "glm-shared": SPARSE_MUTATIONS
    | {
        "bias_dropped",
        "bias_in_weights",
        "topk_not_normalised",
        "shared_layers_choose_anew",
        "shared_layers_attend_to_all_keys",
        "shared_layers_take_the_first_choice",
    },
    "v32": YARN_MUTATIONS | V3_MUTATIONS | SPARSE_MUTATIONS | {"rotary_mscale_dropped"},
    "v2-greedy": YARN_MUTATIONS | {"rotary_mscale_dropped", "topk_normalised"},
    "v2-group": {"groups_ignored", "group_score_is_the_sum_of_two", "topk_normalised"},
    "v3": YARN_MUTATIONS | V3_MUTATIONS | {"rotary_mscale_dropped"},
    "qwen3": {"qk_norms_dropped", "kv_heads_dealt_round"},
    "qwen3-yarn": {
        "qk_norms_dropped",
        "attention_biases_dropped",
        "rotary_mscale_dropped",
        "yarn_interpolation_dropped",
        "yarn_interpolates_all_frequencies",
    },
    "qwen3-window": WINDOW_MUTATIONS | {"qk_norms_dropped", "kv_heads_dealt_round"},
    "gpt-oss": WINDOW_MUTATIONS
    | {
        "attention_biases_dropped",
        "kv_heads_dealt_round",
        "rotary_mscale_dropped",
        "yarn_interpolation_dropped",
        "yarn_interpolates_all_frequencies",
        "yarn_ramp_of_whole_frequencies",
        "sinks_dropped",
        "sinks_scaled_as_scores",
        "router_bias_dropped",
        "weights_among_all_experts",
        "expert_biases_dropped",
        "gates_in_the_first_half",
        "gates_not_clamped",
        "swiglu_alpha_is_one",
    },
    "gpt-oss-mxfp4": {"mxfp4_scales_dropped", "mxfp4_halves_of_bytes_swapped"},
    "llama": {"kv_heads_dealt_round", "llama3_interpolation_dropped", "llama3_interpolates_all_frequencies"},
    "v3-fp8": YARN_MUTATIONS | V3_MUTATIONS | FP8_MUTATIONS,
    "v32-fp8": YARN_MUTATIONS | V3_MUTATIONS | SPARSE_MUTATIONS | FP8_MUTATIONS,
}


def read_json(name, file):
    return json.loads((GOLDENS / name / file).read_text())


def read_prompts(name):
    return read_json(name, "prompts.json")


def read_arrays(name):
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        return dict(arrays)


def tensor_table(name):
    """Return file name, dtype name and shape of every tensor of a golden's checkpoint."""
    table = {}
    for path in sorted((GOLDENS / name).glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                assert key not in table, f"{key} is in two files"
                part = file.get_slice(key)
                table[key] = (path.name, part.get_dtype(), tuple(part.get_shape()))
    return table


def read_tensor(name, key):
    """Read a tensor in float32 directly from the bytes of the safetensors file, because NumPy has no bfloat16."""
    file, dtype, shape = tensor_table(name)[key]
    raw = (GOLDENS / name / file).read_bytes()
    header_size = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + header_size])[key]["data_offsets"]
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
    data = np.frombuffer(raw[8 + header_size :][begin:end], dtypes[dtype])
    return data.reshape(shape).astype(np.float32)


def read_weight(name, key):
    """Read a tensor in float32, multiplied by its block scales."""
    weight = read_tensor(name, key)
    if f"{key}_scale_inv" in tensor_table(name):
        scales = read_tensor(name, f"{key}_scale_inv")
        weight = weight * np.kron(scales, np.ones((128, 128), np.float32))[: weight.shape[0], : weight.shape[1]]
    return weight


def cached_kinds(name):
    """Return the kinds of cached arrays of a golden."""
    if name in SPARSE:
        return ("latents", "index_keys")
    return ("latents",) if name in LATENT else ("keys", "values")


def cached_shape(config, kind, length):
    layers = config["num_hidden_layers"]
    if kind == "index_keys":
        return (config.get("indexer_types", ["full"] * layers).count("full"), length, config["index_head_dim"])
    if "kv_lora_rank" in config:
        return (layers, length, config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return (layers, config["num_key_value_heads"], length, config["head_dim"])


def rope_parameters(config):
    """Return the rope parameters of a config.json with their newer names, whichever names the file has."""
    if "rope_parameters" in config:
        return config["rope_parameters"]
    scaling = dict(config["rope_scaling"])
    kind = scaling.pop("type" if "type" in scaling else "rope_type")
    return {"rope_type": kind, "rope_theta": config["rope_theta"], **scaling}


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def test_documented_goldens_exist():
    assert sorted(path.name for path in GOLDENS.iterdir() if path.is_dir()) == sorted((*NAMES, *GEMMA, *V4))


@pytest.mark.parametrize("name", V4)
def test_arrays_of_deepseek_v4(name):
    """The longest prompt has several entries of each kind or at least one; shared prefixes have equal results."""
    config, prompts, arrays = read_json(name, "config.json"), read_prompts(name), read_arrays(name)
    rates = dict(zip(("csa_entries", "hca_entries"), V4[name], strict=True)) | {"index_keys": V4[name][0]}
    assert set(arrays) == {f"{key}_{i}" for key in ("logits", "tokens", "margins", *rates) for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        for key, rate in rates.items():
            width = config["index_head_dim" if key == "index_keys" else "head_dim"]
            assert arrays[f"{key}_{i}"].shape[1:] == (len(prompt) // rate, width)
        tokens = arrays[f"tokens_{i}"]
        assert arrays[f"logits_{i}"].shape == (len(prompt), config["vocab_size"])
        assert tokens[0] == arrays[f"logits_{i}"][-1].argmax()
        assert arrays[f"margins_{i}"].min() > 1e-3
        assert len(set(tokens.tolist())) >= NEW_TOKENS // 2, "a loop compares little"
    longest = len(prompts[-1])
    assert longest // max(rates.values()) >= 1
    assert longest // rates["csa_entries"] > config["index_topk"]
    for key, rate in {"logits": None, **rates}.items():
        axis, count = (0, SHARED_PREFIX) if rate is None else (1, SHARED_PREFIX // rate)
        short, long = (np.take(arrays[f"{key}_{i}"], range(count), axis) for i in (-2 % len(prompts), len(prompts) - 1))
        np.testing.assert_allclose(short, long, atol=2e-5)


@pytest.mark.parametrize("name", GEMMA)
def test_arrays_of_gemma(name):
    """Prompts are longer than the window, shared prefixes have equal results, and tokens follow from the logits."""
    config, prompts, arrays = read_json(name, "config.json"), read_prompts(name), read_arrays(name)
    config = config.get("text_config", config)
    kinds = [f"{kind}_{part}" for kind in ("local", "global") for part in ("keys", "values")]
    assert set(arrays) == {f"{key}_{i}" for key in ("logits", "tokens", "margins", *kinds) for i in range(len(prompts))}
    cached = config["layer_types"][: config["num_hidden_layers"] - config["num_kv_shared_layers"]]
    heads = {"local": (config["num_key_value_heads"], config["head_dim"])}
    last = config["per_layer_config"][str(config["num_hidden_layers"] - 1)]
    heads["global"] = (last.get("num_key_value_heads", config["num_key_value_heads"]), last["head_dim"])
    assert heads["local"][1] != heads["global"][1]
    assert max(map(len, prompts)) > 2 * config["sliding_window"]
    for i, prompt in enumerate(prompts):
        for key in kinds:
            kind = key.partition("_")[0]
            layers = cached.count("full_attention" if kind == "global" else "sliding_attention")
            num_heads, width = heads[kind]
            assert arrays[f"{key}_{i}"].shape == (layers, num_heads, len(prompt), width)
        tokens = arrays[f"tokens_{i}"]
        assert arrays[f"logits_{i}"].shape == (len(prompt), config["vocab_size"])
        assert tokens[0] == arrays[f"logits_{i}"][-1].argmax()
        assert arrays[f"margins_{i}"].min() > 1e-3
        assert len(set(tokens.tolist())) >= NEW_TOKENS // 2, "a loop compares little"
    for key, axis in (("logits", 0), *((key, -2) for key in kinds)):
        short, long = (np.take(arrays[f"{key}_{i}"], range(SHARED_PREFIX), axis) for i in (2, 3))
        np.testing.assert_allclose(short, long, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_the_documented_shapes(name):
    config, prompts, arrays = read_json(name, "config.json"), read_prompts(name), read_arrays(name)
    kinds = {"logits", "tokens", "margins", *cached_kinds(name)}
    assert set(arrays) == {f"{key}_{i}" for key in kinds for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        expected = {
            "logits": (np.float32, (len(prompt), config["vocab_size"])),
            "tokens": (np.int32, (NEW_TOKENS,)),
            "margins": (np.float32, (NEW_TOKENS,)),
            **{kind: (np.float32, cached_shape(config, kind, len(prompt))) for kind in cached_kinds(name)},
        }
        for key, (dtype, shape) in expected.items():
            array = arrays[f"{key}_{i}"]
            assert (array.dtype, array.shape) == (dtype, shape), f"{key}_{i}"
            assert np.isfinite(array).all(), f"{key}_{i}"


@pytest.mark.parametrize("name", NAMES)
def test_prompt_lengths(name):
    config, prompts = read_json(name, "config.json"), read_prompts(name)
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) == 1
    assert max(lengths) > 2 * rope_parameters(config).get("original_max_position_embeddings", 0)
    ids = {token for prompt in prompts for token in prompt}
    assert config["eos_token_id"] < min(ids)
    assert max(ids) < config["vocab_size"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_follow_from_logits_with_margins(name):
    config, arrays = read_json(name, "config.json"), read_arrays(name)
    for i in range(len(read_prompts(name))):
        tokens, margins = arrays[f"tokens_{i}"], arrays[f"margins_{i}"]
        second, first = np.sort(arrays[f"logits_{i}"][-1])[-2:]
        assert tokens[0] == np.argmax(arrays[f"logits_{i}"][-1])
        np.testing.assert_allclose(margins[0], first - second, rtol=1e-6)
        assert margins.min() > 1e-3
        assert len(set(tokens.tolist())) >= NEW_TOKENS // 2, "a loop compares little"
        assert tokens.min() >= 0
        assert tokens.max() < config["vocab_size"]
        assert config["eos_token_id"] not in tokens


@pytest.mark.parametrize("name", NAMES)
def test_shared_prefixes_have_equal_logits_and_cache(name):
    (*_, shorter, longer), arrays = read_prompts(name), read_arrays(name)
    assert shorter[:SHARED_PREFIX] == longer[:SHARED_PREFIX]
    assert shorter[SHARED_PREFIX:] != longer[SHARED_PREFIX : len(shorter)]
    for key, axis in (("logits", 0), *((kind, -2) for kind in cached_kinds(name))):
        short, long = (np.take(arrays[f"{key}_{i}"], range(SHARED_PREFIX), axis) for i in (2, 3))
        np.testing.assert_allclose(short, long, atol=2e-5)


@pytest.mark.parametrize("name", GQA)
def test_first_keys_and_values_follow_from_checkpoint(name):
    """Keys and values of the first token in the first layer equal a computation from the checkpoint.

    The token at position 0 is not rotated. The comparison depends on the order of heads, norms, biases and the scale.
    """
    config, prompts, arrays = read_json(name, "config.json"), read_prompts(name), read_arrays(name)
    heads, table = (config["num_key_value_heads"], config["head_dim"]), tensor_table(name)
    x = read_weight(name, "model.embed_tokens.weight")[[prompt[0] for prompt in prompts]]
    x = rms_norm(x, read_weight(name, "model.layers.0.input_layernorm.weight"), config["rms_norm_eps"])
    for kind in ("keys", "values"):
        projection = f"model.layers.0.self_attn.{kind[0]}_proj"
        row = x @ read_weight(name, f"{projection}.weight").T
        row += read_weight(name, f"{projection}.bias") if f"{projection}.bias" in table else 0
        row = row.reshape(-1, *heads)
        norm, rope = "model.layers.0.self_attn.k_norm.weight", rope_parameters(config)
        if kind == "keys" and norm in table:
            row = rms_norm(row, read_weight(name, norm), config["rms_norm_eps"])
        if kind == "keys" and rope["rope_type"] == "yarn":
            row = row * (0.1 * log(rope["factor"]) + 1)
        cached = np.stack([arrays[f"{kind}_{i}"][0, :, 0] for i in range(len(prompts))])
        np.testing.assert_allclose(cached, row, atol=1e-5)


@pytest.mark.parametrize("name", LATENT)
def test_first_latent_follows_from_checkpoint(name):
    """The latent of the first token in the first layer equals a computation from the checkpoint.

    The token at position 0 is not rotated. The comparison depends on the order of columns and on the scale.
    """
    config, prompts, arrays = read_json(name, "config.json"), read_prompts(name), read_arrays(name)
    latent_width = config["kv_lora_rank"]
    x = read_weight(name, "model.embed_tokens.weight")[[prompt[0] for prompt in prompts]]
    x = rms_norm(x, read_weight(name, "model.layers.0.input_layernorm.weight"), config["rms_norm_eps"])
    row = x @ read_weight(name, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight").T
    latent, rope = row[:, :latent_width], row[:, latent_width:]
    latent = rms_norm(latent, read_weight(name, "model.layers.0.self_attn.kv_a_layernorm.weight"), 1e-6)
    if read_json(name, "golden.json")["rope_columns"] == "halves":
        rope = np.concatenate([rope[:, 0::2], rope[:, 1::2]], axis=-1)
    yarn = rope_parameters(config)
    if yarn["rope_type"] == "yarn":
        over, under = (0.1 * yarn[key] * log(yarn["factor"]) + 1 for key in ("mscale", "mscale_all_dim"))
        rope = rope * (over / under)
    cached = np.stack([arrays[f"latents_{i}"][0, 0] for i in range(len(prompts))])
    np.testing.assert_allclose(cached, np.concatenate([latent, rope], axis=-1), atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_top_k_is_smaller_than_longer_prompts(name):
    config, summary = read_json(name, "config.json"), read_json(name, "golden.json")
    lengths = sorted(map(len, read_prompts(name)))
    assert lengths[1] + NEW_TOKENS // 2 > config["index_topk"] > lengths[1]
    assert lengths[2] > 1.5 * config["index_topk"]
    assert summary["closest_selection"] > 2e-4


def test_shared_layers_follow_different_full_layers():
    """The golden detects a model whose layers without indexer attend to the keys of a wrong layer.

    Layers that share selected keys ("shared") follow two different layers that select keys ("full").
    """
    types = read_json("glm-shared", "config.json")["indexer_types"]
    assert types == ["full", "shared", "shared", "full", "shared"]
    assert read_json("glm-shared", "golden.json")["closest_selection"] > 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_every_mutation_changes_results(name):
    mutations = read_json(name, "golden.json")["mutations"]
    always = {"rope_in_pairs", "scores_scaled_by_the_hidden_size"}
    if name in LATENT:
        always = {
            "rope_in_halves",
            "routed_scale_dropped",
            "shared_experts_dropped",
            "attention_norms_use_rms_norm_eps",
        }
    assert (set() if name == "gpt-oss-mxfp4" else always) | MUTATIONS[name] <= set(mutations)
    assert min(mutations.values()) > 1e-2


def test_rope_columns_of_family():
    orders = {name: read_json(name, "golden.json")["rope_columns"] for name in LATENT}
    assert orders == {name: "interleaved" if name.startswith("v2-") else "halves" for name in LATENT}


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_shards_match_index(name):
    index, table = read_json(name, "model.safetensors.index.json"), tensor_table(name)
    assert index["weight_map"] == {key: file for key, (file, _, _) in table.items()}
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("name", ["v2-greedy", "v3", "v32", "llama", "gpt-oss"])
def test_published_config_with_older_keys(name):
    config, published = read_json(name, "config.json"), read_json(name, "config_published.json")
    routing = {"scoring_func", "topk_method"} if name in LATENT else set()
    assert {"rope_scaling", "rope_theta", "torch_dtype"} | routing <= set(published)
    assert not {"rope_parameters", "dtype"} & set(published)
    assert rope_parameters(published) == rope_parameters(config)
    assert published["torch_dtype"] == config["dtype"]
    common = set(config) & set(published) - {"transformers_version"}
    assert {key: published[key] for key in common} == {key: config[key] for key in common}


@pytest.mark.parametrize("name", ["v3-fp8", "v32-fp8"])
def test_fp8_blocks_with_remainders(name):
    """FP8 checkpoints have blocks of 128 x 128, and weights whose sizes are not multiples of 128.

    Scales of V3.2 are powers of two. All projections of an indexer are quantised, except its weights projection.
    """
    config, table = read_json(name, "config.json"), tensor_table(name)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    quantised = {key for key in table if f"{key}_scale_inv" in table}
    assert quantised == {key for key, (_, dtype, _) in table.items() if dtype == "F8_E4M3"}
    for key in quantised:
        _, dtype, shape = table[f"{key}_scale_inv"]
        assert (dtype, shape) == ("F32", tuple(ceil(size / 128) for size in table[key][2]))
    shapes = np.array([table[key][2] for key in quantised])
    assert ((shapes > 128) & (shapes % 128 != 0)).all(axis=1).any(), "no weight has smaller last blocks both ways"
    for key in ("model.embed_tokens", "lm_head", "model.norm", "model.layers.1.mlp.gate", "model.layers.2.eh_proj"):
        assert table[f"{key}.weight"][1] == "BF16"
    assert table["model.layers.1.mlp.gate.e_score_correction_bias"][1] == "F32"
    indexers = {key.partition(".indexer.")[2]: dtype for key, (_, dtype, _) in table.items() if ".indexer." in key}
    matrices = {f"{key}.weight": "F8_E4M3" for key in ("wq_b", "wk")}
    scales = {f"{key}_scale_inv": "F32" for key in matrices}
    others = dict.fromkeys(("k_norm.weight", "k_norm.bias", "weights_proj.weight"), "BF16")
    assert indexers == (matrices | scales | others if name in SPARSE else {})
    fractions = np.concatenate([np.frexp(read_tensor(name, f"{key}_scale_inv"))[0].ravel() for key in quantised])
    assert (fractions == 0.5).all() == (name in SPARSE)


def test_packed_experts_equal_rounded_experts():
    """The MXFP4 golden has the weights of the gpt-oss golden, rounded to the nearest values of their group of 32.

    Only the weights of experts are packed in MXFP4.
    """
    plain, packed = tensor_table("gpt-oss"), tensor_table("gpt-oss-mxfp4")
    experts = {key for key in plain if key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(experts) == 4
    assert packed.keys() == plain.keys() - experts | {
        f"{key}{part}" for key in experts for part in ("_blocks", "_scales")
    }
    assert {dtype for key, (_, dtype, _) in packed.items() if key in plain} == {"BF16"}
    for key in experts:
        exact, (_, dtype, shape) = read_tensor("gpt-oss", key), packed[f"{key}_blocks"]
        assert (dtype, shape) == ("U8", (8, exact.shape[2], exact.shape[1] // 32, 16))
        assert packed[f"{key}_scales"][1:] == ("U8", shape[:-1])
        scales = np.exp2(read_tensor("gpt-oss-mxfp4", f"{key}_scales").swapaxes(1, 2) - 127)
        blocks = read_tensor("gpt-oss-mxfp4", f"{key}_blocks").astype(np.uint8)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(8, exact.shape[2], -1).swapaxes(1, 2)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes < 8, 1, -1)
        np.testing.assert_array_less(np.abs(values - exact / np.repeat(scales, 32, axis=1)), 1 + 1e-6)
