"""Patches that make jax's interpreter of Mosaic GPU kernels faster.

- The interpreter translates a kernel to two JAX programs: one launches the threads, the other is the code of a thread.
Each load, store and wait in them is an `io_callback`. XLA compiles both programs, which takes ten times as long as
running them on small inputs. With the patch, `numpy_evaluator` runs the programs without compilation.
- Kernels inside `shard_map` are still compiled. There, `io_callback` converts every argument to a jax array, and the
interpreter's callbacks convert it back to numpy. The patch passes numpy arrays directly.
- The race detector compares an access with all earlier accesses of the same buffer one by one. The patch compares them
in one numpy operation.

The patches are applied only if the sources of all functions in `KNOWN` are the sources of jax `WRITTEN_FOR`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src import core, source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state, thread_map, vector_clock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, shared_memory

from tests.kit import numpy_evaluator

WRITTEN_FOR = "0.11.2"
"""Version of jax whose functions have the hashes in `KNOWN`."""

ORIGINAL = callbacks.io_callback_impl
TO_INT: Any = getattr(shared_memory, "_to_int", None)  # None before jax 0.11
RUN_THREAD = thread_map._run_jaxpr
CLOCK = getattr(vector_clock, "NpVectorClock", None)  # None before jax 0.11.1
INTERPRET = interpret_pallas_call.interpret_pallas_call
States = race_detection_state.RaceDetectionState
CHECK_READ = States.check_read
CHECK_WRITE = States.check_write
KNOWN = {
    ORIGINAL: "3396b676250803d9cf83d69ca8d38069575992d36644ad8799f9c0aa3afb40ee",
    CHECK_READ: "323e67404e3c3da0ad40954280151f4b100a98376f029824206fc8f43f78b556",
    CHECK_WRITE: "44e72c717d6391b0c02dc8dc166a0240124c897c6dbc0e8542f333c7bc3a51ad",
    getattr(CLOCK, "ordered", None): "b8573558752d4845ff8ebfe10c25c9a04edc3bbbfee160c017a3f27730ba1d98",
    getattr(CLOCK, "lt", None): "faaf2cd59d5dabc6e684f06327401837cf6dc84794afb581b6887bb800752c34",
    RUN_THREAD: "0046ded62e782f3b8c435b8369b50914879aa8918ab709ec825871734119908c",
    INTERPRET: "5ff9d8a279c24d2b77b3123893f3dcfc197ff884cb1ec6a45ba05e1c49b99f6e",
    TO_INT: "18d313ec1d2461a1a06a1226f7b8304d9ba4c963f92fb73f3ccc9062316ffd3d",
}
"""SHA-256 of the source of each function that the patches replace, or whose behaviour they depend on."""
INTERPRETERS = ("jax._src.pallas.mosaic_gpu.interpret.", "jax._src.pallas.mosaic.interpret.", __name__)


def fingerprint(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def apply() -> bool:
    """Replace the functions of jax if all hashes of `KNOWN` match. Return whether they were replaced."""
    if any(function is None or fingerprint(function) != known for function, known in KNOWN.items()):
        return False
    callbacks.io_callback_impl = run_callback
    shared_memory._to_int = to_int
    thread_map._run_jaxpr = run_thread
    interpret_pallas_call.interpret_pallas_call = interpret
    States.check_read = check_read
    States.check_write = check_write
    return True


def interpret(*args: Any, **params: Any) -> Any:
    """Interpret a kernel like jax's `interpret_pallas_call`, but evaluate its program with `numpy_evaluator` in one
    callback.
    """
    if core.get_axis_env().axis_sizes:  # inside `shard_map`: only a compiled program knows its axis index
        return INTERPRET(*args, **params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    program, outputs = jax.make_jaxpr(functools.partial(INTERPRET, **params), return_shape=True)(*shapes)

    def run(*arrays: Any) -> Any:
        return numpy_evaluator.evaluate(program, program.consts, arrays)

    return callbacks.io_callback(run, outputs, *args, ordered=True)


def run_thread(jaxpr: Any, consts: Sequence[Any], *args: Any) -> None:
    """Run one thread of a kernel. If it raises an error, for example in a callback of a test, stop the threads that
    wait for it.
    """
    try:
        numpy_evaluator.evaluate(jaxpr, consts, args)
    except Exception as error:
        gpu_callbacks._get_shared_memory().set_failed(error, top_level=False)
        raise


def run_callback(*args: Any, callback: Any, **settings: Any) -> Any:
    """Run an `io_callback`. Callbacks of the interpreter and of this module get numpy copies of the arguments; other
    callbacks get jax arrays, as in jax.
    """
    if not is_interpreters(callback.callback_func):
        return ORIGINAL(*args, callback=callback, **settings)
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def is_interpreters(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).startswith(INTERPRETERS)


def to_int(x: Any) -> Any:
    """Convert a scalar to an int. Unlike jax's function, also accept a numpy array with one element."""
    return x.item() if isinstance(x, np.ndarray) else TO_INT(x)


class Frame:
    """Source location of an access to a buffer. The text, which takes long to make, is made only when a race is
    reported.
    """

    def __init__(self, source_info: source_info_util.SourceInfo | None):
        self.source_info = source_info

    def __str__(self) -> str:
        return "pallas_call" if self.source_info is None else source_info_util.summarize(self.source_info)


def check_read(self: Any, thread: Any, clock: Any, buffer_key: Any, rnge: Any, source_info: Any = None) -> None:
    """Record a read of a buffer. If it races with a write, call jax's `check_read`, which records and reports it."""
    with self.lock:
        races = any_race(self.writes[buffer_key], clock, rnge)
        if not races:
            self.reads[buffer_key].append((thread, clock, rnge, Frame(source_info)))
    if races:
        CHECK_READ(self, thread, clock, buffer_key, rnge, source_info)


def check_write(self: Any, thread: Any, clock: Any, buffer_key: Any, rnge: Any, source_info: Any = None) -> None:
    """Record a write to a buffer. If it races with a read or a write, call jax's `check_write`, which records and
    reports it.
    """
    with self.lock:
        races = any(any_race(accesses[buffer_key], clock, rnge) for accesses in (self.writes, self.reads))
        if not races:
            self.writes[buffer_key].append((thread, clock, rnge, Frame(source_info)))
    if races:
        CHECK_WRITE(self, thread, clock, buffer_key, rnge, source_info)


def any_race(accesses: Sequence[Any], clock: Any, rnge: Any) -> bool:
    """Return whether one of the earlier accesses races: its range overlaps `rnge`, and its vector clock is neither
    before nor after `clock`.
    """
    if not accesses:
        return False
    clocks = np.concatenate([clock.clock for _, clock, _, _ in accesses]).reshape(len(accesses), -1)
    no_later, no_earlier = (clocks <= clock.clock).all(1), (clocks >= clock.clock).all(1)
    unordered = np.flatnonzero(no_later == no_earlier)  # equal clocks (both true) count as unordered, as in jax
    return any(race_detection_state._ranges_overlap(rnge, accesses[i][2]) for i in unordered.tolist())
