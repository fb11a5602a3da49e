"""Definition of `ragged_attention`: every query against every key, with keys of other sequences masked."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall
from pallas_attn.portable import oracle


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    q, cu_q_lens, cu_kv_lens = call.q, call.cu_q_lens, call.cu_kv_lens
    query = jnp.arange(q.shape[0], dtype=jnp.int32)
    key = jnp.arange(call.num_keys, dtype=jnp.int32)
    sequence_of_query = jnp.searchsorted(cu_q_lens[1:], query, side="right")
    sequence_of_key = jnp.searchsorted(cu_kv_lens[1:], key, side="right")
    visible = sequence_of_query[:, None] == sequence_of_key[None]
    visible &= ((query >= cu_q_lens[0]) & (query < cu_q_lens[-1]))[:, None] & (key >= cu_kv_lens[0])[None]
    if call.causal:
        from_end_of_query = cu_q_lens[1:].at[sequence_of_query].get(mode="clip") - query
        from_end_of_key = cu_kv_lens[1:].at[sequence_of_key].get(mode="clip") - key
        before_diagonal = from_end_of_key[None] - from_end_of_query[:, None]
        visible &= before_diagonal >= 0
        if call.window is not None:
            visible &= before_diagonal < call.window
    k, v = (x.swapaxes(0, 1)[None] for x in (call.k, call.v))

    def attend(
        query: tuple[Float[Array, "Hq Dk"], Bool[Array, "U"]],
    ) -> tuple[Float[Array, "Hq Dv"], Float[Array, "Hq"]]:
        """Compute one query. Queries are computed separately, so that NaN in keys that a query does not see cannot
        affect its output."""
        q, visible = query
        out, lse = oracle.attention(
            q[None, None],
            k,
            v,
            visible[None, None, None],
            sm_scale=call.scale,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        )
        return out[0, 0], lse[0, 0]

    out, lse = lax.map(attend, (q, visible))
    return out.astype(call.output_dtype), lse
