"""Absorbed multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over a paged latent cache."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import DecodePlan, Implementation, PagedLatent


def mla_decode(
    q_latent: Float[Array, "B Q Hq L"],
    q_rope: Float[Array, "B Q Hq R"],
    cache: PagedLatent,
    block_tables: Int32[Array, "B P"],
    kv_lens: Int32[Array, "B"],
    *,
    sm_scale: float,
    q_lens: Int32[Array, "B"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    draft_mask: Bool[Array, "B Q Q"] | None = None,
    plan: DecodePlan | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Q Hq L"] | tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute attention of each sequence's newest Q tokens over its latents.

    Every head reads the same [L + R] key, whose first L columns are also the value. The caller absorbs the
    up-projections: W_UK into `q_latent`, and W_UV after this call into the output.

    Query i of sequence b has position kv_lens[b] - q_lens[b] + i. It sees the latents up to its own position that are
    in the window. The latents of the new tokens must already be in the pages.

    Args:
      q_latent: queries for the latent columns, with W_UK absorbed.
      q_rope: rotated queries for the rotated key columns, in the same dtype.
      cache: the latents and rotated keys; see `PagedLatent`. All its dtypes are supported.
      block_tables: page ids. Tokens of PAGE_NONE and of ids outside the pool are invisible. Entries without a visible
        token may have any value.
      kv_lens: tokens per sequence, including the new tokens; 0 for an idle sequence.
      sm_scale: factor of the scores. It has no default, because it depends on the width of a key before absorption.
      q_lens: number of real queries per sequence, at most Q; None if every sequence has Q queries.
      window: number of newest latents that every head sees; None for all.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      draft_mask: entry [b, i, j] is True if query i sees draft key j, the key at position kv_len - q_len + j; replaces
        causality among draft keys.
      plan: from `plan_decode` with the queries (q_latent, q_rope); changes speed and rounding only.
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for the dtype of q_latent.
      implementation: None, a name, or names to try in order.

    Returns:
      Output in the latent space; exactly 0 for queries that see no latent: queries of idle sequences, queries from
      q_len on, and queries with a negative position. With `return_lse` also the float32 natural-log LSE of the scaled,
      capped, masked scores; -inf for queries that see no latent.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> q_latent, q_rope, kv_lens = jnp.ones((2, 1, 4, 6)), jnp.ones((2, 1, 4, 2)), jnp.array([9, 3], jnp.int32)
      >>> pallas_attn.mla_decode(q_latent, q_rope, cache, block_tables, kv_lens, sm_scale=0.1).shape
      (2, 1, 4, 6)
    """
    block_tables, kv_lens, q_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens, q_lens=q_lens)
    call = MlaDecodeCall(
        q_latent,
        q_rope,
        cache,
        block_tables,
        kv_lens,
        q_lens=q_lens,
        draft_mask=draft_mask,
        plan=plan,
        sm_scale=checks.required_number("sm_scale", sm_scale),
        out_dtype=out_dtype,
        window=checks.window(window),
        soft_cap=checks.number("soft_cap", soft_cap),
    )
    call.validate()
    out, lse = dispatch.run(call, implementation) if q_latent.size else call.without_queries()
    return (out, lse) if return_lse else out
