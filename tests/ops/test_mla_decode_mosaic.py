"""The Mosaic kernel behind `mla_decode` for many query rows, held to the contract's numpy: interpreted on the CPU with
race detection, compiled on a GPU.

The interpreter is slow, and compiling a kernel for it slower: cases that differ in values only share a compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import explain, mla_decode
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.mla_decode.config import SeesawConfig
from tests.ops import harness
from tests.ops.harness import Variant
from tests.ops.mla_case import SM_SCALE, Inputs, MlaCase

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
    """Interpreted anywhere, compiled on a GPU."""
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
    num_pages=64,
    dtype="float16",
    tree=True,
    absent_pages=True,
)
CASES = {
    "draft trees, absent pages": TREE,
    "all idle": replace(TREE, kv_lens=(0,) * 4),
    "no latents but the draft's": replace(TREE, kv_lens=(0, 3, 1, 2), absent_pages=False),
    "tiles that end with the first draft": replace(TREE, kv_lens=(0, 66, 64, 129), absent_pages=False),
    "all of maximum length": replace(TREE, kv_lens=(320,) * 4, absent_pages=False, num_pages=100),
    "large scores of either sign": replace(TREE, exact=True),
}
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


def call(arrays: dict[str, Any], variant: Variant = MOSAIC, **static: Any) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, return_lse=True, **static)(**arrays)


def plan_for(case: MlaCase, kv_lens: Any, mode: Any, num_programs: int) -> Any:
    arguments = draw(case).arguments() | {"kv_lens": np.asarray(kv_lens, np.int32)}
    return harness.plan_for(arguments, num_programs=num_programs, mode=mode, implementation="mosaic")


def draw(case: MlaCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, variant: Variant = MOSAIC, **more: Any) -> None:
    """Against numpy, and bit for bit with and without poison."""
    got = call(inputs.arguments() | more, variant)
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(inputs.case.dtype))
    harness.assert_same_bits(got, call(inputs.arguments(poisoned=False) | more, variant))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_contract_and_reads_no_poison(case: MlaCase) -> None:
    check(draw(case), plan=plan_for(case, case.kv_lens, "balanced", 3))


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_shapes(case: MlaCase) -> None:
    """With the plan the operation makes itself; one pair of tiles in shared memory."""
    check(draw(case), SINGLE)


def test_blocks_that_share_what_is_read() -> None:
    """In a cluster of two."""
    case = replace(ONE_BLOCK, kv_lens=(70, 200), heads=128, latent_dim=128, rope_dim=32, page_size=64, pages_per_row=4)
    check(draw(case), CLUSTER)


def test_a_row_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `fixed` mode: shuffled, and alone among idle rows."""
    monkeypatch.setattr(plan_module, "FIXED_PIECE_TOKENS", 64)
    inputs = draw(replace(TREE, kv_lens=(0, 128, 40, 200), q_lens=None, tree=False, absent_pages=False))
    case, arrays = inputs.case, inputs.arguments()

    def rows(order: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
        picked = {name: value if name == "cache" else value[order] for name, value in arrays.items()}
        picked["kv_lens"] = np.where(np.arange(4) < kept, picked["kv_lens"], 0)
        out, lse = call(picked | {"plan": plan_for(case, picked["kv_lens"], "fixed", 3)})
        return np.asarray(out), np.asarray(lse)

    order = np.arange(4)
    out, lse = rows(order, 4)
    harness.assert_attention_close((out, lse), inputs.expected(), MOSAIC.tolerance(case.dtype))
    shuffled = inputs.rng.permutation(4)
    harness.assert_same_bits(rows(shuffled, 4), (out[shuffled], lse[shuffled]))
    alone = rows(np.roll(order, -1), 1)
    harness.assert_same_bits((alone[0][:1], alone[1][:1]), (out[1:2], lse[1:2]))


def test_a_query_of_nan_spoils_no_other_row() -> None:
    inputs = draw(TREE)
    arrays, plan = inputs.arguments(), plan_for(TREE, TREE.kv_lens, "balanced", 3)
    clean = call(arrays | {"plan": plan})
    q = arrays["q_latent"].copy()
    q[:, :, 5] = np.nan
    got = call(arrays | {"q_latent": q, "plan": plan})
    harness.assert_same_bits([np.delete(x, 5, axis=2) for x in got], [np.delete(x, 5, axis=2) for x in clean])


def test_float32_output() -> None:
    inputs = draw(replace(ONE_BLOCK, kv_lens=(70,), page_size=64))
    got = call(inputs.arguments(), out_dtype="float32")
    assert got[0].dtype == jnp.float32
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(inputs.case.dtype))


REFUSED = {
    "float32": (replace(ONE_BLOCK, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(ONE_BLOCK, cache_dtype="float16"), "got bfloat16 over float16"),
    "narrow latents": (replace(ONE_BLOCK, latent_dim=96), "got 96 and 64"),
    "small pages": (replace(ONE_BLOCK, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_words(case: MlaCase, reason: str) -> None:
    explanation = explain("mla_decode", **draw(case).arguments(), sm_scale=SM_SCALE)
    assert explanation.chosen == "xla"
    assert reason in explanation.refused["mosaic"]
