"""Products that are queued one after another as their operands arrive, for `mosaic.row_layout`.

As in `sm90.wgmma`, they go on while the threads that started them do something else: each `start_` is a group of its
own, and `wgmma.finish` tells how many of those that were started later may still be under way. Registers are
made sure of only where no product that uses them is under way: else the assembler has every product wait for the one
before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.sm90 import wgmma
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN, TILE, operand_ref
from pallas_attn.mosaic.sm90.wgmma import ACCUMULATOR


def start_scores(q: Ref, k: Ref, total: jax.Array | None, row_bytes: int) -> jax.Array:
    """Starts total + q @ kᵀ, for q [64, n] and k [N, n] in shared memory; without a total, it is 0.

    The total may be under way, and nothing may touch the result before `finish`.
    """
    if interpreted():
        product = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # there, threads have read what copies are about to overwrite
        return product if total is None else total + product
    refs, more = (operand_ref(row_bytes),) * 2, () if total is None else (total,)
    shape = plgpu.ShapeDtypeStruct((q.shape[0], k.shape[0]), jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(*refs, *[TILE] * len(more)), return_type=shape)
    def begin(_: Any, q: ir.Value, k: ir.Value, *total: Any) -> Any:
        if not total:
            nvvm.wgmma_fence_aligned()
        sums = list(total[0].to_layout(ACCUMULATOR).registers.flat) if total else []
        sums = wgmma.add_scores(sums, q, k, row_bytes)
        wgmma.commit()
        return wgmma.fragments(sums, shape.shape).to_layout(fragmented_array.WGMMA_LAYOUT)

    return begin(q, k, *more)


def start_values(p: jax.Array | Ref, v: Ref, total: jax.Array, row_bytes: int) -> jax.Array:
    """Starts total + p @ v, for p [64, N] in registers or shared memory and v [N, columns] in shared memory.

    Nothing may touch the result, nor change p, before `finish`.
    """
    in_registers = isinstance(p, jax.Array)
    if interpreted():
        product = jnp.dot(p if in_registers else p[...], v[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return total + product
    refs = operand_ref(row_bytes)
    arg_types = TILE if in_registers else refs, refs, TILE

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE))
    def begin(_: Any, p: Any, v: ir.Value, total: Any) -> Any:
        total = total.to_layout(ACCUMULATOR)
        if in_registers:
            p, total = fragmented_array.optimization_barrier(p, total)
        else:
            total = fragmented_array.optimization_barrier(total)
        nvvm.wgmma_fence_aligned()
        if in_registers:
            lefts = wgmma.words(p)
        else:
            (_, keys), _ = mma_utils.tiled_memref_shape(p)
            lefts = ([a] for a in wgmma.left_steps(p, keys, row_bytes))
        sums = wgmma.add_values(list(total.registers.flat), lefts, v, row_bytes)
        wgmma.commit()
        return wgmma.fragments(sums, total.shape).to_layout(fragmented_array.WGMMA_LAYOUT)

    return begin(p, v, total)


def leave(p: jax.Array, to: Ref, m: jax.Array, stats: Ref, row_bytes: int) -> None:
    """Writes p [64, N] and m [64] to shared memory, for whom this warpgroup tells of it, and for tensor cores.

    Pallas would have all threads wait for each other before and after each of the two. Here nobody reads what was
    there any more, and all wait once.
    """
    if interpreted():
        to[...], stats[...] = p, m
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu(arg_types=(TILE, operand_ref(row_bytes), PER_TOKEN, plgpu.RefType()))
    def write(_: Any, p: Any, to: ir.Value, m: Any, stats: ir.Value) -> None:
        p.store_tiled(to, swizzle=row_bytes)
        m.store_untiled(stats, optimized=False)
        mgpu.commit_shared()

    write(p, to, m, stats)
