"""Benchmark of `index_top_k`: new tokens select the keys of a long context that have the highest index scores.

A chain is one compiled program that calls the operation several times. Its calls read different pages.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import CacheSpec, index_cache_spec, index_top_k
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import (
    ChainInputs,
    Pools,
    at_least,
    calls_of,
    chain_of,
    check_fits,
    latent_dtype,
    latent_query_dtype,
    random_index_keys,
    random_values,
    tables,
)
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class IndexTopKCase:
    """A selection of `top_k` keys by each new token of `batch` sequences of `context` tokens.

    Attributes:
      cache: kind of the index keys, a key of `pools.CACHES`; or "fp8".
      ratio: tokens per key: 1, or 4 for the entries of DeepSeek-V4. `page_size` counts keys.
    """

    batch: int
    context: int
    cache: str = "bf16"
    new_tokens: int = 1
    heads: int = 64
    index_dim: int = 128
    top_k: int = 2048
    page_size: int = 64
    ratio: int = 1

    @property
    def name(self) -> str:
        new = f" {self.new_tokens} new" if self.new_tokens > 1 else ""
        keys = f"{self.top_k} of {self.context}" + (f"/{self.ratio}" if self.ratio > 1 else "")
        sizes = f"h{self.heads}x{self.index_dim} B{self.batch}{new} {keys}"
        return f"{sizes} p{self.page_size} {self.cache}"

    @property
    def num_keys(self) -> int:
        """Keys of a sequence."""
        return self.context // self.ratio

    @property
    def table_pages(self) -> int:
        return -(-self.num_keys // self.page_size)

    @property
    def spec(self) -> CacheSpec:
        """Shapes of the pool: separate pages for `calls_of(num_bytes)` calls. Further calls of a chain reuse them."""
        pages = calls_of(self.num_bytes) * self.batch * self.table_pages
        return self.pool_spec(pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all index keys. The bytes of queries and results are not counted."""
        return self.batch * self.num_keys * self.pool_spec(1).bytes_per_page // self.page_size

    @property
    def flops(self) -> int:
        """Multiplications and additions of the index scores, as if every new token saw all keys."""
        return 2 * self.batch * self.new_tokens * self.num_keys * self.heads * self.index_dim

    def pool_spec(self, num_pages: int) -> CacheSpec:
        """Return the shapes of a pool of `num_pages` pages."""
        sizes = {"page_size": self.page_size, "index_dim": self.index_dim}
        return index_cache_spec(num_pages=num_pages, dtype=latent_dtype(self.cache), **sizes)


def inputs(case: IndexTopKCase, pools: Pools) -> ChainInputs:
    """Make the arguments of a chain of calls: `q`, `weights` and `block_tables` of each call, and the shared ones.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.spec.num_bytes)
    calls, num_tokens = calls_of(case.num_bytes), case.batch * case.new_tokens
    cold = tables(np.random.default_rng(0), case.spec.num_pages, calls, (case.batch, case.table_pages))
    dtype = latent_query_dtype(case.cache)
    owns = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), at_least(calls))):
        q = random_values(key, (num_tokens, case.heads, case.index_dim), dtype)
        weights = random_values(jax.random.fold_in(key, 1), (num_tokens, case.heads), jnp.float32)
        owns.append({"q": q, "weights": weights, "block_tables": cold[i % calls]})
    shared = {
        "index": random_index_keys(case.spec),
        "cu_q_lens": case.new_tokens * jnp.arange(case.batch + 1, dtype=jnp.int32),
        "kv_lens": jnp.full((case.batch,), case.context, jnp.int32),
    }
    return ChainInputs(shared, owns)


def ours(implementation: str, case: IndexTopKCase, arrays: ChainInputs, stopwatch: Stopwatch) -> Timing:
    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        rest: Any = {"top_k": case.top_k, "ratio": case.ratio, "implementation": implementation}
        return None, index_top_k(**shared, **own, **rest)

    return stopwatch.chain(call, chain_of(implementation, arrays.owns), shared=arrays.shared)


BENCH = Bench(
    grids={
        "sparse": [
            *(IndexTopKCase(b, n, cache) for cache, b, n in itertools.product(("bf16", "fp8"), (128, 8), (32768,))),
            *(IndexTopKCase(8, 131072, cache) for cache in ("bf16", "fp8")),
            IndexTopKCase(1, 32768, new_tokens=512),
        ],
        # The published sizes of DeepSeek-V4 select 512 or 1,024 entries of 4 tokens.
        "v4": [
            IndexTopKCase(batch, context, cache, top_k=top_k, ratio=4)
            for cache, batch, context in itertools.product(("bf16", "fp8"), (1, 16, 128), (8192, 131072, 1048576))
            if batch * context <= 2**24
            for top_k in (512, 1024)
        ]
        + [IndexTopKCase(1, context, new_tokens=2048, top_k=512, ratio=4) for context in (8192, 65536)],
        "small": [IndexTopKCase(2, 64, cache, 2, 3, 16, 16, 16, ratio) for cache, ratio in (("f32", 1), ("fp8", 4))],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
