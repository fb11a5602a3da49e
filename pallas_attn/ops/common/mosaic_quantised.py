"""8-bit caches in Mosaic GPU kernels: what the tensor cores work in, and bringing it to them.

The tensor cores multiply in float16 here: it holds what e4m3 and int8 do, and two numbers take one instruction (e4m3)
or three (int8). Keys go through registers, which wgmma reads its left operand from; values go back to shared memory,
because wgmma transposes only from there.
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
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float

from pallas_attn.ops.common.mosaic import PER_TOKEN, TILE, Ref, interpreted
from pallas_attn.types import PagedKV, ScaleLayout

QUERY_SCALE = 2.0**-4
"""bfloat16 queries are multiplied with this: float16 then holds those from 2**-13 to 2**20 exactly, and saturates."""

WIDENED_COLUMNS = 64
"""Columns of an 8-bit tile that are in registers at once."""

INT8_PAIR = """
{
.reg .b32 biased, exponents, halves, bias;
xor.b32 biased, $1, 0x8080;
mov.b32 exponents, 0x64646464;
prmt.b32 halves, biased, exponents, 0x4140;
mov.b32 bias, 0x64806480;
sub.f16x2 $0, halves, bias;
}
"""
"""Two int8 to float16: byte b, with its sign flipped b + 128, is the mantissa of 0x6400 + b + 128, which is the float16
1024 + b + 128.
"""


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
    by_channel = scale_layout(kv) == "channel"
    if kv.k_scale is None or (q.dtype == jnp.float16 and not by_channel):
        return [q], 1.0
    exact, limit = q.astype(jnp.float32), float(jnp.finfo(jnp.float16).max)
    if not by_channel:
        return [jnp.clip(exact * QUERY_SCALE, -limit, limit).astype(jnp.float16)], QUERY_SCALE
    exact *= jnp.repeat(kv.k_scale, q.shape[2] // kv.k.shape[1], axis=0)[None, None]
    exact = jnp.clip(exact, -limit, limit)
    high = exact.astype(jnp.float16)
    return [high, (exact - high.astype(jnp.float32)).astype(jnp.float16)], 1.0


# --- in the kernel


def multiply_widened(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """a @ (bs[0] + bs[1] + ...)ᵀ in float32, for an 8-bit a [M, K] and float16 bs [N, K] in shared memory.

    The interpreter has no wgmma of registers.
    """
    parts = [pl.ds(i, WIDENED_COLUMNS) for i in range(0, a.shape[1], WIDENED_COLUMNS)]
    if interpreted():
        products = [
            jnp.dot(_load_widened(a.at[:, part]), b.at[:, part][...].T, preferred_element_type=jnp.float32)
            for b in bs
            for part in parts
        ]
        return sum(products[1:], start=products[0])

    def accumulate(total: Ref) -> jax.Array:
        for part in parts:
            widened = _load_widened(a.at[:, part])
            for b in bs:
                plgpu.wgmma(total, widened, b.at[:, part].transpose((1, 0)))
            plgpu.wgmma_wait(0)  # or the next part would need registers of its own
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], bs[0].shape[0]), jnp.float32))


def widen(narrow: Ref, wide: Ref) -> None:
    """Writes an 8-bit tile to a float16 one, both in shared memory."""
    for i in range(0, wide.shape[1], WIDENED_COLUMNS):
        part = pl.ds(i, WIDENED_COLUMNS)
        wide.at[:, part][...] = _load_widened(narrow.at[:, part])


def _load_widened(ref: Ref) -> jax.Array:
    narrow = plgpu.load(ref, layout=TILE, optimized=False)
    if narrow.dtype != jnp.int8 or interpreted():
        return narrow.astype(jnp.float16)

    # The compiler would convert int8 one by one, with an instruction of a fraction of the rate.
    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(narrow.shape, jnp.float16, layout=TILE))
    def widened(_: Any, narrow: Any) -> Any:
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        registers = np.empty_like(narrow.registers)
        for i, pair in np.ndenumerate(narrow.registers):
            bits = arith.extui(i32, mgpu.utils.bitcast(pair, i16))
            wide: Any = llvm.inline_asm(i32, [bits], INT8_PAIR, "=r,r")
            registers[i] = mgpu.utils.bitcast(wide, ir.VectorType.get((2,), ir.F16Type.get()))
        return mgpu.FragmentedArray(_registers=registers, _layout=narrow.layout, _is_signed=None)

    return widened(narrow)


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
