import hashlib

import pytest

from pallas_attn.cache import InconsistentCache, OutOfPages, PageError, PagePool, PrefixCache

PAGE_SIZE = 4
PROMPT = list(range(100, 112))  # three full pages


def make_cache(num_pages: int = 8, **options) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, PAGE_SIZE, **options)


def published(pool: PagePool, cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Pages of a sequence that computed `tokens` and is still there."""
    pages = pool.allocate(-(-len(tokens) // PAGE_SIZE))
    cache.publish(tokens, pages, salt)
    cache.check()
    return pages


def snapshot(pool: PagePool, cache: PrefixCache) -> tuple:
    counts = [pool.refcount(page) for page in range(pool.num_pages)]
    return counts, list(pool._free), set(cache._by_page), cache.query_tokens, cache.hit_tokens


def test_nothing_matches_before_it_is_published():
    pool, cache = make_cache()
    pages = pool.allocate(3)
    assert cache.match([*PROMPT, 1]) == []
    cache.publish(PROMPT[:7], pages)
    assert cache.match([*PROMPT, 1]) == pages[:1]
    cache.publish(PROMPT, pages)
    assert cache.match([*PROMPT, 1]) == pages


def test_match_retains_and_lookup_does_not():
    pool, cache = make_cache()
    pages = published(pool, cache, PROMPT)
    assert cache.lookup([*PROMPT, 1]) == pages
    assert [pool.refcount(page) for page in pages] == [1, 1, 1]
    assert cache.match([*PROMPT[:8], 7, 7, 7, 7, 7]) == pages[:2]
    assert [pool.refcount(page) for page in pages] == [2, 2, 1]


@pytest.mark.parametrize(
    ("length", "num_matched"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3)]
)
def test_the_last_token_is_never_matched(length, num_matched):
    pool, cache = make_cache()
    pages = published(pool, cache, PROMPT)
    assert cache.match([*PROMPT, 1][:length]) == pages[:num_matched]


def test_a_page_matches_only_after_the_pages_it_followed():
    pool, cache = make_cache()
    published(pool, cache, PROMPT)
    assert cache.lookup([*PROMPT[4:8], 1]) == []
    assert cache.lookup([*PROMPT[4:], 1]) == []
    assert cache.lookup([7, *PROMPT[1:], 1]) == []


def test_salt_isolates():
    pool, cache = make_cache()
    ours = published(pool, cache, PROMPT, salt="ours")
    assert cache.lookup([*PROMPT, 1], salt="ours") == ours
    assert cache.lookup([*PROMPT, 1], salt="theirs") == []
    assert cache.lookup([*PROMPT, 1]) == []
    theirs = published(pool, cache, PROMPT, salt="theirs")
    assert cache.lookup([*PROMPT, 1], salt="theirs") == theirs
    assert set(ours).isdisjoint(theirs)


def test_released_pages_stay_matchable_until_they_are_reused():
    pool, cache = make_cache(num_pages=4)
    pages = published(pool, cache, PROMPT)
    pool.release(pages)
    assert (pool.num_owned, cache.num_published) == (0, 3)
    assert cache.match([*PROMPT, 1]) == pages
    assert pool.num_owned == 3
    pool.release(pages)

    pool.allocate(1)  # the page that was never used
    assert cache.lookup([*PROMPT, 1]) == pages
    for survivors in (2, 1, 0):  # a prefix loses its tail first
        assert pool.allocate(1) == [pages[survivors]]
        assert cache.lookup([*PROMPT, 1]) == pages[:survivors]
        cache.check()


def test_matching_makes_pages_recently_used():
    pool, cache = make_cache(num_pages=2)
    old = published(pool, cache, [1] * 4)
    new = published(pool, cache, [2] * 4)
    pool.release(old)
    pool.release(new)
    pool.release(cache.match([1] * 5))
    assert pool.allocate(1) == new
    assert cache.lookup([1] * 5) == old


def test_pages_after_a_reused_page_are_forgotten_even_while_owned():
    pool, cache = make_cache(num_pages=6)
    first = published(pool, cache, PROMPT[:4])
    second = published(pool, cache, PROMPT)  # its first page is a duplicate, the others follow `first`
    assert cache.lookup([*PROMPT, 1]) == first + second[1:]
    pool.release(first)
    assert first[0] in pool.allocate(3)
    assert cache.num_published == 0
    cache.check()

    cache.publish(PROMPT[:4], second)
    assert cache.lookup([*PROMPT, 1]) == second[:1], "what followed the lost page does not follow its duplicate"
    cache.publish(PROMPT, second)
    assert cache.lookup([*PROMPT, 1]) == second
    cache.check()


def test_the_first_publisher_wins():
    pool, cache = make_cache()
    first = published(pool, cache, PROMPT)
    second = published(pool, cache, PROMPT)
    assert cache.lookup([*PROMPT, 1]) == first
    assert not any(map(cache.is_published, second))
    extended = [*PROMPT, *range(4)]
    cache.publish(extended, [*second, *pool.allocate(1)])
    assert cache.lookup([*extended, 1])[:3] == first
    assert len(cache.lookup([*extended, 1])) == 4


def test_publishing_again_costs_only_the_new_pages():
    hashed: list[bytes] = []

    def digest(message: bytes) -> bytes:
        hashed.append(message)
        return hashlib.sha256(message).digest()

    pool, cache = make_cache(digest=digest)
    pages = published(pool, cache, PROMPT)
    extended, pages = [*PROMPT, *range(4)], pages + pool.allocate(1)
    hashed.clear()
    cache.publish(extended, pages)
    assert len(hashed) == 1
    assert cache.lookup([*extended, 1]) == pages


def test_a_forced_collision_is_a_miss():
    pool, cache = make_cache(digest=lambda message: b"same")
    pages = published(pool, cache, [1] * 4)
    assert cache.lookup([1] * 5) == pages
    assert cache.lookup([2] * 5) == []
    assert cache.lookup([1] * 5, salt="other") == []
    assert cache.lookup([1] * 9) == pages, "the same tokens one page later are another page"
    second = published(pool, cache, [1] * 8)
    assert cache.lookup([1] * 9) == pages, "its digest is taken"
    assert cache.num_published == 1

    pool.release(pages + second)
    pool.release(pool.allocate(pool.num_free))
    taken_over = published(pool, cache, [2] * 8)
    assert cache.lookup([2] * 9) == taken_over[:1]
    assert cache.lookup([1] * 5) == []


def test_digest_fields_cannot_run_into_each_other():
    messages: list[bytes] = []

    def digest(message: bytes) -> bytes:
        messages.append(message)
        return b"D"

    pool, cache = make_cache(digest=digest)
    published(pool, cache, [1] * 4)
    messages.clear()
    cache.lookup([1] * 4 + [2] * 5)  # the second page: no salt, parent "D"
    cache.lookup([2] * 5, salt="D")  # a first page: salt "D", no parent
    assert len(messages) == len(set(messages)) == 3


def test_every_cache_has_a_seed_of_its_own():
    messages: list[bytes] = []
    for _ in range(2):
        _, cache = make_cache(digest=lambda message: messages.append(message) or b"")
        cache.lookup([1] * 5)
    assert len(messages) == len(set(messages)) == 2


def test_statistics_count_what_match_found():
    pool, cache = make_cache()
    published(pool, cache, PROMPT)
    cache.lookup([*PROMPT, 1])
    assert (cache.query_tokens, cache.hit_tokens) == (0, 0)
    cache.match([*PROMPT, 1])
    cache.match([7] * 5)
    assert (cache.query_tokens, cache.hit_tokens) == (18, 12)


def test_clear_forgets_contents_and_keeps_owners():
    pool, cache = make_cache(num_pages=3)
    pages = published(pool, cache, PROMPT)
    cache.clear()
    cache.check()
    assert cache.lookup([*PROMPT, 1]) == []
    assert pool.num_owned == 3
    cache.publish(PROMPT, pages)
    assert cache.lookup([*PROMPT, 1]) == pages
    pool.release(pages)
    cache.clear()
    assert len(pool.allocate(3)) == 3


@pytest.mark.parametrize(
    ("tokens", "pages", "salt", "error", "message"),
    [
        (PROMPT, [0, 1], "", ValueError, "pages must hold the 3 full pages of 12 tokens, got 2"),
        ([*PROMPT, 1, 2, 3, 4], [0, 1, 2, 6], "", PageError, "cannot publish page 6: it is free"),
        ([*PROMPT, 1, 2, 3, 4], [0, 1, 2, 99], "", PageError, "page 99 is not of this pool"),
        ([*PROMPT, *[1] * 8], [0, 1, 2, 3, 3], "", PageError, r"twice in one sequence: \[3, 3\]"),
        ([7] * 12, [0, 1, 2], "", PageError, "cannot publish page 2: it is published with other contents"),
        (PROMPT, [0, 1, 2], "other", PageError, "cannot publish page 2: it is published with other contents"),
        (PROMPT[8:], [2], "", PageError, "cannot publish page 2: it is published with other contents"),
        ([*PROMPT, *[1] * 4, *[2**64] * 4], [0, 1, 2, 3, 4], "", OverflowError, "int too big"),
    ],
)
def test_bad_publications_change_nothing(tokens, pages, salt, error, message):
    pool, cache = make_cache()
    assert published(pool, cache, PROMPT) == [0, 1, 2]
    pool.allocate(2)
    before = snapshot(pool, cache)
    with pytest.raises(error, match=message):
        cache.publish(tokens, pages, salt)
    assert snapshot(pool, cache) == before
    cache.check()


@pytest.mark.parametrize("num_digests", [0, 1, 2])
def test_a_digest_that_fails_leaves_everything_as_it_was(num_digests):
    tickets = [None] * 100

    def digest(message: bytes) -> bytes:
        tickets.pop()
        return hashlib.sha256(message).digest()

    pool, cache = make_cache(digest=digest)
    pages = published(pool, cache, PROMPT) + pool.allocate(3)
    before = snapshot(pool, cache)
    for call in (lambda: cache.publish([*PROMPT, *PROMPT], pages), lambda: cache.match([*PROMPT, *PROMPT])):
        tickets[:] = [None] * num_digests
        with pytest.raises(IndexError):
            call()
        assert snapshot(pool, cache) == before


def test_a_match_whose_pages_cannot_be_retained_counts_nothing(monkeypatch):
    pool, cache = make_cache()
    published(pool, cache, PROMPT)
    before = snapshot(pool, cache)

    def fail(pages):
        raise OutOfPages(len(pages), 0)

    monkeypatch.setattr(pool, "reclaim", fail)
    with pytest.raises(OutOfPages):
        cache.match([*PROMPT, 1])
    assert snapshot(pool, cache) == before


def test_bad_construction_is_refused():
    pool, _ = make_cache()
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        PrefixCache(PagePool(1), 0)
    with pytest.raises(ValueError, match="watched already"):
        PrefixCache(pool, PAGE_SIZE)


@pytest.mark.parametrize(
    ("break_cache", "message"),
    [
        (lambda cache: cache._by_page.pop(1), "3 digests for 2 pages"),
        (
            lambda cache: cache._by_digest.update({cache._by_page[1].digest: cache._by_page[0]}),
            "not found by its digest",
        ),
        (lambda cache: setattr(cache._by_page[1], "tokens", b""), "filed under the digest of other contents"),
        (lambda cache: setattr(cache._by_page[1], "depth", 3), "page 1 is at depth 3"),
        (lambda cache: cache._by_page[0].children.clear(), "page 1 follows a page that is gone"),
        (lambda cache: cache._by_page[2].children.add(cache._by_page[1]), "page 2 is followed by a page that is gone"),
    ],
)
def test_check_finds_broken_invariants(break_cache, message):
    pool, cache = make_cache()
    published(pool, cache, PROMPT)
    cache.check()
    break_cache(cache)
    with pytest.raises(InconsistentCache, match=message):
        cache.check()
