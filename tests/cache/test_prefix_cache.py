"""Tests of `PrefixCache`, which finds the pages of earlier sequences that begin with the same tokens.

To publish a page is to add it to the prefix cache. A row is one page of one KV head, and a cache group is a set of
layers with equal windows. A batch slot is the index of a running sequence in the tables of the pools.
"""

import hashlib
import random

import numpy as np
import pytest

from pallas_attn import FULL, PAGE_NONE
from pallas_attn.cache import InconsistentCache, OutOfPages, PageError, PrefixCache
from tests.cache.prefix_case import PAGE_SIZE, Sequences, present

PROMPT = list(range(100, 112))  # three full pages


def test_nothing_matches_before_it_is_published():
    case = Sequences()
    slot = case.room(12)
    assert case.lookup([*PROMPT, 1]) == []
    case.cache.publish(slot, PROMPT[:7])
    assert case.lookup([*PROMPT, 1]) == case.pages(slot)[:1]
    case.cache.publish(slot, PROMPT)
    assert case.lookup([*PROMPT, 1]) == case.pages(slot)


def test_match_retains_and_lookup_does_not():
    case = Sequences()
    pages = case.pages(case.published(PROMPT))
    assert case.lookup([*PROMPT, 1]) == pages
    assert [case.pool._rows.refcount(page) for page in pages] == [1, 1, 1]
    assert case.pages(case.match([*PROMPT[:8], 7, 7, 7, 7, 7])) == pages[:2]
    assert [case.pool._rows.refcount(page) for page in pages] == [2, 2, 1]
    case.check()


@pytest.mark.parametrize(
    ("length", "num_matched"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3)]
)
def test_the_last_token_is_never_matched(length, num_matched):
    case = Sequences()
    pages = case.pages(case.published(PROMPT))
    assert case.cache.match(1, [*PROMPT, 1][:length]) == num_matched * PAGE_SIZE
    assert case.pages(1) == pages[:num_matched]


def test_page_matches_only_after_its_predecessors():
    case = Sequences()
    case.published(PROMPT)
    assert case.lookup([*PROMPT[4:8], 1]) == []
    assert case.lookup([*PROMPT[4:], 1]) == []
    assert case.lookup([7, *PROMPT[1:], 1]) == []


def test_salts_do_not_share_prefixes():
    case = Sequences()
    ours = case.pages(case.published(PROMPT, salt="ours"))
    assert case.lookup([*PROMPT, 1], salt="ours") == ours
    assert case.lookup([*PROMPT, 1], salt="theirs") == []
    assert case.lookup([*PROMPT, 1]) == []
    theirs = case.pages(case.published(PROMPT, salt="theirs"))
    assert case.lookup([*PROMPT, 1], salt="theirs") == theirs
    assert set(ours).isdisjoint(theirs)


def test_released_pages_stay_matchable_until_they_are_reused():
    case = Sequences(num_pages=4)
    slot = case.published(PROMPT)
    pages = case.pages(slot)
    case.pools.release(slot)
    assert (case.pool.num_owned, case.cache.num_published) == (0, 3)
    slot = case.match([*PROMPT, 1])
    assert case.pages(slot) == pages
    assert case.pool.num_owned == 3
    case.pools.release(slot)

    case.room(4)  # allocates the page that was never used
    assert case.lookup([*PROMPT, 1]) == pages
    for survivors in (2, 1, 0):  # the last page of a prefix is reused first
        assert case.pages(case.room(4)) == [pages[survivors]]
        assert case.lookup([*PROMPT, 1]) == pages[:survivors]
        case.check()


def test_matching_makes_pages_recently_used():
    case = Sequences(num_pages=2)
    old, new = case.published([1] * 4), case.published([2] * 4)
    old_pages, new_pages = case.pages(old), case.pages(new)
    case.pools.release(old)
    case.pools.release(new)
    case.pools.release(case.match([1] * 5))
    assert case.pages(case.room(4)) == new_pages
    assert case.lookup([1] * 5) == old_pages


def test_pages_after_a_reused_page_are_forgotten_even_while_owned():
    case = Sequences(num_pages=6)
    first, second = case.published(PROMPT[:4]), case.published(PROMPT)
    first_page, own = case.pages(first), case.pages(second)
    assert case.lookup([*PROMPT, 1]) == first_page + own[1:], "a duplicate's successors follow what it duplicates"
    case.pools.release(first)
    assert first_page[0] in case.pages(case.room(12))
    assert case.cache.num_published == 0
    case.check()

    case.cache.publish(second, PROMPT[:4])
    assert case.lookup([*PROMPT, 1]) == own[:1], "what followed the lost page does not follow its duplicate"
    case.cache.publish(second, PROMPT)
    assert case.lookup([*PROMPT, 1]) == own
    case.check()


def test_the_first_publisher_wins():
    case = Sequences()
    first, second = case.published(PROMPT), case.published(PROMPT)
    assert case.lookup([*PROMPT, 1]) == case.pages(first)
    assert not any(map(case.cache.is_published, case.pages(second)))
    extended = [*PROMPT, *range(4)]
    case.pools.allocate(second, 16)
    case.cache.publish(second, extended)
    assert case.lookup([*extended, 1]) == [*case.pages(first), case.pages(second)[3]]
    case.check()


def counting(hashed: list[bytes]):
    def digest(message: bytes) -> bytes:
        hashed.append(message)
        return hashlib.sha256(message).digest()

    return digest


def test_publish_hashes_only_new_pages():
    hashed: list[bytes] = []
    case = Sequences(digest=counting(hashed))
    slot = case.published(PROMPT)
    extended = [*PROMPT, *range(4)]
    case.pools.allocate(slot, 16)
    hashed.clear()
    case.cache.publish(slot, extended)
    assert len(hashed) == 1
    assert case.lookup([*extended, 1]) == case.pages(slot)


def test_repeated_lookup_hashes_only_missing_pages():
    """The scheduler looks up a waiting prompt before every step. A repeated lookup hashes only the first page that
    missed.
    """
    hashed: list[bytes] = []
    case = Sequences(digest=counting(hashed))
    slot = case.published(PROMPT[:8])
    pages, waiting = case.pages(slot), [*PROMPT, 1]
    assert case.lookup(waiting) == pages
    hashed.clear()
    assert case.lookup(waiting) == pages
    assert len(hashed) == 1  # the page after the hit
    longer = case.match(waiting)
    case.pools.allocate(longer, 12)
    case.cache.publish(longer, PROMPT)
    assert case.lookup(waiting) == case.pages(longer)
    hashed.clear()
    assert case.lookup(waiting) == case.pages(longer)
    assert case.lookup([*waiting]) == case.pages(longer)
    assert hashed == []
    assert case.lookup(waiting, salt="other") == []
    case.cache.clear()
    assert case.lookup(waiting) == []


def test_digest_collision_is_a_miss():
    case = Sequences(digest=lambda message: b"same")
    first = case.published([1] * 4)
    pages = case.pages(first)
    assert case.lookup([1] * 5) == pages
    assert case.lookup([2] * 5) == []
    assert case.lookup([1] * 5, salt="other") == []
    assert case.lookup([1] * 9) == pages, "the same tokens one page later are another page"
    second = case.published([1] * 8)
    assert case.lookup([1] * 9) == pages, "its digest is taken"
    assert case.cache.num_published == 1

    case.pools.release(first)
    case.pools.release(second)
    case.pools.release(case.room(32))
    taken_over = case.published([2] * 8)
    assert case.lookup([2] * 9) == case.pages(taken_over)[:1]
    assert case.lookup([1] * 5) == []


def test_digest_separates_its_fields():
    messages: list[bytes] = []

    def digest(message: bytes) -> bytes:
        messages.append(message)
        return b"D"

    case = Sequences(digest=digest)
    case.published([1] * 4)
    messages.clear()
    case.lookup([1] * 4 + [2] * 5)  # hashes page 1: no salt, "D" is the digest of page 0
    case.lookup([2] * 5, salt="D")  # hashes page 0 of another sequence, with the salt "D"
    assert len(messages) == len(set(messages)) == 3


def test_caches_have_different_seeds():
    messages: list[bytes] = []
    for _ in range(2):
        Sequences(digest=lambda message: messages.append(message) or b"").lookup([1] * 5)
    assert len(messages) == len(set(messages)) == 2


def test_statistics_count_matches():
    case = Sequences()
    case.published(PROMPT)
    case.lookup([*PROMPT, 1])
    assert (case.cache.query_tokens, case.cache.hit_tokens) == (0, 0)
    case.match([*PROMPT, 1])
    case.match([7] * 5)
    assert (case.cache.query_tokens, case.cache.hit_tokens) == (18, 12)


def test_clear_forgets_contents_and_keeps_owners():
    case = Sequences(num_pages=3)
    slot = case.published(PROMPT)
    case.cache.clear()
    case.check()
    assert case.lookup([*PROMPT, 1]) == []
    assert case.pool.num_owned == 3
    case.cache.publish(slot, PROMPT)
    assert case.lookup([*PROMPT, 1]) == case.pages(slot)
    case.pools.release(slot)
    case.cache.clear()
    case.room(12)


WINDOWS = [(40, [(FULL, 0), (5, 0), (5, 6)]), (20, [(9, 0)])]
"""Number of rows, and (window, sink tokens) of the KV heads, of two cache groups. A row is one page of one KV head. The
first group has a head without a window, a head with a window, and a head with a window and sink tokens. The second
group has one head with a window.
"""


@pytest.mark.parametrize(
    ("tokens", "salt", "error", "message"),
    [
        ([*PROMPT, *[1] * 20], "", ValueError, "at most the 20 that batch slot 0 has room for, got 8 pages"),
        ([7] * 12, "", PageError, "they are published with other contents"),
        (PROMPT, "other", PageError, "they are published with other contents"),
        ([*PROMPT[:8], *[7] * 4], "", PageError, "they are published with other contents"),
        ([*PROMPT, *[1] * 4, *[2**64] * 4], "", OverflowError, "int too big"),
    ],
)
@pytest.mark.parametrize("groups", [None, WINDOWS])
def test_invalid_publication_changes_nothing(groups, tokens, salt, error, message):
    case = Sequences(groups=groups)
    slot = case.published(PROMPT)
    case.pools.allocate(slot, 20)
    before = case.snapshot()
    with pytest.raises(error, match=message):
        case.cache.publish(slot, tokens, salt)
    assert case.snapshot() == before
    case.check()


def test_row_cannot_be_published_twice():
    """If a sequence has a row that the prefix cache knows with other tokens, adding its pages raises an error. The test
    edits a table to create this state, which the pools never do.
    """
    case = Sequences()
    case.published(PROMPT)
    slot = case.room(8)
    case.pool._tables[slot, 0, 1] = 1
    before = case.snapshot()
    with pytest.raises(PageError, match="published with other contents"):
        case.cache.publish(slot, [5] * 8)
    assert case.snapshot() == before


@pytest.mark.parametrize("num_digests", [0, 1, 2])
def test_failing_digest_changes_nothing(num_digests):
    tickets = [None] * 100

    def digest(message: bytes) -> bytes:
        tickets.pop()
        return hashlib.sha256(message).digest()

    case = Sequences(groups=WINDOWS, digest=digest)
    slot = case.published(PROMPT)
    case.pools.allocate(slot, 24)
    before = case.snapshot()
    for call in (lambda: case.cache.publish(slot, PROMPT * 2), lambda: case.cache.match(1, PROMPT * 2)):
        tickets[:] = [None] * num_digests
        with pytest.raises(IndexError):
            call()
        assert case.snapshot() == before


@pytest.mark.parametrize("group", [0, 1])
def test_failing_match_changes_no_statistics(group, monkeypatch):
    case = Sequences(groups=WINDOWS)
    case.published(PROMPT)
    before = case.snapshot()

    def fail(batch_slot, rows):
        raise OutOfPages(rows.size, 0)

    monkeypatch.setattr(case.pools.pools[group], "check_adoptable", fail)
    with pytest.raises(OutOfPages):
        case.match([*PROMPT, 1])
    assert case.snapshot() == before


def test_match_needs_an_idle_batch_slot():
    case = Sequences(groups=WINDOWS)
    slot = case.published(PROMPT)
    before = case.snapshot()
    with pytest.raises(ValueError, match="batch_slot must be idle, 0 is not"):
        case.cache.match(slot, [*PROMPT, 1])
    with pytest.raises(ValueError, match="batch_slot must be from 0 to 7, got 8"):
        case.cache.match(8, [*PROMPT, 1])
    assert case.snapshot() == before


def test_pools_accept_one_prefix_cache():
    with pytest.raises(ValueError, match="already has a callback"):
        PrefixCache(Sequences().pools)


# A hit of n pages of 4 tokens needs, for each head, the pages that the token at position 4n sees. With a window of 5
# tokens, it sees only the last page of the hit; with 6 tokens, it sees the last two pages.
LONG = list(range(200, 232))


def windowed(*heads: tuple[int, int], num_rows: int = 64, num_tokens: int = 32) -> tuple[Sequences, int]:
    """Add the pages of a sequence of `num_tokens` tokens to the prefix cache, and free the rows outside its windows.

    The cache group has a head without a window and `heads`. Return the sequences, and the batch slot of the sequence.
    """
    case = Sequences(groups=[(num_rows, [(FULL, 0), *heads])])
    slot = case.room(num_tokens)
    case.cache.publish(slot, LONG[:num_tokens])
    case.pools.recycle([slot], [num_tokens])
    case.check()
    return case, slot


def hit(case: Sequences, tokens: list[int]) -> list[list[int]]:
    """Return, for each head of the first group, the indices of the pages whose rows a lookup finds."""
    return present(case.cache.lookup(tokens)[0])


@pytest.mark.parametrize(
    ("window", "sink_tokens", "pages"),
    [
        (1, 0, []),
        (2, 0, [4]),
        (5, 0, [4]),
        (6, 0, [3, 4]),
        (9, 0, [3, 4]),
        (10, 0, [2, 3, 4]),
        (20, 0, [0, 1, 2, 3, 4]),
        (2, 1, [0, 4]),
        (2, 5, [0, 1, 4]),
        (1, 4, [0]),
        (1, 99, [0, 1, 2, 3, 4]),
    ],
)
def test_hit_has_the_rows_that_the_first_new_token_sees(window, sink_tokens, pages):
    case, _ = windowed((window, sink_tokens))
    assert hit(case, [*LONG[:20], 1]) == [[0, 1, 2, 3, 4], pages]
    slot = case.match([*LONG[:20], 1])
    assert present(case.pools.tables([slot])[0][0]) == [[0, 1, 2, 3, 4], pages]
    assert case.pools.recycle([slot], [20]) == ([],), "and is as if it had been recycled there"
    case.check()


def test_longer_prefix_may_hit_where_shorter_misses():
    case, _ = windowed((5, 0), num_rows=17)
    # Allocates two page rows (a page row is one page of one KV head): the row that was never used, and the row that was
    # released first, which has page 6 of the KV head with a window.
    case.room(4)
    assert hit(case, [*LONG, 1]) == [list(range(8)), [7]]
    assert hit(case, LONG[:29]) == [list(range(6)), [5]], "the next needs page 6"
    case.check()


def test_recycled_rows_are_matchable_until_they_are_reused():
    case, slot = windowed((2, 4), num_rows=16)
    for num_pages in (1, 4, 7):
        assert hit(case, [*LONG[: 4 * num_pages], 1]) == [list(range(num_pages)), sorted({0, num_pages - 1})]
    shared = case.match([*LONG[:16], 1])
    assert case.pools.recycle([shared], [16]) == ([],)
    case.pools.release(slot)
    assert case.pool.num_owned == 4 + 2
    case.pools.release(case.room(5 * 4))  # allocates all free rows: five pages of two heads
    assert hit(case, [*LONG, 1]) == [list(range(4)), [0, 3]], "what is still held"
    assert hit(case, [*LONG[:8], 1]) == [[0], [0]], "with page 1 the window's row went"
    case.check()


@pytest.mark.parametrize("group", [(17, [(FULL, 0)]), (17, [(2, 8)]), (34, [(2, 0), (2, 5)])])
def test_lost_page_of_a_full_head_ends_longer_prefixes(group):
    case = Sequences(groups=[group])
    first, second = case.published(LONG[:8]), case.published(LONG)
    case.pools.release(case.room(6 * 4))
    assert case.cache.num_published == 8
    case.pools.release(first)
    case.room(8 * 4)  # allocates the unused rows, and rows of page 1 of the first sequence
    assert case.cache.num_published == 1
    assert len(hit(case, [*LONG, 1])[-1]) <= 1
    case.check()
    case.cache.publish(second, LONG)
    assert case.cache.lookup([*LONG, 1])[0].shape[1] == 8
    case.check()


def test_lost_row_is_replaced_by_the_next_publisher():
    case, slot = windowed((5, 0), num_rows=17)
    other = case.room(4)
    case.pools.release(other)
    assert hit(case, LONG[:29]) == [list(range(6)), [5]]
    again = case.match(LONG[:29])
    case.pools.release(slot)
    case.pools.allocate(again, 28)
    case.cache.publish(again, LONG[:28])
    assert hit(case, LONG[:29]) == [list(range(7)), [6]]
    case.check()


def test_hit_needs_all_groups():
    case = Sequences(groups=[(8, [(FULL, 0)]), (8, [(5, 0)]), (20, [(2, 0), (9, 4)])])
    slot = case.room(32)
    case.cache.publish(slot, LONG)
    case.pools.recycle([slot], [32])
    assert [present(rows) for rows in case.cache.lookup([*LONG[:28], 1])] == [[list(range(7))], [[6]], [[6], [0, 5, 6]]]
    assert case.pools.num_owned == (8, 1, 1 + 3)
    case.pools.release(slot)
    assert case.pools.num_owned == (0, 0, 0)
    case.pools.pools[1].allocate(0, 28)  # allocates all rows except the row of page 7, which was freed last
    assert [present(rows) for rows in case.cache.lookup([*LONG, 1])] == [[list(range(8))], [[7]], [[7], [0, 6, 7]]]
    case.pools.pools[1].allocate(0, 32)
    assert [present(rows) for rows in case.cache.lookup([*LONG, 1])] == [[[]], [[]], [[], []]]
    assert case.cache.num_published == 7, "the last page that a table has room for is followed by none"
    case.check()


def test_window_pages_stay_while_a_page_follows():
    case = Sequences(groups=[(8, [(5, 0)])])
    slot = case.room(32)
    case.cache.publish(slot, LONG)
    case.pools.recycle([slot], [32])
    case.room(28)
    assert case.cache.num_published == 8, "seven of them only lead to the last"
    assert case.lookup([*LONG, 1]) == [PAGE_NONE] * 7 + [7]
    case.check()
    case.pools.release(slot)
    case.room(4)
    assert case.cache.num_published == 0
    case.check()


def test_recycled_page_is_published_without_its_row():
    case = Sequences(groups=[(64, [(FULL, 0), (5, 0)])])
    slot = case.room(32)
    case.pools.recycle([slot], [32])
    case.cache.publish(slot, LONG)
    assert hit(case, [*LONG, 1]) == [list(range(8)), [7]]
    assert hit(case, [*LONG[:28], 1]) == [[], []]
    case.check()


def test_pages_without_any_row_are_not_published():
    case = Sequences(groups=[(8, [(1, 0)])])
    slot = case.room(32)
    case.pools.recycle([slot], [32])
    case.cache.publish(slot, LONG)
    assert case.cache.num_published == 0
    case.check()


@pytest.mark.parametrize(
    ("break_cache", "message"),
    [
        (lambda nodes, cache: setattr(nodes[1], "tokens", b""), "filed under the digest of other contents"),
        (lambda nodes, cache: setattr(nodes[1], "depth", 3), "is at depth 3"),
        (lambda nodes, cache: nodes[0].children.clear(), "follows a page that is gone"),
        (lambda nodes, cache: nodes[2].children.add(nodes[1]), "is followed by a page that is gone"),
        (lambda nodes, cache: cache._by_digest.pop(nodes[2].digest), "is followed by a page that is gone"),
        (lambda nodes, cache: cache._by_row[0].pop(nodes[1].rows[0]), "is not found by its row"),
        (lambda nodes, cache: nodes[1].rows.__setitem__(0, PAGE_NONE), "lacks a row without which"),
        (lambda nodes, cache: nodes[1].rows.__setitem__(1, PAGE_NONE), "belongs to a page that is gone"),
        (lambda nodes, cache: cache._by_row[1].update({19: nodes[0]}), "row 19 of group 1 belongs to a page"),
    ],
)
def test_check_finds_violated_invariants(break_cache, message):
    case = Sequences(groups=WINDOWS)
    case.published(PROMPT)
    break_cache(sorted(case.cache._by_digest.values(), key=lambda node: node.depth), case.cache)
    with pytest.raises(InconsistentCache, match=message):
        case.cache.check()


def test_check_finds_useless_pages():
    case = Sequences(groups=[(8, [(5, 0)])])
    case.published(PROMPT)
    leaf = max(case.cache._by_digest.values(), key=lambda node: node.depth)
    case.cache._by_row[0].clear()
    leaf.rows[0] = PAGE_NONE
    with pytest.raises(InconsistentCache, match="is not found by its row|has neither rows nor following pages"):
        case.cache.check()


GROUPS = [[(FULL, 0), (6, 3)], [(5, 0)]]
"""(window, sink tokens) of the heads of two cache groups."""


@pytest.mark.parametrize("num_pages", [100, 7], ids=["ample", "short of rows"])
@pytest.mark.parametrize("seed", range(5))
def test_inserted_pages_match_as_in_the_other_cache(seed: int, num_pages: int):
    """Insert pages of one prefix cache into another, as in a KV-cache transfer. The test tracks the contents of each
    row, and asserts that a hit in the other cache has exactly the pages of the prompt.
    """
    draw = random.Random(seed)
    source = Sequences(groups=[(100 * len(heads), heads) for heads in GROUPS])
    target = Sequences(groups=[(num_pages * len(heads), heads) for heads in GROUPS])
    prompts = [[draw.randrange(2) for _ in range(PAGE_SIZE * draw.randint(1, 8))] for _ in range(8)]
    for tokens in prompts:
        slot = source.idle_slot()
        for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
            source.pools.allocate(slot, end)
            source.cache.publish(slot, tokens[:end])
            source.pools.recycle([slot], [end])
        source.pools.release(slot)
    written = {}
    for tokens, salt in source.cache.sequences():
        known = [rows != PAGE_NONE for rows in source.cache.published(tokens, salt)]
        for group, rows in enumerate(target.cache.insert(tokens, known, salt)):
            for head, page in np.argwhere(rows != PAGE_NONE).tolist():
                written[group, int(rows[head, page])] = head, tokens[: (page + 1) * PAGE_SIZE]
        target.check()
        assert target.pools.num_owned == (0, 0)
    for tokens in prompts:
        for end in range(len(tokens) + 1):
            found = target.cache.lookup([*tokens[:end], 7])
            for group, rows in enumerate(found):
                for head, page in np.argwhere(rows != PAGE_NONE).tolist():
                    assert written[group, int(rows[head, page])] == (head, tokens[: (page + 1) * PAGE_SIZE])
            there = source.cache.lookup([*tokens[:end], 7])
            assert found[0].shape[1] <= there[0].shape[1]
            if num_pages == 100:
                assert [(rows != PAGE_NONE).tolist() for rows in found] == [(r != PAGE_NONE).tolist() for r in there]
