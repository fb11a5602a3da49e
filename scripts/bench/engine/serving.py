"""Measure prefill, decode and latencies of an engine with a model of real size, compared with the roofline.

A case is `batch` requests that arrive at once, each with a prompt of `context` random tokens. One engine serves all
cases. All its steps are compiled before the first case.

The first requests of a case start to decode while later prompts are computed. They get more tokens, so that at the end
all requests decode at the same time. Only the steps in which all requests decode are measured as decode steps.

Cases run in the order of their cost. A case whose prompts would not be computed in the remaining time is skipped, and
the report has the reason.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_attn.models.checkpoints import count_parameters
from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import Engine, EngineConfig, RequestOutput, SamplingParams, StepRecord
from scripts.bench.engine.random_model import random_model
from scripts.bench.harness.device import Rates, measure_rates
from scripts.bench.harness.timing import Stopwatch

ROUTED = ("mlp.gate_up_proj", "mlp.down_proj")
"""Suffixes of the names of the weights of routed experts."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """Workload: batches, contexts and step sizes.

    Attributes:
      batches, contexts: batches and contexts of the cases, in all combinations.
      new_tokens: output tokens of the last request. Requests that start earlier get more.
        limit_seconds: time limit of the run. It includes making the model and compiling the steps.
        page_size: tokens per page.
        max_batched_tokens: maximum new tokens of a step.
        prefill_seqs: maximum number of prompts in a step.
      most_tokens: maximum prompt tokens of a case; larger cases are skipped.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    limit_seconds: float
    page_size: int = 64
    max_batched_tokens: int = 4096
    prefill_seqs: int = 8
    most_tokens: int | None = None

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(batch, context) of each case, in rising order of batch * context**2, an estimate of the prefill time."""
        every = [(batch, context) for batch in self.batches for context in self.contexts]
        if self.most_tokens is not None:
            every = [(batch, context) for batch, context in every if batch * context <= self.most_tokens]
        return sorted(every, key=lambda case: case[0] * case[1] ** 2)

    def tokens_each(self, batch: int, context: int) -> list[int]:
        """Return the output tokens of each request.

        A request gets `new_tokens`, and one more for each step that may compute prompts of later requests. Such a step
        has the maximum number of prompt tokens or completes the maximum number of prompts.
        """
        prompt_tokens = max(1, self.max_batched_tokens - batch)
        return [
            self.new_tokens + behind * context // prompt_tokens + -(-behind // self.prefill_seqs)
            for behind in reversed(range(batch))
        ]

    def engine_config(self) -> EngineConfig:
        longest = {case: case[1] + self.tokens_each(*case)[0] for case in self.cases}
        largest = self.max_batched_tokens
        return EngineConfig(
            num_pages=max(batch * -(-length // self.page_size) for (batch, _), length in longest.items()),
            page_size=self.page_size,
            max_batched_tokens=largest,
            max_num_seqs=max(self.batches),
            max_prefill_seqs=min(self.prefill_seqs, max(self.batches)),
            max_model_len=max(longest.values()),
            prefix_caching=False,
            decode_buckets=tuple(sorted(self.batches)),
            prefill_buckets=(*sorted(n for n in {*self.contexts} if n < largest), largest),
            history=None,
        )


@dataclasses.dataclass(frozen=True)
class Costs:
    """Minimum bytes and operations of the steps of a mixture-of-experts model.

    Attributes:
      config: configuration of the model.
      dense_bytes: bytes of the weights that every step reads, which are all weights except routed experts.
      routed_bytes: bytes of the routed experts.
      token_bytes: cache bytes per token in all layers together.
      rates: rates of the card, measured in the same run.
    """

    config: DeepSeekConfig
    dense_bytes: int
    routed_bytes: int
    token_bytes: int
    rates: Rates

    @staticmethod
    def of(model: Decoder, rates: Rates) -> Costs:
        if not isinstance(model.config, DeepSeekConfig):
            raise NotImplementedError(
                f"costs of a {model.config.model_type}: only mixture-of-experts models are supported"
            )
        sizes = {
            ".".join(map(str, path)): weight.size * weight.dtype.itemsize
            for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
        routed = sum(size for name, size in sizes.items() if name.endswith(ROUTED))
        rows_only = 0 if model.lm_head is None else sizes["embed_tokens"]  # a step reads only a few rows of it
        token_bytes = sum(spec.bytes_per_page for spec in model.cache_specs(1, 1))
        return Costs(model.config, sum(sizes.values()) - routed - rows_only, routed, token_bytes, rates)

    def weight_bytes(self, tokens: int) -> float:
        """Return the expected bytes of weights that a step of `tokens` tokens reads, if experts are selected evenly."""
        missed = (1 - self.config.num_experts_per_tok / self.config.n_routed_experts) ** tokens
        return self.dense_bytes + (1 - missed) * self.routed_bytes

    def decode_floor(self, batch: int, context: float) -> float:
        """Return the seconds to read the weights and latents of a decode step at the copy rate."""
        return (self.weight_bytes(batch) + batch * context * self.token_bytes) / self.rates.copy

    def prefill_floor(self, batch: int, context: int, itemsize: int) -> float:
        """Return the seconds to compute prompts at the matrix rate: all GEMMs except the LM head, and causal attention
        with expanded keys and values.
        """
        c = self.config
        share = c.num_experts_per_tok / c.n_routed_experts
        weights = (self.dense_bytes + share * self.routed_bytes) / itemsize - c.vocab_size * c.hidden_size
        widths = c.qk_head_dim + c.v_head_dim
        attention = c.num_hidden_layers * c.num_attention_heads * widths * context * (context + 1) / 2
        return 2 * batch * (context * weights + attention) / self.rates.matrix


def run(config: DeepSeekConfig, serving: Serving, settings: AttentionSettings, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the report after the model is compiled, and after each case."""
    began = time.perf_counter()
    rates = measure_rates(Stopwatch(samples=3))
    model = jax.block_until_ready(random_model(config, dtype, settings))
    made = time.perf_counter()
    engine = Engine(model, serving.engine_config())
    engine.warmup()
    generate(engine, [[1, 2, 3]] * min(2, max(serving.batches)), [3] * min(2, max(serving.batches)))
    costs = Costs.of(model, rates)
    report: dict[str, Any] = {
        "parameters": count_parameters(config),
        "rates": dataclasses.asdict(rates),
        "implementation": settings.implementation,
        "made_s": made - began,
        "compile_s": engine.stats().compile_s,
        "compilations": engine.stats().compilations,
        "cache_bytes": engine.stats().cache_bytes,
        "cases": [],
    }
    yield report
    reached = 1.0  # floor / time of the newest prefill, to estimate the time of the next prefill
    for batch, context in serving.cases:
        floor = costs.prefill_floor(batch, context, np.dtype(model.embed_tokens.dtype).itemsize)
        left = began + serving.limit_seconds - time.perf_counter()
        case: dict[str, Any] = {"batch": batch, "context": context}
        if floor / reached > left:
            case["skipped"] = f"its prompts would take about {floor / reached:.0f} s, and {max(left, 0):.0f} were left"
        else:
            case |= measure(engine, costs, serving, batch, context, floor)
            reached = case["prefill_fraction_of_floor"]
        report["cases"].append(case)
        report["compilations"] = engine.stats().compilations
        yield report


def generate(
    engine: Engine, prompts: list[list[int]], new_tokens: list[int]
) -> tuple[list[RequestOutput], list[StepRecord]]:
    """Run requests that arrive at once. Return their outputs and the records of the engine's steps."""
    before = engine.stats().num_steps
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in new_tokens])
    for output, tokens in zip(outputs, new_tokens, strict=True):
        if len(output.output_ids) != tokens:
            raise RuntimeError(f"request {output.request_id} ended early: {output.finish_reason}")
    return outputs, list(engine.stats().steps[before:])


def measure(
    engine: Engine, costs: Costs, serving: Serving, batch: int, context: int, prefill_floor: float
) -> dict[str, Any]:
    """Measure one case: times of its steps and requests, and floor / time for prefill and decode. The floors are the
    roofline times of `Costs`.
    """
    prompts = np.random.default_rng(batch).integers(0, costs.config.vocab_size, (batch, context)).tolist()
    new_tokens = serving.tokens_each(batch, context)
    outputs, steps = generate(engine, prompts, new_tokens)
    prefill_s = sum(step.duration_s for step in steps if step.prefill_tokens)
    decodes = [step.duration_s for step in steps if not step.prefill_tokens and step.decode_tokens == batch]
    step_s = statistics.median(decodes)
    mean_context = context + statistics.mean(new_tokens) - len(decodes) / 2
    firsts = [output.ttft_s for output in outputs if output.ttft_s is not None]
    return {
        "prefill_tokens_per_s": batch * context / prefill_s,
        "prefill_fraction_of_floor": prefill_floor / prefill_s,
        "decode_tokens_per_s": batch / step_s,
        "decode_fraction_of_floor": costs.decode_floor(batch, mean_context) / step_s,
        "decode_floor_s": costs.decode_floor(batch, mean_context),
        "ttft_s": summary(firsts),
        "between_tokens_s": summary(decodes),
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def latest(report: dict[str, Any]) -> str:
    """Format the newest case of a report as one line. Before the first case, describe the model instead."""
    if not report["cases"]:
        return (
            f"{report['parameters'] / 1e9:.2f}B parameters made in {report['made_s']:.1f} s,"
            f" {report['compilations']} kinds of steps compiled in {report['compile_s']:.1f} s,"
            f" copies at {report['rates']['copy'] / 1e12:.2f} TB/s"
        )
    case = report["cases"][-1]
    name = f"batch {case['batch']}, context {case['context']}"
    if "skipped" in case:
        return f"{name}: skipped, {case['skipped']}"
    prefill, decode = (
        f"{kind} {case[f'{kind}_tokens_per_s']:,.0f} tokens/s ({case[f'{kind}_fraction_of_floor']:.0%} of the floor)"
        for kind in ("prefill", "decode")
    )
    first, between = (1e3 * case[key]["median"] for key in ("ttft_s", "between_tokens_s"))
    return f"{name}: {prefill}, {decode}, first token after {first:,.1f} ms, others after {between:,.2f} ms"
