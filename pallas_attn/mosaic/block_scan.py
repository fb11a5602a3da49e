"""A number for each thread of a kernel's program, and what threads learn of each other's through shuffles and shared
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, vector

from pallas_attn.mosaic.basics import Ref, interpreted, unknown_zero
from pallas_attn.mosaic.row_layout import THREADS, RowLayout

WARP = 32

MOST_WARPGROUPS = 8
"""Their warps are as many as a warp has threads, which sum up what all warps have."""

PER_THREAD = RowLayout(threads=1, vector=1)
"""How the numbers of a warpgroup lie, [128]."""

COMPARED = 32
"""Numbers that `Lanes.count_larger` reads in a turn of its loop."""


class Lanes(NamedTuple):
    """The threads of a program, of up to 8 warpgroups, its axis "warpgroup".

    Attributes:
      sums: int32 [warps] in shared memory.
      met: a barrier with which warpgroups wait for each other where they are interpreted; None where they are not.
    """

    sums: Any
    met: Any

    @staticmethod
    def types(warpgroups: int) -> Lanes:
        met = plgpu.Barrier(num_arrivals=warpgroups) if interpreted() else None
        return Lanes(plgpu.SMEM((warpgroups * THREADS // WARP,), jnp.int32), met)

    def number(self) -> jax.Array:
        """int32 [128]: which of all threads each is."""
        return PER_THREAD.iota(THREADS) + lax.axis_index("warpgroup") * THREADS

    @property
    def threads(self) -> int:
        return self.sums.shape[0] * WARP

    def each_chunk(self, count: int, body: Callable[[jax.Array, Any], Any], carry: Any = None) -> Any:
        """body(numbers, carry) -> carry for each chunk of 0, 1, ... and at least `count` - 1, a number for each thread;
        what the last one returns.
        """
        if count <= self.threads:
            return body(self.number(), carry)
        chunks = pl.cdiv(count, self.threads)
        return lax.fori_loop(0, chunks, lambda i, carry: body(self.number() + i * self.threads, carry), carry)

    def barrier(self) -> None:
        """Waits for all threads, which see then what each has written to shared memory."""
        if interpreted():
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)
            return

        @plgpu.inline_mgpu()
        def wait(_: Any) -> None:
            gpu.barrier()

        wait()

    def prefix_sums(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each thread's number and those before it; and the sum of all, for each. Takes two barriers: who still
        reads `sums` has done so, then they are there.
        """
        thread = self.number()
        lane, warp = thread % WARP, thread // WARP
        within = _warp_prefix_sums(numbers)
        self.barrier()
        PER_THREAD.put(self.sums, jnp.where(lane == WARP - 1, warp, -1), within)
        self.barrier()
        warps = self.sums.shape[0]
        sum_of_warp = jnp.where(lane < warps, PER_THREAD.take(self.sums, jnp.minimum(lane, warps - 1)), 0)
        before, of_all = _warp_sums(jnp.where(lane < warp, sum_of_warp, 0)), _warp_sums(sum_of_warp)
        return within + before, of_all

    def append(self, sums: Ref, place: jax.Array, numbers: jax.Array, before: jax.Array) -> jax.Array:
        """Writes prefix sums of threads' numbers to these places of `sums`, on top of the sum `before`; returns that
        with all of them. All threads may read what is written.
        """
        within, of_all = self.prefix_sums(numbers)
        PER_THREAD.put(sums, place, before + within)
        self.barrier()
        return before + of_all

    def sum(self, numbers: jax.Array) -> jax.Array:
        """Of all threads' numbers, one. Takes two barriers like `prefix_sums`."""
        return functools.reduce(jnp.add, self._of_warps(_warp_sums(numbers)))

    def max(self, numbers: jax.Array) -> jax.Array:
        """The largest of all threads' numbers, in the same way."""
        return functools.reduce(jnp.maximum, self._of_warps(_warp_max(numbers)))

    def _of_warps(self, numbers: jax.Array) -> list[jax.Array]:
        """One for each warp, of whose threads each has it."""
        thread, zero = self.number(), unknown_zero()  # constants are no indices
        self.barrier()
        PER_THREAD.put(self.sums, jnp.where(thread % WARP == 0, thread // WARP, -1), numbers)
        self.barrier()
        return [self.sums[zero + i] for i in range(self.sums.shape[0])]

    def count_larger(self, numbers: Ref, own: jax.Array) -> jax.Array:
        """How many of the numbers in shared memory, a multiple of 32 of them, are larger than each thread's own; of
        threads past as many, anything.

        Args:
          numbers, own: float32 [n] and [128], whole numbers below 2**24. A difference of those, saturated, is 1 or 0:
            two instructions a comparison, of the kind that multiprocessors do most of at a time.
        """
        if interpreted():
            return jnp.sum(numbers[...][None, :] > own[:, None], axis=1, dtype=jnp.int32)
        each, count = PER_THREAD.per_row, numbers.shape[0]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), each, each),
            return_type=plgpu.ShapeDtypeStruct(own.shape, jnp.float32, layout=each),
        )
        def add(_: Any, some: ir.Value, own: Any, larger: Any) -> Any:
            f32, pointer = ir.F32Type.get(), mgpu.utils.memref_ptr(some)
            registers = np.empty_like(larger.registers)
            for place, register in np.ndenumerate(larger.registers):
                mine, total = (vector.extract(x, [], [0]) for x in (own.registers[place], register))
                for i in range(0, COMPARED, 4):
                    at = mgpu.utils.getelementptr(pointer, [i], f32)
                    four = llvm.load(ir.VectorType.get((4,), f32), at, alignment=16)
                    others = (vector.extract(four, [], [j]) for j in range(4))
                    ones = [mgpu.utils.inline_ptx("sub.sat.f32 $0, $1, $2;", x, mine, result_types=f32) for x in others]
                    pairs = [arith.addf(*ones[j : j + 2]) for j in (0, 2)]
                    total = arith.addf(total, arith.addf(*pairs))  # waits once for four of them
                registers[place] = vector.broadcast(register.type, total)
            return mgpu.FragmentedArray(_registers=registers, _layout=larger.layout, _is_signed=None)

        def step(i: Any, larger: jax.Array) -> jax.Array:
            return add(numbers.at[pl.ds(i * COMPARED, COMPARED)], own, larger)

        has_own = lax.axis_index("warpgroup") * THREADS < count
        nothing = PER_THREAD.filled(jnp.float32(0), THREADS)
        return lax.fori_loop(0, jnp.where(has_own, count // COMPARED, 0), step, nothing).astype(jnp.int32)


def find(ends: Ref, count: int, place: jax.Array) -> jax.Array:
    """The stretch that covers each place, by where `count` of them end, in order; `count` for places past the end. Each
    round reads three ends and leaves a quarter.
    """
    found = PER_THREAD.filled(jnp.int32(0), THREADS)
    step = 4 ** ((count.bit_length() - 1) // 2)  # the largest power of 4 that is not larger
    while step:
        ends_at = [found + (i * step - 1) for i in range(1, 4)]
        passed = [(at < count) & (PER_THREAD.take(ends, jnp.minimum(at, count - 1)) <= place) for at in ends_at]
        found += sum(jnp.where(one, step, 0) for one in passed)
        step //= 4
    return found


def sum_before(sums: Ref, i: jax.Array) -> jax.Array:
    """By prefix sums: the sum of all that come before number i."""
    return jnp.where(i > 0, PER_THREAD.take(sums, jnp.maximum(i - 1, 0)), 0)


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

    return _by_thread(sums, numbers)


def _warp_sums(numbers: jax.Array) -> jax.Array:
    """Of a warp's numbers, for each of its threads."""
    if interpreted():
        return jnp.repeat(jnp.sum(numbers.reshape(-1, WARP), axis=1, dtype=jnp.int32), WARP)
    return _by_thread(functools.partial(_reduced, nvvm.ReductionKind.ADD), numbers)


def _warp_max(numbers: jax.Array) -> jax.Array:
    """The largest of a warp's numbers, for each of its threads."""
    if interpreted():
        return jnp.repeat(jnp.max(numbers.reshape(-1, WARP), axis=1), WARP)
    return _by_thread(functools.partial(_reduced, nvvm.ReductionKind.MAX), numbers)


def _reduced(kind: nvvm.ReductionKind, number: ir.Value) -> ir.Value:
    return mgpu.utils.redux(number, arith.constant(number.type, -1), kind)


def _by_thread(function: Callable[[ir.Value], ir.Value], numbers: jax.Array) -> jax.Array:
    each = PER_THREAD.per_row

    @plgpu.inline_mgpu(arg_types=(each,), return_type=plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=each))
    def apply(_: Any, numbers: Any) -> Any:
        registers = np.empty_like(numbers.registers)
        for place, register in np.ndenumerate(numbers.registers):
            registers[place] = vector.broadcast(register.type, function(vector.extract(register, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=numbers.is_signed)

    return apply(numbers)
