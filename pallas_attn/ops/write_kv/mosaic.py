"""`write_kv` on Hopper and data-center Blackwell.

Terms:

    entry       one token of one KV head of the call: D columns of k and D columns of v
    pool row    columns of the cache for one token of one KV head: a key, a value, or both in a fused cache. The pool
                [N, Hkv, ps, columns] has N·Hkv·ps pool rows
    slot        the place that a token is written to, page·ps + offset; a head-wise slot is the index of a pool row
    group       tokens of one page and KV head that share a dynamic scale
    leader      the lowest slot of a group that the call writes

A CTA is one warpgroup and writes several entries. The threads that share an entry hold its columns in registers, and
load and store them without shared memory (`mosaic.primitives.row_io`).

If no tokens share a scale (`_write_entries`):

    row = pool rows of the CTA's entries, from their slots
    k, v = columns of the entries                    # [entries, columns]; does not wait for slots
    k = k after RMSNorm and RoPE
    store k and v in the pool rows, cast or quantised, and their dynamic scales if any

Additional CTAs apply RMSNorm and RoPE to the queries (`_norm_and_rotate_queries`). RoPE in neox style pairs columns
that are half of the rotated columns apart. The halves are loaded as separate arrays, so that one thread has both
columns of a pair.

If tokens share a scale (`_write_groups`), the new tokens of a group can be anywhere in the call. A first kernel records
for each slot the index of the token that writes it. Records are not cleared between calls: a record is valid if the
recorded token of this call has this slot. Each CTA then checks `scan_tokens` tokens of one head:

    for token in the CTA's tokens:
        if the token's slot is the leader of its group:

            0 1 2   | 3 4 5 6 | 7 ...                    # offsets in the group; the leader is 3
            cached    new       stale, not written

            scale = scale for cached and new tokens together
            write cached and new tokens, quantised with this scale

| synchronisation | arrives | waits | protects |
|---|---|---|---|
| end of the first kernel | `_record_kernel` | `_write_groups` | records of writers |
| `commit_smem` | all threads of a CTA | all threads of the CTA | list of leaders in shared memory |

CTAs do not wait for one another, so there is no deadlock. No two CTAs write the same bytes, because a group has one
leader and slots are distinct.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.dequantize import scale_layout
from pallas_attn.mosaic.primitives.row_io import THREADS, RowLayout
from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.ops.write_kv.config import WriteKVKey, mosaic_config
from pallas_attn.ops.write_kv.mosaic_heads import HeadTile
from pallas_attn.ops.write_kv.mosaic_rounding import Divisor, divide
from pallas_attn.portable.quantise import amax_scale, held_scale
from pallas_attn.types import PagedKV, ScaleLayout

FEW_VALUES = 32
"""Maximum number of k values per thread for which k and v are in registers at the same time."""

MANY_VALUES = 64
"""Maximum number of k values per thread. Above `FEW_VALUES`, v is loaded after k has been stored.

Above `FEW_VALUES`, each memory access must also transfer 8 values: fewer accesses take fewer registers for addresses.
"""


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    basics.require_capability((9, 0), (10, 0))
    if call.kv.v is not None:
        unsupported.require_apart(call.kv)
    unsupported.require_8_bits(call.kv.k.dtype)
    static, x, arrays = WriteKVStatic.of(call), WriteKVInputs.of(call), KVPool.of(call.kv)
    writers = _record_writers(static, x.slots) if static.grouped else None
    pool = KVPool(
        k=basics.alias_in_place(flat(arrays.k)),
        v=None if arrays.v is None else basics.alias_in_place(flat(arrays.v)),
        k_scale=None if arrays.k_scale is None else basics.alias_in_place(arrays.k_scale.reshape(-1)),
        v_scale=None if arrays.v_scale is None else basics.alias_in_place(arrays.v_scale.reshape(-1)),
    )
    rotated = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=() if x.q is None else (jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),),
        grid=(static.kv_programs + static.q_programs,),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM((static.scan.rows,), jnp.int32)] if static.grouped else [],
        kernel_name="write_kv",
    )(basics.materialize(x), pool, basics.materialize(writers))
    written = {
        name: basics.read_back(ref).reshape(getattr(arrays, name).shape)
        for name, ref in pool._asdict().items()
        if ref is not None
    }
    return dataclasses.replace(call.kv, **written), None if call.q is None else rotated[0].reshape(call.q.shape)


def flat(a: Array) -> Array:
    """Reshape an array to two axes, [product of the leading axes, columns]."""
    return a.reshape(-1, a.shape[-1])


class WriteKVInputs(NamedTuple):
    """Operands of the kernel. Inside the kernel, the fields are references to the arrays.

    Attributes:
      q: [T·Hq, D] or None.
      k, v: [T·Hkv, D].
      slots: int32 [T] or, if they are head-wise, [T·Hkv].
      cos, sin: float32 [T, half], cosines and sines of the rotation angles, or None.
      q_norm, k_norm: RMSNorm weights [1, D] or None.
      k_scale, v_scale: static scales [Hkv] or [Hkv, D], or None.
    """

    q: Any
    k: Any
    v: Any
    slots: Any
    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    k_scale: Any
    v_scale: Any

    @staticmethod
    def of(call: WriteKVCall) -> WriteKVInputs:
        kv, rope = call.kv, call.rope
        static = scale_layout(kv) in ("head", "channel")
        return WriteKVInputs(
            q=None if call.q is None else flat(call.q),
            k=flat(call.k),
            v=flat(call.v),
            slots=call.slots.reshape(-1),
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            q_norm=None if rope is None or rope.q_norm is None else rope.q_norm[None],
            k_norm=None if rope is None or rope.k_norm is None else rope.k_norm[None],
            k_scale=kv.k_scale if static else None,
            v_scale=kv.v_scale if static else None,
        )


class KVPool(NamedTuple):
    """Arrays that the kernel writes. Inside the kernel, the fields are references to the arrays.

    Attributes:
      k, v: [N, Hkv, ps, D]; inside the kernel [N·Hkv·ps, D]. In a fused cache, v is None, and k has 2·W columns, the
        value from column W on.
      k_scale, v_scale: dynamic scales [N, Hkv, g], or None; inside the kernel [N·Hkv·g].
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any

    @staticmethod
    def of(kv: PagedKV) -> KVPool:
        dynamic = isinstance(scale_layout(kv), int)
        return KVPool(kv.k, kv.v, kv.k_scale if dynamic else None, kv.v_scale if dynamic else None)

    @property
    def values(self) -> Any:
        """Array that contains the values."""
        return self.k if self.v is None else self.v


@dataclasses.dataclass(frozen=True)
class WriteKVStatic:
    """Compile-time parameters of the kernels.

    Attributes:
      tile: layout of entries in registers.
      value_column: column of a pool row where a value starts; 0 if values have their own array.
      few_values: whether k and v are in registers at the same time.
      num_tokens, num_kv_heads, page_size: T, Hkv and ps.
      num_slots: number of slots in the pool: N·ps, or N·Hkv·ps if slots are head-wise.
      head_slots: whether slots are head-wise, one for each token and KV head.
      q_rows: T·Hq; 0 without queries.
      scales: layout of the cache's scales: None, "head", "channel", or the number of groups per page.
      norm_after: whether RMSNorm is applied after RoPE.
      norm_eps: epsilon of RMSNorm.
      scan_tokens: number of tokens that a CTA checks for leaders.
    """

    tile: HeadTile
    value_column: int
    few_values: bool
    num_tokens: int
    num_kv_heads: int
    page_size: int
    num_slots: int
    head_slots: bool
    q_rows: int
    scales: ScaleLayout
    norm_after: bool
    norm_eps: float
    scan_tokens: int

    @staticmethod
    def of(call: WriteKVCall) -> WriteKVStatic:
        kv, slots, rope, q = call.kv, call.slots, call.rope, call.q
        (num_pages, num_kv_heads, page_size, _), head_dim = kv.k.shape, call.k.shape[-1]
        rows = num_pages * num_kv_heads * page_size
        unsupported.require_int32_rows(rows)
        scales, rotation = scale_layout(kv), "none" if rope is None else rope.style
        half = 0 if rope is None else rope.cos.shape[1]
        if rotation == "neox" and half == 1:
            raise NotImplementedError("takes two pairs of columns or more that are rotated in neox style, got one")
        value_column = call.value_columns.start
        if rotation == "interleaved" and (head_dim % 2 or value_column % 2):
            raise NotImplementedError(
                "takes an even number of columns with interleaved rotation, because a thread stores pairs of columns;"
                f" got {head_dim} columns, and values from column {value_column} on"
            )
        group = page_size // scales if isinstance(scales, int) else 0
        key = WriteKVKey(head_dim, half, rotation, pl.next_power_of_2(slots.shape[0] * num_kv_heads), group)
        config = mosaic_config(key)
        threads, vector = key.threads_and_vector(config)
        if value_column:  # the address of an access must be a multiple of the bytes of the access
            vector = min(vector, value_column & -value_column)
        layout = RowLayout(threads, vector)
        values = head_dim // layout.threads * max(1, -(-group // layout.rows))
        limit = MANY_VALUES if group > 1 and layout.vector == 8 else FEW_VALUES
        if values > limit:
            raise NotImplementedError(
                f"takes up to {limit} values per thread, got {values}: {max(1, group)} tokens of {head_dim} columns in "
                f"segments of {key.unit}, {layout.vector} columns at a time"
            )
        return WriteKVStatic(
            tile=HeadTile(layout, head_dim, half, rotation == "interleaved"),
            value_column=value_column,
            few_values=values <= FEW_VALUES,
            num_tokens=slots.shape[0],
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            num_slots=rows if slots.ndim == 2 else num_pages * page_size,
            head_slots=slots.ndim == 2,
            q_rows=0 if q is None else q.shape[0] * q.shape[1],
            scales=scales,
            norm_after=rope is not None and rope.norm_order == "after_rope",
            norm_eps=0.0 if rope is None else rope.norm_eps,
            scan_tokens=config.scan_tokens,
        )

    @property
    def group_tokens(self) -> int:
        """Number of tokens per group; 0 without dynamic scales."""
        return self.page_size // self.scales if isinstance(self.scales, int) else 0

    @property
    def grouped(self) -> bool:
        """Whether several tokens share a dynamic scale."""
        return self.group_tokens > 1

    @property
    def scan(self) -> RowLayout:
        """Register layout for a list of tokens, [rows], and the slots of their groups, [rows, group_tokens]."""
        return RowLayout(math.gcd(self.group_tokens, 8), 1)

    @property
    def entries(self) -> int:
        return self.num_tokens * self.num_kv_heads

    @property
    def num_slots_given(self) -> int:
        """Number of slots that the call passes: T, or T·Hkv if they are head-wise."""
        return self.entries if self.head_slots else self.num_tokens

    @property
    def kv_programs(self) -> int:
        if self.grouped:
            return pl.cdiv(self.num_tokens, self.scan_tokens) * self.num_kv_heads
        return pl.cdiv(self.entries, self.tile.layout.rows)

    @property
    def q_programs(self) -> int:
        return pl.cdiv(self.q_rows, self.tile.layout.rows)

    def row(self, slot: Any, head: Any) -> Any:
        """Return the index of the pool row for a slot and a KV head. The slot must be inside the pool."""
        if self.head_slots:
            return slot
        page_size = jnp.full_like(slot, self.page_size)
        page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
        return (page * self.num_kv_heads + head) * self.page_size + offset

    def norm_and_rotate(
        self, values: list[jax.Array], x: WriteKVInputs, norm: Ref | None, token: jax.Array
    ) -> list[jax.Array]:
        """Apply RMSNorm and RoPE to heads as `portable.rope.apply_rope` does.

        Args:
          values: one array [heads, columns] per segment of columns.
          norm: RMSNorm weights [1, D], or None.
          token: int32 [heads], token of each head.
        """
        values = [segment.astype(jnp.float32) for segment in values]
        if norm is not None and not self.norm_after:
            values = self.tile.norm(values, norm, self.norm_eps)
        values = self.tile.rotate(values, x.cos, x.sin, token)
        if norm is not None and self.norm_after:
            values = self.tile.norm(values, norm, self.norm_eps)
        return values


def _kernel(static: WriteKVStatic, x: WriteKVInputs, pool: KVPool, writers: Ref | None, *memory: Ref) -> None:
    """Run one CTA: the first `kv_programs` CTAs write k and v, the others process q.

    Args:
      writers: see `_record_writers`; None without groups.
      memory: the output q, if the call has queries; then shared memory for the list of leaders, if it has groups.
    """
    program = lax.axis_index("program")

    @pl.when(program < static.kv_programs)
    def _keys_and_values() -> None:
        if static.grouped:
            _write_groups(static, x, pool, writers, memory[-1], program)
        else:
            _write_entries(static, x, pool, program)

    if x.q is not None:

        @pl.when(program >= static.kv_programs)
        def _queries() -> None:
            _norm_and_rotate_queries(static, x, memory[0], program - static.kv_programs)


def _norm_and_rotate_queries(static: WriteKVStatic, x: WriteKVInputs, rotated: Ref, program: Any) -> None:
    tile = static.tile
    row = program * tile.layout.rows + tile.layout.iota(tile.layout.rows)
    row = jnp.where(row < static.q_rows, row, -1)
    token = _index_or_none(row >= 0, lax.div(row, jnp.full_like(row, static.q_rows // static.num_tokens)))
    values = static.norm_and_rotate(tile.load(x.q, row), x, x.q_norm, token)
    tile.store(rotated, row, [segment.astype(rotated.dtype) for segment in values])


def _index_or_none(there: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(there, index, -1)


# --- tokens that share no scale with other tokens


def _write_entries(static: WriteKVStatic, x: WriteKVInputs, pool: KVPool, program: Any) -> None:
    tile, layout = static.tile, static.tile.layout
    entry = program * layout.rows + layout.iota(layout.rows)
    token, head = (f(entry, jnp.full_like(entry, static.num_kv_heads)) for f in (lax.div, lax.rem))
    slot = layout.take(x.slots, jnp.minimum(entry if static.head_slots else token, static.num_slots_given - 1))
    exists = entry < static.entries
    row = _index_or_none(exists & (slot >= 0) & (slot < static.num_slots), static.row(slot, head))
    # Load all entries, also entries that are not written, so that these loads do not wait for the loads of slots.
    entry, token = _index_or_none(exists, entry), _index_or_none(exists, token)
    k, v = tile.load(x.k, entry), tile.load(x.v, entry)
    if x.cos is not None:
        k = static.norm_and_rotate(k, x, x.k_norm, token)
    for values, pages, column, static_scale, scales in (
        (k, pool.k, 0, x.k_scale, pool.k_scale),
        (v, pool.values, static.value_column, x.v_scale, pool.v_scale),
    ):
        if static.scales is None:
            tile.store(pages, row, [segment.astype(pages.dtype) for segment in values], column)
            continue
        values = [segment.astype(jnp.float32) for segment in values]
        if scales is None:
            divisors = _static_divisors(static, static_scale, head, pages.dtype)
        else:
            scale = amax_scale(tile.largest(values), pages.dtype, divide=_divide_rows(layout))
            layout.put(scales, row, scale)
            divisors = _row_divisors(tile, scale, pages.dtype)
        _store_quantised(tile, pages, column, row, values, divisors)


def _divide_rows(layout: RowLayout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(divide, layout=layout.per_row)


def _row_divisors(tile: HeadTile, scale: jax.Array, dtype: Any) -> list[Divisor]:
    """Return the divisors of each segment of columns, from one scale per entry."""
    divisor = Divisor.of(scale, dtype, tile.layout.per_row)
    return [divisor.spread(tile.layout, columns) for _, columns in tile.segments]


def _static_divisors(static: WriteKVStatic, scale: Ref, head: jax.Array, dtype: Any) -> list[Divisor]:
    """Return the divisors of each segment of columns, from the static scales of the entries' heads."""
    if static.scales == "head":
        return _row_divisors(static.tile, static.tile.layout.take(scale, head), dtype)
    return [Divisor.of(segment, dtype, static.tile.layout.tile) for segment in static.tile.load(scale, head)]


def _store_quantised(
    tile: HeadTile, pages: Ref, column: int, row: jax.Array, values: Sequence[jax.Array], divisors: Sequence[Divisor]
) -> None:
    quantised = [
        divisor.quantise(segment, pages.dtype, tile.layout.tile)
        for segment, divisor in zip(values, divisors, strict=True)
    ]
    tile.store(pages, row, quantised, column)


# --- groups of tokens that share a scale


def _record_writers(static: WriteKVStatic, slots: Int32[Array, "n"]) -> Int32[Array, "slots"]:
    """Return the index in `slots` of each slot of the pool that the call writes. Entries of other slots are undefined:
    memory that an earlier call may have used.
    """
    return plgpu.kernel(
        functools.partial(_record_kernel, static),
        out_type=jax.ShapeDtypeStruct((static.num_slots,), jnp.int32),
        grid=(pl.cdiv(static.num_slots_given, THREADS),),
        grid_names=("program",),
        kernel_name="note_writers",
    )(basics.materialize(slots))


def _record_kernel(static: WriteKVStatic, slots: Ref, writers: Ref) -> None:
    layout = RowLayout(1, 1)
    place = lax.axis_index("program") * layout.rows + layout.iota(layout.rows)
    slot = layout.take(slots, jnp.minimum(place, static.num_slots_given - 1))
    there = (place < static.num_slots_given) & (slot >= 0) & (slot < static.num_slots)
    layout.put(writers, _index_or_none(there, slot), place)


def _writer(
    static: WriteKVStatic, slots: Ref, writers: Ref, slot: jax.Array, layout: RowLayout, registers: Any
) -> jax.Array:
    """Return the index in the call's `slots` of the given slots of the pool; -1 if the call does not write the slot.

    A record in `writers` is valid if the slot at the recorded index is this slot.
    """
    place = layout.take(writers, slot, registers)
    inside = jnp.clip(place, 0, static.num_slots_given - 1)
    return _index_or_none((place == inside) & (layout.take(slots, inside, registers) == slot), place)


def _write_groups(
    static: WriteKVStatic, x: WriteKVInputs, pool: KVPool, writers: Ref, leaders: Ref, program: Any
) -> None:
    """Find the leaders among `scan_tokens` tokens of one head, and write their groups."""
    head = lax.rem(program, static.num_kv_heads)
    first_token = lax.div(program, static.num_kv_heads) * static.scan_tokens
    leaders[...] = _leading_slots(static, x.slots, writers, first_token, head)
    plgpu.commit_smem()

    def visit(i: Any, _: None) -> None:
        slot = leaders[i]
        pl.when(slot >= 0)(lambda: _write_group(static, x, pool, writers, slot, head))

    lax.fori_loop(0, static.scan_tokens, visit, None)


def _leading_slots(static: WriteKVStatic, slots: Ref, writers: Ref, first_token: Any, head: Any) -> jax.Array:
    """Return the slots of the tokens from `first_token` on that are leaders, int32 [scan.rows]; -1 for other tokens."""
    scan, group = static.scan, static.group_tokens
    number = scan.iota(scan.rows)
    token = first_token + number
    place = token * static.num_kv_heads + head if static.head_slots else token
    slot = scan.take(slots, jnp.minimum(place, static.num_slots_given - 1))
    there = (number < static.scan_tokens) & (token < static.num_tokens) & (slot >= 0) & (slot < static.num_slots)
    slot = jnp.where(there, slot, 0)  # any valid slot; the result of these tokens is -1
    offset = scan.spread(lax.rem(slot, jnp.full_like(slot, group)), group)
    other = plgpu.broadcasted_iota(jnp.int32, (scan.rows, group), 1, layout=scan.tile)
    before = jnp.where(other < offset, scan.spread(slot, group) - offset + other, 0)
    written = (other < offset) & (_writer(static, slots, writers, before, scan, scan.tile) >= 0)
    led = jnp.max(jnp.where(written, 1, 0), axis=1) == 0
    return _index_or_none(there & led, slot)


class ScaleGroup(NamedTuple):
    """One group of tokens. Row i of a register tile [rows, columns] is the token at offset i of the group.

    Attributes:
      index: index of the group's scale in `KVPool.k_scale`.
      before: number of tokens before the leader.
      row: int32 [rows], pool rows of the tokens that are written: new tokens and earlier tokens; -1 for other tokens.
      new: bool [rows], whether this call has the token.
      earlier: int32 [rows], pool rows of the tokens before the leader, which are in the cache; -1 for other tokens.
    """

    index: Any
    before: Any
    row: Any
    new: Any
    earlier: Any


def _write_group(static: WriteKVStatic, x: WriteKVInputs, pool: KVPool, writers: Ref, leader: Any, head: Any) -> None:
    """Write the k and v of the group whose leader is the slot `leader`, for KV head `head`."""
    tile, layout, size = static.tile, static.tile.layout, static.group_tokens
    offset = layout.iota(pl.cdiv(size, layout.rows) * layout.rows)
    before = lax.rem(leader, size)  # number of tokens before the leader
    slot = leader - before + jnp.minimum(offset, size - 1)
    place = _writer(static, x.slots, writers, slot, layout, layout.per_row)
    new = (place >= 0) & (offset < size)
    entry = _index_or_none(new, place if static.head_slots else place * static.num_kv_heads + head)
    first_row = static.row(leader - before, head)
    earlier = _index_or_none(offset < before, first_row + offset)
    load_v = functools.partial(tile.load, x.v, entry)
    k, early_v = tile.load(x.k, entry), load_v() if static.few_values else None
    if x.cos is not None:
        k = static.norm_and_rotate(
            k, x, x.k_norm, _index_or_none(new, lax.div(entry, jnp.full_like(entry, static.num_kv_heads)))
        )
    group = ScaleGroup(lax.div(first_row, size), before, jnp.where(new, first_row + offset, earlier), new, earlier)
    _requantise_group(tile, group, pool.k, 0, pool.k_scale, k)
    _requantise_group(tile, group, pool.values, static.value_column, pool.v_scale, early_v or load_v())


def _requantise_group(
    tile: HeadTile, group: ScaleGroup, pages: Ref, column: int, scales: Ref, new: Sequence[jax.Array]
) -> None:
    """Quantise a group's new tokens and requantise its earlier tokens with a common scale, for k or for v.

    Args:
      pages: [N·Hkv·ps, columns], the pool.
      column: column of a pool row where the keys or values start.
      scales: [N·Hkv·g], all scales.
      new: one array [rows, columns] per segment of columns: the new tokens; 0 in other rows.
    """
    layout, rows, divide_rows = tile.layout, group.row.shape[0], _divide_rows(tile.layout)
    new = [segment.astype(jnp.float32) for segment in new]

    def earlier() -> tuple[list[jax.Array], jax.Array]:
        """Return the dequantised earlier tokens, and the smallest scale that represents them."""
        held = [segment.astype(jnp.float32) for segment in tile.load(pages, group.earlier, column)]
        scale = layout.filled(scales[group.index], rows)
        amax = layout.filled(jnp.max(tile.largest(held)), rows)
        values = [a * b for a, b in zip(held, tile.spread(scale), strict=True)]
        return values, held_scale(amax, scale, pages.dtype, divide_rows)

    def none() -> tuple[list[jax.Array], jax.Array]:
        return [plgpu.layout_cast(jnp.zeros_like(segment), layout.tile) for segment in new], layout.filled(
            jnp.float32(0), rows
        )

    old, at_least = lax.cond(group.before > 0, earlier, none)
    amax = layout.filled(jnp.max(tile.largest(new)), rows)
    scale = amax_scale(amax, pages.dtype, at_least, divide_rows)
    values = [jnp.where(is_new, a, b) for is_new, a, b in zip(tile.spread(group.new), new, old, strict=True)]
    _store_quantised(tile, pages, column, group.row, values, _row_divisors(tile, scale, pages.dtype))
    layout.put(scales, _index_or_none(layout.iota(rows) == 0, layout.filled(group.index, rows)), scale)
