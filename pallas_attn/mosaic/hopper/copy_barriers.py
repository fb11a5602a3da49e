"""Barriers that complete when `cp.async` copies have arrived in shared memory.

Pallas has no barriers for `cp.async`, the asynchronous copy instruction of single threads. This module stores mbarrier
objects in an int32 array in shared memory, and uses them with inline PTX. One warpgroup copies and arrives; other
warpgroups wait. Interpreted kernels copy synchronously and use Pallas barriers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import i32

THREADS, WARPS = 128, 4
"""Threads and warps of a warpgroup."""


@dataclasses.dataclass(frozen=True)
class CopyBarriers:
    """An array of barriers for the `cp.async` copies of one warpgroup.

    A phase of a barrier completes when the copies that the 128 threads started before `arrive` have completed, and the
    four warps have called `arrive`.

    Attributes:
      ref: scratch of type `types`.
    """

    ref: Any

    @staticmethod
    def types(count: int) -> Any:
        """Scratch type of `count` barriers."""
        return plgpu.Barrier(num_barriers=count) if interpreted() else plgpu.SMEM((2 * count,), jnp.int32)

    def begin(self) -> None:
        """Initialize the barriers. All threads of the CTA must call this, before the code of the warpgroups
        diverges.
        """
        if interpreted():
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def begin(_: Any, ref: ir.Value) -> None:
            first, i64 = mgpu.utils.memref_ptr(ref), ir.IntegerType.get_signless(64)
            one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.BLOCK)
            arrivals: Any = mgpu.c(THREADS + WARPS, i32())
            for i in range(ir.MemRefType(ref.type).shape[0] // 2):
                nvvm.mbarrier_init(mgpu.utils.getelementptr(first, [i], i64), arrivals, predicate=one)
            _assembly(BEGIN)

        begin(self.ref)

    def arrive(self, index: Any) -> None:
        """Arrive at barrier `index`, with the copies that the calling warpgroup has started since its last arrival.

        Ordinary stores to shared memory before this call are also visible to threads that wait.
        """
        if interpreted():
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def arrive(_: Any, barrier: ir.Value) -> None:
            one: Any = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)
            _assembly(ARRIVE, "b,r", one, llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(barrier)))

        arrive(self._at(index))

    def wait(self, index: Any, use: Any) -> None:
        """Wait until the phase number `use` of barrier `index` has completed. Phases are numbered from 0."""
        if interpreted():
            plgpu.barrier_wait(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def wait(_: Any, barrier: ir.Value, use: Any) -> None:
            pointer = mgpu.utils.memref_ptr(barrier)
            parity = arith.andi(use.registers.item(), mgpu.c(1, i32()))
            ticks: Any = mgpu.c(10_000_000, i32())
            nvvm.mbarrier_try_wait_parity(pointer, parity, ticks)

        wait(self._at(index), jnp.asarray(use, jnp.int32))

    def _at(self, index: Any) -> Ref:
        return self.ref.at[pl.ds(2 * index, 2)]


def see_copies() -> None:
    """Issue a proxy fence: earlier shared-memory accesses by threads and `cp.async` precede later accesses by tensor
    cores and TMA.
    """
    if interpreted():
        return

    @plgpu.inline_mgpu(arg_types=())
    def see(_: Any) -> None:
        _assembly(SEE_COPIES)

    see()


def _assembly(text: str, constraints: str = "", *operands: ir.Value) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


BEGIN = """
fence.mbarrier_init.release.cluster;
barrier.cta.sync.aligned 0;
"""

ARRIVE = """
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$1];
bar.warp.sync 0xffffffff;
@$0 mbarrier.arrive.release.cta.shared::cta.b64 _, [$1];
"""

SEE_COPIES = "fence.proxy.async.shared::cta;"
