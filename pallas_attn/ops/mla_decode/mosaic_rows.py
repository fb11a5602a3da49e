"""Many query rows of a sequence and tiles of its latents, as the kernels of Hopper and Blackwell take them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic.latent_tiles import (
    DEAD as DEAD,
)
from pallas_attn.mosaic.latent_tiles import (
    FULL as FULL,
)
from pallas_attn.mosaic.latent_tiles import (
    INITIAL_MAX as INITIAL_MAX,
)
from pallas_attn.mosaic.latent_tiles import (
    NEVER_BIT as NEVER_BIT,
)
from pallas_attn.mosaic.latent_tiles import (
    OLDER_BIT as OLDER_BIT,
)
from pallas_attn.mosaic.latent_tiles import (
    PARTIAL as PARTIAL,
)
from pallas_attn.mosaic.latent_tiles import (
    TOKENS as TOKENS,
)
from pallas_attn.mosaic.latent_tiles import (
    LatentTiles as LatentTiles,
)
from pallas_attn.mosaic.latent_tiles import (
    RowInputs as RowInputs,
)
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan


def in_blocks(call: MlaDecodeCall, plan: DecodePlan, rows: int) -> RowInputs:
    """The arrays of a call in blocks of so many query rows, the last of them padded."""
    batch, num_queries = call.q_latent.shape[:2]
    padding = -call.query_rows % rows

    def as_rows(x: Array) -> Array:
        x = x.reshape(batch, call.query_rows, *x.shape[3:])
        return jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))

    seen = None
    if call.q_lens is not None or call.draft_mask is not None:
        real = real_queries(call.q_lens, call.kv_lens, num_queries)
        seen = visible_bits(real, num_queries, call.draft_mask)
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
        seen=None if seen is None else as_rows(jnp.broadcast_to(seen[..., None], call.q_latent.shape[:-1])),
        seen_by_any=None if seen is None else lax.reduce(seen, jnp.int32(0), lax.bitwise_or, (1,)),
    )


def out_of_blocks(
    call: MlaDecodeCall, out: Float[Array, "B rows L"], lse: Float[Array, "blocks B block"]
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Output and LSE of a call, from those of blocks of its query rows."""
    lse = lse.swapaxes(0, 1).reshape(len(out), -1)[:, : call.query_rows]
    return out[:, : call.query_rows].reshape(call.q_latent.shape), lse.reshape(call.q_latent.shape[:-1])


def visible_bits(
    q_lens: Int32[Array, "B"], num_queries: int, draft_mask: Bool[Array, "B Q Q"] | None
) -> Int32[Array, "B Q"]:
    """Pack what each query sees into bits: j for draft key j, `OLDER_BIT` for all older keys."""
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if draft_mask is None:
        draft_mask = (index[:, None] >= index[None])[None]
    real = index[None] < q_lens[:, None]
    shown = draft_mask & real[:, None, :] & real[:, :, None]
    bits = jnp.sum(jnp.where(shown, jnp.left_shift(1, index)[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(real, bits | jnp.int32(-(2**OLDER_BIT)), 0)
