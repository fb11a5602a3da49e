"""Prefill with multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

New tokens attend to a cached prefix and to each other. `composition.py` has the algorithm, which calls `gather_latent`,
`ragged_attention` and `mla_decode`. `config.py` has its settings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.mla_prefill import config
from pallas_attn.ops.mla_prefill.composition import MlaPrefillCall
from pallas_attn.portable.arguments import refuse_gradients, varying_like
from pallas_attn.runtime import sharded_calls
from pallas_attn.types import Implementation, PagedLatent


@sharded_calls.over_devices
def mla_prefill(
    q_nope: Float[Array, "T Hq nope"],
    q_rope: Float[Array, "T Hq R"],
    latent_new: Float[Array, "T LR"] | None,
    cache: PagedLatent,
    w_uk: Float[Array, "Hq nope L"],
    w_uv: Float[Array, "Hq v L"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    absorbed: bool | None = None,
    piece_tokens: int | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "T Hq v"] | tuple[Float[Array, "T Hq v"], Float[Array, "T Hq"]]:
    """Causal multi-head latent attention of the new tokens of each sequence to their cached prefix and to each other.

    Keys and values are computed from latents in one of two forms. "Expanded": every latent is multiplied by `w_uk` and
    `w_uv`, which gives a key and a value per head. "Absorbed": queries are multiplied by `w_uk` and outputs by `w_uv`,
    so that all heads attend to the latents themselves. The attention of new tokens to each other is always expanded.

    Args:
      q_nope, q_rope: packed queries, bfloat16, float16 or float32: columns without and with rotary embedding. Tokens
        that belong to no sequence are padding.
      latent_new: [T, L + R], latents (after their norm) and rotated keys of the new tokens, in the dtype of the cache;
        for a quantised cache in bfloat16, float16 or float32. None if the queries see the whole cached prefix and no
        new tokens.
      cache: the cache with the prefix. It is only read. If it already contains the new tokens, the result is the same.
        If it is quantised, new tokens are rounded to the values that a later read from the cache returns.
      w_uk, w_uv: weights of each head that map a latent to the key's unrotated columns, and to the value.
      block_tables: page ids of the cached tokens. Later entries may have any value.
      cu_q_lens: prefix sums of the numbers of new tokens: sequence s has the tokens from cu_q_lens[s] to
        cu_q_lens[s + 1]. An entry below an earlier entry, such as a 0 at the end, counts as the largest earlier entry.
      kv_lens: tokens of each sequence, cached and new; without `latent_new`, the cached tokens only.
      sm_scale: factor of the scores. It has no default, because DeepSeek's factor also depends on the YaRN settings.
      window: number of newest tokens that every head sees; None for all. With a window, all cached tokens that a query
        can see, up to about S · window, are expanded at once.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      absorbed: form of the attention to the prefix: True for absorbed, False for expanded, None for the form that is
        expected to be faster. With a window, only None and False are supported, and both mean expanded. None means
        absorbed if Mosaic's `mla_decode` supports the call and the sequences have at most n new tokens on average,
        weighted by their cached tokens. n is about 320 for 128 heads of DeepSeek-V3's widths, and 512 for 16 heads
        (see `AbsorptionConfig`). The device computes the average; for small T (at most n, and at most 128 for 128
        heads or 512 for 16 heads), absorbed is chosen when the call is traced.
      piece_tokens: number of prefix tokens, of all sequences together, that are expanded at a time, rounded up to
        whole pages. None for the fastest measured number; see `PrefixChunkConfig`. Ignored with a window.
      return_lse: also return the LSE.
      implementation: implementation of `gather_latent`, `ragged_attention` and `mla_decode`.

    Returns:
      The output in the dtype of q, exactly 0 for padding tokens and for queries that see no key. With `return_lse` also
      the LSE: the natural logarithm of the sum of exp(score) over visible keys, float32; -inf where the output is 0.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: a window without `latent_new` (queries then have no position from which a window counts), a
        window with `absorbed=True`, or a call that the named implementation does not support.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 5], jnp.int32), jnp.array([9, 3], jnp.int32)  # 7 tokens are cached
      >>> q_nope, q_rope, latent_new = jnp.ones((5, 4, 3)), jnp.ones((5, 4, 2)), jnp.ones((5, 8))
      >>> w_uk, w_uv = jnp.ones((4, 3, 6)), jnp.ones((4, 5, 6))
      >>> pallas_attn.mla_prefill(
      ...     q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, sm_scale=0.1
      ... ).shape
      (5, 4, 5)
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    sm_scale, soft_cap = checks.required_number("sm_scale", sm_scale), checks.number("soft_cap", soft_cap)
    window = checks.window(window)
    checks.check_int_window(window)
    if window is not None and latent_new is None:
        raise NotImplementedError("window: takes None without latent_new, because queries have no position then")
    if absorbed is not None:
        absorbed = checks.flag("absorbed", absorbed)
    if window is not None and absorbed:
        raise NotImplementedError(
            "absorbed: takes None or False with a window, because keys in a window are always expanded; got True"
        )
    _check(q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, piece_tokens)
    if not (q_nope.shape[0] and kv_lens.shape[0]):
        empty = jnp.zeros((*q_nope.shape[:2], w_uv.shape[1]), q_nope.dtype)
        return (empty, jnp.full(q_nope.shape[:2], -jnp.inf, jnp.float32)) if return_lse else empty
    q_nope, q_rope, latent_new, cache, w_uk, w_uv = refuse_gradients(
        "mla_prefill", (q_nope, q_rope, latent_new, cache, w_uk, w_uv)
    )
    cu_q_lens = checks.bound_sums(cu_q_lens, q_nope.shape[0])
    num_cached = kv_lens if latent_new is None else jnp.maximum(kv_lens, 0) - jnp.diff(cu_q_lens)
    if piece_tokens is None:
        width = w_uk.shape[1] + q_rope.shape[2] + w_uv.shape[1]
        piece_tokens = config.prefix_chunk_config(q_nope.shape[1], width).piece_tokens
    call = MlaPrefillCall(
        jnp.concatenate([q_nope, q_rope], axis=-1),
        latent_new,
        cache,
        w_uk,
        w_uv,
        block_tables,
        cu_q_lens,
        num_cached=checks.bound_lens(num_cached, block_tables.shape[1] * cache.page_size),
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        implementation=implementation,
    )
    with jax.named_scope("mla_prefill"):
        if window is not None:
            out, lse = call.in_window(window)
        else:
            state = call.new_tokens()
            state = varying_like(state, (state, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens))
            out, lse = call.with_prefix(state, absorbed, piece_tokens)
    return (out.astype(q_nope.dtype), lse) if return_lse else out.astype(q_nope.dtype)


def _check(q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, piece_tokens) -> None:
    dims = checks.Dims()
    dims.check("q_nope", q_nope, "T Hq nope", checks.PLAIN)
    dims.check("q_rope", q_rope, "T Hq R", (q_nope.dtype,))
    dims.check("w_uk", w_uk, "Hq nope L", (q_nope.dtype,))
    dims.check("w_uv", w_uv, "Hq v L", (q_nope.dtype,))
    checks.check_latent(cache, dims)
    if latent_new is not None:
        checks.check_new_latents("latent_new", latent_new, cache, dims)
    dims.check("block_tables", block_tables, "S P", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    if piece_tokens is not None:
        checks.size("piece_tokens", piece_tokens)
