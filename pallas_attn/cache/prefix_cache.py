"""Reuse of K/V pages between sequences that begin with the same tokens."""

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pallas_attn.cache.errors import InconsistentCache, PageError
from pallas_attn.cache.page_pool import PagePool


@dataclass(eq=False, slots=True)
class _Node:
    """A published page: `tokens` at depth `depth` (in pages, from 1), read after everything up to `parent`."""

    page: int
    digest: bytes
    parent: "_Node | None"
    salt: str
    tokens: bytes
    depth: int
    children: "set[_Node]" = field(default_factory=set)


class PrefixCache:
    """Finds the full pages that already hold a prompt's prefix.

    The published pages form a forest in which a path from a root spells a token sequence. A page is found by the digest
    of its salt, its parent's digest and its tokens, and counts as found only if parent, salt and tokens are equal
    themselves: a digest collision is a miss, never somebody else's K/V. Digests also cover a random seed, so that
    collisions cannot be prepared in advance.

    The cache holds no references. A published page that everybody released is free, and matchable until the pool hands
    it out again; then it is forgotten together with all pages after it, which no match could reach any more.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        digest: Callable[[bytes], bytes] = lambda message: hashlib.sha256(message).digest(),
    ) -> None:
        """Starts empty, and watches `pool` for reused pages.

        Args:
            pool: Where the pages come from; it serves one prefix cache only.
            page_size: Tokens per page.
            digest: Hash function of the keys.

        Raises:
            ValueError: `page_size` is smaller than 1, or `pool` is watched already.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self._pool = pool
        self._page_size = page_size
        self._hash = digest
        self._seed = secrets.token_bytes(32)
        self._by_digest: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._query_tokens = 0
        self._hit_tokens = 0
        pool.watch_reuse(self._forget)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_published(self) -> int:
        """Pages that can be matched, owned or free."""
        return len(self._by_page)

    @property
    def query_tokens(self) -> int:
        """Tokens that all calls of `match` asked for."""
        return self._query_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens that all calls of `match` found."""
        return self._hit_tokens

    def is_published(self, page: int) -> bool:
        return page in self._by_page

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The pages `match` would return, without a reference to them.

        Args:
            tokens: Token ids of a prompt.
            salt: Isolates whoever uses another one.

        Returns:
            Page ids of the longest published prefix of full pages that leaves at least one token to compute: that
            token's logits are what the caller is after.
        """
        pages: list[int] = []
        node = None
        for index in range((len(tokens) - 1) // self._page_size):
            _, node = self._find(node, salt, self._page_tokens(tokens, index))
            if node is None:
                break
            pages.append(node.page)
        return pages

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """`lookup`, with a reference to each page that the caller has to release to the pool."""
        pages = self.lookup(tokens, salt)
        self._pool.reclaim(pages)
        self._query_tokens += len(tokens)
        self._hit_tokens += len(pages) * self._page_size
        return pages

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Makes the full pages of a sequence matchable. Their K/V must have been written, or be certain to be written
        before anything launched later can read it; nobody may write to them from now on.

        Of several pages with the same contents the first published stays the one that is matched. Pages published
        before cost nothing: the call may be repeated as a sequence grows.

        Args:
            tokens: Token ids whose K/V is in `pages`; those past the last full page are ignored.
            pages: The sequence's page ids, owned; those past the last full page are ignored.
            salt: As for `match`.

        Raises:
            ValueError: `pages` are too few to hold `tokens`.
            PageError: a page is free, foreign, mentioned twice, or published with other contents. Nothing is published.
        """
        num_full = len(tokens) // self._page_size
        if len(pages) < num_full:
            raise ValueError(f"pages must hold the {num_full} full pages of {len(tokens)} tokens, got {len(pages)}")
        parent = self._last_published(tokens, pages[:num_full], salt)
        start = parent.depth if parent is not None else 0
        self._require_publishable(pages[start:num_full])
        fresh: dict[bytes, _Node] = {}
        for index in range(start, num_full):
            page_tokens = self._page_tokens(tokens, index)
            digest, node = self._find(parent, salt, page_tokens)
            if node is None:
                if digest in self._by_digest or digest in fresh:
                    break  # a collision: without this page nobody can reach the next ones either
                node = fresh[digest] = _Node(pages[index], digest, parent, salt, page_tokens, index + 1)
            parent = node
        for node in fresh.values():
            self._by_digest[node.digest] = self._by_page[node.page] = node
            if node.parent is not None:
                node.parent.children.add(node)

    def clear(self) -> None:
        """Forgets every page, as when the contents of the cache are lost. References and statistics stay."""
        self._by_digest.clear()
        self._by_page.clear()

    def check(self) -> None:
        """Verifies every invariant, in O(published pages).

        Raises:
            InconsistentCache: naming the page at fault.
        """
        if len(self._by_digest) != len(self._by_page):
            raise InconsistentCache(f"{len(self._by_digest)} digests for {len(self._by_page)} pages")
        for page, node in self._by_page.items():
            parent = node.parent
            if node.page != page or self._by_digest.get(node.digest) is not node:
                raise InconsistentCache(f"page {page} is not found by its digest")
            if self._digest(parent, node.salt, node.tokens) != node.digest:
                raise InconsistentCache(f"page {page} is filed under the digest of other contents")
            if node.depth != (1 if parent is None else parent.depth + 1):
                raise InconsistentCache(f"page {page} is at depth {node.depth}, its parent disagrees")
            if parent is not None and (self._by_page.get(parent.page) is not parent or node not in parent.children):
                raise InconsistentCache(f"page {page} follows a page that is gone")
            if any(child.parent is not node or child.page not in self._by_page for child in node.children):
                raise InconsistentCache(f"page {page} is followed by a page that is gone")

    def _page_tokens(self, tokens: Sequence[int], index: int) -> bytes:
        return array("q", tokens[index * self._page_size : (index + 1) * self._page_size]).tobytes()

    def _digest(self, parent: _Node | None, salt: str, tokens: bytes) -> bytes:
        fields = (self._seed, salt.encode(), b"" if parent is None else parent.digest, tokens)
        # With their lengths, because a salt could otherwise be chosen to read like another salt and its tokens.
        return self._hash(b"".join(len(value).to_bytes(8, "little") + value for value in fields))

    def _find(self, parent: _Node | None, salt: str, tokens: bytes) -> tuple[bytes, _Node | None]:
        """The digest of `tokens` after `parent`, and the node that holds exactly that if there is one."""
        digest = self._digest(parent, salt, tokens)
        node = self._by_digest.get(digest)
        if node is not None and (node.parent, node.salt, node.tokens) == (parent, salt, tokens):
            return digest, node
        return digest, None

    def _last_published(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> _Node | None:
        """The node of the last published one of `pages`, so that a growing sequence is not hashed all over again."""
        for index in reversed(range(len(pages))):
            node = self._by_page.get(pages[index])
            if node is None:
                continue
            if (node.depth, node.salt, node.tokens) != (index + 1, salt, self._page_tokens(tokens, index)):
                raise PageError(f"cannot publish page {node.page}: it is published with other contents")
            return node
        return None

    def _require_publishable(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages):
            raise PageError(f"cannot publish a page twice in one sequence: {list(pages)}")
        for page in pages:
            if self._pool.refcount(page) == 0:
                raise PageError(f"cannot publish page {page}: it is free")

    def _forget(self, page: int) -> None:
        """Drops a page that the pool hands out again, and with it all that follows it."""
        if page not in self._by_page:
            return
        node = self._by_page[page]
        if node.parent is not None:
            node.parent.children.remove(node)
        doomed = [node]
        while doomed:
            node = doomed.pop()
            del self._by_digest[node.digest], self._by_page[node.page]
            doomed.extend(node.children)
