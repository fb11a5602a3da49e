"""Report pages of prompts as they are written: a consumer receives each layer while later layers compute.

 engine's thread     launch 0, copy  launch 1, copy  launch 2 ...    launches the programs of a step, waits for none
 device              [program 0][c][program 1][c][program 2]...      a program computes consecutive layers
 DMA to the host                    [ pages 0 ]   [ pages 1 ]        overlaps with computation
 feed's thread                                consumer(0)  consumer(1)...  one call per layer

[c] is a copy of the new pages on the device. It holds the pages as the step wrote them. Later changes of the pages
(release, reuse, overwriting) do not affect the copy.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_attn import PAGE_NONE
from pallas_attn.cache import GroupPools, HeadPagePool
from pallas_attn.models.engine.kv_transfer.cached_pages import numbered_rows
from pallas_attn.models.engine.kv_transfer.row_copies import RowCopies
from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.step.plan import StepPlan


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenChunk:
    """Pages of a request that a step completed.

    Attributes:
      request_id: id of the request.
      salt: salt of the request.
      first_page: index of the first of these pages in the request.
      tokens: token ids in these pages.
      rows: int32 [heads, pages], for each head and page the index along the first axis of `WrittenLayer.contents`;
        PAGE_NONE for pages that no later token attends to. `heads` is 1 unless heads have different windows.
    """

    request_id: RequestId
    salt: str
    first_page: int
    tokens: tuple[int, ...]
    rows: Int32[np.ndarray, "heads pages"]


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenLayer:
    """Pages of one layer that a step completed.

    The layers of a step are reported in ascending order, each once. If a step fails, its later layers are not reported,
    and its requests are computed again. The layers of a step are therefore valid only if its last layer is reported.

    Attributes:
      step: number of the step; ascending.
      layer: number of the layer, from 0.
      num_layers: number of layers of every step.
      chunks: pages of each request.
      contents: contents of the pages, [rows, ...], by name of the array, for example "k". The arrays may be views of a
        buffer with several layers. A consumer that keeps an array should copy it, because a view keeps the whole
        buffer.
    """

    step: int
    layer: int
    num_layers: int
    chunks: tuple[WrittenChunk, ...]
    contents: Mapping[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.contents.values())


class ConsumerError(RuntimeError):
    """The consumer of written pages raised an exception or exceeded the backlog limit. The feed has ended."""


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenStep:
    """Pages that a step will complete and that were not reported yet.

    Attributes:
      number: number of the step.
      chunks: for each cache group, the pages of each request.
      rows: for each cache group and each data rank, the numbers of the page rows to copy. `WrittenChunk.rows` are
        indices into the rows of all data ranks, one after the other.
      ends: number of complete pages of each request after the step.
    """

    number: int
    chunks: tuple[tuple[WrittenChunk, ...], ...]
    rows: tuple[tuple[Int32[np.ndarray, "_"], ...], ...]
    ends: Mapping[Request, int]


class _CompletedPages(NamedTuple):
    """Pages of a request that a step completes.

    Attributes:
      request: the request.
      index: index of the request in the arrays of the plan.
      first, end: range of pages.
      page_size: tokens per page.
    """

    request: Request
    index: int
    first: int
    end: int
    page_size: int

    def rows_of(
        self, pool: HeadPagePool, tables: Int32[np.ndarray, "rows heads pages"]
    ) -> Int32[np.ndarray, "heads pages"]:
        """Return the row numbers of the pages in a cache group; PAGE_NONE for pages that no later token attends to.

        Args:
          pool: page pool of the cache group.
          tables: block tables of the plan.
        """
        rows = tables[self.index, :, self.first : self.end].copy()
        # The next token is at most the first one of the page with the request's last known token.
        last_page = (len(self.request.token_ids) - 1) // self.page_size
        next_query = min(self.end, last_page) * self.page_size
        rows[pool.is_unseen(self.first, self.end, next_query)] = PAGE_NONE
        return rows

    def chunk(self, rows: Int32[np.ndarray, "heads pages"]) -> WrittenChunk:
        """Return the report of the pages with these row numbers."""
        tokens = self.request.token_ids[self.first * self.page_size : self.end * self.page_size]
        return WrittenChunk(self.request.request_id, self.request.salt, self.first, tuple(tokens), rows)


class WrittenFeed:
    """Reports written pages to a consumer on a separate thread; made by `Engine.watch_written`.

    No step waits for the consumer. If the consumer raises, or its backlog exceeds `max_bytes`, the feed ends: the
    consumer is not called again, the engine runs steps as without a feed, and `error` has the reason.
    """

    def __init__(
        self,
        consumer: Callable[[WrittenLayer], object],
        layer_groups: Sequence[int],
        row_bytes: Sequence[int],
        pools: Sequence[GroupPools],
        max_bytes: int,
    ):
        """Start the feed's thread.

        Args:
          consumer: function called on the feed's thread.
          layer_groups: number of the cache group of each layer.
          row_bytes: bytes of a page row of each layer.
          pools: page pools of each data rank.
          max_bytes: maximum backlog.
        """
        self._consumer, self._layer_groups, self._pools = consumer, tuple(layer_groups), tuple(pools)
        self._row_bytes, self._max_bytes = tuple(row_bytes), max_bytes
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], int]] = deque()  # functions to call, and bytes of their pages
        self._backlog, self._busy, self._closed = 0, False, False
        self._error: ConsumerError | None = None
        self._broken = -1  # number of a step whose copies could not be read
        self._num_steps = 0
        self._reported: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        threading.Thread(target=self._run, name="written pages", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether the feed has neither failed nor been closed."""
        return not self._closed and self._error is None

    @property
    def error(self) -> ConsumerError | None:
        """Reason of a failure; None if the feed is open or was closed."""
        return self._error

    @property
    def backlog_bytes(self) -> int:
        """Bytes of launched page copies that the consumer has not processed."""
        with self._changed:
            return self._backlog

    def close(self) -> None:
        """End the feed. Does not wait for a running call of the consumer."""
        with self._changed:
            self._closed = True
            self._drop_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the consumer has processed the pages of all steps launched so far, or the feed is closed.

        Raises:
          ConsumerError: the feed has failed.
          TimeoutError: the consumer needs longer than `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not (self.is_open and (self._queue or self._busy)), timeout_s):
                raise TimeoutError(f"timeout_s: {self._backlog} bytes of pages are left after {timeout_s} s")
            if self._error is not None:
                raise self._error

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call a function on the feed's thread after the consumer has processed the pages of all steps launched so far.

        The function is not called if the feed ends earlier. If it raises an exception, the feed ends.
        """
        with self._changed:
            if self.is_open:
                self._queue.append((call, 0))
                self._changed.notify_all()

    def wait_below(self, num_bytes: int, timeout_s: float) -> bool:
        """Wait until the backlog is at most `num_bytes`, or the feed has ended. Return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._backlog <= num_bytes or not self.is_open, timeout_s)

    # --- the engine's side

    def plan(self, plans: Sequence[StepPlan | None]) -> WrittenStep | None:
        """Return the pages that the prompt chunks of a step complete.

        Earlier pages of the same requests are included if they were not reported. Pages that decode steps complete, and
        pages of requests with keys and values of replaced weights, are not reported. Return None if there are no pages
        to report, or the feed has ended. End the feed if the backlog would exceed `max_bytes`.

        Args:
          plans: plan of each data rank; None for a rank without rows.
        """
        if not self.is_open:
            return None
        ends: dict[Request, int] = {}
        num_groups = len(self._pools[0].pools)
        chunks: list[list[WrittenChunk]] = [[] for _ in range(num_groups)]
        rows: list[list[Int32[np.ndarray, "_"]]] = [[] for _ in range(num_groups)]
        for pools, plan in zip(self._pools, plans, strict=True):
            completed = [] if plan is None else self._completed(plan)
            ends |= {page.request: page.end for page in completed}
            for group, pool in enumerate(pools.pools):
                tables = [] if plan is None else [page.rows_of(pool, plan.tables[group]) for page in completed]
                taken, numbers = numbered_rows(tables)
                first_row = sum(map(len, rows[group]))
                rows[group].append(taken)
                for page, own in zip(completed, numbers, strict=True):
                    chunks[group].append(page.chunk(np.where(own == PAGE_NONE, own, own + np.int32(first_row))))
        if not ends:
            return None
        num_rows = [sum(map(len, of_ranks)) for of_ranks in rows]
        num_bytes = sum(num_rows[group] * n for group, n in zip(self._layer_groups, self._row_bytes, strict=True))
        with self._changed:
            if self._backlog and self._backlog + num_bytes > self._max_bytes:
                self._fail(f"max_bytes: {self._backlog + num_bytes} bytes would be waiting, {self._max_bytes} may")
                return None
        self._num_steps += 1
        return WrittenStep(self._num_steps - 1, tuple(map(tuple, chunks)), tuple(map(tuple, rows)), ends)

    def _completed(self, plan: StepPlan) -> list[_CompletedPages]:
        """Return the pages of each prompt chunk of a data rank that are complete after the step and were not
        reported."""
        found, page_size = [], self._pools[0].page_size
        for i, row in enumerate(plan.prefill, len(plan.decode)):
            if row.request.has_old_keys:
                continue
            end = (row.start + row.num_tokens) // page_size
            if end > (first := self._reported.get(row.request, 0)):
                found.append(_CompletedPages(row.request, i, first, end, page_size))
        return found

    def add(self, step: WrittenStep, layer: int, copies: RowCopies) -> None:
        """Queue the copies of a layer. The device may still be copying; the feed's thread waits for the copies."""
        num_bytes = sum(copied.num_bytes for arrays in copies for copied in arrays.values())
        with self._changed:
            if self.is_open:
                self._queue.append((functools.partial(self._deliver, step, layer, copies), num_bytes))
                self._backlog += num_bytes
                self._changed.notify_all()

    def launched(self, step: WrittenStep) -> None:
        """Record that all layers of a step were launched."""
        self._reported.update(step.ends)

    def start_over(self) -> None:
        """Record that the caches were lost, so that all pages will be computed and reported again."""
        self._reported.clear()

    # --- the consumer's side, on the feed's thread

    def _run(self) -> None:
        try:
            while self._deliver_next():
                pass
        except Exception as error:  # noqa: BLE001 - whatever the consumer raises ends the feed, and nothing else
            with self._changed:
                self._fail(f"consumer: raised {type(error).__name__}: {error}", error)
        finally:
            with self._changed:
                if self.is_open:
                    self._fail("consumer: ended its thread")

    def _deliver_next(self) -> bool:
        """Wait for a queued layer and pass it to the consumer. Return False if the feed has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self.is_open)
            if not self.is_open:
                return False
            call, num_bytes = self._queue.popleft()
            self._busy = True
        call()
        del call  # releases the copies
        with self._changed:
            self._busy = False
            self._backlog -= num_bytes if self.is_open else 0
            self._changed.notify_all()
        return True

    def _deliver(self, step: WrittenStep, layer: int, copies: RowCopies) -> None:
        if step.number == self._broken:
            return
        try:
            contents = _joined(copies)
        except RuntimeError:  # the device failed; the engine's next call raises this error, too
            self._broken = step.number
            return
        chunks = step.chunks[self._layer_groups[layer]]
        self._consumer(WrittenLayer(step.number, layer, len(self._layer_groups), chunks, contents))

    def _fail(self, reason: str, cause: BaseException | None = None) -> None:
        self._error = self._error or ConsumerError(reason)
        self._error.__cause__ = cause
        self._drop_all()

    def _drop_all(self) -> None:
        self._queue.clear()
        self._backlog = 0
        self._changed.notify_all()


def _joined(copies: RowCopies) -> dict[str, np.ndarray]:
    """Wait for the copies of a layer, and return its page rows by name of the array."""
    if len(copies) == 1:
        return {name: copied.read() for name, copied in copies[0].items()}
    names = copies[0] if copies else {}
    return {name: np.concatenate([arrays[name].read() for arrays in copies]) for name in names}
