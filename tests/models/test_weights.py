"""Loading of checkpoints: layouts of all parameters, and errors that are raised before a tensor is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from pallas_attn.models.checkpoints import CheckpointError, load_config, weights
from pallas_attn.models.checkpoints.files import EMBEDDING, HEAD, StoredTensor, dequantise, open_checkpoint, scale_name
from pallas_attn.models.config import GQA_PRESETS, PRESETS, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, MTPModule
from pallas_attn.models.decoder.mesh import make_mesh
from pallas_attn.models.moe.layer import MoE
from tests.kit.slow_cases import slow_cases

V3 = dataclasses.replace(PRESETS["v3-tiny"], vocab_size=48, hidden_size=32, intermediate_size=24, num_hidden_layers=2)
PREDICTING = dataclasses.replace(V3, num_nextn_predict_layers=2)
CONFIGS: dict[str, ModelConfig] = {
    "v3": V3,
    "v2": dataclasses.replace(PRESETS["v2-lite-tiny"], vocab_size=48),
    "biased, tied, nothing shared": dataclasses.replace(
        V3, attention_bias=True, tie_word_embeddings=True, n_shared_experts=0
    ),
    "dense, biased, no q_lora": dataclasses.replace(V3, q_lora_rank=None, first_k_dense_replace=9, attention_bias=True),
    "v32": dataclasses.replace(PRESETS["v32-tiny"], vocab_size=48, num_hidden_layers=2),
    "glm": dataclasses.replace(PRESETS["v32-tiny"], model_type="glm_moe_dsa", vocab_size=48, num_hidden_layers=2),
    "glm, shared": dataclasses.replace(
        PRESETS["v32-tiny"],
        model_type="glm_moe_dsa",
        vocab_size=48,
        indexer_types=("full", "shared", "full"),
        num_nextn_predict_layers=1,
    ),
    "qwen3": GQA_PRESETS["qwen3-tiny"],
    "gpt-oss": GQA_PRESETS["gpt-oss-tiny"],
    "llama, biased, tied": dataclasses.replace(
        GQA_PRESETS["qwen3-tiny"], model_type="llama", attention_bias=True, tie_word_embeddings=True
    ),
}
ROUTER = "model.layers.1.mlp.gate.weight"


def parameters(model: nnx.Module) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(p[...]) for path, p in nnx.to_flat_state(nnx.state(model))}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    weights.save_random_checkpoint(tmp_path / "model", V3, seed=3)
    return tmp_path / "model"


def rewrite(directory: Path, **changes: np.ndarray | None) -> None:
    """Add, replace or remove (None) tensors of a checkpoint."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / "model.safetensors")


def reconfigure(directory: Path, **entries: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


# The other models are slow, because v32 and v3 together have all their parameters.
@slow_cases("gpt-oss")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[pytest.mark.slow] * (name in ("v2", "glm", "glm, shared")))
        for name, config in CONFIGS.items()
    ],
)
def test_every_parameter_has_one_source(config: ModelConfig):
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.float32))
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert paths == weights.weight_sources(config).keys()
    shapes = weights.checkpoint_shapes(config)
    read = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        source = weights.weight_sources(config)[".".join(map(str, path))]
        assert source.pack(read[name] for name in source.tensors).shape == parameter.shape, path


def test_random_checkpoint_round_trip(directory: Path):
    loaded, made = parameters(weights.load_model(directory)), parameters(weights.random_model(V3, seed=3))
    assert loaded.keys() == made.keys()
    for path, value in made.items():
        np.testing.assert_array_equal(loaded[path], value, err_msg=path)


def test_different_seeds_give_different_weights():
    first, second = (weights.random_tensor(ROUTER, (4, 8), seed) for seed in (0, 1))
    assert np.all(first != second)
    assert np.all(first != weights.random_tensor("another", (4, 8), 0))


@pytest.mark.slow  # slow, because test_duplicate_tensor_is_read_from_indexed_shard loads shards
def test_sharded_checkpoint(directory: Path, tmp_path: Path):
    tensors = load_file(directory / "model.safetensors")
    parts = {f"model-{i}.safetensors": sorted(tensors)[i::3] for i in range(3)}
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((directory / "config.json").read_text())
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, sharded / file)
    places = {name: file for file, names in parts.items() for name in names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    jax.tree.map(
        np.testing.assert_array_equal,
        parameters(weights.load_model(sharded)),
        parameters(weights.load_model(directory)),
    )


def test_layouts_of_weights(directory: Path):
    """Loaded weights equal the tensors of the file: transposes, order of rotary columns, and the split of kv_b_proj."""
    ours = parameters(weights.load_model(directory))
    file = load_file(directory / "model.safetensors")
    attention, name = "layers.1.self_attn", "model.layers.1.self_attn"
    heads, nope, value = V3.num_attention_heads, V3.qk_nope_head_dim, V3.v_head_dim
    for head in range(heads):
        first = head * (nope + value)
        expand = file[f"{name}.kv_b_proj.weight"]
        np.testing.assert_array_equal(ours[f"{attention}.w_uk"][head], expand[first : first + nope])
        np.testing.assert_array_equal(ours[f"{attention}.w_uv"][head], expand[first + nope : first + nope + value])
        q, first = file[f"{name}.q_b_proj.weight"], head * V3.qk_head_dim
        rope = q[first + nope : first + V3.qk_head_dim]
        wanted = np.concatenate([q[first : first + nope], rope[0::2], rope[1::2]])
        np.testing.assert_array_equal(ours[f"{attention}.q_b_proj.weight"][:, first : first + V3.qk_head_dim], wanted.T)
    key = file[f"{name}.kv_a_proj_with_mqa.weight"][V3.kv_lora_rank :]
    np.testing.assert_array_equal(
        ours[f"{attention}.kv_a_proj_with_mqa.weight"][:, V3.kv_lora_rank :], np.concatenate([key[0::2], key[1::2]]).T
    )
    experts = "model.layers.1.mlp.experts"
    np.testing.assert_array_equal(
        ours["layers.1.mlp.gate_up_proj"][5],
        np.concatenate([file[f"{experts}.5.gate_proj.weight"], file[f"{experts}.5.up_proj.weight"]]).T,
    )


def test_default_dtype_and_float32_router(directory: Path):
    reconfigure(directory, torch_dtype="bfloat16")
    for dtype, wanted in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        model = weights.load_model(directory, dtype)
        assert model.embed_tokens.dtype == wanted
        mixture = model.layers[1].mlp
        assert isinstance(mixture, MoE)
        assert mixture.gate.weight.dtype == jnp.float32
        assert parameters(model)["layers.1.mlp.gate.e_score_correction_bias"].dtype == jnp.float32
    with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16, got float16"):
        weights.load_model(directory, jnp.float16)


def test_float16_checkpoint_as_float32_is_exact(directory: Path):
    tensors = load_file(directory / "model.safetensors")
    rewrite(directory, **{name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()})
    norm = "model.layers.0.input_layernorm.weight"
    loaded = parameters(weights.load_model(directory, jnp.float32))["layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(loaded, tensors[norm].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_all_misfits_are_named_before_reading(directory: Path, monkeypatch):
    rewrite(
        directory,
        **{
            "lm_head.weight": None,
            "model.norm.weight": np.ones(31, np.float32),
            "model.layers.0.self_attn.indexer.weight": np.ones(3, np.float32),
            ROUTER: np.ones((16, 32), np.int32),
        },
    )
    monkeypatch.setattr(StoredTensor, "read", lambda self, part: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError) as raised:
        weights.load_model(directory)
    message = str(raised.value)
    assert "\n" not in message
    assert "1 missing: lm_head.weight" in message
    assert "1 not part of the model: model.layers.0.self_attn.indexer.weight" in message
    assert "1 misshaped: model.norm.weight [31] for [32]" in message
    assert f"1 of an unsupported dtype: {ROUTER} I32" in message


def test_unused_indexers_are_not_read(tmp_path: Path):
    """Tensors of indexers in layers that share the selected keys of another layer are not read.

    Checkpoints of models that were trained with an indexer in every layer have such tensors. All other tensors are
    still required.
    """
    config = dataclasses.replace(
        PRESETS["v32-tiny"], model_type="glm_moe_dsa", vocab_size=48, num_hidden_layers=3, first_k_dense_replace=3
    )
    weights.save_random_checkpoint(tmp_path, config)
    reconfigure(tmp_path, index_topk_pattern="FSF")
    model = weights.load_model(tmp_path)
    assert [layer.shares_choice for layer in model.layers] == [False, True, False]
    shared = weights.random_model(dataclasses.replace(config, indexer_types=("full", "shared", "full")))
    for path, values in parameters(shared).items():
        np.testing.assert_array_equal(parameters(model)[path], values)
    rewrite(tmp_path, **{f"model.layers.{i}.self_attn.indexer.wk.weight": None for i in range(3)})
    with pytest.raises(
        CheckpointError, match="2 missing: model.layers.0.*, model.layers.2.self_attn.indexer.wk.weight"
    ):
        weights.load_model(tmp_path)
    rewrite(tmp_path, **{"model.layers.1.self_attn.indexers.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="1 not part of the model: model.layers.1.self_attn.indexers.weight"):
        weights.load_model(tmp_path)


def test_long_lists_of_names_are_shortened(directory: Path):
    reconfigure(directory, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"not part of the model: .* and \d+ more$"):
        weights.load_model(directory)


def test_unused_tensors_are_logged(directory: Path, caplog):
    reconfigure(directory, num_nextn_predict_layers=1, tie_word_embeddings=True)
    extra = {
        "model.layers.2.eh_proj.weight": "belongs to a multi-token prediction layer",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "follows from the rope parameters",
        HEAD: "is a copy of the embeddings",
    }
    embedding = load_file(directory / "model.safetensors")[EMBEDDING]
    rewrite(directory, **{**dict.fromkeys(extra, np.ones(3, np.float64)), HEAD: embedding})
    with caplog.at_level("INFO"):
        weights.load_model(directory)
    assert sorted(caplog.messages) == sorted(f"{name} is not loaded: it {why}" for name, why in extra.items())


def test_head_that_differs_from_the_embedding_is_used(directory: Path, caplog):
    """The output head of the files is used although config.json ties it to the embedding, as in transformers 5.23.

    The head of this test has the rows of the embedding in reverse order, so the logits are in reverse order, too.
    """
    reconfigure(directory, tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")[EMBEDDING]
    rewrite(directory, **{HEAD: None})
    tied = weights.load_model(directory)
    rewrite(directory, **{HEAD: embedding[::-1].copy()})
    untied = weights.load_model(directory)
    assert caplog.messages == [
        f"{HEAD} is used, although config.json ties it to {EMBEDDING}: the stored tensors differ"
    ]
    assert (tied.config.tie_word_embeddings, untied.config.tie_word_embeddings) == (True, False)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, V3.hidden_size)), jnp.float32)
    np.testing.assert_allclose(untied.logits(x), tied.logits(x)[:, ::-1], rtol=1e-6)
    assert weights.load_model(directory, mesh=make_mesh({"tensor": 2})).lm_head is not None


@pytest.mark.parametrize(
    ("tied", "changes", "message"),
    [
        (True, {HEAD: np.ones((48, 31), np.float32)}, r"misshaped: lm_head.weight \[48, 31\] for \[48, 32\]"),
        (True, {HEAD: np.ones((48, 32), np.float64)}, "of an unsupported dtype: lm_head.weight F64"),
        (True, {EMBEDDING: None}, "1 missing: model.embed_tokens.weight"),
        (False, {HEAD: None}, "1 missing: lm_head.weight"),
        (True, {"lm_head.bias": np.ones(48, np.float32)}, "1 not part of the model: lm_head.bias"),
        (False, {"score.weight": np.ones((2, 32), np.float32)}, "1 not part of the model: score.weight"),
        (
            False,
            {"model.layers.0.self_attn.o_proj.bias": np.ones(32, np.float32)},
            "1 not part of the model: .*o_proj.bias",
        ),
        (False, {"model.layers.1.mlp.gate.bias": np.ones(16, np.float32)}, "1 not part of the model: .*gate.bias"),
    ],
)
def test_heads_and_biases_that_do_not_fit_raise(directory: Path, tied: bool, changes: dict[str, Any], message: str):
    reconfigure(directory, tie_word_embeddings=tied)
    rewrite(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        weights.load_model(directory)


def test_undeclared_mtp_layers_raise(directory: Path):
    rewrite(directory, **{"model.layers.2.eh_proj.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"not part of the model: model.layers.2.eh_proj.weight"):
        weights.load_model(directory)


# --- multi-token prediction


@pytest.fixture
def predicting(tmp_path: Path) -> Path:
    weights.save_random_checkpoint(tmp_path, PREDICTING, seed=3)
    return tmp_path


def test_every_mtp_parameter_has_one_source():
    modules = nnx.eval_shape(
        lambda: nnx.List(
            [MTPModule(PREDICTING, i, AttentionSettings(), jnp.float32) for i in PREDICTING.mtp_layers],
        )
    )
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(modules))}
    assert paths == weights.mtp_sources(PREDICTING).keys()


def test_mtp_modules_share_embedding_and_head(predicting: Path):
    model = weights.load_model(predicting, jnp.bfloat16)
    loaded = weights.load_mtp(predicting, model)
    made = weights.random_mtp(weights.random_model(PREDICTING, seed=3, dtype=jnp.bfloat16), seed=3)
    jax.tree.map(np.testing.assert_array_equal, parameters(loaded), parameters(made))
    assert loaded.embed_tokens is model.embed_tokens
    assert loaded.lm_head is model.lm_head
    file = load_file(predicting / "model.safetensors")
    joins = [parameters(loaded)[f"depths.{k}.eh_proj.weight"] for k in (0, 1)]
    for join, i in zip(joins, (2, 3), strict=True):
        stored = file[f"model.layers.{i}.eh_proj.weight"]
        np.testing.assert_array_equal(join, stored.T.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.slow  # slow, because the test above loads prediction modules
def test_mtp_modules_are_read_only_by_load_mtp(predicting: Path, monkeypatch):
    read, names = StoredTensor.read, []
    opened = {tensor: name for name, tensor in open_checkpoint(predicting).tensors.items()}
    monkeypatch.setattr(StoredTensor, "read", lambda self, part: names.append(opened[self]) or read(self, part))
    plain = weights.load_model(predicting)
    assert set(names) == weights.checkpoint_shapes(PREDICTING).keys()
    names.clear()
    weights.load_mtp(predicting, plain)
    assert names
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.3.hnorm.weight": None}, "1 missing: model.layers.3.hnorm.weight"),
        # Slow, because test_all_misfits_are_named_before_reading tests these errors.
        pytest.param(
            {"model.layers.2.eh_proj.weight": np.ones((32, 32), np.float32)},
            "misshaped: model.layers.2.eh_proj.weight",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model.layers.2.extra": np.ones(3, np.float32)},
            "1 not part of the model: model.layers.2.extra",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model.layers.3.embed_tokens.weight": np.ones((48, 32), np.float32)},
            "model.layers.3.embed_tokens.weight: expected a copy of model.embed_tokens.weight",
            marks=pytest.mark.slow,
        ),
        (
            {"model.layers.2.shared_head.head.weight": np.ones((48, 32), ml_dtypes.bfloat16)},
            "model.layers.2.shared_head.head.weight: expected a copy of lm_head.weight",
        ),
    ],
)
def test_mtp_misfits_are_named(predicting: Path, changes: dict[str, Any], message: str):
    rewrite(predicting, **changes)
    model = weights.load_model(predicting)
    with pytest.raises(CheckpointError, match=message):
        weights.load_mtp(predicting, model)


@pytest.mark.slow
def test_mtp_copies_are_optional(predicting: Path):
    copies = [f"model.layers.{i}.{name}.weight" for i in (2, 3) for name in ("embed_tokens", "shared_head.head")]
    rewrite(predicting, **dict.fromkeys(copies))
    weights.load_mtp(predicting, weights.load_model(predicting))


@pytest.mark.slow
def test_model_without_mtp_modules_raises(predicting: Path):
    model = weights.load_model(predicting)
    reconfigure(predicting, rope_theta=5.0)
    with pytest.raises(ValueError, match=r"model: expected the one of .*, whose config.json differs from the model's"):
        weights.load_mtp(predicting, model)
    with pytest.raises(ValueError, match="num_nextn_predict_layers: expected at least 1 .*, got 0"):
        weights.random_mtp(weights.random_model(V3))
    with pytest.raises(NotImplementedError, match="a qwen3 has no modules for it"):
        weights.random_mtp(weights.random_model(GQA_PRESETS["qwen3-tiny"]))
    nothing_to_route = dataclasses.replace(V3, first_k_dense_replace=2, num_nextn_predict_layers=1, n_routed_experts=0)
    with pytest.raises(ValueError, match="n_routed_experts: expected at least 1, got 0"):
        weights.random_mtp(weights.random_model(nothing_to_route))
    vast = dataclasses.replace(V3, num_nextn_predict_layers=10_000)
    with pytest.raises(ValueError, match="num_hidden_layers: expected at most 10000, got 10002"):
        weights.random_mtp(weights.random_model(vast))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_raise(directory: Path, name: str):
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(CheckpointError, match=f"{name} may run code when read; convert"):
        weights.load_model(directory)


def test_pickle_next_to_safetensors_is_not_read(directory: Path):
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    weights.load_model(directory)


def test_missing_files_are_named(directory: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nowhere: there is no config.json"):
        weights.load_model(tmp_path / "nowhere")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json is there"):
        weights.load_model(directory)


def header(**tensor: object) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **tensor}}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header would be 0 bytes of 0"),
        (b"\xff" * 40, "its header would be"),
        ((5).to_bytes(8, "little") + b"hello", "not a safetensors file: in its header: not JSON: Expecting value"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        (header(data_offsets=[0, 80]), "lies outside the file"),
        (header(data_offsets=[8, 0]), "lies outside the file"),
        (header(data_offsets=[-8, 0]), "expected a dtype, a shape and two data_offsets"),
        (header(shape=[3]), "has 8 bytes"),
        (header(shape=["2"]), "not a safetensors file"),
        (header(data_offsets=[0]), "not a safetensors file"),
    ],
)
def test_malformed_files_raise(directory: Path, content: bytes, message: str):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not safetensors files of the directory"),
        ('{"weight_map": {"a": "shard.bin"}}', "not safetensors files of the directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: there is no such file"),
        ('{"weight_map": {"a": "shard.safetensors", "b": "shard.safetensors"}}', "do not hold: b"),
        ('{"weight_map": {}}', "missing: lm_head.weight"),
    ],
)
def test_malformed_index_raises(directory: Path, index: str, message: str):
    (directory / "model.safetensors").unlink()
    save_file({"a": np.ones(2, np.float32)}, directory / "shard.safetensors")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        weights.load_model(directory)


def test_tensors_missing_from_index_raise(directory: Path):
    (directory / "model.safetensors").rename(directory / "shard.safetensors")
    places = {"lm_head.weight": "shard.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="files hold tensors the index does not list"):
        weights.load_model(directory)


def test_duplicate_tensor_is_read_from_indexed_shard(directory: Path):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    first, second, norm = "model-1.safetensors", "model-2.safetensors", "model.norm.weight"
    save_file(tensors, directory / first)
    save_file({ROUTER: tensors[ROUTER] + 1, norm: tensors[norm]}, directory / second)
    for file, wanted in ((first, tensors[ROUTER]), (second, tensors[ROUTER] + 1)):
        places = dict.fromkeys(tensors, first) | {norm: second, ROUTER: file}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        np.testing.assert_array_equal(open_checkpoint(directory).read(ROUTER), wanted)


def test_generation_config_overrides_eos_ids(directory: Path):
    reconfigure(directory, eos_token_id=1)
    assert load_config(directory).eos_token_ids == (1,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_config(directory).eos_token_ids == (5, 6)


def quantise(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a weight in FP8 blocks. Return the stored values and the scales."""
    grid = [-(-n // b) for n, b in zip(weight.shape, block, strict=True)]
    scale, stored = np.zeros(grid, np.float32), np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = np.abs(weight[part]).max() / 448
            stored[part] = (weight[part] / scale[i, j]).astype(stored.dtype)
    return stored, scale


def test_dequantise_with_partial_blocks(rng):
    weight = rng.standard_normal((7, 10)).astype(np.float32) * np.arange(1, 8)[:, None]
    stored, scale = quantise(weight.astype(np.float32), (3, 4))
    wanted = [[float(stored[r, c]) * scale[r // 3, c // 4] for c in range(10)] for r in range(7)]
    result = dequantise(stored, scale, (3, 4))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array(wanted, np.float32))


def test_huge_blocks_allocate_no_memory(rng):
    weight, scale = rng.standard_normal((3, 5)).astype(np.float32), np.full((1, 1), 2, np.float32)
    np.testing.assert_array_equal(dequantise(weight, scale, (2**31 - 1, 2**31 - 1)), 2 * weight)


@pytest.mark.slow  # slow, because test_parity.py tests FP8 checkpoints
def test_fp8_checkpoint_equals_dequantised_checkpoint(directory: Path):
    block = (5, 12)
    tensors = load_file(directory / "model.safetensors")
    pairs = {n: quantise(t, block) for n, t in tensors.items() if "_proj" in n}
    rewrite(directory, **{name: dequantise(*pair, block) for name, pair in pairs.items()})
    twin = parameters(weights.load_model(directory))
    rewrite(
        directory,
        **{name: stored for name, (stored, _) in pairs.items()},
        **{scale_name(name): scale for name, (_, scale) in pairs.items()},
    )
    reconfigure(directory, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})
    jax.tree.map(np.testing.assert_array_equal, parameters(weights.load_model(directory)), twin)


def test_fp8_without_scales_or_config_raises(directory: Path):
    name, path = "model.layers.0.self_attn.o_proj.weight", directory / "model.safetensors"
    tensors = load_file(path)
    stored, scale = quantise(tensors[name], (128, 128))
    save_file({**tensors, name: stored}, path)
    with pytest.raises(CheckpointError, match=f"of an unsupported dtype: {name} F8_E4M3"):
        weights.load_model(directory)
    reconfigure(directory, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match=f"1 missing: {scale_name(name)}"):
        weights.load_model(directory)
    save_file({**tensors, name: stored, scale_name(name): np.repeat(scale, 2, axis=0)}, path)
    with pytest.raises(CheckpointError, match=r"misshaped: .*_scale_inv \[2, 1\] for \[1, 1\]"):
        weights.load_model(directory)
