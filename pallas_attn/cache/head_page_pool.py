"""Allocation of the rows of a paged KV cache to KV heads. A row is one page of one KV head.

Windowed heads release rows early, and any head can use these rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64
from numpy.typing import ArrayLike

from pallas_attn.cache.errors import InconsistentCache, PageError
from pallas_attn.cache.page_pool import PagePool

PAGE_NONE = -1  # equal to pallas_attn.types.PAGE_NONE, whose module imports JAX


@runtime_checkable
class WindowPerHead(Protocol):
    """Fields of a `pallas_attn.HeadWindow`. The module of that class imports JAX, which this module must not."""

    @property
    def window(self) -> ArrayLike | Sequence[int]: ...

    @property
    def sink_tokens(self) -> ArrayLike | Sequence[int]: ...


class HeadPagePool:
    """Allocate rows to the KV heads of the running sequences. All layers with equal windows share one pool.

    A row is one page of one KV head. Any head may use any row, so heads without a window can use rows that windowed
    heads release. (If all heads have the same window, create the pool with one head. A row is then one page of all
    heads.)

    A batch slot is an index that identifies a running sequence. `allocate` allocates rows for the same pages in all
    heads, or in none. A head keeps a row until `release` ends the sequence or `recycle` releases the row. A row can be
    recycled if no later query sees a token in it: its page is after the sink tokens of the head, and before the windows
    of all later queries.

    Sequences with the same first tokens may share rows: `adopt` starts a sequence with the rows that a `PrefixCache`
    has found. Rows are reference-counted. `recycle` and `release` remove the reference of their sequence, and a row
    without references is free. The least recently freed row is allocated first.

    The caller passes the position of the oldest later query to `recycle`. It is the number of accepted tokens, not the
    number of written tokens: a draft token that is rejected is replaced by another token at the same position, which
    sees the same keys. Steps that are launched already do not count as later: the device runs steps in order, so they
    read their rows before a later step overwrites the rows.

    If `recycle` is called before each `allocate`, a sequence owns at most `peak_rows` rows. Row ids depend only on the
    order of calls, so processes that make the same calls get the same rows. A call that raises changes nothing. Not
    thread-safe.

    Example:
      >>> widths = jnp.array([pallas_attn.FULL, 4], jnp.int32)  # two KV heads, the second has a window
      >>> window = pallas_attn.HeadWindow(widths, sink_tokens=jnp.zeros(2, jnp.int32))
      >>> pool = pallas_attn.cache.HeadPagePool(8, window, page_size=4, max_num_seqs=2, max_pages_per_seq=4)
      >>> pool.allocate(0, num_tokens=12)
      >>> pool.recycle([0], [11])  # the window of token 11 in the second head starts at token 8
      [1, 3]
      >>> tables, kv_lens = jnp.asarray(pool.tables([0])), jnp.array([12], jnp.int32)
      >>> tables.tolist()
      [[[0, 2, 4, -1], [-1, -1, 5, -1]]]
      >>> spec = pallas_attn.kv_cache_spec(num_pages=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
      >>> kv, q = pallas_attn.PagedKV.allocate(spec), jnp.ones((1, 1, 2, 8))  # 4 pages of 2 heads are 8 rows
      >>> pallas_attn.paged_decode(q, kv, tables, kv_lens, window=window).shape
      (1, 1, 2, 8)
    """

    def __init__(
        self, num_rows: int, window: WindowPerHead, *, page_size: int, max_num_seqs: int, max_pages_per_seq: int
    ) -> None:
        """Create a pool with all rows free.

        Args:
          num_rows: number of rows, N·Hkv for a cache of N pages.
          window: window of each KV head, the `HeadWindow` that the attention operations receive. It is copied.
          page_size: ps, tokens per page.
          max_num_seqs: number of batch slots.
          max_pages_per_seq: P, entries of a block table per head.

        Raises:
          ValueError: a size is smaller than 1; num_rows·page_size exceeds 2**31, so that slots would not fit int32; or
            `window` does not have one window of at least 1 and one number of sink tokens of at least 0 per head.
        """
        if min(num_rows, page_size, max_num_seqs, max_pages_per_seq) < 1:
            sizes = f"{num_rows=}, {page_size=}, {max_num_seqs=}, {max_pages_per_seq=}"
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        if num_rows * page_size > 2**31:
            raise ValueError(f"num_rows must be at most {2**31 // page_size} for slots to fit an int32, got {num_rows}")
        self._window, sink_tokens = _widths(window)
        self._sink_pages = -(-sink_tokens // page_size)
        self._page_size = page_size
        self._rows = PagePool(num_rows)
        self._tables = np.empty((max_num_seqs, self.num_heads, max_pages_per_seq), np.int32)
        # Pages of each sequence, including recycled pages.
        self._num_pages = np.empty(max_num_seqs, np.int64)
        # Latest value that `recycle` received for each sequence.
        self._oldest_query = np.empty(max_num_seqs, np.int64)
        # First page that is not recycled, not counting the pages of sink tokens, which are never recycled.
        self._first_page = np.empty((max_num_seqs, self.num_heads), np.int64)
        self.reset()

    def reset(self) -> None:
        """Remove all sequences and free all rows. Works in any state, also if an exception interrupted an earlier call.

        The callback of `watch_reuse` stays registered.
        """
        self._rows.reset()
        self._held: Counter[int] = Counter()  # number of references per row that `take` and `hold` have added
        self._tables.fill(PAGE_NONE)
        self._num_pages.fill(0)
        self._oldest_query.fill(0)
        self._first_page[:] = self._sink_pages

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_heads(self) -> int:
        return len(self._window)

    @property
    def max_num_seqs(self) -> int:
        return self._tables.shape[0]

    @property
    def table_tokens(self) -> int:
        """Number of tokens that a block table has entries for."""
        return self._tables.shape[2] * self._page_size

    @property
    def num_rows(self) -> int:
        return self._rows.num_pages

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return self._rows.num_free

    @property
    def num_owned(self) -> int:
        return self._rows.num_owned

    def num_free_of(self, rows: ArrayLike) -> int:
        """Return how many of `rows` are free, not counting PAGE_NONE.

        Raises:
          PageError: a row is outside this pool.
        """
        return sum(self._rows.refcount(row) == 0 for row in np.ravel(rows).tolist() if row != PAGE_NONE)

    @property
    def free_fraction(self) -> float:
        """Number of free rows divided by the number of all rows, 0.0 to 1.0."""
        return self.num_free / self.num_rows

    def peak_rows(self, num_tokens: int, *, step_tokens: int, num_cached: int = 0) -> int:
        """Return the maximum number of rows that a sequence owns at a time while it grows to `num_tokens`.

        The bound is valid if `recycle` is called before each `allocate`. Each head then owns the pages of its sink
        tokens, of its window and of the new tokens of a step.

        Args:
          num_tokens: final length of the sequence.
          step_tokens: maximum number of new tokens per step, including drafts.
          num_cached: tokens, in whole pages, that the sequence starts with (`adopt`). Their rows are not counted.

        Raises:
          ValueError: `num_tokens` is negative, `step_tokens` smaller than 1, or `num_cached` not from 0 to
            `num_tokens`.
        """
        if not 0 <= num_cached <= num_tokens or step_tokens < 1:
            wanted = "0 <= num_cached <= num_tokens must hold, num_tokens not be negative and step_tokens at least 1"
            raise ValueError(f"{wanted}, got {num_tokens=}, {step_tokens=}, {num_cached=}")
        pages, cached = -(-num_tokens // self._page_size), num_cached // self._page_size
        # A step reads the window of its first query and its own tokens: `span` tokens, which can start in the middle of
        # a page.
        span = self._window + step_tokens - 1
        resident = np.maximum(self._sink_pages - cached, 0) + (span + self._page_size - 2) // self._page_size + 1
        return int(np.minimum(resident, pages - cached).sum())

    def unseen_pages(
        self, oldest_query: int | np.ndarray
    ) -> tuple[Int64[np.ndarray, "Hkv"], Int64[np.ndarray, "... Hkv"]]:
        """Return for each head the range of pages that no query at position `oldest_query` or later sees.

        Args:
          oldest_query: position of a query, or an array of positions [...].

        Returns:
          Start and end of the range. The start is ceil(sink_tokens / ps), [Hkv]. The end (exclusive), [..., Hkv], is
          floor((oldest_query + 1 - window) / ps), or the start if the range is empty.
        """
        behind = np.asarray(oldest_query, np.int64)[..., None] + 1 - self._window
        return self._sink_pages, np.maximum(self._sink_pages, behind // self._page_size)

    def is_unseen(self, first_page: int, end_page: int, oldest_query: int) -> Bool[np.ndarray, "Hkv pages"]:
        """Return for each head and each page from `first_page` to `end_page` - 1 whether no query at position
        `oldest_query` or later sees a token of the page.
        """
        starts, ends = self.unseen_pages(oldest_query)
        pages = np.arange(first_page, end_page)
        return (starts[:, None] <= pages) & (pages < ends[:, None])

    def allocated_tokens(self, batch_slot: int) -> int:
        """Return the number of tokens that the pages of a sequence can contain, including recycled pages.

        Raises:
          ValueError: the batch slot is unknown.
        """
        self._require_batch_slot(batch_slot)
        return int(self._num_pages[batch_slot]) * self._page_size

    def room(self, batch_slot: int) -> int:
        """Return the largest `num_tokens` for which `allocate` succeeds with the free rows.

        Raises:
          ValueError: the batch slot is unknown.
        """
        pages = self.num_free // self.num_heads
        return min(self.allocated_tokens(batch_slot) + pages * self._page_size, self.table_tokens)

    def num_lacking(self, batch_slot: int, num_tokens: int) -> int:
        """Return the number of rows that `allocate` would allocate for these arguments.

        Raises:
          ValueError: see `allocate`.
        """
        self._require_batch_slot(batch_slot)
        if not 0 <= num_tokens <= self.table_tokens:
            limit = f"the {self.table_tokens} tokens that a table has pages for"
            raise ValueError(f"num_tokens must be from 0 to {limit}, got {num_tokens}")
        pages = -(-num_tokens // self._page_size) - int(self._num_pages[batch_slot])
        return max(pages, 0) * self.num_heads

    def allocate(self, batch_slot: int, num_tokens: int) -> None:
        """Extend a sequence to `num_tokens` tokens: allocate the missing rows in every head, or none.

        If the sequence has enough pages already, nothing is allocated. Recycled pages do not get new rows.

        Raises:
          OutOfPages: fewer rows are free than the heads need. The numbers in the error count rows.
          ValueError: the batch slot is unknown, or a block table has too few entries for the tokens.
        """
        rows = self._rows.allocate(self.num_lacking(batch_slot, num_tokens))
        table, start = self._tables[batch_slot], int(self._num_pages[batch_slot])
        # The rows of a page are adjacent. In a new pool without windows, rows are therefore page·Hkv + head, as with
        # page ids that all heads share.
        pages = np.array(rows, np.int32).reshape(-1, len(table))
        table[:, start : start + len(pages)] = pages.T
        self._num_pages[batch_slot] += len(pages)

    def adopt(self, batch_slot: int, rows: Int32[np.ndarray, "heads pages"]) -> None:
        """Start a new sequence with rows that already contain its first tokens, and add a reference to each row.

        The state is then the same as if the sequence had computed these tokens itself and `recycle` had been called.

        Args:
          batch_slot: a batch slot without a sequence.
          rows: rows of the first pages in each head. A row may be free if the caller knows that its contents are still
            valid. The row of a page that no query after these pages sees must be PAGE_NONE, and no other row.

        Raises:
          ValueError: the batch slot is unknown or has a sequence, or `rows` has a wrong number of heads, too many
            pages, duplicates, or PAGE_NONE in wrong places.
          PageError: a row is outside this pool.
        """
        present = self.check_adoptable(batch_slot, rows)
        num_pages = rows.shape[1]
        self._rows.reclaim(present)
        self._tables[batch_slot, :, :num_pages] = rows
        self._num_pages[batch_slot] = num_pages
        self._oldest_query[batch_slot] = num_pages * self._page_size
        _, self._first_page[batch_slot] = self.unseen_pages(num_pages * self._page_size)

    def check_adoptable(self, batch_slot: int, rows: Int32[np.ndarray, "heads pages"]) -> list[int]:
        """Check the arguments of `adopt`. Return the rows that are not PAGE_NONE, in the order of pages.

        Raises:
          PageError, ValueError: see `adopt`.
        """
        self._require_batch_slot(batch_slot)
        if self._num_pages[batch_slot]:
            raise ValueError(f"batch_slot must be idle, {batch_slot} is not")
        num_heads, num_pages = rows.shape
        if num_heads != self.num_heads or num_pages > self._tables.shape[2]:
            raise ValueError(f"rows must be {list(self._tables.shape[1:])} or fewer pages, got {list(rows.shape)}")
        start, end = self.unseen_pages(num_pages * self._page_size)
        pages = np.arange(num_pages)
        unseen = (start[:, None] <= pages) & (pages < end[:, None])
        for head, page in np.argwhere((rows == PAGE_NONE) != unseen)[:1]:
            wanted = "absent" if unseen[head, page] else "present"
            raise ValueError(f"rows[{head}, {page}] must be {wanted}, got {rows[head, page]}")
        present: list[int] = rows.T[~unseen.T].tolist()
        if len(set(present)) != len(present):
            raise ValueError(f"rows must be given once each, got {present}")
        for row in present:
            self._rows.refcount(row)
        return present

    def recycle(self, batch_slots: ArrayLike, oldest_queries: ArrayLike) -> list[int]:
        """Release the rows of the pages that no query at position `oldest_queries` or later sees (`unseen_pages`).

        Args:
          batch_slots: [B], distinct batch slots.
          oldest_queries: [B], lowest position of a query in all steps that will be launched after this call: the number
            of tokens whose K/V is in the cache, without drafts that can be rejected.

        Returns:
          The released rows, ordered by sequence, then by head. They are free unless another sequence shares them.

        Raises:
          ValueError: the arguments are not two integer vectors of equal length, a batch slot is unknown or occurs
            twice, or an oldest query is past the end of the sequence's pages, or below the value of an earlier call,
            whose recycled pages it may see.
        """
        batch_slots = self._known_batch_slots(batch_slots, least=0)
        oldest = self._known_queries(batch_slots, _integers("oldest_queries", oldest_queries))
        start, (_, end) = self._first_page[batch_slots], self.unseen_pages(oldest)
        num_pages = np.maximum(end - start, 0).ravel()
        # Arrays with an element for each recycled page: its sequence, its head, and its index in the table.
        which = np.repeat(np.arange(num_pages.size), num_pages)
        page = start.ravel()[which] + np.arange(which.size) - (np.cumsum(num_pages) - num_pages)[which]
        sequence, head = np.divmod(which, self.num_heads)
        entries = (batch_slots[sequence], head, page)
        rows = self._tables[entries].tolist()
        self._rows.release(rows)
        self._tables[entries] = PAGE_NONE
        self._first_page[batch_slots] = np.maximum(start, end)
        self._oldest_query[batch_slots] = oldest
        return rows

    def release(self, batch_slot: int) -> None:
        """End a sequence (finished, aborted or preempted) and release all its rows. If the batch slot has no sequence,
        do nothing.

        Of the rows that become free, rows of the last pages are allocated again first.

        Raises:
          ValueError: the batch slot is unknown.
        """
        self._require_batch_slot(batch_slot)
        pages = self._tables[batch_slot].T
        self._rows.release(pages[pages != PAGE_NONE].tolist())
        pages.fill(PAGE_NONE)
        self._num_pages[batch_slot] = self._oldest_query[batch_slot] = 0
        self._first_page[batch_slot] = self._sink_pages

    def take(self, num_rows: int) -> list[int]:
        """Allocate rows for a caller that is not a sequence, each with one reference. Release them with `drop`.

        Raises:
          OutOfPages: fewer rows are free.
        """
        rows = self._rows.allocate(num_rows)
        self._held.update(rows)
        return rows

    def hold(self, rows: Sequence[int]) -> None:
        """Add one reference to each row, so that it is not allocated. The rows may be free. Remove the references with
        `drop`.

        Raises:
          PageError: a row is outside this pool.
        """
        self._rows.reclaim(rows)
        self._held.update(rows)

    def drop(self, rows: Sequence[int]) -> None:
        """Release references that `take` or `hold` added.

        The pool allocates the rows that become free again in reverse order: the last row of `rows` first.

        Raises:
          PageError: a row occurs more often than `take` and `hold` have added references to it.
        """
        mentions = Counter(rows)
        for row, count in mentions.items():
            if count > self._held[row]:
                raise PageError(f"cannot drop row {row} {count}x: it is held {self._held[row]}x")
        self._rows.release(rows)
        self._held -= mentions

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences of two batch slots. Either batch slot may be without a sequence.

        Raises:
          ValueError: a batch slot is unknown.
        """
        self._require_batch_slot(first)
        self._require_batch_slot(second)
        for state in (self._tables, self._num_pages, self._oldest_query, self._first_page):
            state[[first, second]] = state[[second, first]]

    def tables(self, batch_slots: ArrayLike) -> Int32[np.ndarray, "B Hkv P"]:
        """Return the head-wise block tables of a step, an argument of the attention operations.

        Args:
          batch_slots: [B], batch slots of the sequences; -1 for an idle sequence.

        Returns:
          Row ids, a copy; PAGE_NONE for recycled pages, pages that are not allocated, and idle sequences.

        Raises:
          ValueError: `batch_slots` is not a vector of integers, or a batch slot is unknown.
        """
        batch_slots = self._known_batch_slots(batch_slots)
        tables = self._tables[batch_slots]
        tables[batch_slots < 0] = PAGE_NONE
        return tables

    def rows(self, batch_slot: int) -> Int32[np.ndarray, "Hkv pages"]:
        """Return a copy of the row ids of a sequence's pages; PAGE_NONE for recycled pages.

        Raises:
          ValueError: the batch slot is unknown.
        """
        self._require_batch_slot(batch_slot)
        return self._tables[batch_slot, :, : self._num_pages[batch_slot]].copy()

    def slots(self, batch_slots: ArrayLike, positions: ArrayLike) -> Int32[np.ndarray, "T Hkv"]:
        """Return the slots of the new tokens of a step, an argument of `write_kv`.

        A slot is the place of one token of one head in the cache: row·ps + offset in the page.

        Args:
          batch_slots: [T], batch slot of each token's sequence; -1 for padding.
          positions: [T], position of each token in its sequence; any value for padding.

        Returns:
          The slot of each token and head; -1 for padding.

        Raises:
          ValueError: the arguments are not two integer vectors of equal length, a batch slot is unknown, or the page of
            a token is recycled or not allocated in some head.
        """
        batch_slots, positions = self._known_batch_slots(batch_slots), _integers("positions", positions)
        if positions.shape != batch_slots.shape:
            raise ValueError(f"positions must be as many as the {len(batch_slots)} batch_slots, got {len(positions)}")
        page, offset = np.divmod(positions, self._page_size)
        last_page = self._tables.shape[2] - 1
        rows = self._tables[batch_slots, :, np.clip(page, 0, last_page)]  # [T, Hkv]
        real = batch_slots >= 0
        homeless = real & ((rows == PAGE_NONE).any(axis=1) | (page < 0) | (page > last_page))
        for at in np.flatnonzero(homeless)[:1]:
            wanted = f"a position for which batch slot {batch_slots[at]} has rows in all heads"
            raise ValueError(f"positions[{at}] must be {wanted}, got {positions[at]}")
        return np.where(real[:, None], rows * self._page_size + offset[:, None], PAGE_NONE).astype(np.int32)

    def watch_reuse(self, on_reuse: Callable[[int], None]) -> None:
        """Register `on_reuse(row)`, which is called for each row that is allocated; see `PagePool.watch_reuse`.

        Raises:
          ValueError: the pool already has a callback.
        """
        self._rows.watch_reuse(on_reuse)

    def check(self) -> None:
        """Verify all invariants of the pool, in O(num_rows + table entries).

        Raises:
          InconsistentCache: names the row or table entry that violates an invariant.
        """
        self._rows.check()
        present = self._tables != PAGE_NONE
        pages = np.arange(self._tables.shape[2])
        recycled = (self._sink_pages[:, None] <= pages) & (pages < self._first_page[:, :, None])
        wanted = (pages < self._num_pages[:, None, None]) & ~recycled
        for entry in np.argwhere(present != wanted)[:1]:
            state = "absent" if wanted[tuple(entry)] else "present"
            batch_slot, head, page = entry.tolist()
            raise InconsistentCache(f"page {page} of head {head} in batch slot {batch_slot} must not be {state}")
        rows = self._tables[present].tolist()
        mentions = Counter(rows)
        for row in sorted(mentions.keys() | range(self.num_rows)):
            owners = self._rows.refcount(row) if 0 <= row < self.num_rows else 0
            if mentions[row] + self._held[row] != owners:
                held = f", held {self._held[row]}x" if self._held[row] else ""
                raise InconsistentCache(f"row {row} is {mentions[row]}x in tables{held} and owned {owners}x")
        places: dict[int, list[int]] = {}
        for row, (_, *place) in zip(rows, np.argwhere(present).tolist(), strict=True):
            if places.setdefault(row, place) != place:
                raise InconsistentCache(f"row {row} is shared between [head, page] {places[row]} and {place}")

    def _require_batch_slot(self, batch_slot: int) -> None:
        if not 0 <= batch_slot < len(self._tables):  # an explicit bound, because arrays accept negative indices
            raise ValueError(f"batch_slot must be from 0 to {len(self._tables) - 1}, got {batch_slot}")

    def _known_batch_slots(self, batch_slots: ArrayLike, least: int = -1) -> np.ndarray:
        known = _integers("batch_slots", batch_slots)
        for at in np.flatnonzero((known < least) | (known >= len(self._tables)))[:1]:
            wanted = f"from {least} to {len(self._tables) - 1}"
            raise ValueError(f"batch_slots[{at}] must be {wanted}, got {known[at]}")
        return known

    def _known_queries(self, batch_slots: np.ndarray, oldest_queries: np.ndarray) -> np.ndarray:
        """Check the arguments of `recycle` and return `oldest_queries`."""
        if oldest_queries.shape != batch_slots.shape or len(np.unique(batch_slots)) != len(batch_slots):
            wanted = f"one for each of different batch_slots {batch_slots.tolist()}"
            raise ValueError(f"oldest_queries must be {wanted}, got {len(oldest_queries)}")
        said, room = self._oldest_query[batch_slots], self._num_pages[batch_slots] * self._page_size
        for at in np.flatnonzero((oldest_queries < said) | (oldest_queries > room))[:1]:
            limits = f"from {said[at]}, its earlier value, to {room[at]}, the room of the sequence"
            raise ValueError(f"oldest_queries[{at}] must be {limits}, got {oldest_queries[at]}")
        return oldest_queries


def _widths(window: WindowPerHead) -> tuple[np.ndarray, np.ndarray]:
    """Return the window and the number of sink tokens of each head, as int64: the sum of a position and an unlimited
    window (2**31 - 1) does not fit int32.
    """
    if not isinstance(window, WindowPerHead):
        raise ValueError(f"window must be a HeadWindow, got {window!r}")
    widths, sink_tokens = _integers("window.window", window.window), _integers("window.sink_tokens", window.sink_tokens)
    if not len(widths) == len(sink_tokens) >= 1:
        lengths = f"{len(widths)} windows and {len(sink_tokens)} numbers of sink tokens"
        raise ValueError(f"window must have one entry of each per KV head, got {lengths}")
    for name, values, least in (("window", widths, 1), ("sink_tokens", sink_tokens, 0)):
        for head in np.flatnonzero(values < least)[:1]:
            raise ValueError(f"window.{name}[{head}] must be at least {least}, got {values[head]}")
    return widths, sink_tokens


def _integers(name: str, values: ArrayLike | Sequence[int]) -> np.ndarray:
    vector = np.asarray(values)
    if vector.ndim != 1 or not (np.issubdtype(vector.dtype, np.integer) or not vector.size):
        raise ValueError(f"{name} must be a vector of integers, got shape {vector.shape} of {vector.dtype.name}")
    return vector.astype(np.int64)
