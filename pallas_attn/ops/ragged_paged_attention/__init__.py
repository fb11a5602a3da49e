"""Attention of a step that mixes decodes and chunks of prompts, in one call that writes its new tokens first.

The call that JAX engines for TPUs make. There are no kernels of its own: `write_kv`, `paged_decode` and `paged_prefill`
do the work. Over 16 bits Mosaic's prefill takes all sequences. Elsewhere decode and prefill get all of them, those of
the other one as idle rows, so that which of them decode may be known on the device only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from pallas_attn import checks
from pallas_attn.ops.paged_decode import paged_decode
from pallas_attn.ops.paged_prefill import paged_prefill
from pallas_attn.ops.write_kv import write_kv
from pallas_attn.portable.arguments import refuse_gradients
from pallas_attn.portable.metadata import slot_mapping
from pallas_attn.portable.mixed_step import MixedStep
from pallas_attn.runtime import dispatch, sharded_calls
from pallas_attn.types import QMAX, HeadWindow, Implementation, PagedKV

type StaticScale = Float[Array, ""] | Float[Array, "Hkv"] | Float[Array, "Hkv D"] | float | None
"""One scale for all heads, one a head [Hkv], one a channel [Hkv, D], or None for the cache's own."""


@sharded_calls.over_devices
def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k: Num[Array, "T Hkv D"] | None,
    v: Num[Array, "T Hkv Dv"] | None,
    kv: PagedKV,
    kv_lens: Int32[Array, "S"],
    page_indices: Int32[Array, "SP"] | Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    distribution: Int32[Array, "3"] | Int32[Array, "1"] | Int32[Array, ""] | None = None,
    *,
    sm_scale: float = 1.0,
    causal: bool = True,
    sliding_window: int | HeadWindow | None = None,
    soft_cap: float | None = None,
    attention_sink: Float[Array, "Hq"] | None = None,
    update_kv_cache: bool = True,
    q_scale: float | None = None,
    k_scale: StaticScale = None,
    v_scale: StaticScale = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T Hq Dv"], PagedKV]:
    """Writes each sequence's new tokens into its pages, and attends over them: for engines written for TPUs.

    Sequences of one new token run on the kernel of `paged_decode` wherever they stand, others on that of
    `paged_prefill`, or all of them on the latter where that is faster, in one call and one output. All arrays may be
    known on the device only.

    Args:
      q: packed queries in bfloat16, float16 or float32, with `q_scale` also in a cache's float8; rows before
        cu_q_lens[0] and after its largest are padding.
      k, v: keys and values of the same tokens, in any of these dtypes; or for static scales quantised already, in the
        cache's dtype. Unused with `update_kv_cache=False`, and may be None then.
      kv: the cache; under donation written in place.
      kv_lens: tokens each sequence holds, the new ones included.
      page_indices: page ids, in a row for each sequence or all rows in one; or row ids for head-wise tables. Entries
        past a sequence's tokens may hold anything.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      distribution: [i, j, n]: n sequences are real, and what stands past them may be anything. Those from i to j are
        prefills even of one token. Or n alone, [1] or []. None for S sequences.
      sm_scale: multiplies the scores.
      causal: False for queries that see every key of their sequence.
      sliding_window: None, the number of newest keys every head sees, or a `HeadWindow`; either needs `causal`.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      attention_sink: float32 learned logits that enter each head's softmax denominator, unscaled and uncapped.
      update_kv_cache: False where the new tokens are in the pages already, as with layers that share a cache.
      q_scale: attends with 8-bit queries over a float8 cache, as `paged_prefill` says. Over a cache of 16 or 32 bits
        queries are as they are: what is divided by it is multiplied with it again.
      k_scale, v_scale: of a quantised cache, in place of its own in this call; None for its own.
      out_dtype: of the output; None for q's, unless that is a float8.
      implementation: of all three operations.

    Returns:
      The output, exactly 0 for padding rows, and the cache.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: a `q_scale` over int8; or the implementation named does not support the call.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv, new = pallas_attn.PagedKV.allocate(spec), jnp.ones((6, 1, 8))
      >>> page_indices = jnp.array([5, 0, 3, 0], jnp.int32)  # two sequences of up to two pages
      >>> kv_lens, cu_q_lens = jnp.array([6, 3], jnp.int32), jnp.array([0, 1, 4], jnp.int32)  # 1 and 3 new tokens
      >>> distribution = jnp.array([1, 2, 2], jnp.int32)
      >>> out, kv = pallas_attn.ragged_paged_attention(
      ...     jnp.ones((6, 2, 8)), new, new, kv, kv_lens, page_indices, cu_q_lens, distribution
      ... )
      >>> out.shape, kv.k[3, 0, :, 0].tolist()  # page 3 holds the three tokens of the second
      ((6, 2, 8), [1.0, 1.0, 1.0, 0.0])
    """
    update, causal = checks.flag("update_kv_cache", update_kv_cache), checks.flag("causal", causal)
    scaled = _with_scales(kv, k_scale, v_scale)
    sliding_window = checks.window(sliding_window)
    dims = checks.Dims()
    q_scale = checks.number("q_scale", q_scale)
    if scaled.k.dtype in checks.PLAIN:
        q_scale = None
    dims.check("q", q, "T Hq D", checks.query_dtypes(scaled, q_scale))
    checks.check_kv(scaled, dims)
    checks.check_heads(dims["Hq"], dims["Hkv"])
    if update:
        _check_new(k, v, scaled, dims)
    if attention_sink is not None:
        dims.check("attention_sink", attention_sink, "Hq", checks.F32)
    checks.check_window(sliding_window, dims["Hkv"], "sliding_window")
    checks.check_causal_window(sliding_window, causal=causal, name="sliding_window")
    options = {
        "sm_scale": checks.required_number("sm_scale", sm_scale),
        "window": sliding_window,
        "soft_cap": checks.number("soft_cap", soft_cap),
        "sinks": attention_sink,
        "q_scale": q_scale,
        "out_dtype": checks.output_dtype(out_dtype, q.dtype),
        "implementation": implementation,
    }
    step = MixedStep.of(page_indices, kv_lens, cu_q_lens, distribution, dims)
    num_tokens, num_sequences = dims["T"], dims["S"]
    if not (num_tokens and num_sequences):
        return jnp.zeros((*q.shape[:2], kv.value_dim(dims["D"])), options["out_dtype"]), kv
    q, k, v, scaled = refuse_gradients("ragged_paged_attention", (jnp.asarray(q), k, v, scaled))
    with jax.named_scope("ragged_paged_attention"):
        if update:
            slots = slot_mapping(
                step.block_tables, step.cu_q_lens, step.kv_lens, page_size=scaled.page_size, length=num_tokens
            )
            scaled = _write(scaled, k, v, slots, implementation)
        out = _attend_at_once(q, scaled, step, causal=causal, **options)
        if out is None:
            out = _attend_apart(q, scaled, step, causal=causal, **options)
    if k_scale is None and v_scale is None:
        return out, scaled
    return out, dataclasses.replace(scaled, k_scale=kv.k_scale, v_scale=kv.v_scale)


def _attend_at_once(q: Any, kv: PagedKV, step: MixedStep, *, implementation: Implementation, **options: Any) -> Any:
    """Attention of all sequences by one kernel of prefill, where that is the faster way; None elsewhere.

    Mosaic's reads the keys of a single query as fast as its decode does, and then there is one launch and no plan.
    """
    if kv.k.dtype not in checks.PLAIN or dispatch.candidates("paged_prefill", implementation)[0] != "mosaic":
        return None
    try:
        return paged_prefill(q, kv, step.block_tables, step.cu_q_lens, step.kv_lens, implementation="mosaic", **options)
    except NotImplementedError:  # another card, or a call that its kernels do not take
        return None


def _attend_apart(q: Any, kv: PagedKV, step: MixedStep, *, causal: bool, **options: Any) -> Any:
    """Attention of sequences of one new token as decodes and of the others as chunks, into one output."""
    num_tokens, num_sequences = q.shape[0], step.kv_lens.shape[0]
    first = jnp.minimum(step.cu_q_lens[:-1], num_tokens - 1)
    prefill_lens, decode_lens = (jnp.where(mine, step.kv_lens, 0) for mine in (~step.single, step.single))
    out: Any = paged_prefill(q, kv, step.block_tables, step.cu_q_lens, prefill_lens, causal=causal, **options)
    of_singles: Any = paged_decode(q[first][:, None], kv, step.block_tables, decode_lens, **options)
    place = jnp.where(step.single, first, num_tokens + jnp.arange(num_sequences, dtype=jnp.int32))
    return out.at[place].set(of_singles[:, 0], mode="drop", unique_indices=True)


def _with_scales(kv: PagedKV, k_scale: StaticScale, v_scale: StaticScale) -> PagedKV:
    """The cache with the scales that are given in place of its own."""
    checks.check_class("kv", kv, PagedKV)
    checks.check_array("kv.k", kv.k)
    return dataclasses.replace(
        kv,
        k_scale=_static_scale("k_scale", k_scale, kv.k_scale, kv.k),
        v_scale=_static_scale("v_scale", v_scale, kv.v_scale, kv.k),
    )


def _static_scale(name: str, given: Any, own: Any, pages: Any) -> Any:
    """The scale that is given, as a cache has it, or the cache's own."""
    if given is None:
        return own
    if jnp.dtype(pages.dtype) not in QMAX:
        raise ValueError(f"{name}: expected None with a {jnp.dtype(pages.dtype).name} cache, which has no scales")
    if own is not None and own.ndim == 3:
        raise ValueError(f"{name}: expected None with scales of token groups, which kv has, {list(own.shape)}")
    if not hasattr(given, "dtype"):
        given = jnp.float32(checks.required_number(name, given))
    checks.check_dtype(name, given, checks.F32)
    return given if given.shape else jnp.broadcast_to(given, pages.shape[1:2])


def _check_new(k: Any, v: Any, kv: PagedKV, dims: checks.Dims) -> None:
    """Raises ValueError unless the new tokens are what the cache is written with."""
    for name, new in (("k", k), ("v", v)):
        if new is None:
            raise ValueError(f"{name}: expected the new tokens', or update_kv_cache=False; got None")
    quantised = (kv.k.dtype,) if jnp.dtype(kv.k.dtype) in QMAX else ()
    dims.check("k", k, "T Hkv D", (*checks.PLAIN, *quantised))
    if k.dtype not in checks.PLAIN and kv.k_scale is not None and kv.k_scale.ndim == 3:
        raise ValueError(
            f"k: expected 16-bit or 32-bit values for a cache with scales of token groups, got {k.dtype.name}"
        )
    dims.check("v", v, "T Hkv Dv", checks.PLAIN if k.dtype in checks.PLAIN else quantised)


def _write(kv: PagedKV, k: Any, v: Any, slots: Any, implementation: Implementation) -> PagedKV:
    """The cache with new tokens, of which quantised ones are taken as they are."""
    if k.dtype in checks.PLAIN:
        return write_kv(kv, k, v, slots, implementation=implementation)
    ones = jnp.ones(kv.k.shape[1:2], jnp.float32)
    unscaled = dataclasses.replace(kv, k_scale=ones, v_scale=ones)
    # bfloat16 holds all that these dtypes do, and quotients by 1 are exact.
    k, v = (jnp.asarray(x).astype(jnp.bfloat16) for x in (k, v))
    written = write_kv(unscaled, k, v, slots, implementation=implementation)
    return dataclasses.replace(kv, k=written.k, v=written.v)
