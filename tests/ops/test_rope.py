"""Tests of RoPE and RMS norms, alone and in `write_kv`, compared with complex arithmetic in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.portable.rope import rms_norm, rotate
from pallas_attn.types import PagedKV, Rope
from tests.contract.backends import in_every_run, unsupported
from tests.kit.harness import Variant, assert_same_bits, fresh_rng
from tests.kit.slow_cases import slow_cases
from tests.ops.write_kv_case import (
    HEADS,
    NUM_PAGES,
    NUM_TOKENS,
    PAGE_SIZE,
    QMAX,
    WIDTH,
    cache_spec,
    each_variant,
    stale_cache,
    tokens,
    write,
)

each_style = pytest.mark.parametrize("style", ["neox", "interleaved"])


def random_rope(rng: np.random.Generator, half: int = WIDTH // 2, **options: Any) -> Rope:
    angles = rng.uniform(0, 2 * np.pi, (NUM_TOKENS, half))
    return Rope(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32), **options)


def normed_and_rotated(x: Any, rope: Rope, norm: Any = None) -> np.ndarray:
    """Apply the RMS norm and RoPE of `rope` to x [T, heads, D] in float64. `norm` is the weight of the norm, or
    None.
    """
    x = np.array(x).astype(np.float64)
    if norm is not None and rope.norm_order == "before_rope":
        x = normed(x, norm, rope.norm_eps)
    half = rope.cos.shape[-1]
    real = slice(0, half) if rope.style == "neox" else slice(0, 2 * half, 2)
    imaginary = slice(half, 2 * half) if rope.style == "neox" else slice(1, 2 * half, 2)
    z = (x[..., real] + 1j * x[..., imaginary]) * (np.asarray(rope.cos) + 1j * np.asarray(rope.sin))[:, None]
    x[..., real], x[..., imaginary] = z.real, z.imag
    return normed(x, norm, rope.norm_eps) if norm is not None and rope.norm_order == "after_rope" else x


def normed(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight).astype(np.float64)


@each_style
@pytest.mark.parametrize("half", [WIDTH // 2, WIDTH // 4, 1])
def test_rotate_multiplies_pairs_by_complex_phases(style: Any, half: int) -> None:
    rng = fresh_rng()
    rope, (x, _) = random_rope(rng, half, style=style), tokens(rng)
    got = rotate(x, rope.cos, rope.sin, style)
    np.testing.assert_allclose(got, normed_and_rotated(x, rope), rtol=1e-5, atol=1e-5)
    assert_same_bits(got[..., 2 * half :], x[..., 2 * half :])


def test_rotate_with_leading_axes() -> None:
    rng = fresh_rng()
    rope = random_rope(rng)
    x = jnp.stack([jnp.stack(tokens(rng)), jnp.stack(tokens(rng)), jnp.stack(tokens(rng))])
    assert x.shape == (3, 2, NUM_TOKENS, HEADS, WIDTH)
    got = rotate(x, rope.cos, rope.sin, "neox")
    for i, j in np.ndindex(3, 2):
        np.testing.assert_allclose(got[i, j], normed_and_rotated(x[i, j], rope), rtol=1e-5, atol=1e-5)


def test_rms_norm_of_bfloat16_computes_in_float32() -> None:
    rng = fresh_rng()
    x, _ = tokens(rng, jnp.bfloat16)
    weight = jnp.asarray(1 + 0.3 * rng.standard_normal(WIDTH), jnp.bfloat16)
    got = rms_norm(x, weight, 1e-2)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, normed(np.asarray(x).astype(np.float64), weight, 1e-2), rtol=1e-5, atol=1e-5)


@slow_cases("4-before_rope-neox-mosaic", "4-before_rope-neox-triton")
@each_variant
@in_every_run(
    "xla",
    mosaic=["4-before_rope-neox", "4-after_rope-interleaved", "1-before_rope-neox"],
    triton=["4-before_rope-neox", "4-after_rope-interleaved"],
)  # fmt: skip
@unsupported(mosaic={"1-before_rope-neox": "two pairs of columns or more that are rotated in neox style"})
@each_style
@pytest.mark.parametrize(
    ("half", "norm_order"),
    [(WIDTH // 2, None), (WIDTH // 4, "before_rope"), (WIDTH // 4, "after_rope"), (1, "before_rope")],
)
def test_write_rotates_keys_and_queries_not_values(style: Any, half: int, norm_order: Any, variant: Variant) -> None:
    rng = fresh_rng()
    norms = {}
    if norm_order is not None:
        q_norm, k_norm = jnp.asarray(1 + 0.3 * rng.standard_normal((2, WIDTH)), jnp.float32).astype(jnp.bfloat16)
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_order": norm_order, "norm_eps": 1e-2}
    rope = random_rope(rng, half, style=style, **norms)
    (k, v), q = tokens(rng), jnp.concatenate(tokens(rng), axis=1)
    kv, slots = stale_cache(rng, "float32"), rng.permutation(NUM_PAGES * PAGE_SIZE)[:NUM_TOKENS].astype(np.int32)
    got, rotated = write(variant, kv, k, v, slots, rope=rope, q=q)
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    np.testing.assert_allclose(got.k[page, :, offset], normed_and_rotated(k, rope, rope.k_norm), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rotated, normed_and_rotated(q, rope, rope.q_norm), rtol=1e-5, atol=1e-5)
    assert_same_bits(got.v[page, :, offset], v)


@each_variant
@in_every_run("xla", "mosaic", "triton")
def test_write_rotates_and_norms_wide_heads(variant: Variant) -> None:
    """Heads of 512 columns, of which RoPE rotates columns i and i + 256. Most angles are 0."""
    rng, width = fresh_rng(), 512
    q_norm, k_norm = jnp.asarray(1 + 0.3 * rng.standard_normal((2, width)), jnp.float32)
    angles = rng.uniform(0, 2 * np.pi, (NUM_TOKENS, width // 2)) * (np.arange(width // 2) < 64)
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    rope = Rope(cos, sin, q_norm=q_norm, k_norm=k_norm, norm_order="before_rope", norm_eps=1e-2)
    (k, v), (q, _) = tokens(rng, width=width), tokens(rng, width=width)
    kv, slots = stale_cache(rng, "float32", width=width), np.arange(NUM_TOKENS, dtype=np.int32)
    got, rotated = write(variant, kv, k, v, slots, rope=rope, q=q)
    stored = got.k[0, :, :NUM_TOKENS].swapaxes(0, 1)
    np.testing.assert_allclose(stored, normed_and_rotated(k, rope, k_norm), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rotated, normed_and_rotated(q, rope, q_norm), rtol=1e-5, atol=1e-5)
    assert_same_bits(got.v[0, :, :NUM_TOKENS].swapaxes(0, 1), v)


@each_variant
@in_every_run("xla", "mosaic")
def test_write_rounds_rotated_keys_and_queries_once(variant: Variant) -> None:
    rng = fresh_rng()
    rope, slots = random_rope(rng), np.arange(NUM_TOKENS, dtype=np.int32)
    (k, v), (q, _) = tokens(rng, jnp.bfloat16), tokens(rng, jnp.bfloat16)
    got, rotated = write(variant, PagedKV.allocate(cache_spec("float16")), k, v, slots, rope=rope, q=q)
    stored = got.k[0, :, :NUM_TOKENS].swapaxes(0, 1)
    want_k, want_q = normed_and_rotated(k, rope), normed_and_rotated(q, rope)
    for cast, want, half_ulp in ((stored, want_k, 2.0**-11), (rotated, want_q, 2.0**-8)):
        assert (np.abs(np.asarray(cast).astype(np.float64) - want) <= half_ulp * 1.001 * np.abs(want) + 1e-6).all()
    assert rotated.dtype == q.dtype


@slow_cases("float8_e4m3fn-mosaic")
@each_variant
@in_every_run("xla", "mosaic")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_write_quantises_rotated_keys_from_float32(dtype: str, variant: Variant) -> None:
    rng = fresh_rng()
    rope, slots = random_rope(rng), np.arange(NUM_TOKENS, dtype=np.int32) * PAGE_SIZE
    k, v = tokens(rng, jnp.bfloat16)
    got = write(variant, PagedKV.allocate(cache_spec(dtype, PAGE_SIZE)), k, v, slots, rope=rope)
    want = normed_and_rotated(k, rope)[:NUM_PAGES]  # the slot of the last token is outside the pool
    scale = np.asarray(got.k_scale)[:, :, :1]
    np.testing.assert_allclose(scale[..., 0], np.abs(want).max(-1) / QMAX[dtype], rtol=1e-5)
    step = scale if dtype == "int8" else np.maximum(np.abs(want) / 8, scale * 2.0**-9)
    read = np.asarray(got.k)[:, :, 0].astype(np.float64) * scale
    assert (np.abs(read - want) <= 0.501 * step + 1e-5 * np.abs(want)).all()
