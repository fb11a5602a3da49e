"""Speculative decoding: outputs equal plain decoding, whatever is proposed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_attn import FULL
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import HeadWindows
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import (
    DraftModelProposer,
    Engine,
    EngineConfig,
    NGramProposer,
    Proposer,
    RequestOutput,
    SamplingParams,
    Speculation,
)
from pallas_attn.models.engine.runner import Runner, StepResult
from pallas_attn.models.engine.speculation.draft_control import DraftControl
from tests.models import engine_case, test_engine_windows
from tests.models.engine_case import PROMPTS, VOCAB_SIZE, compile_events
from tests.models.filter_case import Third
from tests.models.proposer_case import KnowingProposer, KnowingTreeProposer, tell
from tests.models.sampling_oracle import PlainLoop

LATENTS = dataclasses.replace(engine_case.CONFIG, num_hidden_layers=1)
NUM_DRAFTS = 3
GREEDY = SamplingParams(max_tokens=24)
DRAWN = SamplingParams(max_tokens=24, temperature=0.8, top_k=20, top_p=0.95, seed=11)
SHORT = EngineConfig(
    num_pages=12,
    page_size=8,
    max_batched_tokens=16,
    max_num_seqs=4,
    max_model_len=96,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    separate_prefill=False,
)
"""Sizes with too few pages for all requests, so that requests are preempted.

One decode bucket and one prefill bucket limit the time for compilation.
"""

WIDE = HeadWindows((FULL, 100), (0, 0))
"""Windows per head that are longer than any sequence."""

FAMILIES = {
    "latents": (LATENTS, SHORT),
    "sparse": (engine_case.SPARSE, SHORT),
    "windows": (test_engine_windows.CONFIG, dataclasses.replace(SHORT, num_pages=12, page_size=4, cache_dtype="int8")),
    "keys and values": (dataclasses.replace(test_engine_windows.CONFIG, windows=None), SHORT),
    "quantised": (
        dataclasses.replace(test_engine_windows.CONFIG, windows=None),
        dataclasses.replace(SHORT, cache_dtype="int8"),
    ),
    "wide windows": (dataclasses.replace(test_engine_windows.CONFIG, windows=(WIDE, 200)), SHORT),
}


@functools.cache
def model(family: str = "latents") -> Decoder:
    return random_model(FAMILIES[family][0], seed=3, settings=engine_case.QUICK)


def make(family: str = "latents", **changes: Any) -> Engine:
    return Engine(model(family), dataclasses.replace(FAMILIES[family][1], **changes))


def speculation(**changes: Any) -> Speculation:
    knowing = KnowingProposer([], 1.0, VOCAB_SIZE)
    return dataclasses.replace(Speculation(knowing, NUM_DRAFTS, adaptive=False), **changes)


@functools.cache
def plain(family: str = "latents") -> dict[SamplingParams, list[list[int]]]:
    """Return the output of every prompt without speculation, by sampling parameters."""
    return {
        params: [o.output_ids for o in plain_engine(family).generate(PROMPTS, params)] for params in (GREEDY, DRAWN)
    }


@functools.cache
def plain_engine(family: str = "latents") -> Engine:
    """Engine without speculation and with one bucket."""
    return make(family, batch_invariant=True)


@functools.cache
def speculating(family: str = "latents") -> Engine:
    return make(family, speculate=speculation())


def sequences(params: SamplingParams, family: str = "latents") -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, plain(family)[params], strict=True)]


def run(engine: Engine, params: SamplingParams, share: float, family: str = "latents") -> list[RequestOutput]:
    """Continue all prompts with a given share of right drafts, and check that tokens equal plain decoding."""
    tell(engine, sequences(params, family), share)
    streamed: dict[int | str, list[tuple[Any, ...]]] = {}
    ids = [
        engine.add_request(prompt, params, on_token=lambda i, *got: streamed.setdefault(i, []).append(got))
        for prompt in PROMPTS
    ]
    while engine.has_unfinished:
        engine.step()
        engine._pools[0].check()
    outputs = [engine.output(i) for i in ids]
    for output, wanted in zip(outputs, plain(family)[params], strict=True):
        assert (output.output_ids, output.finish_reason) == (wanted, "length")
        assert streamed[output.request_id] == [*((token, None) for token in wanted[:-1]), (wanted[-1], "length")]
        assert len(output.itl_s) == len(wanted) - 1
    assert engine.stats().used_pages == 0
    return outputs


def totals(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    return sum(sum(o.drafted) for o in outputs), sum(sum(o.accepted) for o in outputs)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy"),
        # Slow, because test_drafts.py compares distributions of sampled tokens.
        pytest.param(DRAWN, id="drawn", marks=pytest.mark.slow),
    ],
)
def test_right_wrong_and_random_drafts_change_no_token(params: SamplingParams):
    """Tokens equal plain decoding for any share of right drafts, and all drafts are accepted if all are right.

    To make only right drafts, the proposer must receive every known token, including tokens of prefill chunks, shared
    pages and preempted requests.
    """
    engine = speculating()
    for share in (1.0, 0.0, 0.6):
        before = engine.stats()
        drafted, accepted = totals(run(engine, params, share))
        after = engine.stats()
        assert drafted > 0
        assert accepted == {1.0: drafted, 0.0: 0}.get(share, accepted)
        assert 0 < accepted < drafted or share in (0.0, 1.0)
        assert after.accepted_tokens - before.accepted_tokens >= accepted
        assert after.preemptions > before.preemptions
    assert engine.stats().prefix_hit_rate > 0


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["line", "tree"])
def test_drafts_of_filtered_requests(tree: bool):
    """Tokens equal a plain loop with the same token filters, next to requests without a filter.

    Wrong drafts are sometimes excluded by the filter, sometimes allowed. The filter is never called after an excluded
    draft, which it would reject with an exception.
    """
    trees = Speculation(KnowingTreeProposer([], 1.0, VOCAB_SIZE), 8, adaptive=False)
    engine, loop = make(speculate=trees) if tree else speculating(), PlainLoop(model())
    filters = [None if i % 3 == 2 else Third() for i in range(len(PROMPTS))]
    for params in (GREEDY, DRAWN):
        each = list(zip(PROMPTS, filters, strict=True))
        wanted = [loop.generate(prompt, params, token_filter and Third()) for prompt, token_filter in each]
        tell(engine, [[*prompt, *output] for prompt, output in zip(PROMPTS, wanted, strict=True)], 0.7)
        before = engine.stats().preemptions
        ids = [engine.add_request(prompt, params, token_filter=token_filter) for prompt, token_filter in each]
        with compile_events() as events:
            while engine.has_unfinished:
                engine.step()
        assert events == [] or params is GREEDY  # the first run compiles the steps
        outputs = [engine.output(i) for i in ids]
        assert [output.output_ids for output in outputs] == wanted
        assert engine.stats().preemptions > before
        for output, token_filter in zip(outputs, filters, strict=True):
            assert 0 < sum(output.accepted) < sum(output.drafted)
            assert token_filter is None or len(token_filter.seen) > len(output.output_ids)
    assert engine.stats().used_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["latents", "sparse", *(pytest.param(f, marks=pytest.mark.slow) for f in ("keys and values", "quantised"))],
)
def test_trees_of_drafts_change_no_token(family: str):
    """Tokens equal plain decoding with trees of drafts.

    The accepted tokens of a tree are not consecutive in the cache until the engine moves their entries.
    """
    engine = make(family, speculate=Speculation(KnowingTreeProposer([], 1.0, VOCAB_SIZE), 8, adaptive=False))
    for params, share in itertools.product((GREEDY, DRAWN), (1.0, 0.6, 0.0)):
        outputs = run(engine, params, share, family)
        drafted, accepted = totals(outputs)
        assert (accepted > 0.3 * drafted) == (share > 0)
        assert {len(o.drafted) for o in outputs} == {4}
        assert accepted > 0 or share == 0
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_rate > 0


def test_trees_are_rejected_if_attention_depends_on_slots():
    trees = Speculation(KnowingTreeProposer([], 1.0, VOCAB_SIZE), 8)
    with pytest.raises(NotImplementedError, match="a tree of drafts needs decode rows of several tokens; windows"):
        make("windows", speculate=trees)
    with pytest.raises(NotImplementedError, match="batch_invariant computes each token in a separate row"):
        make(speculate=trees, batch_invariant=True)
    expanding = random_model(LATENTS, seed=3, settings=AttentionSettings(mla="expand"))
    with pytest.raises(NotImplementedError, match="expanded decode rows have one token each"):
        Engine(expanding, dataclasses.replace(SHORT, speculate=trees))


@pytest.mark.slow  # slow, because test_engine_windows.py tests windows, and other tests of this file test drafts
def test_rejected_drafts_change_no_token_with_windows_per_head_and_quantised_caches():
    """Tokens equal plain decoding, because rejected drafts neither recycle pages of later queries nor change scales."""
    engine = speculating("windows")
    for params, share in ((GREEDY, 0.6), (DRAWN, 0.6), (GREEDY, 0.0)):
        run(engine, params, share, "windows")
    assert engine.stats().preemptions > 0


@pytest.mark.slow  # slow, because tests/scripts/test_run_decode.py tests n-gram drafts
def test_ngrams_are_found_and_change_no_token():
    engine = make(speculate=Speculation(NGramProposer(longest=3, shortest=1), NUM_DRAFTS, adaptive=False))
    for params in (GREEDY, DRAWN):
        outputs = engine.generate(PROMPTS, params)
        assert [output.output_ids for output in outputs] == plain()[params]
        assert totals(outputs)[0] > 0


def expect_drafted(engine: Engine, family: str = "latents") -> list[float]:
    """Continue all prompts twice, so that the second run has prefix hits. Return the shares of accepted drafts."""
    shares = []
    for params, _ in itertools.product((GREEDY, DRAWN), range(2)):
        outputs = engine.generate(PROMPTS, params)
        assert [output.output_ids for output in outputs] == plain(family)[params]
        drafted, accepted = totals(outputs)
        shares.append(accepted / drafted)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_rate > 0
    return shares


@pytest.mark.slow
def test_all_drafts_of_the_target_itself_are_accepted():
    """If the draft model is the target model, every draft is accepted, both greedy and sampled.

    This shows that the cache of the draft model equals the cache of the target after prefill chunks, prefix hits,
    preemptions, and drafts that are rejected because a request has no room for more tokens.
    """
    engine = make(speculate=Speculation(DraftModelProposer(model()), NUM_DRAFTS, adaptive=False))
    assert min(expect_drafted(engine)) > 0.99


@pytest.mark.slow
def test_draft_model_of_another_family_changes_no_token():
    """A draft model of another model family changes no token.

    The heads of the target model have different windows, so the pools allocate page rows (one page of one KV head), and
    the draft model uses page rows as its pages. The first draft model has the weights of the target, and its drafts are
    accepted. The second draft model is unrelated to the target.
    """
    same = random_model(dataclasses.replace(test_engine_windows.CONFIG, windows=None), seed=3)
    for drafting, least in ((same, 0.99), (model(), 0.0)):
        speculate = Speculation(DraftModelProposer(drafting), NUM_DRAFTS, adaptive=False)
        assert min(expect_drafted(make("wide windows", speculate=speculate), "wide windows")) >= least


@pytest.mark.slow
def test_draft_model_cache_is_complete_after_steps_without_drafts():
    engine = make(speculate=Speculation(DraftModelProposer(model()), 2))
    control = engine._ranks.schedulers[0]._draft_control
    assert control is not None
    steps = itertools.cycle([0, 0, 2, 1, 0, 2, 2])
    control.num_drafts = lambda requests: next(steps)  # pyrefly: ignore[bad-assignment]
    assert min(expect_drafted(engine)) > 0.99


def test_unsuitable_draft_models_are_rejected():
    with pytest.raises(NotImplementedError, match="draft model: expected heads with equal windows"):
        DraftModelProposer(model("windows"))
    smaller = random_model(dataclasses.replace(LATENTS, vocab_size=32), seed=3)
    with pytest.raises(ValueError, match="draft model: expected the target's vocabulary of 64 tokens, got 32"):
        make(speculate=Speculation(DraftModelProposer(smaller)))


@pytest.mark.slow
def test_stop_token_within_accepted_drafts_ends_the_request():
    engine = speculating()
    tell(engine, sequences(GREEDY), 1.0)
    wanted = plain()[GREEDY][1]
    for end in range(1, 9):
        limited = dataclasses.replace(GREEDY, max_tokens=end)
        stopped = dataclasses.replace(GREEDY, stop_token_ids=(wanted[end - 1],))
        told: list[tuple[Any, ...]] = []
        ids = [
            engine.add_request(PROMPTS[1], limited),
            engine.add_request(PROMPTS[1], stopped, on_token=lambda _, *got: told.append(got)),  # noqa: B023
        ]
        while engine.has_unfinished:
            engine.step()
        assert (engine.output(ids[0]).output_ids, engine.output(ids[0]).finish_reason) == (wanted[:end], "length")
        until = wanted[: wanted.index(wanted[end - 1]) + 1]
        assert (engine.output(ids[1]).output_ids, engine.output(ids[1]).finish_reason) == (until, "stop")
        assert told == [*((token, None) for token in until[:-1]), (until[-1], "stop")]
    assert engine.stats().used_pages == 0


@pytest.mark.slow  # slow, because test_engine.py also aborts requests, although without drafts in flight
def test_aborted_request_keeps_a_prefix_of_its_tokens():
    engine = speculating()
    tell(engine, sequences(GREEDY), 0.6)
    for after in range(1, 6):
        ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
        for _ in range(3 + after):
            engine.step()
        engine.abort(ids[1])
        while engine.has_unfinished:
            engine.step()
        outputs = [engine.output(i).output_ids for i in ids]
        assert outputs[::2] == plain()[GREEDY][:3:2]
        assert outputs[1] == plain()[GREEDY][1][: len(outputs[1])]
    assert engine.stats().used_pages == 0


@pytest.mark.slow
def test_pages_of_accepted_tokens_are_shared():
    """A page is added to the prefix cache once all its tokens are accepted.

    The page has the keys of the accepted tokens, which overwrite the keys of rejected drafts.
    """
    engine = speculating()
    tell(engine, sequences(GREEDY), 0.6)
    output = engine.generate([PROMPTS[3]], GREEDY)[0].output_ids
    longer = [*PROMPTS[3], *output]
    wanted = plain_engine().generate([longer], GREEDY)[0].output_ids
    tell(engine, [[*longer, *wanted]], 0.6)
    again = engine.generate([longer], GREEDY)[0]
    assert (again.cached_tokens, again.output_ids) == (24, wanted)


@pytest.mark.slow
def test_nonfinite_logits_end_only_their_request():
    """A request whose logits are not finite ends, and no accepted token of any request is wrong.

    A draft whose embedding has NaN makes the logits at its position NaN. Earlier tokens of the same request in this
    step may also become NONFINITE.
    """
    wanted = plain()[GREEDY][1]
    at = next(i for i in range(5, 20) if wanted[i] not in wanted[:i] and wanted[i] not in PROMPTS[1])
    broken = random_model(LATENTS, seed=3, settings=engine_case.QUICK)
    broken.embed_tokens[...] = broken.embed_tokens[...].at[wanted[at]].set(jnp.nan)
    engine = Engine(broken, speculating().config)
    engine._runner._programs.forward = speculating()._runner._programs.forward
    engine._runner._programs.shared = speculating()._runner._programs.shared
    tell(engine, sequences(GREEDY), 1.0)
    told: list[tuple[Any, ...]] = []
    request_id = engine.add_request(PROMPTS[1], GREEDY, on_token=lambda *got: told.append(got[1:]))
    others = [i for i in range(len(PROMPTS)) if wanted[at] not in [*PROMPTS[i], *plain()[GREEDY][i]]]
    ids = [engine.add_request(PROMPTS[i], GREEDY) for i in others]
    while engine.has_unfinished:
        engine.step()
    output = engine.output(request_id)
    got = output.output_ids
    assert (got, output.finish_reason) == (wanted[: len(got)], "nonfinite")
    assert at - NUM_DRAFTS < len(got) <= at + 1
    assert told == [*((token, None) for token in got), (-1, "nonfinite")]
    assert sum(output.accepted) > 0
    assert [engine.output(i).output_ids for i in ids] == [plain()[GREEDY][i] for i in others]


@pytest.mark.slow
def test_next_step_is_launched_before_the_previous_one_is_read(monkeypatch: pytest.MonkeyPatch):
    engine = speculating()
    tell(engine, sequences(GREEDY), 1.0)
    order: list[str] = []
    launch, sampled = Runner.launch, StepResult.sampled
    monkeypatch.setattr(Runner, "launch", lambda *args: (order.append("launch"), launch(*args))[1])
    monkeypatch.setattr(StepResult, "sampled", lambda result: (order.append("read"), sampled(result))[1])
    output = engine.generate([PROMPTS[3]], dataclasses.replace(GREEDY, max_tokens=13))[0]
    assert sum(output.accepted) == 9  # 13 tokens: one of the prefill step, then three steps with 1 + 3 accepted drafts
    assert order[:9] == ["launch", *["launch", "read"] * 4]


@pytest.mark.slow
def test_failed_step_loses_and_repeats_no_token(monkeypatch: pytest.MonkeyPatch):
    engine = speculating()
    tell(engine, sequences(GREEDY), 0.6)
    read, calls = StepResult.sampled, itertools.count()

    def failing(result: StepResult) -> Any:
        if next(calls) in (2, 3, 9):
            raise RuntimeError("injected")
        return read(result)

    monkeypatch.setattr(StepResult, "sampled", failing)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    failures = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 3
    assert [engine.output(i).output_ids for i in ids] == plain()[GREEDY]


@pytest.mark.slow
def test_adaptive_drafting_follows_acceptance_without_compilation(monkeypatch: pytest.MonkeyPatch):
    engine = make(speculate=speculation(num_drafts=1, adaptive=True))
    assert engine.warmup() > 0
    assert engine.stats().compilations == 2 + 1  # decode rows without and with a draft; decode rows and prompts
    monkeypatch.setattr(DraftControl, "record_time", lambda *_: None)  # use the cost estimate instead of times
    tell(engine, sequences(GREEDY), 1.0)
    engine.generate(PROMPTS, GREEDY)
    with compile_events() as events:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.output_ids for output in outputs] == plain()[GREEDY]
        right = totals(outputs)
        tell(engine, sequences(GREEDY), 0.0)
        wrong = [totals(engine.generate(PROMPTS, GREEDY)) for _ in range(3)]
    assert not [event for event in events if "backend_compile" in event]
    assert right[0] == right[1] > 40
    assert [accepted for _, accepted in wrong] == [0, 0, 0]
    assert wrong[-1][0] < right[0] / 2


@pytest.mark.slow
def test_times_of_steps_without_prompts_are_recorded(monkeypatch: pytest.MonkeyPatch):
    engine, recorded = make(speculate=speculation()), []
    monkeypatch.setattr(DraftControl, "record_time", lambda _, *given: recorded.append(given))
    tell(engine, sequences(GREEDY), 1.0)
    engine.generate(PROMPTS[3:5], GREEDY)
    steps = [step for step in engine.stats().steps if not step.prefill_tokens]
    assert [seconds for *_, seconds in recorded] == [step.duration_s for step in steps]
    assert {num_drafts for _, num_drafts, _ in recorded} <= {*range(NUM_DRAFTS + 1)}
    assert {rows for rows, *_ in recorded} == {1, 2}


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="proposer: expected a Proposer, got 'ngram'"):
        Speculation("ngram")  # pyrefly: ignore[bad-argument-type]
    for wrong in (0, 65, True, 2.0):
        with pytest.raises(ValueError, match="num_drafts: expected an integer from 1 to 64"):
            Speculation(NGramProposer(), wrong)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="speculate: expected a Speculation or None, got 4"):
        EngineConfig(speculate=4)  # pyrefly: ignore[bad-argument-type]
    for longest, shortest in ((2, 3), (17, 1), (1, 0)):
        with pytest.raises(ValueError, match="1 <= shortest <= longest <= 16"):
            NGramProposer(longest, shortest)
    engine = make(speculate=Speculation(Proposer(), 2, adaptive=False))
    with pytest.raises(NotImplementedError, match=r"Proposer.propose: a proposer has to define it"):
        engine.warmup()


class MisshapenProposer(Proposer):
    def propose(self, weights: Any, state: Any, rows: Any, num_drafts: int) -> Any:
        return jnp.zeros((rows.lens.shape[0], num_drafts + 1), jnp.int32), state


@pytest.mark.usefixtures("unchecked_shapes")
def test_drafts_of_a_wrong_shape_are_rejected():
    engine = make(speculate=Speculation(MisshapenProposer(), 2, adaptive=False))
    with pytest.raises(ValueError, match=r"propose: expected int32 \[4, 2\], got int32 \[4, 3\]"):
        engine.warmup()


def test_expanded_decode_rows_reject_drafts():
    expanding = random_model(LATENTS, seed=3, settings=AttentionSettings(mla="expand"))
    engine = Engine(expanding, dataclasses.replace(SHORT, speculate=speculation()))
    with pytest.raises(NotImplementedError, match="mla: expanded decode rows take one token each, without drafts"):
        engine.warmup()
