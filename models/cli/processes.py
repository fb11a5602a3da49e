"""Options for an engine that runs in several processes: --coordinator, --num-processes and --process-id."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator

from pallas_attn.models.cli.command_line import FAILED, Failure, UsageError, as_failure, decimal, integer
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.engine import ProcessError, Processes
from pallas_attn.models.engine.distributed.secret import SecretError

FLAGS = ("coordinator", "num_processes", "process_id")
"""Names of the options that must be given together."""

LONGEST_TIMEOUT = 1e6
"""Maximum of --process-timeout in seconds. `time.sleep` fails with numbers such as 1e30."""


def add_processes(group: argparse._ActionsContainer) -> None:
    """Add the options."""
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address where process 0 listens for the others; the mesh then has the devices of all processes."
        " On several hosts, set PALLAS_ATTN_SECRET to the same secret for all processes",
    )
    group.add_argument("--num-processes", type=integer, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=integer, metavar="I", help="number of this process, from 0")
    group.add_argument(
        "--process-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds after which a process counts as failed if it sends no heartbeat or does not reach the same point"
        " as the other processes (default: %(default)g)",
    )


def check_processes(options: argparse.Namespace) -> None:
    """Raise UsageError if an option or a combination of options is wrong."""
    given = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(options, name) is not None]
    if not given:
        return
    if len(given) < len(FLAGS) or options.mesh is None:
        raise UsageError("--coordinator, --num-processes and --process-id: expected all three and --mesh, or none")
    host, _, port = options.coordinator.rpartition(":")
    if not (host and 0 < (decimal(port) or 0) < 2**16):
        raise UsageError(f"--coordinator: expected HOST:PORT, got {shown(options.coordinator)}")
    if options.num_processes < 1:
        raise UsageError(f"--num-processes: expected at least 1, got {options.num_processes}")
    if not 0 <= options.process_id < options.num_processes:
        raise UsageError(
            f"--process-id: expected 0 to {options.num_processes - 1}, since there are {options.num_processes}"
            f" processes; got {options.process_id}"
        )
    if not 1 <= options.process_timeout <= LONGEST_TIMEOUT:
        raise UsageError(
            f"--process-timeout: expected at least 1 and at most {LONGEST_TIMEOUT:g}, got {options.process_timeout:g}"
        )


@dataclasses.dataclass
class Joined:
    """Connection of this process to the other processes.

    Attributes:
      prog: name of the command, for error messages.
      alone: whether an exception ends this process. Collective operations that this process has started with the other
        processes may then never complete.
    """

    prog: str
    alone: bool = False

    @contextlib.contextmanager
    def processes(self, options: argparse.Namespace) -> Iterator[Processes | None]:
        """Context manager that connects to the other processes, and at the end waits for them. Yields None without
        --coordinator. If the block raises, the other processes are informed of the reason.

        Raises:
          Failure: the other processes cannot be reached, or one of them has failed.
        """
        if options.coordinator is None:
            yield None
            return
        with as_failure(ProcessError, SecretError):
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
        """Return the exit status. If `alone`, exit immediately instead: a normal exit would wait for the device."""
        if self.alone:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status


def writes(processes: Processes | None) -> bool:
    """Return whether this process prints and writes the results: a single process, or process 0."""
    return processes is None or processes.index == 0


def _reason(error: BaseException) -> str:
    """Return the reason that the other processes get for the failure of this process."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {error}"


def _give_up(prog: str, reason: str) -> None:
    """Print the reason and exit immediately, from any thread."""
    print(f"{prog}: error: {reason}", file=sys.stderr, flush=True)
    os._exit(FAILED)
