"""A small model for tests of the engine, prompts with common prefixes, and the expected tokens.

The model compiles in seconds. Expected tokens come from a plain run, which has no cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import DeepSeekConfig, YarnConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, PlainRun, SamplingParams

MAX_TOKENS = 20
VOCAB_SIZE = 64

CONFIG = DeepSeekConfig(
    model_type="deepseek_v3",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    yarn=YarnConfig(factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7),
    max_position_embeddings=128,
)

SPARSE = dataclasses.replace(
    CONFIG,
    model_type="glm_moe_dsa",
    index_topk=12,
    index_n_heads=4,
    index_head_dim=12,
    indexer_types=("full", "shared"),
)
"""Model with sparse attention. Tokens select 12 keys, fewer than most prompts have. The first layer has an indexer; the
second layer has none and attends to the keys that the first layer selected.
"""

_PREFIX = [7, 3, 60, 22, 41, 9, 18, 33, 50, 2, 11, 28, 5, 44, 37, 16, 29, 8, 55, 13]

PROMPTS = (
    [*_PREFIX, 1],
    [*_PREFIX, 1, 2, 3, 4, 5, 6],
    [*_PREFIX[:16], 40, 41, 42],
    [5],
    [9, 8, 7, 6, 5, 4, 3, 2, 1, 0] * 5,
    _PREFIX * 2,
)

DRAWN = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_k=20, top_p=0.95, seed=11)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)

ENGINES = {
    "ample": EngineConfig(num_pages=96, page_size=4, max_batched_tokens=16, max_num_seqs=4),
    "short of pages": EngineConfig(num_pages=12, page_size=8, max_batched_tokens=16, max_num_seqs=4),
    "short, uncached": EngineConfig(
        num_pages=24, page_size=4, max_batched_tokens=16, max_num_seqs=4, prefix_caching=False
    ),
    "unchunked": EngineConfig(num_pages=64, page_size=4, max_batched_tokens=64, max_num_seqs=4, chunked_prefill=False),
    "one at a time": EngineConfig(num_pages=96, page_size=1, max_batched_tokens=7, max_num_seqs=1),
}
"""Engine sizes that cause different prompt chunks, prefix-cache hits and preemptions."""


QUICK = AttentionSettings(implementation="reference")
"""Settings with the attention implementation that compiles fastest, for tests of other parts of the engine."""


@functools.cache
def model() -> Decoder:
    return random_model(CONFIG, seed=3, settings=QUICK)


@functools.cache
def engine(name: str) -> Engine:
    """Return the engine `ENGINES[name]`, which tests share because its compilation takes longer than a test. A test
    must not leave unfinished requests in it.
    """
    return Engine(model(), padded(ENGINES[name]))


def padded(config: EngineConfig) -> EngineConfig:
    """Return the configuration with one bucket of decode rows and one of prompt tokens, and without separate programs
    for steps without decode rows, so that few steps are compiled.
    """
    return dataclasses.replace(
        config,
        max_model_len=96,
        decode_buckets=(config.max_num_seqs,),
        prefill_buckets=(config.max_batched_tokens,),
        separate_prefill=False,
    )


@functools.cache
def plain(index: int, params: SamplingParams) -> tuple[int, ...]:
    """Return the tokens that continue a prompt, computed by forward passes without a cache.

    One forward pass computes the right token after each right token. The first pass gets tokens of an engine. After a
    wrong token, another pass is needed.

    Raises:
      RuntimeError: the two best logits of a token differ by less than 1e-3. Rounding could then change the token.

    """
    tokens, num_right = _tokens_of_an_engine(index, params), 0
    while num_right < params.max_tokens:
        choices = _plain_run().choose(Decoded(PROMPTS[index], tokens[:-1], params))
        right, first = choices.tokens.tolist(), num_right
        while num_right < params.max_tokens and tokens[num_right] == right[num_right]:
            num_right += 1
        if num_right < params.max_tokens:
            tokens[num_right] = right[num_right]
            num_right += 1
        if choices.margins[first:num_right].min() < 1e-3:
            raise RuntimeError(f"prompt {index} has a near tie before token {num_right}: choose another seed")
    return tuple(tokens)


def _tokens_of_an_engine(index: int, params: SamplingParams) -> list[int]:
    """Return `params.max_tokens` tokens, which may be wrong. The prefix cache is not used."""
    under_test = engine("short of pages")
    if under_test.has_unfinished:
        return [0] * params.max_tokens
    request = under_test.add_request(PROMPTS[index], params, salt=f"plain {index} {params}")
    while under_test.has_unfinished:
        under_test.step()
    tokens = [*under_test.output(request).output_ids, *[0] * params.max_tokens]
    return tokens[: params.max_tokens]


@contextlib.contextmanager
def compile_events() -> Iterator[list[str]]:
    """Yield a list to which jax's compilation events are added, including hits of its compilation cache."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@functools.cache
def _plain_run() -> PlainRun:
    return PlainRun(model(), max_output=MAX_TOKENS)
