"""The work of `sm90.flash.kernel`: queries in blocks, and which of them a program does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import Array, Float, Int32

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT


class Block(NamedTuple):
    """Neighbouring rows of queries of a sequence, and its keys.

    Attributes:
      sequence: which one; of rows after the last one, that.
      start: row of the first one's place in the block, a multiple of 8.
      first_row, end_row: rows of the sequence.
      first_key, end_key: its keys; none of rows after the last sequence.
      tiles: of keys that the block sees at most, from the row on that copies of `first_key` begin at; at least 1.
    """

    sequence: Any
    start: Any
    first_row: Any
    end_row: Any
    first_key: Any
    end_key: Any
    tiles: Any


class Piece(NamedTuple):
    """Of work: a block of a head, or one of the parts that its keys are cut into.

    Attributes:
      part, parts: which one, of how many; None if keys are not cut.
    """

    block: Block
    head: Any
    part: Any = None
    parts: Any = None

    def share(self, tiles: Any) -> tuple[Any, Any]:
        """The first of so many tiles of the block that is the piece's, and how many are, at least 1: that after the
        last, of which nothing is seen, where there are too few.
        """
        if self.parts is None:
            return 0, tiles
        first, end = (lax.div(tiles * part, self.parts) for part in (self.part, self.part + 1))
        return jnp.where(first < end, first, tiles), jnp.maximum(end - first, 1)

    def output(self, row: Any, rows: int) -> Any:
        """Where a row of an output of so many is written to: parts leave outputs one after the other."""
        return row if self.part is None else self.part * rows + row


class Work(NamedTuple):
    """What a program does: blocks of queries of a head, one after the other. Blocks of `together` heads alternate.

    Attributes:
      blocks: int32 [n, fields of a `Block`] in global memory.
      count: how many of them there are.
      parts: of each block, where keys may be cut; else None.
      num_heads: that they are done for.
      queue: where numbers of pieces come from; None if a program does that of its own number.
    """

    blocks: Ref
    count: Any
    parts: Any
    num_heads: int
    together: int
    queue: Queue | None

    @staticmethod
    def of(blocks: Ref, count: Ref, num_heads: int, together: int, queue: Queue | None) -> Work:
        return Work(blocks, count[0], count[1] if count.shape[0] > 1 else None, num_heads, together, queue)

    def produce(self, work: Callable[[Any, Any, Piece], Any]) -> tuple[Any, Any]:
        """Calls work(whether it is not the first, number of its first tile, piece), which returns how many tiles it
        took, for each piece; takes them from the queue.

        Returns:
          how many pieces there were, and how many tiles.
        """
        return self._each(work, Queue.draw)

    def consume(self, work: Callable[[Any, Any, Piece], Any]) -> None:
        """The same in other warpgroups, for the pieces that the producer has taken."""
        self._each(work, Queue.hear)

    def _each(self, work: Callable[..., Any], number_of: Callable[[Queue, Any, Any], Any]) -> tuple[Any, Any]:
        queue, of_head = self.queue, self.count if self.parts is None else self.count * self.parts
        pieces = of_head * self.num_heads

        def do(number: Any, again: Any, tile: Any) -> Any:
            some_heads, rest = divided(number, of_head * self.together)
            place, head = divided(rest, self.together)
            place, part = (place, None) if self.parts is None else divided(place, self.parts)
            block = Block(*(self.blocks[place, field] for field in range(self.blocks.shape[1])))
            return work(again, tile, Piece(block, some_heads * self.together + head, part, self.parts))

        def number(i: Any, before: Any) -> Any:
            """Of the program's i-th piece, which comes after that of number `before`, if there is one."""
            if queue is not None:
                return number_of(queue, i, before)
            return lax.axis_index("program") if before is None else pieces

        def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            i, piece, tile = state
            tile += do(piece, i > 0, tile)
            return i + 1, number(i + 1, piece), tile

        first = (jnp.int32(0), number(jnp.int32(0), None), jnp.int32(0))
        i, _, tiles = lax.while_loop(lambda state: state[1] < pieces, step, first)
        return i, tiles


class Queue(NamedTuple):
    """Hands out pieces, the largest first, to programs as they are through with others.

    A program begins with the piece of its own number. Its producer takes the next one when the last copies for the one
    before are under way, so that nobody waits for it, and tells its consumers. There are two places for what is told:
    one is overwritten when the queries of the piece after it have been copied, which was no sooner than all consumers
    had begun with it.

    Attributes:
      programs: that take pieces.
      taken: int32 [1] in global memory, 0 to begin with: pieces taken after the first ones.
      told: int32 [2, 1] in shared memory.
      landed: a barrier for each of the two.
    """

    programs: int
    taken: Ref
    told: Ref
    landed: Ref

    @staticmethod
    def untouched(zero: Int32[Array, "1"], programs: int, pieces: int) -> Ref | None:
        """`taken` for so many programs, or None if no piece is left after the first ones; `zero` as it is listed."""
        return basics.alias_in_place(zero) if programs < pieces else None

    @staticmethod
    def types(taken: Ref | None) -> tuple[Any, Any]:
        """Of `told` and `landed`."""
        return (None, None) if taken is None else (plgpu.SMEM((2, 1), jnp.int32), plgpu.Barrier(num_barriers=2))

    def draw(self, i: Any, before: Any) -> Any:
        """Number of a producer's i-th piece, after that of number `before`; beyond the last if none is left."""
        place = i & 1
        if before is None:
            self.told[place, 0] = lax.axis_index("program")
        elif interpreted():
            self.told[place, 0] = before + self.programs
        else:
            self._take(place)
        plgpu.barrier_arrive(self.landed.at[place])
        return self.hear(i, before)

    def _take(self, place: Any) -> None:
        programs = self.programs

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def take(_: Any, taken: ir.Value, told: ir.Value) -> None:
            with mgpu.utils.single_thread(mgpu.utils.ThreadSubset.WARPGROUP):
                one = mgpu.c(1, ir.IntegerType.get_signless(32))
                ordering, add = llvm.AtomicOrdering.monotonic, llvm.AtomicBinOp.add
                number = llvm.atomicrmw(add, mgpu.utils.memref_ptr(taken), one, ordering, syncscope="device")
                first: Any = mgpu.c(0, ir.IndexType.get())
                memref.store(arith.addi(number, mgpu.c(programs, one.type)), told, [first])

        take(self.taken, self.told.at[place])

    def hear(self, i: Any, _: Any) -> Any:
        """Number of a consumer's i-th piece."""
        place = i & 1
        plgpu.barrier_wait(self.landed.at[place])
        return self.told[place, 0]


def divided(x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative."""
    return lax.div(x, y), lax.rem(x, y)


def aligned(row: Any) -> Any:
    """The row at or before this one that copies may begin at."""
    return pl.multiple_of(lax.div(row, ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def padded(x: Float[Array, "n H D"], least: int) -> Float[Array, "m H D"]:
    """Rows that copies of so many fit in."""
    more = max(-(-x.shape[0] // ALIGNMENT) * ALIGNMENT, least) - x.shape[0]
    return jnp.pad(x, ((0, more), (0, 0), (0, 0))) if more else x
