"""Tests of the Blackwell kernel of `paged_decode` in addition to the contract suite, interpreted.

For each kind of cache and each layout of the GEMMs, sequences have more tiles than pipeline stages, and KV splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from pallas_attn import FULL, explain, paged_decode
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.runtime.device import INTERPRET_VARIABLE
from tests.contract import backends
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.harness import HALF_OUT, Tolerance, Variant

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

SM100 = next(backend for backend in backends.BACKENDS if backend.id == "mosaic_sm100")
FP8 = "float8_e4m3fn"


@pytest.fixture(autouse=True)
def interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with mock.patch.dict("os.environ", {INTERPRET_VARIABLE: "10.0"}), harness.interpreting(capsys):
        yield


# Several sequences end inside a page. If only one did, its last page could share a tile with fully visible pages.
LONG = PagedCase(
    kv_lens=(1, 410, 130),
    q_lens=(1, 1, 1),
    q_heads=3,
    kv_heads=1,
    head_dim=128,
    page_size=64,
    pages_per_row=10,
    num_pages=24,
    dtype="bfloat16",
)
SMALL_PAGES = replace(LONG, kv_lens=(17, 330, 130), q_lens=(1, 1, 1), page_size=16, pages_per_row=24, num_pages=60)
CASES = {
    "bfloat16": replace(LONG, sinks="ordinary"),
    "bfloat16, heads of 64, windows, absent pages": replace(
        SMALL_PAGES, head_dim=64, head_windows=((200, 40),), absent_pages=True
    ),
    "float16, heads of 256, drafts": replace(
        LONG, dtype="float16", head_dim=256, kv_lens=(0, 300, 130), q_lens=(0, 3, 2), queries=3
    ),
    "float16, heads of 256, drafts, windows, soft cap, absent pages": replace(
        LONG, dtype="float16", head_dim=256, kv_lens=(0, 300, 130), q_lens=(0, 3, 2), queries=3,
        head_windows=((200, 40),), soft_cap=20.0, absent_pages=True,
    ),
    "fp8 per token": replace(SMALL_PAGES, cache_dtype=FP8, scales=16),
    "fp8 in 4 groups, heads of 256, soft cap": replace(
        LONG, cache_dtype=FP8, scales=4, head_dim=256, kv_lens=(0, 300, 130), q_lens=(0, 1, 1), soft_cap=20.0
    ),
    "int8 per channel, heads of 64, tree": replace(
        SMALL_PAGES, cache_dtype="int8", scales="channel", head_dim=64, queries=3, q_lens=(1, 3, 2), tree=True
    ),
    "fp8 queries of heads, over fp8 per head": replace(LONG, cache_dtype=FP8, scales="head", q_scales="head"),
    "fp8 queries of tokens, drafts, over fp8 in 4 groups": replace(
        SMALL_PAGES, cache_dtype=FP8, scales=4, q_scales="token", q_lens=(1, 3, 2), queries=3, dtype="float16",
        absent_pages=True,
    ),
    "int8 per head, two blocks of columns": replace(LONG, cache_dtype="int8", scales="head", q_heads=48),
}  # fmt: skip
EVERY_RUN = ("bfloat16", "fp8 per token", "float16, heads of 256, drafts, windows, soft cap, absent pages")


def check(
    case: PagedCase, num_programs: int, mode: str, tolerances: tuple[Tolerance, Tolerance] | None = None
) -> np.ndarray:
    """Compare a call on poisoned inputs with numpy. Return the number of splits of each plan row."""
    cache_bytes = np.dtype(case.cache_dtype or case.dtype).itemsize
    fp8_products = case.q_scales is not None and case.head_dim == 128 and case.scales != "channel"
    tile_tokens = 128 if fp8_products or case.head_dim * 2 <= 128 * cache_bytes else 64
    configs = DecodeConfig(tile_tokens, stages=2, programs_per_multiprocessor=1), backends.CUT_SHORT_ROWS
    variant = Variant("mosaic", configs, (10, 0), honours_plans=True)
    inputs = Inputs.draw(case, harness.fresh_rng())
    arrays = inputs.decode()
    plan = backends.plan_of(SM100, arrays, window=case.window, num_programs=num_programs, mode=mode)
    got = harness.compiled(paged_decode, variant, return_lse=True, **case.static)(**arrays, plan=plan)
    harness.assert_attention_close(got, inputs.expected_decode(), tolerances or variant.tolerance(case.dtype))
    return np.diff(plan.split_indptr)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in EVERY_RUN else pytest.mark.slow) for n in CASES])
def test_more_tiles_than_stages(name: str) -> None:
    """One CTA processes all plan rows, one after the other."""
    assert check(CASES[name], 1, "balanced").max() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "mode"), [(64, "balanced"), (128, "fixed"), (256, "balanced")])
def test_splits_are_merged(head_dim: int, mode: str) -> None:
    """The head dimensions give accumulators, and therefore partial states, of 64 rows, 128 rows, and 2 x 128 rows."""
    case = replace(
        LONG, head_dim=head_dim, kv_lens=(0, 640, 1), q_lens=(0, 1, 1), head_windows=((FULL, 0),), sinks="mixed"
    )
    assert check(case, 5, mode).max() > 2


@pytest.mark.slow
def test_channel_scales_do_not_round_queries() -> None:
    """With a single key, the LSE is its score. If the scaled query were rounded to one 16-bit value, the score would
    have an error of 1e-4.
    """
    case = replace(CASES["int8 per channel, heads of 64, tree"], kv_lens=(1, 1, 1), q_lens=(1, 1, 1))
    check(case, 1, "balanced", (HALF_OUT, Tolerance(1e-5, 0.0, 1e-9)))


def test_mosaic_is_the_default() -> None:
    assert explain("paged_decode", **Inputs.draw(LONG, harness.fresh_rng()).decode()).chosen == "mosaic"


def test_unsupported_group_has_a_reason() -> None:
    many = replace(LONG, q_heads=67)
    reason = "takes 16 to 32 query heads at once that divide a group; 67 have no such divisor"
    explanation = explain("paged_decode", **Inputs.draw(many, harness.fresh_rng()).decode())
    assert reason in explanation.refused["mosaic"]
