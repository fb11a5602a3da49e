"""`ragged_attention` on Hopper: the operand loader of the prefill kernel for packed keys and values.

The main loop is in `mosaic/hopper/prefill.py`. This file has the operands, and for each work tile the rows that the
producer copies (`RaggedTile.load`) and the keys that each query row sees (`RaggedTile.limits`). `mosaic_sm100.py` uses
the same loader for Blackwell.

    load, in the producer:                          attend, in each consumer:
      for tile i of the keys of the sequence:         attend to all tiles; for each tile:
        copy the keys of tile i+1                       mask scores unless all rows see all keys
        copy the values of tile i                     compute the output rows, and store
        zero values of other sequences in tile i
        i == 0: copy the queries

A work tile is a block of query rows of one sequence and one KV head, with a range of its keys. A query row is one query
head of one token. Array rows are tokens of q, or of k and v.

Copies start at multiples of 8 array rows, while a sequence may start at any row. The first and last rows of a block of
queries, or of a tile of keys, may therefore belong to neighbouring sequences and hold any values, NaN included. The
output of queries of a neighbouring sequence is not stored. Keys of a neighbouring sequence are masked, and their values
are set to 0. Rows past the end of the arrays are copied as zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper import prefill as hopper
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.mosaic.prefill.pipeline import (
    BlockConsumer,
    BlockRows,
    FlashStatic,
    PackedLoader,
    Producer,
    Results,
    RowOptions,
    ScoreTransform,
    list_work,
    shared_heads,
)
from pallas_attn.mosaic.prefill.schedule import (
    FlashWorkTile,
    QueryBlock,
    SequenceLengths,
    align_down,
)
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.mosaic.primitives.tma import tma_load_rows, zero_rows_past_end
from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall

HEADS = ((192, 128), (128, 128), (64, 64), (256, 256))
"""Widths of keys and values, (Dk, Dv), that all Mosaic kernels support."""

SHARED_ROWS = ((512, 512),)
"""Widths for which two consumers share query rows, on Hopper only."""


class RaggedInputs(NamedTuple):
    """Operands of the kernel; arrays, or references to them.

    Attributes:
      q, k, v: [T, Hq, Dk], [U, Hkv, Dk], [U, Hkv, Dv], padded by `zero_rows_past_end`.
      blocks, counts: arrays of the `WorkList`.
      sinks: [Hq], or None.
    """

    q: Any
    k: Any
    v: Any
    blocks: Any
    counts: Any
    sinks: Any


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    basics.require_capability((9, 0))
    check_supported(call, (*HEADS, *SHARED_ROWS))
    settings = config.mosaic_config(config_key(call))
    return attend(call, hopper.flash_attention, settings, hopper.QUERIES, hopper.ROWS)


def config_key(call: RaggedAttentionCall) -> config.RaggedAttentionKey:
    """Return the properties of a call that determine the sizes of the kernel."""
    queries = call.num_tokens // call.num_sequences
    return config.RaggedAttentionKey(call.key_dim, call.value_dim, long=queries >= config.LONG)


def attend(
    call: RaggedAttentionCall,
    flash_attention: Callable[..., tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]],
    settings: FlashConfig,
    tile_rows: int,
    rows: RowLayout,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    """Prepare the operands, list the work tiles, and run the kernel of an architecture.

    Args:
      flash_attention: kernel of the architecture.
      settings: sizes of the kernel.
      tile_rows, rows: see `FlashStatic`.
    """
    (num_tokens, num_heads, key_dim), (num_keys, num_kv_heads, value_dim) = call.q.shape, call.v.shape
    static = FlashStatic(
        key_dim,
        value_dim,
        settings.tile_keys,
        settings.stages,
        settings.consumers,
        copies=1,
        score_scale=call.scale,
        tile_rows=tile_rows,
        rows=rows,
        soft_cap=call.soft_cap,
        block_heads=shared_heads(num_heads // num_kv_heads, tile_rows),
        column_parts=settings.column_parts,
    )
    loader = RaggedLoader(static, num_tokens, num_heads, call.causal, call.window)
    kv_bytes = num_keys * (key_dim + value_dim) * call.k.dtype.itemsize
    l2_head_group = config.l2_head_group(loader.num_heads, num_kv_heads, kv_bytes=kv_bytes)
    splits, work = list_work(loader, SequenceLengths(call.cu_q_lens, call.cu_kv_lens), num_keys, l2_head_group)
    q = zero_rows_past_end(call.q, tile_rows)
    k, v = (zero_rows_past_end(x, static.tile_keys) for x in (call.k, call.v))
    inputs = RaggedInputs(q, k, v, work.blocks, work.counts, call.sinks)
    shape = num_tokens, num_heads
    results = {"shape": shape, "out_dtype": call.output_dtype, "return_lse": call.return_lse}
    return flash_attention(loader, inputs, work, splits, sinks=call.sinks, **results)


def check_supported(
    call: RaggedAttentionCall, heads: Sequence[tuple[int, int]] = HEADS, no_wider: str | None = None
) -> None:
    """Raise NotImplementedError unless a Mosaic kernel of `ragged_attention` supports the call.

    Args:
      heads: supported widths of keys and values.
      no_wider: why there are no wider heads.
    """
    unsupported.require_dtypes(call.q.dtype, call.k.dtype)
    if (call.q.shape[2], call.v.shape[2]) not in heads:
        widths = ", ".join(f"{keys}/{values}" for keys, values in heads)
        got = f"{call.q.shape[2]}/{call.v.shape[2]}"
        reason = f": {no_wider}" if no_wider and max(call.q.shape[2], call.v.shape[2]) > max(map(max, heads)) else ""
        raise NotImplementedError(f"takes keys and values of width {widths}, got {got}{reason}")
    unsupported.require_soft_cap(call.soft_cap)


@dataclasses.dataclass(frozen=True)
class RaggedLoader(PackedLoader):
    """The `OperandLoader` of packed keys and values."""

    kernel_name = "ragged_attention"
    compiler_params = plgpu.CompilerParams(approx_math=True)

    def scratch_types(self, *, orders_tensor_core: bool = False) -> None:
        """Return None: this loader needs no scratch memory."""

    def tile(self, x: RaggedInputs, scratch: None, work: FlashWorkTile) -> RaggedTile:
        return RaggedTile.of(self, x, work)


class RaggedTile(NamedTuple):
    """The `OperandTile` of packed keys and values: one KV head of one sequence.

    Attributes:
      oldest_key: index in k of the first key that any row of the block sees.
      first_tile, kv_tiles: index of the first tile and number of tiles of this work tile. Tile 0 starts at the first
        key of the sequence, rounded down to a multiple of 8.
    """

    loader: RaggedLoader
    x: RaggedInputs
    work: FlashWorkTile
    oldest_key: Any
    first_tile: Any
    kv_tiles: Any

    @staticmethod
    def of(loader: RaggedLoader, x: RaggedInputs, work: FlashWorkTile) -> RaggedTile:
        block = work.block
        if loader.window is None:
            return RaggedTile(loader, x, work, block.first_key, *work.kv_range(block.kv_tiles))
        newest = jnp.maximum(block.start, block.first_row) + block.end_key - block.end_row  # of the first row
        oldest = jnp.maximum(newest + 1 - loader.window, block.first_key)
        hidden_tiles = lax.div(oldest - align_down(block.first_key), jnp.int32(loader.static.tile_keys))
        first_tile, kv_tiles = work.kv_range(block.kv_tiles - hidden_tiles)
        return RaggedTile(loader, x, work, oldest, hidden_tiles + first_tile, kv_tiles)

    @property
    def static(self) -> FlashStatic:
        return self.loader.static

    @property
    def block(self) -> QueryBlock:
        return self.work.block

    @property
    def rows(self) -> BlockRows:
        """Query rows of the block."""
        return self.loader.rows(self.work)

    def first_row(self, i: Any) -> Any:
        """Return the index in k of the first key of the i-th tile of this work tile."""
        return align_down(self.block.first_key) + (self.first_tile + i) * self.static.tile_keys

    # Producer

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        x, static, rings, block = self.x, self.static, producer.rings, self.block
        kv_head = lax.div(self.rows.first_head, x.q.shape[1] // x.k.shape[1])

        def keys(i: Any) -> None:
            copy = functools.partial(tma_load_rows, x.k, self.first_row(i), kv_head, end=block.end_key)
            producer.load_keys(kv_tile + i, copy)

        def values(i: Any) -> None:
            start = self.first_row(i)
            low = jnp.maximum(start, self.oldest_key)
            producer.load_values(
                kv_tile + i,
                functools.partial(tma_load_rows, x.v, start, kv_head, end=block.end_key),
                whole=(start == low) & (start + static.tile_keys <= block.end_key),
                live_mask=lambda token: (token >= low - start) & (token < block.end_key - start),
            )

        load_later_queries = producer.load_queries(again, lambda i, full: self.rows.copy(x.q, i, rings.q.at[i], full))

        has_one_stage = static.stages == 1

        def load(i: Any, _: None) -> None:
            if has_one_stage:  # first: consumers need these queries to empty the only slot of keys
                load_later_queries(i)
            pl.when(i + 1 < self.kv_tiles)(lambda: keys(i + 1))
            pl.when(i >= 0)(lambda: values(i))
            if not has_one_stage:
                load_later_queries(i)

        lax.fori_loop(-1, self.kv_tiles, load, None)

    # Consumer

    def attend(self, consumer: BlockConsumer, kv_tile: Any, result: Results) -> None:
        transform = ScoreTransform(functools.partial(self.limits, consumer.number))
        state = consumer.attend(kv_tile, self.kv_tiles, transform, self.rows.any_of(consumer.number))
        number = consumer.number + basics.opaque_zero()  # saves registers: `row` is computed after attention
        row = self.rows.output_row(self.rows.queries(number), number)
        consumer.store(result, row, state, RowOptions(self.rows.sinks(self.x.sinks, row), self.work.is_whole))

    def limits(self, number: Any, i: Any) -> tuple[Any, Callable[[], Limits]]:
        """Return the limits of the i-th tile for the query rows of consumer `number`. See `ScoreTransform`.

        The limits hide keys of neighbouring sequences, keys after a causal query, and keys older than the window.
        """
        static, causal, window, block = self.static, self.loader.causal, self.loader.window, self.block
        start, rows = self.first_row(i), self.rows
        first = rows.first_query(number)
        diagonal = block.end_key - block.end_row + 1  # a causal query sees the keys before query + diagonal
        low = jnp.maximum(start, block.first_key)
        end = jnp.minimum(block.end_key, first + diagonal) if causal else block.end_key

        def limits() -> Limits:
            in_window = rows.filled(low - start)
            if not causal:
                return Limits(in_window, rows.filled(end - start))
            # The queries are computed for each masked tile, which saves registers. Queries of the next sequence see
            # too many keys, but their output is not stored.
            high = rows.queries(number + basics.opaque_zero()) + (diagonal - start)
            if window is not None:
                in_window = jnp.maximum(in_window, high - window)
            return Limits(in_window, high)

        sees_all = (low == start) & (start + static.tile_keys <= end)
        if window is not None:
            sees_all &= first + static.tile_rows - 1 + diagonal - window <= start
        return sees_all, limits
