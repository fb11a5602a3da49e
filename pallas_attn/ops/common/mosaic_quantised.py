"""8-bit caches in Mosaic GPU kernels: what the tensor cores work in, and bringing it to them.

The tensor cores multiply 16-bit numbers here: float16, which holds what e4m3 does, or bfloat16, which holds what int8
does; both conversions are a few instructions for several numbers. Keys go through registers, which wgmma reads its left
operand from; values go back to shared memory, because wgmma transposes only from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Float

from pallas_attn.ops.common.mosaic import PER_TOKEN, TILE, Ref, interpreted
from pallas_attn.types import PagedKV, ScaleLayout

FP8_QUERY_SCALE = 2.0**-4
"""bfloat16 queries over an fp8 cache are multiplied with this: 2**-20 to 2**20 is then well within float16."""

WIDENED_COLUMNS = 64
"""Columns of an 8-bit tile that are in registers at once."""


# --- before the kernel


def scale_layout(kv: PagedKV) -> ScaleLayout:
    """Which scales a cache has."""
    if kv.k_scale is None:
        return None
    match kv.k_scale.ndim:
        case 1:
            return "head"
        case 2:
            return "channel"
        case _:
            return kv.k_scale.shape[-1]


def query_terms(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Queries as a sum of terms the tensor cores can multiply with the cache, and what they were multiplied with.

    One term where it holds them exactly. Scales of keys by channel are multiplied in, and take two: the LSE would show
    their rounding.
    """
    if kv.k_scale is None:
        return [q], 1.0
    dtype = jnp.dtype(jnp.bfloat16 if kv.k.dtype == jnp.int8 else jnp.float16)
    by_channel = scale_layout(kv) == "channel"
    if q.dtype == dtype and not by_channel:
        return [q], 1.0
    exact = q.astype(jnp.float32)
    if dtype == jnp.float16 and not by_channel:
        limit = float(jnp.finfo(dtype).max)
        return [jnp.clip(exact * FP8_QUERY_SCALE, -limit, limit).astype(dtype)], FP8_QUERY_SCALE
    if by_channel:
        exact *= jnp.repeat(kv.k_scale, q.shape[2] // kv.k.shape[1], axis=0)[None, None]
    high = exact.astype(dtype)
    return [high, (exact - high.astype(jnp.float32)).astype(dtype)], 1.0


# --- in the kernel


def multiply_widened(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """a @ (bs[0] + bs[1] + ...)ᵀ in float32, for an 8-bit a [M, K] and 16-bit bs [N, K] in shared memory.

    The interpreter has no wgmma of registers.
    """
    parts = [pl.ds(i, WIDENED_COLUMNS) for i in range(0, a.shape[1], WIDENED_COLUMNS)]
    if interpreted():
        products = [
            jnp.dot(_load_widened(a.at[:, part], b.dtype), b.at[:, part][...].T, preferred_element_type=jnp.float32)
            for b in bs
            for part in parts
        ]
        return sum(products[1:], start=products[0])

    def accumulate(total: Ref) -> jax.Array:
        for part in parts:
            widened = plgpu.layout_cast(_load_widened(a.at[:, part], bs[0].dtype), TILE)
            for b in bs:
                plgpu.wgmma(total, widened, b.at[:, part].transpose((1, 0)))
            plgpu.wgmma_wait(0)  # or the next part would need registers of its own
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], bs[0].shape[0]), jnp.float32))


def widen(narrow: Ref, wide: Ref) -> None:
    """Writes an 8-bit tile to a 16-bit one, both in shared memory."""
    for i in range(0, wide.shape[1], WIDENED_COLUMNS):
        part = pl.ds(i, WIDENED_COLUMNS)
        wide.at[:, part][...] = _load_widened(narrow.at[:, part], wide.dtype)


def _load_widened(ref: Ref, dtype: Any) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)


def load_per_token(ref: Ref, groups: int, group_tokens: int) -> jax.Array:
    """Spreads values of groups of tokens over the tokens: ref [n, at least `groups`] in shared memory holds those of n
    stretches of groups · group_tokens tokens; returns [n · groups · group_tokens], in layout PER_TOKEN.

    Pallas has no loads by index.
    """
    tokens = ref.shape[0] * groups * group_tokens
    if interpreted():
        return jnp.repeat(ref[...][:, :groups], group_tokens, axis=1).reshape(tokens)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((tokens,), jnp.float32, layout=PER_TOKEN)
    )
    def load(_: Any, ref: ir.Value) -> Any:
        size = mgpu.c(group_tokens, ir.IndexType.get())
        stretch = mgpu.c(groups * group_tokens, ir.IndexType.get())
        layout = mgpu.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((tokens,)), dtype=object)
        for i, (token,) in zip(np.ndindex(registers.shape), layout.thread_idxs((tokens,)), strict=True):
            group = arith.divui(arith.remui(token, stretch), size)
            value = memref.load(ref, [arith.divui(token, stretch), group])
            registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)
