"""Tests of the Triton kernel of `paged_decode`: widths and page sizes that the contract suite does not have, and tiles
for other GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedKV, explain, paged_decode, plan_decode
from pallas_attn.runtime import device
from tests.contract import backends, paged_cases
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

TRITON = next(backend for backend in backends.BACKENDS if backend.name == "triton")


def check(case: PagedCase) -> None:
    inputs = Inputs.draw(replace(case, dtype=case.dtype or TRITON.dtype), harness.fresh_rng())
    got = backends.call(paged_decode, TRITON, inputs.decode(), return_lse=True, **case.static)
    harness.assert_attention_close(got, inputs.expected_decode(), TRITON.variant.tolerance(inputs.case.dtype))


WIDTHS = {
    "D 80, pages of 24": paged_cases.shape(3, 1, 80, 24),
    "D 96, float16, pages of 1": paged_cases.shape(
        2, 1, 96, 1, dtype="float16", kv_lens=(0, 1, 37), q_lens=(0, 1, 1), pages_per_row=40, num_pages=60
    ),
    "D 80, int8 per channel": paged_cases.shape(4, 2, 80, 16, cache_dtype="int8", scales="channel"),
}


@slow_cases("D 96, float16, pages of 1", "D 80, int8 per channel")
@pytest.mark.parametrize("name", WIDTHS)
def test_padded_widths(name: str) -> None:
    check(WIDTHS[name])


@slow_cases("8.6")
@pytest.mark.parametrize("capability", ["8.6", "9.0", pytest.param("12.0", marks=pytest.mark.slow)])
def test_tiles_of_other_cards(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Results are correct with the tiles for other GPUs. GPUs with less shared memory have smaller tiles, and kernels
    for GPUs before sm89 convert float8 without float8 instructions.
    """
    monkeypatch.setenv(device.INTERPRET_VARIABLE, capability)
    case = paged_cases.shape(2, 1, 128, 16, cache_dtype=paged_cases.FP8, scales=4, kv_lens=(0, 64), q_lens=(0, 1))
    inputs = Inputs.draw(replace(case, dtype="bfloat16"), harness.fresh_rng())
    arrays = jax.tree.map(jnp.asarray, inputs.decode())
    call = functools.partial(paged_decode, return_lse=True, implementation="triton")
    got = jax.jit(lambda arrays: call(**arrays))(arrays)
    harness.assert_attention_close(got, inputs.expected_decode(), TRITON.variant.tolerance("bfloat16"))


def test_wide_heads_are_unsupported() -> None:
    pages: Any = jax.ShapeDtypeStruct((4, 1, 16, 1024), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    q, lens = jax.ShapeDtypeStruct((1, 1, 4, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    explanation = explain("paged_decode", q, PagedKV(pages, pages), ints, lens, implementation="triton")
    assert explanation.refused == {"triton": "takes heads of up to 512 columns, got 1024"}


def test_plan_decode_for_triton() -> None:
    """`plan_decode` for Triton runs in XLA, and plans for the number of Triton programs that run at the same time. A
    plan for another implementation is an error.
    """
    case = replace(paged_cases.SAMPLE, dtype="bfloat16")
    arrays = jax.tree.map(jnp.asarray, Inputs.draw(case, harness.fresh_rng()).decode())
    shown = {name: arrays[name] for name in ("q_lens", "window") if name in arrays}
    decoded = (arrays["q"], arrays["kv"], arrays["block_tables"], arrays["kv_lens"])
    plan = jax.jit(lambda decoded, shown: plan_decode(*decoded, **shown, implementation="triton"))(decoded, shown)
    assert plan.implementation == "triton"
    assert np.shape(plan.cta_row) == (3 * device.INTERPRETED_MULTIPROCESSORS + 1,)
    with pytest.raises(ValueError, match="plan: was made for implementation 'other', this call runs 'triton'"):
        paged_decode(**arrays, plan=replace(plan, implementation="other"), implementation="triton")
