"""Static validation of shapes, dtypes and sizes. A ValueError names the argument, the expectation and the actual value.

The values of lengths, tables and slots are on the device and cannot be validated here. The `bounded` method of a call
clips lengths to the sizes of the arrays (`bound_lens`, `bound_sums`) before an implementation receives the call. The
lengths of decode calls are clipped when their plan is made (`plan_decode.planned`).

Shape symbols are defined in `docs/concepts.md`: B sequences and Q queries per sequence of a decode step, T packed
query tokens, U packed key tokens, S sequences of a ragged batch, Hq query heads, Hkv KV heads, D and Dv widths of keys
and values, L and R widths of latents and rotated keys, N pages, ps tokens per page, P entries of a block table.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from pallas_attn.types import (
    FLOAT8,
    FULL,
    LATENT_8BIT,
    PLAIN_DTYPES,
    POWER_OF_TWO,
    QMAX,
    ROPE_DTYPES,
    DecodePlan,
    HeadWindow,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    PlanKey,
    Rope,
    SlotRange,
    latent_group,
)

MAY_BE_EMPTY = ("B", "Q", "S", "T", "U")
"""Shape symbols that may be 0: a step may have nothing to decode, prefill or write."""

INT32_RANGE = np.iinfo(np.int32)

_VIEW = "tokens per page of the viewed array"
"""Symbol that `check_kv` binds to `PagedKV.view_page_size`, for `check_block_tables`."""


class Dims:
    """Sizes of shape symbols. The first array with a symbol determines its size; later arrays must have the same size.

    >>> dims = Dims()
    >>> dims.check("q", q, "B Q Hq D")
    >>> dims.check("block_tables", block_tables, "B P")  # ValueError: block_tables: expected shape [B=4, P], got [3, 8]
    """

    def __init__(self, **sizes: int):
        self._sizes: dict[str, int] = dict(sizes)

    def __getitem__(self, symbol: str) -> int:
        return self._sizes[symbol]

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._sizes

    def check(
        self, name: str, array: Any, shape: str, dtypes: tuple[Any, ...] | None = None, *, advice: str = ""
    ) -> None:
        """Check an array's shape against symbols, integers and `symbol+1`, separated by spaces; bind new symbols.

        `advice` is appended to the message about a wrong shape.
        """
        wanted = shape.split()
        check_array(name, array)
        got = tuple(array.shape)
        if symbolic := [str(size) for size in got if not isinstance(size, int)]:
            raise NotImplementedError(
                f"{name}: got symbolic sizes {', '.join(symbolic)}; kernels and tiles are chosen for known sizes: "
                "export one module for each size"
            )
        if len(got) != len(wanted) or any(self._size(w) not in (None, g) for w, g in zip(wanted, got, strict=True)):
            expected = ", ".join(w if w.isdigit() or self._size(w) is None else f"{w}={self._size(w)}" for w in wanted)
            raise ValueError(f"{name}: expected shape [{expected}], got {list(got)}{advice}")
        if empty := [w for w, g in zip(wanted, got, strict=True) if g == 0 and w not in MAY_BE_EMPTY]:
            raise ValueError(f"{name}: expected {', '.join(empty)} of at least 1, got shape {list(got)}")
        self._sizes.update({w: g for w, g in zip(wanted, got, strict=True) if w.isidentifier()})
        if dtypes is not None:
            check_dtype(name, array, dtypes)

    def bind(self, symbol: str, size: int, why: str = "") -> None:
        """Bind a symbol to a size that follows from other arguments.

        Raises:
          ValueError: the symbol is already bound to another size. The message starts with the reason `why`.
        """
        if self._sizes.setdefault(symbol, size) != size:
            raise ValueError(f"{why}, expected {symbol} = {size}, got {self._sizes[symbol]}")

    def _size(self, symbol: str) -> int | None:
        if symbol.isdigit():
            return int(symbol)
        base, plus, extra = symbol.partition("+")
        size = self._sizes.get(base)
        return size + int(extra) if plus and size is not None else size


def check_array(name: str, array: Any) -> None:
    """Raise ValueError unless the value is a JAX or NumPy array or a `jax.ShapeDtypeStruct`."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise ValueError(f"{name}: expected an array, got {_described(array)}")


def check_dtype(name: str, array: Any, dtypes: tuple[Any, ...]) -> None:
    """Raise ValueError unless the array's dtype is one of `dtypes`."""
    check_array(name, array)
    got = jnp.dtype(array.dtype)
    wanted = [jnp.dtype(d) for d in dtypes]
    if got not in wanted:
        raise ValueError(f"{name}: expected dtype {' or '.join(d.name for d in wanted)}, got {got.name}")


def output_dtype(out_dtype: Any, default: Any) -> jnp.dtype:
    """Return `out_dtype`, or `default` for None; raise ValueError unless attention supports this output dtype."""
    wanted = " or ".join(d.name for d in PLAIN_DTYPES)
    try:
        dtype = jnp.dtype(default if out_dtype is None else out_dtype)
    except TypeError as unknown:
        raise ValueError(f"out_dtype: expected {wanted}, got {out_dtype!r}") from unknown
    if dtype not in PLAIN_DTYPES:
        raise ValueError(f"out_dtype: expected {wanted}, got {dtype.name}")
    return dtype


INT = (jnp.int32,)
BOOL = (jnp.bool_,)
F32 = (jnp.float32,)
PLAIN = PLAIN_DTYPES


# --- conversion of arguments


def int32(**arguments: Any) -> list[Any]:
    """Return the arguments, with lists and NumPy integers of any width converted to int32.

    JAX arrays, shapes and None are returned unchanged.

    Raises:
      ValueError: a value is not an integer or does not fit int32.
    """
    return [_as_int32(name, values) for name, values in arguments.items()]


def _as_int32(name: str, values: Any) -> Any:
    if not isinstance(values, list | tuple | np.ndarray | np.integer):
        return values
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise ValueError(f"{name}: expected integers of one shape, got {values!r}") from ragged
    if array.dtype.kind not in "iu" and not (array.size == 0 and isinstance(values, list | tuple)):
        raise ValueError(f"{name}: expected dtype int32, got {array.dtype.name}")
    if array.size and not (array.min() >= INT32_RANGE.min and array.max() <= INT32_RANGE.max):
        raise ValueError(f"{name}: expected numbers in the range of int32, got {array.min()} to {array.max()}")
    return jnp.asarray(array.astype(np.int32))


def number(name: str, value: Any, wanted: str = "a positive finite number, or None") -> float | None:
    """Return a positive finite number of any numeric class as a Python float; return None for None.

    Raises:
      ValueError: the value is not a positive finite number, or is a traced array. Kernels are compiled for the number,
        so it must be known while tracing.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name}: expected a number that is known while tracing, got {_described(value)}")
    if value is None:
        return None
    single = value.item() if isinstance(value, jax.Array | np.ndarray) and value.shape == () else value
    is_number = isinstance(single, numbers.Real) and not isinstance(single, bool)
    try:
        converted = float(single) if is_number else 0.0
    except OverflowError:  # the int exceeds the range of float
        converted = 0.0
    if not 0 < converted < float("inf"):
        raise ValueError(f"{name}: expected {wanted}, got {_described(value)}")
    return converted


def flag(name: str, value: Any) -> bool:
    """Return True or False as a Python bool; raise ValueError for anything else, for example a traced value."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False, known while tracing, got {_described(value)}")
    return bool(value)


def required_number(name: str, value: Any) -> float:
    """Return a positive finite number as a Python float; see `number`. Raise ValueError for None."""
    wanted = "a positive finite number"
    if (given := number(name, value, wanted)) is None:
        raise ValueError(f"{name}: expected {wanted}, got None")
    return given


def number_or_zero(name: str, value: Any) -> float:
    """Return a finite number of at least 0 as a Python float; see `number`. Raise ValueError for None."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0:
        return 0.0
    wanted = "a finite number of at least 0"
    if (given := number(name, value, wanted)) is None:
        raise ValueError(f"{name}: expected {wanted}, got None")
    return given


def size(name: str, value: Any, most: int = INT32_RANGE.max) -> int:
    """Return an integer from 1 to `most` as a Python int.

    Raises:
      ValueError: the value is not an integer in this range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}: expected an int of at least 1, got {_described(value)}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    if value > most:
        raise ValueError(f"{name}: expected at most {most}, got {value}")
    return int(value)


def window(value: Any) -> Any:
    """Return a window with NumPy integers converted to Python integers. `check_window` validates it."""
    return int(value) if isinstance(value, np.integer) else value


def _described(value: Any) -> str:
    """Describe a value for an error message: a number or string by its repr, another value by its type and shape."""
    if value is None or isinstance(value, str | numbers.Number):
        return repr(value)
    shaped = f" of shape {list(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else ""
    kind = "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__
    return f"{kind}{shaped}"


# --- validation of arguments


def check_heads(num_q_heads: int, num_kv_heads: int, *, advice: str = "") -> None:
    """Raise ValueError unless all KV heads have the same number of query heads. The message ends with `advice`."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"q: its {num_q_heads} heads must be a multiple of the {num_kv_heads} KV heads{advice}")


def view_advice(kv: PagedKV, num_heads: int) -> str:
    """Return the advice to view a cache as pages of one token, for messages about numbers of heads.

    Return "" unless `num_heads` query heads, or new KV heads, fit pages with tokens before heads.
    """
    pages = kv.k
    if kv.view_page_size is not None or pages.ndim != 4 or pages.shape[2] < 2 or num_heads % pages.shape[2]:
        return ""
    view = f"view_fused(pages, {pages.shape[2]})" if kv.is_fused else "view_nhd(k, v)"
    return (
        f". If kv.k {list(pages.shape)} has the tokens of a page before its heads, [N, ps, Hkv, D], pass kv={view} and"
        f" block tables from token_tables(..., page_size={pages.shape[1]})"
    )


def check_block_tables(block_tables: Any, dims: Dims, *, rows: str) -> None:
    """Check tables of page ids [sequences, P], or of page_row ids (page · Hkv + head) [sequences, Hkv, P]; bind P.

    Args:
      rows: symbol of the number of sequences, "B" or "S".
    """
    check_array("block_tables", block_tables)
    dims.check("block_tables", block_tables, f"{rows} P" if block_tables.ndim == 2 else f"{rows} Hkv P", INT)
    check_token_entries("block_tables", block_tables, dims["P"], dims)


def check_token_entries(name: str, tables: Any, width: int, dims: Dims) -> None:
    """Raise ValueError for tables of pages with a view of one token per page, which would read wrong tokens.

    Tables of pages are not recognised if their width is a multiple of the page size.

    Args:
      width: entries per row of the tables.
      dims: result of `check_kv`.
    """
    if _VIEW not in dims:
        return
    page_size = dims[_VIEW]
    if width % page_size:
        raise ValueError(
            f"{name}: expected an entry for each token, a multiple of {page_size} per row, because kv is a view of"
            f" pages of {page_size} tokens with one token per page; got {list(tables.shape)}. Convert tables of pages"
            f" with token_tables({name}, page_size={page_size})"
        )


def check_class(name: str, value: Any, wanted: type) -> None:
    """Raise ValueError unless the value is an instance of the class."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name}: expected a {wanted.__name__}, got {_described(value)}")


def check_kv(kv: PagedKV, dims: Dims, *, mixed_dtypes: bool = False) -> None:
    """Check a K/V cache; bind N, Hkv, ps, D, Dv and the page size of a view. If D or Dv is bound already, the cache
    must have this width.

    Args:
      mixed_dtypes: whether the dtypes of keys and values may differ.
    """
    check_class("kv", kv, PagedKV)
    if kv.view_page_size is not None:
        dims.bind(_VIEW, size("kv.view_page_size", kv.view_page_size))
    if kv.is_fused:
        _check_fused(kv, dims)
    else:
        dims.check("kv.k", kv.k, "N Hkv ps D", (*PLAIN, *QMAX))
        dims.check("kv.v", kv.v, "N Hkv ps Dv", (*PLAIN, *QMAX) if mixed_dtypes else (kv.k.dtype,))
    for name, pages, scale in (("kv.k_scale", kv.k, kv.k_scale), ("kv.v_scale", kv.values[0], kv.v_scale)):
        quantised = jnp.dtype(pages.dtype) in QMAX
        if scale is None:
            if quantised:
                raise ValueError(f"{name}: a {pages.dtype.name} cache needs scales, got None")
            continue
        if not quantised:
            raise ValueError(f"{name}: a {pages.dtype.name} cache has no scales, got shape {list(scale.shape)}")
        check_dtype(name, scale, F32)
        _check_scale_shape(name, scale, dims, "Dv" if name == "kv.v_scale" else "D")
    if kv.k_scale is None or kv.v_scale is None:
        return
    k_layout, v_layout = ((s.ndim, s.shape[2:]) for s in (kv.k_scale, kv.v_scale))
    if k_layout != v_layout:
        k_shape, v_shape = (list(s.shape) for s in (kv.k_scale, kv.v_scale))
        raise ValueError(
            "kv.v_scale: expected the layout of kv.k_scale (one scale per head, per head and column, or per group of"
            f" tokens), got shape {v_shape} with a kv.k_scale of shape {k_shape}"
        )


def query_scale(q_scale: Any, q: Any) -> Any:
    """Return a number `q_scale` as an array with one equal entry per head; return arrays and None unchanged."""
    if q_scale is None or hasattr(q_scale, "dtype"):
        return q_scale
    check_array("q", q)
    return jnp.full(q.shape[-2:-1], required_number("q_scale", q_scale), jnp.float32)


def query_dtypes(kv: PagedKV, q_scale: Any) -> tuple[Any, ...]:
    """Return the dtypes that queries may have: with a `q_scale`, also the cache's dtype if it is a float8 dtype."""
    is_float8 = q_scale is not None and jnp.dtype(kv.k.dtype) in FLOAT8
    return (*PLAIN, kv.k.dtype) if is_float8 else PLAIN


def check_8_bit_queries(q: Any, kv: PagedKV, out_dtype: Any) -> None:
    """Check a call with a `q_scale`, whose queries are rounded to 8 bits.

    Raises:
      NotImplementedError: the cache is not in a float8 dtype.
      ValueError: the queries are float8 and `out_dtype` is None.
    """
    if jnp.dtype(kv.k.dtype) not in FLOAT8:
        names = " or ".join(dtype.name for dtype in FLOAT8)
        raise NotImplementedError(
            f"q_scale: takes a cache in {names}, the dtype of the 8-bit queries; got a cache in {kv.k.dtype.name}"
        )
    if q.dtype not in PLAIN and out_dtype is None:
        raise ValueError(f"out_dtype: expected a dtype of 16 or 32 bits with queries in {q.dtype.name}, got None")


def _check_fused(kv: PagedKV, dims: Dims) -> None:
    """Check fused pages [N, Hkv, ps, 2 · W]: keys in the first half of the columns, values in the second, with W >= D.

    If D is not bound, bind it to W.
    """
    check_array("kv.k", kv.k)
    advice = view_advice(kv, dims["Hkv"]) if "Hkv" in dims else ""
    dims.check("kv.k", kv.k, "N Hkv ps columns", (*PLAIN, *QMAX), advice=advice)
    width = dims["D"] if "D" in dims else dims["columns"] // 2
    if dims["columns"] % 2 or dims["columns"] < 2 * width:
        raise ValueError(
            f"kv.k: expected 2·W columns with W >= D={width}, because kv.v is None: keys in the first W columns and"
            f" values in the last W; got {dims['columns']} columns"
        )
    dims.bind("D", width)
    dims.bind("Dv", width, "kv: fused values are as wide as keys")


def _check_scale_shape(name: str, scale: Any, dims: Dims, width: str) -> None:
    n, hkv, ps, d = dims["N"], dims["Hkv"], dims["ps"], dims[width]
    groups = scale.shape[-1] if scale.ndim == 3 else 1
    if scale.shape not in ((hkv,), (hkv, d), (n, hkv, groups)) or groups < 1 or ps % groups:
        wanted = f"[Hkv={hkv}], [Hkv={hkv}, {width}={d}] or [N={n}, Hkv={hkv}, g] with g dividing ps={ps}"
        if not scale.shape:
            wanted += f" (one scale of all heads is jnp.full(({hkv},), scale))"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(scale.shape)}")


def check_latent(
    cache: PagedLatent, dims: Dims, *, unscaled: bool = False, small_groups: bool = False, name: str = "cache"
) -> None:
    """Check a latent cache; bind N and ps. If L and R are bound already, the cache must have these widths.

    Args:
      unscaled: whether to accept 8-bit latents and rotated keys in one array without scales.
      small_groups: whether to accept scales that are powers of two, for groups of 64 columns.
      name: name of the argument.
    """
    check_class(name, cache, PagedLatent)
    unscaled = unscaled and cache.scale is None and cache.rope is None
    check_dtype(f"{name}.pages", cache.pages, (*PLAIN, *(FLOAT8 if unscaled else (LATENT_8BIT,))))
    dtype = jnp.dtype(cache.pages.dtype)
    quantised = dtype == LATENT_8BIT and not unscaled
    for field, part in (("scale", cache.scale), ("rope", cache.rope)):
        if quantised and part is None:
            raise ValueError(f"{name}.{field}: expected an array with {dtype.name} pages, got None")
        if not quantised and part is not None:
            raise ValueError(f"{name}.{field}: expected None with {dtype.name} pages, got {_described(part)}")
    if cache.scale is not None:
        check_dtype(f"{name}.scale", cache.scale, (*F32, POWER_OF_TWO) if small_groups else F32)
        _check_scaled_latent(cache, dims, latent_group(cache.scale.dtype), name)
        return
    dims.check(f"{name}.pages", cache.pages, "N ps LR")
    if "L" in dims and cache.width != dims["L"] + dims["R"]:
        raise ValueError(f"{name}.pages: expected L + R = {dims['L']} + {dims['R']} columns, got {cache.width}")


def _check_scaled_latent(cache: PagedLatent, dims: Dims, group: int, name: str) -> None:
    """Check the arrays of a quantised latent cache with a scale for each `group` columns.

    If R is bound to 0, rotated keys are part of the latents, and the cache must have L columns in total.
    """
    all_values = "L" in dims and dims["R"] == 0
    own = Dims() if all_values else dims
    own.check(f"{name}.pages", cache.pages, "N ps L")
    if own["L"] % group:
        raise ValueError(f"{name}.pages: expected a multiple of {group} columns, got {own['L']}")
    own.check(f"{name}.scale", cache.scale, f"N ps {own['L'] // group}")
    own.check(f"{name}.rope", cache.rope, "N ps R", ROPE_DTYPES)
    if all_values and cache.width != dims["L"]:
        raise ValueError(f"{name}: expected {dims['L']} columns of pages and rope together, got {cache.width}")


def check_new_latents(name: str, latents: Any, cache: PagedLatent, dims: Dims, *, cast: bool = False) -> None:
    """Check new latents [T, L + R] against a checked cache.

    The latents must have the cache's dtype, unless the cache is quantised or `cast` permits a conversion. A cache of
    8-bit latents without scales accepts its own dtype, and also 16-bit and 32-bit latents.
    """
    dtypes = PLAIN if cast or cache.is_quantised else (cache.pages.dtype,)
    if not cache.is_quantised and cache.pages.dtype not in PLAIN:
        dtypes = (*PLAIN, cache.pages.dtype)
    dims.check(name, latents, f"T {cache.width}", dtypes)


def check_index_keys(index: PagedIndexKeys, dims: Dims, *, name: str = "index") -> None:
    """Check a cache of index keys; bind N, ps and Di."""
    check_class(name, index, PagedIndexKeys)
    dims.check(f"{name}.keys", index.keys, "N ps Di", (*PLAIN, LATENT_8BIT))
    dtype = jnp.dtype(index.keys.dtype)
    if dtype == LATENT_8BIT and index.scale is None:
        raise ValueError(f"{name}.scale: expected an array with {dtype.name} keys, got None")
    if dtype != LATENT_8BIT and index.scale is not None:
        raise ValueError(f"{name}.scale: expected None with {dtype.name} keys, got {_described(index.scale)}")
    if index.scale is not None:
        dims.check(f"{name}.scale", index.scale, "N ps 1", F32)


def check_rope(rope: Rope, dims: Dims, *, has_q: bool) -> None:
    """Check the arguments of RoPE and of the norms of queries and keys; bind half. T and D must be bound.

    Args:
      has_q: whether the call has queries.
    """
    check_class("rope", rope, Rope)
    dims.check("rope.cos", rope.cos, "T half", F32)
    dims.check("rope.sin", rope.sin, "T half", F32)
    if 2 * dims["half"] > dims["D"]:
        raise ValueError(f"rope.cos: expected at most D/2 = {dims['D'] // 2} columns, got {dims['half']}")
    if rope.q_norm is not None and not has_q:
        raise ValueError("rope.q_norm: expected None without q, because the call has no queries to normalise")
    for name, norm in (("rope.q_norm", rope.q_norm), ("rope.k_norm", rope.k_norm)):
        if norm is not None:
            dims.check(name, norm, "D", PLAIN)
    if rope.style not in ("neox", "interleaved"):
        raise ValueError(f"rope.style: expected 'neox' or 'interleaved', got {rope.style!r}")
    if rope.norm_order not in ("before_rope", "after_rope"):
        raise ValueError(f"rope.norm_order: expected 'before_rope' or 'after_rope', got {rope.norm_order!r}")
    check_positive("rope.norm_eps", rope.norm_eps)


def check_window(window: int | HeadWindow | None, num_kv_heads: int, name: str = "window") -> None:
    """Check an int window, or a HeadWindow with one entry per KV head. Values on the device are not checked."""
    if isinstance(window, HeadWindow):
        dims = Dims(Hkv=num_kv_heads)
        dims.check(f"{name}.window", window.window, "Hkv", INT)
        dims.check(f"{name}.sink_tokens", window.sink_tokens, "Hkv", INT)
    elif isinstance(window, bool) or not isinstance(window, int | None):
        raise ValueError(f"{name}: expected None, an int of at least 1 or a HeadWindow, got {_described(window)}")
    else:
        check_int_window(window, name)


def check_int_window(window: int | None, name: str = "window") -> None:
    """Check a window that is the same for all heads."""
    if isinstance(window, bool) or not isinstance(window, int | None):
        raise ValueError(f"{name}: expected None or an int of at least 1 for all heads, got {_described(window)}")
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"{name}: expected an int from 1 to 2**31 - 1, or None to hide nothing, got {window}")


def check_causal_window(window: int | HeadWindow | None, *, causal: bool, name: str = "window") -> None:
    """Raise ValueError for a window without causality: a non-causal query has no position where a window could end."""
    if window is not None and not causal:
        raise ValueError(
            f"{name}: expected None with causal=False, where queries have no positions; got {_described(window)}"
        )


def check_positive(name: str, value: float | None) -> None:
    """Raise ValueError unless the value is None or a positive finite number."""
    number(name, value)


def check_plan(plan: DecodePlan, call: PlanKey) -> None:
    """Raise ValueError unless the plan was made for the call."""
    check_class("plan", plan, DecodePlan)
    for field in dataclasses.fields(PlanKey):
        made_for, wanted = (getattr(key, field.name) for key in (plan.made_for, call))
        if made_for != wanted:
            raise ValueError(
                f"plan: was made for {field.name} = {made_for!r}, this call has {field.name} = {wanted!r}; "
                "call plan_decode with the arrays and options of this call"
            )


def window_key(window: int | HeadWindow | None) -> int | str | None:
    """Return a window in the form that `PlanKey` contains."""
    if isinstance(window, HeadWindow):
        return "per head"
    return None if window == FULL else window


# --- clipping of lengths on the device, where nothing can raise


def bound_sums(cu_lens: Int32[Array, "S_plus_1"], total: int) -> Int32[Array, "S_plus_1"]:
    """Return prefix sums clipped to valid values: never decreasing, from 0 to `total`, the number of packed tokens.

    A sum that is smaller than an earlier sum becomes the largest earlier sum, so that its sequence has no tokens. Sums
    may therefore be padded with zeros. Tokens before the first sum, and from the largest sum on, belong to no sequence.
    """
    return jnp.clip(lax.cummax(cu_lens), 0, total)


def bound_range(keys: SlotRange, page_size: int) -> SlotRange:
    """Return the range with sequences, positions and counts clipped to the block tables."""
    sequences, table_pages = keys.block_tables.shape
    end = min(table_pages * page_size, INT32_RANGE.max)
    known = (keys.sequence >= 0) & (keys.sequence < sequences) & (keys.first >= 0) & (keys.first < end)
    sequence, first, count = (jnp.where(known, x, 0) for x in (keys.sequence, keys.first, keys.count))
    return SlotRange(
        keys.block_tables, sequence, first, jnp.clip(count, 0, jnp.minimum(end - first, keys.size)), keys.size
    )


def bound_lens(lens: Int32[Array, "S"], most: Int32[Array, "#S"] | int) -> Int32[Array, "S"]:
    """Return lengths clipped to the range from 0 to `most`. A Python int `most` may exceed the range of int32."""
    return jnp.clip(lens, 0, min(most, INT32_RANGE.max) if isinstance(most, int) else most)


def bound_decode_lens(
    key: PlanKey, kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"] | None
) -> tuple[Int32[Array, "B"], Int32[Array, "B"] | None]:
    """Return lengths of a decode call: `kv_lens` clipped to the tokens of a full block table, `q_lens` clipped to Q."""
    bounded = None if q_lens is None else bound_lens(q_lens, key.num_queries)
    return bound_lens(kv_lens, key.table_pages * key.page_size), bounded


def bound_window(window: int | HeadWindow | None) -> int | HeadWindow | None:
    """Clip a `HeadWindow` to windows of at least 1 and sink tokens of at least 0. Return other windows unchanged."""
    if not isinstance(window, HeadWindow):
        return window
    return HeadWindow(jnp.maximum(window.window, 1), jnp.maximum(window.sink_tokens, 0))
