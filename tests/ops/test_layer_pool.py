"""One pool with the pages of several layers: tables and slots of a layer, and scans over layers that do not copy the
pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    PAGE_NONE,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    index_cache_spec,
    index_scores,
    kv_cache_spec,
    latent_cache_spec,
    layer_slots,
    layer_tables,
    mla_decode,
    paged_decode,
    slot_mapping,
    token_slots,
    write_index_keys,
    write_kv,
    write_latent,
)
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

LAYERS, N, PS, HKV, HQ, D, B, P = 3, 8, 4, 2, 4, 16, 3, 3
SIZES: dict[str, Any] = {"num_pages": N, "page_size": PS}
TABLES = jnp.array([[5, 0, 7], [3, PAGE_NONE, PAGE_NONE], [1, 6, 2_000_000]], jnp.int32)
KV_LENS = jnp.array([9, 0, 8], jnp.int32)
CU_Q_LENS = jnp.arange(B + 1, dtype=jnp.int32)


# --- tables and slots


def test_layer_tables_shift_pages_of_the_layer_only() -> None:
    """PAGE_NONE, and ids that are no page of a layer, are absent: otherwise they would be pages of another layer."""
    want = [[21, 16, 23], [19, PAGE_NONE, PAGE_NONE], [17, 22, PAGE_NONE]]
    assert layer_tables(TABLES, 2, num_pages=N).tolist() == want
    assert layer_tables(TABLES.reshape(-1), 2, num_pages=N).tolist() == np.ravel(want).tolist()
    assert jax.jit(lambda i: layer_tables(TABLES, i, num_pages=N))(jnp.int32(2)).tolist() == want
    ends = jnp.array([[N - 1, N, -2, 2**31 - 1]], jnp.int32)
    assert layer_tables(ends, 1, num_pages=N).tolist() == [[2 * N - 1, PAGE_NONE, PAGE_NONE, PAGE_NONE]]


def test_layer_tables_of_page_rows() -> None:
    rows = jnp.array([[[0, 15], [1, PAGE_NONE]]], jnp.int32)  # [1, Hkv=2, P=2]
    assert layer_tables(rows, 1, num_pages=N).tolist() == [[[16, 31], [17, PAGE_NONE]]]


@pytest.mark.slow
def test_layer_slots_shift_slots_of_the_layer_only() -> None:
    slots = jnp.array([3, -1, N * PS - 1, N * PS], jnp.int32)
    assert layer_slots(slots, 1, num_slots=N * PS).tolist() == [3 + N * PS, -1, 2 * N * PS - 1, -1]
    chosen = token_slots(jnp.array([[0, 8, -1]], jnp.int32), TABLES[:1], CU_Q_LENS[:2], page_size=PS)
    assert layer_slots(chosen, 1, num_slots=N * PS).tolist() == [[20 + N * PS, 28 + N * PS, -1]]


@pytest.mark.slow
def test_slots_of_layer_tables_are_layer_slots() -> None:
    options: dict[str, Any] = {"page_size": PS, "length": B}
    for rank in (2, 3):
        pages = np.asarray(TABLES)[:, None]
        rows = np.where(pages >= 0, pages * HKV + np.arange(HKV)[:, None], PAGE_NONE)
        tables = TABLES if rank == 2 else jnp.asarray(rows, jnp.int32)
        got = slot_mapping(layer_tables(tables, 2, num_pages=N), CU_Q_LENS, KV_LENS, **options)
        want = slot_mapping(tables, CU_Q_LENS, KV_LENS, **options)
        harness.assert_same_bits(got, layer_slots(want, 2, num_slots=N * PS * (1 if rank == 2 else HKV)))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_tables(jnp.zeros((1, 1, 1, 1), jnp.int32), 0, num_pages=N), "block_tables: expected shape"),
        (lambda: layer_tables(TABLES, -1, num_pages=N), "layer: expected at least 0, got -1"),
        (lambda: layer_tables(TABLES, jnp.zeros(2, jnp.int32), num_pages=N), r"layer: expected shape \[\]"),
        (lambda: layer_tables(TABLES, True, num_pages=N), "layer: expected dtype int32, got bool"),
        (lambda: layer_tables(TABLES, 0, num_pages=0), "num_pages: expected at least 1"),
        (lambda: layer_slots(jnp.zeros(2), 0, num_slots=N), "slots: expected dtype int32"),
        (lambda: PagedKV.allocate(kv_spec(), layers=0), "layers must be at least 1, got 0"),
        (
            lambda: jax.eval_shape(lambda: PagedKV.allocate(kv_spec(), layers=2**26 + 1)),
            "layers: slots of 67108865 layers of 8 pages of 4 tokens do not fit an int32",
        ),
    ],
)
def test_errors_name_the_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# --- pools


def kv_spec(num_pages: int = N, dtype: Any = jnp.float32, scales: Any = None) -> Any:
    sizes = SIZES | {"num_pages": num_pages}
    return kv_cache_spec(**sizes, num_kv_heads=HKV, head_dim=D, dtype=dtype, scales=scales)


def test_allocated_pools() -> None:
    """Arrays with an entry per page have the pages of all layers. Static scales do not."""
    pool: Any = PagedKV.allocate(kv_spec(dtype=jnp.int8, scales=2), layers=LAYERS)
    assert (pool.k.shape, pool.k_scale.shape) == ((LAYERS * N, HKV, PS, D), (LAYERS * N, HKV, 2))
    static: Any = PagedKV.allocate(kv_spec(HKV, dtype=jnp.int8, scales="channel"), layers=LAYERS)
    assert (static.k.shape[0], static.v_scale.shape) == (LAYERS * HKV, (HKV, D))
    latents = latent_cache_spec(**SIZES, latent_dim=128, rope_dim=8, dtype=jnp.float8_e4m3fn)
    assert [x.shape[0] for x in jax.tree.leaves(PagedLatent.allocate(latents, layers=LAYERS))] == [LAYERS * N] * 3
    keys = index_cache_spec(**SIZES, index_dim=D, dtype=jnp.float8_e4m3fn)
    assert [x.shape[0] for x in jax.tree.leaves(PagedIndexKeys.allocate(keys, layers=LAYERS))] == [LAYERS * N] * 2


def kv_layer(pool: PagedKV, new: jax.Array, tables: Any, slots: Any) -> tuple[PagedKV, Any]:
    """Write and attend in one layer. `new` has rows of D columns: Hq queries, Hkv keys, and Hkv values."""
    q, k, v = jnp.split(new[:, : HQ + 2 * HKV], [HQ, HQ + HKV], axis=1)
    pool = write_kv(pool, k, v, slots, implementation="xla")
    return pool, paged_decode(q[:, None], pool, tables, KV_LENS, implementation="xla")


def latent_layer(cache: PagedLatent, new: jax.Array, tables: Any, slots: Any) -> tuple[PagedLatent, Any]:
    q, latent = new[:, :HQ], new[:, HQ]
    cache = write_latent(cache, latent, slots, implementation="xla")
    parts = q[:, None, :, : D - 4], q[:, None, :, D - 4 :]
    return cache, mla_decode(*parts, cache, tables, KV_LENS, sm_scale=0.2, implementation="xla")


def index_layer(index: PagedIndexKeys, new: jax.Array, tables: Any, slots: Any) -> tuple[PagedIndexKeys, Any]:
    index = write_index_keys(index, new[:, HQ], slots, implementation="xla")
    weights = jnp.ones((B, HQ), jnp.float32)
    return index, index_scores(new[:, :HQ], weights, index, tables, CU_Q_LENS, KV_LENS, implementation="xla")


CACHES: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "K/V": (PagedKV, kv_spec(), kv_layer),
    "K/V in int8": (PagedKV, kv_spec(dtype=jnp.int8, scales=2), kv_layer),
    "latents": (
        PagedLatent,
        latent_cache_spec(**SIZES, latent_dim=D - 4, rope_dim=4, dtype=jnp.float32),
        latent_layer,
    ),
    "index keys": (PagedIndexKeys, index_cache_spec(**SIZES, index_dim=D, dtype=jnp.float32), index_layer),
}


def scan_over_layers(layer: Callable[..., Any], num_pages: int) -> Callable[..., Any]:
    """Return the recipe of docs/concepts.md: a scan that carries the pool of all layers."""

    def scan(pool: Any, new: jax.Array, tables: jax.Array) -> Any:
        slots = slot_mapping(tables, CU_Q_LENS, KV_LENS, page_size=PS, length=B)

        def step(pool: Any, inputs: Any) -> Any:
            i, new = inputs
            at = layer_tables(tables, i, num_pages=num_pages), layer_slots(slots, i, num_slots=num_pages * PS)
            return layer(pool, new, *at)

        return jax.lax.scan(step, pool, (jnp.arange(LAYERS, dtype=jnp.int32), new))

    return scan


@slow_cases("K/V", "index keys")
@pytest.mark.parametrize("name", CACHES)
def test_scan_over_a_pool_equals_separate_caches(name: str) -> None:
    kind, spec, layer = CACHES[name]
    new = jnp.asarray(harness.fresh_rng().standard_normal((LAYERS, B, HQ + 2 * HKV, D)), jnp.float32)
    pool, outs = jax.jit(scan_over_layers(layer, N))(kind.allocate(spec, layers=LAYERS), new, TABLES)
    slots = slot_mapping(TABLES, CU_Q_LENS, KV_LENS, page_size=PS, length=B)
    for i in range(LAYERS):
        cache, out = jax.jit(layer)(kind.allocate(spec), new[i], TABLES, slots)
        harness.assert_same_bits(jax.tree.map(lambda x, i=i: x[i * N : (i + 1) * N], pool), cache)
        harness.assert_close("output", outs[i], out, harness.F32_OUT)
    assert np.asarray(outs).any()


MANY = 4096
"""Pages of a layer, so that each pool is larger than all other arrays of the compiled program."""


def test_scan_does_not_copy_the_pool() -> None:
    """The compiled scan writes the donated pool in place. A scan over stacked caches copies them."""
    new = jax.ShapeDtypeStruct((LAYERS, B, HQ + 2 * HKV, D), jnp.float32)
    for spec in (kv_spec(MANY), kv_spec(MANY, jnp.int8, 2)):
        pool = jax.eval_shape(lambda spec=spec: PagedKV.allocate(spec, layers=LAYERS))
        scan = jax.jit(scan_over_layers(kv_layer, MANY), donate_argnums=0)
        harness.assert_stays_put(scan, pool.k, pool, new, TABLES)

    def over_stacked(stacked: Any, new: jax.Array, tables: jax.Array) -> Any:
        slots = slot_mapping(tables, CU_Q_LENS, KV_LENS, page_size=PS, length=B)
        return jax.lax.scan(lambda _, inputs: (None, kv_layer(*inputs, tables, slots)), None, (stacked, new))

    one = jax.eval_shape(lambda: PagedKV.allocate(kv_spec(MANY)))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype), one)
    with pytest.raises(AssertionError, match="temporary memory|the cache has"):
        harness.assert_stays_put(jax.jit(over_stacked, donate_argnums=0), one.k, stacked, new, TABLES)


def test_layer_beyond_int32_gives_no_ids_of_another_layer() -> None:
    ids = jnp.array([[0, 3]], jnp.int32)
    assert layer_tables(ids, jnp.int32(4), num_pages=2**30).tolist() == [[-1, -1]]
    assert layer_slots(ids, jnp.int32(5), num_slots=2**29).tolist() == [[-1, -1]]
