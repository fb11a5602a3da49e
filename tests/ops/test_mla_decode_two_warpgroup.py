"""Tests of the two-warpgroup kernels of `mla_decode` in addition to the contract suite.

These kernels are for many query rows. Each of two warpgroups computes half of the output columns; they process tiles of
latents in pairs. On a CPU, kernels are interpreted with race detection; on a GPU, they are compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from pallas_attn import explain, mla_decode
from pallas_attn.ops.mla_decode.config import TwoWarpgroupConfig
from tests.contract import backends
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Latents that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.usefixtures("short_rows_are_cut"),
]

MOSAIC = Variant("mosaic", TwoWarpgroupConfig(pairs=2, cluster=1), honours_plans=True)
SINGLE = Variant("mosaic", TwoWarpgroupConfig(pairs=1, cluster=1), honours_plans=True)
CLUSTER = Variant("mosaic", TwoWarpgroupConfig(pairs=1, cluster=2), honours_plans=True)


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpret kernels on the CPU, or compile them on a GPU."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


# A draft tree with two blocks of query rows. A tile has four pages.
TREE = MlaCase(
    kv_lens=(0, 20, 137, 320),
    q_lens=(0, 3, 1, 2),
    queries=3,
    heads=40,
    page_size=16,
    pages_per_row=20,
    num_pages=100,
    dtype="float16",
    tree=True,
    absent_pages=True,
)
# One block of query rows. With R = 64, probabilities overwrite rotated keys in shared memory. A page of 128 tokens is a
# pair of tiles.
ONE_BLOCK = MlaCase(
    kv_lens=(1, 129, 64, 0, 300), heads=64, rope_dim=64, page_size=128, pages_per_row=3, num_pages=12, dtype="bfloat16"
)
SHAPES = {
    "one block": ONE_BLOCK,
    "three blocks, drafts": replace(
        ONE_BLOCK, kv_lens=(2, 65, 200), queries=2, heads=67, page_size=64, pages_per_row=4, num_pages=12
    ),
}


def call(arrays: dict[str, Any], variant: Variant, **static: Any) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, return_lse=True, **static)(**arrays)


def draw(case: MlaCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, variant: Variant, **static: Any) -> None:
    """Compare the result for poisoned inputs with numpy."""
    arguments = inputs.arguments()
    plan = backends.plan_of(backends.MOSAIC, arguments, num_programs=3, mode="balanced")
    got = call(arguments | {"plan": plan}, variant, **static)
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(inputs.case.dtype))


STEEP = 16
"""Factor of the queries with which row maxima grow by more than the threshold of rescaling."""

TWO_PAIRS = {
    "draft trees, absent pages": TREE,
    "tiles that end with the first draft": replace(TREE, kv_lens=(0, 66, 64, 129), absent_pages=False),
    "all of maximum length": replace(TREE, kv_lens=(320,) * 4, absent_pages=False),
}


@slow_cases(
    "interpreted-tiles that end with the first draft", "interpreted-all of maximum length",
    "interpreted-draft trees, absent pages",
)  # fmt: skip
@pytest.mark.parametrize("case", TWO_PAIRS.values(), ids=TWO_PAIRS)
def test_two_pairs_of_tiles(case: MlaCase) -> None:
    """Shared memory holds two pairs of tiles. Row maxima grow strongly, so accumulators are rescaled."""
    inputs = draw(case)
    check(replace(inputs, q=(STEEP * inputs.q.astype(np.float32)).astype(inputs.q.dtype)), MOSAIC)


# Not in `make test`, because the contract suite has pages of 128 tokens, odd numbers of heads, and drafts.
@pytest.mark.slow
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_one_pair_of_tiles(case: MlaCase) -> None:
    """Shared memory holds one pair of tiles."""
    check(draw(case), SINGLE)


@slow_cases("interpreted")
def test_cluster_of_two_blocks() -> None:
    """Two CTAs of a cluster share the copies of latents."""
    case = replace(ONE_BLOCK, kv_lens=(70, 200), heads=128, latent_dim=128, rope_dim=32, page_size=64, pages_per_row=4)
    check(draw(case), CLUSTER)


# Blocks with fewer query rows than a tile. The plan gives some sequences one split and others several.
PARTLY_FILLED = {
    "one block of 40": (replace(ONE_BLOCK, heads=40), None),
    "one block of 40, float32 output": (replace(ONE_BLOCK, heads=40), "float32"),
    "two queries in two blocks of 48": (
        replace(ONE_BLOCK, kv_lens=(2, 70, 300), queries=2, heads=48, latent_dim=128),
        None,
    ),
    "draft trees in two blocks of 48, float32 output": (replace(TREE, heads=32), "float32"),
    "padded rows in two blocks of 40": (replace(ONE_BLOCK, heads=73, latent_dim=128), None),
}


@slow_cases(
    "interpreted-one block of 40", "interpreted-two queries in two blocks of 48",
    "interpreted-draft trees in two blocks of 48, float32 output", "interpreted-padded rows in two blocks of 40",
)  # fmt: skip
@pytest.mark.parametrize(("case", "out_dtype"), PARTLY_FILLED.values(), ids=PARTLY_FILLED)
def test_blocks_with_fewer_rows_than_a_tile(case: MlaCase, out_dtype: str | None) -> None:
    check(draw(case), CLUSTER, out_dtype=out_dtype)


FP8 = replace(ONE_BLOCK, cache_dtype="float8_e4m3fn", latent_dim=256)
FP8_CASES = {
    "one block": replace(FP8, absent_pages=True),
    "draft trees, tiles of four pages": replace(
        TREE, heads=32, rope_dim=64, latent_dim=128, dtype="bfloat16", cache_dtype="float8_e4m3fn"
    ),
    "halves that split the columns of a scale": replace(FP8, kv_lens=(70, 0, 200), latent_dim=384, page_size=64),
    "two blocks": replace(FP8, kv_lens=(2, 65, 300), queries=2, heads=64, page_size=32, pages_per_row=10, num_pages=40),
    "two queries in two blocks of 48": replace(FP8, kv_lens=(2, 65, 300), queries=2, heads=48, latent_dim=128),
    "two padded blocks of 40": replace(FP8, kv_lens=(70, 0, 200), heads=73, latent_dim=128),
}


@slow_cases(
    "interpreted-halves that split the columns of a scale", "interpreted-one block", "interpreted-two blocks",
    "interpreted-draft trees, tiles of four pages", "interpreted-two queries in two blocks of 48",
    "interpreted-two padded blocks of 40",
)  # fmt: skip
@pytest.mark.parametrize("case", FP8_CASES.values(), ids=FP8_CASES)
def test_fp8_latents(case: MlaCase) -> None:
    check(draw(case), CLUSTER)


UNSUPPORTED = {
    "float32": (replace(ONE_BLOCK, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(ONE_BLOCK, cache_dtype="float16"), "got bfloat16 over float16"),
    "narrow latents": (replace(ONE_BLOCK, latent_dim=96), "got 96 and 64"),
    "small pages": (replace(ONE_BLOCK, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
}


@pytest.mark.parametrize(("case", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls(case: MlaCase, reason: str) -> None:
    explanation = explain("mla_decode", **draw(case).arguments(), sm_scale=SM_SCALE)
    assert explanation.chosen != "mosaic"
    assert reason in explanation.refused["mosaic"]
