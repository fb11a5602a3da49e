"""Helpers of every Mosaic GPU kernel: device it is traced for, operands in memory of their own, updates in place."""

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
"""exp(x) is exp2(LOG2E · x), which the hardware has."""

Ref = Any
"""A reference to global or shared memory."""


def lane_semantics() -> plgpu.LoweringSemantics:
    """Lowering semantics of kernels whose values all get their layout where they are made, and whose refs have all
    their transforms: what is traced becomes the code of a thread at once. Otherwise jax first infers layouts and
    transforms and lowers its dialect, which takes about as long again; the machine code comes out the same but for its
    order.

    Kernels that have it copy no fewer than 128 bytes at a time, and store single numbers by `store_scalar`.
    """
    mended_lowering.apply()
    return plgpu.LoweringSemantics.Lane


def interpreted() -> bool:
    """Whether a kernel traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    return device.interpreted()


def require_capability(*architectures: device.Architecture) -> None:
    """Raises NotImplementedError unless kernels of one of these architectures run interpreted, or are compiled for such
    a card by an assembler that does not break them.
    """
    here = device.current()
    here.require(*architectures)
    if not here.interpreted:
        require_sound_assembler()


def multiprocessors() -> int:
    """Multiprocessors of the card that a kernel is traced for.

    Raises:
      NotImplementedError: the card does not tell how many it has.
    """
    here = device.current()
    if here.multiprocessors is None:
        raise NotImplementedError(f"needs to know how many multiprocessors there are, and {here.name} does not tell")
    return here.multiprocessors


def opaque_zero() -> Any:
    """0, which the compiler can't know: addresses made with it are not computed, and kept, before a loop."""
    return lax.optimization_barrier(jnp.int32(0))


def load(ref: Ref, layout: Any) -> jax.Array:
    """Values of global memory, or of shared memory that is not swizzled, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_scalar(ref: Ref, value: Any) -> None:
    """Store one number to shared memory, by every thread. Pallas, for a kernel with `lane_semantics`, would have all
    threads of a warpgroup wait for each other before and after.
    """
    if interpreted():
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, ref: ir.Value, value: Any) -> None:
        memref.store(value.registers.item(), ref, [])

    store(ref, value)


def in_pool(page: Any, pages: int) -> Any:
    """Whether ids name one of so many pages, or rows, of the pool; one comparison, since PAGE_NONE is a large number,
    too, without its sign.
    """
    return page.astype(jnp.uint32) < jnp.uint32(pages)


def first_warp(start_copies: Callable[[], None]) -> None:
    """Runs a function that does no more than move scalars and start copies on one warp, once the others are here too.

    Every thread that starts a copy arrives at its barrier: one warp does it with a quarter of the arrivals.
    """

    @plgpu.warp_map
    def _on_each(warp: jax.Array) -> None:
        pl.when(warp == 0)(start_copies)


def materialize[Tree](x: Tree) -> Tree:
    """Give each array memory of its own, as operands of a kernel need it.

    Where operands are slices of an array, or a scan slices them or stacks results, XLA (as of jax 0.11) has a kernel
    read from and write to the whole array. A kernel raises at run time on a slice that does not begin at a multiple of
    256 bytes. And where a kernel changes arrays in place, XLA drops the aliasing of operands and results, so that
    elements which the kernel does not write are lost. XLA does not fuse slices across an optimization barrier.
    """
    return lax.optimization_barrier(x)


def alias_in_place(x: jax.Array) -> Ref:
    """Make a reference through which a kernel changes an array in place; no copy is made of a donated array."""
    return jax.new_ref(materialize(x))


def read_back(ref: Ref) -> jax.Array:
    """Read the array behind a reference of `alias_in_place`, once the kernels that change it were called."""
    return materialize(jax.freeze(ref))
