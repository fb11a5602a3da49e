"""Numbers of a warpgroup's threads, and what threads learn of each other's through shuffles and shared memory.

There are a multiple of 128 of them, and the i-th is thread i % 128's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.ops.common.mosaic import Ref, interpreted, unknown_zero
from pallas_attn.ops.common.mosaic_rows import RowLayout

LANES = RowLayout(threads=1, vector=1)

WARP = 32

COMPARED = 32
"""Numbers that `count_larger` reads in a turn of its loop."""


def barrier() -> None:
    """Waits for all threads, which see then what each has written to shared memory. `plgpu.commit_smem` has copies see
    it too, and that takes longer.
    """
    if interpreted():
        return

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def put_sums(to: Ref, numbers: jax.Array) -> None:
    """Writes the sum of the numbers of each warp."""
    if interpreted():
        _put_last(to, _warp_prefix_sums(numbers))
        return

    def reduce(register: ir.Value) -> ir.Value:
        return mgpu.utils.redux(register, arith.constant(ir.IntegerType.get_signless(32), -1), nvvm.ReductionKind.ADD)

    _put_last(to, _by_register(reduce, numbers))


def take_sum(of_warps: Ref) -> jax.Array:
    """The sum of all numbers, from what `put_sums` wrote before a barrier, or `prefix_sums` to its scratch."""
    zero = unknown_zero()  # constants are no indices
    return functools.reduce(jnp.add, [of_warps[zero + i] for i in range(of_warps.shape[0])])


def prefix_sums(numbers: jax.Array, scratch: Ref) -> jax.Array:
    """Of each number and those before it. Takes two barriers: who still reads `scratch`, a number a warp, has done so,
    then the sum of each warp is there.
    """
    count, zero = numbers.shape[0], unknown_zero()
    sums = _warp_prefix_sums(numbers)
    barrier()
    _put_last(scratch, sums)
    barrier()
    place = LANES.iota(count)
    for warp in range(count // WARP - 1):
        sums += jnp.where(place >= (warp + 1) * WARP, LANES.filled(scratch[zero + warp], count), 0)
    return sums


def count_larger(numbers: Ref, than: jax.Array) -> jax.Array:
    """How many of the numbers, a multiple of 32 of them, are larger than each."""
    if interpreted():
        return jnp.sum(numbers[...][None, :] > than[:, None], axis=1, dtype=jnp.int32)
    each = LANES.per_row

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), each, each),
        return_type=plgpu.ShapeDtypeStruct(than.shape, jnp.int32, layout=each),
    )
    def add(_: Any, some: ir.Value, than: Any, counts: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pointer, registers = mgpu.utils.memref_ptr(some), counts.registers.copy()
        for i in range(0, COMPARED, 4):
            at = mgpu.utils.getelementptr(pointer, [i], i32)
            four = llvm.load(ir.VectorType.get((4,), i32), at, alignment=16)
            for j in range(4):
                for place, register in np.ndenumerate(than.registers):
                    number = vector.broadcast(register.type, vector.extract(four, [], [j]))
                    is_larger = arith.cmpi(arith.CmpIPredicate.sgt, number, register)
                    registers[place] = arith.addi(registers[place], arith.extui(register.type, is_larger))
        return mgpu.FragmentedArray(_registers=registers, _layout=counts.layout, _is_signed=True)

    def step(i: Any, counts: jax.Array) -> jax.Array:
        return add(numbers.at[pl.ds(i * COMPARED, COMPARED)], than, counts)

    return lax.fori_loop(0, numbers.shape[0] // COMPARED, step, LANES.filled(jnp.int32(0), than.shape[0]))


def _put_last(to: Ref, numbers: jax.Array) -> None:
    """Writes the last number of each warp."""
    place = LANES.iota(numbers.shape[0])
    LANES.put(to, jnp.where(place % WARP == WARP - 1, lax.div(place, WARP), -1), numbers)


def _by_register(function: Any, numbers: jax.Array) -> jax.Array:
    """A function of a number of each thread."""
    each = LANES.per_row

    @plgpu.inline_mgpu(arg_types=(each,), return_type=plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=each))
    def apply(_: Any, numbers: Any) -> Any:
        registers = np.empty_like(numbers.registers)
        for place, register in np.ndenumerate(numbers.registers):
            registers[place] = vector.broadcast(register.type, function(vector.extract(register, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=numbers.is_signed)

    return apply(numbers)


def _warp_prefix_sums(numbers: jax.Array) -> jax.Array:
    """In every round each takes in the one twice as far back as in the round before (Hillis and Steele, 1986)."""
    if interpreted():
        return jnp.cumsum(numbers.reshape(-1, WARP), axis=1, dtype=jnp.int32).reshape(-1)

    def sums(number: ir.Value) -> ir.Value:
        i32 = ir.IntegerType.get_signless(32)
        all_lanes, zero = arith.constant(i32, -1), arith.constant(i32, 0)
        lane = arith.andi(mgpu.utils.thread_idx(), arith.constant(i32, WARP - 1))
        for far in (arith.constant(i32, 2**i) for i in range(WARP.bit_length() - 1)):
            other = nvvm.shfl_sync(all_lanes, number, far, zero, nvvm.ShflKind.up)
            is_there = arith.cmpi(arith.CmpIPredicate.uge, lane, far)
            number = arith.addi(number, arith.select(is_there, other, zero))
        return number

    return _by_register(sums, numbers)
