"""What `paged_prefill` computes: every token gathers every page of its sequence; mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable import oracle
from pallas_attn.portable.visibility import head_windows, in_window
from pallas_attn.types import HeadWindow, PagedKV


def paged_prefill(
    q: Float[Array, "T Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    sm_scale: float,
    window: int | HeadWindow | None,
    sinks: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), kv_lens.shape[0] - 1)
    position = (kv_lens - cu_q_lens[1:])[sequence] + token  # the last new token is the last the sequence holds
    real = (token < cu_q_lens[-1]) & (position >= 0)
    k, v, exists = (x[sequence] for x in oracle.gather_kv(kv, block_tables))  # [T, Hkv, K, ...]
    key = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    position = jnp.maximum(position, 0)[:, None, None]
    windows = head_windows(window, kv.k.shape[1])
    visible = in_window(key, position, windows.window[None, :, None], windows.sink_tokens[None, :, None])
    visible &= (key <= position) & real[:, None, None] & exists
    out, lse = oracle.attention(
        q[:, None], k, v, visible[:, :, None], sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks
    )
    return out[:, 0].astype(out_dtype), lse[:, 0]
