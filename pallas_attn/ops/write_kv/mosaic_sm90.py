"""`write_kv` on Hopper (H100, H200).

An entry is one token of one KV head: a row of k, one of v, and a row of the pool for each. A program is one warpgroup
and takes some entries; the threads that share one hold its columns in registers, where it is normed, rotated and
quantised, and move them from and to memory themselves (`mosaic.row_layout`):

    slots of 16 entries -> rows of the pool
    k, v of 16 entries  -> registers -> norm, rotate -> quantise -> rows of the pool          queries likewise

Neox style rotates columns that are half a head apart, so the halves are loaded apart and the same thread has both.

Where groups of tokens share a scale, what decides is which tokens of a call lie in one group, and these may be
anywhere in it. A first kernel therefore notes at every slot who writes it. Nobody clears these notes: one counts if the
token it names does have that slot. So a program can tell which of its tokens lead their groups, being the first
that the call writes, and for each of these it takes all of the group, tokens of the call and earlier ones alike:

    token t leads     ->  its group, n rows:  0 1 2 | 3 4 5 6 | 7 ...
                                              cached  from k    left as they are
                          largest of both -> scale; all of them quantised with it and written

Nothing waits, and no two programs touch the same bytes: groups have one leader, and slots are distinct.
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

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.row_layout import THREADS, RowLayout
from pallas_attn.mosaic.sm90.dequantise import scale_layout
from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.ops.write_kv.config import MosaicKey, mosaic_config
from pallas_attn.ops.write_kv.mosaic_heads import HeadTile
from pallas_attn.ops.write_kv.mosaic_rounding import Divisor, divide
from pallas_attn.portable.quantise import amax_scale, held_scale
from pallas_attn.types import PagedKV, Rope, ScaleLayout

FEW_VALUES = 32
"""How many values of k, of a row or of a group's rows, leave a thread registers for as many of v."""

MANY_VALUES = 64
"""How many leave none for v, which then has to come after k, nor for addresses of less than 8 values each."""


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    basics.require_capability((9, 0))
    kv, q = call.kv, call.q
    static = Static.of(kv, call.slots, call.rope, 0 if q is None else q.shape[0] * q.shape[1])
    x, arrays = Inputs.of(kv, call.k, call.v, call.slots, call.rope, q), Pool.of(kv)
    writers = _note_writers(static, x.slots) if static.grouped else None
    pool = Pool(
        k=basics.alias_in_place(flat(arrays.k)),
        v=basics.alias_in_place(flat(arrays.v)),
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
    return dataclasses.replace(kv, **written), None if q is None else rotated[0].reshape(q.shape)


def flat(a: Array) -> Array:
    """Rows, whatever they are counted by."""
    return a.reshape(-1, a.shape[-1])


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q: [T·Hq, D] or None.
      k, v: [T·Hkv, D].
      slots: [T] or [T·Hkv].
      cos, sin: [T, half] or None.
      q_norm, k_norm: [1, D] or None.
      k_scale, v_scale: static ones, [Hkv] or [Hkv, D], or None.
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
    def of(kv: PagedKV, k: Array, v: Array, slots: Array, rope: Rope | None, q: Array | None) -> Inputs:
        static = scale_layout(kv) in ("head", "channel")
        return Inputs(
            q=None if q is None else flat(q),
            k=flat(k),
            v=flat(v),
            slots=slots.reshape(-1),
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            q_norm=None if rope is None or rope.q_norm is None else rope.q_norm[None],
            k_norm=None if rope is None or rope.k_norm is None else rope.k_norm[None],
            k_scale=kv.k_scale if static else None,
            v_scale=kv.v_scale if static else None,
        )


class Pool(NamedTuple):
    """What is written: k, v [N, Hkv, ps, D] and dynamic scales [N, Hkv, g] or None; in the kernel references to their
    rows, [N·Hkv·ps, D], and [N·Hkv·g].
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any

    @staticmethod
    def of(kv: PagedKV) -> Pool:
        dynamic = isinstance(scale_layout(kv), int)
        return Pool(kv.k, kv.v, kv.k_scale if dynamic else None, kv.v_scale if dynamic else None)


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for, beside shapes and dtypes.

    Attributes:
      few_values: whether there are registers for k and v at once.
      num_tokens, num_kv_heads, page_size: of the call and its cache.
      num_slots: slots from 0 to here are in the pool.
      head_slots: whether every head has slots of its own, in rows.
      q_rows: T·Hq, 0 without queries.
      scales: of the cache.
      norm_after: whether norms come after the rotation.
      norm_eps: epsilon of the norms.
      scan_tokens: see `MosaicConfig`.
    """

    tile: HeadTile
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
    def of(kv: PagedKV, slots: Array, rope: Rope | None, q_rows: int) -> Static:
        num_pages, num_kv_heads, page_size, head_dim = kv.k.shape
        rows = num_pages * num_kv_heads * page_size
        refusals.require_int32_rows(rows)
        scales, rotation = scale_layout(kv), "none" if rope is None else rope.style
        half = 0 if rope is None else rope.cos.shape[1]
        if rotation == "neox" and half == 1:
            raise NotImplementedError("takes two pairs of columns or more that are rotated in neox style, got one")
        group = page_size // scales if isinstance(scales, int) else 0
        key = MosaicKey(head_dim, half, rotation, pl.next_power_of_2(slots.shape[0] * num_kv_heads), group)
        config = mosaic_config(key)
        layout = RowLayout(*key.threads_and_vector(config))
        values = head_dim // layout.threads * max(1, -(-group // layout.rows))
        limit = MANY_VALUES if group > 1 and layout.vector == 8 else FEW_VALUES
        if values > limit:
            raise NotImplementedError(
                f"takes up to {limit} values a thread; {max(1, group)} tokens of {head_dim} columns, alike in "
                f"stretches of {key.unit}, are {values}"
            )
        return Static(
            tile=HeadTile(layout, head_dim, half, rotation == "interleaved"),
            few_values=values <= FEW_VALUES,
            num_tokens=slots.shape[0],
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            num_slots=rows if slots.ndim == 2 else num_pages * page_size,
            head_slots=slots.ndim == 2,
            q_rows=q_rows,
            scales=scales,
            norm_after=rope is not None and rope.norm_order == "after_rope",
            norm_eps=0.0 if rope is None else rope.norm_eps,
            scan_tokens=config.scan_tokens,
        )

    @property
    def group_tokens(self) -> int:
        """Tokens of a group with a scale of its own; 0 if scales are static or there are none."""
        return self.page_size // self.scales if isinstance(self.scales, int) else 0

    @property
    def grouped(self) -> bool:
        """Whether groups have more tokens than one."""
        return self.group_tokens > 1

    @property
    def scan(self) -> RowLayout:
        """Tokens and the slots of their groups, one row a token."""
        return RowLayout(math.gcd(self.group_tokens, 8), 1)

    @property
    def entries(self) -> int:
        return self.num_tokens * self.num_kv_heads

    @property
    def num_noted(self) -> int:
        """Slots of the call."""
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
        """Row of the pool of a slot that is in it."""
        if self.head_slots:
            return slot
        page, offset = lax.div(slot, like(slot, self.page_size)), lax.rem(slot, like(slot, self.page_size))
        return (page * self.num_kv_heads + head) * self.page_size + offset

    def turn(self, values: list[jax.Array], x: Inputs, norm: Ref | None, token: jax.Array) -> list[jax.Array]:
        """`portable.rope.apply_rope`, of rows that belong to these tokens."""
        values = [stretch.astype(jnp.float32) for stretch in values]
        if norm is not None and not self.norm_after:
            values = self.tile.norm(values, norm, self.norm_eps)
        values = self.tile.rotate(values, x.cos, x.sin, token)
        if norm is not None and self.norm_after:
            values = self.tile.norm(values, norm, self.norm_eps)
        return values


def like(x: Any, value: int) -> Any:
    """Integers of one value, in the shape and the layout of others."""
    return jnp.full_like(x, value)


def _kernel(static: Static, x: Inputs, pool: Pool, writers: Ref | None, *memory: Ref) -> None:
    """The programs of k and v, then those of q. `memory` is for the rotated q, if any, and for leaders of groups."""
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
            _turn_queries(static, x, memory[0], program - static.kv_programs)


def _turn_queries(static: Static, x: Inputs, rotated: Ref, program: Any) -> None:
    tile = static.tile
    row = program * tile.layout.rows + tile.layout.iota(tile.layout.rows)
    row = jnp.where(row < static.q_rows, row, -1)
    token = _or_none(row >= 0, lax.div(row, like(row, static.q_rows // static.num_tokens)))
    values = static.turn(tile.load(x.q, row), x, x.q_norm, token)
    tile.store(rotated, row, [stretch.astype(rotated.dtype) for stretch in values])


def _or_none(there: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(there, index, -1)


# --- entries on their own


def _write_entries(static: Static, x: Inputs, pool: Pool, program: Any) -> None:
    tile, layout = static.tile, static.tile.layout
    entry = program * layout.rows + layout.iota(layout.rows)
    token, head = (f(entry, like(entry, static.num_kv_heads)) for f in (lax.div, lax.rem))
    slot = layout.take(x.slots, jnp.minimum(entry if static.head_slots else token, static.num_noted - 1))
    exists = entry < static.entries
    row = _or_none(exists & (slot >= 0) & (slot < static.num_slots), static.row(slot, head))
    entry, token = _or_none(exists, entry), _or_none(exists, token)  # whether or not they have a slot: no need to wait
    k, v = tile.load(x.k, entry), tile.load(x.v, entry)
    if x.cos is not None:
        k = static.turn(k, x, x.k_norm, token)
    for values, pages, static_scale, scales in (
        (k, pool.k, x.k_scale, pool.k_scale),
        (v, pool.v, x.v_scale, pool.v_scale),
    ):
        if static.scales is None:
            tile.store(pages, row, [stretch.astype(pages.dtype) for stretch in values])
            continue
        values = [stretch.astype(jnp.float32) for stretch in values]
        if scales is None:
            divisors = _static_divisors(static, static_scale, head, pages.dtype)
        else:
            scale = amax_scale(tile.largest(values), pages.dtype, divide=_divide_rows(layout))
            layout.put(scales, row, scale)
            divisors = _row_divisors(tile, scale, pages.dtype)
        _store_quantised(tile, pages, row, values, divisors)


def _divide_rows(layout: RowLayout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(divide, layout=layout.per_row)


def _row_divisors(tile: HeadTile, scale: jax.Array, dtype: Any) -> list[Divisor]:
    """Of one scale a row."""
    divisor = Divisor.of(scale, dtype, tile.layout.per_row)
    return [divisor.spread(tile.layout, columns) for _, columns in tile.stretches]


def _static_divisors(static: Static, scale: Ref, head: jax.Array, dtype: Any) -> list[Divisor]:
    """Of the scales that entries of these heads have."""
    if static.scales == "head":
        return _row_divisors(static.tile, static.tile.layout.take(scale, head), dtype)
    return [Divisor.of(stretch, dtype, static.tile.layout.tile) for stretch in static.tile.load(scale, head)]


def _store_quantised(
    tile: HeadTile, pages: Ref, row: jax.Array, values: Sequence[jax.Array], divisors: Sequence[Divisor]
) -> None:
    quantised = [
        divisor.quantise(stretch, pages.dtype, tile.layout.tile)
        for stretch, divisor in zip(values, divisors, strict=True)
    ]
    tile.store(pages, row, quantised)


# --- groups


def _note_writers(static: Static, slots: Int32[Array, "n"]) -> Int32[Array, "slots"]:
    """For each slot that a call writes, where in `slots` it stands; anything for the others."""
    return plgpu.kernel(
        functools.partial(_note_kernel, static),
        out_type=jax.ShapeDtypeStruct((static.num_slots,), jnp.int32),
        grid=(pl.cdiv(static.num_noted, THREADS),),
        grid_names=("program",),
        kernel_name="note_writers",
    )(basics.materialize(slots))


def _note_kernel(static: Static, slots: Ref, writers: Ref) -> None:
    layout = RowLayout(1, 1)
    place = lax.axis_index("program") * layout.rows + layout.iota(layout.rows)
    slot = layout.take(slots, jnp.minimum(place, static.num_noted - 1))
    there = (place < static.num_noted) & (slot >= 0) & (slot < static.num_slots)
    layout.put(writers, _or_none(there, slot), place)


def _writer(static: Static, slots: Ref, writers: Ref, slot: jax.Array, layout: RowLayout, registers: Any) -> jax.Array:
    """Where in `slots` these slots stand, each of which is in the pool; -1 if nowhere."""
    place = layout.take(writers, slot, registers)
    inside = jnp.clip(place, 0, static.num_noted - 1)
    return _or_none((place == inside) & (layout.take(slots, inside, registers) == slot), place)


def _write_groups(static: Static, x: Inputs, pool: Pool, writers: Ref, leaders: Ref, program: Any) -> None:
    """Some tokens of one head: writes the groups that they lead."""
    head = lax.rem(program, static.num_kv_heads)
    first_token = lax.div(program, static.num_kv_heads) * static.scan_tokens
    leaders[...] = _leading_slots(static, x.slots, writers, first_token, head)
    plgpu.commit_smem()

    def visit(i: Any, _: None) -> None:
        slot = leaders[i]
        pl.when(slot >= 0)(lambda: _write_group(static, x, pool, writers, slot, head))

    lax.fori_loop(0, static.scan_tokens, visit, None)


def _leading_slots(static: Static, slots: Ref, writers: Ref, first_token: Any, head: Any) -> jax.Array:
    """int32 [scan.rows]: slots of tokens that lead their groups; -1 for the other tokens."""
    scan, group = static.scan, static.group_tokens
    number = scan.iota(scan.rows)
    token = first_token + number
    place = token * static.num_kv_heads + head if static.head_slots else token
    slot = scan.take(slots, jnp.minimum(place, static.num_noted - 1))
    there = (number < static.scan_tokens) & (token < static.num_tokens) & (slot >= 0) & (slot < static.num_slots)
    slot = jnp.where(there, slot, 0)  # of which nothing comes before
    offset = scan.spread(lax.rem(slot, like(slot, group)), group)
    other = plgpu.broadcasted_iota(jnp.int32, (scan.rows, group), 1, layout=scan.tile)
    before = jnp.where(other < offset, scan.spread(slot, group) - offset + other, 0)
    written = (other < offset) & (_writer(static, slots, writers, before, scan, scan.tile) >= 0)
    led = jnp.max(jnp.where(written, 1, 0), axis=1) == 0
    return _or_none(there & led, slot)


class Group(NamedTuple):
    """Tokens that share a scale, as rows of a tile.

    Attributes:
      index: of its scale.
      before: how many come before those of the call.
      row: [rows], in the pool, of those that are written; -1 for others.
      new: [rows], whether the call brings it.
      earlier: [rows], in the pool, of those that come before; -1 for others.
    """

    index: Any
    before: Any
    row: Any
    new: Any
    earlier: Any


def _write_group(static: Static, x: Inputs, pool: Pool, writers: Ref, leader: Any, head: Any) -> None:
    """The group that the token at slot `leader` leads, in rows of its own head."""
    tile, layout, size = static.tile, static.tile.layout, static.group_tokens
    offset = layout.iota(pl.cdiv(size, layout.rows) * layout.rows)
    before = lax.rem(leader, size)  # so many tokens come before those of this call
    slot = leader - before + jnp.minimum(offset, size - 1)
    place = _writer(static, x.slots, writers, slot, layout, layout.per_row)
    new = (place >= 0) & (offset < size)
    entry = _or_none(new, place if static.head_slots else place * static.num_kv_heads + head)
    first_row = static.row(leader - before, head)
    earlier = _or_none(offset < before, first_row + offset)
    load_v = functools.partial(tile.load, x.v, entry)
    k, early_v = tile.load(x.k, entry), load_v() if static.few_values else None
    if x.cos is not None:
        k = static.turn(k, x, x.k_norm, _or_none(new, lax.div(entry, like(entry, static.num_kv_heads))))
    group = Group(lax.div(first_row, size), before, jnp.where(new, first_row + offset, earlier), new, earlier)
    _join_group(tile, group, pool.k, pool.k_scale, k)
    _join_group(tile, group, pool.v, pool.v_scale, early_v or load_v())


def _join_group(tile: HeadTile, group: Group, pages: Ref, scales: Ref, new: Sequence[jax.Array]) -> None:
    """Quantises a group's new tokens, 0 in other rows, together with those it holds from before."""
    layout, rows, divide_rows = tile.layout, group.row.shape[0], _divide_rows(tile.layout)
    new = [stretch.astype(jnp.float32) for stretch in new]

    def earlier() -> tuple[list[jax.Array], jax.Array]:
        """Their values, and the scale they call for."""
        held = [stretch.astype(jnp.float32) for stretch in tile.load(pages, group.earlier)]
        scale = layout.filled(scales[group.index], rows)
        amax = layout.filled(jnp.max(tile.largest(held)), rows)
        values = [a * b for a, b in zip(held, tile.spread(scale), strict=True)]
        return values, held_scale(amax, scale, pages.dtype, divide_rows)

    def none() -> tuple[list[jax.Array], jax.Array]:
        return [plgpu.layout_cast(jnp.zeros_like(stretch), layout.tile) for stretch in new], layout.filled(
            jnp.float32(0), rows
        )

    old, at_least = lax.cond(group.before > 0, earlier, none)
    amax = layout.filled(jnp.max(tile.largest(new)), rows)
    scale = amax_scale(amax, pages.dtype, at_least, divide_rows)
    values = [jnp.where(is_new, a, b) for is_new, a, b in zip(tile.spread(group.new), new, old, strict=True)]
    _store_quantised(tile, pages, group.row, values, _row_divisors(tile, scale, pages.dtype))
    layout.put(scales, _or_none(layout.iota(rows) == 0, layout.filled(group.index, rows)), scale)
