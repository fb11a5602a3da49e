"""Positions and slots of a step's tokens, computed on the device from lengths and block tables; validation on the host.

Code on the device cannot raise: with wrong metadata, an operation reads and writes wrong tokens. However, every
operation first clips its metadata (`checks.bound_sums`, `checks.bound_lens`), in the same way for all implementations.
Wrong lengths therefore change results, but never cause accesses outside the arrays or an unbounded running time.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32
from numpy.typing import ArrayLike

from pallas_attn import checks
from pallas_attn.portable.segments import segment_of
from pallas_attn.portable.visibility import head_windows
from pallas_attn.types import PAGE_NONE, HeadWindow, SlotRange


def cumulative_lens(lens: Int32[Array, "S"]) -> Int32[Array, "S_plus_1"]:
    """Return prefix sums starting with 0: [0, lens[0], lens[0] + lens[1], ...].

    Raises:
      ValueError: not an int32 vector.

    Example:
      >>> pallas_attn.cumulative_lens(jnp.array([3, 0, 2], jnp.int32)).tolist()
      [0, 3, 3, 5]
    """
    (lens,) = checks.int32(lens=lens)
    checks.Dims().check("lens", lens, "S", checks.INT)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])


def token_positions(
    cu_q_lens: Int32[Array, "S_plus_1"], kv_lens: Int32[Array, "S"], *, length: int
) -> Int32[Array, "length"]:
    """Return the position of each packed new token in its sequence. New tokens are the last tokens of a sequence.

    Args:
      cu_q_lens: prefix sums of the new tokens.
      kv_lens: tokens per sequence, including the new tokens.
      length: number of packed tokens, including padding.

    Returns:
      Positions; -1 for tokens of no sequence, and for positions before 0, which occur if a sequence has more new tokens
      than kv_len.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 3], jnp.int32), jnp.array([9, 4], jnp.int32)
      >>> pallas_attn.token_positions(cu_q_lens, kv_lens, length=5).tolist()
      [7, 8, 3, -1, -1]
    """
    _, position = _locate(cu_q_lens, kv_lens, length)
    return position


def slot_mapping(
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    page_size: int,
    length: int,
) -> Int32[Array, "length"] | Int32[Array, "length Hkv"]:
    """Return the slots that packed new tokens are written to, an argument of `write_kv` and `write_latent`.

    Args:
      block_tables: page ids, or row ids for head-wise tables.
      cu_q_lens: prefix sums of the new tokens.
      kv_lens: tokens per sequence, including the new tokens.
      page_size: ps.
      length: number of packed tokens, including padding.

    Returns:
      page·ps + offset, or row·ps + offset per head; -1 for tokens of no sequence, and where the page is absent, past
      the table, or has slots that exceed int32.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 3], jnp.int32), jnp.array([9, 4], jnp.int32)
      >>> pallas_attn.slot_mapping(block_tables, cu_q_lens, kv_lens, page_size=4, length=4).tolist()
      [3, 8, 15, -1]
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    checks.check_block_tables(block_tables, dims, rows="S")
    page_size = checks.size("page_size", page_size)
    sequence, position = _locate(cu_q_lens, kv_lens, length)
    entry = position // page_size
    inside = (position >= 0) & (entry < dims["P"])
    page = block_tables[sequence, ..., jnp.clip(entry, 0, dims["P"] - 1)]
    if page.ndim == 2:
        position, inside = position[:, None], inside[:, None]
    return jnp.where(inside & _has_slots(page, page_size), page * page_size + position % page_size, PAGE_NONE)


def token_slots(
    positions: Int32[Array, "T K"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    *,
    page_size: int,
) -> Int32[Array, "T K"]:
    """Return the slots of tokens that packed query tokens selected, an argument of `mla_sparse`.

    Args:
      positions: positions of the selected tokens in the sequence of each query token; -1 for none.
      block_tables: page ids.
      cu_q_lens: prefix sums of the query tokens.
      page_size: ps.

    Returns:
      page·ps + offset; -1 for no position, for positions past the table or on an absent page, and for tokens of no
      sequence.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> positions, block_tables = jnp.array([[0, 5, -1], [2, 3, -1]], jnp.int32), jnp.array([[5, 0]], jnp.int32)
      >>> cu_q_lens = jnp.array([0, 2], jnp.int32)
      >>> pallas_attn.token_slots(positions, block_tables, cu_q_lens, page_size=4).tolist()
      [[20, 1, -1], [22, 23, -1]]
    """
    positions, block_tables, cu_q_lens = checks.int32(
        positions=positions, block_tables=block_tables, cu_q_lens=cu_q_lens
    )
    dims = checks.Dims()
    dims.check("positions", positions, "T K", checks.INT)
    dims.check("block_tables", block_tables, "S P", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    page_size = checks.size("page_size", page_size)
    if not (dims["T"] and dims["S"]):
        return jnp.full_like(positions, PAGE_NONE)
    cu_q_lens, token = checks.bound_sums(cu_q_lens, dims["T"]), jnp.arange(dims["T"], dtype=jnp.int32)
    sequence = jnp.minimum(segment_of(cu_q_lens[1:], token), dims["S"] - 1)
    real = ((token >= cu_q_lens[0]) & (token < cu_q_lens[-1]))[:, None]
    return _slots_of(jnp.where(real, positions, -1), block_tables, sequence, page_size)


def window_slots(
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    page_size: int,
    window: int,
    length: int,
) -> Int32[Array, "length window"]:
    """Return the slots of the keys in the window of each packed new token, an argument of `mla_sparse`.

    Args:
      block_tables: page ids.
      cu_q_lens: prefix sums of the new tokens.
      kv_lens: tokens per sequence, including the new tokens.
      page_size: ps.
      window: number of keys up to the token's own key, which counts.
      length: number of packed tokens, including padding.

    Returns:
      page·ps + offset of the keys in ascending order of their positions, then -1 if fewer than `window` tokens precede
      or if the page of a key is absent; -1 for tokens of no sequence.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> block_tables = jnp.array([[5, 0]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2], jnp.int32), jnp.array([6], jnp.int32)
      >>> pallas_attn.window_slots(block_tables, cu_q_lens, kv_lens, page_size=4, window=3, length=3).tolist()
      [[22, 23, 0], [23, 0, 1], [-1, -1, -1]]
    """
    page_size = checks.size("page_size", page_size)
    return range_slots(window_range(block_tables, cu_q_lens, kv_lens, window=window, length=length), page_size)


def entry_slots(
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    ratio: int,
    page_size: int,
    length: int,
) -> Int32[Array, "length K"]:
    """Return the slots of all compressed entries that each packed new token sees, an argument of `mla_sparse`.

    A token at position p sees entry e if e < (p + 1) // ratio: `compress_and_write` writes the entry with the last
    token of its block. For entries that `index_top_k` selected, use `token_slots`.

    Args:
      block_tables: page ids of the entries: page j of a sequence has the entries j·page_size to (j + 1)·page_size - 1.
      cu_q_lens: prefix sums of the new tokens.
      kv_lens: tokens per sequence, including the new tokens.
      ratio: tokens per entry.
      page_size: entries per page.
      length: number of packed tokens, including padding.

    Returns:
      Slots of the entries in ascending order, then -1; K = P·page_size. -1 for entries on absent pages, and for tokens
      of no sequence.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> block_tables = jnp.array([[5, 0]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 3], jnp.int32), jnp.array([12], jnp.int32)
      >>> pallas_attn.entry_slots(block_tables, cu_q_lens, kv_lens, ratio=4, page_size=2, length=3).tolist()
      [[10, 11, -1, -1], [10, 11, -1, -1], [10, 11, 0, -1]]
    """
    seen = entry_range(block_tables, cu_q_lens, kv_lens, ratio=ratio, page_size=page_size, length=length)
    return range_slots(seen, page_size)


def window_range(
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    window: int,
    length: int,
) -> SlotRange:
    """Return the keys in the window of each packed new token, an argument of `mla_sparse`.

    `window_slots` returns their slots; the arguments are those of `window_slots`.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> block_tables = jnp.array([[5, 0]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2], jnp.int32), jnp.array([6], jnp.int32)
      >>> keys = pallas_attn.window_range(block_tables, cu_q_lens, kv_lens, window=3, length=3)
      >>> keys.first.tolist(), keys.count.tolist()
      ([2, 3, 0], [3, 3, 0])
    """
    block_tables, sequence, position = _locate_in(block_tables, cu_q_lens, kv_lens, length)
    window = checks.size("window", window)
    first = jnp.maximum(position - (window - 1), 0)
    return SlotRange(block_tables, sequence, first, position + 1 - first, window)


def entry_range(
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    ratio: int,
    page_size: int,
    length: int,
) -> SlotRange:
    """Return all compressed entries that each packed new token sees, an argument of `mla_sparse`.

    `entry_slots` returns their slots; the arguments are those of `entry_slots`.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> block_tables = jnp.array([[5, 0]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 3], jnp.int32), jnp.array([12], jnp.int32)
      >>> keys = pallas_attn.entry_range(block_tables, cu_q_lens, kv_lens, ratio=4, page_size=2, length=3)
      >>> keys.count.tolist(), keys.size
      ([2, 2, 3], 4)
    """
    block_tables, sequence, position = _locate_in(block_tables, cu_q_lens, kv_lens, length)
    size = block_tables.shape[1] * checks.size("page_size", page_size)
    count = jnp.minimum((position + 1) // checks.size("ratio", ratio), size)
    return SlotRange(block_tables, sequence, jnp.zeros_like(count), count, size)


def range_slots(keys: SlotRange, page_size: int) -> Int32[Array, "T size"]:
    """Return the slots of all keys of a range; -1 for places after the keys of a token, and for keys on absent pages.

    Args:
      keys: a range with valid sequences, positions and counts.
      page_size: ps.
    """
    tokens, places = (jnp.arange(n, dtype=jnp.int32) for n in (keys.count.shape[0], keys.size))
    return range_slots_at(keys, tokens, places, page_size)


def range_slots_at(
    keys: SlotRange, tokens: Int32[Array, "W"], places: Int32[Array, "n"], page_size: int
) -> Int32[Array, "W n"]:
    """Return the slots of the keys with these indices in the ranges of some tokens, as `range_slots` does."""
    positions = keys.first[tokens][:, None] + places[None]
    positions = jnp.where(places[None] < keys.count[tokens][:, None], positions, -1)
    return _slots_of(positions, keys.block_tables, keys.sequence[tokens], page_size)


def _locate_in(
    block_tables: Int32[Array, "S P"], cu_q_lens: Int32[Array, "S_plus_1"], kv_lens: Int32[Array, "S"], length: int
) -> tuple[Int32[Array, "S P"], Int32[Array, "length"], Int32[Array, "length"]]:
    """Check block tables without an axis of heads against lengths, and return them with the results of `_locate`.

    Tables of no sequence get one row, so that they can be indexed.
    """
    block_tables, kv_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens)
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    dims.check("block_tables", block_tables, "S P", checks.INT)
    if not dims["S"]:
        block_tables = jnp.full((1, dims["P"]), PAGE_NONE, jnp.int32)
    return block_tables, *_locate(cu_q_lens, kv_lens, length)


def _slots_of(
    positions: Int32[Array, "T K"], block_tables: Int32[Array, "S P"], sequence: Int32[Array, "T"], page_size: int
) -> Int32[Array, "T K"]:
    """Return the slots of positions in the sequence of each token; -1 for negative positions, for positions past the
    table, and on pages that are absent or have slots that exceed int32.
    """
    entry, table_pages = positions // page_size, block_tables.shape[1]
    page = block_tables[sequence[:, None], jnp.clip(entry, 0, table_pages - 1)]
    inside = (positions >= 0) & (entry < table_pages) & _has_slots(page, page_size)
    return jnp.where(inside, page * page_size + positions % page_size, PAGE_NONE)


def layer_tables(
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"] | Int32[Array, "SP"],
    layer: Int32[Array, ""] | int,
    *,
    num_pages: int,
) -> Int32[Array, "S P"] | Int32[Array, "S Hkv P"] | Int32[Array, "SP"]:
    """Return the block tables of one layer in a pool of several layers, such as `PagedKV.allocate(spec, layers=L)`.

    Args:
      block_tables: page ids within a layer, or row ids for head-wise tables. The tables are equal for all layers.
      layer: index of the layer; it may be traced, for example the index of a `jax.lax.scan`.
      num_pages: N, pages per layer.

    Returns:
      Entries plus layer·N, or layer·N·Hkv for head-wise tables. Entries that are no page of a layer become PAGE_NONE.

    Raises:
      ValueError: shapes or dtypes are wrong.

    Example:
      >>> block_tables = jnp.array([[5, 0, pallas_attn.PAGE_NONE]], jnp.int32)
      >>> pallas_attn.layer_tables(block_tables, 2, num_pages=8).tolist()
      [[21, 16, -1]]
    """
    (block_tables,) = checks.int32(block_tables=block_tables)
    checks.check_array("block_tables", block_tables)
    shape = {1: "SP", 3: "S Hkv P"}.get(block_tables.ndim, "S P")
    checks.Dims().check("block_tables", block_tables, shape, checks.INT)
    num_pages = checks.size("num_pages", num_pages)
    return _of_layer(block_tables, layer, num_pages * (block_tables.shape[1] if block_tables.ndim == 3 else 1))


def layer_slots(
    slots: Int32[Array, "T"] | Int32[Array, "T entries"], layer: Int32[Array, ""] | int, *, num_slots: int
) -> Int32[Array, "T"] | Int32[Array, "T entries"]:
    """Return the slots of one layer in a pool of several layers, such as `PagedKV.allocate(spec, layers=L)`.

    Args:
      slots: slots within a layer, from `slot_mapping` or `token_slots`. They are equal for all layers.
      layer: index of the layer; it may be traced, for example the index of a `jax.lax.scan`.
      num_slots: slots per layer: N·ps, or N·Hkv·ps for slots [T, Hkv] of page rows.

    Returns:
      Slots plus layer · num_slots. Values that are no slot of a layer become -1.

    Raises:
      ValueError: shapes or dtypes are wrong.

    Example:
      >>> pallas_attn.layer_slots(jnp.array([3, -1, 31], jnp.int32), 2, num_slots=8 * 4).tolist()
      [67, -1, 95]
    """
    (slots,) = checks.int32(slots=slots)
    checks.check_array("slots", slots)
    checks.Dims().check("slots", slots, "T" if slots.ndim == 1 else "T entries", checks.INT)
    return _of_layer(slots, layer, checks.size("num_slots", num_slots))


def _of_layer(ids: Int32[Array, "*shape"], layer: Int32[Array, ""] | int, count: int) -> Int32[Array, "*shape"]:
    """Return ids + layer · count; PAGE_NONE for ids outside 0 to count - 1, which would be ids of another layer, and
    for layers whose ids do not fit an int32.
    """
    if isinstance(layer, int) and not isinstance(layer, bool) and layer < 0:
        raise ValueError(f"layer: expected at least 0, got {layer}")
    (layer,) = checks.int32(layer=np.asarray(layer) if isinstance(layer, int) else layer)
    checks.Dims().check("layer", layer, "", checks.INT)
    most = max(np.iinfo(np.int32).max // max(count, 1) - 1, 0)
    fits = (ids >= 0) & (ids < count) & (layer >= 0) & (layer <= most)
    return jnp.where(fits, ids + jnp.where(fits, layer, 0) * count, PAGE_NONE)


def is_prefill(
    num_decode_tokens: Int32[Array, ""] | int, cu_q_lens: Int32[Array, "S_plus_1"], *, length: int
) -> Bool[Array, "length"]:
    """Return which tokens of a packed step belong to prefill: the tokens after the decode tokens, without padding.

    Args:
      num_decode_tokens: number of decode tokens, which come first.
      cu_q_lens: prefix sums of the prefill tokens.
      length: number of packed tokens, including padding.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> pallas_attn.is_prefill(2, jnp.array([0, 1, 3], jnp.int32), length=6).tolist()
      [False, False, True, True, True, False]
    """
    (cu_q_lens,) = checks.int32(cu_q_lens=cu_q_lens)
    checks.Dims().check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    length = checks.size("length", length)
    cu_q_lens = checks.bound_sums(cu_q_lens, length)
    token = jnp.arange(length, dtype=jnp.int32) - num_decode_tokens
    return (token >= cu_q_lens[0]) & (token < cu_q_lens[-1])


def _has_slots(page: Int32[Array, "*shape"], page_size: int) -> Bool[Array, "*shape"]:
    """Return whether ids are page ids whose slots fit int32. Larger ids would wrap around to slots of other pages."""
    return (page >= 0) & (page <= (2**31 - page_size) // page_size)


def _locate(
    cu_q_lens: Int32[Array, "S_plus_1"], kv_lens: Int32[Array, "S"], length: int
) -> tuple[Int32[Array, "length"], Int32[Array, "length"]]:
    """Return the sequence of each packed token (any sequence for padding) and its position there."""
    cu_q_lens, kv_lens = checks.int32(cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    length = checks.size("length", length)
    token = jnp.arange(length, dtype=jnp.int32)
    if not dims["S"]:
        return jnp.zeros_like(token), jnp.full_like(token, -1)
    cu_q_lens, kv_lens = checks.bound_sums(cu_q_lens, length), jnp.maximum(kv_lens, 0)
    sequence = jnp.minimum(segment_of(cu_q_lens[1:], token), dims["S"] - 1)
    position = (kv_lens - cu_q_lens[1:])[sequence] + token
    real = (token >= cu_q_lens[0]) & (token < cu_q_lens[-1]) & (position >= 0)
    return sequence, jnp.where(real, position, -1)


def validate_metadata(
    block_tables: ArrayLike,
    kv_lens: ArrayLike,
    *,
    num_pages: int,
    page_size: int,
    q_lens: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    slots: ArrayLike | None = None,
    window: int | HeadWindow | None = None,
) -> None:
    """Raise ValueError if an operation would access wrong tokens with this metadata. For tests and debugging.

    The check runs on the host and waits for arrays on the device. An idle row (kv_len 0) may have any number of new
    tokens. Absent pages (PAGE_NONE) are allowed everywhere, and table entries that no query reads may have any value.

    Args:
      block_tables: [S, P] page ids, or [S, Hkv, P] row ids.
      kv_lens: [S] tokens per sequence, including the new tokens.
      num_pages: N, pages in the pool.
      page_size: ps.
      q_lens: [S] new tokens per sequence.
      cu_q_lens: [S + 1] prefix sums of the new tokens, an alternative to `q_lens`; with neither, each sequence has one.
        Zeros at the end represent sequences without new tokens.
      slots: [T] or, with row ids, [T, Hkv] slots that are written.
      window: window of the operation; None for no window.

    Raises:
      ValueError: names the argument, the position, the expectation and the value there.

    Example:
      >>> pallas_attn.validate_metadata([[5, 0]], [7], num_pages=6, page_size=4)
      >>> pallas_attn.validate_metadata([[6, 0]], [7], num_pages=6, page_size=4)
      Traceback (most recent call last):
      ValueError: block_tables[0, 0]: expected an id from 0 to 5 or PAGE_NONE, got 6
    """
    tables, lens = _integers("block_tables", block_tables), _integers("kv_lens", kv_lens)
    dims = checks.Dims()
    dims.check("block_tables", tables, "S Hkv P" if tables.ndim == 3 else "S P")
    dims.check("kv_lens", lens, "S")
    num_pages, page_size = checks.size("num_pages", num_pages), checks.size("page_size", page_size)
    rows = num_pages if tables.ndim == 2 else num_pages * dims["Hkv"]
    if rows * page_size > 2**31:
        raise ValueError(f"num_pages: slots of {rows} rows of {page_size} tokens do not fit an int32")
    capacity = dims["P"] * page_size
    _require("kv_lens", lens, (lens >= 0) & (lens <= capacity), f"0 to the {capacity} tokens a table row has pages for")
    new_tokens = _new_tokens(dims, lens, q_lens, cu_q_lens)
    read = _read_entries(tables, lens, new_tokens, page_size, window)
    known = (tables >= 0) & (tables < rows) | (tables == PAGE_NONE)
    _require("block_tables", tables, known | ~read, f"an id from 0 to {rows - 1} or PAGE_NONE")
    if slots is not None:
        places = _integers("slots", slots)
        dims.check("slots", places, "T Hkv" if tables.ndim == 3 else "T")
        _check_slots(places, rows * page_size)
        if cu_q_lens is not None and (packed := max(_integers("cu_q_lens", cu_q_lens))) > dims["T"]:
            raise ValueError(f"slots: expected one for each of {packed} packed tokens, got {dims['T']}")


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: expected integers, got {array.dtype.name}")
    return array.astype(np.int64)


def _require(name: str, values: np.ndarray, holds: np.ndarray, wanted: str) -> None:
    for at in np.argwhere(~holds)[:1]:
        raise ValueError(f"{_place(name, at)}: expected {wanted}, got {values[tuple(at)]}")


def _place(name: str, at: ArrayLike) -> str:
    return f"{name}{np.ravel(at).tolist()}"


def _new_tokens(
    dims: checks.Dims, kv_lens: np.ndarray, q_lens: ArrayLike | None, cu_q_lens: ArrayLike | None
) -> np.ndarray:
    """Return the number of new tokens of each sequence."""
    if cu_q_lens is None:
        new = np.ones_like(kv_lens) if q_lens is None else _integers("q_lens", q_lens)
        dims.check("q_lens", new, "S")
        _require("q_lens", new, new >= 0, "at least 0")
        _require("q_lens", new, (new <= kv_lens) | (kv_lens == 0), "at most the row's kv_len")
        return new
    if q_lens is not None:
        raise ValueError("q_lens: expected None with cu_q_lens")
    sums = _integers("cu_q_lens", cu_q_lens)
    dims.check("cu_q_lens", sums, "S+1")
    _require("cu_q_lens", sums[:1], sums[:1] >= 0, "at least 0")
    padded = np.cumsum(sums[::-1] != 0)[::-1] == 0
    sums = np.where(padded, sums.max(initial=0), sums)
    new = np.diff(sums)
    rises = np.concatenate([[True], (new >= 0) & ((new <= kv_lens) | (kv_lens == 0))])
    _require("cu_q_lens", sums, rises, "a rise of 0 to the row's kv_len from the entry before")
    return new


def _read_entries(
    tables: np.ndarray, kv_lens: np.ndarray, new_tokens: np.ndarray, page_size: int, window: int | HeadWindow | None
) -> np.ndarray:
    """Return which table entries contain a token that a query of the row, and a head of the page, sees."""
    if isinstance(window, HeadWindow):
        checks.check_window(window, tables.shape[1] if tables.ndim == 3 else window.window.shape[0])
    else:
        checks.check_window(window, 1)
    windows = head_windows(window, 1)
    reach, sinks = (np.asarray(a).astype(np.int64)[:, None] for a in (windows.window, windows.sink_tokens))  # [H, 1]
    first = np.arange(tables.shape[-1]) * page_size
    end = np.minimum(first + page_size, kv_lens[:, None])[:, None, :]  # [S, 1, P]
    oldest_query = (kv_lens - new_tokens)[:, None, None]
    seen = (first < end) & ((first < sinks) | (end - 1 > oldest_query - reach)) & (new_tokens > 0)[:, None, None]
    return np.broadcast_to(seen, tables.shape) if tables.ndim == 3 else seen.any(axis=1)


def _check_slots(slots: np.ndarray, num_slots: int) -> None:
    written = slots != PAGE_NONE
    _require("slots", slots, (slots >= 0) & (slots < num_slots) | ~written, f"0 to {num_slots - 1} or -1")
    _, first, inverse = np.unique(slots, return_index=True, return_inverse=True)
    first = first[inverse.reshape(slots.shape)]  # index of the first occurrence of each value
    repeated = written & (first != np.arange(slots.size).reshape(slots.shape))
    for at in np.argwhere(repeated)[:1]:
        taken = _place("slots", np.unravel_index(first[tuple(at)], slots.shape))
        raise ValueError(f"{_place('slots', at)}: expected a unique slot, got {slots[tuple(at)]}, the slot of {taken}")
