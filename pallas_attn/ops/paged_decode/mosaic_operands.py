"""Operands of the `mosaic.decode` kernel for a call of `paged_decode`, and checks for unsupported calls."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.mosaic.decode import SCALES_PER_COPY, DecodeInputs, DecodeStatic, DecodeTile
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.paged_decode.call import PagedDecodeCall
from pallas_attn.ops.paged_decode.config import PagedDecodeKey
from pallas_attn.runtime.device import Architecture
from pallas_attn.types import DecodePlan, HeadWindow


def operands(
    call: PagedDecodeCall,
    plan: DecodePlan,
    tile: DecodeTile,
    stages: int,
    query_parts: list[Array],
    query_scale: float,
) -> tuple[DecodeInputs, DecodeStatic]:
    """Return the kernel operands and compile-time parameters of a call.

    Args:
      stages: number of tiles in shared memory.
      query_parts: one or two arrays [B, Q, Hq, D], whose sum is the queries times `query_scale`.
      query_scale: factor that the kernel removes from the scores.
    """
    kv, draft_mask, sinks, window, packing = call.kv, call.draft_mask, call.sinks, call.window, tile.packing
    q_scale = call.q_scale
    packed = (
        [] if tile.packs_queries else [packing.pack(x).reshape(-1, packing.width, call.head_dim) for x in query_parts]
    )
    pool_of = functools.partial(
        basics.pool_of_pages,
        page_size=tile.page_size,
        tokens_per_row=tile.tokens_per_row,
        tokens_first=tile.tokens_first,
    )
    inputs = DecodeInputs(
        q=(call.q if tile.packs_queries else jnp.stack(packed),),
        k=pool_of(kv.k),
        v=pool_of(kv.values[0]),
        rope=None,
        k_scale=None if tile.scales == "channel" else _one_axis(kv.k_scale),
        v_scale=_one_axis(kv.v_scale),
        q_scale=None if q_scale is None else packing.pack(q_scale[..., None]).reshape(-1, packing.width),
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        window=window if isinstance(window, HeadWindow) else None,
        drafts=None if draft_mask is None else packing.drafts(draft_mask),
        sinks=None if sinks is None else packing.per_head(sinks),
    )
    static = DecodeStatic(
        tile=tile,
        stages=stages,
        num_kv_heads=call.num_kv_heads,
        score_scale=call.scale / query_scale,
        soft_cap=call.soft_cap,
        window=window if isinstance(window, int) else None,
    )
    return inputs, static


def require_supported(call: PagedDecodeCall, architecture: Architecture, limit: int) -> None:
    """Raise NotImplementedError for calls that the kernel does not support.

    Args:
      limit: maximum number of columns of a tile. The columns are query rows of one KV head.
    """
    basics.require_capability(architecture)
    if architecture == (9, 0):
        unsupported.require_layout(call.kv, call.head_dim, call.block_tables)
    else:
        unsupported.require_own_layout(call.kv)
    unsupported.require_dtypes(call.q.dtype, call.kv.k.dtype)
    no_wider = None if architecture == (9, 0) else unsupported.NO_WIDER_ON_BLACKWELL
    unsupported.require_head_dim(call.head_dim, _head_dims(architecture, call.kv.k.dtype.itemsize), no_wider)
    unsupported.require_page_size(call.plan_page_size)
    if call.group > limit and QueryPacking(call.group, 1, limit).block_heads < limit // 2:
        raise NotImplementedError(
            f"takes {limit // 2} to {limit} query heads at once that divide a group; {call.group} have no such divisor"
        )
    if call.draft_mask is not None:
        unsupported.require_draft_bits(call.num_queries)
    unsupported.require_soft_cap(call.soft_cap)


def _head_dims(architecture: Architecture, cache_bytes: int) -> tuple[int, ...]:
    """Return the head widths that the kernel supports for a cache with `cache_bytes` bytes per value."""
    if architecture != (9, 0):
        return unsupported.HEAD_DIMS
    return unsupported.WIDE_HEAD_DIMS if cache_bytes == 2 else unsupported.WIDE_8_BIT_HEAD_DIMS


def config_key(call: PagedDecodeCall, columns: int) -> PagedDecodeKey:
    """Return the key of the kernel's configuration for a call, given the number of its tile columns."""
    scales = call.kv.k_scale
    return PagedDecodeKey(
        head_dim=call.head_dim,
        cache_bytes=call.kv.k.dtype.itemsize,
        token_scales=scales is not None and scales.ndim == 3,
        columns=columns,
        terms=2 if scales is not None and scales.ndim == 2 else 1,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.plan_page_size,
    )


def _one_axis(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Flatten scales per token or group of tokens, and pad them so that no copy of the kernel reads past the end.

    Return other scales unchanged.
    """
    if scale is None or scale.ndim != 3:
        return scale
    scale = scale.reshape(-1)
    return jnp.pad(scale, (0, -scale.size % SCALES_PER_COPY)) if scale.size % SCALES_PER_COPY else scale
