"""One call for a whole step with multi-head latent attention (MLA): write the new latents, then attend to them.

A step has decode tokens and prompt chunks. The interface is the interface of JAX engines for TPUs. The operation
composes `write_latent` and `mla_decode`: the new tokens of a sequence are divided into groups of up to MAX_QUERIES
tokens, and each group is a sequence of `mla_decode` that ends with the group's last token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.mla_decode import mla_decode
from pallas_attn.ops.write_latent import write_latent
from pallas_attn.portable.arguments import refuse_gradients
from pallas_attn.portable.metadata import slot_mapping
from pallas_attn.portable.mixed_step import MixedStep
from pallas_attn.portable.quantise import quantise
from pallas_attn.portable.query_rows import QueryRows
from pallas_attn.runtime import sharded_calls
from pallas_attn.types import Implementation, PagedLatent

FILLED_ROWS = 64
"""Query rows (query tokens times heads) of a tile of the decode kernels.

With few heads, one query token fills only a part of a tile, so several tokens of a sequence form a group.
"""

MAX_QUERIES = 8
"""Maximum number of query tokens per group. A decode sequence has one query token, and the unused places of its group
take time too.
"""


@sharded_calls.over_devices
def mla_ragged_paged_attention(
    q_latent: Float[Array, "T Hq L"],
    q_rope: Float[Array, "T Hq R"],
    new_latent: Float[Array, "T L"] | None,
    new_rope: Float[Array, "T R"] | None,
    cache: PagedLatent,
    kv_lens: Int32[Array, "S"],
    page_indices: Int32[Array, "SP"] | Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    distribution: Int32[Array, "3"] | Int32[Array, "1"] | Int32[Array, ""] | None = None,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    update_kv_cache: bool = True,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T Hq L"], PagedLatent]:
    """Write the new latents of each sequence to its pages, then compute causal attention of the new tokens to all
    latents of their sequence. The signature is the signature of JAX engines for TPUs.

    The attention is absorbed MLA: every head reads the same key [L + R], whose first L columns are also the value. The
    caller multiplies the queries by W_UK before the call and the output by W_UV after it. The host does not need the
    lengths: all arrays stay on the device.

    Args:
      q_latent: packed queries multiplied by W_UK, bfloat16, float16 or float32; with `q_scale` also a float8 dtype.
        Tokens before cu_q_lens[0], and from the largest entry of cu_q_lens on, are padding.
      q_rope: packed rotated queries, in the dtype of q_latent.
      new_latent, new_rope: latents (after their norm) and rotated keys of the new tokens, in bfloat16, float16 or
        float32. For a float8 cache without scales, they may also be quantised already, in the dtype of the cache.
        Unused with `update_kv_cache=False`, and may then be None.
      cache: the cache, in any dtype of `PagedLatent`. It is written in place if it is donated.
      kv_lens: tokens of each sequence, including the new tokens.
      page_indices: page ids, [S, P] or flattened [S·P]. Entries past the tokens of a sequence may have any value.
      cu_q_lens: prefix sums of the numbers of new tokens: sequence s has the tokens from cu_q_lens[s] to
        cu_q_lens[s + 1]. An entry below an earlier entry, such as a 0 at the end, counts as the largest earlier entry.
      distribution: n, [n] or [i, j, n]: only the first n sequences exist, and lengths and tables of the other S - n may
        have any value. i and j are ignored. None for n = S.
      sm_scale: factor of the scores. It has no default, because it depends on the width of keys before absorption.
      sliding_window: number of newest latents that every head sees; None for all.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      update_kv_cache: False if the new latents are in the pages already.
      q_scale: the queries are q_scale times the given numbers; None for 1.
      k_scale: for a float8 cache without scales: as keys, latents and rotated keys are k_scale times the stored
        numbers; None for 1. New latents that are not quantised are divided by `k_scale` before they are stored.
      v_scale: for a float8 cache without scales: as values, latents are v_scale times the stored numbers; None for 1.
      out_dtype: dtype of the output; None for the dtype of q_latent, which then must not be float8.
      implementation: implementation of `write_latent` and `mla_decode`.

    Returns:
      The output in latent space, exactly 0 for padding tokens, and the updated cache.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache, new = pallas_attn.PagedLatent.allocate(spec), jnp.ones((6, 6))
      >>> page_indices = jnp.array([5, 0, 3, 0], jnp.int32)  # two sequences of up to two pages
      >>> kv_lens, cu_q_lens = jnp.array([6, 3], jnp.int32), jnp.array([0, 1, 4], jnp.int32)  # 1 and 3 new tokens
      >>> distribution = jnp.array([1, 2, 2], jnp.int32)
      >>> q_latent, q_rope = jnp.ones((6, 2, 6)), jnp.ones((6, 2, 2))
      >>> out, cache = pallas_attn.mla_ragged_paged_attention(
      ...     q_latent, q_rope, new, new[:, :2], cache, kv_lens, page_indices, cu_q_lens, distribution, sm_scale=0.1
      ... )
      >>> out.shape, cache.pages[3, :, 0].tolist()  # page 3 contains the three tokens of the second sequence
      ((6, 2, 6), [1.0, 1.0, 1.0, 0.0])
    """
    update, sm_scale = checks.flag("update_kv_cache", update_kv_cache), checks.required_number("sm_scale", sm_scale)
    sliding_window, soft_cap = checks.window(sliding_window), checks.number("soft_cap", soft_cap)
    checks.check_int_window(sliding_window, "sliding_window")
    dims = checks.Dims()
    q_scale = checks.number("q_scale", q_scale)
    dims.check("q_latent", q_latent, "T Hq L", checks.PLAIN if q_scale is None else (*checks.PLAIN, *checks.FLOAT8))
    dims.check("q_rope", q_rope, "T Hq R", (q_latent.dtype,))
    checks.check_latent(cache, dims, unscaled=True)
    k_scale, v_scale = _static_scales(cache, k_scale=k_scale, v_scale=v_scale)
    if update:
        _check_new(new_latent, new_rope, cache, dims)
    out_dtype = checks.output_dtype(out_dtype, q_latent.dtype)
    step = MixedStep.of(page_indices, kv_lens, cu_q_lens, distribution, dims)
    num_tokens = dims["T"]
    if not (num_tokens and dims["S"]):
        return jnp.zeros(q_latent.shape, out_dtype), cache
    q_latent, q_rope, new_latent, new_rope, cache = refuse_gradients(
        "mla_ragged_paged_attention", (jnp.asarray(q_latent), jnp.asarray(q_rope), new_latent, new_rope, cache)
    )
    with jax.named_scope("mla_ragged_paged_attention"):
        if update:
            slots = slot_mapping(
                step.block_tables, step.cu_q_lens, step.kv_lens, page_size=cache.page_size, length=num_tokens
            )
            new = jnp.concatenate([_stored(x, cache, k_scale) for x in (new_latent, new_rope)], axis=-1)
            cache = write_latent(cache, new, slots, implementation=implementation)
        if q_latent.dtype not in checks.PLAIN:  # `mla_decode` takes no float8; bfloat16 represents all float8 numbers
            q_latent, q_rope = q_latent.astype(jnp.bfloat16), q_rope.astype(jnp.bfloat16)
        queries = min(MAX_QUERIES, max(1, FILLED_ROWS // dims["Hq"]))
        rows = QueryRows(step.cu_q_lens, num_tokens, queries)
        cached = (step.kv_lens - jnp.diff(step.cu_q_lens))[rows.sequence]
        out: Any = mla_decode(
            rows.pack(q_latent),
            rows.pack(q_rope),
            cache,
            step.block_tables[rows.sequence],
            jnp.where(rows.count > 0, cached + rows.index + rows.count, 0),
            q_lens=None if queries == 1 else rows.count,
            sm_scale=sm_scale * (1.0 if q_scale is None else q_scale) * k_scale,
            window=sliding_window,
            soft_cap=soft_cap,
            out_dtype=out_dtype if v_scale == 1 else jnp.float32,
            implementation=implementation,
        )
        return rows.unpack(out if v_scale == 1 else (out * v_scale).astype(out_dtype)), cache


def _static_scales(cache: PagedLatent, **scales: float | None) -> list[float]:
    """Return the given scales as numbers, 1 for None.

    Raises:
      ValueError: a scale is given, but the cache is 16-bit or 32-bit, or has its own scales.
    """
    numbers = []
    for name, given in scales.items():
        number = checks.number(name, given)
        if number is not None and (cache.is_quantised or cache.pages.dtype in checks.PLAIN):
            has = "has scales" if cache.is_quantised else "is not quantised"
            raise ValueError(f"{name}: expected None with a {jnp.dtype(cache.pages.dtype).name} cache that {has}")
        numbers.append(1.0 if number is None else number)
    return numbers


def _check_new(new_latent: Any, new_rope: Any, cache: PagedLatent, dims: checks.Dims) -> None:
    """Raise ValueError if shapes or dtypes of the new tokens do not fit the cache."""
    unscaled = () if cache.is_quantised or cache.pages.dtype in checks.PLAIN else (cache.pages.dtype,)
    for name, new, shape in (("new_latent", new_latent, "T L"), ("new_rope", new_rope, "T R")):
        if new is None:
            raise ValueError(f"{name}: expected the new tokens, or update_kv_cache=False; got None")
        dims.check(name, new, shape, (*checks.PLAIN, *unscaled))


def _stored(new: Any, cache: PagedLatent, k_scale: float) -> Array:
    """Convert new latents or rotated keys to the dtype that `write_latent` expects for this cache.

    For a float8 cache without scales, unquantised numbers are divided by `k_scale` and rounded.
    """
    new = jnp.asarray(new)
    if cache.is_quantised:
        return new.astype(jnp.float32)
    if cache.pages.dtype in checks.PLAIN or new.dtype == cache.pages.dtype:
        return new.astype(cache.pages.dtype)
    return quantise(new.astype(jnp.float32), jnp.float32(k_scale), cache.pages.dtype)
