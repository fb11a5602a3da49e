"""Interprets Mosaic kernels in a third of the time.

jax's interpreter runs each load, store and wait of a kernel as an `io_callback`, and `io_callback` first puts every
argument on the CPU as an array of jax, for callbacks that compute with jax. The interpreter's do not: they turn them
back. On jax 0.11.2 that is 57% of the time in which latent decode is interpreted.

The search for races compares each access with all earlier ones of its buffer, one by one; here all at once.

A jax whose functions read otherwise than those of `WRITTEN_FOR` is left as it is.
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
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state, vector_clock
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

WRITTEN_FOR = "0.11.2"
"""The version of jax with the functions in `KNOWN`."""

ORIGINAL = callbacks.io_callback_impl
TO_INT = shared_memory._to_int
States = race_detection_state.RaceDetectionState
CHECK_READ = States.check_read
CHECK_WRITE = States.check_write
KNOWN = {
    ORIGINAL: "3396b676250803d9cf83d69ca8d38069575992d36644ad8799f9c0aa3afb40ee",
    CHECK_READ: "323e67404e3c3da0ad40954280151f4b100a98376f029824206fc8f43f78b556",
    CHECK_WRITE: "44e72c717d6391b0c02dc8dc166a0240124c897c6dbc0e8542f333c7bc3a51ad",
    vector_clock.NpVectorClock.ordered: "b8573558752d4845ff8ebfe10c25c9a04edc3bbbfee160c017a3f27730ba1d98",
    vector_clock.NpVectorClock.lt: "faaf2cd59d5dabc6e684f06327401837cf6dc84794afb581b6887bb800752c34",
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
    States.check_read = check_read
    States.check_write = check_write
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


class Frame:
    """Where a kernel accesses a buffer, put into words when a race is reported."""

    def __init__(self, source_info: source_info_util.SourceInfo | None):
        self.source_info = source_info

    def __str__(self) -> str:
        return "pallas_call" if self.source_info is None else source_info_util.summarize(self.source_info)


def check_read(self: Any, thread: Any, clock: Any, buffer_key: Any, rnge: Any, source_info: Any = None) -> None:
    """Records a read; jax's function does, and reports, one that races with a write."""
    with self.lock:
        races = any_race(self.writes[buffer_key], clock, rnge)
        if not races:
            self.reads[buffer_key].append((thread, clock, rnge, Frame(source_info)))
    if races:
        CHECK_READ(self, thread, clock, buffer_key, rnge, source_info)


def check_write(self: Any, thread: Any, clock: Any, buffer_key: Any, rnge: Any, source_info: Any = None) -> None:
    """Records a write; jax's function does, and reports, one that races with a read or a write."""
    with self.lock:
        races = any(any_race(accesses[buffer_key], clock, rnge) for accesses in (self.writes, self.reads))
        if not races:
            self.writes[buffer_key].append((thread, clock, rnge, Frame(source_info)))
    if races:
        CHECK_WRITE(self, thread, clock, buffer_key, rnge, source_info)


def any_race(accesses: Sequence[Any], clock: Any, rnge: Any) -> bool:
    """Whether any of the accesses is neither before nor after `clock` and overlaps `rnge`."""
    if not accesses:
        return False
    clocks = np.concatenate([clock.clock for _, clock, _, _ in accesses]).reshape(len(accesses), -1)
    no_later, no_earlier = (clocks <= clock.clock).all(1), (clocks >= clock.clock).all(1)
    unordered = np.flatnonzero(no_later == no_earlier)  # equal clocks are both
    return any(race_detection_state._ranges_overlap(rnge, accesses[i][2]) for i in unordered.tolist())
