"""The scheduler with attention windows and several cache groups (sets of layers with the same windows)."""

import pytest

from pallas_attn import FULL
from pallas_attn.models.engine.request import Request, RequestRefused
from tests.cache.prefix_case import Heads
from tests.models.scheduler_case import FakeEngine, Limits, summary

WINDOWED: list[Heads] = [[(FULL, 0)], [(FULL, 0), (4, 2)]]
"""Windows and sink tokens of the KV heads of two cache groups. The last head has a window of 4 tokens.

With pages of two tokens, this head keeps one page of sink tokens and two or three pages of its window.
"""


def test_pages_behind_a_window_are_recycled_while_a_request_runs():
    engine = FakeEngine(Limits(num_pages=40, max_batched_tokens=6, groups=WINDOWED))
    request = engine.add([1, 2, 3, 4, 5], max_tokens=50, ignore_eos=True)
    most = 0
    while not request.is_finished:
        engine.step()
        full, rows = engine.pools.num_owned
        most = max(most, rows - full)
        assert rows - full <= 1 + 3
    assert (len(request.output_ids), most) == (50, 4)
    engine.run()


def test_window_allows_more_requests_than_full_heads():
    """More requests run at once if the heads have windows.

    A request of 24 tokens needs 12 pages without a window, and 4 pages with a window of 4 tokens and 2 sink tokens.
    """
    running = []
    for heads in ([(FULL, 0)], [(4, 2)]):
        engine = FakeEngine(Limits(num_pages=16, max_num_seqs=4, max_batched_tokens=4, groups=[heads]))
        requests = [engine.add([1 + n] * 4, max_tokens=20, ignore_eos=True) for n in range(4)]
        while not requests[0].is_finished:
            engine.step()
        running.append((len(engine.scheduler.running) + 1, engine.scheduler.num_preemptions > 0))
        engine.run()
    assert running == [(1, True), (4, False)]


def test_any_group_without_pages_causes_a_preemption():
    groups: list[Heads] = [[(FULL, 0)], [(4, 0)]]
    engine = FakeEngine(Limits(num_pages=6, max_batched_tokens=20, groups=groups))
    engine.add([1] * 6, max_tokens=6, ignore_eos=True)
    young = engine.add([2] * 6, max_tokens=6, ignore_eos=True)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.scheduler.waiting == (young,)
    engine.run()


def test_prompt_that_runs_alone_uses_chunks_that_fit_the_pools():
    """A prompt runs in chunks that fit in the pages, although the limit of tokens per step is larger.

    A step may have 16 tokens, but 5 pages hold only 8 new tokens in addition to a window of 4 tokens.
    """
    for chunked in (True, False):
        limits = Limits(num_pages=5, max_batched_tokens=16, chunked_prefill=chunked, groups=[[(4, 0)]])
        engine = FakeEngine(limits)
        request = engine.add([1, 2, 3, 4, 5, 6] * 2, max_tokens=30, ignore_eos=True)
        assert summary(engine.planned_step().prefill) == [(0, 0, 10, False)]
        assert summary(engine.planned_step().prefill) == [(0, 10, 2, True)]
        engine.run()
        assert len(request.output_ids) == 30


def test_prompt_waits_for_room_for_a_whole_chunk():
    engine = FakeEngine(Limits(num_pages=7, max_batched_tokens=8, max_num_seqs=2, lag=0, groups=[[(4, 0)]]))
    running = engine.add([1, 2], max_tokens=9, ignore_eos=True)
    engine.step()
    waiting = engine.add([2] * 20, max_tokens=1)
    engine.step()
    assert not waiting.is_running, "a chunk of 8 and the window before it can be 7 pages"
    engine.run()
    assert running.finish_reason == waiting.finish_reason == "length"


def test_prefix_hit_takes_only_pages_within_windows():
    engine = FakeEngine(Limits(num_pages=40, max_batched_tokens=8, groups=WINDOWED))
    first = engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=6, ignore_eos=True)
    engine.run()
    second = engine.add([*first.token_ids[:-1], 6], max_tokens=1)
    engine.step()
    assert second.num_cached == 14
    full, mixed = engine.pools.num_owned
    assert (full, mixed) == (8, 8 + 1 + 2 + 1), "sink tokens, tokens 11 to 13 and the new ones"
    engine.run()


def test_prompt_larger_than_a_group_is_refused():
    limits = Limits(num_pages=3, groups=[[(4, 0)], [(FULL, 0), (2, 0), (2, 0)]])
    assert limits.pools().max_tokens == 2 * 5
    engine = FakeEngine(limits)
    with pytest.raises(RequestRefused, match="the prompt needs 10 rows, the pool has 9"):
        engine.scheduler.add(Request("too long", (1,) * 11))
    longest = engine.add([1] * 10, max_tokens=5)
    engine.run()
    assert (longest.finish_reason, len(longest.output_ids)) in [("length", 1), ("stop", 1)]
