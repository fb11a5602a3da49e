"""Benchmark of `write_latent`, which writes latents of new tokens into a page pool that is updated in place.

Each call writes to different slots. A slot is the place of one token in the pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from pallas_attn import CacheSpec, latent_cache_spec, write_latent
from scripts.bench.cases.writes import WriteCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import CACHES, Pools, chain_of, check_fits, random_latents, random_values
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class WriteLatentCase(WriteCase):
    """A call of `write_latent`."""

    latent_dim: int = 512
    rope_dim: int = 64

    @property
    def name(self) -> str:
        width = f"{self.latent_dim}+{self.rope_dim}"
        return f"{width} T{self.tokens} runs of {self.run} p{self.page_size} {self.cache}"

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved: latents read and written, and slots read."""
        return self.tokens * (2 * self.spec(1).bytes_per_page // self.page_size + 4)

    def spec(self, num_pages: int) -> CacheSpec:
        sizes = {"page_size": self.page_size, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}
        return latent_cache_spec(num_pages=num_pages, dtype=CACHES[self.cache][0], **sizes)


def inputs(case: WriteLatentCase, pools: Pools) -> list[dict[str, Array]]:
    """Make the arguments of each call.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.pool.num_bytes)
    keys = jax.random.split(jax.random.key(0), case.calls)
    shape, dtype = (case.tokens, case.latent_dim + case.rope_dim), CACHES[case.cache][0]
    return [
        {"latent": random_values(key, shape, dtype), "slots": slots}
        for key, slots in zip(keys, case.slots, strict=True)
    ]


def ours(implementation: str, case: WriteLatentCase, owns: list[dict[str, Array]], stopwatch: Stopwatch) -> Timing:
    """Time one of our implementations. The calls change the pool, so each implementation gets a new pool."""

    def call(cache: Any, _: None, own: dict[str, Any]) -> tuple[Any, None]:
        return write_latent(cache, **own, implementation=implementation), None

    return stopwatch.chain(call, chain_of(implementation, owns), carried=random_latents(case.pool))


BENCH = Bench(
    grids={
        "writes": [
            WriteLatentCase(tokens, run, "bf16")
            for tokens, run in ((64, 1), (256, 1), (2048, 2048), (8192, 8192), (32768, 4096), (131072, 8192))
        ],
        "small": [WriteLatentCase(4, 2, "f32", 16, 8, page_size=16, pool_bytes=2**20)],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
