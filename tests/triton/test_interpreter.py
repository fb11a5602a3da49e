"""Tests of the interpreter of Triton kernels: 16-bit and 8-bit arithmetic, and detection of mistakes in kernels. The
tests run kernels that have mistakes on purpose.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import triton.language as tl

from pallas_attn.triton.interpreter import KernelFlawError, run
from pallas_attn.triton.launch import kernel
from pallas_attn.triton.quantise import e4m3_from_f32, f16_from_e4m3
from tests.kit.harness import assert_same_bits, fresh_rng
from tests.kit.slow_cases import slow_cases

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def shape(*dims: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# --- arithmetic


@kernel
def _matmul(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty))


@slow_cases("bfloat16")
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_products_of_16_bits(dtype: Any) -> None:
    rng = fresh_rng()
    a, b = (rng.standard_normal((16, 16)).astype(dtype) for _ in range(2))
    (out,) = run(_matmul, [a, b], [shape(16, 16)], (1,), {"N": 16})
    np.testing.assert_allclose(out, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5, atol=1e-5)


@kernel
def _cast(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


CASTS = [(np.float32, BF16), (BF16, np.float32), (np.float16, BF16), (BF16, np.float16)]


@pytest.mark.parametrize(("here", "there"), CASTS)
def test_casts_round_to_nearest_even(here: Any, there: Any) -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-9), 3e4, 0, -0.0, np.inf, 2.0**-14], np.float32).astype(here)
    (out,) = run(_cast, [x], [shape(8, dtype=there)], (1,), {"N": 8})
    assert_same_bits(out, x.astype(np.float32).astype(there))


@kernel
def _to_e4m3(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, e4m3_from_f32(tl.load(x_ptr + at)))


def test_e4m3_is_rounded_to_nearest_even() -> None:
    """The inputs are all e4m3 numbers, the midpoints of adjacent e4m3 numbers, and the float32 numbers next to
    midpoints.
    """
    held = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    between = (held[1:] + held[:-1]) / 2
    x = np.concatenate([held, between, np.nextafter(between, 0), np.nextafter(between, np.float32(1e3)), [np.nan]])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = np.pad(x, (0, 1024 - x.size))
    (out,) = run(_to_e4m3, [x], [shape(1024, dtype=E4M3)], (1,), {"N": 1024})
    assert_same_bits(out, x.astype(E4M3))


@kernel
def _from_e4m3(x_ptr, out_ptr, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, f16_from_e4m3(tl.load(x_ptr + at), NATIVE))


@pytest.mark.parametrize("native", [False, True])
def test_all_e4m3_bytes_convert_to_float16(native: bool) -> None:
    codes = np.arange(256).astype(np.uint8).view(E4M3)
    (out,) = run(_from_e4m3, [codes], [shape(256, dtype=np.float16)], (1,), {"NATIVE": native})
    np.testing.assert_array_equal(out, codes.astype(np.float16))


@kernel
def _multiply_add(x_ptr, y_ptr, z_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, tl.fma(tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)))


def test_fused_multiply_add_rounds_once() -> None:
    x, y = np.array([500_001, 1 + 2**-23, 3, 7], np.float32), np.array([1.4426950, 1 - 2**-23, 0.1, 1 / 7], np.float32)
    z = -(x * y)
    (out,) = run(_multiply_add, [x, y, z], [shape(4)], (1,), {})
    assert out.any()  # z is -round(x * y), so a product that is rounded separately would give 0
    assert_same_bits([out], [(x.astype(np.float64) * y + z).astype(np.float32)])


# --- planted mistakes


@kernel
def _flawed(x_ptr, out_ptr, other_ptr, FLAW: tl.constexpr):
    program = tl.program_id(0)
    at = program * 4 + tl.arange(0, 4)
    if FLAW == "bounds":
        x = tl.load(x_ptr + at + 1)
    elif FLAW == "bounds, mask":
        x = tl.load(x_ptr + at + 1, mask=(at < 9) & (program >= 0), other=0.0)
    elif FLAW == "none, mask":
        x = tl.load(x_ptr + at - 8, mask=(at >= 0) & (program < 0), other=0.0)
    elif FLAW == "below":
        x = tl.load((4 * at).to(tl.int64).to(tl.pointer_type(tl.float32)))
    elif FLAW == "unwritten":
        x = tl.load(other_ptr + at)
    else:
        x = tl.load(x_ptr + at)
    if FLAW == "added":
        tl.atomic_add(out_ptr + at, x)
    elif FLAW == "added, input":
        tl.atomic_add(x_ptr + at, x)
    elif FLAW == "added, stored":
        tl.store(out_ptr + at, x)
        tl.atomic_add(out_ptr + tl.arange(0, 4), x)
    if FLAW == "race":
        at = at % 4
    elif FLAW == "twice":
        at = at // 2
    if FLAW == "input":
        tl.store(x_ptr + at, x)
    tl.store(out_ptr + at, x)
    tl.store(other_ptr + program * 4 + tl.arange(0, 4), x)
    if FLAW == "other":
        tl.store(out_ptr + at, tl.load(other_ptr + tl.arange(0, 4)))


FLAWS = {
    "bounds": "load out of bounds: element 8 of x_ptr, which has 8",
    "bounds, mask": "load out of bounds: element 8 of x_ptr, which has 8",
    "below": "load below every array",
    "unwritten": "load of other_ptr before it is written",
    "race": "two programs store to out_ptr",
    "twice": "one store writes an element of out_ptr twice",
    "input": "store to the input x_ptr",
    "other": "load of other_ptr that another program wrote",
    "added": "addition to out_ptr before it is written",
    "added, input": "addition to the input x_ptr",
    "added, stored": "race: addition to out_ptr, which a program loads or stores",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_detected(flaw: str) -> None:
    with pytest.raises(KernelFlawError, match=FLAWS[flaw]):
        run(_flawed, [np.arange(8, dtype=np.float32)], [shape(8), shape(8)], (2,), {"FLAW": flaw})


@kernel
def _counted(x_ptr, held_ptr, counts_ptr, FLAW: tl.constexpr):
    at = tl.load(x_ptr + tl.program_id(0) * 4 + tl.arange(0, 4))
    if FLAW == "loaded before":
        tl.load(counts_ptr + at)
    tl.atomic_add(counts_ptr + at, 1, mask=at >= 0)
    if FLAW == "loaded":
        tl.load(counts_ptr + tl.arange(0, 2))
    elif FLAW == "stored":
        tl.store(counts_ptr + 1, 0)


def test_atomic_additions() -> None:
    """Several programs may add to one element atomically. It is an error if a program also loads or
    stores the element.
    """

    def count(flaw: str) -> Any:
        x, zeros = np.array([0, 1, 1, 3, 3, 3, 0, 1], np.int32), np.zeros(4, np.int32)
        return run(_counted, [x, zeros], [shape(4, dtype=np.int32)], (2,), {"FLAW": flaw}, {1: 0})

    assert count("")[0].tolist() == [2, 3, 0, 3]
    for flaw, message in (
        ("loaded before", "addition to counts_ptr, which a program loads"),
        ("loaded", "load of counts_ptr that another program wrote"),
        ("stored", "two programs store to counts_ptr"),
    ):
        with pytest.raises(KernelFlawError, match=message):
            count(flaw)


@pytest.mark.parametrize("mask", ["", ", mask"])
def test_kernel_without_flaw_runs(mask: str) -> None:
    x = np.arange(8, dtype=np.float32)
    loaded = np.zeros_like(x) if mask else x
    assert_same_bits(run(_flawed, [x], [shape(8), shape(8)], (2,), {"FLAW": f"none{mask}"}), [loaded, loaded])


@kernel
def _half(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), 1.0)


def test_unwritten_elements_are_nan() -> None:
    (out,) = run(_half, [], [shape(8)], (1,), {})
    assert (out[:4] == 1).all()
    assert np.isnan(out[4:]).all()
