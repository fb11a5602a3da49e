"""Benchmark of `merge_states`, which merges attention outputs of the same queries over separate parts of the keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_attn import merge_states
from scripts.bench.harness.case import Bench
from scripts.bench.harness.pools import Pools, calls_of, random_values
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class MergeCase:
    """A merge of `parts` states. A state is the outputs and log-sum-exps (LSEs) of `tokens` queries with `heads`
    heads.
    """

    parts: int
    tokens: int
    heads: int = 32
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.parts} of T{self.tokens} {self.heads}x{self.head_dim}"

    @property
    def num_bytes(self) -> int:
        """Bytes of bfloat16 outputs and float32 LSEs: all parts read, the result written."""
        return (self.parts + 1) * self.tokens * self.heads * (2 * self.head_dim + 4)

    @property
    def flops(self) -> int:
        return 2 * self.parts * self.tokens * self.heads * self.head_dim


def inputs(case: MergeCase, pools: Pools) -> list[tuple[Array, Array]]:
    """Make the outputs [parts, tokens, heads, head_dim] and LSEs [parts, tokens, heads] of each call."""
    pools.release()
    shape = case.parts, case.tokens, case.heads
    keys = jax.random.split(jax.random.key(0), calls_of(case.num_bytes))
    return [(random_values(key, (*shape, case.head_dim), jnp.bfloat16), jax.random.normal(key, shape)) for key in keys]


def ours(case: MergeCase, states: list[tuple[Array, Array]], stopwatch: Stopwatch) -> Timing:
    del case
    return stopwatch.chain(lambda _, __, state: (None, merge_states(*state)), states)


BENCH = Bench(
    grids={
        "gqa": [MergeCase(parts, tokens) for parts in (2, 4) for tokens in (64, 2048, 8192)],
        "small": [MergeCase(2, 8, 2, 16)],
    },
    contenders={"ours": ours},
    inputs=inputs,
)
