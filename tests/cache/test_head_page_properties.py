"""Property tests of `HeadPagePool` with windows per KV head.

The tests run random steps of sequences and compare the pool with a simple model, which checks every visible token. A
row is one page of one KV head. A batch slot is the index of a running sequence in the table of the pool.
"""

import itertools
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pallas_attn import FULL, PAGE_NONE, HeadWindow
from pallas_attn.cache import HeadPagePool, OutOfPages

NUM_ROWS = 26
NUM_SEQS = 3
MAX_PAGES = 7
MAX_NEW_TOKENS = 5

Written = tuple[int, int, int]  # sequence, head and position of a key, which identify the contents of a cache slot


@dataclass(eq=False)
class Sequence:
    """Model of a sequence: the row of each head and page. The first `num_accepted` tokens are final, and later tokens
    are drafts.
    """

    number: int
    rows: list[dict[int, int]]
    num_pages: int = 0
    num_accepted: int = 0
    oldest_query: int = 0


@dataclass
class World:
    """The pool under test, and a model of it: owners of rows, order of free rows, contents of rows."""

    widths: list[int]
    sink_tokens: list[int]
    page_size: int
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        window = HeadWindow(jnp.asarray(self.widths, jnp.int32), jnp.asarray(self.sink_tokens, jnp.int32))
        self.pool = HeadPagePool(
            NUM_ROWS, window, page_size=self.page_size, max_num_seqs=NUM_SEQS, max_pages_per_seq=MAX_PAGES
        )
        self.num_started = 0
        self.sequences = [self.idle_sequence() for _ in range(NUM_SEQS)]
        self.free = list(range(NUM_ROWS))
        self.memory: dict[int, list[Written | None]] = {row: [None] * self.page_size for row in range(NUM_ROWS)}

    @property
    def heads(self) -> range:
        return range(len(self.widths))

    def idle_sequence(self) -> Sequence:
        self.num_started += 1
        return Sequence(self.num_started, [{} for _ in self.heads])

    def visible(self, head: int, key: int, query: int) -> bool:
        """Return whether a query at position `query` sees the key at position `key`, from the
        window and sink tokens.
        """
        return key <= query and (key < self.sink_tokens[head] or key > query - self.widths[head])

    def is_needed(self, head: int, page: int, oldest_query: int) -> bool:
        """Return whether any query at position `oldest_query` or later sees a token of a page.

        For each token, it is enough to check the first such query at the position of the token or later. Later queries
        see a token only if earlier queries see it.
        """
        tokens = range(page * self.page_size, (page + 1) * self.page_size)
        return any(self.visible(head, token, max(token, oldest_query)) for token in tokens)

    def pages(self, tokens: range) -> set[int]:
        return {token // self.page_size for token in tokens}

    def step(self, batch_slot: int, num_new: int, num_accepted: int) -> None:
        """Run a step of a sequence like an engine: free rows that no query sees any more, allocate rows, write new
        tokens, check attention, and discard rejected drafts.
        """
        sequence = self.sequences[batch_slot]
        start = sequence.num_accepted
        end = min(start + num_new, MAX_PAGES * self.page_size)
        self.recycle(batch_slot, start)
        if not self.grow(batch_slot, end):
            return
        self.expect_no_more_than_needed(sequence, start)
        self.write(batch_slot, range(start, end))
        self.attend(batch_slot, range(start, end))
        sequence.num_accepted = min(start + num_accepted, end)
        if sequence.num_accepted < end:
            self.seen.add("rejected drafts")

    def grow(self, batch_slot: int, num_tokens: int) -> bool:
        """Allocate the rows of a sequence of `num_tokens` tokens, if enough rows are free. Return whether it succeeded.
        The model expects that the pool allocates page by page, and the rows that have been free for the longest time
        first.
        """
        sequence = self.sequences[batch_slot]
        new_pages = sorted(self.pages(range(num_tokens)) - set(range(sequence.num_pages)))
        lacking = len(new_pages) * len(self.heads)
        assert self.pool.num_lacking(batch_slot, num_tokens) == lacking
        if lacking > len(self.free):
            self.seen.add("exhaustion")
            with pytest.raises(OutOfPages):
                self.pool.allocate(batch_slot, num_tokens)
            return False
        self.pool.allocate(batch_slot, num_tokens)
        for page in new_pages:
            for head in self.heads:
                sequence.rows[head][page] = self.free.pop(0)
        sequence.num_pages += len(new_pages)
        return True

    def recycle(self, batch_slot: int, oldest_query: int) -> None:
        sequence = self.sequences[batch_slot]
        expected = []
        for head, rows in enumerate(sequence.rows):
            unseen = [page for page in sorted(rows) if not self.is_needed(head, page, oldest_query)]
            expected += [rows.pop(page) for page in unseen]
        assert self.pool.recycle([batch_slot], [oldest_query]) == expected
        sequence.oldest_query = oldest_query
        self.give_back(expected)
        if expected:
            self.seen.add("recycling")

    def give_back(self, rows: list[int]) -> None:
        self.free += reversed(rows)
        for row in rows:
            self.memory[row] = [None] * self.page_size

    def expect_no_more_than_needed(self, sequence: Sequence, start: int) -> None:
        """Assert that a sequence has only rows with sink tokens, tokens of the window or new tokens, and at most as
        many rows as `peak_rows` of the pool.
        """
        for head in self.heads:
            window = range(max(start - self.widths[head] + 1, 0), start)
            written = range(start, sequence.num_pages * self.page_size)
            needed = self.pages(range(self.sink_tokens[head])) | self.pages(window) | self.pages(written)
            assert sequence.rows[head].keys() <= needed
        num_rows = sum(map(len, sequence.rows))
        assert num_rows <= self.pool.peak_rows(MAX_PAGES * self.page_size, step_tokens=MAX_NEW_TOKENS)

    def write(self, batch_slot: int, positions: range) -> None:
        sequence = self.sequences[batch_slot]
        slots = self.pool.slots([batch_slot] * len(positions), positions)
        for position, by_head in zip(positions, slots.tolist(), strict=True):
            for head, slot in enumerate(by_head):
                row, offset = divmod(slot, self.page_size)
                self.memory[row][offset] = (sequence.number, head, position)

    def attend(self, batch_slot: int, queries: range) -> None:
        """Assert that the rows of a sequence still have every key that the queries see."""
        [table] = self.pool.tables([batch_slot]).tolist()
        for head, query in itertools.product(self.heads, queries):
            for key in range(query + 1):
                if self.visible(head, key, query):
                    row = table[head][key // self.page_size]
                    assert row != PAGE_NONE
                    found = self.memory[row][key % self.page_size]
                    assert found == (self.sequences[batch_slot].number, head, key)

    def recycle_early(self, batch_slot: int, oldest_query: int) -> None:
        """Free rows between two steps. `oldest_query` is the first position that may still have queries: at least its
        value in the last such call, and at most the last accepted token.
        """
        sequence = self.sequences[batch_slot]
        span = sequence.num_accepted - sequence.oldest_query
        self.recycle(batch_slot, sequence.oldest_query + oldest_query % (span + 1))

    def reserve(self, batch_slot: int, num_tokens: int) -> None:
        """Allocate rows for future tokens, without freeing rows that no query sees any more."""
        end = self.sequences[batch_slot].num_accepted + num_tokens
        self.grow(batch_slot, min(end, MAX_PAGES * self.page_size))

    def abort(self, batch_slot: int, times: int) -> None:
        for _ in range(times):
            self.pool.release(batch_slot)
        rows = self.sequences[batch_slot].rows
        self.give_back([rows[head][page] for page in range(MAX_PAGES) for head in self.heads if page in rows[head]])
        self.sequences[batch_slot] = self.idle_sequence()

    def swap(self, first: int, second: int) -> None:
        self.pool.swap(first, second)
        self.sequences[first], self.sequences[second] = self.sequences[second], self.sequences[first]

    def misuse(self, batch_slot: int) -> None:
        """Make invalid calls, which must raise an error. `check` detects whether they changed anything."""
        sequence = self.sequences[batch_slot]
        room = sequence.num_pages * self.page_size
        for oldest_query in (sequence.oldest_query - 1, room + 1):
            with pytest.raises(ValueError, match="oldest_queries.* must be"):
                self.pool.recycle([batch_slot], [oldest_query])
        for position in (-1, room, MAX_PAGES * self.page_size):
            with pytest.raises(ValueError, match="positions"):
                self.pool.slots([batch_slot], [position])
        with pytest.raises(ValueError, match="num_tokens must be"):
            self.pool.allocate(batch_slot, MAX_PAGES * self.page_size + 1)
        with pytest.raises(ValueError, match="batch_slot must be"):
            self.pool.swap(batch_slot, NUM_SEQS)

    def check(self) -> None:
        self.pool.check()
        tables = np.full((NUM_SEQS, len(self.heads), MAX_PAGES), PAGE_NONE)
        for batch_slot, sequence in enumerate(self.sequences):
            for head, rows in enumerate(sequence.rows):
                for page, row in rows.items():
                    tables[batch_slot, head, page] = row
        np.testing.assert_array_equal(self.pool.tables(range(NUM_SEQS)), tables)
        owned = tables[tables != PAGE_NONE].tolist()
        assert sorted([*owned, *self.free]) == list(range(NUM_ROWS)), "each row is free or in one place of one table"
        assert (self.pool.num_owned, self.pool.num_free) == (len(owned), len(self.free))
        assert self.pool.free_fraction == len(self.free) / NUM_ROWS

    def drain(self) -> None:
        for batch_slot in range(NUM_SEQS):
            self.abort(batch_slot, 1)
        self.check()
        assert self.pool.free_fraction == 1.0


def worlds() -> st.SearchStrategy[World]:
    """Return a strategy for heads with windows and sink tokens near multiples of the page size, or no window."""

    def sized(page_size: int) -> st.SearchStrategy[World]:
        width = st.sampled_from([1, max(page_size - 1, 1), page_size, page_size + 1, 3 * page_size - 1, FULL])
        sink_tokens = st.sampled_from([0, 0, 1, page_size, page_size + 1, 100])
        heads = st.lists(st.tuples(width, sink_tokens), min_size=1, max_size=3)
        return heads.map(lambda heads: World([w for w, _ in heads], [s for _, s in heads], page_size))

    return st.integers(1, 4).flatmap(sized)


class HeadPageMachine(RuleBasedStateMachine):
    batch_slot = st.integers(0, NUM_SEQS - 1)
    num_tokens = st.integers(0, MAX_NEW_TOKENS)

    @initialize(world=worlds())
    def begin(self, world):
        self.world = world

    @rule(batch_slot=batch_slot, num_new=num_tokens, num_accepted=num_tokens)
    def step(self, batch_slot, num_new, num_accepted):
        self.world.step(batch_slot, num_new, num_accepted)

    @rule(batch_slot=batch_slot, num_steps=st.integers(2, 12))
    def decode(self, batch_slot, num_steps):
        for _ in range(num_steps):
            self.world.step(batch_slot, 2, 2)

    @rule(batch_slot=batch_slot, oldest_query=st.integers(0, 4 * MAX_PAGES))
    def recycle_early(self, batch_slot, oldest_query):
        self.world.recycle_early(batch_slot, oldest_query)

    @rule(batch_slot=batch_slot, num_tokens=num_tokens)
    def reserve(self, batch_slot, num_tokens):
        self.world.reserve(batch_slot, num_tokens)

    @rule(batch_slot=batch_slot, times=st.integers(1, 2))
    def abort(self, batch_slot, times):
        self.world.abort(batch_slot, times)

    @rule(first=batch_slot, second=batch_slot)
    def swap(self, first, second):
        self.world.swap(first, second)

    @rule(batch_slot=batch_slot)
    def misuse(self, batch_slot):
        self.world.misuse(batch_slot)

    @invariant()
    def consistent(self):
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestHeadPageMachine = HeadPageMachine.TestCase
TestHeadPageMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_operations():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    seen: set[str] = set()
    for _ in range(200):
        page_size = draw.randint(1, 4)
        widths = draw.choices([1, page_size, page_size + 1, 2 * page_size, 3 * page_size - 1, FULL], k=3)
        world = World(widths, draw.choices([0, 0, 1, page_size, page_size + 1, 100], k=3), page_size, seen)
        for _ in range(500):
            batch_slot, many = draw.randrange(NUM_SEQS), draw.randint(0, MAX_PAGES * page_size)
            operations = {
                "step": lambda: world.step(batch_slot, draw.randint(0, 5), draw.randint(0, 5)),  # noqa: B023
                "recycle": lambda: world.recycle_early(batch_slot, many),  # noqa: B023
                "reserve": lambda: world.reserve(batch_slot, draw.randint(0, 5)),  # noqa: B023
                "abort": lambda: world.abort(batch_slot, draw.randint(1, 2)),  # noqa: B023
                "swap": lambda: world.swap(batch_slot, draw.randrange(NUM_SEQS)),  # noqa: B023
                "misuse": lambda: world.misuse(batch_slot),  # noqa: B023
            }
            operations[draw.choice([*operations, *["step"] * 20])]()
            world.check()
        world.drain()
    assert seen == {"recycling", "exhaustion", "rejected drafts"}
