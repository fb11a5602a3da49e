"""`mqa` and `gqa` with the signatures of `jax.experimental.pallas.ops.gpu.decode_attention` of jax 0.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.compat.jax_gpu import arguments, reference
from pallas_attn.ops.paged_decode import paged_decode
from pallas_attn.types import VIEW_PAGE_SIZES, Implementation, PagedKV

type Residuals = tuple[Float[Array, "B Hq"], Float[Array, "B Hq"]]
"""(l, m) of the softmax."""

type Attention = Float[Array, "B Hq D"] | tuple[Float[Array, "B Hq D"], Residuals]
"""Output, or output and residuals."""


def mqa(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    start_idx: Int32[Array, "B"] | int | None = None,
    kv_seq_len: Int32[Array, "B"] | int | None = None,
    sm_scale: float | None = None,
    block_h: int = 16,
    block_k: int = 256,
    k_splits: int = 16,
    num_warps: int | None = None,
    num_stages: int = 2,
    grid: tuple[int, ...] | None = None,
    interpret: bool = False,
    debug: bool = False,
    return_residuals: bool = False,
    normalize_output: bool = True,
    implementation: Implementation = None,
) -> Attention:
    """Attention of one query token per sequence over a dense cache with one KV head.

    Arguments, results and errors are those of `gqa`, with k and v [B, S, D].

    Example:
      >>> from pallas_attn.compat.jax_gpu import decode_attention
      >>> k = v = jnp.ones((2, 64, 128), jnp.bfloat16)  # 64 tokens
      >>> decode_attention.mqa(jnp.ones((2, 8, 128), jnp.bfloat16), k, v, kv_seq_len=50).shape
      (2, 8, 128)
    """
    arguments.warn_about_tuning(mqa, locals())
    attend = _attend_by(implementation)
    return _run("B S D", q, k, v, start_idx, kv_seq_len, sm_scale, return_residuals, normalize_output, attend)


def gqa(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    start_idx: Int32[Array, "B"] | int | None = None,
    kv_seq_len: Int32[Array, "B"] | int | None = None,
    sm_scale: float | None = None,
    block_h: int = 16,
    block_k: int = 128,
    k_splits: int = 16,
    num_warps: int | None = None,
    num_stages: int = 2,
    grid: tuple[int, ...] | None = None,
    interpret: bool = False,
    debug: bool = False,
    return_residuals: bool = False,
    normalize_output: bool = True,
    implementation: Implementation = None,
) -> Attention:
    """Attention of one query token per sequence over a dense cache with tokens before KV heads.

    The cache is read in place. Mosaic kernels run calls without `start_idx`, with one KV head, or on Hopper also with
    several if S is a multiple of 16. Triton kernels run the other calls.

    Args:
      q: queries in bfloat16, float16 or float32.
      k, v: keys and values of S tokens per sequence, in bfloat16, float16 or float32.
      start_idx: number of invisible tokens at the start of each sequence; a number or scalar applies to all sequences.
        None for 0.
      kv_seq_len: end of the visible tokens of each sequence, as `start_idx`; None for S.
      sm_scale: factor of the scores; None for D**-0.5.
      block_h, block_k, k_splits, num_warps, num_stages, grid: ignored, with one warning per process.
      interpret, debug: ignored.
      return_residuals: also return (l, m).
      normalize_output: False for an output that is not yet divided by l. Requires `return_residuals`.
      implementation: as in `paged_decode`; jax's function does not have this argument.

    Returns:
      The output in the dtype of q; 0 for queries without visible tokens. With `return_residuals` a tuple
        (output, (l, m)) with float32 l and m [B, Hq]. As in jax, m + log(l) is the LSE, output / l of an unnormalised
        output is the attention, and queries without visible tokens have l = 0 and m = finfo(float32).min. The scale of
        l and m is different: m is the LSE instead of the maximum of the scores, and l is 1. Formulas that merge parts
        give the same results for both.

    Raises:
      ValueError: inconsistent arguments.
      NotImplementedError: `normalize_output` is False without `return_residuals`; or no implementation supports the
        call.

    Example:
      >>> from pallas_attn.compat.jax_gpu import decode_attention
      >>> k = v = jnp.ones((2, 64, 2, 128), jnp.bfloat16)  # 64 tokens, 2 KV heads
      >>> q, ends = jnp.ones((2, 8, 128), jnp.bfloat16), jnp.array([50, 0], jnp.int32)
      >>> out, (l, m) = decode_attention.gqa(q, k, v, kv_seq_len=ends, return_residuals=True)
      >>> out[:, 0, 0].tolist(), l[:, 0].tolist()
      ([1.0, 0.0], [1.0, 0.0])
    """
    arguments.warn_about_tuning(gqa, locals())
    attend = _attend_by(implementation)
    return _run("B S Hkv D", q, k, v, start_idx, kv_seq_len, sm_scale, return_residuals, normalize_output, attend)


def mqa_reference(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    start_idx: Int32[Array, "B"] | int | None = None,
    kv_seq_len: Int32[Array, "B"] | int | None = None,
    sm_scale: float | None = None,
    return_residuals: bool = False,
    normalize_output: bool = True,
) -> Attention:
    """Attention in float32 with the results and errors of `mqa`, for tests. It stores all scores.

    Arguments for tuning and `implementation` are absent.

    Example:
      >>> from pallas_attn.compat.jax_gpu import decode_attention
      >>> k = v = jnp.ones((2, 64, 128), jnp.bfloat16)  # 64 tokens
      >>> decode_attention.mqa_reference(jnp.ones((2, 8, 128), jnp.bfloat16), k, v, kv_seq_len=50).shape
      (2, 8, 128)
    """
    return _run("B S D", q, k, v, start_idx, kv_seq_len, sm_scale, return_residuals, normalize_output, _attend_dense)


def gqa_reference(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    start_idx: Int32[Array, "B"] | int | None = None,
    kv_seq_len: Int32[Array, "B"] | int | None = None,
    sm_scale: float | None = None,
    return_residuals: bool = False,
    normalize_output: bool = True,
) -> Attention:
    """Attention in float32 with the results and errors of `gqa`, for tests. It stores all scores.

    Arguments for tuning and `implementation` are absent. The residuals have the scale of the residuals of `gqa`: l is 1
    and m is the LSE.

    Example:
      >>> from pallas_attn.compat.jax_gpu import decode_attention
      >>> k = v = jnp.ones((2, 64, 2, 128), jnp.bfloat16)  # 64 tokens, 2 KV heads
      >>> decode_attention.gqa_reference(jnp.ones((2, 8, 128), jnp.bfloat16), k, v, kv_seq_len=50).shape
      (2, 8, 128)
    """
    return _run(
        "B S Hkv D", q, k, v, start_idx, kv_seq_len, sm_scale, return_residuals, normalize_output, _attend_dense
    )


def mha_reference(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S Hq D"],
    v: Float[Array, "B S Hq D"],
    start_idx: Int32[Array, "B"] | int | None = None,
    kv_seq_len: Int32[Array, "B"] | int | None = None,
    sm_scale: float | None = None,
) -> Float[Array, "B Hq D"]:
    """Attention in float32 with one KV head per query head, for tests. It has the errors of `gqa`.

    Example:
      >>> from pallas_attn.compat.jax_gpu import decode_attention
      >>> k = v = jnp.ones((2, 64, 8, 128), jnp.bfloat16)  # 64 tokens
      >>> decode_attention.mha_reference(jnp.ones((2, 8, 128), jnp.bfloat16), k, v, kv_seq_len=50).shape
      (2, 8, 128)
    """
    result: Any = _run("B S Hq D", q, k, v, start_idx, kv_seq_len, sm_scale, False, True, _attend_dense)
    return result


def _run(
    axes: str,
    q: Any,
    k: Any,
    v: Any,
    start_idx: Any,
    kv_seq_len: Any,
    sm_scale: Any,
    return_residuals: bool,
    normalize_output: bool,
    attend: Callable[..., tuple[Float[Array, "B Hq D"], Residuals]],
) -> Attention:
    """Check the arguments and attend.

    Args:
      axes: axes of k and v.
      start_idx, kv_seq_len: None, a number, or int32 [] or [B].
      attend: function of the arrays by name and of `sm_scale` that returns the output and (l, m).
    """
    dims = checks.Dims()
    dims.check("q", q, "B Hq D", checks.PLAIN)
    dims.check("k", k, axes, checks.PLAIN)
    dims.check("v", v, axes, (k.dtype,))
    if "Hkv" in axes:
        checks.check_heads(dims["Hq"], dims["Hkv"])
    arrays = {"q": q, "k": k, "v": v}
    for name, value in (("start_idx", start_idx), ("kv_seq_len", kv_seq_len)):
        (value,) = checks.int32(**{name: np.int64(value) if isinstance(value, int) else value})
        if value is not None:
            dims.check(name, value, "B" if getattr(value, "ndim", 0) else "", checks.INT)
        arrays[name] = value
    if not normalize_output and not return_residuals:
        raise NotImplementedError(
            "normalize_output: takes False only with return_residuals=True, because an unnormalised output has no"
            " meaning without residuals"
        )
    out, residuals = attend(arrays, sm_scale=checks.number("sm_scale", sm_scale))
    return (out, residuals) if return_residuals else out


def _attend_dense(arrays: dict[str, Any], *, sm_scale: float | None) -> tuple[Float[Array, "B Hq D"], Residuals]:
    """Return the output and (l, m), computed with all scores in memory."""
    q, k, v, start, end = arrays.values()
    k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = reference.attention(q, k, v, start, end, sm_scale=scale)
    return out, _residuals(lse)


def _attend_by(implementation: Implementation) -> Callable[..., tuple[Float[Array, "B Hq D"], Residuals]]:
    """Return a function for `_run` that calls `paged_decode` with an implementation."""
    return lambda arrays, sm_scale: arguments.call_in_jit(_attend, arrays, implementation, sm_scale=sm_scale)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    start_idx: Array | None,
    kv_seq_len: Array | None,
    *,
    sm_scale: float | None,
    implementation: Implementation,
) -> tuple[Float[Array, "B Hq D"], Residuals]:
    """Return the output and (l, m) for a cache [B, S, D] or [B, S, Hkv, D]."""
    batch, tokens, head_dim = k.shape[0], k.shape[1], k.shape[-1]
    num_kv_heads = k.shape[2] if k.ndim == 4 else 1
    # The tokens of a page of one head are contiguous only if the page has one token, or the cache one head. Pages of
    # one token also permit tables that start at any token.
    page_size = (
        next((ps for ps in VIEW_PAGE_SIZES if tokens % ps == 0), 1) if num_kv_heads == 1 and start_idx is None else 1
    )
    # Without `start_idx`, a row of `table` has consecutive tokens.
    view = tokens or None if num_kv_heads > 1 and start_idx is None else None
    kv = PagedKV(*(x.reshape(-1, num_kv_heads, page_size, head_dim) for x in (k, v)), view_page_size=view)
    table = jnp.arange(batch * tokens // page_size, dtype=jnp.int32).reshape(batch, tokens // page_size)
    kv_lens = jnp.broadcast_to(jnp.int32(tokens) if kv_seq_len is None else kv_seq_len, (batch,))
    if start_idx is not None:
        start = jnp.broadcast_to(jnp.clip(start_idx, 0, tokens), (batch,))
        table += start[:, None]
        kv_lens = jnp.minimum(kv_lens, tokens) - start
    out, lse = paged_decode(
        q[:, None], kv, table, kv_lens, sm_scale=sm_scale, return_lse=True, implementation=implementation
    )
    return out[:, 0], _residuals(lse[:, 0])


def _residuals(lse: Float[Array, "B Hq"]) -> Residuals:
    sees_token = lse > -jnp.inf
    return sees_token.astype(jnp.float32), jnp.where(sees_token, lse, jnp.finfo(jnp.float32).min)
