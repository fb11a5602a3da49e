"""A prefix cache with its page pools and sequences, for tests.

A batch slot is the index of a running sequence in the tables of the pools. A row is one page of one KV head. A cache
group is a set of layers with equal windows; it has a pool of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_attn import FULL, PAGE_NONE, HeadWindow
from pallas_attn.cache import GroupPools, HeadPagePool, PrefixCache

PAGE_SIZE = 4

Heads = list[tuple[int, int]]
"""(window, sink tokens) of each KV head of a cache group."""


def head_window(heads: Heads) -> HeadWindow:
    widths, sink_tokens = zip(*heads, strict=True)
    return HeadWindow(jnp.asarray(widths, jnp.int32), jnp.asarray(sink_tokens, jnp.int32))


def make_pools(
    groups: list[tuple[int, Heads]], *, page_size: int = PAGE_SIZE, max_num_seqs: int = 8, max_pages: int = 8
) -> GroupPools:
    """Return the pools of cache groups. `groups` has the number of rows and the heads of each group."""
    sizes = {"page_size": page_size, "max_num_seqs": max_num_seqs, "max_pages_per_seq": max_pages}
    return GroupPools([HeadPagePool(num_rows, head_window(heads), **sizes) for num_rows, heads in groups])


class Sequences:
    """A prefix cache, its pools, and sequences in their batch slots.

    By default, the pools have one group with one KV head without a window. A row is then a page.
    """

    def __init__(self, num_pages: int = 8, groups: list[tuple[int, Heads]] | None = None, **options: Callable):
        self.pools = make_pools(groups or [(num_pages, [(FULL, 0)])])
        self.cache = PrefixCache(self.pools, **options)

    @property
    def pool(self) -> HeadPagePool:
        return self.pools.pools[0]

    def idle_slot(self) -> int:
        return next(slot for slot in range(self.pools.max_num_seqs) if not self.pool.allocated_tokens(slot))

    def room(self, num_tokens: int) -> int:
        """Allocate pages for a new sequence of `num_tokens` tokens. Return its batch slot."""
        slot = self.idle_slot()
        self.pools.allocate(slot, num_tokens)
        return slot

    def match(self, tokens: list[int], salt: str = "") -> int:
        slot = self.idle_slot()
        self.cache.match(slot, tokens, salt)
        return slot

    def published(self, tokens: list[int], salt: str = "") -> int:
        """Start a sequence that has computed `tokens`, and add its full pages to the prefix cache. Return its batch
        slot.
        """
        slot = self.room(len(tokens))
        self.cache.publish(slot, tokens, salt)
        self.check()
        return slot

    def pages(self, slot: int, group: int = 0, head: int = 0) -> list[int]:
        """Return the row ids of a sequence for a group and head. Recycled rows are PAGE_NONE."""
        table = self.pools.tables([slot])[group][0, head]
        return table[: self.pool.allocated_tokens(slot) // PAGE_SIZE].tolist()

    def lookup(self, tokens: list[int], salt: str = "") -> list[int]:
        return self.cache.lookup(tokens, salt)[0][0].tolist()

    def snapshot(self) -> tuple:
        """Return the full state of the pools and the cache, including the order of free rows."""
        rows = [(pool._rows._refcounts[:], list(pool._rows._free), pool._tables.tolist()) for pool in self.pools.pools]
        nodes = {digest: list(node.rows) for digest, node in self.cache._by_digest.items()}
        return (
            rows,
            nodes,
            [set(by_row) for by_row in self.cache._by_row],
            self.cache.query_tokens,
            self.cache.hit_tokens,
        )

    def check(self) -> None:
        self.pools.check()
        self.cache.check()


def present(rows: np.ndarray) -> list[list[int]]:
    """Return, for each head, the indices of the table entries that have a row."""
    return [np.flatnonzero(head != PAGE_NONE).tolist() for head in rows]
