"""What can go wrong in cache management. Whoever catches one of these finds the state as it was before the call."""


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
    """A page id was used in a way its state forbids: unknown, free already, or holding something else."""


class InconsistentCache(CacheError):
    """`check()` found a broken invariant."""
