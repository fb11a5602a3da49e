"""What run_decode says on stderr while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """A line on a terminal that goes away when it is done; or nothing."""

    def __init__(self, shown: bool):
        self._console = Console(stderr=True, quiet=not shown)

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Says what is going on, for something that cannot say how far it is."""
        return self._console.status(f"{what} ...")

    @contextlib.contextmanager
    def tokens(self, most: int) -> Iterator[Callable[[int], None]]:
        """A bar of at most that many tokens; call what it gives with how many have come."""
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("decoding", total=most)
            yield lambda count: progress.advance(bar, count)
