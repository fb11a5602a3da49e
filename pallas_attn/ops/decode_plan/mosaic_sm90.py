"""`plan_decode` on Hopper: one program, one warpgroup, so that a step pays for one short kernel.

Rows are taken a chunk at a time, a few of them by each thread. Prefix sums of their costs stay in shared memory, where
every place among the rows is then found by bisection:

    rows      walk, cost       -> ends: where each row ends          (prefix sums)
    total     -> share
    programs  whole rows       -> are_cut; or, if there are programs for all rows,
    rows      parts            -> are_cut, piece_ends                (prefix sums)
    rows      pieces, next row -> piece_ends                         (prefix sums)
    programs  start            -> row, page, piece

Nothing waits but the threads of the warpgroup for each other.
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
from jaxtyping import Array, Int32

from pallas_attn.ops.common import mosaic
from pallas_attn.ops.common.mosaic import Ref
from pallas_attn.ops.common.mosaic_rows import THREADS, RowLayout
from pallas_attn.ops.common.sharing import Sharing
from pallas_attn.ops.common.visibility import page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

LANES = RowLayout(threads=1, vector=1)
"""Numbers by thread: the i-th of a chunk is thread i % 128's."""

MAX_CHUNK = 8 * THREADS
"""Rows or programs at a time: more would be more registers, fewer more rounds."""

MAX_ROWS = 24 * 1024
"""What fits shared memory, twice."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for, beside shapes."""

    sharing: Sharing
    window: int
    num_kv_heads: int
    page_size: int
    rows: int
    programs: int

    @property
    def for_each_row(self) -> bool:
        """Whether there are programs for all rows, so that rows might have some to themselves."""
        return not self.sharing.piece_pages and self.rows <= self.programs


class Inputs(NamedTuple):
    """As `plan_decode` takes them."""

    kv_lens: Any
    q_lens: Any
    window: HeadWindow | None


class Outputs(NamedTuple):
    """The arrays of a `DecodePlan`."""

    sink_pages: Any
    first_page: Any
    num_pages: Any
    next_row: Any
    piece_offsets: Any
    program_row: Any
    program_page: Any
    program_piece: Any

    @staticmethod
    def types(static: Static) -> Outputs:
        rows, rows_plus_1, programs_plus_1 = (
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (static.rows, static.rows + 1, static.programs + 1)
        )
        programs = (programs_plus_1, programs_plus_1, programs_plus_1)
        return Outputs(rows, rows, rows, rows, rows_plus_1, *programs)


class Memory(NamedTuple):
    """Shared memory, all int32.

    Attributes:
      ends, piece_ends: prefix sums of costs and of pieces, up to and with each row; rows past the last add nothing.
      sums: [2, chunk], of a scan on its way.
      are_cut: [1], 1 if rows are.
    """

    ends: Any
    piece_ends: Any
    sums: Any
    are_cut: Any


def plan_decode(
    kv_lens: Int32[Array, "B"],
    q_lens: Int32[Array, "B"] | None,
    window: int | HeadWindow | None,
    sharing: Sharing,
    *,
    num_kv_heads: int,
    page_size: int,
    num_programs: int,
) -> DecodePlan:
    mosaic.require_hopper()
    rows = kv_lens.shape[0] * num_kv_heads
    if rows > MAX_ROWS:
        raise NotImplementedError(f"takes at most {MAX_ROWS} rows (sequences x KV heads), got {rows}")
    static = Static(
        sharing=sharing,
        window=window if isinstance(window, int) else FULL,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        rows=rows,
        programs=num_programs,
    )
    padded = pl.cdiv(rows, _chunk(rows)) * _chunk(rows)
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(Outputs.types(static),),
        scratch_types=[
            plgpu.SMEM((padded,), jnp.int32),
            plgpu.SMEM((padded,), jnp.int32),
            plgpu.SMEM((2 * _chunk(rows),), jnp.int32),
            plgpu.SMEM((1,), jnp.int32),
        ],
        kernel_name="plan_decode",
    )(mosaic.unsliced(Inputs(kv_lens, q_lens, window if isinstance(window, HeadWindow) else None)))
    return DecodePlan(**outputs._asdict(), page_size=page_size, piece_pages=sharing.piece_pages)


def _chunk(count: int) -> int:
    """How many of so many are taken at a time."""
    return min(MAX_CHUNK, pl.cdiv(count, THREADS) * THREADS)


def _each_chunk(count: int, body: Any, carry: Any) -> Any:
    """body(first, carry) -> carry for each chunk of 0, 1, ... and at least `count` - 1, of which `first` begins one."""
    chunk = _chunk(count)

    def step(i: Any, carry: Any) -> Any:
        return body(i * chunk, carry)

    return lax.fori_loop(0, pl.cdiv(count, chunk), step, carry)


def _kernel(static: Static, x: Inputs, plan: Outputs, *memory: Ref) -> None:
    mem, sharing = Memory(*memory), static.sharing

    def lay_out(first: Any, before: Any) -> Any:
        row = LANES.iota(_chunk(static.rows)) + first
        walk = _walk(static, x, row)
        for ref, values in zip((plan.sink_pages, plan.first_page, plan.num_pages), walk, strict=True):
            _write(ref, row, static.rows, values)
        cost = jnp.where(row < static.rows, sharing.cost(walk.num_pages), 0)
        return _append(mem.ends, first, cost, mem.sums, before)

    total = _each_chunk(static.rows, lay_out, jnp.int32(0))
    share = sharing.share(total, static.programs)
    each = sharing.rows_each(mem.ends[0], share, static.rows)
    if static.for_each_row:
        _compare_parts(static, mem, share)
    else:
        _compare_rows(static, mem, each, share)

    def cut(first: Any, before: Any) -> Any:
        row = LANES.iota(_chunk(static.rows)) + first
        end, begin = LANES.take(mem.ends, row), _before(mem.ends, row)
        pages = _pages(static, mem, row)
        uncut = sharing.parts(pages, share) if static.for_each_row else jnp.minimum(pages, 1)
        pieces = jnp.where(_are_cut(mem, row), sharing.pieces(begin, end, share), uncut)
        _write(plan.next_row, row, static.rows, _find(static, mem.ends, end))
        after = _append(mem.piece_ends, first, pieces, mem.sums, before)
        _write(plan.piece_offsets, row, static.rows, _before(mem.piece_ends, row))
        return after

    num_pieces = _each_chunk(static.rows, cut, jnp.int32(0))
    plan.piece_offsets[static.rows] = num_pieces

    def start(first: Any, _: None) -> None:
        program = LANES.iota(_chunk(static.programs + 1)) + first
        are_cut = _are_cut(mem, program)
        place = jnp.minimum(sharing.start(program, share, total), total)
        if not static.for_each_row:
            place = jnp.where(are_cut, place, _whole(static, mem, program, each))
        row = _find(static, mem.ends, place)
        begin = _before(mem.ends, row)
        into = place - begin
        page, piece = sharing.page(into), sharing.piece(program, begin, into, _before(mem.piece_ends, row), share)
        if static.for_each_row:
            own = _find(static, mem.piece_ends, program)
            pages, before = _pages(static, mem, own), _before(mem.piece_ends, own)
            part = sharing.part(pages, jnp.maximum(sharing.parts(pages, share), 1))
            row = jnp.where(are_cut, row, own)
            page = jnp.where(are_cut, page, jnp.where(own < static.rows, (program - before) * part, 0))
            piece = jnp.where(are_cut, piece, jnp.minimum(program, num_pieces))
        _write(plan.program_row, program, static.programs + 1, row)
        _write(plan.program_page, program, static.programs + 1, page)
        _write(plan.program_piece, program, static.programs + 1, piece)

    _each_chunk(static.programs + 1, start, None)


def _walk(static: Static, x: Inputs, row: Any) -> Any:
    """Pages of rows; anything for those past the last."""
    row = jnp.minimum(row, static.rows - 1)
    batch, head = row // static.num_kv_heads, row % static.num_kv_heads
    kv_len = LANES.take(x.kv_lens, batch)
    q_len = jnp.full_like(kv_len, 1) if x.q_lens is None else LANES.take(x.q_lens, batch)
    if x.window is None:
        window, sink_tokens = jnp.full_like(kv_len, static.window), jnp.zeros_like(kv_len)
    else:
        window, sink_tokens = LANES.take(x.window.window, head), LANES.take(x.window.sink_tokens, head)
    end = jnp.where(q_len > 0, kv_len, 0)
    return page_walk(jnp.maximum(kv_len - q_len, 0), end, window, sink_tokens, page_size=static.page_size)


def _whole(static: Static, mem: Memory, program: Any, each: Any) -> Any:
    """Where programs start if each takes so many rows."""
    return _before(mem.ends, static.sharing.first_row(program, each, static.programs, static.rows))


def _pages(static: Static, mem: Memory, row: Any) -> Any:
    """Of rows, by what they cost where that is their pages and a constant; 0 for those past the last."""
    last = jnp.minimum(row, static.rows - 1)
    cost = LANES.take(mem.ends, last) - _before(mem.ends, last)
    return jnp.where(row < static.rows, jnp.maximum(cost - static.sharing.overhead, 0), 0)


def _compare_rows(static: Static, mem: Memory, each: Any, share: Any) -> None:
    """Notes whether so many rows for each program would be too uneven."""
    mem.are_cut[0] = 1 if static.sharing.piece_pages else 0
    plgpu.commit_smem()

    def note(first: Any, _: None) -> None:
        program = jnp.minimum(LANES.iota(_chunk(static.programs)) + first, static.programs - 1)
        begin, end = (_whole(static, mem, program + i, each) for i in range(2))
        _note(mem, static.sharing.is_uneven(end - begin, share))

    _each_chunk(static.programs, note, None)
    plgpu.commit_smem()


def _compare_parts(static: Static, mem: Memory, share: Any) -> None:
    """Notes whether programs for each row would be too uneven, or too many."""
    sharing = static.sharing
    mem.are_cut[0] = 0
    plgpu.commit_smem()

    def note(first: Any, before: Any) -> Any:
        pages = _pages(static, mem, LANES.iota(_chunk(static.rows)) + first)
        parts = sharing.parts(pages, share)
        _note(mem, sharing.is_uneven(sharing.part(pages, jnp.maximum(parts, 1)), share))
        return _append(mem.piece_ends, first, parts, mem.sums, before)

    needed = _each_chunk(static.rows, note, jnp.int32(0))
    _note(mem, LANES.filled(needed, THREADS) > static.programs)
    plgpu.commit_smem()


def _note(mem: Memory, are_worse: Any) -> None:
    """That rows are cut at equal distances, if any of these is true."""
    LANES.put(mem.are_cut, jnp.where(are_worse, 0, -1), LANES.filled(jnp.int32(1), are_worse.shape[0]))  # all the same


def _are_cut(mem: Memory, like: Any) -> Any:
    """Whether rows are cut, for each of so many."""
    return LANES.filled(mem.are_cut[0], like.shape[0]) == 1


def _append(sums: Ref, first: Any, values: Any, scratch: Ref, before: Any) -> Any:
    """Writes prefix sums of a chunk to `sums` from `first` on, on top of the sum `before`; returns the last one.

    In every round each number takes in the one twice as far back as in the round before (Hillis and Steele, 1986).
    """
    chunk = values.shape[0]
    within = LANES.iota(chunk)
    far, half = 1, 0
    while far < chunk:
        written = scratch.at[pl.ds(half, chunk)]
        written[...] = values
        plgpu.commit_smem()
        values += jnp.where(within >= far, LANES.take(written, jnp.maximum(within - far, 0)), 0)
        far, half = 2 * far, chunk - half  # who is still reading this half is done before it is written again
    values += before
    sums[pl.ds(first, chunk)] = values
    plgpu.commit_smem()
    return sums[first + (chunk - 1)]


def _before(sums: Ref, i: Any) -> Any:
    """The sum of all that come before number i."""
    return jnp.where(i > 0, LANES.take(sums, jnp.maximum(i - 1, 0)), 0)


def _find(static: Static, ends: Ref, place: Any) -> Any:
    """The row that covers each place, by where rows end; the number of rows past the end."""
    found, step = LANES.filled(jnp.int32(0), place.shape[0]), pl.next_power_of_2(static.rows)
    while step:
        last = found + (step - 1)
        passed = (last < static.rows) & (LANES.take(ends, jnp.minimum(last, static.rows - 1)) <= place)
        found, step = jnp.where(passed, found + step, found), step // 2
    return found


def _write(ref: Ref, number: Any, count: int, values: Any) -> None:
    """ref[number[i]] = values[i] for numbers below `count`."""
    LANES.put(ref, jnp.where(number < count, number, -1), values)
