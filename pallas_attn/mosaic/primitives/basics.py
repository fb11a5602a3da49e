"""Helpers of all Mosaic GPU kernels: target device, loads and stores, kernel operands, and in-place updates."""

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
from jaxtyping import Array, Num

from pallas_attn.jax_patches import mended_lowering
from pallas_attn.mosaic.primitives.assembler import require_sound_assembler
from pallas_attn.runtime import device

LOG2E = math.log2(math.e)
"""log2(e). Kernels compute exp(x) as exp2(LOG2E · x), because the hardware has only exp2."""

Ref = Any
"""A reference to global or shared memory."""


def lane_semantics() -> plgpu.LoweringSemantics:
    """Return Pallas's lane semantics, and apply a correction that they need (`jax_patches.mended_lowering`).

    In a kernel with lane semantics, the author gives every value a layout and every reference its transforms. Pallas
    then emits the code of a thread directly. With the default warpgroup semantics, Pallas first infers layouts and
    transforms and lowers its MLIR dialect, which about doubles the lowering time. The machine code differs only in
    instruction order.

    A kernel with lane semantics must copy at least 128 bytes at a time, and must store scalars with `store_scalar`.
    """
    mended_lowering.apply()
    return plgpu.LoweringSemantics.Lane


def interpreted() -> bool:
    """Whether a kernel that is traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    return device.interpreted()


def require_capability(*architectures: device.Architecture) -> None:
    """Check that kernels for one of these architectures can run on the target device. Unless they run interpreted, also
    check the ptxas version.

    Raises:
      NotImplementedError: the device has another architecture, or this ptxas version miscompiles kernels.
    """
    here = device.current()
    here.require(*architectures)
    if not here.interpreted:
        require_sound_assembler()


def multiprocessors() -> int:
    """Return the number of multiprocessors of the device that the kernel is traced for.

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
    """Store a scalar to shared memory. Every thread stores it, without synchronization.

    With `lane_semantics`, Pallas's own store would synchronize all threads of a warpgroup before and after it.
    """
    if interpreted():
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, ref: ir.Value, value: Any) -> None:
        memref.store(value.registers.item(), ref, [])

    store(ref, value)


def in_pool(page: Any, pages: int) -> Any:
    """Whether each id is at least 0 and less than `pages`, the number of pages (or rows) of the pool.

    One unsigned comparison tests both: negative ids, such as PAGE_NONE, are large unsigned numbers.
    """
    return page.astype(jnp.uint32) < jnp.uint32(pages)


def pool_of_pages(
    pages: Num[Array, "N Hkv ps columns"], page_size: int, tokens_per_row: int, *, tokens_first: bool
) -> Num[Array, "..."]:
    """Return keys or values of a cache in the shape in which kernels copy them, without a copy.

    Args:
      page_size: tokens of a page in the kernel.
      tokens_per_row: tokens of a row of the result, t.
      tokens_first: whether `pages` is a view of pages with tokens before heads, which has pages of one token.

    Returns:
      [N·Hkv, ps / t, t·columns], or [N, Hkv, columns] with `tokens_first`.
    """
    if tokens_first:
        return pages.reshape(-1, pages.shape[1], pages.shape[3])
    return pages.reshape(-1, page_size // tokens_per_row, pages.shape[3] * tokens_per_row)


def first_warp(start_copies: Callable[[], None]) -> None:
    """Synchronize all warps of the warpgroup, then run `start_copies` on the first warp.

    The function may only read and write scalars, start copies and use barriers. Every thread that executes the start of
    a copy arrives at the barrier of the copy. One warp makes only a quarter of the arrivals of a whole warpgroup.
    """

    @plgpu.warp_map
    def _on_each(warp: jax.Array) -> None:
        pl.when(warp == 0)(start_copies)


def materialize[Tree](x: Tree) -> Tree:
    """Pass arrays through an optimization barrier, so that each kernel operand has a buffer of its own.

    Otherwise, XLA (as of jax 0.11) may fuse a slice into the kernel call, for example the slices that `lax.scan` makes.
    The operand is then a pointer into a larger array. Two failures follow. The call raises at run time if the slice
    does not start at a multiple of 256 bytes. If the kernel updates an array in place, XLA drops the aliasing of
    operand and result, and elements that the kernel does not write are lost.
    """
    return lax.optimization_barrier(x)


def alias_in_place(x: jax.Array) -> Ref:
    """Make a reference through which a kernel updates an array in place. XLA copies the array first, unless the caller
    donated it.
    """
    return jax.new_ref(materialize(x))


def read_back(ref: Ref) -> jax.Array:
    """Return the updated array of a reference from `alias_in_place`. Call it after all kernels that use the
    reference.
    """
    return materialize(jax.freeze(ref))
