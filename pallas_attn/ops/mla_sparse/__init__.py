"""Latent attention of each token to its selected keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1; DeepSeek-V4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedLatent, SlotRange


def mla_sparse(
    q_latent: Float[Array, "T Hq L"],
    q_rope: Float[Array, "T Hq R"] | None,
    cache: PagedLatent,
    slots: Int32[Array, "T K"] | SlotRange,
    *,
    sm_scale: float,
    extra_cache: PagedLatent | None = None,
    extra_slots: Int32[Array, "T Ke"] | SlotRange | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "T Hq L"] | tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    """Compute attention of every token to the latents in its selected slots. `mla_decode` attends to all latents
    instead.

    A slot is the place of one token in the cache. Tokens of decode requests and of prompt chunks are treated alike.
    Token t sees exactly the slots in `slots[t]`; causality is not applied, so the selection must respect it.

    With `extra_cache`, one softmax covers the slots of two caches, for example the window of a token (`window_slots`)
    and compressed entries (`entry_slots`, or `token_slots` of selected entries).

    If the keys of each token are consecutive, a `SlotRange` replaces the list of slots (`window_range`, `entry_range`):
    kernels compute the slots from the block table. Kernels for GPUs have not run with a `SlotRange` yet.

    Args:
      q_latent: queries for the latent columns, with W_UK absorbed.
      q_rope: rotated queries for the rotated key columns, in the same dtype. None if all L columns are key and value:
        the cache has R = 0, or scales and L columns including the rotated keys.
      cache: the latents and rotated keys; see `PagedLatent`. 8-bit latents must have scales.
      slots: page · ps + offset of the latents that each token attends to, from `token_slots`. A token must not name a
        slot twice. -1 and slots outside the pool are ignored. Or a `SlotRange`.
      sm_scale: factor of the scores. It has no default, because it depends on the width of a key before absorption.
      extra_cache: a second cache with arrays of the same dtypes and widths, or None.
      extra_slots: slots of `extra_cache` that each token attends to, in the form of `slots`; None without a second
        cache. Kernels skip trailing -1 of the last list of slots only, so the longer list belongs here. A `SlotRange`
        if `slots` is one.
      sinks: one learned logit per head (float32) that enters the head's softmax denominator once, unscaled.
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for the dtype of q_latent.
      implementation: None, a name, or names to try in order.

    Returns:
      Output in the latent space; exactly 0 for tokens without a slot in the pool. With `return_lse` also the float32
      natural-log LSE of the scaled scores without the learned sinks; -inf for tokens without a slot in the pool.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> slots = jnp.array([[20, 1, 2], [12, -1, -1]], jnp.int32)
      >>> pallas_attn.mla_sparse(jnp.ones((2, 4, 6)), jnp.ones((2, 4, 2)), cache, slots, sm_scale=0.1).shape
      (2, 4, 6)
    """
    slots, extra_slots = checks.int32(slots=slots, extra_slots=extra_slots)
    call = MlaSparseCall(
        q_latent,
        q_rope,
        cache,
        slots,
        extra_cache,
        extra_slots,
        sinks,
        sm_scale=checks.required_number("sm_scale", sm_scale),
        out_dtype=out_dtype,
    )
    call.validate()
    if not q_latent.shape[0]:
        out, lse = jnp.zeros(q_latent.shape, call.output_dtype), jnp.zeros(q_latent.shape[:2], jnp.float32)
    else:
        out, lse = dispatch.run(call, implementation)
    return (out, lse) if return_lse else out
