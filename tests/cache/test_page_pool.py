import subprocess
import sys

import pytest

from pallas_attn.cache import CacheError, InconsistentCache, OutOfPages, PageError, PagePool


def snapshot(pool: PagePool) -> tuple[list[int], list[int]]:
    """Return the reference counts and the order of free pages."""
    return [pool.refcount(page) for page in range(pool.num_pages)], list(pool._free)


def test_counts_follow_allocation_and_release():
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert (pool.num_pages, pool.num_free, pool.num_owned) == (4, 1, 3)
    pool.release(pages[:1])
    assert (pool.num_free, pool.num_owned) == (2, 2)
    pool.check()


def test_allocation_is_all_or_nothing():
    pool = PagePool(4)
    pool.allocate(3)
    before = snapshot(pool)
    with pytest.raises(OutOfPages, match="2 pages requested, 1 free") as caught:
        pool.allocate(2)
    assert (caught.value.requested, caught.value.free) == (2, 1)
    assert isinstance(caught.value, CacheError)
    assert snapshot(pool) == before
    assert pool.allocate(0) == []
    assert len(pool.allocate(1)) == 1


def test_shared_page_is_free_when_its_last_owner_releases():
    pool = PagePool(2)
    [page] = pool.allocate(1)
    pool.retain([page, page])
    assert pool.refcount(page) == 3
    pool.release([page, page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2


def test_least_recently_freed_page_is_allocated_first():
    pool = PagePool(6)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == second[::-1] + first[::-1]


def test_reclaimed_page_is_not_free():
    pool = PagePool(3)
    first, second, third = pool.allocate(3)
    pool.release([first, second])
    pool.reclaim([first, third])
    assert [pool.refcount(page) for page in (first, second, third)] == [1, 0, 2]
    assert pool.allocate(1) == [second]
    pool.check()


def test_watcher_is_called_before_allocation_returns():
    pool = PagePool(3)
    announced: list[int] = []
    pool.watch_reuse(announced.append)
    with pytest.raises(OutOfPages):
        pool.allocate(4)
    assert announced == []
    assert pool.allocate(2) == announced
    with pytest.raises(ValueError, match="already has a callback"):
        pool.watch_reuse(announced.append)


@pytest.mark.parametrize(
    ("operation", "pages", "message"),
    [
        ("release", [2], "cannot release page 2 1x: it has 0 references"),
        ("release", [0, 2], "cannot release page 2 1x"),
        ("release", [0, 1, 1], "cannot release page 1 2x: it has 1 references"),
        ("release", [0, 4], "page 4 is not of this pool of 4"),
        ("release", [0, -1], "page -1 is not of this pool of 4"),
        ("retain", [0, 2], "cannot retain page 2: it is free"),
        ("retain", [0, -1], "page -1 is not of this pool"),
        ("reclaim", [2, 4], "page 4 is not of this pool"),
        ("reclaim", [2, -1], "page -1 is not of this pool"),
    ],
)
def test_misuse_raises_and_changes_nothing(operation, pages, message):
    pool = PagePool(4)
    assert pool.allocate(2) == [0, 1]
    before = snapshot(pool)
    with pytest.raises(PageError, match=message):
        getattr(pool, operation)(pages)
    assert snapshot(pool) == before
    pool.check()


def test_invalid_sizes():
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        PagePool(0)
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        PagePool(1).allocate(-1)
    for page in (-1, 1):
        with pytest.raises(PageError, match="not of this pool"):
            PagePool(1).refcount(page)


@pytest.mark.parametrize(
    ("break_pool", "message"),
    [
        (lambda pool: pool._refcounts.__setitem__(1, 0), "page 1 has 0 references and is not among the free pages"),
        (lambda pool: pool._refcounts.__setitem__(3, 1), "page 3 has 1 references and is among the free pages"),
        (lambda pool: pool._refcounts.__setitem__(1, -1), "page 1 has -1 references"),
        (lambda pool: pool._free.__setitem__(9, None), r"not of this pool: \[9\]"),
    ],
)
def test_check_finds_violated_invariants(break_pool, message):
    pool = PagePool(4)
    pool.allocate(2)
    pool.check()
    break_pool(pool)
    with pytest.raises(InconsistentCache, match=message):
        pool.check()


def test_cache_is_an_attribute_that_is_imported_when_used() -> None:
    program = (
        "import sys, pallas_attn; assert 'pallas_attn.cache' not in sys.modules; print(pallas_attn.cache.PagePool(4))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PagePool" in done.stdout
