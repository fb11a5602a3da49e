"""Caches of JAX engines for TPUs as an argument: one array with keys and values, and tables of its pages."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_attn import checks
from pallas_attn.convert import token_tables
from pallas_attn.portable.arguments import is_array
from pallas_attn.portable.mixed_step import as_tables
from pallas_attn.types import QMAX, PagedKV


def accept_fused_array[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """Decorate `ragged_paged_attention`, so that `kv` may be an array of keys and values.

    The operation receives a view of the array with one token per page, without a copy, and tables of tokens. The result
    has an array of the original shape in place of the view.
    """
    signature, call = inspect.signature(operation), cast("Callable[..., Any]", operation)

    @functools.wraps(operation)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        pages = arguments["kv"]
        if isinstance(pages, PagedKV) or not is_array(pages):
            return operation(*args, **kwargs)
        num_q_heads = _use_view(arguments)
        out, kv = call(**arguments)
        return out[:, :num_q_heads], _reshape(kv.k, pages.shape, from_axis=1, to_axis=2)

    return wrapped


def _use_view(arguments: dict[str, Any]) -> int:
    """Replace the array in the arguments of a call by a view, and the tables of pages by tables of tokens.

    If the array has more KV heads than the new tokens, append heads of zeros to the other arguments.

    Returns:
      Number of query heads before heads were appended.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the array is split over devices along another axis than its rows.
    """
    pages, k = arguments["kv"], arguments["k"]
    if k is None:
        raise ValueError(
            f"k: expected the new keys, which give the number of KV heads if kv is an array {list(pages.shape)}; got"
            " None. Pass kv=view_fused(kv, num_kv_heads) and token_tables(page_indices, page_size=kv.shape[1])"
        )
    dims = checks.Dims()
    checks.check_array("q", arguments["q"])
    dims.check("q", arguments["q"], "T Hq D")
    dims.check("k", k, "T Hkv D")
    checks.check_heads(dims["Hq"], dims["Hkv"])
    checks.check_dtype("kv", pages, (*checks.PLAIN, *QMAX))
    heads = _num_heads(pages, dims["Hkv"], dims["D"])
    kv_lens, tables = checks.int32(kv_lens=arguments["kv_lens"], page_indices=arguments["page_indices"])
    of_tables = checks.Dims()
    of_tables.check("kv_lens", kv_lens, "S")
    tables = as_tables(tables, of_tables)
    num_pages, page_size, *rest = pages.shape
    columns = math.prod(rest) // heads
    view = _reshape(pages, (num_pages * page_size, heads, 1, columns), from_axis=2, to_axis=1)
    arguments["kv"] = PagedKV(view, None, view_page_size=page_size)
    if tables.size:
        arguments["page_indices"] = token_tables(tables, page_size=page_size)
    if jnp.dtype(pages.dtype) in QMAX:
        for name in ("k_scale", "v_scale"):
            arguments[name] = 1.0 if arguments.get(name) is None else arguments[name]
    _append_heads(arguments, heads - dims["Hkv"], dims["Hq"] // dims["Hkv"])
    return dims["Hq"]


def _num_heads(pages: Any, num_kv_heads: int, head_dim: int) -> int:
    """Return the number of KV heads in an array, including heads that only pad it.

    The rows of a token are keys and values alternating, or rows of a key followed by its value. Their number is padded
    to a multiple of the packing.

    Raises:
      ValueError: the shape fits neither or both.
    """
    if pages.ndim not in (4, 5) or not pages.size:
        raise ValueError(
            "kv: expected a PagedKV, or a nonempty array [N, ps, rows, columns] or [N, ps, rows / packing, packing,"
            f" columns], got shape {list(pages.shape)}"
        )
    rows, columns = math.prod(pages.shape[2:-1]), pages.shape[-1]
    packing = pages.shape[3] if pages.ndim == 5 else 1

    def padded(count: int) -> int:
        return -(-count // packing) * packing

    is_alternating = columns >= head_dim and rows == padded(2 * num_kv_heads) and rows % 2 == 0
    is_joined = columns == 2 * head_dim and rows == padded(num_kv_heads)
    if is_alternating and is_joined:
        raise ValueError(
            f"kv: expected a shape that tells how keys and values are stored, got {list(pages.shape)} for"
            f" num_kv_heads={num_kv_heads} and D={head_dim}. If keys and values alternate, pass"
            f" kv.reshape({', '.join(map(str, pages.shape[:2]))}, {rows}, {columns}). If a key is followed by its value"
            f" and {rows - num_kv_heads} heads are padding, append heads of zeros to q, k and v"
        )
    if is_joined:
        return rows
    if is_alternating:
        return rows // 2
    raise ValueError(
        f"kv: expected {padded(2 * num_kv_heads)} rows of at least {head_dim} columns, keys and values alternating, or"
        f" {padded(num_kv_heads)} rows of {2 * head_dim} columns, a key followed by its value, for each token of"
        f" num_kv_heads={num_kv_heads}; got shape {list(pages.shape)}. For separate arrays of keys and values, pass a"
        " PagedKV, or view_nhd(k, v) and token_tables(page_indices, page_size=ps)"
    )


def _reshape(x: Any, shape: tuple[int, ...], *, from_axis: int, to_axis: int) -> jax.Array:
    """Return a reshaped array. If `x` is split along `from_axis` over `AxisType.Explicit` axes, split `to_axis`."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return jnp.reshape(x, shape)
    if any(axes for i, axes in enumerate(sharding.spec) if i != from_axis):
        raise NotImplementedError(
            f"kv: an array may be split over devices along its rows only, got {sharding.spec} for shape"
            f" {list(x.shape)}; call ragged_paged_attention inside jax.shard_map"
        )
    spec = [None] * len(shape)
    spec[to_axis] = sharding.spec[from_axis]
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _append_heads(arguments: dict[str, Any], count: int, group: int) -> None:
    """Append `count` KV heads, and their query heads, to all arguments that have heads."""
    if not count:
        return

    def pad(x: Any, axis: int, number: int, value: int = 0) -> Any:
        if not is_array(x) or x.ndim <= axis:  # a number is for all heads
            return x
        widths = [(0, number if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    arguments["q"] = pad(arguments["q"], 1, count * group)
    for name in ("k", "v"):
        arguments[name] = pad(arguments.get(name), 1, count)
    for name in ("k_scale", "v_scale"):
        arguments[name] = pad(arguments.get(name), 0, count, 1)
    arguments["attention_sink"] = pad(arguments.get("attention_sink"), 0, count * group)
    arguments["sliding_window"] = jax.tree.map(lambda x: pad(x, 0, count, 1), arguments.get("sliding_window"))
