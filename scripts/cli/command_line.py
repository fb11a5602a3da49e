"""Errors and exit statuses of command lines: wrong input ends in one line on stderr and status 2, without a traceback,
and a failure despite right input in one line and status 3."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console

WRONG_INPUT, FAILED, INTERRUPTED = 2, 3, 130


class UsageError(Exception):
    """The input is wrong; the message is for the person who gave it."""


class Failure(Exception):
    """The command failed though its input is right; the message is for the person who ran it."""


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError where argparse would print its usage and exit, and takes no abbreviated flags.

    Args:
      description, epilog: printed line by line as they are.
    """

    def __init__(self, prog: str, *, description: str, epilog: str):
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class StandardOutput(Console):
    """Standard output. A closed pipe is a Failure, where rich would end the program with status 1."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails when it flushes at the end
        raise Failure("standard output was closed before everything was printed")


def exit_status(prog: str, command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status, or that of its exception or interrupt. Exceptions other than
    UsageError and Failure are mistakes of the program and print their traceback."""
    try:
        return command()
    except (UsageError, Failure) as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:  # noqa: BLE001  Python would end with status 1, which is a command's own to give a meaning
        traceback.print_exc()
        return FAILED


def as_usage_error(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Converts errors caused by the input to a UsageError."""
    return _turned_into(UsageError, errors, prefix)


def as_failure(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Converts errors not caused by the input to a Failure."""
    return _turned_into(Failure, errors, prefix)


@contextlib.contextmanager
def _turned_into(kind: type[UsageError | Failure], errors: tuple[type[Exception], ...], prefix: str) -> Iterator[None]:
    try:
        yield
    except errors as error:
        parts = [error.message, *error.exceptions] if isinstance(error, ExceptionGroup) else [error]
        reasons = [str(part) or type(part).__name__ for part in parts]  # a MemoryError often says nothing
        raise kind(prefix + "; ".join(reasons)) from error


def check_writable(flag: str, path: Path) -> None:
    """Raises UsageError, naming the flag, if no file can be written at `path`."""
    try:
        if path.is_dir():
            why = "it is a directory"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied"
        else:
            return
    except OSError as error:  # such as a name that is too long
        why = error.strerror
    raise UsageError(f"{flag}: cannot write {path}: {why}")
