"""Measures speculative decoding with acceptance set at will, compared with plain decoding and with what arithmetic
allows; and n-grams on text that repeats itself and on text that never does.

The model has random weights of a real size, but its input embeddings are so large that layers hardly change them: the
next token is then a function of the newest one, known before, and costs as much as any other. A proposer that knows the
function is right as often as it is told to be.

The bound of a case is a verifying step's time if it took the plain step's, and what the additional tokens must read
(experts that no other token chose) or compute, whichever is longer; with acceptance rate p it gives
1 + p + ... + p^d tokens a row. Drafting costs nothing here.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from models.config import DeepSeekConfig
from models.decoder import AttentionSettings, Decoder
from models.engine import DraftRows, Engine, EngineConfig, NGramProposer, Proposer, SamplingParams, Speculation
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import Costs
from scripts.bench.harness.device import measure_rates
from scripts.bench.harness.timing import Stopwatch

EMBEDDING_SCALE = 1024.0
"""Factor of the input embeddings, beyond which bfloat16 drops what a layer adds to them."""

SETTLING_STEPS = 8
"""Steps after the last prompt that are not measured."""


@dataclasses.dataclass(frozen=True)
class DraftingWork:
    """Cases: every batch, context and acceptance rate.

    Attributes:
      batches, contexts, rates: of the cases.
      num_drafts: drafts of a row, at most.
      new_tokens: tokens of a request that are measured.
      page_size, max_batched_tokens: of the engine.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rates: tuple[float, ...]
    num_drafts: int
    new_tokens: int
    page_size: int = 64
    max_batched_tokens: int = 4096

    def output_tokens(self, batch: int, context: int) -> int:
        """Tokens of a request until measuring has ended, whatever is accepted: the first ones get some while later
        prompts are computed."""
        prompt_steps = batch * context // max(1, self.max_batched_tokens - batch) + batch
        return self.new_tokens + (prompt_steps + SETTLING_STEPS + 4) * (1 + self.num_drafts)

    def engine_config(self, batch: int, context: int, speculate: Speculation | None) -> EngineConfig:
        longest = context + self.output_tokens(batch, context) + 1
        return EngineConfig(
            num_pages=batch * -(-longest // self.page_size) + 1,
            page_size=self.page_size,
            max_batched_tokens=max(self.max_batched_tokens, batch),
            max_num_seqs=batch,
            max_prefill_seqs=min(batch, 8),
            max_model_len=longest,
            prefix_caching=False,
            decode_buckets=(batch,),
            prefill_buckets=(max(self.max_batched_tokens, batch),),
            speculate=speculate,
        )


class TabledProposer(Proposer):
    """Follows a table of next tokens, and is right as often as a rate says.

    Attributes:
      weights: int32 [V], the token after each one; float32, the rate.
    """

    def __init__(self, next_tokens: Int32[Array, "V"], rate: float):
        self.weights = (next_tokens, jnp.asarray(rate, jnp.float32))

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Any]:
        next_tokens, rate = weights
        token, drafts = rows.tokens, []
        for ahead in range(num_drafts):
            token = next_tokens[token]
            mixed = (rows.lens + ahead) * 40503 + rows.slots * 30103 + token * 7919
            is_right = (mixed % 4096).astype(jnp.float32) < rate * 4096
            drafts.append(jnp.where(is_right, token, (token + 1) % next_tokens.shape[0]))
        return jnp.stack(drafts, axis=1), state


def following_model(config: DeepSeekConfig, dtype: str, settings: AttentionSettings) -> tuple[Decoder, Array]:
    """Makes a random model whose next token follows from the newest one, and the table of what follows."""
    model = random_model(config, dtype, settings)
    model.embed_tokens[...] = model.embed_tokens[...] * jnp.asarray(EMBEDDING_SCALE, dtype)

    @jax.jit
    def following(rows: Array) -> Int32[Array, "n"]:
        return jnp.argmax(_logits(model, rows), axis=1).astype(jnp.int32)

    table = model.embed_tokens[...]
    parts = [following(table[begin : begin + 2048]) for begin in range(0, table.shape[0], 2048)]
    return model, jnp.concatenate(parts)


def _logits(model: Decoder, x: Array) -> Float32[Array, "n V"]:
    head = model.embed_tokens[...].T if model.lm_head is None else model.lm_head.weight[...]
    return jnp.matmul(model.norm(x), head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def tokens_per_s(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, work: DraftingWork) -> float:
    """Decodes requests side by side; returns their tokens per second while all of them decode."""
    arrived: Counter[int | str] = Counter()
    ids = [engine.add_request(prompt, params, on_token=lambda i, *_: arrived.update((i,))) for prompt in prompts]

    def step() -> None:
        if not engine.has_unfinished:
            raise RuntimeError(f"requests ended after {dict(arrived)} tokens, before enough steps were measured")
        engine.step()

    while len(arrived) < len(ids):
        step()
    for _ in range(SETTLING_STEPS):
        step()
    before, began = arrived.copy(), time.perf_counter()
    while max(arrived.values()) < max(before.values()) + work.new_tokens:
        step()
    ended = time.perf_counter()
    got = arrived.total() - before.total()
    for i in ids:
        engine.abort(i)
    while engine.has_unfinished:
        engine.step()
    return got / (ended - began)


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Tokens that a row gets on average, if a draft is accepted with probability `rate` where those before it are."""
    return sum(rate**i for i in range(num_drafts + 1))


def verifying_s(costs: Costs, plain_s: float, batch: int, num_drafts: int, itemsize: int) -> float:
    """Least seconds of a step with drafts, given a plain step's."""
    tokens, config = batch * (1 + num_drafts), costs.config
    read = (costs.weight_bytes(tokens) - costs.weight_bytes(batch)) / costs.rates.copy
    share = config.num_experts_per_tok / config.n_routed_experts
    weights = (costs.dense_bytes + share * costs.routed_bytes) / itemsize
    return plain_s + max(read, 2 * (tokens - batch) * weights / costs.rates.matrix)


def run(
    config: DeepSeekConfig, work: DraftingWork, settings: AttentionSettings, dtype: str, *, adaptive: bool
) -> Iterator[dict[str, Any]]:
    """Yields the result of each case: tokens per second, as a multiple of plain decoding's, and as a share of the
    bound, which for an adaptive engine is that of the best number of drafts."""
    rates = measure_rates(Stopwatch(samples=3))
    model, table = following_model(config, dtype, settings)
    costs, itemsize = Costs.of(model, rates), np.dtype(model.embed_tokens[...].dtype).itemsize
    host_table = np.asarray(table)
    for batch in work.batches:
        for context in work.contexts:
            greedy = SamplingParams(max_tokens=work.output_tokens(batch, context), ignore_eos=True)
            drawn = dataclasses.replace(greedy, temperature=1e6)
            rng = np.random.default_rng(batch)
            random_text = rng.integers(0, config.vocab_size, (batch, context)).tolist()
            repeating = [follow(host_table, first, context) for first in rng.integers(0, config.vocab_size, batch)]

            compiled: dict[Any, Any] = {}

            def measured(speculate: Speculation | None, *texts: tuple[Any, SamplingParams]) -> list[float]:
                engine = Engine(model, work.engine_config(batch, context, speculate))  # noqa: B023
                kind = None if speculate is None else type(speculate.proposer)
                # Engines that differ in their proposers' weights alone share programs; each measures acceptance anew.
                engine._runner._compiled = compiled.setdefault(kind, engine._runner._compiled)  # noqa: B023
                engine.warmup()
                return [tokens_per_s(engine, prompts, params, work) for prompts, params in texts]

            plain, plain_drawn = measured(None, (random_text, greedy), (random_text, drawn))
            case = {"batch": batch, "context": context}
            for rate in work.rates:
                policy = Speculation(TabledProposer(table, rate), work.num_drafts, adaptive)
                [got] = measured(policy, (random_text, greedy))
                steps = [(n, verifying_s(costs, batch / plain, batch, n, itemsize)) for n in policy.draft_buckets]
                bound = max(batch * expected_tokens(rate, n) / seconds for n, seconds in steps)
                yield case | {"proposer": "table", "rate": rate} | ratios(got, plain, bound)
            policy = Speculation(NGramProposer(), work.num_drafts, adaptive)
            again, never = measured(policy, (repeating, greedy), (random_text, drawn))
            yield case | {"proposer": "ngram", "text": "repeating"} | ratios(again, plain)
            yield case | {"proposer": "ngram", "text": "random"} | ratios(never, plain_drawn)


def follow(table: np.ndarray, first: int, length: int) -> list[int]:
    """A text that the model would go on with as it has begun."""
    tokens = [int(first)]
    while len(tokens) < length:
        tokens.append(int(table[tokens[-1]]))
    return tokens


def ratios(got: float, plain: float, bound: float | None = None) -> dict[str, float]:
    result = {"tokens_per_s": got, "plain_tokens_per_s": plain, "of_plain": got / plain}
    return result if bound is None else result | {"bound_tokens_per_s": bound, "of_bound": got / bound}


def line(result: dict[str, Any]) -> str:
    """A result in one line."""
    drafts = f"acceptance {result['rate']:g}" if "rate" in result else f"ngram, {result['text']} text"
    bound = f", {result['of_bound']:.0%} of the bound" if "of_bound" in result else ""
    return (
        f"batch {result['batch']}, context {result['context']}, {drafts}: {result['tokens_per_s']:,.0f} tokens/s,"
        f" {result['of_plain']:.2f}x plain{bound}"
    )
