"""Random operations on a page pool and its prefix cache, against a model that remembers everything in full."""

import random
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pallas_attn.cache import OutOfPages, PageError, PagePool, PrefixCache

PAGE_SIZE = 2
NUM_PAGES = 10
SALTS = ("", "a")
MAX_LENGTH = 14

Prefix = tuple[str, tuple[int, ...]]  # a salt, and all tokens up to and including a slot


@dataclass(eq=False)
class Sequence:
    """One owner of pages, the first `num_written` of whose tokens have their K/V in them."""

    salt: str
    tokens: list[int]
    pages: list[int]
    num_written: int

    def prefix(self, length: int) -> Prefix:
        return self.salt, tuple(self.tokens[:length])

    @property
    def writable_pages(self) -> list[int]:
        return self.pages[self.num_written // PAGE_SIZE :]


class World:
    """The real thing, and beside it: reference counts, order of freed pages, what is published, what memory holds."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.cache = PrefixCache(self.pool, PAGE_SIZE)
        self.sequences: list[Sequence] = []
        self.refcounts = dict.fromkeys(range(NUM_PAGES), 0)
        self.free = list(range(NUM_PAGES))
        self.published: dict[Prefix, int] = {}
        self.memory: dict[int, list[Prefix | None]] = {page: [None] * PAGE_SIZE for page in range(NUM_PAGES)}

    def admit(self, tokens: list[int], salt: str) -> None:
        """What an engine does for a new request: match, then allocate the rest or give up."""
        expected = []
        for end in range(PAGE_SIZE, len(tokens), PAGE_SIZE):
            page = self.published.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            expected.append(page)
        assert self.cache.lookup(tokens, salt) == expected
        pages = self.cache.match(tokens, salt)
        assert pages == expected
        for page in pages:
            if self.refcounts[page] == 0:
                self.free.remove(page)
            self.refcounts[page] += 1
        sequence = Sequence(salt, tokens, pages, len(pages) * PAGE_SIZE)
        for index, page in enumerate(pages):
            for offset in range(PAGE_SIZE):
                assert self.memory[page][offset] == sequence.prefix(index * PAGE_SIZE + offset + 1)
        self.sequences.append(sequence)
        if not self.grow(sequence):
            self.finish(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Allocates what the tokens of a sequence still lack, if there is as much."""
        lacking = -(-len(sequence.tokens) // PAGE_SIZE) - len(sequence.pages)
        if lacking > len(self.free):
            with pytest.raises(OutOfPages):
                self.pool.allocate(lacking)
            return False
        pages = self.pool.allocate(lacking)
        assert pages == self.free[:lacking]
        for page in pages:
            self.free.remove(page)
            self.refcounts[page] = 1
            self.forget(page)
        sequence.pages += pages
        return True

    def forget(self, page: int) -> None:
        """A published page is lost, and with it everything that extends it."""
        for salt, tokens in [prefix for prefix, published in self.published.items() if published == page]:
            self.published = {
                (other_salt, other): published
                for (other_salt, other), published in self.published.items()
                if (other_salt, other[: len(tokens)]) != (salt, tokens)
            }

    def append(self, sequence: Sequence, token: int) -> None:
        if len(sequence.tokens) < MAX_LENGTH:
            sequence.tokens.append(token)
            if not self.grow(sequence):
                sequence.tokens.pop()

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        for position in range(sequence.num_written, min(sequence.num_written + num_tokens, len(sequence.tokens))):
            page = sequence.pages[position // PAGE_SIZE]
            self.memory[page][position % PAGE_SIZE] = sequence.prefix(position + 1)
            sequence.num_written = position + 1

    def publish(self, sequence: Sequence) -> None:
        self.cache.publish(sequence.tokens[: sequence.num_written], sequence.pages, sequence.salt)
        known_from = 0  # the model, too, does not look again at what precedes the sequence's last published page
        full = sequence.num_written // PAGE_SIZE
        for index in range(full):
            if sequence.pages[index] in self.published.values():
                known_from = index + 1
        for index in range(known_from, full):
            self.published.setdefault(sequence.prefix((index + 1) * PAGE_SIZE), sequence.pages[index])

    def fork(self, sequence: Sequence) -> None:
        """Another sequence that shares the full pages, as beam search would."""
        full = sequence.num_written // PAGE_SIZE
        if full:
            pages = sequence.pages[:full]
            self.pool.retain(pages)
            for page in pages:
                self.refcounts[page] += 1
            self.sequences.append(Sequence(sequence.salt, sequence.tokens[: full * PAGE_SIZE], pages, full * PAGE_SIZE))

    def finish(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self.sequences.remove(sequence)
        for page in reversed(sequence.pages):
            self.refcounts[page] -= 1
            if self.refcounts[page] == 0:
                self.free.append(page)

    def evict(self, num_pages: int) -> None:
        """Somebody else comes and goes."""
        tokens = [-1] * min(num_pages, len(self.free)) * PAGE_SIZE
        passer_by = Sequence("passer-by", tokens, [], 0)
        self.sequences.append(passer_by)
        assert self.grow(passer_by)
        self.finish(passer_by)

    def clear(self) -> None:
        self.cache.clear()
        self.published.clear()

    def misuse(self, page: int) -> None:
        """Each of these is refused; `check` sees whether anything changed."""
        owned = [page for page, count in self.refcounts.items() if count]
        for operation in (self.pool.release, self.pool.retain):
            for bad in [page, *self.free[:1]]:
                if self.refcounts.get(bad, 0) == 0:
                    with pytest.raises(PageError):
                        operation([*owned, bad])
        if owned:
            with pytest.raises(PageError):
                self.pool.release([*owned, *owned[-1:] * self.refcounts[owned[-1]]])
        if self.free:
            with pytest.raises(PageError):
                self.cache.publish([9] * PAGE_SIZE, self.free[-1:])

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        published = set(self.published.values())
        cached = published & set(self.free)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_owned + len(cached) + len(set(self.free) - cached) == NUM_PAGES
        assert {page: self.pool.refcount(page) for page in range(NUM_PAGES)} == self.refcounts
        assert {page for page in range(NUM_PAGES) if self.cache.is_published(page)} == published
        assert self.cache.num_published == len(published) == len(self.published)
        for sequence in self.sequences:
            for page in sequence.writable_pages:
                assert self.refcounts[page] == 1
                assert page not in published
        if not self.sequences:
            assert self.pool.num_owned == 0


class CacheMachine(RuleBasedStateMachine):
    pick = st.integers(0, 5)
    token = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def sequence(self, pick: int) -> Sequence | None:
        sequences = self.world.sequences
        return sequences[pick % len(sequences)] if sequences else None

    @rule(tokens=st.lists(token, min_size=1, max_size=MAX_LENGTH), salt=st.sampled_from(SALTS))
    def admit(self, tokens, salt):
        self.world.admit(tokens, salt)

    @rule(pick=pick, token=token)
    def append(self, pick, token):
        if sequence := self.sequence(pick):
            self.world.append(sequence, token)

    @rule(pick=pick, num_tokens=st.integers(1, MAX_LENGTH))
    def write(self, pick, num_tokens):
        if sequence := self.sequence(pick):
            self.world.write(sequence, num_tokens)

    @rule(pick=pick)
    def publish(self, pick):
        if sequence := self.sequence(pick):
            self.world.publish(sequence)

    @rule(pick=pick)
    def fork(self, pick):
        if sequence := self.sequence(pick):
            self.world.fork(sequence)

    @rule(pick=pick)
    def finish(self, pick):
        if sequence := self.sequence(pick):
            self.world.finish(sequence)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages):
        self.world.evict(num_pages)

    @rule(page=st.integers(-2, NUM_PAGES + 1))
    def misuse(self, page):
        self.world.misuse(page)

    @rule()
    def clear(self):
        self.world.clear()

    @invariant()
    def consistent(self):
        self.world.check()

    def teardown(self):
        for sequence in list(self.world.sequences):
            self.world.finish(sequence)
        self.world.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_operations():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    world = World()
    on_a_sequence = {
        "append": lambda sequence: world.append(sequence, draw.randrange(2)),
        "write": lambda sequence: world.write(sequence, draw.randint(1, MAX_LENGTH)),
        "publish": world.publish,
        "fork": world.fork,
        "finish": world.finish,
    }
    elsewhere = {
        "admit": lambda: world.admit(draw.choices(range(2), k=draw.randint(1, MAX_LENGTH)), draw.choice(SALTS)),
        "evict": lambda: world.evict(draw.randint(0, 3)),
        "misuse": lambda: world.misuse(draw.randint(-2, NUM_PAGES + 1)),
    }
    for step in range(100_000):
        name = draw.choice([*elsewhere, *on_a_sequence, "admit", "write", "publish"])
        if name in elsewhere:
            elsewhere[name]()
        elif world.sequences:
            on_a_sequence[name](draw.choice(world.sequences))
        if step % 1000 == 999:
            world.clear()
        world.check()
    for sequence in list(world.sequences):
        world.finish(sequence)
    world.check()
    assert world.cache.hit_tokens > 0
