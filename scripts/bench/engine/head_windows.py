"""Measure the savings of head windows in the engine: contexts per pool, throughput, latencies.

A model with head windows has, in every layer, full KV heads, which see all tokens, and windowed KV heads, which see a
window of the newest tokens and the first tokens (sink tokens). A row of the pool is one page of one KV head. Recycling
frees the rows of windowed heads when the window has passed them. There are three measurements:

- Contexts. More requests than fit the pool arrive at once, with recycling and without. The result is the maximum number
of requests that decoded in one step. Recycling increases it at most by the factor Hkv / (F + (Hkv -
F)·resident/context), where F heads are full and a windowed head has `resident` tokens (window and sinks) in the pool.
- Waiting. The same requests run, interleaved, on a model with head windows and on a model without: time to the first
token and time between tokens.
- Rows in use during one long decode, for a plot.

On a CPU, the sizes are a sixteenth of the sizes on a GPU (contexts of 32,768 tokens, windows of 4,096, pages of 64);
contexts and windows of the waiting measurement are a quarter. The ratio of window to context is the same.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from rich.table import Table

from pallas_attn import FULL
from pallas_attn.models.config import GQAConfig, HeadWindows
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import Engine, EngineConfig
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import generate, summary


@dataclasses.dataclass(frozen=True)
class HeadWindowSizes:
    """Sizes of the requests and pools, in tokens unless stated otherwise.

    Attributes:
      context: final length of a request, prompt and output.
      new_tokens: tokens of each output. They must exceed the number of steps that compute prompts: the first request
      then still decodes when the last request that fits starts to decode.
      window, sink_tokens: numbers of newest and of first tokens that a windowed head sees.
      page_size: tokens per page.
      pool_contexts: number of contexts that fill the pool without recycling.
      step_tokens: maximum tokens of a step, decode and prefill together.
      waiting_context, waiting_window, waiting_batch, waiting_tokens: prompt length, window, number of requests and
        output length of the waiting measurement.
      repeats: runs of the waiting measurement.
        serving_repeats: runs of the measurement of contexts and throughput.
    """

    context: int
    new_tokens: int
    window: int
    sink_tokens: int
    page_size: int
    pool_contexts: int
    step_tokens: int
    waiting_context: int
    waiting_window: int
    waiting_batch: int = 8
    waiting_tokens: int = 64
    repeats: int = 5
    serving_repeats: int = 1

    @property
    def num_pages(self) -> int:
        """Number of pages of a pool that holds `pool_contexts` contexts without recycling."""
        return self.pool_contexts * -(-self.context // self.page_size)

    def allowed(self, num_heads: int, windowed: int) -> float:
        """Return the maximum factor by which recycling increases the number of contexts: rows of a context without
        recycling divided by its rows with recycling. `windowed` of the `num_heads` KV heads have a window.
        """
        resident = min(1.0, (self.window + self.sink_tokens) / self.context)
        return num_heads / (num_heads - windowed + windowed * resident)


SIZES = {
    "cpu": HeadWindowSizes(
        context=2048,
        new_tokens=192,
        window=256,
        sink_tokens=4,
        page_size=4,
        pool_contexts=9,
        step_tokens=512,
        waiting_context=2048,
        waiting_window=256,
        serving_repeats=3,
    ),
    "gpu": HeadWindowSizes(
        context=32768,
        new_tokens=256,
        window=4096,
        sink_tokens=64,
        page_size=64,
        pool_contexts=9,
        step_tokens=8192,
        waiting_context=8192,
        waiting_window=1024,
        waiting_batch=32,
    ),
}
"""Sizes by jax backend."""

MODELS = {
    "cpu": GQAConfig(
        model_type="qwen3",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=4096,
    ),
    "gpu": GQAConfig(
        model_type="qwen3",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        dtype="bfloat16",
    ),
}
"""Models by jax backend. On a GPU: 8 of the 36 layers of Qwen3-8B, with a smaller vocabulary."""


@dataclasses.dataclass(frozen=True)
class HeadWindowBench:
    """A model configuration without windows, and the settings of the measurement.

    Attributes:
      config, dtype, settings: arguments of the models. Weights are random.
      sizes: sizes of requests and pools.
      windowed: numbers of KV heads with windows, one case each.
    """

    config: GQAConfig
    dtype: str
    settings: AttentionSettings
    sizes: HeadWindowSizes
    windowed: tuple[int, ...]

    def model(self, windowed: int = 0, window: int = 0) -> Decoder:
        """Return the model in which the last `windowed` KV heads of every layer have a window of `window` tokens. Its
        weights do not depend on the windows.
        """
        heads, sinks = self.config.num_key_value_heads, self.sizes.sink_tokens
        widths = (FULL,) * (heads - windowed) + (window,) * windowed
        layer = HeadWindows(widths, (0,) * (heads - windowed) + (sinks,) * windowed)
        windows = (layer,) * self.config.num_hidden_layers if windowed else None
        return random_model(dataclasses.replace(self.config, windows=windows), self.dtype, self.settings)

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        return np.random.default_rng(batch).integers(0, self.config.vocab_size, (batch, length)).tolist()


def run(bench: HeadWindowBench, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the report before the first case and after each case. No case starts after `limit_seconds`."""
    began = time.perf_counter()
    report: dict[str, Any] = {
        "model": bench.config.to_hf(),
        "dtype": bench.dtype,
        "implementation": bench.settings.implementation,
        "sizes": dataclasses.asdict(bench.sizes),
        "cases": [],
    }
    yield report
    for windowed in bench.windowed:
        if time.perf_counter() - began > limit_seconds:
            return
        report["cases"].append({"windowed": windowed} | contexts(bench, windowed) | waiting(bench, windowed))
        yield report


def contexts(bench: HeadWindowBench, windowed: int) -> dict[str, Any]:
    """Measure contexts per pool and throughput, in interleaved runs with and without recycling. Return the run of
    median duration of each.
    """
    sizes, model = bench.sizes, bench.model(windowed, bench.sizes.window)
    allowed = sizes.allowed(bench.config.num_key_value_heads, windowed)
    most = round(1.1 * allowed * sizes.pool_contexts)
    prompts = bench.prompts(round(1.5 * allowed * sizes.pool_contexts), sizes.context - sizes.new_tokens)
    engines = {name: _engine(model, sizes, most, recycling) for name, recycling in (("off", False), ("on", True))}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.warmup()
    for name in list(engines) * sizes.serving_repeats:
        runs[name].append(_serve(engines[name], sizes, prompts))
    off, on = (sorted(of_one, key=lambda run: run["run_s"])[len(of_one) // 2] for of_one in runs.values())
    ratios = {f"{key}_ratio": on[key] / off[key] for key in ("contexts", "new_tokens_per_s", "decode_tokens_per_s")}
    return {
        "requests": len(prompts),
        "allowed_ratio": allowed,
        "fraction_of_allowed": ratios["contexts_ratio"] / allowed,
        **ratios,
        "off": off,
        "on": on,
    }


def _serve(engine: Engine, sizes: HeadWindowSizes, prompts: list[list[int]]) -> dict[str, Any]:
    """Measure the maximum number of requests that decode in one step, the total throughput, and the decode throughput
    of the steps in which at least 90% of this number decode.
    """
    preempted = engine.stats().preemptions
    _, steps = generate(engine, prompts, [sizes.new_tokens] * len(prompts))
    run_s = sum(step.duration_s for step in steps)
    most = max(step.decode_tokens for step in steps)
    decodes = [step for step in steps if not step.prefill_tokens and step.decode_tokens >= 0.9 * most]
    return {
        "contexts": most,
        "new_tokens_per_s": len(prompts) * sizes.new_tokens / run_s,
        "decode_tokens_per_s": sum(s.decode_tokens for s in decodes) / sum(s.duration_s for s in decodes),
        "steps": len(steps),
        "preemptions": engine.stats().preemptions - preempted,
        "cache_bytes": engine.stats().cache_bytes,
        "run_s": run_s,
    }


def _engine(model: Decoder, sizes: HeadWindowSizes, max_num_seqs: int, recycling: bool) -> Engine:
    """Return an engine with two sizes of decode steps: one for the number of requests that fit without recycling, one
    for the number that fits with recycling. Padding is then small in both cases.
    """
    return Engine(
        model,
        EngineConfig(
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            max_batched_tokens=sizes.step_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=sizes.context,
            prefix_caching=False,
            recycling=recycling,
            decode_buckets=tuple(sorted({min(sizes.pool_contexts + 1, max_num_seqs), max_num_seqs})),
            prefill_buckets=(sizes.step_tokens,),
            history=None,
        ),
    )


def waiting(bench: HeadWindowBench, windowed: int) -> dict[str, Any]:
    """Measure latencies of a model with head windows ("head_wise") and of a model without windows ("uniform"), and the
    share of the time that head windows save.
    """
    sizes = bench.sizes
    models = {"uniform": bench.model(), "head_wise": bench.model(windowed, sizes.waiting_window)}
    longest = sizes.waiting_context + sizes.waiting_tokens
    config = EngineConfig(
        num_pages=sizes.waiting_batch * -(-longest // sizes.page_size),
        page_size=sizes.page_size,
        max_batched_tokens=sizes.step_tokens,
        max_num_seqs=sizes.waiting_batch,
        max_model_len=longest,
        prefix_caching=False,
        decode_buckets=(sizes.waiting_batch,),
        prefill_buckets=(sizes.step_tokens,),
        history=None,
    )
    engines = {name: Engine(model, config) for name, model in models.items()}
    firsts, betweens = ({name: [] for name in engines} for _ in range(2))
    prompts = bench.prompts(sizes.waiting_batch, sizes.waiting_context)
    for engine in engines.values():
        engine.warmup()
        generate(engine, prompts[:1], [3])
    for name in list(engines) * sizes.repeats:  # interleaved, because the speed of a machine drifts
        outputs, steps = generate(engines[name], prompts, [sizes.waiting_tokens] * len(prompts))
        firsts[name] += [output.ttft_s for output in outputs]
        betweens[name] += [s.duration_s for s in steps if not s.prefill_tokens and s.decode_tokens == len(prompts)]
    saved = {
        f"{kind}_saved": 1 - statistics.median(times["head_wise"]) / statistics.median(times["uniform"])
        for kind, times in (("ttft", firsts), ("between_tokens", betweens))
    }
    times = {name: {"ttft_s": summary(firsts[name]), "between_tokens_s": summary(betweens[name])} for name in engines}
    return times | saved


def long_decode(bench: HeadWindowBench, windowed: int) -> dict[str, Any]:
    """Count the pool rows in use after each step of a request that grows from one page to `sizes.context` tokens, with
    and without recycling.
    """
    sizes, model = bench.sizes, bench.model(windowed, bench.sizes.window)
    prompt = bench.prompts(1, sizes.page_size)
    series: dict[str, Any] = {"windowed": windowed, "prompt_tokens": sizes.page_size}
    for name, recycling in (("off", False), ("on", True)):
        engine = _engine(model, sizes, 1, recycling)
        _, steps = generate(engine, prompt, [sizes.context - sizes.page_size])
        series[name] = [step.used_rows[0] for step in steps]
    return series


def most_rows(bench: HeadWindowBench, windowed: int, tokens: int) -> int:
    """Return the maximum number of pool rows of a sequence of `tokens` tokens that decodes one token per step, with
    recycling.
    """
    sizes = bench.sizes
    pages = -(-tokens // sizes.page_size)
    in_window = (sizes.window + sizes.page_size - 2) // sizes.page_size + 1  # the window may begin anywhere in a page
    resident = min(pages, -(-sizes.sink_tokens // sizes.page_size) + in_window)
    return pages * (bench.config.num_key_value_heads - windowed) + resident * windowed


def table(report: dict[str, Any]) -> Table:
    """Make a table of the results, one line per case."""
    sizes, heads = report["sizes"], report["model"]["num_key_value_heads"]
    title = (
        f"contexts of {sizes['context']:,} in a pool for {sizes['pool_contexts']}, windows of {sizes['window']:,};"
        f" waiting with {sizes['waiting_context']:,} and {sizes['waiting_window']:,}"
    )
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in ("windowed", "contexts", "allowed", "reached", "tokens/s", "first token", "between tokens"):
        made.add_column(column, justify="right")
    for case in report["cases"]:
        off, on = case["off"], case["on"]
        made.add_row(
            f"{case['windowed']} of {heads}",
            f"{off['contexts']} to {on['contexts']} ({case['contexts_ratio']:.2f}x)",
            f"{case['allowed_ratio']:.2f}x",
            f"{case['fraction_of_allowed']:.0%}",
            f"{off['new_tokens_per_s']:,.0f} to {on['new_tokens_per_s']:,.0f} ({case['new_tokens_per_s_ratio']:.2f}x)",
            *(_waited(case, kind) for kind in ("ttft", "between_tokens")),
        )
    return made


def _waited(case: dict[str, Any], kind: str) -> str:
    uniform, head_wise = (1e3 * case[name][f"{kind}_s"]["median"] for name in ("uniform", "head_wise"))
    return f"{uniform:,.2f} to {head_wise:,.2f} ms ({-case[f'{kind}_saved']:+.0%})"


def plot_long_decode(file: BinaryIO, bench: HeadWindowBench, series: dict[str, Any]) -> None:
    """Write a PNG of the rows in use as one context grows, and their upper bound.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    tokens = series["prompt_tokens"] + np.arange(len(series["on"]))
    bound = [most_rows(bench, series["windowed"], count) for count in tokens.tolist()]
    axes.plot(tokens, series["off"], color="#E69F00", label="no recycling")
    axes.plot(tokens, bound, color="#666666", linewidth=6, alpha=0.3, label="sink pages, window and one page")
    axes.plot(tokens, series["on"], color="#0072B2", label="recycling")
    heads, window = bench.config.num_key_value_heads, bench.sizes.window
    axes.set(xlabel="tokens of the context", ylabel="rows in use", xlim=(0, tokens[-1]), ylim=(0, None))
    axes.set_title(f"{series['windowed']} of {heads} KV heads with a window of {window:,} tokens", loc="left")
    axes.legend(frameon=False)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png", dpi=150)
