"""Tests of the Hopper kernel of `paged_decode` in addition to the contract suite.

On a CPU, kernels are interpreted with race detection; on a GPU, they are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import FULL, PagedKV, explain, paged_decode
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.hopper import dequantize
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives import dequantize as shared
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.paged_decode import mosaic_sm90
from pallas_attn.ops.paged_decode.config import max_columns
from pallas_attn.runtime import device
from tests.contract import backends
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.usefixtures("short_rows_are_cut"),
]

MOSAIC = Variant("mosaic", DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1), honours_plans=True)


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Run kernels interpreted on the CPU or, on a GPU, compiled."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


BASE = PagedCase(
    kv_lens=(0, 1, 15, 64, 65, 128), head_dim=64, page_size=16, pages_per_row=8, num_pages=56, dtype="bfloat16"
)
WINDOWED = replace(BASE, head_windows=((FULL, 0), (FULL, 0)), sinks="mixed")


def plan_for(case: PagedCase, arrays: dict[str, Any], mode: Any, num_programs: int) -> Any:
    return backends.plan_of(backends.MOSAIC, arrays, window=case.window, num_programs=num_programs, mode=mode)


def call(case: PagedCase, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return harness.compiled(paged_decode, MOSAIC, return_lse=True, **case.static)(**arrays)


def draw(case: PagedCase) -> Inputs:
    return Inputs.draw(case, harness.fresh_rng())


def check(inputs: Inputs, **more: Any) -> None:
    """Compare a call on poisoned inputs with numpy."""
    got = call(inputs.case, inputs.decode() | more)
    harness.assert_attention_close(got, inputs.expected_decode(), MOSAIC.tolerance(inputs.case.dtype))


@pytest.mark.slow  # in `make test`, test_merge_of_few_rows_uses_narrow_blocks also splits a sequence
def test_row_split_among_many_ctas() -> None:
    case = replace(WINDOWED, kv_lens=(0, 0, 128, 0, 1, 0), head_windows=((FULL, 0), (1, 0)))
    inputs = draw(case)
    plan = plan_for(case, inputs.decode(), "balanced", 9)
    assert np.diff(plan.split_indptr).max() > 2
    check(inputs, plan=plan)


@slow_cases("interpreted-64-2")
@pytest.mark.parametrize(("group", "queries"), [pytest.param(16, 1, marks=pytest.mark.slow), (64, 2)])
def test_merge_of_few_rows_uses_narrow_blocks(group: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial states have 16 query rows, or 64 for each of two queries. A CTA of the merge kernel merges 8 of them."""
    monkeypatch.setattr(basics, "multiprocessors", lambda: 132)
    packing = QueryPacking(group, queries, max_columns(64, 2))
    assert packing.width == group
    assert packing.split_width(packing.blocks * 2).width == 8
    case = replace(WINDOWED, kv_lens=(128,), q_heads=2 * group, queries=queries, head_windows=((FULL, 0), (40, 3)))
    inputs = draw(case)
    plan = plan_for(case, inputs.decode(), "fixed", 9)
    assert np.diff(plan.split_indptr).max() > 2
    check(inputs, plan=plan)


WIDE = PagedCase(
    kv_lens=(0, 260, 130),
    q_lens=(1, 1, 1),
    q_heads=3,
    kv_heads=1,
    head_dim=512,
    page_size=64,
    pages_per_row=5,
    num_pages=14,
    dtype="bfloat16",
)
WIDE_CASES = {
    "one stage, sinks, absent pages": (1, replace(WIDE, sinks="ordinary", absent_pages=True)),
    "one stage, pages of 16, drafts, windows": (
        1,
        replace(
            WIDE, page_size=16, pages_per_row=17, num_pages=50, q_lens=(0, 3, 2), head_windows=((150, 20),), q_heads=6
        ),
    ),
    "one stage, pages of 128, float16, soft cap": (
        1,
        replace(WIDE, page_size=128, num_pages=12, dtype="float16", head_dim=448, soft_cap=20.0),
    ),
    "two stages, heads of 320": (2, replace(WIDE, head_dim=320, head_windows=((200, 5),))),
    "int8 per channel, two stages, drafts": (
        2,
        replace(WIDE, cache_dtype="int8", scales="channel", q_lens=(0, 3, 2), q_heads=6),
    ),
    "fp8 per token, three stages, heads of 384": (
        3,
        replace(WIDE, cache_dtype="float8_e4m3fn", scales=64, head_dim=384),
    ),
}


@slow_cases(
    "interpreted-one stage, pages of 16, drafts, windows",
    "interpreted-one stage, pages of 128, float16, soft cap", "interpreted-two stages, heads of 320",
    "interpreted-int8 per channel, two stages, drafts",
    "interpreted-fp8 per token, three stages, heads of 384",
)  # fmt: skip
@pytest.mark.parametrize("name", WIDE_CASES)
def test_wide_heads_with_more_tiles_than_stages(name: str) -> None:
    stages, case = WIDE_CASES[name]
    inputs = draw(case)
    variant = Variant("mosaic", DecodeConfig(64, stages, programs_per_multiprocessor=1), honours_plans=True)
    arrays = inputs.decode()
    plan = plan_for(case, arrays, "balanced", 2)
    got = harness.compiled(paged_decode, variant, return_lse=True, **case.static)(**arrays, plan=plan)
    harness.assert_attention_close(got, inputs.expected_decode(), variant.tolerance(case.dtype))


@pytest.mark.parametrize("scales", ["head", "channel"])
def test_sum_of_query_parts_is_the_query(scales: Any) -> None:
    """A query element is stored as a sum of float16 parts. The sum is exact in the range of float16, and finite for
    larger elements. Elements that are too small for float16 do not affect a score.
    """
    case = replace(BASE, cache_dtype="int8", scales=scales, q_heads=2, head_dim=64)
    kv = draw(case).decode()["kv"]
    powers = np.exp2(np.linspace(-12, 19, 64))
    q = jnp.asarray((powers * [[1], [-1.25]])[None, None], jnp.bfloat16)
    expected = np.float64(q) * (np.float64(kv.k_scale) if scales == "channel" else 1)
    expected = np.take(expected, dequantize.as_keys(jnp.arange(64)), axis=-1)
    parts, scale = dequantize.split_and_permute_queries(q, kv)
    np.testing.assert_allclose(sum(map(np.float64, parts)) / scale, expected, rtol=2**-20, atol=(scale == 1) * 2**-25)
    far, _ = dequantize.split_and_permute_queries(jnp.full_like(q, 1e30), kv)
    assert all(jnp.isfinite(part).all() for part in far)


def run_ptx(assembly: str, words: np.ndarray) -> list[np.ndarray]:
    """Emulate PTX that converts words of four 8-bit numbers to pairs of float16, which the interpreter does not
    support.
    """
    registers: dict[str, np.ndarray] = {"$2": words}

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand in registers else np.full_like(words, int(operand, 0))

    for line in assembly.translate(str.maketrans("", "", ";,{}")).splitlines():
        operation, *operands = line.split() or [""]
        if operation == "xor.b32":
            registers[operands[0]] = value(operands[1]) ^ value(operands[2])
        elif operation == "mov.b32" and len(operands) == 3:  # splits a word into its two 16-bit halves
            registers[operands[0]], registers[operands[1]] = value(operands[2]) & 0xFFFF, value(operands[2]) >> 16
        elif operation == "mov.b32":
            registers[operands[0]] = value(operands[1])
        elif operation == "prmt.b32":
            source = np.stack([value(operands[1]), value(operands[2])], axis=1).view(np.uint8)
            picks = [int(pick, 16) for pick in operands[3][:1:-1]]
            registers[operands[0]] = np.ascontiguousarray(source[:, picks]).view(np.uint32)[:, 0]
        elif operation == "sub.f16x2":
            a, b = (value(operand).view(np.float16) for operand in operands[1:])
            registers[operands[0]] = (a - b).view(np.uint32)
        elif operation == "cvt.rn.f16x2.e4m3x2":
            pairs = value(operands[1]).astype(np.uint16).view(ml_dtypes.float8_e4m3fn)
            registers[operands[0]] = pairs.astype(np.float16).view(np.uint32)
        else:
            assert operation in ("", ".reg"), line
    return [registers[name].view(np.float16).reshape(-1, 2) for name in ("$0", "$1")]


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_conversion_to_float16(dtype: Any) -> None:
    """The words have every pair of bytes in the low half and a random pair in the high half. Keys and values store the
    four numbers in different orders.
    """
    low = np.arange(2**16, dtype=np.uint32)
    words = low | harness.fresh_rng().permutation(low) << 16
    numbers = words.view(dtype).reshape(-1, 4).astype(np.float16)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        got = run_ptx(shared.conversion(dtype, order), words)
        np.testing.assert_array_equal(np.concatenate(got, axis=1), numbers[:, order])


# --- calls


SMALL = replace(BASE, kv_lens=(0, 37), pages_per_row=4, num_pages=9, kv_heads=1, q_heads=2)


def check_all(got: Any, inputs: Sequence[Inputs]) -> None:
    """Compare the stacked results of several calls with numpy."""
    outs, lses = zip(*(each.expected_decode() for each in inputs), strict=True)
    harness.assert_attention_close(got, (np.stack(outs), np.stack(lses)), MOSAIC.tolerance(SMALL.dtype))


def arguments(inputs: Inputs) -> dict[str, Any]:
    return {name: jax.tree.map(jnp.asarray, value) for name, value in inputs.decode().items() if value is not None}


@slow_cases("interpreted")
def test_layers_of_a_scan_share_a_pool() -> None:
    """All layers use the whole pool. The block tables of each layer have separate pages."""
    inputs = [draw(SMALL), draw(SMALL)]
    each = [arguments(layer) for layer in inputs]
    pool = jax.tree.map(lambda *x: jnp.concatenate(x), *(layer["kv"] for layer in each))

    def layer(pool: Any, x: Any) -> tuple[Any, Any]:
        q, tables, i = x
        moved = {"q": q, "kv": pool, "block_tables": tables + i * SMALL.num_pages}
        return pool, call(SMALL, each[0] | moved)

    steps: Any = [jnp.stack([layer[name] for layer in each]) for name in ("q", "block_tables")] + [jnp.arange(2)]
    check_all(jax.jit(lambda pool: lax.scan(layer, pool, steps)[1])(pool), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compiled"], indirect=True)
def test_more_plan_rows_than_a_grid_axis_allows() -> None:
    rows, rng = 70_000, harness.fresh_rng()
    k, v = (jnp.asarray(rng.standard_normal((64, 1, 16, 64)), jnp.bfloat16) for _ in range(2))
    tables = jnp.arange(rows, dtype=jnp.int32)[:, None] % 64
    lens = jnp.where(tables[:, 0] == 0, 0, 1)  # each sequence has one token or none
    out = jax.jit(functools.partial(paged_decode, implementation="mosaic"))(
        jnp.zeros((rows, 1, 1, 64), jnp.bfloat16), PagedKV(k, v), tables, lens
    )
    want = jnp.where(lens[:, None] > 0, v[tables[:, 0], 0, 0], 0)
    np.testing.assert_array_equal(out[:, 0, 0], want)


@slow_cases("interpreted")
def test_plan_has_the_number_of_ctas_of_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan_decode`, which sees only shapes, must choose the number of CTAs that `paged_decode` chooses without a plan.
    For an implementation that follows no plan it is 1.
    """
    planned = []

    def plan(call: Any, implementation: str, num_programs: int) -> Any:
        planned.append(num_programs)
        return plan_module.planned(call, implementation, num_programs)

    monkeypatch.setattr(mosaic_sm90, "planned", plan)
    narrow, wide = (arguments(draw(replace(SMALL, dtype=dtype))) for dtype in ("bfloat16", "float32"))
    jax.eval_shape(functools.partial(paged_decode, implementation="mosaic"), **narrow)
    plans = [jax.eval_shape(lambda x=x: harness.plan_for(x)) for x in (narrow, wide)]
    assert [plan.implementation for plan in plans] == ["mosaic_sm90", "xla"]
    assert [plan.cta_row.shape[0] - 1 for plan in plans] == [*planned, 1]


UNSUPPORTED = {
    "float32": (replace(BASE, dtype="float32"), "takes bfloat16 and float16 queries, got float32"),
    "mixed": (replace(BASE, cache_dtype="float16"), "got bfloat16 over float16"),
    "narrow heads": (replace(BASE, head_dim=32), "takes heads of width 64, 128, 256, 320, 384, 448 or 512, got 32"),
    "8-bit heads of 320": (
        replace(BASE, head_dim=320, cache_dtype="int8", scales="head"),
        "takes heads of width 64, 128, 256, 384 or 512, got 320",
    ),
    "small pages": (replace(BASE, page_size=8), "takes pages of 16, 32, 64 or 128 tokens, got 8"),
    "67 heads per KV head": (replace(BASE, q_heads=67, kv_heads=1), "67 have no such divisor"),
}


def test_soft_cap_above_the_limit_is_unsupported() -> None:
    """The limit exists because the kernel computes capped scores as differences of numbers as large as the cap."""
    refused = explain("paged_decode", **draw(BASE).decode(), soft_cap=5000.0).refused
    assert refused["mosaic"] == "takes a soft cap of up to 4096, got 5000"


@pytest.mark.parametrize(("case", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls_have_a_reason(case: PagedCase, reason: str) -> None:
    explanation = explain("paged_decode", **draw(case).decode())
    assert explanation.chosen != "mosaic"
    assert reason in explanation.refused["mosaic"]


def unsupported_reason(
    monkeypatch: pytest.MonkeyPatch, platform: str, compute_capability: tuple[int, int] | None
) -> str:
    """Return the reason why the Mosaic kernel does not support a device, outside the interpreter."""
    monkeypatch.setattr(device, "current", lambda: device.Device(platform, "a card", compute_capability, 100))
    interpreting: Any = None
    with plgpu.force_gpu_interpret_mode(interpreting):
        return explain("paged_decode", **draw(BASE).decode()).refused["mosaic"]


def test_other_devices_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "needs a GPU of compute capability 9.0 (H100, H200) or 10.0 (B200, GB200), this is"
    assert unsupported_reason(monkeypatch, "cpu", None) == f"{needed} cpu"
    assert unsupported_reason(monkeypatch, "gpu", (8, 0)) == f"{needed} gpu 8.0"


def test_broken_assembler_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ptxas"
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "version 12.8.93, and ptxas of CUDA 12.8.0 to 12.9.0 miscompiles" in unsupported_reason(
        monkeypatch, "gpu", (9, 0)
    )


def test_mosaic_is_the_default_in_the_interpreter() -> None:
    assert explain("paged_decode", **draw(BASE).decode()).chosen == "mosaic"
