"""The processes that --coordinator, --num-processes and --process-id ask for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator

from models.engine import ProcessError, Processes
from scripts.cli.command_line import FAILED, Failure, UsageError, as_failure

FLAGS = ("coordinator", "num_processes", "process_id")


def add_processes(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 lets the others find it; the mesh then has the devices of all processes",
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="number of this one, from 0")
    group.add_argument(
        "--process-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds without a sign of life, or behind the others, after which a process counts as failed (default:"
        " %(default)g)",
    )


def check_processes(options: argparse.Namespace) -> None:
    """Raises UsageError for options that are wrong by themselves or together."""
    given = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(options, name) is not None]
    if not given:
        return
    if len(given) < len(FLAGS) or options.mesh is None:
        raise UsageError("--coordinator, --num-processes, --process-id and --mesh: expected all or only the last")
    host, _, port = options.coordinator.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(f"--coordinator: expected HOST:PORT, got {options.coordinator!r}")
    if options.num_processes < 1:
        raise UsageError(f"--num-processes: expected at least 1, got {options.num_processes}")
    if not 0 <= options.process_id < options.num_processes:
        raise UsageError(
            f"--process-id: expected 0 to {options.num_processes - 1}, since there are {options.num_processes}"
            f" processes; got {options.process_id}"
        )
    if not 1 <= options.process_timeout < float("inf"):
        raise UsageError(f"--process-timeout: expected at least 1, got {options.process_timeout:g}")


@dataclasses.dataclass
class Joined:
    """Membership of this process among others, and how it ended.

    Attributes:
      prog: name of the command.
      alone: whether this process ends without the others, so that computations with them may never come to an end.
    """

    prog: str
    alone: bool = False

    @contextlib.contextmanager
    def processes(self, options: argparse.Namespace) -> Iterator[Processes | None]:
        """Joins the other processes, and ends together with them; None without others.

        Raises:
          Failure: the others cannot be joined, or one has failed.
        """
        if options.coordinator is None:
            yield None
            return
        with as_failure(ProcessError):
            processes = Processes(
                options.coordinator,
                options.num_processes,
                options.process_id,
                timeout_s=options.process_timeout,
                give_up=functools.partial(_give_up, self.prog),
            )
            try:
                yield processes
                processes.leave()
            except BaseException as error:
                self.alone = True
                processes.leave(_reason(error))
                raise

    def end(self, status: int) -> int:
        """Returns the exit status; but a process that ends without the others ends here, waiting for nothing."""
        if self.alone:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status


def writes(processes: Processes | None) -> bool:
    """Whether this process prints and writes the results."""
    return processes is None or processes.index == 0


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {error}"


def _give_up(prog: str, reason: str) -> None:
    print(f"{prog}: error: {reason}", file=sys.stderr, flush=True)
    os._exit(FAILED)
