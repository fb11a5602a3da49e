"""Errors of cache management. A call that raises one of them changes nothing."""


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
    """An allocation requested more pages than are free.

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
    """A page id is unknown, already free, or holds other contents than the call assumes.

    Example:
      >>> pallas_attn.cache.PagePool(4).refcount(4)
      Traceback (most recent call last):
      pallas_attn.cache.errors.PageError: page 4 is not of this pool of 4
    """


class InconsistentCache(CacheError):
    """`check()` found a violated invariant.

    Example:
      >>> pool = pallas_attn.cache.PagePool(4)
      >>> pool.check()  # it has none
    """
