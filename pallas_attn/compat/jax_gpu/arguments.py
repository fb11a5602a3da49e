"""Arguments that both modules of `pallas_attn.compat.jax_gpu` handle alike."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_attn.types import Implementation

TUNING = ("block_h", "block_k", "pages_per_compute_block", "k_splits", "num_warps", "num_stages", "grid")
"""Arguments of jax's functions that choose the sizes of kernels."""


def warn_about_tuning(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Warn once per process that tuning arguments have no effect, if one of them differs from its default.

    Args:
      given: the arguments of `function`, by name.
    """
    defaults = _defaults(function)
    if changed := [name for name in TUNING if name in given and given[name] != defaults[name]]:
        _warn_once(f"{function.__name__}: pallas_attn ignores {', '.join(changed)}; it has its own kernel settings")


@functools.cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


_warned = False


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, UserWarning, stacklevel=4)


def call_in_jit[Result](
    function: Callable[..., Result], arrays: Mapping[str, Any], implementation: Implementation, **static: Any
) -> Result:
    """Call `function(**arrays, **static, implementation=implementation)` inside `jax.jit`.

    A reshape of the cache outside `jax.jit` would copy the cache. Inside a transformation, the surrounding `jax.jit`
    compiles the call, for the device that it compiles for.
    """
    static["implementation"] = tuple(implementation) if isinstance(implementation, list) else implementation
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return function(**arrays, **static)
    return _jitted(function, tuple(static))(**arrays, **static)


@functools.cache
def _jitted(function: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(function, static_argnames=static)
