"""Tests of `pallas_attn.types`: arrays of the caches, pytrees, and checks of shapes and dtypes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

from pallas_attn import (
    CacheSpec,
    DecodePlan,
    HeadWindow,
    PagedKV,
    PagedLatent,
    PlanKey,
    Rope,
    kv_cache_spec,
    latent_cache_spec,
    types,
)
from pallas_attn.checks import Dims
from pallas_attn.types import ScaleLayout

N, PS, HKV, D = 10, 16, 3, 8


def kv_spec(dtype: Any, scales: ScaleLayout = None, **sizes: int) -> CacheSpec:
    sizes = {"num_pages": N, "page_size": PS, "num_kv_heads": HKV, "head_dim": D} | sizes
    return kv_cache_spec(**sizes, dtype=dtype, scales=scales)


def shapes(spec: CacheSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape, array.dtype.name) for name, array in spec.arrays.items()}


# --- specifications


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_unquantised_cache_has_keys_and_values(dtype: str) -> None:
    spec = kv_spec(dtype)
    pages = ((N, HKV, PS, D), dtype)
    assert shapes(spec) == {"k": pages, "v": pages}
    itemsize = jnp.dtype(dtype).itemsize
    assert spec.bytes_per_page == 2 * HKV * PS * D * itemsize
    assert spec.num_bytes == N * spec.bytes_per_page


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("scales", "shape", "bytes_per_page"),
    [("head", (HKV,), 0), ("channel", (HKV, D), 0), *[(g, (N, HKV, g), 2 * HKV * g * 4) for g in (1, 2, 4, PS)]],
)
def test_quantised_cache_has_scales(dtype: str, scales: Any, shape: tuple[int, ...], bytes_per_page: int) -> None:
    spec = kv_spec(dtype, scales)
    pages, scale = ((N, HKV, PS, D), dtype), (shape, "float32")
    assert shapes(spec) == {"k": pages, "v": pages, "k_scale": scale, "v_scale": scale}
    assert spec.bytes_per_page == 2 * HKV * PS * D + bytes_per_page
    assert spec.num_bytes == 2 * N * HKV * PS * D + 2 * 4 * int(np.prod(shape))


def test_a_pool_of_one_page_per_head_has_the_same_bytes_per_page() -> None:
    """Static scales are not part of a page, also if their number equals the number of pages."""
    assert kv_spec("int8", "channel", num_pages=HKV).bytes_per_page == 2 * HKV * PS * D


def test_latent_cache_has_one_array() -> None:
    spec = latent_cache_spec(num_pages=N, page_size=PS, latent_dim=512, rope_dim=64, dtype=jnp.bfloat16)
    assert shapes(spec) == {"pages": ((N, PS, 576), "bfloat16")}
    assert spec.bytes_per_page == PS * 576 * 2
    assert spec.num_bytes == N * PS * 576 * 2


def test_fp8_latent_cache_has_scales_and_rotated_keys() -> None:
    """A token has 656 bytes at DeepSeek's widths: 512 fp8 values, 4 float32 scales and 64 bfloat16 rotated key
    columns.
    """
    sizes = {"num_pages": N, "page_size": PS, "latent_dim": 512, "rope_dim": 64}
    spec = latent_cache_spec(**sizes, dtype=jnp.float8_e4m3fn)
    assert shapes(spec) == {
        "pages": ((N, PS, 512), "float8_e4m3fn"),
        "scale": ((N, PS, 4), "float32"),
        "rope": ((N, PS, 64), "bfloat16"),
    }
    assert spec.bytes_per_page == PS * 656
    assert spec.num_bytes == N * PS * 656
    float16 = latent_cache_spec(**sizes, dtype=jnp.float8_e4m3fn, rope_dtype=jnp.float16)
    assert shapes(float16)["rope"] == ((N, PS, 64), "float16")


def test_latent_cache_of_deepseek_v4() -> None:
    """Rotated columns may be part of the latents. In 8 bits, a scale that is a power of two belongs to 64 columns."""
    sizes = {"num_pages": N, "page_size": PS}
    spec = latent_cache_spec(**sizes, latent_dim=512, rope_dim=0, dtype=jnp.bfloat16)
    assert shapes(spec) == {"pages": ((N, PS, 512), "bfloat16")}
    dtypes = {"dtype": jnp.float8_e4m3fn, "scale_dtype": jnp.float8_e8m0fnu}
    spec = latent_cache_spec(**sizes, latent_dim=448, rope_dim=64, **dtypes)
    assert shapes(spec) == {
        "pages": ((N, PS, 448), "float8_e4m3fn"),
        "scale": ((N, PS, 7), "float8_e8m0fnu"),
        "rope": ((N, PS, 64), "bfloat16"),
    }
    assert spec.bytes_per_page == PS * 583
    assert (np.asarray(PagedLatent.allocate(spec).scale, np.float32) == 1).all()


@pytest.mark.parametrize(
    ("dtype", "scales", "sizes", "message"),
    [
        ("float32", "head", {}, "scales must be None for a float32 cache"),
        ("bfloat16", 4, {}, "scales must be None for a bfloat16 cache"),
        ("int8", None, {}, "scales of a int8 cache must be 'head', 'channel' or a divisor of page_size=16, got None"),
        ("int8", 3, {}, "divisor of page_size=16, got 3"),
        ("int8", 0, {}, "divisor of page_size=16, got 0"),
        ("int8", -4, {}, "divisor of page_size=16, got -4"),
        ("int8", 32, {}, "divisor of page_size=16, got 32"),
        ("float8_e4m3fn", "token", {}, "got 'token'"),
        ("int4", None, {}, "dtype must be one of .*'float8_e4m3fn'.*, got int4"),
        *[("float32", None, {size: n}, f"{size} must be at least 1, got {n}") for size, n in [("num_pages", 0)]],
        *[("int8", "head", {size: 0}, f"{size} must be") for size in ("page_size", "num_kv_heads", "head_dim")],
    ],
)
def test_invalid_kv_cache_spec(dtype: Any, scales: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_spec(dtype, scales, **sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.int8}, r"dtype must be one of \['bfloat16', .*, 'float8_e4m3fn'\] for latents, got int8"),
        ({"dtype": jnp.float8_e4m3fn}, "latent_dim must be a multiple of 128 for float8_e4m3fn latents.*; got 32"),
        ({"rope_dtype": jnp.float16}, "rope_dtype must be None for float32 latents.*; got float16"),
        (
            {"dtype": jnp.float8_e4m3fn, "latent_dim": 256, "rope_dtype": jnp.float32},
            r"rope_dtype must be one of \['bfloat16', 'float16'\], got float32",
        ),
        ({"latent_dim": 0}, "latent_dim must be at least 1, got 0"),
        ({"rope_dim": -1}, "rope_dim must be at least 1, got -1"),
        ({"rope_dim": 0, "dtype": jnp.float8_e4m3fn, "latent_dim": 128}, "rope_dim must be at least 1, got 0"),
        ({"scale_dtype": jnp.float32}, "scale_dtype must be None for float32 latents, got float32"),
        (
            {"dtype": jnp.float8_e4m3fn, "latent_dim": 128, "scale_dtype": jnp.bfloat16},
            "scale_dtype must be float32 or float8_e8m0fnu, got bfloat16",
        ),
        (
            {"dtype": jnp.float8_e4m3fn, "latent_dim": 96, "scale_dtype": jnp.float8_e8m0fnu},
            "latent_dim must be a multiple of 64 for float8_e4m3fn latents.*; got 96",
        ),
        ({"num_pages": -1}, "num_pages must be"),
        ({"page_size": 0}, "page_size must be"),
    ],
)
def test_invalid_latent_cache_spec(change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_pages": N, "page_size": PS, "latent_dim": 32, "rope_dim": 8, "dtype": jnp.float32}
    with pytest.raises(ValueError, match=message):
        latent_cache_spec(**sizes | change)


# --- caches


@pytest.mark.parametrize(
    ("dtype", "scales"), [("float32", None), ("bfloat16", None), ("int8", "channel"), ("float8_e4m3fn", 4)]
)
def test_allocation_matches_the_spec(dtype: Any, scales: Any) -> None:
    spec = kv_spec(dtype, scales)
    kv = PagedKV.allocate(spec)
    for name, array in spec.arrays.items():
        value = getattr(kv, name)
        assert (value.shape, value.dtype) == (array.shape, array.dtype)
        assert (value == jnp.full((), name.endswith("_scale"), value.dtype)).all()  # scales are 1, pages are 0
    assert (kv.k_scale is None) == (scales is None)
    assert kv.page_size == PS
    assert sum(x.nbytes for x in jax.tree.leaves(kv)) == spec.num_bytes


def test_latent_allocation() -> None:
    spec = latent_cache_spec(num_pages=N, page_size=PS, latent_dim=24, rope_dim=8, dtype=jnp.float16)
    cache = PagedLatent.allocate(spec)
    assert (cache.pages.shape, cache.pages.dtype, cache.page_size) == ((N, PS, 32), jnp.float16, PS)
    assert not cache.pages.any()
    assert (cache.width, cache.is_quantised) == (32, False)


def test_latent_allocation_in_8_bits() -> None:
    spec = latent_cache_spec(num_pages=N, page_size=PS, latent_dim=256, rope_dim=8, dtype=jnp.float8_e4m3fn)
    cache = PagedLatent.allocate(spec)
    got = {name: (array.shape, array.dtype.name) for name in spec.arrays if (array := getattr(cache, name)) is not None}
    assert got == shapes(spec)
    assert (cache.page_size, cache.width, cache.is_quantised) == (PS, 264, True)
    assert cache.scale is not None
    assert cache.rope is not None
    assert not cache.pages.astype(jnp.float32).any()
    assert not cache.rope.any()
    assert (cache.scale == 1).all()


# --- pytrees

ONES = jnp.ones((2,), jnp.int32)
ANGLES = jnp.ones((3, 4))
MADE_FOR = PlanKey("paged_decode", 1, 1, 2, 2, page_size=16, table_pages=3, window="per head", q_lens=False)
PLAN = DecodePlan(*(ONES,) * 10, MADE_FOR, "mosaic_sm90", split_pages=8)
INSTANCES = [
    PagedKV(jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 4, 8))),
    PagedKV(*[jnp.ones((2, 1, 4, 8), jnp.int8)] * 2, *[jnp.ones((1,))] * 2),
    PagedKV(jnp.ones((8, 2, 1, 8)), view_page_size=4),
    PagedLatent(jnp.ones((2, 4, 8))),
    PagedLatent(jnp.ones((2, 4, 8)), jnp.ones((2, 4, 1)), jnp.ones((2, 4, 2))),
    HeadWindow(ONES, ONES),
    PLAN,
    Rope(ANGLES, ANGLES, k_norm=jnp.ones((8,)), style="interleaved", norm_order="after_rope", norm_eps=1e-5),
]


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: type(instance).__name__)
def test_pytrees_are_frozen_and_rebuilt(instance: Any) -> None:
    """Instances are frozen dataclasses. They keep their static fields when jit and export rebuild them from their
    arrays.
    """
    fields = dataclasses.fields(instance)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, fields[0].name, None)
    leaves, structure = jax.tree.flatten(instance)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree))
    exported = export.deserialize(export.export(double)(instance).serialize())
    for doubled in (double(instance), exported.call(instance)):
        assert jax.tree.structure(doubled) == structure
        for field in fields:
            before, after = getattr(instance, field.name), getattr(doubled, field.name)
            if isinstance(before, jax.Array):
                np.testing.assert_array_equal(after, 2 * np.asarray(before))
            else:
                assert after == before


def test_static_fields_of_an_earlier_version_have_defaults() -> None:
    """Exported functions of a version without `view_page_size` can be loaded."""
    assert types._from_json(b"[]", PagedKV) == (None,)
    assert types._from_json(types._as_json((4,)), PagedKV) == (4,)
    assert types._from_json(types._as_json((MADE_FOR, "xla", 8)), DecodePlan) == (MADE_FOR, "xla", 8)


def test_static_fields_retrace_and_arrays_do_not() -> None:
    traces = []
    width = jax.jit(lambda plan: (traces.append(plan.made_for.page_size), plan.num_pages)[1])
    width(PLAN)
    width(dataclasses.replace(PLAN, num_pages=2 * ONES))
    width(dataclasses.replace(PLAN, made_for=dataclasses.replace(MADE_FOR, page_size=32)))
    assert traces == [16, 32]


def test_caches_are_updated_in_place_when_donated() -> None:
    kv = PagedKV.allocate(kv_spec(jnp.float32))
    write = jax.jit(lambda kv: dataclasses.replace(kv, k=kv.k.at[0, 0, 0].set(1.0)), donate_argnums=0)
    after = write(kv)
    assert kv.k.is_deleted()
    assert float(after.k.sum()) == D


# --- checks of shapes and dtypes


def test_symbols_are_bound_by_the_first_argument_that_has_them() -> None:
    dims = Dims(R=2)
    dims.check("q", np.zeros((3, 4)), "B Hq")
    assert (dims["B"], dims["Hq"]) == (3, 4)
    dims.check("cu_q_lens", np.zeros((4,), np.int32), "B+1", (jnp.int32,))
    dims.check("rope", np.zeros((2, 3)), "R 3")
    for name, shape, wanted, message in [
        ("tables", (4, 5), "B P", r"tables: expected shape \[B=3, P\], got \[4, 5\]"),
        ("tables", (3,), "B P", r"tables: expected shape \[B=3, P\], got \[3\]"),
        ("offsets", (3,), "B+1", r"offsets: expected shape \[B\+1=4\], got \[3\]"),
        ("rope", (2, 4), "R 3", r"rope: expected shape \[R=2, 3\], got \[2, 4\]"),
        ("v", (3, 0), "B Dv", r"v: expected Dv of at least 1, got shape \[3, 0\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            dims.check(name, np.zeros(shape), wanted)
    dims.check("k", np.zeros((0, 4)), "T Hq")  # no tokens


def test_dtypes_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="q: expected dtype bfloat16 or float32, got float8_e4m3fn"):
        Dims().check("q", np.zeros((1,), ml_dtypes.float8_e4m3fn), "B", (jnp.bfloat16, jnp.float32))
