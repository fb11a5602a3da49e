"""Benchmark of `compress_and_write`: rows of new tokens are written, and completed blocks are pooled to entries.

Each call has other sequences, whose rows and entries are in separate pages.

The grid "tune" runs the Triton kernel with several settings:

    python scripts/bench_ops.py compress_and_write --grid tune --contenders triton --json OUT
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import CacheSpec, PagedLatent, compress_and_write, latent_cache_spec
from pallas_attn.runtime import tuning
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import (
    ChainInputs,
    Pools,
    calls_of,
    chain_of,
    check_fits,
    random_latents,
    random_values,
)
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class CompressCase:
    """New tokens of `batch` sequences. The sequences have 2·ratio to 3·ratio - 1 cached tokens.

    Attributes:
      new_tokens: new tokens per sequence.
      ratio: tokens per block. Blocks of 4 tokens overlap.
      settings: (tokens, rows, warps) of a program of the Triton kernel; None for the settings that users get.
    """

    batch: int
    new_tokens: int
    ratio: int
    width: int = 512
    rotary: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    settings: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        name = f"{self.width} of {self.ratio} B{self.batch} {self.new_tokens} new {self.dtype}"
        if self.settings is None:
            return name
        tokens, rows, warps = self.settings
        return f"{name} tokens={tokens} rows={rows} warps={warps}"

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens

    @property
    def columns(self) -> int:
        return 2 * self.width * (2 if self.ratio == 4 else 1)

    @property
    def cached(self) -> np.ndarray:
        """Cached tokens of each sequence. In decode, 1 / ratio of the sequences complete a block."""
        return 2 * self.ratio + np.arange(self.batch) % self.ratio

    @property
    def num_entries(self) -> int:
        """Entries that a call writes."""
        return int(((self.cached + self.new_tokens) // self.ratio - self.cached // self.ratio).sum())

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved: new rows read and written, entries written. Cached rows are not counted."""
        return 8 * self.tokens * self.columns + self.num_entries * self.width * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        return 0

    @property
    def calls(self) -> int:
        """Number of calls in a chain."""
        return calls_of(self.num_bytes)

    def table_pages(self, tokens: int) -> int:
        """Return the pages of a sequence with a row per `tokens` tokens."""
        return -(-(3 * self.ratio + self.new_tokens) // (tokens * self.page_size))

    def spec(self, tokens: int) -> CacheSpec:
        """Return the shapes of the pool of the state (tokens = 1) or of the entries (tokens = ratio)."""
        width, dtype = (self.columns, jnp.dtype(jnp.float32)) if tokens == 1 else (self.width, jnp.dtype(self.dtype))
        pages = self.calls * self.batch * self.table_pages(tokens)
        sizes = {"num_pages": pages, "page_size": self.page_size}
        return latent_cache_spec(**sizes, latent_dim=width, rope_dim=0, dtype=dtype)

    def tables(self, tokens: int) -> np.ndarray:
        """Return the block tables of all calls, [calls, batch, pages]."""
        shape = self.calls, self.batch, self.table_pages(tokens)
        return np.random.default_rng(tokens).permutation(np.prod(shape)).reshape(shape).astype(np.int32)


def inputs(case: CompressCase, pools: Pools) -> ChainInputs:
    """Make the arguments of a chain of calls.

    Raises:
      MemoryError: the pools do not fit.
    """
    pools.release()
    check_fits(case.spec(1).num_bytes + case.spec(case.ratio).num_bytes)
    angles = jax.random.uniform(jax.random.key(1), (case.tokens, case.rotary // 2))
    shared = {
        "norm": jnp.ones(case.width, jnp.bfloat16),
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "cu_q_lens": jnp.arange(case.batch + 1, dtype=jnp.int32) * case.new_tokens,
        "kv_lens": jnp.asarray(case.cached + case.new_tokens, jnp.int32),
    }
    keys = jax.random.split(jax.random.key(0), case.calls)
    tables = zip(case.tables(1), case.tables(case.ratio), strict=True)
    owns = [
        {
            "rows": random_values(key, (case.tokens, case.columns), jnp.float32),
            "state_tables": jnp.asarray(state),
            "entry_tables": jnp.asarray(entries),
        }
        for key, (state, entries) in zip(keys, tables, strict=True)
    ]
    return ChainInputs(shared, owns)


def ours(implementation: str, case: CompressCase, arrays: ChainInputs, stopwatch: Stopwatch) -> Timing:
    """Time one of our implementations. The calls change the pools, so each implementation gets new pools."""

    def call(caches: tuple[PagedLatent, PagedLatent], shared: Any, own: dict[str, Any]) -> tuple[Any, None]:
        return compress_and_write(*caches, **shared, **own, ratio=case.ratio, implementation=implementation), None

    def decide(op: str, _key: Mapping[str, Any], config: Any) -> Any:
        if op != "compress_and_write/triton" or case.settings is None:
            return config
        return dataclasses.replace(config, **dict(zip(("tokens", "rows", "warps"), case.settings, strict=True)))

    carried = random_latents(case.spec(1)), random_latents(case.spec(case.ratio))
    with tuning.deciding(decide):
        return stopwatch.chain(call, chain_of(implementation, arrays.owns), carried=carried, shared=arrays.shared)


TUNED: dict[tuple[int, int], list[tuple[int, int, int]]] = {
    (4, 512): list(itertools.product((1, 2, 4), (8,), (2, 4, 8))),
    (4, 128): list(itertools.product((1, 2, 4, 8), (8,), (1, 2, 4))),
    (128, 512): [*itertools.product((1, 2, 4), (8,), (4, 8)), (1, 16, 4), (1, 16, 8), (2, 16, 4)],
}
"""Settings (tokens, rows, warps) of the grid "tune" by (ratio, width). None of them spills registers on sm90. With
width / 128 warps, a thread has all rows of its columns, and pooling needs no barriers.
"""

BENCH = Bench(
    grids={
        "v4": [
            CompressCase(batch, new, ratio, width)
            for ratio, width in ((4, 512), (4, 128), (128, 512))
            for batch, new in ((1, 1), (16, 1), (128, 1), (1, 8192), (4, 8192))
        ],
        "tune": [
            CompressCase(batch, new, ratio, width, settings=settings)
            for (ratio, width), tuned in TUNED.items()
            for batch, new in ((4, 8192), (128, 1))
            for settings in tuned
        ],
        "small": [CompressCase(2, 3, 4, 32, 8, 4, "float32")],
    },
    contenders={name: contender for name, contender in by_name(ours).items() if name != "mosaic"},
    inputs=inputs,
)
