"""Interprets Mosaic kernels in less than half the time, by handing the interpreter's callbacks numpy arrays.

jax's interpreter runs each load, store and wait of a kernel as an `io_callback`, and `io_callback` first puts every
argument on the CPU as an array of jax, for callbacks that compute with jax. The interpreter's do not: they turn them
back. On jax 0.11.2 that is 57% of the time in which latent decode is interpreted.

A jax whose functions read otherwise than those this was written against is left as it is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

ORIGINAL = callbacks.io_callback_impl
TO_INT = shared_memory._to_int
KNOWN = {
    ORIGINAL: "3396b676250803d9cf83d69ca8d38069575992d36644ad8799f9c0aa3afb40ee",
    TO_INT: "18d313ec1d2461a1a06a1226f7b8304d9ba4c963f92fb73f3ccc9062316ffd3d",
}
"""SHA-256 of the source of each function that is replaced."""
INTERPRETERS = ("jax._src.pallas.mosaic_gpu.interpret.", "jax._src.pallas.mosaic.interpret.")


def fingerprint(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def apply() -> bool:
    """Replaces jax's functions if they are the known ones; returns whether they are."""
    if any(fingerprint(function) != known for function, known in KNOWN.items()):
        return False
    callbacks.io_callback_impl = run_callback
    shared_memory._to_int = to_int
    return True


def run_callback(*args: Any, callback: Any, **settings: Any) -> Any:
    """Runs a callback: the interpreter's on copies of its arguments, others as jax does."""
    if not is_interpreters(callback.callback_func):
        return ORIGINAL(*args, callback=callback, **settings)
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def is_interpreters(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).startswith(INTERPRETERS)


def to_int(x: Any) -> Any:
    """Converts a scalar to an int as jax's function does, one of numpy too."""
    return x.item() if isinstance(x, np.ndarray) else TO_INT(x)
