"""Tests of the Hopper kernels of `mla_sparse` in addition to the contract suite.

A work item is the attention of one token and up to 64 heads to a split of the selected latents. On a CPU, kernels are
interpreted with race detection; on a GPU, they are compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_attn import mla_sparse
from pallas_attn.mosaic.primitives import basics
from pallas_attn.ops.mla_sparse import config
from tests.contract.backends import MOSAIC
from tests.contract.test_mla_sparse import SM_SCALE, SparseCase, SparseInputs
from tests.kit import harness
from tests.kit.slow_cases import slow_cases


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpret kernels on the CPU, or compile them on a GPU."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


MANY = SparseCase(chosen=(170, 3, 0, 129), top_k=400, heads=67, dtype="bfloat16", scattered=True)
V4 = replace(MANY, rope_dim=0, extra=(70, 0, 3, 64), sinks=True)
FP8 = replace(MANY, heads=20, latent_dim=256, cache_dtype="float8_e4m3fn")
RECORDS = replace(V4, latent_dim=512, scaled=448, cache_dtype="float8_e4m3fn")


@slow_cases(
    "interpreted-splits of two blocks, several items per CTA", "interpreted-unequal halves",
    "interpreted-two caches, splits", "interpreted-fp8, splits, halves of 192",
    "interpreted-fp8, one CTA", "interpreted-fp8, narrow", "interpreted-fp8, two blocks",
    "interpreted-fp8, wide, several items per CTA", "interpreted-fp8, many pairs, one CTA",
    "interpreted-records, two blocks, several items per CTA", "interpreted-records, 64 heads, splits",
    "interpreted-records, unequal halves, one cache, one CTA",
    "interpreted-ranges of two caches, splits", "interpreted-ranges of records, 64 heads, splits",
    "interpreted-ranges over fp8, one CTA",
)  # fmt: skip
@pytest.mark.parametrize(
    ("case", "splits", "programs"),
    [
        pytest.param(MANY, 3, 5, id="splits of two blocks, several items per CTA"),
        pytest.param(replace(MANY, latent_dim=448, heads=64, dtype="float16"), 1, 2, id="unequal halves"),
        pytest.param(V4, 2, 3, id="two caches, splits"),
        pytest.param(replace(V4, latent_dim=448, heads=20), 1, 2, id="two caches, unequal halves"),
        pytest.param(replace(V4, ranges=True), 2, 3, id="ranges of two caches, splits"),
        pytest.param(
            replace(V4, chosen=(100, 3, 0, 129), top_k=129, heads=9, ranges=True),
            1,
            1,
            id="ranges of two caches, one CTA",
        ),
        pytest.param(replace(RECORDS, heads=64, ranges=True), 2, 4, id="ranges of records, 64 heads, splits"),
        pytest.param(replace(FP8, ranges=True), 2, 1, id="ranges over fp8, one CTA"),
        pytest.param(replace(FP8, latent_dim=384), 2, 64, id="fp8, splits, halves of 192"),
        pytest.param(replace(FP8, heads=9, chosen=(40, 170, 1)), 1, 1, id="fp8, one CTA"),
        pytest.param(replace(FP8, latent_dim=128), 1, 2, id="fp8, narrow"),
        pytest.param(replace(FP8, heads=70), 2, 4, id="fp8, two blocks"),
        pytest.param(replace(FP8, heads=70, latent_dim=512), 1, 3, id="fp8, wide, several items per CTA"),
        pytest.param(replace(FP8, chosen=(170, 60, 9), top_k=1300), 2, 1, id="fp8, many pairs, one CTA"),
        pytest.param(RECORDS, 1, 3, id="records, two blocks, several items per CTA"),
        pytest.param(replace(RECORDS, heads=64), 2, 4, id="records, 64 heads, splits"),
        pytest.param(
            replace(RECORDS, latent_dim=256, scaled=192, heads=9, extra=(), sinks=False),
            1,
            1,
            id="records, unequal halves, one cache, one CTA",
        ),
    ],
)
def test_splits_and_items(case: SparseCase, splits: int, programs: int) -> None:
    """Compare with numpy. On a GPU, poisoned inputs must not change any bit of the result."""
    inputs = SparseInputs.draw(case, harness.fresh_rng(), "bfloat16")
    with (
        mock.patch.object(config, "num_splits", return_value=splits),
        mock.patch.object(basics, "multiprocessors", return_value=programs),
    ):
        call = jax.jit(functools.partial(mla_sparse, sm_scale=SM_SCALE, return_lse=True, implementation="mosaic"))
        got = call(**inputs.arguments())
        if not MOSAIC.interpreted:
            harness.assert_same_bits(got, call(**inputs.arguments(poisoned=False)))
    harness.assert_attention_close(got, inputs.expected(), harness.Variant("mosaic").tolerance(case.dtype))


def test_scales_of_records_may_differ_by_any_factor() -> None:
    """Exponents of the scales are from 0 (2**-127) to 118. A scale that the last token selects is NaN."""
    rng = harness.fresh_rng()
    case = replace(RECORDS, chosen=(70, 1, 40, 3), top_k=80, heads=5, latent_dim=192, scaled=128, extra=(), sinks=False)
    arguments = SparseInputs.draw(replace(case, scattered=False), rng, "bfloat16").arguments()
    exponents = rng.choice([0, 20, 41, 90, 110, 118], arguments["cache"].scale.shape).astype(np.uint8)
    slot = arguments["slots"][3, 0]
    exponents.reshape(-1, 2)[slot, 1] = 255
    is_nan = (arguments["slots"] == slot).any(axis=1)
    scale = exponents.view(ml_dtypes.float8_e8m0fnu)
    arguments = jax.tree.map(jnp.asarray, arguments | {"cache": replace(arguments["cache"], scale=scale)})
    call = functools.partial(mla_sparse, sm_scale=SM_SCALE, return_lse=True)
    got = jax.jit(functools.partial(call, implementation="mosaic"))(**arguments)
    expected = call(**arguments, implementation="reference", out_dtype=jnp.float32)
    assert all(np.isnan(np.asarray(x, np.float32)[is_nan]).all() for x in (*got, *expected))
    (out, lse), (want, want_lse) = ([x[~is_nan] for x in results] for results in (got, expected))
    harness.assert_attention_close((out, lse), (want, want_lse), harness.Variant("mosaic").tolerance("bfloat16"))


def test_num_splits_fills_the_gpu() -> None:
    """The arguments of `num_splits` are the number of work items without splits, of pairs of tiles per item, and of
    multiprocessors.
    """
    assert config.num_splits(16, 16, 132) == 8
    assert config.num_splits(256, 16, 132) == 1
    assert config.num_splits(128, 16, 132) == 1
    assert config.num_splits(2, 16, 132) == 16
    assert config.num_splits(1, 1, 132) == 1
