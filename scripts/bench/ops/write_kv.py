"""Benchmark of `write_kv`, which writes keys and values of new tokens into a page pool that is updated in place.

Each call writes to different slots. A slot is the place of one token in the pool.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import CacheSpec, Rope, write_kv
from scripts.bench.cases.writes import WriteCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import (
    Layout,
    Pools,
    cache_spec,
    chain_of,
    check_fits,
    random_pool,
    random_values,
    view_of,
)
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class WriteKVCase(WriteCase):
    """A call of `write_kv`.

    Attributes:
      rope: whether the call also rotates keys and queries (RoPE).
      layout: order of a page's axes (`pools.Layout`).
    """

    rope: bool
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layout: Layout = "heads first"

    @property
    def name(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        layout = "" if self.layout == "heads first" else f" {self.layout}"
        return f"{heads} T{self.tokens} runs of {self.run} p{self.page_size}{' rope' * self.rope} {self.cache}{layout}"

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, read in bfloat16 and written in the cache's dtype. With `rope` also the bytes of
        queries, read and written, and of the float32 cosines and sines.
        """
        written = self.tokens * self.spec(1).bytes_per_page // self.page_size
        rotated = 2 * self.q_heads if self.rope else 0
        angles = 2 * 4 * (self.head_dim // 2) if self.rope else 0
        return written + self.tokens * (2 * self.head_dim * (2 * self.kv_heads + rotated) + angles)

    def spec(self, num_pages: int) -> CacheSpec:
        sizes = {"page_size": self.page_size, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return cache_spec(self.cache, num_pages=num_pages, **sizes)


def inputs(case: WriteKVCase, pools: Pools) -> list[dict[str, Array]]:
    """Make the arguments of each call.

    Raises:
      MemoryError: the pool does not fit.
    """
    pools.release()
    check_fits(case.pool.num_bytes)
    shapes = {"k": case.kv_heads, "v": case.kv_heads} | ({"q": case.q_heads} if case.rope else {})
    keys = jax.random.split(jax.random.key(0), case.calls)
    return [
        {name: random_values(key, (case.tokens, n, case.head_dim), jnp.bfloat16) for name, n in shapes.items()}
        | {"slots": slots}
        for key, slots in zip(keys, case.slots, strict=True)
    ]


def ours(implementation: str, case: WriteKVCase, owns: list[dict[str, Array]], stopwatch: Stopwatch) -> Timing:
    """Time one of our implementations. The calls change the pool, so each implementation gets a new pool."""

    def call(kv: Any, rope: Any, own: dict[str, Any]) -> tuple[Any, Any]:
        written: Any = write_kv(kv, **own, rope=rope, implementation=implementation)
        return written if "q" in own else (written, None)

    angles = jax.random.uniform(jax.random.key(1), (case.tokens, case.head_dim // 2), maxval=2 * np.pi)
    rope = Rope(jnp.cos(angles), jnp.sin(angles)) if case.rope else None
    return stopwatch.chain(
        call, chain_of(implementation, owns), carried=view_of(random_pool(case.pool), case.layout), shared=rope
    )


def _grid() -> list[WriteKVCase]:
    """Return writes of decode steps (one token per sequence) and of prompt chunks (one sequence)."""
    sizes = ((64, 1), (256, 1), (2048, 2048), (8192, 8192))
    caches = ("bf16", "int8-head", "fp8-head", "fp8-token")
    return [
        WriteKVCase(tokens, run, cache, rope)
        for cache, rope, (tokens, run) in itertools.product(caches, (True, False), sizes)
    ]


def _layouts() -> list[WriteKVCase]:
    sizes = itertools.product(("bf16", "fp8-head"), ((64, 1), (2048, 2048)))
    return [
        WriteKVCase(*size, cache, rope=True, layout=layout)
        for cache, size in sizes
        for layout in ("heads first", "tokens first", "fused, tokens first")
    ]


BENCH = Bench(
    grids={
        "layouts": _layouts(),
        "writes": _grid(),
        "small": [
            WriteKVCase(4, 2, cache, rope, 4, 2, 16, layout=layout, page_size=16, pool_bytes=2**20)
            for cache, rope, layout in (
                ("f32", True, "heads first"),
                ("int8-head", False, "heads first"),
                ("f32", True, "fused, tokens first"),
            )
        ],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
