"""`write_kv` in Triton, for any card from Ampere (sm80) on.

A program takes some tokens of a few neighbouring heads, of k, of v or of q, holds their columns in registers, where
they are normed, rotated and quantised, and stores them, k and v in their slots. Heads of a token share its angles,
which without that would be most of what is read from the L2. Columns that are rotated together are loaded as two tiles,
so that a thread has both, and those that pass as a third.

Where groups of several tokens share a scale, tokens of a group may be anywhere in the call. Which token writes a slot
is therefore recorded first, for every slot of the pool. A program then takes some tokens, one after the other, and for
each that leads its group, being the first of it that the call writes, takes the whole group twice: for its largest
magnitude, of the tokens of the call and of those cached before them, and to quantise both with the scale that gives.
Groups have one leader and slots are distinct, so no two programs write the same bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.runtime import device
from pallas_attn.triton import caches, tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.pieces import amax_scale, e4m3_from_f32, f16_from_e4m3
from pallas_attn.types import QMAX, PagedKV

TILE_ELEMENTS = 1024
"""Elements that a program writes at a time: 8 for each of its 128 threads."""

MOST_HEADS = 4
"""Heads of a token that a program takes, at most."""

MOST_SCANNED = 16
"""Tokens among which a program looks for leaders, at most."""

FEW_ENTRIES = 4096
"""Tokens and heads of a call up to which a program looks at one token."""

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a float32 of up to 2**22 leaves no places after the point."""


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    caches.refuse_8_bits(call.kv)
    if min(call.k.shape[-1], call.v.shape[-1]) == 1:
        raise NotImplementedError("takes heads of two columns or more, got one")
    if _group_tokens(call.kv) > 1:
        return _write_groups(call), _rotated_queries(call)
    return _write_rows(call)


def _rotated_queries(call: WriteKVCall) -> Float[Array, "T Hq D"] | None:
    rope, q = call.rope, call.q
    if q is None or rope is None:
        return q
    (q,) = launch(
        _rotate_queries,
        *(q, rope.cos, rope.sin, rope.q_norm, call.num_tokens),
        outputs=[q],
        grid=(_token_blocks(call), q.shape[1] // _heads(call)),
        constants=_row_constants(call) | _block_constants(call) | {"HEADS": q.shape[1]},
        bytes_accessed=2 * q.size * q.dtype.itemsize,
    )
    return q


def _write_rows(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    """Write tokens that share no scale with others, and rotate their queries."""
    kv, rope, q = call.kv, call.rope, call.q if call.rope is not None else None
    scales = None if kv.k_scale is None else {1: "head", 2: "channel", 3: "token"}[kv.k_scale.ndim]
    dynamic = scales == "token"
    none = jax.ShapeDtypeStruct((1,), jnp.float32)
    written: list[Any] = [kv.k, kv.v if kv.v is not None else none]
    written += [kv.k_scale, kv.v_scale] if dynamic else [none, none]
    q_heads = 0 if q is None else q.shape[1]
    q_bytes = 0 if q is None else 2 * q.size * q.dtype.itemsize
    k, v, k_scale, v_scale, rotated = launch(
        _write_tokens,
        *(call.k, call.v, call.slots, kv.k, kv.v, kv.k_scale, kv.v_scale, q),
        *((None, None, None, None) if rope is None else (rope.cos, rope.sin, rope.k_norm, rope.q_norm)),
        call.num_tokens,
        outputs=[*written, none if q is None else q],
        grid=(_token_blocks(call), (2 * kv.k.shape[1] + q_heads) // _heads(call)),
        constants=_row_constants(call)
        | _block_constants(call)
        | _pool_constants(call)
        | {"Q_HEADS": q_heads, "SCALES": scales},
        aliases={3: 0} | ({} if kv.is_fused else {4: 1}) | ({5: 2, 6: 3} if dynamic else {}),
        bytes_accessed=_bytes_written(call) + q_bytes,
    )
    scales_now = (k_scale, v_scale) if dynamic else (kv.k_scale, kv.v_scale)
    return kv.with_pages(k, v, *scales_now), call.q if q is None else rotated


def _write_groups(call: WriteKVCall) -> PagedKV:
    """Write tokens whose groups share scales."""
    kv, rope = call.kv, call.rope
    group, width = _group_tokens(kv), tiles.power_of_two(_widest(call), at_least=2)
    scanned = min(MOST_SCANNED, max(1, call.num_tokens * kv.k.shape[1] // FEW_ENTRIES))
    none = jax.ShapeDtypeStruct((1,), jnp.float32)
    written: list[Any] = [kv.k, none if kv.v is None else kv.v, kv.k_scale, kv.v_scale]
    k, v, k_scale, v_scale = launch(
        _write_led_groups,
        *(call.k, call.v, call.slots, _writers(call), kv.k, kv.v, kv.k_scale, kv.v_scale),
        *((None, None, None) if rope is None else (rope.cos, rope.sin, rope.k_norm)),
        call.num_tokens,
        outputs=written,
        grid=(-(-call.num_tokens // scanned), kv.k.shape[1], 2),
        constants=_row_constants(call)
        | _pool_constants(call)
        | {
            "SCANNED": scanned,
            "GROUP": group,
            "GROUP_LANES": tiles.power_of_two(group, at_least=1),
            "TOKENS": max(1, min(tiles.power_of_two(group, at_least=1), TILE_ELEMENTS // width)),
        },
        max_registers=128,
        aliases={4: 0, 6: 2, 7: 3} | ({} if kv.is_fused else {5: 1}),
        bytes_accessed=_bytes_written(call),
    )
    return kv.with_pages(k, v, k_scale, v_scale)


def _bytes_written(call: WriteKVCall) -> int:
    """Bytes of new keys and values, read and written."""
    return sum(x.size * (x.dtype.itemsize + call.kv.k.dtype.itemsize) for x in (call.k, call.v))


def _widest(call: WriteKVCall) -> int:
    """Columns of keys or of values, whichever are more."""
    return max(call.k.shape[-1], call.v.shape[-1])


def _writers(call: WriteKVCall) -> Int32[Array, "slots"]:
    """Which token (or, where heads have slots of their own, which token and head) writes each slot; -1 for none."""
    num_slots, slots = _num_slots(call), call.slots.reshape(-1)
    if num_slots > jnp.iinfo(jnp.int32).max - slots.shape[0]:
        raise NotImplementedError(f"takes pools of fewer slots where tokens share scales, got {num_slots}")
    entry = jnp.arange(slots.shape[0], dtype=jnp.int32)
    written = page_or_none(slots, (slots >= 0) & (slots < num_slots), num_slots)
    return put(jnp.full((num_slots,), -1, jnp.int32), (written,), entry)


def _num_slots(call: WriteKVCall) -> int:
    """Slots that an int32 names, of the pool or, head-wise, of its rows."""
    num_pages, kv_heads, page_size, _ = call.kv.k.shape
    slots = num_pages * page_size * (kv_heads if call.slots.ndim == 2 else 1)
    return min(slots, jnp.iinfo(jnp.int32).max)


def _group_tokens(kv: PagedKV) -> int:
    """Tokens that share a dynamic scale; 0 without those."""
    return kv.page_size // kv.k_scale.shape[-1] if kv.k_scale is not None and kv.k_scale.ndim == 3 else 0


def _rows(call: WriteKVCall) -> int:
    """Rows of columns, each a head of a token, that a program writes at a time."""
    return max(1, TILE_ELEMENTS // tiles.power_of_two(_widest(call), at_least=2))


def _heads(call: WriteKVCall) -> int:
    """Heads of a token among those rows: a power of two that divides KV heads, and so query heads."""
    kv_heads = call.kv.k.shape[1]
    return min(kv_heads & -kv_heads, MOST_HEADS, _rows(call))


def _token_blocks(call: WriteKVCall) -> int:
    """Programs that share the tokens of a head."""
    return -(-call.num_tokens // (_rows(call) // _heads(call)))


def _block_constants(call: WriteKVCall) -> dict[str, Any]:
    return {"ROWS": _rows(call), "BLOCK_HEADS": _heads(call)}


def _row_constants(call: WriteKVCall) -> dict[str, Any]:
    """Columns of a head, and what rotation and norms do to them."""
    rope, width = call.rope, call.k.shape[-1]
    half = width // 2 if rope is None else rope.cos.shape[-1]
    return _thirds("", width, half) | {
        "INTERLEAVED": rope is not None and rope.style == "interleaved",
        "NORM_AFTER": rope is not None and rope.norm_order == "after_rope",
        "EPS": 0.0 if rope is None else rope.norm_eps,
    }


def _thirds(prefix: str, width: int, half: int) -> dict[str, int]:
    """Sizes of the three tiles that columns are cut into: two of `half`, and the rest."""
    return {
        f"{prefix}WIDTH": width,
        f"{prefix}HALF": half,
        f"{prefix}HALF_LANES": tiles.power_of_two(half, at_least=1),
        f"{prefix}REST_LANES": tiles.power_of_two(width - 2 * half, at_least=1),
    }


def _pool_constants(call: WriteKVCall) -> dict[str, Any]:
    kv, (pages, first_column), value_dim = call.kv, call.kv.values, call.v.shape[-1]
    # Values are cut like keys where they can be, so that both are one function of the kernel.
    half = _row_constants(call)["HALF"] if value_dim == call.k.shape[-1] else value_dim // 2
    return _thirds("V_", value_dim, half) | {
        "K_STRIDE": kv.k.shape[-1],
        "V_STRIDE": pages.shape[-1],
        "V_FIRST": first_column,
        "FUSED": kv.is_fused,
        "KV_HEADS": kv.k.shape[1],
        "PAGE": kv.page_size,
        "NUM_SLOTS": _num_slots(call),
        "HEAD_SLOTS": call.slots.ndim == 2,
        "QMAX": None if kv.k_scale is None else float(QMAX[kv.k.dtype]),
        "NATIVE": tiles.has_e4m3(device.triton_card()),
    }


# --- rows of columns: those that are rotated in two tiles [tokens, HALF_LANES], others in one [tokens, REST_LANES]


@kernel
def _columns(
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Columns of the three tiles, and which lanes of the first two and of the third have one."""
    lane, other = tl.arange(0, HALF_LANES), tl.arange(0, REST_LANES)
    first, second = lane, lane + HALF
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    return first, second, 2 * HALF + other, lane < HALF, other < WIDTH - 2 * HALF


@kernel
def _load(x_ptr, row, real, columns, real_columns, STRIDE: tl.constexpr):
    """A tile of columns of rows (int64), which begin STRIDE apart."""
    at = (row * STRIDE)[:, None] + columns[None, :]
    return tl.load(x_ptr + at, mask=real[:, None] & real_columns[None, :], other=0)


@kernel
def _normed(
    a, b, c, norm_ptr, columns_a, columns_b, columns_c, real_half, real_rest, WIDTH: tl.constexpr, EPS: tl.constexpr
):
    """Rows over the root of their mean square, times a weight for each column."""
    square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
    inverse = tl.rsqrt(square / WIDTH + EPS)[:, None]
    a = a * inverse * tl.load(norm_ptr + columns_a, mask=real_half, other=0.0).to(tl.float32)[None, :]
    b = b * inverse * tl.load(norm_ptr + columns_b, mask=real_half, other=0.0).to(tl.float32)[None, :]
    c = c * inverse * tl.load(norm_ptr + columns_c, mask=real_rest, other=0.0).to(tl.float32)[None, :]
    return a, b, c


@kernel
def _turned(
    x_ptr,
    row,
    token,
    real,
    cos_ptr,  # [T, HALF], or None for columns as they are
    sin_ptr,
    norm_ptr,  # [WIDTH] or None
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
):
    """Three tiles of rows, normed and rotated in float32."""
    columns_a, columns_b, columns_c, real_half, real_rest = _columns(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED)
    a = _load(x_ptr, row, real, columns_a, real_half, WIDTH)
    b = _load(x_ptr, row, real, columns_b, real_half, WIDTH)
    c = _load(x_ptr, row, real, columns_c, real_rest, WIDTH)
    if cos_ptr is not None:
        a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        if norm_ptr is not None and not NORM_AFTER:
            a, b, c = _normed(a, b, c, norm_ptr, columns_a, columns_b, columns_c, real_half, real_rest, WIDTH, EPS)
        angle = tl.arange(0, HALF_LANES)
        cos = _load(cos_ptr, token.to(tl.int64), real, angle, real_half, HALF)
        sin = _load(sin_ptr, token.to(tl.int64), real, angle, real_half, HALF)
        a, b = a * cos - b * sin, b * cos + a * sin
        if norm_ptr is not None and NORM_AFTER:
            a, b, c = _normed(a, b, c, norm_ptr, columns_a, columns_b, columns_c, real_half, real_rest, WIDTH, EPS)
    return a, b, c


@kernel
def _largest(a, b, c):
    """Largest magnitude of each row of three tiles; NaN where there is one."""
    amax = tl.maximum(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), tl.max(tl.abs(c), 1))
    nans = tl.max((a != a).to(tl.int32), 1) + tl.max((b != b).to(tl.int32), 1) + tl.max((c != c).to(tl.int32), 1)
    return tl.where(nans > 0, float("nan"), amax)


@kernel
def _quantised(x, scale, dtype: tl.constexpr, QMAX: tl.constexpr):
    """clip(x / scale) as int8, rounded half to even, or as bytes of float8_e4m3fn; `scale` has x's shape or a part."""
    quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    clipped = tl.where(quotient > QMAX, QMAX, tl.where(quotient < -QMAX, -QMAX, quotient))
    rounded = (clipped + ROUNDING) - ROUNDING
    return e4m3_from_f32(clipped) if dtype == tl.uint8 else rounded.to(tl.int8)


@kernel
def _dequantised(stored, scale, NATIVE: tl.constexpr):
    values = f16_from_e4m3(stored, NATIVE).to(tl.float32) if stored.dtype == tl.uint8 else stored.to(tl.float32)
    return values * scale


@kernel
def _rows_of(token_block, head_block, ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Token and head of each row of a program."""
    row = tl.arange(0, ROWS)
    token = token_block * (ROWS // BLOCK_HEADS) + row // BLOCK_HEADS
    return token, head_block * BLOCK_HEADS + row % BLOCK_HEADS


# --- queries


@kernel
def _rotate_queries(
    q_ptr,  # [T, HEADS, WIDTH]
    cos_ptr,  # [T, HALF]
    sin_ptr,
    norm_ptr,  # [WIDTH] or None
    num_tokens,
    out_ptr,  # [T, HEADS, WIDTH]
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, head = _rows_of(tl.program_id(0), tl.program_id(1), ROWS, BLOCK_HEADS)
    _rotate_rows(
        *(q_ptr, cos_ptr, sin_ptr, norm_ptr, num_tokens, out_ptr, token, head),
        *(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS, HEADS),
    )


@kernel
def _rotate_rows(
    q_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    num_tokens,
    out_ptr,
    token,
    head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
):
    real = token < num_tokens
    row = token.to(tl.int64) * HEADS + head
    a, b, c = _turned(
        *(q_ptr, row, token, real, cos_ptr, sin_ptr, norm_ptr),
        *(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS),
    )
    columns_a, columns_b, columns_c, real_half, real_rest = _columns(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED)
    _store(out_ptr, row, real, columns_a, real_half, a.to(out_ptr.dtype.element_ty), WIDTH)
    _store(out_ptr, row, real, columns_b, real_half, b.to(out_ptr.dtype.element_ty), WIDTH)
    _store(out_ptr, row, real, columns_c, real_rest, c.to(out_ptr.dtype.element_ty), WIDTH)


@kernel
def _store(x_ptr, row, real, columns, real_columns, values, STRIDE: tl.constexpr):
    at = (row * STRIDE)[:, None] + columns[None, :]
    tl.store(x_ptr + at, values, mask=real[:, None] & real_columns[None, :])


# --- tokens that share no scale


@kernel
def _write_tokens(
    k_ptr,  # [T, KV_HEADS, WIDTH]
    v_ptr,  # [T, KV_HEADS, V_WIDTH]
    slots_ptr,  # [T] or [T, KV_HEADS]
    _aliased_k_ptr,
    _aliased_v_ptr,
    k_static_ptr,  # [KV_HEADS], [KV_HEADS, WIDTH], the new scales, or None
    v_static_ptr,
    q_ptr,  # [T, Q_HEADS, WIDTH] or None
    cos_ptr,  # [T, HALF] or None
    sin_ptr,
    k_norm_ptr,  # [WIDTH] or None
    q_norm_ptr,
    num_tokens,
    k_pages_ptr,  # [pool rows, PAGE, K_STRIDE]
    v_pages_ptr,  # [pool rows, PAGE, V_STRIDE], or one number that nobody writes
    k_scale_ptr,  # [pool rows, PAGE], or one number that nobody writes
    v_scale_ptr,
    q_out_ptr,  # [T, Q_HEADS, WIDTH], or one number that nobody writes
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HEAD_SLOTS: tl.constexpr,
    QMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    SCALES: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_HALF: tl.constexpr,
    V_HALF_LANES: tl.constexpr,
    V_REST_LANES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    FUSED: tl.constexpr,
):
    values_ptr = k_pages_ptr + V_FIRST if FUSED else v_pages_ptr
    kv_blocks: tl.constexpr = KV_HEADS // BLOCK_HEADS  # of heads: of k, then of v, then of q
    block = tl.program_id(1)
    if block < 2 * kv_blocks:
        token, head = _rows_of(tl.program_id(0), block % kv_blocks, ROWS, BLOCK_HEADS)
        entry = token * KV_HEADS + head if HEAD_SLOTS else token
        slot = tl.load(slots_ptr + entry, mask=token < num_tokens, other=-1)
        real = (slot >= 0) & (slot < NUM_SLOTS)
        pool_row = (slot // PAGE).to(tl.int64)
        if not HEAD_SLOTS:
            pool_row = pool_row * KV_HEADS + head
        pool_row = pool_row * PAGE + slot % PAGE
        row = token.to(tl.int64) * KV_HEADS + head
        if block < kv_blocks:
            _write_tiles(
                *(k_ptr, row, token, cos_ptr, sin_ptr, k_norm_ptr, k_pages_ptr, k_static_ptr, k_scale_ptr, pool_row),
                *(real, head, WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS, QMAX, SCALES),
                K_STRIDE,
            )
        else:
            _write_tiles(
                *(v_ptr, row, token, None, None, None, values_ptr, v_static_ptr, v_scale_ptr, pool_row),
                *(real, head, V_WIDTH, V_HALF, V_HALF_LANES, V_REST_LANES, INTERLEAVED, NORM_AFTER, EPS, QMAX, SCALES),
                V_STRIDE,
            )
    elif Q_HEADS > 0:
        token, head = _rows_of(tl.program_id(0), block - 2 * kv_blocks, ROWS, BLOCK_HEADS)
        _rotate_rows(
            *(q_ptr, cos_ptr, sin_ptr, q_norm_ptr, num_tokens, q_out_ptr, token, head),
            *(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS, Q_HEADS),
        )


@kernel
def _write_tiles(
    x_ptr,
    row,
    token,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    pages_ptr,
    static_ptr,
    scale_ptr,
    pool_row,
    real,
    head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    QMAX: tl.constexpr,
    SCALES: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Casts or quantises rows of k or v, and stores them in rows of the pool's tokens."""
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    a, b, c = _turned(
        *(x_ptr, row, token, real, cos_ptr, sin_ptr, norm_ptr),
        *(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS),
    )
    columns_a, columns_b, columns_c, real_half, real_rest = _columns(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED)
    if SCALES is None:
        a, b, c = a.to(dtype), b.to(dtype), c.to(dtype)
    else:
        a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        if SCALES == "channel":
            scale_a = _channel_scales(static_ptr, head, columns_a, real_half, WIDTH)
            scale_b = _channel_scales(static_ptr, head, columns_b, real_half, WIDTH)
            scale_c = _channel_scales(static_ptr, head, columns_c, real_rest, WIDTH)
        elif SCALES == "head":
            scale_a = tl.load(static_ptr + head)[:, None]
            scale_b, scale_c = scale_a, scale_a
        else:
            scale = amax_scale(_largest(a, b, c), QMAX)
            tl.store(scale_ptr + pool_row, scale, mask=real)
            scale_a = scale[:, None]
            scale_b, scale_c = scale_a, scale_a
        a = _quantised(a, scale_a, dtype, QMAX)
        b = _quantised(b, scale_b, dtype, QMAX)
        c = _quantised(c, scale_c, dtype, QMAX)
    _store(pages_ptr, pool_row, real, columns_a, real_half, a, STRIDE)
    _store(pages_ptr, pool_row, real, columns_b, real_half, b, STRIDE)
    _store(pages_ptr, pool_row, real, columns_c, real_rest, c, STRIDE)


@kernel
def _channel_scales(static_ptr, head, columns, real_columns, WIDTH: tl.constexpr):
    """Scales [rows, columns] of rows' heads; 1 for lanes without a column."""
    return tl.load(static_ptr + head[:, None] * WIDTH + columns[None, :], mask=real_columns[None, :], other=1.0)


# --- groups of tokens that share a scale


@kernel
def _write_led_groups(
    k_ptr,  # [T, KV_HEADS, WIDTH]
    v_ptr,  # [T, KV_HEADS, V_WIDTH]
    slots_ptr,  # [T] or [T, KV_HEADS]
    writers_ptr,  # [NUM_SLOTS]
    _aliased_k_ptr,
    _aliased_v_ptr,
    _aliased_k_scale_ptr,
    _aliased_v_scale_ptr,
    cos_ptr,  # [T, HALF] or None
    sin_ptr,
    norm_ptr,  # [WIDTH] or None
    num_tokens,
    k_pages_ptr,  # [pool rows, PAGE, K_STRIDE]
    v_pages_ptr,  # [pool rows, PAGE, V_STRIDE], or one number that nobody writes
    k_scale_ptr,  # [pool rows, PAGE / GROUP]
    v_scale_ptr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HEAD_SLOTS: tl.constexpr,
    QMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    SCANNED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_HALF: tl.constexpr,
    V_HALF_LANES: tl.constexpr,
    V_REST_LANES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    FUSED: tl.constexpr,
):
    values_ptr = k_pages_ptr + V_FIRST if FUSED else v_pages_ptr
    head = tl.program_id(1)
    for token in range(tl.program_id(0) * SCANNED, tl.minimum((tl.program_id(0) + 1) * SCANNED, num_tokens)):
        slot = tl.load(slots_ptr + (token * KV_HEADS + head if HEAD_SLOTS else token))
        if (slot >= 0) & (slot < NUM_SLOTS):
            begin = slot // GROUP * GROUP
            place = tl.arange(0, GROUP_LANES)
            writer = tl.load(writers_ptr + begin + place, mask=place < GROUP, other=-1)
            leader = tl.min(tl.where(writer >= 0, place, GROUP), 0)
            if leader == slot - begin:
                if tl.program_id(2) == 0:
                    _write_group(
                        *(k_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, k_pages_ptr, k_scale_ptr),
                        *(begin, leader, head, WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS),
                        *(TOKENS, KV_HEADS, PAGE, HEAD_SLOTS, QMAX, NATIVE, GROUP, K_STRIDE),
                    )
                else:
                    _write_group(
                        *(v_ptr, writers_ptr, None, None, None, values_ptr, v_scale_ptr, begin, leader, head),
                        *(V_WIDTH, V_HALF, V_HALF_LANES, V_REST_LANES, INTERLEAVED, NORM_AFTER, EPS),
                        *(TOKENS, KV_HEADS, PAGE, HEAD_SLOTS, QMAX, NATIVE, GROUP, V_STRIDE),
                    )


@kernel
def _write_group(
    x_ptr,
    writers_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    pages_ptr,
    scale_ptr,
    begin,  # first slot of the group
    leader,  # lowest place in the group that the call writes
    head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_SLOTS: tl.constexpr,
    QMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Scales a group, and writes the call's tokens of it and those before its leader."""
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    columns_a, columns_b, columns_c, real_half, real_rest = _columns(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED)
    pool_row = (begin // PAGE).to(tl.int64)
    if not HEAD_SLOTS:
        pool_row = pool_row * KV_HEADS + head
    first_row = pool_row * PAGE + begin % PAGE
    scale_at = scale_ptr + first_row // GROUP + tl.zeros([1], tl.int32)
    old_scale = tl.load(scale_at)

    amax, stored_amax = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, GROUP, TOKENS):
        a, b, c, _, new = _members(
            *(x_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, begin, start, head, WIDTH, HALF, HALF_LANES, REST_LANES),
            *(INTERLEAVED, NORM_AFTER, EPS, TOKENS, KV_HEADS, HEAD_SLOTS, GROUP),
        )
        largest = tl.where(new, _largest(a, b, c), 0.0)
        amax = _larger(amax, largest)
        place = start + tl.arange(0, TOKENS)
        row, earlier = first_row + place, place < leader
        a = _dequantised(_load(pages_ptr, row, earlier, columns_a, real_half, STRIDE), 1.0, NATIVE)
        b = _dequantised(_load(pages_ptr, row, earlier, columns_b, real_half, STRIDE), 1.0, NATIVE)
        c = _dequantised(_load(pages_ptr, row, earlier, columns_c, real_rest, STRIDE), 1.0, NATIVE)
        stored_amax = _larger(stored_amax, _largest(a, b, c))
    held = old_scale * tl.div_rn(stored_amax, tl.full([1], QMAX, tl.float32))
    scale = amax_scale(amax, QMAX, tl.where(stored_amax == 0, 0.0, held))
    tl.store(scale_at, scale)

    for start in range(0, GROUP, TOKENS):
        a, b, c, place, new = _members(
            *(x_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, begin, start, head, WIDTH, HALF, HALF_LANES, REST_LANES),
            *(INTERLEAVED, NORM_AFTER, EPS, TOKENS, KV_HEADS, HEAD_SLOTS, GROUP),
        )
        row, earlier = first_row + place, place < leader
        _requantise(
            pages_ptr, row, new, earlier, columns_a, real_half, a, old_scale, scale, dtype, STRIDE, QMAX, NATIVE
        )
        _requantise(
            pages_ptr, row, new, earlier, columns_b, real_half, b, old_scale, scale, dtype, STRIDE, QMAX, NATIVE
        )
        _requantise(
            pages_ptr, row, new, earlier, columns_c, real_rest, c, old_scale, scale, dtype, STRIDE, QMAX, NATIVE
        )


@kernel
def _members(
    x_ptr,
    writers_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    begin,
    start,
    head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Tiles of the call's tokens at some places of a group in float32, the places, and which of them it writes."""
    place = start + tl.arange(0, TOKENS)
    writer = tl.load(writers_ptr + begin + place, mask=place < GROUP, other=-1)
    new = writer >= 0
    if HEAD_SLOTS:  # any head writes to any row
        row, token = writer.to(tl.int64), writer // KV_HEADS
    else:
        row, token = writer.to(tl.int64) * KV_HEADS + head, writer
    a, b, c = _turned(
        *(x_ptr, row, token, new, cos_ptr, sin_ptr, norm_ptr),
        *(WIDTH, HALF, HALF_LANES, REST_LANES, INTERLEAVED, NORM_AFTER, EPS),
    )
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), place, new


@kernel
def _larger(amax, values):
    """The larger of a number [1] and the largest of some; NaN if any is."""
    is_nan = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.where(is_nan, float("nan"), tl.max(values, 0))
    return tl.maximum(amax, largest, propagate_nan=tl.PropagateNan.ALL)


@kernel
def _requantise(
    pages_ptr,
    row,
    new,
    earlier,
    columns,
    real_columns,
    x,
    old_scale,
    scale,
    dtype: tl.constexpr,
    STRIDE: tl.constexpr,
    QMAX: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Stores a tile of new tokens, and of earlier ones as the new scale has them."""
    stored = _load(pages_ptr, row, earlier, columns, real_columns, STRIDE)
    values = tl.where(new[:, None], x, _dequantised(stored, old_scale[:, None], NATIVE))
    _store(
        pages_ptr, row, new | earlier, columns, real_columns, _quantised(values, scale[:, None], dtype, QMAX), STRIDE
    )
