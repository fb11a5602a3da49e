"""Prefix cache: lets a new sequence reuse the K/V pages of an earlier sequence with the same first tokens."""

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
"""Rows of the first pages of a sequence, one array [heads, pages] for each cache group.

A cache group is a set of layers with equal windows, and a row is one page of one KV head. The row is PAGE_NONE if no
later query sees the page.
"""


@dataclass(eq=False, slots=True)
class _Node:
    """A published page: the K/V of one page of tokens that follow the tokens of `parent` and of its ancestors.

    Attributes:
      rows: row of the page in each *lane*. A lane is one KV head of one cache group. The row is PAGE_NONE if its pool
        has allocated it again, or if it was recycled before the page was published.
      digest: key of the page in the dictionary of published pages.
      parent: the previous page; None for the first page of a sequence.
      salt: prefixes are shared only between sequences with equal salts.
      tokens: token ids of the page, as int64 bytes.
      depth: number of pages from the start of the sequence up to this page, at least 1.
      children: published pages that follow this page.
    """

    rows: list[int]
    digest: bytes
    parent: "_Node | None"
    salt: str
    tokens: bytes
    depth: int
    children: "set[_Node]" = field(default_factory=set)


class PrefixCache:
    """Find the pages that already contain the K/V of a prompt's first tokens.

    Publishing a page means to register its rows and its tokens, so that later prompts find the page. `publish` is
    called for full pages only.

    Lookup: the published pages form trees, in which each path from a root is a token sequence. The key of a page is a
    digest of the parent's digest, its salt and its tokens. A page is found only if parent, salt and tokens are equal
    too, so a digest collision never returns the K/V of other tokens. Digests include a random seed, so colliding
    prompts cannot be constructed in advance.

    Hits: a page has a row for each head of each cache group (layers with equal windows). Heads with windows release
    their rows one by one. A prefix is a hit if every head still has the rows that the first token after the prefix
    sees: the rows of its sink tokens and of its window. A prefix can therefore be a hit although a shorter prefix is
    not.

    Lifetime: the prefix cache holds no references to rows. A published row without references is free, and can be
    reused until its pool allocates it again. The prefix cache then forgets the row. If the head has no window, or if
    the row contains sink tokens, no prefix that includes the page can be a hit any more; the page and all pages that
    follow it are forgotten too.

    Example:
      >>> window = pallas_attn.HeadWindow([pallas_attn.FULL], [0])  # one row is a page of all heads
      >>> sizes = {"page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 4}
      >>> pools = pallas_attn.cache.GroupPools([pallas_attn.cache.HeadPagePool(8, window, **sizes)])
      >>> prefixes = pallas_attn.cache.PrefixCache(pools)
      >>> prompt = list(range(10))
      >>> prefixes.match(0, prompt)
      0
      >>> pools.allocate(0, num_tokens=10)
      >>> prefixes.publish(0, prompt)  # after the K/V of its first two pages has been written
      >>> prefixes.match(1, prompt)  # the second sequence reuses 8 tokens and computes 2
      8
    """

    def __init__(
        self,
        pools: GroupPools,
        *,
        digest: Callable[[bytes], bytes] = lambda message: hashlib.sha256(message).digest(),
    ) -> None:
        """Create an empty prefix cache for the rows of `pools`, and register a callback for rows that are allocated
        again.

        Args:
          pools: pools of the rows. They can have only one prefix cache.
          digest: hash function for the keys of pages.

        Raises:
          ValueError: `pools` already have a callback of `watch_reuse`.
        """
        self._pools = pools
        self._page_size = pools.page_size
        self._hash = digest
        self._seed = secrets.token_bytes(32)
        self._by_digest: dict[bytes, _Node] = {}
        self._by_row: tuple[dict[int, _Node], ...] = tuple({} for _ in pools.pools)
        # Two lists with one entry per lane (one KV head of one cache group): the index of its group, and the range of
        # pages that a sequence of maximum length has recycled at its end. A prefix that includes a page outside this
        # range needs the page's row.
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
        """Number of published pages."""
        return len(self._by_digest)

    @property
    def query_tokens(self) -> int:
        """Total number of tokens in the prompts of all `match` calls."""
        return self._query_tokens

    @property
    def hit_tokens(self) -> int:
        """Total number of tokens whose K/V `match` calls have reused."""
        return self._hit_tokens

    def is_published(self, row: int, group: int = 0) -> bool:
        """Return whether `row` of a cache group belongs to a published page."""
        return row in self._by_row[group]

    def lookup(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """Return the rows of the longest cached prefix of a prompt, without adding references.

        Args:
          tokens: token ids of a prompt.
          salt: prefixes are shared only between sequences with equal salts.

        Returns:
          Rows of the longest prefix of whole pages that is a hit. The prefix never includes the last token of the
          prompt, which must be computed to get its logits.
        """
        path = [node.rows for node in self._path(tokens, salt)]
        rows = np.array(path, np.int32).reshape(-1, len(self._groups))  # [pages, lanes]
        rows = rows[: self._longest_hit(rows)]
        start, end = self._unseen_pages(len(rows) * self._page_size)
        pages = np.arange(len(rows))[:, None]
        return self._by_group(np.where((start <= pages) & (pages < end), np.int32(PAGE_NONE), rows))

    def match(self, batch_slot: int, tokens: Sequence[int], salt: str = "") -> int:
        """Start a sequence with the prefix that `lookup` finds, and add a reference to each of its rows.

        Args:
          batch_slot: a batch slot of the pools without a sequence.
          tokens: token ids of the prompt.
          salt: see `lookup`.

        Returns:
          The number of tokens whose K/V is reused; 0 without a hit.

        Raises:
          ValueError: the batch slot is unknown or already has a sequence.
        """
        prefix = self.lookup(tokens, salt)
        self._pools.adopt(batch_slot, prefix)
        num_hit = prefix[0].shape[1] * self._page_size
        self._query_tokens += len(tokens)
        self._hit_tokens += num_hit
        return num_hit

    def published(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """Return the rows of the published pages that `tokens` begin with; PAGE_NONE for rows that were forgotten.

        Unlike the result of `lookup`, the pages need not be a hit, and may include the last token.
        """
        path = [node.rows for node in self._path([*tokens, 0], salt)]  # `_path` leaves out the last token
        return self._by_group(np.array(path, np.int32).reshape(-1, len(self._groups)))

    def publish(self, batch_slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Publish the full pages of a sequence, so that later prompts can reuse them.

        The K/V of the pages must be in the cache, or be written by a step that is already launched. No later step may
        write to the pages.

        If several rows have the same contents, the row that was published first is used. Another row replaces it only
        after it was forgotten. The call may be repeated while a sequence grows; pages that are published already are
        skipped.

        Args:
          batch_slot: batch slot of the sequence. Its recycled rows are not published.
          tokens: token ids whose K/V is in the sequence's rows. Tokens after the last full page are ignored.
          salt: see `lookup`.

        Raises:
          ValueError: the batch slot is unknown, or the sequence has too few pages for `tokens`.
          PageError: a row is already published for other tokens. Nothing is published.
        """
        num_full = len(tokens) // self._page_size
        rows = self._rows_of(batch_slot, num_full)
        self._register(tokens, salt, rows, self._last_published(tokens, rows, salt))

    def publish_rows(self, tokens: Sequence[int], rows: Prefix, salt: str = "") -> None:
        """Publish full pages that belong to no running sequence. Otherwise like `publish`.

        Args:
          tokens: token ids of whole pages.
          rows: rows of the pages; PAGE_NONE for rows that do not exist. The K/V of the rows must be written, and the
            caller must have references to them.
          salt: see `lookup`.

        Raises:
          PageError: a row is already published for other tokens. Nothing is published.
        """
        self._register(tokens, salt, np.concatenate(rows).T, None)

    def insert(self, tokens: Sequence[int], known: Sequence[Bool[np.ndarray, "_ pages"]], salt: str = "") -> Prefix:
        """Publish the pages of a sequence that another process has computed: allocate free rows for them.

        Pages are processed in order, until too few rows are free or until a page lacks a row that every longer prefix
        needs.

        Args:
          tokens: token ids of whole pages.
          known: for each cache group, which pages of each head the other process provides, [heads, pages].
          salt: see `lookup`.

        Returns:
          The allocated rows, which the caller must fill with the K/V before a step reads them. PAGE_NONE where no row
          was allocated: the page is not provided, already published, or not processed. The rows have no references.
        """
        pools, lanes = self._pools.pools, np.array(self._groups)
        rows = np.concatenate(self.published(tokens, salt)).T
        rows = np.pad(rows, ((0, len(tokens) // self._page_size - len(rows)), (0, 0)), constant_values=PAGE_NONE)
        given = np.full_like(rows, PAGE_NONE)
        held = [rows[:, lanes == group] for group in range(len(pools))]
        for pool, own in zip(pools, held, strict=True):
            # Without references, a published row could be allocated for one of the following pages.
            pool.hold(own[own != PAGE_NONE].tolist())
        try:
            offered = np.concatenate(known).T
            for page, lacking in enumerate(offered & (rows == PAGE_NONE)):
                gone = (rows[page] == PAGE_NONE) & ~offered[page]
                wanted = [lacking & (lanes == group) for group in range(len(pools))]
                if any(start > page or page >= end for start, end in itertools.compress(self._unseen, gone)):
                    break  # a prefix that includes this page cannot be a hit
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
        """Publish the pages of a sequence that follow `parent`.

        Args:
          rows: int32 [pages, lanes], rows of all pages of the sequence.
          parent: last page that is published already; None for none.
        """
        start = parent.depth if parent is not None else 0
        fresh: dict[bytes, _Node] = {}
        path: list[tuple[_Node, list[int]]] = []
        for index, own in enumerate(rows[start:].tolist(), start):
            page_tokens = self._page_tokens(tokens, index)
            digest, node = self._find(parent, salt, page_tokens)
            if node is None:
                if digest in self._by_digest or digest in fresh:
                    break  # a collision: this page cannot be published, so later prompts cannot find the pages after it
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
        """Return the token ids and the salt of each published sequence that no longer published sequence contains."""
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
        """Forget all pages, for example because the contents of the cache on the device were lost.

        Works in any state, also if an exception interrupted an earlier call. References to rows, `query_tokens` and
        `hit_tokens` do not change.
        """
        self._last_lookup = (([], ""), [])
        self._by_digest.clear()
        for by_row in self._by_row:
            by_row.clear()

    def check(self) -> None:
        """Verify all invariants of the prefix cache, in O(published rows).

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
                raise InconsistentCache(f"{page} has neither rows nor following pages")
        for group, by_row in enumerate(self._by_row):
            for row, node in by_row.items():
                own = [row for lane, row in enumerate(node.rows) if self._groups[lane] == group]
                if self._by_digest.get(node.digest) is not node or row not in own:
                    raise InconsistentCache(f"row {row} of group {group} belongs to a page that is gone")

    def _by_group(self, rows: Int32[np.ndarray, "pages lanes"]) -> Prefix:
        """Split rows into one array [heads, pages] per cache group."""
        first_lanes = np.cumsum([pool.num_heads for pool in self._pools.pools])[:-1]
        return tuple(np.split(rows.T, first_lanes))

    def _longest_hit(self, rows: Int32[np.ndarray, "pages lanes"]) -> int:
        """Return the number of pages of the longest prefix of the given pages that is a hit; 0 if no prefix is.

        A prefix is a hit if, in every lane, its last absent row is before the window of the first token after it. No
        absent row has sink tokens: a page without a row for its sink tokens is not published.
        """
        pages = np.arange(len(rows))
        last_absent = np.maximum.accumulate(np.where(rows == PAGE_NONE, pages[:, None], -1), axis=0)
        _, ends = self._unseen_pages((pages + 1) * self._page_size)
        [hits] = np.nonzero((last_absent < ends).all(axis=1))
        return int(hits[-1]) + 1 if len(hits) else 0

    def _unseen_pages(self, oldest_query: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the end of the pages that no query at position `oldest_query` or later sees, for each
        lane: `HeadPagePool.unseen_pages` of all groups, concatenated.
        """
        starts, ends = zip(*(pool.unseen_pages(oldest_query) for pool in self._pools.pools), strict=True)
        return np.concatenate(starts), np.concatenate(ends, axis=-1)

    def _rows_of(self, batch_slot: int, num_pages: int) -> Int32[np.ndarray, "pages lanes"]:
        """Return the rows of the first pages of a sequence.

        Raises:
          ValueError: the sequence has fewer pages.
        """
        rows = np.concatenate([pool.rows(batch_slot) for pool in self._pools.pools])
        if num_pages > rows.shape[1]:
            limit = f"the {rows.shape[1] * self._page_size} that batch slot {batch_slot} has room for"
            raise ValueError(f"tokens must be at most {limit}, got {num_pages} pages of them")
        return rows.T[:num_pages]

    def _page_tokens(self, tokens: Sequence[int], index: int) -> bytes:
        """Return the token ids of page `index` as int64 bytes."""
        return array("q", tokens[index * self._page_size : (index + 1) * self._page_size]).tobytes()

    def _digest(self, parent: _Node | None, salt: str, tokens: bytes) -> bytes:
        """Return the key of the page with these tokens that follows `parent`."""
        fields = (self._seed, salt.encode(), b"" if parent is None else parent.digest, tokens)
        # Each field is preceded by its length. Otherwise different fields could have the same concatenation.
        return self._hash(b"".join(len(value).to_bytes(8, "little") + value for value in fields))

    def _find(self, parent: _Node | None, salt: str, tokens: bytes) -> tuple[bytes, _Node | None]:
        """Return the key of the page with these tokens that follows `parent`, and the page, or None if it is not
        published.
        """
        digest = self._digest(parent, salt, tokens)
        node = self._by_digest.get(digest)
        if node is not None and (node.parent, node.salt, node.tokens) == (parent, salt, tokens):
            return digest, node
        return digest, None

    def _path(self, tokens: Sequence[int], salt: str) -> list[_Node]:
        """Return the published pages that `tokens` begin with, not including the last token.

        A waiting prompt is looked up in every step. If a call has the same arguments as the previous call, the pages
        that the previous call found are not hashed again.
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
        """Yield for each lane the published page that has this row; None if the row is not published."""
        for group, row in zip(self._groups, rows, strict=True):
            yield self._by_row[group].get(row)

    def _last_published(self, tokens: Sequence[int], rows: np.ndarray, salt: str) -> _Node | None:
        """Return the last page of a sequence that is published with rows of this sequence; None if no page is.

        The page is found by its rows. A growing sequence is therefore not hashed from its start.

        Raises:
          PageError: a row is published for other tokens.
        """
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
        """Add rows to a page in the lanes where the page has no row."""
        for lane, row in enumerate(rows):
            if row != PAGE_NONE and node.rows[lane] == PAGE_NONE:
                node.rows[lane] = row
                self._by_row[self._groups[lane]][row] = node

    def _is_needed_forever(self, node: _Node, lane: int) -> bool:
        """Return whether every prefix that includes the page needs its row in this lane: the lane has no window, or the
        page has sink tokens.
        """
        start, end = self._unseen[lane]
        return not start <= node.depth - 1 < end

    def _forget(self, group: int, row: int) -> None:
        """Forget a row that its pool allocates again, and the pages that cannot be part of a hit without it."""
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
        """Forget a page and all pages that follow it."""
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
        """Forget a page if it has neither rows nor following pages. Repeat this for its parent, and so on."""
        while node is not None and not node.children and all(row == PAGE_NONE for row in node.rows):
            del self._by_digest[node.digest]
            if node.parent is not None:
                node.parent.children.remove(node)
            node = node.parent
