"""Tests of Hopper's kernel of `mla_sparse` beyond the contract: shares of slots and their merge, programs that take
several items, pieces of other sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from pallas_attn import mla_sparse
from pallas_attn.mosaic import basics
from pallas_attn.ops.mla_sparse import config
from tests.contract.backends import MOSAIC
from tests.contract.test_mla_sparse import SM_SCALE, SparseCase, SparseInputs
from tests.ops import harness


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Run kernels interpreted on the CPU or, on a GPU, compiled."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


MANY = SparseCase(chosen=(170, 3, 0, 129), top_k=400, heads=67, dtype="bfloat16", scattered=True)
FP8 = replace(MANY, heads=20, latent_dim=256, cache_dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("case", "splits", "programs"),
    [
        pytest.param(MANY, 3, 5, id="shares of two blocks, by programs that take several"),
        pytest.param(replace(FP8, latent_dim=384), 2, 64, id="shares, 8 bits, halves of 192"),
        pytest.param(replace(FP8, heads=9, chosen=(40, 170, 1)), 1, 1, id="one program, 8 bits"),
        pytest.param(replace(FP8, latent_dim=128), 1, 2, id="narrow, 8 bits"),
        pytest.param(replace(FP8, heads=70), 2, 4, id="two blocks, which share on a GPU, 8 bits"),
        pytest.param(replace(MANY, latent_dim=448, heads=64, dtype="float16"), 1, 2, id="unequal halves"),
    ],
)
def test_shares_and_programs(case: SparseCase, splits: int, programs: int) -> None:
    inputs, variant = SparseInputs.draw(case, harness.fresh_rng(), "bfloat16"), harness.Variant("mosaic")
    call = harness.compiled(mla_sparse, variant, sm_scale=SM_SCALE, return_lse=True, out_dtype=None)
    with (
        mock.patch.object(config, "num_splits", return_value=splits),
        mock.patch.object(basics, "multiprocessors", return_value=programs),
    ):
        got = call(**inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(MOSAIC), variant.tolerance(case.dtype))


def test_splits_fill_the_card_and_no_more() -> None:
    """128 heads are two items a token, 2,048 slots are 16 pairs of tiles."""
    assert config.num_splits(16, 16, 132) == 8
    assert config.num_splits(256, 16, 132) == 1
    assert config.num_splits(128, 16, 132) == 1
    assert config.num_splits(2, 16, 132) == 16
    assert config.num_splits(1, 1, 132) == 1
