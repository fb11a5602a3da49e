"""Benchmark cases of `mla_decode`, the absorbed decode step of one MLA layer.

A case computes its minimum bytes and operations, for the roofline, and makes its arguments on the device. Absorbed
means that W_UK and W_UV are multiplied into queries and outputs, so that every head reads the same latents.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import PagedLatent, latent_cache_spec
from scripts.bench.harness.pools import (
    Pools,
    at_least,
    calls_of,
    latent_dtype,
    latent_query_dtype,
    random_values,
    tables,
)
from scripts.bench.shapes import MlaDecode

LOG_DEVIATION = 0.8
"""Standard deviation of the logarithm of lognormal lengths."""


@dataclasses.dataclass(frozen=True)
class MlaDecodeInputs:
    """Arguments of a chain, a compiled program that calls the operation several times.

    Attributes:
      cache: pool that all calls read.
      kv_lens: int32 [B], tokens per sequence.
      owns: `q_latent`, `q_rope` and `block_tables` of each call. They differ between calls, because XLA would merge
        equal calls.
    """

    cache: PagedLatent
    kv_lens: Array
    owns: list[dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class MlaDecodeCase:
    """An absorbed decode step over one kind of cache.

    Attributes:
      shape: shape of the step.
      cache: kind of cache, a key of `pools.CACHES`; or "fp8".
      varied: whether lengths differ, with mean `context` and standard deviation `context` / 2.
      lognormal: whether lengths differ and are drawn from a lognormal distribution with mean `context` and a standard
        deviation of 0.8 of their logarithm, so that few sequences have most of the tokens.
    """

    shape: MlaDecode
    cache: str = "bf16"
    varied: bool = False
    lognormal: bool = False

    @property
    def name(self) -> str:
        s = self.shape
        context = f"{'~' * self.varied}{'lognormal ' * self.lognormal}{s.context}"
        parts = [f"{s.latent_dim}+{s.rope_dim}", f"h{s.heads} B{s.batch}", context]
        return " ".join([*parts, f"p{s.page_size}", *([f"Q{s.queries}"] if s.queries > 1 else []), self.cache])

    @property
    def num_bytes(self) -> int:
        """Bytes of the latents of all tokens. The bytes of queries and outputs are not counted."""
        s = self.shape
        spec = latent_cache_spec(
            num_pages=1, dtype=latent_dtype(self.cache), rope_dtype=None, scale_dtype=None, **self.pool_sizes
        )
        return int(self.lens.sum()) * spec.bytes_per_page // s.page_size

    @property
    def flops(self) -> int:
        """Multiplications and additions of both GEMMs (scores and outputs), as if every query attended to all
        latents.
        """
        s = self.shape
        return 2 * s.heads * s.queries * int(self.lens.sum()) * (2 * s.latent_dim + s.rope_dim)

    @functools.cached_property
    def lens(self) -> np.ndarray:
        """Number of tokens per sequence."""
        s = self.shape
        rng = np.random.default_rng(0)
        if self.lognormal:
            drawn = rng.lognormal(np.log(s.context) - LOG_DEVIATION**2 / 2, LOG_DEVIATION, s.batch)
        elif self.varied:
            drawn = rng.normal(s.context, s.context / 2, s.batch)
        else:
            return np.full(s.batch, s.context, np.int32)
        return np.maximum(drawn, s.queries).astype(np.int32)

    @property
    def sm_scale(self) -> float:
        """DeepSeek's scale of the scores: (128 unrotated + `rope_dim` rotated key columns) ** -0.5."""
        return (128 + self.shape.rope_dim) ** -0.5

    @property
    def table_pages(self) -> int:
        """Number of columns of the block table."""
        return -(-int(self.lens.max()) // self.shape.page_size)

    @property
    def cold_calls(self) -> int:
        """Number of calls of a chain with separate pages. If a chain has more calls, they reuse these pages in order.
        Unless a call reads less than a megabyte, these pages exceed the L2, so no call finds its pages there.
        """
        return calls_of(self.num_bytes)

    @property
    def pool_sizes(self) -> dict[str, int]:
        s = self.shape
        return {"page_size": s.page_size, "latent_dim": s.latent_dim, "rope_dim": s.rope_dim}

    def inputs(self, pools: Pools) -> MlaDecodeInputs:
        """Make the arguments of a chain of calls.

        Raises:
          MemoryError: the pages do not fit.
        """
        s = self.shape
        pages = self.cold_calls * s.batch * self.table_pages
        cache = pools.get_latents(self.cache, pages, **self.pool_sizes)
        rng = np.random.default_rng(pages)
        cold = tables(rng, cache.pages.shape[0], self.cold_calls, (s.batch, self.table_pages))
        owns = []
        for i, key in enumerate(jax.random.split(jax.random.key(1), at_least(self.cold_calls))):
            shape = s.batch, s.queries, s.heads, s.latent_dim + s.rope_dim
            q = random_values(key, shape, latent_query_dtype(self.cache))
            q_latent, q_rope = jnp.split(q, [s.latent_dim], axis=-1)
            owns.append({"q_latent": q_latent, "q_rope": q_rope, "block_tables": cold[i % len(cold)]})
        return MlaDecodeInputs(cache, jnp.asarray(self.lens), owns)
