"""Contract suite of `write_kv`: written bytes, their places, and unchanged bytes equal numpy in all implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn import to_nhd, view_nhd
from pallas_attn.ops.write_kv import write_kv, xla
from pallas_attn.types import PagedKV
from tests.contract.backends import all_but, in_every_run, unsupported
from tests.kit.harness import VARIANTS, Variant, any_bits, assert_same_bits, fresh_rng
from tests.kit.slow_cases import slow_cases
from tests.ops.test_rope import random_rope
from tests.ops.write_kv_case import (
    HEADS,
    NUM_PAGES,
    NUM_TOKENS,
    PAGE_SIZE,
    PLAIN,
    QMAX,
    RUNNABLE,
    WIDTH,
    cache_spec,
    each_variant,
    numpy_write,
    random_slots,
    stale_cache,
    tokens,
    write,
)

each_quantised = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
each_slot_rank = pytest.mark.parametrize("rank", [1, 2])
NOWHERE = [-1, NUM_PAGES * PAGE_SIZE, -NUM_PAGES * PAGE_SIZE, 2**31 - 1, -(2**31)]


@each_variant
@in_every_run(
    "reference",
    xla=["bfloat16-2", "float16-2", "float32-2"],
    mosaic=["bfloat16-1", "float16-2"],
    mosaic_sm100=["bfloat16-1"],
    triton=["float32-2"],
)  # fmt: skip
@each_slot_rank
@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_caches_store_cast_tokens(dtype: str, rank: int, variant: Variant) -> None:
    rng = fresh_rng()
    for _ in range(3):
        kv, (k, v), slots = stale_cache(rng, dtype), tokens(rng), random_slots(rng, rank)
        assert_same_bits(write(variant, kv, k, v, slots), numpy_write(kv, k, v, slots))


@each_variant
@in_every_run("xla", "mosaic")
def test_tokens_in_the_cache_dtype_are_copied_bit_for_bit(variant: Variant) -> None:
    rng = fresh_rng()
    x = any_bits(rng, (NUM_TOKENS, HEADS, WIDTH), jnp.bfloat16)
    slots = np.arange(NUM_TOKENS, dtype=np.int32)
    got = write(variant, stale_cache(rng, "bfloat16"), jnp.asarray(x), jnp.asarray(x), slots)
    assert_same_bits(got.v[0, :, :NUM_TOKENS].swapaxes(0, 1), x)


@each_variant
@in_every_run(
    "reference",
    xla=["head-int8-2", "head-float8_e4m3fn-2", "channel-int8-2", "channel-float8_e4m3fn-2"],
    mosaic=["head-float8_e4m3fn-2", "channel-int8-1"],
    triton=["head-int8-2"],
)  # fmt: skip
@each_slot_rank
@each_quantised
@pytest.mark.parametrize("layout", ["head", "channel"])
def test_static_scales_equal_numpy_bytes(dtype: str, layout: Any, rank: int, variant: Variant) -> None:
    """With slots per head, a head may write to a page row of another head; it still uses its own scale. Values out of
    range saturate.
    """
    rng = fresh_rng()
    shape = cache_spec(dtype, layout).arrays["k_scale"].shape
    k_scale, v_scale = (jnp.asarray(10.0 ** rng.uniform(-4, -1, shape), jnp.float32) for _ in range(2))
    kv = dataclasses.replace(stale_cache(rng, dtype, layout), k_scale=k_scale, v_scale=v_scale)
    slots = random_slots(rng, rank)
    k, v = (x.at[:, :, :2].set(jnp.asarray([np.inf, -3e38])[None, None]) for x in tokens(rng))
    got = write(variant, kv, k, v, slots)
    assert_same_bits(got, numpy_write(kv, k, v, slots))
    assert (np.abs(np.asarray(got.k).astype(np.float32)) == QMAX[dtype]).sum() > NUM_TOKENS


@slow_cases("4-float8_e4m3fn-2-mosaic", "2-float8_e4m3fn-2-triton")
@each_variant
@in_every_run(
    xla=["1-float8_e4m3fn-2", "4-int8-1", "8-int8-1", "8-float8_e4m3fn-2"],
    reference=all_but("1-float8_e4m3fn-2", "4-int8-1", "8-int8-1"),
    mosaic=["4-float8_e4m3fn-2", "8-int8-1"],
    mosaic_sm100=["4-float8_e4m3fn-2"],
    triton=["2-float8_e4m3fn-2"],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "rank"), [("int8", 1), ("float8_e4m3fn", 2)])
@pytest.mark.parametrize("groups", [1, 2, 4, PAGE_SIZE])
def test_dynamic_scales_equal_numpy_bytes(dtype: str, rank: int, groups: int, variant: Variant) -> None:
    """Slots are in random order. The slots of a group that are not written hold random bytes."""
    rng = fresh_rng()
    kv = jax.tree.map(
        lambda a: jnp.where(jnp.isfinite(a.astype(jnp.float32)), a, jnp.ones_like(a)), stale_cache(rng, dtype, groups)
    )
    for spread in (0.1, 2.0, 0.1, 2.0):
        (k, v), slots = tokens(rng, spread=spread), random_slots(rng, rank)
        want = numpy_write(kv, k, v, slots)
        kv = write(variant, kv, k, v, slots)
        assert_same_bits(kv, want)


@slow_cases("int8-2-mosaic")
@each_variant
@in_every_run("xla", mosaic=["int8-2"])
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("float8_e4m3fn", "head"), ("int8", 2)])
def test_tokens_outside_the_pool_change_no_bytes(dtype: str, scales: Any, variant: Variant) -> None:
    kv = stale_cache(fresh_rng(), dtype, scales)
    x = jnp.full((NUM_TOKENS, HEADS, WIDTH), jnp.nan, jnp.float32)
    for slot in NOWHERE:
        assert_same_bits(write(variant, kv, x, x, jnp.full((NUM_TOKENS,), slot, jnp.int32)), kv)


@each_variant
@in_every_run("xla", mosaic=["int8"])
@each_quantised
def test_tokens_outside_the_pool_do_not_affect_scales(dtype: str, variant: Variant) -> None:
    rng = fresh_rng()
    kv = stale_cache(rng, dtype, 2)
    k, v = (x.at[3].set(jnp.nan) for x in tokens(rng))
    for slot in NOWHERE:
        slots = jnp.asarray([0, 1, 2, slot, 3, PAGE_SIZE], jnp.int32)
        assert_same_bits(write(variant, kv, k, v, slots), numpy_write(kv, k, v, slots))


@each_variant
@in_every_run("xla", "mosaic", "triton")
@pytest.mark.parametrize("layout", ["head", "channel", 2])
def test_float8_e5m2_is_written_or_unsupported(layout: Any, variant: Variant) -> None:
    rng = fresh_rng()
    kv = PagedKV.allocate(cache_spec("float8_e5m2", layout))
    (k, v), slots = tokens(rng), random_slots(rng, 1)
    if variant.implementation not in ("reference", "xla"):
        with pytest.raises(NotImplementedError, match="takes caches of 8 bits in int8 and float8_e4m3fn"):
            write(variant, kv, k, v, slots)
        return
    got = write(variant, kv, k, v, slots)
    assert_same_bits(got, numpy_write(kv, k, v, slots))
    if layout == 2:
        assert np.isin(np.float32(57344), np.abs(np.asarray(got.k).astype(np.float32)))


# --- values of a different width, and fused caches

OTHER_CACHES = pytest.mark.parametrize(
    ("dtype", "scales", "rank"), [("bfloat16", None, 2), ("int8", "channel", 1), ("float8_e4m3fn", 2, 1)]
)


def with_narrow_values(kv: PagedKV, width: int) -> PagedKV:
    """Return the cache with only the first `width` columns of its values."""
    scale = kv.v_scale
    return dataclasses.replace(
        kv, v=kv.values[0][..., :width], v_scale=scale[:, :width] if scale is not None and scale.ndim == 2 else scale
    )


def finite(kv: PagedKV) -> PagedKV:
    return jax.tree.map(lambda a: jnp.where(jnp.isfinite(a.astype(jnp.float32)), a, jnp.ones_like(a)), kv)


@slow_cases(
    "float8_e4m3fn-2-1-reference", "float8_e4m3fn-2-1-xla", "bfloat16-None-2-triton", "float8_e4m3fn-2-1-triton",
)  # fmt: skip
@each_variant
@in_every_run("xla", "mosaic", "triton", reference=all_but("bfloat16-None-2"))
@unsupported(mosaic="takes pages of keys and values of one width")
@OTHER_CACHES
def test_values_of_a_different_width(dtype: str, scales: Any, rank: int, variant: Variant) -> None:
    """Values have 5 columns, and keys, which are also rotated, have 16. Implementations divide them into different
    tiles.
    """
    rng = fresh_rng()
    kv, (k, v), slots = finite(stale_cache(rng, dtype, scales)), tokens(rng), random_slots(rng, rank)
    rope = random_rope(rng, WIDTH // 4)
    narrow, v = with_narrow_values(kv, 5), v[..., :5]
    got = write(variant, narrow, k, v, slots, rope=rope)
    keys = write(variant, dataclasses.replace(kv, v=kv.k, v_scale=kv.k_scale), k, k, slots, rope=rope)
    values = numpy_write(PagedKV(narrow.values[0], narrow.v, narrow.v_scale, narrow.v_scale), v, v, slots)
    assert_same_bits((got.k, got.k_scale), (keys.k, keys.k_scale))
    assert_same_bits((got.v, got.v_scale), (values.v, values.v_scale))


@slow_cases("21-float8_e4m3fn-2-1-triton")
@each_variant
@in_every_run(
    "mosaic", "triton",
    xla=["16-int8-channel-1", "21-bfloat16-None-2", "21-float8_e4m3fn-2-1"],
)  # fmt: skip
@OTHER_CACHES
@pytest.mark.parametrize("lanes", [WIDTH, WIDTH + 5])
def test_fused_caches_equal_separate_caches(dtype: str, scales: Any, rank: int, lanes: int, variant: Variant) -> None:
    """A fused cache has keys and values in one array. Unused columns after a key and after a value keep their bytes."""
    rng = fresh_rng()
    kv, (k, v), slots = finite(stale_cache(rng, dtype, scales)), tokens(rng), random_slots(rng, rank)
    behind = jnp.asarray(any_bits(rng, (*kv.k.shape[:3], lanes - WIDTH), kv.k.dtype))
    want = numpy_write(kv, k, v, slots)
    fused = jnp.concatenate([kv.k, behind, kv.v, behind], axis=-1)
    got = write(variant, dataclasses.replace(kv, k=fused, v=None), k, v, slots)
    assert got.v is None
    assert_same_bits(got.k, np.concatenate([want.k, behind, want.v, behind], axis=-1))
    assert_same_bits((got.k_scale, got.v_scale), (want.k_scale, want.v_scale))


@slow_cases("16-bfloat16-None-2-xla")
@each_variant
@in_every_run("xla", mosaic=["None-float16-None-1", "16-float8_e4m3fn-8-1", "24-int8-channel-1"], triton=[])
@pytest.mark.parametrize(
    ("dtype", "scales", "rank"),
    [
        ("bfloat16", None, 2),
        ("float16", None, 1),
        ("int8", "channel", 1),
        ("float8_e4m3fn", "head", 2),
        ("float8_e4m3fn", PAGE_SIZE, 1),
    ],
)
@pytest.mark.parametrize("lanes", [None, WIDTH, WIDTH + 8])
def test_views_of_tokens_before_heads(dtype: str, scales: Any, rank: int, lanes: int | None, variant: Variant) -> None:
    """Views of pages with tokens before heads are written like caches with heads before tokens. With `lanes`, keys and
    values are in one array, and the columns after a key and after a value keep their bytes. The second call overwrites
    the tokens of the first call, as after rejected drafts.
    """
    rng = fresh_rng()
    kv, slots = finite(stale_cache(rng, dtype, scales)), random_slots(rng, rank)
    keys, values, *of_tokens = to_nhd(kv)
    behind = jnp.asarray(any_bits(rng, (NUM_PAGES * PAGE_SIZE, HEADS, 1, (lanes or WIDTH) - WIDTH), keys.dtype))

    def in_layout(view: PagedKV) -> PagedKV:
        if lanes is None:
            return view
        return dataclasses.replace(view, k=jnp.concatenate([view.k, behind, view.v, behind], axis=-1), v=None)

    view = in_layout(view_nhd(keys, values, *of_tokens))
    for _ in range(2):
        k, v = tokens(rng)
        kv = numpy_write(kv, k, v, slots)
        view = write(variant, view, k, v, _of_view(slots))
        slots = rng.permuted(slots)
    assert_same_bits(view, in_layout(view_nhd(*to_nhd(jax.tree.map(jnp.asarray, kv)))))


def _of_view(slots: Any) -> Any:
    """Return slots of a view of pages with tokens before heads. Only slots per head differ: there, the heads of a token
    are consecutive.
    """
    slots = np.asarray(slots)
    if slots.ndim == 1:
        return jnp.asarray(slots)
    row, offset = np.divmod(slots, PAGE_SIZE)
    page, head = np.divmod(row, HEADS)
    exists = (slots >= 0) & (page < NUM_PAGES)
    return jnp.asarray(np.where(exists, (page * PAGE_SIZE + offset) * HEADS + head, slots), jnp.int32)


# --- wide heads


@each_variant
@in_every_run(
    xla=all_but("320-float8_e4m3fn-2"),
    mosaic=["512-bfloat16-None"],
    triton=["512-float8_e4m3fn-2"],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("int8", "channel"), ("float8_e4m3fn", 2)])
@pytest.mark.parametrize("width", [320, 512])
def test_wide_heads(width: int, dtype: str, scales: Any, variant: Variant) -> None:
    rng = fresh_rng()
    kv = finite(stale_cache(rng, dtype, scales, width=width))
    (k, v), slots = tokens(rng, width=width), random_slots(rng, 1)
    assert_same_bits(write(variant, kv, k, v, slots), numpy_write(kv, k, v, slots))


class Group:
    """Helper for tests of a scale group: the first half of page 2, which holds stale bytes at first.

    `append` writes tokens; all columns of a token have the same value.
    """

    def __init__(self, variant: Variant, dtype: str):
        self.kv = stale_cache(fresh_rng(), dtype, 2)
        self.variant = variant

    def append(self, start: int, *values: float) -> Group:
        x = np.zeros((NUM_TOKENS, HEADS, WIDTH), np.float32)
        x[: len(values)] = np.array(values, np.float32)[:, None, None]
        slots = np.full((NUM_TOKENS,), -1, np.int32)
        slots[: len(values)] = 2 * PAGE_SIZE + start + np.arange(len(values))
        self.kv = write(self.variant, self.kv, jnp.asarray(x), jnp.asarray(x), slots)
        return self

    @property
    def scale(self) -> np.float32:
        return np.asarray(self.kv.k_scale)[2, 0, 0]

    @property
    def stored(self) -> np.ndarray:
        return np.asarray(self.kv.k)[2, 0, : PAGE_SIZE // 2]

    @property
    def values(self) -> np.ndarray:
        return self.stored[:, 0].astype(np.float32) * self.scale


@each_variant
@in_every_run("xla", mosaic=["int8"])
@each_quantised
class TestGroups:
    def test_first_token_resets_the_scale(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 3.0)
        assert group.scale == np.float32(3) / QMAX[dtype]
        assert group.append(0, 0.5).scale == np.float32(0.5) / QMAX[dtype]

    def test_tokens_of_one_call_share_a_maximum(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 1.0, -4.0, 2.0)
        assert group.scale == np.float32(4) / QMAX[dtype]
        np.testing.assert_allclose(group.values[:3], [1, -4, 2], atol=0.02)

    def test_larger_token_requantises_earlier_tokens(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 1.0, 0.5).append(2, 8.0)
        assert group.scale == np.float32(8) / QMAX[dtype]
        np.testing.assert_allclose(group.values[:3], [1, 0.5, 8], atol=0.04)

    def test_smaller_token_changes_no_earlier_bytes(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 5.0, 0.3)
        scale, before = group.scale, group.stored[:2]
        group.append(2, 4.9)
        assert group.scale == scale
        assert_same_bits(group.stored[:2], before)

    def test_unit_scale_of_zeros_does_not_affect_later_tokens(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 0.0, 0.0)
        assert group.scale == 1
        np.testing.assert_array_equal(group.values[:2], [0, 0])
        group.append(2, 0.01)
        assert group.scale == np.float32(0.01) / QMAX[dtype]
        np.testing.assert_allclose(group.values[:3], [0, 0, 0.01], rtol=1e-6)

    def test_zero_token_leaves_the_scale(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 0.01)
        scale = group.scale
        assert group.append(1, 0.0).scale == scale
        np.testing.assert_allclose(group.values[:2], [0.01, 0], rtol=1e-6)

    def test_overwritten_draft_token_does_not_affect_the_scale(self, dtype: str, variant: Variant) -> None:
        """The draft with value 1000 gives the group a scale with which the first token uses 1/100 of the range. When
        the draft is overwritten by a token of value 10, the scale becomes small again.
        """
        group = Group(variant, dtype).append(0, 10.0).append(1, 1000.0).append(1, 10.0)
        assert group.scale < 11 / QMAX[dtype]
        np.testing.assert_allclose(group.values[:2], 10, rtol=0.25 if dtype == "int8" else 0.05)
        np.testing.assert_allclose(group.values[1], 10, rtol=0.01 if dtype == "int8" else 0.05)

    def test_huge_value_next_to_small_values(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype).append(0, 1.0, 3e38).append(2, 1.0)
        np.testing.assert_allclose(group.values[:3], [0, 3e38, 0], rtol=1e-6)

    def test_stale_tokens_are_unchanged(self, dtype: str, variant: Variant) -> None:
        group = Group(variant, dtype)
        before = group.stored[2:]
        assert_same_bits(group.append(0, 1.0).append(1, 9.0).stored[2:], before)


@pytest.mark.slow
def test_requantisation_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = fresh_rng()
    first = np.arange(NUM_TOKENS, dtype=np.int32) * (PAGE_SIZE // 2)
    kv = write(VARIANTS["reference"], stale_cache(rng, "int8", 2), *tokens(rng), first)
    k, v = (10 * x for x in tokens(rng))
    want = numpy_write(kv, k, v, first + 1)
    assert not np.array_equal(want.k[:3, :, 0], kv.k[:3, :, 0])
    for groups in (1, 5, 7):
        monkeypatch.setattr(xla, "_BLOCK_ELEMENTS", groups * WIDTH * PAGE_SIZE // 2)
        assert_same_bits(jax.jit(lambda *args: write_kv(*args, implementation="xla"))(kv, k, v, first + 1), want)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Draw a list of calls that append tokens to one sequence.

    Returns:
      Number of tokens of each call, exponent of their magnitudes for each call, and a seed.

    """
    calls = draw(st.lists(st.tuples(st.integers(1, NUM_TOKENS), st.integers(-8, 8)), min_size=1, max_size=8))
    counts, exponents = zip(*calls, strict=True)
    return list(counts), list(exponents), draw(st.integers(0, 2**32 - 1))


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(histories(), st.sampled_from([("int8", 2), ("float8_e4m3fn", 2)]))
def test_random_chunking_bounds_the_error(history: tuple[list[int], list[int], int], cache: tuple[str, int]) -> None:
    """Tokens are appended to a sequence in random chunks. All implementations must write the same bytes, and the error
    of each stored token is bounded.
    """
    (counts, exponents, seed), (dtype, groups) = history, cache
    rng = np.random.default_rng(seed)
    pages = rng.permutation(NUM_PAGES)
    kv = stale_cache(rng, dtype, groups)
    written, roundings = np.zeros((0, HEADS, WIDTH), np.float32), np.zeros((0,), int)
    for count, exponent in zip(counts, exponents, strict=True):
        x = (rng.standard_normal((NUM_TOKENS, HEADS, WIDTH)) * 2.0**exponent).astype(np.float32)
        positions = np.arange(len(written), min(len(written) + count, NUM_PAGES * PAGE_SIZE))
        slots = np.full((NUM_TOKENS,), -1, np.int32)
        slots[: len(positions)] = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        want = numpy_write(kv, x, -x, slots)
        for variant in RUNNABLE:
            assert_same_bits(write(variant, kv, jnp.asarray(x), jnp.asarray(-x), slots), want)
        kv = jax.tree.map(jnp.asarray, want)
        written = np.concatenate([written, x[: len(positions)]])
        roundings = np.concatenate([roundings, np.zeros(len(positions), int)]) + 1
    _assert_near(kv, pages, written, roundings)


def _assert_near(kv: PagedKV, pages: np.ndarray, written: np.ndarray, roundings: np.ndarray) -> None:
    """Assert that the error of each stored value is at most about half a quantisation step per rounding. `roundings`
    has the number of times that each token was rounded.
    """
    position = np.arange(len(written))
    page, offset = pages[position // PAGE_SIZE], position % PAGE_SIZE
    assert kv.k_scale is not None
    scale = np.repeat(np.asarray(kv.k_scale), PAGE_SIZE // kv.k_scale.shape[-1], axis=-1)[page, :, offset][..., None]
    read = np.asarray(kv.k)[page, :, offset].astype(np.float32) * scale
    step = scale if kv.k.dtype == jnp.int8 else np.maximum(np.abs(written) / 8, scale * 2.0**-9)
    # 0.55 and not 0.5: a float8 value that was rounded up can have a larger step when it is rounded again.
    assert (np.abs(read - written) <= 0.55 * roundings[:, None, None] * step).all()
