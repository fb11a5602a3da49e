"""The Mosaic kernel of `mla_decode` for few query rows, held to the contract's numpy: interpreted on the CPU with race
detection, compiled on a GPU.

The interpreter is slow, and compiling a kernel for it slower: cases that differ in values only share a compilation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PAGE_NONE, DecodePlan
from pallas_attn.mosaic.sm90 import split_states
from pallas_attn.mosaic.sm90.decode_config import DecodeConfig
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.mla_decode import mosaic_swap_ab
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import plan_of
from tests.ops import harness
from tests.ops.harness import Variant
from tests.ops.mla_case import SM_SCALE, Inputs, MlaCase

# Keys that are masked anyway may be NaN when they are multiplied.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.usefixtures("short_rows_are_cut"),
]

MOSAIC = Variant("mosaic", DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1), honours_plans=True)
PROGRAMS = 5
"""Of plans; another number would be another compilation."""


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpreted anywhere, compiled on a GPU."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


BASE = MlaCase(
    kv_lens=(0, 1, 15, 64, 65, 128), page_size=16, pages_per_row=8, num_pages=56, rope_dim=64, dtype="bfloat16"
)
TREE = replace(BASE, kv_lens=(0, 20, 37, 128), queries=4, q_lens=(0, 4, 1, 3), tree=True, dtype="float16")
CASES = {
    "mixed lengths": BASE,
    "all idle": replace(BASE, kv_lens=(0,) * 6),
    "all of maximum length": replace(BASE, kv_lens=(128,) * 6),
    "absent pages": replace(BASE, absent_pages=True),
    "scores to 5e5": replace(BASE, exact=True),
    "draft trees": TREE,
    "draft trees, absent pages": replace(TREE, absent_pages=True),
    "no keys but the draft's": replace(TREE, kv_lens=(0, 3, 1, 2)),
    "causal drafts": replace(TREE, tree=False, kv_lens=(2, 64, 65, 127)),
}
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
    "128 + 32, 9 heads, 8 drafts in blocks, pages of 32": replace(
        BASE, kv_lens=(3, 129, 64), q_lens=(8, 3, 2), queries=8, heads=9, rope_dim=32, page_size=32, num_pages=18
    ),
}


def plan_for(
    case: MlaCase, kv_lens: Any, num_programs: int, mode: Literal["balanced", "fixed"] = "balanced"
) -> DecodePlan:
    """A plan for the case's shapes and these lengths, for as many rows as queries are given of."""
    arguments = draw(case).arguments() | {"kv_lens": np.asarray(kv_lens, np.int32)}
    arguments["q_lens"] = np.array(case.query_lens, np.int32)
    return harness.plan_for(arguments, num_programs=num_programs, mode=mode, implementation="mosaic")


@functools.cache
def compiled(out_dtype: str) -> harness.Jitted:
    """Jitted once, so that cases of equal shapes share a compilation."""

    @jax.jit
    def decode(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        with MOSAIC.settings():
            call = MlaDecodeCall(**arrays, sm_scale=SM_SCALE, out_dtype=out_dtype)
            return mosaic_swap_ab.decode(call, plan_of(call, "mosaic_sm90", mosaic_swap_ab.num_programs(call)))

    return decode


def call(case: MlaCase, arrays: dict[str, Any], out_dtype: str | None = None) -> tuple[jax.Array, jax.Array]:
    defaults = {"q_lens": np.array(case.query_lens, np.int32), "draft_mask": None, "plan": None}
    return compiled(out_dtype or case.dtype)(jax.tree.map(jnp.asarray, defaults | arrays))


def draw(case: MlaCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, **more: Any) -> None:
    """Against numpy, and bit for bit with and without poison."""
    case = inputs.case
    got = call(case, inputs.arguments() | more)
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(case.dtype))
    harness.assert_same_bits(got, call(case, inputs.arguments(poisoned=False) | more))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_contract_and_reads_no_poison(case: MlaCase) -> None:
    check(draw(case), plan=plan_for(case, case.kv_lens, PROGRAMS))


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_widths_and_pages(case: MlaCase) -> None:
    """With the plan the kernel makes itself."""
    check(draw(case))


def test_an_absent_page_between_others_of_a_tile() -> None:
    inputs = draw(replace(BASE, kv_lens=(128,) * 6))
    inputs.tables[:, 1] = PAGE_NONE
    inputs.visible[:, :, 16:32] = False
    check(inputs, plan=plan_for(inputs.case, inputs.case.kv_lens, PROGRAMS))


def test_a_row_cut_among_many_programs() -> None:
    case = replace(BASE, kv_lens=(0, 0, 128, 0, 1, 0))
    plan = plan_for(case, case.kv_lens, PROGRAMS)
    assert np.diff(plan.split_indptr).max() > 2
    check(draw(case), plan=plan)


def test_a_row_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `fixed` mode: shuffled, and alone among idle rows."""
    monkeypatch.setattr(plan_module, "FIXED_PIECE_TOKENS", 32)
    inputs = draw(replace(BASE, kv_lens=(0, 128, 40, 100, 0, 17)))
    case, arrays = inputs.case, inputs.arguments()

    def rows(order: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
        picked = {name: value[order] for name, value in arrays.items() if name != "cache"}
        picked["kv_lens"] = np.where(np.arange(6) < kept, picked["kv_lens"], 0)
        out, lse = call(case, arrays | picked | {"plan": plan_for(case, picked["kv_lens"], PROGRAMS, "fixed")})
        return np.asarray(out), np.asarray(lse)

    out, lse = rows(np.arange(6), 6)
    harness.assert_attention_close((out, lse), inputs.expected(), MOSAIC.tolerance(case.dtype))
    shuffled = inputs.rng.permutation(6)
    harness.assert_same_bits(rows(shuffled, 6), (out[shuffled], lse[shuffled]))
    alone = rows(np.roll(np.arange(6), -1), 1)
    harness.assert_same_bits((alone[0][:1], alone[1][:1]), (out[1:2], lse[1:2]))


def test_float32_output_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a tile that does not hold a row's output at once."""
    monkeypatch.setattr(split_states, "OUTPUT_BYTES", 4096)
    inputs = draw(replace(BASE, latent_dim=192))
    plan = plan_for(inputs.case, inputs.case.kv_lens, PROGRAMS)
    got = call(inputs.case, inputs.arguments() | {"plan": plan}, "float32")
    assert got[0].dtype == jnp.float32
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(inputs.case.dtype))


def test_a_query_of_nan_spoils_no_other_head() -> None:
    """Whether latents count is asked of all query rows; one that sees everything as NaN says yes, too."""
    arrays = draw(TREE).arguments() | {"plan": plan_for(TREE, TREE.kv_lens, PROGRAMS)}
    clean = call(TREE, arrays)
    q_rope = arrays["q_rope"].copy()
    q_rope[:, :, 0] = np.nan
    got = call(TREE, arrays | {"q_rope": q_rope})
    harness.assert_same_bits([x[:, :, 1:] for x in got], [x[:, :, 1:] for x in clean])


REFUSED = {
    "float32": (replace(BASE, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(BASE, cache_dtype="float16"), "got bfloat16 over float16"),
    "latents of 100": (replace(BASE, latent_dim=100), "a multiple of 64 columns up to 512, got 100"),
    "rotated columns of 16": (replace(BASE, rope_dim=16), "takes 32 or 64 rotated columns, got 16"),
    "small pages": (replace(BASE, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
    "33 heads": (replace(BASE, heads=33), "takes at most 32 query heads, got 33"),
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_words(case: MlaCase, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        call(case, draw(case).arguments())
