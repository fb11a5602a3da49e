"""Metrics of the server in the text format of Prometheus, served at /metrics.

The names follow vLLM, with the prefix `pallas_attn_`. Counters end with `_total`; histograms have the suffixes
`_bucket`, `_sum` and `_count`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

PREFIX = "pallas_attn"

_LATENCY = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


@dataclasses.dataclass(frozen=True)
class EngineState:
    """State of the engine after a step.

    Attributes:
      kv_cache_usage: share of the cache pages that requests own, from 0 to 1.
      prefix_hit_rate: share of prompt tokens that were found in the prefix cache, from 0 to 1.
      num_pages: number of all cache pages.
      preemptions: number of preemptions since the start.
      steps: number of steps since the start.
      compiled_shapes: number of step shapes whose programs steps use.
      pending_shapes: number of step shapes that are compiled in the background.
      failed_shapes: number of step shapes whose compilation in the background failed.
    """

    kv_cache_usage: float = 0.0
    prefix_hit_rate: float = 0.0
    num_pages: int = 0
    preemptions: int = 0
    steps: int = 0
    compiled_shapes: int = 0
    pending_shapes: int = 0
    failed_shapes: int = 0


class Histogram:
    """Histogram of one thread, which needs no lock, unlike prometheus_client's histogram.

    Args:
      name: name of the metric.
      text: its description.
      model: value of the label `model_name`.
      bounds: inclusive upper bounds of the buckets, ascending. A further bucket has no bound.
    """

    def __init__(self, name: str, text: str, model: str, bounds: tuple[float, ...]):
        self._name, self._text, self._model, self._bounds = name, text, model, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric for `CollectorRegistry`."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric([self._model], [*zip(ends, itertools.accumulate(self._counts), strict=True)], self._sum)
        yield family


class Metrics:
    """Metrics of one server, with the names of docs/server.md. All methods run on the event loop.

    Args:
      model: value of the label `model_name` of all metrics but `http_requests`.
    """

    def __init__(self, model: str):
        disable_created_metrics()  # times of creation, which Prometheus does not need
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"{PREFIX}_{name}", text, ["model_name"], registry=self.registry).labels(model)

        def counter(name: str, text: str) -> Any:
            return Counter(f"{PREFIX}_{name}", text, ["model_name"], registry=self.registry).labels(model)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(f"{PREFIX}_{name}", text, model, bounds)
            self.registry.register(made)
            return made

        self.running = gauge("num_requests_running", "Requests that have received a token and have not ended.")
        self.waiting = gauge("num_requests_waiting", "Accepted requests without a token.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the cache pages that requests own, from 0 to 1.")
        self._hit_rate = gauge("prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache.")
        self._pages = gauge("num_gpu_blocks", "Number of cache pages.")
        self._preemptions = gauge("num_preemptions", "Preemptions since the start.")
        self._steps = gauge("engine_steps", "Steps of the engine since the start.")
        self._compiled = gauge("compiled_step_shapes", "Shapes of steps whose programs are compiled and used.")
        self._pending = gauge("pending_step_shapes", "Shapes of steps that are compiled in the background.")
        self._failed = gauge("failed_step_shapes", "Shapes of steps whose compilation in the background failed.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.queried_tokens = counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self.cached_tokens = counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.engine_errors = counter("engine_errors", "Steps that raised an exception.")
        self._finished = Counter(
            f"{PREFIX}_request_success",
            "Outputs that have ended, by reason: stop, length, abort or error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._responses = Counter(
            f"{PREFIX}_http_requests", "HTTP responses.", ["path", "status"], registry=self.registry
        )
        self.latency = histogram("e2e_request_latency_seconds", "From the arrival to the last token.", _LATENCY)
        self.first_token = histogram("time_to_first_token_seconds", "From the arrival to the first token.", _FIRST)
        self.between_tokens = histogram("inter_token_latency_seconds", "Time between tokens.", _BETWEEN)
        self._model = model
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model, reason)

    def finished(self, reason: str) -> None:
        """Count an output that has ended."""
        self._finished.labels(self._model, reason).inc()

    def responded(self, path: str, status: int) -> None:
        """Count a response. `path` is the path of a route, so that the number of labels is bounded."""
        self._responses.labels(path, str(status)).inc()

    def text(self, state: EngineState) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        self._usage.set(state.kv_cache_usage)
        self._hit_rate.set(state.prefix_hit_rate)
        self._pages.set(state.num_pages)
        self._preemptions.set(state.preemptions)
        self._steps.set(state.steps)
        self._compiled.set(state.compiled_shapes)
        self._pending.set(state.pending_shapes)
        self._failed.set(state.failed_shapes)
        return generate_latest(self.registry)
