"""Tests of the cost of the XLA implementations of `paged_decode` and `paged_prefill`.

The implementations process a tile of tokens of a group of rows per step. Temporary memory must not depend on the width
of the tables, and the number of steps must follow the lengths and windows of the rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import FULL, PagedKV, kv_cache_spec, paged_decode, paged_prefill
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.harness import VARIANTS
from tests.kit.slow_cases import slow_cases

SMALL_TILES = VARIANTS["xla"]  # a step has 3 rows and 16 tokens of each; a row of prefill has 4 queries
AS_SHIPPED = replace(SMALL_TILES, config=None)

BASE = PagedCase(kv_lens=(64,))
LONG = PagedCase((4096,), page_size=16, pages_per_row=256, num_pages=300)


def decode_steps(case: PagedCase) -> list[tuple[list[int], int]]:
    """Return the rows and the tile index of each step of `paged_decode`. A row is a sequence or, with windows per head,
    one KV head of a sequence.
    """
    return _steps(paged_decode, case, Inputs.draw(case, harness.fresh_rng()).decode())


def prefill_steps(case: PagedCase) -> list[tuple[list[int], int]]:
    """Return the rows and the tile index of each step of `paged_prefill`. A row is four queries or, with windows per
    head, four queries of one KV head.
    """
    return _steps(paged_prefill, case, Inputs.draw(case, harness.fresh_rng()).prefill())


def _steps(op: Callable[..., Any], case: PagedCase, arrays: dict[str, Any]) -> list[tuple[list[int], int]]:
    with harness.recorded_tiles() as tiles, SMALL_TILES.settings():
        jax.block_until_ready(jax.jit(lambda **arrays: op(**arrays, **case.static, implementation="xla"))(**arrays))
    return tiles


# --- cost


def test_short_rows_take_no_steps_of_long_rows() -> None:
    """The three rows with 4 tiles form a group and take 4 steps. The six rows with one tile form two groups and take
    2.
    """
    steps = decode_steps(replace(BASE, kv_lens=(1, 64, 1, 64, 1, 1, 64, 1, 1)))
    assert len(steps) == 4 + 1 + 1
    assert all(sorted(rows) == [1, 3, 6] for rows, tile in steps if tile > 0)


def test_idle_rows_take_no_steps() -> None:
    assert decode_steps(replace(BASE, kv_lens=(0,) * 9)) == []
    assert prefill_steps(replace(BASE, kv_lens=(64, 0), q_lens=(0, 0), tokens=5)) == []


def test_unused_table_entries_take_no_steps() -> None:
    steps = decode_steps(replace(LONG, kv_lens=(20,), num_pages=8))
    assert [tile for _, tile in steps] == [0, 1]


@slow_cases("4096")
@pytest.mark.parametrize("kv_len", [4096, 4090])
def test_decode_visits_only_tiles_in_the_window(kv_len: int) -> None:
    steps = decode_steps(replace(LONG, kv_lens=(kv_len,), window=32))
    assert len(steps) == {4096: 2, 4090: 3}[kv_len]  # a window of 32 tokens spans 2 or 3 pages of 16 tokens


def test_windowed_heads_take_no_steps_of_full_heads() -> None:
    """Three sequences have a head without a window and a head with one. The rows without a window form a group, and the
    rows with a window form another group, which takes few steps.
    """
    case = replace(LONG, kv_lens=(4096,) * 3, num_pages=900, head_windows=((FULL, 0), (32, 5)), head_wise=False)
    steps = decode_steps(case)
    assert len([rows for rows, _ in steps if sorted(rows) == [0, 2, 4]]) == 256
    assert len([rows for rows, _ in steps if sorted(rows) == [1, 3, 5]]) == 3  # two of the window, one of sink tokens
    assert len(steps) == 256 + 3


@pytest.mark.slow
def test_prefill_visits_only_visible_tiles() -> None:
    """16 causal queries of a sequence of 64 tokens are 4 rows, which see 52, 56, 60 and 64 tokens: 4 tiles of 16."""
    assert len(prefill_steps(replace(BASE, q_lens=(16,)))) == 4 + 4  # a group of 3 rows, and a group of 1 row
    assert len(prefill_steps(replace(BASE, kv_lens=(16,), q_lens=(16,)))) == 1 + 1
    assert len(prefill_steps(replace(LONG, q_lens=(4,), window=28))) == 2  # the 4 queries see 31 tokens, in 2 tiles


# --- memory


def shapes(*, batch: int, pages_per_row: int) -> dict[str, Any]:
    spec = kv_cache_spec(num_pages=4096, page_size=16, num_kv_heads=2, head_dim=32, dtype=jnp.float32)
    return {
        "kv": jax.eval_shape(lambda: PagedKV.allocate(spec)),
        "block_tables": jax.ShapeDtypeStruct((batch, pages_per_row), jnp.int32),
        "kv_lens": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


TOKEN_BYTES = 4 * 32 * 4  # bytes of q, or of the output, per token
DENSE_BYTES = 2 * 16 * 4096 * 16 * 2 * 32 * 4  # bytes of the keys and values of 16 tables of 4,096 pages


def test_decode_memory_is_bounded_by_a_tile() -> None:
    """Temporary memory does not grow with the width of the tables, and with the batch only by arrays like q."""
    decode = harness.compiled(paged_decode, AS_SHIPPED)

    def temp(batch: int, pages_per_row: int) -> int:
        q = jax.ShapeDtypeStruct((batch, 1, 4, 32), jnp.float32)
        return harness.temp_bytes(decode, q=q, **shapes(batch=batch, pages_per_row=pages_per_row))

    narrow, wide, many = temp(16, 64), temp(16, 4096), temp(128, 4096)
    assert wide - narrow <= 16 * (4096 - 64) * 4
    assert many - wide <= 112 * (4096 * 4 + 8 * TOKEN_BYTES)
    assert wide < DENSE_BYTES / 100


@pytest.mark.slow
def test_prefill_memory_is_bounded_by_a_tile() -> None:
    """Temporary memory does not grow with the width of the tables, and grows per new token by a few copies of q."""
    prefill = harness.compiled(paged_prefill, AS_SHIPPED)

    def temp(tokens: int, pages_per_row: int) -> int:
        q = jax.ShapeDtypeStruct((tokens, 4, 32), jnp.float32)
        cu_q_lens = jax.ShapeDtypeStruct((17,), jnp.int32)
        return harness.temp_bytes(prefill, q=q, cu_q_lens=cu_q_lens, **shapes(batch=16, pages_per_row=pages_per_row))

    narrow, wide, many = temp(512, 64), temp(512, 4096), temp(4096, 4096)
    assert wide - narrow <= 16 * (4096 - 64) * 4
    assert many - wide <= 3584 * 12 * TOKEN_BYTES
    assert wide < DENSE_BYTES / 100
