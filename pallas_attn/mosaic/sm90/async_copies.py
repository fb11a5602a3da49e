"""Barriers of what a warpgroup's threads copy to shared memory asynchronously.

Such a barrier completes once the copies of all threads have arrived, by themselves, and each warp after what it has
stored besides. Pallas has none that copies of threads arrive at, so these are ours, in plain shared memory. In the
interpreter copies are done at once, and barriers are those of Pallas.
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

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.dequantise import i32

THREADS, WARPS = 128, 4
"""Threads and warps of a warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class CopyBarriers:
    """Barriers of parts that a warpgroup's threads copy.

    Attributes:
      ref: of `types`.
    """

    ref: Any

    @staticmethod
    def types(count: int) -> Any:
        """Scratch type of so many barriers."""
        return plgpu.Barrier(num_barriers=count) if interpreted() else plgpu.SMEM((2 * count,), jnp.int32)

    def begin(self) -> None:
        """Make the barriers; all threads of the kernel call it before they part."""
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

    def _at(self, index: Any) -> Ref:
        return self.ref.at[pl.ds(2 * index, 2)]

    def arrive(self, index: Any) -> None:
        """Tell that the calling warpgroup's threads have started all copies of a part, and stored what goes with it."""
        if interpreted():
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def arrive(_: Any, barrier: ir.Value) -> None:
            one: Any = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)
            address = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(barrier))
            _assembly(ARRIVE, "b,r", one, address)

        arrive(self._at(index))

    def wait(self, index: Any, use: Any) -> None:
        """Wait until a part is there.

        Args:
          use: how often it was before.
        """
        if interpreted():
            plgpu.barrier_wait(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(_: Any, barrier: ir.Value, use: Any) -> None:
            pointer = mgpu.utils.memref_ptr(barrier)
            parity = arith.andi(use.registers.item(), mgpu.c(1, i32()))
            ticks: Any = mgpu.c(10_000_000, i32())
            nvvm.mbarrier_try_wait_parity(pointer, parity, ticks)

        wait(self._at(index), jnp.asarray(use, jnp.int32))


def fence() -> None:
    """Order what threads have read, or copied and waited for, before what tensor cores and the copy engine do next."""
    if interpreted():
        return

    @plgpu.inline_mgpu(arg_types=())
    def fence(_: Any) -> None:
        _assembly("fence.proxy.async.shared::cta;")

    fence()


def _assembly(text: str, constraints: str = "", *operands: ir.Value) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


BEGIN = """
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""

ARRIVE = """
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$1];
bar.warp.sync 0xffffffff;
@$0 mbarrier.arrive.release.cta.shared::cta.b64 _, [$1];
"""
