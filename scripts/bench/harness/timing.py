"""Timing of operations: chains of calls that the device works through without waiting for the host.

A chain is one compiled program that calls an operation many times, each time on other data, and is run repeatedly. On a
GPU, XLA turns a chain of five or more kernels into a CUDA graph and replays it; the outputs of one run are donated to
the next, so that the graph is never rewritten for other addresses. The host queues runs faster than the device finishes
them. The time of a call is the difference in wall time between more runs and fewer (`Stopwatch.take`), divided by the
difference in calls: it includes kernels and the gaps between them, but neither the host nor the nearly constant
millisecond of the first launch and the last notice.

XLA's dumps show whether graphs are used (XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"): kCommandBuffer in the
sequence of thunks. Comparison with the times of single kernels, from CUPTI, gives the gaps.

Calls cannot overlap: the graph is serial (`SERIAL`), and runs follow one another on a stream. No call can be left out:
each has operands of its own, and every output is returned.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
"""XLA's option that runs the kernels of a graph one after the other, as on a stream."""

type Call = Callable[[Any, Any, Any], tuple[Any, Any]]
"""call(carried, shared, own) -> carried, output: one call of an operation. `carried` is updated in place by each call
for the next, `shared` is the same for all, `own` belongs to one call. Each may be any pytree of arrays, or None."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measurement of one implementation in one case.

    Attributes:
      samples: seconds per call, one number for each sample.
      calls: number of calls in a sample.
      method: description of how the samples were taken.
      kernels: seconds per call by kernel, from CUPTI; None if not measured.
      output: output of the first call, for a comparison; None if it cannot be compared.
      host: seconds per call that the host takes to queue a run. If they equal the samples, the host was measured.
    """

    samples: Sequence[float]
    calls: int
    method: str
    kernels: Mapping[str, float] | None = None
    output: np.ndarray | None = None
    host: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def fields(self) -> dict[str, Any]:
        """Fields of a JSON report, times in microseconds."""
        fields: dict[str, Any] = {
            "median_us": 1e6 * self.median,
            "min_us": 1e6 * min(self.samples),
            "max_us": 1e6 * max(self.samples),
            "samples": len(self.samples),
            "calls_per_sample": self.calls,
            "method": self.method,
        }
        if self.host is not None:
            fields["host_us"] = 1e6 * self.host
        if self.kernels is not None:
            fields["kernels_us"] = {name: 1e6 * seconds for name, seconds in self.kernels.items()}
        return fields


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Settings of a measurement.

    Attributes:
      sample_seconds: least time of a sample.
      samples: number of samples, of which the median counts.
      kernels: whether to measure also the times of single kernels on a GPU, with CUPTI, in a second compilation of the
        chain.
    """

    sample_seconds: float = 0.04
    samples: int = 7
    kernels: bool = False

    def take(self, run: Callable[[int], float]) -> tuple[list[float], int]:
        """Takes samples of run(repeats), which returns the seconds of so many repeats. Returns seconds per repeat, and
        the repeats of a sample.

        A sample is the additional time of three times as many repeats, per repeat. That leaves out the constant time of
        a run, such as the latency of the first launch and of the last result.
        """
        run(1)
        repeats = 1
        while (elapsed := run(repeats)) < self.sample_seconds / 16:
            repeats = max(2 * repeats, min(16 * repeats, int(repeats * self.sample_seconds / 8 / elapsed)))
        repeats = max(1, math.ceil(repeats * self.sample_seconds / 4 / elapsed))

        def sample() -> float:
            shorter, longer = run(repeats), run(3 * repeats)
            # Not positive only if noise exceeds the sample; then the longer run is the best estimate.
            return (longer - shorter) / (2 * repeats) if longer > shorter else longer / (3 * repeats)

        return [sample() for _ in range(self.samples)], 4 * repeats

    def chain(
        self,
        call: Call,
        owns: Sequence[Any],
        *,
        carried: Any = None,
        shared: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> Timing:
        """Times calls of an operation, one for each of `owns`, in turn.

        Args:
          carried: state that calls pass on; donated.
          options: the compiler's options for GPUs.
        """
        on_gpu = jax.default_backend() == "gpu"
        kernels = _kernel_times(call, carried, shared, owns) if self.kernels and on_gpu else None
        runs = _Runs(call, carried, shared, owns, SERIAL | dict(options or {}) if on_gpu else {})
        seconds, repeats = self.take(runs.run)
        samples = [s / len(owns) for s in seconds]
        host = runs.host_seconds() / len(owns) if on_gpu else None
        method = f"program of {len(owns)} calls, wall time, slope"
        return Timing(samples, repeats * len(owns), method, kernels, runs.first_output(), host)

    def graph(self, calls: Sequence[Callable[[], Any]], *, compared: bool = False) -> Timing:
        """Times calls of torch, captured in a CUDA graph one after the other.

        Args:
          compared: whether to keep the first call's result for a comparison.
        """
        torch: Any = importlib.import_module("torch")  # needed by contenders alone, so no dependency
        calls[0]()  # the first call may compile
        graph, began, ended = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = [call() for call in calls]

        def run(repeats: int) -> float:
            began.record()
            for _ in range(repeats):
                graph.replay()
            ended.record()
            ended.synchronize()
            return began.elapsed_time(ended) / 1e3

        seconds, repeats = self.take(run)
        samples = [s / len(calls) for s in seconds]
        first = outputs[0].float().cpu().numpy() if compared else None
        return Timing(samples, repeats * len(calls), f"CUDA graph of {len(calls)} calls, events, slope", output=first)


class _Runs:
    """A compiled chain, and the arrays that its last run left for the next."""

    def __init__(self, call: Call, carried: Any, shared: Any, owns: Sequence[Any], options: Mapping[str, Any]):
        chain = _chain(call)
        outputs, _ = jax.eval_shape(chain, carried, shared, owns)
        self._outputs = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), outputs)
        self._carried, self._shared, self._owns = carried, shared, owns
        self._run = jax.jit(
            lambda outputs, carried, shared, owns: chain(carried, shared, owns),
            donate_argnums=(0, 1),
            keep_unused=True,  # or the donated outputs would not be there to be written to
            compiler_options=dict(options),
        )

    def run(self, repeats: int) -> float:
        """Seconds for so many runs."""
        began = time.perf_counter()
        self._queue(repeats)
        jax.block_until_ready((self._outputs, self._carried))
        return time.perf_counter() - began

    def host_seconds(self) -> float:
        """Seconds to queue a run on an idle device."""
        began = time.perf_counter()
        self._queue(4)
        took = time.perf_counter() - began
        jax.block_until_ready((self._outputs, self._carried))
        return took / 4

    def _queue(self, repeats: int) -> None:
        for _ in range(repeats):
            self._outputs, self._carried = self._run(self._outputs, self._carried, self._shared, self._owns)

    def first_output(self) -> np.ndarray | None:
        """Output of the first call in float32; None if that is no single array."""
        output = self._outputs[0]
        return np.asarray(output.astype(jnp.float32)) if isinstance(output, jax.Array) else None


def _chain(call: Call) -> Callable[[Any, Any, Sequence[Any]], tuple[list[Any], Any]]:
    """Makes a function that calls once for each of `owns`; the operation is traced and lowered once, as a function of
    it."""
    once = jax.jit(call)

    def chain(carried: Any, shared: Any, owns: Sequence[Any]) -> tuple[list[Any], Any]:
        outputs = []
        for own in owns:
            carried, output = once(carried, shared, own)
            outputs.append(output)
        return outputs, carried

    return chain


def _kernel_times(call: Call, carried: Any, shared: Any, owns: Sequence[Any]) -> dict[str, float]:
    """Seconds per call by name of kernel. Nothing is donated, so arrays that are updated in place are copied first,
    which is no kernel."""
    from jax.experimental.mosaic.gpu import profiler  # available on Linux alone

    _, launches = profiler.measure(jax.jit(_chain(call)), aggregate=False)(carried, shared, owns)
    total: dict[str, float] = {}
    for name, milliseconds in launches or ():
        total[name] = total.get(name, 0.0) + milliseconds / 1e3 / len(owns)
    return total
