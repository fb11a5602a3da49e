"""Products of two warpgroups' tensor cores that go on while the threads that started them do something else.

As `mosaic_wgmma`, for products that are queued one after another as their operands arrive: each `start_` is a group of
its own, and `finish` tells how many of those that were started later may still be under way. Registers are made sure of
only where no product that uses them is under way: else the assembler has every product wait for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.ops.common.mosaic import PER_TOKEN, TILE, Ref, interpreted, over_tokens

DEPTH = 16
"""What one instruction sums over, of numbers of 16 bits."""

ACCUMULATOR = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
"""`TILE` with one number a register."""


def operand(row_bytes: int) -> Any:
    """How a reference to 16-bit numbers lies, in rows of so many bytes."""
    return plgpu.RefType((plgpu.TilingTransform((8, row_bytes // 2)), plgpu.SwizzleTransform(row_bytes)))


def start_scores(q: Ref, k: Ref, total: jax.Array | None, row_bytes: int) -> jax.Array:
    """Starts total + q @ kᵀ, for q [64, n] and k [N, n] in shared memory; without a total, it is 0.

    The total may be under way, and nothing may touch the result before `finish`.
    """
    if interpreted():
        product = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # there, threads have read what copies are about to overwrite
        return product if total is None else total + product
    refs, more = (operand(row_bytes),) * 2, () if total is None else (total,)
    shape = plgpu.ShapeDtypeStruct((q.shape[0], k.shape[0]), jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(*refs, *[TILE] * len(more)), return_type=shape)
    def begin(_: Any, q: ir.Value, k: ir.Value, *total: Any) -> Any:
        if not total:
            nvvm.wgmma_fence_aligned()
        (rows, depth), dtype = mma_utils.tiled_memref_shape(q)
        (keys, _), _ = mma_utils.tiled_memref_shape(k)
        left, right = _left(q, row_bytes), _right(mgpu.memref_transpose(k, (1, 0, 3, 2)), keys, row_bytes)
        sums = list(total[0].to_layout(ACCUMULATOR).registers.flat) if total else []
        for a, b in zip(_steps(*left, depth, row_bytes), _steps(*right, depth, row_bytes), strict=True):
            sums = _instruction(sums, [a], b, columns=keys, dtype=dtype, transposed=False)
        _assembly("wgmma.commit_group.sync.aligned;")
        return _fragments(sums, (rows, keys)).to_layout(fragmented_array.WGMMA_LAYOUT)

    return begin(q, k, *more)


def start_values(p: jax.Array | Ref, v: Ref, total: jax.Array, row_bytes: int) -> jax.Array:
    """Starts total + p @ v, for p [64, N] in registers or shared memory and v [chunks, N, columns] in shared memory.

    Nothing may touch the result, nor change p, before `finish`.
    """
    in_registers = isinstance(p, jax.Array)
    if interpreted():
        values = v[...].transpose(1, 0, 2).reshape(v.shape[1], -1)
        product = jnp.dot(p if in_registers else p[...], values, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return total + product
    arg_types = TILE if in_registers else operand(row_bytes), operand(row_bytes), TILE

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE))
    def begin(_: Any, p: Any, v: ir.Value, total: Any) -> Any:
        total = total.to_layout(ACCUMULATOR)
        if in_registers:
            p, total = fragmented_array.optimization_barrier(p, total)
        else:
            total = fragmented_array.optimization_barrier(total)
        nvvm.wgmma_fence_aligned()
        v = _side_by_side(v)
        (keys, values), dtype = mma_utils.tiled_memref_shape(v)
        lefts = _words(p) if in_registers else [[a] for a in _steps(*_left(p, row_bytes), keys, row_bytes)]
        sums = list(total.registers.flat)
        for a, b in zip(lefts, _steps(*_right(v, values, row_bytes), keys, row_bytes), strict=True):
            sums = _instruction(sums, a, b, columns=values, dtype=dtype, transposed=True)
        _assembly("wgmma.commit_group.sync.aligned;")
        return _fragments(sums, total.shape).to_layout(fragmented_array.WGMMA_LAYOUT)

    return begin(p, v, total)


def finish(product: jax.Array, *, under_way: int) -> jax.Array:
    """What a product has become, once at most so many are under way that were started after it."""
    if interpreted():
        return product

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=TILE))
    def wait(_: Any, product: Any) -> Any:
        _assembly(f"wgmma.wait_group.sync.aligned {under_way};")
        return fragmented_array.optimization_barrier(product)

    return wait(product)


def shrink(total: jax.Array, factor: jax.Array) -> jax.Array:
    """total [64, n] times factor [64], or as it is where all factors of a warp are 1."""
    if interpreted():
        return total * over_tokens(factor, total.shape)

    @plgpu.inline_mgpu(
        arg_types=(TILE, PER_TOKEN), return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE)
    )
    def multiply(_: Any, total: Any, factor: Any) -> Any:
        total = total.to_layout(ACCUMULATOR)
        halves = [_number(register) for register in factor.registers.flat]
        sums = list(total.registers.flat)
        count = len(sums)
        products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i // 2 % 2}; " for i in range(count))
        text = (
            "{ .reg .pred p, q; "
            f"setp.eq.f32 p, ${2 * count}, 0f3F800000; setp.eq.and.f32 q, ${2 * count + 1}, 0f3F800000, p; "
            "vote.sync.all.pred p, q, 0xffffffff; @p bra.uni done; "
            f"{products}done: }}"
        )
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * 2
        return _fragments(_many(sums, text, constraints, [*sums, *halves]), total.shape).to_layout(
            fragmented_array.WGMMA_LAYOUT
        )

    return multiply(total, factor)


# --- in the language of the compiler


def _side_by_side(chunks: ir.Value) -> ir.Value:
    """Swizzled tiles of [chunks, rows, columns], either one chunk or one tile wide, as those of [rows, all columns]."""
    everything = slice(None)
    if ir.MemRefType(chunks.type).shape[0] == 1:
        return mgpu.memref_slice(chunks, (0,))
    return mgpu.memref_transpose(mgpu.memref_slice(chunks, (everything, everything, 0)), (1, 0, 2, 3))


def _left(ref: ir.Value, row_bytes: int) -> tuple[Any, int, int]:
    """Descriptor of a left operand, and how many bytes on the next step and the next row of a swizzled tile begin."""
    (base, (_, (step,))), (_, chunk), _ = mma_utils.create_descriptor(
        ref, swizzle=row_bytes, large_tile=(64, row_bytes // 2), group_size=(64, row_bytes // 2), logical_k_major=False
    )
    return base, step, chunk


def _right(ref: ir.Value, columns: int, row_bytes: int) -> tuple[Any, int, int]:
    """The same for a right operand."""
    depth = row_bytes // 2
    (base, (_, (step,))), (_, chunk), _ = mma_utils.create_descriptor(
        ref, swizzle=row_bytes, large_tile=(depth, depth), group_size=(depth, columns), logical_k_major=True
    )
    return base, step, chunk


def _steps(base: Any, step: int, chunk: int, depth: int, row_bytes: int) -> list[ir.Value]:
    """Descriptors of what each instruction takes, of so many numbers to sum over."""
    offsets = [i * chunk + j * step for i, j in np.ndindex(depth // (row_bytes // 2), row_bytes // 2 // DEPTH)]
    wide = ir.IntegerType.get_signless(64)
    return [arith.addi(base, mgpu.c(mma_utils.encode_addr(offset), wide)) for offset in offsets]


def _words(p: Any) -> list[list[ir.Value]]:
    """Registers of a left operand, of each instruction."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return [
        [vector.extract(vector.bitcast(word, r), [], [0]) for r in p[:, i : i + DEPTH].registers.flat]
        for i in range(0, p.shape[1], DEPTH)
    ]


def _instruction(
    total: Sequence[ir.Value], left: Sequence[ir.Value], right: ir.Value, *, columns: int, dtype: Any, transposed: bool
) -> list[ir.Value]:
    """One wgmma, added to a total, or to nothing if that has no registers.

    Args:
      left: the descriptor of a left operand, or the registers that hold one.
      transposed: whether neighbours in the right operand are columns, and not what is summed over.
    """
    count = columns // 2
    places = iter(f"${i}" for i in range(2 * count + len(left) + 1))
    results = [next(places) for _ in range(count)]
    for _ in total:
        next(places)
    a = [next(places) for _ in left]
    in_registers = len(left) > 1
    operand, flags = (f"{{{', '.join(a)}}}", "") if in_registers else (a[0], "0, ")
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(total))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH}.f32.{dtype}.{dtype} "
        f"{{{', '.join(results)}}}, {operand}, {next(places)}, p, 1, 1, {flags}{int(transposed)}; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(len(total))] + ["r" if in_registers else "l"] * len(left)
    return _many([None] * count, text, [*constraints, "l"], [*total, *left, right])


def _many(results: Sequence[Any], text: str, constraints: Sequence[str], operands: Sequence[ir.Value]) -> Any:
    """Inline assembly with so many float32 results."""
    number = ir.VectorType.get((1,), ir.F32Type.get())
    struct: Any = llvm.inline_asm(
        llvm.StructType.get_literal([number] * len(results)),
        list(operands),
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(len(results))]


def _fragments(registers: Sequence[ir.Value], shape: tuple[int, ...]) -> Any:
    array = np.empty(ACCUMULATOR.registers_shape(shape), dtype=object)
    array.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=ACCUMULATOR, _is_signed=None)


def _number(register: ir.Value) -> Any:
    """The only element of a register."""
    return vector.extract(register, [], [0])


def _assembly(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
