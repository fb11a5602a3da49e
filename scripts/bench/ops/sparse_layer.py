"""Benchmark of the attention of a DeepSeek-V3.2 layer in a decode step: sparse, or dense over the same latents.

"sparse" is `index_top_k`, which selects keys by index scores, `token_slots`, and `mla_sparse`, which attends to the
selected latents. "dense" is `mla_decode`. Neither includes projections or writes of new tokens. Each operation runs its
default implementation.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_attn import PagedIndexKeys, PagedLatent, index_top_k, mla_decode, mla_sparse, plan_decode, token_slots
from scripts.bench.cases.mla_decode import MlaDecodeCase
from scripts.bench.harness.case import Bench
from scripts.bench.harness.pools import Pools, check_fits, latent_query_dtype, random_index_keys, random_values
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.ops.index_top_k import IndexTopKCase
from scripts.bench.shapes import MlaDecode

SM_SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True)
class SparseLayerCase:
    """A decode step of `batch` sequences of `context` tokens, with DeepSeek-V3.2's index heads.

    Attributes:
      cache: kind of latents and index keys, a key of `pools.CACHES`; or "fp8".
    """

    batch: int
    context: int
    heads: int = 128
    cache: str = "bf16"
    top_k: int = 2048
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"h{self.heads} B{self.batch} {self.top_k} of {self.context} p{self.page_size} {self.cache}"

    @property
    def dense(self) -> MlaDecodeCase:
        """The dense step as a case of `mla_decode`."""
        return MlaDecodeCase(MlaDecode(self.batch, self.context, self.heads, page_size=self.page_size), self.cache)

    @property
    def index(self) -> IndexTopKCase:
        """The selection of keys as a case of `index_top_k`."""
        return IndexTopKCase(self.batch, self.context, self.cache, top_k=self.top_k, page_size=self.page_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all index keys and of the selected latents."""
        return self.index.num_bytes + self.dense.num_bytes * min(self.top_k, self.context) // self.context

    @property
    def flops(self) -> int:
        """Multiplications and additions of the index scores and of the attention to the selected latents."""
        return self.index.flops + self.dense.flops * min(self.top_k, self.context) // self.context


@dataclasses.dataclass(frozen=True)
class SparseLayerInputs:
    """Arguments of a chain of calls. `owns` has queries, index weights and block table of each call; all calls share
    the others.
    """

    cache: PagedLatent
    index: PagedIndexKeys
    kv_lens: Array
    owns: list[dict[str, Array]]


def inputs(case: SparseLayerCase, pools: Pools) -> SparseLayerInputs:
    """Make the arguments of a chain of calls.

    Raises:
      MemoryError: the pages do not fit.
    """
    pools.release()
    dense = case.dense.inputs(pools)
    spec = case.index.pool_spec(dense.cache.pages.shape[0])
    check_fits(spec.num_bytes)
    owns = []
    for key, own in zip(jax.random.split(jax.random.key(2), len(dense.owns)), dense.owns, strict=True):
        q = random_values(key, (case.batch, case.index.heads, case.index.index_dim), latent_query_dtype(case.cache))
        weights = random_values(jax.random.fold_in(key, 1), (case.batch, case.index.heads), jnp.float32)
        owns.append(own | {"q": q, "weights": weights})
    return SparseLayerInputs(dense.cache, random_index_keys(spec), dense.kv_lens, owns)


def sparse(case: SparseLayerCase, arrays: SparseLayerInputs, stopwatch: Stopwatch) -> Timing:
    def call(_: None, shared: Any, own: dict[str, Any]) -> tuple[None, Any]:
        cache, index, kv_lens = shared
        cu_q_lens = jnp.arange(case.batch + 1, dtype=jnp.int32)
        tables = own["block_tables"]
        chosen = index_top_k(own["q"], own["weights"], index, tables, cu_q_lens, kv_lens, top_k=case.top_k)
        slots = token_slots(chosen, tables, cu_q_lens, page_size=case.page_size)
        return None, mla_sparse(own["q_latent"][:, 0], own["q_rope"][:, 0], cache, slots, sm_scale=SM_SCALE)

    return stopwatch.chain(call, arrays.owns, shared=(arrays.cache, arrays.index, arrays.kv_lens))


def dense(case: SparseLayerCase, arrays: SparseLayerInputs, stopwatch: Stopwatch) -> Timing:
    """Time `mla_decode`. The plan is made before the calls and not timed, because an engine makes one plan per step for
    all layers.
    """

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        own = {name: own[name] for name in ("q_latent", "q_rope", "block_tables")}
        return None, mla_decode(**own, **shared, sm_scale=SM_SCALE)

    first, shared = arrays.owns[0], {"cache": arrays.cache, "kv_lens": arrays.kv_lens}
    queries = first["q_latent"], first["q_rope"]
    shared["plan"] = jax.jit(plan_decode)(queries, arrays.cache, first["block_tables"], arrays.kv_lens)
    return stopwatch.chain(call, arrays.owns, shared=shared)


BENCH = Bench(
    grids={
        "sparse": [
            SparseLayerCase(batch, context, heads, cache)
            for heads, cache, (batch, context) in itertools.product(
                (128, 16), ("bf16", "fp8"), ((64, 8192), (64, 32768), (16, 131072), (64, 4096), (1, 131072))
            )
        ],
        "choice": [
            SparseLayerCase(batch, context, cache=cache)
            for cache, context, batch in itertools.product(("bf16", "fp8"), (8192, 32768, 131072), (8, 16, 64, 128))
        ],
        "small": [SparseLayerCase(2, 64, 3, cache, 16, 16) for cache in ("f32", "fp8")],
    },
    contenders={"sparse": sparse, "dense": dense},
    inputs=inputs,
)
