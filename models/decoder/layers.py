"""Norms, projections and dense feed-forward layers, and matrix products that are fast on GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32

from pallas_attn import capability

MAX_UNSPLIT_ROWS = 8
"""Maximum number of bfloat16 rows for which a GPU multiplies by float32 weights in a float32 GEMM. For more rows,
`project_split_weights` is faster. A single row is repeated this number of times (see `project`)."""


def project(
    x: Float[Array, "*rows D"], weight: Float[Array, "D F"], out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows F"]:
    """Return x @ weight, accumulated in float32.

    Products have precision HIGHEST, because GPUs otherwise round float32 operands to TF32. The precision does not
    affect 16-bit operands.

    On a GPU a single row is multiplied as eight equal rows, because XLA has no GEMM for a vector: it would multiply
    elementwise, and write the products to memory before the reduction or recompute them in each thread block of the
    next kernel.

    Args:
      x: rows.
      weight: matrix.
      out_dtype: dtype of the result. The default is float32 if the weight is float32, else the dtype of x.
    """
    on_gpu, num_rows = capability().platform == "gpu", math.prod(x.shape[:-1])
    if weight.dtype == jnp.float32:
        if on_gpu and x.dtype == jnp.bfloat16 and num_rows > MAX_UNSPLIT_ROWS:
            return project_split_weights(x, weight).astype(out_dtype or jnp.float32)
        x = x.astype(jnp.float32)
    splits_k = on_gpu and num_rows <= MAX_SPLIT_K_ROWS and num_k_splits(weight.shape[0]) > 1
    multiply = _split_k_matmul if splits_k else _matmul
    if on_gpu and num_rows == 1:
        rows = jax.lax.optimization_barrier(jnp.broadcast_to(x.reshape(1, -1), (MAX_UNSPLIT_ROWS, x.shape[-1])))
        return multiply(rows, weight, out_dtype)[0].reshape(*x.shape[:-1], -1)
    return multiply(x, weight, out_dtype)


MAX_SPLIT_K_ROWS = 64
"""Maximum number of rows for which `project` may split the sum over K itself (`num_k_splits`). Up to this number of
rows, XLA may use split-K GEMMs, which sum over up to 16 ranges of K in parallel."""


def num_k_splits(depth: int) -> int:
    """Return the number of ranges into which `project` splits the sum over K = depth; 1 to leave the split to XLA.

    XLA's split-K pads the weights in every call if K is not divisible by 256. On an H200, padding took 28 of 44 us for
    K = 10,944 (the dense layer of DeepSeek-V2-Lite). Therefore `project` splits long K of this kind itself.
    """
    if depth < 8192 or depth % 256 == 0:
        return 1
    return max((splits for splits in (3, 5, 7, 9) if depth % (16 * splits) == 0), default=1)


def _split_k_matmul(
    x: Float[Array, "*rows D"], weight: Float[Array, "D F"], out_dtype: DTypeLike | None
) -> Float[Array, "*rows F"]:
    """Return x @ weight as a sum of products over `num_k_splits` equal ranges of D."""
    splits = num_k_splits(weight.shape[0])
    rows = x.reshape(-1, splits, weight.shape[0] // splits).swapaxes(0, 1)  # [splits, rows, D / splits]
    products = _matmul(rows, weight.reshape(splits, -1, weight.shape[1]), jnp.float32)
    return jnp.sum(products, axis=0).reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)


def _matmul(
    x: Float[Array, "*rows D"], weight: Float[Array, "*splits D F"], out_dtype: DTypeLike | None
) -> Float[Array, "*rows F"]:
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out_dtype or x.dtype)


def project_split_weights(x: Float[Array, "*rows D"], weight: Float32[Array, "D F"]) -> Float32[Array, "*rows F"]:
    """Return x @ weight for bfloat16 rows and float32 weights with float32 accuracy, on tensor cores.

    The product of two bfloat16 values is exact in float32. A float32 GEMM would convert the rows to float32 first, and
    would not use tensor cores.
    """
    return sum_of_parts(jnp.matmul(x, split_weights(weight), preferred_element_type=jnp.float32))


def split_weights(weight: Float32[Array, "D F"]) -> BFloat16[Array, "D F3"]:
    """Return three bfloat16 matrices [D, F] side by side, whose sum is the weight."""
    parts, left = [], weight
    for _ in range(3):
        part = jax.lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)
        left = left - part
        parts.append(part.astype(jnp.bfloat16))
    return jnp.concatenate(parts, axis=1)


def sum_of_parts(products: Float32[Array, "*rows F3"]) -> Float32[Array, "*rows F"]:
    """Return x @ weight, for the products of x and the matrices of `split_weights`."""
    large, middle, small = jnp.split(products, 3, axis=-1)
    return (small + middle) + large


def swiglu(gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
    """Return silu(gate) · up [*rows, F], where gate and up are the halves of the 2F columns (Shazeer,
    arXiv:2002.05202)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class LimitedSwiglu:
    """Activation of DeepSeek-V4: silu(gate) · up, where gate and up are the halves of the columns. Before it, gate is
    clamped to at most `limit`, and up to [-limit, limit]."""

    limit: float

    def __call__(self, gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)


def geglu(gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
    """Return gelu(gate) · up [*rows, F], where gate and up are the halves of the 2F columns (Shazeer,
    arXiv:2002.05202). GELU is its tanh approximation."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up


def rms_scaled(x: Float[Array, "*rows D"], eps: float) -> Float32[Array, "*rows D"]:
    """Return x / sqrt(mean(x²) + eps) of each row: an RMS norm without a weight, computed in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMS norm: x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, arXiv:1910.07467). The division is computed in
    float32. The quotient is converted to the dtype of x before it is multiplied by the weight."""

    def __init__(self, width: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.weight[...][None, :] * rms_scaled(x, self.eps).astype(x.dtype)


class WideRMSNorm(RMSNorm):
    """RMS norm whose product with the weight is computed in float32."""

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), range(x.ndim - 1))
        return (rms_scaled(x, self.eps) * weight).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean) / standard deviation · weight + bias (Ba et al., arXiv:1607.06450), computed in
    float32."""

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
    """Linear layer x @ weight + bias. The weight is [in, out], which is faster for few rows than the [out, in] of
    checkpoints."""

    def __init__(self, in_width: int, out_width: int, dtype: DTypeLike, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((in_width, out_width), dtype))
        self.bias = nnx.Param(jnp.zeros(out_width, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class MLP(nnx.Module):
    """Gated feed-forward layer: of a dense layer, or of the shared experts of a mixture of experts. `activation` maps
    gate and up columns to hidden columns."""

    def __init__(self, width: int, hidden_width: int, dtype: DTypeLike, activation: Callable[[Array], Array] = swiglu):
        self.gate_up_proj = Linear(width, 2 * hidden_width, dtype)
        self.down_proj = Linear(hidden_width, width, dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down_proj(self.activation(self.gate_up_proj(x)))
