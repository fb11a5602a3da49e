"""Reuse of K/V pages by sequences with the same first tokens."""

import hashlib
import itertools
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32

from pallas_attn.cache.errors import InconsistentCache, PageError
from pallas_attn.cache.group_pools import GroupPools
from pallas_attn.cache.head_page_pool import PAGE_NONE

type Prefix = tuple[Int32[np.ndarray, "_ pages"], ...]
"""Rows of the first pages of a sequence, [heads, pages] per cache group; PAGE_NONE where no row is needed."""


@dataclass(eq=False, slots=True)
class _Node:
    """A published page: `tokens` at depth `depth` (in pages, from 1), after all tokens up to `parent`.

    `rows` contains the row of the page in each *lane*. A lane is one head of one group. The row is PAGE_NONE if it was
    reallocated, or if it was recycled before the page was published.
    """

    rows: list[int]
    digest: bytes
    parent: "_Node | None"
    salt: str
    tokens: bytes
    depth: int
    children: "set[_Node]" = field(default_factory=set)


class PrefixCache:
    """Find the full pages that already hold a prompt's prefix.

    The published pages form a forest in which a path from a root represents a token sequence. A page is found by the
    digest of its salt, its parent's digest and its tokens. It is a hit only if parent, salt and tokens are also equal:
    a digest collision is a miss and never returns another prompt's K/V. Digests include a random seed, so that
    collisions cannot be prepared in advance.

    A page has a row for each head of each cache group. Heads with windows lose rows one by one. A prefix is a hit if
    every head still has the rows that the first token after the prefix sees, which are the rows of its sink tokens and
    of its window. A prefix may therefore be a hit although a shorter prefix is not.

    The cache holds no references. A published row without references is free, and can be matched until its pool
    allocates it again; then the cache forgets it. It also forgets the pages after it if none of them can be part of a
    hit any more: if the row's head has no window, or if the row holds sink tokens.

    Example:
      >>> window = pallas_attn.HeadWindow([pallas_attn.FULL], [0])  # one row is a page of all heads
      >>> sizes = {"page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 4}
      >>> pools = pallas_attn.cache.GroupPools([pallas_attn.cache.HeadPagePool(8, window, **sizes)])
      >>> prefixes = pallas_attn.cache.PrefixCache(pools)
      >>> prompt = list(range(10))
      >>> prefixes.match(0, prompt)
      0
      >>> pools.allocate(0, num_tokens=10)
      >>> prefixes.publish(0, prompt)  # once its first two pages have been written
      >>> prefixes.match(1, prompt)  # the second sequence has to compute two tokens
      8
    """

    def __init__(
        self,
        pools: GroupPools,
        *,
        digest: Callable[[bytes], bytes] = lambda message: hashlib.sha256(message).digest(),
    ) -> None:
        """Create an empty prefix cache, and watch `pools` for reused rows.

        Args:
          pools: pools of the rows. They can have only one prefix cache.
          digest: hash function of the keys.

        Raises:
          ValueError: `pools` already have a watcher.
        """
        self._pools = pools
        self._page_size = pools.page_size
        self._hash = digest
        self._seed = secrets.token_bytes(32)
        self._by_digest: dict[bytes, _Node] = {}
        self._by_row: tuple[dict[int, _Node], ...] = tuple({} for _ in pools.pools)
        # For each lane: its group, and the range of pages that the longest sequence has recycled at its end.
        self._groups = [group for group, pool in enumerate(pools.pools) for _ in range(pool.num_heads)]
        starts, ends = self._unseen_pages(pools.pools[0].table_tokens)
        self._unseen = list(zip(starts.tolist(), ends.tolist(), strict=True))
        self._last_lookup: tuple[tuple[list[int], str], list[_Node]] = (([], ""), [])
        self._query_tokens = 0
        self._hit_tokens = 0
        pools.watch_reuse(self._forget)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_published(self) -> int:
        """Number of pages with at least one row that can be matched, owned or free."""
        return len(self._by_digest)

    @property
    def query_tokens(self) -> int:
        """Total number of tokens in the prompts of all `match` calls."""
        return self._query_tokens

    @property
    def hit_tokens(self) -> int:
        """Total number of tokens that all `match` calls found."""
        return self._hit_tokens

    def is_published(self, row: int, group: int = 0) -> bool:
        return row in self._by_row[group]

    def lookup(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """Find the rows that `match` would use, without adding references.

        Args:
          tokens: token ids of a prompt.
          salt: prefixes are shared only between equal salts.

        Returns:
          Rows of the longest prefix of full pages that is a hit and leaves at least one token to compute, because the
          caller needs the logits of that token.
        """
        path = [node.rows for node in self._path(tokens, salt)]
        rows = np.array(path, np.int32).reshape(-1, len(self._groups))  # [pages, lanes]
        rows = rows[: self._longest_hit(rows)]
        start, end = self._unseen_pages(len(rows) * self._page_size)
        pages = np.arange(len(rows))[:, None]
        return self._by_group(np.where((start <= pages) & (pages < end), np.int32(PAGE_NONE), rows))

    def match(self, batch_slot: int, tokens: Sequence[int], salt: str = "") -> int:
        """Start the sequence of an idle batch slot with the prefix that `lookup` finds.

        Returns:
          The number of tokens found, whose rows the batch slot now holds.

        Raises:
          ValueError: the batch slot is unknown or not idle.
        """
        prefix = self.lookup(tokens, salt)
        self._pools.adopt(batch_slot, prefix)
        num_hit = prefix[0].shape[1] * self._page_size
        self._query_tokens += len(tokens)
        self._hit_tokens += num_hit
        return num_hit

    def published(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """Return the rows of the published pages of the prefix of `tokens`; PAGE_NONE for rows that are gone."""
        path = [node.rows for node in self._path([*tokens, 0], salt)]  # `_path` leaves out the last token
        return self._by_group(np.array(path, np.int32).reshape(-1, len(self._groups)))

    def publish(self, batch_slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Make the full pages of a sequence matchable.

        Their K/V must be written, or certain to be written before anything launched later reads it. No call may write
        to these pages afterwards.

        If several rows have the same contents, the row that was published first is matched. If it is gone, another row
        replaces it. Pages that are already published cost nothing, so the call may be repeated while a sequence grows.

        Args:
          batch_slot: batch slot of the sequence. Its recycled rows are not published.
          tokens: token ids whose K/V is in its rows; tokens after the last full page are ignored.
          salt: see `match`.

        Raises:
          ValueError: the batch slot is unknown or has no room for `tokens`.
          PageError: a row is published with other contents. Nothing is published.
        """
        num_full = len(tokens) // self._page_size
        rows = self._rows_of(batch_slot, num_full)
        self._register(tokens, salt, rows, self._last_published(tokens, rows, salt))

    def publish_rows(self, tokens: Sequence[int], rows: Prefix, salt: str = "") -> None:
        """Make full pages that belong to no batch slot matchable, like `publish`.

        Args:
          tokens: token ids of whole pages.
          rows: rows of these pages, which the caller references and which are written; PAGE_NONE for missing rows.
          salt: see `match`.

        Raises:
          PageError: a row is published with other contents. Nothing is published.
        """
        self._register(tokens, salt, np.concatenate(rows).T, None)

    def insert(self, tokens: Sequence[int], known: Sequence[Bool[np.ndarray, "_ pages"]], salt: str = "") -> Prefix:
        """Make the full pages of a sequence that another process computed matchable, in free rows, until no row is
        free.

        Args:
          tokens: token ids of whole pages.
          known: for each group, the pages of each head whose K/V is available.
          salt: see `match`.

        Returns:
          The rows of these pages. The caller must write them before anything reads them. PAGE_NONE for pages that are
          not available, already published, or without a free row.
        """
        pools, lanes = self._pools.pools, np.array(self._groups)
        rows = np.concatenate(self.published(tokens, salt)).T
        rows = np.pad(rows, ((0, len(tokens) // self._page_size - len(rows)), (0, 0)), constant_values=PAGE_NONE)
        given = np.full_like(rows, PAGE_NONE)
        held = [rows[:, lanes == group] for group in range(len(pools))]
        for pool, own in zip(pools, held, strict=True):
            pool.hold(own[own != PAGE_NONE].tolist())  # otherwise they could be allocated for the pages after it
        try:
            offered = np.concatenate(known).T
            for page, lacking in enumerate(offered & (rows == PAGE_NONE)):
                gone = (rows[page] == PAGE_NONE) & ~offered[page]
                wanted = [lacking & (lanes == group) for group in range(len(pools))]
                if any(start > page or page >= end for start, end in itertools.compress(self._unseen, gone)):
                    break  # no prefix that continues after this page can be a hit
                if any(own.sum() > pool.num_free for pool, own in zip(pools, wanted, strict=True)):
                    break
                for pool, own in zip(pools, wanted, strict=True):
                    given[page, own] = pool.take(int(own.sum()))
            self._register(tokens, salt, np.where(given == PAGE_NONE, rows, given), None)
        finally:
            rows = np.where(given == PAGE_NONE, rows, given)
            for group, pool in enumerate(pools):
                own = rows[:, lanes == group]
                pool.drop(own[own != PAGE_NONE].tolist())
        return self._by_group(given)

    def _register(self, tokens: Sequence[int], salt: str, rows: np.ndarray, parent: _Node | None) -> None:
        """Publish the rows [pages, lanes] of a sequence's pages after `parent`."""
        start = parent.depth if parent is not None else 0
        fresh: dict[bytes, _Node] = {}
        path: list[tuple[_Node, list[int]]] = []
        for index, own in enumerate(rows[start:].tolist(), start):
            page_tokens = self._page_tokens(tokens, index)
            digest, node = self._find(parent, salt, page_tokens)
            if node is None:
                if digest in self._by_digest or digest in fresh:
                    break  # a collision: without this page the next ones cannot be reached either
                node = fresh[digest] = _Node([PAGE_NONE] * len(own), digest, parent, salt, page_tokens, index + 1)
            self._require_unpublished_elsewhere(node, own)
            path.append((node, own))
            parent = node
        for node in fresh.values():
            self._by_digest[node.digest] = node
            if node.parent is not None:
                node.parent.children.add(node)
        for node, own in path:
            self._fill(node, own)
        if path:
            self._prune(path[-1][0])

    def sequences(self) -> list[tuple[list[int], str]]:
        """Yield, for each published page without a following page, the tokens up to its end and the salt."""
        found = []
        for node in self._by_digest.values():
            if node.children:
                continue
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            found.append(([token for page in reversed(path) for token in array("q", page.tokens)], node.salt))
        return found

    def clear(self) -> None:
        """Forget all pages, for example after the contents of the cache are lost, whatever state an interrupted call
        has left. References and statistics stay.
        """
        self._last_lookup = (([], ""), [])
        self._by_digest.clear()
        for by_row in self._by_row:
            by_row.clear()

    def check(self) -> None:
        """Verify every invariant, in O(published rows).

        Raises:
          InconsistentCache: names the page or row that violates an invariant.
        """
        for digest, node in self._by_digest.items():
            parent, page = node.parent, f"page {node.depth} with rows {node.rows}"
            if node.digest != digest or self._digest(parent, node.salt, node.tokens) != digest:
                raise InconsistentCache(f"{page} is filed under the digest of other contents")
            if node.depth != (1 if parent is None else parent.depth + 1):
                raise InconsistentCache(f"{page} is at depth {node.depth}, its parent disagrees")
            if parent is not None and (self._by_digest.get(parent.digest) is not parent or node not in parent.children):
                raise InconsistentCache(f"{page} follows a page that is gone")
            if any(child.parent is not node or child.digest not in self._by_digest for child in node.children):
                raise InconsistentCache(f"{page} is followed by a page that is gone")
            for lane, row in enumerate(node.rows):
                if row == PAGE_NONE and self._is_needed_forever(node, lane):
                    raise InconsistentCache(f"{page} lacks a row without which nothing after it is a hit")
                if row != PAGE_NONE and self._by_row[self._groups[lane]].get(row) is not node:
                    raise InconsistentCache(f"{page} is not found by its row {row}")
            if not node.children and all(row == PAGE_NONE for row in node.rows):
                raise InconsistentCache(f"{page} is of no use")
        for group, by_row in enumerate(self._by_row):
            for row, node in by_row.items():
                own = [row for lane, row in enumerate(node.rows) if self._groups[lane] == group]
                if self._by_digest.get(node.digest) is not node or row not in own:
                    raise InconsistentCache(f"row {row} of group {group} belongs to a page that is gone")

    def _by_group(self, rows: Int32[np.ndarray, "pages lanes"]) -> Prefix:
        first_lanes = np.cumsum([pool.num_heads for pool in self._pools.pools])[:-1]
        return tuple(np.split(rows.T, first_lanes))

    def _longest_hit(self, rows: Int32[np.ndarray, "pages lanes"]) -> int:
        """Return the length in pages of the longest hit among the first of these pages."""
        pages = np.arange(len(rows))
        # An absent page is after all sink tokens: dropping a page that is always needed drops the pages after it.
        last_absent = np.maximum.accumulate(np.where(rows == PAGE_NONE, pages[:, None], -1), axis=0)
        _, ends = self._unseen_pages((pages + 1) * self._page_size)
        [hits] = np.nonzero((last_absent < ends).all(axis=1))
        return int(hits[-1]) + 1 if len(hits) else 0

    def _unseen_pages(self, oldest_query: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated `HeadPagePool.unseen_pages` of all lanes."""
        starts, ends = zip(*(pool.unseen_pages(oldest_query) for pool in self._pools.pools), strict=True)
        return np.concatenate(starts), np.concatenate(ends, axis=-1)

    def _rows_of(self, batch_slot: int, num_pages: int) -> Int32[np.ndarray, "pages lanes"]:
        """Return the rows of a sequence's first pages."""
        rows = np.concatenate([pool.rows(batch_slot) for pool in self._pools.pools])
        if num_pages > rows.shape[1]:
            limit = f"the {rows.shape[1] * self._page_size} that batch slot {batch_slot} has room for"
            raise ValueError(f"tokens must be at most {limit}, got {num_pages} pages of them")
        return rows.T[:num_pages]

    def _page_tokens(self, tokens: Sequence[int], index: int) -> bytes:
        return array("q", tokens[index * self._page_size : (index + 1) * self._page_size]).tobytes()

    def _digest(self, parent: _Node | None, salt: str, tokens: bytes) -> bytes:
        fields = (self._seed, salt.encode(), b"" if parent is None else parent.digest, tokens)
        # Lengths are included: otherwise a salt could equal the concatenation of another salt and its tokens.
        return self._hash(b"".join(len(value).to_bytes(8, "little") + value for value in fields))

    def _find(self, parent: _Node | None, salt: str, tokens: bytes) -> tuple[bytes, _Node | None]:
        """Return the digest of `tokens` after `parent`, and the node with exactly these tokens or None."""
        digest = self._digest(parent, salt, tokens)
        node = self._by_digest.get(digest)
        if node is not None and (node.parent, node.salt, node.tokens) == (parent, salt, tokens):
            return digest, node
        return digest, None

    def _path(self, tokens: Sequence[int], salt: str) -> list[_Node]:
        """Return the published pages of the prefix of `tokens` without the last token.

        Pages that the previous call found are not hashed again, because a waiting prompt is looked up in every step.
        """
        asked, (last_asked, last_path) = (list(tokens), salt), self._last_lookup
        known = last_path if asked == last_asked else []
        path = list(itertools.takewhile(lambda node: self._by_digest.get(node.digest) is node, known))
        for index in range(len(path), (len(tokens) - 1) // self._page_size):
            _, node = self._find(path[-1] if path else None, salt, self._page_tokens(tokens, index))
            if node is None:
                break
            path.append(node)
        self._last_lookup = (asked, path)
        return path

    def _nodes_of(self, rows: Sequence[int]) -> Iterator[_Node | None]:
        """Yield the page of each lane's row; None if it is not published."""
        for group, row in zip(self._groups, rows, strict=True):
            yield self._by_row[group].get(row)

    def _last_published(self, tokens: Sequence[int], rows: np.ndarray, salt: str) -> _Node | None:
        """Return the last published page of a sequence, so that a growing sequence is not hashed from its start."""
        for index in reversed(range(len(rows))):
            for node in filter(None, self._nodes_of(rows[index].tolist())):
                if (node.depth, node.salt, node.tokens) != (index + 1, salt, self._page_tokens(tokens, index)):
                    raise PageError(f"cannot publish rows {node.rows}: they are published with other contents")
                return node
        return None

    def _require_unpublished_elsewhere(self, page: _Node, rows: Sequence[int]) -> None:
        for node in filter(None, self._nodes_of(rows)):
            if node is not page:
                raise PageError(f"cannot publish rows {node.rows}: they are published with other contents")

    def _fill(self, node: _Node, rows: Sequence[int]) -> None:
        """Register rows as rows of a page in the lanes where it has none."""
        for lane, row in enumerate(rows):
            if row != PAGE_NONE and node.rows[lane] == PAGE_NONE:
                node.rows[lane] = row
                self._by_row[self._groups[lane]][row] = node

    def _is_needed_forever(self, node: _Node, lane: int) -> bool:
        """Return whether every prefix that continues after a page needs its row in a lane."""
        start, end = self._unseen[lane]
        return not start <= node.depth - 1 < end

    def _forget(self, group: int, row: int) -> None:
        """Forget a row that its pool allocates again, and the pages that become useless without it."""
        node = self._by_row[group].pop(row, None)
        if node is None:
            return
        lane = node.rows.index(row, self._groups.index(group))
        node.rows[lane] = PAGE_NONE
        if self._is_needed_forever(node, lane):
            self._drop(node)
        else:
            self._prune(node)

    def _drop(self, node: _Node) -> None:
        """Forget a page and all pages after it."""
        if node.parent is not None:
            node.parent.children.remove(node)
        doomed = [node]
        while doomed:
            page = doomed.pop()
            del self._by_digest[page.digest]
            for lane, row in enumerate(page.rows):
                if row != PAGE_NONE:
                    del self._by_row[self._groups[lane]][row]
            doomed.extend(page.children)
        self._prune(node.parent)

    def _prune(self, node: _Node | None) -> None:
        """Forget a page without rows and without following pages, and then its ancestors in the same way."""
        while node is not None and not node.children and all(row == PAGE_NONE for row in node.rows):
            del self._by_digest[node.digest]
            if node.parent is not None:
                node.parent.children.remove(node)
            node = node.parent
