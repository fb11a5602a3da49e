"""Errors and exit statuses of command lines.

Wrong input: one line on stderr and status 2, without a traceback. A failure with correct input: one line and status 3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rich.console import Console

from scripts.cli.output_files import check_output, is_replaced, output_file

WRONG_INPUT, FAILED, INTERRUPTED = 2, 3, 130


class UsageError(Exception):
    """The input is wrong. The message addresses the user."""


class Failure(Exception):
    """The command failed with correct input. The message addresses the user."""


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError instead of exiting, and does not accept abbreviated flags.

    Args:
      description, epilog: printed with their line breaks.
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
    """Standard output. A closed pipe raises Failure (rich would exit with status 1). File names that the encoding
    cannot represent are escaped.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        super().__init__()

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit fails
        raise Failure("standard output was closed before everything was printed")


def exit_status(prog: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status, or the status of its exception or interrupt.

    Exceptions other than UsageError and Failure are bugs and print a traceback.
    """
    try:
        return command()
    except (UsageError, Failure) as error:
        print(f"{prog}: error: {_one_line(str(error))}", file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit:  # argparse's --help
        raise
    except BaseException:  # noqa: BLE001  Python would end with status 1, a command's own; a panic in Rust is no Exception
        traceback.print_exc()
        return FAILED


def _one_line(message: str, longest: int = 2000) -> str:
    """Return a message as one line of printable characters. Parts of a message may come from a file."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    return text if len(text) <= longest else f"{text[:longest]}..."


def as_usage_error(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Convert errors that the input caused to UsageError."""
    return _turned_into(UsageError, errors, prefix)


def as_failure(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Convert errors that the input did not cause to Failure."""
    return _turned_into(Failure, errors, prefix)


@contextlib.contextmanager
def _turned_into(kind: type[UsageError | Failure], errors: tuple[type[Exception], ...], prefix: str) -> Iterator[None]:
    try:
        yield
    except errors as error:
        parts = [error.message, *error.exceptions] if isinstance(error, ExceptionGroup) else [error]
        reasons = [str(part) or type(part).__name__ for part in parts]  # the message of a MemoryError is often empty
        raise kind(prefix + "; ".join(reasons)) from error


@dataclasses.dataclass
class Failures:
    """Failures of the last parts of a command. Each part runs, even if other parts fail.

    Attributes:
      messages: messages of the failures.
    """

    messages: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record a Failure that ends the block."""
        try:
            yield
        except Failure as error:
            self.messages.append(str(error))

    def check(self) -> None:
        """Raise Failure with all messages, if any."""
        if self.messages:
            raise Failure("; ".join(self.messages))


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[BinaryIO]:
    """Open an output file like `output_file`. Raise Failure with the flag if the file cannot be written."""
    try:
        with output_file(path) as file:
            yield file
    except OSError as error:
        raise Failure(f"{flag}: cannot write {path}: {error.strerror or error}") from error


def write_report(flag: str, path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON. Raise Failure with the flag if this is not possible."""
    with writing(flag, path) as file:
        file.write((json.dumps(report, indent=1) + "\n").encode("utf-8"))


def check_outputs(paths: Mapping[str, Path | None], *, make_folders: bool = False) -> None:
    """Raise UsageError if an output file cannot be written, or if two flags name the same file."""
    flags: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        try:
            if make_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
            check_output(path)
        except OSError as error:  # such as a name that is too long
            raise UsageError(f"{flag}: cannot write {path}: {error.strerror}") from error
        other = flags.setdefault(os.path.realpath(path), flag)
        if other != flag and is_replaced(path):
            raise UsageError(f"{flag}: cannot write {path}: {other} does")
