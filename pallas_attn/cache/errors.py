"""Errors of cache management. A call that raises one of them leaves pools and prefix caches unchanged."""


class CacheError(Exception):
    """Base class of the errors that page pools and prefix caches raise.

    Example:
      >>> pool = pallas_attn.cache.PagePool(4)
      >>> try:
      ...     pool.release([2])
      ... except pallas_attn.cache.CacheError as error:
      ...     print(error)
      cannot release page 2 1x: it has 0 references
    """


class OutOfPages(CacheError):
    """An allocation requested more pages than are free. In a `HeadPagePool`, the numbers count rows instead.

    Attributes:
      requested: number of pages requested.
      free: number of pages that were free.

    Example:
      >>> pool = pallas_attn.cache.PagePool(4)
      >>> try:
      ...     pool.allocate(6)
      ... except pallas_attn.cache.OutOfPages as error:
      ...     print(error.requested, error.free)
      6 4
    """

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} pages requested, {free} free")
        self.requested = requested
        self.free = free


class PageError(CacheError):
    """A page id (or row id) is outside the pool, is free although the call needs an owned page, or is already published
    for other tokens.

    Example:
      >>> pallas_attn.cache.PagePool(4).refcount(4)
      Traceback (most recent call last):
      pallas_attn.cache.errors.PageError: page 4 is not of this pool of 4
    """


class InconsistentCache(CacheError):
    """`check()` found a violated invariant.

    Example:
      >>> pool = pallas_attn.cache.PagePool(4)
      >>> pool.check()  # no invariant is violated, so nothing is raised
    """
