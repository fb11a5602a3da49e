"""Errors and exit statuses of command-line scripts.

If the input is wrong, a script prints one line to stderr, without a traceback, and exits with status 2. If it fails
with correct input, it prints one line and exits with status 3. After Ctrl-C it exits with status 130. A bug (any other
exception) prints a traceback, and the script exits with status 3.
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

from pallas_attn.models.cli.output_files import check_output, is_replaced, output_file
from pallas_attn.models.config.json_files import shown

WRONG_INPUT, FAILED, INTERRUPTED = 2, 3, 130


class UsageError(Exception):
    """The input is wrong: options or input files. The message is shown to the user."""


class Failure(Exception):
    """The command failed although its input is correct. The message is shown to the user."""


class Parser(argparse.ArgumentParser):
    """argparse parser that raises UsageError instead of exiting, and does not accept abbreviated flags.

    Args:
      prog: name of the command.
      description, epilog: texts before and after the list of options. Their line breaks are kept.
      usage: first line of the help; None for a list of all options.
    """

    def __init__(self, prog: str, *, description: str, epilog: str, usage: str | None = None):
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_switch(group: argparse._ActionsContainer, name: str, description: str, *, default: bool) -> None:
    """Add an option without a value, such as --name, and its opposite, --no-name."""
    description += f" (default: {'yes' if default else 'no'})"
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=description)


def integer(text: str) -> int:
    """Parse an integer of less than 2**31, for argparse, which adds the flag to the error."""
    try:
        return bounded(int(text))
    except ValueError as error:  # also for more than 4300 digits
        raise argparse.ArgumentTypeError(f"invalid int value: {shown(text)}") from error


def bounded(value: int, limit: int = 2**31) -> int:
    """Return an integer. Raise argparse.ArgumentTypeError if its magnitude is not less than `limit`."""
    if abs(value) >= limit:
        raise argparse.ArgumentTypeError(f"expected an integer of less than {limit}, got {shown(value)}")
    return value


def decimal(text: str) -> int | None:
    """Return the number of up to nine ASCII digits; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


class StandardOutput(Console):
    """rich console for standard output. Characters that the encoding cannot represent are escaped. If the reader has
    closed the pipe, printing raises Failure; a plain `Console` would exit with status 1.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        super().__init__()

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails
        raise Failure("standard output was closed before everything was printed")


class StandardError(Console):
    """rich console for standard error. Printing does nothing if the reader has closed the pipe; a plain `Console` would
    exit with status 1.

    Args:
      quiet: whether to print nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(stderr=True, quiet=quiet)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def exit_status(prog: str, command: Callable[[], int]) -> int:
    """Run a command and return the exit status: the command's result, or the status for the exception that it raised.

    UsageError, Failure and KeyboardInterrupt print one line. SystemExit, from argparse's --help, is raised again. All
    other exceptions are bugs and print a traceback.
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
    except BaseException:  # noqa: BLE001  includes panics of Rust libraries; Python would exit with status 1
        traceback.print_exc()
        return FAILED


def _one_line(message: str, longest: int = 2000) -> str:
    """Return a message as one line of printable characters, because a part of it may come from an untrusted file."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    return text if len(text) <= longest else f"{text[:longest]}..."


def as_usage_error(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Convert exceptions of these types in a `with` block to UsageError, with a prefix before the message."""
    return _turned_into(UsageError, errors, prefix)


def as_failure(*errors: type[Exception], prefix: str = "") -> contextlib.AbstractContextManager[None]:
    """Convert exceptions of these types in a `with` block to Failure, with a prefix before the message."""
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
    """Collects failures of parts of a command that run even if other parts fail, such as writing several files.

    Attributes:
      messages: messages of the failures.
    """

    messages: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records a Failure raised in its block instead of raising it."""
        try:
            yield
        except Failure as error:
            self.messages.append(str(error))

    def check(self) -> None:
        """Raise Failure with all recorded messages. Return if no failure was recorded."""
        if self.messages:
            raise Failure("; ".join(self.messages))


@contextlib.contextmanager
def writing(flag: str, path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open the output file of an option, like `output_file`.

    Raises:
      Failure: the file cannot be written. The message names the flag.
    """
    try:
        with output_file(path, private=private) as file:
            yield file
    except OSError as error:
        raise Failure(f"{flag}: cannot write {path}: {error.strerror or error}") from error


def write_report(flag: str, path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON to the output file of an option.

    Raises:
      Failure: the file cannot be written. The message names the flag.
    """
    with writing(flag, path) as file:
        file.write((json.dumps(report, indent=1) + "\n").encode("utf-8"))


def check_outputs(paths: Mapping[str, Path | None], *, make_folders: bool = False) -> None:
    """Check output files before the command starts.

    Args:
      paths: path of each flag; None if the flag is not given.
      make_folders: whether missing folders are created.

    Raises:
      UsageError: a file cannot be written, or two flags name the same regular or new file.
    """
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
