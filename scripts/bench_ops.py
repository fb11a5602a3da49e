"""Measure one operation on this device: our implementations and baselines, compared with the roofline.

    python scripts/bench_ops.py paged_decode --grid gqa-quick [--limit-seconds 90] [--contenders mosaic xla ...]

A contender is one of our implementations or a baseline, which is a kernel of another project. A grid is a list of
cases.

The run first measures the copy bandwidth and the matrix rate of the device. The floor of a case is the longer of the
times to move its bytes and to do its arithmetic at these rates. The fraction of a result is floor / time.
scripts/bench/harness/timing.py describes the timing.

If a case fails or a baseline is not installed, the report has the reason and the run continues. The report is written
after each case, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for the baselines, which use torch

from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import check_outputs, exit_status, write_report, writing
from pallas_attn.runtime import tuning
from scripts.bench.harness.device import description, measure_rates
from scripts.bench.harness.plot import plot_report
from scripts.bench.harness.report import cache_ratios, results_table, summary
from scripts.bench.harness.session import OPERATIONS, RESULTS, Session, cases_until, load
from scripts.bench.harness.timing import Stopwatch


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS, metavar="OP", help=", ".join(OPERATIONS))
    parser.add_argument("--grid", default="small", help="default: small, for any machine")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--match", nargs="+", metavar="TEXT", default=[""], help="only cases whose name contains one of these"
    )
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--samples", type=int, default=Stopwatch.samples)
    parser.add_argument("--sample-seconds", type=float, default=Stopwatch.sample_seconds)
    parser.add_argument("--kernels", action="store_true", help="also measure the time of each kernel with CUPTI")
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
    return exit_status("bench_ops", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the measurements of the arguments.

    Raises:
      UsageError: the results cannot be written (checked before the run).
      Failure: the results cannot be written after the run.
    """
    out = args.json or RESULTS / f"{args.operation}_{tuning.device_name()}.json"
    picture = out.with_suffix(".png")
    check_outputs({"--json": out, "the picture of --json": picture}, make_folders=True)
    began, console, bench = time.perf_counter(), Console(), load(args.operation)
    console.width = max(console.width, 160)
    stopwatch = Stopwatch(args.sample_seconds, args.samples, args.kernels)
    rates = measure_rates(stopwatch)
    console.print(f"copy {rates.copy / 1e12:.2f} TB/s, bf16 GEMM {rates.matrix / 1e12:.1f} TFLOP/s")
    session = Session(bench, args.contenders or list(bench.contenders), stopwatch, rates)
    cases = [case for case in bench.grids[args.grid] if any(text in case.name for text in args.match)]
    report = description() | {"operation": args.operation, "grid": args.grid, "rates": dataclasses.asdict(rates)}
    report |= {"complete": False, "cases": []}
    write_report("--json", out, report)
    for case in cases_until(began + args.limit_seconds, cases):
        report["cases"].append(session.run(case))
        report["complete"] = len(report["cases"]) == len(cases)
        report["seconds"] = time.perf_counter() - began
        write_report("--json", out, report)
        console.print(summary(report["cases"][-1]), highlight=False, soft_wrap=True)
    console.print(results_table(report))
    for line in cache_ratios(report):
        console.print(line, highlight=False)
    try:
        with writing("the picture of --json", picture) as file:
            plot_report(file, report)
        console.print(f"drawn in {picture}")
    except ImportError as missing:
        console.print(f"not drawn: {missing}")
    console.print(f"{len(report['cases'])} of {len(cases)} cases, written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
