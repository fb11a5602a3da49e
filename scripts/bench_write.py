"""`write_kv` under the benchmark: new tokens into a pool that is updated in place, to other slots in every call."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import Rope, write_kv
from scripts.bench_case import Bench, by_name
from scripts.bench_pools import (
    Pools,
    cache_spec,
    calls_of,
    chain_of,
    check_fits,
    random_pool,
    random_values,
    slots_of_runs,
)
from scripts.bench_timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """New tokens, `run` consecutive ones of each sequence.

    Attributes:
      rope: they are rotated, and so are queries.
      pool_bytes: of pages at least, so that those written to are seldom in the cache.
    """

    tokens: int
    run: int
    cache: str
    rope: bool
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    pool_bytes: int = 2**30

    @property
    def name(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        return f"{heads} T{self.tokens} runs of {self.run} p{self.page_size}{' rope' * self.rope} {self.cache}"

    @property
    def num_bytes(self) -> int:
        """Keys and values, read in bfloat16 and written in the cache's dtype; with rope queries, read and written."""
        spec = cache_spec(self.cache, num_pages=1, **self.pool_sizes)
        written = self.tokens * spec.bytes_per_page // self.page_size
        rotated = 2 * self.q_heads if self.rope else 0
        angles = 2 * 4 * (self.head_dim // 2) if self.rope else 0
        return written + self.tokens * (2 * self.head_dim * (2 * self.kv_heads + rotated) + angles)

    @property
    def flops(self) -> int:
        return 0

    @property
    def slots(self) -> list[Array]:
        """Of each call."""
        return slots_of_runs(self.calls, self.tokens, self.run, page_size=self.page_size, num_pages=self.pool_pages)

    @property
    def pool_sizes(self) -> dict[str, int]:
        return {"page_size": self.page_size, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}

    @property
    def calls(self) -> int:
        """In a chain."""
        return calls_of(self.num_bytes)

    @property
    def pool_pages(self) -> int:
        """As many as the calls of a chain write to, and as many as make a large pool."""
        page = cache_spec(self.cache, num_pages=1, **self.pool_sizes).bytes_per_page
        runs = -(-self.tokens // self.run)
        return max(-(-self.pool_bytes // page), self.calls * runs * -(-self.run // self.page_size))


def inputs(case: WriteCase, pools: Pools) -> list[dict[str, Array]]:
    """What each call writes, and where.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(cache_spec(case.cache, num_pages=case.pool_pages, **case.pool_sizes).num_bytes)
    shapes = {"k": case.kv_heads, "v": case.kv_heads} | ({"q": case.q_heads} if case.rope else {})
    keys = jax.random.split(jax.random.key(0), case.calls)
    return [
        {name: random_values(key, (case.tokens, n, case.head_dim), jnp.bfloat16) for name, n in shapes.items()}
        | {"slots": slots}
        for key, slots in zip(keys, case.slots, strict=True)
    ]


def ours(implementation: str, case: WriteCase, owns: list[dict[str, Array]], stopwatch: Stopwatch) -> Timing:
    """Times calls over a pool of their own, because they change it."""

    def call(kv: Any, rope: Any, own: dict[str, Any]) -> tuple[Any, Any]:
        written: Any = write_kv(kv, **own, rope=rope, implementation=implementation)
        return written if "q" in own else (written, None)

    angles = jax.random.uniform(jax.random.key(1), (case.tokens, case.head_dim // 2), maxval=2 * np.pi)
    rope = Rope(jnp.cos(angles), jnp.sin(angles)) if case.rope else None
    kv = random_pool(cache_spec(case.cache, num_pages=case.pool_pages, **case.pool_sizes))
    return stopwatch.chain(call, chain_of(implementation, owns), carried=kv, shared=rope)


def _grid() -> list[WriteCase]:
    """A decode step's tokens, each of a sequence of its own, and prefill chunks."""
    sizes = ((64, 1), (256, 1), (2048, 2048), (8192, 8192))
    caches = ("bf16", "int8-head", "fp8-head", "fp8-token")
    return [
        WriteCase(tokens, run, cache, rope)
        for cache, rope, (tokens, run) in itertools.product(caches, (True, False), sizes)
    ]


BENCH = Bench(
    grids={
        "writes": _grid(),
        "small": [
            WriteCase(4, 2, cache, rope, 4, 2, 16, 16, 2**20) for cache, rope in (("f32", True), ("int8-head", False))
        ],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
