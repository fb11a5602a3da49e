"""`paged_attention` with the signature of `jax.experimental.pallas.ops.gpu.paged_attention` of jax 0.11."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Num

from pallas_attn import checks
from pallas_attn.compat.jax_gpu import arguments, reference
from pallas_attn.ops.paged_decode import paged_decode
from pallas_attn.types import PAGE_NONE, QMAX, Implementation, PagedKV

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.dtype("float32")).max)
"""Default of `mask_value`."""

LARGEST_MASK_VALUE = -1e4
"""Largest supported `mask_value`. Larger values would give tokens after the end of a sequence a weight above 0."""


def paged_attention(
    q: Float[Array, "B Hq D"],
    k_pages: Num[Array, "Hkv N ps D"],
    v_pages: Num[Array, "Hkv N ps D"],
    block_tables: Int32[Array, "B P"],
    lengths: Int32[Array, "B"] | None,
    k_scales_pages: Float[Array, "Hkv N ps"] | None = None,
    v_scales_pages: Float[Array, "Hkv N ps"] | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Hq D"]:
    """Attention of one query token per sequence over pages with KV heads before pages.

    The pages are read in place. Scores are not scaled: multiply q by the softmax scale first.

    Args:
      q: queries in bfloat16, float16 or float32.
      k_pages, v_pages: keys and values, each in a dtype of `PagedKV`. Mosaic kernels require one dtype for both.
      block_tables: page ids. The tokens of ids outside the pool are invisible.
      lengths: tokens of each sequence; None if every sequence fills all pages of its row of `block_tables`.
      k_scales_pages, v_scales_pages: a scale per head and token, for 8-bit pages. Scales in another dtype than float32
        are converted, which copies all scales in each call.
      block_h, pages_per_compute_block, k_splits, num_warps, num_stages: ignored, with one warning per process.
      interpret, debug: ignored.
      mask_value: at most -1e4. Tokens after the end of a sequence have the weight 0.
      attn_logits_soft_cap: scores become cap · tanh(score / cap).
      implementation: as in `paged_decode`; jax's function does not have this argument.

    Returns:
      The output in the dtype of q; 0 for sequences of length 0.

    Raises:
      ValueError: inconsistent arguments.
      NotImplementedError: `mask_value` is above -1e4; or no implementation supports the call.

    Example:
      >>> from pallas_attn.compat.jax_gpu import paged_attention
      >>> pages = jnp.ones((2, 8, 16, 64), jnp.bfloat16)  # 2 KV heads, 8 pages of 16 tokens
      >>> q, tables = jnp.ones((3, 4, 64), jnp.bfloat16), jnp.array([[0, 7], [3, 1], [2, 2]], jnp.int32)
      >>> lengths = jnp.array([20, 5, 0], jnp.int32)
      >>> out = paged_attention.paged_attention(q * 64**-0.5, pages, pages, tables, lengths)
      >>> out[:, 0, 0].tolist()
      [1.0, 1.0, 0.0]
    """
    arguments.warn_about_tuning(paged_attention, locals())
    block_tables, lengths = checks.int32(block_tables=block_tables, lengths=lengths)
    _check(q, k_pages, v_pages, block_tables, lengths, k_scales_pages, v_scales_pages)
    _check_mask_value(mask_value)
    arrays = {
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "block_tables": block_tables,
        "lengths": lengths,
        "k_scales": k_scales_pages,
        "v_scales": v_scales_pages,
    }
    soft_cap = checks.number("attn_logits_soft_cap", attn_logits_soft_cap)
    return arguments.call_in_jit(_attend, arrays, implementation, soft_cap=soft_cap)


def paged_attention_reference(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    lengths: Int32[Array, "B"] | None,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
) -> Float[Array, "B Hq D"]:
    """Attention in float32 of one query token per sequence over keys and values without pages, for tests.

    It stores all scores. It has the arguments, results and errors of `paged_attention`, except that k and v have no
    pages and no scales. They are in bfloat16, float16 or float32.

    Example:
      >>> from pallas_attn.compat.jax_gpu import paged_attention
      >>> k = v = jnp.ones((2, 32, 2, 64), jnp.bfloat16)  # 32 tokens, 2 KV heads
      >>> q, lengths = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.array([20, 0], jnp.int32)
      >>> paged_attention.paged_attention_reference(q, k, v, lengths)[:, 0, 0].tolist()
      [1.0, 0.0]
    """
    (lengths,) = checks.int32(lengths=lengths)
    dims = checks.Dims()
    dims.check("q", q, "B Hq D", checks.PLAIN)
    dims.check("k", k, "B S Hkv D", checks.PLAIN)
    dims.check("v", v, "B S Hkv D", checks.PLAIN)
    checks.check_heads(dims["Hq"], dims["Hkv"])
    if lengths is not None:
        dims.check("lengths", lengths, "B", checks.INT)
    _check_mask_value(mask_value)
    soft_cap = checks.number("attn_logits_soft_cap", attn_logits_soft_cap)
    return reference.attention(q, k, v, None, lengths, sm_scale=1.0, soft_cap=soft_cap)[0]


def _check_mask_value(mask_value: float) -> None:
    if not mask_value <= LARGEST_MASK_VALUE:
        raise NotImplementedError(
            f"mask_value: takes numbers of at most {LARGEST_MASK_VALUE:g}, with which masked tokens have the weight 0;"
            f" got {mask_value!r}"
        )


def _check(q: Any, k: Any, v: Any, block_tables: Any, lengths: Any, k_scales: Any, v_scales: Any) -> None:
    """Raise for arguments that do not fit each other; the messages have the names of the arguments of
    `paged_attention`.
    """
    dims = checks.Dims()
    dims.check("q", q, "B Hq D", checks.PLAIN)
    dims.check("k_pages", k, "Hkv N ps D", (*checks.PLAIN, *QMAX))
    dims.check("v_pages", v, "Hkv N ps D", (*checks.PLAIN, *QMAX))
    checks.check_heads(dims["Hq"], dims["Hkv"])
    dims.check("block_tables", block_tables, "B P", checks.INT)
    if lengths is not None:
        dims.check("lengths", lengths, "B", checks.INT)
    for name, pages, scales in (("k", k, k_scales), ("v", v, v_scales)):
        is_quantised = jnp.dtype(pages.dtype) in QMAX
        if is_quantised and scales is None:
            raise ValueError(f"{name}_scales_pages: expected scales for {pages.dtype.name} pages, got None")
        if scales is None:
            continue
        if not is_quantised:
            raise ValueError(f"{name}_scales_pages: expected None for {pages.dtype.name} pages, got scales")
        dims.check(f"{name}_scales_pages", scales, "Hkv N ps", checks.PLAIN)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    block_tables: Array,
    lengths: Array | None,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    soft_cap: float | None,
    implementation: Implementation,
) -> Array:
    num_kv_heads, num_pages, page_size, head_dim = k.shape
    batch, table_pages = block_tables.shape
    if lengths is None:
        lengths = jnp.full(batch, table_pages * page_size, jnp.int32)
    # jax's pages of head h have the page rows h·N to (h + 1)·N - 1. Head-wise tables permit any page row for any head,
    # so a reshape suffices.
    kv = PagedKV(
        *(x.reshape(num_pages, num_kv_heads, page_size, head_dim) for x in (k, v)),
        *(
            None if x is None else x.astype(jnp.float32).reshape(num_pages, num_kv_heads, page_size)
            for x in (k_scales, v_scales)
        ),
    )
    if num_kv_heads > 1:
        first_row = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None] * num_pages
        page = block_tables[:, None]
        block_tables = jnp.where((page >= 0) & (page < num_pages), first_row + page, PAGE_NONE)
    out, _ = paged_decode(
        q[:, None],
        kv,
        block_tables,
        lengths,
        sm_scale=1.0,
        soft_cap=soft_cap,
        return_lse=True,
        implementation=implementation,
    )
    return out[:, 0]
