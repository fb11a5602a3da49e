"""Measure speculative decoding at given acceptance rates: `python scripts/bench_speculate.py [--config v2-lite]`.

scripts/bench/engine/drafting.py describes the measurement and the bound in the report.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import check_outputs, exit_status
from pallas_attn.models.config import PRESETS, DeepSeekConfig
from pallas_attn.models.decoder import AttentionSettings
from scripts.bench.engine import drafting
from scripts.bench.engine.drafting import DraftingWork
from scripts.bench.harness.device import description
from scripts.bench.harness.report import report_each

PROG = "bench_speculate"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.partition("\n")[0])
    deepseek = [name for name, config in PRESETS.items() if isinstance(config, DeepSeekConfig)]
    parser.add_argument("--config", choices=deepseek, default="v2-lite", help="default: %(default)s")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="default: 1 8")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192], help="default: 1024 8192")
    parser.add_argument("--rates", nargs="+", type=float, default=[0, 0.5, 0.8, 1], help="default: 0 0.5 0.8 1")
    parser.add_argument("--num-drafts", type=int, default=4, help="maximum drafts per row (default: 4)")
    parser.add_argument("--new-tokens", type=int, default=512, help="total measured tokens (default: 512)")
    parser.add_argument("--fixed", action="store_true", help="fixed number of drafts, for any acceptance")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each case")
    args = parser.parse_args(argv)
    if min(*args.batch, *args.contexts, args.num_drafts, args.new_tokens) < 1 or not args.num_drafts <= 64:
        parser.error("--batch, --contexts and --new-tokens are at least 1, --num-drafts from 1 to 64")
    if not all(0 <= rate <= 1 for rate in args.rates):
        parser.error("--rates: expected numbers from 0 to 1")
    return args


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json})
    work = DraftingWork(tuple(args.batch), tuple(args.contexts), tuple(args.rates), args.num_drafts, args.new_tokens)
    report = description() | {"config": args.config, "dtype": args.dtype, "adaptive": not args.fixed}
    report |= {"workload": dataclasses.asdict(work)}
    config = PRESETS[args.config]
    report_each(
        drafting.run(config, work, AttentionSettings(), args.dtype, adaptive=not args.fixed),
        drafting.line,
        report,
        args.json,
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return exit_status(PROG, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
