"""Two small kernels on which the compile gate is tried: both sound, and both easily spoilt."""

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
"""Layout of 16-bit operands of the tensor cores in shared memory."""


def copy_pages(cache: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Writes page i of `cache` [N, rows, 128] over page page_ids[i], in place if it is donated."""

    def kernel(cache_ref, ids_ref, page, landed):
        i = lax.axis_index("page")
        plgpu.copy_gmem_to_smem(cache_ref.at[i], page, landed)
        plgpu.barrier_wait(landed)
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
    """Sum over i of x[i] @ w[i]: x [T, 64, 64] is float32 and rounded to bfloat16 on the way, w [T, 64, n] bfloat16.

    Args:
      slots: tiles in flight; too many do not fit shared memory.
      accumulators: how often the sum is computed, side by side; too many do not fit the registers.
    """
    n = w.shape[2]

    def kernel(x_ref, w_ref, out_ref, x_tiles, w_tiles, out, landed):
        num_tiles = x_ref.shape[0]

        def fetch(i):
            slot = lax.rem(i, slots)
            plgpu.copy_gmem_to_smem(x_ref.at[i], x_tiles.at[slot], landed.at[slot])
            plgpu.copy_gmem_to_smem(w_ref.at[i], w_tiles.at[slot], landed.at[slot])

        def body(i, sums):
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(landed.at[slot])
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
    """Arguments of `copy_pages`, and so a kernel, for so many pages."""
    return {"cache": shape(64, 64, 128), "page_ids": shape(num_copied, dtype=jnp.int32)}


TILES = {"x": shape(16, 64, 64, dtype=jnp.float32), "w": shape(16, 64, 128)}
COPIES_PAGES = Case(copy_pages, pages(8), cache="cache", donated=True, tensor_cores=False)
STREAMS_TILES = Case(stream_matmul, TILES, tile=Tile(num_bytes=64 * 128 * 2, multiply_adds=64 * 64 * 128))


def widened(cache: jax.Array) -> jax.Array:
    """A result that cannot take the place of its argument."""
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
    # XLA leaves fewer than five operations as they are
    "is-not-one-graph": replace(STREAMS_TILES, function=functools.partial(stream_matmul, slots=3), one_graph=True),
    "has-temporaries": replace(STREAMS_TILES, function=lambda x, w: stream_matmul(2 * x, w, slots=4)),
}
"""Each has a kernel of its own: a process compiles a kernel once, and only the first report that has it shows it."""
