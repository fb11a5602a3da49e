"""Benchmark cases of `paged_decode`, the decode step of one attention layer.

A case computes its minimum bytes and operations, for the roofline, and makes its arguments on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import FULL, HeadWindow, PagedKV, token_tables
from scripts.bench.harness.pools import (
    CACHES,
    Layout,
    Pools,
    at_least,
    cache_spec,
    calls_of,
    random_values,
    tables,
    view_of,
)
from scripts.bench.shapes import Decode


@dataclasses.dataclass(frozen=True)
class DecodeArrays:
    """Arguments of a chain, a compiled program that calls the operation several times.

    Attributes:
      kv: pool that all calls read.
      kv_lens: int32 [B], tokens per sequence.
      q, block_tables: one array per call. They differ between calls, because XLA would merge equal calls.
    """

    kv: PagedKV
    kv_lens: Array
    q: list[Array]
    block_tables: list[Array]


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A decode step over one kind of cache.

    Attributes:
      shape: shape of the step.
      cache: kind of cache, a key of `pools.CACHES`.
      varied: whether lengths are drawn from `shape.queries` to `context`; otherwise all are `context`.
      windowed_heads: number of KV heads that see `shape.window` keys; the other heads see all keys. None for no head
        windows.
      sink_tokens: number of first tokens that the windowed heads also see.
      layout: order of a page's axes (`pools.Layout`).
    """

    shape: Decode
    cache: str = "bf16"
    varied: bool = False
    windowed_heads: int | None = None
    sink_tokens: int = 0
    layout: Layout = "heads first"

    @property
    def name(self) -> str:
        s = self.shape
        parts = [f"{s.q_heads}/{s.kv_heads}x{s.head_dim}", f"B{s.batch}", f"{'<' * self.varied}{s.context}"]
        parts += [f"p{s.page_size}", *([f"Q{s.queries}"] if s.queries > 1 else [])]
        if self.windowed_heads is not None:
            parts.append(f"{self.windowed_heads}of{s.kv_heads}w{s.window}+{self.sink_tokens}")
        elif s.window is not None:
            parts.append(f"w{s.window}")
        return " ".join([*parts, self.cache, *([] if self.layout == "heads first" else [self.layout])])

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all tokens; with a window, of all pages that have a visible key."""
        page = cache_spec(self.cache, num_pages=1, **self.pool_sizes).bytes_per_page
        if self.window is None:
            return page * int(self.lens.sum()) // self.shape.page_size
        return page * int(self.walked_pages.sum()) // self.shape.kv_heads

    @property
    def flops(self) -> int:
        s = self.shape
        tokens = self.lens.sum() if self.window is None else self.walked_pages.sum() * s.page_size / s.kv_heads
        return int(4 * s.q_heads * s.head_dim * s.queries * tokens)

    @functools.cached_property
    def lens(self) -> np.ndarray:
        """Number of tokens per sequence."""
        s = self.shape
        if not self.varied:
            return np.full(s.batch, s.context, np.int32)
        return np.random.default_rng(0).integers(s.queries, s.context + 1, s.batch, np.int32)

    @functools.cached_property
    def walked_pages(self) -> np.ndarray:
        """Number of pages [B, Hkv] with a visible token: pages of sink tokens and pages of the window."""
        s = self.shape
        windowed = np.arange(s.kv_heads) < (s.kv_heads if self.windowed_heads is None else self.windowed_heads)
        width = np.where(windowed, s.window or FULL, FULL)
        sink_pages = np.where(windowed, -(-self.sink_tokens // s.page_size), 0)
        first = np.maximum(self.lens[:, None].astype(np.int64) - s.queries + 1 - width, 0) // s.page_size
        return -(-self.lens[:, None] // s.page_size) - first + np.minimum(sink_pages, first)

    @property
    def window(self) -> int | HeadWindow | None:
        """Window in the form of the operation's argument."""
        if self.windowed_heads is None or self.shape.window is None:
            return self.shape.window
        windowed = np.arange(self.shape.kv_heads) < self.windowed_heads
        widths = np.where(windowed, self.shape.window, FULL).astype(np.int32)
        return HeadWindow(jnp.asarray(widths), jnp.asarray(np.where(windowed, self.sink_tokens, 0).astype(np.int32)))

    @property
    def pool_sizes(self) -> dict[str, int]:
        s = self.shape
        return {"page_size": s.page_size, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim}

    @property
    def table_pages(self) -> int:
        """Number of columns of the block table."""
        return -(-self.shape.context // self.shape.page_size)

    @property
    def cold_calls(self) -> int:
        """Number of calls of a chain with separate pages. If a chain has more calls, they reuse these pages in order.
        Unless a call reads less than a megabyte, these pages exceed the L2, so no call finds its pages there.
        """
        return calls_of(self.num_bytes)

    @property
    def calls(self) -> int:
        """Number of calls in a chain."""
        return at_least(self.cold_calls)

    @property
    def pool_pages(self) -> int:
        """Number of different pages that the calls of a chain read."""
        return self.cold_calls * self.shape.batch * self.table_pages

    def repeated[Own](self, owns: Sequence[Own]) -> list[Own]:
        """Return arguments for all calls of a chain: the arguments of the `cold_calls` calls, repeated cyclically."""
        return [owns[i % len(owns)] for i in range(self.calls)]

    def inputs(self, pools: Pools) -> DecodeArrays:
        """Make the arguments of a chain of calls.

        Raises:
          MemoryError: the pages do not fit.
        """
        s = self.shape
        shape = (s.batch, s.queries, s.q_heads, s.head_dim)
        dtype = CACHES[self.cache][0] if self.cache in ("f16", "f32") else jnp.bfloat16
        kv = pools.get(self.cache, self.pool_pages, **self.pool_sizes)
        rng = np.random.default_rng(self.pool_pages)
        block_tables = tables(rng, kv.k.shape[0], self.cold_calls, (s.batch, self.table_pages))
        if self.layout != "heads first":
            kv = view_of(kv, self.layout)
            block_tables = [token_tables(table, page_size=s.page_size) for table in block_tables]
        return DecodeArrays(
            kv=kv,
            kv_lens=jnp.asarray(self.lens),
            q=[random_values(key, shape, dtype) for key in jax.random.split(jax.random.key(1), self.calls)],
            block_tables=self.repeated(block_tables),
        )
