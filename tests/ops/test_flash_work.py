"""How the kernels of `mosaic_flash` share out their work: every row once. (That every piece is done shows in their
results, of which the interpreter fills what nobody writes with NaN.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.ops.common import mosaic_flash_work
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


def test_heads_that_run_together_fit_the_cache() -> None:
    assert heads_together(32, 8, kv_bytes=4 * 2**20) == 32
    assert heads_together(32, 8, kv_bytes=5 * 2**20) == 16
    assert heads_together(128, 128, kv_bytes=2**30) == 1
