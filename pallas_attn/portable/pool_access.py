"""Reads and writes of a pool without copying it.

XLA's CPU backend has no float8. It would convert a whole float8 pool to float16 and back, so its bytes are copied as
uint8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Num

from pallas_attn.types import FLOAT8, POWER_OF_TWO

COPIED_AS_BYTES = (*FLOAT8, POWER_OF_TWO)
"""Dtypes whose values are read, and on CPUs written, as uint8."""


def take(pool: Num[Array, "..."], *index: Int32[Array, "*#rows"]) -> Num[Array, "..."]:
    """Return the values of a pool at indices inside it, one index array for each leading axis."""
    if pool.dtype not in COPIED_AS_BYTES:
        return pool[index]
    # The barrier makes the cast depend on the indices. Otherwise XLA moves it out of loops and copies the pool.
    pool, index = lax.optimization_barrier((pool, index))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(pool, jnp.uint8)[index], pool.dtype)


def put(
    pool: Num[Array, "..."],
    index: tuple[Int32[Array, "*#rows"], ...],
    values: Num[Array, "..."],
    columns: slice | None = None,
) -> Array:
    """Return the pool with values written at unique indices; indices past its end are ignored.

    Args:
      columns: columns of the last axis to write; None for all columns, or if the last axis is indexed.
    """
    rest = () if columns is None or columns == slice(0, pool.shape[-1]) else (..., columns)

    def scatter(pool: Array, values: Array, *index: Array) -> Array:
        return pool.at[(*index, *rest)].set(values, mode="drop", unique_indices=True)

    def scatter_bits(pool: Array, values: Array, *index: Array) -> Array:
        bits = (lax.bitcast_convert_type(a, jnp.uint8) for a in (pool, values))
        return lax.bitcast_convert_type(scatter(*bits, *index), pool.dtype)

    if pool.dtype not in COPIED_AS_BYTES:
        return scatter(pool, values, *index)
    if pool.dtype == POWER_OF_TWO:
        return scatter_bits(pool, values, *index)
    return lax.platform_dependent(pool, values, *index, cpu=scatter_bits, default=scatter)


def put_tokens[Cache](cache: Cache, slots: Int32[Array, "T"], stored: Cache) -> Cache:
    """Return a cache with a row per token in which the rows of tokens are written to their slots.

    Each array of the cache is updated by one scatter, in place if the cache is donated.

    Args:
      cache: arrays [N, ps, ...].
      slots: slot of each token. Tokens whose slot is not in the pool are not written. The other slots are unique.
      stored: arrays [T, ...] in the form that the cache stores.
    """
    num_pages, page_size = jax.tree.leaves(cache)[0].shape[:2]
    page, offset = slots // page_size, slots % page_size
    # A JAX scatter ignores indices past the end of the pool, but index -1 would refer to the last page.
    page = page_or_none(page, (page >= 0) & (page < num_pages), num_pages)
    return jax.tree.map(lambda pool, values: put(pool, (page, offset), values), cache, stored)


def page_or_none(page: Int32[Array, "E"], exists: Array, num_pages: int) -> Int32[Array, "E"]:
    """Return the page of each entry that is written. Other entries get distinct pages past the pool, so indices stay
    unique.
    """
    return jnp.where(exists, page, num_pages + jnp.arange(page.shape[0], dtype=jnp.int32))
