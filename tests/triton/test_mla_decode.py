"""Tests of the Triton kernel of `mla_decode` with the tiles for Hopper.

With these tiles, the kernel has two loops over tokens: one for steps in which all tokens are visible, without a mask,
and one for the other steps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import mla_decode
from pallas_attn.runtime import device
from tests.contract import backends
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

TRITON = next(backend for backend in backends.BACKENDS if backend.name == "triton")

# The cases have 64 query rows (heads times query tokens), and steps of 64 tokens with and without a mask. The sequence
# of 128 tokens needs a mask in its last step, because the first of two queries does not see the last token.
LATENTS = {
    "one query, absent pages": MlaCase(
        kv_lens=(0, 200, 64), heads=64, page_size=64, pages_per_row=4, num_pages=16, dtype="bfloat16", absent_pages=True
    ),
    "drafts, small pages": MlaCase(
        kv_lens=(2, 150, 128, 131), q_lens=(2, 1, 2, 0), queries=2, heads=32, page_size=16, pages_per_row=10,
        num_pages=50,
        dtype="bfloat16",
    ),
}  # fmt: skip


@slow_cases("drafts, small pages")
@pytest.mark.parametrize("case", LATENTS.values(), ids=LATENTS)
def test_steps_without_a_mask(monkeypatch: pytest.MonkeyPatch, case: MlaCase) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "9.0")
    inputs = Inputs.draw(case, harness.fresh_rng())
    arrays = jax.tree.map(jnp.asarray, inputs.arguments())
    call = functools.partial(mla_decode, sm_scale=SM_SCALE, return_lse=True, implementation="triton")
    got = jax.jit(lambda arrays: call(**arrays))(arrays)
    harness.assert_attention_close(got, inputs.expected(), TRITON.variant.tolerance(case.dtype))
