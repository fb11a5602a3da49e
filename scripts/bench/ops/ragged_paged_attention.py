"""Benchmark of `ragged_paged_attention`: decoding sequences and prompt chunks in one call.

Contenders: "one_call" is `ragged_paged_attention`. "split" calls `paged_decode` for the decoding sequences, whose
number it knows on the host, and `paged_prefill` for the chunks. "prefill_alone" calls `paged_prefill` for all
sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import paged_decode, paged_prefill, plan_decode, ragged_paged_attention
from scripts.bench.cases.prefill import PagedPrefillCase, mixed
from scripts.bench.harness.case import Bench
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.shapes import Prefill

CALLS = 4
"""Maximum number of calls in a chain (one compiled program). It limits the compilation time: each kernel of each call
takes a third of a second.
"""


@dataclasses.dataclass(frozen=True)
class MixedCase:
    """A step of decoding sequences followed by prompt chunks.

    Attributes:
      rows: number of decoding sequences, each with one new token.
      context: tokens of each decoding sequence, including the new token.
      chunks: number of prompt chunks, each of another sequence.
      new, cached: numbers of new and of cached tokens of each chunk.
    """

    rows: int
    context: int
    chunks: int
    new: int
    cached: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    cache: str = "bf16"

    @property
    def name(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        parts = [f"{self.rows} rows of {self.context}"] * (self.rows > 0)
        parts += [f"{self.chunks} x {self.new} on {self.cached}"] * (self.chunks > 0)
        return f"{heads} {', '.join(parts)} p{self.page_size} {self.cache}"

    @property
    def as_prefill(self) -> PagedPrefillCase:
        """The step as a case of prompt chunks only: a decoding sequence is a chunk of one token."""
        sizes, lengths = mixed(*[(1, self.context - 1)] * self.rows, *[(self.new, self.cached)] * self.chunks)
        shape = Prefill(*sizes, self.q_heads, self.kv_heads, self.head_dim, self.page_size)
        return PagedPrefillCase(shape, self.cache, lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, outputs and the pages of all tokens."""
        return self.as_prefill.num_bytes

    @property
    def flops(self) -> int:
        return self.as_prefill.flops

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, pools: Pools) -> dict[str, Any]:
        """Make the arguments of a chain: a list with `q` of each call, and the arguments that all calls share. Block
        tables are shared because all layers of a step use the same tables.
        """
        arrays = self.as_prefill.inputs(pools)
        return arrays | {"q": arrays["q"][:CALLS]}


def one_call(case: MixedCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time `ragged_paged_attention`, which finds the decoding sequences on the device."""

    def call(_: None, shared: dict[str, Any], q: Any) -> tuple[None, Any]:
        lens, pages, offsets = shared["kv_lens"], shared["block_tables"], shared["cu_q_lens"]
        options: dict[str, Any] = {"sm_scale": case.sm_scale, "update_kv_cache": False}
        return None, ragged_paged_attention(q, None, None, shared["kv"], lens, pages, offsets, **options)[0]

    return stopwatch.chain(call, arrays["q"], shared=_shared(arrays))


def split(case: MixedCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time a caller that splits the step with static slices and concatenates the outputs. The plan of `paged_decode` is
    made before the calls and not timed.
    """
    rows, sm_scale = case.rows, case.sm_scale
    shared = _shared(arrays)

    def of_rows(q: jax.Array, shared: dict[str, Any]) -> tuple[Any, ...]:
        return q[:rows, None], shared["kv"], shared["block_tables"][:rows], shared["kv_lens"][:rows]

    def call(_: None, shared: dict[str, Any], q: jax.Array) -> tuple[None, Any]:
        outs = []
        if rows:
            decoded: Any = paged_decode(*of_rows(q, shared), plan=shared["plan"], sm_scale=sm_scale)
            outs.append(decoded[:, 0])
        if case.chunks:
            chunks = q[rows:], shared["kv"], shared["block_tables"][rows:], shared["cu_q_lens"][rows:] - rows
            outs.append(paged_prefill(*chunks, shared["kv_lens"][rows:], sm_scale=sm_scale))
        return None, jnp.concatenate(outs)

    if rows:
        shared["plan"] = jax.jit(lambda q, shared: plan_decode(*of_rows(q, shared)))(arrays["q"][0], shared)
    return stopwatch.chain(call, arrays["q"], shared=shared)


def prefill_alone(case: MixedCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time `paged_prefill` for all sequences."""

    def call(_: None, shared: dict[str, Any], q: Any) -> tuple[None, Any]:
        return None, paged_prefill(q, **shared, sm_scale=case.sm_scale)

    return stopwatch.chain(call, arrays["q"], shared=_shared(arrays))


def _shared(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name != "q"}


MIXED: Sequence[MixedCase] = [
    MixedCase(64, 4096, 8, 256, 1024),
    MixedCase(64, 4096, 0, 1, 0),
    MixedCase(64, 1024, 1, 2048, 0),
    MixedCase(64, 1024, 8, 64, 0, 64, 8, 64),
    MixedCase(256, 2048, 1, 512, 0),
    MixedCase(8, 8192, 1, 512, 8192),
    MixedCase(0, 1, 8, 256, 1024),
]

FEW_OR_NARROW: Sequence[MixedCase] = [
    MixedCase(1, 65536, 0, 1, 0),
    MixedCase(64, 4096, 8, 256, 1024, cache="int8-head"),
    MixedCase(64, 4096, 0, 1, 0, cache="fp8-head"),
    MixedCase(8, 16384, 0, 1, 0),
    MixedCase(64, 2048, 0, 1, 0, 16, 16),
    MixedCase(64, 4096, 0, 1, 0, 64, 8),
    MixedCase(8, 8192, 1, 512, 8192),
    MixedCase(256, 1024, 0, 1, 0, 64, 8, 64),
    MixedCase(16, 2048, 1, 256, 0, page_size=16),
]
"""Steps with few decoding sequences, int8 and fp8 caches, other numbers of query heads per KV head, or small pages."""

BENCH = Bench(
    grids={"mixed": MIXED, "mixed-varied": FEW_OR_NARROW, "small": [MixedCase(3, 40, 2, 8, 24, 4, 2, 16, 16, "f32")]},
    contenders={"one_call": one_call, "split": split, "prefill_alone": prefill_alone},
    inputs=MixedCase.inputs,
)
