"""Implementations of attention operations that a model uses, by its settings and by the device."""

import dataclasses
from types import SimpleNamespace

import pytest

from pallas_attn.models.config import PRESETS
from pallas_attn.models.decoder import AttentionSettings, explain_attention
from pallas_attn.models.engine import EngineConfig
from pallas_attn.runtime import device, kernel_cache
from pallas_attn.triton import launch
from scripts.bench.shapes import DEEPSEEK_V3
from tests.aot import engine
from tests.kit.slow_cases import slow_cases

CONFIG = PRESETS["v3-tiny"]
LARGE = EngineConfig(num_pages=64, page_size=64, max_batched_tokens=512, max_num_seqs=64)
SIZES_OF_PAGES_OF_64 = LARGE.runner_config(4096).largest_step
SIZES = EngineConfig(num_pages=8, page_size=4, max_batched_tokens=8, max_num_seqs=2).runner_config(64).largest_step


def chosen(dtype="float32", **settings):
    explained = explain_attention(CONFIG, AttentionSettings(**settings), SIZES, dtype)
    return {op: explanation.chosen for op, explanation in explained.items()}


@pytest.mark.parametrize(
    ("mla", "ops"),
    [
        ("auto", ["write_latent", "mla_decode", "gather_latent", "ragged_attention"]),
        ("absorb", ["write_latent", "mla_decode"]),
        ("expand", ["write_latent", "gather_latent", "ragged_attention"]),
    ],
)
def test_mla_setting_determines_operations(mla, ops):
    assert list(chosen(mla=mla)) == ops


@pytest.mark.parametrize(
    ("changes", "batch_invariant", "ops"),
    [
        ({"index_topk": 31}, False, ["index_top_k", "mla_sparse", "mla_decode", "gather_latent", "ragged_attention"]),
        ({"index_topk": 32}, False, ["mla_decode", "gather_latent", "ragged_attention"]),
        ({"index_topk": 32}, True, ["index_top_k", "mla_sparse"]),
    ],
)
def test_operations_of_sparse_attention(changes, batch_invariant, ops):
    settings = AttentionSettings(batch_invariant=batch_invariant, implementation="xla")
    config = dataclasses.replace(PRESETS["v32-tiny"], **changes)
    explained = explain_attention(config, settings, SIZES, "float32")
    assert list(explained) == ["write_latent", "write_index_keys", *ops]
    assert {explanation.chosen for explanation in explained.values()} == {"xla"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["xla", "reference"])
def test_named_implementation_is_used(name, dtype):
    assert set(chosen(dtype, implementation=name).values()) == {name}


def test_implementations_are_tried_in_order():
    assert set(chosen(implementation=("reference", "xla")).values()) == {"reference"}


@pytest.mark.parametrize("name", ["NVIDIA L4", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 5090"])
def test_demo_uses_triton_without_hopper(name, monkeypatch, compiled_triton):
    """On GPUs other than Hopper, all attention operations of the demo's bfloat16 model use Triton.

    `make demo CUDA=13` runs the demo. This test compiles nothing; the compile gate (`make test-aot`) compiles every
    kernel.
    """
    card = SimpleNamespace(platform="cuda", device_kind=name, core_count=58)
    monkeypatch.setattr(device, "_traced_device", lambda: card)
    monkeypatch.setattr(launch, "compiled", lambda *_: launch.CompiledKernel("kernel", "", 0))
    monkeypatch.setattr(launch, "encoded_call", lambda *_: b"")
    assert chosen("bfloat16") == dict.fromkeys(chosen("bfloat16"), "triton")


@slow_cases("gpt-oss")
@pytest.mark.parametrize(
    "config",
    [DEEPSEEK_V3, engine.GPT_OSS, *(pytest.param(c, marks=pytest.mark.slow) for c in (engine.V2_LITE, engine.QWEN3))],
    ids=["v3", "gpt-oss", "v2-lite", "qwen3"],
)
def test_b200_uses_mosaic(config, monkeypatch):
    """On a B200, all attention operations use the Mosaic kernels.

    The test only describes the device. The compile gate (`make test-aot`) compiles every engine bucket for a B200.
    """
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, "0")
    sizes = {"core_count": 148, "shared_memory_per_block_optin": 227 * 1024}
    card = SimpleNamespace(platform="cuda", device_kind="NVIDIA B200", compute_capability="10.0", **sizes)
    monkeypatch.setattr(device, "_traced_device", lambda: card)
    explained = explain_attention(config, AttentionSettings(), SIZES_OF_PAGES_OF_64, "bfloat16")
    assert {op: explanation.chosen for op, explanation in explained.items()} == dict.fromkeys(explained, "mosaic")


def test_unsupported_implementation_has_reason():
    explained = explain_attention(CONFIG, AttentionSettings(implementation="mosaic"), SIZES, "float32")
    assert all(explanation.chosen is None and "mosaic" in explanation.refused for explanation in explained.values())


def test_unknown_implementation_raises():
    with pytest.raises(ValueError, match="implementation"):
        chosen(implementation="cuda")
