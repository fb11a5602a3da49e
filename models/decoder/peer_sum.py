"""Sums over the GPUs of one process by a kernel of ours: small ones, whose time is latency.

Each device has an inbox, and all know the addresses of all: memory that XLA takes for constant inputs of a step, and
that only this kernel reads and writes. A program has a piece of the array. It copies the piece into every device's
inbox, tells the program of the same number there, waits until all have told it, and adds up what lies in its own inbox,
in float32 and in the order of the devices, so that all get the same bits.

    device 0    piece ──▶ inbox[0] of 0, 1, ···     signal peers    wait for n - 1 signals    sum of inbox[0 ··· n-1]
    device 1    piece ──▶ inbox[1] of 0, 1, ···     signal peers    wait for n - 1 signals    sum of inbox[0 ··· n-1]

Every byte crosses NVLink once for each peer, and nothing is forwarded. Signals are counted and never taken back, so
that nothing has to be cleared: after a program's call c it has got (c + 1) · (n - 1). Calls take two halves of the
inbox in turn. A call writes to a half that its peers read two calls ago: that all of them have begun the call between,
and so ended that one, is what the call between has waited for. All devices therefore make the same calls in the same
order, one after the other, as they do with collective operations. Programs wait for those of the same number only, and
all are on the device at once, being few.

For XLA this is a kernel like any other. Its own collectives end a CUDA graph, or are captured anew at every run, and a
Mosaic kernel that reaches peers by `plgpu.remote_ref` is told their addresses before every run: 20 us of the host's
time for each of them, and a step has two a layer (benchmarks/log/095).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float, Int32

PROGRAMS = 64
"""Programs at most: fewer than any of these GPUs has multiprocessors."""

THREADS, LOAD_BYTES = 128, 16
"""Threads of a program, and bytes that each loads at once."""

PIECE_BYTES = 16 * 1024
"""Bytes of a program at most."""

COUNTED, ARRIVED, RANK, FIRST = 0, PROGRAMS, 2 * PROGRAMS, 2 * PROGRAMS + 1
"""Places in `PeerMemory.control`."""

CONTROL = 2 * PROGRAMS + 32
"""Numbers of `PeerMemory.control`."""


class PeerMemory(NamedTuple):
    """Memory of a device that others write to, and where that of others is.

    Attributes:
      control: calls of each program so far; signals that each has got; this device's place among those it adds up with,
        and the number of the first of them.
      inbox: pieces of both halves from each device that it adds up with.
      addresses: low and high half of the addresses of `control` and `inbox` of every device, by its number.
    """

    control: Int32[Array, "numbers"]
    inbox: Float[Array, "2 n programs rows columns"]
    addresses: Int32[Array, "devices 2 2"]


class PeerSum(NamedTuple):
    """A call of `peer_sum`.

    Attributes:
      x: this device's part of the sum; `tile_elements` divide its size, and `takes` says whether its bytes are few.
      memory: of the inbox's dtype, x's.
    """

    x: Float[Array, "*dims"]
    memory: PeerMemory


def tile_elements(dtype: Any) -> int:
    """Number of elements that a program loads at once; they divide an array that `peer_sum` takes."""
    return THREADS * LOAD_BYTES // jnp.dtype(dtype).itemsize


def num_programs(size: int, dtype: Any) -> int:
    """Number of programs that divide an array of so many elements in whole tiles."""
    tiles = size // tile_elements(dtype)
    return max(n for n in range(1, PROGRAMS + 1) if tiles % n == 0)


def takes(size: int, dtype: Any) -> bool:
    """Whether `peer_sum` takes an array of so many elements: whole tiles, in pieces that fit the inbox."""
    if size == 0 or size % tile_elements(dtype):
        return False
    return size // num_programs(size, dtype) * jnp.dtype(dtype).itemsize <= PIECE_BYTES


def inbox_shape(devices: int, dtype: Any) -> tuple[int, ...]:
    """Shape of the inbox of each of so many devices."""
    return (2, devices, PROGRAMS, PIECE_BYTES // jnp.dtype(dtype).itemsize // THREADS, THREADS)


def peer_sum(call: PeerSum) -> Float[Array, "*dims"]:
    """Adds up an array over devices that have one another's addresses, each of which calls this.

    Returns:
      The sum, in x's dtype, the same bits on all devices.
    """
    x, memory = call
    programs = num_programs(x.size, x.dtype)
    shape = (x.size // programs // THREADS, THREADS)
    out = plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((programs, *shape), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(plgpu.SMEM(shape, x.dtype), plgpu.Barrier()),
        kernel_name="peer_sum",
    )(x.reshape(programs, *shape), memory)
    return out.reshape(x.shape)


def _kernel(x: Any, memory: PeerMemory, out: Any, piece: Any, landed: Any) -> None:
    program, devices = lax.axis_index("program"), memory.inbox.shape[1]
    calls, inbox = memory.control[COUNTED + program], cast(Any, memory.inbox)
    half = calls & 1
    plgpu.copy_gmem_to_smem(x.at[program], piece, landed)
    plgpu.barrier_wait(landed)
    _exchange(memory, piece, program, calls)
    rows = LOAD_BYTES // x.dtype.itemsize
    layout = plgpu.Layout.WG_STRIDED((rows, THREADS), vec_size=rows)

    def add(tile: Any, _: None) -> None:
        own = pl.ds(tile * rows, rows)

        def load(device: int) -> jax.Array:
            values = plgpu.load(inbox.at[half, device, program, own], layout=layout, optimized=False)
            return values.astype(jnp.float32)

        out.at[program, own][...] = functools.reduce(jnp.add, map(load, range(devices))).astype(out.dtype)

    lax.fori_loop(0, x.shape[1] // rows, add, None)


SCALAR = plgpu.Layout.WG_SPLAT(())


def _exchange(memory: PeerMemory, piece: Any, program: Any, calls: Any) -> None:
    """Sends the piece to all inboxes, this device's among them, and returns when all have sent theirs."""
    devices, size = memory.inbox.shape[1], piece.shape[0] * piece.shape[1] * piece.dtype.itemsize
    refs = (plgpu.RefType(),) * 3

    @plgpu.inline_mgpu(arg_types=(*refs, SCALAR, SCALAR, SCALAR, SCALAR))
    def exchange(_: Any, control: Any, addresses: Any, piece: Any, *numbers: Any) -> None:
        program, calls, rank, first = (number.registers.item() for number in numbers)
        mgpu.utils.warpgroup_barrier()  # every thread has read the number of calls, which is about to change
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            place = _plus(_times(_plus(_times(arith.andi(calls, _number(1)), devices), rank), PROGRAMS), program)
            source = llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(piece))
            theirs = []
            for distance in range(devices):
                peer = _plus(first, arith.remui(_plus(rank, _number(distance)), _number(devices)))
                entry = _plus(_address(addresses), _wide(_times(peer, 16)))
                theirs.append(_assembly("ld.global.u64 $0, [$1];", "=l,l", [entry], _i64()))
                inbox = _assembly("ld.global.u64 $0, [$1];", "=l,l", [_plus(entry, _wide(_number(8)))], _i64())
                target = _plus(inbox, _wide(_times(place, PIECE_BYTES)))
                copy = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
                _assembly(copy, "l,r,r", [target, source, _number(size)])
            _assembly("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "")
            arrived = _wide(_times(_plus(program, _number(ARRIVED)), 4))
            _assembly("fence.acq_rel.sys;", "")
            for their in theirs[1:]:
                _assembly("red.relaxed.sys.global.add.u32 [$0], 1;", "l", [_plus(their, arrived)])
            wanted = _times(_plus(calls, _number(1)), devices - 1)
            own = _address(control)
            wait = (
                "{ .reg .pred early; .reg .s32 behind; WAIT_${:uid}: ld.acquire.sys.global.u32 behind, [$0];"
                " sub.s32 behind, behind, $1; setp.lt.s32 early, behind, 0; @early bra WAIT_${:uid}; }"
            )
            _assembly(wait, "l,r", [_plus(own, arrived), wanted])
            counted = _plus(own, _wide(_times(_plus(program, _number(COUNTED)), 4)))
            _assembly("st.global.u32 [$0], $1;", "l,r", [counted, _plus(calls, _number(1))])
        mgpu.utils.warpgroup_barrier()

    exchange(memory.control, memory.addresses, piece, program, calls, memory.control[RANK], memory.control[FIRST])


# --- MLIR


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _number(x: int) -> Any:
    return mgpu.c(x, _i32())


def _plus(x: Any, y: Any) -> Any:
    return arith.addi(x, y)


def _times(x: Any, factor: int) -> Any:
    return arith.muli(x, _number(factor))


def _wide(x: Any) -> Any:
    return arith.extui(_i64(), x)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_i64(), mgpu.utils.memref_ptr(ref))


def _assembly(text: str, constraints: str, operands: Any = (), result: ir.Type | None = None) -> Any:
    """PTX that no other access to memory is moved past."""
    of = ir.Type.parse("!llvm.void") if result is None else result
    clobbers = ",".join(filter(None, [constraints, "~{memory}"]))
    return llvm.inline_asm(of, [*operands], text, clobbers, has_side_effects=True)
