"""`ragged_attention` on Hopper; see `mosaic_flash` for how a program works.

Copies begin at multiples of 8 rows, sequences anywhere: the first rows of a block of queries, or of a tile of keys, and
the last ones, may be those of neighbours, whatever they hold. Queries of neighbours are computed and not written, keys
are masked, values cleared. Blocks are ordered so that those of the most keys of a few heads come first: the last ones
to run are short, and what runs at a time finds its keys and values in the L2 cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.common import mosaic, mosaic_flash, mosaic_limits, mosaic_wgmma
from pallas_attn.ops.common.mosaic import Ref
from pallas_attn.ops.common.mosaic_flash import (
    QUERIES,
    ROWS,
    Consumer,
    Memory,
    Producer,
    Static,
    View,
)
from pallas_attn.ops.common.mosaic_flash_parts import Parts, share
from pallas_attn.ops.common.mosaic_flash_work import ALIGNMENT, QueryBlocks, Queue, Work, aligned, padded
from pallas_attn.ops.ragged_attention import config

HEADS = ((192, 128), (128, 128), (64, 64), (256, 256))
"""Widths of keys and values."""


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q, k, v: [T, Hq, Dk], [U, Hkv, Dk], [U, Hkv, Dv], with T and U padded to multiples of 8 and a block, or a tile.
      blocks: int32 [n, 6 or 7], a `Block` each.
      count: int32 [1 or 2], how many of them there are, and parts of a block where keys are cut.
    """

    q: Any
    k: Any
    v: Any
    blocks: Any
    count: Any


class Block(NamedTuple):
    """Neighbouring queries of a sequence, and its keys.

    Attributes:
      start: row of the first one's place in the block, a multiple of 8.
      first_row, end_row: rows of the sequence's queries.
      first_key, end_key: rows of its keys.
      tiles: of keys that the block sees; at least 1.
      part: which one of its parts a piece of work is, where keys are cut.
      first_tile: the first of its tiles then, of which it has `tiles`.
    """

    start: Any
    first_row: Any
    end_row: Any
    first_key: Any
    end_key: Any
    tiles: Any
    part: Any = 0
    first_tile: Any = 0

    @staticmethod
    def of(x: Inputs, fields: list[Any]) -> Block:
        """In a kernel: what a piece of work is."""
        block = Block(*fields)
        if x.count.shape[0] == 1:
            return block
        first_tile, tiles = share(block.tiles, block.part, x.count[1])
        return block._replace(first_tile=first_tile, tiles=tiles)


class Call(NamedTuple):
    """What a kernel is compiled for, beside `Static`."""

    causal: bool
    num_tokens: int
    together: int
    programs: int


def ragged_attention(
    q: Float[Array, "T Hq Dk"],
    k: Float[Array, "U Hkv Dk"],
    v: Float[Array, "U Hkv Dv"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    cu_kv_lens: Int32[Array, "S_plus_1"],
    *,
    causal: bool,
    sm_scale: float,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    _refuse(q, k, v)
    (num_tokens, num_heads, key_dim), (num_keys, num_kv_heads, value_dim) = q.shape, v.shape
    if not num_tokens or not num_keys:
        out = jnp.zeros((num_tokens, num_heads, value_dim), out_dtype)
        return out, jnp.full(out.shape[:2], -jnp.inf, jnp.float32)
    settings = config.mosaic_config(config.MosaicKey(key_dim, value_dim))
    static = Static(
        key_dim, value_dim, settings.tile_keys, settings.stages, settings.consumers, copies=1, score_scale=sm_scale
    )
    blocks, count = _blocks(static, cu_q_lens, cu_kv_lens, num_tokens, causal=causal)
    parts = Parts.of(
        count,
        blocks[0, Block._fields.index("tiles")],
        heads=num_heads,
        blocks=(-(-num_tokens // static.queries), blocks.shape[0]),
        limit=-(-num_keys // static.tile_keys),
    )
    blocks, count = parts.pieces(blocks, count)
    q = padded(q, QUERIES)
    k, v = (padded(x, static.tile_keys) for x in (k, v))
    together = config.heads_together(num_heads, num_kv_heads, kv_bytes=(k[:, 0].size + v[:, 0].size) * k.dtype.itemsize)
    pieces = blocks.shape[0] * num_heads
    programs = min(pieces, mosaic.multiprocessors())
    taken = Queue.untouched(programs, pieces)
    rows = parts.most * num_tokens * num_heads
    out, lse = plgpu.kernel(
        functools.partial(_kernel, static, Call(causal, num_tokens, together, programs)),
        out_type=(
            jax.ShapeDtypeStruct((rows, value_dim), out_dtype if parts.most == 1 else jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        scratch_types=(*Memory.types(static, q.dtype), *Queue.types(taken)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_attention",
    )(mosaic.unsliced(Inputs(q, k, v, blocks, count)), taken)
    return parts.merged(out, lse, (num_tokens, num_heads), None, out_dtype)


def _refuse(q: Float[Array, "T Hq Dk"], k: Float[Array, "U Hkv Dk"], v: Float[Array, "U Hkv Dv"]) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    mosaic.require_hopper()
    mosaic_limits.require_dtypes(q, k)
    if (q.shape[2], v.shape[2]) not in HEADS:
        taken = ", ".join(f"{keys}/{values}" for keys, values in HEADS)
        raise NotImplementedError(f"takes keys and values of width {taken}, got {q.shape[2]}/{v.shape[2]}")


def _blocks(
    static: Static,
    cu_q_lens: Int32[Array, "S_plus_1"],
    cu_kv_lens: Int32[Array, "S_plus_1"],
    num_tokens: int,
    *,
    causal: bool,
) -> tuple[Int32[Array, "n 6"], Int32[Array, ""]]:
    """All blocks, those of the most keys first, and how many there are. What follows the last sequence sees no keys."""
    queries = QueryBlocks.of(cu_q_lens, num_tokens, static.queries)
    ends = jnp.concatenate([cu_kv_lens, cu_kv_lens[-1:]])
    first_key, end_key = ends[queries.sequence], ends[queries.sequence + 1]
    seen = end_key
    if causal:
        last_row = jnp.minimum(queries.start + static.queries, queries.end_row)
        seen = end_key - (queries.end_row - last_row)
    tiles = jnp.maximum(-(-(seen - first_key // ALIGNMENT * ALIGNMENT) // static.tile_keys), 1)
    order = jnp.argsort(jnp.where(queries.exists, -tiles, 1))
    fields = (queries.start, queries.first_row, queries.end_row, first_key, end_key, tiles)
    return jnp.stack(fields, axis=1)[order], jnp.sum(queries.exists, dtype=jnp.int32)


def _kernel(static: Static, call: Call, x: Inputs, taken: Ref | None, out: Ref, lse: Ref, *scratch: Ref) -> None:
    *memory, told, landed = scratch
    warpgroup, mem, num_heads = lax.axis_index("warpgroup"), Memory(*memory), x.q.shape[1]

    def work() -> Work:
        queue = None if taken is None else Queue(call.programs, taken, told, landed)
        return Work.of(x.blocks, x.count, num_heads, call.together, queue)

    def produce() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        producer = Producer(static, mem)

        def copy(again: Any, tile: Any, fields: list[Any], head: Any) -> Any:
            block = Block.of(x, fields)
            _copy_block(producer, x, again, tile, block, head)
            return block.tiles

        pieces, tiles = work().produce(copy)
        producer.drain(tiles, pieces > 0)

    def consume() -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        consumer = Consumer(static, mem, warpgroup, x.q.dtype)

        def attend(_: Any, tile: Any, fields: list[Any], head: Any) -> Any:
            block = Block.of(x, fields)
            rows = _Rows.of(static, call, x, block, warpgroup)
            result = consumer.attend(tile, block.tiles, View(rows.mask))
            mosaic_flash.write_rows(out, lse, rows.place(num_heads, head), result)
            return block.tiles

        consumer.start_round()
        work().consume(attend)
        consumer.end_round()

    lax.cond(warpgroup < static.consumers, consume, produce)


class _Rows(NamedTuple):
    """64 rows of a consumer, which begin at `first`; its own are those of the block from `start` on.

    Attributes:
      newer: what makes of a row the first key that it does not see, if causal.
    """

    static: Static
    call: Call
    num_keys: int
    block: Block
    start: Any
    first: Any
    newer: Any

    @staticmethod
    def of(static: Static, call: Call, x: Inputs, block: Block, number: Any) -> _Rows:
        start = block.start + number * QUERIES
        first = jnp.minimum(start, x.q.shape[0] - QUERIES)
        return _Rows(static, call, x.k.shape[0], block, start, first, block.end_key - block.end_row + 1)

    @property
    def row(self) -> jax.Array:
        return self.first + mosaic.token_iota(QUERIES)

    def mask(self, tile: Any, s: jax.Array) -> jax.Array:
        nominal = aligned(self.block.first_key) + (self.block.first_tile + tile) * self.static.tile_keys
        start = jnp.minimum(nominal, self.num_keys - self.static.tile_keys)
        low = jnp.maximum(nominal, self.block.first_key)
        end = jnp.minimum(self.block.end_key, self.first + self.newer) if self.call.causal else self.block.end_key

        def hide(s: jax.Array) -> jax.Array:
            # Causal rows of the next sequence see too much. They are not written.
            high = ROWS.filled((self.first + self.newer if self.call.causal else end) - start, QUERIES)
            high = high + mosaic.token_iota(QUERIES) if self.call.causal else high
            return mosaic_wgmma.hide(s, mosaic_wgmma.Limits(ROWS.filled(low - start, QUERIES), high))

        sees_all = (low == start) & (start + self.static.tile_keys <= end)
        return lax.cond(sees_all, lambda s: s, hide, s)

    def place(self, num_heads: int, head: Any) -> jax.Array:
        """Of each row in the output, or -1."""
        ours = (self.row >= jnp.maximum(self.start, self.block.first_row)) & (self.row < self.block.end_row)
        return jnp.where(ours, (self.block.part * self.call.num_tokens + self.row) * num_heads + head, -1)


def _copy_block(producer: Producer, x: Inputs, again: Any, tile: Any, block: Block, head: Any) -> None:
    """Copies what a block needs: its queries, and its keys and values from number `tile` of the rings on."""
    static, mem = producer.static, producer.mem
    kv_head = lax.div(head, x.q.shape[1] // x.k.shape[1])
    start_key = aligned(block.first_key) + block.first_tile * static.tile_keys

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

    def work(i: Any, _: None) -> None:
        pl.when(i + 1 < block.tiles)(lambda: keys(i + 1))
        pl.when(i >= 0)(lambda: values(i))

    mosaic_flash.wait_if(again, mem.q_free)
    for i in range(static.consumers):
        start = jnp.minimum(block.start + i * QUERIES, x.q.shape[0] - QUERIES)
        source = x.q.at[pl.ds(pl.multiple_of(start, ALIGNMENT), QUERIES), head]
        plgpu.copy_gmem_to_smem(source, mem.q.at[i], mem.q_landed)
    lax.fori_loop(-1, block.tiles, work, None)
