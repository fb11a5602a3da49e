"""Tests of `pallas_attn.convert`: conversions between cache layouts preserve the bits of each token and head."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import PAGE_NONE, PagedLatent, latent_cache_spec, paged_decode, write_kv, write_latent
from pallas_attn.convert import (
    from_csr,
    from_nhd,
    from_records,
    join_kv,
    split_kv,
    to_nhd,
    to_records,
    token_tables,
    view_fused,
    view_nhd,
)
from pallas_attn.types import PagedKV
from tests.kit.harness import assert_same_bits, fresh_rng
from tests.kit.slow_cases import slow_cases
from tests.ops.write_kv_case import HEADS, NUM_PAGES, PAGE_SIZE, WIDTH, random_slots, stale_cache, tokens

LAYOUTS = pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float32", None), ("bfloat16", None), ("int8", "head"), ("float8_e4m3fn", "channel"), ("int8", 2)],
)


@LAYOUTS
def test_nhd_round_trip_preserves_bits(dtype: str, scales: Any) -> None:
    kv = stale_cache(fresh_rng(), dtype, scales)
    assert_same_bits(from_nhd(*to_nhd(kv)), kv)


@LAYOUTS
def test_nhd_has_tokens_before_heads(dtype: str, scales: Any) -> None:
    kv = stale_cache(fresh_rng(), dtype, scales)
    k, v, k_scale, v_scale = to_nhd(kv)
    assert k.shape == (NUM_PAGES, PAGE_SIZE, HEADS, WIDTH)
    for nhd, ours in ((k, kv.k), (v, kv.v)):
        for token, head in np.ndindex(PAGE_SIZE, HEADS):
            assert_same_bits(nhd[:, token, head], ours[:, head, token])
    if scales == 2:
        assert k_scale is not None
        assert kv.k_scale is not None
        for group, head in np.ndindex(2, HEADS):
            assert_same_bits(k_scale[:, group, head], kv.k_scale[:, head, group])
    else:
        assert_same_bits((k_scale, v_scale), (kv.k_scale, kv.v_scale))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_split_kv_splits_combined_pages(axis: int, dtype: str) -> None:
    kv = stale_cache(fresh_rng(), dtype, None if dtype == "bfloat16" else "head")
    pages = join_kv(kv.k, kv.v, axis=axis)
    assert_same_bits(split_kv(pages, axis=axis), (kv.k, kv.v))
    for i, array in enumerate((kv.k, kv.v)):
        assert_same_bits(pages[i] if axis == 0 else pages[:, i], array)


def test_a_cache_is_converted_under_jit() -> None:
    kv = stale_cache(fresh_rng(), "bfloat16")
    pages = jnp.stack([jnp.swapaxes(kv.k, 1, 2), jnp.swapaxes(kv.v, 1, 2)], axis=1)  # [N, 2, ps, Hkv, D]
    got = jax.jit(lambda pages: from_nhd(*split_kv(pages, axis=1)))(pages)
    assert_same_bits(got, kv)


# --- views of pages with tokens before heads, without a copy


@slow_cases("float8_e4m3fn-8")
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("int8", "head"), ("float8_e4m3fn", PAGE_SIZE)])
def test_view_nhd_is_written_in_place(dtype: str, scales: Any) -> None:
    """A write to the view stores the same bytes at the same slots as a write to a converted copy."""
    rng = fresh_rng()
    kv, slots, (k, v) = stale_cache(rng, dtype, scales), random_slots(rng, 1), tokens(rng)
    got = write_kv(view_nhd(*to_nhd(kv)), k, v, slots, implementation="xla")
    want = write_kv(kv, k, v, slots, implementation="xla")
    for ours, theirs in zip((got.k, got.v, got.k_scale, got.v_scale), to_nhd(want), strict=True):
        assert_same_bits(ours if theirs is None or ours is None else ours.reshape(theirs.shape), theirs)


@slow_cases(
    "alternating-16-bfloat16-None", "alternating-16-int8-head", "alternating-16-float8_e4m3fn-8",
    "packed-24-int8-head", "packed-24-float8_e4m3fn-8",
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("int8", "head"), ("float8_e4m3fn", PAGE_SIZE)])
@pytest.mark.parametrize("lanes", [WIDTH, 24])
@pytest.mark.parametrize("layout", ["alternating", "packed", "side by side"])
def test_view_fused_is_read_and_written_in_place(dtype: str, scales: Any, lanes: int, layout: str) -> None:
    rng = fresh_rng()
    kv, slots, (k, v) = stale_cache(rng, dtype, scales), random_slots(rng, 1), tokens(rng)
    keys, values, k_scale, v_scale = to_nhd(kv)
    pages = np.full((NUM_PAGES, PAGE_SIZE, HEADS, 2, lanes), 3, kv.k.dtype)
    pages[..., 0, :WIDTH], pages[..., 1, :WIDTH] = keys, values
    rest = {"alternating": (2 * HEADS, lanes), "packed": (HEADS, 2, lanes), "side by side": (HEADS, 2 * lanes)}[layout]
    pages = jnp.asarray(pages.reshape(NUM_PAGES, PAGE_SIZE, *rest))
    write = jax.jit(functools.partial(write_kv, implementation="xla"))
    view = write(view_fused(pages, HEADS, k_scale, v_scale), k, v, slots)
    want = write(kv, k, v, slots)
    halves = np.asarray(view.k).reshape(NUM_PAGES, PAGE_SIZE, HEADS, 2, lanes)
    assert_same_bits((halves[..., 0, :WIDTH], halves[..., 1, :WIDTH]), to_nhd(want)[:2])
    if lanes > WIDTH:
        assert (np.asarray(halves[..., WIDTH:]).astype(np.float32) == 3).all()
    q, lens = jnp.asarray(rng.standard_normal((2, 1, 2 * HEADS, WIDTH)), jnp.bfloat16), jnp.array([11, 3], jnp.int32)
    tables = jnp.array([[3, 1], [0, -1]], jnp.int32)
    decode = jax.jit(functools.partial(paged_decode, implementation="reference"))
    got = decode(q, view, token_tables(tables, page_size=PAGE_SIZE), lens)
    assert_same_bits(got, decode(q, want, tables, lens))


def test_to_nhd_splits_a_fused_cache() -> None:
    kv = stale_cache(fresh_rng(), "float32")
    fused = PagedKV(jnp.concatenate([kv.k, kv.v], axis=-1))
    assert_same_bits(to_nhd(fused), to_nhd(kv))


@pytest.mark.slow
def test_dense_cache_gives_the_result_of_pages() -> None:
    """A dense cache [B, S, Hkv, D] is a pool in which each sequence is one page of S tokens."""
    rng = fresh_rng()
    k, v = (jnp.asarray(rng.standard_normal((3, 12, HEADS, WIDTH)), jnp.float32) for _ in range(2))
    q, lens = jnp.asarray(rng.standard_normal((3, 1, 2 * HEADS, WIDTH)), jnp.float32), jnp.array([5, 12, 0], jnp.int32)
    tables = jnp.arange(3, dtype=jnp.int32)[:, None]
    want = paged_decode(q, from_nhd(k, v), tables, lens, implementation="reference")
    got = paged_decode(q, view_nhd(k, v), token_tables(tables, page_size=12), lens, implementation="reference")
    assert_same_bits(got, want)


def test_view_of_shared_scales_is_unsupported() -> None:
    with pytest.raises(NotImplementedError, match="^k_scale: expected static scales, or one for each of ps=8 tokens"):
        view_nhd(**nhd())


@pytest.mark.usefixtures("unchecked_shapes")
def test_token_tables_have_the_tokens_of_pages() -> None:
    """Entries of absent pages become PAGE_NONE, and so do page ids whose token ids would exceed int32."""
    big = np.iinfo(np.int32).max
    last = big // 4 - 1
    rows: Any = [[2, PAGE_NONE], [big, last]]
    tables = token_tables(rows, page_size=4)
    assert tables.tolist() == [[8, 9, 10, 11] + [PAGE_NONE] * 4, [PAGE_NONE] * 4 + [4 * last + t for t in range(4)]]
    assert token_tables(jnp.zeros((0, 3), jnp.int32), page_size=4).shape == (0, 12)
    assert token_tables(jnp.asarray(rows, jnp.int32).reshape(-1), page_size=4).tolist() == tables.reshape(-1).tolist()


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill", "cascade_decode", "plan_decode"])
def test_view_with_tables_of_pages(name: str, view: bool) -> None:
    """Tables whose width is no multiple of the page size are refused for a view, and accepted for other caches."""
    k = jnp.zeros((9, 4, 1, 8))
    lens, tables = jnp.array([3], jnp.int32), jnp.zeros((1, 6), jnp.int32)
    kv = view_nhd(k, k) if view else from_nhd(k, k)
    q = jnp.ones((1, 2, 8)) if name == "paged_prefill" else jnp.ones((1, 1, 2, 8))
    lengths = (jnp.array([0, 1], jnp.int32), lens) if name == "paged_prefill" else (lens,)
    call = functools.partial(getattr(pallas_attn, name), q, kv, tables, *lengths)
    if view:
        with pytest.raises(
            ValueError, match=r"^block_tables: expected an entry for each token, a multiple of 4 .*\[1, 6\]"
        ):
            jax.eval_shape(call)
    else:
        jax.eval_shape(call)


NHD_PAGES, NEW_KEYS = jnp.zeros((9, 16, 2, 8)), jnp.zeros((3, 2, 8))  # 2 KV heads, pages of 16 tokens
NHD_KV = PagedKV(NHD_PAGES, NHD_PAGES)
ONE_TABLE, ONE_LEN, NEW_TOKENS = jnp.zeros((1, 4), jnp.int32), jnp.array([3], jnp.int32), jnp.array([0, 3], jnp.int32)
MISTAKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "decode": (lambda: paged_decode(jnp.ones((1, 1, 4, 8)), NHD_KV, ONE_TABLE, ONE_LEN), "q: its 4 heads"),
    "cascade": (
        lambda: pallas_attn.cascade_decode(jnp.ones((1, 1, 4, 8)), NHD_KV, ONE_TABLE, ONE_LEN),
        "q: its 4 heads",
    ),
    "prefill": (
        lambda: pallas_attn.paged_prefill(jnp.ones((3, 4, 8)), NHD_KV, ONE_TABLE, NEW_TOKENS, ONE_LEN),
        "q: its 4 heads",
    ),
    "write": (
        lambda: write_kv(NHD_KV, NEW_KEYS, NEW_KEYS, jnp.arange(3, dtype=jnp.int32)),
        r"k: expected shape \[T, Hkv=16, D=8\], got \[3, 2, 8\]",
    ),
    "step": (
        lambda: pallas_attn.ragged_paged_attention(
            jnp.ones((3, 16, 8)), NEW_KEYS, NEW_KEYS, NHD_KV, ONE_LEN, ONE_TABLE, NEW_TOKENS
        ),
        r"k: expected shape \[T=3, Hkv=16, D=8\], got \[3, 2, 8\]",
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", MISTAKEN)
def test_error_about_heads_names_the_view(name: str) -> None:
    """Pages with tokens before heads, passed as a `PagedKV`, give an error that names `view_nhd`."""
    call, start = MISTAKEN[name]
    advice = r"\. If kv\.k \[9, 16, 2, 8\] has the tokens of a page before its heads, \[N, ps, Hkv, D\], pass"
    with pytest.raises(ValueError, match=rf"^{start}.*{advice} kv=view_nhd\(k, v\) and .* page_size=16\)$"):
        call()


@pytest.mark.usefixtures("unchecked_shapes")
def test_error_about_heads_names_the_fused_view() -> None:
    kv = PagedKV(jnp.zeros((9, 16, 2, 16)))
    with pytest.raises(ValueError, match=r"^kv\.k: expected shape \[N, Hkv=2.*kv=view_fused\(pages, 2\)"):
        write_kv(kv, NEW_KEYS, NEW_KEYS, jnp.arange(3, dtype=jnp.int32))


# --- tables in CSR form (FlashInfer)


@pytest.mark.usefixtures("unchecked_shapes")
def test_from_csr_pads_tables() -> None:
    """The four sequences have two pages, no pages, more pages than the table has columns, and one page that is
    invalid.
    """
    arrays: tuple[Any, ...] = ([0, 2, 2, 5, 6], [7, 3, 3, 9, 0], [4, 9, 1, 2])
    tables, lens = from_csr(*arrays, page_size=4, table_pages=2)
    assert tables.tolist() == [[7, 3], [-1, -1], [3, 9], [-1, -1]]
    assert lens.tolist() == [8, 0, 8, 2]
    none: Any = []
    empty = from_csr(jnp.zeros(1, jnp.int32), none, none, page_size=4, table_pages=2)
    assert empty[0].shape == (0, 2)
    assert empty[1].shape == (0,)


@pytest.mark.parametrize("seed", range(3))
def test_from_csr_under_jit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, 9)
    last = rng.integers(1, 17, 9).astype(np.int32)
    indptr, indices = np.append(0, np.cumsum(counts)).astype(np.int32), rng.permutation(80).astype(np.int32)
    convert = jax.jit(lambda *arrays: from_csr(*arrays, page_size=16, table_pages=5))
    tables, lens = convert(indptr, indices, last)
    for s, count in enumerate(counts):
        assert tables[s].tolist() == indices[indptr[s] : indptr[s + 1]].tolist() + [PAGE_NONE] * (5 - count)
        assert lens[s] == (0 if count == 0 else 16 * (count - 1) + last[s])


# --- records of latents (FlashMLA)


def test_record_layout_matches_flashmla() -> None:
    """The record of FlashMLA's README: 512 float8_e4m3 values, 4 float32 scales, 64 bfloat16 values."""
    rng = fresh_rng()
    latents = rng.integers(0, 256, 512, np.uint8).tobytes()
    scales = rng.uniform(0.1, 9.0, 4).tolist()
    rope = [int(bits) for bits in rng.integers(0, 2**16, 64)]
    record = latents + struct.pack("<4f", *scales) + struct.pack("<64H", *rope)
    records = np.zeros((3, 2, 656), np.uint8)
    records[1, 1] = np.frombuffer(record, np.uint8)
    cache = from_records(jnp.asarray(records))
    assert cache.scale is not None
    assert cache.rope is not None
    assert np.asarray(cache.pages)[1, 1].tobytes() == latents
    assert np.asarray(cache.scale)[1, 1].tolist() == np.float32(scales).tolist()
    assert np.asarray(cache.rope)[1, 1].view(np.uint16).tolist() == rope
    assert not np.asarray(cache.pages)[0].view(np.uint8).any()


@pytest.mark.parametrize(("latent_dim", "size"), [(512, 656), (128, 128 + 4 + 2 * 5)])
def test_records_round_trip(latent_dim: int, size: int) -> None:
    records = jnp.asarray(fresh_rng().integers(0, 256, (3, 8, size), np.uint8))
    convert = jax.jit(lambda records: to_records(from_records(records, latent_dim=latent_dim)))
    assert_same_bits(convert(records), records)


def test_written_token_has_the_expected_record() -> None:
    """The expected bytes of one token are written out: e4m3 values, scales amax / 448, and rotated keys."""
    latent = ((np.arange(576) * 37 % 101) - 50).astype(np.float32)[None] / 16
    spec = latent_cache_spec(num_pages=2, page_size=4, latent_dim=512, rope_dim=64, dtype=jnp.float8_e4m3fn)
    cache = write_latent(PagedLatent.allocate(spec), jnp.asarray(latent), jnp.asarray([6], jnp.int32))
    records = np.array(to_records(cache))
    assert records[1, 2, :16].tobytes().hex() == "feef75fbdd7af8687cf372fdeb77fa00"
    assert records[1, 2, 512:528].tobytes().hex() == "4992e43b" * 4
    assert records[1, 2, 528:544].tobytes().hex() == "e03e3040a0bf883f3cc020bfd83f14c0"
    assert zlib.crc32(records[1, 2].tobytes()) == 155683002
    empty = np.zeros(656, np.uint8)
    empty[512:528] = np.frombuffer(np.ones(4, np.float32).tobytes(), np.uint8)
    records[1, 2] = empty
    assert (records == empty).all()


def page_of_v4(data: list[bytes], scales: list[bytes]) -> bytes:
    """Return a page of DeepSeek-V4: the data of all records, then their scales, padded to a multiple of 576 bytes."""
    page = b"".join(data) + b"".join(each + b"\0" for each in scales)
    return page + b"\0" * (-len(page) % 576)


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_page_layout_of_v4(page_size: int) -> None:
    """Bytes of a page: 448 float8_e4m3fn and 64 bfloat16 per record, then 7 float8_e8m0fnu and a byte per record."""
    rng = fresh_rng()
    data = [[rng.bytes(576) for _ in range(page_size)] for _ in range(3)]
    scales = [[rng.bytes(7) for _ in range(page_size)] for _ in range(3)]
    pages = [page_of_v4(*page) for page in zip(data, scales, strict=True)]
    assert len(pages[0]) == {1: 1152, 2: 1728, 64: 37440}[page_size]
    records = jnp.asarray(np.stack([np.frombuffer(page, np.uint8) for page in pages]))
    cache = from_records(records, page_size=page_size)
    assert cache.scale is not None
    assert cache.rope is not None
    latent, scale, rope = (np.asarray(array) for array in (cache.pages, cache.scale, cache.rope))
    assert (latent.dtype, scale.dtype, rope.dtype) == (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.bfloat16)
    for page, row in itertools.product(range(3), range(page_size)):
        assert latent[page, row].tobytes() + rope[page, row].tobytes() == data[page][row]
        assert scale[page, row].tobytes() == scales[page][row]
    assert_same_bits(jax.jit(to_records)(cache), records)


@slow_cases("xla")
@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
def test_written_token_has_the_expected_record_of_v4(implementation: str) -> None:
    """Scales are the smallest powers of two that are at least max(amax, 1e-4) / 448."""
    spec = latent_cache_spec(
        num_pages=2, page_size=4, latent_dim=448, rope_dim=64, dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu"
    )
    assert spec.bytes_per_page == 4 * 583
    latent = fresh_rng().standard_normal((1, 512)).astype(np.float32)
    amax = [448.0, 449.0, 0.0, 1e-5, 3.5, 7e4, 2.0**-12 * 448]
    for i, largest in enumerate(amax):
        latent[0, 64 * i : 64 * (i + 1)] *= 0.9 * largest / np.abs(latent[0, 64 * i : 64 * (i + 1)]).max()
        latent[0, 64 * i + 5] = largest
    slots = jnp.asarray([6], jnp.int32)
    cache = write_latent(PagedLatent.allocate(spec), jnp.asarray(latent), slots, implementation=implementation)
    exponents = [0, 1, -22, -22, -7, 8, -12]
    scale = 2.0 ** np.array(exponents)
    data = (latent[0, :448].reshape(7, 64) / scale[:, None]).astype(np.float32).astype(jnp.float8_e4m3fn).tobytes()
    data += latent[0, 448:].astype(jnp.bfloat16).tobytes()
    none = bytes(576), bytes([127] * 7)
    page = page_of_v4([none[0], none[0], data, none[0]], [none[1], none[1], bytes(127 + e for e in exponents), none[1]])
    assert np.asarray(to_records(cache))[1].tobytes() == page


def eight_bits(**changes: Any) -> PagedLatent:
    spec = latent_cache_spec(num_pages=2, page_size=4, latent_dim=256, rope_dim=8, dtype=jnp.float8_e4m3fn)
    return dataclasses.replace(PagedLatent.allocate(spec), **changes)


def small_groups(latent_dim: int, rope_dim: int) -> PagedLatent:
    pages = jnp.zeros((2, 4, latent_dim), jnp.float8_e4m3fn)
    scale = jnp.ones((2, 4, latent_dim // 64), jnp.float8_e8m0fnu)
    return PagedLatent(pages, scale, jnp.zeros((2, 4, rope_dim), jnp.bfloat16))


RECORDS, PAGES = jnp.zeros((3, 8, 656), jnp.uint8), jnp.zeros((3, 37440), jnp.uint8)
BAD_RECORDS = {
    "records of bytes with a sign": (from_records, {"records": RECORDS.astype(jnp.int8)}, "records: expected dtype"),
    "records with an axis of heads": (from_records, {"records": RECORDS[:, :, None]}, "records: expected shape"),
    "no rotated keys": (from_records, {"records": RECORDS[..., :528]}, "records: expected 528 bytes"),
    "half a number": (from_records, {"records": RECORDS[..., :655]}, "records: expected 528 bytes"),
    "latents of 96": (from_records, {"records": RECORDS, "latent_dim": 96}, "latent_dim: expected a multiple"),
    "pages without their size": (from_records, {"records": PAGES}, "page_size: expected the records"),
    "pages of another size": (from_records, {"records": PAGES, "page_size": 63}, "records: expected 36864 bytes"),
    "records with a page size": (from_records, {"records": RECORDS, "page_size": 8}, "page_size: expected None"),
    "other widths of V4": (to_records, {"cache": small_groups(128, 64)}, "cache.pages: expected 448 columns"),
    "columns of half a group": (to_records, {"cache": small_groups(96, 64)}, "cache.pages: expected a multiple of 64"),
    "latents in 16 bits": (to_records, {"cache": PagedLatent(jnp.zeros((2, 4, 264)))}, "cache.pages: expected float8"),
    "float16 rotated keys": (to_records, {"cache": eight_bits(rope=jnp.zeros((2, 4, 8), jnp.float16))}, "cache.rope"),
    "scales of other pages": (to_records, {"cache": eight_bits(scale=jnp.ones((3, 4, 2)))}, "cache.scale"),
}


def nhd(**changes: Any) -> dict[str, Any]:
    pages = jnp.zeros((3, 8, 2, 4), jnp.int8)
    return {"k": pages, "v": pages, "k_scale": jnp.ones((3, 2, 2)), "v_scale": jnp.ones((3, 2, 2))} | changes


def csr(**changes: Any) -> dict[str, Any]:
    call = {"indptr": [0, 1, 2], "indices": [4, 2], "last_page_len": [1, 1], "page_size": 4, "table_pages": 2}
    return call | changes


BAD_CALLS = {
    "k of rank 3": (from_nhd, nhd(k=jnp.zeros((8, 2, 4), jnp.int8)), "k: expected shape"),
    "k of a dtype no cache has": (from_nhd, nhd(k=jnp.zeros((3, 8, 2, 4), jnp.int32)), "k: expected dtype"),
    "v of other pages": (from_nhd, nhd(v=jnp.zeros((4, 8, 2, 4), jnp.int8)), "v: expected shape"),
    "v of another dtype": (from_nhd, nhd(v=jnp.zeros((3, 8, 2, 4))), "v: expected dtype"),
    "no scale": (from_nhd, nhd(k_scale=None), "kv.k_scale"),
    "a view of two shapes": (view_nhd, nhd(v=jnp.zeros((4, 8, 2, 4), jnp.int8)), "v: expected shape"),
    "a fused view of other heads": (
        view_fused,
        {"pages": jnp.zeros((4, 8, 4, 4)), "num_kv_heads": 3},
        "pages: expected keys",
    ),
    "a fused view of keys": (view_fused, {"pages": jnp.zeros((4, 8, 3, 3)), "num_kv_heads": 1}, "pages: expected keys"),
    "a fused view of nothing behind tokens": (
        view_fused,
        {"pages": jnp.zeros((4, 8, 4)), "num_kv_heads": 1},
        "pages: expected a nonempty array",
    ),
    "a view without scales": (view_nhd, nhd(k_scale=None, v_scale=jnp.ones(2)), "kv.k_scale"),
    "pages of no tokens": (token_tables, {"block_tables": [[1]], "page_size": 0}, "page_size: expected at least 1"),
    "tables of heads": (token_tables, {"block_tables": [[[1]]], "page_size": 2}, "block_tables: expected shape"),
    "pointers of other sequences": (from_csr, csr(indptr=[0, 1]), "indptr: expected shape"),
    "indices in rows": (from_csr, csr(indices=[[1, 2]]), "indices: expected shape"),
    "tables of no pages": (from_csr, csr(table_pages=0), "table_pages: expected at least 1"),
    "groups that do not divide": (from_nhd, nhd(k_scale=jnp.ones((3, 5, 2))), "kv.k_scale"),
    "heads before groups": (from_nhd, nhd(k_scale=jnp.ones((3, 2, 4)), v_scale=jnp.ones((3, 2, 4))), "kv.k_scale"),
    "a broken cache": (to_nhd, {"kv": PagedKV(jnp.zeros((3, 2, 8, 4)), jnp.zeros((3, 2, 4, 4)))}, "kv.v"),
    "pages of three": (split_kv, {"pages": jnp.zeros((3, 5, 2, 8, 4)), "axis": 0}, "pages: expected shape"),
    "pages that are not both": (split_kv, {"pages": jnp.zeros((2, 5, 8, 4)), "axis": 0}, "pages: expected shape"),
    "an axis of its own": (split_kv, {"pages": jnp.zeros((2, 5, 2, 8, 4)), "axis": 2}, "axis"),
    "v of another shape": (join_kv, {"k": jnp.zeros((3, 2, 8, 4)), "v": jnp.zeros((3, 8, 2, 4)), "axis": 0}, "v"),
    "nowhere to join": (join_kv, {"k": jnp.zeros((3, 2, 8, 4)), "v": jnp.zeros((3, 2, 8, 4)), "axis": -1}, "axis"),
}


BAD_CALLS |= BAD_RECORDS


@pytest.mark.parametrize(("function", "call", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.usefixtures("unchecked_shapes")
def test_error_names_the_argument(function: Any, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**call)
