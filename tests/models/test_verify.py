"""The plain run against goldens and an engine: acceptance, and every way of failing."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from models.checkpoints import load_model
from models.engine import Decoded, Difference, PlainRun, RequestCheck, SamplingParams, Verification
from models.engine.verify import verify

GOLDEN = Path(__file__).parents[1] / "goldens" / "v3"
NUM_TOKENS = 24
MAX_LEN = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt, its greedy continuation and margins, and the logits after the prompt, all by transformers."""

    prompt: list[int]
    tokens: list[int]
    margins: np.ndarray
    logits: np.ndarray

    def decoded(self, tokens=None, **params):
        sampling = dataclasses.replace(SamplingParams(max_tokens=NUM_TOKENS), **params)
        return Decoded(self.prompt, self.tokens if tokens is None else tokens, sampling)


@pytest.fixture(scope="module")
def cases():
    with np.load(GOLDEN / "golden.npz") as stored:
        arrays = dict(stored)
    prompts = json.loads((GOLDEN / "prompts.json").read_text())
    return [
        Case(prompt, arrays[f"tokens_{i}"].tolist(), arrays[f"margins_{i}"], arrays[f"logits_{i}"][-1])
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN)


@pytest.fixture(scope="module")
def plain(model):
    return PlainRun(model, NUM_TOKENS)


@pytest.fixture(scope="module")
def check(plain):
    """Checks one request without compiling anything that another test has not compiled."""

    def check(decoded, *, tolerance=1e-3, max_len=MAX_LEN):
        return plain.check(decoded, max_len, tolerance)

    return check


def same(difference, position, got, wanted, margin):
    found = (difference.position, difference.got, difference.wanted, difference.margin)
    return found == (position, got, wanted, pytest.approx(margin, abs=1e-4))


def test_transformers_tokens_are_the_plain_runs(model, cases):
    verification = verify(model, [case.decoded() for case in cases], max_len=MAX_LEN)
    assert verification.passed
    assert verification.requests == (RequestCheck(NUM_TOKENS, 0, None),) * 4
    assert verification.tolerance == 1e-3


@pytest.mark.parametrize("position", [0, 7, NUM_TOKENS - 1])
def test_a_wrong_token_is_found_with_its_margin(check, cases, position):
    case = cases[2]
    wrong = [*case.tokens]
    wrong[position] = (case.tokens[position] + 1) % 256
    result = check(case.decoded(wrong))
    assert result.equal == position
    assert same(result.difference, position, wrong[position], case.tokens[position], case.margins[position])


def test_one_wrong_request_is_enough():
    right, wrong = RequestCheck(9, 0, None), RequestCheck(1, 0, Difference(1, 2, 3, 0.5))
    assert Verification((right, right), 1e-3).passed
    assert not Verification((right, wrong, right), 1e-3).passed


def test_a_tie_is_a_gap_within_the_tolerance(check, cases):
    case = cases[3]
    second, first = np.argsort(case.logits)[-2:].tolist()
    gap = float(case.logits[first] - case.logits[second])
    decoded = case.decoded([second], max_tokens=1)
    assert check(decoded, tolerance=gap + 1e-3) == RequestCheck(0, 1, None)
    assert same(check(decoded, tolerance=gap - 1e-3).difference, 0, second, first, gap)
    # Those between do not matter.
    tenth = int(np.argsort(case.logits)[-10])
    gap_of_tenth = float(case.logits[first] - case.logits[tenth])
    decoded = case.decoded([tenth], max_tokens=1)
    assert check(decoded, tolerance=gap_of_tenth + 1e-3) == RequestCheck(0, 1, None)
    assert same(check(decoded, tolerance=gap_of_tenth - 1e-3).difference, 0, tenth, first, gap)


def test_an_output_that_ends_too_early(check, cases):
    case = cases[1]
    short = case.decoded(case.tokens[:20])
    assert same(check(short).difference, 20, None, case.tokens[20], case.margins[20])
    assert check(dataclasses.replace(short, finished=False)) == RequestCheck(20, 0, None)
    assert check(short, max_len=len(case.prompt) + 20) == RequestCheck(20, 0, None)
    assert same(check(case.decoded([])).difference, 0, None, case.tokens[0], case.margins[0])


def test_an_output_that_goes_on_too_long(check, cases):
    case = cases[1]
    assert same(check(case.decoded(max_tokens=20)).difference, 20, case.tokens[20], None, 0)
    assert same(check(case.decoded(), max_len=len(case.prompt) + 20).difference, 20, case.tokens[20], None, 0)


def test_a_stop_token_ends_the_output(check, cases):
    case = cases[2]
    stop = case.tokens[5]
    end = case.tokens.index(stop) + 1
    assert check(case.decoded(case.tokens[:end], stop_token_ids=(stop,))) == RequestCheck(end, 0, None)
    assert same(check(case.decoded(stop_token_ids=(stop,))).difference, end, case.tokens[end], None, 0)


def test_the_models_own_stop_tokens_count_unless_ignored(check, cases, model):
    case = cases[0]
    wrong = [*case.tokens]
    wrong[-2] = model.config.eos_token_ids[0]
    assert check(case.decoded(wrong)).difference.position == NUM_TOKENS - 2
    assert same(check(case.decoded(wrong), tolerance=100.0).difference, NUM_TOKENS - 1, wrong[-1], None, 0)
    assert check(case.decoded(wrong, ignore_eos=True), tolerance=100.0).difference is None


@pytest.mark.parametrize(("tied", "passed"), [(0, True), (4, True), (5, False)])
def test_of_few_tokens_few_may_be_tied(tied, passed):
    assert Verification((RequestCheck(2, tied, None),), 1.0).passed is passed


@pytest.mark.parametrize(("tied", "passed"), [(25, True), (26, False)])
def test_of_many_tokens_a_quarter_may_be_tied(tied, passed):
    halves = (RequestCheck(50, tied, None), RequestCheck(50 - tied, 0, None))
    assert Verification(halves, 1.0).passed is passed


@pytest.mark.parametrize(("tokens", "far", "passed"), [(2, 1, True), (2, 2, False), (300, 3, True), (300, 4, False)])
def test_few_tokens_may_differ_by_more_where_that_is_counted(tokens, far, passed):
    differences = (Difference(0, 2, 3, 0.1),) * far
    assert Verification((RequestCheck(tokens - far, 0, None, differences),), 5.0).passed is passed


def test_tokens_that_differ_by_more_are_counted_one_by_one(plain, cases):
    """Tokens after them are compared, too, and an end is never excused."""
    case = cases[2]
    wrong = [*case.tokens]
    wrong[7] = (case.tokens[7] + 1) % 256
    result = plain.check(case.decoded(wrong), MAX_LEN, 1e-3, may_be_far=True)
    first, *others = result.far
    assert same(first, 7, wrong[7], case.tokens[7], case.margins[7])
    assert (result.difference, result.equal + result.tied + 1 + len(others)) == (None, NUM_TOKENS)
    short = plain.check(case.decoded(wrong[:20]), MAX_LEN, 1e-3, may_be_far=True)
    assert (short.difference.position, short.far) == (20, tuple(d for d in result.far if d.position < 20))


SAMPLING = {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def sampled(plain, cases):
    """Draws tokens after the last prompt, one after the other."""
    tokens = []
    while len(tokens) < NUM_TOKENS:
        wanted, _, _ = plain.choose(cases[3].decoded(tokens, **SAMPLING), 1e-3)
        tokens.append(int(wanted[-1]))
    return tokens


def test_sampled_tokens_are_found_again_wherever_the_output_starts(check, cases, sampled):
    assert sampled != cases[3].tokens
    whole = cases[3].decoded(sampled, **SAMPLING)
    assert check(whole) == RequestCheck(NUM_TOKENS, 0, None)
    rest = cases[3].decoded(sampled[1:], **{**SAMPLING, "max_tokens": NUM_TOKENS - 1})
    rest = dataclasses.replace(rest, prompt_ids=[*whole.prompt_ids, sampled[0]])
    assert check(rest) == RequestCheck(NUM_TOKENS - 1, 0, None)


@pytest.mark.parametrize("change", [{"seed": 12}, {"temperature": 0.3}, {"top_k": 2}, {"top_p": 0.1}])
def test_other_sampling_is_found(check, cases, sampled, change):
    assert check(cases[3].decoded(sampled, **{**SAMPLING, **change})).difference is not None


def test_bfloat16_has_a_tolerance_of_its_own(cases):
    model = load_model(GOLDEN, "bfloat16")
    verification = verify(model, [case.decoded() for case in cases], max_len=MAX_LEN)
    assert verification.passed
    assert verification.tolerance > 1
    swapped = [dataclasses.replace(case.decoded(), prompt_ids=cases[i - 1].prompt) for i, case in enumerate(cases)]
    assert not verify(model, swapped, max_len=MAX_LEN).passed
