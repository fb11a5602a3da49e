"""Benchmark cases of writes into a page pool that is updated in place.

A chain is one compiled program that calls an operation several times. Each call writes to different slots. A slot is
the place of one token in the pool: page id * page size + position in the page.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import CacheSpec
from scripts.bench.harness.pools import calls_of


@dataclasses.dataclass(frozen=True)
class WriteCase(abc.ABC):
    """A write of new tokens: runs of `run` consecutive tokens, one run per sequence.

    Attributes:
      cache: kind of cache (`pools.CACHES`).
      pool_bytes: minimum size of the pool. The pages of a large pool are rarely in the L2 when they are written.
    """

    tokens: int
    run: int
    cache: str
    page_size: int = dataclasses.field(default=64, kw_only=True)
    pool_bytes: int = dataclasses.field(default=2**30, kw_only=True)

    @abc.abstractmethod
    def spec(self, num_pages: int) -> CacheSpec:
        """Return the shapes of a pool of `num_pages` pages."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes that a call must read or write."""

    @property
    def flops(self) -> int:
        return 0

    @property
    def calls(self) -> int:
        """Number of calls in a chain."""
        return calls_of(self.num_bytes)

    @property
    def pool(self) -> CacheSpec:
        """Shapes of the pool: separate pages for all calls of a chain, and at least `pool_bytes`."""
        return self.spec(max(-(-self.pool_bytes // self.spec(1).bytes_per_page), math.prod(self._run_pages)))

    @property
    def slots(self) -> list[Array]:
        """Slots (int32 [tokens]) of each call. Each run has its own pages. A run longer than a page starts at a page
        boundary; a shorter run starts at a random position where it fits into its page.
        """
        rng = np.random.default_rng(0)
        pages = rng.permutation(self.pool.num_pages)[: math.prod(self._run_pages)].reshape(self._run_pages)
        place = np.arange(self.run)
        slots = pages[:, :, place // self.page_size] * self.page_size + place % self.page_size
        slots += rng.integers(0, max(1, self.page_size - self.run + 1), (*pages.shape[:2], 1))
        return [jnp.asarray(call, jnp.int32) for call in slots.reshape(len(slots), -1)[:, : self.tokens]]

    @property
    def _run_pages(self) -> tuple[int, int, int]:
        """Calls per chain, runs per call, and pages per run."""
        return self.calls, -(-self.tokens // self.run), -(-self.run // self.page_size)
