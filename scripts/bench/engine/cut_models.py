"""Measure decode steps and prompts of models with published widths and fewer layers, so that they fit on one GPU.

The weights are random, in the dtype of the model (bfloat16), also where published checkpoints have 8-bit or 4-bit
weights, because the model has no other format. The layers that are left have all kinds of layers of the whole model.

No prompt is computed for decode steps. The caches are filled on the device with random values, and block tables refer
to pages in random order, without the pages before the windows. A case is `batch` sequences whose last measured step
sees `context` tokens. Steps run through the engine's runner (forward program, sampling, packing of the step, copies
between host and device). A step is launched before the tokens of the previous step are read, as in the engine. The
scheduler does not run.

Prompts are computed in steps of `step_tokens` tokens, one sequence at a time, with a second runner.

`layer_parts` divides the time of a decode step into parts.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from pallas_attn import FULL, PAGE_NONE
from pallas_attn.models.config import GEMMA_PRESETS, V4_PRESETS, DeepseekV4Config, Gemma4Config
from pallas_attn.models.decoder import AttentionSettings, Caches, Decoder, LayerCache, cache_arrays, with_arrays
from pallas_attn.models.engine import EngineConfig, SamplingParams
from pallas_attn.models.engine.config import RunnerConfig
from pallas_attn.models.engine.group_sizes import GroupSizes, group_sizes
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.sampler import NONFINITE
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan
from pallas_attn.models.engine.step.result import StepResult
from scripts.bench.engine import layer_parts
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import summary
from scripts.bench.harness.device import Rates, measure_rates, memory_bytes
from scripts.bench.harness.timing import Stopwatch, kernels_of
from scripts.bench.shapes import DEEPSEEK_V4_FLASH, GEMMA4_26B, GEMMA4_31B

type CutConfig = DeepseekV4Config | Gemma4Config
"""Configuration of a model that this module measures."""

WARMUP_STEPS = 3
"""Decode steps of a case that are not measured."""

FREE_SHARE = 0.06
"""Share of the device memory that weights and caches leave for activations and programs."""


@dataclasses.dataclass(frozen=True)
class CutModel:
    """A model and its default workload.

    Attributes:
      config: configuration of the whole model.
      layers: default number of layers, with which weights and caches fit on a GPU with 141 GB.
      contexts: default contexts.
      page_size: tokens per page.
    """

    config: CutConfig
    layers: int
    contexts: tuple[int, ...]
    page_size: int


MODELS = {
    "v4-flash": CutModel(DEEPSEEK_V4_FLASH, layers=6, contexts=(8192, 131072, 1048576), page_size=256),
    "gemma4-31b": CutModel(GEMMA4_31B, layers=12, contexts=(8192, 32768, 131072), page_size=64),
    "gemma4-26b-a4b": CutModel(GEMMA4_26B, layers=12, contexts=(8192, 32768, 131072), page_size=64),
    "v4-tiny": CutModel(V4_PRESETS["v4-tiny"], layers=4, contexts=(128, 512), page_size=32),
    "gemma4-tiny": CutModel(GEMMA_PRESETS["gemma4-tiny"], layers=6, contexts=(128, 512), page_size=16),
}
"""Models by name. The last two are for tests."""


def kinds_of(config: CutConfig) -> list[tuple[str, ...]]:
    """Return the kind of each layer: kind of its attention, and for DeepSeek-V4 how it selects experts."""
    if isinstance(config, Gemma4Config):
        return [(kind,) for kind in config.layer_types]
    return list(zip(config.layer_types, config.mlp_layer_types, strict=True))


def cut(config: CutConfig, layers: int) -> tuple[CutConfig, tuple[int, ...]]:
    """Return a configuration with fewer layers of all kinds, and the indices of its layers in the whole model.

    These are the last layers of the model. The first of them are replaced by the first layers of the kinds that the
    last layers lack.

    Raises:
      ValueError: the number of layers is out of range.
      NotImplementedError: the model has layers without a cache, and `layers` is not the number of its layers.
    """
    kinds = kinds_of(config)
    fewest = len({*kinds})
    if not fewest <= layers <= len(kinds):
        raise ValueError(f"layers: expected {fewest}, the number of kinds of layers, to {len(kinds)}, got {layers}")
    if layers == len(kinds):
        return config, tuple(range(layers))
    if isinstance(config, Gemma4Config) and config.num_kv_shared_layers:
        raise NotImplementedError(f"layers: expected {len(kinds)}, because the last layers have no cache; got {layers}")
    last = list(range(len(kinds) - layers, len(kinds)))
    lacking: list[int] = []
    while missing := {*kinds} - {kinds[layer] for layer in [*lacking, *last[len(lacking) :]]}:
        lacking = sorted([*lacking, min(kinds.index(kind) for kind in missing)])
    taken = (*lacking, *last[len(lacking) :])
    fields: dict[str, Any] = {"layer_types": tuple(config.layer_types[layer] for layer in taken)}
    if isinstance(config, DeepseekV4Config):
        fields["mlp_layer_types"] = tuple(config.mlp_layer_types[layer] for layer in taken)
    return dataclasses.replace(config, num_hidden_layers=layers, **fields), taken


@dataclasses.dataclass(frozen=True)
class CutWork:
    """Workload.

    Attributes:
      batches, contexts: batches and contexts of the cases, in all combinations.
      steps: measured decode steps per case.
      page_size: tokens per page.
      prompts: lengths of the computed prompts, in tokens.
      step_tokens: prompt tokens per step.
      cache_dtype: dtype of the caches; None for the dtype of the model.
      parts: whether to measure parts of the layers.
      kernels: whether to measure the kernels of a decode step with CUPTI.
      stopwatch: settings of the measurement of parts.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    page_size: int
    prompts: tuple[int, ...] = ()
    step_tokens: int = 8192
    cache_dtype: str | None = None
    parts: bool = True
    kernels: bool = False
    stopwatch: Stopwatch = dataclasses.field(default_factory=lambda: Stopwatch(sample_seconds=0.02, samples=3))

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(batch, context) of each case, in rising order of the number of tokens."""
        every = [(batch, context) for batch in {*self.batches} for context in {*self.contexts}]
        return sorted(every, key=lambda case: (case[0] * case[1], case[0]))

    def first_position(self, context: int) -> int:
        """Return the position of the first new token of a case, and so the number of its tokens in the caches."""
        return context - self.steps - WARMUP_STEPS

    def check(self, config: CutConfig) -> None:
        """Raise ValueError if a sequence is too short or too long, or pages have a wrong size."""
        limit, fewest = config.max_position_embeddings, 1 + self.steps + WARMUP_STEPS
        for name, sizes, least in (("contexts", self.contexts, fewest), ("prefill", self.prompts, 1)):
            if wrong := [size for size in sizes if not least <= size <= limit]:
                raise ValueError(f"{name}: expected {least} to {limit} tokens, got {wrong[0]}")
        if isinstance(config, DeepseekV4Config) and self.page_size % config.page_unit:
            raise ValueError(f"page_size: expected a multiple of {config.page_unit}, got {self.page_size}")

    def engine_config(self, batches: Sequence[int], prompt_tokens: int) -> EngineConfig:
        """Return the sizes of an engine for decode steps of these batches, and for steps with prompt tokens."""
        largest = max(batches)
        return EngineConfig(
            page_size=self.page_size,
            max_batched_tokens=max(largest, prompt_tokens),
            max_num_seqs=largest,
            max_prefill_seqs=1,
            cache_dtype=self.cache_dtype,
            decode_buckets=tuple(sorted({*batches})),
            prefill_buckets=(max(largest, prompt_tokens),),
            history=None,
        )


# --- pages


def empty_groups(config: CutConfig, page_size: int) -> tuple[GroupSizes, ...]:
    """Return the cache groups of a model, without pages."""
    sizes = {"num_pages": 1, "page_size": page_size, "max_model_len": page_size, "max_num_seqs": 1, "step_tokens": 1}
    groups = group_sizes(config, **sizes, recycling=True)
    return tuple(dataclasses.replace(group, num_pages=0) for group in groups)


def page_range(group: GroupSizes, page_size: int, first: int, context: int) -> range:
    """Return the pages of a sequence that tokens at the positions from `first` on see, up to `context` tokens."""
    oldest = max(first + 1 - int(group.heads.window[0]), 0)
    return range(oldest // page_size, -(-context // page_size))


def with_pages(
    groups: Sequence[GroupSizes], page_size: int, first: int, batch: int, context: int
) -> tuple[GroupSizes, ...]:
    """Return the cache groups with at least the pages of a case."""

    def pages(group: GroupSizes) -> int:
        return max(group.num_pages, batch * len(page_range(group, page_size, first, context)))

    return tuple(dataclasses.replace(group, num_pages=pages(group)) for group in groups)


def random_tables(
    groups: Sequence[GroupSizes], page_size: int, first: int, batch: int, context: int, width: int
) -> tuple[Int32[np.ndarray, "B 1 P"], ...]:
    """Return block tables of `width` pages of each cache group. Sequences share no pages."""
    rng, tables = np.random.default_rng(batch + context), []
    for group in groups:
        pages = page_range(group, page_size, first, context)
        table = np.full((batch, 1, width), PAGE_NONE, np.int32)
        ids = rng.permutation(group.num_pages)[: batch * len(pages)]
        table[:, 0, pages.start : pages.stop] = ids.reshape(batch, len(pages))
        tables.append(table)
    return tuple(tables)


# --- runner


@functools.partial(jax.jit, donate_argnums=0)
def _filled(array: Array, key: Array) -> Array:
    """Return the array with random values, which are drawn a few million at a time and written in place."""
    rows = min(array.shape[0], max(1, 2**24 // math.prod(array.shape[1:])))

    def fill(i: Array, array: Array) -> Array:
        drawn = jax.random.normal(jax.random.fold_in(key, i), (rows, *array.shape[1:]), jnp.float32)
        start = jnp.minimum(i * rows, array.shape[0] - rows)
        return jax.lax.dynamic_update_slice_in_dim(array, drawn.astype(array.dtype), start, 0)

    return jax.lax.fori_loop(0, -(-array.shape[0] // rows), fill, array)


class FilledRunner(Runner):
    """A runner whose caches have random contents."""

    def fill(self) -> None:
        """Replace the contents of the caches by random values. Scales stay 1."""
        self._allocate()
        key = jax.random.key(0, impl="rbg")
        for layer, cache in enumerate(self._caches):
            of_layer = jax.random.fold_in(key, layer)
            arrays = {
                name: _filled(array, jax.random.fold_in(of_layer, i))
                for i, (name, array) in enumerate(cache_arrays(cache).items())
                if not name.endswith("scale")
            }
            self.replace_cache(layer, with_arrays(cache, arrays))
        jax.block_until_ready(self._caches)

    def draw_tokens(self) -> None:
        """Set the last token of each request slot to a random token, so that rows select different experts."""
        slots, vocabulary = self._config.max_num_seqs, self._model.config.vocab_size
        self._last_tokens = jax.random.randint(jax.random.key(slots), (slots,), 0, vocabulary, jnp.int32)

    @property
    def caches(self) -> Caches:
        """Caches of all layers."""
        return self._caches

    def replace_cache(self, layer: int, cache: LayerCache) -> None:
        """Use another cache in a layer."""
        self._caches = (*self._caches[:layer], cache, *self._caches[layer + 1 :])


def runner_of(
    model: Decoder, work: CutWork, groups: tuple[GroupSizes, ...], batches: Sequence[int], longest: int, prompt: int
) -> tuple[FilledRunner, RunnerConfig]:
    """Return a runner with filled caches and compiled steps: with `prompt` prompt tokens, or decode steps if it is 0.

    Args:
      model: the model.
      work: the workload.
      groups: cache groups with their numbers of pages.
      batches: numbers of decode rows.
      longest: maximum number of tokens of a sequence.
      prompt: prompt tokens per step.
    """
    config = work.engine_config(batches, prompt).runner_config(longest, groups)
    runner = FilledRunner(model, config)
    runner.fill()
    runner.compile([bucket for bucket in runner.buckets() if bool(bucket.prefill_tokens) is bool(prompt)])
    return runner, config


def decode(
    runner: FilledRunner, batch: int, first: int, count: int, tables: tuple[Int32[np.ndarray, "B 1 P"], ...]
) -> tuple[list[float], list[float]]:
    """Run `count` decode steps of `batch` sequences from position `first` on.

    Returns:
      Seconds between the ends of steps, and seconds of the host to launch a step, of all steps after the first.

    Raises:
      RuntimeError: logits are NaN or infinite.
    """
    requests = [Request(i, (1,), SamplingParams(ignore_eos=True)) for i in range(batch)]
    steps, launches, pending, ended = [], [], None, 0.0

    def read(step: StepResult) -> float:
        """Wait until a step has ended. Return the seconds since the end of the step before."""
        nonlocal ended
        if any(NONFINITE in row.tokens for row in step.sampled()):
            raise RuntimeError("expected finite logits")
        before, ended = ended, time.perf_counter()
        return ended - before

    for position in range(first, first + count):
        rows = tuple(ScheduledRow(request, i, position, 1, samples=True) for i, request in enumerate(requests))
        began = time.perf_counter()
        launched = runner.launch([StepPlan(rows, (), tables)])
        launches.append(time.perf_counter() - began)
        if pending is not None:
            steps.append(read(pending))
        pending = launched
    if pending is not None:
        steps.append(read(pending))
    return steps[1:], launches[1:]


# --- floors


def read_bytes(
    model: Decoder, batch: int, context: int, page_size: int, cache_dtype: str | None = None
) -> dict[str, float]:
    """Return the bytes that a decode step must read: weights, with experts that are selected evenly, and caches."""
    config, weights, routed = model.config, 0, 0
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, size = ".".join(map(str, path)), weight.size * weight.dtype.itemsize
        is_table = name.endswith(("embed_tokens", "experts_of_tokens")) and not config.tie_word_embeddings
        if weight.ndim == 3 and name.endswith(("gate_up_proj", "down_proj")):
            routed += size
        elif not is_table:  # a step reads only a few rows of tables
            weights += size
    if isinstance(config, DeepseekV4Config):
        chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    elif isinstance(config, Gemma4Config):
        chosen, experts = config.top_k_experts, config.num_experts or 1
    else:
        raise NotImplementedError(f"floor of a {config.model_type}: expected DeepSeek-V4 or Gemma 4")
    cached = 0.0
    for layer, spec in enumerate(model.cache_specs(1, page_size, cache_dtype)):
        for cache, rows in _rows_read(config, layer, context).items():
            arrays = [a for name, a in spec.arrays.items() if name.partition(".")[0] == cache or not cache]
            per_page = arrays[0].shape[1] if isinstance(config, DeepseekV4Config) else page_size
            cached += rows / per_page * sum(a.size * a.dtype.itemsize for a in arrays)
    share = 1 - (1 - chosen / experts) ** batch
    return {"weight_bytes": weights + share * routed, "cache_bytes": batch * cached}


def _rows_read(config: CutConfig, layer: int, context: int) -> dict[str, int]:
    """Return the number of rows that a token reads from each cache of a layer, by name; "" for the whole cache."""
    if isinstance(config, Gemma4Config):
        window = config.windows[layer]
        return {"": context if window is None else min(context, config.sliding_window)}
    rows, rate = {"window": min(context, config.sliding_window)}, config.rate(layer)
    if rate:
        entries = context // rate
        rows["entries"] = min(entries, config.index_topk) if config.has_indexer(layer) else entries
    if config.has_indexer(layer):
        rows["index"] = context // rate
    return rows


# --- measurement


def run(
    name: str, layers: int, work: CutWork, settings: AttentionSettings, dtype: str, limit_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the report after the model is compiled, and after each case. No case starts after `limit_seconds`.

    Raises:
      ValueError: the weights leave no memory for a case.
    """
    began = time.perf_counter()
    end, whole = began + limit_seconds, MODELS[name].config
    config, taken = cut(whole, layers)
    work.check(config)
    shapes = shapes_of_model(config, settings, dtype)
    groups, fitting, skipped = fit(shapes, work)
    rates = measure_rates(Stopwatch(samples=3))
    model = jax.block_until_ready(random_model(config, dtype, settings))
    made_s = time.perf_counter() - began
    batches, longest = [batch for batch, _ in fitting], max(context for _, context in fitting)
    runner, runner_config = runner_of(model, work, groups, batches, longest, 0)
    report: dict[str, Any] = {
        "config": name,
        "layers": [{"index": index, "kind": list(kind)} for index, kind in zip(taken, kinds_of(config), strict=True)],
        "layers_of_whole_model": whole.num_hidden_layers,
        "weights": f"random, {dtype}",
        "weight_bytes": weight_bytes(shapes),
        "cache_bytes": runner.cache_bytes,
        "table_pages": runner_config.table_pages,
        "groups": [of_group(shapes, group, work) for group in groups],
        "rates": dataclasses.asdict(rates),
        "made_s": made_s,
        "compile_s": runner.compile_s,
        "compilations": runner.num_compilations,
        "ready_s": time.perf_counter() - began,
        "method": __doc__,
        "cases": [{"batch": batch, "context": context, "skipped": why} for (batch, context), why in skipped.items()],
        "prompts": [],
    }
    yield report
    bench = DecodeBench(model, runner, work, groups, runner_config.table_pages, rates)
    for _ in bench.run(report, fitting, whole, limit_seconds, end):
        yield report
    del bench, runner
    gc.collect()  # free the caches before the next runner allocates its caches
    if work.prompts and time.perf_counter() <= end:
        for result in prompts(model, work, end):
            report["prompts"].append(result)
            yield report


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeBench:
    """Measurement of decode steps.

    Attributes:
      model: the model.
      runner: has the caches and the compiled steps.
      work: the workload.
      groups: cache groups with their numbers of pages.
      table_pages: pages per sequence of the block tables.
      rates: rates of the device.
    """

    model: Decoder
    runner: FilledRunner
    work: CutWork
    groups: tuple[GroupSizes, ...]
    table_pages: int
    rates: Rates

    def run(
        self,
        report: dict[str, Any],
        cases: Sequence[tuple[int, int]],
        whole: CutConfig,
        limit_seconds: float,
        end: float,
    ) -> Iterator[None]:
        """Add the cases to the report: decode steps of all cases, then parts, then kernels. Yield after each addition.

        Args:
          report: the report.
          cases: (batch, context) of each case.
          whole: configuration of the whole model.
          limit_seconds: time limit of the run, for messages.
          end: time at which the limit ends.
        """
        measured: list[dict[str, Any]] = []
        for batch, context in cases:
            case: dict[str, Any] = {"batch": batch, "context": context}
            if time.perf_counter() > end:
                case["skipped"] = f"the time limit of {limit_seconds:g} s had passed"
            else:
                case |= self.decode(batch, context)
                measured.append(case)
            report["cases"].append(case)
            yield
        measured.sort(key=lambda case: -case["batch"])  # the chains of parts are compiled once per batch
        if self.work.parts:
            parts = layer_parts.LayerParts(self.model, self.work.page_size, self.work.stopwatch)
            for case in measured:
                if time.perf_counter() > end:
                    return
                seconds = parts.measure(self.runner, case["context"], self.tables(case["batch"], case["context"]))
                case["parts_us"] = {name: 1e6 * s for name, s in seconds.items()}
                case |= layer_parts.shares(parts.config, whole, seconds, case["step_s"]["median"])
                yield
        if self.work.kernels:
            for case in measured:
                if time.perf_counter() > end:
                    return
                case["kernels_us"] = self.kernels(case["batch"], case["context"])
            yield

    def tables(self, batch: int, context: int) -> tuple[Int32[np.ndarray, "B 1 P"], ...]:
        """Return block tables of a case."""
        first = self.work.first_position(context)
        return random_tables(self.groups, self.work.page_size, first, batch, context, self.table_pages)

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """Measure decode steps of a case."""
        first, count = self.work.first_position(context), self.work.steps + WARMUP_STEPS
        self.runner.draw_tokens()
        times = decode(self.runner, batch, first, count, self.tables(batch, context))
        steps, launches = (seconds[WARMUP_STEPS - 1 :] for seconds in times)
        cache = self.work.page_size, self.work.cache_dtype
        step_s, read = statistics.median(steps), read_bytes(self.model, batch, context, *cache)
        floor = sum(read.values()) / self.rates.copy
        return {
            "step_s": summary(steps),
            "launch_s": summary(launches),
            "decode_tokens_per_s": batch / step_s,
            "per_layer_s": step_s / self.model.config.num_hidden_layers,
            **read,
            "floor_s": floor,
            "fraction_of_floor": floor / step_s,
        }

    def kernels(self, batch: int, context: int) -> dict[str, float]:
        """Return the microseconds of each kernel in one decode step of a case, by name; empty without a GPU."""
        tables = self.tables(batch, context)
        decode(self.runner, batch, self.work.first_position(context), WARMUP_STEPS, tables)
        kernels = kernels_of(lambda: decode(self.runner, batch, context - 1, 1, tables))
        return {name: 1e6 * seconds for name, seconds in sorted(kernels.items())}


def shapes_of_model(config: CutConfig, settings: AttentionSettings, dtype: str) -> Decoder:
    """Return a model that has shapes in place of weights."""
    return nnx.eval_shape(lambda: Decoder(config, settings, dtype))


def of_group(model: Decoder, group: GroupSizes, work: CutWork) -> dict[str, Any]:
    """Return the size of a cache group: `layers`, `caches` ([] for whole caches), `pages` of each layer, `window` in
    tokens (None without), and `token_bytes`, the bytes of a page of all its layers divided by the tokens of a page."""
    specs = model.cache_specs(1, work.page_size, work.cache_dtype)
    arrays = [array for layer in group.layers for name, array in specs[layer].arrays.items() if group.has_array(name)]
    window = int(group.heads.window[0])
    return {
        "layers": list(group.layers),
        "caches": list(group.caches),
        "pages": group.num_pages,
        "window": None if window >= FULL else window,
        "token_bytes": sum(array.size * array.dtype.itemsize for array in arrays) / work.page_size,
    }


def weight_bytes(model: Decoder) -> int:
    """Return the bytes of all weights."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))


def fit(
    model: Decoder, work: CutWork
) -> tuple[tuple[GroupSizes, ...], list[tuple[int, int]], dict[tuple[int, int], str]]:
    """Return cache groups with the pages of all cases that fit into the memory next to the weights, these cases, and
    the reasons of the other cases.

    Raises:
      ValueError: no case fits.
    """
    config: Any = model.config
    groups, fitting, skipped = empty_groups(config, work.page_size), list[tuple[int, int]](), {}
    room = (1 - FREE_SHARE) * memory_bytes() - weight_bytes(model)
    for batch, context in work.cases:
        more = with_pages(groups, work.page_size, work.first_position(context), batch, context)
        pages = RunnerConfig(1, work.page_size, 1, 1, 1, (1,), (1,), groups=more).layer_pages(config.num_hidden_layers)
        size = sum(spec.num_bytes for spec in model.cache_specs(pages, work.page_size, work.cache_dtype))
        if size > room:
            skipped[batch, context] = (
                f"caches of {size / 1e9:.1f} GB, expected at most {room / 1e9:.1f} next to the weights"
            )
        else:
            groups, fitting = more, [*fitting, (batch, context)]
    if not fitting:
        used = f"weights of {weight_bytes(model) / 1e9:.1f} GB and {next(iter(skipped.values()))}"
        raise ValueError(f"layers: expected weights and caches that fit into the device memory, got {used}")
    return groups, fitting, skipped


def prompts(model: Decoder, work: CutWork, end: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each computed prompt. No prompt starts after `end`."""
    config: Any = model.config
    longest = max(work.prompts)
    groups = with_pages(empty_groups(config, work.page_size), work.page_size, 0, 1, longest)
    runner, runner_config = runner_of(model, work, groups, [1], longest, work.step_tokens)
    compile_s = runner.compile_s
    for length in sorted({*work.prompts}):
        if time.perf_counter() > end:
            yield {"tokens": length, "skipped": "the time limit had passed"}
            continue
        ids = np.random.default_rng(length).integers(0, config.vocab_size, length).tolist()
        request = Request(length, tuple(ids), SamplingParams(ignore_eos=True))
        tables = random_tables(groups, work.page_size, 0, 1, length, runner_config.table_pages)
        began, pending = time.perf_counter(), None
        for start in range(0, length, work.step_tokens):
            count = min(work.step_tokens, length - start)
            row = ScheduledRow(request, 0, start, count, samples=start + count == length)
            pending = runner.launch([StepPlan((), (row,), tables)])
        if pending is not None:
            pending.sampled()
        took = time.perf_counter() - began
        yield {
            "tokens": length,
            "step_tokens": work.step_tokens,
            "prefill_s": took,
            "prefill_tokens_per_s": length / took,
            "compile_s": compile_s,
        }


# --- output


def latest(report: dict[str, Any]) -> str:
    """Format the newest result of a report as one line. Before the first result, describe the model."""
    if report["prompts"]:
        result = report["prompts"][-1]
        name = f"prompt of {result['tokens']} tokens"
        if "skipped" in result:
            return f"{name}: skipped, {result['skipped']}"
        return f"{name}: {result['prefill_tokens_per_s']:,.0f} tokens/s, {result['prefill_s']:.2f} s"
    done = [case for case in report["cases"] if "parts_us" in case]
    if done:
        case = min(done, key=lambda case: (case["batch"], -case["context"]))
        return f"{case_name(case)}, parts: {layer_parts.line(case)}"
    if not any("step_s" in case for case in report["cases"]):
        kinds = ", ".join(f"{layer['index']} {' '.join(layer['kind'])}" for layer in report["layers"])
        skipped = "".join(f"\n{case_name(case)}: skipped, {case['skipped']}" for case in report["cases"])
        return (
            f"{report['config']}, {len(report['layers'])} of {report['layers_of_whole_model']} layers ({kinds});"
            f" weights {report['weight_bytes'] / 1e9:.1f} GB ({report['weights']}), caches"
            f" {report['cache_bytes'] / 1e9:.1f} GB; model made in {report['made_s']:.1f} s,"
            f" {report['compilations']} kinds of steps compiled in {report['compile_s']:.1f} s{skipped}"
        )
    case = report["cases"][-1]
    if "skipped" in case:
        return f"{case_name(case)}: skipped, {case['skipped']}"
    step, launch = (1e3 * case[name]["median"] for name in ("step_s", "launch_s"))
    return (
        f"{case_name(case)}: {case['decode_tokens_per_s']:,.0f} tokens/s, {step:.2f} ms a step (host {launch:.2f}),"
        f" {1e3 * case['per_layer_s']:.3f} ms a layer ({case['fraction_of_floor']:.0%} of the floor)"
    )


def case_name(case: dict[str, Any]) -> str:
    return f"{case['batch']} x {case['context']}"
