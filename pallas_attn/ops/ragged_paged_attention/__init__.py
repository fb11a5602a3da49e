"""Attention of a step with decodes and prompt chunks in one call that first writes the new tokens.

JAX engines for TPUs make this call. There are no kernels of its own: it calls `write_kv`, `paged_decode` and
`paged_prefill`. With a 16-bit cache, Mosaic's prefill kernel processes all sequences. Otherwise decode and prefill both
get all sequences, and each sees the sequences of the other as idle rows. So only the device needs to know which
sequences decode.
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
"""One scale for all heads, one per head [Hkv], one per channel [Hkv, D], or None for the scales of the cache."""


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
    """Write the new tokens of each sequence to its pages and attend to them, with the signature of TPU engines.

    A sequence with one new token runs on the kernel of `paged_decode`, any other on the kernel of `paged_prefill`, into
    one output. If prefill is faster for both, all sequences run on its kernel. The order of sequences is free. All
    arrays may be known on the device only.

    Args:
      q: packed queries in bfloat16, float16 or float32; with `q_scale` also in the float8 dtype of the cache. Rows
        before cu_q_lens[0] and from the largest entry of cu_q_lens on are padding.
      k, v: keys and values of the new tokens in bfloat16, float16 or float32, or, for static scales, already quantised
        in the dtype of the cache. Unused with `update_kv_cache=False`, and may then be None.
      kv: the cache. It is written in place if it is donated.
      kv_lens: tokens of each sequence, including the new ones.
      page_indices: page ids, [S, P] or flattened [S·P], or per-head row ids [S, Hkv, P]. Entries past the tokens of a
        sequence may have any value.
      cu_q_lens: prefix sums of the numbers of new tokens. An entry less than an earlier one, such as a 0 at the end,
        counts as the largest earlier entry.
      distribution: [i, j, n] or n alone, [1] or []: the first n sequences are real, and metadata of the others may have
        any value. Sequences i to j - 1 run as prefills even with one new token. None for S real sequences.
      sm_scale: factor of the scores.
      causal: False for queries that see all keys of their sequence.
      sliding_window: number of newest keys that every head sees, a `HeadWindow`, or None for all. A window needs
        `causal`.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      attention_sink: float32 logits, one per head, that are added to the softmax denominator, unscaled and uncapped.
      update_kv_cache: False if the new tokens are in the pages already, as in layers that share a cache.
      q_scale: quantises the queries for a float8 cache, as in `paged_prefill`. Ignored with a 16-bit or 32-bit cache,
        where dividing the queries and multiplying the scores would cancel.
      k_scale, v_scale: scales that replace the scales of a quantised cache in this call; None for the scales of the
        cache.
      out_dtype: dtype of the output; None for the dtype of q, which then must not be float8.
      implementation: implementation of all three operations.

    Returns:
      The output, exactly 0 for padding rows, and the cache.

    Raises:
      ValueError: arguments do not match each other.
      NotImplementedError: `q_scale` with an int8 cache, or the named implementation does not support the call.

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
    """Attend with all sequences in one prefill kernel if that is faster; return None otherwise.

    Mosaic's prefill reads the keys of a single query as fast as its decode, and takes one launch and no plan.
    """
    if kv.k.dtype not in checks.PLAIN or dispatch.candidates("paged_prefill", implementation)[0] != "mosaic":
        return None
    try:
        return paged_prefill(q, kv, step.block_tables, step.cu_q_lens, step.kv_lens, implementation="mosaic", **options)
    except NotImplementedError:  # another GPU, or an unsupported call
        return None


def _attend_apart(q: Any, kv: PagedKV, step: MixedStep, *, causal: bool, **options: Any) -> Any:
    """Attend with sequences of one new token in decode and with all others in prefill, into one output."""
    num_tokens, num_sequences = q.shape[0], step.kv_lens.shape[0]
    first = jnp.minimum(step.cu_q_lens[:-1], num_tokens - 1)
    prefill_lens, decode_lens = (jnp.where(mine, step.kv_lens, 0) for mine in (~step.single, step.single))
    out: Any = paged_prefill(q, kv, step.block_tables, step.cu_q_lens, prefill_lens, causal=causal, **options)
    of_singles: Any = paged_decode(q[first][:, None], kv, step.block_tables, decode_lens, **options)
    place = jnp.where(step.single, first, num_tokens + jnp.arange(num_sequences, dtype=jnp.int32))
    return out.at[place].set(of_singles[:, 0], mode="drop", unique_indices=True)


def _with_scales(kv: PagedKV, k_scale: StaticScale, v_scale: StaticScale) -> PagedKV:
    """Return the cache with `k_scale` and `v_scale` instead of its scales, where they are given."""
    checks.check_class("kv", kv, PagedKV)
    checks.check_array("kv.k", kv.k)
    return dataclasses.replace(
        kv,
        k_scale=_static_scale("k_scale", k_scale, kv.k_scale, kv.k),
        v_scale=_static_scale("v_scale", v_scale, kv.v_scale, kv.k),
    )


def _static_scale(name: str, given: Any, own: Any, pages: Any) -> Any:
    """Return the given scale in the shape of a cache scale, or the scale of the cache if none is given."""
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
    """Raise ValueError if the new tokens cannot be written to the cache."""
    for name, new in (("k", k), ("v", v)):
        if new is None:
            raise ValueError(f"{name}: expected the new tokens, or update_kv_cache=False; got None")
    quantised = (kv.k.dtype,) if jnp.dtype(kv.k.dtype) in QMAX else ()
    dims.check("k", k, "T Hkv D", (*checks.PLAIN, *quantised))
    if k.dtype not in checks.PLAIN and kv.k_scale is not None and kv.k_scale.ndim == 3:
        raise ValueError(
            f"k: expected 16-bit or 32-bit values for a cache with scales of token groups, got {k.dtype.name}"
        )
    dims.check("v", v, "T Hkv Dv", checks.PLAIN if k.dtype in checks.PLAIN else quantised)


def _write(kv: PagedKV, k: Any, v: Any, slots: Any, implementation: Implementation) -> PagedKV:
    """Write the new tokens to the cache. Quantised tokens are stored unchanged."""
    if k.dtype in checks.PLAIN:
        return write_kv(kv, k, v, slots, implementation=implementation)
    ones = jnp.ones(kv.k.shape[1:2], jnp.float32)
    unscaled = dataclasses.replace(kv, k_scale=ones, v_scale=ones)
    # bfloat16 represents all int8 and float8 values, and quotients by 1 are exact.
    k, v = (jnp.asarray(x).astype(jnp.bfloat16) for x in (k, v))
    written = write_kv(unscaled, k, v, slots, implementation=implementation)
    return dataclasses.replace(kv, k=written.k, v=written.v)
