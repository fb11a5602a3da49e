"""Reading and writing places of a pool, without a copy of it.

XLA's CPU backend has no float8: it would convert a whole pool to float16, and back. So its bytes are moved there.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Num

from pallas_attn.types import FLOAT8


def take(pool: Num[Array, "..."], *index: Int32[Array, "*#rows"]) -> Num[Array, "..."]:
    """Values of a pool at places that are inside it: one array of indices for each of its first axes."""
    if pool.dtype not in FLOAT8:
        return pool[index]
    # Tied to the indices, so that no loop around this takes the cast out, and makes a copy of the pool to hold it.
    pool, index = lax.optimization_barrier((pool, index))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(pool, jnp.uint8)[index], pool.dtype)


def put(
    pool: Num[Array, "..."],
    index: tuple[Int32[Array, "*#rows"], ...],
    values: Num[Array, "..."],
    columns: slice | None = None,
) -> Array:
    """The pool with values at unique places; those past its end are skipped.

    Args:
      columns: of the pool's last axis, to write; None for all of them, or where that axis is indexed.
    """
    rest = () if columns is None or columns == slice(0, pool.shape[-1]) else (..., columns)

    def scatter(pool: Array, values: Array, *index: Array) -> Array:
        return pool.at[(*index, *rest)].set(values, mode="drop", unique_indices=True)

    def scatter_bits(pool: Array, values: Array, *index: Array) -> Array:
        bits = (lax.bitcast_convert_type(a, jnp.uint8) for a in (pool, values))
        return lax.bitcast_convert_type(scatter(*bits, *index), pool.dtype)

    if pool.dtype not in FLOAT8:
        return scatter(pool, values, *index)
    return lax.platform_dependent(pool, values, *index, cpu=scatter_bits, default=scatter)


def page_or_none(page: Int32[Array, "E"], exists: Array, num_pages: int) -> Int32[Array, "E"]:
    """The page of each entry that is written. Others get one past the pool, a different one each, so that indices stay
    unique.
    """
    return jnp.where(exists, page, num_pages + jnp.arange(page.shape[0], dtype=jnp.int32))
