"""Row pools of all cache groups of a model.

A cache group is a set of layers with equal windows, which share one pool. A row is one page of one KV head. A sequence
has rows in every pool.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from pallas_attn.cache.errors import OutOfPages
from pallas_attn.cache.head_page_pool import HeadPagePool


class GroupPools:
    """One `HeadPagePool` per cache group (layers with equal windows).

    A batch slot is an index that identifies a running sequence. A sequence has the same batch slot in all pools.
    `allocate` allocates rows in every pool or in none. A call that raises changes nothing. Not thread-safe.

    Example:
      >>> sizes = {"page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 4}
      >>> windows = [pallas_attn.HeadWindow([pallas_attn.FULL], [0]), pallas_attn.HeadWindow([4], [0])]
      >>> pools = pallas_attn.cache.GroupPools([pallas_attn.cache.HeadPagePool(4, w, **sizes) for w in windows])
      >>> pools.allocate(0, num_tokens=12)
      >>> pools.recycle([0], [11])  # the window of token 11 starts at token 8 in the second group
      ([], [0, 1])
      >>> pools.num_owned
      (3, 1)
    """

    def __init__(self, pools: Sequence[HeadPagePool]) -> None:
        """Combine pools. The caller must not change them afterwards, but may read them.

        Args:
          pools: pools with all rows free, with equal page sizes, numbers of batch slots and numbers of table entries.

        Raises:
          ValueError: the list is empty, or one of the three numbers differs between pools.
        """
        shapes = {(pool.page_size, pool.max_num_seqs, pool.table_tokens) for pool in pools}
        if len(shapes) != 1:
            wanted = "at least one, all of one page size, one number of batch slots and one number of table entries"
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
        """Number of tokens that a block table has entries for."""
        return self._pools[0].table_tokens

    @property
    def num_owned(self) -> tuple[int, ...]:
        """Number of rows with references, for each group."""
        return tuple(pool.num_owned for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """Maximum length in tokens of a sequence that is alone in the pools and grows by one token per step."""
        # The number of rows never decreases with the length, so bisect for the largest number of pages that fits.
        least, most = 0, self.table_tokens // self.page_size
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.lacking_pool(middle * self.page_size) is None
            least, most = (middle, most) if fits else (least, middle - 1)
        return least * self.page_size

    def lacking_pool(self, num_tokens: int) -> HeadPagePool | None:
        """Return the first pool with too few rows for one sequence of `num_tokens` that is alone in the pools and grows
        by one token per step. Return None if all pools are large enough.
        """
        for pool in self._pools:
            if pool.peak_rows(num_tokens, step_tokens=1) > pool.num_rows:
                return pool
        return None

    def has_room(
        self, num_tokens: int, *, step_tokens: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]] | None = None
    ) -> bool:
        """Return whether the free rows are enough for a new sequence that will have `num_tokens`.

        Args:
          num_tokens: final length of the sequence.
          step_tokens: maximum number of new tokens per step.
          prefix: rows of the sequence's prefix for each group, from `PrefixCache.lookup`; None without a prefix. Free
            rows of the prefix are not counted as free, because the sequence will own them.
        """
        for group, pool in enumerate(self._pools):
            rows = np.empty((pool.num_heads, 0), np.int32) if prefix is None else prefix[group]
            num_cached = rows.shape[1] * self.page_size
            lacking = pool.peak_rows(num_tokens, step_tokens=step_tokens, num_cached=num_cached)
            if lacking > pool.num_free - pool.num_free_of(rows):
                return False
        return True

    def room(self, batch_slot: int) -> int:
        """Return the largest `num_tokens` for which `allocate` succeeds with the free rows."""
        return min(pool.room(batch_slot) for pool in self._pools)

    def allocate(self, batch_slot: int, num_tokens: int) -> None:
        """Extend a sequence to `num_tokens` tokens: allocate the missing rows in every head of every group, or none.

        Raises:
          OutOfPages: a pool has fewer free rows than its heads need. The numbers in the error count rows of this pool.
          ValueError: see `HeadPagePool.allocate`.
        """
        for pool in self._pools:
            if (lacking := pool.num_lacking(batch_slot, num_tokens)) > pool.num_free:
                raise OutOfPages(requested=lacking, free=pool.num_free)
        for pool in self._pools:
            pool.allocate(batch_slot, num_tokens)

    def adopt(self, batch_slot: int, prefix: Sequence[Int32[np.ndarray, "_ pages"]]) -> None:
        """Start a new sequence with rows that already contain its first tokens; see `HeadPagePool.adopt`.

        Args:
          batch_slot: a batch slot without a sequence.
          prefix: rows of the first pages for each group, [heads, pages], with equal numbers of pages.

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
        """Release the rows that no later query sees, like `HeadPagePool.recycle`. Return them for each group.

        Raises:
          ValueError: see `HeadPagePool.recycle`.
        """
        # If one pool accepts the arguments, all do: a sequence has the same number of pages and the same oldest query
        # in all pools.
        return tuple(pool.recycle(batch_slots, oldest_queries) for pool in self._pools)

    def release(self, batch_slot: int) -> None:
        """Release all rows of a sequence. If the batch slot has no sequence, do nothing.

        Raises:
          ValueError: the batch slot is unknown.
        """
        for pool in self._pools:
            pool.release(batch_slot)

    def reset(self) -> None:
        """Free all rows of all pools. Works in any state, also if an exception interrupted an earlier call."""
        for pool in self._pools:
            pool.reset()

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences of two batch slots. Either batch slot may be without a sequence.

        Raises:
          ValueError: a batch slot is unknown.
        """
        for pool in self._pools:
            pool.swap(first, second)

    def tables(self, batch_slots: ArrayLike) -> tuple[Int32[np.ndarray, "B _ P"], ...]:
        """Return the head-wise block tables of a step for each group; see `HeadPagePool.tables`.

        Raises:
          ValueError: `batch_slots` is not a vector of integers, or a batch slot is unknown.
        """
        return tuple(pool.tables(batch_slots) for pool in self._pools)

    def watch_reuse(self, on_reuse: Callable[[int, int], None]) -> None:
        """Register `on_reuse(group, row)`, which is called for each row that is allocated; see `PagePool.watch_reuse`.

        Raises:
          ValueError: the pools already have a callback.
        """
        for group, pool in enumerate(self._pools):
            pool.watch_reuse(lambda row, group=group: on_reuse(group, row))

    def check(self) -> None:
        """Verify all invariants of every pool.

        Raises:
          InconsistentCache: names the row or table entry that violates an invariant.
        """
        for pool in self._pools:
            pool.check()
