"""`mla_sparse` on Hopper (H100, H200): splits a token's slots into work items, runs a kernel, and merges the splits.

An item is a block of up to 64 heads of a token and one split of the token's slots. The number of splits depends on
shapes only. The slots of a token up to its last slot in the pool are divided evenly, in units of 128 slots. CTAs, one
per SM, process items in a static order. `mosaic_bf16` is the kernel for 16-bit latents, `mosaic_fp8` the kernel for fp8
latents, also for those of DeepSeek-V4, whose scales are powers of two.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper.mla_rows import EIGHT_ROWS, ROWS, TOKENS
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.ops.mla_sparse import config, mosaic_bf16, mosaic_fp8
from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.ops.mla_sparse.mosaic_items import (
    PAIR_TOKENS,
    ROTATED,
    SparseInputs,
    SparseStatic,
    merge_splits,
)
from pallas_attn.types import SlotRange


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    _require_supported(call)
    (num_tokens, num_heads, latent_dim), (top_k, *extra_k) = call.q_latent.shape, call.max_slots
    first_extra, unit = top_k, PAIR_TOKENS if isinstance(call.slots, SlotRange) else TOKENS
    if extra_k:
        first_extra = -(-top_k // unit) * unit
        top_k = first_extra + extra_k[0]
    blocks, pairs, quantised = -(-num_heads // ROWS), -(-top_k // PAIR_TOKENS), call.cache.is_quantised
    unit = EIGHT_ROWS * blocks
    static = SparseStatic(
        latent_dim=latent_dim,
        rope_dim=call.rope_dim,
        top_k=top_k,
        first_extra=first_extra,
        heads=-(-num_heads // unit) * unit,
        splits=config.num_splits(num_tokens * blocks, pairs, basics.multiprocessors()),
        sm_scale=call.sm_scale,
        small_groups=call.small_groups,
        page_sizes=tuple(cache.page_size for cache in call.caches) if isinstance(call.slots, SlotRange) else (),
    )
    kernel = mosaic_fp8 if quantised else mosaic_bf16
    inputs = SparseInputs.of(call, static)
    results = kernel.attend(inputs, static, call.output_dtype)
    if static.splits > 1:
        results = merge_splits(results, inputs.sinks, static, num_tokens, call.output_dtype)
    out, lse = results
    return out[:, :num_heads], lse[..., : static.rows].reshape(num_tokens, -1)[:, :num_heads]


def _require_supported(call: MlaSparseCall) -> None:
    """Raise NotImplementedError for unsupported calls."""
    basics.require_capability((9, 0))
    for pool in call.caches:
        unsupported.require_int32_rows(pool.pages.shape[0] * pool.page_size)
    cache, latent_dim, rope_dim = call.cache, call.q_latent.shape[2], call.rope_dim
    if cache.is_quantised and not call.small_groups and (call.extra_cache is not None or call.sinks is not None):
        raise NotImplementedError("takes one cache of latents with float32 scales, without learned sinks")
    unsupported.require_dtypes(call.q_latent.dtype, (cache.pages if cache.rope is None else cache.rope).dtype)
    if cache.is_quantised and call.q_latent.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 queries over quantised latents, got {call.q_latent.dtype.name}")
    if call.small_groups:
        _require_small_groups(call)
        return
    rope_dims = (TOKENS,) if cache.is_quantised else (0, TOKENS)
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim not in rope_dims:
        raise NotImplementedError(
            f"takes latents of 128 to 512 columns, a multiple of 64, and {' or '.join(map(str, rope_dims))} rotated"
            f" ones, got {latent_dim} and {rope_dim}"
        )


def _require_small_groups(call: MlaSparseCall) -> None:
    """Raise NotImplementedError for unsupported caches with scales that are powers of two."""
    rope = call.cache.rope
    rotated = 0 if rope is None else rope.shape[2]
    if rope is None or rope.dtype != jnp.bfloat16 or rotated != ROTATED or call.rope_dim:
        raise NotImplementedError(
            f"takes scales that are powers of two only with {ROTATED} bfloat16 rotated columns that are values, too"
        )
    if not 128 <= (latent_dim := call.cache.pages.shape[2]) <= 448:
        raise NotImplementedError(f"takes 128 to 448 columns with scales that are powers of two, got {latent_dim}")
