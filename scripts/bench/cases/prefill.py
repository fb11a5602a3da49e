"""Benchmark cases of prefill chunks: sequences of new tokens that follow cached tokens.

A chain is one compiled program that calls an operation several times (scripts/bench/harness/timing.py).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import PagedKV, PagedLatent, token_tables
from scripts.bench.harness.pools import CACHES, Layout, Pools, cache_spec, random_values, tables, view_of
from scripts.bench.shapes import MlaPrefill, Prefill

CHAIN_SECONDS = 2e-3
"""Target time of a chain in seconds. It makes the start of a chain, about 15 microseconds, negligible."""

PORTABLE_FLOPS = 4e12
"""Maximum operations per call of the XLA implementations, which take about a second for them on a GPU."""


LENGTHS = tuple((new, cached) for cached in (0, 8192, 32768) for new in (8192, 2048, 512))
"""(new tokens, cached tokens) of the cases. The longest chunks come first, in case a time limit ends the run."""


def mixed(*lengths: tuple[int, int]) -> tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]:
    """Return the arguments of a case with sequences of different (new tokens, cached tokens).

    Returns:
      The first three fields of the shape (number of sequences, maximum of new and of cached tokens), and `lengths` of
      `PrefillCase`.
    """
    return (len(lengths), max(new for new, _ in lengths), max(cached for _, cached in lengths)), lengths


MIXED = mixed((1500, 0), (200, 9000), (3000, 1000), (64, 4000), (800, 0))
"""A step with first, middle and last chunks of prompts. The number of new tokens, 5,564, is not a multiple of 8."""


@dataclasses.dataclass(frozen=True)
class RaggedPrefill:
    """Shape of a chunk with contiguous keys and values: `sequences` sequences of `new_tokens` after `cached_tokens`."""

    sequences: int
    new_tokens: int
    cached_tokens: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


def offsets(lengths: list[int]) -> Array:
    """Return the start offset of each sequence and the end of the last sequence, int32 [len(lengths) + 1]."""
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """Base of the cases of `ragged_attention`, `paged_prefill` and `mla_prefill`.

    Attributes:
      shape: shape of the chunk.
      cache: kind of cache (`pools.CACHES`); for contiguous arrays, their dtype.
      lengths: (new tokens, cached tokens) per sequence; empty if all sequences have the lengths of the shape. `mixed`
      returns matching values of `shape` and `lengths`.
    """

    shape: Any
    cache: str = "bf16"
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def each(self) -> tuple[tuple[int, int], ...]:
        """(new tokens, cached tokens) per sequence."""
        return self.lengths or ((self.shape.new_tokens, self.shape.cached_tokens),) * self.shape.sequences

    @property
    def new(self) -> int:
        """Total number of new tokens."""
        return sum(new for new, _ in self.each)

    @property
    def held(self) -> int:
        """Total number of cached and new tokens."""
        return sum(self.held_by_each)

    @property
    def held_by_each(self) -> list[int]:
        """Number of cached and new tokens per sequence."""
        return [new + cached for new, cached in self.each]

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees (causal mask, and window if there is one)."""
        window = getattr(self.shape, "window", None)
        counts = collections.Counter(self.each)
        seen = {(new, cached): cached + 1 + np.arange(new) for new, cached in counts}
        return sum(
            count * int(np.minimum(seen[each], window or seen[each][-1]).sum()) for each, count in counts.items()
        )

    @property
    def dtype(self) -> Any:
        """Dtype of queries."""
        return CACHES[self.cache][0] if self.cache in ("f16", "f32") else jnp.bfloat16

    @property
    def cu_q_lens(self) -> Array:
        return offsets([new for new, _ in self.each])

    @property
    def kv_lens(self) -> Array:
        return jnp.asarray(self.held_by_each, jnp.int32)

    @property
    def lengths_name(self) -> str:
        s = self.shape
        if not self.lengths:
            return f"S{s.sequences} {s.new_tokens} on {s.cached_tokens}"
        counts = collections.Counter(self.lengths).items()
        return ", ".join(f"{f'{n} x ' if n > 1 else ''}{new} on {cached}" for (new, cached), n in counts)

    def check_one_length(self) -> None:
        """Raise NotImplementedError for sequences of different lengths."""
        if self.lengths:
            raise NotImplementedError("needs sequences of equal length")

    def calls(self, num_bytes: int, flops: int) -> int:
        """Number of calls in a chain, 2 to 16: as a call takes at least the time of the roofline of an H200 (800
        TFLOP/s, 4.8 TB/s), a chain takes at least about `CHAIN_SECONDS`.
        """
        seconds = max(flops / 8e14, num_bytes / 4.8e12)
        return max(2, min(16, round(CHAIN_SECONDS / seconds)))

    def check_portable(self, implementation: str, flops: int) -> None:
        """Raise NotImplementedError if `implementation` is "xla" and the call exceeds `PORTABLE_FLOPS`."""
        if implementation == "xla" and flops > PORTABLE_FLOPS:
            raise NotImplementedError(f"would take too long for {flops / 1e12:.0f} TFLOP")

    def values(self, key: int, *shape: int) -> Array:
        return random_values(jax.random.key(key), shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class RaggedAttentionCase(PrefillCase):
    """A call of `ragged_attention`."""

    shape: RaggedPrefill

    @property
    def name(self) -> str:
        s = self.shape
        return f"{s.q_heads}/{s.kv_heads}x{s.qk_dim}/{s.v_dim} {self.lengths_name} {self.cache}"

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, outputs, keys and values."""
        s = self.shape
        rows = self.new * s.q_heads + self.held * s.kv_heads
        return rows * (s.qk_dim + s.v_dim) * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        s = self.shape
        return 2 * s.q_heads * (s.qk_dim + s.v_dim) * self.pairs

    def inputs(self, pools: Pools) -> dict[str, Any]:
        """Make the arguments of a chain: a list with `q` of each call, and the arguments that all calls share."""
        pools.release()
        s = self.shape
        calls = range(self.calls(self.num_bytes, self.flops))
        return {
            "q": [self.values(call, self.new, s.q_heads, s.qk_dim) for call in calls],
            "k": self.values(100, self.held, s.kv_heads, s.qk_dim),
            "v": self.values(101, self.held, s.kv_heads, s.v_dim),
            "cu_q_lens": self.cu_q_lens,
            "cu_kv_lens": offsets(self.held_by_each),
        }


@dataclasses.dataclass(frozen=True)
class PagedPrefillCase(PrefillCase):
    """A call of `paged_prefill`.

    Attributes:
      layout: order of a page's axes (`pools.Layout`).
    """

    shape: Prefill
    layout: Layout = "heads first"

    @property
    def name(self) -> str:
        s = self.shape
        window = "" if s.window is None else f" w{s.window}"
        layout = "" if self.layout == "heads first" else f" {self.layout}"
        lengths = self.lengths_name
        return f"{s.q_heads}/{s.kv_heads}x{s.head_dim} {lengths} p{s.page_size}{window} {self.cache}{layout}"

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, outputs, and keys and values of all tokens; with a window, of the visible tokens only."""
        s = self.shape
        page = cache_spec(self.cache, num_pages=1, **self.pool_sizes).bytes_per_page
        seen = sum(new - 1 + min(cached + 1, s.window or cached + 1) for new, cached in self.each)
        q = 2 * self.new * s.q_heads * s.head_dim * jnp.dtype(self.dtype).itemsize
        return q + page * seen // s.page_size

    @property
    def flops(self) -> int:
        return 4 * self.shape.q_heads * self.shape.head_dim * self.pairs

    @property
    def pool_sizes(self) -> dict[str, int]:
        s = self.shape
        return {"page_size": s.page_size, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim}

    def inputs(self, pools: Pools) -> dict[str, Any]:
        """Make the arguments of a chain: a list with `q` of each call, and the arguments that all calls share.

        Raises:
          MemoryError: the pages do not fit.
        """
        s = self.shape
        table_pages = -(-max(self.held_by_each) // s.page_size)
        kv: PagedKV = pools.get(self.cache, s.sequences * table_pages, **self.pool_sizes)
        rng = np.random.default_rng(0)
        calls = range(self.calls(self.num_bytes, self.flops))
        block_tables = tables(rng, kv.k.shape[0], 1, (s.sequences, table_pages))[0]
        if self.layout != "heads first":
            block_tables = token_tables(block_tables, page_size=s.page_size)
        return {
            "q": [self.values(call, self.new, s.q_heads, s.head_dim) for call in calls],
            "kv": view_of(kv, self.layout),
            "block_tables": block_tables,
            "cu_q_lens": self.cu_q_lens,
            "kv_lens": self.kv_lens,
        }


@dataclasses.dataclass(frozen=True)
class MlaPrefillCase(PrefillCase):
    """A call of `mla_prefill`.

    Attributes:
      piece_tokens: number of cached latents that are expanded to keys and values at a time; None for the operation's
      default.
    """

    shape: MlaPrefill
    piece_tokens: int | None = None

    @property
    def name(self) -> str:
        s = self.shape
        piece = "" if self.piece_tokens is None else f" by {self.piece_tokens}"
        widths = f"h{s.heads} {s.latent_dim}+{s.rope_dim} {s.nope_dim + s.rope_dim}/{s.value_dim}"
        return f"{widths} {self.lengths_name}{piece} {self.cache}"

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, outputs, weights (W_UK and W_UV) and latents, each moved once."""
        s = self.shape
        heads = self.new * (s.nope_dim + s.rope_dim + s.value_dim) + (s.nope_dim + s.value_dim) * s.latent_dim
        return (s.heads * heads + self.held * self.width) * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Operations of the attention, and of expanding each latent once to keys and values of all heads."""
        s = self.shape
        attention = self.pairs * (s.nope_dim + s.rope_dim + s.value_dim)
        return 2 * s.heads * (attention + self.held * s.latent_dim * (s.nope_dim + s.value_dim))

    @property
    def width(self) -> int:
        return self.shape.latent_dim + self.shape.rope_dim

    @property
    def sm_scale(self) -> float:
        return (self.shape.nope_dim + self.shape.rope_dim) ** -0.5

    def inputs(self, pools: Pools) -> dict[str, Any]:
        """Make the arguments of a chain: queries and new latents of each call, and the arguments that all calls share.

        Raises:
          MemoryError: the pages do not fit.
        """
        s = self.shape
        table_pages = -(-max(self.held_by_each) // s.page_size)
        sizes = {"page_size": s.page_size, "latent_dim": s.latent_dim, "rope_dim": s.rope_dim}
        cache: PagedLatent = pools.get_latents(self.cache, s.sequences * table_pages, **sizes)
        rng = np.random.default_rng(0)
        owns = [
            {
                "q_nope": self.values(3 * call, self.new, s.heads, s.nope_dim),
                "q_rope": self.values(3 * call + 1, self.new, s.heads, s.rope_dim),
                "latent_new": self.values(3 * call + 2, self.new, self.width),
            }
            for call in range(self.calls(self.num_bytes, self.flops))
        ]
        shared = {
            "cache": cache,
            "w_uk": self.values(100, s.heads, s.nope_dim, s.latent_dim) * s.latent_dim**-0.5,
            "w_uv": self.values(101, s.heads, s.value_dim, s.latent_dim) * s.latent_dim**-0.5,
            "block_tables": tables(rng, cache.pages.shape[0], 1, (s.sequences, table_pages))[0],
            "cu_q_lens": self.cu_q_lens,
            "kv_lens": self.kv_lens,
        }
        return {"owns": owns, "shared": shared}
