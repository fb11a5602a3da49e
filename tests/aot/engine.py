"""Compile-gate cases of whole engine steps. Every step must be one CUDA graph.

A bucket is the size of a step: number of decode rows, prompt tokens and drafts per row. The models have the widths of
published models and few layers: DeepSeek-V2-Lite (one dense layer, two with experts), gpt-oss-20b (with its sliding
windows or with windows per KV head) and Qwen3-8B; for a B200 also DeepSeek-V3. Steps with Triton kernels are compiled
for an H200 and an L4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_attn import FULL
from pallas_attn.models.config import GQA_PRESETS, PRESETS, GQAConfig, HeadWindows, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, split_model
from pallas_attn.models.engine import DraftRows, DraftTree, NGramProposer, Proposer, Speculation
from pallas_attn.models.engine.compile_options import gpu_options
from pallas_attn.models.engine.config import Bucket, EngineConfig, RunnerConfig
from pallas_attn.models.engine.group_sizes import group_sizes
from pallas_attn.models.engine.logit_edits import EditState
from pallas_attn.models.engine.speculation.step import allocate_state, proposer_sizes, run_speculative_step
from pallas_attn.models.engine.step.layered import LayeredStep, apply_layer_range
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import run_step
from scripts.bench.shapes import DEEPSEEK_V3
from tests.aot.case import Case, deferred, on_b200, shape

V2_LITE = dataclasses.replace(PRESETS["v2-lite"], num_hidden_layers=3)
GPT_OSS = dataclasses.replace(GQA_PRESETS["gpt-oss-20b"], num_hidden_layers=2, windows=(128, None))
QWEN3 = dataclasses.replace(
    GQA_PRESETS["qwen3-tiny"],
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
HEADS = HeadWindows((FULL,) * 2 + (4096,) * 6, (0,) * 2 + (64,) * 6)

UNTIMED: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""XLA options for compilation without a GPU. XLA's Triton GEMMs are off, because XLA must time their tile sizes on a
GPU.
"""

SIZES = RunnerConfig(
    num_pages=32768,
    page_size=64,
    table_pages=512,
    max_num_seqs=64,
    max_prefill_seqs=8,
    decode_buckets=(64,),
    prefill_buckets=(2048,),
)


@deferred
def step(
    config: ModelConfig,
    bucket: Bucket,
    settings: AttentionSettings = AttentionSettings(),
    speculate: Speculation | None = None,
    temporaries: int = 512 * 2**20,
) -> Case:
    """Return the case of the step of a bucket.

    `temporaries` limits its temporary memory in bytes. The default allows activations, up to the activations of all
    experts for all rows, but no copy of a cache.
    """
    model = nnx.eval_shape(lambda: Decoder(config, settings, jnp.bfloat16))
    sizes = _sizes(config, speculate)
    arguments = _arguments(model, sizes, bucket)

    def call(weights: Any, caches: Any, last_tokens: Any, packed: Any, edits: Any, masks: Any) -> Any:
        (run, _), state = split_model(model), (caches, last_tokens, packed, edits, masks)
        if speculate is not None:
            return run_speculative_step(run, sizes, bucket, (weights, ()), *state)
        return run_step(run, sizes, bucket, weights, *state)

    return Case(
        call,
        arguments,
        cache="caches",
        donated=True,
        temporaries=temporaries,
        one_graph=True,
        output=_packed_output(config, bucket),
        options=gpu_options(bucket) | UNTIMED,
    )


@deferred
def first_layers(config: ModelConfig, bucket: Bucket, num_programs: int) -> Case:
    """Return the case of the first of `num_programs` programs into which `LayeredStep` splits the layers of a step.

    The program also includes `LayeredStep.begin`, which computes the inputs that all layers share, such as plans. A
    program without it would have plans as arguments, whose shapes depend on the GPU.
    """
    model, sizes = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16)), _sizes(config)
    layered = LayeredStep(model, sizes, num_programs)
    layers, arguments = layered.layers[: layered.layer_ranges[0].stop], _arguments(model, sizes, bucket)
    arguments["caches"] = arguments["caches"][: len(layers)]
    del arguments["edits"], arguments["masks"]  # sampling is in another program

    def call(weights: Any, caches: Any, last_tokens: Any, packed: Any) -> Any:
        x, *shared = layered.begin(bucket, weights, caches[0], packed, last_tokens)
        kinds, own = [layer.kind for layer in layers], [layer.weights(weights) for layer in layers]
        return apply_layer_range(kinds, own, caches, x, None, *shared)

    return Case(
        call,
        arguments,
        cache="caches",
        donated=True,
        temporaries=512 * 2**20,
        one_graph=True,
        output=_packed_output(config, bucket),
        options=gpu_options() | UNTIMED,
    )


def _sizes(config: ModelConfig, speculate: Speculation | None = None) -> RunnerConfig:
    groups = group_sizes(
        config,
        num_pages=SIZES.num_pages,
        page_size=SIZES.page_size,
        max_model_len=SIZES.table_pages * SIZES.page_size,
        max_num_seqs=SIZES.max_num_seqs,
        step_tokens=SIZES.prefill_buckets[-1],
        recycling=True,
    )
    return dataclasses.replace(SIZES, groups=groups, speculate=speculate)


def _arguments(model: Decoder, sizes: RunnerConfig, bucket: Bucket) -> dict[str, Any]:
    pages = sizes.layer_pages(model.config.num_hidden_layers)
    return {
        "weights": jax.tree.leaves(nnx.state(model)),
        "caches": jax.eval_shape(lambda: model.allocate_caches(pages, sizes.page_size)),
        "last_tokens": _last_tokens(model.config, sizes),
        "packed": shape(PackedStep.size(sizes, bucket), dtype=jnp.int32),
        "edits": jax.eval_shape(lambda: EditState.allocate(sizes.max_num_seqs, model.config.vocab_size)),
        "masks": shape(sizes.num_rows(bucket), -(-model.config.vocab_size // 32), dtype=jnp.uint32),
    }


def _packed_output(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Return the shape of the attention output of a step with decode rows and prompt chunks; () if it need not be
    checked.

    The kernels of decode rows and of chunks write parts of one array, so XLA has nothing to concatenate. Models with
    latents are not checked: XLA fuses their concatenation with the GEMMs and merges that follow the kernels.
    """
    if not isinstance(config, GQAConfig) or not (bucket.decode_rows and bucket.prefill_tokens):
        return ()
    tokens = bucket.decode_rows * (1 + bucket.num_drafts) + bucket.prefill_tokens
    return tokens, config.num_attention_heads, config.head_dim


def _last_tokens(config: ModelConfig, sizes: RunnerConfig) -> Any:
    if sizes.speculate is None:
        return shape(sizes.max_num_seqs, dtype=jnp.int32)
    proposer = sizes.speculate.proposer
    return jax.eval_shape(lambda: allocate_state(proposer, proposer_sizes(sizes, config.num_hidden_layers)))


class Forking(Proposer):
    """Proposer of draft trees for compilation. Every draft is the newest token. The first two drafts are roots; draft i
    has the parent i - 2.
    """

    makes_trees = True

    def propose(self, weights: Any, state: Any, rows: DraftRows, num_drafts: int) -> tuple[DraftTree, Any]:
        tokens = jnp.repeat(rows.tokens[:, None], num_drafts, axis=1)
        parents = jnp.maximum(jnp.arange(num_drafts, dtype=jnp.int32) - 2, -1)
        return DraftTree(tokens, jnp.broadcast_to(parents, tokens.shape)), state


DECODE, MIXED = Bucket(64, 0), Bucket(64, 2048)
DRAFTS, NGRAM, TREE = Bucket(64, 0, num_drafts=4), Speculation(NGramProposer(), 4), Speculation(Forking(), 4)
ENGINE = {
    "engine-decode": step(V2_LITE, DECODE),
    "engine-one-row": step(V2_LITE, Bucket(1, 0)),
    "engine-mixed": step(V2_LITE, MIXED),
    "engine-few-prompts": step(V2_LITE, Bucket(64, 512)),
    "engine-piece": first_layers(V2_LITE, MIXED, 2),
    "engine-gpt-oss-piece": first_layers(GPT_OSS, MIXED, 2),
    "engine-gpt-oss-decode": step(GPT_OSS, DECODE),
    "engine-gpt-oss-mixed": step(GPT_OSS, MIXED),
    "engine-head-windows-mixed": step(dataclasses.replace(GPT_OSS, windows=(HEADS, None)), MIXED),
    # Verifying drafts takes up to six arrays of logits, each with 320 rows in float32: model's, edited, four to draw.
    "engine-drafts": step(V2_LITE, DRAFTS, speculate=NGRAM, temporaries=768 * 2**20),
    "engine-tree": step(V2_LITE, DRAFTS, speculate=TREE, temporaries=768 * 2**20),
    "engine-qwen3-tree": step(QWEN3, DRAFTS, speculate=TREE, temporaries=1280 * 2**20),
    "engine-gpt-oss-drafts": step(GPT_OSS, DRAFTS, speculate=NGRAM, temporaries=1664 * 2**20),
    "engine-batch-invariant": step(V2_LITE, Bucket(64, 448), AttentionSettings(batch_invariant=True)),
    "engine-gpt-oss-batch-invariant": step(GPT_OSS, Bucket(64, 448), AttentionSettings(batch_invariant=True)),
}
MODELS = {"v2-lite": V2_LITE, "v3": DEEPSEEK_V3, "qwen3": QWEN3, "gpt-oss": GPT_OSS}
BUCKETS = EngineConfig(num_pages=32768, page_size=64, max_num_seqs=64, max_batched_tokens=2048).runner_config(2**15)
SMALL_QWEN3 = dataclasses.replace(QWEN3, vocab_size=4096, intermediate_size=4096, num_hidden_layers=1)
IN_TRITON = AttentionSettings(implementation="triton")
TRITON_ENGINE = {
    name: case.replace(kernels=False, tensor_cores=False)
    for name, case in {
        "engine-triton-decode": step(SMALL_QWEN3, DECODE, IN_TRITON),
        "engine-triton-mixed": step(QWEN3, MIXED, IN_TRITON),
    }.items()
} | {
    f"sm89-engine-{name}": case.replace(kernels=False, tensor_cores=False, card="L4")
    for name, case in {
        "v2-lite-decode": step(V2_LITE, DECODE, IN_TRITON),
        "v2-lite-mixed": step(V2_LITE, MIXED, IN_TRITON),
        "gpt-oss-decode": step(GPT_OSS, DECODE, IN_TRITON),
        "gpt-oss-mixed": step(GPT_OSS, MIXED, IN_TRITON),
        "qwen3-decode": step(QWEN3, DECODE, IN_TRITON),
    }.items()
}
SM100_ENGINE = on_b200(
    {name: ENGINE[name] for name in ("engine-head-windows-mixed", "engine-drafts", "engine-gpt-oss-drafts")}
    | {
        f"engine-{name}-{bucket.decode_rows}-{bucket.prefill_tokens}": step(config, bucket, temporaries=2**30)
        for name, config in MODELS.items()
        for bucket in BUCKETS.buckets()
    }
)
"""Steps for a B200, including every bucket of an engine with default buckets for each of `MODELS`."""
