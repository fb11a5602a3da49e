"""Operations on split arrays inside `jax.shard_map` on meshes of 1 to 4 devices return the results of one device."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_attn import (
    PAGE_NONE,
    HeadWindow,
    PagedKV,
    PagedLatent,
    kv_cache_spec,
    mla_decode,
    paged_decode,
    parallel,
    plan_decode,
    to_nhd,
    token_tables,
    view_nhd,
    write_kv,
)
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

PS, COLUMNS, PAGES = 4, 7, 16
"""Page size, columns of a table (which 2 and 4 devices do not divide), and pages of each device."""
KV_LENS = np.array([0, 1, 4, 5, 17, 28], np.int32)
"""Tokens of each sequence: no tokens, pages on the first device only, a partly filled page, and a full block table."""
B, HQ, HKV, D, R = len(KV_LENS), 8, 4, 16, 8


def mesh_of(devices: int, name: str = "context") -> jax.sharding.Mesh:
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices")
    return jax.make_mesh((devices,), (name,), axis_types=(jax.sharding.AxisType.Auto,))


def values(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def dealt_tables(rng: np.random.Generator, devices: int, heads: int = 1) -> np.ndarray:
    """Return block tables whose entry j is a page of device j % devices.

    With several `heads`, return head-wise tables, whose entries are row ids: page id times heads plus head.
    """
    free = [list(rng.permutation(PAGES) + device * PAGES) for device in range(devices)]
    tables = np.full((B, COLUMNS), PAGE_NONE, np.int32)
    for row, kv_len in enumerate(KV_LENS):
        for column in range(-(-kv_len // PS)):
            tables[row, column] = free[column % devices].pop()
    return (
        tables
        if heads == 1
        else np.where(
            tables[:, None] < 0, PAGE_NONE, tables[:, None] * heads + np.arange(heads, dtype=np.int32)[:, None]
        )
    )


def cache_of(kind: str, rng: np.random.Generator, devices: int) -> Any:
    """Return a cache that has the pages of all devices."""
    if kind == "latent":
        return PagedLatent(values(rng, devices * PAGES, PS, D + R))
    if kind == "latent, 8 bits":
        pool = devices * PAGES, PS
        scale = 0.25 * jnp.exp(values(rng, *pool, 1))  # the tolerance assumes latents near 1
        return PagedLatent(
            values(rng, *pool, 128).astype(jnp.float8_e4m3fn), scale, values(rng, *pool, R, dtype=jnp.bfloat16)
        )
    if kind in ("f32", "bf16", "head-wise"):
        dtype = jnp.bfloat16 if kind == "bf16" else jnp.float32
        kv = (harness.HALF_SCALE * values(rng, devices * PAGES, HKV, PS, D) for _ in range(2))
        return PagedKV(*(x.astype(dtype) for x in kv))
    sizes: dict[str, Any] = {"page_size": PS, "num_kv_heads": HKV, "head_dim": D, "dtype": jnp.int8}
    spec = kv_cache_spec(num_pages=devices * PAGES, scales="head" if kind == "int8-head" else 2, **sizes)
    slots = jnp.arange(devices * PAGES * PS, dtype=jnp.int32)
    k, v = (values(rng, len(slots), HKV, D) for _ in range(2))
    return write_kv(PagedKV.allocate(spec), k, v, slots)


def partition(cache: Any, **axes: Any) -> Any:
    of = parallel.latent_partition if isinstance(cache, PagedLatent) else parallel.kv_partition
    return of(cache, **axes)


def queries_of(cache: Any, rng: np.random.Generator, num_queries: int) -> list[jax.Array]:
    dtype = jnp.bfloat16 if isinstance(cache, PagedKV) and cache.k.dtype == jnp.bfloat16 else jnp.float32
    widths = (cache.width - R, R) if isinstance(cache, PagedLatent) else (D,)
    return [values(rng, B, num_queries, HQ, width, dtype=dtype) for width in widths]


CASES = {
    "f32": ("f32", 1, {}),
    "bf16": ("bf16", 1, {}),
    "bf16, float32 exchanged": ("bf16", 1, {"out_dtype": jnp.float32}),
    "int8, scales of heads": ("int8-head", 1, {}),
    "int8, scales of groups": ("int8-group", 1, {}),
    "tables of heads": ("head-wise", 1, {}),
    "drafts, sinks, caps": ("f32", 3, {"soft_cap": 5.0, "sinks": True, "q_lens": True}),
    "latents": ("latent", 1, {"sm_scale": 0.2}),
    "latents, drafts": ("latent", 2, {"sm_scale": 0.2}),
    "latents in 8 bits": ("latent, 8 bits", 1, {"sm_scale": 0.2}),
}


def _named() -> list[Any]:
    """Return each case with 1, 2 and 4 devices. One of the combinations with 2 or 4 devices has no mark `slow`."""
    in_every_run = set(zip(itertools.cycle((2, 4)), CASES, strict=False))
    in_every_run.remove((2, "bf16, float32 exchanged"))  # "bf16" runs the same exchange in another dtype
    return [
        pytest.param(*case, n, id=f"{name}-{n}", marks=[] if (n, name) in in_every_run else pytest.mark.slow)
        for name, case in CASES.items()
        for n in (1, 2, 4)
    ]


@pytest.mark.slow
@slow_cases(
    "bf16-4", "latents, drafts-2", "drafts, sinks, caps-2", "latents in 8 bits-4", "int8, scales of heads-4",
    "tables of heads-4", "f32-2", "int8, scales of groups-2",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "num_queries", "options", "devices"), _named())
def test_decode_over_contexts(kind: str, num_queries: int, options: dict[str, Any], devices: int) -> None:
    rng = np.random.default_rng(devices)
    cache, tables = cache_of(kind, rng, devices), dealt_tables(rng, devices, HKV if kind == "head-wise" else 1)
    queries, options = queries_of(cache, rng, num_queries), dict(options)
    arrays: dict[str, Any] = {}
    if options.pop("sinks", None):
        arrays["sinks"] = values(rng, HQ)
    if options.pop("q_lens", None):
        arrays["q_lens"] = jnp.asarray(np.minimum(KV_LENS, [0, 1, 3, 2, 0, 3]), jnp.int32)
    operation = functools.partial(mla_decode if "latent" in kind else paged_decode, implementation="xla", **options)

    def split(queries: Any, cache: Any, tables: Any, lens: Any, arrays: Any) -> Any:
        return parallel.decode_over_contexts(operation, queries, cache, tables, lens, axis="context", **arrays)

    run = jax.shard_map(
        split,
        mesh=mesh_of(devices),
        in_specs=(P(), partition(cache, pages="context"), P(), P(), P()),
        out_specs=P(None, None, "context"),
    )
    lens = jnp.asarray(KV_LENS)
    got = jax.jit(run)(queries, cache, tables, lens, arrays)
    want: Any = operation(*queries, cache, jnp.asarray(tables), lens, return_lse=True, **arrays)
    of_output = harness.HALF_OUT if kind == "bf16" else harness.F32_OUT
    harness.assert_attention_close(got, want, (of_output, harness.F32_LSE))


@pytest.mark.parametrize("devices", [2, 4])
def test_one_exchange_and_no_gather(devices: int) -> None:
    rng = np.random.default_rng(0)
    cache, tables = cache_of("bf16", rng, devices), dealt_tables(rng, devices)

    def split(q: Any, cache: Any, tables: Any, lens: Any) -> Any:
        return parallel.decode_over_contexts(paged_decode, [q], cache, tables, lens, axis="context")

    specs = (P(), partition(cache, pages="context"), P(), P())
    run = jax.shard_map(split, mesh=mesh_of(devices), in_specs=specs, out_specs=P(None, None, "context"))
    text = jax.jit(run).lower(*queries_of(cache, rng, 1), cache, tables, KV_LENS).compile().as_text()
    exchanges = re.findall(r" (all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\(", str(text))
    assert [name.removesuffix("-start") for name in exchanges if not name.endswith("-done")] == ["all-to-all"]


def test_page_on_the_wrong_device_is_invisible() -> None:
    rng = np.random.default_rng(0)
    cache, tables = cache_of("f32", rng, 2), dealt_tables(rng, 2)
    # Column 1 belongs to device 1, but has pages of device 0.
    strayed = np.where(np.arange(COLUMNS) == 1, tables - PAGES, tables)

    def part(tables: Any, lens: Any, cache: Any) -> Any:
        own = parallel.context_part(tables, lens, cache, axis="context")
        return own.block_tables[None], own.kv_lens[None]

    specs = (P(), P(), partition(cache, pages="context"))
    run = jax.shard_map(part, mesh=mesh_of(2), in_specs=specs, out_specs=P("context"))
    own, lens = jax.jit(run)(strayed.astype(np.int32), KV_LENS, cache)
    np.testing.assert_array_equal(own[0], np.where(tables[:, 0::2] < 0, PAGE_NONE, tables[:, 0::2]))
    np.testing.assert_array_equal(own[1, :, 0], PAGE_NONE)
    np.testing.assert_array_equal(own[1, :, 1:3], np.where(tables[:, 3::2] < 0, PAGE_NONE, tables[:, 3::2] - PAGES))
    np.testing.assert_array_equal(own[1, :, 3], PAGE_NONE)  # column 7, which the tables do not have
    np.testing.assert_array_equal(lens, [[0, 1, 4, 4, 9, 16], [0, 0, 0, 1, 8, 12]])


def test_tables_of_a_view_are_dealt_in_pages() -> None:
    """The tables of a view have an entry per token. A device has the entries of whole pages."""
    rng = np.random.default_rng(0)
    cache, tables = cache_of("f32", rng, 2), dealt_tables(rng, 2)
    view, tokens = view_nhd(*to_nhd(cache)), token_tables(jnp.asarray(tables), page_size=cache.page_size)

    def part(tables: Any, lens: Any, cache: Any) -> Any:
        own = parallel.context_part(tables, lens, cache, axis="context")
        return own.block_tables[None], own.kv_lens[None]

    def parts(cache: Any, tables: Any) -> Any:
        specs = (P(), P(), partition(cache, pages="context"))
        return jax.jit(jax.shard_map(part, mesh=mesh_of(2), in_specs=specs, out_specs=P("context")))(
            tables, KV_LENS, cache
        )

    own, lens = parts(cache, jnp.asarray(tables))
    own_tokens, lens_of_view = parts(view, tokens)
    expected = token_tables(own.reshape(-1, own.shape[-1]), page_size=cache.page_size).reshape(own_tokens.shape)
    np.testing.assert_array_equal(own_tokens, expected)
    np.testing.assert_array_equal(lens_of_view, lens)
    if tables.shape[1] % cache.page_size:
        with pytest.raises(ValueError, match="block_tables: expected an entry for each token, a multiple of"):
            parts(view, jnp.asarray(tables))


def test_lengths_beyond_the_table_are_clipped() -> None:
    """A length beyond the block table is clipped in the same way as on one device, also with several queries."""
    rng = np.random.default_rng(0)
    cache, lens = cache_of("f32", rng, 2), jnp.asarray(np.where(KV_LENS == 28, 2**31 - 1, KV_LENS), jnp.int32)
    tables, (q,) = jnp.asarray(dealt_tables(rng, 2)), queries_of(cache, rng, 3)
    decode = functools.partial(paged_decode, implementation="xla")

    def split(q: Any, cache: Any, tables: Any, lens: Any) -> Any:
        return parallel.decode_over_contexts(decode, [q], cache, tables, lens, axis="context")

    specs = (P(), partition(cache, pages="context"), P(), P())
    run = jax.shard_map(split, mesh=mesh_of(2), in_specs=specs, out_specs=P(None, None, "context"))
    want: Any = decode(q, cache, tables, lens, return_lse=True)
    harness.assert_attention_close(jax.jit(run)(q, cache, tables, lens), want, (harness.F32_OUT, harness.F32_LSE))


def test_writes_to_split_pages() -> None:
    rng = np.random.default_rng(0)
    cache, slots = cache_of("int8-head", rng, 4), rng.permutation(4 * PAGES * PS)[:50].astype(np.int32)
    slots[7] = PAGE_NONE
    k, v = (values(rng, 50, HKV, D) for _ in range(2))

    def write(cache: Any, k: Any, v: Any, slots: Any) -> Any:
        return write_kv(cache, k, v, parallel.local_slots(slots, cache, axis="context"))

    specs = partition(cache, pages="context")
    run = jax.shard_map(write, mesh=mesh_of(4), in_specs=(specs, P(), P(), P()), out_specs=specs)
    harness.assert_same_bits(jax.jit(run)(cache, k, v, slots), write_kv(cache, k, v, jnp.asarray(slots)))


@pytest.mark.slow
@slow_cases("int8-group")
@pytest.mark.parametrize(
    "kind",
    # `make test` tests static scales in tests/runtime/test_sharded_calls.py.
    ["f32", pytest.param("int8-head", marks=pytest.mark.slow), "int8-group"],
)
def test_heads_over_devices(kind: str) -> None:
    """Query and KV heads are split over four devices. Each device makes a plan for its heads, and decodes with it."""
    rng = np.random.default_rng(0)
    cache, tables = cache_of(kind, rng, 1), dealt_tables(rng, 1)
    (q,), sinks = queries_of(cache, rng, 1), values(rng, HQ)
    tables, lens = jnp.asarray(tables), jnp.asarray(KV_LENS)
    specs, mesh = (P(None, None, "tensor"), partition(cache, heads="tensor"), P(), P()), mesh_of(4, "tensor")
    decode = functools.partial(paged_decode, implementation="xla", return_lse=True)

    def split(q: Any, cache: Any, tables: Any, lens: Any, sinks: Any, plan: Any) -> Any:
        return decode(q, cache, tables, lens, sinks=sinks, plan=plan)

    make = functools.partial(plan_decode, num_programs=3)
    first = [
        jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)).addressable_data(0), x, spec)
        for x, spec in zip((q, cache), specs[:2], strict=True)
    ]
    plans = parallel.plan_partition(jax.eval_shape(make, *first, tables, lens), "tensor")
    plan = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=specs, out_specs=plans))(q, cache, tables, lens)
    run = jax.shard_map(split, mesh=mesh, in_specs=(*specs, P("tensor"), plans), out_specs=P(None, None, "tensor"))
    got = jax.jit(run)(q, cache, tables, lens, sinks, plan)
    want: Any = decode(q, cache, tables, lens, sinks=sinks)
    harness.assert_attention_close(got, want, (harness.F32_OUT, harness.F32_LSE))


# --- head splits and invalid splits


@pytest.mark.parametrize(
    ("heads", "devices", "kv_heads"),
    [
        ((32, 8), 4, [range(2 * i, 2 * i + 2) for i in range(4)]),
        ((32, 8), 8, [range(i, i + 1) for i in range(8)]),
        ((8, 2), 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        ((6, 3), 1, [range(3)]),
    ],
)
def test_head_split(heads: tuple[int, int], devices: int, kv_heads: list[range]) -> None:
    split, group = parallel.head_split(*heads, devices), heads[0] // heads[1]
    assert [split.kv_heads_of(device) for device in range(devices)] == kv_heads
    for device in range(devices):
        q_heads = range(device * split.q_heads, (device + 1) * split.q_heads)
        assert {head // group for head in q_heads} == set(split.kv_heads_of(device))


@pytest.mark.parametrize(
    ("heads", "devices", "message"),
    [
        ((28, 4), 8, "devices: expected a divisor of 28 query heads, got 8"),
        ((24, 6), 4, "devices: expected a divisor or a multiple of 6 KV heads, got 4"),
        ((8, 3), 1, "8 heads must be a multiple of the 3 KV heads"),
        ((8, 4), 0, "devices: expected at least 1, got 0"),
    ],
)
def test_invalid_head_splits(heads: tuple[int, int], devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.head_split(*heads, devices)


@pytest.mark.parametrize(
    ("heads", "options", "error", "message"),
    [
        (6, {}, ValueError, "expected heads that the 4 devices of 'context' divide, got 6"),
        (8, {"window": 8}, NotImplementedError, "window: hides different numbers of tokens"),
        (8, {"window": HeadWindow(jnp.ones(HKV, jnp.int32), jnp.zeros(HKV, jnp.int32))}, NotImplementedError, "window"),
        (8, {"draft_mask": jnp.ones((B, 1, 1), bool)}, NotImplementedError, "draft_mask: hides"),
    ],
)
def test_invalid_context_splits(heads: int, options: dict[str, Any], error: Any, message: str) -> None:
    cache = cache_of("f32", np.random.default_rng(0), 4)

    def split(q: Any, cache: Any) -> Any:
        tables = jnp.zeros((B, COLUMNS), jnp.int32)
        return parallel.decode_over_contexts(
            paged_decode, [q], cache, tables, jnp.asarray(KV_LENS), axis="context", **options
        )

    specs = (P(), partition(cache, pages="context"))
    run = jax.shard_map(split, mesh=mesh_of(4), in_specs=specs, out_specs=P(None, None, "context"))
    with pytest.raises(error, match=message):
        run(jnp.zeros((B, 1, heads, D)), cache)
