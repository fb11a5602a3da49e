"""Tests of the swap-AB kernel of `mla_decode` in addition to the contract suite.

The kernel is for few query rows: it computes scores as K·qᵀ. On a CPU, kernels are interpreted with race detection; on
a GPU, they are compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import DecodePlan
from pallas_attn.mosaic import decode, decode_merge
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.ops.mla_decode import mosaic_swap_ab
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import planned
from tests.contract import backends
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.usefixtures("short_rows_are_cut"),
]

MOSAIC = Variant("mosaic", DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1), honours_plans=True)
PROGRAMS = 5
"""Number of CTAs of the plans. All tests use the same number to share compilations."""


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpret kernels on the CPU, or compile them on a GPU."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


BASE = MlaCase(
    kv_lens=(0, 1, 15, 64, 65, 128), page_size=16, pages_per_row=8, num_pages=56, rope_dim=64, dtype="bfloat16"
)
SHAPES = {
    "512 + 64, 16 heads, pages of 64": replace(
        BASE, kv_lens=(0, 63, 64, 200), heads=16, latent_dim=512, page_size=64, pages_per_row=4, num_pages=14
    ),
    "256 + 32, 20 heads, pages of 128": replace(
        BASE,
        kv_lens=(100, 129, 256),
        heads=20,
        latent_dim=256,
        rope_dim=32,
        page_size=128,
        pages_per_row=2,
        num_pages=8,
    ),
    "fp8, 256 + 64, 20 heads, 2 drafts in blocks, pages of 128": replace(
        BASE,
        kv_lens=(130, 129, 250),
        queries=2,
        heads=20,
        latent_dim=256,
        page_size=128,
        pages_per_row=2,
        num_pages=8,
        cache_dtype="float8_e4m3fn",
    ),
    "128 + 32, 9 heads, 8 drafts in blocks, pages of 32": replace(
        BASE, kv_lens=(3, 129, 64), q_lens=(8, 3, 2), queries=8, heads=9, rope_dim=32, page_size=32, num_pages=18
    ),
}


def plan_for(case: MlaCase, arguments: dict[str, Any]) -> DecodePlan:
    """Return a plan for a case, with the number of queries of each sequence."""
    arguments = arguments | {"q_lens": np.array(case.query_lens, np.int32)}
    return backends.plan_of(backends.MOSAIC, arguments, num_programs=PROGRAMS, mode="balanced")


@functools.cache
def compiled(out_dtype: str) -> harness.Jitted:
    """Return a jitted call, cached so that cases of equal shapes share a compilation."""

    @jax.jit
    def decode(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        with MOSAIC.settings():
            call = MlaDecodeCall(**arrays, sm_scale=SM_SCALE, out_dtype=out_dtype)
            return mosaic_swap_ab.decode(*planned(call, "mosaic_sm90", mosaic_swap_ab.num_programs(call)))

    return decode


def call(case: MlaCase, arrays: dict[str, Any], out_dtype: str | None = None) -> tuple[jax.Array, jax.Array]:
    defaults = {"q_lens": np.array(case.query_lens, np.int32), "draft_mask": None, "plan": None}
    return compiled(out_dtype or case.dtype)(jax.tree.map(jnp.asarray, defaults | arrays))


def draw(case: MlaCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, arguments: dict[str, Any] | None = None) -> None:
    """Compare the result for poisoned inputs with numpy."""
    arguments = arguments or inputs.arguments()
    got = call(inputs.case, arguments | {"plan": plan_for(inputs.case, arguments)})
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(inputs.case.dtype))


SLOW_SHAPES = {"256 + 32, 20 heads, pages of 128"}  # other shapes have this width, this number of heads, these pages


@slow_cases(
    "interpreted-512 + 64, 16 heads, pages of 64", "interpreted-128 + 32, 9 heads, 8 drafts in blocks, pages of 32",
    "interpreted-fp8, 256 + 64, 20 heads, 2 drafts in blocks, pages of 128",
)  # fmt: skip
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW_SHAPES else [])
        for name, case in SHAPES.items()
    ],
)
def test_widths_and_pages(case: MlaCase) -> None:
    check(draw(case))


@slow_cases("interpreted")
def test_row_split_among_many_programs() -> None:
    inputs = draw(replace(BASE, kv_lens=(0, 0, 128, 0, 1, 0)))
    arguments = inputs.arguments()
    assert np.diff(plan_for(inputs.case, arguments).split_indptr).max() > 2
    check(inputs, arguments)


@slow_cases("interpreted")
def test_float32_output_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer for the output is patched to be smaller than the output of a sequence."""
    for module in (decode, decode_merge):
        monkeypatch.setattr(module, "OUTPUT_BYTES", 4096)
    inputs = draw(replace(BASE, latent_dim=192))
    arguments = inputs.arguments()
    got = call(inputs.case, arguments | {"plan": plan_for(inputs.case, arguments)}, "float32")
    assert got[0].dtype == jnp.float32
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(inputs.case.dtype))


UNSUPPORTED = {
    "float32": (replace(BASE, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(BASE, cache_dtype="float16"), "got bfloat16 over float16"),
    "latents of 100": (replace(BASE, latent_dim=100), "a multiple of 64 columns up to 512, got 100"),
    "rotated columns of 16": (replace(BASE, rope_dim=16), "takes 32 or 64 rotated columns, got 16"),
    "small pages": (replace(BASE, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
    "33 heads": (replace(BASE, heads=33), "takes at most 32 query heads, got 33"),
}


@pytest.mark.parametrize(("case", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls(case: MlaCase, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        call(case, draw(case).arguments())
