"""Metrics of the server in the text format of Prometheus, served at /metrics.

The names follow vLLM, with the prefix `pallas_attn_`. Counters end with `_total`; histograms have the suffixes
`_bucket`, `_sum` and `_count`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from pallas_attn.models.engine import EngineStats
from pallas_attn.models.server.messages import EngineState

PREFIX = "pallas_attn"

_LATENCY = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "kv_cache_usage_perc": (
        "Share of the cache pages that requests own, from 0 to 1.",
        lambda stats: stats.used_pages / stats.num_pages,
    ),
    "prefix_cache_hit_rate": (
        "Share of prompt tokens found in the prefix cache, from 0 to 1.",
        lambda stats: stats.prefix_hit_rate,
    ),
    "num_gpu_blocks": ("Number of cache pages.", lambda stats: stats.num_pages),
    "num_preemptions": ("Preemptions since the start.", lambda stats: stats.preemptions),
    "engine_steps": ("Steps of the engine since the start.", lambda stats: stats.num_steps),
    "compiled_step_shapes": (
        "Shapes of steps whose programs are compiled and used.",
        lambda stats: stats.compilations,
    ),
    "pending_step_shapes": (
        "Shapes of steps that are compiled in the background.",
        lambda stats: stats.pending_compilations,
    ),
    "failed_step_shapes": (
        "Shapes of steps whose compilation in the background failed.",
        lambda stats: stats.failed_compilations,
    ),
}
"""State of the engine: text and value of each metric."""

PREFILL_GAUGES = {
    "prefill_workers": "Connected prefill workers.",
    "prefill_prompts_pending": "Prompts that prefill workers compute, or that wait for them.",
    "prefill_prompts_sent": "Prompts sent to prefill workers since the start.",
    "prefill_failures": "Lost prefill workers and failed connections since the start.",
}
"""State of `PrefillWorkers`: text of each metric. Without workers, the values are 0."""


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

        def made(kind: type[Counter | Gauge], name: str, text: str) -> Any:
            return kind(f"{PREFIX}_{name}", text, ["model_name"], registry=self.registry).labels(model)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            histogram = Histogram(f"{PREFIX}_{name}", text, model, bounds)
            self.registry.register(histogram)
            return histogram

        self.running = made(Gauge, "num_requests_running", "Requests that have received a token and have not ended.")
        self.waiting = made(Gauge, "num_requests_waiting", "Accepted requests without a token.")
        texts = {name: text for name, (text, _) in ENGINE_GAUGES.items()} | PREFILL_GAUGES
        self._of_engine = {name: made(Gauge, name, text) for name, text in texts.items()}
        self.prompt_tokens = made(Counter, "prompt_tokens", "Prompt tokens of accepted requests.")
        self.queried_tokens = made(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cached_tokens = made(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = made(Counter, "generation_tokens", "Generated tokens.")
        self.engine_errors = made(Counter, "engine_errors", "Steps that raised an exception.")
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
        for name, value in state.items():
            self._of_engine[name].set(value)
        return generate_latest(self.registry)
