"""`mla_decode` on Hopper (H100, H200) for few query rows, with swapped operands (swap-AB). Memory bandwidth limits it.

Every query head reads the same key. The first L columns of the key are the value. A query row is one head of one query
token. All query rows of a sequence are the columns of a tile, and 64 tokens are its rows:

    S [64 tokens, columns] = C qᵀ      O [L, columns] += C[:, :L]ᵀ P      m, l [columns]

A tile C [64 tokens, L + R] is read once from global memory, and both products read it from the same shared memory. The
64 rows (M) of a wgmma are tokens in the first product, and latent columns in the second. Few query rows therefore leave
no rows of the tensor core unused. The latent and the rotated columns of a tile are separate arrays, because the second
product reads only the latent columns.

The main loop is `decode_attention` in `pallas_attn/mosaic/decode.py`, the kernel of `paged_decode`, with one KV head
and without separate values.

The size of O limits the number of columns: at L = 512, 32 columns take half of a CTA's registers. More query rows are
split into blocks, and each block reads the cache again.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.decode import DecodeInputs, DecodeStatic, decode_attention
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.hopper.dequantize import as_keys
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.dequantize import latent_queries
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.types import DecodePlan


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute output and LSE of `mla_decode` for few query rows."""
    packing, settings = _sizes(call)
    cache, queries, query_scale = call.cache, (call.q_latent, call.q_rope), 1.0
    if cache.scale is not None:
        q_latent, q_rope, query_scale = latent_queries(*queries)
        queries = as_keys(q_latent), q_rope
    inputs = DecodeInputs(
        q=tuple(packing.pack(q).reshape(1, -1, packing.width, q.shape[-1]) for q in queries),
        k=cache.pages,
        v=None,
        rope=cache.rope,
        k_scale=None if cache.scale is None else cache.scale.reshape(cache.scale.shape[0], -1),
        v_scale=None,
        q_scale=None,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        window=None,
        drafts=None if call.draft_mask is None else packing.drafts(call.draft_mask),
        sinks=None,
    )
    tile = config.swap_ab_tile(
        packing,
        settings.tile_tokens,
        call.page_size,
        (call.latent_dim, call.rope_dim),
        dtype=call.q_latent.dtype,
        out_dtype=call.output_dtype,
        quantised=cache.is_quantised,
    )
    static = DecodeStatic(
        tile=tile,
        stages=settings.stages,
        num_kv_heads=1,
        score_scale=call.sm_scale / query_scale,
        soft_cap=None,
        window=None,
    )
    return decode_attention(inputs, static, call.q_latent.shape, name="mla_decode")


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call: the number of CTAs that run concurrently on the GPU.

    Raises:
      NotImplementedError: unsupported architecture, dtype, width, page size, number of heads or draft mask.
    """
    _require_supported(call)
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: MlaDecodeCall) -> tuple[QueryPacking, DecodeConfig]:
    """Return the arrangement of query rows in columns, and the sizes of the kernel."""
    packing = QueryPacking(call.num_heads, call.num_queries, _most_columns(call))
    key = config.SwapAbKey(
        latent_dim=call.latent_dim,
        rope_dim=call.rope_dim,
        columns=packing.width,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.page_size,
        quantised=call.cache.is_quantised,
    )
    return packing, config.swap_ab_config(key)


def _most_columns(call: MlaDecodeCall) -> int:
    """Return the maximum number of columns of a tile."""
    is_masked = call.draft_mask is not None
    return config.max_columns(call.output_dtype, quantised=call.cache.is_quantised, masked=is_masked)


def _require_supported(call: MlaDecodeCall) -> None:
    """Raise NotImplementedError for unsupported calls."""
    basics.require_capability((9, 0))
    latent_dim, num_heads, most = call.latent_dim, call.num_heads, _most_columns(call)
    unsupported.require_dtypes(
        call.q_latent.dtype, (call.cache.pages if call.cache.rope is None else call.cache.rope).dtype
    )
    if num_heads > most:
        raise NotImplementedError(f"takes at most {most} query heads, got {num_heads}")
    unsupported.require_page_size(call.page_size)
    if latent_dim % 64 or not 64 <= latent_dim <= 512:
        raise NotImplementedError(f"takes latents of a multiple of 64 columns up to 512, got {latent_dim}")
    if call.rope_dim not in (32, 64):
        raise NotImplementedError(f"takes 32 or 64 rotated columns, got {call.rope_dim}")
    if call.draft_mask is not None:
        unsupported.require_draft_bits(call.num_queries)
