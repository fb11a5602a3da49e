"""Data model: caches, windows and plans as frozen dataclasses that are pytrees.

Symbols, here and in all signatures:

    B, Q              sequences of a decode step, and query tokens of each sequence
    T, S              packed new tokens of a step, and the sequences that they belong to
    Hq, Hkv, G        number of query heads, number of KV heads, G = Hq / Hkv
    D, Dv             width of a key, and of a value
    N, ps             pages in a pool, and tokens per page
    P                 entries per row of a block table (one row per sequence)
    L, R              MLA: width of a latent, and of the rotated key
    Di                width of an index key (sparse attention)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, Int32, Num

PAGE_NONE = -1
"""Entry of a block table that refers to no page: queries do not see the tokens of this entry. As the slot of a token:
the token is not written.
"""

FULL = 2**31 - 1
"""Window that hides no key: the largest int32."""

QMAX = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
"""Largest magnitude that a quantised cache stores, for each quantised dtype. Caches of other dtypes have no scales."""

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
"""Floating-point dtypes of quantised caches."""

PLAIN_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
"""Dtypes of unquantised caches."""

LATENT_8BIT = jnp.dtype(jnp.float8_e4m3fn)
"""Dtype of quantised latents, and of quantised index keys."""

LATENT_GROUP = 128
"""Number of consecutive columns of a quantised latent that share a scale."""

VIEW_PAGE_SIZES = (64, 32, 16)
"""Page sizes of plans and Mosaic kernels for views of other layouts (`PagedKV.plan_page_size`), best first."""

POWER_OF_TWO = jnp.dtype(jnp.float8_e8m0fnu)
"""Dtype of scales that are powers of two: the biased exponent in a byte."""

SMALL_LATENT_GROUP = 64
"""Number of consecutive columns of a quantised latent that share a scale of the dtype `POWER_OF_TWO`."""

ROPE_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16))
"""Dtypes of rotated keys next to quantised latents, which have separate arrays."""

type ScaleLayout = Literal["head", "channel"] | int | None
"""Scales of a quantised cache, float32:

"head": one per KV head, shape [Hkv], set by calibration.
"channel": one per KV head and column, shape [Hkv, D], set by calibration.
An int g: one per page, KV head and group of ps / g tokens, shape [N, Hkv, g], set when tokens are written.
None: the cache is not quantised.
"""

type Implementation = str | Sequence[str] | None
"""Which implementation of an operation runs: "mosaic", "triton", "xla" or "reference"; a sequence of these names, which
are tried in order; or None for the first one that supports the call, in the order mosaic, triton, xla.
"""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shapes and dtypes of the arrays of one layer's cache.

    `kv_cache_spec`, `latent_cache_spec` and `index_cache_spec` return cache specs. They are the only functions that
    define cache shapes.

    Attributes:
      num_pages: N, pages in the pool.
      page_size: ps, tokens per page.
      arrays: shape and dtype of each array. The keys are field names of PagedKV, PagedLatent or PagedIndexKeys.

    Example:
      >>> pages = jax.ShapeDtypeStruct((8, 4, 6), jnp.bfloat16)
      >>> pallas_attn.CacheSpec(num_pages=8, page_size=4, arrays={"pages": pages}).bytes_per_page
      48
    """

    num_pages: int
    page_size: int
    arrays: dict[str, jax.ShapeDtypeStruct]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, summed over all arrays that have an entry per page. Static scales are not included."""
        return sum(_num_bytes(a) // self.num_pages for a in self.arrays.values() if _has_pages(a, self))

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache: all pages, and static scales."""
        return sum(_num_bytes(a) for a in self.arrays.values())


def _num_bytes(a: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(a.shape, dtype=np.int64)) * jnp.dtype(a.dtype).itemsize


def _has_pages(a: jax.ShapeDtypeStruct, spec: CacheSpec) -> bool:
    """Return whether an array has an entry per page. Static scales, [Hkv] or [Hkv, D], have none."""
    return a.shape[0] == spec.num_pages and a.ndim > 2


def _allocate(spec: CacheSpec, layers: int) -> dict[str, jax.Array]:
    """Allocate the arrays of a cache: scales are ones, all other arrays are zeros.

    Arrays with an entry per page get `layers` times as many pages.
    """
    _positive(layers=layers)
    if layers > 1 and layers * spec.num_pages * spec.page_size > 2**31:
        raise ValueError(
            f"layers: slots of {layers} layers of {spec.num_pages} pages of {spec.page_size} tokens do not fit an int32"
        )

    def allocate(name: str, a: jax.ShapeDtypeStruct) -> jax.Array:
        shape = (layers * a.shape[0], *a.shape[1:]) if _has_pages(a, spec) else a.shape
        return jnp.ones(shape, a.dtype) if name.endswith("scale") else jnp.zeros(shape, a.dtype)

    return {name: allocate(name, a) for name, a in spec.arrays.items()}


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def kv_cache_spec(
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    scales: ScaleLayout = None,
    value_dim: int | None = None,
) -> CacheSpec:
    """Return the shapes and dtypes of a `PagedKV` with separate arrays of keys and values.

    Args:
      num_pages: N, pages in the pool.
      page_size: ps, tokens per page.
      num_kv_heads: Hkv.
      head_dim: D, width of a key.
      dtype: bfloat16, float16, float32, int8, float8_e4m3fn or float8_e5m2.
      scales: None for bfloat16, float16 and float32. For the 8-bit dtypes: "head" or "channel" for static scales
        [Hkv] or [Hkv, D]; or the number g of token groups per page, for scales [N, Hkv, g] that writes update. g
        divides page_size; g = page_size means one scale per token and head.
      value_dim: Dv, width of a value; None for D.

    Raises:
      ValueError: a size is below 1, the dtype is not listed above, or `scales` is not valid for the dtype or the page
        size.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(
      ...     num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.int8, scales="head"
      ... )
      >>> spec.bytes_per_page, spec.arrays["k_scale"].shape
      (4096, (2,))
    """
    widths = {"k": head_dim, "v": head_dim if value_dim is None else value_dim}
    _positive(
        num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=widths["v"]
    )
    dtype = jnp.dtype(dtype)
    arrays = {
        name: jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, width), dtype) for name, width in widths.items()
    }
    if dtype in PLAIN_DTYPES:
        if scales is not None:
            raise ValueError(f"scales must be None for a {dtype.name} cache, which is not quantised; got {scales!r}")
        return CacheSpec(num_pages, page_size, arrays)
    if dtype not in QMAX:
        raise ValueError(f"dtype must be one of {[d.name for d in (*PLAIN_DTYPES, *QMAX)]}, got {dtype.name}")
    match scales:
        case "head":
            shapes: dict[str, tuple[int, ...]] = dict.fromkeys(widths, (num_kv_heads,))
        case "channel":
            shapes = {name: (num_kv_heads, width) for name, width in widths.items()}
        case int() if scales >= 1 and page_size % scales == 0:
            shapes = dict.fromkeys(widths, (num_pages, num_kv_heads, scales))
        case _:
            wanted = f"'head', 'channel' or a divisor of page_size={page_size}"
            raise ValueError(f"scales of a {dtype.name} cache must be {wanted}, got {scales!r}")
    of_scales = {f"{name}_scale": jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return CacheSpec(num_pages, page_size, arrays | of_scales)


def latent_cache_spec(
    *,
    num_pages: int,
    page_size: int,
    latent_dim: int,
    rope_dim: int,
    dtype: jax.typing.DTypeLike,
    rope_dtype: jax.typing.DTypeLike | None = None,
    scale_dtype: jax.typing.DTypeLike | None = None,
) -> CacheSpec:
    """Return the shapes and dtypes of a `PagedLatent`.

    Args:
      num_pages: N, pages in the pool.
      page_size: ps, tokens per page.
      latent_dim: L, width of a latent.
      rope_dim: R, width of the rotated key. 0 if the latents contain the rotated columns; not 0 for float8_e4m3fn.
      dtype: bfloat16, float16 or float32 for one array of pages [N, ps, L + R]; or float8_e4m3fn for three arrays:
        latents [N, ps, L], scales [N, ps, L / 128] and rotated keys [N, ps, R].
      rope_dtype: dtype of the rotated keys of a float8_e4m3fn cache: bfloat16 or float16; None for bfloat16. Must be
        None for other caches.
      scale_dtype: dtype of the scales of a float8_e4m3fn cache: float32, or float8_e8m0fnu for scales [N, ps, L / 64]
        that are powers of two, as DeepSeek-V4 has them; None for float32. Must be None for other caches.

    Raises:
      ValueError: a size is too small, a dtype is not listed above, or `latent_dim` of a float8_e4m3fn cache is not a
        multiple of the columns per scale.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(
      ...     num_pages=8, page_size=64, latent_dim=512, rope_dim=64, dtype=jnp.bfloat16
      ... )
      >>> spec.arrays["pages"].shape, spec.bytes_per_page
      ((8, 64, 576), 73728)
      >>> spec = pallas_attn.latent_cache_spec(
      ...     num_pages=8, page_size=64, latent_dim=512, rope_dim=64, dtype=jnp.float8_e4m3fn
      ... )
      >>> spec.arrays["scale"].shape, spec.bytes_per_page  # 656 bytes a token
      ((8, 64, 4), 41984)
    """
    dtype = jnp.dtype(dtype)
    widths = {"rope_dim": rope_dim} if rope_dim or dtype not in PLAIN_DTYPES else {}
    _positive(num_pages=num_pages, page_size=page_size, latent_dim=latent_dim, **widths)

    def pages(width: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_pages, page_size, width), dtype)

    if dtype in PLAIN_DTYPES:
        if rope_dtype is not None:
            raise ValueError(
                f"rope_dtype must be None for {dtype.name} latents, which share pages with rotated keys;"
                f" got {jnp.dtype(rope_dtype).name}"
            )
        if scale_dtype is not None:
            raise ValueError(f"scale_dtype must be None for {dtype.name} latents, got {jnp.dtype(scale_dtype).name}")
        return CacheSpec(num_pages, page_size, {"pages": pages(latent_dim + rope_dim, dtype)})
    if dtype != LATENT_8BIT:
        wanted = [d.name for d in (*PLAIN_DTYPES, LATENT_8BIT)]
        raise ValueError(f"dtype must be one of {wanted} for latents, got {dtype.name}")
    scale_dtype = jnp.dtype(jnp.float32 if scale_dtype is None else scale_dtype)
    if scale_dtype not in (jnp.float32, POWER_OF_TWO):
        raise ValueError(f"scale_dtype must be float32 or {POWER_OF_TWO.name}, got {scale_dtype.name}")
    group = latent_group(scale_dtype)
    if latent_dim % group:
        raise ValueError(
            f"latent_dim must be a multiple of {group} for {dtype.name} latents, which have a scale for each"
            f" {group} columns; got {latent_dim}"
        )
    rope_dtype = jnp.dtype(ROPE_DTYPES[0] if rope_dtype is None else rope_dtype)
    if rope_dtype not in ROPE_DTYPES:
        raise ValueError(f"rope_dtype must be one of {[d.name for d in ROPE_DTYPES]}, got {rope_dtype.name}")
    arrays = {
        "pages": pages(latent_dim, dtype),
        "scale": pages(latent_dim // group, scale_dtype),
        "rope": pages(rope_dim, rope_dtype),
    }
    return CacheSpec(num_pages, page_size, arrays)


def latent_group(scale_dtype: jax.typing.DTypeLike) -> int:
    """Return the number of columns of a latent that share a scale of a dtype."""
    return SMALL_LATENT_GROUP if jnp.dtype(scale_dtype) == POWER_OF_TWO else LATENT_GROUP


def index_cache_spec(*, num_pages: int, page_size: int, index_dim: int, dtype: jax.typing.DTypeLike) -> CacheSpec:
    """Return the shapes and dtypes of a `PagedIndexKeys`.

    Args:
      num_pages: N, pages in the pool.
      page_size: ps, tokens per page.
      index_dim: Di, width of an index key.
      dtype: bfloat16, float16 or float32; or float8_e4m3fn, with a float32 scale per token, [N, ps, 1].

    Raises:
      ValueError: a size is below 1, or the dtype is not listed above.

    Example:
      >>> spec = pallas_attn.index_cache_spec(num_pages=8, page_size=64, index_dim=128, dtype=jnp.float8_e4m3fn)
      >>> spec.arrays["scale"].shape, spec.bytes_per_page  # 132 bytes a token
      ((8, 64, 1), 8448)
    """
    _positive(num_pages=num_pages, page_size=page_size, index_dim=index_dim)
    dtype = jnp.dtype(dtype)
    if dtype not in (*PLAIN_DTYPES, LATENT_8BIT):
        wanted = [d.name for d in (*PLAIN_DTYPES, LATENT_8BIT)]
        raise ValueError(f"dtype must be one of {wanted} for index keys, got {dtype.name}")
    arrays = {"keys": jax.ShapeDtypeStruct((num_pages, page_size, index_dim), dtype)}
    if dtype == LATENT_8BIT:
        arrays["scale"] = jax.ShapeDtypeStruct((num_pages, page_size, 1), jnp.dtype(jnp.float32))
    return CacheSpec(num_pages, page_size, arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Paged K/V cache of one layer.

    Attributes:
      k: keys [N, Hkv, ps, D] in bfloat16, float16, float32, int8, float8_e4m3fn or float8_e5m2. In a fused cache (`v`
        is None), k contains keys and values, [N, Hkv, ps, 2·W] with W >= D = Dv: columns [:D] are the key, columns
        [W : W + D] are the value, and other columns are neither read nor written.
      v: values [N, Hkv, ps, Dv] in the dtype of k, or None. Only `paged_decode` also supports another dtype.
      k_scale, v_scale: float32 scales of an 8-bit cache, or None. A key or value is the stored number times its scale.
        Shapes: [Hkv], one per head; [Hkv, D] and [Hkv, Dv], one per head and column; or [N, Hkv, g], one per page,
        head and token group, where group j of a page has the page's tokens [j·ps/g, (j+1)·ps/g).
      view_page_size: None, except for a view with one token per page of an array (`view_nhd`, `view_fused`): tokens per
        page of the array. Operations on a view require block tables from `token_tables`: the number of entries per row
        must be a multiple of `view_page_size`. Replace `view_page_size` by None to pass other tables of tokens.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
      >>> pallas_attn.PagedKV.allocate(spec).k.shape
      (8, 2, 16, 64)
    """

    k: Num[Array, "N Hkv ps D"]
    # The type has Any instead of None, so that a type checker accepts `kv.v.shape` without a test for None.
    v: Num[Array, "N Hkv ps Dv"] | Any = None
    k_scale: Float[Array, "Hkv"] | Float[Array, "Hkv D"] | Float[Array, "N Hkv g"] | None = None
    v_scale: Float[Array, "Hkv"] | Float[Array, "Hkv Dv"] | Float[Array, "N Hkv g"] | None = None
    # Any instead of None: type checkers would refuse `PagedKV(**arrays)` for a dict of arrays.
    view_page_size: int | Any = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    @staticmethod
    def allocate(spec: CacheSpec, *, layers: int = 1) -> PagedKV:
        """Return a cache with zeroed pages and unit scales for a spec from `kv_cache_spec`.

        With `layers`, the cache is a pool of layers · N pages for several layers. A `jax.lax.scan` over the layers can
        carry it and update it in place. Layer i has the pages i·N to (i + 1)·N - 1: `layer_tables` and `layer_slots`
        return its tables and slots. Static scales are one array for all layers. If layers have different scales,
        replace them in each layer.

        Raises:
          ValueError: `layers` is below 1, or the slots of the pool do not fit an int32.
        """
        return PagedKV(**_allocate(spec, layers))

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def plan_page_size(self) -> int:
        """Tokens per page of a `DecodePlan`: ps. For a view, the largest of 64, 32 and 16 that divides
        `view_page_size`, or 1 if none does. The tokens of such a page are consecutive in the array and in tables from
        `token_tables`.
        """
        if self.view_page_size is None:
            return self.page_size
        return next((size for size in VIEW_PAGE_SIZES if self.view_page_size % size == 0), 1)

    @property
    def is_fused(self) -> bool:
        """Whether `k` contains both keys and values, and `v` is None."""
        return self.v is None

    def value_dim(self, head_dim: int) -> int:
        """Return Dv. `head_dim` is D, which is also Dv in a fused cache."""
        return head_dim if self.v is None else self.v.shape[-1]

    @property
    def values(self) -> tuple[Num[Array, "N Hkv ps columns"], int]:
        """Array that contains the values, and the column of this array where a value starts."""
        return (self.k, self.k.shape[-1] // 2) if self.v is None else (self.v, 0)

    def with_pages(self, k: Array, v: Array, k_scale: Array | None, v_scale: Array | None) -> PagedKV:
        """Return a cache with these arrays. If this cache is fused, the returned cache is fused, and `v` is ignored."""
        return PagedKV(k, None if self.is_fused else v, k_scale, v_scale, view_page_size=self.view_page_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLatent:
    """Paged latent cache of one MLA layer.

    Attributes:
      pages: without `scale` and `rope`, [N, ps, L + R] in bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        Columns [:L] are the latent after its norm, which is both key and value. Columns [L:] are the rotated key that
        all heads share. `write_latent` casts to a float8 dtype, and `mla_decode` reads float8 pages without a scale;
        `mla_ragged_paged_attention` takes one scale for the whole cache as an argument. With `scale` and `rope`,
        [N, ps, L] in float8_e4m3fn: latents only.
      scale: float32 [N, ps, L / 128] or None. Columns [128·j : 128·(j + 1)] of a latent are the stored columns times
        entry j. Or float8_e8m0fnu [N, ps, L / 64], powers of two for 64 columns each (DeepSeek-V4).
      rope: rotated keys [N, ps, R] in bfloat16 or float16, or None.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(
      ...     num_pages=8, page_size=16, latent_dim=512, rope_dim=64, dtype=jnp.float16
      ... )
      >>> pallas_attn.PagedLatent.allocate(spec).pages.shape
      (8, 16, 576)
    """

    pages: Float[Array, "N ps columns"]
    scale: Float[Array, "N ps groups"] | None = None
    rope: Float[Array, "N ps R"] | None = None

    @staticmethod
    def allocate(spec: CacheSpec, *, layers: int = 1) -> PagedLatent:
        """Return a cache with zeroed pages and unit scales for a spec from `latent_cache_spec`.

        `layers` is as for `PagedKV.allocate`.

        Raises:
          ValueError: `layers` is below 1, or the slots of the pool do not fit an int32.
        """
        return PagedLatent(**_allocate(spec, layers))

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    @property
    def width(self) -> int:
        """L + R: columns of a latent and its rotated key."""
        return self.pages.shape[-1] + (0 if self.rope is None else self.rope.shape[-1])

    @property
    def is_quantised(self) -> bool:
        """Whether the cache has scales: latents in float8_e4m3fn, rotated keys in a separate array."""
        return self.scale is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedIndexKeys:
    """Paged index keys of one layer of sparse attention: one key per token, which all index heads share.

    An indexer scores these keys to select the tokens that attention reads. The arrays are separate from the layer's
    latents, but page ids and slots are the same.

    Attributes:
      keys: [N, ps, Di] in bfloat16, float16, float32 or float8_e4m3fn.
      scale: float32 [N, ps, 1] for float8_e4m3fn keys, else None. An index key is the stored key times its scale.

    Example:
      >>> spec = pallas_attn.index_cache_spec(num_pages=8, page_size=16, index_dim=128, dtype=jnp.bfloat16)
      >>> pallas_attn.PagedIndexKeys.allocate(spec).keys.shape
      (8, 16, 128)
    """

    keys: Float[Array, "N ps Di"]
    scale: Float[Array, "N ps 1"] | None = None

    @staticmethod
    def allocate(spec: CacheSpec, *, layers: int = 1) -> PagedIndexKeys:
        """Return a cache with zeroed keys and unit scales for a spec from `index_cache_spec`.

        `layers` is as for `PagedKV.allocate`.

        Raises:
          ValueError: `layers` is below 1, or the slots of the pool do not fit an int32.
        """
        return PagedIndexKeys(**_allocate(spec, layers))

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadWindow:
    """Window per KV head. A query sees two ranges of keys: the first `sink_tokens` keys of the sequence, and the last
    `window` keys up to and including the query's own key.

    Attributes:
      window: int32 [Hkv], keys, at least 1; FULL hides no key.
      sink_tokens: int32 [Hkv], keys, at least 0.

    Example:
      >>> window = pallas_attn.HeadWindow(  # head 0 sees all keys, head 1 the first 64 and the last 4,096 keys
      ...     window=jnp.array([pallas_attn.FULL, 4096], jnp.int32), sink_tokens=jnp.array([0, 64], jnp.int32)
      ... )
      >>> window.window.shape
      (2,)
    """

    window: Int32[Array, "Hkv"]
    sink_tokens: Int32[Array, "Hkv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotRange:
    """Consecutive keys of a sequence that each packed query token attends to, from `window_range` or `entry_range`.

    `mla_sparse` takes it instead of a list of slots. Key i of a token is at position first + i of its sequence, and its
    slot follows from the block table. A key on an absent page is ignored. A token has no keys if its `sequence` is
    outside the block tables or `first` is negative. Keys past the end of the block table are ignored.

    Attributes:
      block_tables: [S, P], page ids.
      sequence: int32 [T], row of `block_tables` of each token.
      first: int32 [T], position of the first key.
      count: int32 [T], number of keys.
      size: maximum of `count`; kernels ignore further keys.

    Example:
      >>> tables, zero = jnp.array([[5, 0]], jnp.int32), jnp.zeros(2, jnp.int32)
      >>> pallas_attn.SlotRange(tables, zero, zero, jnp.array([6, 7], jnp.int32), size=8).size
      8
    """

    block_tables: Int32[Array, "S P"]
    sequence: Int32[Array, "T"]
    first: Int32[Array, "T"]
    count: Int32[Array, "T"]
    size: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class PlanKey:
    """Sizes and options of a decode call that a `DecodePlan` depends on.

    A plan contains the `PlanKey` of the call that it was made for. A decode call with another `PlanKey` raises
    ValueError. `kv_lens`, `q_lens` and the values of a `HeadWindow` are on the device, so they cannot be compared while
    a call is traced: the caller must pass the values that the plan was made for.

    Attributes:
      op: "paged_decode" or "mla_decode".
      batch: B, sequences.
      num_queries: Q, query tokens per sequence.
      num_q_heads, num_kv_heads: Hq and Hkv; Hkv is 1 for latents.
      page_size: ps, tokens per page; `PagedKV.plan_page_size` for a `PagedKV`.
      table_pages: P, pages of this size per row of the block table.
      window: the window in tokens, "per head" for a `HeadWindow`, or None if no key is hidden.
      q_lens: whether the call has the argument `q_lens`.

    Example:
      >>> key = pallas_attn.PlanKey("mla_decode", 2, 1, 16, 1, 64, 8, window=None, q_lens=False)
      >>> key.num_q_heads
      16
    """

    op: str
    batch: int
    num_queries: int
    num_q_heads: int
    num_kv_heads: int
    page_size: int
    table_pages: int
    window: int | str | None
    q_lens: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Assignment of the visible pages of a decode step to the CTAs of a decode kernel (in Triton: to its programs).

    `plan_decode` computes it. A plan changes speed and rounding only.

    Rows: a row is one KV head of one sequence. KV head h of sequence b is row b·Hkv + h. `row_order` is a permutation
    of the rows. In all other fields, "row i" is the row at index i of `row_order`.

    Pages: a page is visible to a row if a query of the row sees one of its tokens. The visible pages of row i are
    numbered 0 to num_pages[i] - 1: first the `sink_pages[i]` pages with sink tokens, which are the first entries of
    the block table; then the pages of the window, from table entry `first_page[i]` on.

    CTAs: CTA j starts at page cta_page[j] of row cta_row[j], continues with the following rows, and stops where
    CTA j + 1 starts.

    Splits: a split is a range of pages of one row that one CTA processes without interruption. Row i has
    n = split_indptr[i + 1] - split_indptr[i] splits. A row without visible keys has n = 0. If n = 1, the CTA writes the
    output. If n > 1, a second kernel merges the partial states of the splits. In `fixed` mode, splits also end at
    multiples of `split_pages` pages.

    Attributes:
      row_order: int32 [B·Hkv], the rows in the order of the plan.
      sink_pages, first_page, num_pages: int32 [B·Hkv], visible pages of each row.
      next_row: int32 [B·Hkv], index of the next row with visible pages; B·Hkv if no such row follows.
      merged_rows: int32 [B·Hkv + 1], indices of the rows that the merge kernel writes: all rows with n = 0 or n > 1.
        The remaining entries are B·Hkv.
      split_indptr: int32 [B·Hkv + 1], index of the first split of each row among all splits; the last entry is the
        number of splits.
      cta_row, cta_page: int32 [num_programs + 1], start of each CTA; the last entry is the end of the last CTA.
      cta_split: int32 [num_programs + 1], index of the first split of each CTA.
      made_for: sizes and options of the decode call. A decode call with other values raises ValueError.
      implementation: module that runs the decode call, for example "mosaic_sm90"; "xla" and "reference" ignore plans.
      split_pages: maximum pages per split in `fixed` mode, 0 in `balanced` mode.

    Example:
      >>> q, table = jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.int32)
      >>> pages = jax.ShapeDtypeStruct((6, 2, 16, 8), jnp.float32)
      >>> kv = pallas_attn.PagedKV(pages, pages)
      >>> plan = pallas_attn.plan_decode(q, kv, table, jnp.array([40, 7], jnp.int32), num_programs=3)
      >>> plan.made_for.page_size, plan.num_pages.shape  # two heads of two sequences are four rows
      (16, (4,))
    """

    row_order: Int32[Array, "rows"]
    sink_pages: Int32[Array, "rows"]
    first_page: Int32[Array, "rows"]
    num_pages: Int32[Array, "rows"]
    next_row: Int32[Array, "rows"]
    merged_rows: Int32[Array, "rows_plus_1"]
    split_indptr: Int32[Array, "rows_plus_1"]
    cta_row: Int32[Array, "programs_plus_1"]
    cta_page: Int32[Array, "programs_plus_1"]
    cta_split: Int32[Array, "programs_plus_1"]
    made_for: PlanKey = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(metadata={"static": True})
    split_pages: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding, and RMSNorms before or after it, that `write_kv` applies to queries and new keys.

    Attributes:
      cos, sin: float32 [T, rotary / 2], cosines and sines of the rotation angles of each token. The first `rotary`
        columns of a head are rotated, the other columns are not.
      q_norm, k_norm: RMSNorm weights [D] of queries and keys, or None for no norm.
      style: "neox" rotates the pair of columns (i, i + rotary/2), "interleaved" the pair (2i, 2i + 1).
      norm_order: "before_rope" (Qwen3) or "after_rope": whether the norms come before or after the rotation.
      norm_eps: epsilon of the norms.

    Example:
      >>> angles = jnp.arange(3.0)[:, None] * jnp.array([[1.0, 0.1]])  # 3 tokens; 2 angles rotate 4 columns
      >>> rope = pallas_attn.Rope(jnp.cos(angles), jnp.sin(angles))
      >>> spec = pallas_attn.kv_cache_spec(num_pages=2, page_size=4, num_kv_heads=1, head_dim=4, dtype=jnp.float32)
      >>> new, slots = jnp.ones((3, 1, 4)), jnp.arange(3, dtype=jnp.int32)
      >>> kv, q = pallas_attn.write_kv(pallas_attn.PagedKV.allocate(spec), new, new, slots, rope=rope, q=new)
      >>> q.shape
      (3, 1, 4)
    """

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]
    q_norm: Float[Array, "D"] | None = None
    k_norm: Float[Array, "D"] | None = None
    style: Literal["neox", "interleaved"] = dataclasses.field(default="neox", metadata={"static": True})
    norm_order: Literal["before_rope", "after_rope"] = dataclasses.field(
        default="before_rope", metadata={"static": True}
    )
    norm_eps: float = dataclasses.field(default=1e-6, metadata={"static": True})


def _as_json(static_fields: tuple[Any, ...]) -> bytes:
    return json.dumps(static_fields, default=dataclasses.asdict).encode()


def _from_json(text: bytes, of: type) -> tuple[Any, ...]:
    """Return the static fields of the class `of` from the text that `_as_json` returned.

    Only `DecodePlan.made_for` is a JSON object. Fields that the text does not have, because an earlier version wrote
    it, have their defaults.
    """
    found = [PlanKey(**field) if isinstance(field, dict) else field for field in json.loads(text)]
    static = [field.default for field in dataclasses.fields(of) if field.metadata.get("static")]
    return (*found, *static[len(found) :])


# `jax.export` serialises functions with these arguments only if the types are registered.
for _type in (
    PagedKV,
    PagedLatent,
    PagedIndexKeys,
    HeadWindow,
    DecodePlan,
    Rope,
):
    export.register_pytree_node_serialization(
        _type,
        serialized_name=f"pallas_attn.{_type.__name__}",
        serialize_auxdata=_as_json,
        deserialize_auxdata=functools.partial(_from_json, of=_type),
    )
