"""`gather_latent` on Hopper and data-center Blackwell.

A CTA is one warpgroup. Each group of threads copies one row of the result, up to 16 bytes per thread and access:

    sequence, position = position of the result row, from one pass over the lengths of all sequences
    cached rows: pool row from the block table -> registers -> result
    new rows:    row of the new latents        -> registers -> result

The pass over the lengths is cheaper than a separate kernel for their prefix sums. Every CTA runs both copies, each for
its rows of this kind. Most CTAs have only cached or only new rows, so that one of the copies moves no data. CTAs do not
wait for one another, and there are no barriers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.row_io import RowLayout, copy_indexed_rows
from pallas_attn.ops.gather_latent.call import GatherLatentCall

MAX_SEQUENCES = 1024
"""Maximum number of sequences. With more, the pass over their lengths would take longer than the copies."""


def gather_latent(call: GatherLatentCall) -> Float[Array, "length LR"]:
    basics.require_capability((9, 0), (10, 0))
    unsupported.require_16_bit_latents(call.cache)
    num_pages, page_size, width = call.cache.pages.shape
    unsupported.require_int32_rows(num_pages * page_size)
    if call.num_sequences > MAX_SEQUENCES:
        raise NotImplementedError(f"takes up to {MAX_SEQUENCES} sequences, got {call.num_sequences}")
    layout = RowLayout.for_copies(width, call.cache.pages.dtype)
    inputs = GatherLatentInputs(
        rows=call.cache.pages.reshape(-1, width),
        new=call.latent_new if call.latent_new.shape[0] else None,
        block_tables=call.block_tables.reshape(-1),
        cu_q_lens=call.cu_q_lens,
        kv_lens=call.kv_lens,
    )
    return plgpu.kernel(
        functools.partial(_kernel, layout, page_size),
        out_type=jax.ShapeDtypeStruct((call.length, width), call.cache.pages.dtype),
        grid=(pl.cdiv(call.length, layout.rows),),
        grid_names=("program",),
        kernel_name="gather_latent",
    )(basics.materialize(inputs))


class GatherLatentInputs(NamedTuple):
    """Operands of the kernel: arrays, or references to them inside the kernel.

    Attributes:
      rows: latents of the cache, [N·ps, L + R]; row page·ps + offset.
      new: [T, L + R]; None without new tokens.
      block_tables: [S·P].
      cu_q_lens, kv_lens: arguments of the operation.
    """

    rows: Array | Ref
    new: Array | Ref | None
    block_tables: Array | Ref
    cu_q_lens: Array | Ref
    kv_lens: Array | Ref


class RowSource(NamedTuple):
    """Sources of result rows; each field is int32 [rows].

    Attributes:
      sequence: index of the sequence; S for rows after the last sequence.
      start: row of the result at which the sequence starts.
      cached: number of cached tokens of the sequence.
      first_new: index of the sequence's first token in the new latents.
    """

    sequence: jax.Array
    start: jax.Array
    cached: jax.Array
    first_new: jax.Array


def _kernel(layout: RowLayout, page_size: int, x: GatherLatentInputs, out: Ref) -> None:
    row = lax.axis_index("program") * layout.rows + layout.iota(layout.rows)
    source = _row_source(x, row)
    position = row - source.start
    there, held = row < out.shape[0], source.sequence < x.kv_lens.shape[0]
    cached, new = held & (position < source.cached), held & (position >= source.cached)

    table_width = x.block_tables.shape[0] // x.kv_lens.shape[0]
    entry = source.sequence * table_width + lax.div(position, jnp.full_like(row, page_size))
    page = layout.take(x.block_tables, jnp.where(cached, entry, 0))
    pool_row = page * page_size + lax.rem(position, jnp.full_like(row, page_size))
    out_row = jnp.where(there, row, -1)
    exists = cached & basics.in_pool(page, x.rows.shape[0] // page_size)
    copy_indexed_rows(
        layout, x.rows, jnp.where(exists, pool_row, -1), out, jnp.where(new, -1, out_row)
    )  # rows with source -1 are zeros
    if x.new is not None:
        new_row = jnp.where(new, source.first_new + position - source.cached, -1)
        copy_indexed_rows(layout, x.new, new_row, out, jnp.where(new, out_row, -1))


def _row_source(x: GatherLatentInputs, row: jax.Array) -> RowSource:
    """Find the sequence of each result row."""

    def visit(s: jax.Array, carry: tuple[jax.Array, RowSource]) -> tuple[jax.Array, RowSource]:
        start, source = carry
        kv_len, first_new = x.kv_lens[s], x.cu_q_lens[s]
        within = (row >= start) & (row < start + kv_len)
        here = RowSource(s, start, kv_len - (x.cu_q_lens[s + 1] - first_new), first_new)
        source = RowSource(*(jnp.where(within, new, old) for new, old in zip(here, source, strict=True)))
        return start + kv_len, source

    nowhere = RowSource(jnp.full_like(row, x.kv_lens.shape[0]), *(jnp.full_like(row, 0) for _ in range(3)))
    return lax.fori_loop(0, x.kv_lens.shape[0], visit, (jnp.int32(0), nowhere))[1]
