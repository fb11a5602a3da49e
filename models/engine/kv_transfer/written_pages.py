"""Pages of prompts as they are written: a consumer is told of every layer while the layers after it compute.

 engine's thread     piece 0, copy   piece 1, copy   piece 2 ...     starts the programs of a step, waits for none
 device              [ piece 0 ][c][ piece 1 ][c][ piece 2 ]...      a piece is some layers
 to the host                        [ pages 0 ]   [ pages 1 ]        copies go by an engine of their own
 feed's thread                                consumer(0)  consumer(1)...  once for each layer

A copy holds the pages as the step left them, whatever happens to them afterwards: given back, handed out, overwritten.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from models.engine.kv_transfer.cached_pages import RowParts, numbered_rows
from models.engine.outputs import RequestId
from models.engine.request import Request
from models.engine.step.plan import StepPlan
from pallas_attn import PAGE_NONE
from pallas_attn.cache import GroupPools


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenChunk:
    """Pages of a request that a step completed.

    Attributes:
      request_id: the request's.
      salt: the request's.
      first_page: number of pages before them.
      tokens: token ids in these pages.
      rows: int32 [heads, pages], which rows of the layer's contents they are; PAGE_NONE where no later token sees them.
    """

    request_id: RequestId
    salt: str
    first_page: int
    tokens: tuple[int, ...]
    rows: Int32[np.ndarray, "heads pages"]


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenLayer:
    """Pages of one layer that a step completed.

    Layers come in order and each once. A step that fails ends early, and its requests are computed again: layers that
    came of a step without its last one are void.

    Attributes:
      step: number of the step; steps have ascending numbers.
      layer: number of the layer, from 0.
      num_layers: of every step.
      chunks: of the requests.
      contents: [rows, ...] by array; views of what was copied for several layers, so copy a part that is kept.
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
    """A consumer of written pages raised, or fell too far behind, and is told of nothing more."""


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenStep:
    """Pages that a step is about to complete, and that a feed was not told of.

    Attributes:
      number: of the step.
      chunks: of each cache group.
      rows: of each cache group: the rows to copy, by which `chunks` are numbered.
      ends: pages of each request that are written after it.
    """

    number: int
    chunks: tuple[tuple[WrittenChunk, ...], ...]
    rows: tuple[Int32[np.ndarray, "n"], ...]
    ends: Mapping[Request, int]


class WrittenFeed:
    """Tells a consumer of written pages, on a thread of its own; `Engine.watch_written` makes one.

    No step waits for it. If the consumer raises, or is more than `max_bytes` behind, it is told of nothing more, the
    engine's steps are those of an engine without a feed, and `error` says why.
    """

    def __init__(
        self,
        consumer: Callable[[WrittenLayer], object],
        layer_groups: Sequence[int],
        row_bytes: Sequence[int],
        pools: GroupPools,
        max_bytes: int,
    ):
        self._consumer, self._layer_groups, self._pools = consumer, tuple(layer_groups), pools
        self._row_bytes, self._max_bytes = tuple(row_bytes), max_bytes
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], int]] = deque()  # calls, and the bytes of pages each has
        self._backlog, self._busy, self._closed = 0, False, False
        self._error: ConsumerError | None = None
        self._broken = -1  # number of a step whose copies cannot be read
        self._num_steps = 0
        self._told: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        threading.Thread(target=self._run, name="written pages", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        return not self._closed and self._error is None

    @property
    def error(self) -> ConsumerError | None:
        """Why it ended, unless it was closed."""
        return self._error

    @property
    def backlog_bytes(self) -> int:
        """Bytes of pages that were copied or are about to be, and that the consumer has not taken."""
        with self._changed:
            return self._backlog

    def close(self) -> None:
        """Tells the consumer of nothing more; a call that is under way is not waited for."""
        with self._changed:
            self._closed = True
            self._drop_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the consumer has taken all that was launched so far.

        Raises:
          ConsumerError: it ended.
          TimeoutError: it takes longer.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not (self.is_open and (self._queue or self._busy)), timeout_s):
                raise TimeoutError(f"timeout_s: {self._backlog} bytes of pages are left after {timeout_s} s")
            if self._error is not None:
                raise self._error

    def afterwards(self, call: Callable[[], None]) -> None:
        """Calls a function on the feed's thread once the consumer was told of all that was launched so far; not at all
        if the feed ends before. An exception ends the feed, as the consumer's do."""
        with self._changed:
            if self.is_open:
                self._queue.append((call, 0))
                self._changed.notify_all()

    def wait_below(self, num_bytes: int, timeout_s: float) -> bool:
        """Waits until no more than so many bytes wait for the consumer, or the feed has ended; False if it takes
        longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._backlog <= num_bytes or not self.is_open, timeout_s)

    # --- the engine's side

    def plan(self, plan: StepPlan | None) -> WrittenStep | None:
        """Finds pages that a step completes, and those before them that were not told of; None if there are none, or
        nobody is to be told."""
        if not self.is_open or plan is None:
            return None
        page_size = self._pools.page_size
        ends: dict[Request, int] = {}
        pages: list[tuple[int, int, int]] = []  # row of the plan, first page and end
        for i, row in enumerate(plan.prefill, len(plan.decode)):
            end = (row.start + row.num_tokens) // page_size
            if end > (first := self._told.get(row.request, 0)):
                ends[row.request] = end
                pages.append((i, first, end))
        if not pages:
            return None
        chunks, rows = [], []
        for pool, tables in zip(self._pools.pools, plan.tables, strict=True):
            seen = []
            for i, first, end in pages:
                of_pages = tables[i, :, first:end].copy()
                of_pages[pool.is_unseen(first, end, _next_query(plan.rows[i].request, end, page_size))] = PAGE_NONE
                seen.append(of_pages)
            taken, numbers = numbered_rows(seen)
            rows.append(taken)
            chunks.append(
                tuple(
                    WrittenChunk(
                        (request := plan.rows[i].request).request_id,
                        request.salt,
                        first,
                        tuple(request.token_ids[first * page_size : end * page_size]),
                        of_pages,
                    )
                    for (i, first, end), of_pages in zip(pages, numbers, strict=True)
                )
            )
        num_bytes = sum(len(rows[group]) * n for group, n in zip(self._layer_groups, self._row_bytes, strict=True))
        with self._changed:
            if self._backlog and self._backlog + num_bytes > self._max_bytes:
                self._fail(f"max_bytes: {self._backlog + num_bytes} bytes would be waiting, {self._max_bytes} may")
                return None
        self._num_steps += 1
        return WrittenStep(self._num_steps - 1, tuple(chunks), tuple(rows), ends)

    def add(self, step: WrittenStep, layer: int, parts: RowParts) -> None:
        """Takes the copies of a layer, which the device is about to make."""
        num_bytes = sum(copied.num_bytes for arrays in parts for copied in arrays.values())
        with self._changed:
            if self.is_open:
                self._queue.append((functools.partial(self._tell, step, layer, parts), num_bytes))
                self._backlog += num_bytes
                self._changed.notify_all()

    def launched(self, step: WrittenStep) -> None:
        """Notes that all layers of a step were started."""
        self._told.update(step.ends)

    def start_over(self) -> None:
        """Notes that the caches were lost, so that all pages are computed again."""
        self._told.clear()

    # --- the consumer's side, on the feed's thread

    def _run(self) -> None:
        try:
            while self._tell_next():
                pass
        except Exception as error:  # noqa: BLE001 - whatever the consumer raises ends the feed, and nothing else
            with self._changed:
                self._fail(f"consumer: raised {type(error).__name__}: {error}", error)
        finally:
            with self._changed:
                if self.is_open:
                    self._fail("consumer: ended its thread")

    def _tell_next(self) -> bool:
        """Waits for a layer and tells the consumer of it; False if the feed has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self.is_open)
            if not self.is_open:
                return False
            call, num_bytes = self._queue.popleft()
            self._busy = True
        call()
        del call  # and the copies with it
        with self._changed:
            self._busy = False
            self._backlog -= num_bytes if self.is_open else 0
            self._changed.notify_all()
        return True

    def _tell(self, step: WrittenStep, layer: int, parts: RowParts) -> None:
        if step.number == self._broken:
            return
        try:
            contents = _joined(parts)
        except RuntimeError:  # of the device: the engine's next call raises it
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


def _next_query(request: Request, end: int, page_size: int) -> int:
    """Position of the first token that is computed after `end` pages: at the latest the last one of the prompt's."""
    return min(end, (len(request.token_ids) - 1) // page_size) * page_size


def _joined(parts: RowParts) -> dict[str, np.ndarray]:
    """Waits for copies and joins them."""
    if len(parts) == 1:
        return {name: copied.read() for name, copied in parts[0].items()}
    names = parts[0] if parts else {}
    return {name: np.concatenate([arrays[name].read() for arrays in parts]) for name in names}
