"""How the kernels of `mosaic_flash` share out their work: every row once. (That every piece is done shows in their
results, of which the interpreter fills what nobody writes with NaN.)
"""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.ops.common import mosaic, mosaic_flash_parts, mosaic_flash_work
from pallas_attn.ops.common.mosaic_flash_parts import Parts
from pallas_attn.ops.ragged_attention.config import heads_together
from tests.ops import harness


def test_blocks_hold_every_row_once() -> None:
    """And begin at rows that copies may begin at."""
    rng = harness.fresh_rng()
    num_tokens = 300
    make = jax.jit(lambda cu_q_lens: mosaic_flash_work.QueryBlocks.of(cu_q_lens, num_tokens, 64))
    for _ in range(20):
        lens = rng.multinomial(rng.integers(num_tokens + 1), rng.dirichlet([0.5] * 5))
        cu_q_lens = jnp.asarray(np.cumsum((0, *lens)), jnp.int32)
        blocks = jax.tree.map(np.asarray, make(cu_q_lens))
        assert not np.any(blocks.start % 8)
        rows = []
        for i in np.flatnonzero(blocks.exists):
            place = np.arange(blocks.start[i], blocks.start[i] + 64)
            rows += place[(place >= blocks.first_row[i]) & (place < blocks.end_row[i])].tolist()
        assert rows == list(range(num_tokens))


def choose(*, blocks: int, tiles: int, heads: int, limit: int = 512, most_blocks: int | None = None) -> tuple[int, int]:
    with mock.patch.object(mosaic, "multiprocessors", return_value=132):
        parts = Parts.of(
            jnp.int32(blocks), jnp.int32(tiles), heads=heads, blocks=(blocks, most_blocks or blocks), limit=limit
        )
    return parts.most, int(parts.number)


def test_keys_are_cut_where_multiprocessors_would_be_idle() -> None:
    assert choose(blocks=4, heads=16, tiles=260) == (2, 2)
    assert choose(blocks=1, heads=8, tiles=256) == (16, 16)
    assert choose(blocks=64, heads=2, tiles=64) == (1, 1), "programs for all blocks, nearly"
    assert choose(blocks=4, heads=16, tiles=4, limit=4) == (1, 1), "merging takes longer"
    assert choose(blocks=4, heads=16, tiles=4, limit=260) == (2, 1), "and here as well, but that is not known ahead"
    assert choose(blocks=40, heads=2, tiles=260) == (3, 3), "two rounds of a third"


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
@pytest.mark.parametrize("tiles", [1, 4, 5, 33])
def test_parts_have_every_tile_once(tiles: int, parts: int) -> None:
    taken = []
    for part in range(parts):
        first, count = map(int, mosaic_flash_parts.share(jnp.int32(tiles), jnp.int32(part), jnp.int32(parts)))
        assert count >= 1
        taken += range(first, first + count)
    assert [tile for tile in taken if tile < tiles] == list(range(tiles))
    assert taken.count(tiles) == max(0, parts - tiles), "parts without a tile have the one after the last"


def test_heads_that_run_together_fit_the_cache() -> None:
    assert heads_together(32, 8, kv_bytes=4 * 2**20) == 32
    assert heads_together(32, 8, kv_bytes=5 * 2**20) == 16
    assert heads_together(128, 128, kv_bytes=2**30) == 1
