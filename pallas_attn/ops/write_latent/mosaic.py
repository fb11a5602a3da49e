"""`write_latent` on Hopper and data-center Blackwell.

A slot is the place of one token in the cache, here a row of the array [N·ps, L + R] (`rows`). A CTA is one warpgroup.
Each group of threads copies one token, up to 16 bytes per thread and access:

    slot = slots[token]
    latent[token] -> registers -> rows[slot]

Tokens whose slot is outside the pool, such as -1, are not read. All other slots are distinct, so no two CTAs write the
same bytes, and there are no barriers. At least five CTAs run concurrently on a multiprocessor, which hides the memory
latency.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.row_io import RowLayout, copy_indexed_rows
from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    basics.require_capability((9, 0), (10, 0))
    unsupported.require_16_bit_latents(call.cache)
    num_pages, page_size, width = call.cache.pages.shape
    unsupported.require_int32_rows(num_pages * page_size)
    if not call.slots.shape[0]:
        return call.cache
    layout = RowLayout.for_copies(width, call.latent.dtype)
    rows = basics.alias_in_place(call.cache.pages.reshape(-1, width))
    plgpu.kernel(
        functools.partial(_kernel, layout),
        out_type=(),
        grid=(pl.cdiv(call.slots.shape[0], layout.rows),),
        grid_names=("program",),
        kernel_name="write_latent",
    )(*basics.materialize((call.latent, call.slots)), rows)
    return PagedLatent(basics.read_back(rows).reshape(call.cache.pages.shape))


def _kernel(layout: RowLayout, latent: Ref, slots: Ref, rows: Ref) -> None:
    num_tokens = slots.shape[0]
    token = lax.axis_index("program") * layout.rows + layout.iota(layout.rows)
    slot = layout.take(slots, jnp.minimum(token, num_tokens - 1))
    written = (token < num_tokens) & (slot >= 0) & (slot < rows.shape[0])
    copy_indexed_rows(layout, latent, jnp.where(written, token, -1), rows, jnp.where(written, slot, -1))
