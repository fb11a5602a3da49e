"""Logits that sampling parameters change: equal to a NumPy oracle, and tokens with the distribution of the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.engine import LogitsProcessor, SamplingParams
from pallas_attn.models.engine import logit_edits as under_test
from pallas_attn.models.engine.logit_edits import DraftsBefore, EditRows, EditState, make_edit, pack_writes, write_slot
from pallas_attn.models.engine.logprobs import pack_logprobs, read_logprobs
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.sampler import SamplingRows, draw
from tests.models.sampling_oracle import edited, probabilities, sampling_rows

V, EOS = 40, (39,)
MASK = np.array([0b1011 << 20 | 0xFF, 0x8F], np.uint32)


class Masked:
    """Token filter that always allows the same tokens."""

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray:
        return MASK


write, edit_of = jax.jit(write_slot), jax.jit(lambda logits, *args: make_edit(*args).function(logits))


def edit_rows(requests: Sequence[Request], slots: Sequence[int]) -> EditRows:
    def penalty(name: str) -> jax.Array:
        return jnp.asarray([getattr(r.params, name) for r in requests], jnp.float32)

    return EditRows(
        slots=jnp.asarray(slots, jnp.int32),
        flags=jnp.asarray([request.flags for request in requests], jnp.int32),
        repetition_penalty=penalty("repetition_penalty"),
        presence_penalty=penalty("presence_penalty"),
        frequency_penalty=penalty("frequency_penalty"),
        extra={},
        masks=jnp.asarray([MASK if request.token_filter else 0 * MASK for request in requests]),
    )


def written(state: EditState, request: Request, slot: int) -> EditState:
    for packed in pack_writes(request, slot, EOS, V):
        state = write(state, packed)
    return state


def with_output(
    prompt: Sequence[int], output: Sequence[int], params: SamplingParams, *, masked: bool = False
) -> Request:
    request = Request("a", tuple(prompt), params, "", Masked() if masked else None)
    request.token_ids += output
    return request


tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=12)
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.0, 0.5, 20.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
    min_tokens=st.integers(0, 9),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3),
)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    each=st.lists(st.tuples(tokens, tokens, some_params, st.booleans()), min_size=4, max_size=4),
    sampled=st.lists(st.integers(0, V - 1), min_size=4, max_size=4),
)
def test_edited_logits_equal_the_oracle(seed: int, each: list[Any], sampled: list[int]):
    """Four requests with different parameters. After the host has written their state, one more token is sampled, which
    only the device counts."""
    requests = [with_output(prompt, output, params, masked=masked) for prompt, output, params, masked in each]
    state, slots = EditState.allocate(6, V), [4, 1, 5, 0]
    for request, slot in zip(requests, slots, strict=True):
        state = written(state, request, slot)
    rows = edit_rows(requests, slots)
    logits = np.random.default_rng(seed).standard_normal((4, V)).astype(np.float32) * 3
    state = state.with_sampled(rows, jnp.asarray(sampled, jnp.int32))
    positions = jnp.asarray([len(r.token_ids) + 1 for r in requests], jnp.int32)
    got = np.asarray(edit_of(jnp.asarray(logits), rows, positions, state))
    for request, token, before, after in zip(requests, sampled, logits, got, strict=True):
        output, mask = [*request.output_ids, token], MASK if request.token_filter else None
        wanted = edited(before, request.params, request.prompt_ids, output, mask=mask, eos=EOS)
        np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-5)
        if not request.flags:
            np.testing.assert_array_equal(after, before)


@jax.jit
def drawn(logits: Any, sampling: SamplingRows, rows: EditRows, state: EditState) -> Any:
    return draw(logits, sampling, make_edit(rows, sampling.position, state))


PARAMS = SamplingParams(
    temperature=0.9,
    top_k=9,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    logit_bias={3: 1.5, 5: -2.0},
    min_tokens=4,
    stop_token_ids=(0,),
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allowed_token_ids": (1, 3, 5, 6, 39)},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.0},
        {"logit_bias": {}, "min_tokens": 0, "top_k": 3},
    ],
)
def test_tokens_have_the_distribution_of_the_oracle(changes: dict[str, Any]):
    """Chi-square test over 4,000 seeds; its statistic has the mean of its degrees of freedom."""
    number, params = 4000, dataclasses.replace(PARAMS, **changes)
    request = with_output([1, 2, 2, 7], [3, 3, 8], params, masked="top_k" in changes)
    state = written(EditState.allocate(1, V), request, 0)
    logits = np.round(np.random.default_rng(3).standard_normal(V) * 2, 1).astype(np.float32)  # some are equal

    rows = jax.tree.map(lambda x: np.repeat(x, number, axis=0), edit_rows([request], [0]))
    sampling = jax.tree.map(lambda x: np.repeat(x, number), sampling_rows(params, len(request.token_ids)))
    sampling = dataclasses.replace(sampling, seed=np.arange(number, dtype=np.uint32))
    counts = np.bincount(drawn(np.broadcast_to(logits, (number, V)), sampling, rows, state), minlength=V)
    mask = MASK if request.token_filter else None
    wanted = probabilities(edited(logits, params, request.prompt_ids, request.output_ids, mask=mask, eos=EOS), params)
    assert not counts[wanted == 0].any()
    some = wanted > 0
    freedom = some.sum() - 1
    statistic = np.sum((counts[some] - number * wanted[some]) ** 2 / (number * wanted[some]))
    assert statistic <= freedom + 4.5 * np.sqrt(2 * freedom)


def test_state_of_a_long_request_is_written_in_several_calls(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(under_test, "WRITE_TOKENS", 16)
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25)
    request = with_output(rng.integers(0, 20, 40).tolist(), rng.integers(10, 30, 27).tolist(), params)
    assert len(pack_writes(request, 2, EOS, V)) == 5
    state = EditState.allocate(3, V)
    dirty = dataclasses.replace(state, counts=jnp.full_like(state.counts, 7))
    for packed in pack_writes(request, 2, EOS, V):
        dirty = write_slot(dirty, jnp.asarray(packed))
    wanted = 2 * np.bincount(request.output_ids, minlength=V) + np.isin(np.arange(V), request.prompt_ids)
    np.testing.assert_array_equal(dirty.counts, [[7] * V, [7] * V, wanted])


@pytest.mark.parametrize("tree", [pytest.param(False, marks=pytest.mark.slow), True])
def test_penalties_count_the_drafts_before_each_input(tree: bool):
    """Two rows with two drafts. In a line, draft 1 follows draft 0; in the tree, both follow the newest token."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    requests = [with_output([1, 2], [3, 4], params), with_output([5], [6], params)]
    state = written(written(EditState.allocate(2, V), requests[0], 0), requests[1], 1)
    drafts = [[3, 9], [8, 8]]
    line, branches = [[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    reach = jnp.asarray([branches if tree else line] * 2, bool)
    rows = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), edit_rows(requests, [0, 1]))
    logits = np.random.default_rng(1).standard_normal((6, V)).astype(np.float32)
    before = DraftsBefore(jnp.asarray(drafts, jnp.int32), reach)
    got = jax.jit(make_edit(rows, jnp.zeros(6, jnp.int32), state, None, before).function)(logits)
    for i, request in enumerate(requests):
        for j in range(3):
            passed = drafts[i][j - 1 : j] if tree else drafts[i][:j]
            wanted = edited(logits[3 * i + j], params, request.prompt_ids, [*request.output_ids, *passed])
            np.testing.assert_allclose(got[3 * i + j], wanted, rtol=1e-5, atol=1e-5)


def test_logits_processor_gets_masked_logits_before_penalties():
    """The processor sees -inf for excluded tokens; its result must have the shape and dtype of the logits."""
    seen: list[np.ndarray] = []

    def double(logits: Any, extra: dict[str, Any]) -> Any:
        seen.append(np.asarray(logits))
        return logits * extra["factor"][:, None]

    params = SamplingParams(allowed_token_ids=[3, 4], repetition_penalty=2.0)
    request = with_output([4], [], params)
    rows = dataclasses.replace(edit_rows([request], [0]), extra={"factor": jnp.asarray([2.0], jnp.float32)})
    state, logits = written(EditState.allocate(1, V), request, 0), jnp.ones((1, V))
    edit = make_edit(rows, jnp.ones(1, jnp.int32), state, LogitsProcessor(double, {"factor": 1.0}))
    assert edit.is_used is None
    got = np.asarray(edit.function(logits))[0]
    assert (got[3], got[4]) == (2.0, 1.0)
    assert np.isneginf(np.delete(got, [3, 4])).all()
    assert np.isneginf(np.delete(seen[0][0], [3, 4])).all()
    wrong = make_edit(rows, jnp.ones(1, jnp.int32), state, LogitsProcessor(lambda logits, extra: logits[:, :5]))
    with pytest.raises(ValueError, match=r"logits_processor: expected float32 \[1, 40\], got float32 \[1, 5\]"):
        wrong.function(logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"function": 5}, "function: expected a function"),
        ({"function": len, "defaults": {"a": "b"}}, "defaults: expected a mapping from names to finite numbers"),
        ({"function": len, "defaults": ["a"]}, "defaults: expected a mapping from names to finite numbers"),
    ],
)
def test_logits_processor_is_validated(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LogitsProcessor(**given)


def test_logprobs_equal_a_log_softmax_in_float64():
    """More than 16 likeliest tokens are found in several rounds. Of equal logits, lower ids come first."""
    logits = np.round(np.random.default_rng(2).standard_normal((3, 80)) * 2, 1).astype(np.float32)
    chosen = np.array([7, 0, 79], np.int32)
    packed = jax.jit(pack_logprobs, static_argnums=2)(logits, chosen, 20, True)
    assert not np.any(pack_logprobs(jnp.asarray(logits), jnp.asarray(chosen), 20, jnp.asarray(False)))
    x = logits.astype(np.float64)
    wanted = x - np.log(np.sum(np.exp(x), axis=1, keepdims=True))
    for i, got in enumerate(read_logprobs(np.asarray(packed), chosen.tolist(), 18)):
        order = np.lexsort((np.arange(80), -x[i]))[:18]
        assert (got.token_id, got.rank) == (chosen[i], np.sum(x[i] >= x[i, chosen[i]]))
        assert [token for token, _ in got.top] == order.tolist()
        np.testing.assert_allclose(
            [got.logprob, *(value for _, value in got.top)], wanted[i][[chosen[i], *order]], atol=1e-5
        )
