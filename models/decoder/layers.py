"""Plain layers: norm, projection, feed-forward."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_attn import capability

FEW_ROWS = 8
"""Rows up to which a GPU multiplies float32 weights as they are: cutting them into parts would take longer. One row is
multiplied as so many, since matrix units compute no fewer."""


def project(
    x: Float[Array, "*rows D"], weight: Float[Array, "D F"], out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows F"]:
    """x @ weight, accumulated in float32; in x's dtype unless `out_dtype` is given, with float32 weights in float32.

    Whoever asks for float32 weights means them: without HIGHEST, GPUs would round both operands to TF32. 16-bit
    operands are not affected. A GPU is given eight equal rows for one: XLA multiplies a vector elementwise, and writes
    the products to memory before it adds them up, or fuses them with what comes next, in each of whose programs the
    whole product is computed.
    """
    on_gpu, num_rows = capability().platform == "gpu", math.prod(x.shape[:-1])
    if weight.dtype == jnp.float32:
        if on_gpu and x.dtype == jnp.bfloat16 and num_rows > FEW_ROWS:
            return project_by_parts(x, weight).astype(out_dtype or jnp.float32)
        x = x.astype(jnp.float32)
    in_parts = on_gpu and num_rows <= SPLIT_ROWS and depth_parts(weight.shape[0]) > 1
    multiply = _product_of_parts if in_parts else _product
    if on_gpu and num_rows == 1:
        rows = jax.lax.optimization_barrier(jnp.broadcast_to(x.reshape(1, -1), (FEW_ROWS, x.shape[-1])))
        return multiply(rows, weight, out_dtype)[0].reshape(*x.shape[:-1], -1)
    return multiply(x, weight, out_dtype)


SPLIT_ROWS = 64
"""Rows up to which XLA may cut K into parts that are multiplied side by side, up to 16."""


def depth_parts(depth: int) -> int:
    """Parts that a long K is cut into here, where 16 of them are no multiples of 16 long: XLA would pad the weights in
    every call. 28 of 44 us for the 10,944 of DeepSeek-V2-Lite's dense layer (H200; benchmarks/log/114)."""
    if depth < 8192 or depth % 256 == 0:
        return 1
    return max((parts for parts in (3, 5, 7, 9) if depth % (16 * parts) == 0), default=1)


def _product_of_parts(
    x: Float[Array, "*rows D"], weight: Float[Array, "D F"], out_dtype: DTypeLike | None
) -> Float[Array, "*rows F"]:
    """x @ weight as a sum over parts of D."""
    parts = depth_parts(weight.shape[0])
    of_parts = x.reshape(-1, parts, weight.shape[0] // parts).swapaxes(0, 1)
    products = _product(of_parts, weight.reshape(parts, -1, weight.shape[1]), jnp.float32)
    return jnp.sum(products, axis=0).reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)


def _product(
    x: Float[Array, "*rows D"], weight: Float[Array, "*parts D F"], out_dtype: DTypeLike | None
) -> Float[Array, "*rows F"]:
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out_dtype or x.dtype)


def project_by_parts(x: Float[Array, "*rows D"], weight: Float32[Array, "D F"]) -> Float32[Array, "*rows F"]:
    """x @ weight of bfloat16 rows and float32 weights, on tensor cores and yet in float32.

    A weight is the sum of three bfloat16 numbers, whose products with a row's are exact in float32. A product of
    float32 operands would first write the rows in float32, and multiply them without tensor cores.
    """
    parts, left = [], weight
    for _ in range(3):
        part = jax.lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)
        left = left - part
        parts.append(part.astype(jnp.bfloat16))
    y = jnp.matmul(x, jnp.concatenate(parts, axis=1), preferred_element_type=jnp.float32)
    large, middle, small = jnp.split(y, 3, axis=-1)
    return (small + middle) + large


def swiglu(gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
    """silu(gate) · up of the two halves of the columns (Shazeer, arXiv:2002.05202)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


class RMSNorm(nnx.Module):
    """x / rms(x) · weight (Zhang and Sennrich, arXiv:1910.07467), the mean square taken in float32."""

    def __init__(self, width: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x32 = x.astype(jnp.float32)
        scaled = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return self.weight[...][None, :] * scaled.astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation · weight + bias (Ba et al., arXiv:1607.06450), computed in float32."""

    def __init__(self, width: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        weight, bias = (part[...].astype(jnp.float32)[None, :] for part in (self.weight, self.bias))
        return (scaled * weight + bias).astype(x.dtype)


class Linear(nnx.Module):
    """x @ weight + bias. The weight is [in, out], the transpose of a checkpoint's: the faster one for a few rows."""

    def __init__(self, in_width: int, out_width: int, dtype: DTypeLike, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((in_width, out_width), dtype))
        self.bias = nnx.Param(jnp.zeros(out_width, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class MLP(nnx.Module):
    """Feed-forward layer of a dense block, and the shared experts of a mixture."""

    def __init__(self, width: int, hidden_width: int, dtype: DTypeLike):
        self.gate_up_proj = Linear(width, 2 * hidden_width, dtype)
        self.down_proj = Linear(hidden_width, width, dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down_proj(swiglu(self.gate_up_proj(x)))
