"""Measure decode steps over long contexts, with sparse and dense attention, over 16-bit and fp8 caches.

No prompt is computed. The cache is filled with pages of random values, which are imported like a KV-cache transfer from
another engine. Each request then has one imported context and a prompt of one more token.

The sparse model has indexers (DeepSeek-V3.2). The dense model is the same model without indexers. One engine serves all
cases of a model and a cache dtype. A case is `batch` contexts of `context` tokens. Only steps in which all contexts
decode are measured.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn.models.config import PRESETS, DeepSeekConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.decoder.caches import INDEX
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig
from pallas_attn.models.engine.kv_transfer.cached_pages import CachedSequence
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import Costs, generate, summary
from scripts.bench.harness.device import measure_rates
from scripts.bench.harness.timing import Stopwatch
from scripts.bench.shapes import DEEPSEEK_V3

CONFIGS: dict[str, DeepSeekConfig] = {
    "v32-tiny": PRESETS["v32-tiny"],
    "v32-2-layers": dataclasses.replace(
        DEEPSEEK_V3,
        model_type="deepseek_v32",
        vocab_size=16160,
        n_routed_experts=16,
        index_topk=2048,
        index_n_heads=64,
        index_head_dim=128,
    ),
}
"""Configurations by name: a tiny one for tests, and a model of DeepSeek-V3.2's widths with two layers (one dense, one
with 16 of the 256 experts) and an eighth of the vocabulary. With 16 experts, the expert layer reads about the weights
that one device reads if the 256 experts are split over 16 devices.
"""

CACHES = {"float32": "float32", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Cache dtypes by their names on the command line."""


@dataclasses.dataclass(frozen=True)
class FilledWork:
    """Measured model, contexts and caches.

    Attributes:
      config: name of a configuration in `CONFIGS`.
      cases: (batch, context) per case; contexts are multiples of the page size.
      caches: names of the cache dtypes.
      new_tokens: new tokens per request.
      page_size: tokens per page.
    """

    config: str
    cases: tuple[tuple[int, int], ...]
    caches: tuple[str, ...]
    new_tokens: int
    page_size: int = 64

    def __post_init__(self) -> None:
        limit = CONFIGS[self.config].max_position_embeddings
        for batch, context in self.cases:
            if batch < 1 or context < 1 or context % self.page_size:
                raise ValueError(
                    f"cases: expected batches of at least 1 and contexts of whole pages of {self.page_size},"
                    f" got {batch}x{context}"
                )
            if context + 1 + self.new_tokens > limit:
                raise ValueError(
                    f"cases: expected at most {limit} tokens, got {context} in the cache and {1 + self.new_tokens} more"
                )
        if self.new_tokens < 3:
            raise ValueError(f"new_tokens: expected at least 3, so that all decode in one step, got {self.new_tokens}")

    def engine_config(self, cache: str) -> EngineConfig:
        batches = tuple(sorted({batch for batch, _ in self.cases}))
        own = -(-(1 + self.new_tokens) // self.page_size)
        return EngineConfig(
            num_pages=max(batch * (context // self.page_size + own) for batch, context in self.cases),
            page_size=self.page_size,
            max_batched_tokens=batches[-1],
            max_num_seqs=batches[-1],
            max_prefill_seqs=batches[-1],
            max_model_len=max(context for _, context in self.cases) + 1 + self.new_tokens,
            cache_dtype=cache,
            decode_buckets=batches,
            prefill_buckets=(batches[-1],),
            history=None,
        )


def dense(config: DeepSeekConfig) -> DeepSeekConfig:
    """Return the configuration without indexers, which attends to all tokens."""
    return dataclasses.replace(config, model_type="deepseek_v3", index_topk=0, index_n_heads=0, index_head_dim=0)


def run(work: FilledWork, settings: AttentionSettings, dtype: str, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each case. After `limit_seconds`, neither a case nor the compilation of an engine is
    started.
    """
    began = time.perf_counter()
    rates = measure_rates(Stopwatch(samples=3))
    config = CONFIGS[work.config]
    models = [random_model(config, dtype, settings), random_model(dense(config), dtype, settings)]
    for cache, model in itertools.product(work.caches, models):
        if time.perf_counter() - began > limit_seconds:
            return
        engine = Engine(model, work.engine_config(cache))
        engine.warmup()
        for batch, context in work.cases:
            if time.perf_counter() - began > limit_seconds:
                return
            least = decode_bytes(model, Costs.of(model, rates), cache, batch, context)
            yield {
                "sparse": model.config.is_sparse,
                "cache": cache,
                "batch": batch,
                "context": context,
                "compile_s": engine.stats().compile_s,
                "rates": dataclasses.asdict(rates),
                **measure(engine, work, batch, context, least / rates.copy),
            }
        del engine
        gc.collect()  # free the cache before the next engine allocates its cache


def decode_bytes(model: Decoder, costs: Costs, cache: str, batch: int, context: int) -> float:
    """Return the bytes that a step must read: weights, index keys of all tokens, and the latents of attended tokens."""
    specs = model.cache_specs(1, 1, cache)
    arrays = [named for spec in specs for named in spec.arrays.items()]
    index = sum(array.size * array.dtype.itemsize for name, array in arrays if name.startswith(INDEX))
    latents = sum(spec.bytes_per_page for spec in specs) - index
    attended = min(costs.config.index_topk or context, context)
    return costs.weight_bytes(batch) + batch * (context * index + attended * latents)


def measure(engine: Engine, work: FilledWork, batch: int, context: int, floor_s: float) -> dict[str, Any]:
    """Fill the cache and measure decode steps. `floor_s` is the roofline of a step in seconds."""
    began = time.perf_counter()
    prompts = fill(engine, batch, context)
    filled_s = time.perf_counter() - began
    outputs, steps = generate(engine, prompts, [work.new_tokens] * batch)
    if any(output.cached_tokens != context for output in outputs):
        raise RuntimeError(f"expected {context} tokens per request in the cache, but a request found fewer")
    decodes = [step.duration_s for step in steps if not step.prefill_tokens and step.decode_tokens == batch]
    step_s = statistics.median(decodes)
    return {
        "filled_s": filled_s,
        "decode_tokens_per_s": batch / step_s,
        "step_s": summary(decodes),
        "floor_s": floor_s,
        "fraction_of_floor": floor_s / step_s,
    }


def fill(engine: Engine, batch: int, context: int) -> list[list[int]]:
    """Import pages of random values for `batch` contexts. Return the prompts: `context` cached tokens and one new
    token.
    """
    rng = np.random.default_rng(batch)
    made_for, page_size = engine.cache_format, engine.config.page_size
    num_pages, vocabulary = context // page_size, made_for["config.vocab_size"]
    values = {}
    for arrays in made_for["arrays"].values():
        for name, (shape, dtype) in arrays.items():
            if name not in values:  # all layers get the same values; their arrays of one name have one shape
                drawn = rng.standard_normal((num_pages, *shape), np.float32)
                values[name] = (np.abs(drawn) if name.endswith("scale") else drawn).astype(jnp.dtype(dtype))
    contents = {f"{layer}.{name}": values[name] for layer, arrays in made_for["arrays"].items() for name in arrays}
    prompts = rng.integers(0, vocabulary, (batch, context + 1)).tolist()
    for prompt in prompts:  # each prompt has a different page order
        rows = rng.permutation(num_pages).astype(np.int32)[None]
        sequence = CachedSequence(tuple(prompt[:-1]), "", (rows,))
        engine.import_pages(CachedPages(made_for, (sequence,), (contents,)))
    return prompts


def line(result: dict[str, Any]) -> str:
    """Format a result as one line."""
    step = result["step_s"]["median"]
    return (
        f"{'sparse' if result['sparse'] else 'dense'}, {result['cache']}, {result['batch']} x {result['context']}:"
        f" {result['decode_tokens_per_s']:,.0f} tokens/s, {1e3 * step:.2f} ms a step"
        f" ({result['fraction_of_floor']:.0%} of the floor); filled in {result['filled_s']:.1f} s"
    )
