"""The prediction module of DeepSeek-V4: a float64 computation of its logits, and drafts in the engine."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import files, load_mtp, random_model, random_mtp, save_random_checkpoint
from pallas_attn.models.cli.decode import command
from pallas_attn.models.config import V4_PRESETS, DeepseekV4Config
from pallas_attn.models.decoder import V4MTP, GroupTables, StepMetadata, split_model, split_module
from pallas_attn.models.engine import Engine, EngineConfig, MTPProposer, Speculation
from tests.models.test_deepseek_v4 import MAX_LEN, config_of, expect_golden, golden, loaded, run
from tests.models.test_parity import GOLDENS

NAME = "v4-published"
TINY = dataclasses.replace(V4_PRESETS["v4-tiny"], num_nextn_predict_layers=1)


@functools.cache
def module() -> V4MTP:
    mtp = load_mtp(GOLDENS / NAME, loaded(NAME))
    assert isinstance(mtp, V4MTP)
    return mtp


class Oracle:
    """Prediction module in float64, without a cache, from the tensors of a checkpoint."""

    def __init__(self, config: DeepseekV4Config):
        self.config, checkpoint = config, files.open_checkpoint(GOLDENS / NAME)
        self.read = lambda name: np.asarray(checkpoint.read(name), np.float64)

    def weight(self, name: str) -> np.ndarray:
        return self.read(f"mtp.0.{name}.weight")

    def rms(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps)

    def logits(self, streams: np.ndarray, next_tokens: list[int]) -> np.ndarray:
        """Return the logits of each position, given the streams [T, N, D] of the decoder."""
        embedded = self.read("embed.weight")[next_tokens]
        x = (self.rms(embedded) * self.weight("enorm")) @ self.weight("e_proj").T
        x = x[:, None] + (self.rms(streams) * self.weight("hnorm")) @ self.weight("h_proj").T
        for site, sublayer in (("attn", self.attention), ("ffn", self.experts)):
            pre, post, mix = self.connection(x, site)
            h = self.rms(np.einsum("tn,tnd->td", pre, x)) * self.weight(f"{site}_norm")
            x = post[..., None] * sublayer(h)[:, None] + np.einsum("tij,tid->tjd", mix, x)
        z = self.rms(x.reshape(len(x), -1)) @ self.read("mtp.0.hc_head_fn").T
        pre = self.sigmoid(z * self.read("mtp.0.hc_head_scale") + self.read("mtp.0.hc_head_base")) + self.config.hc_eps
        final = self.rms(np.einsum("tn,tnd->td", pre, x)) * self.weight("norm")
        return final @ self.read("head.weight").T

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def connection(self, x: np.ndarray, site: str) -> tuple[np.ndarray, ...]:
        n, eps = self.config.hc_mult, self.config.hc_eps
        fn, base, scale = (self.read(f"mtp.0.hc_{site}_{part}") for part in ("fn", "base", "scale"))
        z = self.rms(x.reshape(len(x), -1)) @ fn.T
        pre = self.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * self.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        mix = np.exp((z[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n))
        mix = mix / mix.sum(2, keepdims=True) + eps
        mix = mix / (mix.sum(1, keepdims=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(2, keepdims=True) + eps)
            mix = mix / (mix.sum(1, keepdims=True) + eps)
        return pre, post, mix

    def rotate(self, x: np.ndarray, sign: int = 1) -> np.ndarray:
        width = self.config.qk_rope_head_dim
        angles = np.arange(len(x))[:, None] * self.config.rope_theta ** (-np.arange(0, width, 2) / width)
        angles = (sign * angles).reshape(len(x), *[1] * (x.ndim - 2), -1)
        y = x.copy()
        first, second = x[..., -width::2], x[..., -width + 1 :: 2]
        y[..., -width::2] = first * np.cos(angles) - second * np.sin(angles)
        y[..., -width + 1 :: 2] = second * np.cos(angles) + first * np.sin(angles)
        return y

    def attention(self, h: np.ndarray) -> np.ndarray:
        config, of = self.config, lambda name: self.weight(f"attn.{name}")
        residual = self.rms(h @ of("wq_a").T) * of("q_norm")
        q = (residual @ of("wq_b").T).reshape(len(h), config.num_attention_heads, config.head_dim)
        q, kv = self.rotate(self.rms(q)), self.rotate(self.rms(h @ of("wkv").T) * of("kv_norm"))
        distance = np.arange(len(h))[:, None] - np.arange(len(h))
        seen = (distance >= 0) & (distance < config.sliding_window)
        weights = np.exp(np.einsum("thd,sd->ths", q, kv) * config.head_dim**-0.5) * seen[:, None]
        weights = weights / (weights.sum(2, keepdims=True) + np.exp(self.read("mtp.0.attn.attn_sink"))[None, :, None])
        out = self.rotate(np.einsum("ths,sd->thd", weights, kv), -1).reshape(len(h), config.o_groups, -1)
        matrices = of("wo_a").reshape(config.o_groups, config.o_lora_rank, -1)
        return np.einsum("tgi,goi->tgo", out, matrices).reshape(len(h), -1) @ of("wo_b").T

    def experts(self, h: np.ndarray) -> np.ndarray:
        config, limit = self.config, self.config.swiglu_limit

        def expert(x: np.ndarray, name: str) -> np.ndarray:
            gate, up = (x @ self.weight(f"ffn.{name}.{part}").T for part in ("w1", "w3"))
            gate = np.minimum(gate, limit)
            return (gate * self.sigmoid(gate) * np.clip(up, -limit, limit)) @ self.weight(f"ffn.{name}.w2").T

        scores = np.sqrt(np.log1p(np.exp(h @ self.weight("ffn.gate").T)))
        y = expert(h, "shared_experts")
        for t, row in enumerate(scores + self.read("mtp.0.ffn.gate.bias")):
            chosen = np.argsort(-row)[: config.num_experts_per_tok]
            shares = scores[t, chosen] / scores[t, chosen].sum() * config.routed_scaling_factor
            y[t] += sum(share * expert(h[t], f"experts.{e}") for share, e in zip(shares, chosen, strict=True))
        return y


def _ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


@pytest.mark.parametrize("of_decoder", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_equal_a_float64_computation(of_decoder: bool):
    """Prompt of 40 tokens, longer than the window, in two chunks. The hidden states are random, or the decoder's."""
    decoder, prompt, size = loaded(NAME), golden(NAME).prompts[1][:41], 128
    group = GroupTables(_ints(np.arange(40)), jnp.zeros((0, 1), jnp.int32), _ints([[0]]))

    def metadata(start: int, stop: int) -> StepMetadata:
        return StepMetadata(
            positions=_ints(np.arange(start, stop)),
            groups=(dataclasses.replace(group, slots=_ints(np.arange(start, stop))),),
            decode_kv_lens=_ints([]),
            cu_q_lens=_ints([0, stop - start]),
            prefill_kv_lens=_ints([stop]),
            logit_rows=_ints(np.arange(stop - start)),
        )

    hidden: Any = np.random.default_rng(0).standard_normal((40, 4 * 32)).astype(np.float32)
    if of_decoder:
        stepping, weights = split_model(decoder)
        with_hidden = jax.jit(functools.partial(stepping, return_hidden=True))
        logits, _, hidden = with_hidden(weights, _ints(prompt[:40]), decoder.allocate_caches(1, size), metadata(0, 40))
        np.testing.assert_allclose(logits, golden(NAME)["logits"][1][:40], atol=1e-4)
    assert hidden.shape == (40, decoder.hidden_width) == (40, 4 * 32)
    rebuild, of_module = split_module(module())

    @jax.jit
    def predict(weights: Any, tokens: Any, hidden: Any, caches: Any, metadata: StepMetadata) -> tuple[Any, Any]:
        out, caches = rebuild(weights)(tokens, hidden, caches, metadata)
        return rebuild(weights).logits(out), caches

    caches, found = module().allocate_caches(1, size), []
    for start, stop in ((0, 20), (20, 40)):
        tokens = _ints(prompt[start + 1 : stop + 1])
        out, caches = predict(of_module, tokens, hidden[start:stop], caches, metadata(start, stop))
        found.append(out)
    streams = np.asarray(hidden, np.float64).reshape(40, 4, -1)
    wanted = Oracle(config_of(NAME)).logits(streams, prompt[1:])
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-4)


@pytest.mark.slow
def test_drafts_of_the_module_change_no_token():
    drafts = Speculation(MTPProposer(module()), 2, adaptive=False)
    sizes = EngineConfig(num_pages=8, page_size=128, max_batched_tokens=48, max_num_seqs=2, speculate=drafts)
    _, outputs = run(loaded(NAME), sizes, golden(NAME).prompts)
    expect_golden(NAME, outputs)
    assert sum(sum(output.drafted) for output in outputs) > 0


def test_trees_of_drafts_are_not_supported():
    drafts = Speculation(MTPProposer(module(), alternatives=2), 4, adaptive=False)
    sizes = EngineConfig(num_pages=8, page_size=128, max_batched_tokens=48, max_num_seqs=2, speculate=drafts)
    with pytest.raises(NotImplementedError, match="tree of drafts"):
        Engine(loaded(NAME), dataclasses.replace(sizes, max_model_len=MAX_LEN))


def test_saved_random_module_is_the_random_module(tmp_path: Path):
    config = dataclasses.replace(TINY, vocab_size=64)
    save_random_checkpoint(tmp_path, config, seed=3)
    decoder = random_model(config, seed=3)
    one, other = load_mtp(tmp_path, decoder), random_mtp(decoder, seed=3)
    hidden = jnp.ones((2, decoder.hidden_width))
    np.testing.assert_array_equal(one.logits(hidden), other.logits(hidden))


def test_model_without_a_module_raises():
    with pytest.raises(ValueError, match="num_nextn_predict_layers: expected at least 1"):
        random_mtp(random_model(dataclasses.replace(TINY, vocab_size=64, num_nextn_predict_layers=0)))


@pytest.mark.slow
def test_command_drafts_with_the_module(tmp_path: Path):
    out = tmp_path / "out.json"
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(golden("v4").prompts))
    sizes = ["--num-pages", "40", "--max-batched-tokens", "16", "--max-num-seqs", "4", "--max-tokens", "24"]
    arguments = ["--random", "v4-tiny", *sizes, "--prompt-ids", str(ids), "--speculate", "mtp:2", "--verify"]
    assert command.main([*arguments, "--json", str(out)]) == 0
