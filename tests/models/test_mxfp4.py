"""MXFP4 compared with the definition of the format, one weight at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.checkpoints import mxfp4


def meant(code: int, scale: int) -> float:
    """Return the value of a 4-bit code by the definition of the format.

    A code has a sign, two exponent bits with bias 1, and one mantissa bit. Its value is multiplied by 2^(scale - 127).
    """
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return (-1) ** sign * magnitude * 2.0 ** (scale - 127)


def pack(codes: np.ndarray) -> np.ndarray:
    """Pack codes [E, in, out] into bytes [E, out, in / 32, 16]."""
    experts, in_width, out_width = codes.shape
    blocks = np.zeros((experts, out_width, in_width // 32, 16), np.uint8)
    for expert, row, column in np.ndindex(codes.shape):
        group, place = divmod(row, 32)
        blocks[expert, column, group, place // 2] += codes[expert, row, column] << (4 if place % 2 else 0)
    return blocks


def test_every_code_with_every_scale():
    """Dequantised weights in bfloat16 are exact for every code and scale. Values out of range are infinite."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)[None, :, None].repeat(255, axis=2)
    scales = np.arange(255, dtype=np.uint8)[None, :, None]
    out = mxfp4.dequantise(pack(codes), scales)
    assert (out.dtype, out.shape) == (ml_dtypes.bfloat16, (1, 32, 255))
    wanted = np.array([[meant(code, scale) for scale in range(255)] for code in codes[0, :, 0].tolist()])
    finite = np.abs(wanted) < 2.0**128
    np.testing.assert_array_equal(out[0].astype(np.float64)[finite], wanted[finite])
    assert np.isinf(out[0][~finite].astype(np.float64)).all()
    np.testing.assert_array_equal(np.signbit(out[0]), codes[0] > 7)


def test_scale_255_is_nan():
    out = mxfp4.dequantise(np.zeros((1, 1, 1, 16), np.uint8), np.full((1, 1, 1), 255, np.uint8))
    assert np.isnan(out.astype(np.float32)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_weight_layout(experts: int, groups: int, out_width: int, seed: int):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, 32 * groups, out_width), np.uint8)
    scales = rng.integers(100, 150, (experts, out_width, groups), np.uint8)
    blocks = pack(codes)
    assert (blocks.shape, scales.shape) == mxfp4.packed_shapes(codes.shape)
    out = mxfp4.dequantise(blocks, scales)
    assert out.shape == codes.shape
    for expert, row, column in np.ndindex(codes.shape):
        wanted = meant(int(codes[expert, row, column]), int(scales[expert, column, row // 32]))
        assert float(out[expert, row, column]) == wanted
