"""Prefix sums, reductions and ranks over one number per thread of a CTA.

The threads of a warp exchange numbers with shuffles. The warps exchange their results through shared memory. An array
with one number per thread has shape [128] in each warpgroup and layout `PER_THREAD`.
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

from pallas_attn.mosaic.primitives.basics import Ref, interpreted, opaque_zero
from pallas_attn.mosaic.primitives.row_io import THREADS, RowLayout, load_element

LOG2_WARP = 5
WARP = 2**LOG2_WARP

MOST_WARPGROUPS = 8
"""Maximum number of warpgroups of a CTA that uses `Lanes`. They have 32 warps, so each lane of a warp can read the sum
of one warp.
"""

PER_THREAD = RowLayout(threads=1, vector=1)
"""Layout of arrays [128] with a number for each thread of a warpgroup."""

COMPARED = 32
"""Number of values that one iteration of `Lanes.count_larger` compares."""


class Lanes(NamedTuple):
    """Scans and reductions over the threads of a CTA with up to 8 warpgroups (kernel axis "warpgroup").

    Attributes:
      sums: int32 [warps] in shared memory, one result per warp.
      met: barrier at which interpreted warpgroups wait for each other; None on a GPU.
    """

    sums: Any
    met: Any

    @staticmethod
    def types(warpgroups: int) -> Lanes:
        """Scratch types."""
        met = plgpu.Barrier(num_arrivals=warpgroups) if interpreted() else None
        return Lanes(plgpu.SMEM((warpgroups * THREADS // WARP,), jnp.int32), met)

    def number(self) -> jax.Array:
        """Index of each thread in the CTA, int32 [128]."""
        return PER_THREAD.iota(THREADS) + lax.axis_index("warpgroup") * THREADS

    @property
    def threads(self) -> int:
        return self.sums.shape[0] * WARP

    def each_chunk(self, count: int, body: Callable[[jax.Array, Any], Any], carry: Any = None) -> Any:
        """Loop over the numbers 0 to count - 1, with one number per thread in each iteration. Return the last carry.

        Args:
          body: body(numbers, carry) returns the next carry. `numbers` (int32 [128]) has the number of each thread. In
            the last iteration, some numbers may be `count` or larger.
        """
        if count <= self.threads:
            return body(self.number(), carry)
        chunks = pl.cdiv(count, self.threads)
        return lax.fori_loop(0, chunks, lambda i, carry: body(self.number() + i * self.threads, carry), carry)

    def barrier(self) -> None:
        """Synchronize all threads of the CTA. Each thread then sees the other threads' writes to shared memory."""
        if interpreted():
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)
            return

        @plgpu.inline_mgpu()
        def wait(_: Any) -> None:
            gpu.barrier()

        wait()

    def prefix_sums(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return inclusive prefix sums over all threads of the CTA, [128], and the total, [128].

        All threads synchronize twice: before `sums` is overwritten, because other threads may still read the values of
        an earlier call, and after it is written.
        """
        thread = self.number()
        lane, warp = thread & (WARP - 1), thread >> LOG2_WARP
        within = _warp_prefix_sums(numbers)
        self.barrier()
        PER_THREAD.put(self.sums, jnp.where(lane == WARP - 1, warp, -1), within)
        self.barrier()
        warps = self.sums.shape[0]
        sum_of_warp = jnp.where(lane < warps, PER_THREAD.take(self.sums, jnp.minimum(lane, warps - 1)), 0)
        before, total = _warp_sums(jnp.where(lane < warp, sum_of_warp, 0)), _warp_sums(sum_of_warp)
        return within + before, total

    def append(self, sums: Ref, place: jax.Array, numbers: jax.Array, before: jax.Array) -> jax.Array:
        """Write `before` plus inclusive prefix sums of the threads' numbers to sums[place]. Return `before` plus the
        total.

        All threads may read `sums` afterwards.

        Args:
          sums: int32 in shared memory.
          place: int32 [128], index into `sums` for each thread.
          before: int32 [128], the same number in all threads: sum of the numbers of earlier calls.
        """
        within, total = self.prefix_sums(numbers)
        PER_THREAD.put(sums, place, before + within)
        self.barrier()
        return before + total

    def sum(self, numbers: jax.Array) -> jax.Array:
        """Return the sum of all threads' numbers, a scalar. All threads synchronize twice, as in `prefix_sums`."""
        return functools.reduce(jnp.add, self._of_warps(_warp_sums(numbers)))

    def max(self, numbers: jax.Array) -> jax.Array:
        """Return the largest of all threads' numbers, a scalar. All threads synchronize twice, as in `prefix_sums`."""
        return functools.reduce(jnp.maximum, self._of_warps(_warp_max(numbers)))

    def _of_warps(self, numbers: jax.Array) -> list[jax.Array]:
        """Return the number of each warp, as scalars. All threads of a warp must hold the same number."""
        thread, zero = self.number(), opaque_zero()  # indexing `sums` needs a traced index, not a Python constant
        self.barrier()
        PER_THREAD.put(self.sums, jnp.where(thread & (WARP - 1) == 0, thread >> LOG2_WARP, -1), numbers)
        self.barrier()
        return [self.sums[zero + i] for i in range(self.sums.shape[0])]

    def count_larger(self, numbers: Ref, own: jax.Array) -> jax.Array:
        """Return for each thread how many entries of `numbers` are larger than its own number, int32 [128].

        Threads of the CTA whose index is n or more get arbitrary counts.

        Args:
          numbers: float32 [n] in shared memory, integers below 2**24; n is a multiple of 32.
          own: float32 [128], integers below 2**24.
        """
        if interpreted():
            return jnp.sum(numbers[...][None, :] > own[:, None], axis=1, dtype=jnp.int32)
        each, count = PER_THREAD.per_row, numbers.shape[0]

        # sub.sat clamps the difference of two integers to 0 or 1, so it is the result of the comparison. Comparing and
        # counting thus takes two float32 additions, which have a higher throughput than integer comparisons.
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
                    total = arith.addf(total, arith.addf(*pairs))  # one dependent addition per four comparisons
                registers[place] = vector.broadcast(register.type, total)
            return mgpu.FragmentedArray(_registers=registers, _layout=larger.layout, _is_signed=None)

        def step(i: Any, larger: jax.Array) -> jax.Array:
            return add(numbers.at[pl.ds(i * COMPARED, COMPARED)], own, larger)

        has_own = lax.axis_index("warpgroup") * THREADS < count
        nothing = PER_THREAD.filled(jnp.float32(0), THREADS)
        return lax.fori_loop(0, jnp.where(has_own, count // COMPARED, 0), step, nothing).astype(jnp.int32)


def segment_of(ends: Ref, count: int, place: jax.Array) -> jax.Array:
    """Return the index of the segment that contains each position, int32 [128]; `count` past the last segment.

    Each round of the search reads three ends and leaves a quarter of the segments.

    Args:
      ends: int32 [count] in shared memory, sorted; segment i ends before position ends[i].
      count: number of segments.
      place: int32 [128], positions.
    """
    step = 4 ** ((count.bit_length() - 1) // 2)  # largest power of 4 that is at most `count`
    if interpreted():
        found = PER_THREAD.filled(jnp.int32(0), THREADS)
        while step:
            ends_at = [found + (i * step - 1) for i in range(1, 4)]
            passed = [(at < count) & (PER_THREAD.take(ends, jnp.minimum(at, count - 1)) <= place) for at in ends_at]
            found += sum(jnp.where(one, step, 0) for one in passed)
            step //= 4
        return found

    # The same search in MLIR. A kernel has up to eight searches, and the lowering of the jax version of a search takes
    # ten times as long.
    def search(ends: ir.Value, place: ir.Value) -> ir.Value:
        found = zero = mgpu.c(0, place.type)
        for length in (step >> shift for shift in range(0, step.bit_length(), 2)):
            of_each = mgpu.c(length, place.type)
            passed = []
            for i in range(1, 4):
                at = arith.addi(found, mgpu.c(i * length - 1, place.type))
                exists = arith.cmpi(arith.CmpIPredicate.slt, at, mgpu.c(count, place.type))
                end = load_element(ends, arith.minsi(at, mgpu.c(count - 1, place.type)))
                is_before = arith.cmpi(arith.CmpIPredicate.sle, end, place)
                passed.append(arith.select(arith.andi(exists, is_before), of_each, zero))
            found = functools.reduce(arith.addi, passed, found)
        return found

    return _by_thread(search, place, ends)


def exclusive_sum(sums: Ref, i: jax.Array) -> jax.Array:
    """Return the i-th exclusive prefix sum for each thread.

    Args:
      sums: inclusive prefix sums in shared memory.
      i: int32 [128].
    """
    return jnp.where(i > 0, PER_THREAD.take(sums, jnp.maximum(i - 1, 0)), 0)


def _warp_prefix_sums(numbers: jax.Array) -> jax.Array:
    """Return inclusive prefix sums within each warp.

    In round i, each lane adds the partial sum of the lane 2**i before it (Hillis and Steele, 1986).
    """
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
    """Return the sum of a warp's numbers in each thread of the warp."""
    if interpreted():
        return jnp.repeat(jnp.sum(numbers.reshape(-1, WARP), axis=1, dtype=jnp.int32), WARP)
    return _by_thread(functools.partial(_reduced, nvvm.ReductionKind.ADD), numbers)


def _warp_max(numbers: jax.Array) -> jax.Array:
    """Return the largest of a warp's numbers in each thread of the warp."""
    if interpreted():
        return jnp.repeat(jnp.max(numbers.reshape(-1, WARP), axis=1), WARP)
    return _by_thread(functools.partial(_reduced, nvvm.ReductionKind.MAX), numbers)


def _reduced(kind: nvvm.ReductionKind, number: ir.Value) -> ir.Value:
    return mgpu.utils.redux(number, arith.constant(number.type, -1), kind)


def _by_thread(function: Callable[..., ir.Value], numbers: jax.Array, *refs: Ref) -> jax.Array:
    """Apply function(*refs, number), which emits MLIR, to the number of each thread."""
    each = PER_THREAD.per_row

    @plgpu.inline_mgpu(
        arg_types=(each, *[plgpu.RefType()] * len(refs)),
        return_type=plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=each),
    )
    def apply(_: Any, numbers: Any, *refs: ir.Value) -> Any:
        registers = np.empty_like(numbers.registers)
        for place, register in np.ndenumerate(numbers.registers):
            registers[place] = vector.broadcast(register.type, function(*refs, vector.extract(register, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=numbers.is_signed)

    return apply(numbers, *refs)
