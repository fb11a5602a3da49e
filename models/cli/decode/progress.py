"""Progress display of run_decode on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """Shows the progress of the current work in a line on the terminal, which disappears when the work ends."""

    def __init__(self, shown: bool):
        """Make a display. If `shown` is False, nothing is printed."""
        self._console = Console(stderr=True, quiet=not shown)

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Context manager that shows a description while its block runs."""
        return self._console.status(f"{what} ...")

    @contextlib.contextmanager
    def tokens(self, most: int) -> Iterator[Callable[[int], None]]:
        """Context manager that shows a progress bar for up to `most` tokens. It yields a function, which must be called
        with the number of new tokens."""
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("decoding", total=most)
            yield lambda count: progress.advance(bar, count)
