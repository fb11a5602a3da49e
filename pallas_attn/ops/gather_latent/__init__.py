"""Gather the cached and new latents of all sequences into one packed array."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.gather_latent.call import GatherLatentCall
from pallas_attn.portable.latents import as_read_back
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedLatent


def gather_latent(
    cache: PagedLatent,
    latent_new: Float[Array, "T LR"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    length: int,
    implementation: Implementation = None,
) -> Float[Array, "length LR"]:
    """Copy the latents of all sequences to one array, sequence after sequence.

    For each sequence, the result has the cached latents, followed by the new latents. Sequence s has
    cu_q_lens[s + 1] - cu_q_lens[s] new tokens in `latent_new`. Its other kv_lens[s] - (number of new tokens) tokens are
    in its pages. Sequence s starts at row sum(kv_lens[:s]) of the result.

    Values of a cache without scales are copied without change. Cached tokens of a quantised cache are dequantised. New
    tokens are rounded to the values that a write to the cache and a later read would return.

    Args:
      cache: the latents and rotated keys; see `PagedLatent`. 8-bit latents must have scales.
      latent_new: packed new tokens, in the cache's dtype, or in any 16-bit or 32-bit dtype for a quantised cache. The
        result has this dtype. T may be 0 if no sequence has new tokens.
      block_tables: page ids. Entries after the cached tokens are ignored. Tokens in absent pages, or in pages outside
        the pool, are 0.
      cu_q_lens: prefix sums of the numbers of new tokens. An entry below the largest previous entry, such as a 0 at the
        end, counts as the largest previous entry.
      kv_lens: number of tokens of each sequence, cached and new.
      length: number of rows of the result. Rows after sum(kv_lens) are 0. Tokens after `length` are dropped.
      implementation: None, a name, or names to try in order.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> block_tables, cu_q_lens = jnp.array([[5, 0]], jnp.int32), jnp.array([0, 2], jnp.int32)
      >>> kv_lens = jnp.array([7], jnp.int32)  # 5 cached tokens and 2 new ones
      >>> pallas_attn.gather_latent(cache, jnp.ones((2, 8)), block_tables, cu_q_lens, kv_lens, length=8)[:, 0].tolist()
      [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    call = GatherLatentCall(cache, latent_new, block_tables, cu_q_lens, kv_lens, length=length)
    call.validate()
    if not call.num_sequences:
        return jnp.zeros((call.length, latent_new.shape[1]), latent_new.dtype)
    return dispatch.run(dataclasses.replace(call, latent_new=as_read_back(latent_new, cache)), implementation)
