"""Absorbed multi-head latent attention of a step that mixes decodes and chunks of prompts, which writes its new latents
first.

The call that JAX engines for TPUs make. There are no kernels of its own: `write_latent` and `mla_decode` do the work.
New tokens are cut into rows of a few, each a row of `mla_decode` that ends where its last token stands.
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
"""Query rows (heads of each query) that kernels compute at once, in which a decode of few heads leaves room."""

MAX_QUERIES = 8
"""Queries of a row, at most: a decode pays for the room that it leaves."""


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
    """Writes each sequence's new latents into its pages, and attends over them causally: for engines written for TPUs.

    Every head reads the same [L + R] key, whose first L columns are also the value. The up-projections are absorbed
    into `q_latent` and applied to the output by the caller. All arrays may be known on the device only.

    Args:
      q_latent: packed queries against the latent columns, W_UK absorbed; rows before cu_q_lens[0] and after its largest
        are padding.
      q_rope: rotated queries against the rotated key's columns; same dtype.
      new_latent, new_rope: normed latents and rotated keys of the same tokens, in bfloat16, float16 or float32; or for
        a cache of 8 bits without scales quantised already, in its dtype. Unused with `update_kv_cache=False`, and may
        be None then.
      cache: of any dtype; under donation written in place.
      kv_lens: tokens each sequence holds, the new ones included.
      page_indices: page ids, in a row for each sequence or all rows in one; entries past a sequence's tokens may hold
        anything.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      distribution: [i, j, n]: n sequences are real, and what stands past them may be anything; i and j do not matter.
        Or n alone, [1] or []. None for S sequences.
      sm_scale: multiplies the scores. Required: it is set by the width before absorption, which is not visible here.
      sliding_window: the number of newest latents that every head sees; None for all.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      update_kv_cache: False where the new latents are in the pages already.
      q_scale: multiplies the queries, which then may also be in a float8 dtype; None for 1.
      k_scale: of a cache of 8 bits without scales of its own: what is stored times it are the keys, latent and rotated
        columns alike; None for 1. New latents of more bits are divided by it.
      v_scale: likewise of the values; None for 1.
      out_dtype: of the output; None for q_latent's, unless that is a float8.
      implementation: of both operations.

    Returns:
      Latent-space output, exactly 0 for padding rows, and the cache.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.

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
      >>> out.shape, cache.pages[3, :, 0].tolist()  # page 3 holds the three tokens of the second
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
        if q_latent.dtype not in checks.PLAIN:  # bfloat16 holds all that a float8 does
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
    """Scales that are given, 1 for None; raises ValueError unless they are numbers for a cache without its own."""
    numbers = []
    for name, given in scales.items():
        number = checks.number(name, given)
        if number is not None and (cache.is_quantised or cache.pages.dtype in checks.PLAIN):
            has = "has scales of its own" if cache.is_quantised else "has none"
            raise ValueError(f"{name}: expected None with a {jnp.dtype(cache.pages.dtype).name} cache that {has}")
        numbers.append(1.0 if number is None else number)
    return numbers


def _check_new(new_latent: Any, new_rope: Any, cache: PagedLatent, dims: checks.Dims) -> None:
    """Raises ValueError unless the new tokens are what the cache is written with."""
    unscaled = () if cache.is_quantised or cache.pages.dtype in checks.PLAIN else (cache.pages.dtype,)
    for name, new, shape in (("new_latent", new_latent, "T L"), ("new_rope", new_rope, "T R")):
        if new is None:
            raise ValueError(f"{name}: expected the new tokens', or update_kv_cache=False; got None")
        dims.check(name, new, shape, (*checks.PLAIN, *unscaled))


def _stored(new: Any, cache: PagedLatent, k_scale: float) -> Array:
    """New columns in the dtype in which the cache is written."""
    new = jnp.asarray(new)
    if cache.is_quantised:
        return new.astype(jnp.float32)
    if cache.pages.dtype in checks.PLAIN or new.dtype == cache.pages.dtype:
        return new.astype(cache.pages.dtype)
    return quantise(new.astype(jnp.float32), jnp.float32(k_scale), cache.pages.dtype)
