"""Measure a KV-cache transfer between two processes: `python scripts/bench_hand_over.py [--config v2-lite]`.

scripts/bench/engine/hand_over.py describes the measurement. By default, both processes use the same GPU, each with 45%
of its memory. `--prefill-device 1` gives the process that computes prompts another GPU.

    python scripts/bench_hand_over.py --mesh tensor=2 --prefill-mesh tensor=2 --prefill-device 2,3    # four GPUs

With meshes, the pages of a prompt are exported and imported as a whole, because only steps on one device can be
launched layer by layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import UsageError, as_usage_error, check_outputs, exit_status
from pallas_attn.models.cli.mesh import parse_mesh
from pallas_attn.models.decoder import device_part, make_mesh
from scripts.bench.engine import hand_over
from scripts.bench.engine.hand_over import HandOver
from scripts.bench.harness.device import description
from scripts.bench.harness.report import report_each

PROG = "bench_hand_over"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.partition("\n")[0])
    parser.add_argument("--config", choices=hand_over.CONFIGS, default="v2-lite", help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768], help="default: 2048 8192 32768")
    parser.add_argument("--step-tokens", type=int, default=2048, help="maximum tokens of a step (default: 2048)")
    parser.add_argument("--page-size", type=int, default=64, help="default: 64")
    parser.add_argument(
        "--pieces", type=int, default=hand_over.PIECES, help="launches per step with a consumer (default: 4)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="default: 7")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--implementation", help="implementation of attention (default: the best on this device)")
    parser.add_argument("--prefill-device", metavar="N[,N...]", help="GPUs of the second process (default: the same)")
    layout = "AXIS=N[,AXIS=N...]"
    parser.add_argument("--mesh", metavar=layout, help="devices of this process (default: one device)")
    parser.add_argument("--prefill-mesh", metavar=layout, help="devices of the second process (default: one device)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each length")
    args = parser.parse_args(argv)
    if min(*args.lengths, args.step_tokens, args.page_size, args.repeats, args.pieces) < 1:
        parser.error("--lengths, --step-tokens, --page-size, --repeats and --pieces are at least 1")
    for option in ("mesh", "prefill_mesh"):
        try:
            setattr(args, option, parse_mesh(getattr(args, option)) or {})
        except UsageError as error:
            parser.error(str(error).replace("--mesh", f"--{option.replace('_', '-')}"))
    return args


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json})
    if args.prefill_device is None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")  # per process; read when jax initializes
    if args.mesh:
        with as_usage_error(ValueError, NotImplementedError, prefix="--mesh: "):
            device_part(hand_over.CONFIGS[args.config], make_mesh(args.mesh))
    work = HandOver(
        args.config,
        args.dtype,
        args.implementation,
        tuple(args.lengths),
        args.step_tokens,
        args.page_size,
        args.repeats,
        args.pieces,
        args.mesh,
        args.prefill_mesh,
    )
    report = description() | {"workload": dataclasses.asdict(work)}
    apart = [] if args.prefill_device is None else args.prefill_device.split(",")
    report["cards"] = len(apart) + (make_mesh(args.mesh).size if args.mesh else 1)
    run = hand_over.run_on_meshes if work.on_meshes else hand_over.run
    report_each(run(work, args.prefill_device), hand_over.line, report, args.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return exit_status(PROG, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
