"""Sets of TMA copies to shared memory with one arrival at a barrier for the whole set.

`plgpu.copy_gmem_to_smem` synchronizes all threads of a warpgroup and arrives at the barrier once per copy, which takes
140 ns on an H100. A tile of 128 keys in pages of 16 tokens has 16 copies (K and V). With the functions of this module,
each thread arrives once for the whole set of copies, and announces 1/128 of the bytes of the set. The four warps of the
warpgroup start the copies: one thread of each warp starts every fourth copy. Each lane of a warp looks up one page.

Rows past the end of an array are copied as zeros, so arrays need no padding. If the shape of the TMA descriptor has an
axis of rows, TMA clips copies to the exact number of rows. Tiles in shared memory consist of groups of 8 rows. To copy
a whole tile at once, the descriptor must have an axis of groups, and TMA clips copies to complete groups. A tile with
rows of an incomplete last group is therefore copied group by group, with rows. A tile in which a sequence ends is also
copied group by group: groups without a row of the sequence are not copied.

In interpret mode every copy arrives separately (`arrivals`), and arrays are padded (`zero_rows_past_end`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering  # no public API returns a barrier's address
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import i32
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES
from pallas_attn.mosaic.primitives.row_io import THREADS, RowLayout

GROUP = 8
"""Number of rows of a group, after which the swizzle pattern of shared memory repeats."""

WARP, WARPS = 32, 4
"""Number of threads of a warp, and number of warps of a warpgroup."""

LANES = RowLayout(threads=1, vector=1)
"""Register layout of arrays [128] with one number per thread of a warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())

BARRIER_BYTES = 8

LEAST_CUT = 32
"""Minimum number of rows copied per page for which unneeded groups of 8 rows are skipped. For fewer rows, starting one
copy per group takes longer than copying the unneeded bytes.
"""


def arrivals(copies: int) -> int:
    """Return the number of arrivals that a barrier must expect for a set of `copies` copies."""
    return copies if interpreted() else 1


def zero_rows_past_end(x: Float[Array, "n H D"], most: int) -> Float[Array, "m H D"]:
    """Pad an array for `tma_load_rows` and `tma_load_row_groups` with tiles of up to `most` rows.

    In interpret mode, append rows of zeros, from which rows past the end are copied. In compiled kernels, only ensure
    that x has at least the 8 rows of a group.
    """
    rows = x.shape[0]
    padded = -(-rows // GROUP) * GROUP + most if interpreted() else max(rows, GROUP)
    return x if padded == rows else jnp.pad(x, ((0, padded - rows), (0, 0), (0, 0)))


# --- pages


def lane_iota() -> jax.Array:
    """Return the lane of each thread in its warp, int32 [128] with layout `LANES`.

    The lane is the index of the page that the thread looks up.
    """
    return LANES.iota(THREADS) & (WARP - 1)


def present_pages(row: jax.Array) -> jax.Array:
    """Return the bit mask of the lanes whose pool row is not negative, int32. These are the present pages.

    Args:
      row: int32 [128] in layout `LANES`, with equal values in all warps.
    """
    if interpreted():
        return jnp.where(row[:WARP] >= 0, jnp.int32(1) << jnp.arange(WARP, dtype=jnp.int32), 0).sum(dtype=jnp.int32)

    @plgpu.inline_mgpu(arg_types=(LANES.per_row,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def vote(_: Any, row: Any) -> Any:
        return mgpu.FragmentedArray.splat(_present(_own(row)), (), is_signed=True)

    return vote(row)


class PagesOfHead(NamedTuple):
    """Keys or values in global memory, as a source of `tma_load_pages`.

    Attributes:
      pages: [N, rows of a page, columns], one KV head per page. With `head`, [rows, Hkv, columns], where the rows of a
        page are consecutive.
      head: KV head, or None.
      first_column: first column that is copied, a multiple of 128 bytes.
    """

    pages: Ref
    head: Any = None
    first_column: int = 0

    def rows(self, page: Any, first: Any, count: int, columns: int) -> Ref:
        """Return `count` rows of a page from row `first` on, in interpret mode. `page` is as in `tma_load_pages`."""
        some = pl.ds(self.first_column, columns)
        if self.head is None:
            return self.pages.at[page, pl.ds(first, count), some]
        return self.pages.at[pl.ds(page + first, count), self.head, some]


def tma_load_pages(
    pool: PagesOfHead,
    row: jax.Array,
    first: Any,
    tile: Ref,
    barrier: Ref,
    pages: int,
    needed: Any = None,
    lane: int | None = None,
) -> None:
    """Start TMA copies of pages, or of a part of each page, to consecutive rows of a tile in shared memory.

    Args:
      pool: the source.
      row: int32 [128] in layout `LANES`, with equal values in all warps. Lane i < `pages` has the index in `pool.pages`
        of page i of the tile, with `pool.head` the index of the first row of the page; or a negative number if the page
        is absent; other lanes have negative numbers. The rows of an absent page in the tile stay unchanged.
      first: first row that is copied of each page, a multiple of 8.
      tile: `register_tiles.operand` [pages · rows copied per page, columns].
      barrier: barrier that expects `arrivals(pages)` arrivals for these copies.
      needed: number of rows of the tile that are needed, from its first row on; None if all rows are needed. Groups of
        8 rows after the needed rows may be skipped, and their part of the tile then stays unchanged. Pages without a
        needed row must be absent.
      lane: if given, page i is in lane `lane` + i, other lanes have any numbers, and `needed` must be None.
    """
    _require_arrivals(barrier, pages)
    rows = tile.shape[0] // pages
    if interpreted():
        for i in range(pages):
            page = row[i + (lane or 0)]
            source = pool.rows(jnp.maximum(page, 0), first, rows, tile.shape[1])
            target = tile.at[pl.ds(i * rows, rows)]
            pl.when(page >= 0)(lambda a=source, b=target: plgpu.copy_gmem_to_smem(a, b, barrier))
            pl.when(page < 0)(lambda: plgpu.barrier_arrive(barrier))
        return

    groups = rows // GROUP
    columns, tokens_first = tile.shape[1], pool.head is not None
    is_cut = needed is not None and rows >= LEAST_CUT
    last, left = _last_page(needed, pages, groups) if is_cut else (jnp.int32(pages), jnp.int32(0))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES.per_row, *[SCALAR] * 4, _tile_ref(tile), SCALAR))
    def start(
        ctx: Any, source: ir.Value, row: Any, head: Any, first: Any, last: Any, left: Any, tile: ir.Value, address: Any
    ) -> None:
        own, share = _own(row), GROUP * columns * _item_bytes(source) // THREADS
        head, first, last, left = (x.registers.item() for x in (head, first, last, left))
        present: Any = _present(own)
        if lane is not None:
            present = arith.andi(arith.shrui(present, _number(lane)), _number((1 << pages) - 1))
        announced = arith.muli(llvm.intr_ctpop(present), _number(groups))
        has_last = arith.andi(arith.shrui(present, last), _number(1)) if is_cut else None
        if has_last is not None:
            announced = arith.subi(announced, arith.muli(has_last, arith.subi(_number(groups), left)))
        copies = _Copies.announced(ctx, address, arith.muli(announced, _number(share)))

        def copy(number: ir.Value, begin: ir.Value, count: int, group: ir.Value, condition: ir.Value) -> None:
            some = mgpu.ds(pool.first_column, columns)
            index = _index(number), mgpu.ds(_index(begin), count * GROUP), some
            if tokens_first:
                index = mgpu.ds(_index(arith.addi(number, begin)), count * GROUP), _index(head), some
            to = mgpu.utils.memref_slice(tile, (mgpu.ds(_index(group), count),))
            copies.start(source, index, to, (_whole_groups(source),), condition)

        for page in copies.shared_by_warps(pages):
            number = _of_lane(own, arith.addi(page, _number(lane)) if lane else page)
            is_whole = arith.cmpi(arith.CmpIPredicate.sge, number, _number(0))
            if is_cut:
                is_whole = arith.andi(is_whole, arith.cmpi(arith.CmpIPredicate.ne, page, last))
            copy(number, first, groups, arith.muli(page, _number(groups)), is_whole)
        if has_last is None:
            return
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, has_last, _number(0))):
            number, first_group = _of_lane(own, last), arith.muli(last, _number(groups))
            for group in copies.shared_by_warps(groups):
                is_needed = arith.cmpi(arith.CmpIPredicate.ult, group, left)
                begin = arith.addi(first, arith.muli(group, _number(GROUP)))
                copy(number, begin, 1, arith.addi(first_group, group), is_needed)

    head, first = (jnp.asarray(x, jnp.int32) for x in (pool.head if tokens_first else 0, first))
    start(pool.pages, row, head, first, last, left, tile, _address(barrier))


def _last_page(needed: Any, pages: int, groups: int) -> tuple[Any, Any]:
    """Find the first page of a tile that is not completely needed.

    Returns:
      The index of the page, and the number of its groups of 8 rows that are needed. If the number is 0, the page is
      absent or past the last page of the tile.
    """
    all_needed = jnp.clip(lax.div(needed + (GROUP - 1), GROUP), 0, pages * groups)
    last = lax.div(all_needed, groups)
    return last, all_needed - last * groups


# --- rows of packed sequences


def tma_load_rows(source: Ref, first: Any, head: Any, tile: Ref, barrier: Ref, end: Any = None) -> None:
    """Start TMA copies of consecutive rows of a head to a tile in shared memory.

    Rows past the end of the array are copied as zeros.

    Args:
      source: [T, H, D] in global memory, result of `zero_rows_past_end`. A row is an index along T.
      first: the first row, a multiple of 8.
      head: the head.
      tile: `register_tiles.operand` [n, D].
      barrier: barrier that expects one arrival for these copies.
      end: one past the last needed row; None if all rows are needed. Groups of 8 rows that begin at `end` or later may
        be skipped, and their part of the tile then stays unchanged.
    """
    count, rows = tile.shape[0], source.shape[0]
    if interpreted():
        plgpu.copy_gmem_to_smem(source.at[pl.ds(_in_padding(first, rows, count), count), head], tile, barrier)
        return

    groups = count // GROUP
    needed = jnp.int32(groups) if end is None else jnp.clip(lax.div(end - first + (GROUP - 1), GROUP), 0, groups)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, _tile_ref(tile), SCALAR))
    def start(ctx: Any, source: ir.Value, first: Any, head: Any, needed: Any, tile: ir.Value, address: Any) -> None:
        # A kernel mapped over a batch copies all groups, because skipping groups would take too many registers.
        is_cut = end is not None and not _operand(source)[1]
        needed = needed.registers.item() if is_cut else _number(groups)
        copies = _Copies.announced(ctx, address, arith.muli(needed, _number(GROUP * _row_bytes(source) // THREADS)))
        first, head = _here(first.registers.item()), _index(_here(head.registers.item()))

        def start_whole() -> None:
            for _ in copies.shared_by_warps(1):
                copies.start(source, (mgpu.ds(_index(first), count), head), tile, (_whole_groups(source),))

        if rows % GROUP == 0 and not is_cut:
            start_whole()
            return
        whole = arith.cmpi(arith.CmpIPredicate.eq, needed, _number(groups))
        if rows % GROUP:
            past = arith.addi(first, _number(count))
            complete = arith.cmpi(arith.CmpIPredicate.sle, past, _number(rows // GROUP * GROUP))
            whole = arith.andi(whole, complete)
        with mgpu.when(whole):
            start_whole()
        with mgpu.when(arith.xori(whole, mgpu.c(1, ir.IntegerType.get_signless(1)))):
            for group in copies.shared_by_warps(groups):
                start_row = arith.addi(first, arith.muli(group, _number(GROUP)))
                wanted = arith.cmpi(arith.CmpIPredicate.ult, group, needed) if is_cut else None
                copies.start_group(source, start_row, head, tile, group, wanted)

    scalars = (jnp.asarray(x, jnp.int32) for x in (first, head, needed))
    start(source, *scalars, tile, _address(barrier))


def tma_load_row_groups(source: Ref, first: Any, head: Any, heads: int, skipped: Any, tile: Ref, barrier: Ref) -> None:
    """Start TMA copies of groups of 8 consecutive rows to a tile in shared memory.

    Rows past the end of the array are copied as zeros. The order of groups is: 8 rows of one head, the same rows of the
    next head, and after `heads` heads the next 8 rows.

    Args:
      source: [T, H, D] in global memory, result of `zero_rows_past_end`.
      first, head: the first row, a multiple of 8, and the first head.
      heads: number of heads whose groups alternate.
      skipped: number of groups in this order that precede the first group of the tile.
      tile: `register_tiles.operand` [8 · groups, D].
      barrier: barrier that expects `arrivals(groups)` arrivals for these copies.
    """
    groups = tile.shape[0] // GROUP
    if interpreted():
        for i in range(groups):
            eights, of_head = (divide(skipped + i, jnp.int32(heads)) for divide in (lax.div, lax.rem))
            start_row = _in_padding(first + eights * GROUP, source.shape[0], GROUP)
            rows = source.at[pl.ds(start_row, GROUP), head + of_head]
            plgpu.copy_gmem_to_smem(rows, tile.at[pl.ds(i * GROUP, GROUP)], barrier)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, _tile_ref(tile), SCALAR))
    def start(ctx: Any, source: ir.Value, first: Any, head: Any, skipped: Any, tile: ir.Value, address: Any) -> None:
        share = groups * GROUP * _row_bytes(source) // THREADS
        copies = _Copies.announced(ctx, address, _number(share))
        first, head, skipped = (_here(x.registers.item()) for x in (first, head, skipped))
        for group in copies.shared_by_warps(groups):
            number = arith.addi(group, skipped)
            eights, of_head = (divide(number, _number(heads)) for divide in (arith.divui, arith.remui))
            start_row = arith.addi(first, arith.muli(eights, _number(GROUP)))
            copies.start_group(source, start_row, _index(arith.addi(head, of_head)), tile, group)

    scalars = (jnp.asarray(x, jnp.int32) for x in (first, head, skipped))
    start(source, *scalars, tile, _address(barrier))


def _in_padding(first: Any, rows: int, count: int) -> Any:
    """Return the start row of a copy in interpret mode, clipped so that the copy does not read past the padding."""
    return pl.multiple_of(jnp.minimum(first, rows - count), GROUP)


# --- barriers


def _require_arrivals(barrier: Ref, copies: int) -> None:
    """Raise ValueError unless a barrier expects the arrivals of `copies` copies.

    A wrong number of arrivals deadlocks a kernel on the GPU. The number differs in interpret mode; see `arrivals`.
    """
    counted = jax.typeof(getattr(barrier, "ref", barrier)).inner_aval.dtype.num_arrivals
    if counted != arrivals(copies):
        raise ValueError(f"barrier: expected {arrivals(copies)} arrivals for {copies} copies, got {counted}")


_barrier_address_p = core.Primitive("barrier_address")


@_barrier_address_p.def_abstract_eval
def _barrier_address_type(_: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), jnp.int32)


@lowering.register_lowering_rule(_barrier_address_p, mgpu.LoweringSemantics.Warpgroup)
def _lower_barrier_address(_: Any, barrier: Any) -> ir.Value:
    return llvm.ptrtoint(i32(), barrier.barrier_ref.base_address)


def _address(barrier: Ref) -> jax.Array:
    """Return the address of a barrier in shared memory. The barrier may be an element of a barrier array."""
    transforms = getattr(barrier, "transforms", ())
    first: jax.Array = _barrier_address_p.bind(barrier.ref if transforms else barrier)
    for indexer in transforms:
        (index,) = indexer.indices
        first += jnp.asarray(index, jnp.int32) * BARRIER_BYTES
    return first


# --- copies as MLIR


class _Copies:
    """A set of copies whose bytes a barrier counts. One thread of each warp starts copies of the set."""

    def __init__(self, ctx: Any, barrier: Any) -> None:
        self._ctx, self._barrier = ctx, barrier
        # The assembler knows that this number, and the result of `elect`, are uniform in a warp. Otherwise it emits a
        # loop over the lanes for the operands of copies.
        self._warp = arith.andi(mgpu.utils.warp_idx(sync=True), _number(WARPS - 1))
        self._one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)

    @staticmethod
    def announced(ctx: Any, address: Any, share: ir.Value) -> _Copies:
        """Arrive at a barrier from each thread, announce the bytes of the copies, and return the set of copies.

        Args:
          address: address of the barrier.
          share: number of bytes that each thread announces: 1/128 of the bytes of all copies.
        """
        number = address.registers.item()
        text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        # The arrival makes earlier stores visible to other threads, so nothing may be moved past it.
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [number, share], text, "r,r,~{memory}", has_side_effects=True)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), number)
        none: Any = None
        return _Copies(ctx, mgpu.utils.BarrierRef(pointer, _number(0), none, 1))

    def shared_by_warps(self, count: int) -> Iterator[ir.Value]:
        """Yield the indices, out of `count`, of the copies that a warp starts: its own index, then every fourth index.

        The code that is emitted for an index runs in all warps, each with another value of the index.
        """
        for i in range(0, count, WARPS):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, self._warp, _number(count - i))):
                yield arith.addi(self._warp, _number(i))

    def start(
        self, source: ir.Value, index: tuple[Any, ...], to: ir.Value, transforms: Any, condition: Any = None
    ) -> None:
        """Start the copy of source[index] if a condition holds."""
        predicate = self._one if condition is None else arith.andi(self._one, condition)
        array, batch = _operand(source)
        self._ctx.async_copy(
            src_ref=array,
            dst_ref=to,
            gmem_slice=(*batch, *index),
            gmem_transform=transforms,
            swizzle=ROW_BYTES,
            barrier=self._barrier,
            arrive=False,
            predicate=predicate,
        )

    def start_group(
        self, source: ir.Value, first: ir.Value, head: ir.Value, tile: ir.Value, group: Any, condition: Any = None
    ) -> None:
        """Start the copy of 8 rows of a head to a group of a tile if a condition holds."""
        swizzled, transposed = _swizzled(source), launch_context.TransposeTransform((1, 0, 2))
        transforms = launch_context.TileTransform((swizzled,)), transposed
        to = mgpu.utils.memref_slice(tile, (_index(group),))
        self.start(source, (mgpu.ds(_index(first), GROUP), head), to, transforms, condition)


def _operand(source: Any) -> tuple[ir.Value, list[Any]]:
    """Return the kernel operand of which a reference is a part, and the indices of the operand's leading axes.

    An operand has leading axes if the kernel is mapped over a batch. TMA descriptors describe whole operands.
    """
    while isinstance(source, ir.BlockArgument):
        source = source.owner.owner.operands[source.arg_number]
    slicing = source.owner
    if slicing.name != "memref.subview":
        return source, []
    array, *given = slicing.operands
    offsets, dynamic = iter(given), ir.ShapedType.get_dynamic_stride_or_offset()
    more = ir.MemRefType(array.type).rank - ir.MemRefType(source.type).rank
    indices = [next(offsets) if offset == dynamic else offset for offset in slicing.static_offsets]
    if any(isinstance(index, ir.Value) or index for index in indices[more:]):
        raise NotImplementedError(
            "the source of a TMA copy: expected a whole array, or one entry of its leading axes; got the slice"
            f" {slicing}"
        )
    array, before = _operand(array)
    return array, [*before, *indices[:more]]


def _tile_ref(tile: Ref) -> Any:
    """Return the type of a reference to a `register_tiles.operand`."""
    columns = ROW_BYTES // jnp.dtype(tile.dtype).itemsize
    return plgpu.RefType((plgpu.TilingTransform((GROUP, columns)), plgpu.SwizzleTransform(ROW_BYTES)))


def _whole_groups(source: ir.Value) -> Any:
    """Return the TMA transform that splits an array into groups of 8 rows and drops an incomplete last group."""
    rounding = launch_context.Rounding.DOWN
    return launch_context.TileTransform((GROUP, _swizzled(source)), rounding=rounding)


def _swizzled(source: ir.Value) -> int:
    """Return the number of elements of a row of a swizzled tile."""
    return ROW_BYTES * 8 // mgpu.utils.bitwidth(ir.MemRefType(source.type).element_type)


def _row_bytes(source: ir.Value) -> int:
    """Return the number of bytes of the last axis of an array."""
    return ir.MemRefType(source.type).shape[-1] * _item_bytes(source)


def _item_bytes(source: ir.Value) -> int:
    """Return the number of bytes of an element of an array."""
    return mgpu.utils.bitwidth(ir.MemRefType(source.type).element_type) // 8


def _own(x: Any) -> ir.Value:
    """Return the number of this thread in an array with layout `LANES`."""
    (register,) = x.registers.flat
    return vector.extract(register, [], [0])


def _of_lane(own: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the number that another lane of the warp holds."""
    all_lanes: Any = mgpu.c(0xFFFFFFFF, i32())
    return nvvm.shfl_sync(all_lanes, own, lane, _number(WARP - 1), nvvm.ShflKind.idx)


def _present(own: ir.Value) -> ir.Value:
    """Return the bit mask of the lanes of a warp whose number is not negative."""
    there = arith.cmpi(arith.CmpIPredicate.sge, own, _number(0))
    text = "vote.sync.ballot.b32 $0, $1, 0xffffffff;"
    present: Any = llvm.inline_asm(i32(), [there], text, "=r,b", has_side_effects=True)
    return present


def _here(number: ir.Value) -> ir.Value:
    """Return the number through an inline assembly instruction, whose result the compiler does not move.

    Values that are computed from the result are therefore not hoisted out of a loop or a branch, where they would take
    registers.
    """
    here: Any = llvm.inline_asm(i32(), [number], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
    return here


def _number(x: int) -> Any:
    return mgpu.c(x, i32())


def _index(x: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), x)
