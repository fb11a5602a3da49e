"""`write_kv` in Triton, for GPUs from Ampere (sm80) on.

A row is one head of one token: a row of k, v or q, or a row of the pool, which has pages·Hkv·ps rows. A slot is the
place that a token is written to: page·ps + offset, or with head-wise slots the index of a pool row.

If no tokens share a scale (`_write_tokens`), a program holds the rows of a block of tokens and adjacent heads, of k, v
or q, in registers:

    block of k  -> three tiles -> RMSNorm, RoPE -> cast or quantise -> rows of the pool, dynamic scales
    block of v  -> three tiles                  -> cast or quantise -> rows of the pool, dynamic scales
    block of q  -> three tiles -> RMSNorm, RoPE                     -> q

The columns of a block's rows are in three register tiles. Tile 0 has the first columns of the pairs that RoPE rotates,
tile 1 the second columns, so that one thread has both columns of a pair. Tile 2 has the columns without rotation. A
program loads the angles of a token once for several heads; otherwise most of the L2 traffic would be angles.

If groups of tokens share a dynamic scale (`_write_led_groups`), the new tokens of a group can be anywhere in the call.
XLA first records which token writes each slot of the pool. The leader of a group is the group's lowest slot that the
call writes.

    for token in the program's tokens:
        if the token's slot is the leader of its group:
            amax = largest magnitude of the group's new tokens
            stored_amax = largest stored magnitude of the group's cached tokens before the leader
            scale = scale of the group from both
            write the new tokens, quantised, and the cached tokens before the leader, requantised

There are no barriers between programs. Each group has one leader and slots are distinct, so no two programs write the
same bytes.
"""

from __future__ import annotations

import dataclasses
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
from pallas_attn.triton.quantise import amax_scale, dequantise, quantise, row_amax
from pallas_attn.types import QMAX, PagedKV

TILE_ELEMENTS = 1024
"""Elements that a program writes at a time: 8 for each of its 128 threads."""

MAX_BLOCK_HEADS = 4
"""Maximum number of adjacent heads that a program handles at a time."""

MAX_SCANNED = 16
"""Maximum number of tokens that a program of `_write_led_groups` checks for leaders."""

ENTRIES_PER_SCANNED_TOKEN = 4096
"""A program checks one token for each 4,096 rows (tokens times KV heads) of the call, and at least one."""


@dataclasses.dataclass(frozen=True)
class HeadColumns:
    """Compile-time description of a head's columns as three tiles, and of RMSNorm and RoPE.

    Attributes:
      width: columns of a head.
      half: columns of tile 0, and of tile 1; tile 2 has the remaining columns.
      half_lanes, rest_lanes: columns of tiles 0 and 1, and of tile 2, padded to powers of two.
      interleaved: whether tiles 0 and 1 have the even and odd columns; otherwise the first and the second `half`
        columns.
      norm_after: whether RMSNorm is applied after RoPE.
      eps: epsilon of RMSNorm.
    """

    width: int
    half: int
    half_lanes: int
    rest_lanes: int
    interleaved: bool
    norm_after: bool
    eps: float

    @staticmethod
    def of(call: WriteKVCall, width: int, half: int) -> HeadColumns:
        rope = call.rope
        return HeadColumns(
            width,
            half,
            tiles.power_of_two(half, at_least=1),
            tiles.power_of_two(width - 2 * half, at_least=1),
            interleaved=rope is not None and rope.style == "interleaved",
            norm_after=rope is not None and rope.norm_order == "after_rope",
            eps=0.0 if rope is None else rope.norm_eps,
        )


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Compile-time description of the pool.

    Attributes:
      kv_heads: Hkv.
      page: ps, tokens per page.
      num_slots: number of slots in the pool, at most the largest int32.
      head_slots: whether slots are head-wise, one for each token and head.
      qmax: largest magnitude of the quantised dtype; None for 16-bit and 32-bit caches.
      native: whether the GPU has instructions that convert float8_e4m3fn.
    """

    kv_heads: int
    page: int
    num_slots: int
    head_slots: bool
    qmax: float | None
    native: bool

    @staticmethod
    def of(call: WriteKVCall) -> PoolLayout:
        kv = call.kv
        return PoolLayout(
            kv.k.shape[1],
            kv.page_size,
            _num_slots(call),
            head_slots=call.slots.ndim == 2,
            qmax=None if kv.k_scale is None else float(QMAX[kv.k.dtype]),
            native=tiles.has_e4m3(device.triton_card()),
        )


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    caches.require_cache_dtype(call.kv)
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
        grid=(_token_blocks(call), q.shape[1] // _block_heads(call)),
        constants=_block_constants(call) | {"COLUMNS": _key_columns(call), "HEADS": q.shape[1]},
        bytes_accessed=2 * q.size * q.dtype.itemsize,
    )
    return q


def _write_rows(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    """Write tokens that share no scale with other tokens, and rotate the queries."""
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
        grid=(_token_blocks(call), (2 * kv.k.shape[1] + q_heads) // _block_heads(call)),
        constants=_block_constants(call) | _cache_constants(call) | {"Q_HEADS": q_heads, "SCALES": scales},
        aliases={3: 0} | ({} if kv.is_fused else {4: 1}) | ({5: 2, 6: 3} if dynamic else {}),
        bytes_accessed=_bytes_written(call) + q_bytes,
    )
    scales_now = (k_scale, v_scale) if dynamic else (kv.k_scale, kv.v_scale)
    return kv.with_pages(k, v, *scales_now), call.q if q is None else rotated


def _write_groups(call: WriteKVCall) -> PagedKV:
    """Write tokens if groups of tokens share scales."""
    kv, rope = call.kv, call.rope
    group, width = _group_tokens(kv), tiles.power_of_two(_max_width(call), at_least=2)
    scanned = min(MAX_SCANNED, max(1, call.num_tokens * kv.k.shape[1] // ENTRIES_PER_SCANNED_TOKEN))
    none = jax.ShapeDtypeStruct((1,), jnp.float32)
    written: list[Any] = [kv.k, none if kv.v is None else kv.v, kv.k_scale, kv.v_scale]
    k, v, k_scale, v_scale = launch(
        _write_led_groups,
        *(call.k, call.v, call.slots, _writers(call), kv.k, kv.v, kv.k_scale, kv.v_scale),
        *((None, None, None) if rope is None else (rope.cos, rope.sin, rope.k_norm)),
        call.num_tokens,
        outputs=written,
        grid=(-(-call.num_tokens // scanned), kv.k.shape[1], 2),
        constants=_cache_constants(call)
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
    """Return the number of bytes that are read and written for new keys and values."""
    return sum(x.size * (x.dtype.itemsize + call.kv.k.dtype.itemsize) for x in (call.k, call.v))


def _max_width(call: WriteKVCall) -> int:
    return max(call.k.shape[-1], call.v.shape[-1])


def _writers(call: WriteKVCall) -> Int32[Array, "slots"]:
    """Return the index of the token that writes each slot of the pool, or -1. With head-wise slots, the index is
    token·Hkv + head.
    """
    num_slots, slots = _num_slots(call), call.slots.reshape(-1)
    limit = jnp.iinfo(jnp.int32).max - slots.shape[0]
    if num_slots > limit:
        raise NotImplementedError(f"takes pools of up to {limit} slots if tokens share a scale, got {num_slots}")
    entry = jnp.arange(slots.shape[0], dtype=jnp.int32)
    written = page_or_none(slots, (slots >= 0) & (slots < num_slots), num_slots)
    return put(jnp.full((num_slots,), -1, jnp.int32), (written,), entry)


def _num_slots(call: WriteKVCall) -> int:
    """Return the number of slots in the pool, or the largest int32 if the pool has more: slots are int32."""
    num_pages, kv_heads, page_size, _ = call.kv.k.shape
    slots = num_pages * page_size * (kv_heads if call.slots.ndim == 2 else 1)
    return min(slots, jnp.iinfo(jnp.int32).max)


def _group_tokens(kv: PagedKV) -> int:
    """Return the number of tokens that share a dynamic scale; 0 without dynamic scales."""
    return kv.page_size // kv.k_scale.shape[-1] if kv.k_scale is not None and kv.k_scale.ndim == 3 else 0


def _block_rows(call: WriteKVCall) -> int:
    """Return the number of rows of a program's block. A row is one head of one token."""
    return max(1, TILE_ELEMENTS // tiles.power_of_two(_max_width(call), at_least=2))


def _block_heads(call: WriteKVCall) -> int:
    """Return the number of heads of a program's block: a power of two that divides the number of KV heads, and
    therefore the number of query heads.
    """
    kv_heads = call.kv.k.shape[1]
    return min(kv_heads & -kv_heads, MAX_BLOCK_HEADS, _block_rows(call))


def _token_blocks(call: WriteKVCall) -> int:
    """Return the number of programs that all tokens of a block of heads are divided among."""
    return -(-call.num_tokens // (_block_rows(call) // _block_heads(call)))


def _block_constants(call: WriteKVCall) -> dict[str, Any]:
    return {"ROWS": _block_rows(call), "BLOCK_HEADS": _block_heads(call)}


def _key_columns(call: WriteKVCall) -> HeadColumns:
    width = call.k.shape[-1]
    return HeadColumns.of(call, width, width // 2 if call.rope is None else call.rope.cos.shape[-1])


def _cache_constants(call: WriteKVCall) -> dict[str, Any]:
    kv, (pages, first_column), value_dim = call.kv, call.kv.values, call.v.shape[-1]
    k_columns = _key_columns(call)
    # If values are as wide as keys, they are divided into the same tiles, although they have no rotated columns: Triton
    # then compiles each device function once for both.
    half = k_columns.half if value_dim == k_columns.width else value_dim // 2
    return {
        "COLUMNS": k_columns,
        "V_COLUMNS": HeadColumns.of(call, value_dim, half),
        "POOL": PoolLayout.of(call),
        "K_STRIDE": kv.k.shape[-1],
        "V_STRIDE": pages.shape[-1],
        "V_FIRST": first_column,
        "FUSED": kv.is_fused,
    }


# --- tiles of rows: tiles 0 and 1 [rows, half_lanes], tile 2 [rows, rest_lanes]


@kernel
def _tile_columns(TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the column of the head at each column of a tile, and whether it exists. Tiles are padded."""
    if TILE == 2:
        lane = tl.arange(0, COLUMNS.rest_lanes)
        column = 2 * COLUMNS.half + lane
        real = lane < COLUMNS.width - 2 * COLUMNS.half
    else:
        lane = tl.arange(0, COLUMNS.half_lanes)
        column = 2 * lane + TILE if COLUMNS.interleaved else lane + TILE * COLUMNS.half
        real = lane < COLUMNS.half
    return column, real


@kernel
def _load_tile(x_ptr, row, real, column, real_column, STRIDE: tl.constexpr):
    """Load the columns `column` of the rows with indices `row` (int64). Rows start STRIDE elements apart. Elements
    whose row or column does not exist are 0.
    """
    at = (row * STRIDE)[:, None] + column[None, :]
    return tl.load(x_ptr + at, mask=real[:, None] & real_column[None, :], other=0)


@kernel
def _store_tile(x_ptr, row, real, column, real_column, values, STRIDE: tl.constexpr):
    """Store the columns `column` of the rows with indices `row` (int64). Rows start STRIDE elements apart."""
    at = (row * STRIDE)[:, None] + column[None, :]
    tl.store(x_ptr + at, values, mask=real[:, None] & real_column[None, :])


@kernel
def _load_rows(x_ptr, row, real, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Load rows as three tiles."""
    x = ()
    for tile in tl.static_range(3):
        column, real_column = _tile_columns(tile, COLUMNS)
        x += (_load_tile(x_ptr, row, real, column, real_column, STRIDE),)
    return x


@kernel
def _store_rows(x_ptr, row, real, x, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Store three tiles as rows."""
    for tile in tl.static_range(3):
        column, real_column = _tile_columns(tile, COLUMNS)
        _store_tile(x_ptr, row, real, column, real_column, x[tile], STRIDE)


@kernel
def _cast(x, dtype: tl.constexpr):
    return x[0].to(dtype), x[1].to(dtype), x[2].to(dtype)


@kernel
def _norm(x, norm_ptr, COLUMNS: tl.constexpr):
    """Return rows after RMSNorm: divided by the root of their mean square, multiplied by the weight of each column."""
    square = tl.sum(x[0] * x[0], 1) + tl.sum(x[1] * x[1], 1) + tl.sum(x[2] * x[2], 1)
    inverse = tl.rsqrt(square / COLUMNS.width + COLUMNS.eps)[:, None]
    normed = ()
    for tile in tl.static_range(3):
        column, real_column = _tile_columns(tile, COLUMNS)
        weight = tl.load(norm_ptr + column, mask=real_column, other=0.0).to(tl.float32)
        normed += (x[tile] * inverse * weight[None, :],)
    return normed


@kernel
def _load_rotated(
    x_ptr,
    row,
    token,
    real,
    cos_ptr,  # [T, half], or None to load rows without RMSNorm and RoPE
    sin_ptr,
    norm_ptr,  # [width] or None
    COLUMNS: tl.constexpr,
):
    """Load rows as three tiles, and apply RMSNorm and RoPE in float32.

    Args:
      row: index of each row in x_ptr [rows, width].
      token: token of each row, which selects the angles.
      real: whether each row exists.
    """
    x = _load_rows(x_ptr, row, real, COLUMNS, COLUMNS.width)
    if cos_ptr is not None:
        x = _cast(x, tl.float32)
        if norm_ptr is not None and not COLUMNS.norm_after:
            x = _norm(x, norm_ptr, COLUMNS)
        angle = tl.arange(0, COLUMNS.half_lanes)
        cos = _load_tile(cos_ptr, token.to(tl.int64), real, angle, angle < COLUMNS.half, COLUMNS.half)
        sin = _load_tile(sin_ptr, token.to(tl.int64), real, angle, angle < COLUMNS.half, COLUMNS.half)
        x = (x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin, x[2])
        if norm_ptr is not None and COLUMNS.norm_after:
            x = _norm(x, norm_ptr, COLUMNS)
    return x


@kernel
def _block_tokens_and_heads(token_block, head_block, ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return the token and the head of each row of a program's block."""
    row = tl.arange(0, ROWS)
    token = token_block * (ROWS // BLOCK_HEADS) + row // BLOCK_HEADS
    return token, head_block * BLOCK_HEADS + row % BLOCK_HEADS


# --- queries


@kernel
def _rotate_queries(
    q_ptr,  # [T, HEADS, width]
    cos_ptr,  # [T, half]
    sin_ptr,
    norm_ptr,  # [width] or None
    num_tokens,
    out_ptr,  # [T, HEADS, width]
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, head = _block_tokens_and_heads(tl.program_id(0), tl.program_id(1), ROWS, BLOCK_HEADS)
    _rotate_query_rows(q_ptr, cos_ptr, sin_ptr, norm_ptr, num_tokens, out_ptr, token, head, COLUMNS, HEADS)


@kernel
def _rotate_query_rows(
    q_ptr, cos_ptr, sin_ptr, norm_ptr, num_tokens, out_ptr, token, head, COLUMNS: tl.constexpr, HEADS: tl.constexpr
):
    real = token < num_tokens
    row = token.to(tl.int64) * HEADS + head
    q = _load_rotated(q_ptr, row, token, real, cos_ptr, sin_ptr, norm_ptr, COLUMNS)
    _store_rows(out_ptr, row, real, _cast(q, out_ptr.dtype.element_ty), COLUMNS, COLUMNS.width)


# --- tokens that share no scale with other tokens


@kernel
def _write_tokens(
    k_ptr,  # [T, kv_heads, k width]
    v_ptr,  # [T, kv_heads, v width]
    slots_ptr,  # [T] or [T, kv_heads]
    _aliased_k_ptr,  # same memory as k_pages_ptr
    _aliased_v_ptr,  # same memory as v_pages_ptr
    k_static_ptr,  # static scales [kv_heads] or [kv_heads, k width]; None or unused if SCALES is neither
    v_static_ptr,
    q_ptr,  # [T, Q_HEADS, k width] or None
    cos_ptr,  # [T, half] or None
    sin_ptr,
    k_norm_ptr,  # [k width] or None
    q_norm_ptr,
    num_tokens,
    k_pages_ptr,  # [pages, kv_heads, page, K_STRIDE]
    v_pages_ptr,  # [pages, kv_heads, page, V_STRIDE]; one unused element if FUSED
    k_scale_ptr,  # [pages, kv_heads, page] dynamic scales; otherwise one unused element
    v_scale_ptr,
    q_out_ptr,  # [T, Q_HEADS, k width]; one unused element without queries
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    SCALES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    FUSED: tl.constexpr,
):
    values_ptr = k_pages_ptr + V_FIRST if FUSED else v_pages_ptr
    # Axis 1 of the grid has the blocks of heads of k, then of v, then of q.
    kv_blocks: tl.constexpr = POOL.kv_heads // BLOCK_HEADS
    block = tl.program_id(1)
    if block < 2 * kv_blocks:
        token, head = _block_tokens_and_heads(tl.program_id(0), block % kv_blocks, ROWS, BLOCK_HEADS)
        entry = token * POOL.kv_heads + head if POOL.head_slots else token
        slot = tl.load(slots_ptr + entry, mask=token < num_tokens, other=-1)
        real = (slot >= 0) & (slot < POOL.num_slots)
        pool_row = _pool_token(slot, head, POOL)
        row = token.to(tl.int64) * POOL.kv_heads + head
        if block < kv_blocks:
            keys = _load_rotated(k_ptr, row, token, real, cos_ptr, sin_ptr, k_norm_ptr, COLUMNS)
            _store_tokens(
                *(keys, k_pages_ptr, k_static_ptr, k_scale_ptr, pool_row, real, head, COLUMNS, POOL, SCALES, K_STRIDE)
            )
        else:
            values = _load_rotated(v_ptr, row, token, real, None, None, None, V_COLUMNS)
            _store_tokens(
                *(values, values_ptr, v_static_ptr, v_scale_ptr, pool_row, real, head, V_COLUMNS, POOL, SCALES),
                V_STRIDE,
            )
    elif Q_HEADS > 0:
        token, head = _block_tokens_and_heads(tl.program_id(0), block - 2 * kv_blocks, ROWS, BLOCK_HEADS)
        _rotate_query_rows(q_ptr, cos_ptr, sin_ptr, q_norm_ptr, num_tokens, q_out_ptr, token, head, COLUMNS, Q_HEADS)


@kernel
def _pool_token(slot, head, POOL: tl.constexpr):
    """Return the index (int64) of the pool row, in [pages·kv_heads·page, columns], of a slot and a head."""
    pool_row = (slot // POOL.page).to(tl.int64)
    if not POOL.head_slots:
        pool_row = pool_row * POOL.kv_heads + head
    return pool_row * POOL.page + slot % POOL.page


@kernel
def _store_tokens(
    x,
    pages_ptr,
    static_ptr,
    scale_ptr,
    pool_row,
    real,
    head,
    COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    SCALES: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Cast or quantise rows of k or v, and store them in the pool. Also store dynamic scales.

    Args:
      x: the rows as three tiles.
      pool_row: index of the pool row that each row is stored in.
      real: whether each row is stored.
      SCALES: None, "head", "channel", or "token" for one dynamic scale per token and head.
    """
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    if SCALES is None:
        stored = _cast(x, dtype)
    else:
        x = _cast(x, tl.float32)
        scale = (None, None, None)
        if SCALES == "channel":
            scale = ()
            for tile in tl.static_range(3):
                column, real_column = _tile_columns(tile, COLUMNS)
                at = static_ptr + head[:, None] * COLUMNS.width + column[None, :]
                scale += (tl.load(at, mask=real_column[None, :], other=1.0),)
        elif SCALES == "head":
            of_head = tl.load(static_ptr + head)[:, None]
            scale = (of_head, of_head, of_head)
        else:
            of_token = amax_scale(row_amax(x), POOL.qmax)
            tl.store(scale_ptr + pool_row, of_token, mask=real)
            scale = (of_token[:, None], of_token[:, None], of_token[:, None])
        stored = ()
        for tile in tl.static_range(3):
            stored += (quantise(x[tile], scale[tile], dtype, POOL.qmax),)
    _store_rows(pages_ptr, pool_row, real, stored, COLUMNS, STRIDE)


# --- groups of tokens that share a scale


@kernel
def _write_led_groups(
    k_ptr,  # [T, kv_heads, k width]
    v_ptr,  # [T, kv_heads, v width]
    slots_ptr,  # [T] or [T, kv_heads]
    writers_ptr,  # [num_slots], see `_writers`
    _aliased_k_ptr,  # the four aliased operands have the memory of the four outputs below
    _aliased_v_ptr,
    _aliased_k_scale_ptr,
    _aliased_v_scale_ptr,
    cos_ptr,  # [T, half] or None
    sin_ptr,
    norm_ptr,  # [k width] or None
    num_tokens,
    k_pages_ptr,  # [pages, kv_heads, page, K_STRIDE]
    v_pages_ptr,  # [pages, kv_heads, page, V_STRIDE]; one unused element if FUSED
    k_scale_ptr,  # [pages, kv_heads, page / GROUP]
    v_scale_ptr,
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    TOKENS: tl.constexpr,
    SCANNED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr,
    FUSED: tl.constexpr,
):
    values_ptr = k_pages_ptr + V_FIRST if FUSED else v_pages_ptr
    head = tl.program_id(1)
    for token in range(tl.program_id(0) * SCANNED, tl.minimum((tl.program_id(0) + 1) * SCANNED, num_tokens)):
        slot = tl.load(slots_ptr + (token * POOL.kv_heads + head if POOL.head_slots else token))
        if (slot >= 0) & (slot < POOL.num_slots):
            begin = slot // GROUP * GROUP
            place = tl.arange(0, GROUP_LANES)
            writer = tl.load(writers_ptr + begin + place, mask=place < GROUP, other=-1)
            leader = tl.min(tl.where(writer >= 0, place, GROUP), 0)
            if leader == slot - begin:
                if tl.program_id(2) == 0:
                    _write_group(
                        *(k_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, k_pages_ptr, k_scale_ptr),
                        *(begin, leader, head, COLUMNS, POOL, TOKENS, GROUP, K_STRIDE),
                    )
                else:
                    _write_group(
                        *(v_ptr, writers_ptr, None, None, None, values_ptr, v_scale_ptr),
                        *(begin, leader, head, V_COLUMNS, POOL, TOKENS, GROUP, V_STRIDE),
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
    leader,  # offset in the group of the lowest slot that the call writes
    head,
    COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Compute the scale of a group, then write its new tokens and its cached tokens before the leader, for k or v."""
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    first_row = _pool_token(begin, head, POOL)
    scale_at = scale_ptr + first_row // GROUP + tl.zeros([1], tl.int32)
    old_scale = tl.load(scale_at)

    amax, stored_amax = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, GROUP, TOKENS):
        x, place, new = _load_members(
            x_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, begin, start, head, COLUMNS, POOL, TOKENS, GROUP
        )
        amax = _max_or_nan(amax, tl.where(new, row_amax(x), 0.0))
        row, earlier = first_row + place, place < leader
        stored = ()
        for tile in tl.static_range(3):
            column, real_column = _tile_columns(tile, COLUMNS)
            values = _load_tile(pages_ptr, row, earlier, column, real_column, STRIDE)
            stored += (dequantise(values, 1.0, POOL.native),)
        stored_amax = _max_or_nan(stored_amax, row_amax(stored))
    held = old_scale * tl.div_rn(stored_amax, tl.full([1], POOL.qmax, tl.float32))
    scale = amax_scale(amax, POOL.qmax, tl.where(stored_amax == 0, 0.0, held))
    tl.store(scale_at, scale)

    for start in range(0, GROUP, TOKENS):
        x, place, new = _load_members(
            x_ptr, writers_ptr, cos_ptr, sin_ptr, norm_ptr, begin, start, head, COLUMNS, POOL, TOKENS, GROUP
        )
        row, earlier = first_row + place, place < leader
        for tile in tl.static_range(3):
            column, real_column = _tile_columns(tile, COLUMNS)
            stored = _load_tile(pages_ptr, row, earlier, column, real_column, STRIDE)
            values = tl.where(new[:, None], x[tile], dequantise(stored, old_scale[:, None], POOL.native))
            values = quantise(values, scale[:, None], dtype, POOL.qmax)
            _store_tile(pages_ptr, row, new | earlier, column, real_column, values, STRIDE)


@kernel
def _load_members(
    x_ptr,
    writers_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    begin,
    start,
    head,
    COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load the new tokens at the offsets `start` to start + TOKENS - 1 of a group.

    Returns:
      The tokens as three float32 tiles, the offset of each token in the group, and whether the call has the token.
    """
    place = start + tl.arange(0, TOKENS)
    writer = tl.load(writers_ptr + begin + place, mask=place < GROUP, other=-1)
    new = writer >= 0
    if POOL.head_slots:  # the writer is token·Hkv + head; its head can differ from the head of the page
        row, token = writer.to(tl.int64), writer // POOL.kv_heads
    else:
        row, token = writer.to(tl.int64) * POOL.kv_heads + head, writer
    x = _load_rotated(x_ptr, row, token, new, cos_ptr, sin_ptr, norm_ptr, COLUMNS)
    return _cast(x, tl.float32), place, new


@kernel
def _max_or_nan(amax, values):
    """Return the maximum of amax [1] and values [rows]; NaN if any number is NaN."""
    is_nan = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.where(is_nan, float("nan"), tl.max(values, 0))
    return tl.maximum(amax, largest, propagate_nan=tl.PropagateNan.ALL)
