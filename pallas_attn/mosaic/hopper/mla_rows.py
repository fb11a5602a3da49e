"""Blocks of 64 query rows of latent attention: column halves, output normalisation, and the merge of partial states.

The kernels of `mla_decode` and `mla_sparse` for many query rows share these functions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.merge import (
    FRAGMENT_COLUMNS,
    AttentionState,
    PartialLoader,
    PartialStates,
    load_fragments,
    num_fragments,
)
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens

ROWS = 64
"""Query rows of a block."""

TOKENS = 64
"""Latents of a tile."""

PER_ROW = PER_TOKEN
"""Register layout of one value per query row, where query rows are the rows of a tile."""

INITIAL_MAX = -1e30
"""Initial running maximum: smaller than any score, and finite, so that no difference of maxima is NaN."""

MERGE_COLUMNS = 64
"""Maximum number of latent columns that one work item of the merge kernel covers."""


def halves(latent_dim: int) -> tuple[int, int]:
    """Latent columns that each warpgroup accumulates, multiples of 64. The left half is the larger one."""
    left = -(-latent_dim // 128) * 64
    return left, latent_dim - left


# --- results


def normalise(acc: Any, l: Any) -> Any:  # noqa: E741
    """Divide acc [rows, columns] by the sums of weights l [rows]. A row with sum 0 becomes 0, whatever acc holds."""
    seen = l != 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    return jnp.where(over_tokens(seen, acc.shape), acc * over_tokens(inverse, acc.shape), 0.0)


def log_sum_exp(m: Any, l: Any) -> Any:  # noqa: E741
    """Natural-log LSE of rows whose weights, exp2(score · log2 e - m), sum up to l; -inf where l is 0."""
    seen = l != 0
    return jnp.where(seen, (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E), -jnp.inf)


# --- the merge of partial states


def merge_columns(blocks: int, latent_dim: int) -> int:
    """Latent columns of a work item of the merge: fewer than `MERGE_COLUMNS` where that employs more SMs.

    Args:
      blocks: number of blocks of query rows to merge.
    """
    columns = MERGE_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * blocks * (latent_dim // columns) <= basics.multiprocessors():
        columns //= 2
    return columns


def merge_slice(
    loader: PartialLoader, partials: PartialStates, first: Any, count: Any, column_slice: Any, tile: Ref
) -> AttentionState:
    """Merge one slice of latent columns of a block and write the normalised output to `tile`.

    Args:
      first, count: index of the block's first partial state, and number of states. They are merged in this order.
      column_slice: index of the slice.
      tile: [ROWS, columns of a slice] in shared memory.

    Returns:
      The merged state.
    """
    columns = tile.shape[1]
    slice_fragments = num_fragments(ROWS * columns)
    fragments = pl.ds(column_slice * slice_fragments, slice_fragments)
    empty = AttentionState(
        register_tiles.filled(-jnp.inf, (ROWS,), PER_ROW),
        register_tiles.filled(0.0, (ROWS,), PER_ROW),
        register_tiles.filled(0.0, (ROWS, columns), TILE),
    )
    merged = loader.for_each(partials, first, count, slice(None), fragments, _add_partial, empty)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy of the previous slice may still read the tile
    tile[...] = normalise(merged.acc, merged.l).astype(tile.dtype)
    plgpu.commit_smem()
    return merged


def _add_partial(stats: Ref, acc: Ref, merged: AttentionState) -> AttentionState:
    """Merge a partial state into another: stats [2, ROWS], and fragments of a slice of columns."""
    m, l = (basics.load(stats.at[i], PER_ROW) for i in range(2))  # noqa: E741
    return merged.merge(AttentionState(m, l, load_fragments(acc, merged.acc.shape, BY_64)), over_tokens)
