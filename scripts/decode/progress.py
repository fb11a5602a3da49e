"""Progress of run_decode on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """A line on a terminal that disappears when the work is done; or nothing."""

    def __init__(self, shown: bool):
        self._console = Console(stderr=True, quiet=not shown)

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Shows a description of work whose progress is unknown."""
        return self._console.status(f"{what} ...")

    @contextlib.contextmanager
    def tokens(self, most: int) -> Iterator[Callable[[int], None]]:
        """Shows a bar of at most so many tokens; call the returned function with the number of new ones."""
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("decoding", total=most)
            yield lambda count: progress.advance(bar, count)
