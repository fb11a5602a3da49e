"""Cases for tests of the compile gate itself: two small correct kernels, and variants that violate one requirement
each.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.aot.case import Case, Tile, shape

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Shared-memory layout of 16-bit operands of tensor-core instructions."""


def copy_pages(cache: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Copy page i of `cache` [N, rows, 128] to page page_ids[i], in place if the cache is donated."""

    def kernel(cache_ref, ids_ref, page, full):
        i = lax.axis_index("page")
        plgpu.copy_gmem_to_smem(cache_ref.at[i], page, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(page, cache_ref.at[ids_ref[i]])
        plgpu.wait_smem_to_gmem(0)

    ref = jax.new_ref(cache)
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=page_ids.shape,
        grid_names=("page",),
        scratch_types=[plgpu.SMEM(cache.shape[1:], cache.dtype), plgpu.Barrier()],
    )(ref, page_ids)
    return jax.freeze(ref)


def stream_matmul(x: jax.Array, w: jax.Array, *, slots: int = 2, accumulators: int = 1) -> jax.Array:
    """Return the sum over i of x[i] @ w[i].

    Args:
      x: float32 [T, 64, 64], rounded to bfloat16 in the kernel.
      w: bfloat16 [T, 64, n].
      slots: number of pipeline stages. A large number exceeds shared memory.
        accumulators: number of accumulators, each of which computes the whole sum. A large number spills registers. The
        result is multiplied by this number.
    """
    n = w.shape[2]

    def kernel(x_ref, w_ref, out_ref, x_tiles, w_tiles, out, full):
        num_tiles = x_ref.shape[0]

        def fetch(i):
            slot = lax.rem(i, slots)
            plgpu.copy_gmem_to_smem(x_ref.at[i], x_tiles.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(w_ref.at[i], w_tiles.at[slot], full.at[slot])

        def body(i, sums):
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(full.at[slot])
            x_tile = plgpu.load(x_tiles.at[slot], layout=plgpu.Layout.WGMMA).astype(w.dtype)

            def accumulate(total):
                return pl.run_state(lambda ref: plgpu.wgmma(ref, x_tile, w_tiles.at[slot]))(plgpu.ACC.init(total))

            sums = tuple(accumulate(total) for total in sums)
            pl.when(i + slots < num_tiles)(lambda: fetch(i + slots))
            return sums

        for i in range(slots):
            fetch(i)
        zeros = plgpu.layout_cast(jnp.zeros((64, n), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, num_tiles, body, (zeros,) * accumulators)
        out[...] = sum(sums[1:], start=sums[0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, n), jnp.float32),
        scratch_types=[
            plgpu.SMEM((slots, 64, 64), x.dtype),
            plgpu.SMEM((slots, 64, n), w.dtype, transforms=SWIZZLED),
            plgpu.SMEM((64, n), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
    )(x, w)


def pages(num_copied: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of arguments of `copy_pages`. The compiled kernel depends on `num_copied`."""
    return {"cache": shape(64, 64, 128), "page_ids": shape(num_copied, dtype=jnp.int32)}


TILES = {"x": shape(16, 64, 64, dtype=jnp.float32), "w": shape(16, 64, 128)}
COPIES_PAGES = Case(copy_pages, pages(8), cache="cache", donated=True, tensor_cores=False)
STREAMS_TILES = Case(stream_matmul, TILES, tile=Tile(num_bytes=64 * 128 * 2, multiply_adds=64 * 64 * 128))


def widened(cache: jax.Array) -> jax.Array:
    """Convert to float32. The result cannot reuse the memory of a 16-bit argument."""
    return cache.astype(jnp.float32)


SAMPLES = {
    "copies-pages": COPIES_PAGES,
    "streams-tiles": STREAMS_TILES,
    "spills": replace(STREAMS_TILES, function=functools.partial(stream_matmul, accumulators=4)),
    "does-not-fit-shared-memory": replace(STREAMS_TILES, function=functools.partial(stream_matmul, slots=8)),
    "leaves-the-tensor-cores-idle": replace(COPIES_PAGES, arguments=pages(9), tensor_cores=True),
    "copies-its-cache": replace(COPIES_PAGES, arguments=pages(10), donated=False),
    "is-not-in-place": Case(widened, {"cache": shape(64, 64, 128)}, cache="cache", donated=True, tensor_cores=False),
    "has-no-kernel": replace(STREAMS_TILES, function=lambda x, w: jnp.float32(0)),
    # A program with one kernel is not one graph, because XLA builds graphs of at least five operations.
    "is-not-one-graph": replace(
        STREAMS_TILES, function=functools.partial(stream_matmul, slots=3), one_graph=True, launches=2
    ),
    "has-temporaries": replace(STREAMS_TILES, function=lambda x, w: stream_matmul(2 * x, w, slots=4)),
}
"""Samples by name. Their kernels differ, because a process compiles equal kernels once: the kernel would be missing in
the report of the second sample.
"""
