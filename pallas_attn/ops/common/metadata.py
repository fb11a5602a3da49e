"""Where a step's tokens stand, worked out on the device from lengths and block tables."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_attn import checks
from pallas_attn.types import PAGE_NONE


def cumulative_lens(lens: Int32[Array, "S"]) -> Int32[Array, "S_plus_1"]:
    """Prefix sums from 0: [0, lens[0], lens[0] + lens[1], ...].

    Raises:
      ValueError: not a vector of int32.
    """
    checks.Dims().check("lens", lens, "S", checks.INT)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])


def token_positions(
    cu_q_lens: Int32[Array, "S_plus_1"], kv_lens: Int32[Array, "S"], *, length: int
) -> Int32[Array, "length"]:
    """The position of each packed new token in its sequence: the new tokens are the last a sequence holds.

    Args:
      cu_q_lens: prefix sums of the new tokens, from 0.
      kv_lens: tokens each sequence holds, the new ones included.
      length: packed tokens with padding.

    Returns:
      Positions; -1 for padding, and for tokens of a sequence that holds fewer than it is said to get.

    Raises:
      ValueError: shapes or dtypes that do not fit each other.
    """
    _, position = _locate(cu_q_lens, kv_lens, length)
    return position


def slot_mapping(
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    page_size: int,
    length: int,
) -> Int32[Array, "length"] | Int32[Array, "length Hkv"]:
    """Where each packed new token is written, as `write_kv` and `write_latent` take it.

    Args:
      block_tables: page ids, or row ids for head-wise tables.
      cu_q_lens: prefix sums of the new tokens, from 0.
      kv_lens: tokens each sequence holds, the new ones included.
      page_size: ps.
      length: packed tokens with padding.

    Returns:
      page·ps + offset, or row·ps + offset per head; -1 for padding and where the page is absent or past the table.

    Raises:
      ValueError: shapes or dtypes that do not fit each other.
    """
    dims = checks.Dims(S=kv_lens.shape[0])
    dims.check("block_tables", block_tables, "S P" if block_tables.ndim == 2 else "S Hkv P", checks.INT)
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    sequence, position = _locate(cu_q_lens, kv_lens, length)
    entry = position // page_size
    inside = (position >= 0) & (entry < dims["P"])
    page = block_tables[sequence, ..., jnp.clip(entry, 0, dims["P"] - 1)]
    if page.ndim == 2:
        position, inside = position[:, None], inside[:, None]
    return jnp.where(inside & (page >= 0), page * page_size + position % page_size, PAGE_NONE)


def is_prefill(
    num_decode_tokens: Int32[Array, ""], cu_q_lens: Int32[Array, "S_plus_1"], *, length: int
) -> Bool[Array, "length"]:
    """Which tokens of a packed step belong to prefill: those after its decode tokens, padding excluded.

    Args:
      num_decode_tokens: decode tokens, which come first.
      cu_q_lens: prefix sums of the prefill tokens, from 0.
      length: packed tokens with padding.
    """
    token = jnp.arange(length, dtype=jnp.int32)
    return (token >= num_decode_tokens) & (token < num_decode_tokens + cu_q_lens[-1])


def _locate(
    cu_q_lens: Int32[Array, "S_plus_1"], kv_lens: Int32[Array, "S"], length: int
) -> tuple[Int32[Array, "length"], Int32[Array, "length"]]:
    """The sequence of each packed token (any for padding), and its position there."""
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    token = jnp.arange(length, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, dims["S"] - 1)
    position = (kv_lens - cu_q_lens[1:])[sequence] + token
    return sequence, jnp.where((token < cu_q_lens[-1]) & (position >= 0), position, -1)
