"""Softmax steps of the two-warpgroup MLA kernel with fp8 latents (`mla_fp8`): maxima, sums, rescaling, and stores.

A tile of scores or probabilities is [TOKENS, N]: 64 tokens are its rows, and N query rows (one head of one query token
each) are its columns. Of every eight columns, a thread holds two adjacent columns. A warp holds 16 rows. Maxima and
sums of columns are computed with shuffles between the lanes of a warp, then through shared memory between the four
warps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.mla_fp8_products import warp_and_lane
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import i8, i32, masked, plus, shifted, times
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, operand_ref, over_tokens

SPLAT = plgpu.Layout.WG_SPLAT(())


def exceeds(x: jax.Array, limit: float) -> jax.Array:
    """Return 1 (int32) if any element of x [TOKENS, N] exceeds a limit, else 0.

    All threads of the warpgroup synchronise and get the same result. NaN, which columns of padding may contain, does
    not exceed the limit.
    """
    if interpreted():
        plgpu.commit_smem()
        return (x > limit).any().astype(jnp.int32)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT))
    def vote(_: Any, x: Any) -> Any:
        numbers = [vector.extract(register, [], [i]) for register in x.registers.flat for i in range(2)]
        while len(numbers) > 1:
            rest = numbers[len(numbers) & -2 :]
            numbers = [arith.maxnumf(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=False)] + rest
        bound: Any = mgpu.c(limit, ir.F32Type.get())
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        any_: Any = llvm.inline_asm(i32(), [numbers[0], bound, barrier], VOTE, "=r,f,f,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(any_, (), is_signed=True)

    return vote(x)


VOTE = """
{
.reg .pred own, all;
setp.gt.f32 own, $1, $2;
barrier.cta.red.or.pred.aligned all, $3, 128, own;
selp.b32 $0, 1, 0, all;
}
"""


def largest_of_rows(x: jax.Array, scratch: Ref) -> jax.Array:
    """Return the maximum of each column (query row) of x [TOKENS, N], float32 [N] with layout `PER_COLUMN`.

    All threads of the warpgroup synchronise.

    Args:
      scratch: float32 [4 warps, N] in shared memory, used by this warpgroup only.
    """
    columns = x.shape[1]
    if interpreted():
        plgpu.commit_smem()
        return x.max(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=PER_COLUMN),
    )
    def reduce(_: Any, x: Any, scratch: ir.Value) -> Any:
        registers = list(x.registers.flat)
        registers = [arith.maximumf(a, b) for a, b in zip(registers[::2], registers[1::2], strict=True)]
        numbers = [vector.extract(register, [], [i]) for register in registers for i in range(2)]
        for distance in (4, 8, 16):
            numbers = [arith.maximumf(x, _from_lane(x, distance)) for x in numbers]
        return _over_warps(dict(enumerate(numbers)), 4, columns, scratch, arith.maximumf)

    return reduce(x, scratch)


def _from_lane(x: ir.Value, distance: int) -> ir.Value:
    operands: list[Any] = [mgpu.c(number, i32()) for number in (0xFFFFFFFF, distance, 31)]
    all_lanes, bits, clamp = operands
    return nvvm.shfl_sync(all_lanes, x, bits, clamp, nvvm.ShflKind.bfly)


def _over_warps(
    numbers: Mapping[int | ir.Value, ir.Value], lanes: int, columns: int, scratch: ir.Value, combine: Callable[..., Any]
) -> Any:
    """Reduce one number per column over the four warps. Return an array [columns] with layout `PER_COLUMN`.

    Args:
      numbers: maps an index among the columns that this thread holds to the warp's number for this column. The entries
        are pairs of adjacent columns; only the index of the first column of a pair is read.
      lanes: the first `lanes` lanes of each warp have the warp's numbers for all columns.
      scratch: float32 [4 warps, columns] in shared memory.
      combine: reduction of two numbers, for example addition.
    """
    warp, lane = warp_and_lane()
    number, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
    base, quarter = mgpu.utils.memref_ptr(scratch), times(masked(lane, 3), 2)
    mgpu.utils.warpgroup_barrier()  # reads of the previous call are done
    own = mgpu.utils.getelementptr(base, [plus(times(warp, columns), quarter)], number)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, mgpu.c(lanes, i32()))):
        places = list(numbers)
        for first, second in zip(places[::2], places[1::2], strict=True):
            both = vector.from_elements(pair, [numbers[first], numbers[second]])
            place = 4 * first if isinstance(first, int) else times(first, 4)
            llvm.store(both, mgpu.utils.getelementptr(own, [place], number), alignment=8)
    mgpu.utils.warpgroup_barrier()
    first = mgpu.utils.getelementptr(base, [quarter], number)
    results = []
    for j in range(columns // 8):
        of_warps = [
            llvm.load(pair, mgpu.utils.getelementptr(first, [w * columns + 8 * j], number), alignment=8)
            for w in range(4)
        ]
        results.append(combine(combine(of_warps[0], of_warps[1]), combine(of_warps[2], of_warps[3])))
    return _per_column(results, columns)


def halvings(columns: int) -> int:
    """Return the number of shuffle rounds in `add_weights`. Each round halves the columns that a thread sums."""
    return 3 if columns % 64 == 0 else 2 if columns % 32 == 0 else 0


def sums_type(columns: int) -> Any:
    """Scratch type of the partial column sums of two warpgroups: float32 [2, 128 threads · sums per thread].

    Each thread has private sums over the rows of tiles that it holds. `add_weights` adds to them, and `total_weights`
    adds up the sums of all threads.
    """
    return plgpu.SMEM((2, 32 * columns >> halvings(columns)), jnp.float32)


def clear_sums(sums: Ref, columns: int) -> None:
    """Set the partial column sums of a warpgroup to 0.

    Args:
      sums: row of `sums_type`.
    """
    if interpreted():
        sums[...] = jnp.zeros(sums.shape, sums.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear(_: Any, sums: ir.Value) -> None:
        zeros = vector.broadcast(ir.VectorType.get((2,), ir.F32Type.get()), mgpu.c(0.0, ir.F32Type.get()))
        for pointer in _own_sums(sums):
            llvm.store(zeros, pointer, alignment=8)

    clear(sums)


def _own_sums(sums: ir.Value) -> list[ir.Value]:
    """Return pointers to this thread's sums, one pointer per pair of columns."""
    warp, lane = warp_and_lane()
    number = ir.F32Type.get()
    thread = plus(times(warp, 32), lane)
    own = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(sums), [times(thread, 2)], number)
    (size,) = ir.MemRefType(sums.type).shape
    return [mgpu.utils.getelementptr(own, [first], number) for first in range(0, size, 256)]


def add_weights(sums: Ref, p: jax.Array, factor: jax.Array) -> None:
    """Add the column sums of a tile of probabilities to partial sums.

    Args:
      sums: row of `sums_type`.
      p: probabilities [TOKENS, N], multiplied by the largest scale of each token.
      factor: [TOKENS], factor of the rows of p: inverse of the largest scale.
    """
    columns = p.shape[1]
    if interpreted():
        of_columns = pl.ds(0, columns)
        sums[of_columns] = sums[of_columns] + (p * over_tokens(factor, p.shape)).sum(axis=0)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, PER_TOKEN))
    def add(_: Any, sums: ir.Value, p: Any, factor: Any) -> None:
        rows = [vector.extract(register, [], [0]) for register in factor.registers.flat]
        numbers = []
        for upper, lower in p.registers.reshape(-1, 2):
            for i in range(2):
                product = arith.mulf(vector.extract(upper, [], [i]), rows[0])
                numbers.append(llvm.intr_fma(vector.extract(lower, [], [i]), rows[1], product))
        for distance in (4, 8, 16)[: halvings(columns)]:
            half, is_upper = len(numbers) // 2, _bit(distance)
            low, high = numbers[:half], numbers[half:]
            kept = [arith.select(is_upper, b, a) for a, b in zip(low, high, strict=True)]
            given = [arith.select(is_upper, a, b) for a, b in zip(low, high, strict=True)]
            numbers = [arith.addf(a, _from_lane(b, distance)) for a, b in zip(kept, given, strict=True)]
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        for j, pointer in enumerate(_own_sums(sums)):
            more = vector.from_elements(pair, numbers[2 * j : 2 * j + 2])
            llvm.store(arith.addf(llvm.load(pair, pointer, alignment=8), more), pointer, alignment=8)

    add(sums, p, factor)


def total_weights(sums: Ref, columns: int, scratch: Ref) -> jax.Array:
    """Add up the partial column sums of all threads of a warpgroup. Return float32 [N] with layout `PER_COLUMN`.

    Args:
      sums: row of `sums_type`.
      columns: N.
      scratch: as in `largest_of_rows`.
    """
    if interpreted():
        plgpu.commit_smem()
        return sums[pl.ds(0, columns)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=PER_COLUMN),
    )
    def add(_: Any, sums: ir.Value, scratch: ir.Value) -> Any:
        pair, count = ir.VectorType.get((2,), ir.F32Type.get()), halvings(columns)
        pairs = [llvm.load(pair, pointer, alignment=8) for pointer in _own_sums(sums)]
        numbers = [vector.extract(both, [], [i]) for both in pairs for i in range(2)]
        for distance in (4, 8, 16)[count:]:
            numbers = [arith.addf(x, _from_lane(x, distance)) for x in numbers]
        if not count:
            return _over_warps(dict(enumerate(numbers)), 4, columns, scratch, arith.addf)
        first = _first_column(columns)
        by_place: dict[int | ir.Value, ir.Value] = {
            plus(first, mgpu.c(i, i32())): number for i, number in enumerate(numbers)
        }
        return _over_warps(by_place, 4 << count, columns, scratch, arith.addf)

    return add(sums, scratch)


def _bit(distance: int) -> ir.Value:
    """Return whether the lane index has the bit `distance` set."""
    _, lane = warp_and_lane()
    none: Any = mgpu.c(0, i32())
    return arith.cmpi(arith.CmpIPredicate.ne, masked(lane, distance), none)


def _first_column(columns: int) -> ir.Value:
    """Return the index of the first column that this thread sums, among the N / 4 columns that it holds."""
    _, lane = warp_and_lane()
    first, count = mgpu.c(0, i32()), columns // 4
    for i in range(halvings(columns)):
        count //= 2
        first = plus(first, times(masked(shifted(lane, 2 + i), 1), count))
    return first


def rescale_columns(total: jax.Array, changed: Any, factors: Ref) -> jax.Array:
    """Multiply the columns of O after m has changed. Return O; it is unchanged if `changed` is 0.

    Args:
      total: O [K, N].
      changed: int32 scalar.
      factors: float32 [N] in shared memory.
    """
    columns = total.shape[1]
    if interpreted():
        plgpu.commit_smem()
        return total * jnp.where(changed != 0, factors[...], 1.0)[None]

    @plgpu.inline_mgpu(
        arg_types=(TILE, SPLAT, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE),
    )
    def multiply(_: Any, total: Any, changed: Any, factors: ir.Value) -> Any:
        total = total.to_layout(wgmma.ACCUMULATOR)
        given = list(total.registers.flat)
        count = len(given)
        flag, place = (f"${2 * count + i}" for i in range(2))
        text = f"{{ .reg .pred kept; .reg .f32 f<2>; setp.eq.s32 kept, {flag}, 0; @kept bra.uni done; "
        for j in range(columns // 8):
            text += f"ld.shared.v2.f32 {{f0, f1}}, [{place} + {32 * j}]; "
            text += "".join(f"mul.f32 ${i}, ${i}, f{i % 2}; " for i in range(count) if i // 4 % (columns // 8) == j)
        text += "done: }"
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r", "r"]
        operands = [*given, changed.registers.item(), _own_factors(factors)]
        scaled = wgmma.fragments(wgmma.floats(count, text, constraints, operands), total.shape)
        return scaled.to_layout(fragmented_array.WGMMA_LAYOUT)

    return multiply(total, changed, factors)


def rescale_weights(sums: Ref, changed: Any, factors: Ref) -> None:
    """Multiply partial column sums after m has changed. Do nothing if `changed` is 0.

    Args:
      sums: row of `sums_type`.
      changed: int32 scalar.
      factors: float32 [N] in shared memory, one factor per column.
    """
    (columns,) = factors.shape
    if interpreted():
        factor = jnp.where(changed != 0, factors[...], 1.0)
        plgpu.commit_smem()
        sums[pl.ds(0, columns)] = sums[pl.ds(0, columns)] * factor
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, plgpu.RefType()))
    def multiply(_: Any, sums: ir.Value, changed: Any, factors: ir.Value) -> None:
        own_sums, place = _own_sums(sums), _own_factors(factors)
        if halvings(columns):
            place = plus(place, times(_first_column(columns), 16))
        text = "{ .reg .pred kept; .reg .f32 f<4>; setp.eq.s32 kept, $0, 0; @kept bra.uni done; "
        for j in range(len(own_sums)):
            text += f"ld.shared.v2.f32 {{f0, f1}}, [$1 + {32 * j}]; ld.shared.v2.f32 {{f2, f3}}, [$2 + {1024 * j}]; "
            text += f"mul.f32 f2, f2, f0; mul.f32 f3, f3, f1; st.shared.v2.f32 [$2 + {1024 * j}], {{f2, f3}}; "
        text += "done: }"
        operands = [changed.registers.item(), place, llvm.ptrtoint(i32(), own_sums[0])]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,r,~{memory}", has_side_effects=True)

    multiply(sums, changed, factors)


def _own_factors(factors: ir.Value) -> ir.Value:
    """Return the shared-memory address of the factor of the first column that this thread holds."""
    _, lane = warp_and_lane()
    own = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(factors), [times(masked(lane, 3), 8)], i8())
    return llvm.ptrtoint(i32(), own)


def _per_column(registers: Sequence[ir.Value], columns: int) -> Any:
    """Return the array [columns] with layout `PER_COLUMN` that has these registers, with two adjacent columns each."""
    layout = PER_COLUMN.to_mgpu()
    array = np.empty(layout.registers_shape((columns,)), dtype=object)
    array.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=None)


def store_probs(
    ps: Sequence[jax.Array], to: Sequence[Ref], ratios: Sequence[jax.Array] = (), ratios_to: Ref | None = None
) -> None:
    """Store probabilities and ratios of scales in shared memory, and make them visible to tensor cores and threads.

    The caller guarantees that nothing reads the previous contents any more. The function ends with `plgpu.commit_smem`,
    so earlier stores of the threads become visible, too.

    Args:
      ps: arrays of probabilities, 16-bit [TOKENS, N] each.
      to: for each array its place in shared memory, [N, TOKENS].
      ratios: for each channel group, float16 [TOKENS].
      ratios_to: float16 [channel groups, TOKENS] in shared memory; None without ratios.
    """
    count = len(ps)
    if interpreted():
        for p, place in zip(ps, to, strict=True):
            place[...] = p.T
        if ratios_to is not None:
            for i, ratio in enumerate(ratios):
                ratios_to[i] = ratio
        plgpu.commit_smem()
        return
    more = () if ratios_to is None else (ratios_to, *ratios)
    kinds = () if ratios_to is None else (plgpu.RefType(), *[PER_TOKEN] * len(ratios))

    @plgpu.inline_mgpu(arg_types=(*[TILE] * count, *[operand_ref()] * count, *kinds))
    def write(_: Any, *given: Any) -> None:
        ps, to, more = given[:count], given[count : 2 * count], given[2 * count :]
        for p, place in zip(ps, to, strict=True):
            p.store_tiled(mgpu.memref_transpose(place, (1, 0, 3, 2)), swizzle=128)
        for i, ratio in enumerate(more[1:]):
            ratio.store_untiled(mgpu.utils.memref_slice(more[0], (i,)), optimized=False)
        mgpu.commit_shared()

    write(*ps, *to, *more)
