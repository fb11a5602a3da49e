"""One run of a benchmark of an operation: measure each contender (implementation or baseline) in each case."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.harness.case import Bench, Case, noting_configs
from scripts.bench.harness.device import Rates
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.timing import Stopwatch

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"

OPERATIONS = (
    "paged_decode",
    "plan_decode",
    "merge_states",
    "write_kv",
    "mla_decode",
    "ragged_attention",
    "paged_prefill",
    "mla_prefill",
    "write_latent",
    "gather_latent",
    "mla_sparse",
    "index_top_k",
    "compress_and_write",
    "hyper_connection_weights",
    "sparse_layer",
    "cascade_decode",
    "ragged_paged_attention",
    "jax_paged_attention",
)
"""Operations with a benchmark: names of the modules in scripts/bench/ops that have a `BENCH`."""

ABSENT = (ImportError, NotImplementedError, ExceptionGroup)
"""Exceptions of a contender that is not installed (ImportError) or does not support a case (the others)."""
FAILURES = (AttributeError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that other projects' code may raise when it fails."""


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of a benchmark.

    Attributes:
      bench: benchmark of the operation.
      contenders: names of the measured contenders.
      stopwatch: settings of the measurement.
      rates: measured rates of the device, for the roofline.
        pools: owner of the page pool, which cases share.
    """

    bench: Bench
    contenders: list[str]
    stopwatch: Stopwatch
    rates: Rates
    pools: Pools = dataclasses.field(default_factory=Pools)

    def run(self, case: Case) -> dict[str, Any]:
        """Measure all contenders in one case. Return the entry of the report."""
        floor = self.rates.floor(case.num_bytes, case.flops)
        bound = "memory" if case.num_bytes / self.rates.copy == floor else "math"
        report: dict[str, Any] = {"case": case.name, "bytes": case.num_bytes, "flops": case.flops, "bound": bound}
        report |= {"floor_us": 1e6 * floor, "arguments": dataclasses.asdict(case)}  # pyrefly: ignore[bad-argument-type]
        try:
            inputs = self.bench.inputs(case, self.pools)
        except (MemoryError, *FAILURES) as error:
            return report | {"skipped": reason(error)}
        outputs: dict[str, np.ndarray] = {}
        results = {name: self.attempt(name, case, inputs, floor, outputs) for name in self.contenders}
        return report | {"results": results}

    def attempt(
        self, name: str, case: Case, inputs: Any, floor: float, outputs: dict[str, np.ndarray]
    ) -> dict[str, Any]:
        """Measure one contender. Return its times, or the reason why it has none.

        Args:
          floor: roofline time of the case in seconds.
          outputs: outputs of the contenders that were measured before, by name. The output of this contender is added.
        """
        began = time.perf_counter()
        try:
            with noting_configs() as noted:
                timing = self.bench.contenders[name](case, inputs, self.stopwatch)
        except ABSENT as error:
            return {"absent": reason(error)}
        except FAILURES as error:
            return {"error": reason(error)}
        bandwidth, arithmetic = case.num_bytes / timing.median, case.flops / timing.median
        entry = {"fraction_of_floor": floor / timing.median, "took_s": time.perf_counter() - began}
        entry |= {"bytes_per_s": bandwidth, "fraction_of_copy": bandwidth / self.rates.copy}
        entry |= {"flops_per_s": arithmetic, "fraction_of_matrix": arithmetic / self.rates.matrix}
        if timing.output is not None:
            entry |= differences(timing.output, outputs)
            outputs[name] = timing.output
        configs = {op: dataclasses.asdict(config) for op, config in noted.items()}
        return timing.fields() | entry | ({"config": configs} if configs else {})


def differences(output: np.ndarray, others: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the maximum difference from the first of the other outputs. A large one reveals a contender that computes
    something else.
    """
    for name, other in others.items():
        distance, largest = np.abs(output.reshape(other.shape) - other).max(), np.abs(other).max()
        return {"compared_with": name, "largest_difference": float(distance), "largest_value": float(largest)}
    return {}


def reason(error: BaseException) -> str:
    """Describe an exception in at most about 300 characters. An exception group is described by its members."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(reason(part) for part in error.exceptions)
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return text if isinstance(error, (NotImplementedError, MemoryError)) else f"{type(error).__name__}: {text}"


def cases_until(end: float, cases: list[Any]) -> Iterator[Any]:
    """Yield cases until `time.perf_counter()` reaches `end`."""
    for case in cases:
        if time.perf_counter() >= end:
            return
        yield case


def load(operation: str) -> Bench:
    return importlib.import_module(f"scripts.bench.ops.{operation}").BENCH
