"""Benchmark of `gather_latent`, which copies the latents of cached prefixes from pages, followed by new latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import PagedLatent, gather_latent
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import CACHES, Pools, at_least, calls_of, chain_of, random_values, tables
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class GatherCase:
    """A gather of `sequences` sequences with `cached` tokens in pages, followed by `new` tokens."""

    sequences: int
    cached: int
    new: int
    cache: str = "bf16"
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64

    @property
    def name(self) -> str:
        size = f"{self.latent_dim}+{self.rope_dim} S{self.sequences} {self.cached}+{self.new}"
        return f"{size} p{self.page_size} {self.cache}"

    @property
    def length(self) -> int:
        """Number of latents in the result."""
        return self.sequences * (self.cached + self.new)

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved: latents read and written, and page ids read."""
        return 2 * self.length * self.width * jnp.dtype(self.dtype).itemsize + 4 * self.sequences * self.table_pages

    @property
    def flops(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def dtype(self) -> Any:
        return CACHES[self.cache][0]

    @property
    def table_pages(self) -> int:
        return -(-(self.cached + self.new) // self.page_size)

    @property
    def cold_calls(self) -> int:
        """Number of calls of a chain with separate pages. If a chain has more calls, they reuse these pages in order.
        Unless a call reads less than a megabyte, these pages exceed the L2, so no call finds its pages there.
        """
        return calls_of(self.num_bytes)

    @property
    def pool_sizes(self) -> dict[str, int]:
        return {"page_size": self.page_size, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}


@dataclasses.dataclass(frozen=True)
class GatherInputs:
    """Arguments of a chain, a compiled program that calls the operation several times.

    Attributes:
      cache: pool that all calls read.
      cu_q_lens, kv_lens: lengths of the sequences, the same for all calls.
      owns: `latent_new` and `block_tables` of each call.
    """

    cache: PagedLatent
    cu_q_lens: Array
    kv_lens: Array
    owns: list[dict[str, Array]]


def inputs(case: GatherCase, pools: Pools) -> GatherInputs:
    """Make the arguments of a chain of calls.

    Raises:
      MemoryError: the pages do not fit.
    """
    pages = case.cold_calls * case.sequences * case.table_pages
    cache = pools.get_latents(case.cache, pages, **case.pool_sizes)
    shape = (case.sequences, case.table_pages)
    cold = tables(np.random.default_rng(pages), cache.pages.shape[0], case.cold_calls, shape)
    keys = jax.random.split(jax.random.key(0), at_least(case.cold_calls))
    new = [random_values(key, (case.sequences * case.new, case.width), case.dtype) for key in keys]
    return GatherInputs(
        cache=cache,
        cu_q_lens=jnp.arange(case.sequences + 1, dtype=jnp.int32) * case.new,
        kv_lens=jnp.full((case.sequences,), case.cached + case.new, jnp.int32),
        owns=[{"latent_new": x, "block_tables": cold[i % len(cold)]} for i, x in enumerate(new)],
    )


def ours(implementation: str, case: GatherCase, arrays: GatherInputs, stopwatch: Stopwatch) -> Timing:
    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, gather_latent(**shared, **own, length=case.length, implementation=implementation)

    shared = {"cache": arrays.cache, "cu_q_lens": arrays.cu_q_lens, "kv_lens": arrays.kv_lens}
    return stopwatch.chain(call, chain_of(implementation, arrays.owns), shared=shared)


BENCH = Bench(
    grids={
        "gathers": [
            GatherCase(*sizes)
            for sizes in ((1, 4096, 0), (1, 32768, 512), (8, 4096, 512), (64, 1024, 8), (4, 32768, 0))
        ]
        + [GatherCase(8, 4096, 512, page_size=16)],
        "small": [GatherCase(2, 20, 4, "f32", 16, 8, 16)],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
