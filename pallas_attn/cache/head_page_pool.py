"""Rows of a head-wise paged KV cache: which head of which sequence owns them, and which of them nobody reads again."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from pallas_attn.cache.errors import InconsistentCache
from pallas_attn.cache.page_pool import PagePool

PAGE_NONE = -1  # the one of pallas_attn.types, which imports jax


@runtime_checkable
class WindowPerHead(Protocol):
    """What is read of a `pallas_attn.HeadWindow`, whose module imports jax."""

    @property
    def window(self) -> ArrayLike: ...

    @property
    def sink_tokens(self) -> ArrayLike: ...


class HeadPagePool:
    """Hands out the rows of layers with equal windows to the KV heads of the sequences in a batch.

    A row is one page of one KV head, and any head may own any row: what windowed heads give back, full heads can use.
    A sequence is known by its batch slot. Its heads get rows for the same pages at the same time, all or none, and keep
    them until the sequence is released, but for the pages that are *recycled*: those of which a head can see no token
    any more, because they lie behind its sink tokens and outside the window of every query still to come.

    What is still to come, only the caller knows. The oldest query of any later step is the first token whose K/V is not
    final: a token that was computed on trial and can be rejected is computed again, and then sees what it saw before.
    So recycling follows the tokens that are accepted, never those that are written. Steps that are launched already do
    not count: the device runs them before any step that writes to the rows they read.

    With `recycle` before each `allocate`, a sequence holds at most `peak_rows`. Row ids depend on the order of calls
    only, so that processes which are told the same hand out the same. Nothing that raises has changed anything. Not
    thread-safe.
    """

    def __init__(
        self, num_rows: int, window: WindowPerHead, *, page_size: int, max_num_seqs: int, max_pages_per_seq: int
    ) -> None:
        """Starts with all rows free.

        Args:
            num_rows: N·Hkv, rows of a cache of N pages.
            window: What each KV head sees: the very `HeadWindow` that the attention operations are given. Read here,
                and never again.
            page_size: ps, tokens per page.
            max_num_seqs: Batch slots.
            max_pages_per_seq: P, table entries of a head.

        Raises:
            ValueError: a size is smaller than 1, the slots of all rows do not fit an int32, or `window` is not a
                HeadWindow with one width of at least 1 and one non-negative number of sink tokens per head.
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
        num_heads = len(self._window)
        self._tables = np.full((max_num_seqs, num_heads, max_pages_per_seq), PAGE_NONE, np.int32)
        self._num_pages = np.zeros(max_num_seqs, np.int64)  # entries that rows were allocated for
        self._oldest_query = np.zeros(max_num_seqs, np.int64)
        # The first page after a head's sink tokens that is not recycled.
        self._first_page = np.tile(self._sink_pages, (max_num_seqs, 1))

    @property
    def num_rows(self) -> int:
        return self._rows.num_pages

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can hand out."""
        return self._rows.num_free

    @property
    def num_owned(self) -> int:
        return self._rows.num_owned

    @property
    def free_fraction(self) -> float:
        """The part of all rows that is free, from 0.0 to 1.0: not rounded to pages of all heads, so that each row that
        comes free shows."""
        return self.num_free / self.num_rows

    def peak_rows(self, num_tokens: int, *, step_tokens: int) -> int:
        """Rows that a sequence never exceeds on its way to `num_tokens`, if it is recycled before each `allocate`: in
        each head the pages of its sink tokens, of the window and of a step's new tokens.

        Args:
            num_tokens: Tokens of the sequence in the end.
            step_tokens: New tokens of one step at most, including those that may be rejected.

        Raises:
            ValueError: `num_tokens` is negative or `step_tokens` smaller than 1.
        """
        if num_tokens < 0 or step_tokens < 1:
            wanted = "num_tokens must not be negative and step_tokens at least 1"
            raise ValueError(f"{wanted}, got {num_tokens=}, {step_tokens=}")
        # The first query's window and all queries, one page more than they fill because they may begin anywhere in it.
        span = self._window + step_tokens - 1
        resident = self._sink_pages + (span + self._page_size - 2) // self._page_size + 1
        return int(np.minimum(resident, -(-num_tokens // self._page_size)).sum())

    def num_lacking(self, batch_slot: int, num_tokens: int) -> int:
        """Rows that `allocate` would take.

        Raises:
            ValueError: as for `allocate`.
        """
        self._require_batch_slot(batch_slot)
        _, num_heads, max_pages = self._tables.shape
        if not 0 <= num_tokens <= max_pages * self._page_size:
            limit = f"the {max_pages * self._page_size} tokens that a table has pages for"
            raise ValueError(f"num_tokens must be from 0 to {limit}, got {num_tokens}")
        pages = -(-num_tokens // self._page_size) - int(self._num_pages[batch_slot])
        return max(pages, 0) * num_heads

    def allocate(self, batch_slot: int, num_tokens: int) -> None:
        """Makes room for the first `num_tokens` tokens of a sequence in every head, or in none.

        Takes nothing if the room is there, and leaves recycled pages absent.

        Raises:
            OutOfPages: fewer rows are free than the heads lack; it counts rows.
            ValueError: an unknown batch slot, or more tokens than a table has pages for.
        """
        rows = self._rows.allocate(self.num_lacking(batch_slot, num_tokens))
        table, start = self._tables[batch_slot], int(self._num_pages[batch_slot])
        # Page by page, so that without windows a fresh pool numbers its rows as rank-2 tables do: page·Hkv + head.
        pages = np.array(rows, np.int32).reshape(-1, len(table))
        table[:, start : start + len(pages)] = pages.T
        self._num_pages[batch_slot] += len(pages)

    def recycle(self, batch_slot: int, oldest_query: int) -> list[int]:
        """Takes back the rows of pages that no head needs for a query at `oldest_query` or after it.

        These are the pages from ceil(sink_tokens / ps) to floor((oldest_query + 1 - window) / ps), exclusive. The page
        of `oldest_query` itself is never among them.

        Args:
            batch_slot: The sequence's.
            oldest_query: Position of the oldest query of any step launched from now on: the number of tokens whose K/V
                is in the cache and which no rejected draft can take back.

        Returns:
            The rows taken back.

        Raises:
            ValueError: an unknown batch slot, or an `oldest_query` that there is no room up to or that is smaller than
                it was said to be before: it may see recycled pages.
        """
        self._require_batch_slot(batch_slot)
        room = int(self._num_pages[batch_slot]) * self._page_size
        if not (said := int(self._oldest_query[batch_slot])) <= oldest_query <= room:
            limits = f"from {said}, as it was before, to the {room} tokens there is room for"
            raise ValueError(f"oldest_query must be {limits}, got {oldest_query}")
        table, start = self._tables[batch_slot], self._first_page[batch_slot]
        end = np.maximum(start, (oldest_query + 1 - self._window) // self._page_size)
        recycled = [table[head, start[head] : end[head]] for head in np.flatnonzero(end > start)]
        rows = [row for entries in recycled for row in entries.tolist()]
        self._rows.release(rows)
        for entries in recycled:
            entries.fill(PAGE_NONE)
        self._first_page[batch_slot] = end
        self._oldest_query[batch_slot] = oldest_query
        return rows

    def release(self, batch_slot: int) -> None:
        """Takes back all rows of a sequence that has ended, was aborted or is preempted.

        Doing it again does nothing, as long as the batch slot has not gone to another sequence.

        Raises:
            ValueError: an unknown batch slot.
        """
        self._require_batch_slot(batch_slot)
        pages = self._tables[batch_slot].T
        self._rows.release(pages[pages != PAGE_NONE].tolist())
        pages.fill(PAGE_NONE)
        self._num_pages[batch_slot] = self._oldest_query[batch_slot] = 0
        self._first_page[batch_slot] = self._sink_pages

    def swap(self, first: int, second: int) -> None:
        """Exchanges the sequences of two batch slots, with the rows of all their heads; either may be idle.

        Raises:
            ValueError: an unknown batch slot.
        """
        self._require_batch_slot(first)
        self._require_batch_slot(second)
        for state in (self._tables, self._num_pages, self._oldest_query, self._first_page):
            state[[first, second]] = state[[second, first]]

    def tables(self, batch_slots: ArrayLike) -> Int32[np.ndarray, "B Hkv P"]:
        """Head-wise block tables of a step, as the attention operations take them.

        Args:
            batch_slots: [B], the sequences' batch slots; -1 for an idle row.

        Returns:
            A copy: row ids, PAGE_NONE where a page is recycled or not yet allocated, and in idle rows.

        Raises:
            ValueError: not a vector of integers, or an unknown batch slot.
        """
        batch_slots = self._known_batch_slots(batch_slots)
        tables = self._tables[batch_slots]
        tables[batch_slots < 0] = PAGE_NONE
        return tables

    def slots(self, batch_slots: ArrayLike, positions: ArrayLike) -> Int32[np.ndarray, "T Hkv"]:
        """Where `write_kv` puts each new token of a step.

        Args:
            batch_slots: [T], the batch slot of each token's sequence; -1 for padding.
            positions: [T], the tokens' positions in their sequences; anything for padding.

        Returns:
            row·ps + offset per head; -1 for padding.

        Raises:
            ValueError: not two vectors of integers of one length, an unknown batch slot, or a token without a row in
                some head: its page was not allocated, or recycled.
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

    def check(self) -> None:
        """Verifies every invariant, in O(num_rows + table entries).

        Raises:
            InconsistentCache: naming the row, or the table entry at fault.
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
        rows, mentions = np.unique(self._tables[present], return_counts=True)
        mentioned = dict(zip(rows.tolist(), mentions.tolist(), strict=True))
        for row in sorted(mentioned.keys() | range(self.num_rows)):
            owners = self._rows.refcount(row) if 0 <= row < self.num_rows else 0
            if not mentioned.get(row, 0) == owners <= 1:
                raise InconsistentCache(f"row {row} is {mentioned.get(row, 0)}x in tables and owned {owners}x")

    def _require_batch_slot(self, batch_slot: int) -> None:
        if not 0 <= batch_slot < len(self._tables):  # an explicit bound, because arrays accept negative indices
            raise ValueError(f"batch_slot must be from 0 to {len(self._tables) - 1}, got {batch_slot}")

    def _known_batch_slots(self, batch_slots: ArrayLike) -> np.ndarray:
        known = _integers("batch_slots", batch_slots)
        for at in np.flatnonzero((known < -1) | (known >= len(self._tables)))[:1]:
            wanted = f"from -1 to {len(self._tables) - 1}"
            raise ValueError(f"batch_slots[{at}] must be {wanted}, got {known[at]}")
        return known


def _widths(window: WindowPerHead) -> tuple[np.ndarray, np.ndarray]:
    """Window and sink tokens of each head, in 64 bits: positions and unlimited windows add up to more than 32 hold."""
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


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    vector = np.asarray(values)
    if vector.ndim != 1 or not (np.issubdtype(vector.dtype, np.integer) or not vector.size):
        raise ValueError(f"{name} must be a vector of integers, got shape {vector.shape} of {vector.dtype.name}")
    return vector.astype(np.int64)
