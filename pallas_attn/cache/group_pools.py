"""Row pools of all cache groups of a model. A sequence has rows in each pool."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from pallas_attn.cache.errors import OutOfPages
from pallas_attn.cache.head_page_pool import HeadPagePool


class GroupPools:
    """One `HeadPagePool` per cache group (layers with equal windows). A sequence has the same batch slot in all of
    them.

    All pools succeed or fail together: a sequence gets room in every group or in none. A call that raises changes
    nothing. Not thread-safe.

    Example:
      >>> sizes = {"page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 4}
      >>> windows = [pallas_attn.HeadWindow([pallas_attn.FULL], [0]), pallas_attn.HeadWindow([4], [0])]
      >>> pools = pallas_attn.cache.GroupPools([pallas_attn.cache.HeadPagePool(4, w, **sizes) for w in windows])
      >>> pools.allocate(0, num_tokens=12)
      >>> pools.recycle([0], [11])  # what tokens from 11 on see: in the second group those from 8 on
      ([], [0, 1])
      >>> pools.num_owned
      (3, 1)
    """

    def __init__(self, pools: Sequence[HeadPagePool]) -> None:
        """Take ownership of the pools. Afterwards the caller may read them but must not change them.

        Args:
          pools: pools with all rows free, of equal page size, batch slots and table entries.

        Raises:
          ValueError: there are no pools, or they differ in these sizes.
        """
        shapes = {(pool.page_size, pool.max_num_seqs, pool.table_tokens) for pool in pools}
        if len(shapes) != 1:
            wanted = "at least one, all of one page size and as many batch slots and table entries"
            raise ValueError(f"pools must be {wanted}, got (page size, batch slots, tokens) {sorted(shapes)}")
        self._pools = tuple(pools)

    @property
    def pools(self) -> tuple[HeadPagePool, ...]:
        return self._pools

    @property
    def page_size(self) -> int:
        return self._pools[0].page_size

    @property
    def max_num_seqs(self) -> int:
        return self._pools[0].max_num_seqs

    @property
    def table_tokens(self) -> int:
        """Number of tokens that a table has entries for."""
        return self._pools[0].table_tokens

    @property
    def num_owned(self) -> tuple[int, ...]:
        """Number of rows that sequences own, per group."""
        return tuple(pool.num_owned for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """Maximum length of a sequence that grows token by token while no other sequence has rows."""
        # The number of rows grows with the tokens: bisect for the first number of pages that exceeds a pool.
        least, most = 0, self.table_tokens // self.page_size
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.lacking_pool(middle * self.page_size) is None
            least, most = (middle, most) if fits else (least, middle - 1)
        return least * self.page_size

    def lacking_pool(self, num_tokens: int) -> HeadPagePool | None:
        """Return the first pool that is too small for a single sequence of `num_tokens` that grows token by token; None
        if all are large enough.
        """
        for pool in self._pools:
            if pool.peak_rows(num_tokens, step_tokens=1) > pool.num_rows:
                return pool
        return None

    def has_room(
        self, num_tokens: int, *, step_tokens: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]] | None = None
    ) -> bool:
        """Return whether the free rows are enough for a new sequence until it has `num_tokens`.

        Args:
          num_tokens: final length of the sequence.
          step_tokens: maximum number of new tokens per step.
          prefix: rows of the sequence's prefix per group, from `PrefixCache.lookup`. Free rows among them are not
            available for other pages.
        """
        for group, pool in enumerate(self._pools):
            rows = np.empty((pool.num_heads, 0), np.int32) if prefix is None else prefix[group]
            num_cached = rows.shape[1] * self.page_size
            lacking = pool.peak_rows(num_tokens, step_tokens=step_tokens, num_cached=num_cached)
            if lacking > pool.num_free - pool.num_free_of(rows):
                return False
        return True

    def room(self, batch_slot: int) -> int:
        """Return the number of tokens up to which `allocate` can extend a sequence with the free rows."""
        return min(pool.room(batch_slot) for pool in self._pools)

    def allocate(self, batch_slot: int, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens of a sequence in every head of every group, or in none.

        Raises:
          OutOfPages: a pool has fewer free rows than its heads need; the error counts rows of this pool.
          ValueError: see `HeadPagePool.allocate`.
        """
        for pool in self._pools:
            if (lacking := pool.num_lacking(batch_slot, num_tokens)) > pool.num_free:
                raise OutOfPages(requested=lacking, free=pool.num_free)
        for pool in self._pools:
            pool.allocate(batch_slot, num_tokens)

    def adopt(self, batch_slot: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]]) -> None:
        """Start a new sequence with rows that already hold its first tokens; see `HeadPagePool.adopt`.

        Args:
          batch_slot: an idle batch slot.
          prefix: rows per group, with equal numbers of pages.

        Raises:
          PageError, ValueError: see `HeadPagePool.adopt`, or `prefix` does not have one entry per group.
        """
        if len(prefix) != len(self._pools) or len({rows.shape[1] for rows in prefix}) != 1:
            shapes = [list(rows.shape) for rows in prefix]
            raise ValueError(f"prefix must be rows of as many pages for {len(self._pools)} groups, got {shapes}")
        for pool, rows in zip(self._pools, prefix, strict=True):
            pool.check_adoptable(batch_slot, rows)
        for pool, rows in zip(self._pools, prefix, strict=True):
            pool.adopt(batch_slot, rows)

    def recycle(self, batch_slots: ArrayLike, oldest_queries: ArrayLike) -> tuple[list[int], ...]:
        """Release the rows that no head needs any more, like `HeadPagePool.recycle`; return them per group.

        Raises:
          ValueError: see `HeadPagePool.recycle`.
        """
        # All pools accept or all reject, because sequences have the same room and queries in all of them.
        return tuple(pool.recycle(batch_slots, oldest_queries) for pool in self._pools)

    def release(self, batch_slot: int) -> None:
        """Release all rows of a sequence. A second call does nothing.

        Raises:
          ValueError: the batch slot is unknown.
        """
        for pool in self._pools:
            pool.release(batch_slot)

    def reset(self) -> None:
        """Free all rows of all pools, whatever state an interrupted call has left."""
        for pool in self._pools:
            pool.reset()

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences of two batch slots, with the rows of all heads; either slot may be idle.

        Raises:
          ValueError: a batch slot is unknown.
        """
        for pool in self._pools:
            pool.swap(first, second)

    def tables(self, batch_slots: ArrayLike) -> tuple[Int32[np.ndarray, "B _ P"], ...]:
        """Return the head-wise block tables of a step per group; see `HeadPagePool.tables`.

        Raises:
          ValueError: not a vector of integers, or an unknown batch slot.
        """
        return tuple(pool.tables(batch_slots) for pool in self._pools)

    def watch_reuse(self, on_reuse: Callable[[int, int], None]) -> None:
        """Register `on_reuse(group, row)`, which is called whenever a row is allocated; see `PagePool.watch_reuse`.

        Raises:
          ValueError: the pools already have a watcher.
        """
        for group, pool in enumerate(self._pools):
            pool.watch_reuse(lambda row, group=group: on_reuse(group, row))

    def check(self) -> None:
        """Verify every invariant of every pool.

        Raises:
          InconsistentCache: names the row or table entry that violates an invariant.
        """
        for pool in self._pools:
            pool.check()
