"""The pools of all cache groups of a model; a sequence has rows in each of them."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from pallas_attn.cache.errors import OutOfPages
from pallas_attn.cache.head_page_pool import HeadPagePool


class GroupPools:
    """One `HeadPagePool` for each cache group, the layers of equal windows; a sequence has one batch slot in all of
    them.

    Properties of one pool hold for all of them together: a sequence gets room in every group or in none. A call that
    raises changes nothing. Not thread-safe.

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
        """Takes over the pools; from now on they may be read directly, but not changed.

        Args:
            pools: Pools with all rows free, of equal page size, batch slots and table entries.

        Raises:
            ValueError: no pools, or they differ where they must not.
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
        """Tokens that a table has entries for."""
        return self._pools[0].table_tokens

    @property
    def num_owned(self) -> tuple[int, ...]:
        """Rows that sequences hold, in each group."""
        return tuple(pool.num_owned for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """Tokens to which a sequence can grow, one by one, if it has all pools to itself."""
        # Rows that grow with the tokens: bisect for the first number of pages that some pool does not hold.
        least, most = 0, self.table_tokens // self.page_size
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.lacking_pool(middle * self.page_size) is None
            least, most = (middle, most) if fits else (least, middle - 1)
        return least * self.page_size

    def lacking_pool(self, num_tokens: int) -> HeadPagePool | None:
        """First pool that is too small for a sequence of `num_tokens` alone in it and growing one by one; None if all
        suffice."""
        for pool in self._pools:
            if pool.peak_rows(num_tokens, step_tokens=1) > pool.num_rows:
                return pool
        return None

    def has_room(
        self, num_tokens: int, *, step_tokens: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]] | None = None
    ) -> bool:
        """Whether the free rows suffice for a new sequence all the way to `num_tokens`.

        Args:
            num_tokens: Final length of the sequence.
            step_tokens: New tokens of one step at most.
            prefix: The rows it begins with, group by group, as `PrefixCache.lookup` finds them. Free ones among them
                are not available for anything else.
        """
        for group, pool in enumerate(self._pools):
            rows = np.empty((pool.num_heads, 0), np.int32) if prefix is None else prefix[group]
            num_cached = rows.shape[1] * self.page_size
            lacking = pool.peak_rows(num_tokens, step_tokens=step_tokens, num_cached=num_cached)
            if lacking > pool.num_free - pool.num_free_of(rows):
                return False
        return True

    def room(self, batch_slot: int) -> int:
        """Tokens up to which `allocate` could make room for a sequence with the free rows."""
        return min(pool.room(batch_slot) for pool in self._pools)

    def allocate(self, batch_slot: int, num_tokens: int) -> None:
        """Makes room for the first `num_tokens` tokens of a sequence in every head of every group, or in none.

        Raises:
            OutOfPages: some pool has fewer rows free than its heads lack; it counts that pool's rows.
            ValueError: as `HeadPagePool.allocate`.
        """
        for pool in self._pools:
            if (lacking := pool.num_lacking(batch_slot, num_tokens)) > pool.num_free:
                raise OutOfPages(requested=lacking, free=pool.num_free)
        for pool in self._pools:
            pool.allocate(batch_slot, num_tokens)

    def adopt(self, batch_slot: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]]) -> None:
        """Lets a new sequence begin with rows that hold its first tokens already; see `HeadPagePool.adopt`.

        Args:
            batch_slot: Idle.
            prefix: Rows group by group, of equal numbers of pages.

        Raises:
            PageError, ValueError: as `HeadPagePool.adopt`, or not one of `prefix` for each group.
        """
        if len(prefix) != len(self._pools) or len({rows.shape[1] for rows in prefix}) != 1:
            shapes = [list(rows.shape) for rows in prefix]
            raise ValueError(f"prefix must be rows of as many pages for {len(self._pools)} groups, got {shapes}")
        for pool, rows in zip(self._pools, prefix, strict=True):
            pool.check_adoptable(batch_slot, rows)
        for pool, rows in zip(self._pools, prefix, strict=True):
            pool.adopt(batch_slot, rows)

    def recycle(self, batch_slots: ArrayLike, oldest_queries: ArrayLike) -> tuple[list[int], ...]:
        """Drops the rows that no head needs any more, as `HeadPagePool.recycle`; returns those of each group.

        Raises:
            ValueError: as `HeadPagePool.recycle`.
        """
        # Every pool accepts or none does, since sequences have the same room and queries in all of them.
        return tuple(pool.recycle(batch_slots, oldest_queries) for pool in self._pools)

    def release(self, batch_slot: int) -> None:
        """Drops all rows of a sequence. Doing it again does nothing.

        Raises:
            ValueError: an unknown batch slot.
        """
        for pool in self._pools:
            pool.release(batch_slot)

    def reset(self) -> None:
        """Starts over with all rows of all pools free, whatever state an interrupted call has left."""
        for pool in self._pools:
            pool.reset()

    def swap(self, first: int, second: int) -> None:
        """Exchanges the sequences of two batch slots, with the rows of all their heads; either may be idle.

        Raises:
            ValueError: an unknown batch slot.
        """
        for pool in self._pools:
            pool.swap(first, second)

    def tables(self, batch_slots: ArrayLike) -> tuple[Int32[np.ndarray, "B _ P"], ...]:
        """Head-wise block tables of a step, group by group; see `HeadPagePool.tables`.

        Raises:
            ValueError: not a vector of integers, or an unknown batch slot.
        """
        return tuple(pool.tables(batch_slots) for pool in self._pools)

    def watch_reuse(self, on_reuse: Callable[[int, int], None]) -> None:
        """Registers `on_reuse(group, row)` to be called whenever a row is handed out; see `PagePool.watch_reuse`.

        Raises:
            ValueError: the pools are watched already.
        """
        for group, pool in enumerate(self._pools):
            pool.watch_reuse(lambda row, group=group: on_reuse(group, row))

    def check(self) -> None:
        """Verifies every invariant of every pool.

        Raises:
            InconsistentCache: naming the row or table entry at fault.
        """
        for pool in self._pools:
            pool.check()
