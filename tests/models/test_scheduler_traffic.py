"""The scheduler with random traffic: requests of random lengths, aborts and failed steps."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pallas_attn import FULL
from pallas_attn.cache import OutOfPages
from pallas_attn.models.engine import scheduler
from tests.models.scheduler_case import PLAIN, SALTS, FakeEngine, Limits

prompts = st.builds(
    lambda shared, tail: [1, 2, 3, 4, 5, 6, 1, 2, 3, 4][:shared] + tail,
    st.integers(0, 10),
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
)
params = st.fixed_dictionaries({"max_tokens": st.integers(1, 12), "ignore_eos": st.booleans()})
additions = st.tuples(st.just("add"), prompts, st.sampled_from(["", *SALTS]), params)
actions = st.one_of(
    additions,
    additions,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("fail")),
)
limits = st.builds(
    Limits,
    num_pages=st.integers(5, 14),
    page_size=st.integers(1, 3),
    max_batched_tokens=st.integers(2, 16),
    max_num_seqs=st.integers(1, 4),
    max_prefill_seqs=st.none() | st.integers(1, 2),
    max_model_len=st.integers(12, 30),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    lag=st.integers(0, 2),
    num_drafts=st.sampled_from([0, 0, 1, 3, 6]),
    groups=st.sampled_from(
        [PLAIN, PLAIN, [[(3, 0)]], [[(FULL, 0), (3, 2)]], [[(FULL, 0)], [(4, 0)], [(2, 3), (1, 0)]]]
    ),
)


limits |= limits.map(  # adds limits with padded step sizes; the fixture below sets the cost of a step to zero
    lambda limits: replace(limits, padded_sizes=(*range(1, limits.max_batched_tokens, 3), limits.max_batched_tokens))
)


@pytest.fixture(autouse=True, scope="module")
def steps_that_cost_nothing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "STEP_TOKENS", 0)
        yield


traffic = given(limits=limits, actions=st.lists(actions, min_size=8, max_size=30))


def run_traffic(limits: Limits, actions: list[tuple]) -> None:
    """Run the actions on `FakeEngine`, which checks tokens, pages and limits in every step."""
    engine = FakeEngine(limits)
    for name, *arguments in actions:
        match name:
            case "add":
                prompt, salt, params = arguments
                engine.add(prompt, salt, **params)
            case "step":
                for _ in range(*arguments):
                    engine.step()
            case "abort":
                engine.scheduler.abort(*arguments)
                engine.check()
            case "fail":
                engine.fail()
    engine.run()


@traffic
@settings(max_examples=25, deadline=None)
def test_random_traffic(limits, actions):
    run_traffic(limits, actions)


@pytest.mark.slow
@traffic
@settings(max_examples=3000, deadline=None)
def test_much_random_traffic(limits, actions):
    run_traffic(limits, actions)


@pytest.mark.slow  # slow, because test_random_traffic runs shorter traffic of the same kind
@pytest.mark.parametrize("lag", [0, 1])
def test_long_traffic_with_failures(lag, monkeypatch):
    """A thousand steps with failures give the right tokens.

    The steps contain preemptions, prefix hits, dropped tokens and every finish reason.
    """
    draw = random.Random(lag)
    engine = FakeEngine(Limits(num_pages=10, max_num_seqs=4, lag=lag), sees_progress=False)
    allocate = engine.pools.allocate

    def fail_sometimes(slot: int, n: int) -> None:
        if draw.random() < 0.02:
            raise OutOfPages(n, 0)
        allocate(slot, n)

    monkeypatch.setattr(engine.pools, "allocate", fail_sometimes)
    for _ in range(1000):
        if draw.random() < 0.3 and len(engine.scheduler.waiting) < 5:
            prompt = [1, 2, 3, 4, 5, 6, 1, 2][: draw.randint(0, 8)] + draw.choices((1, 2), k=draw.randint(1, 6))
            engine.add(prompt, draw.choice(SALTS), max_tokens=draw.randint(1, 12), ignore_eos=draw.random() < 0.7)
        if draw.random() < 0.02 and engine.requests:
            engine.scheduler.abort(draw.choice(engine.requests).request_id)
        if draw.random() < 0.01:
            engine.fail()
        engine.step()
    engine.run()
    assert engine.scheduler.num_preemptions > 20
    assert engine.cache.hit_tokens > 100
    assert (engine.num_dropped > 0) == (lag > 0)
    assert {request.finish_reason for request in engine.requests} == {"stop", "length", "abort"}
