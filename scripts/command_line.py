"""What command lines share: wrong input ends in one line on stderr and exit status 2, without a traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

WRONG_INPUT, INTERRUPTED = 2, 130


class UsageError(Exception):
    """Input that is wrong, in words for the person who gave it."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit, and takes no flag cut short.

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


def exit_status(prog: str, command: Callable[[], int]) -> int:
    """Runs a command; what it returns, or the status that its UsageError or an interrupt comes to."""
    try:
        return command()
    except UsageError as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def as_usage_error(*errors: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turns errors that the input is to blame for into a UsageError."""
    try:
        yield
    except errors as error:
        reasons = [error.message, *map(str, error.exceptions)] if isinstance(error, ExceptionGroup) else [str(error)]
        raise UsageError(prefix + "; ".join(reasons)) from error


def check_writable(flag: str, path: Path) -> None:
    """Raises UsageError, naming the flag, where no file can be written at `path`."""
    if path.is_dir():
        why = "it is a directory"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    else:
        return
    raise UsageError(f"{flag}: cannot write {path}: {why}")
