"""Multi-token prediction in the engine: tokens equal decoding without drafts.

The drafts of a request depend only on its own tokens, not on rejected drafts, prefix hits or preemptions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn.models.checkpoints import random_model, random_mtp
from pallas_attn.models.decoder import MTP, Decoder, split_model, split_module
from pallas_attn.models.engine import (
    Decoded,
    DraftRows,
    Engine,
    EngineConfig,
    MTPProposer,
    RequestOutput,
    SamplingParams,
    Speculation,
)
from pallas_attn.models.engine.speculation.mtp import MTPState
from pallas_attn.models.engine.verify import verify
from tests.kit.slow_cases import slow_cases
from tests.models.engine_case import CONFIG, DRAWN, GREEDY, MAX_TOKENS, VOCAB_SIZE, padded
from tests.models.filter_case import Third
from tests.models.sampling_oracle import PlainLoop
from tests.models.step_case import Pages, step

LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1, first_k_dense_replace=2, num_nextn_predict_layers=1)

LONGEST = 64

PREFIX = np.random.default_rng(7).integers(0, VOCAB_SIZE, 21).tolist()
PROMPTS = [PREFIX, [*PREFIX, 1, 2, 3], [5, 6], [*PREFIX, 9], [40, 41, 42, 43, 44, 45, 46, 47, 48]]

SIZES = EngineConfig(num_pages=15, page_size=4, max_batched_tokens=16, max_num_seqs=3, batch_invariant=True)
"""Sizes for which prompts are prefilled in chunks and requests are preempted, because 15 pages are too few.

A batch-invariant engine has one bucket, so only one step is compiled.
"""

NUM_DRAFTS = 2


@functools.cache
def modules() -> tuple[Decoder, MTP]:
    """Return a model and a prediction module whose drafts are right more often than not.

    The module is the model's only layer, applied to the embedding of the next token. Its other input, the hidden state
    of the target model, changes the result only slightly.
    """
    model = random_model(LAYER, seed=3)
    embedding = model.embed_tokens[...]
    norms = jnp.sqrt(jnp.mean(jnp.square(embedding), axis=1, keepdims=True))
    model.embed_tokens = nnx.Param(embedding / norms)  # so that the norm `enorm` does not change the embedding
    mtp = random_mtp(model)
    assert isinstance(mtp, MTP)
    (module,) = mtp.depths
    width = LAYER.hidden_size
    module.enorm.weight[...] = jnp.ones(width)
    module.eh_proj.weight[...] = module.eh_proj.weight[...].at[:width].set(jnp.eye(width)).at[width:].multiply(0.1)
    module.layer, module.norm = model.layers[0], model.norm
    return model, mtp


@dataclasses.dataclass(frozen=True)
class Proposed:
    """Proposal for one request of a step.

    It has the known tokens of the request, the hidden state from which the first draft was computed, and the drafts.
    """

    tokens: list[int]
    hidden: np.ndarray
    drafts: list[int]


class Recorded(MTPProposer):
    """Proposer that records its proposals."""

    def __init__(self, mtp: MTP):
        super().__init__(mtp)
        self.proposed: list[Proposed] = []

    def propose(self, weights: Any, state: MTPState, rows: DraftRows, num_drafts: int) -> Any:
        drafts, after = super().propose(weights, state, rows, num_drafts)
        jax.debug.callback(self._keep, rows.lens, rows.history(), state.hidden[rows.slots], rows.max_drafts, drafts)
        return drafts, after

    def _keep(self, lens: Any, history: Any, hidden: Any, max_drafts: Any, drafts: Any) -> None:
        for n, tokens, state, most, of_row in zip(lens, history, hidden, max_drafts, drafts, strict=True):
            if n:
                self.proposed.append(Proposed(tokens[:n].tolist(), np.array(state), of_row[:most].tolist()))


class Expected:
    """Reference that computes the drafts of a sequence from its tokens alone.

    It runs one forward pass of the model, then one forward pass of the module per draft.
    """

    def __init__(self, model: Decoder, mtp: MTP):
        run, self.weights = split_model(model)
        self.run = jax.jit(run, static_argnames="return_hidden")
        rebuild, self.mtp_weights = split_module(mtp)

        def draft(weights: Any, tokens: jax.Array, hidden: jax.Array, caches: Any, metadata: Any) -> Any:
            whole = rebuild(weights)
            given, _ = whole(tokens, hidden, caches, metadata)
            return whole.logits(given[metadata.logit_rows])[0], given[metadata.logit_rows][0]

        self.draft = jax.jit(draft)
        self.pages = Pages.scatter(1, LONGEST // 8)
        self.caches = self.pages.allocate(model)
        self.mtp_caches = mtp.allocate_caches(self.pages.tables.size + 1, 8)

    def check(self, proposed: Proposed) -> None:
        """Check that each draft is the likeliest token of the reference, or equally likely up to rounding."""
        tokens, entries = proposed.tokens, len(proposed.tokens) - 1  # the K/V of the newest token is not computed yet
        computed = self._metadata(len(tokens))
        hidden = np.array(self.run(self.weights, self._padded(tokens), self.caches, computed, return_hidden=True)[2])
        for i, draft in enumerate(proposed.drafts):
            following = self._padded([*tokens[1:], *proposed.drafts[:i]])
            arguments = following, jnp.asarray(hidden), self.mtp_caches, self._metadata(entries + i)
            logits, given = self.draft(self.mtp_weights, *arguments)
            if not i:
                np.testing.assert_allclose(proposed.hidden, given, rtol=1e-3, atol=1e-4)
            assert logits[draft] > np.max(logits) - 1e-3, f"draft {i} after {len(tokens)} tokens"
            hidden[entries + i] = given

    def _padded(self, tokens: list[int]) -> jax.Array:
        return jnp.asarray(np.pad(tokens, (0, LONGEST - len(tokens))), jnp.int32)

    def _metadata(self, length: int) -> Any:
        return step(self.pages, prefill=[(0, 0, length)], padding=LONGEST - length, logit_rows=[length - 1])


HOT = dataclasses.replace(DRAWN, temperature=2.0, top_k=0, top_p=1.0)
"""Sampling parameters with a flat distribution, from which the likeliest token is rarely drawn."""


@functools.cache
def drafting() -> tuple[Engine, Recorded]:
    model, mtp = modules()
    proposer = Recorded(mtp)
    speculation = Speculation(proposer, NUM_DRAFTS, adaptive=False)
    return Engine(model, dataclasses.replace(padded(SIZES), speculate=speculation)), proposer


@functools.cache
def decoded(params: SamplingParams) -> tuple[list[RequestOutput], list[Proposed]]:
    engine, proposer = drafting()
    proposer.proposed.clear()
    return engine.generate(PROMPTS, params), list(proposer.proposed)


@pytest.mark.slow  # slow, because tests/scripts/test_run_decode.py verifies tokens with drafts of a prediction module
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_output_equals_plain_decoding(params: SamplingParams):
    outputs, _ = decoded(params)
    runs = [Decoded(prompt, output.output_ids, params) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    assert [len(run.output_ids) for run in runs] == [MAX_TOKENS] * len(PROMPTS)
    assert verify(modules()[0], runs, max_len=drafting()[0].max_sequence_len).passed


@pytest.mark.slow
def test_drafts_of_filtered_requests():
    engine, _ = drafting()
    loop, params = PlainLoop(modules()[0]), dataclasses.replace(DRAWN, seed=2)
    filters = [Third(), None, Third(), Third(), None]
    ids = [engine.add_request(p, params, token_filter=f) for p, f in zip(PROMPTS, filters, strict=True)]
    while engine.has_unfinished:
        engine.step()
    for i, prompt, token_filter in zip(ids, PROMPTS, filters, strict=True):
        output = engine.output(i)
        assert output.output_ids == loop.generate(prompt, params, token_filter and Third())
        assert sum(output.drafted) > 0
    assert sum(sum(engine.output(i).accepted) for i in ids) > 0


@pytest.mark.slow
@slow_cases("hot", "greedy")
@pytest.mark.parametrize("params", [GREEDY, DRAWN, HOT], ids=["greedy", "drawn", "hot"])
def test_acceptance_is_reported(params: SamplingParams):
    """Sampled drafts are accepted as often as greedy drafts, because draft and model use the same sampling noise."""
    outputs, _ = decoded(params)
    drafted, accepted = (np.sum([getattr(o, of) for o in outputs], axis=0) for of in ("drafted", "accepted"))
    assert len(drafted) == len(accepted) == NUM_DRAFTS
    assert np.all(0.3 * drafted < accepted)
    assert np.all(accepted < 0.9 * drafted)


@pytest.mark.slow
def test_drafts_depend_only_on_the_tokens():
    """Drafts do not depend on rejected drafts, prefix hits or preemptions."""
    engine, _ = drafting()
    before = engine.stats().preemptions
    outputs, proposed = decoded(dataclasses.replace(GREEDY, max_tokens=24))
    assert engine.stats().preemptions > before
    assert max(output.cached_tokens for output in outputs) >= 20
    assert len(proposed) > 40
    expected = Expected(*modules())
    for row in proposed:
        expected.check(row)


@pytest.mark.slow  # slow, because test_speculation.py tests trees of drafts
def test_alternatives_are_accepted_where_the_likeliest_draft_is_not():
    """Three alternative drafts per position are accepted more often than one draft per position.

    The first alternatives of the tree equal the drafts without alternatives.
    """
    model, mtp = modules()
    sizes = dataclasses.replace(padded(SIZES), batch_invariant=False)
    shares = []
    for alternatives, num_drafts in ((1, 2), (3, 6)):
        speculation = Speculation(MTPProposer(mtp, alternatives), num_drafts, adaptive=False)
        engine = Engine(model, dataclasses.replace(sizes, speculate=speculation))
        of_params = []
        for params in (GREEDY, DRAWN):
            outputs = engine.generate(PROMPTS, params)
            runs = [Decoded(prompt, output.output_ids, params) for prompt, output in zip(PROMPTS, outputs, strict=True)]
            assert verify(model, runs, max_len=engine.max_sequence_len).passed
            drafted, accepted = (np.sum([getattr(o, of) for o in outputs], axis=0) for of in ("drafted", "accepted"))
            assert len(drafted) == 2
            of_params.append(accepted / drafted)
        shares.append(np.stack(of_params))
    assert np.all(shares[1] > shares[0])


def test_cost_of_a_draft_counts_only_weights_that_it_reads():
    """A draft reads two of four experts and one row of the embedding, so their other weights do not count."""
    routed = dataclasses.replace(LAYER, first_k_dense_replace=0)
    mtp = random_mtp(random_model(routed))
    (module,) = mtp.depths
    sizes = {".".join(map(str, path)): value.size for path, value in nnx.to_flat_state(nnx.state(module))}
    experts = sum(size for path, size in sizes.items() if path in ("layer.mlp.gate_up_proj", "layer.mlp.down_proj"))
    head = routed.hidden_size * VOCAB_SIZE
    assert MTPProposer(mtp).draft_bytes == 4 * (sum(sizes.values()) - experts // 2 + head)


def test_cache_bytes_include_the_state_of_the_module():
    """`cache_bytes` includes the state of the prediction module.

    The state has the cache of the module's layer, as large as the cache of the model's layer; a hidden state, a token
    and a length for each request slot; and the token ids of all pages.
    """
    model, _ = modules()
    plain = Engine(model, padded(SIZES)).stats().cache_bytes
    of_slots = SIZES.max_num_seqs * (LAYER.hidden_size + 2) * 4
    assert drafting()[0].stats().cache_bytes == 2 * plain + of_slots + SIZES.num_pages * SIZES.page_size * 4


def test_unsupported_models_are_rejected():
    _, mtp = modules()
    two = random_model(dataclasses.replace(LAYER, num_nextn_predict_layers=2))
    with pytest.raises(NotImplementedError, match="mtp: expected one module, as in published checkpoints, got 2"):
        MTPProposer(random_mtp(two))
    for wrong in (0, 9, True, 1.5):
        with pytest.raises(ValueError, match="alternatives: expected an integer from 1 to 8"):
            MTPProposer(mtp, wrong)  # pyrefly: ignore[bad-argument-type]
    speculation = Speculation(MTPProposer(mtp), NUM_DRAFTS)
    with pytest.raises(ValueError, match="mtp: expected the module of the engine's model"):
        Engine(two, dataclasses.replace(SIZES, speculate=speculation))
