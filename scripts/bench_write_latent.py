"""`write_latent` under the benchmark: new latents into a pool that is updated in place, each call to other slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_attn import latent_cache_spec, write_latent
from scripts.bench_case import Bench, by_name
from scripts.bench_pools import (
    CACHES,
    Pools,
    calls_of,
    chain_of,
    check_fits,
    random_latents,
    random_values,
    slots_of_runs,
)
from scripts.bench_timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class WriteLatentCase:
    """New latents, `run` consecutive ones of each sequence.

    Attributes:
      pool_bytes: of pages at least, so that those written to are seldom in the cache.
    """

    tokens: int
    run: int
    cache: str = "bf16"
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    pool_bytes: int = 2**30

    @property
    def name(self) -> str:
        width = f"{self.latent_dim}+{self.rope_dim}"
        return f"{width} T{self.tokens} runs of {self.run} p{self.page_size} {self.cache}"

    @property
    def num_bytes(self) -> int:
        """Latents, read and written; slots, read."""
        return self.tokens * (2 * self._token_bytes + 4)

    @property
    def flops(self) -> int:
        return 0

    @property
    def calls(self) -> int:
        """In a chain."""
        return calls_of(self.num_bytes)

    @property
    def pages_of_run(self) -> int:
        return -(-self.run // self.page_size)

    @property
    def pool_pages(self) -> int:
        """As many as the calls of a chain write to, and as many as make a large pool."""
        written = self.calls * -(-self.tokens // self.run) * self.pages_of_run
        return max(-(-self.pool_bytes // (self._token_bytes * self.page_size)), written)

    @property
    def slots(self) -> list[Array]:
        """Of each call."""
        return slots_of_runs(self.calls, self.tokens, self.run, page_size=self.page_size, num_pages=self.pool_pages)

    @property
    def pool_sizes(self) -> dict[str, int]:
        return {"page_size": self.page_size, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}

    @property
    def spec(self) -> Any:
        return latent_cache_spec(num_pages=self.pool_pages, dtype=CACHES[self.cache][0], **self.pool_sizes)

    @property
    def _token_bytes(self) -> int:
        return (self.latent_dim + self.rope_dim) * jnp.dtype(CACHES[self.cache][0]).itemsize


def inputs(case: WriteLatentCase, pools: Pools) -> list[dict[str, Array]]:
    """What each call writes, and where.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.spec.num_bytes)
    keys = jax.random.split(jax.random.key(0), case.calls)
    shape, dtype = (case.tokens, case.latent_dim + case.rope_dim), CACHES[case.cache][0]
    return [
        {"latent": random_values(key, shape, dtype), "slots": slots}
        for key, slots in zip(keys, case.slots, strict=True)
    ]


def ours(implementation: str, case: WriteLatentCase, owns: list[dict[str, Array]], stopwatch: Stopwatch) -> Timing:
    """Times calls over a pool of their own, because they change it."""

    def call(cache: Any, _: None, own: dict[str, Any]) -> tuple[Any, None]:
        return write_latent(cache, **own, implementation=implementation), None

    return stopwatch.chain(call, chain_of(implementation, owns), carried=random_latents(case.spec))


BENCH = Bench(
    grids={
        "writes": [
            WriteLatentCase(tokens, run)
            for tokens, run in ((64, 1), (256, 1), (2048, 2048), (8192, 8192), (32768, 4096), (131072, 8192))
        ],
        "small": [WriteLatentCase(4, 2, "f32", 16, 8, 16, 2**20)],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
