"""Asynchronous wgmma products, and register-level operations on their results that Pallas cannot express.

A product, such as q @ kᵀ, consists of several wgmma instructions. Each instruction multiplies 16 of the K elements of
its operands. The left operand is in registers or in shared memory, the right operand always in shared memory. Each
product is a separate commit group, which `finish` waits for. Results are float32 in registers.

A fence of a register is an empty piece of inline assembly with the register as operand; the compiler cannot move the
computation of the register past it. Pallas fences the registers of a left operand right before the product. If another
product is in flight at this point, ptxas treats the fence as a write to the operand of that other product, and
serializes all products of the function. This module fences registers only while no product in flight uses them.

In interpret mode, products finish at once.

Terms of the functions at the end of the module, which emit MLIR:

    total        registers of the float32 accumulator of a product; an empty list if the product overwrites it
    descriptor   64-bit number that describes an operand in shared memory to wgmma: address, strides, swizzle
    row_bytes    swizzle width [bytes] of an operand in shared memory, 64 or 128
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES, operand_ref, over_tokens
from pallas_attn.mosaic.primitives.soft_cap import soft_capped

DEPTH = 16
"""K of a wgmma instruction on 16-bit operands."""

ACCUMULATOR = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
"""Layout that assigns the same elements to each thread as `TILE`. In MLIR, each element is a separate value; with
`TILE` a value is a pair of elements.
"""

UNPAIRED = plgpu.Layout.TILED(ACCUMULATOR.tiling, ACCUMULATOR.warp_dims, ACCUMULATOR.lane_dims, ACCUMULATOR.vector_dim)
"""`ACCUMULATOR` as a Pallas layout, for accumulators that several products are added to.

With `TILE`, each product would split the pairs before it and join them after it. This would emit no machine code, but
lowering would take longer.
"""


MOST_DESCRIBED = 256
"""Maximum width of keys for which the descriptors of all instructions of Q Kᵀ are kept in registers."""


def start(qs: Sequence[Ref], k: Ref, p: jax.Array, v: Ref, o: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Start two products: sum(qs) @ kᵀ, then o + p @ v. Return both.

    Do not access a result before `finish` has waited for it. Do not change p and o before the second product has
    finished.

    Args:
      qs: 16-bit [64, D] each, in shared memory.
      k: 16-bit [N, D] in shared memory.
      p: 16-bit [64, N] in registers.
      v: 16-bit [N, Dv] in shared memory.
      o: float32 [64, Dv] in registers.
    """
    if interpreted():
        return multiply(qs, k, lambda: None), accumulate(p, v, o)
    results = tuple(
        plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE) for shape in ((o.shape[0], k.shape[0]), o.shape)
    )

    @plgpu.inline_mgpu(
        arg_types=(operand_ref(), TILE, operand_ref(), TILE, *[operand_ref()] * len(qs)), return_type=results
    )
    def begin(_: Any, k: ir.Value, p: Any, v: ir.Value, o: Any, *qs: ir.Value) -> Any:
        lefts, total = fenced_product(words(p), o.to_layout(ACCUMULATOR))
        nvvm.wgmma_fence_aligned()
        products = _scores(qs, k), _weighted(lefts, v, total, o.shape)
        return tuple(product.to_layout(fragmented_array.WGMMA_LAYOUT) for product in products)

    return begin(k, p, v, o, *qs)


def multiply(qs: Sequence[Ref], k: Ref, meanwhile: Callable[[], None]) -> jax.Array:
    """Compute sum(qs) @ kᵀ in float32. Call `meanwhile` while the product is in flight. `qs` and `k` are as in
    `start`.
    """

    def product(s: Ref) -> jax.Array:
        for q in qs:
            plgpu.wgmma(s, q, k.transpose((1, 0)))
        meanwhile()
        return s[...]

    if k.shape[1] > MOST_DESCRIBED and not interpreted():
        shape = plgpu.ShapeDtypeStruct((qs[0].shape[0], k.shape[0]), jnp.float32, layout=TILE)

        @plgpu.inline_mgpu(arg_types=[operand_ref()] * (1 + len(qs)), return_type=shape)
        def begin(_: Any, k: ir.Value, *qs: ir.Value) -> Any:
            nvvm.wgmma_fence_aligned()
            return _scores(qs, k).to_layout(fragmented_array.WGMMA_LAYOUT)

        s = begin(k, *qs)
        meanwhile()
        return finish(s, TILE, TILE, under_way=0)
    return pl.run_scoped(product, plgpu.ACC((qs[0].shape[0], k.shape[0]), jnp.float32))


def accumulate(p: jax.Array, v: Ref, o: jax.Array) -> jax.Array:
    """Compute o + p @ v, with operands as in `start`. The product has finished when the function returns."""
    if interpreted():
        o += jnp.dot(p, v[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # for the race detector: the reads of v precede later copies to its memory
        return o
    added: Any = pl.run_state(lambda total: plgpu.wgmma(total, p, v))(plgpu.ACC.init(o))
    return added


def start_scores(parts: Sequence[tuple[Ref, Ref]], total: jax.Array | None, row_bytes: int) -> jax.Array:
    """Start the product total + sum of q @ kᵀ over all pairs (q, k) of `parts`.

    Do not access the result, which has layout `UNPAIRED`, before `finish`.

    Args:
      parts: pairs of q [64, n] and k [N, n], 16-bit in shared memory; n may differ between pairs.
      total: float32 [64, N] with layout `UNPAIRED`, or None for 0. It may be the result of a product in flight.
      row_bytes: swizzle width of all operands.
    """
    if interpreted():
        for q, k in parts:
            product = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
            total = product if total is None else total + product
        plgpu.commit_smem()  # for the race detector: the reads of q and k precede later copies to their memory
        return jnp.asarray(total)
    refs, more = [operand_ref(row_bytes)] * (2 * len(parts)), () if total is None else (total,)
    shape = plgpu.ShapeDtypeStruct((parts[0][0].shape[0], parts[0][1].shape[0]), jnp.float32, layout=UNPAIRED)

    @plgpu.inline_mgpu(arg_types=(*refs, *[UNPAIRED] * len(more)), return_type=shape)
    def begin(_: Any, *given: Any) -> Any:
        refs, total = given[: 2 * len(parts)], given[2 * len(parts) :]
        if not total:
            nvvm.wgmma_fence_aligned()
        sums = list(total[0].registers.flat) if total else []
        for q, k in zip(refs[::2], refs[1::2], strict=True):
            sums = add_scores(sums, q, k, row_bytes)
        commit()
        return fragments(sums, shape.shape)

    return begin(*itertools.chain(*parts), *more)


def start_values(p: jax.Array | Ref, v: Ref, total: jax.Array, row_bytes: int) -> jax.Array:
    """Start the product total + p @ v.

    Do not access the result, which has layout `UNPAIRED`, or change p before `finish`.

    Args:
      p: 16-bit [64, N] in registers or shared memory.
      v: 16-bit [N, columns] in shared memory.
      total: float32 [64, columns] with layout `UNPAIRED`.
      row_bytes: swizzle width of the operands in shared memory.
    """
    in_registers = isinstance(p, jax.Array)
    if interpreted():
        product = jnp.dot(p if in_registers else p[...], v[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return total + product
    refs = operand_ref(row_bytes)
    arg_types = TILE if in_registers else refs, refs, UNPAIRED

    @plgpu.inline_mgpu(
        arg_types=arg_types, return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=UNPAIRED)
    )
    def begin(_: Any, p: Any, v: ir.Value, total: Any) -> Any:
        lefts, sums = fenced_product(words(p) if in_registers else [], total)
        nvvm.wgmma_fence_aligned()
        if not in_registers:
            (_, keys), _ = mma_utils.tiled_memref_shape(p)
            lefts = left_steps(p, keys, row_bytes)
        sums = add_values(sums, lefts, v, row_bytes)
        commit()
        return fragments(sums, total.shape)

    return begin(p, v, total)


def publish_probs(p: jax.Array, to: Ref, m: jax.Array, stats: Ref, row_bytes: int) -> None:
    """Write p [64, N] to `to` and m [64] to `stats`, both in shared memory, and make them visible to the tensor cores
    and to other threads.

    The caller guarantees that nothing reads the old contents any more. One synchronization of the warpgroup after both
    stores then suffices. Pallas's own stores would synchronize before and after each store.

    Args:
      row_bytes: swizzle width of `to`.
    """
    if interpreted():
        to[...], stats[...] = p, m
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu(arg_types=(TILE, operand_ref(row_bytes), PER_TOKEN, plgpu.RefType()))
    def write(_: Any, p: Any, to: ir.Value, m: Any, stats: ir.Value) -> None:
        p.store_tiled(to, swizzle=row_bytes)
        m.store_untiled(stats, optimized=False)
        mgpu.commit_shared()

    write(p, to, m, stats)


def finish(product: jax.Array, layout: Any, result_layout: Any, *, under_way: int) -> jax.Array:
    """Wait until a product has finished. Return its result.

    Args:
      product: result of a function that starts a product.
      layout, result_layout: `UNPAIRED` or `TILE`, layouts of `product` and of the returned array.
      under_way: number of products that were started after this product and may still be in flight.
    """
    if interpreted():
        return product
    shape = plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=result_layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=shape)
    def wait(_: Any, product: Any) -> Any:
        assembly(f"wgmma.wait_group.sync.aligned {under_way};")
        sums = fenced(list(product.to_layout(ACCUMULATOR).registers.flat))
        return fragments(sums, product.shape).to_layout(result_layout.to_mgpu())

    return wait(product)


def as_tile(sums: jax.Array) -> jax.Array:
    """Convert sums [64, n] from layout `UNPAIRED` to layout `TILE`."""
    if interpreted():
        return sums

    @plgpu.inline_mgpu(arg_types=(UNPAIRED,), return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=TILE))
    def pair(_: Any, sums: Any) -> Any:
        return sums.to_layout(fragmented_array.WGMMA_LAYOUT)

    return pair(sums)


RESCALE_THRESHOLD_LOG2 = 8
"""Growth of the maximum score [log2] up to which kernels keep the old maximum and do not rescale accumulators.

Probabilities are then at most 2**8. Their relative precision is the same as below 1, because they are floating-point
numbers.
"""


def rescale_accumulator(
    totals: Sequence[jax.Array], layouts: Sequence[Any], before: jax.Array, after: jax.Array, *, finished: bool = True
) -> list[jax.Array]:
    """Multiply the rows of accumulators by 2**(before - after), after the running maximum of the scores has changed.

    A warp skips the multiplication if before = after in all its rows.

    Args:
      totals: accumulators, float32 [64, n] each.
      layouts: `UNPAIRED` or `TILE`, layout of each accumulator and of its result.
      before, after: [64], old and new maximum [log2]; they are equal in rows that need no rescaling.
      finished: whether no product in flight writes the accumulators. If False, the function waits for all products in
        flight, after the branch that decides whether to skip. ptxas moves no arithmetic across a branch, so the code
        before this call stays before the wait and overlaps the products.
    """
    if interpreted():
        factor = jnp.where(before == after, 1.0, jnp.exp2(before - after))
        return [total * over_tokens(factor, total.shape) for total in totals]

    @plgpu.inline_mgpu(
        arg_types=(*layouts, PER_TOKEN, PER_TOKEN),
        return_type=[
            plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout)
            for total, layout in zip(totals, layouts, strict=True)
        ],
    )
    def multiply(_: Any, *given: Any) -> Any:
        *totals, before, after = given
        totals = [total.to_layout(ACCUMULATOR) for total in totals]
        sums = [register for total in totals for register in total.registers.flat]
        rows = [vector.extract(register, [], [0]) for x in (before, after) for register in x.registers.flat]
        text = _rescale_assembly(len(sums), "" if finished else "wgmma.wait_group.sync.aligned 0; ")
        constraints = ["=f"] * len(sums) + [str(i) for i in range(len(sums))] + ["f"] * len(rows)
        registers = iter(floats(len(sums), text, constraints, [*sums, *rows]))
        results = [fragments([next(registers) for _ in total.registers.flat], total.shape) for total in totals]
        return [result.to_layout(layout.to_mgpu()) for result, layout in zip(results, layouts, strict=True)]

    return multiply(*totals, before, after)


def _rescale_assembly(count: int, wait: str) -> str:
    """Return the PTX of `rescale_accumulator`.

    A thread has elements of two rows. Registers 0 and 1 of an accumulator belong to the first row, 2 and 3 to the
    second row, 4 and 5 to the first row again, and so on.

    Args:
      count: number of registers of all accumulators.
      wait: PTX that waits for products in flight, or an empty string.
    """
    before, after = ([f"${2 * count + 2 * i + row}" for row in range(2)] for i in range(2))
    factors = "".join(
        f"sub.f32 f{row}, {before[row]}, {after[row]}; ex2.approx.f32 f{row}, f{row}; "
        f"selp.f32 f{row}, 0f3F800000, f{row}, p{row}; "
        for row in range(2)
    )
    products = "".join(f"mul.f32 ${i}, ${i}, f{i // 2 % 2}; " for i in range(count))
    return (
        "{ .reg .pred p<2>, kept; .reg .f32 f<2>; "
        f"setp.eq.f32 p0, {before[0]}, {after[0]}; setp.eq.f32 p1, {before[1]}, {after[1]}; "
        "and.pred kept, p0, p1; vote.sync.all.pred kept, kept, 0xffffffff; @kept bra.uni keep; "
        f"{wait}{factors}{products}bra.uni done; keep: {wait}done: }}"
    )


def zero_rows(o: jax.Array, sums: jax.Array) -> jax.Array:
    """Return o [64, n] with the rows set to 0 whose `sums` [64] is 0. These query rows see no key.

    A warp without such rows skips the selections. `jnp.where` would be slower: if its result is then rounded to 16
    bits, ptxas emits four instructions per pair of values.
    """
    if interpreted():
        return jnp.where(over_tokens(sums != 0, o.shape), o, 0.0)

    @plgpu.inline_mgpu(
        arg_types=(TILE, PER_TOKEN), return_type=plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=TILE)
    )
    def clear(_: Any, o: Any, sums: Any) -> Any:
        registers = [*o.to_layout(ACCUMULATOR).registers.flat]
        rows = [vector.extract(register, [], [0]) for register in sums.registers.flat]
        count = len(registers)
        cleared = "".join(f"selp.f32 ${i}, ${i}, 0f00000000, p{i // 2 % 2}; " for i in range(count))
        text = (
            f"{{ .reg .pred p<2>, kept; setp.neu.f32 p0, ${2 * count}, 0f00000000; "
            f"setp.neu.f32 p1, ${2 * count + 1}, 0f00000000; and.pred kept, p0, p1; "
            f"vote.sync.all.pred kept, kept, 0xffffffff; @kept bra.uni done; {cleared}done: }}"
        )
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * len(rows)
        results = fragments(floats(count, text, constraints, [*registers, *rows]), o.shape)
        return results.to_layout(fragmented_array.WGMMA_LAYOUT)

    return clear(o, sums)


def partial_sums(p: jax.Array) -> jax.Array:
    """Return partial row sums of p [64, n], float32 [64, 8]: column j is the sum of the columns j, j + 8, j + 16, ...

    Each thread adds its own registers only. Sums of whole rows would need shuffles.
    """
    if interpreted():
        return p.reshape(p.shape[0], -1, 8).sum(axis=1)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((p.shape[0], 8), jnp.float32, layout=TILE))
    def add(_: Any, p: Any) -> Any:
        return functools.reduce(operator.add, (p[:, i : i + 8] for i in range(0, p.shape[1], 8)))

    return add(p)


def capped(s: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Compute soft_cap * tanh(scale * s / soft_cap), for s [64 n, N] with layout `TILE`."""
    return soft_capped(s, scale, soft_cap, _reciprocal)


def _reciprocal(x: jax.Array) -> jax.Array:
    """Compute 1 / x with the instruction rcp.approx.ftz, which returns 0 instead of subnormal results. A division would
    take three more instructions to handle subnormals.
    """
    if interpreted():
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE))
    def invert(_: Any, x: Any) -> Any:
        x = x.to_layout(ACCUMULATOR)
        count = x.registers.size
        text = "".join(f"rcp.approx.ftz.f32 ${i}, ${i}; " for i in range(count))
        constraints = ["=f"] * count + [str(i) for i in range(count)]
        return fragments(floats(count, text, constraints, [*x.registers.flat]), x.shape).to_layout(
            fragmented_array.WGMMA_LAYOUT
        )

    return invert(x)


def hide(s: jax.Array, limits: Limits) -> jax.Array:
    """Set scores s [64, N] to -inf in the columns that a row does not see.

    Each thread computes 32-bit words with one visibility bit per column, and tests the bits of its columns. ptxas moves
    seven bits at a time to predicates, because the bit numbers are constants. The alternative, comparing an iota of
    columns with each limit, takes three times as many instructions, and the iota takes as many registers as `s`.
    """
    if interpreted():
        return jnp.where(limits.sees(jnp.arange(s.shape[1], dtype=jnp.int32)[None]), s, -jnp.inf)
    given = [limit for limit in limits[:4] if limit is not None]

    @plgpu.inline_mgpu(
        arg_types=(TILE, *[PER_TOKEN] * len(given)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout=TILE),
    )
    def select(_: Any, s: Any, *given: Any) -> Any:
        arrays = iter(given)
        halves = [
            None if limit is None else [vector.extract(r, [], [0]) for r in next(arrays).registers.flat]
            for limit in limits[:4]
        ]
        registers = s.registers.reshape(s.shape[1] // 8, 2)
        hidden = np.empty_like(registers)
        for half in range(2):
            low, high, sink, pages = (None if limit is None else limit[half] for limit in halves)
            row = _Row.of(low, high, sink, pages, limits.page_tokens)
            for first in range(0, len(registers), EIGHTS):
                seen = row.seen(8 * first)
                for eight in range(first, min(first + EIGHTS, len(registers))):
                    hidden[eight, half] = _select_pair(seen, 2 * (eight - first), registers[eight, half])
        return mgpu.FragmentedArray(
            _registers=hidden.reshape(s.registers.shape), _layout=s.layout, _is_signed=s.is_signed
        )

    return select(s, *given)


EIGHTS = 16
"""Number of groups of 8 columns with one 32-bit word of visibility bits. A thread has two columns of each group, so two
bits.
"""


class _Row(NamedTuple):
    """`Limits` of one row of a tile. The thread's first column is subtracted from `low`, `high` and `sink`."""

    low: ir.Value
    high: ir.Value
    sink: ir.Value | None
    pages: ir.Value | None
    page_tokens: int

    @staticmethod
    def of(low: Any, high: Any, sink: Any, pages: Any, page_tokens: int) -> _Row:
        first = arith.muli(arith.andi(mgpu.utils.thread_idx(), _number(3)), _number(2))
        low, high, sink = (None if limit is None else arith.subi(limit, first) for limit in (low, high, sink))
        return _Row(low, high, sink, pages, page_tokens)  # pyrefly: ignore[bad-argument-type]

    def seen(self, first: int) -> ir.Value:
        """Return one word of visibility bits of this thread, for the columns of the tile from `first` on. A bit is 1 if
        the row sees the column.
        """
        hidden = _columns_below(self.low, first)
        if self.sink is not None:
            hidden = arith.andi(hidden, _inverse(_columns_below(self.sink, first)))
        seen = arith.andi(_columns_below(self.high, first), _inverse(hidden))
        if self.pages is not None:
            width = self.page_tokens // 4
            for begin in range(0, 2 * EIGHTS, width):
                page = (first + 4 * begin) // self.page_tokens
                is_there = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(self.pages, _number(1 << page)), _number(0))
                others = _number(_signed(~(((1 << width) - 1) << begin)))
                seen = arith.andi(seen, arith.select(is_there, _number(-1), others))
        return seen


def _signed(bits: int) -> int:
    """Return the int32 with the same 32 low bits as the Python integer `bits`."""
    return ((bits + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _inverse(bits: ir.Value) -> ir.Value:
    return arith.xori(bits, _number(-1))


def _columns_below(limit: Any, first: int) -> Any:
    """Return one word of this thread, for the columns of the tile from `first` on. A bit is 1 if the column is below
    `limit`, which is relative to the thread's first column.
    """
    inside = arith.minsi(arith.maxsi(limit, _number(first)), _number(first + 8 * EIGHTS))
    inside = arith.subi(inside, _number(first)) if first else inside
    in_eight = arith.minsi(arith.andi(inside, _number(7)), _number(2))
    count = arith.addi(arith.muli(arith.shrui(inside, _number(3)), _number(2)), in_eight)
    text = "bmsk.clamp.b32 $0, 0, $1;"
    return llvm.inline_asm(_number(0).type, [count], text, "=r,r", has_side_effects=False)


def _select_pair(seen: ir.Value, bit: int, pair: ir.Value) -> ir.Value:
    """Set the scores of two adjacent columns to -inf where their bits in `seen`, number `bit` and `bit` + 1, are 0."""
    masked, minus_inf = [], mgpu.c(-np.inf, ir.F32Type.get())
    for i in range(2):
        is_seen = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(seen, _number(_signed(1 << bit + i))), _number(0))
        masked.append(arith.select(is_seen, vector.extract(pair, [], [i]), minus_inf))
    return vector.from_elements(pair.type, masked)


def _number(x: int) -> Any:
    return mgpu.c(x, ir.IntegerType.get_signless(32))


# --- products as MLIR


def _scores(qs: Sequence[ir.Value], k: ir.Value) -> Any:
    """Start sum(qs) @ kᵀ as a commit group. Return the result with layout `ACCUMULATOR`."""
    total: list[ir.Value] = []
    (columns, depth), dtype = mma_utils.tiled_memref_shape(k)
    for q in qs:
        lefts = left_steps(q, depth)
        rights = _steps(*_right(mgpu.memref_transpose(k, (1, 0, 3, 2)), columns, ROW_BYTES), depth, ROW_BYTES)
        issue = _one_by_one if depth <= MOST_DESCRIBED else _products
        total = issue(total, lefts, rights, columns=columns, dtype=dtype, transposed=False)
    commit()
    return fragments(total, (mma_utils.tiled_memref_shape(qs[0])[0][0], mma_utils.tiled_memref_shape(k)[0][0]))


def _weighted(
    lefts: Sequence[Sequence[ir.Value]], v: ir.Value, total: Sequence[ir.Value], shape: tuple[int, ...]
) -> Any:
    """Start total + p @ v as a commit group. Return the result with layout `ACCUMULATOR`.

    Args:
      lefts: registers of p for each instruction, from `words`.
      shape: shape of the result.
    """
    (keys, values), dtype = mma_utils.tiled_memref_shape(v)
    rights = _steps(*_right(v, values, ROW_BYTES), keys, ROW_BYTES)
    total = _one_by_one(total, lefts, rights, columns=values, dtype=dtype, transposed=True)
    commit()
    return fragments(total, shape)


def add_scores(total: Sequence[ir.Value], q: ir.Value, k: ir.Value, row_bytes: int = ROW_BYTES) -> list[ir.Value]:
    """Start total + q @ kᵀ. Return the registers of the result."""
    (_, depth), _ = mma_utils.tiled_memref_shape(q)
    return RightOperand(k, row_bytes).add(total, left_steps(q, depth, row_bytes))


class Descriptors(NamedTuple):
    """Descriptors of an operand in shared memory, one for each instruction of a product.

    Attributes:
      first: descriptor for the first instruction.
      offsets: the descriptor for instruction i is first + offsets[i].
      transposed: for a left operand, whether M is contiguous in memory; otherwise K is contiguous.
    """

    first: ir.Value
    offsets: Sequence[int]
    transposed: bool = False

    def each(self) -> Iterator[ir.Value]:
        """Yield the descriptors. The addition for a descriptor is emitted when the descriptor is requested."""
        for offset in self.offsets:
            yield arith.addi(self.first, mgpu.c(offset, self.first.type))


class RightOperand:
    """Right operand [N, K] in shared memory, with contiguous K, that is multiplied in several steps.

    A call of `add` with n left operands multiplies the next n · `DEPTH` elements of K.
    """

    def __init__(self, ref: ir.Value, row_bytes: int = ROW_BYTES, *, dtype: Any = None) -> None:
        """Describe an operand.

        Args:
          dtype: PTX name of the element type. None if it is the element type of `ref`.
        """
        (self._columns, depth), own_dtype = mma_utils.tiled_memref_shape(ref)
        self._dtype = dtype or own_dtype
        rights = _right(mgpu.memref_transpose(ref, (1, 0, 3, 2)), self._columns, row_bytes)
        steps = _steps(*rights, depth, row_bytes)
        self._first, self._offsets = steps.first, iter(steps.offsets)

    def add(self, total: Sequence[ir.Value], lefts: Descriptors | Sequence[Sequence[ir.Value]]) -> list[ir.Value]:
        """Start total + left @ rightᵀ for the next elements of K. Return the registers of the result.

        Args:
          lefts: left operands [M, DEPTH], one per instruction: a list of registers each, or `Descriptors` of all.
        """
        count = len(lefts.offsets if isinstance(lefts, Descriptors) else lefts)
        rights: Any = Descriptors(self._first, list(itertools.islice(self._offsets, count)))
        # If the left operand is in registers, emit all right descriptors first. LLVM then computes each descriptor once
        # and keeps it in a register, also if several products use it. In the other case, registers do not suffice.
        if not isinstance(lefts, Descriptors):
            rights = list(rights.each())
        return _products(total, lefts, rights, columns=self._columns, dtype=self._dtype, transposed=False)


def add_values(
    total: Sequence[ir.Value],
    lefts: Descriptors | Sequence[Sequence[ir.Value]],
    v: ir.Value,
    row_bytes: int = ROW_BYTES,
) -> list[ir.Value]:
    """Start total + p @ v. Return the registers of the result.

    Args:
      lefts: left operands, one per instruction: registers of p from `words`, or descriptors of p from `left_steps`.
      v: [N, columns] in shared memory.
    """
    (keys, values), dtype = mma_utils.tiled_memref_shape(v)
    right = _steps(*_right(v, values, row_bytes), keys, row_bytes)
    return _products(total, lefts, right, columns=values, dtype=dtype, transposed=True)


def words(p: Any) -> list[list[ir.Value]]:
    """Return the registers of p [64, N] for each instruction, as 32-bit words. An instruction reads 16 columns of p."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return [
        [vector.extract(vector.bitcast(word, r), [], [0]) for r in p[:, i : i + DEPTH].registers.flat]
        for i in range(0, p.shape[1], DEPTH)
    ]


def left_steps(ref: ir.Value, depth: int, row_bytes: int = ROW_BYTES) -> Descriptors:
    """Return the descriptors of a left operand [64, depth] in shared memory."""
    (base, (_, (step,))), (_, chunk), _ = mma_utils.create_descriptor(
        ref, swizzle=row_bytes, large_tile=(64, row_bytes // 2), group_size=(64, row_bytes // 2), logical_k_major=False
    )
    return _steps(base, step, chunk, depth, row_bytes)


def transposed_left_steps(ref: ir.Value) -> Descriptors:
    """Return the descriptors of the left operand refᵀ [64, K], for ref [K, 64] in shared memory."""
    (depth, rows), _ = mma_utils.tiled_memref_shape(ref)
    described: Any = mma_utils.create_descriptor(
        mgpu.memref_transpose(ref, (1, 0, 3, 2)), swizzle=ROW_BYTES, group_size=(rows, depth), logical_k_major=False
    )
    (base, (_, (step,))), *_ = described
    return Descriptors(base, [mma_utils.encode_addr(i * step) for i in range(depth // DEPTH)], transposed=True)


def _right(ref: ir.Value, columns: int, row_bytes: int) -> tuple[Any, int, int]:
    """Return the first descriptor of a right operand [K, columns], and two distances [bytes] between the elements that
    successive instructions read.

    The operand is stored as blocks of `row_bytes` / 2 elements of K. The first distance is within a block, the second
    is from a block to the next block.
    """
    depth = row_bytes // 2
    (base, (_, (step,))), (_, chunk), _ = mma_utils.create_descriptor(
        ref, swizzle=row_bytes, large_tile=(depth, depth), group_size=(depth, columns), logical_k_major=True
    )
    return base, step, chunk


def _steps(base: Any, step: int, chunk: int, depth: int, row_bytes: int) -> Descriptors:
    """Return the descriptors of an operand with `depth` elements of K. Each instruction reads `DEPTH` elements.

    Args:
      base: descriptor for the first instruction.
      step, chunk: distances [bytes] to the elements of the next instruction, in a block of `row_bytes` / 2 elements and
        from block to block.
    """
    places = np.ndindex(depth // (row_bytes // 2), row_bytes // 2 // DEPTH)
    return Descriptors(base, [mma_utils.encode_addr(i * chunk + j * step) for i, j in places])


def _products(
    total: Sequence[ir.Value],
    lefts: Descriptors | Sequence[Sequence[ir.Value]],
    rights: Descriptors | Sequence[ir.Value],
    *,
    columns: int,
    dtype: Any,
    transposed: bool,
) -> list[ir.Value]:
    """Issue a wgmma instruction for each pair of left and right operands. Return the registers of the result.

    All instructions are one piece of inline assembly, because lowering takes time per register of each piece. For
    `Descriptors`, the assembly computes each descriptor right before its instruction. LLVM would compute all
    descriptors first and keep them in registers, which accumulators need.

    Args:
      lefts: left operands, one per instruction: a list of registers each, a list with one descriptor each, or
        `Descriptors` of all.
      rights: descriptors of the right operands.
      columns: N of the instructions.
      dtype: PTX name of the element type.
      transposed: whether the right operand [K, N] has contiguous N in memory; otherwise contiguous K.
    """
    count = columns // 2
    in_registers = not isinstance(lefts, Descriptors) and len(lefts[0]) > 1
    operands, kinds = list(total), ["=f"] * count + [str(i) for i in range(len(total))]

    def place(operand: ir.Value, kind: str) -> str:
        operands.append(operand)
        kinds.append(kind)
        return f"${count + len(operands) - 1}"

    def made(name: str, descriptors: Descriptors) -> list[tuple[str, str]]:
        """Return for each instruction the PTX that computes its descriptor, and the PTX register with the
        descriptor.
        """
        first = place(descriptors.first, "l")
        return [(f"add.s64 {name}, {first}, {offset}; ", name) for offset in descriptors.offsets]

    if isinstance(lefts, Descriptors):
        left = made("left", lefts)
    elif in_registers:
        left = [("", f"{{{', '.join(place(register, 'r') for register in registers)}}}") for registers in lefts]
    else:
        left = [("", place(descriptor, "l")) for (descriptor,) in lefts]
    if isinstance(rights, Descriptors):
        right = made("right", rights)
    else:
        right = [("", place(descriptor, "l")) for descriptor in rights]
    results = ", ".join(f"${i}" for i in range(count))
    left_transposed = isinstance(lefts, Descriptors) and lefts.transposed
    flags = f"1, 1, {'' if in_registers else f'{int(left_transposed)}, '}{int(transposed)}"
    instructions = (
        f"{make_a}{make_b}wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH}.f32.{dtype}.{dtype} "
        f"{{{results}}}, {a}, {b}, {'adds' if total or i else 'overwrites'}, {flags}; "
        for i, ((make_a, a), (make_b, b)) in enumerate(zip(left, right, strict=True))
    )
    text = (
        "{ .reg .pred overwrites, adds; .reg .b64 left, right; "
        f"setp.ne.b32 overwrites, 0, 0; setp.ne.b32 adds, 1, 0; {''.join(instructions)}}}"
    )
    return floats(count, text, kinds, operands)


def _one_by_one(
    total: Sequence[ir.Value], lefts: Descriptors | Sequence[Sequence[ir.Value]], rights: Descriptors, **facts: Any
) -> list[ir.Value]:
    """Issue the same instructions as `_products`, each in a separate piece of inline assembly.

    LLVM then computes the descriptors outside the assembly, and computes a descriptor once if several products use it.
    This is faster if there are enough registers.
    """
    each_left = ([left] for left in lefts.each()) if isinstance(lefts, Descriptors) else lefts
    for left, right in zip(each_left, rights.each(), strict=True):
        total = _products(total, [left], [right], **facts)
    return list(total)


def floats(count: int, text: str, constraints: Sequence[str], operands: Sequence[ir.Value]) -> list[ir.Value]:
    """Emit inline assembly with `count` float32 results. Return them."""
    number = ir.VectorType.get((1,), ir.F32Type.get())
    results: Any = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        list(operands),
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return _elements(results, [number] * count)


def fenced(registers: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the same registers (float32 or 32-bit words) after a fence: their computation cannot move past it.

    `fragmented_array.optimization_barrier` has the same effect, but emits four times as many MLIR operations.
    """
    count = len(registers)
    kinds = ["r" if isinstance(register.type, ir.IntegerType) else "f" for register in registers]
    constraints = ",".join([*(f"={kind}" for kind in kinds), *map(str, range(count))])
    types = [register.type for register in registers]
    results: Any = llvm.inline_asm(
        llvm.StructType.get_literal(types), list(registers), "", constraints, asm_dialect=0, has_side_effects=True
    )
    return _elements(results, types)


def _elements(struct: ir.Value, types: Sequence[ir.Type]) -> list[ir.Value]:
    """Return all elements of an LLVM struct. This takes less than half the lowering time of calls of
    `llvm.extractvalue`.
    """
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(len(types)))
    return [
        ir.Operation.create("llvm.extractvalue", [kind], [struct], {"position": place}).result
        for kind, place in zip(types, places, strict=True)
    ]


def fenced_product(lefts: Sequence[Sequence[ir.Value]], total: Any) -> tuple[list[list[ir.Value]], list[ir.Value]]:
    """Return the registers of left operands and of a total, after one common fence.

    Args:
      lefts: registers of the left operand of each instruction; empty if it is in shared memory.
      total: array with layout `ACCUMULATOR`.
    """
    registers = iter(fenced([*itertools.chain(*lefts), *total.registers.flat]))
    return [[next(registers) for _ in left] for left in lefts], list(registers)


def fragments(registers: Sequence[ir.Value], shape: tuple[int, ...]) -> Any:
    """Return the array with layout `ACCUMULATOR` that has these registers."""
    array = np.empty(ACCUMULATOR.registers_shape(shape), dtype=object)
    array.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=ACCUMULATOR, _is_signed=None)


def commit() -> None:
    """Commit all wgmma instructions since the last commit as a group. Waits are for groups."""
    assembly("wgmma.commit_group.sync.aligned;")


def assembly(text: str) -> None:
    """Emit inline assembly without operands or results."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
