"""Tests of the Blackwell kernel of `mla_decode` in addition to the contract suite, interpreted.

The kernel computes the output O with query rows as rows or as columns, and divides the latent width into halves or
slices, which overlap for some widths. The tests run both forms, sequences with more tiles than pipeline stages, several
blocks of query rows, and KV splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from pallas_attn import explain, mla_decode
from pallas_attn.runtime.device import INTERPRET_VARIABLE
from tests.contract import backends
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.harness import Variant

# Latents that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

SM100 = next(backend for backend in backends.BACKENDS if backend.id == "mosaic_sm100")
VARIANT = Variant("mosaic", (backends.CUT_SHORT_ROWS,), (10, 0), honours_plans=True)


@pytest.fixture(autouse=True)
def interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with mock.patch.dict("os.environ", {INTERPRET_VARIABLE: "10.0"}), harness.interpreting(capsys):
        yield


# Sequences without tiles, with five tiles (more than the two to four pipeline stages), and with two tiles.
ROWS = MlaCase(
    kv_lens=(0, 310, 70),
    heads=70,
    latent_dim=512,
    rope_dim=64,
    page_size=64,
    pages_per_row=6,
    num_pages=14,
    dtype="bfloat16",
)
SMALL_PAGES = replace(ROWS, page_size=16, pages_per_row=24, num_pages=56)
TREE = {"queries": 3, "q_lens": (0, 3, 2), "tree": True, "absent_pages": True}
CASES = {
    "rows, two halves": ROWS,
    "rows, halves that overlap, float16": replace(SMALL_PAGES, latent_dim=320, rope_dim=32, dtype="float16"),
    # The newest key of the first sequence is the last of a tile.
    "rows, halves that overlap, float16, drafts": replace(
        SMALL_PAGES, kv_lens=(64, 310, 70), latent_dim=320, rope_dim=32, dtype="float16", heads=35, queries=2
    ),
    "rows, halves that overlap": replace(ROWS, latent_dim=448, page_size=128, pages_per_row=3, num_pages=9),
    "rows, two blocks, tree": replace(SMALL_PAGES, latent_dim=128, heads=45, **TREE),
    "rows, narrow": replace(ROWS, latent_dim=64, rope_dim=32, heads=3),
    "columns": replace(ROWS, heads=64),
    "columns, slices that overlap": replace(SMALL_PAGES, heads=17, latent_dim=448, rope_dim=32),
    "columns, one part whose slices overlap, float16": replace(ROWS, heads=5, latent_dim=192, dtype="float16"),
    "columns, tree": replace(SMALL_PAGES, latent_dim=256, heads=11, **TREE),
    "columns, two parts, tree": replace(SMALL_PAGES, heads=11, **TREE),
    "columns, large scores": replace(SMALL_PAGES, latent_dim=128, heads=3, exact=True),
    "rows, large scores": replace(SMALL_PAGES, latent_dim=128, heads=70, exact=True),
}
EVERY_RUN = ("rows, halves that overlap, float16, drafts", "columns, two parts, tree")


def check(case: MlaCase, num_programs: int, mode: str = "balanced", *, steep: bool = False) -> np.ndarray:
    """Compare a call on poisoned inputs with numpy. Return the number of KV splits of each sequence.

    Args:
      steep: whether queries are multiplied by 8, so that row maxima grow by more than the threshold of rescaling.
    """
    inputs = Inputs.draw(case, harness.fresh_rng())
    if steep:
        inputs = replace(inputs, q=(8 * inputs.q.astype(np.float32)).astype(inputs.q.dtype))
    arguments = inputs.arguments()
    plan = backends.plan_of(SM100, arguments, num_programs=num_programs, mode=mode)
    got = harness.compiled(mla_decode, VARIANT, sm_scale=SM_SCALE, return_lse=True)(**arguments, plan=plan)
    harness.assert_attention_close(got, inputs.expected(), VARIANT.tolerance(case.dtype))
    return np.diff(plan.split_indptr)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_more_tiles_than_stages(name: str) -> None:
    """One CTA processes all sequences, one after the other."""
    assert check(CASES[name], 1).max() == 1


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in EVERY_RUN else pytest.mark.slow) for n in CASES])
def test_splits_are_merged(name: str) -> None:
    """Two CTAs share a sequence, and each processes more tiles than pipeline stages. Row maxima grow, so O is
    rescaled.
    """
    assert check(CASES[name], 2, steep=not CASES[name].exact).max() == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_splits_of_several_sequences(name: str) -> None:
    """Five CTAs share the sequences, and some process parts of two sequences."""
    assert check(CASES[name], 5).max() > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows, halves that overlap", "columns, slices that overlap"])
def test_fixed_splits(name: str) -> None:
    assert check(CASES[name], 2, "fixed").max() > 2


def test_mosaic_is_the_default() -> None:
    assert (
        explain("mla_decode", **Inputs.draw(ROWS, harness.fresh_rng()).arguments(), sm_scale=SM_SCALE).chosen
        == "mosaic"
    )


UNSUPPORTED = {
    "float32": (replace(ROWS, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "8 bits": (replace(ROWS, cache_dtype="float8_e4m3fn"), "takes no quantised latents"),
    "wide latents": (replace(ROWS, latent_dim=576), "takes latents of a multiple of 64 columns up to 512, got 576"),
    "31 queries": (replace(ROWS, queries=31, heads=1), "takes at most 30 queries, got 31"),
}


@pytest.mark.parametrize(("case", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls_have_a_reason(case: MlaCase, reason: str) -> None:
    explanation = explain("mla_decode", **Inputs.draw(case, harness.fresh_rng()).arguments(), sm_scale=SM_SCALE)
    assert explanation.chosen != "mosaic"
    assert reason in explanation.refused["mosaic"]
