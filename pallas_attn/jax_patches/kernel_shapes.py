"""Tracing of calls without the bodies of their kernels.

Implementations raise NotImplementedError for unsupported calls before they launch a kernel. To find out whether a call
is supported, no kernel body has to be traced, which would take most of the time. Within `without_bodies()`,
`plgpu.kernel` and `pallas_attn.triton.launch.launch` return zeros of the shapes and dtypes of a kernel's results. The
context is meant for abstract traces (`jax.eval_shape`), whose values are not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

_skips: ContextVar[bool] = ContextVar("skips_bodies", default=False)


def skips_bodies() -> bool:
    """Return whether a `without_bodies` context is active."""
    return _skips.get()


@contextlib.contextmanager
def without_bodies() -> Iterator[None]:
    """Trace no kernel bodies within this context. Other threads trace them as before.

    The context imports Mosaic GPU, also if no call uses it.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # imported here because the import is slow

    original, token = plgpu.kernel, _skips.set(True)

    def kernel(*arguments: Any, **options: Any) -> Any:
        return _shapes_only(**options) if _skips.get() else original(*arguments, **options)

    setattr(plgpu, "kernel", kernel)  # noqa: B010  a type checker rejects the assignment of a function of a module
    try:
        yield
    finally:
        setattr(plgpu, "kernel", original)  # noqa: B010
        _skips.reset(token)


def zeros(types: Any) -> Any:
    """Return arrays of zeros with the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), types)


def _shapes_only(*, out_type: Any = (), **options: Any) -> Callable[..., Any]:
    """Return a function that replaces the result of `plgpu.kernel` and returns zeros."""
    return lambda *operands: zeros(out_type)
