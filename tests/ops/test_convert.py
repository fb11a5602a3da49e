"""Converters between cache layouts keep each token of each head, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.convert import from_nhd, join_kv, split_kv, to_nhd
from pallas_attn.types import PagedKV
from tests.ops.harness import assert_same_bits, fresh_rng
from tests.ops.write_kv_case import HEADS, NUM_PAGES, PAGE_SIZE, WIDTH, stale_cache

LAYOUTS = pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float32", None), ("bfloat16", None), ("int8", "head"), ("float8_e4m3fn", "channel"), ("int8", 2)],
)


@LAYOUTS
def test_nhd_and_back(dtype: str, scales: Any) -> None:
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
def test_combined_pages(axis: int, dtype: str) -> None:
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


def nhd(**changes: Any) -> dict[str, Any]:
    pages = jnp.zeros((3, 8, 2, 4), jnp.int8)
    return {"k": pages, "v": pages, "k_scale": jnp.ones((3, 2, 2)), "v_scale": jnp.ones((3, 2, 2))} | changes


BAD_CALLS = {
    "k of rank 3": (from_nhd, nhd(k=jnp.zeros((8, 2, 4), jnp.int8)), "k: expected shape"),
    "k of a dtype no cache has": (from_nhd, nhd(k=jnp.zeros((3, 8, 2, 4), jnp.int32)), "k: expected dtype"),
    "v of other pages": (from_nhd, nhd(v=jnp.zeros((4, 8, 2, 4), jnp.int8)), "v: expected shape"),
    "v of another dtype": (from_nhd, nhd(v=jnp.zeros((3, 8, 2, 4))), "v: expected dtype"),
    "no scale": (from_nhd, nhd(k_scale=None), "kv.k_scale"),
    "groups that do not divide": (from_nhd, nhd(k_scale=jnp.ones((3, 5, 2))), "kv.k_scale"),
    "heads before groups": (from_nhd, nhd(k_scale=jnp.ones((3, 2, 4)), v_scale=jnp.ones((3, 2, 4))), "kv.k_scale"),
    "a broken cache": (to_nhd, {"kv": PagedKV(jnp.zeros((3, 2, 8, 4)), jnp.zeros((3, 2, 4, 4)))}, "kv.v"),
    "pages of three": (split_kv, {"pages": jnp.zeros((3, 5, 2, 8, 4)), "axis": 0}, "pages: expected shape"),
    "pages that are not both": (split_kv, {"pages": jnp.zeros((2, 5, 8, 4)), "axis": 0}, "pages: expected shape"),
    "an axis of its own": (split_kv, {"pages": jnp.zeros((2, 5, 2, 8, 4)), "axis": 2}, "axis"),
    "v of another shape": (join_kv, {"k": jnp.zeros((3, 2, 8, 4)), "v": jnp.zeros((3, 8, 2, 4)), "axis": 0}, "v"),
    "nowhere to join": (join_kv, {"k": jnp.zeros((3, 2, 8, 4)), "v": jnp.zeros((3, 2, 8, 4)), "axis": -1}, "axis"),
}


@pytest.mark.parametrize(("function", "call", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_calls_are_refused_by_name(function: Any, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**call)
