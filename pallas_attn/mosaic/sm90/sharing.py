"""Tiles of which both programs of a cluster store a share, each to its own shared memory and to the other's.

A barrier of such a part completes once its own program has stored its share and said how many bytes come from the other
one, and those are there. Pallas has stores to another program (`async_store_smem`), but with them every thread arrives
at the other's barrier, after a fence of the whole GPU. So these barriers are ours, in plain shared memory. A cluster is
all of a kernel's programs along its only cluster axis, and has two.

The interpreter has no memory of other programs: there each stores everything, and barriers are those of Pallas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.dequantise import i32
from pallas_attn.mosaic.tiles import operand_ref

SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class PartBarriers:
    """Barriers of parts that a program stores, alone or with the other one of its cluster.

    Attributes:
      ref: of `types`.
      shared: whether both programs of a cluster store to each of them.
    """

    ref: Any
    shared: bool

    @staticmethod
    def types(count: int, *, shared: bool) -> Any:
        """Scratch type of so many barriers."""
        return plgpu.SMEM((2 * count,), jnp.int32) if shared else plgpu.Barrier(num_barriers=count)

    def begin(self) -> None:
        """Make the barriers; all threads of the kernel call it before they part."""
        if not self.shared:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def begin(_: Any, ref: ir.Value) -> None:
            first, i64 = mgpu.utils.memref_ptr(ref), ir.IntegerType.get_signless(64)
            one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.BLOCK)
            arrivals: Any = mgpu.c(1, i32())
            for i in range(ir.MemRefType(ref.type).shape[0] // 2):
                nvvm.mbarrier_init(mgpu.utils.getelementptr(first, [i], i64), arrivals, predicate=one)
            _assembly(BEGIN)

        begin(self.ref)

    def at(self, index: Any) -> Ref:
        """One of the barriers, as those of `store_rows` take it."""
        return self.ref.at[pl.ds(2 * index, 2)]

    def arrive(self, index: Any, others_bytes: int) -> None:
        """Tell that this program has stored its share, and that so many bytes come from the other one. What it stored
        was committed.
        """
        if not self.shared:
            plgpu.barrier_arrive(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def arrive(_: Any, barrier: ir.Value) -> None:
            one: Any = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
            _assembly(ARRIVE, "b,r,r", one, shared_address(barrier), mgpu.c(others_bytes, i32()))

        arrive(self.at(index))

    def wait(self, index: Any, use: Any) -> None:
        """Wait until a part is there.

        Args:
          use: how often it was before.
        """
        if not self.shared:
            plgpu.barrier_wait(self.ref.at[index])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(_: Any, barrier: ir.Value, use: Any) -> None:
            pointer = mgpu.utils.memref_ptr(barrier)
            parity = arith.andi(use.registers.item(), mgpu.c(1, i32()))
            ticks: Any = mgpu.c(10_000_000, i32())
            nvvm.mbarrier_try_wait_parity(pointer, parity, ticks)

        wait(self.at(index), jnp.asarray(use, jnp.int32))


def copy_to_other(rows: Ref, barrier: Ref) -> None:
    """Start copies of rows of a tile to the same place of the other program's, whose barrier counts their bytes.

    Threads that store a row twice wait for the other program's memory; a copy does not. What is copied was committed.

    Args:
      rows: `tiles.operand` [rows, columns], some columns of a tile.
      barrier: of `PartBarriers`.
    """

    @plgpu.inline_mgpu(arg_types=(operand_ref(), plgpu.RefType()))
    def copy(_: Any, rows: ir.Value, barrier: ir.Value) -> None:
        one: Any = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        memref_type = ir.MemRefType(rows.type)
        (row_tile, *_), _ = memref_type.get_strides_and_offset()
        row_tiles, *of_row_tile = memref_type.shape
        copies = [COPY.format(offset=2 * row_tile * i, num_bytes=2 * math.prod(of_row_tile)) for i in range(row_tiles)]
        text = OTHER_PLACES.format(copies="".join(copies))
        _assembly(text, "b,r,r", one, shared_address(rows), shared_address(barrier))

    copy(rows, barrier)


def shared_address(ref: ir.Value) -> ir.Value:
    """Address of a reference to shared memory in this program's window of 32 bits."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def other_program() -> ir.Value:
    """Rank of the other program of a cluster of two."""
    rank: Any = llvm.inline_asm(i32(), [], OTHER, "=r")
    return rank


def store_to_other(words: ir.Value, place: ir.Value, barrier: ir.Value, other: ir.Value) -> None:
    """Store 16 bytes to the other program's shared memory.

    Args:
      words: vector of 16 bytes.
      place, barrier: addresses in this program, of what lies at the same place in the other one.
    """
    words = vector.bitcast(ir.VectorType.get((4,), i32()), words)
    four = [vector.extract(words, [], [i]) for i in range(4)]
    _assembly(STORE, "r,r,r,r,r,r,r", place, *four, barrier, other)


def _assembly(text: str, constraints: str = "", *operands: ir.Value) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


BEGIN = """
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""

ARRIVE = "@$0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;"

OTHER = """
{
.reg .b32 own;
mov.u32 own, %cluster_ctarank;
xor.b32 $0, own, 1;
}
"""

OTHER_PLACES = """
{{
.reg .b32 other, to, barrier;
mov.u32 other, %cluster_ctarank;
xor.b32 other, other, 1;
mapa.shared::cluster.u32 to, $1, other;
mapa.shared::cluster.u32 barrier, $2, other;
{copies}}}
"""

COPY = """\
@$0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[to + {offset}], [$1 + {offset}], {num_bytes}, [barrier];
"""

STORE = """
{
.reg .b32 to, barrier;
mapa.shared::cluster.u32 to, $0, $6;
mapa.shared::cluster.u32 barrier, $5, $6;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {$1, $2, $3, $4}, [barrier];
}
"""
