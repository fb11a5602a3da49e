"""Checks that several Mosaic GPU kernels share. Each raises NotImplementedError for a call that they do not support."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_attn.mosaic.primitives.dequantize import tokens_per_smem_row
from pallas_attn.types import QMAX, PagedKV, PagedLatent

HEAD_DIMS = (64, 128, 256)
WIDE_HEAD_DIMS = (*HEAD_DIMS, 320, 384, 448, 512)
"""Head widths of decode on Hopper over 16-bit caches."""
WIDE_8_BIT_HEAD_DIMS = (*HEAD_DIMS, 384, 512)
"""Head widths of decode on Hopper over 8-bit caches, whose wide heads are converted in blocks of 128 columns."""
NO_WIDER_ON_BLACKWELL = "no kernel on Blackwell has wider heads, most of which exceed shared memory"
PAGE_SIZES = (16, 32, 64, 128)
LARGEST_SOFT_CAP = 4096.0
"""Largest supported soft cap. Kernels compute a capped score as the difference of two numbers of the size of the cap,
so the absolute error of a score is about 1e-7 times the cap (`mosaic.hopper.wgmma.capped`).
"""


def require_dtypes(q_dtype: jnp.dtype, key_dtype: jnp.dtype) -> None:
    """Raise NotImplementedError unless queries are bfloat16 or float16, and keys have the same dtype or are int8 or
    float8_e4m3fn.
    """
    if q_dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 and float16 queries, got {q_dtype.name}")
    require_8_bits(key_dtype)
    if key_dtype != q_dtype and key_dtype not in QMAX:
        raise NotImplementedError(
            f"takes queries and an unquantised cache of one dtype, got {q_dtype.name} over {key_dtype.name}"
        )


def require_8_bits(dtype: jnp.dtype) -> None:
    """Raise NotImplementedError for a cache in float8_e5m2."""
    if dtype == jnp.float8_e5m2:
        raise NotImplementedError(f"takes caches of 8 bits in int8 and float8_e4m3fn, got {dtype.name}")


def require_apart(kv: PagedKV) -> None:
    """Raise NotImplementedError unless keys and values are separate arrays of the same width and dtype."""
    if kv.v is None:
        raise NotImplementedError("takes keys and values in arrays of their own, got them fused")
    if kv.k.shape[-1] != kv.v.shape[-1]:
        raise NotImplementedError(
            f"takes pages of keys and values of one width, got {kv.k.shape[-1]} and {kv.v.shape[-1]}"
        )
    if kv.k.dtype != kv.v.dtype:
        raise NotImplementedError(
            "takes keys and values of one dtype, because their tiles have the same layout in shared memory; got"
            f" {kv.k.dtype.name} and {kv.v.dtype.name}"
        )


def require_own_layout(kv: PagedKV) -> None:
    """Raise NotImplementedError for fused caches and for views of pages with tokens before heads."""
    require_apart(kv)
    if kv.view_page_size is not None:
        raise NotImplementedError("takes pages with heads before tokens, got a view of pages with tokens before heads")


def require_layout(kv: PagedKV, head_dim: int, block_tables: Int32[Array, "B *heads P"]) -> None:
    """Raise NotImplementedError for layouts of a cache that the kernels on Hopper do not support.

    They support separate and fused arrays of keys and values, with heads before tokens or tokens before heads (a view).
    """
    columns = kv.k.shape[-1] // 2
    if kv.v is None and columns * kv.k.dtype.itemsize % 128:
        raise NotImplementedError(
            f"takes fused keys and values of a multiple of 128 bytes, got {columns} columns of {kv.k.dtype.name}"
        )
    if kv.v is not None:
        require_apart(kv)
    is_contiguous = kv.v is not None and kv.view_page_size is None
    if not is_contiguous and tokens_per_smem_row(kv.k.dtype, head_dim) > 1:
        raise NotImplementedError(
            f"takes 8-bit heads of at least 128 columns if the rows of a head are not contiguous, got {head_dim}"
        )
    if kv.view_page_size is None:
        return
    if kv.view_page_size % PAGE_SIZES[0]:
        raise NotImplementedError(
            f"takes views of pages of a multiple of {PAGE_SIZES[0]} tokens, got {kv.view_page_size}"
        )
    if block_tables.ndim == 3:
        raise NotImplementedError("takes tables of all heads, [B, P], with a view of pages with tokens before heads")
    if kv.k_scale is not None and kv.k_scale.ndim == 3:
        raise NotImplementedError("takes scales per head or channel with tokens before heads, got a scale per token")


def require_16_bit_latents(cache: PagedLatent) -> None:
    """Raise NotImplementedError for 8-bit latents."""
    if cache.pages.dtype.itemsize == 1:
        raise NotImplementedError(f"takes no quantised latents, got {cache.pages.dtype.name}")


def require_scales_of_latents(cache: PagedLatent) -> None:
    """Raise NotImplementedError for 8-bit latents without scales."""
    if cache.pages.dtype.itemsize == 1 and not cache.is_quantised:
        raise NotImplementedError(
            f"takes 8-bit latents with a scale per 128 columns, got {cache.pages.dtype.name} without scales"
        )


def require_plain_scores(window: int | None, soft_cap: float | None) -> None:
    """Raise NotImplementedError if the call has a window or a soft cap, which MLA kernels do not support."""
    for name, option in (("window", window), ("soft cap", soft_cap)):
        if option is not None:
            raise NotImplementedError(f"takes no {name} over latents, got {option}")


def require_head_dim(head_dim: int, supported: tuple[int, ...] = HEAD_DIMS, no_wider: str | None = None) -> None:
    """Raise NotImplementedError unless the head width is in `supported`. `no_wider` is why it has no wider heads."""
    if head_dim not in supported:
        reason = f": {no_wider}" if no_wider and head_dim > max(supported) else ""
        raise NotImplementedError(f"takes heads of width {_listed(supported)}, got {head_dim}{reason}")


def require_page_size(page_size: int) -> None:
    """Raise NotImplementedError unless the page size is in `PAGE_SIZES`."""
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"takes pages of {_listed(PAGE_SIZES)} tokens, got {page_size}")


def require_soft_cap(soft_cap: float | None) -> None:
    """Raise NotImplementedError for a soft cap above `LARGEST_SOFT_CAP`, with which scores would be inaccurate."""
    if soft_cap is not None and soft_cap > LARGEST_SOFT_CAP:
        raise NotImplementedError(f"takes a soft cap of up to {LARGEST_SOFT_CAP:g}, got {soft_cap:g}")


def require_int32_rows(rows: int) -> None:
    """Raise NotImplementedError unless int32 can index the rows of a pool. A row is one token of one KV head."""
    if rows >= 2**31:
        raise NotImplementedError(f"takes pools of less than 2**31 rows, got {rows}")


def require_draft_bits(num_queries: int) -> None:
    """Raise NotImplementedError for more than 31 queries per sequence. A query's draft mask has one bit per query, in
    an int32 without its sign bit.
    """
    if num_queries > 31:
        raise NotImplementedError(f"takes draft masks of at most 31 queries, got {num_queries}")


def _listed(sizes: tuple[int, ...]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}"
