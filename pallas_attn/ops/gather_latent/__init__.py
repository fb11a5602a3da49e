"""Cached and new latents of each sequence, back to back in one ragged array."""

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
    """Gathers each sequence's cached and new latents, [cached..., new...], bit for bit, sequence after sequence.

    Sequence s has cu_q_lens[s + 1] - cu_q_lens[s] new tokens, read from `latent_new`; the kv_lens[s] minus that many
    before them are read from its pages. It starts at the sum of the kv_lens before it.

    From a quantised cache tokens come dequantised, the stored values times their scales, and new ones come as they
    would be read back.

    Args:
      cache: of any dtype.
      latent_new: the packed new tokens, in the cache's dtype, or in any 16-bit or 32-bit dtype for a quantised one;
        the dtype of the result. T may be 0 where every length is.
      block_tables: page ids; entries past the cached tokens may hold anything. Tokens of pages that are absent, or
        outside the pool, are 0.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      kv_lens: tokens each sequence holds, cached and new.
      length: rows of the result; those past the sum of kv_lens are 0, tokens past `length` are left out.
      implementation: None, a name, or names to try in order.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.

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
