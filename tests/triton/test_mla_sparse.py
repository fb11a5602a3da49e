"""Tests of the Triton kernel of `mla_sparse` with the tiles for Hopper (64 heads), and with splits: several programs
share the selected latents of a token.
"""

from __future__ import annotations

import dataclasses

import pytest

from pallas_attn.ops.mla_sparse import triton as module
from pallas_attn.runtime import device
from tests.contract.test_mla_sparse import BASE, SparseInputs, attend
from tests.kit import harness
from tests.kit.slow_cases import slow_cases
from tests.triton.test_mla_decode import TRITON

HOPPER = dataclasses.replace(BASE, chosen=(150, 3), top_k=160, heads=64, dtype="bfloat16", scattered=True)
CASES = {
    "16 bits": HOPPER,
    "8 bits": dataclasses.replace(HOPPER, cache_dtype="float8_e4m3fn", latent_dim=256),
    "splits": dataclasses.replace(HOPPER, chosen=(150,), heads=3, latent_dim=96),
    "ranges, splits": dataclasses.replace(
        HOPPER, chosen=(100, 160), extra=(64, 20), heads=3, latent_dim=96, rope_dim=0, ranges=True
    ),
    "splits, some without a slot": dataclasses.replace(HOPPER, chosen=(20,), heads=3, scattered=False),
}


@slow_cases("splits", "splits, some without a slot")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hopper_tiles_and_splits(monkeypatch: pytest.MonkeyPatch, case) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "9.0")
    monkeypatch.setattr(module, "MIN_STEPS", 1)
    monkeypatch.setattr(device, "INTERPRETED_MULTIPROCESSORS", 4)
    inputs = SparseInputs.draw(case, harness.fresh_rng(), "bfloat16")
    of_output, of_lse = TRITON.variant.tolerance("bfloat16")
    if case.cache_dtype:  # of few keys, as in tests.contract.test_mla_sparse.test_values
        of_output = dataclasses.replace(of_output, cosine=harness.ROUNDED_TWICE)
    harness.assert_attention_close(attend(TRITON)(**inputs.arguments()), inputs.expected(), (of_output, of_lse))


@pytest.mark.parametrize(
    ("programs", "steps", "splits"), [(0, 64, 1), (16, 64, 16), (5, 64, 5), (100, 64, 16), (3, 8, 2), (132, 3, 1)]
)
def test_splits_have_a_minimum_number_of_steps(programs: int, steps: int, splits: int) -> None:
    assert module._num_splits(programs, steps) == splits
