"""Data model: caches, windows and plans as frozen pytrees.

Symbols, here and in all signatures: B sequences; Q query tokens per sequence in decode; T packed new tokens; S
sequences of a ragged batch; Hq and Hkv query and KV heads, G = Hq / Hkv; D head width; N pages in a pool; ps tokens per
page; P pages per table row; L latent width; R rotated width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, Int32, Num

PAGE_NONE = -1
"""Absent page in a block table; its tokens are invisible. As a slot: write nothing."""

FULL = 2**31 - 1
"""Window that hides no key."""

QMAX = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
"""Largest magnitude that a quantised cache stores, by dtype. Dtypes that are not listed are stored unscaled."""

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
"""Floating-point dtypes of quantised caches."""

PLAIN_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
"""Dtypes of unquantised caches."""

LATENT_8BIT = jnp.dtype(jnp.float8_e4m3fn)
"""Dtype of quantised latents."""

LATENT_GROUP = 128
"""Number of columns of a quantised latent that share a scale."""

ROPE_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16))
"""Dtypes of the rotated keys of quantised latents."""

type ScaleLayout = Literal["head", "channel"] | int | None
"""Scales of a quantised cache: "head" (static [Hkv]), "channel" (static [Hkv, D]), an int (dynamic, this number of
token groups per page), or None.
"""

type Implementation = str | Sequence[str] | None
"""Implementation to run: None for the best one that supports the call on this device, a name, or names to try in order.
"""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shapes and dtypes of one layer's cache. Only cache specs determine them.

    Attributes:
      num_pages: N, pages in the pool.
      page_size: ps, tokens per page.
      arrays: shape and dtype of each array, by its field name in PagedKV, PagedLatent or PagedIndexKeys.

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
        """Bytes of one page in all arrays whose size grows with the pool."""
        return sum(
            _num_bytes(a) // self.num_pages for a in self.arrays.values() if a.shape[0] == self.num_pages and a.ndim > 2
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, including static scales."""
        return sum(_num_bytes(a) for a in self.arrays.values())


def _num_bytes(a: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(a.shape, dtype=np.int64)) * jnp.dtype(a.dtype).itemsize


def _allocate(spec: CacheSpec) -> dict[str, jax.Array]:
    """Return the arrays of a cache: ones for scales, zeros for all other arrays."""
    return {
        name: (jnp.ones if name.endswith("scale") else jnp.zeros)(a.shape, a.dtype) for name, a in spec.arrays.items()
    }


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
    """Return the shapes and dtypes of a `PagedKV`.

    Args:
      head_dim: D, width of keys.
      dtype: bfloat16, float16, float32, int8, float8_e4m3fn or float8_e5m2.
      scales: None for unquantised dtypes. For 8-bit dtypes "head" or "channel" (static), or the number g of token
        groups per page (dynamic; g divides page_size; g = page_size is one scale per token and head).
      value_dim: Dv, width of values; None for D.

    Raises:
      ValueError: a size is below 1, the dtype is unsupported, or the scales do not fit the dtype or the page size.

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
) -> CacheSpec:
    """Return the shapes and dtypes of a `PagedLatent`.

    Args:
      dtype: bfloat16, float16 or float32 for pages [N, ps, L + R]; float8_e4m3fn for latents [N, ps, L] with a float32
        scale per 128 columns of a token and separate rotated keys [N, ps, R].
      rope_dtype: dtype of the rotated keys of float8_e4m3fn latents, bfloat16 (None) or float16; None for other dtypes.

    Raises:
      ValueError: a size is below 1, the dtype is unsupported, or the width of float8_e4m3fn latents is no multiple of
        128.

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
    _positive(num_pages=num_pages, page_size=page_size, latent_dim=latent_dim, rope_dim=rope_dim)
    dtype = jnp.dtype(dtype)

    def pages(width: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_pages, page_size, width), dtype)

    if dtype in PLAIN_DTYPES:
        if rope_dtype is not None:
            raise ValueError(
                f"rope_dtype must be None for {dtype.name} latents, which share pages with rotated keys;"
                f" got {jnp.dtype(rope_dtype).name}"
            )
        return CacheSpec(num_pages, page_size, {"pages": pages(latent_dim + rope_dim, dtype)})
    if dtype != LATENT_8BIT:
        wanted = [d.name for d in (*PLAIN_DTYPES, LATENT_8BIT)]
        raise ValueError(f"dtype must be one of {wanted} for latents, got {dtype.name}")
    if latent_dim % LATENT_GROUP:
        raise ValueError(
            f"latent_dim must be a multiple of {LATENT_GROUP} for {dtype.name} latents, which have a scale for each"
            f" {LATENT_GROUP} columns; got {latent_dim}"
        )
    rope_dtype = jnp.dtype(ROPE_DTYPES[0] if rope_dtype is None else rope_dtype)
    if rope_dtype not in ROPE_DTYPES:
        raise ValueError(f"rope_dtype must be one of {[d.name for d in ROPE_DTYPES]}, got {rope_dtype.name}")
    arrays = {
        "pages": pages(latent_dim, dtype),
        "scale": pages(latent_dim // LATENT_GROUP, jnp.dtype(jnp.float32)),
        "rope": pages(rope_dim, rope_dtype),
    }
    return CacheSpec(num_pages, page_size, arrays)


def index_cache_spec(*, num_pages: int, page_size: int, index_dim: int, dtype: jax.typing.DTypeLike) -> CacheSpec:
    """Return the shapes and dtypes of a `PagedIndexKeys`.

    Args:
      index_dim: Di, columns of an index key.
      dtype: bfloat16, float16 or float32; or float8_e4m3fn, with a float32 scale per token.

    Raises:
      ValueError: a size is below 1, or the dtype is unsupported.

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
      k: [N, Hkv, ps, D] in bfloat16, float16, float32, int8, float8_e4m3fn or float8_e5m2.
      v: [N, Hkv, ps, Dv] in the dtype of k; None if keys and values are fused. Then k is [N, Hkv, ps, 2·W] with W >= D
        = Dv: columns [:D] are the key and columns [W : W + D] the value. Other columns are neither read nor written.
      k_scale, v_scale: float32 or None: static per head [Hkv], static per channel [Hkv, D] and [Hkv, Dv], or dynamic
        per token group [N, Hkv, g], where group j of a page covers its tokens [j·ps/g, (j+1)·ps/g). The cached value is
        the stored value times its scale.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
      >>> pallas_attn.PagedKV.allocate(spec).k.shape
      (8, 2, 16, 64)
    """

    k: Num[Array, "N Hkv ps D"]
    v: Num[Array, "N Hkv ps Dv"] | Any = None  # Any instead of None: callers of caches that are not fused need no check
    k_scale: Float[Array, "Hkv"] | Float[Array, "Hkv D"] | Float[Array, "N Hkv g"] | None = None
    v_scale: Float[Array, "Hkv"] | Float[Array, "Hkv Dv"] | Float[Array, "N Hkv g"] | None = None

    @staticmethod
    def allocate(spec: CacheSpec) -> PagedKV:
        """Return a cache with zeroed pages and unit scales for a spec from `kv_cache_spec`."""
        return PagedKV(**_allocate(spec))

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def is_fused(self) -> bool:
        """Whether k contains both keys and values."""
        return self.v is None

    def value_dim(self, head_dim: int) -> int:
        """Return Dv for keys of width D."""
        return head_dim if self.v is None else self.v.shape[-1]

    @property
    def values(self) -> tuple[Num[Array, "N Hkv ps columns"], int]:
        """Array that contains the values, and the first column of the values in it."""
        return (self.k, self.k.shape[-1] // 2) if self.v is None else (self.v, 0)

    def with_pages(self, k: Array, v: Array, k_scale: Array | None, v_scale: Array | None) -> PagedKV:
        """Return a cache with other arrays. `v` is ignored if the cache is fused."""
        return PagedKV(k, None if self.is_fused else v, k_scale, v_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLatent:
    """Paged latent cache of one MLA layer.

    Attributes:
      pages: [N, ps, L + R] in bfloat16, float16 or float32. Columns [:L] are the normed latent, which is both key and
        value; columns [L:] are the shared rotated key. With `scale` and `rope`: the quantised latents, [N, ps, L] in
        float8_e4m3fn. Without `scale` and `rope`, float8_e4m3fn and float8_e5m2 pages [N, ps, L + R] are also
        supported: `write_latent` casts to them, and `mla_decode` reads them unscaled. Their single scale is an argument
        of `mla_ragged_paged_attention`.
      scale: float32 [N, ps, L / 128] or None. Columns [128·j : 128·(j + 1)] of the latent are the stored columns times
        entry j.
      rope: [N, ps, R] in bfloat16 or float16, or None: the shared rotated keys of quantised latents.

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
    def allocate(spec: CacheSpec) -> PagedLatent:
        """Return a cache with zeroed pages and unit scales for a spec from `latent_cache_spec`."""
        return PagedLatent(**_allocate(spec))

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    @property
    def width(self) -> int:
        """L + R."""
        return self.pages.shape[-1] + (0 if self.rope is None else self.rope.shape[-1])

    @property
    def is_quantised(self) -> bool:
        """Whether latents are stored in 8 bits with scales."""
        return self.scale is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedIndexKeys:
    """Paged index keys of one layer of sparse attention. All index heads of the layer share them.

    Index keys use the same pages and slots as the layer's latents, but separate arrays.

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
    def allocate(spec: CacheSpec) -> PagedIndexKeys:
        """Return a cache with zeroed keys and unit scales for a spec from `index_cache_spec`."""
        return PagedIndexKeys(**_allocate(spec))

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadWindow:
    """Window per KV head: a query sees the first `sink_tokens` keys and the last `window` keys, including its own key.

    Attributes:
      window: int32 [Hkv], at least 1; FULL hides no key.
      sink_tokens: int32 [Hkv], at least 0.

    Example:
      >>> window = pallas_attn.HeadWindow(  # one head sees all, the other 64 sink tokens and its last 4,096
      ...     window=jnp.array([pallas_attn.FULL, 4096], jnp.int32), sink_tokens=jnp.array([0, 64], jnp.int32)
      ... )
      >>> window.window.shape
      (2,)
    """

    window: Int32[Array, "Hkv"]
    sink_tokens: Int32[Array, "Hkv"]


@dataclasses.dataclass(frozen=True)
class PlanKey:
    """Static facts of a decode call that its plan depends on.

    Lengths and the values of a `HeadWindow` are on the device and cannot be compared while a call is traced. The caller
    must ensure that a plan was made for the lengths and windows of the call.

    Attributes:
      op: "paged_decode" or "mla_decode".
      batch: B.
      num_queries: Q.
      num_q_heads, num_kv_heads: Hq and Hkv; Hkv is 1 for latents.
      page_size: ps.
      table_pages: P.
      window: an int, "per head" for a `HeadWindow`, or None if the window hides no key.
      q_lens: whether the call has `q_lens`.

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
    """Partition of the visible pages of a step over the CTAs of a decode kernel. It changes speed and rounding only.

    A row is one KV head of one sequence, row b·Hkv + h. `row_order` lists the rows in the order of the plan; all other
    fields use this order. The visible pages of the row at index i have the numbers 0 to num_pages[i] in the order of
    its table: first `sink_pages[i]` pages from entry 0, then the pages of the window from entry `first_page[i]`. CTA j
    processes the pages from (cta_row[j], cta_page[j]) up to the start of CTA j + 1. In `fixed` mode it also cuts each
    row at multiples of `split_pages`. The row at index i has n = split_indptr[i + 1] - split_indptr[i] splits, whose
    partial states are merged; n = 1 needs no merge, and n = 0 is an idle row. Splits are numbered in the order of rows
    and pages.

    Attributes:
      row_order: int32 [B·Hkv], rows in the order of the plan.
      sink_pages, first_page, num_pages: int32 [B·Hkv].
      next_row: int32 [B·Hkv], index of the next row that is not idle; B·Hkv after the last.
      merged_rows: int32 [B·Hkv + 1], indices of the rows that the merge kernel writes, which do not have exactly one
        split; then B·Hkv.
      split_indptr: int32 [B·Hkv + 1], number of the first split of each row.
      cta_row, cta_page: int32 [num_programs + 1], start of each CTA.
      cta_split: int32 [num_programs + 1], number of the first split of each CTA.
      made_for: facts of the decode call; other calls reject the plan.
      implementation: implementation of the operation that uses the plan, for example "mosaic_sm90"; "xla" and
        "reference" ignore plans.
      split_pages: pages per split in `fixed` mode, 0 in `balanced` mode.

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
    """Rotary embedding and the norms around it, which `write_kv` fuses into the cache write.

    Attributes:
      cos, sin: float32 [T, rotary / 2] for the positions of the tokens. Only the first `rotary` columns of a head are
        rotated.
      q_norm, k_norm: RMSNorm weights [D], or None for no norm.
      style: "neox" rotates column i with i + rotary/2, "interleaved" column 2i with 2i + 1.
      norm_order: "before_rope" (Qwen3) or "after_rope".
      norm_eps: epsilon of the norms.

    Example:
      >>> angles = jnp.arange(3.0)[:, None] * jnp.array([[1.0, 0.1]])  # of 3 tokens, for 4 columns of a head
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


def _from_json(text: bytes) -> tuple[Any, ...]:
    """Return the static fields of a type. The only field that is an object is the `PlanKey` of a plan."""
    return tuple(PlanKey(**field) if isinstance(field, dict) else field for field in json.loads(text))


# Registration lets users export functions that take these types.
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
        deserialize_auxdata=_from_json,
    )
