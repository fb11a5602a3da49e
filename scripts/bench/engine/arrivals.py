"""Measure the latencies of an engine with Poisson arrivals at given rates, and random prompt and output lengths.

- Time to first token: from the scheduled arrival of a request, so it includes the rest of a step that is running.
- Time between tokens: between two calls of the request's callback `on_token`.
- Longest step: compared with the median step, for steps between the first and the last arrival. The ratio shows how
much an arriving prompt delays decoding requests. For the five longest steps, the report has their decode and prefill
tokens, and the time of their launch on the host and of Python's garbage collection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_attn.models.config import GQA_PRESETS, PRESETS, ModelConfig
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Engine, EngineConfig, SamplingParams, StepRecord
from scripts.bench.engine.random_model import random_model

CONFIGS: dict[str, ModelConfig] = {**PRESETS, **GQA_PRESETS}


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Random traffic.

    Attributes:
      rates: requests per second, one measurement per rate.
      requests: requests of a measurement.
      prompt_tokens, new_tokens: mean lengths. Each length is drawn from 0.5 to 1.5 of the mean.
      step_tokens: maximum new tokens of a step. Each value is measured with a separate engine.
      max_num_seqs: maximum number of running requests.
      page_size: tokens per page.
    """

    rates: tuple[float, ...]
    requests: int
    prompt_tokens: int
    new_tokens: int
    step_tokens: tuple[int, ...]
    max_num_seqs: int = 64
    page_size: int = 64

    @property
    def longest(self) -> int:
        return self.prompt_tokens * 3 // 2 + self.new_tokens * 3 // 2 + 1

    def engine_config(self, step_tokens: int) -> EngineConfig:
        rows = tuple(sorted({min(2**i, self.max_num_seqs) for i in range(2, 12)}))
        return EngineConfig(
            num_pages=self.max_num_seqs * -(-self.longest // self.page_size),
            page_size=self.page_size,
            max_batched_tokens=step_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.longest,
            prefix_caching=False,
            decode_buckets=rows,
            prefill_buckets=(step_tokens,),
            history=None,
        )


def run(
    config: ModelConfig, work: Arrivals, settings: AttentionSettings, dtype: str, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the result of each rate for each step size."""
    model = random_model(config, dtype, settings)
    for step_tokens in work.step_tokens:
        engine = Engine(model, work.engine_config(step_tokens))
        engine.warmup()
        engine.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
        for rate in work.rates:
            rng = np.random.default_rng([seed, step_tokens])
            yield {"step_tokens": step_tokens, "rate": rate} | measure(engine, work, rate, config.vocab_size, rng)


def measure(engine: Engine, work: Arrivals, rate: float, vocab_size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Serve requests that arrive at `rate` requests per second until the last request ends, and summarise the times."""
    due = np.cumsum(rng.exponential(1 / rate, work.requests))
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in _lengths(rng, work.prompt_tokens, work.requests)]
    outputs = _lengths(rng, work.new_tokens, work.requests)
    times: list[list[float]] = [[] for _ in prompts]
    first_step, added = engine.stats().num_steps, 0
    began = time.perf_counter()
    last_arrival, collected_s = first_step, []
    with _garbage_collection() as collections_s:
        while added < len(prompts) or engine.has_unfinished:
            now = time.perf_counter() - began
            while added < len(prompts) and due[added] <= now:
                params = SamplingParams(max_tokens=outputs[added], ignore_eos=True)
                engine.add_request(prompts[added], params, on_token=_noting(times[added], began))
                added += 1
                last_arrival = engine.stats().num_steps
            if engine.has_unfinished:
                engine.step()
            else:
                time.sleep(max(0.0, due[added] - (time.perf_counter() - began)))
            if engine.stats().num_steps - first_step > len(collected_s):
                collected_s.append(sum(collections_s))
                collections_s.clear()
    ended = time.perf_counter() - began
    if any(len(got) != wanted for got, wanted in zip(times, outputs, strict=True)):
        raise RuntimeError("a request ended early")
    records = engine.stats().steps[first_step : max(last_arrival, first_step + 1)]
    steps = [step.duration_s for step in records]
    return {
        "ttft_ms": summary([got[0] - at for got, at in zip(times, due, strict=True)]),
        "between_tokens_ms": summary(np.concatenate([np.diff(got) for got in times])),
        "step_ms": summary(steps),
        "longest_step_over_median": max(steps) / float(np.median(steps)),
        "longest_steps": longest(records, collected_s),
        "tokens_per_s": sum(outputs) / ended,
        "offered_tokens_per_s": rate * work.new_tokens,
    }


def longest(steps: Sequence[StepRecord], collected_s: Sequence[float], count: int = 5) -> list[dict[str, Any]]:
    """Describe the `count` longest steps, the longest first.

    Each entry has the index of the step, its duration and tokens, and the time of its launch on the host and of garbage
    collection, in milliseconds. `collected_s` has the seconds of garbage collection of each step.
    """
    order = sorted(range(len(steps)), key=lambda i: -steps[i].duration_s)[:count]
    return [
        {
            "step": i,
            "ms": 1e3 * steps[i].duration_s,
            "decode_tokens": steps[i].decode_tokens,
            "prefill_tokens": steps[i].prefill_tokens,
            "launch_ms": 1e3 * steps[i].launch_s,
            "garbage_collection_ms": 1e3 * collected_s[i],
        }
        for i in order
    ]


@contextlib.contextmanager
def _garbage_collection() -> Iterator[list[float]]:
    """Yield a list. Inside the `with` block, each garbage collection appends its duration in seconds."""
    seconds: list[float] = []
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def _noting(times: list[float], began: float) -> Callable[..., None]:
    """Return a callback that appends the seconds since `began` to `times` when it is called for a token."""
    return lambda *_: times.append(time.perf_counter() - began)


def _lengths(rng: np.random.Generator, mean: int, count: int) -> list[int]:
    return rng.integers(max(2, mean // 2), max(3, mean * 3 // 2 + 1), count).tolist()


def summary(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Milliseconds: median, 90th and 99th percentile, and maximum."""
    milliseconds = 1e3 * np.asarray(seconds)
    quantiles = np.quantile(milliseconds, (0.5, 0.9, 0.99)).tolist()
    return dict(zip(("p50", "p90", "p99"), quantiles, strict=True)) | {"max": float(milliseconds.max())}


def line(result: dict[str, Any]) -> str:
    """Format a result as one line."""

    def times(name: str) -> str:
        return " / ".join(f"{result[name][key]:,.1f}" for key in ("p50", "p90", "p99"))

    worst = result["longest_steps"][0]
    tokens = f"step {worst['step']}: {worst['decode_tokens']} tokens of decode, {worst['prefill_tokens']} of prompts"
    return (
        f"{result['rate']:g} requests/s, steps of {result['step_tokens']}: first token after {times('ttft_ms')} ms"
        f" (p50 / p90 / p99), others {times('between_tokens_ms')} ms, {result['tokens_per_s']:,.0f} tokens/s,"
        f" longest step {worst['ms']:.1f} ms, {result['longest_step_over_median']:.1f}x the median ({tokens},"
        f" launched in {worst['launch_ms']:.1f} ms, garbage collected in {worst['garbage_collection_ms']:.1f} ms)"
    )
