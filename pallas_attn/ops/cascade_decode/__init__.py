"""Decode of sequences that share their leading pages, such as samples of one prompt (cascade attention; Hydragen,
arXiv:2402.05099).

The operation calls three operations. `paged_prefill` computes attention of the queries of all sequences to the shared
pages, as if all queries belonged to one sequence. `paged_decode` computes attention of each sequence to its remaining
pages. `merge_states` merges the two results.
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
"""Default of `min_saved_bytes`: a cascade is used if it saves at least this number of bytes of page reads.

With fewer bytes, `paged_decode` is faster: it runs fewer kernels, and reads shared pages from L2 after the first read.
Measured on an H100 with 16 samples: 2,048 shared tokens (120 MiB saved) take 26 us with `paged_decode` and 35 us with
a cascade; 8,192 shared tokens (480 MiB saved) take 100 us and 50 us. The threshold lies between these two cases.
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
    min_saved_bytes: int | None = None,
    sm_scale: float | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Q Hq Dv"] | tuple[Float[Array, "B Q Hq Dv"], Float[Array, "B Q Hq"]]:
    """Attention of `paged_decode` for sequences whose block tables begin with the same page ids.

    The shared pages are read once for all queries instead of once per sequence. The result is also correct if no page
    is shared. The call runs `paged_decode` alone if a cascade cannot be faster, judged from the shapes and from
    `shared_pages` if it is a Python int.

    Args:
      q: queries in bfloat16, float16 or float32.
      kv: the cache; see `PagedKV`.
      block_tables: page ids; entries without a visible token may have any value.
      kv_lens: tokens of each sequence, including the new tokens; 0 for an idle sequence.
      q_lens: number of queries of each sequence, at most Q; None if every sequence has Q queries.
      window: must be None: with a window, each sequence would see a different part of the shared pages.
      shared_pages: number of leading columns of `block_tables` that are equal in all sequences that are not idle.
        Pages in which some query does not see all tokens are not counted as shared. `count_shared_pages` computes the
        number on the host. None to compute it on the device, which takes 10 to 20 us per call, also if no page is
        shared.
      min_saved_bytes: minimum number of bytes of page reads that a cascade must save; otherwise the call runs
        `paged_decode` alone. If `shared_pages` is an array or None, the bytes are computed as if all pages were shared.
        None for 192 MiB, the limit from measurements on an H100.
      sm_scale: factor of the scores; None for D**-0.5.
      sinks: float32 learned logits, one per query head, which are added to the softmax denominator, neither scaled nor
        capped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for q's dtype.
      implementation: implementation of `paged_prefill` and `paged_decode`.

    Returns:
      The output, exactly 0 for queries that see no key. With `return_lse` also the LSE: the natural logarithm of the
        sum of exp(score) over visible keys, float32, without `sinks`; -inf for queries that see no key.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the call has a window or tables of row ids [B, Hkv, P], or the named implementation does not
        support the call.

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
    checks.check_heads(dims["Hq"], dims["Hkv"], advice=checks.view_advice(kv, dims["Hq"]))
    checks.check_block_tables(block_tables, dims, rows="B")
    if block_tables.ndim == 3:
        raise NotImplementedError("block_tables: takes page ids [B, P], which all heads share; got row ids [B, Hkv, P]")
    dims.check("kv_lens", kv_lens, "B", checks.INT)
    if q_lens is not None:
        dims.check("q_lens", q_lens, "B", checks.INT)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", checks.F32)
    given, least = _as_count(shared_pages), _as_bytes(min_saved_bytes)
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
    if not _pays(kv, batch, min(most_shared, dims["P"]), least):
        options |= {"return_lse": return_lse, "out_dtype": out_dtype}
        return paged_decode(q, kv, block_tables, kv_lens, q_lens=q_lens, sinks=sinks, **options)
    with jax.named_scope("cascade_decode"):
        block_tables = jnp.asarray(block_tables)
        kv_lens = checks.bound_lens(jnp.asarray(kv_lens), dims["P"] * ps)
        q_lens = None if q_lens is None else checks.bound_lens(jnp.asarray(q_lens), queries)
        real = real_queries(q_lens, kv_lens, queries)
        active = (kv_lens > 0) & (real > 0)
        table, shared = _shared_part(block_tables, jnp.where(active, jnp.maximum(kv_lens - real, 0), -1), given, ps)
        if (entries := kv.plan_page_size // ps) > 1:
            # The tables of a view have an entry per token. The rest of a table starts with a page of a plan, too.
            shared = shared // entries * entries
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
    kv: PagedKV,
    block_tables: np.ndarray,
    kv_lens: np.ndarray,
    *,
    q_lens: np.ndarray | int = 1,
    min_saved_bytes: int | None = None,
) -> int:
    """Return the number of leading pages that all sequences share, or 0 if `paged_decode` would be faster than a
    cascade.

    The function runs on the host, with numpy. An engine that has its block tables on the host passes the result to
    `cascade_decode` as `shared_pages`, or calls `paged_decode` if it is 0. The device then does not search for shared
    pages. Pass the number to a jitted step as an argument: a step that closes over it is compiled anew for each number.

    Args:
      kv: the cache; only its shapes and dtypes are used.
      block_tables: int32 [B, P], page ids.
      kv_lens: int32 [B], tokens of each sequence, including the new tokens; 0 for an idle sequence.
      q_lens: int32 [B], new tokens of each sequence, or one number for all sequences.
      min_saved_bytes: as in `cascade_decode`: the result is 0 if a cascade would save fewer bytes of page reads.

    Raises:
      ValueError: an array has a wrong number of axes, a wrong dtype, or another number of sequences; or
        min_saved_bytes is not an int of at least 0.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
      >>> kv = jax.eval_shape(lambda: pallas_attn.PagedKV.allocate(spec))
      >>> tables = np.zeros((64, 40), np.int32)  # the pages of one prompt, in 64 samples
      >>> tables[:, 30:] = np.arange(1, 65)[:, None]  # after 30 pages, each sample has other pages
      >>> pallas_attn.count_shared_pages(kv, tables, np.full(64, 2000))
      30
      >>> pallas_attn.count_shared_pages(kv, tables[:4], np.full(4, 2000))  # four sequences would save 23 MB
      0
    """
    checks.check_class("kv", kv, PagedKV)
    least = _as_bytes(min_saved_bytes)
    tables, lens, new = (np.asarray(x) for x in (block_tables, kv_lens, q_lens))
    for name, array, ndims in (("block_tables", tables, (2,)), ("kv_lens", lens, (1,)), ("q_lens", new, (0, 1))):
        if array.ndim not in ndims or array.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected integers of {ndims[-1]} axes, got {array.dtype} {list(array.shape)}")
        if array.ndim and len(array) != len(tables):
            raise ValueError(f"{name}: expected one for each of {len(tables)} sequences, got {len(array)}")
    active = (lens > 0) & (new > 0)
    if not active.any():
        return 0
    seen = int(np.maximum(lens - new, 0)[active].min() // kv.page_size)
    if not _pays(kv, int(active.sum()), min(seen, tables.shape[1]), least):
        return 0
    tables = tables[active, :seen]
    shared = int(np.logical_and.accumulate((tables == tables[0]).all(axis=0)).sum())
    return shared if _pays(kv, len(tables), shared, least) else 0


def _as_bytes(min_saved_bytes: Any) -> int:
    """Return `min_saved_bytes` as an int; the default if it is None.

    Raises:
      ValueError: the argument is negative or not an integer.
    """
    if min_saved_bytes is None:
        return LEAST_SAVED_BYTES
    if isinstance(min_saved_bytes, bool) or not isinstance(min_saved_bytes, int) or min_saved_bytes < 0:
        raise ValueError(f"min_saved_bytes: expected an int of at least 0, or None; got {min_saved_bytes!r}")
    return min_saved_bytes


def _pays(kv: PagedKV, sequences: int, shared_pages: int, min_saved_bytes: int) -> bool:
    """Return whether a cascade is expected to be faster than `paged_decode`.

    `paged_decode` reads the shared pages once per sequence, a cascade once.
    """
    page_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in (kv.k, kv.v) if x is not None)
    return (sequences - 1) * shared_pages * page_bytes >= min_saved_bytes


def _as_count(shared_pages: Any) -> Any:
    """Check `shared_pages` and return it as an int32 scalar array, or None if it is None.

    Raises:
      ValueError: the argument is negative, not an integer, or not a scalar.
    """
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
    """Return a block table row with the shared pages, and the number of its leading entries that are shared.

    A column of `block_tables` is shared if all sequences have the same entry and every query sees all tokens of the
    page. The entries of a column are equal if their minimum equals their maximum. This test takes few reductions, each
    of which is a kernel launch.

    Args:
      cached: tokens of each sequence before its first query; -1 for sequences without a query, which are ignored.
      given: the number of equal leading columns, or None to compute it.
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
