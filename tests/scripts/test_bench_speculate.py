"""Tests of scripts/bench_speculate.py, the benchmark of speculative decoding.

The tests check the bound (roofline) of the speed, and that drafts are correct at the given rate. The model of the
benchmark has a table with the next token of each token, so drafts of a known quality can be made.
"""

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import DraftRows, Engine, NGramProposer, SamplingParams, Speculation
from scripts import bench_speculate
from scripts.bench.engine.drafting import (
    ChosenProposer,
    DraftingWork,
    TabledProposer,
    decode,
    expected_tokens,
    follow,
    following_model,
    line,
    ratios,
    verifying_s,
)
from scripts.bench.engine.serving import Costs
from scripts.bench.harness.device import Rates
from tests.models.engine_case import CONFIG

TABLE = np.array([3, 0, 1, 4, 2], np.int32)


def drafts(rate: float) -> np.ndarray:
    rows = SimpleNamespace(
        tokens=jnp.arange(400, dtype=jnp.int32) % 5,
        lens=jnp.arange(400, dtype=jnp.int32) + 7,
        slots=jnp.arange(400, dtype=jnp.int32) % 8,
    )
    proposer = TabledProposer(jnp.asarray(TABLE), rate)
    return np.asarray(proposer.propose(proposer.weights, (), cast(DraftRows, cast(Any, rows)), 3)[0])


@pytest.mark.usefixtures("unchecked_shapes")
def test_drafts_are_correct_at_the_given_rate():
    first = np.arange(400) % 5
    right = np.stack([TABLE[first], TABLE[TABLE[first]], TABLE[TABLE[TABLE[first]]]], axis=1)
    assert (drafts(1.0) == right).all()
    assert not (drafts(0.0) == right).any()
    assert np.mean(drafts(0.5) == right, axis=0) == pytest.approx([0.5] * 3, abs=0.1)
    assert follow(TABLE, 1, 5) == [1, 0, 3, 4, 2]


def test_bound_is_the_longer_of_bytes_and_operations():
    costs = Costs(CONFIG, dense_bytes=1000, routed_bytes=800, token_bytes=10, rates=Rates(copy=1e3, matrix=1e9))
    assert verifying_s(costs, 2.0, 1, 0, 2) == 2.0
    assert verifying_s(costs, 2.0, 1, 1, 2) == pytest.approx(2.2)  # one token reads 400 bytes of experts, two read 600
    slow = Costs(CONFIG, dense_bytes=1000, routed_bytes=800, token_bytes=10, rates=Rates(copy=1e9, matrix=1e3))
    assert verifying_s(slow, 2.0, 1, 3, 2) == pytest.approx(2 + 3 * 2 * 700 / 1e3)
    assert [expected_tokens(rate, 3) for rate in (0, 0.5, 1)] == [1, 1.875, 4]
    got = {"tokens_per_s": 150.0, "step_s": 0.01, "drafted": 1.0, "accepted": 0.5}
    result = {"batch": 1, "context": 64, "rate": 0.5} | got | ratios(got, {"tokens_per_s": 100.0, "step_s": 0.01}, 200)
    assert line(result) == (
        "batch 1, context 64, acceptance 0.5: 150 tokens/s, 1.50x plain, 75% of the bound; 10.00 ms a step,"
        " 0.50 of 1.00 drafts accepted"
    )


def test_cases_have_room_for_all_tokens():
    work = DraftingWork((1, 8), (1024, 8192), (1.0,), num_drafts=4, new_tokens=256)
    sizes = work.engine_config(None)
    assert sizes.max_model_len == 8192 + max(work.output_tokens(batch, 8192) for batch in (1, 8)) + 1
    assert [work.measured_tokens(batch) for batch in (1, 8)] == [256, 128]
    assert sizes.num_pages * sizes.page_size >= 8 * (8192 + work.output_tokens(8, 8192))
    assert sizes.decode_buckets == (1, 8)


@pytest.mark.slow
def test_model_follows_its_table():
    """Drafts from the table are accepted at the given rate, so the model really generates the tokens of its table."""
    work = DraftingWork((2,), (16,), (1.0, 0.0), num_drafts=1, new_tokens=8, page_size=16, max_batched_tokens=32)
    model, table = following_model(CONFIG, "float32", AttentionSettings())
    tabled = TabledProposer(table, 1.0)
    chosen = ChosenProposer(tabled, NGramProposer())
    engine = Engine(model, work.engine_config(Speculation(chosen, 1, adaptive=False)))
    prompts = [follow(np.asarray(table), first, 16) for first in (1, 2)]
    params = SamplingParams(max_tokens=work.output_tokens(2, 16), ignore_eos=True)
    for index, rate in ((0, 1.0), (0, 0.0), (1, 1.0)):
        tabled.set_rate(rate)
        chosen.choose(index)
        got = decode(engine, prompts, params, work)
        assert (got["drafted"], got["accepted"]) == (1, rate)
        assert got["tokens_per_s"] * got["step_s"] == pytest.approx(2 * (1 + rate))
        assert [kind["drafts"] for kind in got["steps"]] == [1]


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--num-drafts", "65"], ["--rates", "1.5"], ["--new-tokens", "0"]])
def test_sizes_out_of_range_are_errors(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_speculate.main(wrong)
    assert wrong[0] in capsys.readouterr().err
