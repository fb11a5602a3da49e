"""`mla_decode` on Hopper (H100, H200)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

import pallas_attn.ops.mla_decode.mosaic_rows as mosaic_rows
import pallas_attn.ops.mla_decode.mosaic_swap_ab as mosaic_swap_ab
from pallas_attn.mosaic import basics, refusals
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.mosaic_rows_memory import NO_DRAFT, REAL, ROWS, Inputs, Static
from pallas_attn.ops.mla_decode.mosaic_rows_merge import merge_pieces
from pallas_attn.ops.plan_decode import plan_of
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    plan = plan_of(call, "mosaic_sm90", num_programs(call))
    return mosaic_swap_ab.decode(call, plan) if _are_few(call) else _decode_rows(call, plan)


def num_programs(call: MlaDecodeCall) -> int:
    """Programs that share the pages and run side by side on the card, for plans of such calls."""
    if _are_few(call):
        return mosaic_swap_ab.num_programs(call)
    _refuse(call)
    return max(1, basics.multiprocessors() // -(-call.query_rows // ROWS))  # a block of rows takes a multiprocessor


def _are_few(call: MlaDecodeCall) -> bool:
    """Whether a sequence's query rows are columns of tiles, not rows."""
    return call.query_rows <= config.max_columns(call.output_dtype)


def _decode_rows(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """As `mla_decode`, for many query rows."""
    q_latent, kv_lens, q_lens, draft_mask = call.q_latent, call.kv_lens, call.q_lens, call.draft_mask
    batch, num_queries, num_heads, latent_dim = q_latent.shape
    page_size, rows = call.page_size, call.query_rows
    settings = config.seesaw_config(latent_dim, call.rope_dim, page_size)
    blocks = -(-rows // ROWS)

    def as_rows(x: Array) -> Array:
        x = x.reshape(batch, rows, *x.shape[3:])
        return jnp.pad(x, ((0, 0), (0, blocks * ROWS - rows), *[(0, 0)] * (x.ndim - 2)))

    given = q_lens is not None or draft_mask is not None
    seen = _seen(real_queries(q_lens, kv_lens, num_queries), num_queries, draft_mask) if given else None
    inputs = Inputs(
        q_latent=as_rows(q_latent),
        q_rope=as_rows(call.q_rope),
        pages=call.cache.pages,
        block_tables=call.block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        plan=plan,
        seen=None if seen is None else as_rows(jnp.broadcast_to(seen[..., None], (batch, num_queries, num_heads))),
        seen_by_any=None if seen is None else lax.reduce(seen, jnp.int32(0), lax.bitwise_or, (1,)),
    )
    static = Static(
        latent_dim=latent_dim,
        rope_dim=call.rope_dim,
        queries=num_queries,
        heads=num_heads,
        page_size=page_size,
        pairs=settings.pairs,
        cluster=settings.cluster if blocks % settings.cluster == 0 else 1,
        causal=draft_mask is None,
        sm_scale=call.sm_scale,
    )
    out, lse, partials = mosaic_rows.decode(inputs, static, call.output_dtype)
    out, lse = merge_pieces(out, lse, partials, plan)
    lse = lse.swapaxes(0, 1).reshape(batch, -1)[:, :rows]
    return out[:, :rows].reshape(q_latent.shape), lse.reshape(q_latent.shape[:-1])


def _seen(q_lens: Int32[Array, "B"], num_queries: int, draft_mask: Bool[Array, "B Q Q"] | None) -> Int32[Array, "B Q"]:
    """What each query sees, as bits: j for draft key j, `REAL` for all older ones."""
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if draft_mask is None:
        draft_mask = (index[:, None] >= index[None])[None]
    real = index[None] < q_lens[:, None]
    shown = draft_mask & real[:, None, :] & real[:, :, None]
    bits = jnp.sum(jnp.where(shown, jnp.left_shift(1, index)[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(real, bits | jnp.int32(-(2**REAL)), 0)


def _refuse(call: MlaDecodeCall) -> None:
    """Raises NotImplementedError for what the kernels do not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(call.q_latent, call.cache.pages)
    refusals.require_page_size(call.page_size)
    num_queries, latent_dim, rope_dim = call.num_queries, call.latent_dim, call.rope_dim
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim not in (32, 64):
        raise NotImplementedError(
            "takes latents of 128 to 512 columns, a multiple of 64, and 32 or 64 rotated ones, "
            f"got {latent_dim} and {rope_dim}"
        )
    if num_queries > NO_DRAFT:
        raise NotImplementedError(f"takes at most {NO_DRAFT} queries, got {num_queries}")
