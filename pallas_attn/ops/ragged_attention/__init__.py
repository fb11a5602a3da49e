"""Attention within packed sequences of any lengths. Keys and values may have different widths."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation


def ragged_attention(
    q: Float[Array, "T Hq Dk"],
    k: Float[Array, "U Hkv Dk"],
    v: Float[Array, "U Hkv Dv"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    cu_kv_lens: Int32[Array, "S_plus_1"],
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "T Hq Dv"] | tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Attention within each of S packed sequences.

    Args:
      q: packed queries. Sequence s has the tokens cu_q_lens[s] to cu_q_lens[s + 1] - 1; other tokens are padding.
      k, v: packed keys and values in the dtype of q. Sequence s has the tokens cu_kv_lens[s] to cu_kv_lens[s + 1] - 1.
        Other tokens may have any value.
      cu_q_lens, cu_kv_lens: prefix sums of the lengths. A sequence may have no queries, no keys, or neither. An entry
        less than an earlier one, such as a 0 at the end, counts as the largest earlier entry.
      causal: whether the last query sees all keys, the query before it all keys but one, and so on.
      sm_scale: factor of the scores; None for Dk**-0.5.
      window: a query sees only this number of newest keys of its causal keys; None for all. A window needs `causal`.
      sinks: float32 logits, one per head, that are added to the softmax denominator, unscaled and uncapped.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for the dtype of q.
      implementation: None, a name, or names to try in order.

    Returns:
      The output, exactly 0 for padding tokens and queries that see no key. With `return_lse` also the float32
      natural-log LSE of the scaled, capped, masked scores without the sinks; -inf for the same tokens.

    Raises:
      ValueError: arguments do not match each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> q, k, v = jnp.ones((5, 2, 8)), jnp.ones((9, 1, 8)), jnp.ones((9, 1, 4))
      >>> cu_q_lens, cu_kv_lens = jnp.array([0, 2, 5], jnp.int32), jnp.array([0, 6, 9], jnp.int32)
      >>> pallas_attn.ragged_attention(q, k, v, cu_q_lens, cu_kv_lens).shape
      (5, 2, 4)
    """
    cu_q_lens, cu_kv_lens = checks.int32(cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens)
    call = RaggedAttentionCall(
        q,
        k,
        v,
        cu_q_lens,
        cu_kv_lens,
        sinks=sinks,
        causal=checks.flag("causal", causal),
        window=checks.window(window),
        sm_scale=checks.number("sm_scale", sm_scale),
        soft_cap=checks.number("soft_cap", soft_cap),
        out_dtype=out_dtype,
        return_lse=bool(return_lse),
    )
    call.validate()
    has_keys = call.num_tokens and call.num_keys and call.num_sequences
    out, lse = dispatch.run(call, implementation) if has_keys else call.without_keys()
    return (out, lse) if return_lse else out
