"""One call for a whole step over a paged K/V cache: write the new keys and values, then attend to them.

A step has decode tokens and prompt chunks. The interface is the interface of JAX engines for TPUs. The operation
composes `write_kv`, `paged_decode` and `paged_prefill`:

- With a 16-bit cache on a GPU with Mosaic kernels, `paged_prefill` processes all sequences.
- Otherwise, `paged_decode` processes the sequences with one new token, and `paged_prefill` the other sequences. Both
  receive all sequences, with length 0 for the sequences of the other operation. The shapes are therefore the same for
  every mix, and only the device needs to know which sequences decode.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from pallas_attn import checks
from pallas_attn.ops.paged_decode import paged_decode
from pallas_attn.ops.paged_prefill import paged_prefill
from pallas_attn.ops.write_kv import write_kv
from pallas_attn.portable.arguments import refuse_gradients
from pallas_attn.portable.fused_array import accept_fused_array
from pallas_attn.portable.metadata import slot_mapping
from pallas_attn.portable.mixed_step import MixedStep
from pallas_attn.runtime import dispatch, sharded_calls
from pallas_attn.types import QMAX, HeadWindow, Implementation, PagedKV


@accept_fused_array
@sharded_calls.over_devices
def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k: Num[Array, "T Hkv D"] | None,
    v: Num[Array, "T Hkv Dv"] | None,
    kv: PagedKV | Num[Array, "N ps *rows columns"],
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
    k_scale: Float[Array, ""] | Float[Array, "Hkv"] | Float[Array, "Hkv D"] | float | None = None,
    v_scale: Float[Array, ""] | Float[Array, "Hkv"] | Float[Array, "Hkv Dv"] | float | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T Hq Dv"], Any]:
    """Write the new keys and values of each sequence to its pages, then compute attention of the new tokens to all
    tokens of their sequence. The signature is the signature of JAX engines for TPUs.

    Sequences with one new token and sequences with several may be in any order. The host does not need the lengths: all
    arrays stay on the device.

    Args:
      q: packed queries in bfloat16, float16 or float32; with `q_scale` also in the float8 dtype of the cache. Tokens
        before cu_q_lens[0], and from the largest entry of cu_q_lens on, are padding.
      k, v: keys and values of the new tokens in bfloat16, float16 or float32. For a quantised cache with static scales,
        they may also be quantised already, in the dtype of the cache. Unused with `update_kv_cache=False`, and may then
        be None.
      kv: the cache, or an array of pages with keys and values, which is not copied. The cache is written in place if it
        is donated. For each token, an array has 2·Hkv rows of at least D columns, keys and values alternating, or Hkv
        rows of 2·D columns, the key followed by the value: [N, ps, rows, columns], or [N, ps, rows / packing, packing,
        columns], where the number of rows is padded to a multiple of the packing (tpu-inference). An 8-bit array
        without `k_scale` or `v_scale` has scales of 1.
      kv_lens: tokens of each sequence, including the new tokens.
      page_indices: page ids, [S, P] or flattened [S·P], or head-wise tables [S, Hkv, P] with row ids page·Hkv + head.
        Entries past the tokens of a sequence may have any value. For a cache of `view_nhd` or `view_fused`, tables from
        `token_tables`; for an array, page ids of the array, [S, P] or [S·P].
      cu_q_lens: prefix sums of the numbers of new tokens: sequence s has the tokens from cu_q_lens[s] to
        cu_q_lens[s + 1]. An entry below an earlier entry, such as a 0 at the end, counts as the largest earlier entry.
      distribution: n, [n] or [i, j, n]: only the first n sequences exist, and lengths and tables of the other S - n may
        have any value. Sequences i to j - 1 run as prefill even with one new token. None for n = S and i = j.
      sm_scale: factor of the scores. The default is 1, as in JAX engines for TPUs; other operations have D**-0.5.
      causal: True if a token sees the keys up to its own position, False if it sees all keys of its sequence.
      sliding_window: number of newest keys that every head sees, a `HeadWindow`, or None for all. A window needs
        `causal=True`.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      attention_sink: float32 logits, one per query head, which are added to the softmax denominator, neither scaled nor
        capped.
      update_kv_cache: False if the new tokens are in the pages already, as in layers that share a cache.
      q_scale: for a float8 cache, queries are quantised to float8(q / q_scale) and scores are multiplied by `q_scale`,
        as in `paged_prefill`. Ignored with a 16-bit or 32-bit cache.
      k_scale, v_scale: scales of a quantised cache for this call, instead of the static scales in `kv`; None for the
        scales in `kv`.
      out_dtype: dtype of the output; None for the dtype of q, which then must not be float8.
      implementation: implementation of `write_kv`, `paged_decode` and `paged_prefill`.

    Returns:
      The output, exactly 0 for padding tokens, and the updated cache: a `PagedKV`, or an array of the shape of `kv`.

    Raises:
      ValueError: the arguments do not fit each other.
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
      >>> out.shape, kv.k[3, 0, :, 0].tolist()  # page 3 contains the three tokens of the second sequence
      ((6, 2, 8), [1.0, 1.0, 1.0, 0.0])
    """
    update, causal = checks.flag("update_kv_cache", update_kv_cache), checks.flag("causal", causal)
    checks.check_class("kv", kv, PagedKV)
    cache = cast("PagedKV", kv)  # `accept_fused_array` has replaced an array by a view
    scaled = _with_scales(cache, k_scale, v_scale)
    sliding_window = checks.window(sliding_window)
    dims = checks.Dims()
    q_scale = checks.number("q_scale", q_scale)
    if scaled.k.dtype in checks.PLAIN:
        q_scale = None
    dims.check("q", q, "T Hq D", checks.query_dtypes(scaled, q_scale))
    checks.check_kv(scaled, dims)
    checks.check_heads(dims["Hq"], dims["Hkv"], advice=checks.view_advice(scaled, dims["Hq"]))
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
        return jnp.zeros((*q.shape[:2], cache.value_dim(dims["D"])), options["out_dtype"]), cache
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
    return out, dataclasses.replace(scaled, k_scale=cache.k_scale, v_scale=cache.v_scale)


def _attend_at_once(q: Any, kv: PagedKV, step: MixedStep, *, implementation: Implementation, **options: Any) -> Any:
    """Compute attention of all sequences with Mosaic's prefill kernel, and return the output.

    Return None if the cache is quantised, if "mosaic" is not the first implementation to try, or if the kernel does not
    support the call. For a sequence with one query, Mosaic's prefill kernel is as fast as its decode kernel. One kernel
    for all sequences saves a launch and a decode plan.
    """
    if kv.k.dtype not in checks.PLAIN or dispatch.candidates("paged_prefill", implementation)[0] != "mosaic":
        return None
    try:
        return paged_prefill(q, kv, step.block_tables, step.cu_q_lens, step.kv_lens, implementation="mosaic", **options)
    except NotImplementedError:  # the device has no Mosaic kernels, or they do not support the call
        return None


def _attend_apart(q: Any, kv: PagedKV, step: MixedStep, *, causal: bool, **options: Any) -> Any:
    """Compute attention of sequences that decode with `paged_decode`, of all other sequences with `paged_prefill`, and
    combine both outputs.
    """
    num_tokens, num_sequences = q.shape[0], step.kv_lens.shape[0]
    first = jnp.minimum(step.cu_q_lens[:-1], num_tokens - 1)
    prefill_lens, decode_lens = (jnp.where(mine, step.kv_lens, 0) for mine in (~step.single, step.single))
    out: Any = paged_prefill(q, kv, step.block_tables, step.cu_q_lens, prefill_lens, causal=causal, **options)
    of_singles: Any = paged_decode(q[first][:, None], kv, step.block_tables, decode_lens, **options)
    place = jnp.where(step.single, first, num_tokens + jnp.arange(num_sequences, dtype=jnp.int32))
    return out.at[place].set(of_singles[:, 0], mode="drop", unique_indices=True)


def _with_scales(kv: PagedKV, k_scale: Any, v_scale: Any) -> PagedKV:
    """Return the cache with the given scales. A scale of None keeps the scale of the cache."""
    checks.check_array("kv.k", kv.k)
    return dataclasses.replace(
        kv,
        k_scale=_static_scale("k_scale", k_scale, kv.k_scale, kv.k),
        v_scale=_static_scale("v_scale", v_scale, kv.v_scale, kv.k),
    )


def _static_scale(name: str, given: Any, own: Any, pages: Any) -> Any:
    """Return the scale `given` as float32 [Hkv] or [Hkv, D], or `own`, the scale in the cache, if it is None.

    Raises:
      ValueError: the cache is not quantised, or has scales of token groups.
    """
    if given is None:
        return own
    if jnp.dtype(pages.dtype) not in QMAX:
        raise ValueError(f"{name}: expected None with a {jnp.dtype(pages.dtype).name} cache, which has no scales")
    if own is not None and own.ndim == 3:
        raise ValueError(f"{name}: expected None, because kv has scales of token groups, shape {list(own.shape)}")
    if not hasattr(given, "dtype"):
        given = jnp.float32(checks.required_number(name, given))
    checks.check_dtype(name, given, checks.F32)
    return given if given.shape else jnp.broadcast_to(given, pages.shape[1:2])


def _check_new(k: Any, v: Any, kv: PagedKV, dims: checks.Dims) -> None:
    """Raise ValueError if shapes or dtypes of the new keys and values do not fit the cache."""
    for name, new in (("k", k), ("v", v)):
        if new is None:
            raise ValueError(f"{name}: expected the new tokens, or update_kv_cache=False; got None")
    quantised = (kv.k.dtype,) if jnp.dtype(kv.k.dtype) in QMAX else ()
    checks.check_array("k", k)
    advice = checks.view_advice(kv, k.shape[1]) if k.ndim == 3 else ""
    dims.check("k", k, "T Hkv D", (*checks.PLAIN, *quantised), advice=advice)
    if k.dtype not in checks.PLAIN and kv.k_scale is not None and kv.k_scale.ndim == 3:
        raise ValueError(
            f"k: expected 16-bit or 32-bit values for a cache with scales of token groups, got {k.dtype.name}"
        )
    dims.check("v", v, "T Hkv Dv", checks.PLAIN if k.dtype in checks.PLAIN else quantised)


def _write(kv: PagedKV, k: Any, v: Any, slots: Any, implementation: Implementation) -> PagedKV:
    """Write the new keys and values to the cache. If they are quantised already, they are stored unchanged."""
    if k.dtype in checks.PLAIN:
        return write_kv(kv, k, v, slots, implementation=implementation)
    ones = jnp.ones(kv.k.shape[1:2], jnp.float32)
    unscaled = dataclasses.replace(kv, k_scale=ones, v_scale=ones)
    # `write_kv` does not accept 8-bit tokens. bfloat16 represents all int8 and float8 numbers, and `write_kv` divides
    # by scales of 1, so the stored bits are the given bits.
    k, v = (jnp.asarray(x).astype(jnp.bfloat16) for x in (k, v))
    written = write_kv(unscaled, k, v, slots, implementation=implementation)
    return dataclasses.replace(kv, k=written.k, v=written.v)
