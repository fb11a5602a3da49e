"""Inputs of the `mla_decode` kernels for many query rows on Hopper, and of the kernel on Blackwell.

A query row is one head of one query token of a sequence. The kernels process query rows in blocks. A draft key is the
key of one of the Q newest tokens, which other queries of the sequence may not see.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic.latent_tiles import OLDER_BIT, RowInputs
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan


def tile_parameters(call: MlaDecodeCall) -> dict[str, Any]:
    """Return the fields of `LatentTiles` for a call."""
    return {
        "latent_dim": call.latent_dim,
        "rope_dim": call.rope_dim,
        "queries": call.num_queries,
        "heads": call.num_heads,
        "page_size": call.page_size,
        "causal": call.draft_mask is None,
        "sm_scale": call.sm_scale,
    }


def in_blocks(call: MlaDecodeCall, plan: DecodePlan, rows: int, tile_rows: int | None = None) -> RowInputs:
    """Arrange a call's query rows in blocks of `rows` rows. If they do not fill the last block, they are padded.

    Args:
      tile_rows: number of rows, from the first row of a block on, whose visibility the kernel reads; None for `rows`.
    """
    batch, num_queries = call.q_latent.shape[:2]
    padding = -call.query_rows % rows

    def as_rows(x: Array, more: int = 0) -> Array:
        x = x.reshape(batch, call.query_rows, *x.shape[3:])
        return jnp.pad(x, ((0, 0), (0, padding + more), *[(0, 0)] * (x.ndim - 2)))

    seen = seen_by_any = None
    if call.q_lens is not None or call.draft_mask is not None:
        real = real_queries(call.q_lens, call.kv_lens, num_queries)
        bits = visible_bits(real, num_queries, call.draft_mask)
        seen = as_rows(jnp.broadcast_to(bits[..., None], call.q_latent.shape[:-1]), (tile_rows or rows) - rows)
        seen_by_any = lax.reduce(bits, jnp.int32(0), lax.bitwise_or, (1,))
    return RowInputs(
        q_latent=as_rows(call.q_latent),
        q_rope=as_rows(call.q_rope),
        pages=call.cache.pages,
        scale=call.cache.scale,
        rope=call.cache.rope,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        seen=seen,
        seen_by_any=seen_by_any,
    )


def out_of_blocks(
    call: MlaDecodeCall, out: Float[Array, "B rows L"], lse: Float[Array, "blocks B tile_rows"]
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Convert output and LSE of blocks of query rows to the shapes of the call's results.

    In `lse`, values after the rows of a block are ignored.
    """
    lse = lse[..., : out.shape[1] // lse.shape[0]]
    lse = lse.swapaxes(0, 1).reshape(len(out), -1)[:, : call.query_rows]
    return out[:, : call.query_rows].reshape(call.q_latent.shape), lse.reshape(call.q_latent.shape[:-1])


def visible_bits(
    q_lens: Int32[Array, "B"], num_queries: int, draft_mask: Bool[Array, "B Q Q"] | None
) -> Int32[Array, "B Q"]:
    """Pack the keys that each query sees into bits: bit j for draft key j, bit `OLDER_BIT` for all older keys.

    Queries from q_len on are padding, and see no key.
    """
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if draft_mask is None:
        draft_mask = (index[:, None] >= index[None])[None]
    real = index[None] < q_lens[:, None]
    shown = draft_mask & real[:, None, :] & real[:, :, None]
    bits = jnp.sum(jnp.where(shown, jnp.left_shift(1, index)[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(real, bits | jnp.int32(-(2**OLDER_BIT)), 0)
