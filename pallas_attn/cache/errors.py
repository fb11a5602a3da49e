"""Errors of cache management. Each leaves the state as it was before the call."""


class CacheError(Exception):
    """Base of every failure that a page pool or prefix cache reports."""


class OutOfPages(CacheError):
    """An allocation asked for more pages than are free.

    Attributes:
        requested: Pages asked for.
        free: Pages that were free.
    """

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} pages requested, {free} free")
        self.requested = requested
        self.free = free


class PageError(CacheError):
    """A page id is unknown, already free, or holds other contents than the call assumes."""


class InconsistentCache(CacheError):
    """`check()` found a broken invariant."""
