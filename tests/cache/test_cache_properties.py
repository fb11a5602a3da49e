"""Property tests of the page pools of cache groups and of the prefix cache.

The tests run random operations and compare the pools with a simple model, which checks every visible token after each
operation. A row is one page of one KV head. A cache group is a set of layers with equal windows, and a lane is one KV
head of one cache group. A batch slot is the index of a running sequence in the tables of the pools.
"""

import itertools
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pallas_attn import FULL, PAGE_NONE
from pallas_attn.cache import OutOfPages, PageError, PrefixCache
from tests.cache.prefix_case import Heads, make_pools

NUM_SEQS = 4
MAX_PAGES = 7
SALTS = ("", "a")

Lane = tuple[int, int]  # indices of a cache group and of a head in it
# Salt and first tokens of a sequence. They identify the key and value of the last of these tokens.
Text = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Sequence:
    """Model of a sequence: the row of each lane and page. Keys and values of the first `num_written` tokens are in
    rows.
    """

    salt: str
    tokens: list[int]
    rows: dict[Lane, dict[int, int]]
    num_pages: int = 0
    num_written: int = 0
    oldest_query: int = 0

    def text(self, length: int) -> Text:
        return self.salt, tuple(self.tokens[:length])


def begins(text: Text, other: Text) -> bool:
    """Return whether `other` equals `text` or continues it."""
    return text[0] == other[0] and other[1][: len(text[1])] == text[1]


@dataclass
class World:
    """The pools and the prefix cache under test, and a model of them: owners of rows, order of free rows, pages in the
    prefix cache ("published"), and contents of the rows.
    """

    groups: list[tuple[int, Heads]]
    page_size: int
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = {"page_size": self.page_size, "max_num_seqs": NUM_SEQS, "max_pages": MAX_PAGES}
        self.pools = make_pools(self.groups, **sizes)
        self.cache = PrefixCache(self.pools)
        self.sequences: dict[int, Sequence] = {}
        self.free = [list(range(num_rows)) for num_rows, _ in self.groups]
        self.lanes = [(group, head) for group, (_, heads) in enumerate(self.groups) for head in range(len(heads))]
        self.published: dict[tuple[Lane, Text], int] = {}
        self.memory: dict[tuple[int, int, int], tuple[int, Text]] = {}  # (group, row, offset) -> (head, text)

    def visible(self, lane: Lane, key: int, query: int) -> bool:
        """Return whether a query at position `query` sees the key at position `key`, from the
        window and sink tokens.
        """
        window, sink_tokens = self.groups[lane[0]][1][lane[1]]
        return key <= query and (key < sink_tokens or key > query - window)

    def is_needed(self, lane: Lane, page: int, oldest_query: int) -> bool:
        """Return whether any query at position `oldest_query` or later sees a token of a page.

        For each token, it is enough to check the first such query at the position of the token or later. Later queries
        see a token only if earlier queries see it.
        """
        tokens = range(page * self.page_size, (page + 1) * self.page_size)
        return any(self.visible(lane, token, max(token, oldest_query)) for token in tokens)

    def longest_hit(self, salt: str, tokens: list[int]) -> int:
        """Return the expected length of a hit in the prefix cache, in pages. It is the longest prefix for which every
        lane has the rows that the first token after the prefix sees.
        """
        texts = [(salt, tuple(tokens[:end])) for end in range(self.page_size, len(tokens), self.page_size)]
        for num_pages in range(len(texts), 0, -1):
            known = any(begins(texts[num_pages - 1], text) for _, text in self.published)
            query = num_pages * self.page_size
            if known and all(
                (lane, texts[page]) in self.published
                for lane, page in itertools.product(self.lanes, range(num_pages))
                if self.is_needed(lane, page, query)
            ):
                return num_pages
        return 0

    def admit(self, tokens: list[int], salt: str, step_tokens: int) -> None:
        """Process a new request like an engine: find its prefix in the cache, and compute the other tokens in steps of
        `step_tokens` tokens. Stop if no rows are free.
        """
        if len(self.sequences) == NUM_SEQS:
            return
        batch_slot = next(slot for slot in range(NUM_SEQS) if slot not in self.sequences)
        num_pages = self.longest_hit(salt, tokens)
        prefix = self.cache.lookup(tokens, salt)
        assert [rows.shape for rows in prefix] == [(len(heads), num_pages) for _, heads in self.groups]
        has_room = self.pools.has_room(len(tokens), step_tokens=step_tokens, prefix=prefix)
        start = num_pages * self.page_size
        assert self.cache.match(batch_slot, tokens, salt) == start
        sequence = Sequence(salt, tokens[:start], {lane: {} for lane in self.lanes}, num_pages, start, start)
        for lane, page in itertools.product(self.lanes, range(num_pages)):
            if self.is_needed(lane, page, start):
                row = self.published[lane, sequence.text((page + 1) * self.page_size)]
                sequence.rows[lane][page] = row
                self.seen.add("hit")
                if row in self.free[lane[0]]:
                    self.free[lane[0]].remove(row)
        self.sequences[batch_slot] = sequence
        self.attend(batch_slot, start)
        for begin in range(start, len(tokens), step_tokens):
            self.recycle(batch_slot, begin)
            if not self.extend(batch_slot, tokens[begin : begin + step_tokens]):
                assert not has_room
                self.finish(batch_slot, 1)
                return

    def extend(self, batch_slot: int, tokens: list[int]) -> bool:
        """Run one step of a sequence: allocate rows for its new tokens in all groups, write the tokens, and check which
        keys attention finds. If a group has too few free rows, no group allocates rows.
        """
        sequence = self.sequences[batch_slot]
        start, end = len(sequence.tokens), len(sequence.tokens) + len(tokens)
        if end > MAX_PAGES * self.page_size:
            return True
        new_pages = range(sequence.num_pages, max(-(-end // self.page_size), sequence.num_pages))
        lacking = [len(new_pages) * len(heads) for _, heads in self.groups]
        assert (self.pools.room(batch_slot) >= end) == all(n <= len(f) for n, f in zip(lacking, self.free, strict=True))
        if self.pools.room(batch_slot) < end:
            self.seen.add("exhaustion")
            with pytest.raises(OutOfPages):
                self.pools.allocate(batch_slot, end)
            return False
        self.pools.allocate(batch_slot, end)
        for page, lane in itertools.product(new_pages, self.lanes):
            row = self.free[lane[0]].pop(0)
            self.forget(lane[0], row)
            sequence.rows[lane][page] = row
        sequence.num_pages += len(new_pages)
        sequence.tokens += tokens
        for position in range(start, end):
            page, offset = divmod(position, self.page_size)
            for lane in self.lanes:
                row = sequence.rows[lane][page]
                assert [page for _, page, _ in self.holders(lane[0], row)] == [page], "what is written to is not shared"
                assert row not in self.published_rows(lane[0])
                self.memory[lane[0], row, offset] = lane[1], sequence.text(position + 1)
        sequence.num_written = end
        for query in range(start, end):
            self.attend(batch_slot, query)
        return True

    def attend(self, batch_slot: int, query: int) -> None:
        """Assert that the rows of a sequence still have every written key that the query sees."""
        sequence = self.sequences[batch_slot]
        for lane, key in itertools.product(self.lanes, range(min(query + 1, sequence.num_written))):
            if self.visible(lane, key, query):
                row = sequence.rows[lane][key // self.page_size]
                assert self.memory[lane[0], row, key % self.page_size] == (lane[1], sequence.text(key + 1))

    def holders(self, group: int, row: int) -> list[tuple[int, int, int]]:
        """Return (batch slot, page, head) of each table entry that refers to a row."""
        return [
            (batch_slot, page, head)
            for batch_slot, sequence in self.sequences.items()
            for (of, head), rows in sequence.rows.items()
            for page, held in rows.items()
            if (of, held) == (group, row)
        ]

    def published_rows(self, group: int) -> set[int]:
        return {row for ((of, _), _), row in self.published.items() if of == group}

    def forget(self, group: int, row: int) -> None:
        """Update the model after a free row was allocated again. The prefix cache no longer has the page of the row. If
        every longer prefix needs the row, the prefix cache has none of their pages either.
        """
        for lane, text in [key for key, known in self.published.items() if (key[0][0], known) == (group, row)]:
            del self.published[lane, text]
            self.seen.add("eviction")
            if self.is_needed(lane, len(text[1]) // self.page_size - 1, MAX_PAGES * self.page_size):
                self.published = {key: known for key, known in self.published.items() if not begins(text, key[1])}

    def publish(self, batch_slot: int) -> None:
        sequence = self.sequences[batch_slot]
        self.cache.publish(batch_slot, sequence.tokens, sequence.salt)
        full = len(sequence.tokens) // self.page_size
        known_from = 0  # number of pages that this sequence added to the prefix cache before
        for page, lane in itertools.product(range(full), self.lanes):
            if sequence.rows[lane].get(page) in self.published_rows(lane[0]):
                known_from = page + 1
        for page, lane in itertools.product(range(known_from, full), self.lanes):
            if page in sequence.rows[lane]:
                text = sequence.text((page + 1) * self.page_size)
                self.published.setdefault((lane, text), sequence.rows[lane][page])

    def recycle(self, batch_slot: int, oldest_query: int) -> None:
        """Free the rows that no query at position `oldest_query` or later sees. The caller draws a position between the
        position of the last such call and the last written token.
        """
        sequence = self.sequences[batch_slot]
        span = sequence.num_written - sequence.oldest_query
        oldest_query = sequence.oldest_query + (oldest_query - sequence.oldest_query) % (span + 1)
        expected: list[list[int]] = [[] for _ in self.groups]
        for lane in self.lanes:
            rows = sequence.rows[lane]
            unseen = [page for page in sorted(rows) if not self.is_needed(lane, page, oldest_query)]
            expected[lane[0]] += [rows.pop(page) for page in unseen]
        assert self.pools.recycle([batch_slot], [oldest_query]) == tuple(expected)
        sequence.oldest_query = oldest_query
        for group, rows in enumerate(expected):
            self.give_back(group, rows)
            if rows:
                self.seen.add("recycling")

    def give_back(self, group: int, rows: list[int]) -> None:
        unheld = [row for row in reversed(rows) if not self.holders(group, row)]
        if len(unheld) < len(rows):
            self.seen.add("giving back what others hold")
        self.free[group] += unheld

    def finish(self, batch_slot: int, times: int) -> None:
        for _ in range(times):
            self.pools.release(batch_slot)
        sequence = self.sequences.pop(batch_slot)
        for group in range(len(self.groups)):
            rows = [r for lane, r in sequence.rows.items() if lane[0] == group]
            self.give_back(group, [r[page] for page in range(sequence.num_pages) for r in rows if page in r])

    def swap(self, first: int, second: int) -> None:
        self.pools.swap(first, second)
        names = {first: second, second: first}
        self.sequences = {names.get(slot, slot): sequence for slot, sequence in self.sequences.items()}

    def clear(self) -> None:
        self.cache.clear()
        self.published.clear()

    def misuse(self, batch_slot: int) -> None:
        """Make invalid calls, which must raise an error. `check` detects whether they changed anything."""
        sequence = self.sequences[batch_slot]
        room = sequence.num_pages * self.page_size
        with pytest.raises(ValueError, match="oldest_queries"):
            self.pools.recycle([batch_slot], [room + 1])
        with pytest.raises(ValueError, match="oldest_queries"):
            self.pools.recycle([batch_slot] * 2, [sequence.oldest_query] * 2)
        with pytest.raises(ValueError, match="room for"):
            self.cache.publish(batch_slot, [0] * (room + self.page_size))
        if sequence.num_pages:
            with pytest.raises(ValueError, match="batch_slot must be idle"):
                self.cache.match(batch_slot, sequence.tokens)
        if any(row in self.published_rows(lane[0]) for lane in self.lanes for row in sequence.rows[lane].values()):
            with pytest.raises(PageError):
                self.cache.publish(batch_slot, [9] * len(sequence.tokens), sequence.salt)

    def check(self) -> None:
        self.pools.check()
        self.cache.check()
        for group, pool in enumerate(self.pools.pools):
            owned = {row: len(self.holders(group, row)) for row in range(pool.num_rows)}
            assert {row: pool._rows.refcount(row) for row in owned} == owned
            assert list(pool._rows._free) == self.free[group]
            assert {row for row in owned if self.cache.is_published(row, group)} == self.published_rows(group)
            tables = np.full((NUM_SEQS, pool.num_heads, MAX_PAGES), PAGE_NONE)
            for batch_slot, sequence in self.sequences.items():
                for (of, head), rows in sequence.rows.items():
                    if of == group:
                        tables[batch_slot, head, list(rows)] = list(rows.values())
            np.testing.assert_array_equal(pool.tables(range(NUM_SEQS)), tables)
        known = {(text[0], text[1][:end]) for _, text in self.published for end in range(1, len(text[1]) + 1)}
        assert self.cache.num_published == sum(len(tokens) % self.page_size == 0 for _, tokens in known)

    def drain(self) -> None:
        for batch_slot in list(self.sequences):
            self.finish(batch_slot, 1)
        self.check()
        assert not any(self.pools.num_owned)


def worlds() -> st.SearchStrategy[World]:
    """Return a strategy for groups whose heads have windows and sink tokens near multiples of the page size, or no
    window. It includes one group with one head without a window.
    """

    def sized(page_size: int) -> st.SearchStrategy[World]:
        width = st.sampled_from([1, page_size, page_size + 1, 3 * page_size - 1, FULL])
        head = st.tuples(width, st.sampled_from([0, 0, 1, page_size + 1]))
        heads = st.just([(FULL, 0)]) | st.lists(head, min_size=1, max_size=3)
        groups = st.lists(heads, min_size=1, max_size=2)
        return groups.map(lambda groups: World([(10 * len(heads), heads) for heads in groups], page_size))

    return st.integers(1, 3).flatmap(sized)


class CacheMachine(RuleBasedStateMachine):
    pick = st.integers(0, NUM_SEQS - 1)
    text = st.lists(st.integers(0, 1), min_size=1, max_size=12)

    @initialize(world=worlds())
    def begin(self, world):
        self.world = world

    def slot(self, pick: int) -> int | None:
        slots = sorted(self.world.sequences)
        return slots[pick % len(slots)] if slots else None

    @rule(tokens=text, salt=st.sampled_from(SALTS), step_tokens=st.integers(1, 8), publishes=st.booleans())
    def admit(self, tokens, salt, step_tokens, publishes):
        tokens = tokens[: MAX_PAGES * self.world.page_size]
        before = set(self.world.sequences)
        self.world.admit(tokens, salt, step_tokens)
        for batch_slot in set(self.world.sequences) - before:
            if publishes:
                self.world.publish(batch_slot)

    @rule(pick=pick, tokens=text, recycles=st.booleans())
    def extend(self, pick, tokens, recycles):
        if (batch_slot := self.slot(pick)) is not None:
            for token in tokens:
                if recycles:
                    self.world.recycle(batch_slot, self.world.sequences[batch_slot].num_written)
                self.world.extend(batch_slot, [token])

    @rule(pick=pick)
    def publish(self, pick):
        if (batch_slot := self.slot(pick)) is not None:
            self.world.publish(batch_slot)

    @rule(pick=pick, oldest_query=st.integers(0, 30))
    def recycle(self, pick, oldest_query):
        if (batch_slot := self.slot(pick)) is not None:
            self.world.recycle(batch_slot, oldest_query)

    @rule(pick=pick, times=st.integers(1, 2))
    def finish(self, pick, times):
        if (batch_slot := self.slot(pick)) is not None:
            self.world.finish(batch_slot, times)

    @rule(first=pick, second=pick)
    def swap(self, first, second):
        self.world.swap(first, second)

    @rule(pick=pick)
    def misuse(self, pick):
        if (batch_slot := self.slot(pick)) is not None:
            self.world.misuse(batch_slot)

    @rule()
    def clear(self):
        self.world.clear()

    @invariant()
    def consistent(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_operations():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    seen: set[str] = set()
    for _ in range(200):
        page_size = draw.randint(1, 3)
        widths = [1, page_size, page_size + 1, 2 * page_size, FULL]
        heads = [[(draw.choice(widths), draw.choice([0, 0, 1, page_size + 1])) for _ in range(n)] for n in (1, 2)]
        world = World([(10 * len(group), group) for group in draw.sample(heads, draw.randint(1, 2))], page_size, seen)
        for _ in range(500):
            run_one(world, draw)
            world.check()
        world.drain()
    assert seen == {"hit", "eviction", "recycling", "exhaustion", "giving back what others hold"}


def run_one(world: World, draw: random.Random) -> None:
    """Run one random operation. Operations on a sequence get a random sequence."""
    if not world.sequences or draw.random() < 0.3:
        tokens = draw.choices(range(2), k=draw.randint(1, MAX_PAGES * world.page_size))
        world.admit(tokens, draw.choice(SALTS), draw.randint(1, 8))
        return
    batch_slot = draw.choice(sorted(world.sequences))
    written = world.sequences[batch_slot].num_written
    operations = {
        "decode": lambda: world.recycle(batch_slot, written) or world.extend(batch_slot, [draw.randrange(2)]),
        "extend": lambda: world.extend(batch_slot, draw.choices(range(2), k=draw.randint(1, 5))),
        "publish": lambda: world.publish(batch_slot),
        "recycle": lambda: world.recycle(batch_slot, draw.randint(0, 30)),
        "finish": lambda: world.finish(batch_slot, draw.randint(1, 2)),
        "swap": lambda: world.swap(batch_slot, draw.randrange(NUM_SEQS)),
        "misuse": lambda: world.misuse(batch_slot),
    }
    operations[draw.choice([*operations, "publish", "publish", "decode"])]()
