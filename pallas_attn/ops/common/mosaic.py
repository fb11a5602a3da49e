"""What Mosaic GPU kernels share: where they run, how operands of the tensor cores lie, products, vectors beside a tile.

A tile of scores is [tokens, columns]: wgmma's M are tokens, its N the query rows of one KV head. A value per token
therefore varies along the rows of a tile and is spread over its columns, a value per query the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as jax_config  # the mode a kernel is traced in has no public name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import dispatch
from pallas_attn.ops.common.assembler import require_sound_assembler

HOPPER = (9, 0)

LOG2E = math.log2(math.e)
"""exp(x) is exp2(LOG2E · x), which the hardware has."""

TILE = plgpu.Layout.WGMMA
PER_TOKEN = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""How a tile, a value for each of its rows and a value for each of its columns lie in the registers of a warpgroup."""

Ref = Any
"""A reference to global or shared memory."""


# --- where kernels run


def interpreted() -> bool:
    """Whether a kernel traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    return isinstance(jax_config.pallas_tpu_interpret_mode_context_manager.value, plgpu.InterpretGPUParams)


def require_hopper() -> None:
    """Raises NotImplementedError unless kernels run interpreted, or are compiled for compute capability 9.0 by an
    assembler that does not break them.
    """
    if interpreted():
        return
    here = dispatch.capability()
    if here.platform != "gpu" or here.compute_capability != HOPPER:
        version = "" if here.compute_capability is None else f" {'.'.join(map(str, here.compute_capability))}"
        raise NotImplementedError(
            f"needs a GPU of compute capability 9.0 (H100, H200), this is {here.platform}{version}"
        )
    require_sound_assembler()


def multiprocessors() -> int:
    """Of the device a kernel is traced for; few in the interpreter, where programs run one after the other."""
    if interpreted():
        return 2
    device = jax.config.jax_default_device
    device = jax.local_devices()[0] if device is None or isinstance(device, str) else device
    return device.core_count


def unknown_zero() -> Any:
    """0, which the compiler can't know: addresses made with it are not computed, and kept, before a loop."""
    return lax.optimization_barrier(jnp.int32(0))


# --- memory


def operand(shape: tuple[int, ...], dtype: Any, *, row_bytes: int = 128) -> Any:
    """Shared memory for tiles [..., rows, columns], swizzled as wgmma wants operands of 16 bits and as threads read
    values of 8 without conflicts.

    Args:
      row_bytes: 128, or 64 where rows of the tile, or those it is copied from, are not made of as many.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load(ref: Ref, layout: Any) -> jax.Array:
    """Values of global memory, or of shared memory that is not swizzled, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def first_warp(start_copies: Callable[[], None]) -> None:
    """Runs a function that does no more than move scalars and start copies on one warp, once the others are here too.

    Every thread that starts a copy arrives at its barrier: one warp does it with a quarter of the arrivals.
    """

    @plgpu.warp_map
    def _on_each(warp: jax.Array) -> None:
        pl.when(warp == 0)(start_copies)


def unsliced[Tree](x: Tree) -> Tree:
    """Arrays as a kernel's operands: in memory of their own.

    Where operands are slices of an array, or a scan slices them or stacks results, XLA (as of jax 0.11) has a kernel
    read from and write to the whole. Kernels refuse slices that do not begin at a multiple of 256 bytes, when they run;
    and of a kernel that changes arrays in place it forgets that results were to be in the place of operands: what the
    kernel leaves alone is lost. Barriers are what it does not look through.
    """
    return lax.optimization_barrier(x)


def changeable(x: jax.Array) -> Ref:
    """A reference through which a kernel changes an array in place: the array itself where it is donated."""
    return jax.new_ref(unsliced(x))


def frozen(ref: Ref) -> jax.Array:
    """What a `changeable` array has become."""
    return unsliced(jax.freeze(ref))


# --- products


def multiply(pairs: Sequence[tuple[Ref, Ref]]) -> jax.Array:
    """The sum of a @ bᵀ over pairs of a [M, K] and b [N, K] in shared memory, in float32."""

    def accumulate(total: Ref) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        return total[...]

    (a, b), *_ = pairs
    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_product(total: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """total + a @ b in float32, in the registers of `total`, for a [M, K] in shared memory or registers and b [K, N] in
    shared memory.

    The interpreter has no accumulators that begin with a value, and no wgmma of registers.
    """
    if not interpreted():
        added: Any = pl.run_state(lambda result: plgpu.wgmma(result, a, b))(plgpu.ACC.init(total))
        return added
    if isinstance(a, jax.Array):
        return total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def product(result: Ref) -> jax.Array:
        plgpu.wgmma(result, a, b)
        return result[...]

    return total + pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


# --- vectors beside a tile


def over_tokens(per_token: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per token, for each element of a tile."""
    return lax.broadcast_in_dim(per_token, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per column, for each element of a tile."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def token_iota(tokens: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=PER_TOKEN)


def column_iota(columns: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=PER_COLUMN)


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
