"""Patches that evaluate four eager operations with NumPy instead of a compiled program.

jax compiles a program for each eager operation and shape, in about 10 ms. In a sample of 901 tests, a third of
the programs only made constants: `jnp.asarray(numpy_array)` (`stage`), `jnp.zeros` and the like (`broadcast_in_dim`),
conversions to wider types (`convert_element_type`), and `reshape`. The patches give the same bits. They leave
conversions that may round, subnormal numbers (which XLA replaces by 0), weak types, committed arrays, shardings and
keys of random numbers to jax, and do not concern operations inside `jax.jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import dispatch, mesh
from jax._src.lax import lax


def apply() -> None:
    """Replace the implementations of the primitives, if they are those that the patches were written for."""
    for name, evaluate in EVALUATORS.items():
        primitive: Any = getattr(lax, name, None)  # jax before 0.11 has no `stage_p`
        known: Any = getattr(primitive, "impl", None)
        of_stage: Any = getattr(lax, "_stage_impl", dispatch.apply_primitive)
        if known is of_stage or getattr(known, "func", None) is dispatch.apply_primitive:
            primitive.def_impl(functools.partial(_run, evaluate, known))


def _run(
    evaluate: Callable[..., np.ndarray | None], known: Callable[..., Any], x: Any, *rest: Any, **params: Any
) -> Any:
    """Return the result of `evaluate`; of `known`, the implementation of jax, if `evaluate` returns None."""
    made = None if rest or not _is_plain(x) else evaluate(x, **params)
    return known(x, *rest, **params) if made is None else jax.device_put(_unaligned(made))


def _unaligned(x: np.ndarray) -> np.ndarray:
    """Return a copy whose address is no multiple of 64 bytes.

    `device_put` would keep an aligned array as its buffer, which XLA cannot update in place after a donation. It may
    return before it has read its argument, so the copy must have no other owner.
    """
    memory = np.empty(x.nbytes + 128, np.uint8)
    start = 64 - memory.ctypes.data % 64 + 16
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def _is_plain(x: Any) -> bool:
    """Whether x is a NumPy array, or an array of jax that a program without shardings may have returned."""
    if not mesh.get_abstract_mesh().empty:
        return False
    if isinstance(x, jax.Array):
        is_plain = not (jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.committed or x.weak_type)
    else:
        is_plain = isinstance(x, np.ndarray) and x.dtype == jax.dtypes.canonicalize_dtype(x.dtype)
    return is_plain and not _has_subnormals(np.asarray(x))


def _has_subnormals(x: np.ndarray) -> bool:
    if not jax.dtypes.issubdtype(x.dtype, np.inexact):
        return False
    size = np.abs(x)
    return bool(np.any((size > 0) & (size < jax.dtypes.finfo(x.dtype).smallest_normal)))


def _stage(x: Any) -> np.ndarray | None:
    return x if isinstance(x, np.ndarray) else None


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, sharding: Any) -> np.ndarray | None:
    if sharding is not None:
        return None
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(np.asarray(x).reshape(sizes), shape)


def _convert(x: Any, *, new_dtype: Any, weak_type: bool, sharding: Any) -> np.ndarray | None:
    if sharding is not None or weak_type or jax.dtypes.issubdtype(new_dtype, jax.dtypes.extended):
        return None
    return np.asarray(x).astype(new_dtype) if np.can_cast(x.dtype, new_dtype, "safe") else None


def _reshape(x: Any, *, new_sizes: Any, dimensions: Any, sharding: Any) -> np.ndarray | None:
    return None if dimensions is not None or sharding is not None else np.asarray(x).reshape(new_sizes)


EVALUATORS: dict[str, Callable[..., np.ndarray | None]] = {
    "stage_p": _stage,
    "broadcast_in_dim_p": _broadcast,
    "convert_element_type_p": _convert,
    "reshape_p": _reshape,
}
"""Function that evaluates a primitive of `lax`, or returns None."""
