"""What `paged_decode` computes: gather every page, mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.portable import oracle
from pallas_attn.portable.visibility import draft_visible, head_windows, in_window, real_queries
from pallas_attn.types import DecodePlan, HeadWindow, PagedKV


def paged_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    window: int | HeadWindow | None,
    sinks: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    del plan  # nothing here is split
    q_lens = real_queries(q_lens, kv_lens, q.shape[1])
    k, v, exists = oracle.gather_kv(kv, block_tables)
    key = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32)[None], (k.shape[0], k.shape[2]))
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    position = jnp.maximum((kv_lens - q_lens)[:, None] + index[None], 0)
    windows = head_windows(window, kv.k.shape[1])
    visible = in_window(
        key[:, None, None, :],
        position[:, None, :, None],
        windows.window[None, :, None, None],
        windows.sink_tokens[None, :, None, None],
    )
    visible &= draft_visible(key, index, kv_lens, q_lens, draft_mask)[:, None] & exists[:, :, None, :]
    out, lse = oracle.attention(q, k, v, visible, sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks)
    return out.astype(out_dtype), lse
