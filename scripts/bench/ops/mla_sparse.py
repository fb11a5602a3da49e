"""Benchmark of `mla_sparse`: decode rows that attend to chosen latents of a long context each, anew in every call."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import CacheSpec, PagedLatent, latent_cache_spec, mla_sparse
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import (
    CACHES,
    Pools,
    at_least,
    calls_of,
    chain_of,
    check_fits,
    random_latents,
    random_values,
)
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class MlaSparseCase:
    """A decode step of `batch` sequences of `context` tokens, each of which attends to `top_k` of them.

    Attributes:
      cache: kind of the cache, "fp8" for latents in 8 bits.
    """

    batch: int
    context: int
    heads: int
    cache: str = "bf16"
    top_k: int = 2048
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64

    @property
    def name(self) -> str:
        width = f"{self.latent_dim}+{self.rope_dim}"
        return f"{width} h{self.heads} B{self.batch} {self.top_k} of {self.context} p{self.page_size} {self.cache}"

    @property
    def spec(self) -> CacheSpec:
        """The pool that all calls read from."""
        pages = self.batch * self.context // self.page_size
        sizes = {"page_size": self.page_size, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}
        dtype = jnp.float8_e4m3fn if self.cache == "fp8" else CACHES[self.cache][0]
        return latent_cache_spec(num_pages=pages, dtype=dtype, **sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the latents that are chosen."""
        return self.batch * self.top_k * self.spec.bytes_per_page // self.page_size

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        return 2 * self.batch * self.heads * self.top_k * (2 * self.latent_dim + self.rope_dim)


@dataclasses.dataclass(frozen=True)
class MlaSparseInputs:
    """Arguments of a chain of calls: the cache, and the queries and slots of each call."""

    cache: PagedLatent
    owns: list[dict[str, Array]]


def inputs(case: MlaSparseCase, pools: Pools) -> MlaSparseInputs:
    """Makes the arguments of a chain.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.spec.num_bytes)
    rng, owns = np.random.default_rng(0), []
    first = case.context * np.arange(case.batch)[:, None]
    dtype = jnp.float32 if case.cache == "f32" else jnp.bfloat16
    for key in jax.random.split(jax.random.key(1), at_least(calls_of(case.num_bytes))):
        chosen = [rng.choice(case.context, case.top_k, replace=False) for _ in range(case.batch)]
        q = random_values(key, (case.batch, case.heads, case.latent_dim + case.rope_dim), dtype)
        q_latent, q_rope = jnp.split(q, [case.latent_dim], axis=-1)
        slots = jnp.asarray(first + np.sort(chosen, axis=1), jnp.int32)
        owns.append({"q_latent": q_latent, "q_rope": q_rope, "slots": slots})
    return MlaSparseInputs(random_latents(case.spec), owns)


def ours(implementation: str, case: MlaSparseCase, arrays: MlaSparseInputs, stopwatch: Stopwatch) -> Timing:
    def call(_: None, cache: PagedLatent, own: dict[str, Any]) -> tuple[None, Any]:
        return None, mla_sparse(cache=cache, **own, sm_scale=192**-0.5, implementation=implementation)

    return stopwatch.chain(call, chain_of(implementation, arrays.owns), shared=arrays.cache)


BENCH = Bench(
    grids={
        "sparse": [
            MlaSparseCase(batch, 32768, heads, cache)
            for cache, batch, heads in itertools.product(("bf16", "fp8"), (128, 8), (128, 64, 16))
        ],
        "small": [MlaSparseCase(2, 64, 3, cache, 16, 128, 8, 16) for cache in ("f32", "fp8")],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
