"""Progress display of run_decode on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """A line on a terminal that disappears when the work ends. Nothing is shown without a terminal."""

    def __init__(self, shown: bool):
        self._console = Console(stderr=True, quiet=not shown)

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Show a description of work with unknown progress."""
        return self._console.status(f"{what} ...")

    @contextlib.contextmanager
    def tokens(self, most: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar of at most `most` tokens. Call the returned function with the number of new tokens."""
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("decoding", total=most)
            yield lambda count: progress.advance(bar, count)
