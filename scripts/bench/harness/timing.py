"""Timing of operations: chains of calls that the device executes without waiting for the host.

A chain is one compiled program that calls an operation many times with different data. It runs repeatedly. On a GPU,
XLA turns a chain of five or more kernels into a CUDA graph and replays it. The outputs of a run are donated to the next
run. All runs then use the same addresses, and XLA does not have to update the graph. The host queues runs faster than
the device finishes them.

The time of a call is the difference in wall time between more and fewer runs (`Stopwatch.take`), divided by the
difference in the number of calls. It includes kernels and the gaps between them. It includes neither host time nor the
latency of the first launch and of the completion, together nearly constant and about a millisecond.

XLA's dumps (XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text") show whether graphs are used: the sequence of thunks
has a kCommandBuffer. The gaps between kernels are the time of a call minus the sum of its kernel times from CUPTI.

Calls cannot overlap, because the graph is serial (`SERIAL`) and runs are queued on one stream. XLA cannot eliminate a
call, because each call has different operands and every output is returned.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
"""XLA option that runs the kernels of a graph one after another, as on a stream."""

type Call = Callable[[Any, Any, Any], tuple[Any, Any]]
"""call(carried, shared, own) -> carried, output: one call of an operation in a chain.

`carried` is state that a call updates in place and passes to the next call, such as a page pool. `shared` are arguments
that all calls share. `own` are arguments of this call only. Each may be any pytree of arrays, or None.
"""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measurement of one implementation in one case.

    Attributes:
      samples: seconds per call, one value per sample.
      calls: number of calls that a sample ran.
        method: description of the measurement, for the report.
      kernels: seconds per call by kernel, from CUPTI; None if not measured.
      output: output of the first call, for a comparison; None if it cannot be compared.
      host: seconds of the host per call to queue runs. If they nearly equal the samples, the device waited for the
      host.
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
        """Return the fields of the JSON report, times in microseconds."""
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
      sample_seconds: approximate time of a sample.
      samples: number of samples. The report has their median.
      kernels: whether to also measure the time of each kernel with CUPTI, on a GPU. This compiles the chain a second
      time.
    """

    sample_seconds: float = 0.04
    samples: int = 7
    kernels: bool = False

    def take(self, run: Callable[[int], float]) -> tuple[list[float], int]:
        """Take samples of `run`, where run(n) returns the seconds of n repeats.

        A sample is (run(3n) - run(n)) / 2n. The difference cancels constant times, such as the latency of the first
        launch and of the last result.

        Returns:
          Seconds per repeat of each sample, and the number of repeats that a sample runs (4n).
        """
        run(1)
        repeats = 1
        while (elapsed := run(repeats)) < self.sample_seconds / 16:
            repeats = max(2 * repeats, min(16 * repeats, int(repeats * self.sample_seconds / 8 / elapsed)))
        repeats = max(1, math.ceil(repeats * self.sample_seconds / 4 / elapsed))

        def sample() -> float:
            shorter, longer = run(repeats), run(3 * repeats)
            # The difference can be negative or 0 if noise exceeds the time of the runs. Use the mean of the longer run
            # then.
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
        """Time a chain of calls of an operation: one call for each element of `owns`, in order.

        Args:
          call, owns, carried, shared: see `Call`. `carried` is donated.
          options: additional compiler options, used on a GPU only.
        """
        on_gpu = jax.default_backend() == "gpu"
        kernels = _kernel_times(call, carried, shared, owns) if self.kernels and on_gpu else None
        timing, _ = self.time(Chain(call, options), owns, carried=carried, shared=shared)
        return dataclasses.replace(timing, kernels=kernels)

    def time(self, chain: Chain, owns: Sequence[Any], *, carried: Any = None, shared: Any = None) -> tuple[Timing, Any]:
        """Time a chain like `chain`. A chain that was timed before is not compiled again for arguments of equal shapes.

        Returns:
          The measurement, and the state after the last call, because `carried` is donated.
        """
        runs = _Runs(chain, carried, shared, owns)
        runs.run(2)  # the second run of a program records its CUDA graph
        seconds, repeats = self.take(runs.run)
        samples = [s / len(owns) for s in seconds]
        host = runs.host_seconds() / len(owns) if jax.default_backend() == "gpu" else None
        method = f"program of {len(owns)} calls, wall time, slope"
        return Timing(samples, repeats * len(owns), method, None, runs.first_output(), host), runs.carried

    def graph(self, calls: Sequence[Callable[[], Any]], *, compared: bool = False) -> Timing:
        """Time torch calls that one CUDA graph runs in order.

        Args:
          compared: whether to store the result of the first call, for a comparison with other implementations.
        """
        torch: Any = importlib.import_module("torch")  # an optional dependency, for baselines
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


class Chain:
    """Chain of calls of an operation, compiled for the arguments of its first run or by `compile_chains`."""

    def __init__(self, call: Call, options: Mapping[str, Any] | None = None):
        """Compile nothing. Arguments as in `Stopwatch.chain`."""
        self.function = _chain(call)
        options = SERIAL | dict(options or {}) if jax.default_backend() == "gpu" else {}
        self.run: Callable[..., tuple[Any, Any]] = jax.jit(
            lambda outputs, carried, shared, owns: self.function(carried, shared, owns),
            donate_argnums=(0, 1),
            keep_unused=True,  # else the donated outputs have no buffers to write to
            compiler_options=options,
        )

    def outputs(self, carried: Any, shared: Any, owns: Sequence[Any]) -> Any:
        """Return the shapes of the outputs of all calls. Arguments may be shapes."""
        return jax.eval_shape(self.function, carried, shared, owns)[0]


def compile_chains(chains: Sequence[tuple[Chain, Any, Any, Sequence[Any]]]) -> None:
    """Compile chains for their arguments (carried, shared, owns) in parallel. Compiled chains are left out."""

    def lowered(chain: Chain, *arguments: Any) -> jax.stages.Lowered:
        run: Any = chain.run
        return run.lower(chain.outputs(*arguments), *arguments)

    with ThreadPoolExecutor() as threads:
        futures = [
            (chain, threads.submit(lowered(chain, *arguments).compile))
            for chain, *arguments in chains
            if not isinstance(chain.run, jax.stages.Compiled)
        ]
        for chain, future in futures:
            chain.run = future.result()


class _Runs:
    """A chain, and the outputs of its newest run, which are donated to the next run."""

    def __init__(self, chain: Chain, carried: Any, shared: Any, owns: Sequence[Any]):
        self._outputs = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), chain.outputs(carried, shared, owns))
        self.carried, self._shared, self._owns, self._run = carried, shared, owns, chain.run

    def run(self, repeats: int) -> float:
        """Run the chain `repeats` times. Return the seconds until the last run ends."""
        began = time.perf_counter()
        self._queue(repeats)
        jax.block_until_ready((self._outputs, self.carried))
        return time.perf_counter() - began

    def host_seconds(self) -> float:
        """Return the seconds of the host to queue one run, while no earlier run is pending on the device."""
        began = time.perf_counter()
        self._queue(4)
        took = time.perf_counter() - began
        jax.block_until_ready((self._outputs, self.carried))
        return took / 4

    def _queue(self, repeats: int) -> None:
        for _ in range(repeats):
            self._outputs, self.carried = self._run(self._outputs, self.carried, self._shared, self._owns)

    def first_output(self) -> np.ndarray | None:
        """Return the output of the first call in float32; None if it is not a single array."""
        output = self._outputs[0]
        return np.asarray(output.astype(jnp.float32)) if isinstance(output, jax.Array) else None


def _chain(call: Call) -> Callable[[Any, Any, Sequence[Any]], tuple[list[Any], Any]]:
    """Return a function that calls `call` for each element of `owns`. `call` is jitted, so that JAX traces and lowers
    it once for all elements.
    """
    once = jax.jit(call)

    def chain(carried: Any, shared: Any, owns: Sequence[Any]) -> tuple[list[Any], Any]:
        outputs = []
        for own in owns:
            carried, output = once(carried, shared, own)
            outputs.append(output)
        return outputs, carried

    return chain


def _kernel_times(call: Call, carried: Any, shared: Any, owns: Sequence[Any]) -> dict[str, float]:
    """Return the seconds per call by kernel name.

    Nothing is donated here, so XLA copies arrays before a kernel updates them in place. These copies are not in the
    result, because they are memory copies and not kernels.
    """
    from jax.experimental.mosaic.gpu import profiler  # available on Linux only

    _, launches = profiler.measure(jax.jit(_chain(call)), aggregate=False)(carried, shared, owns)
    return {name: seconds / len(owns) for name, seconds in _seconds_by_name(launches or ()).items()}


def kernels_of(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds by kernel name of one call of `run`, which waits for the device; empty without a GPU.

    Launches are counted that CUPTI sees between the start and the end of the call.
    """
    if jax.default_backend() != "gpu":
        return {}
    from jax.experimental.mosaic.gpu import profiler  # available on Linux only

    extension: Any = getattr(profiler.mosaic_gpu_lib, "_mosaic_gpu_ext", None)
    if extension is None:
        return {}
    extension._cupti_init()
    try:
        run()
    finally:
        launches = extension._cupti_get_timings(True)
    return _seconds_by_name(launches or ())


def _seconds_by_name(launches: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the seconds of all launches of each kernel, given (name, milliseconds) of each launch."""
    total: dict[str, float] = {}
    for name, milliseconds in launches:
        total[name] = total.get(name, 0.0) + milliseconds / 1e3
    return total
