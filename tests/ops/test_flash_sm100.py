"""Tests of the Blackwell prefill kernel in addition to the contract suites, interpreted with race detection.

The contract suites run the kernel with one consumer warpgroup of 128 query rows. These tests run it with two, which
alternate on the tensor core, and test features that only this kernel has. Cases that differ only in values of arrays
share a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pallas_attn import paged_prefill, ragged_attention
from pallas_attn.mosaic.blackwell import prefill
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.runtime import device
from tests.aot.device import MULTIPROCESSOR_REGISTERS
from tests.aot.report import WARPGROUP
from tests.contract import paged_case, test_ragged_attention
from tests.contract.paged_case import PagedCase
from tests.contract.test_ragged_attention import RaggedCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases
from tests.ops import test_paged_prefill_mosaic

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

SM100 = (10, 0)
TWO = FlashConfig(tile_keys=64, stages=2, consumers=2)
RAGGED = RaggedCase(
    (3, 0, 261, 20),
    (70, 9, 290, 5),
    tokens=293,
    keys=383,
    q_heads=1,
    kv_heads=1,
    key_dim=64,
    value_dim=64,
    dtype="bfloat16",
)
PAGED = test_paged_prefill_mosaic.BASE


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "10.0")
    with harness.interpreting(capsys):
        yield


def check_ragged(case: RaggedCase, config: FlashConfig, growth: int = 0) -> None:
    """Compare a call of `ragged_attention` on poisoned inputs with numpy.

    Args:
      growth: the keys of each 64-key tile are multiplied by 1 + growth * index of the tile.
    """
    inputs = test_ragged_attention.Inputs.draw(case, harness.fresh_rng())
    inputs.k[...] *= (1 + growth * (np.arange(case.keys) // 64))[:, None, None].astype(inputs.k.dtype)
    variant = Variant("mosaic", config, SM100)
    got = harness.compiled(ragged_attention, variant, return_lse=True, **case.static)(**inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(case.dtype))


def check_paged(case: PagedCase, config: FlashConfig) -> None:
    """Compare a call of `paged_prefill` on poisoned inputs with numpy."""
    inputs = paged_case.Inputs.draw(case, harness.fresh_rng())
    variant = Variant("mosaic", config, SM100)
    got = harness.compiled(paged_prefill, variant, return_lse=True, **case.static)(**inputs.prefill())
    harness.assert_attention_close(got, inputs.expected_prefill(), variant.tolerance(case.dtype))


def test_two_consumers() -> None:
    """The second consumer of a block of 256 rows has few query rows or none, because a sequence of 261 queries starts
    at row 3. From key tile to key tile, row maxima grow by more than the threshold of rescaling.
    """
    check_ragged(RAGGED, TWO, growth=2)


@slow_cases("128", "192/128", "64")
@pytest.mark.parametrize(
    ("widths", "config"),
    [
        ((128, 128), FlashConfig(tile_keys=128, stages=2, consumers=2)),
        ((192, 128), FlashConfig(tile_keys=64, stages=3, consumers=2)),
        ((256, 256), FlashConfig(tile_keys=64, stages=2, consumers=1)),
        ((64, 64), FlashConfig(tile_keys=128, stages=4, consumers=2)),
    ],
    ids=["128", "192/128", "256", "64"],
)
def test_each_width(widths: tuple[int, int], config: FlashConfig) -> None:
    check_ragged(replace(RAGGED, key_dim=widths[0], value_dim=widths[1]), config)


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_split_keys(causal: bool, consumers: int) -> None:
    """Sequences with fewer key tiles than splits have empty splits. CTAs compute several work tiles."""
    case = replace(RAGGED, q_lens=(3, 0, 7, 50), kv_lens=(70, 9, 3, 230), tokens=64, keys=320, causal=causal)
    with harness.keys_cut(16) as parts:
        check_ragged(replace(case, sinks=True, soft_cap=5.0), replace(TWO, consumers=consumers))
    assert parts[0].most > 1


@slow_cases("16 bits", "int8 by token", "groups of 3, absent pages")
@pytest.mark.parametrize(
    "case",
    [
        PAGED,
        replace(PAGED, cache_dtype="int8", scales=16),
        replace(PAGED, cache_dtype="float8_e4m3fn", scales="channel"),
        replace(PAGED, q_heads=6, absent_pages=True, sinks=None),
        replace(PAGED, q_heads=6, absent_pages=True, sinks=None, cache_dtype="int8", scales=16),
    ],
    ids=["16 bits", "int8 by token", "fp8 by channel", "groups of 3, absent pages", "int8, absent pages"],
)
def test_pages_with_two_consumers(case: PagedCase) -> None:
    """Consumers do not wait for keys, so they wait at a separate barrier for the page ids."""
    check_paged(case, TWO)


@pytest.mark.parametrize(
    ("widths", "config", "why"),
    [
        ((256, 256), FlashConfig(tile_keys=64, stages=2, consumers=2), "take 640 columns of TMEM"),
        ((64, 64), FlashConfig(tile_keys=256, stages=2, consumers=2), "take 640 columns"),
        ((64, 64), FlashConfig(tile_keys=64, stages=2, consumers=3), "takes one or two consumers, got 3"),
        ((192, 128), FlashConfig(tile_keys=128, stages=2, consumers=2), "bytes of shared memory"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(widths: tuple[int, int], config: FlashConfig, why: str) -> None:
    case = replace(RAGGED, key_dim=widths[0], value_dim=widths[1])
    with pytest.raises(NotImplementedError, match=why):
        check_ragged(case, config)


@pytest.mark.parametrize("registers", [prefill.REGISTERS, prefill.DEQUANTIZE_REGISTERS], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_register_budget_of_warpgroups(registers, consumers):
    """At the start, all threads have the same number of registers, a multiple of 8. A consumer warpgroup that requests
    more registers than the other warpgroups release would wait forever.
    """
    consumer_registers, *others = registers[consumers]
    warpgroups = consumers + 2
    initial = min(MULTIPROCESSOR_REGISTERS // (WARPGROUP * warpgroups), 255) // 8 * 8
    assert consumers * consumer_registers + sum(others) <= warpgroups * initial
    assert all(registers % 8 == 0 for registers in (consumer_registers, *others))
    assert consumer_registers < 256
