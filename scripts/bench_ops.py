"""Measures operations on this device: ours and others' implementations, beside what the device can do at most.

    python scripts/bench_ops.py paged_decode --grid gqa-quick [--limit-seconds 90] [--contenders mosaic xla ...]

Copy bandwidth and matrix rate are measured first, in the same run. They give each case a floor: the time of moving the
bytes that have to be moved, or of the arithmetic, whichever is longer. A result's fraction is floor / time. How times
are taken is told in scripts/bench/timing.py. A case that fails, or a contender that cannot be had here, is reported
with the reason, and the rest goes on; the report is written after each case, so that a run may end at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need memory of the same card

import numpy as np
from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn import tuning
from scripts.bench.harness.case import Bench, Case, noting_configs
from scripts.bench.harness.device import Rates, description, measure_rates
from scripts.bench.harness.plot import plot_report
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.report import cache_ratios, results_table, summary
from scripts.bench.harness.timing import Stopwatch

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

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
)
"""Each has a module of its name in scripts/bench, with a `BENCH`."""

ABSENT = (ImportError, NotImplementedError, ExceptionGroup)
"""What a contender that cannot take part raises."""
FAILURES = (AttributeError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What the code of others may raise that does not work."""


@dataclasses.dataclass(frozen=True)
class Session:
    """One run.

    Attributes:
      bench: the operation.
      contenders: names of those that are asked.
      stopwatch: how much is measured.
      rates: of the device.
    """

    bench: Bench
    contenders: list[str]
    stopwatch: Stopwatch
    rates: Rates
    pools: Pools = dataclasses.field(default_factory=Pools)

    def run(self, case: Case) -> dict[str, Any]:
        """A case of the report."""
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
        """One contender's entry: what was measured, or why there is nothing.

        Args:
          outputs: of those before it, by name; its own is added.
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
    """How far an output is from the first of the others, so that nobody is praised for computing something else."""
    for name, other in others.items():
        distance, largest = np.abs(output.reshape(other.shape) - other).max(), np.abs(other).max()
        return {"compared_with": name, "largest_difference": float(distance), "largest_value": float(largest)}
    return {}


def reason(error: BaseException) -> str:
    """An exception in a few words, with those of a group."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(reason(part) for part in error.exceptions)
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return text if isinstance(error, (NotImplementedError, MemoryError)) else f"{type(error).__name__}: {text}"


def cases_until(end: float, cases: list[Any]) -> Iterator[Any]:
    """The cases that are reached before a time of `time.perf_counter`."""
    for case in cases:
        if time.perf_counter() >= end:
            return
        yield case


def write(path: Path, report: dict[str, Any]) -> None:
    """All of it or nothing: who ends the run while it is written finds the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    draft.replace(path)


def load(operation: str) -> Bench:
    return importlib.import_module(f"scripts.bench.{operation}").BENCH


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS, metavar="OP", help=", ".join(OPERATIONS))
    parser.add_argument("--grid", default="small", help="default: small, which any machine can run")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--match", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="begin no case after this")
    parser.add_argument("--samples", type=int, default=Stopwatch.samples)
    parser.add_argument("--sample-seconds", type=float, default=Stopwatch.sample_seconds)
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel, from CUPTI")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: benchmarks/results/OP_<device>.json")
    args = parser.parse_args(argv)
    bench = load(args.operation)
    if args.grid not in bench.grids:
        parser.error(f"--grid: {args.operation} has {', '.join(bench.grids)}; got {args.grid!r}")
    if unknown := set(args.contenders or ()) - set(bench.contenders):
        parser.error(f"--contenders: {args.operation} has {', '.join(bench.contenders)}; got {', '.join(unknown)}")
    if args.samples < 1 or args.sample_seconds <= 0:
        parser.error("--samples is at least 1, and --sample-seconds above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    began, console, bench = time.perf_counter(), Console(), load(args.operation)
    console.width = max(console.width, 160)
    stopwatch = Stopwatch(args.sample_seconds, args.samples, args.kernels)
    rates = measure_rates(stopwatch)
    console.print(f"copy {rates.copy / 1e12:.2f} TB/s, bf16 product {rates.matrix / 1e12:.1f} TFLOP/s")
    session = Session(bench, args.contenders or list(bench.contenders), stopwatch, rates)
    cases = [case for case in bench.grids[args.grid] if (args.match or "") in case.name]
    out = args.json or RESULTS / f"{args.operation}_{tuning.device_name()}.json"
    report = description() | {"operation": args.operation, "grid": args.grid, "rates": dataclasses.asdict(rates)}
    report |= {"complete": False, "cases": []}
    write(out, report)
    for case in cases_until(began + args.limit_seconds, cases):
        report["cases"].append(session.run(case))
        report["complete"] = len(report["cases"]) == len(cases)
        report["seconds"] = time.perf_counter() - began
        write(out, report)
        console.print(summary(report["cases"][-1]), highlight=False, soft_wrap=True)
    console.print(results_table(report))
    for line in cache_ratios(report):
        console.print(line, highlight=False)
    picture = out.with_suffix(".png")
    try:
        plot_report(picture, report)
        console.print(f"drawn in {picture}")
    except ImportError as missing:
        console.print(f"not drawn: {missing}")
    console.print(f"{len(report['cases'])} of {len(cases)} cases, written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
