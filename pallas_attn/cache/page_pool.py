"""Allocation and reference counts of the pages of a paged KV cache."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from pallas_attn.cache.errors import InconsistentCache, OutOfPages, PageError


class PagePool:
    """Allocate page ids 0 to num_pages - 1 and count their references.

    A page with references is *owned*, a page without references is *free*. `allocate` returns the least recently freed
    pages. A free page therefore keeps its contents for as long as possible, and a prefix cache can take it back with
    `reclaim`. Every operation takes O(1) per page. A call that raises changes nothing. Not thread-safe.

    Example:
      >>> pool = pallas_attn.cache.PagePool(num_pages=4)
      >>> pages = pool.allocate(2)
      >>> pool.retain(pages[:1])  # a second sequence begins with the same page
      >>> pool.release(pages)
      >>> pages, pool.refcount(pages[0]), pool.num_free
      ([0, 1], 1, 3)
    """

    def __init__(self, num_pages: int) -> None:
        """Create a pool with all pages free.

        Args:
          num_pages: size of the pool, at least 1.

        Raises:
          ValueError: `num_pages` is smaller than 1.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self._num_pages = num_pages
        self._on_reuse: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Free all pages. Works in any state, also if an exception interrupted an earlier call.

        The callback of `watch_reuse` stays registered.
        """
        self._refcounts = [0] * self._num_pages
        # Free pages, in the order in which they will be allocated. An OrderedDict, because finding the first item of a
        # dict takes time proportional to the items that were removed from its front.
        self._free = OrderedDict.fromkeys(range(self._num_pages))

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages, including free pages whose contents a prefix cache still knows."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_free

    def refcount(self, page: int) -> int:
        """Return the number of references to `page`; 0 if it is free.

        Raises:
          PageError: `page` is outside this pool.
        """
        self._require_known(page)
        return self._refcounts[page]

    def allocate(self, n: int) -> list[int]:
        """Return the `n` least recently freed pages, each with one reference.

        Raises:
          OutOfPages: fewer than `n` pages are free.
          ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if n > self.num_free:
            raise OutOfPages(requested=n, free=self.num_free)
        pages = [self._free.popitem(last=False)[0] for _ in range(n)]
        for page in pages:
            self._refcounts[page] = 1
            if self._on_reuse is not None:
                self._on_reuse(page)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page for each time that it occurs in `pages`. The pages must be owned.

        Raises:
          PageError: a page is free or outside this pool.
        """
        pages = list(pages)
        for page in pages:
            self._require_known(page)
            if self._refcounts[page] == 0:
                raise PageError(f"cannot retain page {page}: it is free")
        for page in pages:
            self._refcounts[page] += 1

    def reclaim(self, pages: Iterable[int]) -> None:
        """Add one reference to each page for each time that it occurs in `pages`. The pages may be free.

        A prefix cache uses this function to reuse free pages whose contents it knows.

        Raises:
          PageError: a page is outside this pool.
        """
        pages = list(pages)
        for page in pages:
            self._require_known(page)
        for page in pages:
            if self._refcounts[page] == 0:
                del self._free[page]
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page for each time that it occurs in `pages`. Pages without references become
        free.

        Args:
          pages: pages in the order of their sequence. The last page in the list will be allocated again first, because
            a prefix cache can reuse a page only while it knows all pages before it.

        Raises:
          PageError: a page is free, outside this pool, or occurs more often than it has references.
        """
        pages = list(pages)
        for page, mentions in Counter(pages).items():
            self._require_known(page)
            if mentions > self._refcounts[page]:
                raise PageError(f"cannot release page {page} {mentions}x: it has {self._refcounts[page]} references")
        for page in reversed(pages):
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._free[page] = None

    def watch_reuse(self, on_reuse: Callable[[int], None]) -> None:
        """Register a callback that `allocate` calls for each page that it is about to return.

        A prefix cache then forgets the old contents of the page.

        Args:
          on_reuse: function of the page id. It must neither raise nor call the pool.

        Raises:
          ValueError: the pool already has a callback.
        """
        if self._on_reuse is not None:
            raise ValueError("on_reuse: the pool already has a callback; a pool can have one")
        self._on_reuse = on_reuse

    def check(self) -> None:
        """Verify all invariants of the pool, in O(num_pages).

        Raises:
          InconsistentCache: names the page that violates an invariant.
        """
        for page, count in enumerate(self._refcounts):
            if count < 0:
                raise InconsistentCache(f"page {page} has {count} references")
            if (count == 0) != (page in self._free):
                listed = "is" if page in self._free else "is not"
                raise InconsistentCache(f"page {page} has {count} references and {listed} among the free pages")
        if foreign := self._free.keys() - range(self.num_pages):
            raise InconsistentCache(f"free pages that are not of this pool: {sorted(foreign)}")

    def _require_known(self, page: int) -> None:
        if not 0 <= page < self.num_pages:  # an explicit bound, because a list accepts negative indices
            raise PageError(f"page {page} is not of this pool of {self.num_pages}")
