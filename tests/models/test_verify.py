"""`verify`, which checks the tokens of an engine with an uncached run: accepted tokens, and every kind of failure.

The tokens and logits of the cases are results of Hugging Face transformers (tests/goldens).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.engine import (
    Decoded,
    Difference,
    PlainRun,
    RequestCheck,
    SamplingParams,
    StructuredOutputs,
    Verification,
)
from pallas_attn.models.engine.verify import SIGMAS, RoundingLoss, verify
from tests.kit.slow_cases import slow_cases

GOLDEN = Path(__file__).parents[1] / "goldens" / "v3"
NUM_TOKENS = 24
MAX_LEN = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt with results of transformers: its greedy continuation and margins, and the logits after the prompt."""

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
    """Return a function that checks one request. All tests share its compiled programs."""

    def check(decoded, *, tolerance=1e-3, max_len=MAX_LEN):
        return plain.check(decoded, max_len, tolerance)

    return check


def same(difference, position, got, wanted, margin):
    found = (difference.position, difference.got, difference.wanted, difference.margin)
    return found == (position, got, wanted, pytest.approx(margin, abs=1e-4))


@pytest.mark.slow  # slow, because tests/scripts/test_run_decode.py verifies these tokens
def test_tokens_of_transformers_pass(model, cases):
    verification = verify(model, [case.decoded() for case in cases], max_len=MAX_LEN)
    assert verification.passed
    assert verification.requests == (RequestCheck(NUM_TOKENS, 0, None),) * 4
    assert verification.tolerance == 1e-3
    assert verification.rounding is None


@slow_cases("7")
@slow_cases("0")
@pytest.mark.parametrize("position", [0, 7, NUM_TOKENS - 1])
def test_wrong_token_is_reported_with_its_margin(check, cases, position):
    case = cases[2]
    wrong = [*case.tokens]
    wrong[position] = (case.tokens[position] + 1) % 256
    result = check(case.decoded(wrong))
    assert result.equal == position
    assert same(result.difference, position, wrong[position], case.tokens[position], case.margins[position])


def test_one_wrong_request_fails_the_verification():
    right, wrong = RequestCheck(9, 0, None), RequestCheck(1, 0, Difference(1, 2, 3, 0.5))
    assert Verification((right, right), 1e-3).passed
    assert not Verification((right, wrong, right), 1e-3).passed


def test_token_with_a_loss_within_the_tolerance_is_tied(check, cases):
    case = cases[3]
    second, first = np.argsort(case.logits)[-2:].tolist()
    gap = float(case.logits[first] - case.logits[second])
    decoded = case.decoded([second], max_tokens=1)
    assert check(decoded, tolerance=gap + 1e-3) == RequestCheck(0, 1, None)
    assert same(check(decoded, tolerance=gap - 1e-3).difference, 0, second, first, gap)
    # The loss of a token is the distance of its logit to the highest logit, not to the next higher logit.
    tenth = int(np.argsort(case.logits)[-10])
    gap_of_tenth = float(case.logits[first] - case.logits[tenth])
    decoded = case.decoded([tenth], max_tokens=1)
    assert check(decoded, tolerance=gap_of_tenth + 1e-3) == RequestCheck(0, 1, None)
    assert same(check(decoded, tolerance=gap_of_tenth - 1e-3).difference, 0, tenth, first, gap)


def test_output_that_ends_too_early(check, cases):
    case = cases[1]
    short = case.decoded(case.tokens[:20])
    assert same(check(short).difference, 20, None, case.tokens[20], case.margins[20])
    assert check(dataclasses.replace(short, finished=False)) == RequestCheck(20, 0, None)
    assert check(short, max_len=len(case.prompt) + 20) == RequestCheck(20, 0, None)
    assert same(check(case.decoded([])).difference, 0, None, case.tokens[0], case.margins[0])


def test_output_that_ends_too_late(check, cases):
    case = cases[1]
    assert same(check(case.decoded(max_tokens=20)).difference, 20, case.tokens[20], None, 0)
    assert same(check(case.decoded(), max_len=len(case.prompt) + 20).difference, 20, case.tokens[20], None, 0)


def test_stop_token_ends_the_output(check, cases):
    case = cases[2]
    stop = case.tokens[5]
    end = case.tokens.index(stop) + 1
    assert check(case.decoded(case.tokens[:end], stop_token_ids=(stop,))) == RequestCheck(end, 0, None)
    assert same(check(case.decoded(stop_token_ids=(stop,))).difference, end, case.tokens[end], None, 0)


def test_stop_tokens_of_the_model_end_the_output_unless_ignored(check, cases, model):
    case = cases[0]
    wrong = [*case.tokens]
    wrong[-2] = model.config.eos_token_ids[0]
    assert check(case.decoded(wrong)).difference.position == NUM_TOKENS - 2
    assert same(check(case.decoded(wrong), tolerance=100.0).difference, NUM_TOKENS - 1, wrong[-1], None, 0)
    assert check(case.decoded(wrong, ignore_eos=True), tolerance=100.0).difference is None


@pytest.mark.parametrize(("tied", "passed"), [(0, True), (4, True), (5, False)])
def test_limit_of_tied_tokens_in_a_short_run(tied, passed):
    assert Verification((RequestCheck(2, tied, None),), 1.0).passed is passed


@pytest.mark.parametrize(("tied", "passed"), [(10, True), (11, False)])
def test_limit_of_tied_tokens_in_a_long_run(tied, passed):
    halves = (RequestCheck(100, tied, None), RequestCheck(100 - tied, 0, None))
    assert Verification(halves, 1.0).passed is passed


SAMPLING = {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def sampled(plain, cases):
    """Return the tokens that are sampled one after the other after the last prompt."""
    tokens = []
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(plain.choose(cases[3].decoded(tokens, **SAMPLING)).tokens[-1]))
    return tokens


@pytest.mark.slow  # slow, because test_drawn_tokens_with_other_sampling_parameters_fail samples the same tokens
def test_drawn_tokens_pass_wherever_the_output_starts(check, cases, sampled):
    assert sampled != cases[3].tokens
    whole = cases[3].decoded(sampled, **SAMPLING)
    assert check(whole) == RequestCheck(NUM_TOKENS, 0, None)
    rest = cases[3].decoded(sampled[1:], **{**SAMPLING, "max_tokens": NUM_TOKENS - 1})
    rest = dataclasses.replace(rest, prompt_ids=[*whole.prompt_ids, sampled[0]])
    assert check(rest) == RequestCheck(NUM_TOKENS - 1, 0, None)


@slow_cases("change0", "change1", "change2")
@pytest.mark.parametrize("change", [{"seed": 12}, {"temperature": 0.3}, {"top_k": 2}, {"top_p": 0.1}])
def test_drawn_tokens_with_other_sampling_parameters_fail(check, cases, sampled, change):
    assert check(cases[3].decoded(sampled, **{**SAMPLING, **change})).difference is not None


def test_loss_of_a_drawn_token_is_the_rise_that_makes_it_the_choice(plain, cases):
    """The loss of a sampled token is the smallest increase of its logit with which the sampler would choose this token.

    Without top-k and top-p, the loss is the distance of its perturbed logit to the highest perturbed logit, so the loss
    of the second-best token is the margin. The loss of a token that top-k excludes is at least the distance of its
    logit to the k-th logit.
    """
    params = {"temperature": 0.1, "seed": 3, "ignore_eos": True}
    nothing = plain.choose(cases[3].decoded([], **params))
    order = np.argsort(cases[3].logits)
    losses = [float(plain.choose(cases[3].decoded([int(token)], **params)).losses[0]) for token in order[-8:]]
    assert sorted(losses)[0] == pytest.approx(0, abs=1e-6)  # a rounding error of the logits
    assert sorted(losses)[1] == pytest.approx(float(nothing.margins[0]), abs=1e-3)
    tenth = int(order[-10])
    excluded = plain.choose(cases[3].decoded([tenth], **params, top_k=2)).losses[0]
    assert excluded >= cases[3].logits[order[-2]] - cases[3].logits[tenth] - 1e-3


def rounded(loss, expected=2.0, variance=1.0, largest=0.5):
    return RequestCheck(30, 2, None, RoundingLoss(loss, expected, variance, largest))


def test_losses_in_16_bits_may_exceed_the_expectation_by_a_few_standard_deviations():
    allowed = 2.0 + SIGMAS + 0.5
    rounding = rounded(0.0).rounding
    assert rounding is not None
    assert rounding.allowed == allowed
    assert Verification((rounded(allowed),), None).passed
    assert Verification((rounded(allowed + 0.1),), None).lost_too_much
    assert not Verification((rounded(allowed + 0.1),), None).passed
    assert not Verification((rounded(np.nan),), None).passed


def test_standard_deviations_of_requests_are_not_added():
    """Many requests fail together if each has a loss that a single request may have.

    The variance of a sum is the sum of the variances, so the standard deviation of the sum grows more slowly than the
    sum of the losses.
    """
    each = (rounded(2.0 + SIGMAS - 1),) * 16
    assert Verification(each[:1], None).passed
    assert not Verification(each, None).passed


@pytest.mark.slow  # slow, because tests/models/test_verify_faults.py verifies bfloat16 models
def test_bfloat16_model_rejects_outputs_of_other_prompts(cases):
    model = load_model(GOLDEN, "bfloat16")
    verification = verify(model, [case.decoded() for case in cases], max_len=MAX_LEN)
    assert verification.passed
    assert verification.tolerance is None
    swapped = [dataclasses.replace(case.decoded(), prompt_ids=cases[i - 1].prompt) for i, case in enumerate(cases)]
    assert not verify(model, swapped, max_len=MAX_LEN).passed


@pytest.mark.parametrize("params", [{"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}])
def test_parameters_that_change_logits_are_not_supported(plain, cases, params):
    with pytest.raises(NotImplementedError, match="params: the plain run has no repetition_penalty"):
        plain.choose(cases[0].decoded(**params))


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"structured_outputs": StructuredOutputs(regex="a*")}, "structured_outputs"),
        ({"bad_words": ["a"], "stop": ["b"]}, "stop, bad_words"),
    ],
)
def test_parameters_that_need_a_tokenizer_are_not_verified(plain, cases, params, names):
    message = f"params: the plain run has no tokenizer and no token filters, so it does not verify {names}"
    with pytest.raises(NotImplementedError, match=message):
        plain.choose(cases[0].decoded(**params))
