"""`ragged_attention` on Hopper; see `sm90.flash.kernel` for how a program works.

Copies begin at multiples of 8 rows, sequences anywhere: the first rows of a block of queries, or of a tile of keys, and
the last ones, may be those of neighbours, whatever they hold. Queries of neighbours are computed and not written, keys
are masked, values cleared.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.sm90 import tiles, wgmma
from pallas_attn.mosaic.sm90.flash import kernel
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT, QUERIES
from pallas_attn.mosaic.sm90.flash.kernel import ROWS, Consumer, Memory, Producer, Static, View
from pallas_attn.mosaic.sm90.flash.schedule import Lengths, Listing, list_blocks
from pallas_attn.mosaic.sm90.flash.split import Cuts
from pallas_attn.mosaic.sm90.flash.work import Block, Piece, Queue, Work, aligned, padded
from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall

HEADS = ((192, 128), (128, 128), (64, 64), (256, 256))
"""Widths of keys and values."""


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q, k, v: [T, Hq, Dk], [U, Hkv, Dk], [U, Hkv, Dv], with T and U padded to multiples of 8 and a block, or a tile.
      blocks, count: as they are `Listed`.
    """

    q: Any
    k: Any
    v: Any
    blocks: Any
    count: Any


class RaggedSizes(NamedTuple):
    """What a kernel is compiled for, beside `Static`."""

    causal: bool
    num_tokens: int
    together: int
    programs: int


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    q, k, v, causal, out_dtype = call.q, call.k, call.v, call.causal, call.output_dtype
    _refuse(q, k, v)
    (num_tokens, num_heads, key_dim), (num_keys, num_kv_heads, value_dim) = q.shape, v.shape
    if not num_tokens or not num_keys:
        return call.without_keys()
    queries = num_tokens // call.num_sequences
    settings = config.mosaic_config(config.MosaicKey(key_dim, value_dim, long=queries >= config.LONG))
    static = Static(
        key_dim, value_dim, settings.tile_keys, settings.stages, settings.consumers, copies=1, score_scale=call.scale
    )
    listing = Listing(num_tokens, static.queries, static.tile_keys, causal)
    lengths = Lengths(call.cu_q_lens, call.cu_kv_lens)
    cuts = Cuts.of(heads=num_heads, blocks=listing.num_blocks(lengths), limit=-(-num_keys // static.tile_keys))
    listed = list_blocks(listing, lengths, cuts)
    q = padded(q, QUERIES)
    k, v = (padded(x, static.tile_keys) for x in (k, v))
    together = config.heads_together(num_heads, num_kv_heads, kv_bytes=(k[:, 0].size + v[:, 0].size) * k.dtype.itemsize)
    pieces = listed.blocks.shape[0] * num_heads * cuts.most
    programs = min(pieces, basics.multiprocessors())
    taken = Queue.untouched(listed.zero, programs, pieces)
    rows = cuts.most * num_tokens * num_heads
    out, lse = plgpu.kernel(
        functools.partial(_kernel, static, RaggedSizes(causal, num_tokens, together, programs)),
        out_type=(
            jax.ShapeDtypeStruct((rows, value_dim), out_dtype if cuts.most == 1 else jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        scratch_types=(*Memory.types(static, q.dtype), *Queue.types(taken)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_attention",
    )(basics.materialize(Inputs(q, k, v, listed.blocks, listed.count)), taken)
    return cuts.merged(out, lse, listed.count, (num_tokens, num_heads), None, out_dtype)


def _refuse(q: Float[Array, "T Hq Dk"], k: Float[Array, "U Hkv Dk"], v: Float[Array, "U Hkv Dv"]) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(q, k)
    if (q.shape[2], v.shape[2]) not in HEADS:
        taken = ", ".join(f"{keys}/{values}" for keys, values in HEADS)
        raise NotImplementedError(f"takes keys and values of width {taken}, got {q.shape[2]}/{v.shape[2]}")


def _kernel(static: Static, call: RaggedSizes, x: Inputs, taken: Ref | None, out: Ref, lse: Ref, *scratch: Ref) -> None:
    *memory, told, landed = scratch
    warpgroup, mem, num_heads = lax.axis_index("warpgroup"), Memory(*memory), x.q.shape[1]

    def work() -> Work:
        queue = None if taken is None else Queue(call.programs, taken, told, landed)
        return Work.of(x.blocks, x.count, num_heads, call.together, queue)

    def produce() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        producer = Producer(static, mem)

        def copy(again: Any, tile: Any, piece: Piece) -> Any:
            return _copy_piece(producer, x, again, tile, piece)

        pieces, tiles = work().produce(copy)
        producer.drain(tiles, pieces > 0)

    def consume() -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        consumer = Consumer(static, mem, warpgroup, x.q.dtype)

        def attend(_: Any, tile: Any, piece: Piece) -> Any:
            rows = _Rows.of(static, call, x, piece, warpgroup)
            result = consumer.attend(tile, rows.tiles, View(rows.mask))
            kernel.write_rows(out, lse, rows.place(num_heads), result)
            return rows.tiles

        consumer.start_round()
        work().consume(attend)
        consumer.end_round()

    lax.cond(warpgroup < static.consumers, consume, produce)


class _Rows(NamedTuple):
    """64 rows of a consumer, which begin at `first`; its own are those of the block from `start` on.

    Attributes:
      newer: what makes of a row the first key that it does not see, if causal.
      first_tile, tiles: of the piece.
    """

    static: Static
    call: RaggedSizes
    num_keys: int
    piece: Piece
    start: Any
    first: Any
    newer: Any
    first_tile: Any
    tiles: Any

    @staticmethod
    def of(static: Static, call: RaggedSizes, x: Inputs, piece: Piece, number: Any) -> _Rows:
        block = piece.block
        start = block.start + number * QUERIES
        first = jnp.minimum(start, x.q.shape[0] - QUERIES)
        newer = block.end_key - block.end_row + 1
        return _Rows(static, call, x.k.shape[0], piece, start, first, newer, *piece.share(block.tiles))

    @property
    def block(self) -> Block:
        return self.piece.block

    @property
    def row(self) -> jax.Array:
        return self.first + tiles.token_iota(QUERIES)

    def mask(self, tile: Any, s: jax.Array) -> jax.Array:
        nominal = aligned(self.block.first_key) + (self.first_tile + tile) * self.static.tile_keys
        start = jnp.minimum(nominal, self.num_keys - self.static.tile_keys)
        low = jnp.maximum(nominal, self.block.first_key)
        end = jnp.minimum(self.block.end_key, self.first + self.newer) if self.call.causal else self.block.end_key

        def hide(s: jax.Array) -> jax.Array:
            # Causal rows of the next sequence see too much. They are not written.
            high = ROWS.filled((self.first + self.newer if self.call.causal else end) - start, QUERIES)
            high = high + tiles.token_iota(QUERIES) if self.call.causal else high
            return wgmma.hide(s, wgmma.Limits(ROWS.filled(low - start, QUERIES), high))

        sees_all = (low == start) & (start + self.static.tile_keys <= end)
        return lax.cond(sees_all, lambda s: s, hide, s)

    def place(self, num_heads: int) -> jax.Array:
        """Of each row in the output, or -1."""
        ours = (self.row >= jnp.maximum(self.start, self.block.first_row)) & (self.row < self.block.end_row)
        return jnp.where(ours, self.piece.output(self.row, self.call.num_tokens) * num_heads + self.piece.head, -1)


def _copy_piece(producer: Producer, x: Inputs, again: Any, tile: Any, piece: Piece) -> Any:
    """Copies what a piece needs: its queries, and its keys and values from number `tile` of the rings on; returns how
    many tiles these are.
    """
    static, mem, block, head = producer.static, producer.mem, piece.block, piece.head
    first_tile, tiles = piece.share(block.tiles)
    kv_head = lax.div(head, x.q.shape[1] // x.k.shape[1])
    start_key = aligned(block.first_key) + first_tile * static.tile_keys

    def rows(i: Any) -> Any:
        """Where the copies of the i-th tile begin."""
        return pl.multiple_of(jnp.minimum(start_key + i * static.tile_keys, x.k.shape[0] - static.tile_keys), ALIGNMENT)

    def keys(i: Any) -> None:
        source = x.k.at[pl.ds(rows(i), static.tile_keys), kv_head]
        producer.load_keys(tile + i, lambda slot, landed: plgpu.copy_gmem_to_smem(source, slot, landed))

    def values(i: Any) -> None:
        start = rows(i)
        low = jnp.maximum(start_key + i * static.tile_keys, block.first_key)
        source = x.v.at[pl.ds(start, static.tile_keys), kv_head]
        producer.load_values(
            tile + i,
            lambda slot, landed: plgpu.copy_gmem_to_smem(source, slot, landed),
            whole=(start == low) & (start + static.tile_keys <= block.end_key),
            alive=lambda token: (token >= low - start) & (token < block.end_key - start),
        )

    def queries() -> None:
        for i in range(static.consumers):
            start = jnp.minimum(block.start + i * QUERIES, x.q.shape[0] - QUERIES)
            source = x.q.at[pl.ds(pl.multiple_of(start, ALIGNMENT), QUERIES), head]
            plgpu.copy_gmem_to_smem(source, mem.q.at[i], mem.q_landed)

    later_queries = producer.load_queries(again, queries)

    def work(i: Any, _: None) -> None:
        pl.when(i + 1 < tiles)(lambda: keys(i + 1))
        pl.when(i >= 0)(lambda: values(i))
        later_queries(i)

    lax.fori_loop(-1, tiles, work, None)
    return tiles
