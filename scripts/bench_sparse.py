"""Measure sparse and dense decoding over long contexts with 16-bit and fp8 caches.

    python scripts/bench_sparse.py [--cases 16x32768 16x131072] [--caches bfloat16 fp8]

scripts/bench/engine/filled.py describes the measurement. Weights and cache contents are random; no prompt is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import check_outputs, exit_status
from pallas_attn.models.decoder import AttentionSettings
from scripts.bench.engine import filled
from scripts.bench.engine.filled import CACHES, FilledWork
from scripts.bench.harness.device import description
from scripts.bench.harness.report import report_each

PROG = "bench_sparse"


def case(text: str) -> tuple[int, int]:
    """Parse BATCHxCONTEXT."""
    batch, _, context = text.partition("x")
    return int(batch), int(context)


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, FilledWork]:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.partition(":")[0])
    parser.add_argument("--config", choices=filled.CONFIGS, default="v32-2-layers", help="default: %(default)s")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=case,
        default=[(16, 32768), (16, 131072)],
        metavar="BATCHxCONTEXT",
        help="default: 16x32768 16x131072",
    )
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, default=["bfloat16", "fp8"], help="default: bfloat16 fp8"
    )
    parser.add_argument("--new-tokens", type=int, default=48, help="new tokens per request (default: 48)")
    parser.add_argument("--page-size", type=int, default=64, help="default: 64")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--implementation", help="implementation of attention (default: the best on this device)")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each case")
    args = parser.parse_args(argv)
    try:
        caches = tuple(CACHES[name] for name in args.caches)
        return args, FilledWork(args.config, tuple(args.cases), caches, args.new_tokens, args.page_size)
    except ValueError as error:
        parser.error(str(error))


def run(argv: list[str] | None) -> int:
    args, work = parse_args(argv)
    check_outputs({"--json": args.json})
    report = description() | {"dtype": args.dtype, "workload": dataclasses.asdict(work)}
    settings = AttentionSettings(implementation=args.implementation)
    report_each(filled.run(work, settings, args.dtype, args.limit_seconds), filled.line, report, args.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if not os.environ.keys() & {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"  # read when jax initializes the device
    return exit_status(PROG, lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
