"""Compilation of step programs in a thread, while the engine runs steps with the programs that are compiled already.

The thread compiles one bucket (padded shape of a step) after the other. It counts, for each missing bucket, the steps
that used a larger bucket instead, and compiles the bucket with the highest count next; of equal counts the first. The
engine's thread, which runs steps, takes compiled buckets with `next_compiled` and `taken`. XLA compiles without
Python's global lock. Tracing and lowering hold the lock, so a step that runs at the same time may wait for it.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.step.compiler import RunnerState, StepCompiler
from pallas_attn.models.engine.step.layered import LayeredStep

LOGGER = logging.getLogger("pallas_attn.engine")


class BackgroundCompiler:
    """Compiles buckets in a thread.

    The thread ends when all buckets are compiled. After `stop` or the end of the main thread, it ends before the next
    bucket. XLA cannot be interrupted, so the thread first compiles its current bucket.

    A bucket whose compilation fails is logged and skipped.
    """

    def __init__(self, programs: StepCompiler, buckets: Mapping[Bucket, LayeredStep | None], state: RunnerState):
        """Start the thread.

        Args:
          programs: compiler of the programs. The thread stores programs in `programs.shared`, not `programs.forward`.
          buckets: the buckets, each with the split of its steps. Buckets with equal counts of `count_miss` are compiled
            in this order.
          state: shapes of the runner's arrays, from `StepCompiler.shapes`.
        """
        self._programs, self._buckets, self._state = programs, dict(buckets), state
        self._compiled: deque[tuple[Bucket, Any]] = deque()
        self._misses: Counter[Bucket] = Counter()
        self._num_taken = self.num_errors = 0
        self._is_stopping = threading.Event()
        device = jax.config.jax_default_device  # a setting of a `with` block applies to one thread
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, device), name="compile steps")
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Number of buckets that may still be taken."""
        if not self._thread.is_alive():
            return len(self._compiled)
        return len(self._buckets) - self._num_taken - self.num_errors

    @property
    def is_complete(self) -> bool:
        """Whether all buckets have been compiled and taken."""
        return self._num_taken == len(self._buckets)

    def count_miss(self, bucket: Bucket) -> None:
        """Count a step that uses another bucket, because this one is not compiled.

        Args:
          bucket: the smallest bucket that holds the step. A step that may call `cascade_decode` but has no compiled
            bucket with `Bucket.cascade` is counted for the smallest buckets with and without it.
        """
        self._misses[bucket] += 1

    def next_compiled(self) -> tuple[Bucket, Any] | None:
        """Return the next compiled bucket and its forward program; None if there is none yet."""
        return self._compiled[0] if self._compiled else None

    def taken(self) -> None:
        """Remove the bucket that `next_compiled` returns."""
        self._compiled.popleft()
        self._num_taken += 1

    def stop(self) -> None:
        """Let the thread end before the next bucket."""
        self._is_stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self, device: Any) -> None:
        with jax.default_device(device):
            pending = dict(self._buckets)
            while pending and not self._is_stopping.is_set() and threading.main_thread().is_alive():
                bucket = max(pending, key=self._misses.__getitem__)  # of equals the first
                split = pending.pop(bucket)
                try:
                    compiled = self._programs.compile({bucket: split}, self._state)
                except Exception as error:  # steps continue with the other programs
                    self.num_errors += 1
                    LOGGER.exception("compilation of %s failed: %s", bucket, error)
                else:
                    self._compiled.append((bucket, compiled[bucket]))
