"""`mla_decode` on Hopper (H100, H200) for few query rows, with operands swapped; memory is the limit.

Every query head reads the same key, whose first L columns are the value, too. All query rows of a sequence are the
columns of a tile, and 64 tokens its rows:

    S [64 tokens, columns] = C qᵀ      O [L, columns] += (C's latent part)ᵀ P      m, l [columns]

so a tile C [64 tokens, L + R] is read once from global memory and multiplied twice from where it landed, and wgmma's M
of 64 are tokens in one product and latent columns in the other, however few the query rows. The latent and the rope
part of a tile are arrays of their own, since O takes the latent alone. The kernel is that of `paged_decode`
(`sm90.decode`), with one KV head and no values apart from the keys.

O limits the columns: at L 512, 32 of them are half of a program's registers. More query rows would be several blocks
that each read the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90.decode import DecodeInputs, DecodeStatic, decode_attention
from pallas_attn.mosaic.sm90.decode_config import DecodeConfig
from pallas_attn.mosaic.sm90.query_packing import QueryPacking
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.plan_decode import plan_decode
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan, PagedLatent


def decode(
    q_latent: Float[Array, "B Q Hq L"],
    q_rope: Float[Array, "B Q Hq R"],
    cache: PagedLatent,
    block_tables: Int32[Array, "B P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute `mla_decode`, output and LSE, of few query rows.

    Raises:
      NotImplementedError: not on Hopper, or dtypes, widths, pages or draft masks the kernel does not take.
    """
    _refuse(q_latent, q_rope, cache, draft_mask, out_dtype)
    packing, settings = _sizes(q_latent, q_rope, cache, out_dtype)
    if plan is None:
        plan = plan_decode(
            kv_lens,
            q_lens=real_queries(q_lens, kv_lens, q_latent.shape[1]),
            page_size=cache.page_size,
            num_q_heads=q_latent.shape[2],
            num_kv_heads=1,
            num_programs=settings.programs_per_multiprocessor * basics.multiprocessors(),
        )
    inputs = DecodeInputs(
        q=tuple(packing.pack(q).reshape(1, -1, packing.width, q.shape[-1]) for q in (q_latent, q_rope)),
        k=cache.pages,
        v=None,
        k_scale=None,
        v_scale=None,
        block_tables=block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        plan=plan,
        window=None,
        drafts=None if draft_mask is None else packing.drafts(draft_mask),
        sinks=None,
    )
    static = DecodeStatic(
        tile=config.swap_ab_tile(
            packing,
            settings.tile_tokens,
            cache.page_size,
            (q_latent.shape[-1], q_rope.shape[-1]),
            dtype=q_latent.dtype,
            out_dtype=out_dtype,
        ),
        stages=settings.stages,
        num_kv_heads=1,
        score_scale=sm_scale,
        soft_cap=None,
        window=None,
    )
    return decode_attention(inputs, static, q_latent.shape, name="mla_decode")


def decode_programs(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    *,
    out_dtype: jax.typing.DTypeLike,
) -> int:
    """Number of programs that a plan for such a call should have.

    Raises:
      NotImplementedError: as `decode`.
    """
    _refuse(q_latent, q_rope, cache, None, out_dtype)
    _, settings = _sizes(q_latent, q_rope, cache, out_dtype)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[QueryPacking, DecodeConfig]:
    num_queries, num_heads, latent_dim = q_latent.shape[1:]
    packing = QueryPacking(num_heads, num_queries, config.max_columns(out_dtype))
    key = config.SwapAbKey(
        latent_dim=latent_dim,
        rope_dim=q_rope.shape[-1],
        columns=packing.width,
        out_bytes=jnp.dtype(out_dtype).itemsize,
        page_size=cache.page_size,
    )
    return packing, config.swap_ab_config(key)


def _refuse(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    draft_mask: Array | None,
    out_dtype: jax.typing.DTypeLike,
) -> None:
    """Raise NotImplementedError for calls that the kernel does not take."""
    basics.require_hopper()
    num_queries, num_heads, latent_dim = q_latent.shape[1:]
    refusals.require_dtypes(q_latent, cache.pages)
    refusals.require_page_size(cache.page_size)
    if latent_dim % 64 or not 64 <= latent_dim <= 512:
        raise NotImplementedError(f"takes latents of a multiple of 64 columns up to 512, got {latent_dim}")
    if q_rope.shape[-1] not in (32, 64):
        raise NotImplementedError(f"takes 32 or 64 rotated columns, got {q_rope.shape[-1]}")
    if num_heads > config.max_columns(out_dtype):
        raise NotImplementedError(f"takes at most {config.max_columns(out_dtype)} query heads, got {num_heads}")
    if draft_mask is not None:
        refusals.require_draft_bits(num_queries)
