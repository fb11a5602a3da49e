"""Benchmark of `plan_decode`, which assigns the pages of all sequences to the CTAs of a decode kernel.

An engine makes one plan per step. All layers share it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import FULL, HeadWindow, PagedKV, plan_decode
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.device import multiprocessors
from scripts.bench.harness.pools import MAX_CALLS, Pools
from scripts.bench.harness.timing import Stopwatch, Timing

PROGRAMS_PER_MULTIPROCESSOR = 3
HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class PlanCase:
    """A plan for `batch` sequences with lengths from 1 to `context` tokens.

    Attributes:
      windowed: whether half of the KV heads see only the newest 1,024 tokens and the first 128 tokens.
    """

    batch: int
    context: int = 32768
    kv_heads: int = 8
    page_size: int = 64
    windowed: bool = False

    @property
    def name(self) -> str:
        return f"B{self.batch} <{self.context} h{self.kv_heads} p{self.page_size}{' windows' * self.windowed}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the lengths and of the plan."""
        rows = self.batch * self.kv_heads
        return 4 * (self.batch + 7 * rows + 2 + 3 * (PROGRAMS_PER_MULTIPROCESSOR * multiprocessors() + 1))

    @property
    def flops(self) -> int:
        return 0


def inputs(case: PlanCase, pools: Pools) -> list[Array]:
    """Draw the lengths (int32 [batch]) of each call."""
    del pools
    lens = np.random.default_rng(0).integers(1, case.context + 1, (MAX_CALLS, case.batch), np.int32)
    return [jnp.asarray(row) for row in lens]


def ours(implementation: str, case: PlanCase, lens: list[Array], stopwatch: Stopwatch) -> Timing:
    window: Any = None
    if case.windowed:
        is_windowed = np.arange(case.kv_heads) % 2 == 0
        width, sinks = np.where(is_windowed, 1024, FULL), np.where(is_windowed, 128, 0)
        window = HeadWindow(jnp.asarray(width, jnp.int32), jnp.asarray(sinks, jnp.int32))

    q = jax.ShapeDtypeStruct((case.batch, 1, case.kv_heads, HEAD_DIM), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((case.batch, case.kv_heads, case.page_size, HEAD_DIM), jnp.bfloat16)
    kv: Any = PagedKV(pages, pages)  # pyrefly: ignore[bad-argument-type]
    block_tables = jax.ShapeDtypeStruct((case.batch, case.context // case.page_size), jnp.int32)

    def call(_: None, window: Any, lens: Array) -> tuple[None, Any]:
        return None, plan_decode(
            q,
            kv,
            block_tables,
            lens,
            window=window,
            num_programs=PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(),
            implementation=implementation,
        )

    return stopwatch.chain(call, lens, shared=window)


BENCH = Bench(
    grids={
        "gqa": [PlanCase(batch, windowed=windowed) for batch in (1, 16, 64, 256, 1024) for windowed in (False, True)],
        "small": [PlanCase(4, 64, 2, 16)],
    },
    contenders=by_name(ours),
    inputs=inputs,
)
