"""Conversions between this package's cache layout and the layouts of other engines.

N pages of ps tokens with Hkv KV heads of D columns are stored in two ways: `PagedKV` has heads before tokens,
[N, Hkv, ps, D] (HND in FlashInfer); other engines have tokens before heads, [N, ps, Hkv, D] (NHD). Keys and values are
separate arrays, or one array [2, N, ...] (vLLM) or [N, 2, ...] (FlashInfer). Examples:

    kv = from_nhd(k, v)                            # separate, NHD
    kv = from_nhd(*split_kv(pages, axis=1))        # [N, 2, ps, Hkv, D]
    kv = PagedKV(*split_kv(pages, axis=0))         # [2, N, Hkv, ps, D]
    pages = join_kv(kv.k, kv.v, axis=0)

`PagedLatent` stores 8-bit latents, their scales and the rotated keys in separate arrays. Other engines store one record
of bytes per token; `from_records` and `to_records` convert these records.

The functions above copy the cache, also under `jax.jit`. Use them to transfer a cache, not in every step.

`view_nhd` copies nothing. It interprets N NHD pages of ps tokens as N·ps pages of one token, [N·ps, Hkv, 1, D]. The
slots of tokens stay the same. `view_fused` does the same for arrays that store the key and the value of a head next to
each other. `token_tables` computes the block tables of these pages:

    kv, tables = view_nhd(k, v), token_tables(block_tables, page_size=k.shape[1])

Every operation that takes a `PagedKV` accepts this cache with these tables, and reads and writes the original arrays.
The block table then has an entry of 4 bytes per token, which is little compared with Hkv·D keys and values. The cache
records ps, so that operations can refuse most tables of pages (`PagedKV.view_page_size`).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num, UInt8

from pallas_attn import checks
from pallas_attn.types import LATENT_GROUP, PAGE_NONE, POWER_OF_TWO, QMAX, PagedKV, PagedLatent


def from_nhd(
    k: Num[Array, "N ps Hkv D"],
    v: Num[Array, "N ps Hkv Dv"],
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedKV:
    """Copy pages with tokens before heads (NHD) into a `PagedKV`.

    Args:
      k, v: keys and values in a dtype of `PagedKV`.
      k_scale, v_scale: float32 scales of 8-bit keys and values, or None: [Hkv], one per head; [Hkv, D], one per head
        and column; or [N, g, Hkv], one per page, token group and head.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> pages = jnp.ones((6, 4, 2, 8))  # 6 pages of 4 tokens, 2 KV heads
      >>> pallas_attn.from_nhd(pages, pages).k.shape
      (6, 2, 4, 8)
    """
    dims = checks.Dims()
    dims.check("k", k, "N ps Hkv D", (*checks.PLAIN, *QMAX))
    dims.check("v", v, "N ps Hkv Dv", (k.dtype,))
    kv = PagedKV(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), _swap_groups(k_scale), _swap_groups(v_scale))
    checks.check_kv(kv, checks.Dims())
    return kv


def to_nhd(
    kv: PagedKV,
) -> tuple[Num[Array, "N ps Hkv D"], Num[Array, "N ps Hkv Dv"], Float[Array, "..."] | None, Float[Array, "..."] | None]:
    """Copy a cache to pages with tokens before heads (NHD): the inverse of `from_nhd`.

    Returns:
      k, v, k_scale and v_scale, with the shapes of the arguments of `from_nhd`. For a fused cache, whose array has W
      columns for the key and W columns for the value, k and v have W columns.

    Raises:
      ValueError: the arrays of the cache do not fit each other.

    Example:
      >>> pages = jnp.ones((6, 2, 4, 8))  # 6 pages, 2 KV heads, 4 tokens
      >>> k, v, k_scale, v_scale = pallas_attn.to_nhd(pallas_attn.PagedKV(pages, pages))
      >>> k.shape, k_scale
      ((6, 4, 2, 8), None)
    """
    checks.check_kv(kv, checks.Dims())
    k, v = jnp.split(kv.k, 2, axis=-1) if kv.v is None else (kv.k, kv.v)
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), _swap_groups(kv.k_scale), _swap_groups(kv.v_scale)


def _swap_groups(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Exchange the axes of heads and token groups of dynamic scales, which have three axes. Return other scales."""
    return jnp.swapaxes(scale, 1, 2) if scale is not None and scale.ndim == 3 else scale


def view_nhd(
    k: Num[Array, "N ps Hkv D"],
    v: Num[Array, "N ps Hkv Dv"],
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedKV:
    """Interpret pages with tokens before heads (NHD) as a cache with one token per page, without a copy.

    Pass this cache to operations together with `token_tables(block_tables, ...)`. Operations raise ValueError for
    tables whose width is not a multiple of ps, such as most tables of pages. The slots of tokens stay the same.
    If an operation returns the cache `kv`, `kv.k.reshape(k.shape)` has the original shape, also without a copy. A dense
    cache [B, S, Hkv, D] is the special case of one page of S tokens per sequence, with the block tables
    `jnp.arange(B)[:, None]`.

    Implementations: `triton` supports these pages on all GPUs, `xla` on all devices. On Hopper, the Mosaic kernels of
    `paged_decode` and `paged_prefill` support views whose ps is a multiple of 16, in 16 bits, or in 8 bits with static
    scales and at least 128 columns.

    Args:
      k, v: keys and values in a dtype of `PagedKV`.
      k_scale, v_scale: float32 scales of 8-bit keys and values, or None: [Hkv], one per head; [Hkv, D], one per head
        and column; or [N, ps, Hkv], one per token and head.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the scales have shape [N, g, Hkv] with g < ps: several tokens share a scale.

    Example:
      >>> pages = jnp.ones((6, 4, 2, 8))  # 6 pages of 4 tokens, 2 KV heads
      >>> kv, block_tables = pallas_attn.view_nhd(pages, pages), jnp.array([[3, 1]], jnp.int32)
      >>> tables = pallas_attn.token_tables(block_tables, page_size=4)
      >>> q, kv_lens = jnp.ones((1, 1, 2, 8)), jnp.array([6], jnp.int32)
      >>> pallas_attn.paged_decode(q, kv, tables, kv_lens).shape
      (1, 1, 2, 8)
    """
    dims = checks.Dims()
    dims.check("k", k, "N ps Hkv D", (*checks.PLAIN, *QMAX))
    dims.check("v", v, "N ps Hkv Dv", (k.dtype,))
    tokens, heads = k.shape[0] * k.shape[1], k.shape[2]
    kv = PagedKV(
        *(jnp.reshape(x, (tokens, heads, 1, x.shape[-1])) for x in (k, v)),
        *(_scale_of_tokens(name, scale, dims) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))),
        view_page_size=dims["ps"],
    )
    checks.check_kv(kv, checks.Dims())
    return kv


def _scale_of_tokens(name: str, scale: Float[Array, "..."] | None, dims: checks.Dims) -> Float[Array, "..."] | None:
    """Return the scales for pages of one token: static scales unchanged, [N, ps, Hkv] as [N·ps, Hkv, 1].

    `dims` contains N, ps and Hkv.

    Raises:
      NotImplementedError: several tokens share a scale.
    """
    if scale is None or scale.ndim != 3:
        return scale
    if scale.shape[1] != dims["ps"]:
        raise NotImplementedError(
            f"{name}: expected static scales, or one for each of ps={dims['ps']} tokens of a page and head, got"
            f" {list(scale.shape)}: pages of one token cannot share a scale; from_nhd converts the cache"
        )
    dims.check(name, scale, "N ps Hkv", checks.F32)
    return jnp.reshape(scale, (dims["N"] * dims["ps"], dims["Hkv"], 1))


def view_fused(
    pages: Num[Array, "N ps *heads columns"],
    num_kv_heads: int,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedKV:
    """Interpret one array with keys and values as a fused cache with one token per page, without a copy.

    Block tables, slots, returned caches and implementations are as for `view_nhd`; `ragged_paged_attention` also takes
    the array itself, with tables of pages. Mosaic kernels of attention require that W columns have a multiple of 128
    bytes. In memory, the array must have, for each token and each head, W columns of the key followed by W columns of
    the value. These shapes have this order:

    - [N, ps, 2·Hkv, W], keys and values alternating (levanter, tpu-inference);
    - [N, ps, 2·Hkv / packing, packing, W], the same with more axes;
    - [N, ps, Hkv, 2·W], key and value of a head concatenated.

    Queries, new keys and new values may have fewer than W columns. The remaining columns, for example a padding to 128
    columns, are then neither read nor written.

    Args:
      pages: keys and values in a dtype of `PagedKV`.
      num_kv_heads: Hkv.
      k_scale, v_scale: see `view_nhd`.

    Raises:
      ValueError: the shape of `pages` cannot be divided into keys and values of this number of heads, or other shapes
        or dtypes do not fit each other.
      NotImplementedError: several tokens share a scale.

    Example:
      >>> pages = jnp.ones((6, 4, 4, 8))  # 6 pages of 4 tokens, 2 KV heads, keys and values alternating
      >>> kv = pallas_attn.view_fused(pages, 2)
      >>> kv.k.shape, kv.v
      ((24, 2, 1, 16), None)
      >>> tables = pallas_attn.token_tables(jnp.array([[3, 1]], jnp.int32), page_size=4)
      >>> q, kv_lens = jnp.ones((1, 1, 2, 8)), jnp.array([6], jnp.int32)
      >>> pallas_attn.paged_decode(q, kv, tables, kv_lens).shape
      (1, 1, 2, 8)
    """
    num_kv_heads = checks.size("num_kv_heads", num_kv_heads)
    checks.check_dtype("pages", pages, (*checks.PLAIN, *QMAX))
    if pages.ndim < 4 or not pages.size:
        raise ValueError(
            "pages: expected a nonempty array [N, ps, 2·Hkv, W], or [N, ps, ...] with more axes whose product is"
            f" 2·Hkv·W, got shape {list(pages.shape)}"
        )
    num_pages, page_size, *rest = pages.shape
    columns, left = divmod(math.prod(rest), num_kv_heads)
    if left or columns % 2:
        raise ValueError(
            f"pages: expected keys and values of num_kv_heads={num_kv_heads} heads after N and ps, got {rest}"
        )
    dims = checks.Dims(N=num_pages, ps=page_size, Hkv=num_kv_heads)
    scales = (_scale_of_tokens(name, scale, dims) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)))
    kv = PagedKV(
        jnp.reshape(pages, (num_pages * page_size, num_kv_heads, 1, columns)), None, *scales, view_page_size=page_size
    )
    checks.check_kv(kv, checks.Dims())
    return kv


def token_tables(
    block_tables: Int32[Array, "S P"] | Int32[Array, "SP"], *, page_size: int
) -> Int32[Array, "S entries"] | Int32[Array, "entries"]:
    """Convert block tables for pages of ps tokens into block tables for pages of one token.

    Entry i·ps + t of a row of the result is entry i of the row times ps, plus t, or PAGE_NONE if entry i has no page.
    The tables are for the caches of `view_nhd` and `view_fused`.

    Args:
      block_tables: page ids, [S, P] or flattened [S·P].
      page_size: ps, tokens per page.

    Returns:
      Tables [S, P·ps], or [S·P·ps] for flattened tables.

    Raises:
      ValueError: `block_tables` is not int32 [S, P] or [S·P], or the page size is below 1.

    Example:
      >>> tables = jnp.array([[3, 1], [0, pallas_attn.PAGE_NONE]], jnp.int32)
      >>> pallas_attn.token_tables(tables, page_size=2).tolist()
      [[6, 7, 2, 3], [0, 1, -1, -1]]
    """
    (block_tables,) = checks.int32(block_tables=block_tables)
    checks.check_array("block_tables", block_tables)
    is_flat = block_tables.ndim == 1
    checks.Dims().check("block_tables", block_tables, "S" if is_flat else "S P", checks.INT)
    page_size = checks.size("page_size", page_size)
    most = (jnp.iinfo(jnp.int32).max - (page_size - 1)) // page_size
    exists = (block_tables >= 0) & (block_tables <= most)
    offsets = jnp.arange(page_size, dtype=jnp.int32).reshape((1,) * block_tables.ndim + (page_size,))
    tokens = jnp.where(
        exists[..., None], jnp.where(exists, block_tables, 0)[..., None] * page_size + offsets, PAGE_NONE
    )
    return tokens.reshape(*block_tables.shape[:-1], block_tables.shape[-1] * page_size)


def from_csr(
    indptr: Int32[Array, "S_plus_1"],
    indices: Int32[Array, "I"],
    last_page_len: Int32[Array, "S"],
    *,
    page_size: int,
    table_pages: int,
) -> tuple[Int32[Array, "S P"], Int32[Array, "S"]]:
    """Convert FlashInfer's metadata, concatenated page ids in CSR form, into block tables and lengths.

    Args:
      indptr: sequence s has the pages indices[indptr[s] : indptr[s + 1]]; the range may be empty.
      indices: page ids. Ids from indptr[S] on may have any value.
      last_page_len: tokens in the last page of each sequence, 1 to ps; any value for a sequence without pages.
      page_size: ps, tokens per page.
      table_pages: P, entries per row of the result. A sequence with more pages is truncated to P·ps tokens.

    Returns:
      Block tables, with PAGE_NONE after the pages of a sequence, and the number of tokens of each sequence.

    Raises:
      ValueError: shapes or dtypes do not fit each other, or sizes are below 1.

    Example:
      >>> indptr, indices = jnp.array([0, 2, 2, 3], jnp.int32), jnp.array([5, 1, 4], jnp.int32)
      >>> tables, kv_lens = pallas_attn.from_csr(
      ...     indptr, indices, jnp.array([3, 0, 8], jnp.int32), page_size=8, table_pages=2
      ... )
      >>> tables.tolist(), kv_lens.tolist()
      ([[5, 1], [-1, -1], [4, -1]], [11, 0, 8])
    """
    indptr, indices, last_page_len = checks.int32(indptr=indptr, indices=indices, last_page_len=last_page_len)
    dims = checks.Dims()
    dims.check("last_page_len", last_page_len, "S", checks.INT)
    dims.check("indptr", indptr, "S+1", checks.INT)
    checks.check_array("indices", indices)
    if indices.ndim != 1:
        raise ValueError(f"indices: expected shape [I], got {list(indices.shape)}")
    page_size, table_pages = checks.size("page_size", page_size), checks.size("table_pages", table_pages)
    counts = jnp.maximum(jnp.diff(indptr), 0)
    column = jnp.arange(table_pages, dtype=jnp.int32)[None]
    place = indptr[:-1, None] + column
    held = (column < counts[:, None]) & (place >= 0) & (place < indices.shape[0])
    tables = jnp.full(held.shape, PAGE_NONE, jnp.int32)
    if indices.shape[0]:
        tables = jnp.where(held, indices[jnp.where(held, place, 0)], PAGE_NONE)
    in_last = jnp.clip(last_page_len, 0, page_size)
    lens = (counts - 1) * page_size + in_last
    return tables, jnp.where(counts > table_pages, table_pages * page_size, jnp.where(counts > 0, lens, 0))


def split_kv(pages: Num[Array, "..."], *, axis: int) -> tuple[Num[Array, "N A B D"], Num[Array, "N A B D"]]:
    """Split an array of keys and values into an array of keys and an array of values.

    Args:
      pages: [2, N, A, B, D] for axis=0, [N, 2, A, B, D] for axis=1, where A and B are the heads and the tokens of a
        page in any order. Index 0 of the axis has the keys, index 1 the values.
      axis: 0 or 1.

    Raises:
      ValueError: `pages` has another shape, or `axis` is neither 0 nor 1.

    Example:
      >>> k, v = pallas_attn.split_kv(jnp.ones((6, 2, 4, 1, 8)), axis=1)
      >>> k.shape
      (6, 4, 1, 8)
    """
    _check_axis(axis)
    checks.Dims().check("pages", pages, "2 N A B D" if axis == 0 else "N 2 A B D")
    return jnp.take(pages, 0, axis=axis), jnp.take(pages, 1, axis=axis)


def join_kv(k: Num[Array, "N A B D"], v: Num[Array, "N A B D"], *, axis: int) -> Num[Array, "..."]:
    """Join keys and values into one array: the inverse of `split_kv`.

    Raises:
      ValueError: k and v have different shapes or dtypes, or `axis` is neither 0 nor 1.

    Example:
      >>> pallas_attn.join_kv(jnp.ones((6, 4, 1, 8)), jnp.ones((6, 4, 1, 8)), axis=0).shape
      (2, 6, 4, 1, 8)
    """
    _check_axis(axis)
    dims = checks.Dims()
    dims.check("k", k, "N A B D")
    dims.check("v", v, "N A B D", (k.dtype,))
    return jnp.stack([k, v], axis=axis)


def from_records(
    records: UInt8[Array, "N ps bytes"] | UInt8[Array, "N bytes"],
    *,
    latent_dim: int = 512,
    page_size: int | None = None,
) -> PagedLatent:
    """Copy the token records of FlashMLA and vLLM into a quantised latent cache. No bits of the numbers change.

    With records [N, ps, bytes], a record has the bytes of one token, little-endian: L float8_e4m3fn numbers of the
    latent; L / 128 float32 scales, one for each 128 numbers; R bfloat16 numbers of the rotated key. For L = 512 and
    R = 64 these are 512 + 16 + 128 = 656 bytes. FlashMLA calls this format "FP8 with scale" (README and
    tests/quant.py); vLLM's kv-cache dtype "fp8_ds_mla" uses it (`concat_and_cache_ds_mla` in csrc/cache_kernels.cu). A
    latent is number times scale, as in `PagedLatent`. FlashMLA's arrays have an additional axis of size 1 (heads)
    before the bytes; remove it first.

    With pages [N, bytes], the format is DeepSeek-V4's: a page has `page_size` records of 576 bytes (448 float8_e4m3fn
    numbers and 64 bfloat16 rotated columns), then 8 bytes of scales per record (7 float8_e8m0fnu, one for each 64
    numbers, and one unused byte), and is padded to a multiple of 576 bytes.

    Args:
      records: uint8 [N, ps, bytes], N pages of ps records; or uint8 [N, bytes], N pages.
      latent_dim: L, a multiple of 128; not used for pages [N, bytes].
      page_size: records per page of pages [N, bytes], else None.

    Raises:
      ValueError: `records` has another shape or dtype, no R fits its number of bytes, or `page_size` is None for pages
        [N, bytes] or given for records [N, ps, bytes].

    Example:
      >>> cache = pallas_attn.from_records(jnp.zeros((6, 64, 656), jnp.uint8))
      >>> cache.pages.shape, cache.scale.shape, cache.rope.shape
      ((6, 64, 512), (6, 64, 4), (6, 64, 64))
      >>> cache = pallas_attn.from_records(jnp.zeros((6, 37440), jnp.uint8), page_size=64)
      >>> cache.pages.shape, cache.scale.shape, cache.rope.shape
      ((6, 64, 448), (6, 64, 7), (6, 64, 64))
    """
    checks.check_array("records", records)
    if len(records.shape) == 2:
        return _from_pages(records, page_size)
    if page_size is not None:
        raise ValueError(f"page_size: expected None for records [N, ps, bytes], got {page_size!r}")
    if checks.size("latent_dim", latent_dim) % LATENT_GROUP:
        raise ValueError(f"latent_dim: expected a multiple of {LATENT_GROUP}, got {latent_dim}")
    checks.Dims().check("records", records, "N ps bytes", (jnp.uint8,))
    groups = latent_dim // LATENT_GROUP
    end_of_scales = latent_dim + 4 * groups
    rope_bytes = records.shape[2] - end_of_scales
    if rope_bytes < 2 or rope_bytes % 2:
        raise ValueError(
            f"records: expected {end_of_scales} bytes for {latent_dim} latent columns and 2 for each rotated one,"
            f" got {records.shape[2]}"
        )
    cache = PagedLatent(
        _numbers(records[..., :latent_dim], jnp.float8_e4m3fn),
        _numbers(records[..., latent_dim:end_of_scales], jnp.float32),
        _numbers(records[..., end_of_scales:], jnp.bfloat16),
    )
    checks.check_latent(cache, checks.Dims())
    return cache


V4_LATENT, V4_ROPE, V4_SCALES = 448, 64, 7
"""Float8 columns, rotated columns and scales of a record of DeepSeek-V4."""

V4_DATA, V4_SCALE_BYTES = V4_LATENT + 2 * V4_ROPE, 8
"""Bytes of a record of DeepSeek-V4 before the scales, and bytes of its scales."""


def _page_bytes(page_size: int) -> int:
    """Return the bytes of a page of DeepSeek-V4: a multiple of `V4_DATA`."""
    return -(-page_size * (V4_DATA + V4_SCALE_BYTES) // V4_DATA) * V4_DATA


def _from_pages(pages: UInt8[Array, "N bytes"], page_size: int | None) -> PagedLatent:
    checks.Dims().check("records", pages, "N bytes", (jnp.uint8,))
    if page_size is None:
        raise ValueError("page_size: expected the records per page for pages [N, bytes], got None")
    page_size = checks.size("page_size", page_size)
    if pages.shape[1] != _page_bytes(page_size):
        wanted = f"{_page_bytes(page_size)} bytes for {page_size} records"
        raise ValueError(f"records: expected {wanted}, got {pages.shape[1]}")
    end = page_size * V4_DATA
    data = pages[:, :end].reshape(-1, page_size, V4_DATA)
    scales = pages[:, end : end + page_size * V4_SCALE_BYTES].reshape(-1, page_size, V4_SCALE_BYTES)
    return PagedLatent(
        _numbers(data[..., :V4_LATENT], jnp.float8_e4m3fn),
        _numbers(scales[..., :V4_SCALES], POWER_OF_TWO),
        _numbers(data[..., V4_LATENT:], jnp.bfloat16),
    )


def _numbers(records: UInt8[Array, "N ps bytes"], dtype: Any) -> Array:
    """Return bytes as numbers of a dtype."""
    size = jnp.dtype(dtype).itemsize
    shape = (-1,) if size == 1 else (-1, size)
    return lax.bitcast_convert_type(records.reshape(*records.shape[:2], *shape), dtype)


def to_records(cache: PagedLatent) -> UInt8[Array, "N ps bytes"] | UInt8[Array, "N bytes"]:
    """Copy a quantised latent cache into token records: the inverse of `from_records`.

    A cache with float8_e8m0fnu scales becomes pages [N, bytes] in DeepSeek-V4's format. Unused bytes are 0.

    Raises:
      ValueError: the arrays of the cache do not fit each other, the cache is not quantised, the rotated keys are not
        bfloat16, or a cache with float8_e8m0fnu scales has other widths than L = 448 and R = 64.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(
      ...     num_pages=6, page_size=64, latent_dim=512, rope_dim=64, dtype=jnp.float8_e4m3fn
      ... )
      >>> pallas_attn.to_records(pallas_attn.PagedLatent.allocate(spec)).shape
      (6, 64, 656)
    """
    checks.check_latent(cache, checks.Dims(), small_groups=True)
    if cache.scale is None or cache.rope is None:
        raise ValueError(f"cache.pages: expected float8_e4m3fn with scales, got {cache.pages.dtype.name}")
    checks.check_dtype("cache.rope", cache.rope, (jnp.bfloat16,))
    num_pages, page_size, latent_dim = cache.pages.shape
    latent, scale, rope = (
        lax.bitcast_convert_type(part, jnp.uint8).reshape(num_pages, page_size, -1)
        for part in (cache.pages, cache.scale, cache.rope)
    )
    if cache.scale.dtype != POWER_OF_TWO:
        return jnp.concatenate([latent, scale, rope], axis=-1)
    if (latent_dim, cache.rope.shape[2]) != (V4_LATENT, V4_ROPE):
        widths = f"{latent_dim} and {cache.rope.shape[2]}"
        raise ValueError(f"cache.pages: expected {V4_LATENT} columns and {V4_ROPE} rotated ones, got {widths}")
    scale = jnp.pad(scale, ((0, 0), (0, 0), (0, V4_SCALE_BYTES - V4_SCALES)))
    parts = [part.reshape(num_pages, -1) for part in (jnp.concatenate([latent, rope], axis=-1), scale)]
    pages = jnp.concatenate(parts, axis=-1)
    return jnp.pad(pages, ((0, 0), (0, _page_bytes(page_size) - pages.shape[1])))


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ValueError(f"axis: expected 0 or 1, the axis of keys and values, got {axis!r}")
