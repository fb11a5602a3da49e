"""Components of speculative decoding, tested without a model: acceptance, n-grams, and the number of drafts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.sampler import SamplingRows, sample
from pallas_attn.models.engine.speculation.acceptance import accept, accept_branch
from pallas_attn.models.engine.speculation.draft_control import (
    FORGOTTEN_STEPS,
    PROBE_STEPS,
    RAREST_PROBE_STEPS,
    SETTLING_STEPS,
    DraftControl,
    counted,
    step_cost,
)
from pallas_attn.models.engine.speculation.ngram import continue_ngrams
from pallas_attn.models.engine.speculation.proposer import DraftTree
from tests.kit.slow_cases import slow_cases

find = jax.jit(continue_ngrams, static_argnums=(2, 3, 4))


def ngrams(tokens: list[int], num_drafts: int, longest: int, shortest: int) -> list[int]:
    """Reference implementation of n-gram drafts.

    Find the longest suffix of `tokens` that occurred before, and return the tokens after its latest occurrence. Return
    -1 without a match.
    """
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :] and min(tokens[end - n : end]) >= 0:
                cycle = tokens[end:]
                return [cycle[i % len(cycle)] for i in range(num_drafts)]
    return [-1] * num_drafts


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=3, max_size=3), st.integers(0, 8))
def test_ngrams_match_the_reference(rows: list[list[int]], recycled: int):
    rows = [[*[-1] * min(recycled, len(row) - 1), *row[min(recycled, len(row) - 1) :]] for row in rows]
    tokens = np.full((3, 32), 2, np.int32)  # token 2 after the end of each sequence must be ignored
    for of_row, row in zip(tokens, rows, strict=True):
        of_row[: len(row)] = row
    drafts = find(jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32), 5, 3, 1)
    assert np.asarray(drafts).tolist() == [ngrams(row, 5, 3, 1) for row in rows]


def test_repeated_text_is_continued_past_its_end():
    assert ngrams([5, 1, 2, 1, 2, 1], 5, 4, 2) == [2, 1, 2, 1, 2]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=4, max_size=4), st.integers(0, 3))
def test_drafts_are_accepted_up_to_the_first_difference(pairs: list[tuple[int, int]], num_drafts: int):
    chosen, drafts = [a for a, _ in pairs], [b for _, b in pairs][:3]
    wanted = next((i for i in range(num_drafts) if chosen[i] != drafts[i]), num_drafts)
    got = accept(
        jnp.asarray([chosen], jnp.int32), jnp.asarray([drafts], jnp.int32), jnp.asarray([num_drafts], jnp.int32)
    )
    assert got.tolist() == [wanted]


def branches(parents: list[int]) -> list[list[int]]:
    """Reference implementation: return the path from input 0 to each input of a tree of drafts.

    The parent of input i is input parents[i - 1].
    """
    ways = [[0]]
    for i, parent in enumerate(parents, 1):
        ways.append([*ways[parent], i])
    return ways


trees = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=7).map(
    lambda drafts: [(min(parent, i), token) for i, (parent, token) in enumerate(drafts)]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(trees, st.lists(st.integers(0, 2), min_size=8, max_size=8), st.integers(0, 7))
def test_one_branch_of_a_tree_is_accepted(drafts: list[tuple[int, int]], chosen: list[int], num_drafts: int):
    """If several drafts with the same parent have the same token, the first of these drafts is accepted."""
    parents, tokens = [parent for parent, _ in drafts], [token for _, token in drafts]
    ways, at = branches(parents), 0
    num_drafts = min(num_drafts, len(drafts))
    while following := [i + 1 for i in range(num_drafts) if parents[i] == at and tokens[i] == chosen[at]]:
        at = following[0]
    padded = [np.pad(np.asarray(x, np.int32), (0, 7 - len(x)))[None] for x in (tokens, parents)]
    branch, accepted = accept_branch(*(jnp.asarray(x, jnp.int32) for x in ([chosen], *padded, [num_drafts])), depth=7)
    assert branch[0, : len(ways[at])].tolist() == ways[at]
    assert set(branch[0, len(ways[at]) - 1 :].tolist()) == {at}
    assert accepted.tolist() == [len(ways[at]) - 1]
    reach = DraftTree(jnp.asarray(padded[0]), jnp.asarray(padded[1] - 1)).reach()[0]
    for i, way in enumerate(ways):
        assert np.flatnonzero(reach[i]).tolist() == way


N, V = 3000, 6
sample_all = jax.jit(sample)


@pytest.mark.slow
@slow_cases("right")
@pytest.mark.parametrize(
    "kind", ["right", "random", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wrong", "likeliest"))]
)
def test_tokens_with_drafts_have_the_distribution_of_the_model(kind: str):
    """Draw two tokens from a small Markov model with many seeds. The logits of the second token are computed after the
    draft of the first token, and again after the sampled token if the draft is rejected. The test is a chi-square test
    over all pairs."""
    table = jnp.asarray(np.random.default_rng(0).standard_normal((V, V)) * 1.5, jnp.float32)
    temperature, top_k, top_p, min_p, start = 0.9, 5, 0.95, 0.01, 2

    def rows(position: int) -> SamplingRows:
        return SamplingRows(
            temperature=jnp.full(N, temperature, jnp.float32),
            top_k=jnp.full(N, top_k, jnp.int32),
            top_p=jnp.full(N, top_p, jnp.float32),
            min_p=jnp.full(N, min_p, jnp.float32),
            seed=jnp.arange(N, dtype=jnp.uint32),
            position=jnp.full(N, position, jnp.int32),
        )

    def draw(previous: Any, position: int) -> Any:
        return sample_all(table[previous], rows(position))[0]

    before = jnp.full(N, start, jnp.int32)
    first = draw(before, 7)
    draft = {
        "right": first,
        "wrong": (first + 1) % V,
        "likeliest": jnp.argmax(table[before], axis=1).astype(jnp.int32),
        "random": jnp.asarray(np.random.default_rng(1).integers(V, size=N), jnp.int32),
    }[kind]
    chosen = jnp.stack([first, draw(draft, 8)], axis=1)
    accepted = accept(chosen, draft[:, None], jnp.ones(N, jnp.int32))
    second = jnp.where(accepted == 1, chosen[:, 1], draw(first, 8))
    share = float(jnp.mean(accepted.astype(jnp.float32)))
    p = kept_probability(np.asarray(table), temperature, top_k, top_p)
    if kind == "likeliest":
        assert share == pytest.approx(p[start].max(), abs=0.03), "a draft is accepted with its probability"
    assert {"right": share == 1, "wrong": share == 0}.get(kind, 0.1 < share < 0.9)
    wanted = (p[start][:, None] * p).reshape(-1) * N
    got = np.bincount(np.asarray(first * V + second), minlength=V * V)
    assert not got[wanted == 0].any()
    possible = wanted > 0
    chi_square = np.sum((got[possible] - wanted[possible]) ** 2 / wanted[possible])
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def kept_probability(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probabilities of each row after temperature, top-k and top-p, in float64."""
    result = np.zeros(logits.shape)
    for row, out in zip(logits.astype(np.float64) / temperature, result, strict=True):
        order = np.argsort(-row)[:top_k]
        p = np.exp(row[order] - row.max())
        p /= p.sum()
        kept = np.cumsum(p) - p < top_p
        out[order[kept]] = p[kept] / p[kept].sum()
    return result


DENSE = step_cost(2e9, 0.0, 0.0, 2)


def simulate(control: DraftControl, requests: list[Request], right: bool, steps: int) -> list[int]:
    """Return the numbers of drafts that `control` chooses in consecutive steps.

    Either all drafts are right or all are wrong.
    """
    chosen = []
    for _ in range(steps):
        num_drafts = control.num_drafts(requests)
        chosen.append(num_drafts)
        for request in requests:
            if num_drafts:
                control.record(request, num_drafts, num_drafts if right else 0)
    return chosen


def requests(num: int) -> list[Request]:
    return [Request(i, (1,)) for i in range(num)]


def test_number_of_drafts_is_largest_for_right_and_zero_for_wrong_drafts():
    assert simulate(DraftControl((0, 1, 2, 4), DENSE), requests(1), True, 40)[10:] == [4] * 30
    control, pair = DraftControl((0, 1, 2, 4), DENSE), requests(2)
    assert simulate(control, pair, False, 400)[200:].count(0) >= 190
    last = simulate(control, pair, False, 1000 + 2 * RAREST_PROBE_STEPS)[1000:]
    assert sorted(set(last)) == [0, 1], "now and then one is tried"
    assert last.count(1) == 2
    back = simulate(control, pair, True, RAREST_PROBE_STEPS + 8 * PROBE_STEPS)
    assert back[-1] == 4, "and comes back when it pays"
    tried = np.flatnonzero(back)
    assert tried[1] - tried[0] <= PROBE_STEPS, "soon after the first that is accepted"


def test_probes_are_rare_after_an_accepted_probe():
    control, pair = DraftControl((0, 1, 2, 4), step_cost(0.2e9, 30e9, 6 / 64, 2)), requests(2)
    simulate(control, pair, False, 4 * RAREST_PROBE_STEPS)
    while control.num_drafts(pair) == 0:
        pass
    control.record(pair[0], 1, 1)
    assert simulate(control, pair, False, PROBE_STEPS).count(1) <= 1


def test_equal_traffic_gives_equal_choices():
    first, second = (simulate(DraftControl((0, 1, 2, 4), DENSE), requests(3), False, 100) for _ in range(2))
    assert first == second


def test_compute_bound_batch_uses_fewer_drafts():
    def chosen(num_requests: int, cost: Any) -> int:
        control, running = DraftControl((0, 1, 2, 4), cost), requests(num_requests)
        for request in running:
            for _ in range(30):
                control.record(request, 4, 1)
        return control.num_drafts(running)

    assert [chosen(n, DENSE) for n in (1, 64, 512)] == [4, 1, 0]
    experts = step_cost(0.2e9, 30e9, 6 / 64, 2)  # a model whose tokens read different experts
    assert chosen(1, experts) <= 1
    assert experts(64) < 64 * experts(1)


def decode(control: DraftControl, seconds: dict[int, float], rate: float, steps: int, rows: int = 1) -> list[int]:
    """Return the numbers of drafts that `control` chooses in consecutive simulated steps.

    Drafts are accepted with the probability `rate`, and a step with n drafts takes seconds[n]. The result of a step is
    known after the next step has been planned.
    """
    rng, running, chosen, under_way = np.random.default_rng(0), requests(rows), [], None
    for _ in range(steps):
        chosen.append(control.num_drafts(running))
        retired, under_way = under_way, chosen[-1]
        if retired is not None:
            for request in running:
                if retired:
                    accepted = np.argmin([*(rng.random(retired) < rate), False])
                    control.record(request, retired, int(accepted))
            control.record_time(rows, retired, seconds[retired])
    return chosen


FLAT, STEEP = {0: 3.8, 1: 4.0, 2: 4.2, 4: 4.6}, {0: 3.8, 1: 5.4, 2: 7.0, 4: 10.0}


@pytest.mark.parametrize(
    ("seconds", "rate", "wanted"),
    [
        (FLAT, 0.9, {4}),
        (FLAT, 0.5, {2, 4}),
        (STEEP, 0.5, {0, 1}),
        (STEEP, 0.0, {0}),
        (FLAT, 0.0, {0}),
        (STEEP, 1.0, {4}),
    ],
)
def test_measured_times_determine_the_number_of_drafts(seconds, rate, wanted):
    """The control follows measured times instead of the estimate from the bytes that a step reads.

    By the estimate, every draft costs half of a step without drafts. The fixed time of a step makes drafts cheaper.
    """
    experts = step_cost(2.4e9, 28.8e9, 6 / 64, 2)
    chosen = decode(DraftControl((0, 1, 2, 4), experts), seconds, rate, 400)[60:]
    assert sum(n in wanted for n in chosen) > 0.9 * len(chosen)


def test_pause_of_the_host_changes_no_choice():
    control, experts = DraftControl((0, 1, 2, 4), DENSE), dict(FLAT)
    assert decode(control, experts, 1.0, 40)[-1] == 4
    for seconds in (300.0, 0.01):
        control.record_time(1, 4, seconds)
    assert control.num_drafts(requests(1)) == 4


def test_long_measurements_do_not_block_a_number_of_drafts():
    """A measured time that is too long does not exclude a number of drafts forever.

    A step without drafts never counts as slower than a step with drafts, even if the measurements say so. A number of
    drafts between two measured numbers is tried if its estimated time could make this number worthwhile. The estimate
    is the measured time of the larger number, scaled by bytes.
    """
    experts = step_cost(2.4e9, 28.8e9, 6 / 64, 2)
    for accepted, wanted in ((0, {0}), (1, {1, 2})):
        control, running = DraftControl((0, 1, 2, 4), experts), requests(1)
        for num_drafts, seconds in ((0, 8.0), (4, 7.3)):
            for _ in range(5):
                control.record_time(1, num_drafts, seconds)
        for _ in range(30):
            control.record(running[0], 4, accepted)
        assert control.num_drafts(running) in wanted


def test_times_of_the_first_steps_after_prompts_are_ignored():
    control, running = DraftControl((0, 1), DENSE), requests(1)
    control.record_prompts()
    for _ in range(SETTLING_STEPS):
        control.record_time(1, 0, 0.001)
    assert control.num_drafts(running) == 1, "by bytes alone"
    for num_drafts, seconds in ((0, 1.0), (1, 9.0)):
        for _ in range(3):
            control.record_time(1, num_drafts, seconds)
    assert control.num_drafts(running) == 0


def test_times_are_grouped_by_rows_and_expire():
    control, one = DraftControl((0, 1), DENSE), requests(1)
    control.record(one[0], 1, 1)
    for num_drafts, seconds in ((0, 1.0), (1, 9.0)):
        for _ in range(3):
            control.record_time(1, num_drafts, seconds)
    again = requests(8)
    assert (control.num_drafts(one), control.num_drafts(again)) == (0, 1), "a draft was slow with one row alone"
    for _ in range(FORGOTTEN_STEPS + 1):
        control.record_time(8, 0, 1.0)
    assert control.num_drafts(one) == 1, "so it is tried again"


def test_single_width_is_always_used():
    assert simulate(DraftControl((3,), DENSE), requests(2), False, 50) == [3] * 50
    for wrong in ((), (2, 1), (-1, 2), (1, 1)):
        with pytest.raises(ValueError, match="widths must be ascending"):
            DraftControl(wrong, DENSE)


def test_drafts_are_counted_by_position():
    assert counted((), 0, 3) == (0, 0, 0)
    assert counted((4, 2), 1, 3) == (5, 2, 0)
    assert counted((4, 2, 1), 2, 1) == (5, 3, 1)
