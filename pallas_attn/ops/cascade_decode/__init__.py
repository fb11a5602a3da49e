"""Decode of sequences that share their leading pages, such as samples of one prompt (cascade attention; Hydragen,
arXiv:2402.05099).

The shared pages are attended once, by the queries of all sequences: they are one sequence of `paged_prefill`. The
remaining pages of each sequence are attended by `paged_decode`, and `merge_states` combines the two results. The
operation has no kernels itself.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.paged_decode import paged_decode
from pallas_attn.ops.paged_prefill import paged_prefill
from pallas_attn.portable.arguments import refuse_gradients
from pallas_attn.portable.merge import merge_states
from pallas_attn.portable.visibility import real_queries
from pallas_attn.runtime import sharded_calls
from pallas_attn.types import HeadWindow, Implementation, PagedKV

LEAST_SAVED_BYTES = 192 * 2**20
"""Minimum bytes of page reads that a cascade must save to be faster than `paged_decode`, which reads shared pages from
L2. On an H100, 16 samples of 2,048 tokens (120 MiB saved) take 26 us with `paged_decode` and 35 us with a cascade;
samples of 8,192 tokens (480 MiB) take 100 us and 50 us. The threshold lies between these two.
"""


@sharded_calls.over_devices
def cascade_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None = None,
    window: int | HeadWindow | None = None,
    shared_pages: Int32[Array, ""] | int | None = None,
    sm_scale: float | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Q Hq Dv"] | tuple[Float[Array, "B Q Hq Dv"], Float[Array, "B Q Hq"]]:
    """Attention of `paged_decode` for sequences that all begin with the same pages.

    The shared pages are read once for all queries instead of once per sequence. The result is also correct if no page
    is shared. If shapes, or a static `shared_pages`, show that a cascade cannot be faster, `paged_decode` computes
    everything.

    Args:
      q: queries in bfloat16, float16 or float32.
      kv: the cache; see `PagedKV`.
      block_tables: page ids; entries without a visible token may hold any value.
      kv_lens: tokens of each sequence, including the new tokens; 0 for an idle row.
      q_lens: real queries of each sequence, at most Q; None for Q each.
      window: must be None, because a window that moves with its sequence hides shared keys from some sequences only.
      shared_pages: number of leading table columns that are equal in all rows that are not idle. It is clipped to the
        pages in which every query sees all tokens. `count_shared_pages` computes it on the host. None to compute it on
        the device, which costs a call about 10 to 20 us even if no page is shared.
      sm_scale: factor of the scores; None for D**-0.5.
      sinks: float32 learned logits that enter each head's softmax denominator, unscaled and uncapped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for q's dtype.
      implementation: implementation of `paged_prefill` and `paged_decode`.

    Returns:
      The output, exactly 0 for queries that see no key. With `return_lse` also the float32 natural-log LSE of the
        scaled, capped, masked scores without the learned sinks; -inf for queries that see no key.

    Raises:
      ValueError: inconsistent arguments.
      NotImplementedError: a window, head-wise tables, or the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv = pallas_attn.PagedKV.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [5, 0, 3]], jnp.int32)  # the first 8 tokens are shared
      >>> pallas_attn.cascade_decode(jnp.ones((2, 1, 2, 8)), kv, block_tables, jnp.array([9, 10], jnp.int32)).shape
      (2, 1, 2, 8)
    """
    if window is not None:
        raise NotImplementedError(
            "window: takes None; with a window, sequences see different parts of the shared pages"
        )
    block_tables, kv_lens, q_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens, q_lens=q_lens)
    dims = checks.Dims()
    dims.check("q", q, "B Q Hq D", checks.PLAIN)
    checks.check_kv(kv, dims)
    checks.check_heads(dims["Hq"], dims["Hkv"])
    checks.check_block_tables(block_tables, dims, rows="B")
    if block_tables.ndim == 3:
        raise NotImplementedError("block_tables: takes page ids [B, P], which all heads share; got row ids [B, Hkv, P]")
    dims.check("kv_lens", kv_lens, "B", checks.INT)
    if q_lens is not None:
        dims.check("q_lens", q_lens, "B", checks.INT)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", checks.F32)
    given = _as_count(shared_pages)
    out_dtype = checks.output_dtype(out_dtype, q.dtype)
    options: dict[str, Any] = {
        "sm_scale": checks.number("sm_scale", sm_scale),
        "soft_cap": checks.number("soft_cap", soft_cap),
        "return_lse": True,
        "out_dtype": jnp.float32,
        "implementation": implementation,
    }
    if not q.size:
        out = jnp.zeros((*q.shape[:3], kv.value_dim(dims["D"])), out_dtype)
        lse = jnp.zeros(q.shape[:3], jnp.float32)
        return (out, lse) if return_lse else out
    q, kv, sinks = refuse_gradients("cascade_decode", (jnp.asarray(q), kv, sinks))
    batch, queries, ps = dims["B"], dims["Q"], kv.page_size
    most_shared = shared_pages if isinstance(shared_pages, int) else dims["P"]
    if not _pays(kv, batch, min(most_shared, dims["P"])):
        options |= {"return_lse": return_lse, "out_dtype": out_dtype}
        return paged_decode(q, kv, block_tables, kv_lens, q_lens=q_lens, sinks=sinks, **options)
    with jax.named_scope("cascade_decode"):
        block_tables = jnp.asarray(block_tables)
        kv_lens = checks.bound_lens(jnp.asarray(kv_lens), dims["P"] * ps)
        q_lens = None if q_lens is None else checks.bound_lens(jnp.asarray(q_lens), queries)
        real = real_queries(q_lens, kv_lens, queries)
        active = (kv_lens > 0) & (real > 0)
        table, shared = _shared_part(block_tables, jnp.where(active, jnp.maximum(kv_lens - real, 0), -1), given, ps)
        out_shared, lse_shared = paged_prefill(
            q.reshape(batch * queries, *q.shape[2:]),
            kv,
            table[None],
            jnp.array([0, batch * queries], jnp.int32),
            (shared * ps)[None],
            causal=False,
            **options,
        )
        seen = active[:, None] & (jnp.arange(queries, dtype=jnp.int32)[None] < real[:, None])
        lse_shared = jnp.where(seen[..., None], lse_shared.reshape(q.shape[:3]), -jnp.inf)
        column = jnp.minimum(shared + jnp.arange(dims["P"], dtype=jnp.int32), dims["P"] - 1)
        own_lens = jnp.maximum(kv_lens - shared * ps, 0)
        out_own, lse_own = paged_decode(q, kv, block_tables[:, column], own_lens, q_lens=q_lens, **options)
        outs, lses = jnp.stack([out_shared.reshape(out_own.shape), out_own]), jnp.stack([lse_shared, lse_own])
        out, lse = merge_states(outs, lses, sinks)
    return (out.astype(out_dtype), lse) if return_lse else out.astype(out_dtype)


def count_shared_pages(
    kv: PagedKV, block_tables: np.ndarray, kv_lens: np.ndarray, *, q_lens: np.ndarray | int = 1
) -> int:
    """Return the number of leading pages that all sequences share, or 0 if a cascade would not be faster than
    `paged_decode`.

    Engines, which have their tables on the host, pass the result to `cascade_decode` as `shared_pages`, and call
    `paged_decode` if it is 0. This avoids the search on the device. The function computes on the host, from numpy
    arrays. Pass the number to a jitted step as an argument; a step that closes over it is compiled for this number.

    Args:
      kv: the cache; only its shapes and dtypes are used.
      block_tables: int32 [B, P], as for `cascade_decode`.
      kv_lens: int32 [B], tokens of each sequence, including the new tokens; 0 for an idle row.
      q_lens: int32 [B], new tokens of each sequence, or one number for all sequences.

    Raises:
      ValueError: inconsistent arguments.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
      >>> kv = jax.eval_shape(lambda: pallas_attn.PagedKV.allocate(spec))
      >>> tables = np.zeros((64, 40), np.int32)  # one prompt's pages
      >>> tables[:, 30:] = np.arange(1, 65)[:, None]  # and each sample's own
      >>> pallas_attn.count_shared_pages(kv, tables, np.full(64, 2000))
      30
      >>> pallas_attn.count_shared_pages(kv, tables[:4], np.full(4, 2000))  # four sequences would save 23 MB
      0
    """
    checks.check_class("kv", kv, PagedKV)
    tables, lens, new = (np.asarray(x) for x in (block_tables, kv_lens, q_lens))
    for name, array, ndims in (("block_tables", tables, (2,)), ("kv_lens", lens, (1,)), ("q_lens", new, (0, 1))):
        if array.ndim not in ndims or array.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected integers of {ndims[-1]} axes, got {array.dtype} {list(array.shape)}")
        if array.ndim and len(array) != len(tables):
            raise ValueError(f"{name}: expected one for each of {len(tables)} sequences, got {len(array)}")
    active = (lens > 0) & (new > 0)
    if not active.any():
        return 0
    tables, seen = tables[active], np.maximum(lens - new, 0)[active].min() // kv.page_size
    alike = np.logical_and.accumulate((tables == tables[0]).all(axis=0))
    shared = int(min(alike.sum(), seen))
    return shared if _pays(kv, len(tables), shared) else 0


def _pays(kv: PagedKV, sequences: int, shared_pages: int) -> bool:
    """Whether a cascade is expected to be faster than `paged_decode`."""
    page_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in (kv.k, kv.v) if x is not None)
    return (sequences - 1) * shared_pages * page_bytes >= LEAST_SAVED_BYTES


def _as_count(shared_pages: Any) -> Any:
    """A number of pages as an int32 array, or None."""
    if shared_pages is None:
        return None
    (shared_pages,) = checks.int32(shared_pages=shared_pages)
    if isinstance(shared_pages, int) and not isinstance(shared_pages, bool):
        if shared_pages < 0:
            raise ValueError(f"shared_pages: expected at least 0, got {shared_pages}")
        shared_pages = jnp.int32(min(shared_pages, checks.INT32_RANGE.max))
    checks.check_dtype("shared_pages", shared_pages, checks.INT)
    if shared_pages.shape:
        raise ValueError(f"shared_pages: expected one number, got shape {list(shared_pages.shape)}")
    return shared_pages


def _shared_part(
    block_tables: Int32[Array, "B P"], cached: Int32[Array, "B"], given: Int32[Array, ""] | None, page_size: int
) -> tuple[Int32[Array, "P"], Int32[Array, ""]]:
    """Return the table of the shared pages, and the number of leading columns that are shared.

    A column is shared if it is equal in all rows and every query sees all its tokens. The function uses few reductions,
    because each is a launch: a column that is equal in all rows equals its own minimum and maximum.

    Args:
      cached: tokens that the first query of each row sees except its own token; -1 for rows without a query.
      given: the number of equal columns, if it is known.
    """
    bounds = jnp.iinfo(jnp.int32)
    without = cached < 0
    seen = jnp.min(jnp.where(without, bounds.max, cached)) // page_size
    most = jnp.where(jnp.all(without), 0, jnp.minimum(seen, block_tables.shape[1]))
    table = jnp.min(jnp.where(without[:, None], bounds.max, block_tables), axis=0)
    if given is None:
        largest = jnp.max(jnp.where(without[:, None], bounds.min, block_tables), axis=0)
        column = jnp.arange(block_tables.shape[1], dtype=jnp.int32)
        given = jnp.min(jnp.where(table == largest, bounds.max, column))
    return table, jnp.clip(given, 0, most)
