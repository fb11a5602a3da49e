"""Compare the engine on several devices with one device: `python scripts/bench_mesh.py --mesh none data=2 tensor=2`.

scripts/bench/engine/several_devices.py describes the measurement. With --coordinator, --num-processes and --process-id,
the model runs in several processes with separate devices, as with scripts/run_decode.py. Process 0 prints and writes
the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import (
    UsageError,
    as_failure,
    as_usage_error,
    check_outputs,
    decimal,
    exit_status,
    write_report,
)
from pallas_attn.models.cli.mesh import parse_mesh
from pallas_attn.models.cli.processes import Joined, add_processes, check_processes, writes
from pallas_attn.models.decoder import AttentionSettings, device_part, make_mesh
from pallas_attn.models.engine import ProcessError, Processes
from scripts.bench.engine import several_devices
from scripts.bench.engine.several_devices import CONFIGS, SPLIT_DECODES, MeshWork, SplitDecode
from scripts.bench.harness.device import description, measure_rates
from scripts.bench.harness.timing import Stopwatch

PROG = "bench_mesh"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.partition("\n")[0])
    parser.add_argument("--config", choices=CONFIGS, default="v2-lite", help="default: %(default)s")
    parser.add_argument(
        "--mesh", nargs="*", default=["none"], metavar="AXIS=N[,AXIS=N...]", help="layouts; none is one device"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[64], help="simultaneous requests (default: 64)")
    parser.add_argument("--per-device", action="store_true", help="--batch is per device")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024], help="tokens per prompt (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=64, help="at least 2 (default: 64)")
    parser.add_argument(
        "--step-tokens", type=int, default=4096, help="maximum tokens of a step on each data rank (default: 4096)"
    )
    parser.add_argument(
        "--most-tokens", type=int, metavar="N", help="skip cases with more prompt tokens in total (default: none)"
    )
    parser.add_argument("--exchanges", action="store_true", help="also time an all-reduce and an all-to-all")
    parser.add_argument(
        "--operation",
        nargs="*",
        type=split_decode,
        metavar="BATCHxTOKENS",
        help="also time latent decode over split contexts, of BATCH sequences with TOKENS cached tokens each"
        f" (default: {' '.join(f'{work.batch}x{work.context}' for work in SPLIT_DECODES)})",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each case")
    add_processes(parser.add_argument_group("several processes"))
    args = parser.parse_args(argv)
    if min(*args.batch, *args.contexts, args.step_tokens) < 1 or args.new_tokens < 2:
        parser.error("--batch, --contexts and --step-tokens are at least 1, --new-tokens 2")
    if args.most_tokens is not None and args.most_tokens < min(args.batch) * min(args.contexts):
        parser.error(f"--most-tokens: expected at least the tokens of the smallest case, got {args.most_tokens}")
    try:
        check_processes(args)
        args.layouts = tuple({} if given == "none" else parse_mesh(given) or {} for given in args.mesh)
    except UsageError as error:
        parser.error(str(error))
    if args.coordinator is not None and (args.exchanges or args.operation is not None or not all(args.layouts)):
        parser.error("--coordinator: expected layouts of a mesh, without --exchanges and --operation")
    if args.operation is not None:
        args.operation = args.operation or SPLIT_DECODES
    return args


def split_decode(given: str) -> SplitDecode:
    """Parse a value of --operation."""
    batch, context = (decimal(count) for count in given.partition("x")[::2])
    if not (batch and context):
        raise argparse.ArgumentTypeError(f"expected BATCHxTOKENS, such as 16x131072, got {given!r}")
    return SplitDecode(batch, context)


def run(args: argparse.Namespace, processes: Processes | None) -> int:
    for layout in filter(None, args.layouts):
        with as_usage_error(ValueError, NotImplementedError, prefix="--mesh: "):
            device_part(CONFIGS[args.config], make_mesh(layout))
    for operation in args.operation or ():
        with as_usage_error(ValueError, prefix="--operation: "):
            operation.check(jax.device_count())
    check_outputs({"--json": args.json if writes(processes) else None})
    console, stopwatch = Console(quiet=not writes(processes)), Stopwatch(samples=3)
    work = MeshWork(
        args.config,
        args.layouts,
        tuple(args.batch),
        tuple(args.contexts),
        args.new_tokens,
        args.per_device,
        args.step_tokens,
        most_tokens=args.most_tokens,
    )
    report: dict[str, Any] = description() | {"devices": jax.device_count(), "dtype": args.dtype}
    report["processes"] = jax.process_count()
    report |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "workload": dataclasses.asdict(work)}
    report["rates"] = dataclasses.asdict(measure_rates(stopwatch))

    def write() -> None:
        if args.json is not None and writes(processes):
            write_report("--json", args.json, report)

    if args.exchanges:
        report["exchanges"] = several_devices.exchanges(stopwatch)
        for found in report["exchanges"]:
            times = f"{found['us']:.1f} us, of the devices {found['device_us']:.1f}"
            console.print(f"{found['exchange']} of {found['rows']} rows: {times}", highlight=False)
        write()
    if args.operation is not None:
        report["mla_decode"] = []
        for operation in args.operation:
            for found in several_devices.decode_over_contexts(operation, stopwatch):
                report["mla_decode"].append(found)
                sizes = f"{operation.batch} x {operation.context} tokens"
                console.print(f"mla_decode, {sizes}, on {found['devices']}: {found['us']:.1f} us", highlight=False)
                write()
    results: list[dict[str, Any]] = []
    report["results"] = results
    with as_failure(ProcessError):
        for result in several_devices.run(work, AttentionSettings(), args.dtype, processes):
            if not results or results[-1] is not result:
                results.append(result)
            console.print(several_devices.line(result), highlight=False, soft_wrap=True)
            write()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if not os.environ.keys() & {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.93"  # before jax initializes the device
    joined = Joined(PROG)
    return joined.end(exit_status(PROG, lambda: _join(parse_args(argv), joined)))


def _join(args: argparse.Namespace, joined: Joined) -> int:
    with joined.processes(args) as processes:
        return run(args, processes)


if __name__ == "__main__":
    sys.exit(main())
