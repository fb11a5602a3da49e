"""Tests of the Hopper kernel of `paged_prefill` in addition to the contract suite.

On a CPU, kernels are interpreted with race detection; on a GPU, they are compiled. A block has 64 query rows per
consumer warpgroup, and a tile has 64 keys. Cases that differ only in values of arrays share a compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

from pallas_attn import FULL, paged_prefill
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.mosaic.primitives import basics
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

FP8 = "float8_e4m3fn"
MOSAIC = Variant("mosaic", FlashConfig(tile_keys=64, stages=2, consumers=1))
SHARED_ROWS = Variant("mosaic", FlashConfig(tile_keys=64, stages=1, consumers=2, column_parts=2))
TWO_CONSUMERS = Variant("mosaic", FlashConfig(tile_keys=128, stages=2, consumers=2))


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Run kernels interpreted on the CPU or, on a GPU, compiled."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


BASE = PagedCase(
    kv_lens=(0, 20, 200, 65),
    q_lens=(0, 3, 40, 1),
    tokens=48,
    head_dim=64,
    page_size=16,
    pages_per_row=16,
    num_pages=56,
    dtype="bfloat16",
    head_windows=((FULL, 0), (FULL, 0)),
    sinks="mixed",
)
SHORT = replace(BASE, kv_lens=(20, 150), q_lens=(3, 20), tokens=27, pages_per_row=10, num_pages=40)
ABSENT = replace(SHORT, head_wise=True, absent_pages=True, dtype="float16", sinks=None)
WIDE = replace(
    BASE,
    kv_lens=(130, 200),
    q_lens=(3, 9),
    tokens=16,
    q_heads=3,
    kv_heads=1,
    head_dim=128,
    page_size=128,
    pages_per_row=2,
    num_pages=8,
    head_windows=None,
    sinks=None,
    soft_cap=5.0,
)


def call(variant: Variant, case: PagedCase, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(paged_prefill, variant, return_lse=True, **case.static)(**arrays)


def check(case: PagedCase, variant: Variant = MOSAIC) -> None:
    """Compare a call on poisoned inputs with numpy."""
    inputs = Inputs.draw(case, harness.fresh_rng())
    got = call(variant, case, inputs.prefill())
    harness.assert_attention_close(got, inputs.expected_prefill(), variant.tolerance(case.dtype))


@slow_cases("interpreted-512, windows and sinks", "interpreted-512, splits")
@pytest.mark.parametrize("name", ["512, windows and sinks", "512, absent pages", "512, splits"])
def test_consumers_share_query_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers have the same query rows and half of the columns each, with one stage of keys and values.

    A CTA processes several work tiles with more than one tile of keys.
    """
    cases = {
        "512, windows and sinks": replace(BASE, head_dim=512, head_windows=((40, 3), (FULL, 0))),
        "512, absent pages": replace(ABSENT, head_dim=512),
        "512, splits": replace(BASE, head_dim=512, kv_lens=(0, 20, 250, 65), soft_cap=7.0),
    }
    multiprocessors = 40 if "splits" in name else 2
    monkeypatch.setattr(basics, "multiprocessors", lambda: multiprocessors)
    check(cases[name], SHARED_ROWS)


@slow_cases("interpreted-fp8 per head, absent pages", "interpreted-int8 per token, windows, splits")
@pytest.mark.parametrize(
    "name", ["fp8 per token, windows", "fp8 per head, absent pages", "int8 per token, windows, splits"]
)
def test_wide_8_bit_caches_are_converted_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer has one tile, or with scales per token three quarters of a tile, as a ring of pieces."""
    wide, windows = replace(BASE, head_dim=512), ((40, 3), (FULL, 0))
    cases = {
        "fp8 per token, windows": replace(wide, cache_dtype=FP8, scales=16, head_windows=windows),
        "fp8 per head, absent pages": replace(
            ABSENT, head_dim=512, cache_dtype=FP8, scales="head", page_size=32, pages_per_row=5
        ),
        "int8 per token, windows, splits": replace(
            wide, kv_lens=(0, 20, 250, 65), cache_dtype="int8", scales=16, head_windows=windows, soft_cap=7.0
        ),
    }
    multiprocessors = 40 if "splits" in name else 2
    monkeypatch.setattr(basics, "multiprocessors", lambda: multiprocessors)
    check(cases[name], SHARED_ROWS)


# Groups of 2 and 7 are not in `make test`: tests/contract/test_paged_attention.py has a group of 7.
@slow_cases("interpreted-10")
@pytest.mark.parametrize("group", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7)), 10])
def test_heads_share_a_block(group: int) -> None:
    """A block has the query rows of 2, 7 or (for a group of 10) 5 heads of a KV head, 8 queries at a time. Some blocks
    end between the heads of 8 queries.
    """
    case = replace(WIDE, q_heads=2 * group, kv_heads=2, head_dim=64, page_size=64, pages_per_row=4, num_pages=16)
    check(replace(case, sinks="mixed", q_lens=(3, 30), tokens=37), TWO_CONSUMERS)


SPLIT = Variant("mosaic", FlashConfig(tile_keys=64, stages=4, consumers=1))
SPLIT_CASES = {
    "windows, sink tokens and sinks": replace(BASE, head_windows=((FULL, 0), (70, 17))),
    "absent pages of any heads' rows, padding": replace(ABSENT, head_windows=((FULL, 0), (90, 5)), tokens=26),
    "an int window": replace(WIDE, window=150, q_lens=(3, 50), tokens=57),
    "all keys for all queries": replace(WIDE, causal=False, kv_lens=(2, 200), q_lens=(3, 50), tokens=57),
}


IN_EVERY_RUN = "windows, sink tokens and sinks"
"""Name of the case that `make test` runs. The contract suite has the options of the other cases, without splits."""


@slow_cases("interpreted-windows, sink tokens and sinks")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name == IN_EVERY_RUN else pytest.mark.slow)
        for name, case in SPLIT_CASES.items()
    ],
)
def test_split_keys(case: PagedCase) -> None:
    with harness.keys_cut() as splits:
        check(case, SPLIT)
    assert splits[0].most > 1


@pytest.mark.slow  # in `make test`, the contract suite has int8 caches, and test_split_keys has splits
def test_split_int8_keys() -> None:
    case = replace(SHORT, cache_dtype="int8", scales=16, head_windows=((FULL, 0), (60, 5)), tokens=25)
    with harness.keys_cut() as splits:
        check(case, SPLIT)
    assert splits[0].most > 1


QUANTISED = {
    "int8 per head, soft cap": (
        replace(SHORT, cache_dtype="int8", scales="head", head_windows=((FULL, 0), (60, 5)), soft_cap=3.0),
        MOSAIC,
    ),
    "int8 per channel, wide heads, an int window": (
        replace(WIDE, cache_dtype="int8", scales="channel", soft_cap=None, window=150),
        MOSAIC,
    ),
    "fp8 per head, float16": (
        replace(WIDE, cache_dtype=FP8, scales="head", dtype="float16", head_dim=64),
        TWO_CONSUMERS,
    ),
    "fp8 per token, windows, absent pages of any heads' rows": (
        replace(
            SHORT, cache_dtype=FP8, scales=16, head_wise=True, absent_pages=True, head_windows=((FULL, 0), (90, 5))
        ),
        MOSAIC,
    ),
    "fp8 per group of pages of two tiles": (replace(WIDE, cache_dtype=FP8, scales=4, head_dim=64), MOSAIC),
    "int8 per group, several pages a tile": (
        replace(SHORT, page_size=32, pages_per_row=5, num_pages=24, cache_dtype="int8", scales=2, head_windows=None),
        TWO_CONSUMERS,
    ),
}


@pytest.mark.slow  # in `make test`, the contract suite has each kind of scales
@pytest.mark.parametrize(("case", "variant"), QUANTISED.values(), ids=QUANTISED)
def test_quantised_caches(case: PagedCase, variant: Variant) -> None:
    check(case, variant)


def test_tiles_of_partial_pages_are_unsupported() -> None:
    variant = replace(MOSAIC, config=FlashConfig(tile_keys=192, stages=2, consumers=2))
    with pytest.raises(NotImplementedError, match="got 192 keys of pages of 128"):
        call(variant, WIDE, Inputs.draw(WIDE, harness.fresh_rng()).prefill())
