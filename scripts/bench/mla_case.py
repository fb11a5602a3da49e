"""One layer's absorbed decode step as a benchmark's case: what it costs at least, and its arguments on the device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import PagedLatent
from scripts.bench.pools import CACHES, Pools, at_least, calls_of, random_values, tables
from scripts.bench.shapes import MlaDecode


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """A step over one kind of cache.

    Attributes:
      shape: of the step.
      varied: sequences differ: `context` is their mean, and twice their standard deviation.
    """

    shape: MlaDecode
    cache: str = "bf16"
    varied: bool = False

    @property
    def name(self) -> str:
        s = self.shape
        parts = [f"{s.latent_dim}+{s.rope_dim}", f"h{s.heads} B{s.batch}", f"{'~' * self.varied}{s.context}"]
        return " ".join([*parts, f"p{s.page_size}", *([f"Q{s.queries}"] if s.queries > 1 else []), self.cache])

    @property
    def num_bytes(self) -> int:
        """Of latents that are seen."""
        s = self.shape
        return int(self.lens.sum()) * (s.latent_dim + s.rope_dim) * jnp.dtype(CACHES[self.cache][0]).itemsize

    @property
    def flops(self) -> int:
        """Of both products. All queries are taken to see all latents."""
        s = self.shape
        return 2 * s.heads * s.queries * int(self.lens.sum()) * (2 * s.latent_dim + s.rope_dim)

    @functools.cached_property
    def lens(self) -> np.ndarray:
        """Tokens of each sequence."""
        s = self.shape
        if not self.varied:
            return np.full(s.batch, s.context, np.int32)
        drawn = np.random.default_rng(0).normal(s.context, s.context / 2, s.batch)
        return np.maximum(drawn, s.queries).astype(np.int32)

    @property
    def sm_scale(self) -> float:
        """DeepSeek's for 128 columns of keys that are not rotated."""
        return (128 + self.shape.rope_dim) ** -0.5

    @property
    def table_pages(self) -> int:
        """Pages of a row of the table."""
        return -(-int(self.lens.max()) // self.shape.page_size)

    @property
    def cold_calls(self) -> int:
        """Calls that read pages of their own, until so much was read that the first one's are cold again."""
        return calls_of(self.num_bytes)

    @property
    def pool_sizes(self) -> dict[str, int]:
        s = self.shape
        return {"page_size": s.page_size, "latent_dim": s.latent_dim, "rope_dim": s.rope_dim}


@dataclasses.dataclass(frozen=True)
class MlaInputs:
    """The arguments of a chain of calls.

    Attributes:
      cache: the pool all calls read from.
      kv_lens: int32 [B].
      owns: queries and a table for each call. No two calls are the same, or the compiler would do with one.
    """

    cache: PagedLatent
    kv_lens: Array
    owns: list[dict[str, Array]]


def inputs(case: MlaCase, pools: Pools) -> MlaInputs:
    """The arguments of a chain.

    Raises:
      MemoryError: the pages do not fit.
    """
    s = case.shape
    pages = case.cold_calls * s.batch * case.table_pages
    cache = pools.get_latents(case.cache, pages, **case.pool_sizes)
    rng = np.random.default_rng(pages)
    cold = tables(rng, cache.pages.shape[0], case.cold_calls, (s.batch, case.table_pages))
    owns = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), at_least(case.cold_calls))):
        q = random_values(key, (s.batch, s.queries, s.heads, s.latent_dim + s.rope_dim), CACHES[case.cache][0])
        q_latent, q_rope = jnp.split(q, [s.latent_dim], axis=-1)
        owns.append({"q_latent": q_latent, "q_rope": q_rope, "block_tables": cold[i % len(cold)]})
    return MlaInputs(cache, jnp.asarray(case.lens), owns)
