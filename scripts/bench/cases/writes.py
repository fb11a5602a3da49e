"""Benchmark cases of writes into a pool that is updated in place. Each call of a chain writes to different slots."""

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
      pool_bytes: minimum size of the pool. A large pool makes L2 hits of the written pages rare.
    """

    tokens: int
    run: int
    cache: str
    page_size: int = dataclasses.field(default=64, kw_only=True)
    pool_bytes: int = dataclasses.field(default=2**30, kw_only=True)

    @abc.abstractmethod
    def spec(self, num_pages: int) -> CacheSpec:
        """Shapes of a pool of `num_pages` pages."""

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
        """Pool with the pages that all calls of a chain write to, and with at least `pool_bytes`."""
        return self.spec(max(-(-self.pool_bytes // self.spec(1).bytes_per_page), math.prod(self._run_pages)))

    @property
    def slots(self) -> list[Array]:
        """Slots of each call. A run has separate pages and starts at a page boundary, or anywhere in the page if it
        fits into one page.
        """
        rng = np.random.default_rng(0)
        pages = rng.permutation(self.pool.num_pages)[: math.prod(self._run_pages)].reshape(self._run_pages)
        place = np.arange(self.run)
        slots = pages[:, :, place // self.page_size] * self.page_size + place % self.page_size
        slots += rng.integers(0, max(1, self.page_size - self.run + 1), (*pages.shape[:2], 1))
        return [jnp.asarray(call, jnp.int32) for call in slots.reshape(len(slots), -1)[:, : self.tokens]]

    @property
    def _run_pages(self) -> tuple[int, int, int]:
        """Number of calls per chain, of runs per call, and of pages per run."""
        return self.calls, -(-self.tokens // self.run), -(-self.run // self.page_size)
