"""Tests of the schedule of the prefill kernels: the list of query blocks, and KV splits.

The blocks must cover every query row once, and the splits every tile of keys once. The tests of the kernels check that
every work tile (a block and a range of keys) is computed: the interpreter initialises outputs with NaN.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL, HeadWindow, checks, ragged_attention
from pallas_attn.mosaic.hopper import prefill
from pallas_attn.mosaic.prefill import schedule
from pallas_attn.mosaic.prefill.pipeline import shared_heads
from pallas_attn.mosaic.prefill.schedule import (
    Blocking,
    FlashWorkTile,
    QueryBlock,
    SequenceLengths,
    WorkList,
    list_blocks,
)
from pallas_attn.mosaic.prefill.split import KvSplits
from pallas_attn.mosaic.primitives import basics
from pallas_attn.ops.ragged_attention.config import l2_head_group
from tests.aot.device import MULTIPROCESSOR_REGISTERS
from tests.aot.report import WARPGROUP
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

UNSPLIT = KvSplits(most=1, heads=1, most_tiles=1, num_ctas=1)
RAGGED = Blocking(num_rows=300, block_rows=64, tile_keys=64, causal=True)
compiled = pytest.param("compiled", marks=pytest.mark.gpu)


@contextlib.contextmanager
def running(mode: str, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with contextlib.nullcontext() if mode == "compiled" else harness.interpreting(capsys):
        yield


@pytest.mark.parametrize("registers", [prefill.REGISTERS, prefill.DEQUANTIZE_REGISTERS], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_registers_of_all_warpgroups_fit(registers, consumers):
    """If the warpgroups of a CTA request more registers with `setmaxnreg` than the CTA has when it starts, a warpgroup
    waits forever. At the start, all threads have the same number of registers, a multiple of 8.
    """
    of_consumer, of_producer = registers[consumers]
    warpgroups = consumers + 1
    at_first = min(MULTIPROCESSOR_REGISTERS // (WARPGROUP * warpgroups), 255) // 8 * 8
    assert consumers * of_consumer + of_producer <= warpgroups * at_first
    assert of_consumer % 8 == of_producer % 8 == 0
    assert of_consumer < 256


class Case(NamedTuple):
    """Lengths of sequences. Keys are packed (`ragged_attention`) or in pages (`paged_prefill`)."""

    q_lens: np.ndarray
    kv_lens: np.ndarray
    packed_keys: bool = True

    @staticmethod
    def draw(rng: np.random.Generator, tokens: int, sequences: int, *, packed_keys: bool = True) -> Case:
        """Draw lengths. Some sequences have no queries or no keys, and there may be queries after the last sequence."""
        q_lens = rng.multinomial(rng.integers(tokens + 1), rng.dirichlet([0.5] * sequences))
        kv_lens = rng.integers(0, 1000, sequences) * (rng.random(sequences) < 0.8)
        return Case(q_lens, kv_lens, packed_keys)

    @property
    def lengths(self) -> SequenceLengths:
        cu_q_lens, cu_kv_lens = (np.cumsum((0, *lens)).astype(np.int32) for lens in (self.q_lens, self.kv_lens))
        if self.packed_keys:
            return SequenceLengths(jnp.asarray(cu_q_lens), jnp.asarray(cu_kv_lens))
        return SequenceLengths(jnp.asarray(cu_q_lens), kv_lens=jnp.asarray(self.kv_lens, jnp.int32))

    def blocks(self, blocking: Blocking) -> list[QueryBlock]:
        """Return the expected list of blocks, in the order in which the kernel computes them."""
        found, begin, first_key = [], 0, 0
        for sequence, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            end, end_key = begin + q_len, first_key + kv_len
            for rows in _blocks_of(blocking, begin, end):
                start, skipped, last_query = *rows[0], rows[-1][0] + 7
                unseen = max(end - last_query - 1, 0) if blocking.causal else 0
                tiles = max(1, -(-(end_key - unseen - first_key // 8 * 8) // blocking.tile_keys))
                found.append(QueryBlock(sequence, start, skipped, begin, end, first_key, end_key, tiles))
            begin, first_key = end, end_key if self.packed_keys else 0
        last, num_rows = len(self.q_lens) - 1, blocking.num_rows
        found += [
            QueryBlock(last, *rows[0], begin, num_rows, first_key, first_key, 1)
            for rows in _blocks_of(blocking, begin, num_rows)
        ]
        return sorted(found, key=lambda block: -block.kv_tiles)


def _blocks_of(blocking: Blocking, begin: int, end: int) -> list[list[tuple[int, int]]]:
    """Return the blocks of the queries `begin` to `end`. A block is a list of groups of 8 rows, as (first query,
    head).
    """
    heads, size = blocking.heads, blocking.block_rows // 8
    first = begin // 8 * 8
    blocks = -(-(-(-(end - first) // 8) * heads) // size) if begin < end else 0
    groups = [(first + group // heads * 8, group % heads) for group in range(blocks * size)]
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def check(case: Case, blocking: Blocking, splits: KvSplits = UNSPLIT) -> WorkList:
    """Compute the list of blocks and compare it with the expected list."""
    listed = jax.tree.map(np.asarray, jax.jit(lambda lengths: list_blocks(blocking, lengths, splits))(case.lengths))
    want = case.blocks(blocking)
    assert listed.counts[0] == len(want)
    np.testing.assert_array_equal(listed.blocks[: len(want)], np.asarray(want).reshape(-1, len(QueryBlock._fields)))
    np.testing.assert_array_equal(listed.zero, [0])
    rows: list[tuple[int, int]] = []
    for block in (QueryBlock(*fields) for fields in listed.blocks[: len(want)]):
        assert block.start % 8 == 0, "copies must start at multiples of 8"
        for group in range(block.skipped_heads, block.skipped_heads + blocking.block_rows // 8):
            eight, head = divmod(group, blocking.heads)
            first = block.start + 8 * eight
            rows += ((row, head) for row in range(max(first, block.first_row), min(first + 8, block.end_row)))
    assert sorted(rows) == list(itertools.product(range(blocking.num_rows), range(blocking.heads))), "each row once"
    return listed


@slow_cases("causal-interpreted")
@pytest.mark.parametrize(
    ("causal", "mode"),
    [
        pytest.param(True, "interpreted", id="causal-interpreted"),
        # The causal case runs all code that this case runs.
        pytest.param(False, "interpreted", id="full-interpreted", marks=pytest.mark.slow),
        pytest.param(True, "compiled", id="causal-compiled", marks=pytest.mark.gpu),
        pytest.param(False, "compiled", id="full-compiled", marks=pytest.mark.gpu),
    ],
)
def test_blocks_are_listed_by_visible_tiles(causal: bool, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The calls have packed keys, keys in pages, and KV heads whose query heads share blocks."""
    rng, blocking = harness.fresh_rng(), replace(RAGGED, causal=causal)
    with running(mode, capsys):
        for _ in range(4):
            check(Case.draw(rng, 300, 5), blocking)
        check(Case.draw(rng, 300, 5, packed_keys=False), replace(blocking, block_rows=128, heads=7))
        check(Case.draw(rng, 300, 5), replace(blocking, heads=5))


EDGES = {
    "none": Case(np.zeros(3, int), np.zeros(3, int)),
    "one": Case(np.asarray([300]), np.asarray([300])),
    "more queries than keys": Case(np.asarray([200, 100]), np.asarray([3, 0])),
    "equal ones": Case(np.full(4, 64), np.full(4, 128)),
}


@slow_cases("interpreted")
@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_blocks_of_edge_cases_match_the_expected_list(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(mode, capsys):
        for case in EDGES.values():
            check(case, RAGGED)


@slow_cases("interpreted")
@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_more_sequences_and_blocks_than_threads_are_listed(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    rng = harness.fresh_rng()
    case = Case(rng.integers(0, 30, 130), rng.integers(0, 300, 130))
    with running(mode, capsys), mock.patch.object(schedule, "MOST_WARPGROUPS", 1):
        check(case, replace(RAGGED, num_rows=4000, block_rows=24))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "sequences"), [(70_000, 8), (70_000, 900), (300_000, 1), (8192, 64)])
def test_lists_of_many_blocks_match_the_expected_list(tokens: int, sequences: int) -> None:
    check(Case.draw(harness.fresh_rng(), tokens, sequences), replace(RAGGED, num_rows=tokens, block_rows=128))


@pytest.mark.slow
def test_calls_with_equal_lengths_share_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of a step with the same lengths call the same function with the same arguments, so XLA computes it
    once.
    """
    q = jnp.zeros((24, 1, 64), jnp.bfloat16)
    ends = [jnp.asarray([0, last], jnp.int32) for last in (20, 24)]

    def layers(q: jax.Array, some: jax.Array, others: jax.Array) -> list[Any]:
        return [ragged_attention(q, q, q, lens, lens, implementation="mosaic") for lens in (some, some, others)]

    # Without this patch, each call clips its lengths with separate operations, which XLA would merge later.
    with harness.interpreting(capsys), mock.patch.object(checks, "bound_sums", lambda sums, total: sums):
        module = jax.jit(layers).lower(q, *ends).as_text()
    assert module.count("func.func private @_listed") == 1
    # The first arguments of the calls are tokens with which jax orders the interpreter's effects.
    first, second, third = re.findall(r"call @_listed\(.*?(%\w+, %\w+)\)", module)
    assert first == second != third


def test_too_many_blocks_are_unsupported() -> None:
    case = Case(np.zeros(1, int), np.zeros(1, int))
    with pytest.raises(NotImplementedError, match=r"takes at most 49152 sequences and blocks .* got 1 sequences of"):
        list_blocks(replace(RAGGED, num_rows=2**22), case.lengths, UNSPLIT)


# --- splits of keys


def choose(
    *, blocks: int, tiles: int, heads: int, limit: int = 512, most_blocks: int | None = None, rows: int = 0
) -> tuple[int, int]:
    """Return the maximum number of splits, which is chosen from shapes, and the chosen number for one sequence.

    Args:
      blocks, tiles: number of query blocks of the sequence, and of key tiles that each block sees.
      limit: maximum number of key tiles that the shapes of the call allow.
      most_blocks: maximum number of query blocks that the shapes of the call allow; None for `blocks`.
      rows: argument `rows` of `KvSplits.of`: time to move the partial states of one split, in units of a key tile's
      time.
    """
    blocking = replace(RAGGED, num_rows=64 * blocks, causal=False)
    with mock.patch.object(basics, "multiprocessors", return_value=132):
        splits = KvSplits.of(heads=heads, num_blocks=(blocks, most_blocks or blocks), most_tiles=limit, rows=rows)
        if splits.most == 1:
            return 1, 1
        listed = check(Case(np.asarray([64 * blocks]), np.asarray([64 * tiles])), blocking, splits)
    return splits.most, int(listed.counts[2])


@slow_cases("interpreted")
@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_keys_are_split_if_multiprocessors_would_be_idle(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(mode, capsys):
        assert choose(blocks=4, heads=16, tiles=260) == (2, 2)
        assert choose(blocks=1, heads=8, tiles=256) == (16, 16)
        assert choose(blocks=64, heads=2, tiles=64) == (1, 1), "nearly one CTA per multiprocessor"
        assert choose(blocks=4, heads=16, tiles=4, limit=4) == (1, 1), "the merge would take longer"
        assert choose(blocks=4, heads=16, tiles=4, limit=260) == (2, 1), "a longer merge, known to the device only"
        assert choose(blocks=40, heads=2, tiles=260) == (8, 8), "five rounds of eighths"
        assert choose(blocks=40, heads=2, tiles=260, rows=10) == (3, 3), "two rounds of thirds, fewer partial states"


@slow_cases("interpreted")
@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_number_of_splits_follows_the_widest_window(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(np.asarray([64]), np.asarray([64 * 260]), packed_keys=False)
    splits = KvSplits(most=16, heads=8, most_tiles=260, num_ctas=132)
    with running(mode, capsys):
        for width, sink_tokens, num_splits in ((100, 0, 1), (100, 16_000, 16), (FULL, 0, 16)):
            head_window = HeadWindow(jnp.asarray([5, width], jnp.int32), jnp.asarray([0, sink_tokens], jnp.int32))
            lengths = case.lengths._replace(window=head_window)
            listed = list_blocks(replace(RAGGED, num_rows=64), lengths, splits)
            assert int(listed.counts[2]) == num_splits


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("tiles", [1, 4, 5, 33])
def test_each_tile_belongs_to_one_split(tiles: int, splits: int) -> None:
    walked = []
    for split in range(splits):
        work = FlashWorkTile(QueryBlock(*[0] * 8), head=0, split=jnp.int32(split), num_splits=jnp.int32(splits))
        first, count = map(int, work.kv_range(jnp.int32(tiles)))
        assert count >= 1
        walked += range(first, first + count)
    assert [tile for tile in walked if tile < tiles] == list(range(tiles))
    assert walked.count(tiles) == max(0, splits - tiles), "a split without tiles gets the tile after the last"


def test_l2_head_group_fits_the_cache() -> None:
    assert l2_head_group(32, 8, kv_bytes=4 * 2**20) == 32
    assert l2_head_group(32, 8, kv_bytes=5 * 2**20) == 16
    assert l2_head_group(128, 128, kv_bytes=2**30) == 1


@slow_cases("interpreted")
@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_heads_alternate_in_groups_unless_one_block_is_long(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each head has blocks with 4 key tiles and one block with `longest` key tiles."""
    with running(mode, capsys):
        for longest, num_ctas, heads in ((4, 8, 2), (4, 32, 2), (24, 8, 4), (500, 8, 8), (500, 32, 16)):
            case = Case(np.asarray([64, 128, 128]), np.asarray([64 * longest, 64 * 4, 64 * 4]), packed_keys=False)
            assert alternating_heads(case, num_ctas) == heads, (longest, num_ctas)


@pytest.mark.parametrize("mode", ["interpreted", compiled])
def test_all_heads_alternate_if_no_blocks_share_keys(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(mode, capsys):
        assert alternating_heads(Case(np.asarray([64] * 5), np.asarray([64 * 4] * 5)), 8) == 16
        assert alternating_heads(Case(np.asarray([64] * 4 + [128]), np.asarray([64 * 4] * 5)), 8) == 2


def alternating_heads(case: Case, num_ctas: int) -> int:
    """Return the number of heads (of 16) whose blocks alternate in the list, if the keys of 2 heads fit the L2
    cache.
    """
    splits = KvSplits(most=1, heads=16, most_tiles=512, num_ctas=num_ctas)
    blocking = replace(RAGGED, num_rows=int(sum(case.q_lens)), causal=False)
    return int(list_blocks(blocking, case.lengths, splits, 2).counts[1])


@pytest.mark.parametrize(("group", "heads"), [(1, 1), (4, 4), (5, 5), (7, 7), (14, 7), (16, 8)])
def test_shared_heads_is_the_largest_divisor_that_fits(group: int, heads: int) -> None:
    assert shared_heads(group, 64) == heads
