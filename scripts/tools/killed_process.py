"""Kill one of two processes that decode together, and measure how the other process ends.

    python -m scripts.tools.killed_process [--step 100] [--kill 1] [--mesh tensor=2] [--json OUT]

Both processes run scripts/run_decode.py with a small random model. On a machine with GPUs each process has one GPU. The
killed process sends SIGKILL to itself before a step, while collective operations of the previous step are running.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.harness.device import description, driver
from scripts.cli.command_line import Failure, UsageError, check_outputs, exit_status, write_report

PROG = "killed_process"
ROOT = Path(__file__).resolve().parents[2]

KILLED = """
import os, signal, sys, time
from pathlib import Path
from models.engine import Engine
from scripts.cli.output_files import output_file
from scripts.run_decode import main

right, steps = Engine.step, 0

def step(engine):
    global steps
    steps += 1
    if steps == int(sys.argv[1]):
        with output_file(Path(sys.argv[2])) as file:
            file.write(repr(time.time()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    return right(engine)

Engine.step = step
sys.exit(main(sys.argv[3:]))
"""
"""Program of the killed process. Its arguments are the step, a file for the time, and the arguments of run_decode."""


@dataclasses.dataclass(frozen=True)
class Survivor:
    """End of the surviving process.

    Attributes:
      status: its exit status.
      seconds: from the death of the killed process to its end.
      line: its last line on standard error.
    """

    status: int
    seconds: float
    line: str


def command(options: argparse.Namespace, port: int) -> list[str]:
    """Arguments of run_decode for both processes."""
    mesh = ["--mesh", options.mesh, "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    sizes = ["--max-num-seqs", "4", "--max-batched-tokens", "64", "--max-tokens", str(options.step + 400)]
    ends = ["--ignore-eos", "--process-timeout", f"{options.timeout:g}"]
    return ["--random", options.model, "--dtype", options.dtype, *mesh, *sizes, *ends]


def environment(index: int) -> dict[str, str]:
    """Environment of a process: one GPU if the machine has GPUs, else one CPU device."""
    if driver() is None:
        return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"CUDA_VISIBLE_DEVICES": str(index), "PYTHONPATH": path}


def run(options: argparse.Namespace) -> int:
    if options.kill not in (0, 1) or options.step < 2:
        raise UsageError("--kill is 0 or 1, --step at least 2")
    check_outputs({"--json": options.json})
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        arguments, died = command(options, free.getsockname()[1]), Path(folder, "died")
        free.close()
        programs = [[str(ROOT / "scripts" / "run_decode.py")]] * 2
        programs[options.kill] = ["-c", KILLED, str(options.step), str(died)]
        started = [
            subprocess.Popen(
                [sys.executable, *program, *arguments, "--process-id", str(index)],
                env=environment(index),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, program in enumerate(programs)
        ]
        try:
            ended = watch(started[1 - options.kill], died, options.limit)
        finally:
            for process in started:
                process.kill()
                process.communicate()
    print(f"status {ended.status}, {ended.seconds:.1f} s after process {options.kill} was killed: {ended.line}")
    if options.json is not None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # query the card without allocating memory
        write_report("--json", options.json, report(options, ended))
    return 0


def watch(left: subprocess.Popen[str], died: Path, limit_s: float) -> Survivor:
    """Wait until the surviving process ends.

    Raises:
      Failure: it does not end within the limit, or no process was killed before.
    """
    try:
        _, said = left.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"the surviving process did not end within {limit_s:g} s") from expired
    ended_s = time.time()
    lines = said.strip().splitlines() or [""]
    if not died.exists():
        raise Failure(f"it ended with status {left.returncode} before the other was killed: {lines[-1]}")
    return Survivor(left.returncode, ended_s - float(died.read_text()), lines[-1])


def report(options: argparse.Namespace, ended: Survivor) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("model", "dtype", "mesh", "step", "kill", "timeout")}
    return description() | {"workload": given, "result": dataclasses.asdict(ended)}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-tiny", help="model of run_decode's --random (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--mesh", default="tensor=2", help="mesh of two devices (default: %(default)s)")
    parser.add_argument(
        "--step", type=int, default=100, help="step before which the process is killed (default: %(default)s)"
    )
    parser.add_argument("--kill", type=int, default=1, help="number of the killed process (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=4.0, help="--process-timeout of both processes (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="time limit in seconds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the result")
    return exit_status(PROG, lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
