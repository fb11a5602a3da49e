"""Compile-gate cases of the programs of engine steps: `forward`, `propose`, `sample` and `score_prompts`. Every program
except `score_prompts` must be one CUDA graph.

A bucket is the size of a step: number of decode rows, prompt tokens and drafts per row. The models have the widths of
published models and few layers: DeepSeek-V2-Lite (one dense layer, two with experts), gpt-oss-20b (with its sliding
windows or with windows per KV head), Qwen3-8B, Gemma 4 (a layer with a window and one without, for E2B also layers
without a cache) and DeepSeek-V4-Flash (a layer of each kind); for a B200 also DeepSeek-V3. Steps with Triton kernels
are compiled for an H200 and an L4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_attn import FULL
from pallas_attn.models.config import (
    GQA_PRESETS,
    PRESETS,
    DeepseekV4Config,
    Gemma4Config,
    GQAConfig,
    HeadWindows,
    ModelConfig,
)
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HASH_MOE, HCA_KIND, SCORED_MOE
from pallas_attn.models.config.windows import GLOBAL_KIND, LOCAL_KIND
from pallas_attn.models.decoder import AttentionSettings, Decoder, split_model
from pallas_attn.models.engine import DraftRows, DraftTree, NGramProposer, Proposer, Speculation
from pallas_attn.models.engine.compile_options import gpu_options
from pallas_attn.models.engine.config import Bucket, EngineConfig, RunnerConfig
from pallas_attn.models.engine.group_sizes import group_sizes
from pallas_attn.models.engine.logit_edits import EditState
from pallas_attn.models.engine.speculation import step as speculative
from pallas_attn.models.engine.speculation.step import Drafts, allocate_state, has_drafts, proposer_sizes
from pallas_attn.models.engine.step import plain
from pallas_attn.models.engine.step.layered import LayeredStep, apply_layer_range, inputs_of_range
from pallas_attn.models.engine.step.packed import PackedStep, RowParameters
from pallas_attn.models.engine.step.plain import StepOutputs
from scripts.bench.shapes import DEEPSEEK_V3, DEEPSEEK_V4_FLASH, GEMMA4_26B, GEMMA4_31B
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
KINDS: dict[str, Any] = {"layer_types": (LOCAL_KIND, GLOBAL_KIND), "num_hidden_layers": 2}
GEMMA4, GEMMA4_MOE = dataclasses.replace(GEMMA4_31B, **KINDS), dataclasses.replace(GEMMA4_26B, **KINDS)
GEMMA4_E2B = dataclasses.replace(
    GEMMA4_31B,
    hidden_size=1536,
    intermediate_size=6144,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=1,
    num_global_key_value_heads=1,
    layer_types=(LOCAL_KIND, GLOBAL_KIND) * 2,
    sliding_window=512,
    attention_k_eq_v=False,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=256,
)
V4_FLASH = dataclasses.replace(
    DEEPSEEK_V4_FLASH,
    num_hidden_layers=3,
    layer_types=(LOCAL_KIND, CSA_KIND, HCA_KIND),
    mlp_layer_types=(HASH_MOE, SCORED_MOE, SCORED_MOE),
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
def forward(
    config: ModelConfig,
    bucket: Bucket,
    settings: AttentionSettings = AttentionSettings(),
    speculate: Speculation | None = None,
    temporaries: int = 512 * 2**20,
) -> Case:
    """Return the case of the forward program of a bucket.

    `temporaries` limits its temporary memory in bytes. The default allows activations, up to the activations of all
    experts for all rows, but no copy of a cache.
    """
    model = nnx.eval_shape(lambda: Decoder(config, settings, jnp.bfloat16))
    sizes = _sizes(config, speculate)

    def call(weights: Any, caches: Any, last_tokens: Any, packed: Any, drafts: Any) -> Any:
        run, _ = split_model(model)
        function = plain.forward if speculate is None else speculative.forward
        return function(run, sizes, bucket, weights, caches, last_tokens, packed, drafts)

    return Case(
        call,
        _arguments(model, sizes, bucket) | {"drafts": _drafts(bucket, speculate)},
        cache="caches",
        donated=True,
        temporaries=temporaries,
        one_graph=True,
        output=_packed_output(config, bucket),
        options=gpu_options(bucket) | UNTIMED,
    )


@deferred
def sample(config: ModelConfig, bucket: Bucket, speculate: Speculation | None = None, *, arrays: int) -> Case:
    """Return the case of the sample program of a bucket. Its temporary memory is at most `arrays` arrays of logits."""
    sizes, num_logits = _sizes(config, speculate), SIZES.num_logits(bucket)
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16))
    of_step, moves = _arguments(model, sizes, bucket), speculate is not None and speculate.proposer.makes_trees
    rows = shape(RowParameters.size(sizes, num_logits), dtype=jnp.int32) if speculate is None else of_step["packed"]
    own: Any = (sizes,) if speculate is None else (sizes, bucket)

    def call(caches: Any, last_tokens: Any, edits: Any, outputs: Any, drafts: Any, masks: Any) -> Any:
        function: Any = plain.sample if speculate is None else speculative.sample
        return function(*own, (), caches, last_tokens, edits, outputs, drafts, masks)

    arguments = {
        "caches": of_step["caches"] if moves else (),
        "last_tokens": of_step["last_tokens"],
        "edits": jax.eval_shape(lambda: EditState.allocate(sizes.max_num_seqs, config.vocab_size)),
        "outputs": StepOutputs(rows, shape(num_logits, config.vocab_size, dtype=jnp.float32)),
        "drafts": _drafts(bucket, speculate),
        "masks": shape(num_logits, -(-config.vocab_size // 32), dtype=jnp.uint32),
    }
    # The state of the request slots is as large as the logits of 64 rows. XLA copies logits for conditionals, so copies
    # of the state can be found only in programs with fewer rows.
    cache = "caches" if moves else "edits" if num_logits < sizes.max_num_seqs else None
    return Case(
        call,
        arguments,
        cache=cache,
        donated=cache is not None,
        kernels=False,
        tensor_cores=False,
        temporaries=arrays * num_logits * config.vocab_size * 4,
        one_graph=True,
        options=gpu_options(bucket) | UNTIMED,
    )


@deferred
def propose(config: ModelConfig, bucket: Bucket, speculate: Speculation) -> Case:
    """Return the case of the program that proposes drafts."""
    sizes = _sizes(config, speculate)

    def call(last_tokens: Any, packed: Any) -> Any:
        return speculative.propose(sizes, bucket, (), last_tokens, packed)

    return Case(
        call,
        {"last_tokens": _last_tokens(config, sizes), "packed": _packed(sizes, bucket)},
        cache="last_tokens",
        donated=True,
        kernels=False,
        tensor_cores=False,
        temporaries=64 * 2**20,
        one_graph=True,
        options=gpu_options(bucket) | UNTIMED,
    )


@deferred
def score(config: ModelConfig, num_tokens: int) -> Case:
    """Return the case of the program for log probabilities of prompt tokens. Its temporary memory is at most four
    arrays of logits of 128 tokens."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16)))
    weights, structure = jax.tree.flatten(state)

    def logits_of(weights: Any, hidden: Any) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(structure, weights)).logits(hidden)

    def call(weights: Any, hidden: Any, tokens: Any) -> Any:
        return plain.score_prompts(logits_of, SIZES, weights, hidden, tokens)

    return Case(
        call,
        {
            "weights": weights,
            "hidden": shape(num_tokens, config.hidden_size),
            "tokens": shape(num_tokens, dtype=jnp.int32),
        },
        kernels=False,
        tensor_cores=False,
        temporaries=4 * 128 * config.vocab_size * 4,
        options=gpu_options(Bucket(0, num_tokens)) | UNTIMED,
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

    def call(weights: Any, caches: Any, last_tokens: Any, packed: Any) -> Any:
        x, *inputs = layered.begin(bucket, weights, caches[0], packed, last_tokens)
        kinds, own = [layer.kind for layer in layers], [layer.weights(weights) for layer in layers]
        return apply_layer_range(kinds, own, caches, x, None, *inputs_of_range(inputs, 0, is_narrow=False), {})

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
    sizes = SIZES
    if isinstance(config, DeepseekV4Config):  # pages with whole entries
        sizes = dataclasses.replace(SIZES, num_pages=8192, page_size=256, table_pages=128)
    groups = group_sizes(
        config,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        max_model_len=sizes.table_pages * sizes.page_size,
        max_num_seqs=sizes.max_num_seqs,
        step_tokens=sizes.prefill_buckets[-1],
        recycling=True,
    )
    return dataclasses.replace(sizes, groups=groups, speculate=speculate)


def _arguments(model: Decoder, sizes: RunnerConfig, bucket: Bucket) -> dict[str, Any]:
    pages = sizes.layer_pages(model.config.num_hidden_layers)
    return {
        "weights": jax.tree.leaves(nnx.state(model)),
        "caches": jax.eval_shape(lambda: model.allocate_caches(pages, sizes.page_size)),
        "last_tokens": _last_tokens(model.config, sizes),
        "packed": _packed(sizes, bucket),
    }


def _packed(sizes: RunnerConfig, bucket: Bucket) -> Any:
    return shape(PackedStep.size(sizes, bucket), dtype=jnp.int32)


def _drafts(bucket: Bucket, speculate: Speculation | None) -> Drafts | None:
    if not has_drafts(bucket):
        return None
    drafts: Any = shape(bucket.decode_rows, bucket.num_drafts, dtype=jnp.int32)
    counts: Any = shape(bucket.decode_rows, dtype=jnp.int32)
    is_tree = speculate is not None and speculate.proposer.makes_trees
    return Drafts(drafts, counts, drafts if is_tree else None)


def _packed_output(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Return the shape of the attention output of the last layer of a step with decode rows and prompt chunks; () if it
    need not be checked.

    The kernels of decode rows and of chunks write parts of one array, so XLA has nothing to concatenate. Models with
    latents are not checked: XLA fuses their concatenation with the GEMMs and merges that follow the kernels. If the
    last layer is applied only to tokens with logits, it has no chunks.
    """
    has_both = bucket.decode_rows and bucket.prefill_tokens and not bucket.skips_layers
    if not isinstance(config, GQAConfig | Gemma4Config) or not has_both:
        return ()
    tokens = bucket.decode_rows * (1 + bucket.num_drafts) + bucket.prefill_tokens
    return tokens, config.num_attention_heads, config.kv_heads(config.num_hidden_layers - 1).width


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


DECODE, MIXED, CASCADE = Bucket(64, 0), Bucket(64, 2048), Bucket(64, 0, cascade=True)
DRAFTS, NGRAM, TREE = Bucket(64, 0, num_drafts=4), Speculation(NGramProposer(), 4), Speculation(Forking(), 4)
ENGINE = {
    "engine-decode": forward(V2_LITE, DECODE),
    "engine-one-row": forward(V2_LITE, Bucket(1, 0)),
    "engine-mixed": forward(V2_LITE, MIXED),
    "engine-few-prompts": forward(V2_LITE, Bucket(64, 512)),
    "engine-piece": first_layers(V2_LITE, MIXED, 2),
    "engine-gpt-oss-piece": first_layers(GPT_OSS, MIXED, 2),
    "engine-gpt-oss-decode": forward(GPT_OSS, DECODE),
    "engine-gpt-oss-cascade": forward(GPT_OSS, CASCADE),
    "engine-gpt-oss-mixed": forward(GPT_OSS, MIXED),
    "engine-head-windows-mixed": forward(dataclasses.replace(GPT_OSS, windows=(HEADS, None)), MIXED),
    "engine-drafts": forward(V2_LITE, DRAFTS, speculate=NGRAM),
    "engine-tree": forward(V2_LITE, DRAFTS, speculate=TREE),
    "engine-qwen3-tree": forward(QWEN3, DRAFTS, speculate=TREE),
    "engine-gpt-oss-drafts": forward(GPT_OSS, DRAFTS, speculate=NGRAM),
    "engine-batch-invariant": forward(V2_LITE, Bucket(64, 448), AttentionSettings(batch_invariant=True)),
    "engine-gpt-oss-batch-invariant": forward(GPT_OSS, Bucket(64, 448), AttentionSettings(batch_invariant=True)),
    "engine-gemma4-decode": forward(GEMMA4, DECODE),
    "engine-gemma4-mixed": forward(GEMMA4, MIXED),
    "engine-gemma4-drafts": forward(GEMMA4, DRAFTS, speculate=NGRAM),
    "engine-gemma4-shared-mixed": forward(GEMMA4_E2B, dataclasses.replace(MIXED, skips_layers=True)),
    "engine-gemma4-moe-decode": forward(GEMMA4_MOE, DECODE),
    "engine-gemma4-moe-mixed": forward(GEMMA4_MOE, MIXED),
    "engine-v4-decode": forward(V4_FLASH, DECODE),
    "engine-v4-mixed": forward(V4_FLASH, MIXED),
    "engine-v4-drafts": forward(V4_FLASH, DRAFTS, speculate=NGRAM),
    # Sampling takes up to seven arrays of logits: copies for conditionals, edited, and four to draw.
    "engine-sample-one-row": sample(V2_LITE, Bucket(1, 0), arrays=6),
    "engine-sample": sample(V2_LITE, DECODE, arrays=6),
    "engine-gpt-oss-sample": sample(GPT_OSS, DECODE, arrays=6),
    "engine-sample-drafts": sample(V2_LITE, DRAFTS, NGRAM, arrays=6),
    "engine-sample-tree": sample(V2_LITE, DRAFTS, TREE, arrays=6),
    "engine-gpt-oss-sample-drafts": sample(GPT_OSS, DRAFTS, NGRAM, arrays=7),
    "engine-propose": propose(V2_LITE, DRAFTS, NGRAM),
    "engine-propose-tree": propose(V2_LITE, DRAFTS, TREE),
    "engine-score": score(V2_LITE, 2048),
}
MODELS = {"v2-lite": V2_LITE, "v3": DEEPSEEK_V3, "qwen3": QWEN3, "gpt-oss": GPT_OSS}
BUCKETS = EngineConfig(num_pages=32768, page_size=64, max_num_seqs=64, max_batched_tokens=2048).runner_config(2**15)
SMALL_QWEN3 = dataclasses.replace(QWEN3, vocab_size=4096, intermediate_size=4096, num_hidden_layers=1)
IN_TRITON = AttentionSettings(implementation="triton")
TRITON_ENGINE = {
    name: case.replace(kernels=False, tensor_cores=False)
    for name, case in {
        "engine-triton-decode": forward(SMALL_QWEN3, DECODE, IN_TRITON),
        "engine-triton-mixed": forward(QWEN3, MIXED, IN_TRITON),
        "engine-triton-gemma4-decode": forward(GEMMA4, DECODE, IN_TRITON),
        "engine-triton-gemma4-mixed": forward(GEMMA4, MIXED, IN_TRITON),
        "engine-triton-gemma4-drafts": forward(GEMMA4, DRAFTS, IN_TRITON, NGRAM),
        "engine-triton-v4-decode": forward(V4_FLASH, DECODE, IN_TRITON),
        "engine-triton-v4-mixed": forward(V4_FLASH, MIXED, IN_TRITON),
        "engine-triton-v4-drafts": forward(V4_FLASH, DRAFTS, IN_TRITON, NGRAM),
    }.items()
} | {
    f"sm89-engine-{name}": case.replace(kernels=False, tensor_cores=False, card="L4")
    for name, case in {
        "v2-lite-decode": forward(V2_LITE, DECODE, IN_TRITON),
        "v2-lite-mixed": forward(V2_LITE, MIXED, IN_TRITON),
        "gpt-oss-decode": forward(GPT_OSS, DECODE, IN_TRITON),
        "gpt-oss-mixed": forward(GPT_OSS, MIXED, IN_TRITON),
        "qwen3-decode": forward(QWEN3, DECODE, IN_TRITON),
    }.items()
}
SM100_ENGINE = on_b200(
    {name: ENGINE[name] for name in ("engine-head-windows-mixed", "engine-drafts", "engine-gpt-oss-drafts")}
    | {
        f"engine-{name}-{bucket.decode_rows}-{bucket.prefill_tokens}": forward(config, bucket, temporaries=2**30)
        for name, config in MODELS.items()
        for bucket in BUCKETS.buckets()
    }
    | {f"engine-{name}-sample": sample(config, DECODE, arrays=6) for name, config in MODELS.items()}
)
"""Programs for a B200, including every bucket of an engine with default buckets for each of `MODELS`."""
