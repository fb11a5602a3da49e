"""Tests of the seesaw kernel of `mla_decode` (many query rows) beyond the contract: interpreted with race detection on
a CPU, compiled on a GPU.
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
from pallas_attn.ops.mla_decode.config import SeesawConfig
from tests.contract import backends
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.harness import Variant

# Latents that are masked anyway may be NaN when they are multiplied.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.usefixtures("short_rows_are_cut"),
]

MOSAIC = Variant("mosaic", SeesawConfig(pairs=2, cluster=1), honours_plans=True)
SINGLE = Variant("mosaic", SeesawConfig(pairs=1, cluster=1), honours_plans=True)
CLUSTER = Variant("mosaic", SeesawConfig(pairs=1, cluster=2), honours_plans=True)


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Run kernels interpreted on the CPU or, on a GPU, compiled."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


# Two blocks of rows; tiles of four pages.
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
# Probabilities lie where rotated keys were, and a page is a pair of tiles.
ONE_BLOCK = MlaCase(
    kv_lens=(1, 129, 64, 0, 300), heads=64, rope_dim=64, page_size=128, pages_per_row=3, num_pages=12, dtype="bfloat16"
)
SHAPES = {
    "one block": ONE_BLOCK,
    "three blocks, drafts": replace(
        ONE_BLOCK, kv_lens=(2, 65, 200), queries=2, heads=67, page_size=64, pages_per_row=4, num_pages=12
    ),
}


def call(arrays: dict[str, Any], variant: Variant) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, return_lse=True)(**arrays)


def draw(case: MlaCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, variant: Variant) -> None:
    """Compare a call on poisoned inputs with numpy."""
    arguments = inputs.arguments()
    plan = backends.plan_of(backends.MOSAIC, arguments, num_programs=3, mode="balanced")
    got = call(arguments | {"plan": plan}, variant)
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(inputs.case.dtype))


STEEP = 16
"""Times queries as other cases draw them."""

TWO_PAIRS = {
    "draft trees, absent pages": TREE,
    "tiles that end with the first draft": replace(TREE, kv_lens=(0, 66, 64, 129), absent_pages=False),
    "all of maximum length": replace(TREE, kv_lens=(320,) * 4, absent_pages=False),
}


@pytest.mark.parametrize("case", TWO_PAIRS.values(), ids=TWO_PAIRS)
def test_two_pairs_of_tiles(case: MlaCase) -> None:
    """Scores differ by so much that maxima grow past what leaves sums as they are."""
    inputs = draw(case)
    check(replace(inputs, q=(STEEP * inputs.q.astype(np.float32)).astype(inputs.q.dtype)), MOSAIC)


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_shapes(case: MlaCase) -> None:
    """Shared memory holds one pair of tiles."""
    check(draw(case), SINGLE)


def test_blocks_that_share_what_is_read() -> None:
    """Two blocks of query rows are a cluster, and share the copies of latents."""
    case = replace(ONE_BLOCK, kv_lens=(70, 200), heads=128, latent_dim=128, rope_dim=32, page_size=64, pages_per_row=4)
    check(draw(case), CLUSTER)


EIGHT = replace(ONE_BLOCK, cache_dtype="float8_e4m3fn", latent_dim=256)
EIGHT_BITS = {
    "one block": replace(EIGHT, absent_pages=True),
    "draft trees, tiles of four pages": replace(
        TREE, heads=32, rope_dim=64, latent_dim=128, dtype="bfloat16", cache_dtype="float8_e4m3fn"
    ),
    "halves that cut a scale's columns": replace(EIGHT, kv_lens=(70, 0, 200), latent_dim=384, page_size=64),
    "two blocks": replace(
        EIGHT, kv_lens=(2, 65, 300), queries=2, heads=64, page_size=32, pages_per_row=10, num_pages=40
    ),
}


@pytest.mark.parametrize("case", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_latents_in_8_bits(case: MlaCase) -> None:
    check(draw(case), CLUSTER)


REFUSED = {
    "float32": (replace(ONE_BLOCK, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(ONE_BLOCK, cache_dtype="float16"), "got bfloat16 over float16"),
    "narrow latents": (replace(ONE_BLOCK, latent_dim=96), "got 96 and 64"),
    "small pages": (replace(ONE_BLOCK, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_words(case: MlaCase, reason: str) -> None:
    explanation = explain("mla_decode", **draw(case).arguments(), sm_scale=SM_SCALE)
    assert explanation.chosen != "mosaic"
    assert reason in explanation.refused["mosaic"]
