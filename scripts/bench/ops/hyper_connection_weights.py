"""Benchmark of `hyper_connection_weights`: weights of the residual streams of the tokens of a step.

Each call has other logits. The logits of a decode step are a few KB, so its calls measure the latency of the kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_attn import hyper_connection_weights
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import MAX_CALLS, Pools, chain_of, random_values
from scripts.bench.harness.timing import Stopwatch, Timing


@dataclasses.dataclass(frozen=True)
class StreamCase:
    """Weights of `streams` residual streams for `tokens` tokens."""

    tokens: int
    streams: int = 4
    iterations: int = 20

    @property
    def name(self) -> str:
        return f"{self.streams} streams {self.iterations} iterations T{self.tokens}"

    @property
    def columns(self) -> int:
        return (2 + self.streams) * self.streams

    @property
    def num_bytes(self) -> int:
        """Bytes of the logits and inverse RMS, which are read, and of the weights, which are written."""
        return 4 * self.tokens * (2 * self.columns + 1)

    @property
    def flops(self) -> int:
        return 0


def inputs(case: StreamCase, pools: Pools) -> list[dict[str, Array]]:
    """Make the arguments of a chain of calls."""
    pools.release()
    shapes = {
        "logits": (case.tokens, case.columns),
        "inverse_rms": (case.tokens,),
        "scale": (3,),
        "base": (case.columns,),
    }
    return [
        {
            name: random_values(jax.random.fold_in(key, i), shape, jnp.float32)
            for i, (name, shape) in enumerate(shapes.items())
        }
        for key in jax.random.split(jax.random.key(0), MAX_CALLS)
    ]


def ours(implementation: str, case: StreamCase, owns: list[dict[str, Array]], stopwatch: Stopwatch) -> Timing:
    def call(_carried: None, _shared: None, own: dict[str, Any]) -> tuple[None, Any]:
        return None, hyper_connection_weights(**own, iterations=case.iterations, implementation=implementation)

    return stopwatch.chain(call, chain_of(implementation, owns))


BENCH = Bench(
    grids={
        "v4": [StreamCase(tokens) for tokens in (1, 16, 128, 1024, 8192, 131072)],
        "small": [StreamCase(5, 2, 3)],
    },
    contenders={name: contender for name, contender in by_name(ours).items() if name != "mosaic"},
    inputs=inputs,
)
