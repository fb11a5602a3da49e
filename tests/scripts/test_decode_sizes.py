"""Tests of the sizes that run_decode chooses for its prompts: few programs, and a program for every step."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import pytest

from pallas_attn.models.cli.decode.options import parse_options
from pallas_attn.models.cli.decode.sizes import engine_config, rounded_up
from pallas_attn.models.cli.model import choose_page_size
from pallas_attn.models.cli.prompts import demo_ids
from pallas_attn.models.cli.speculate import make_speculation
from pallas_attn.models.config import PRESETS, ModelConfig
from pallas_attn.models.decoder import make_mesh
from pallas_attn.models.engine import Engine, EngineConfig, NGramProposer, Speculation
from pallas_attn.models.engine import engine as engine_module
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.step.plan import StepPlan
from tests.models import engine_case
from tests.models.test_engine_faults import FakeResult, FakeRunner

MODEL = PRESETS["v3-tiny"]
GIVEN = ["--prompt-ids", "ids.json"]
DEMO = [len(ids) for ids in demo_ids(MODEL.vocab_size, 16)]


def sizes_of(lengths: list[int], *flags: Any, model: ModelConfig = MODEL) -> EngineConfig:
    options = parse_options([*map(str, flags)])
    choose_page_size(options, model)
    return engine_config(options, model, lengths)


def buckets_of(sizes: EngineConfig) -> list[tuple[int, int, int]]:
    """Return (decode rows, prefill tokens, drafts) of each program."""
    buckets = sizes.runner_config(sizes.max_model_len or 1024).buckets()
    return [(bucket.decode_rows, bucket.prefill_tokens, bucket.num_drafts) for bucket in buckets]


@pytest.mark.parametrize(
    ("lengths", "flags", "buckets"),
    [
        ([48], [*GIVEN, "--max-tokens", 48], [(1, 0, 0), (0, 64, 0)]),
        ([3], GIVEN, [(1, 0, 0), (0, 32, 0)]),
        ([5000], GIVEN, [(1, 0, 0), (0, 512, 0)]),
        ([700], [*GIVEN, "--max-batched-tokens", 100], [(1, 0, 0), (0, 100, 0)]),
        ([700], [*GIVEN, "--no-chunked-prefill"], [(1, 0, 0), (0, 700, 0)]),
        (DEMO, [], [(4, 0, 0), (4, 64, 0)]),
        ([20, 20], GIVEN, [(2, 0, 0), (2, 64, 0)]),
        ([20] * 64, [*GIVEN, "--max-num-seqs", 64], [(64, 0, 0), (64, 256, 0)]),
        ([2000] * 64, [*GIVEN, "--max-num-seqs", 64, "--max-batched-tokens", 4096], [(64, 0, 0), (64, 4096, 0)]),
        (
            [20] * 600,
            [*GIVEN, "--max-num-seqs", 300],
            [(64, 0, 0), (256, 0, 0), (300, 0, 0), (300, 32, 0), (300, 128, 0), (300, 512, 0)],
        ),
        ([20], [*GIVEN, "--batch-invariant"], [(4, 64, 0)]),
        ([20], ["--model", "x", "--chat", "--max-num-seqs", 1], [(1, 0, 0), (0, 32, 0)]),
    ],
)
def test_few_programs_are_compiled(lengths: list[int], flags: list[Any], buckets: list[tuple[int, int, int]]) -> None:
    assert buckets_of(sizes_of(lengths, *flags)) == buckets


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_data_ranks_have_steps_with_decode_rows_and_prompts() -> None:
    """One data rank may decode while another computes a prompt, although each runs one request."""
    config = EngineConfig(max_num_seqs=1, mesh=make_mesh({"data": 2}))
    assert Bucket(1, 512) in config.runner_config(1024).buckets()


@pytest.mark.parametrize(
    ("flags", "num_prompts", "widths"),
    [
        (["--speculate", "ngram:4"], 8, (0, 4)),
        (["--speculate", "ngram:4", "--max-tokens", 4], 8, (0, 2)),
        (["--speculate", "ngram:4", "--max-tokens", 1], 8, (0, 1)),
        (["--speculate", "ngram:4", "--max-tokens", 1000], 8, (0, 1, 2, 4)),
    ],
)
def test_only_usable_numbers_of_drafts_are_compiled(
    flags: list[Any], num_prompts: int, widths: tuple[int, ...]
) -> None:
    speculation = make_speculation(parse_options([*map(str, flags)]), engine_case.model(), num_prompts)
    assert speculation is not None
    assert speculation.draft_buckets == widths


def test_one_request_with_drafts_needs_three_programs() -> None:
    sizes = sizes_of([48], *GIVEN)
    drafting = Speculation(NGramProposer(), 4, few_programs=True)
    config = dataclasses.replace(sizes, speculate=drafting)
    assert buckets_of(config) == [(1, 0, 0), (1, 0, 4), (0, 64, 0)]


def test_similar_prompts_have_equal_sizes() -> None:
    """Runs with similar prompts find the compiled programs of earlier runs, because the shapes are equal."""
    first, *others = [sizes_of([length], *GIVEN, "--max-tokens", 48) for length in (33, 48, 60, 64)]
    assert all(other == first for other in others)


def test_sizes_are_rounded_up_by_at_most_a_quarter() -> None:
    assert [rounded_up(n) for n in (1, 4, 5, 9, 17, 33, 65)] == [4, 4, 8, 12, 20, 40, 80]
    assert all(n <= rounded_up(n) <= 1.25 * n for n in range(16, 5000))


class RecordingRunner(FakeRunner):
    """Fake runner that finds the program of every step."""

    def __init__(self, model: object, config: Any, processes: object = None):
        super().__init__(model, config, processes)
        self.buckets = config.buckets()

    def launch(self, plans: tuple[StepPlan], all_logits: bool) -> FakeResult:
        (plan,) = plans
        tokens = sum(row.num_tokens for row in plan.prefill)
        assert any(
            len(plan.decode) <= bucket.decode_rows
            and tokens <= bucket.prefill_tokens
            and plan.num_drafts <= bucket.num_drafts
            for bucket in self.buckets
        ), f"no program for {len(plan.decode)} decode rows, {tokens} prompt tokens and {plan.num_drafts} drafts"
        return super().launch(plans, all_logits)


@pytest.mark.parametrize("seed", range(30))
def test_every_step_has_a_program(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random numbers and lengths of prompts, with equal prefixes, early ends, preemptions and drafts."""
    draw = random.Random(seed)
    monkeypatch.setattr(engine_module, "Runner", RecordingRunner)
    prefix = [draw.randrange(engine_case.VOCAB_SIZE) for _ in range(20)]
    prompts = [
        [*prefix[: draw.choice([0, 16, 20])], *(draw.randrange(64) for _ in range(draw.randint(1, 40)))]
        for _ in range(draw.choice([1, 1, 2, 5, 12]))
    ]
    flags: list[Any] = [*GIVEN, "--page-size", 4, "--max-tokens", draw.choice([1, 5, 20])]
    if draw.random() < 0.5:
        flags += ["--num-pages", draw.choice([16, 20, 30])]  # too few for all requests
    if draw.random() < 0.5:
        flags += ["--max-num-seqs", draw.randint(1, 6)]
    if draw.random() < 0.3:
        flags += ["--max-batched-tokens", draw.choice([8, 20])]
    sizes = sizes_of([*map(len, prompts)], *flags, model=engine_case.CONFIG)
    drafting = None if draw.random() < 0.5 else Speculation(NGramProposer(), 3, few_programs=draw.random() < 0.5)
    engine = Engine(engine_case.model(), dataclasses.replace(sizes, speculate=drafting))
    params = parse_options([*map(str, flags)]).params
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
