"""Receiver of a prompt's pages, which another engine computes and sends layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from pallas_attn import PAGE_NONE
from pallas_attn.cache import GroupPools, PrefixCache
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.fields import Array, Integer, check_field
from pallas_attn.models.engine.runner import Runner


@dataclasses.dataclass(eq=False)
class _Chunk:
    """Pages that one step of the other engine completed, while their layers arrive.

    Attributes:
      step: number of the other engine's step.
      first_page, end_page: range of pages.
      rows: for each cache group (layers with equal windows), the row numbers int32 [heads, pages] that were allocated
        in this engine's pool; None before the first layer of the group arrives.
      next_layer: number of layers that have arrived.
    """

    step: int
    first_page: int
    end_page: int
    rows: list[Int32[np.ndarray, "heads pages"] | None]
    next_layer: int = 0


class IncomingPages:
    """Writes the first pages of a prompt into an engine's cache, layer by layer; made by `Engine.receive_pages`.

    A page row is the part of a page in one cache array: all KV heads, or one head if heads have different windows. Rows
    are allocated as pages arrive. The object holds its rows until `close`, or until no later token attends to them:
    requests do not get held rows. The prefix cache contains a page once all layers of the page are written.

    The engine releases all held rows early if they prevent requests from running, or if it clears its caches after an
    exception. Then `is_lost` is True, and pages that arrive later are ignored. The prompt's request computes all pages
    that are missing.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        salt: str,
        groups: Sequence[GroupSizes],
        pools: GroupPools,
        prefix_cache: PrefixCache,
        runner: Runner,
        changing: Callable[[], contextlib.AbstractContextManager[None]],
        rank: int,
    ):
        self._groups, self._pools, self._prefix_cache = tuple(groups), pools, prefix_cache
        self._runner, self._changing, self._rank = runner, changing, rank
        num_pages = len(tokens) // pools.page_size
        self._last_page = (len(tokens) - 1) // pools.page_size  # a request always computes the last token's page
        self._tokens, self._salt = tuple(tokens[: num_pages * pools.page_size]), salt
        self._of_layer = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self._formats = {
            layer: arrays for group in groups for layer, arrays in runner.row_format(group).of_layers().items()
        }
        self._rows = [np.full((group.num_heads, num_pages), PAGE_NONE, np.int32) for group in groups]
        self._num_pages = 0
        self._chunk: _Chunk | None = None
        self._last_step = -1  # newest step from which a layer has arrived
        self._open, self._lost = True, False

    @property
    def rank(self) -> int:
        """Data rank whose caches get the pages; 0 without data parallelism."""
        return self._rank

    @property
    def is_open(self) -> bool:
        """Whether arriving pages are written."""
        return self._open

    @property
    def is_lost(self) -> bool:
        """Whether the held page rows were released before `close`."""
        return self._lost

    @property
    def num_tokens(self) -> int:
        """Number of leading tokens whose pages have arrived completely."""
        return self._num_pages * self._pools.page_size

    def write(
        self,
        step: int,
        layer: int,
        first_page: int,
        rows: Int32[np.ndarray, "heads pages"],
        contents: Mapping[str, np.ndarray],
    ) -> None:
        """Write one layer of the pages that a step of the other engine completed.

        If a new step begins before the last layer of the previous step has arrived, the previous step is discarded.
        Pages that have already arrived are skipped.

        Args:
          step: number of the step; ascending.
          layer: number of the layer; layers come in order.
          first_page: index of the first page in the prompt.
          rows: for each head and page, the index of the page row along the first axis of the arrays in `contents`;
            PAGE_NONE for page rows that were not sent. `heads` is 1 unless heads have different windows.
          contents: contents of the sent page rows, [sent rows, ...], by name of the array.

        Raises:
          ValueError: the pages are outside the prompt, or earlier pages are missing; a layer or a step is out of order;
            or an argument has another type or format. Nothing is written.
        """
        self.check(step, layer, first_page, rows, contents)
        if not self._open:
            return
        chunk = self._chunk_of(step, first_page, rows)
        with self._changing():
            if not self._open:
                return  # entering `_changing` made the engine start over, which released the rows
            if chunk is not self._chunk:
                self._drop_chunk()
                self._chunk, self._last_step = chunk, step
            own = self._take(chunk, layer, rows)
            if own is None:
                self.lose()
                return
            given = own != PAGE_NONE
            new = {name: array[rows[given]] for name, array in contents.items()}
            self._runner.write_layer(self._groups[self._of_layer[layer]], layer, own[given], new, self._rank)
            chunk.next_layer += 1
            if chunk.next_layer == len(self._of_layer):
                self._publish(chunk)

    def close(self) -> None:
        """Release the held page rows. Complete pages stay in the prefix cache until they are evicted. Further calls do
        nothing."""
        if self._open:
            with self._changing():
                if self._open:  # False if entering `_changing` made the engine start over
                    self.lose()
                    self._lost = False

    def lose(self, *, dropping: bool = True) -> None:
        """Release the held page rows early; the engine calls this method.

        Args:
          dropping: whether to return the rows to the pools. False if the pools have been reset already.
        """
        if self._open and dropping:
            self._drop_chunk()
            for pool, rows in zip(self._pools.pools, self._rows, strict=True):
                pool.drop(rows.T[rows.T != PAGE_NONE].tolist())
        self._open, self._lost, self._chunk = False, True, None

    def _chunk_of(self, step: int, first_page: int, rows: np.ndarray) -> _Chunk:
        """Return the chunk of a layer: the current chunk, or a new one if a new step begins."""
        chunk = self._chunk
        if chunk is None or step != chunk.step:
            chunk = _Chunk(step, first_page, first_page + rows.shape[1], [None] * len(self._groups))
        return chunk

    def check(
        self,
        step: int,
        layer: int,
        first_page: int,
        rows: Int32[np.ndarray, "heads pages"],
        contents: Mapping[str, np.ndarray],
    ) -> None:
        """Raise the ValueError that `write` with these arguments would raise.

        The order of steps and layers is checked only while `is_open` is True.
        """
        check_field("step", step, Integer())
        check_field("layer", layer, Integer(0, len(self._of_layer) - 1))
        check_field("first_page", first_page, Integer(0, self._rows[0].shape[1]))
        self._check_rows(layer, first_page, rows, contents)
        if self._open:
            self._check_order(step, layer, first_page, rows)

    def _check_rows(self, layer: int, first_page: int, rows: np.ndarray, contents: Mapping[str, np.ndarray]) -> None:
        """Check the format of rows and contents, and that no page is missing that later tokens attend to."""
        if not isinstance(contents, Mapping) or not all(isinstance(array, np.ndarray) for array in contents.values()):
            raise ValueError(f"contents: expected arrays by name, got a {type(contents).__name__}")
        if {name: (array.shape[1:], array.dtype) for name, array in contents.items()} != self._formats[layer]:
            raise ValueError(f"contents: layer {layer} has other shapes or dtypes than the cache's rows")
        counts = {len(array) for array in contents.values()}
        if len(counts) != 1:
            raise ValueError(f"contents: expected the same number of rows in every array, got {sorted(counts)}")
        (most,) = counts
        group = self._of_layer[layer]
        check_field("rows", rows, Array("int32", (self._groups[group].num_heads, None)))
        end_page, num_pages = first_page + rows.shape[1], self._rows[0].shape[1]
        if not first_page < end_page <= num_pages:
            raise ValueError(
                f"rows: expected 1 to {num_pages - first_page} pages from {first_page}, got {rows.shape[1]}"
            )
        if not PAGE_NONE <= rows.min() <= rows.max() < most:
            raise ValueError(f"rows: expected numbers from {PAGE_NONE} to {most - 1}, got {rows.min()} to {rows.max()}")
        # The prefix cache must not contain a page without rows that every longer sequence needs.
        optional = self._pools.pools[group].is_unseen(first_page, end_page, self._pools.table_tokens)
        if lacking := np.argwhere((rows == PAGE_NONE) & ~optional).tolist():
            head, page = lacking[0]
            raise ValueError(f"rows: expected a row for page {first_page + page} of head {head}, got {PAGE_NONE}")

    def _check_order(self, step: int, layer: int, first_page: int, rows: np.ndarray) -> None:
        """Check that a layer is the next one of the current chunk, or the first one of a new step."""
        chunk = self._chunk
        if chunk is None or step != chunk.step:
            if step <= self._last_step:
                raise ValueError(f"step: expected an integer of at least {self._last_step + 1}, got {step}")
            if first_page > self._num_pages:
                raise ValueError(f"first_page: expected at most {self._num_pages}, got {first_page}")
            chunk = self._chunk_of(step, first_page, rows)
        if layer != chunk.next_layer:
            raise ValueError(f"layer: expected {chunk.next_layer} of step {step}, got {layer}")
        if (first_page, first_page + rows.shape[1]) != (chunk.first_page, chunk.end_page):
            raise ValueError(f"rows: expected pages {chunk.first_page} to {chunk.end_page} in every layer of the step")
        own = chunk.rows[self._of_layer[layer]]
        if own is not None and (own != PAGE_NONE)[rows == PAGE_NONE].any():
            raise ValueError(f"rows: layer {layer} lacks pages that other layers of its cache group have")

    def _take(self, chunk: _Chunk, layer: int, rows: np.ndarray) -> np.ndarray | None:
        """Return the row numbers of a chunk in the cache group of a layer, int32 [heads, pages].

        The rows are allocated when the first layer of the group arrives. PAGE_NONE marks pages that are not written.
        Return None if too few rows are free.
        """
        group = self._of_layer[layer]
        own = chunk.rows[group]
        if own is None:
            wanted = rows != PAGE_NONE
            wanted[:, : self._num_pages - chunk.first_page] = False
            pool = self._pools.pools[group]
            wanted &= ~pool.is_unseen(chunk.first_page, chunk.end_page, self._next_query(chunk.end_page))
            if (lacking := int(wanted.sum())) > pool.num_free:
                return None
            own = np.full(rows.shape, PAGE_NONE, np.int32)
            own[wanted] = pool.take(lacking)
            chunk.rows[group] = own
        return own

    def _publish(self, chunk: _Chunk) -> None:
        """Add the pages of a complete chunk to the prefix cache. Release rows that no later token attends to."""
        for held, own in zip(self._rows, chunk.rows, strict=True):
            if own is not None:
                before = held[:, chunk.first_page : chunk.end_page]
                held[:, chunk.first_page : chunk.end_page] = np.where(own == PAGE_NONE, before, own)
        self._chunk = None
        self._num_pages = max(self._num_pages, chunk.end_page)
        rows = tuple(held[:, : self._num_pages] for held in self._rows)
        self._prefix_cache.publish_rows(self._tokens[: self.num_tokens], rows, self._salt)
        for pool, held in zip(self._pools.pools, rows, strict=True):
            behind = pool.is_unseen(0, self._num_pages, self._next_query(self._num_pages)) & (held != PAGE_NONE)
            pool.drop(held[behind].tolist())
            held[behind] = PAGE_NONE  # `held` is a view of `self._rows`

    def _next_query(self, num_pages: int) -> int:
        """Position of the first token that a request computes if it finds `num_pages` pages."""
        return min(num_pages, self._last_page) * self._pools.page_size

    def _drop_chunk(self) -> None:
        """Release the page rows of an incomplete chunk."""
        if self._chunk is not None:
            for pool, own in zip(self._pools.pools, self._chunk.rows, strict=True):
                if own is not None:
                    pool.drop(own[own != PAGE_NONE].tolist())
        self._chunk = None
