"""Measure decode steps of sequences with a common prefix, with `cascade_decode` and without.

A case is a number of requests with a prefix that all of them share, such as a system prompt, and `OWN_TOKENS` further
prompt tokens. An unmeasured request computes the prefix first, so that the prefix cache has it. The requests then run
on two engines with the same model, in interleaved runs: "on" has `EngineConfig.cascade_attention`, "off" has not. Only
steps in which all requests decode are measured. A case without a prefix measures the cost of counting shared pages.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.table import Table

from pallas_attn.models.config import GQAConfig
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Engine, EngineConfig
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import generate, summary

OWN_TOKENS = 32
"""Prompt tokens of a request after the prefix."""


@dataclasses.dataclass(frozen=True)
class SharedPrefixSizes:
    """Sizes of the cases.

    Attributes:
      samples: numbers of requests of the cases.
      prefixes: numbers of tokens that all requests of a case share; 0 for none.
      new_tokens: output tokens of a request.
      page_size: tokens per page.
      step_tokens: maximum new tokens of a step.
      repeats: runs of each engine per case.
    """

    samples: tuple[int, ...]
    prefixes: tuple[int, ...]
    new_tokens: int = 64
    page_size: int = 64
    step_tokens: int = 4096
    repeats: int = 3

    def engine_config(self, *, cascade_attention: bool) -> EngineConfig:
        longest, most = max(self.prefixes) + OWN_TOKENS + self.new_tokens, max(self.samples)
        own_pages = 2 + -(-(OWN_TOKENS + self.new_tokens) // self.page_size)
        return EngineConfig(
            num_pages=-(-longest // self.page_size) + most * own_pages,
            page_size=self.page_size,
            max_batched_tokens=max(self.step_tokens, most),
            max_num_seqs=most,
            max_prefill_seqs=most,
            max_model_len=longest,
            decode_buckets=tuple(sorted(self.samples)),
            prefill_buckets=(max(self.step_tokens, most),),
            cascade_attention=cascade_attention,
            history=None,
        )


SIZES = {
    "cpu": SharedPrefixSizes((4,), (0, 256), new_tokens=16, page_size=16, step_tokens=256),
    "gpu": SharedPrefixSizes((4, 16, 64), (0, 2048, 8192, 32768)),
}
"""Sizes by jax backend. On a CPU, set a low `AttentionSettings.cascade_saved_bytes`, because the caches are small."""


def run(
    config: GQAConfig, dtype: str, settings: AttentionSettings, sizes: SharedPrefixSizes, limit_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the report after each case. No case starts after `limit_seconds`."""
    began, model = time.perf_counter(), random_model(config, dtype, settings)
    engines = {name: Engine(model, sizes.engine_config(cascade_attention=name == "on")) for name in ("off", "on")}
    report: dict[str, Any] = {
        "model": config.to_hf(),
        "dtype": dtype,
        "settings": dataclasses.asdict(settings),
        "sizes": dataclasses.asdict(sizes),
        "warmup_s": {name: engine.warmup() for name, engine in engines.items()},
        "compilations": {name: engine.stats().compilations for name, engine in engines.items()},
        "cases": [],
    }
    for samples in sizes.samples:
        for prefix in sizes.prefixes:
            if time.perf_counter() - began > limit_seconds:
                return
            report["cases"].append(_case(engines, config.vocab_size, sizes, samples, prefix))
            yield report


def _case(
    engines: dict[str, Engine], vocab_size: int, sizes: SharedPrefixSizes, samples: int, prefix: int
) -> dict[str, Any]:
    """Measure decode steps of `samples` requests that share `prefix` tokens."""
    rng = np.random.default_rng(samples + prefix)
    shared = rng.integers(0, vocab_size, prefix).tolist()
    prompts = [[*shared, *rng.integers(0, vocab_size, OWN_TOKENS).tolist()] for _ in range(samples)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    num_cascades, tokens = dict.fromkeys(engines, 0), {}
    for name in [*engines] * sizes.repeats:  # interleaved, because the speed of a machine drifts
        engine = engines[name]
        generate(engine, [prompts[0]], [2])  # the prefix cache then has the prefix
        outputs, steps = generate(engine, prompts, [sizes.new_tokens] * samples)
        decodes = [step for step in steps if not step.prefill_tokens and step.decode_tokens == samples]
        seconds[name] += [step.duration_s for step in decodes]
        num_cascades[name] += sum(step.cascade for step in decodes)
        tokens[name] = [output.output_ids for output in outputs]
    equal = [a == b for of_off, of_on in zip(*tokens.values(), strict=True) for a, b in zip(of_off, of_on, strict=True)]
    return {
        "samples": samples,
        "prefix_tokens": prefix,
        "step_s": {name: summary(of_engine) for name, of_engine in seconds.items()},
        "steps": {name: len(of_engine) for name, of_engine in seconds.items()},
        "cascade_steps": num_cascades,
        "speedup": statistics.median(seconds["off"]) / statistics.median(seconds["on"]),
        "equal_tokens": sum(equal) / len(equal),
    }


def table(report: dict[str, Any]) -> Table:
    """Make a table of the results, one line per case."""
    title = "warmup " + ", ".join(
        f"{name}: {report['compilations'][name]} shapes in {seconds:.1f} s"
        for name, seconds in report["warmup_s"].items()
    )
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in ("requests", "shared tokens", "off, ms", "on, ms", "off/on", "cascade steps", "equal tokens"):
        made.add_column(column, justify="right")
    for case in report["cases"]:
        off, on = (1e3 * case["step_s"][name]["median"] for name in ("off", "on"))
        made.add_row(
            str(case["samples"]),
            f"{case['prefix_tokens']:,}",
            f"{off:,.3f}",
            f"{on:,.3f}",
            f"{case['speedup']:.2f}x",
            f"{case['cascade_steps']['on']} of {case['steps']['on']}",
            f"{case['equal_tokens']:.0%}",
        )
    return made
