"""Sums over the GPUs of one process by a kernel of ours: small ones, whose time is latency.

A program has a piece of the array. It copies the piece into every device's inbox, tells the program of the same number
there, waits until all have told it, and adds up what lies in its own inbox, in float32 and in the order of the devices,
so that all get the same bits. Every byte crosses NVLink once for each peer, and nothing is forwarded.

    device 0    piece ──▶ inbox[0] of 0, 1, ···     signal peers    wait for n - 1 signals    sum of inbox[0 ··· n-1]
    device 1    piece ──▶ inbox[1] of 0, 1, ···     signal peers    wait for n - 1 signals    sum of inbox[0 ··· n-1]

XLA has all devices meet before the kernel starts, so an inbox, which is memory of the kernel's own results, is not
written before its device is past whatever used that memory before; and a device does not end before all have written
to it. Programs wait for those of the same number only, and all are on the device at once, being few.

Unlike a collective operation of NCCL, which XLA captures anew at every run, it is a node of a step's CUDA graph like
any other kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

PROGRAMS = 64
"""Programs at most: fewer than any of these GPUs has multiprocessors."""

THREADS, LOAD_BYTES = 128, 16
"""Threads of a program, and bytes that each loads at once."""


class Scratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      piece: its elements.
      landed: completed when they are in shared memory.
      arrived: counts devices whose pieces are in the inbox; devices signal one another's.
    """

    piece: Any
    landed: Any
    arrived: Any


def tile_elements(dtype: Any) -> int:
    """Number of elements that a program loads at once; they divide an array that `peer_sum` takes."""
    return THREADS * LOAD_BYTES // jnp.dtype(dtype).itemsize


def peer_sum(x: Float[Array, "*dims"], axes: tuple[str, ...], outer: tuple[str, ...]) -> Float[Array, "*dims"]:
    """Adds up an array over devices of a mesh, inside `jax.shard_map`, traced for GPUs with NVLink.

    Args:
      x: this device's part of the sum; `tile_elements` divide its size.
      axes: the innermost axes of the mesh, in its order; devices along them add up.
      outer: all axes before those.

    Returns:
      The sum, in x's dtype, the same bits on all devices.
    """
    tile = tile_elements(x.dtype)
    tiles = x.size // tile
    programs = max(n for n in range(1, PROGRAMS + 1) if tiles % n == 0)
    shape = (tiles // programs * tile // THREADS, THREADS)
    scratch = Scratch(plgpu.SMEM(shape, x.dtype), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR)
    inbox = jax.ShapeDtypeStruct((lax.axis_size(axes), programs, *shape), x.dtype)
    out, _ = plgpu.kernel(
        functools.partial(_kernel, axes, outer),
        out_type=(jax.ShapeDtypeStruct((programs, *shape), x.dtype), inbox),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(scratch,),
        kernel_name="peer_sum",
    )(x.reshape(programs, *shape))
    return out.reshape(x.shape)


def _kernel(axes: tuple[str, ...], outer: tuple[str, ...], x: Any, out: Any, inbox: Any, scratch: Scratch) -> None:
    program, rank, devices = lax.axis_index("program"), lax.axis_index(axes), lax.axis_size(axes)
    first = lax.axis_index(outer) * devices
    peers = [first + lax.rem(rank + distance, devices) for distance in range(1, devices)]
    plgpu.copy_gmem_to_smem(x.at[program], scratch.piece, scratch.landed)
    plgpu.barrier_wait(scratch.landed)
    for peer in peers:
        there = plgpu.remote_ref(inbox, peer, pl.DeviceIdType.LOGICAL)
        plgpu.copy_smem_to_gmem(scratch.piece, there.at[rank, program])
    plgpu.copy_smem_to_gmem(scratch.piece, inbox.at[rank, program])
    plgpu.wait_smem_to_gmem(0)
    for peer in peers:  # each signal is a release; those of jax's semaphore_signal_parallel precede the fence
        pl.semaphore_signal(scratch.arrived, device_id=peer, device_id_type=pl.DeviceIdType.LOGICAL)
    pl.semaphore_wait(scratch.arrived, devices - 1)

    rows = LOAD_BYTES // x.dtype.itemsize
    layout = plgpu.Layout.WG_STRIDED((rows, THREADS), vec_size=rows)

    def add(tile: Any, _: None) -> None:
        own = pl.ds(tile * rows, rows)

        def load(device: int) -> jax.Array:
            values = plgpu.load(inbox.at[device, program, own], layout=layout, optimized=False)
            return values.astype(jnp.float32)

        total = functools.reduce(jnp.add, map(load, range(devices)))
        out.at[program, own][...] = total.astype(out.dtype)

    lax.fori_loop(0, x.shape[1] // rows, add, None)
