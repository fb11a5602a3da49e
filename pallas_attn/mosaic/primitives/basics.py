"""Helpers of all Mosaic GPU kernels: target device, operands with separate buffers, and in-place updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

from pallas_attn.jax_patches import mended_lowering
from pallas_attn.mosaic.primitives.assembler import require_sound_assembler
from pallas_attn.runtime import device

LOG2E = math.log2(math.e)
"""exp(x) is computed as exp2(LOG2E · x), because the hardware has only exp2."""

Ref = Any
"""A reference to global or shared memory."""


def lane_semantics() -> plgpu.LoweringSemantics:
    """Lowering semantics for kernels in which every value has an explicit layout and every reference explicit
    transforms.

    Tracing then produces the code of a thread directly. With the default semantics, jax first infers layouts and
    transforms and lowers its dialect, which takes about as long again. The machine code differs only in instruction
    order.

    Kernels with these semantics must copy at least 128 bytes at a time and store single numbers with `store_scalar`.
    """
    mended_lowering.apply()
    return plgpu.LoweringSemantics.Lane


def interpreted() -> bool:
    """Whether a kernel that is traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    return device.interpreted()


def require_capability(*architectures: device.Architecture) -> None:
    """Check that kernels of one of these architectures can run here: interpreted, or compiled by a ptxas version that
    does not miscompile them.

    Raises:
      NotImplementedError: the device has another architecture, or ptxas miscompiles kernels.
    """
    here = device.current()
    here.require(*architectures)
    if not here.interpreted:
        require_sound_assembler()


def multiprocessors() -> int:
    """Number of multiprocessors of the card that a kernel is traced for.

    Raises:
      NotImplementedError: the device does not report the number.
    """
    here = device.current()
    if here.multiprocessors is None:
        raise NotImplementedError(f"needs the number of multiprocessors, which {here.name} does not report")
    return here.multiprocessors


def opaque_zero() -> Any:
    """Return 0 in a form that the compiler cannot fold. Addresses computed with it are not hoisted out of a loop into
    registers.
    """
    return lax.optimization_barrier(jnp.int32(0))


def load(ref: Ref, layout: Any) -> jax.Array:
    """Load values of global memory, or of unswizzled shared memory, to registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_scalar(ref: Ref, value: Any) -> None:
    """Store one number to shared memory, from every thread. With `lane_semantics`, Pallas's own store would synchronize
    all threads of a warpgroup before and after.
    """
    if interpreted():
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, ref: ir.Value, value: Any) -> None:
        memref.store(value.registers.item(), ref, [])

    store(ref, value)


def in_pool(page: Any, pages: int) -> Any:
    """Whether each id names one of the pool's `pages` pages (or rows). One unsigned comparison suffices, because
    PAGE_NONE is a large unsigned number.
    """
    return page.astype(jnp.uint32) < jnp.uint32(pages)


def first_warp(start_copies: Callable[[], None]) -> None:
    """Run a function on the first warp, after all warps have reached this point. The function may only move scalars and
    start copies.

    Every thread that starts a copy arrives at its barrier, so one warp makes a quarter of the arrivals of a warpgroup.
    """

    @plgpu.warp_map
    def _on_each(warp: jax.Array) -> None:
        pl.when(warp == 0)(start_copies)


def materialize[Tree](x: Tree) -> Tree:
    """Give each array a separate buffer, as kernel operands require.

    If operands are slices of an array, or a scan slices operands or stacks results, XLA (as of jax 0.11) lets a kernel
    read and write the whole array. A kernel then raises at run time if a slice does not start at a multiple of 256
    bytes. If the kernel also updates arrays in place, XLA drops the aliasing of operands and results, and elements that
    the kernel does not write are lost. XLA does not fuse slices across an optimization barrier.
    """
    return lax.optimization_barrier(x)


def alias_in_place(x: jax.Array) -> Ref:
    """Make a reference through which a kernel updates an array in place. A donated array is not copied."""
    return jax.new_ref(materialize(x))


def read_back(ref: Ref) -> jax.Array:
    """Return the array behind a reference of `alias_in_place`. Call it after the kernels that update the array."""
    return materialize(jax.freeze(ref))
