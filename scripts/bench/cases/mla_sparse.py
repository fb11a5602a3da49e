"""Benchmark cases of `mla_sparse`: each new token attends to `top_k` selected latents of a long context.

The new tokens are decode tokens (one per sequence) or tokens of a prefill chunk. Each call selects other latents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import CacheSpec, SlotRange, latent_cache_spec
from scripts.bench.harness.pools import (
    ChainInputs,
    Pools,
    at_least,
    calls_of,
    check_fits,
    latent_dtype,
    latent_query_dtype,
    random_latents,
    random_values,
)

SM_SCALE = 192**-0.5
"""Factor of scores before the softmax."""


@dataclasses.dataclass(frozen=True)
class MlaSparseCase:
    """A step of `batch` sequences of `context` tokens. Each new token attends to `top_k` of the context's tokens.

    With a window, calls have the form of DeepSeek-V4: `context` counts compressed entries, another cache has
    the window of each sequence, all columns are key and value, and heads have learned sinks.

    Attributes:
      cache: kind of cache, a key of `pools.CACHES` or one of `pools.FP8_LATENTS`; "fp8-v4" needs a window.
      new_tokens: new tokens per sequence.
      window: tokens of the window; 0 for none.
    """

    batch: int
    context: int
    heads: int
    cache: str = "bf16"
    top_k: int = 2048
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    new_tokens: int = 1
    window: int = 0

    @property
    def name(self) -> str:
        width = f"{self.latent_dim}+{self.rope_dim}"
        new = f" {self.new_tokens} new" if self.new_tokens > 1 else ""
        chosen = f"{self.top_k} of {self.context}" + (f" and {self.window}" if self.window else "")
        return f"{width} h{self.heads} B{self.batch}{new} {chosen} p{self.page_size} {self.cache}"

    @property
    def num_rows(self) -> int:
        return self.batch * self.new_tokens

    @property
    def value_dim(self) -> int:
        """Columns of a value. In DeepSeek-V4, rotated columns are values too."""
        return self.latent_dim + (self.rope_dim if self.window else 0)

    @property
    def spec(self) -> CacheSpec:
        """Shapes of the pool that all calls read."""
        return self._spec(self.batch * self.context // self.page_size)

    @property
    def window_spec(self) -> CacheSpec:
        """Shapes of the pool with the tokens of the windows: as many tokens as a window and the new tokens have."""
        return self._spec(self.batch * -(-(self.window + self.new_tokens) // self.page_size))

    def _spec(self, pages: int) -> CacheSpec:
        sizes: dict[str, Any] = {"page_size": self.page_size, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}
        if self.cache == "fp8-v4":
            sizes["scale_dtype"] = jnp.float8_e8m0fnu
        return latent_cache_spec(num_pages=pages, dtype=latent_dtype(self.cache), **sizes)

    @property
    def num_bytes(self) -> int:
        """Minimum bytes of latents that a call reads. Each selected latent is read once, even if several new tokens
        select it; a sequence cannot have more than `context` different latents.
        """
        chosen = self.batch * min(self.context, self.new_tokens * self.top_k)
        if self.window:
            chosen += self.batch * (self.window + self.new_tokens - 1)
        return chosen * self.spec.bytes_per_page // self.page_size

    @property
    def own_bytes(self) -> int:
        """Bytes of the queries and outputs of a call, 2 bytes per element."""
        return 2 * self.num_rows * self.heads * (self.latent_dim + self.rope_dim + self.value_dim)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both GEMMs (scores and outputs)."""
        width = self.latent_dim + self.rope_dim + self.value_dim
        return 2 * self.num_rows * self.heads * (self.top_k + self.window) * width


def inputs(case: MlaSparseCase, pools: Pools) -> ChainInputs:
    """Make the arguments of a chain of calls: caches and sinks, and `q_latent`, `q_rope` and slots of each call.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.spec.num_bytes)
    rng, owns = np.random.default_rng(0), []
    first = case.context * np.arange(case.batch).repeat(case.new_tokens)[:, None]
    dtype = latent_query_dtype(case.cache)
    for key in jax.random.split(jax.random.key(1), at_least(calls_of(case.num_bytes + case.own_bytes))):
        q = random_values(key, (case.num_rows, case.heads, case.latent_dim + case.rope_dim), dtype)
        q_latent, q_rope = jnp.split(q, [case.latent_dim], axis=-1)
        slots = jnp.asarray(first + _choose(rng, case), jnp.int32)
        if case.window:
            owns.append({"q_latent": q, "q_rope": None, "slots": _window(case), "extra_slots": slots})
        else:
            owns.append({"q_latent": q_latent, "q_rope": q_rope, "slots": slots})
    pool = random_latents(case.spec)
    if not case.window:
        return ChainInputs({"cache": pool}, owns)
    sinks = random_values(jax.random.key(2), (case.heads,), jnp.float32)
    return ChainInputs({"cache": random_latents(case.window_spec), "extra_cache": pool, "sinks": sinks}, owns)


def ranges(case: MlaSparseCase) -> dict[str, SlotRange]:
    """Return the slots of the calls of a case as ranges of keys, arguments of `mla_sparse`.

    Raises:
      NotImplementedError: the case has no window, or new tokens do not attend to all entries.
    """
    if not case.window or case.top_k != case.context:
        raise NotImplementedError("takes cases with a window whose tokens attend to all entries")
    sequence, token = (jnp.asarray(x, jnp.int32) for x in np.divmod(np.arange(case.num_rows), case.new_tokens))

    def consecutive(spec: CacheSpec, first: Array, size: int) -> SlotRange:
        tables = jnp.arange(spec.num_pages, dtype=jnp.int32).reshape(case.batch, -1)
        return SlotRange(tables, sequence, first, jnp.full_like(first, size), size)

    return {
        "slots": consecutive(case.window_spec, token, case.window),
        "extra_slots": consecutive(case.spec, jnp.zeros_like(token), case.top_k),
    }


def _window(case: MlaSparseCase) -> Array:
    """Return the slots of the window of each new token, [rows, window]."""
    tokens = case.window_spec.num_pages // case.batch * case.page_size
    first = tokens * np.arange(case.batch)[:, None] + np.arange(case.new_tokens)[None]
    return jnp.asarray(first.reshape(-1, 1) + np.arange(case.window)[None], jnp.int32)


def _choose(rng: np.random.Generator, case: MlaSparseCase) -> np.ndarray:
    """Draw sorted positions [rows, top_k].

    For one new token per sequence, positions are drawn without replacement. This would take long for the many tokens of
    a chunk. They draw one position from each of `top_k` equal intervals of the context instead.
    """
    if case.new_tokens == 1:
        chosen = [rng.choice(case.context, case.top_k, replace=False) for _ in range(case.num_rows)]
        return np.sort(chosen, axis=1)
    edges = np.linspace(0, case.context, case.top_k + 1).astype(np.int64)
    return edges[:-1] + (rng.random((case.num_rows, case.top_k)) * np.diff(edges)).astype(np.int64)
