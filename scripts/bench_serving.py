"""Measure latencies while requests arrive at random: `python scripts/bench_serving.py [--config v2-lite]`.

scripts/bench/engine/arrivals.py describes the measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import check_outputs, exit_status
from pallas_attn.models.decoder import AttentionSettings
from scripts.bench.engine import arrivals
from scripts.bench.engine.arrivals import CONFIGS, Arrivals
from scripts.bench.harness.device import description
from scripts.bench.harness.report import report_each

PROG = "bench_serving"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.partition("\n")[0])
    parser.add_argument("--config", choices=CONFIGS, default="v2-lite", help="default: %(default)s")
    parser.add_argument("--rates", nargs="+", type=float, default=[2, 8], help="requests per second (default: 2 8)")
    parser.add_argument("--requests", type=int, default=96, help="requests per rate (default: 96)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="mean; lengths are 0.5 to 1.5 of it")
    parser.add_argument("--new-tokens", type=int, default=128, help="the same")
    parser.add_argument(
        "--step-tokens", nargs="+", type=int, default=[512, 4096], help="maximum tokens of a step (default: 512 4096)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="maximum running requests (default: 64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--implementation", default="auto", metavar="NAME[,NAME...]", help="of attention operations")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each rate")
    args = parser.parse_args(argv)
    if min(*args.step_tokens, args.requests, args.prompt_tokens, args.new_tokens, args.max_num_seqs) < 1:
        parser.error("--requests, --prompt-tokens, --new-tokens, --step-tokens and --max-num-seqs are at least 1")
    if not all(0 < rate < 1e6 for rate in args.rates):
        parser.error("--rates: expected positive numbers")
    if min(args.step_tokens) < args.max_num_seqs:
        parser.error("--step-tokens: expected at least --max-num-seqs, one token per request")
    return args


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json})
    work = Arrivals(
        tuple(args.rates),
        args.requests,
        args.prompt_tokens,
        args.new_tokens,
        tuple(args.step_tokens),
        args.max_num_seqs,
    )
    report: dict[str, Any] = description() | {"config": args.config, "dtype": args.dtype}
    report |= {"workload": dataclasses.asdict(work)}
    named = None if args.implementation == "auto" else tuple(args.implementation.split(","))
    report_each(
        arrivals.run(CONFIGS[args.config], work, AttentionSettings(implementation=named), args.dtype),
        arrivals.line,
        report,
        args.json,
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return exit_status(PROG, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
