"""Measure speculative decoding at given acceptance rates, and with n-gram drafts on repeating and on random text.

Plain decoding, without drafts, is the baseline. A row is one decoding request of a step. A proposer is the component
that drafts tokens.

The model has random weights. Its input embeddings are scaled up until the layers hardly change them, so the next token
depends on the newest token only. A table of all next tokens is computed once. The steps still cost as much as those of
any other model of this size. A proposer that reads the table is right at any given rate.

The bound of tokens per second assumes that drafting is free. A verification step takes the time of a plain step plus
the longer of two times: reading the weights of the additional experts that the draft tokens select, and computing the
draft tokens. With d drafts and acceptance rate p, a row gets 1 + p + ... + p^d tokens per step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import (
    DraftRows,
    Engine,
    EngineConfig,
    NGramProposer,
    Proposer,
    SamplingParams,
    Speculation,
)
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import Costs
from scripts.bench.harness.device import measure_rates
from scripts.bench.harness.timing import Stopwatch

EMBEDDING_SCALE = 2.0**20
"""Factor of the input embeddings. The embedding plus the output of a layer then almost always rounds to the
embedding.
"""

SETTLING_STEPS = 32
"""Number of steps between the end of the last prompt and the measurement. In these steps the adaptive engine adjusts
its number of drafts to the acceptance rate.
"""


FEWEST_TOKENS = 128
"""Minimum number of measured tokens per request, even if this exceeds `new_tokens` in total."""


@dataclasses.dataclass(frozen=True)
class DraftingWork:
    """Cases: every combination of batch, context and acceptance rate.

    Attributes:
      batches, contexts, rates: values of the cases.
      num_drafts: maximum drafts per row.
      new_tokens: measured tokens of all requests together; more if a request would get fewer than `FEWEST_TOKENS`.
      page_size, max_batched_tokens: settings of the engine.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rates: tuple[float, ...]
    num_drafts: int
    new_tokens: int
    page_size: int = 64
    max_batched_tokens: int = 4096

    def measured_tokens(self, batch: int) -> int:
        """Measured tokens per request."""
        return max(self.new_tokens // batch, min(self.new_tokens, FEWEST_TOKENS))

    def output_tokens(self, batch: int, context: int) -> int:
        """Upper bound of the tokens of a request until the measurement ends, for any acceptance rate. It includes the
        tokens that the first requests get while the prompts of later requests are computed.
        """
        prompt_steps = batch * context // max(1, self.max_batched_tokens - batch) + batch
        return self.measured_tokens(batch) + (prompt_steps + SETTLING_STEPS + 4) * (1 + self.num_drafts)

    def engine_config(self, speculate: Speculation | None) -> EngineConfig:
        """Return an engine configuration that is large enough for every case, so that all cases run the same
        programs.
        """
        cases = [(batch, context) for batch in self.batches for context in self.contexts]
        longest = [context + self.output_tokens(batch, context) + 1 for batch, context in cases]
        most = max(self.batches)
        return EngineConfig(
            num_pages=max(b * -(-n // self.page_size) for (b, _), n in zip(cases, longest, strict=True)) + 1,
            page_size=self.page_size,
            max_batched_tokens=max(self.max_batched_tokens, most),
            max_num_seqs=most,
            max_prefill_seqs=min(most, 8),
            max_model_len=max(longest),
            prefix_caching=False,
            decode_buckets=tuple(sorted(set(self.batches))),
            prefill_buckets=(max(self.max_batched_tokens, most),),
            speculate=speculate,
            history=None,
        )


class TabledProposer(Proposer):
    """Proposer that drafts from a table of next tokens and makes a share of the drafts wrong.

    Attributes:
      weights: the table (int32 [V], next token by token) and the rate of correct drafts (float32 scalar).
    """

    def __init__(self, next_tokens: Int32[Array, "V"], rate: float):
        self._next_tokens = next_tokens
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        """Set the rate of correct drafts."""
        self.weights = (self._next_tokens, jnp.asarray(rate, jnp.float32))

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Any]:
        next_tokens, rate = weights
        token, drafts = rows.tokens, []
        for ahead in range(num_drafts):
            token = next_tokens[token]
            position, slots, tokens = (x.astype(jnp.uint32) for x in (rows.lens + ahead, rows.slots, token))
            mixed = _mixed(_mixed(_mixed(position) + slots) + tokens)
            is_right = (mixed >> 8).astype(jnp.float32) < rate * 2**24
            drafts.append(jnp.where(is_right, token, (token + 1) % next_tokens.shape[0]))
        return jnp.stack(drafts, axis=1), state


def _mixed(x: Array) -> Array:
    """Hash the bits of `x` (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


class ChosenProposer(Proposer):
    """Proposer that forwards to one of several stateless proposers, selected between steps.

    The compiled step contains all proposers, so selecting another proposer compiles nothing. Compilation takes minutes.

    Attributes:
      weights: index of the selected proposer, and the weights of all proposers.
    """

    def __init__(self, *proposers: Proposer):
        self._proposers = proposers
        self.choose(0)

    def choose(self, index: int) -> None:
        """Select the proposer of the following steps, and copy the current weights of all proposers."""
        self.weights = (jnp.asarray(index, jnp.int32), tuple(proposer.weights for proposer in self._proposers))

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Any]:
        index, of_each = weights

        def drafts(proposer: Proposer, own: Any) -> Any:
            return lambda: proposer.propose(own, (), rows, num_drafts)[0]

        return jax.lax.switch(index, list(map(drafts, self._proposers, of_each))), state


def following_model(config: DeepSeekConfig, dtype: str, settings: AttentionSettings) -> tuple[Decoder, Array]:
    """Return a random model whose next token depends on the newest token only, and its table (int32 [V])."""
    model = random_model(config, dtype, settings)
    model.embed_tokens[...] = model.embed_tokens[...] * jnp.asarray(EMBEDDING_SCALE, dtype)

    head = model.embed_tokens[...].T if model.lm_head is None else model.lm_head.weight[...]
    graph, norm = nnx.split(model.norm)
    return model, _following(graph, norm, model.embed_tokens[...], head)


@functools.partial(jax.jit, static_argnums=0)
def _following(graph: Any, norm: Any, embeddings: Array, head: Array) -> Int32[Array, "V"]:
    """Return the most likely next token of each token, computed in batches of 2,048 tokens.

    The weights are arguments of the compiled function, because constants would be copied to the host and back.
    """

    def of_row(row: Array) -> Int32[Array, ""]:
        x = nnx.merge(graph, norm)(row[None])
        logits = jnp.matmul(x, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return jnp.argmax(logits[0]).astype(jnp.int32)

    return jax.lax.map(of_row, embeddings, batch_size=2048)


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, work: DraftingWork
) -> dict[str, Any]:
    """Decode requests in one batch.

    Returns:
      Results of the steps in which all requests decode: tokens per second; mean time of a step; mean number of drafts
      and of accepted drafts per request and step; and, for each number of drafts per row, the number of steps and their
      median time.
    """
    arrived: Counter[int | str] = Counter()
    ids = [
        engine.add_request(prompt, dataclasses.replace(params, seed=seed), on_token=lambda i, *_: arrived.update((i,)))
        for seed, prompt in enumerate(prompts)  # with equal seeds, all requests would sample the same tokens
    ]

    def step() -> None:
        if not engine.has_unfinished:
            raise RuntimeError(f"requests ended after {dict(arrived)} tokens, before enough steps were measured")
        engine.step()

    while len(arrived) < len(ids):
        step()
    for _ in range(SETTLING_STEPS):
        step()
    before, first, began = arrived.copy(), engine.stats().num_steps, time.perf_counter()
    while max(arrived.values()) < max(before.values()) + work.measured_tokens(len(prompts)):
        step()
    seconds, got = time.perf_counter() - began, arrived.total() - before.total()
    stats = engine.stats()
    steps = stats.steps[first - stats.num_steps :]
    for i in ids:
        engine.abort(i)
    while engine.has_unfinished:
        engine.step()
    rows = len(steps) * len(ids)
    durations: dict[int, list[float]] = {}
    for record in steps:
        durations.setdefault(-(-record.drafted_tokens // len(ids)), []).append(record.duration_s)
    return {
        "tokens_per_s": got / seconds,
        "step_s": seconds / len(steps),
        "drafted": sum(record.drafted_tokens for record in steps) / rows,
        "accepted": sum(record.accepted_tokens for record in steps) / rows,
        "steps": [
            {"drafts": drafts, "count": len(seconds), "median_s": statistics.median(seconds)}
            for drafts, seconds in sorted(durations.items())
        ],
    }


def fastest(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the most tokens per second.

    Any run may be slowed down by a pause of the host, and plain decoding also because it is measured first. A pause can
    cost more than 3%, the largest loss that an adaptive engine is allowed to have over plain decoding.
    """
    return max(runs, key=lambda run: run["tokens_per_s"])


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Return the mean number of tokens per row and step. Each draft is accepted with probability `rate`, if all drafts
    before it were accepted.
    """
    return sum(rate**i for i in range(num_drafts + 1))


def verifying_s(costs: Costs, plain_s: float, batch: int, num_drafts: int, itemsize: int) -> float:
    """Return the minimum seconds of a verification step, given the seconds of a plain step; see the module
    docstring.
    """
    tokens, config = batch * (1 + num_drafts), costs.config
    read = (costs.weight_bytes(tokens) - costs.weight_bytes(batch)) / costs.rates.copy
    share = config.num_experts_per_tok / config.n_routed_experts
    weights = (costs.dense_bytes + share * costs.routed_bytes) / itemsize
    return plain_s + max(read, 2 * (tokens - batch) * weights / costs.rates.matrix)


def run(
    config: DeepSeekConfig, work: DraftingWork, settings: AttentionSettings, dtype: str, *, adaptive: bool
) -> Iterator[dict[str, Any]]:
    """Yield the result of each case: tokens per second, the ratio to plain decoding, and the share of the bound.

    The bound is the highest over all numbers of drafts that the engine may use (`draft_buckets`).
    """
    rates = measure_rates(Stopwatch(samples=3))
    model, table = following_model(config, dtype, settings)
    costs, itemsize = Costs.of(model, rates), np.dtype(model.embed_tokens[...].dtype).itemsize
    tabled = TabledProposer(table, 1.0)
    chosen = ChosenProposer(tabled, NGramProposer())
    speculate = Speculation(chosen, work.num_drafts, adaptive)
    plain_engine, engine = [Engine(model, work.engine_config(policy)) for policy in (None, speculate)]
    warm_up((plain_engine, engine))
    (scheduler,) = engine._ranks.schedulers
    new_control = copy.deepcopy(scheduler._draft_control)

    def measure(prompts: Sequence[Sequence[int]], params: SamplingParams, repeats: int) -> dict[str, Any]:
        """Return the fastest of `repeats` runs. Each run starts without statistics of acceptance rates and step
        times.
        """
        runs = []
        for _ in range(repeats):
            scheduler._draft_control = copy.deepcopy(new_control)
            runs.append(decode(engine, prompts, params, work))
        return fastest(runs)

    def measure_plain(prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, Any]:
        return fastest([decode(plain_engine, prompts, params, work) for _ in range(2)])

    host_table = np.asarray(table)
    for batch in work.batches:
        for context in work.contexts:
            greedy = SamplingParams(max_tokens=work.output_tokens(batch, context), ignore_eos=True)
            drawn = dataclasses.replace(greedy, temperature=1e6)
            rng = np.random.default_rng(batch)
            random_text = rng.integers(0, config.vocab_size, (batch, context)).tolist()
            repeating = [follow(host_table, first, context) for first in rng.integers(0, config.vocab_size, batch)]
            case = {"batch": batch, "context": context}
            plain = measure_plain(random_text, greedy)
            for rate in work.rates:
                tabled.set_rate(rate)
                chosen.choose(0)
                got = measure(random_text, greedy, 1 if rate else 2)
                plain_s = batch / plain["tokens_per_s"]
                steps = [(n, verifying_s(costs, plain_s, batch, n, itemsize)) for n in speculate.draft_buckets]
                bound = max(batch * expected_tokens(rate, n) / seconds for n, seconds in steps)
                yield case | {"proposer": "table", "rate": rate} | got | ratios(got, plain, bound)
            chosen.choose(1)
            plain_drawn = measure_plain(random_text, drawn)
            for text, prompts, params, repeats, without in (
                ("repeating", repeating, greedy, 1, plain),
                ("random", random_text, drawn, 2, plain_drawn),
            ):
                got = measure(prompts, params, repeats)
                yield case | {"proposer": "ngram", "text": text} | got | ratios(got, without)


def warm_up(engines: Sequence[Engine]) -> None:
    """Compile all steps of the engines, then run each program twice, so that its CUDA graph exists. Compilation also
    creates graphs, but XLA drops them when it creates other graphs.
    """
    for engine in engines:
        engine.warmup()
    for engine in engines:
        for bucket in engine._runner.buckets() * 2:
            engine._runner.run_idle(bucket)


def follow(table: np.ndarray, first: int, length: int) -> list[int]:
    """Return `length` tokens that start with `first` and follow the table, as the model would generate them."""
    tokens = [int(first)]
    while len(tokens) < length:
        tokens.append(int(table[tokens[-1]]))
    return tokens


def ratios(got: dict[str, Any], plain: dict[str, Any], bound: float | None = None) -> dict[str, float]:
    """Return tokens per second relative to plain decoding, and as a share of the bound unless `bound` is None."""
    rate, plain_rate = got["tokens_per_s"], plain["tokens_per_s"]
    result = {"plain_tokens_per_s": plain_rate, "plain_step_s": plain["step_s"], "of_plain": rate / plain_rate}
    return result if bound is None else result | {"bound_tokens_per_s": bound, "of_bound": rate / bound}


def line(result: dict[str, Any]) -> str:
    """Format a result as one line."""
    drafts = f"acceptance {result['rate']:g}" if "rate" in result else f"ngram, {result['text']} text"
    bound = f", {result['of_bound']:.0%} of the bound" if "of_bound" in result else ""
    return (
        f"batch {result['batch']}, context {result['context']}, {drafts}: {result['tokens_per_s']:,.0f} tokens/s,"
        f" {result['of_plain']:.2f}x plain{bound}; {1e3 * result['step_s']:.2f} ms a step, {result['accepted']:.2f} of"
        f" {result['drafted']:.2f} drafts accepted"
    )
