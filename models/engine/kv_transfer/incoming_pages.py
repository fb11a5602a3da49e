"""Pages of a prompt that another engine computes, as they arrive layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from models.engine.group_sizes import GroupSizes
from models.engine.runner import Runner
from pallas_attn import PAGE_NONE
from pallas_attn.cache import GroupPools, PrefixCache


@dataclasses.dataclass(eq=False)
class _Chunk:
    """Pages that one step of the other engine completed, of which some layers have arrived.

    Attributes:
      step: number of that step.
      first_page, end_page: the pages.
      rows: [heads, pages] of each cache group that they got here; None for groups of which no layer has arrived.
      next_layer: number of layers that have arrived.
    """

    step: int
    first_page: int
    end_page: int
    rows: list[Int32[np.ndarray, "heads pages"] | None]
    next_layer: int = 0


class IncomingPages:
    """Leading pages of a prompt on their way into an engine's cache; `Engine.receive_pages` makes one.

    Rows are taken as pages arrive, and held until `close` or until no later token sees them: no request is given them,
    and none finds them before all their layers are written. If no request could move otherwise, or the engine starts
    over, all of them are given up: then `is_lost`, and what still arrives is ignored. A request computes whatever is
    not there.
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
    ):
        self._groups, self._pools, self._prefix_cache = tuple(groups), pools, prefix_cache
        self._runner, self._changing = runner, changing
        num_pages = len(tokens) // pools.page_size
        self._last_page = (len(tokens) - 1) // pools.page_size  # the first that a request computes
        self._tokens, self._salt = tuple(tokens[: num_pages * pools.page_size]), salt
        self._of_layer = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self._formats = {
            layer: arrays for group in groups for layer, arrays in runner.row_format(group).of_layers().items()
        }
        self._rows = [np.full((group.num_heads, num_pages), PAGE_NONE, np.int32) for group in groups]
        self._num_pages = 0
        self._chunk: _Chunk | None = None
        self._open, self._lost = True, False

    @property
    def is_open(self) -> bool:
        """Whether pages are still taken in."""
        return self._open

    @property
    def is_lost(self) -> bool:
        """Whether the pages were given up."""
        return self._lost

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose pages have arrived whole."""
        return self._num_pages * self._pools.page_size

    def write(
        self,
        step: int,
        layer: int,
        first_page: int,
        rows: Int32[np.ndarray, "heads pages"],
        contents: Mapping[str, np.ndarray],
    ) -> None:
        """Writes a layer of the pages that a step of the other engine completed.

        A step whose last layer does not come before the next step is void. Pages that are there already are skipped.

        Args:
          step: number of the step.
          layer: number of the layer; they come in order.
          first_page: number of pages before them.
          rows: which of the rows of `contents` they are; PAGE_NONE where none came.
          contents: [rows, ...] by array.

        Raises:
          ValueError: pages past the prompt's or not next to those before them, a layer that is not the next, or rows of
            another format. Nothing is written.
        """
        if not self._open:
            return
        chunk = self._chunk_of(step, layer, first_page, rows)
        self._check(chunk, layer, rows, contents)
        with self._changing():
            if not self._open:
                return  # it was lost when the engine started over just now
            if chunk is not self._chunk:
                self._drop_chunk()
                self._chunk = chunk
            own = self._take(chunk, layer, rows)
            if own is None:
                self.lose()
                return
            given = own != PAGE_NONE
            new = {name: array[rows[given]] for name, array in contents.items()}
            self._runner.write_layer(self._groups[self._of_layer[layer]], layer, own[given], new)
            chunk.next_layer += 1
            if chunk.next_layer == len(self._of_layer):
                self._publish(chunk)

    def close(self) -> None:
        """Gives up the hold on the rows: pages that have arrived whole stay in the prefix cache while nothing takes
        their place. Doing it again does nothing."""
        if self._open:
            with self._changing():
                if self._open:  # the engine has not just started over
                    self.lose()
                    self._lost = False

    def lose(self, *, dropping: bool = True) -> None:
        """Gives the pages up, on the engine's side; with `dropping` False their rows were made free otherwise."""
        if self._open and dropping:
            self._drop_chunk()
            for pool, rows in zip(self._pools.pools, self._rows, strict=True):
                pool.drop(rows.T[rows.T != PAGE_NONE].tolist())
        self._open, self._lost, self._chunk = False, True, None

    def _chunk_of(self, step: int, layer: int, first_page: int, rows: np.ndarray) -> _Chunk:
        """The chunk that a layer belongs to: the last one's, or a new one."""
        chunk = self._chunk
        if chunk is None or step != chunk.step:
            chunk = _Chunk(step, first_page, first_page + rows.shape[-1], [None] * len(self._groups))
        if layer != chunk.next_layer:
            raise ValueError(f"layer: expected {chunk.next_layer} of step {step}, got {layer}")
        if rows.ndim != 2 or (first_page, first_page + rows.shape[1]) != (chunk.first_page, chunk.end_page):
            raise ValueError(f"rows: expected those of pages {chunk.first_page} to {chunk.end_page} in every layer")
        if not 0 <= first_page <= self._num_pages or chunk.end_page > self._rows[0].shape[1]:
            wanted = f"at most {self._num_pages}, and pages up to {self._rows[0].shape[1]}"
            raise ValueError(f"first_page: expected {wanted}, got pages {first_page} to {chunk.end_page}")
        return chunk

    def _check(self, chunk: _Chunk, layer: int, rows: np.ndarray, contents: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError unless rows and contents have the format of a layer."""
        if {name: (array.shape[1:], array.dtype) for name, array in contents.items()} != self._formats[layer]:
            raise ValueError(f"contents: layer {layer} has other shapes or dtypes than the cache's rows")
        counts = {len(array) for array in contents.values()}
        heads, most = self._groups[self._of_layer[layer]].num_heads, min(counts)
        if len(counts) != 1 or rows.dtype != np.int32 or len(rows) != heads:
            raise ValueError(f"rows: expected int32 of {heads} heads, and contents of as many rows in every array")
        if rows.size and not PAGE_NONE <= rows.min() <= rows.max() < most:
            raise ValueError(f"rows: expected numbers from {PAGE_NONE} to {most - 1}, got {rows.min()} to {rows.max()}")
        own = chunk.rows[self._of_layer[layer]]
        if own is not None and (own != PAGE_NONE)[rows == PAGE_NONE].any():
            raise ValueError(f"rows: layer {layer} lacks pages that other layers of its cache group have")

    def _take(self, chunk: _Chunk, layer: int, rows: np.ndarray) -> np.ndarray | None:
        """Rows that the pages got in the layer's group, taken with its first layer; None if too few are free."""
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
        """Lets requests find the pages of a chunk that has arrived whole."""
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
            held[behind] = PAGE_NONE  # a view of those that are held

    def _next_query(self, num_pages: int) -> int:
        """Position of the first token that a request computes after so many pages."""
        return min(num_pages, self._last_page) * self._pools.page_size

    def _drop_chunk(self) -> None:
        """Gives back the rows of a chunk that has not arrived whole."""
        if self._chunk is not None:
            for pool, own in zip(self._pools.pools, self._chunk.rows, strict=True):
                if own is not None:
                    pool.drop(own[own != PAGE_NONE].tolist())
        self._chunk = None
