"""The benchmark of drafts: its bound, and drafts that are right as often as they are told to be."""

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from models.engine import DraftRows
from scripts import bench_speculate
from scripts.bench.engine.drafting import (
    DraftingWork,
    TabledProposer,
    expected_tokens,
    follow,
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
def test_drafts_are_right_at_the_rate_asked_for():
    first = np.arange(400) % 5
    right = np.stack([TABLE[first], TABLE[TABLE[first]], TABLE[TABLE[TABLE[first]]]], axis=1)
    assert (drafts(1.0) == right).all()
    assert not (drafts(0.0) == right).any()
    assert np.mean(drafts(0.5) == right, axis=0) == pytest.approx([0.5] * 3, abs=0.1)
    assert follow(TABLE, 1, 5) == [1, 0, 3, 4, 2]


def test_the_bound_is_of_bytes_or_operations():
    costs = Costs(CONFIG, dense_bytes=1000, routed_bytes=800, token_bytes=10, rates=Rates(copy=1e3, matrix=1e9))
    assert verifying_s(costs, 2.0, 1, 0, 2) == 2.0
    assert verifying_s(costs, 2.0, 1, 1, 2) == pytest.approx(2.2)  # 2 of 4 experts a token: 400 bytes, then 600
    slow = Costs(CONFIG, dense_bytes=1000, routed_bytes=800, token_bytes=10, rates=Rates(copy=1e9, matrix=1e3))
    assert verifying_s(slow, 2.0, 1, 3, 2) == pytest.approx(2 + 3 * 2 * 700 / 1e3)
    assert [expected_tokens(rate, 3) for rate in (0, 0.5, 1)] == [1, 1.875, 4]
    result = {"batch": 1, "context": 64, "rate": 0.5} | ratios(150, 100, 200)
    assert line(result) == "batch 1, context 64, acceptance 0.5: 150 tokens/s, 1.50x plain, 75% of the bound"


def test_a_case_has_room_for_all_that_it_decodes():
    work = DraftingWork((8,), (8192,), (1.0,), num_drafts=4, new_tokens=256)
    sizes = work.engine_config(8, 8192, None)
    assert sizes.max_model_len == 8192 + work.output_tokens(8, 8192) + 1
    assert sizes.num_pages * sizes.page_size >= 8 * (8192 + work.output_tokens(8, 8192))


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--num-drafts", "65"], ["--rates", "1.5"], ["--new-tokens", "0"]])
def test_sizes_out_of_range_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_speculate.main(wrong)
    assert wrong[0] in capsys.readouterr().err
