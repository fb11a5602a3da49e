"""Benchmark of `cascade_decode`: a decode step of sequences that share the pages of their prompt.

Contenders: `cascade_decode`, and `paged_decode` with the same block tables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import cascade_decode, paged_decode, plan_decode
from scripts.bench.cases.paged_decode import DecodeArrays
from scripts.bench.harness.case import Bench
from scripts.bench.harness.pools import Pools, cache_spec, random_values, tables
from scripts.bench.harness.timing import Stopwatch, Timing

CALLS = (4, 8)
"""Minimum and maximum number of calls in a chain (one compiled program). The maximum limits the compilation time: each
kernel of each call takes a third of a second.
"""

COLD_BYTES = 2e8
"""Bytes that a chain reads, unless `CALLS` limits the number of calls: more than three times the L2 of an H200."""


@dataclasses.dataclass(frozen=True)
class CascadeCase:
    """A step of `samples` sequences.

    Attributes:
      shared: number of first tokens whose pages all sequences share; a multiple of the page size.
      own: number of following tokens per sequence, in separate pages; a multiple of the page size.
    """

    samples: int
    shared: int
    own: int = 256
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    cache: str = "bf16"

    @property
    def name(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        return f"{heads} {self.samples} of {self.shared} + {self.own} p{self.page_size} {self.cache}"

    @property
    def pool_sizes(self) -> dict[str, int]:
        return {"page_size": self.page_size, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values: the shared ones counted once, the separate ones for each sequence."""
        page = cache_spec(self.cache, num_pages=1, **self.pool_sizes).bytes_per_page
        return page * (self.shared + self.samples * self.own) // self.page_size

    @property
    def flops(self) -> int:
        return 4 * self.q_heads * self.head_dim * self.samples * (self.shared + self.own)

    def inputs(self, pools: Pools) -> DecodeArrays:
        """Make the arguments of a chain of calls.

        Raises:
          MemoryError: the pages do not fit.
        """
        shared, own = (tokens // self.page_size for tokens in (self.shared, self.own))
        each, (fewest, most) = shared + self.samples * own, CALLS
        calls = max(fewest, min(most, math.ceil(COLD_BYTES / self.num_bytes)))
        kv = pools.get(self.cache, calls * each, **self.pool_sizes)
        dtype = jnp.float32 if self.cache == "f32" else jnp.bfloat16
        keys, shape = jax.random.split(jax.random.key(1), calls), (self.samples, 1, self.q_heads, self.head_dim)

        def of_rows(pages: Any) -> jax.Array:
            of_all, rest = np.split(np.asarray(pages), [shared])
            return jnp.asarray(np.hstack([np.tile(of_all, (self.samples, 1)), rest.reshape(self.samples, own)]))

        found = [of_rows(pages) for pages in tables(np.random.default_rng(0), kv.k.shape[0], calls, (each,))]
        return DecodeArrays(
            kv=kv,
            kv_lens=jnp.full(self.samples, self.shared + self.own, jnp.int32),
            q=[random_values(key, shape, dtype) for key in keys],
            block_tables=found,
        )


def cascade(case: CascadeCase, arrays: DecodeArrays, stopwatch: Stopwatch, *, found: bool) -> Timing:
    """Time `cascade_decode`, including its plans (the assignment of pages to CTAs).

    Args:
      found: whether each call searches the block table for shared pages; otherwise it receives their number.

    """
    pages = None if found else case.shared // case.page_size

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, cascade_decode(**own, **shared, shared_pages=pages)

    return stopwatch.chain(call, _owns(arrays), shared={"kv": arrays.kv, "kv_lens": arrays.kv_lens})


def plain(case: CascadeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time `paged_decode`, which reads the shared pages once per sequence. Its plan is made before and not timed."""

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, paged_decode(**own, **shared)

    owns, shared = _owns(arrays), {"kv": arrays.kv, "kv_lens": arrays.kv_lens}
    first = owns[0]
    shared["plan"] = jax.jit(plan_decode)(first["q"], arrays.kv, first["block_tables"], arrays.kv_lens)
    return stopwatch.chain(call, owns, shared=shared)


def _owns(arrays: DecodeArrays) -> list[dict[str, Any]]:
    return [{"q": q, "block_tables": table} for q, table in zip(arrays.q, arrays.block_tables, strict=True)]


SAMPLES = [CascadeCase(samples, shared) for samples, shared in itertools.product((16, 64), (2048, 8192, 32768))]
LARGE = [CascadeCase(256, shared) for shared in (2048, 8192, 32768)]
LARGE += [CascadeCase(16, 64, 2048), CascadeCase(64, 64, 2048), CascadeCase(64, 1024, 8192)]
"""256 sequences, and sequences with more separate tokens than shared tokens."""

BENCH = Bench(
    grids={
        "cascade": [*SAMPLES, *LARGE],
        "cascade-large": LARGE,
        "small": [CascadeCase(3, 32, 16, 4, 2, 16, 16, "f32")],
    },
    contenders={
        "given": functools.partial(cascade, found=False),
        "found": functools.partial(cascade, found=True),
        "paged_decode": plain,
    },
    inputs=CascadeCase.inputs,
)
