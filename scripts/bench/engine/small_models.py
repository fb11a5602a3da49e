"""Measure engines with small models: prefill and decode speed by batch size, and savings of the prefix cache.

The models have random weights, which are written to disk, so that Hugging Face transformers' `generate` can be measured
with the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_attn.models.checkpoints import count_parameters, load_model, save_random_checkpoint
from pallas_attn.models.config import PRESETS
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Engine, EngineConfig, SamplingParams

OWN_TOKENS = 32
"""Prompt tokens of a request after the prefix that all requests share, in the measurement of the prefix cache."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts of `prompt_tokens` tokens, each continued by `new_tokens` tokens. A measurement is the median of
    `repeats` runs.
    """

    prompt_tokens: int
    new_tokens: int
    repeats: int
    page_size: int = 64
    max_batched_tokens: int = 512

    @property
    def shared_tokens(self) -> int:
        """Tokens of the prefix that all requests share, in the measurement of the prefix cache."""
        return 4 * self.prompt_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared_tokens + OWN_TOKENS + self.new_tokens

    def engine_config(self, batch: int, max_len: int, *, prefix_caching: bool) -> EngineConfig:
        return EngineConfig(
            num_pages=2 * batch * -(-max_len // self.page_size),
            page_size=self.page_size,
            max_batched_tokens=max(self.max_batched_tokens, batch),
            max_num_seqs=batch,
            max_model_len=max_len,
            prefix_caching=prefix_caching,
            decode_buckets=(batch,),
        )


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompts(rng: np.random.Generator, vocab_size: int, batch: int, length: int) -> list[list[int]]:
    return rng.integers(0, vocab_size, (batch, length)).tolist()


def timed_run(engine: Engine, batch: list[list[int]], new_tokens: int) -> float:
    """Generate `new_tokens` tokens for each prompt of `batch`. Return the seconds that this takes."""
    began = time.perf_counter()
    outputs = engine.generate(batch, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    elapsed = time.perf_counter() - began
    for output in outputs:
        if len(output.output_ids) != new_tokens:
            raise RuntimeError(f"request {output.request_id} ended early: {output.finish_reason}")
    return elapsed


def make_engine(model: Any, work: Workload, batch: int, max_len: int, *, prefix_caching: bool) -> Engine:
    engine = Engine(model, work.engine_config(batch, max_len, prefix_caching=prefix_caching))
    engine.warmup()
    return engine


def bench_batch(model: Any, work: Workload, batch: int) -> dict[str, Any]:
    """Measure prefill and decode speed of `batch` requests that arrive at once. Prompts have no common prefix."""
    engine = make_engine(model, work, batch, work.prompt_tokens + work.new_tokens, prefix_caching=False)
    rng = np.random.default_rng(batch)
    vocab_size = model.config.vocab_size
    timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), work.new_tokens)
    first, whole = [], []
    for _ in range(work.repeats):
        first.append(timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), 1))
        whole.append(timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), work.new_tokens))
    prefill_s, total_s = statistics.median(first), statistics.median(whole)
    stats = engine.stats()
    return {
        "batch": batch,
        "prefill_s": prefill_s,
        "total_s": total_s,
        "prefill_tokens_per_s": batch * work.prompt_tokens / prefill_s,
        "decode_tokens_per_s": batch * (work.new_tokens - 1) / (total_s - prefill_s),
        "total_s_spread": [min(whole), max(whole)],
        "compilations": stats.compilations,
        "compile_s": stats.compile_s,
    }


def bench_prefix_cache(model: Any, work: Workload, batch: int) -> dict[str, Any]:
    """Measure requests with a long common prefix and `OWN_TOKENS` further prompt tokens, with the prefix cache off and
    on. An unmeasured request computes the prefix first.
    """
    shared, own, requests = work.shared_tokens, OWN_TOKENS, 2 * batch
    rng = np.random.default_rng(0)
    row: dict[str, Any] = {"requests": requests, "shared_tokens": shared, "own_tokens": own, "batch": batch}
    for name, prefix_caching in (("off", False), ("on", True)):
        engine = make_engine(model, work, batch, work.longest, prefix_caching=prefix_caching)
        seconds = []
        for _ in range(work.repeats):
            prefix = prompts(rng, model.config.vocab_size, 1, shared)[0]
            tails = prompts(rng, model.config.vocab_size, requests, own)
            timed_run(engine, [prefix + tails[0]], 1)  # computes the prefix, which the prefix cache then holds
            seconds.append(timed_run(engine, [prefix + tail for tail in tails], work.new_tokens))
        row[f"total_s_{name}"] = statistics.median(seconds)
        row[f"prefix_hit_rate_{name}"] = engine.stats().prefix_hit_rate
    row["speedup"] = row["total_s_off"] / row["total_s_on"]
    return row


def bench_transformers(
    python: str, checkpoint: Path, work: Workload, batches: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Time transformers' `generate` on the checkpoint, in a process of the Python at path `python`."""
    script = Path(__file__).parents[1] / "peers" / "transformers_generate.py"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "transformers.json"
        command = [python, str(script), "--model", str(checkpoint), "--json", str(report), "--dtype", dtype]
        command += ["--prompt-tokens", str(work.prompt_tokens), "--new-tokens", str(work.new_tokens)]
        command += ["--repeats", str(work.repeats), "--threads", str(num_cores()), "--batch", *map(str, batches)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())


def bench_config(
    name: str,
    work: Workload,
    batches: Sequence[int],
    settings: AttentionSettings,
    dtype: str,
    transformers: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a configuration. If `transformers` is given, yield them again with its times.

    Args:
      name: name of the configuration in `PRESETS`.
      work: workload, run for each of `batches`.
      settings, dtype: settings of the model.
      transformers: path of a Python that has torch and transformers; None to skip this measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / name
        save_random_checkpoint(checkpoint, PRESETS[name])
        model = load_model(checkpoint, dtype, settings)
        result: dict[str, Any] = {
            "config": name,
            "parameters": count_parameters(model.config),
            "batches": [bench_batch(model, work, batch) for batch in batches],
            "prefix_cache": bench_prefix_cache(model, work, min(8, max(batches))),
        }
        yield result
        if transformers is not None:
            peer = bench_transformers(transformers, checkpoint, work, batches, dtype)
            result["transformers"] = peer
            for ours, theirs in zip(result["batches"], peer["results"], strict=True):
                theirs_s = theirs["prefill_s"] + theirs["decode_s"]
                ours["speedup_over_transformers"] = {
                    "prefill": ours["prefill_tokens_per_s"] / theirs["prefill_tokens_per_s"],
                    "decode": ours["decode_tokens_per_s"] / theirs["decode_tokens_per_s"],
                    "total": theirs_s / ours["total_s"],
                }
            yield result


def show(console: Console, result: dict[str, Any]) -> None:
    title = f"{result['config']}: {result['parameters'] / 1e6:.1f}M parameters"
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("batch", "prefill tok/s", "decode tok/s", "total s", "compile s", "over transformers"):
        table.add_column(column, justify="right")
    for row in result["batches"]:
        ratio = row.get("speedup_over_transformers")
        versus = " ".join(f"{ratio[part]:.1f}x {part}" for part in ratio) if ratio else "not measured"
        table.add_row(
            str(row["batch"]),
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            f"{row['total_s']:.2f}",
            f"{row['compile_s']:.1f}",
            versus,
        )
    console.print(table)
    cache = result["prefix_cache"]
    console.print(
        f"prefix cache, {cache['requests']} requests sharing {cache['shared_tokens']} tokens:"
        f" {cache['total_s_off']:.2f} s without, {cache['total_s_on']:.2f} s with"
        f" ({cache['speedup']:.1f}x, hit rate {cache['prefix_hit_rate_on']:.0%})"
    )
