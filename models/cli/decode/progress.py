"""Progress display of run_decode on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from pallas_attn.models.cli.command_line import StandardError


class Display:
    """Shows the progress of the current work.

    On a terminal, a line shows it while the work lasts. Otherwise a line is printed when compilation starts, and
    another when it ends, because compilation may take a minute.

    Args:
      prog: name of the command.
      shown: whether to show anything.
    """

    def __init__(self, prog: str, shown: bool):
        self._prog = prog
        self._on_terminal = shown and sys.stderr.isatty()
        self._in_lines = shown and not self._on_terminal
        self._console = StandardError(quiet=not self._on_terminal)

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Context manager that shows a description while its block runs."""
        return self._console.status(f"{what} ...")

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Callable[[int, int], None]]:
        """Context manager that shows the progress of compilation. It yields a function, which must be called with the
        number of compiled programs and the number of all programs."""
        began = time.perf_counter()
        with Progress(TextColumn("{task.description}"), _Seconds(), console=self._console, transient=True) as progress:
            line = progress.add_task("compiling")

            def on_compiled(done: int, total: int) -> None:
                progress.update(line, description=f"compiling program {min(done + 1, total)} of {total},")
                if self._in_lines and done == 0:
                    self._print(f"compiling {_programs(total)} ...")
                if self._in_lines and done == total:
                    self._print(f"compiled {_programs(total)} in {time.perf_counter() - began:.1f} s")

            yield on_compiled

    @contextlib.contextmanager
    def tokens(self, most: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
        """Context manager that shows a progress bar for up to `most` tokens. It yields a function, which must be called
        with the number of new tokens. If `shown` is False, nothing is shown."""
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not shown) as progress:
            bar = progress.add_task("decoding", total=most)
            yield lambda count: progress.advance(bar, count)

    def _print(self, message: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # progress is no result
            print(f"{self._prog}: {message}", file=sys.stderr, flush=True)


class _Seconds(ProgressColumn):
    """Elapsed time in seconds."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0:.0f} s")


def _programs(number: int) -> str:
    return f"{number} program" if number == 1 else f"{number} programs"
