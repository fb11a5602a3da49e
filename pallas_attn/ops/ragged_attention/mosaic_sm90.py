"""`ragged_attention` on Hopper: a front end of the prefill kernel (`sm90.flash.kernel`) for packed keys and values.

Copies begin at multiples of 8 rows, sequences anywhere: the first and last rows of a block of queries, or of a tile of
keys, may belong to neighbouring sequences and hold anything. Queries of neighbours are computed but not written; keys
of neighbours are masked, and their values zeroed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90 import wgmma
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT, QUERIES
from pallas_attn.mosaic.sm90.flash.kernel import (
    ROWS,
    Consumer,
    FlashStatic,
    OutputRows,
    Producer,
    ScoreTransform,
    flash_attention,
    pad_rows,
    store_rows,
)
from pallas_attn.mosaic.sm90.flash.schedule import (
    Blocking,
    FlashWorkTile,
    QueryBlock,
    SequenceLengths,
    align_down,
    list_blocks,
)
from pallas_attn.mosaic.sm90.flash.split import KvSplits, RowState
from pallas_attn.mosaic.sm90.tiles import token_iota
from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall

HEADS = ((192, 128), (128, 128), (64, 64), (256, 256))
"""Widths of keys and values."""


class RaggedInputs(NamedTuple):
    """Operands of the kernel: arrays, or in the kernel references to them.

    Attributes:
      q, k, v: [T, Hq, Dk], [U, Hkv, Dk], [U, Hkv, Dv], with T and U padded to multiples of 8 and a block, or a tile.
      blocks, counts: of the `WorkList`.
      sinks: [Hq] or None.
    """

    q: Any
    k: Any
    v: Any
    blocks: Any
    counts: Any
    sinks: Any


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    _refuse(call)
    (num_tokens, num_heads, key_dim), (num_keys, num_kv_heads, value_dim) = call.q.shape, call.v.shape
    queries = num_tokens // call.num_sequences
    settings = config.mosaic_config(config.RaggedAttentionKey(key_dim, value_dim, long=queries >= config.LONG))
    static = FlashStatic(
        key_dim,
        value_dim,
        settings.tile_keys,
        settings.stages,
        settings.consumers,
        copies=1,
        score_scale=call.scale,
        soft_cap=call.soft_cap,
    )
    blocking = Blocking(num_tokens, static.block_rows, static.tile_keys, call.causal)
    lengths = SequenceLengths(call.cu_q_lens, call.cu_kv_lens)
    most_tiles = static.most_tiles(num_keys, call.window)
    splits = KvSplits.of(heads=num_heads, num_blocks=blocking.num_blocks(lengths), most_tiles=most_tiles)
    work = list_blocks(blocking, lengths, splits)
    q = pad_rows(call.q, QUERIES)
    k, v = (pad_rows(x, static.tile_keys) for x in (call.k, call.v))
    kv_bytes = (k[:, 0].size + v[:, 0].size) * k.dtype.itemsize
    l2_head_group = config.l2_head_group(num_heads, num_kv_heads, kv_bytes=kv_bytes)
    front = RaggedFrontEnd(static, num_tokens, num_heads, l2_head_group, call.causal, call.window)
    inputs = RaggedInputs(q, k, v, work.blocks, work.counts, call.sinks if splits.most == 1 else None)
    shape = num_tokens, num_heads
    return flash_attention(front, inputs, work, splits, shape=shape, sinks=call.sinks, out_dtype=call.output_dtype)


def _refuse(call: RaggedAttentionCall) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(call.q, call.k)
    if (call.q.shape[2], call.v.shape[2]) not in HEADS:
        widths = ", ".join(f"{keys}/{values}" for keys, values in HEADS)
        raise NotImplementedError(f"takes keys and values of width {widths}, got {call.q.shape[2]}/{call.v.shape[2]}")
    refusals.require_soft_cap(call.soft_cap)


@dataclasses.dataclass(frozen=True)
class RaggedFrontEnd:
    """The `FrontEnd` of packed keys and values."""

    static: FlashStatic
    num_tokens: int
    num_heads: int
    l2_head_group: int
    causal: bool
    window: int | None

    kernel_name = "ragged_attention"
    compiler_params = plgpu.CompilerParams(approx_math=True)

    def scratch_types(self) -> None:
        """There is none of its own."""

    def tile(self, x: RaggedInputs, scratch: None, work: FlashWorkTile) -> RaggedTile:
        return RaggedTile.of(self, x, work)


class RaggedTile(NamedTuple):
    """The `FrontTile` of packed keys and values.

    Attributes:
      oldest_key: first key of the sequence that some row of the block sees.
      first_tile, kv_tiles: its tiles of keys, counted from where copies of the sequence's first key begin.
    """

    front: RaggedFrontEnd
    x: RaggedInputs
    work: FlashWorkTile
    oldest_key: Any
    first_tile: Any
    kv_tiles: Any

    @staticmethod
    def of(front: RaggedFrontEnd, x: RaggedInputs, work: FlashWorkTile) -> RaggedTile:
        block = work.block
        if front.window is None:
            return RaggedTile(front, x, work, block.first_key, *work.kv_range(block.kv_tiles))
        newest = jnp.maximum(block.start, block.first_row) + block.end_key - block.end_row  # that the first row sees
        oldest = jnp.maximum(newest + 1 - front.window, block.first_key)
        hidden_tiles = lax.div(oldest - align_down(block.first_key), jnp.int32(front.static.tile_keys))
        first_tile, kv_tiles = work.kv_range(block.kv_tiles - hidden_tiles)
        return RaggedTile(front, x, work, oldest, hidden_tiles + first_tile, kv_tiles)

    @property
    def static(self) -> FlashStatic:
        return self.front.static

    @property
    def block(self) -> QueryBlock:
        return self.work.block

    # Producer

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        x, static, scratch, block = self.x, self.static, producer.scratch, self.block
        num_queries, num_keys = x.q.shape[0], x.k.shape[0]
        kv_head = lax.div(self.work.head, x.q.shape[1] // x.k.shape[1])
        start_key = align_down(block.first_key) + self.first_tile * static.tile_keys

        def rows(i: Any) -> Any:
            """First row that is copied of the i-th tile; less than its own if it reaches beyond the last key."""
            return pl.multiple_of(jnp.minimum(start_key + i * static.tile_keys, num_keys - static.tile_keys), ALIGNMENT)

        def keys(i: Any) -> None:
            source = x.k.at[pl.ds(rows(i), static.tile_keys), kv_head]
            producer.load_keys(kv_tile + i, lambda slot, landed: plgpu.copy_gmem_to_smem(source, slot, landed))

        def values(i: Any) -> None:
            start = rows(i)
            low = jnp.maximum(start_key + i * static.tile_keys, self.oldest_key)
            source = x.v.at[pl.ds(start, static.tile_keys), kv_head]
            producer.load_values(
                kv_tile + i,
                lambda slot, landed: plgpu.copy_gmem_to_smem(source, slot, landed),
                whole=(start == low) & (start + static.tile_keys <= block.end_key),
                live_mask=lambda token: (token >= low - start) & (token < block.end_key - start),
            )

        def queries() -> None:
            for i in range(static.consumers):
                start = jnp.minimum(block.start + i * QUERIES, num_queries - QUERIES)
                source = x.q.at[pl.ds(pl.multiple_of(start, ALIGNMENT), QUERIES), self.work.head]
                plgpu.copy_gmem_to_smem(source, scratch.q.at[i], scratch.q_landed)

        load_later_queries = producer.load_queries(again, queries)

        def load(i: Any, _: None) -> None:
            pl.when(i + 1 < self.kv_tiles)(lambda: keys(i + 1))
            pl.when(i >= 0)(lambda: values(i))
            load_later_queries(i)

        lax.fori_loop(-1, self.kv_tiles, load, None)

    # Consumer

    def attend(self, consumer: Consumer, kv_tile: Any, result: OutputRows | RowState) -> None:
        start = self.block.start + consumer.number * QUERIES
        first = jnp.minimum(start, self.x.q.shape[0] - QUERIES)  # rows before `start` are another consumer's
        diagonal = self.block.end_key - self.block.end_row + 1
        transform = ScoreTransform(functools.partial(self.mask, first, diagonal))
        state = consumer.attend(kv_tile, self.kv_tiles, transform)
        row = first + token_iota(QUERIES)
        ours = (row >= jnp.maximum(start, self.block.first_row)) & (row < self.block.end_row)
        num_heads = self.front.num_heads
        row = jnp.where(ours, self.work.output_row(row, self.front.num_tokens) * num_heads + self.work.head, -1)
        store_rows(result, row, state, self.sinks())

    def sinks(self) -> jax.Array | None:
        """[64]: learned logit of the head, for each row."""
        return None if self.x.sinks is None else ROWS.filled(self.x.sinks[self.work.head], QUERIES)

    def mask(self, first: Any, diagonal: Any, i: Any, s: jax.Array) -> jax.Array:
        """Masks keys of neighbouring sequences in the scores of the i-th tile, and keys that causal rows do not see,
        or that a window hides.

        Args:
          first: the first of 64 rows.
          diagonal: a causal row sees the keys before number row + diagonal.
        """
        tile_keys, causal, window = self.static.tile_keys, self.front.causal, self.front.window
        nominal = align_down(self.block.first_key) + (self.first_tile + i) * tile_keys
        start = jnp.minimum(nominal, self.x.k.shape[0] - tile_keys)
        low = jnp.maximum(nominal, self.block.first_key)
        end = jnp.minimum(self.block.end_key, first + diagonal) if causal else self.block.end_key

        def hide(s: jax.Array) -> jax.Array:
            # Causal rows of the next sequence see too much. They are not written.
            high = ROWS.filled((first + diagonal if causal else end) - start, QUERIES)
            high = high + token_iota(QUERIES) if causal else high
            in_window = ROWS.filled(low - start, QUERIES)
            if window is not None:
                oldest = ROWS.filled(first + diagonal - window - start, QUERIES) + token_iota(QUERIES)
                in_window = jnp.maximum(in_window, oldest)
            return wgmma.hide(s, wgmma.Limits(in_window, high))

        sees_all = (low == start) & (start + tile_keys <= end)
        if window is not None:
            sees_all &= first + QUERIES - 1 + diagonal - window <= start
        return lax.cond(sees_all, lambda s: s, hide, s)
