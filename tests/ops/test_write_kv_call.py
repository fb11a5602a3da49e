"""Tests of calls of `write_kv`: updates in place in jit and scan, one trace, export, and errors for invalid
arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_attn.ops.write_kv import write_kv
from pallas_attn.runtime import dispatch
from pallas_attn.types import PagedKV, Rope, kv_cache_spec
from tests.contract import backends
from tests.kit.harness import (
    VARIANTS,
    Variant,
    assert_no_host_callbacks,
    assert_same_bits,
    assert_stays_put,
    compiled,
    fresh_rng,
    scope_names,
)
from tests.kit.slow_cases import slow_cases
from tests.ops.write_kv_case import (
    HEADS,
    NUM_PAGES,
    NUM_TOKENS,
    PAGE_SIZE,
    WIDTH,
    cache_spec,
    each_variant,
    random_slots,
    stale_cache,
    tokens,
    write,
)

LAYOUTS = [("float32", None), ("bfloat16", None), ("int8", "channel"), ("int8", 2), ("int8", PAGE_SIZE)]
FLOAT8 = [("float8_e4m3fn", "head"), ("float8_e4m3fn", 2)]
XLA = VARIANTS["xla"]


def scan_write(kv: PagedKV, k: Any, v: Any, slots: Any, implementation: str = "xla") -> PagedKV:
    """Write in each iteration of a scan whose carry is the cache."""
    write_step = lambda kv, x: (write_kv(kv, *x, implementation=implementation), None)  # noqa: E731
    return lax.scan(write_step, kv, (k, v, slots))[0]


def single_write(kv: PagedKV, k: Any, v: Any, slots: Any, implementation: str = "xla") -> PagedKV:
    return write_kv(kv, k, v, slots, implementation=implementation)


def shapes(dtype: str, scales: Any, rank: int, steps: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Return the shapes of the arguments of a call whose pool is much larger than its other arguments. `steps` are
    leading axes of the other arguments.
    """
    x = jax.ShapeDtypeStruct((*steps, NUM_TOKENS, HEADS, WIDTH), jnp.float32)
    slots = jax.ShapeDtypeStruct((*steps, *(NUM_TOKENS, HEADS)[:rank]), jnp.int32)
    arrays: dict[str, Any] = cache_spec(dtype, scales, num_pages=2000).arrays  # pyrefly: ignore[bad-assignment]
    return PagedKV(**arrays), x, x, slots


def assert_in_place(function: Callable[..., PagedKV], args: tuple[Any, ...]) -> None:
    call = jax.jit(function, donate_argnums=0)
    assert_stays_put(call, args[0].k, *args)
    analysis = call.lower(*args).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args[0]))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("dtype", "scales"), LAYOUTS)
def test_donated_cache_is_written_in_place(dtype: str, scales: Any, rank: int) -> None:
    assert_in_place(single_write, shapes(dtype, scales, rank))


@pytest.mark.parametrize(("dtype", "scales"), LAYOUTS)
def test_cache_carried_by_a_scan_is_written_in_place(dtype: str, scales: Any) -> None:
    assert_in_place(scan_write, shapes(dtype, scales, 1, steps=(3,)))


def test_float8_pool_is_not_converted() -> None:
    """XLA's CPU backend copies the pool, which is accepted, but it must not convert the pool to float16."""
    args = shapes("float8_e4m3fn", "head", 1)
    module = jax.jit(single_write, donate_argnums=0).lower(*args).compile()
    assert not re.search(rf"\w+\[{','.join(map(str, args[0].k.shape))}\]\S* convert\(", str(module.as_text()))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "scales"), LAYOUTS + FLOAT8)
def test_donated_cache_is_written_in_place_on_a_gpu(dtype: str, scales: Any) -> None:
    assert_in_place(single_write, shapes(dtype, scales, 1))
    assert_in_place(scan_write, shapes(dtype, scales, 2, steps=(3,)))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("dtype", "scales"), [("int8", 4), ("float8_e4m3fn", "head")])
def test_pool_of_more_than_2_to_the_32_elements(dtype: str, scales: Any, rank: int, implementation: str) -> None:
    num_pages, heads, page_size, width = 66_000, 8, 64, 128
    spec = kv_cache_spec(
        num_pages=num_pages, page_size=page_size, num_kv_heads=heads, head_dim=width, dtype=dtype, scales=scales
    )
    assert spec.arrays["k"].size > 2**32
    x = jnp.ones((2, heads, width), jnp.bfloat16)
    pages = jnp.asarray([num_pages - 1, 0], jnp.int32)
    slots = pages * page_size + 3
    if rank == 2:
        slots = (pages[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None]) * page_size + 3
    write_one = functools.partial(single_write, implementation=implementation)
    kv = jax.jit(write_one, donate_argnums=0)(PagedKV.allocate(spec), x, x, slots)
    for array in (kv.k, kv.v):
        written = array[pages, :, 3]
        assert (written == written.max()).all()
        assert written.max() > 0
        assert sum(int(jnp.count_nonzero(array[i : i + 1000])) for i in range(0, num_pages, 1000)) == written.size


@slow_cases("int8-2-xla", "int8-2-mosaic")
@each_variant
@backends.in_every_run("xla", mosaic=["int8-2"])
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("float8_e4m3fn", "head"), ("int8", 2)])
def test_scan_equals_separate_calls(dtype: str, scales: Any, variant: Variant) -> None:
    rng = fresh_rng()
    kv = stale_cache(rng, dtype, scales)
    if scales == "head":
        kv = dataclasses.replace(kv, k_scale=jnp.ones((HEADS,)), v_scale=jnp.ones((HEADS,)))
    k, v = (jnp.stack(x) for x in zip(*(tokens(rng) for _ in range(3)), strict=True))
    slots = jnp.arange(3 * NUM_TOKENS, dtype=jnp.int32).reshape(3, NUM_TOKENS) + PAGE_SIZE
    want = kv
    for i in range(3):
        want = write(XLA, want, k[i], v[i], slots[i])
    write_all = functools.partial(scan_write, implementation=variant.implementation)
    assert_same_bits(jax.jit(write_all, donate_argnums=0)(kv, k, v, slots), want)


@slow_cases("mosaic")
@each_variant
@backends.in_every_run("mosaic")
def test_scan_over_stacked_caches(variant: Variant) -> None:
    """Each iteration slices a cache from a stack and writes it to another stack. Slots that are not written are
    unchanged.
    """
    rng = fresh_rng()
    calls = [(stale_cache(rng, "int8", 2), *tokens(rng), random_slots(rng, 1)) for _ in range(3)]

    def step(_: None, call: Any) -> tuple[None, PagedKV]:
        return None, write_kv(*call, implementation=variant.implementation)

    stacked = jax.tree.map(lambda *a: jnp.stack(a), *calls)
    got = jax.jit(lambda stacked: lax.scan(step, None, stacked)[1])(stacked)
    assert_same_bits(got, jax.tree.map(lambda *a: jnp.stack(a), *(write(XLA, *call) for call in calls)))


def test_different_slots_do_not_retrace() -> None:
    rng = fresh_rng()
    chex.clear_trace_counter()
    traced_once = jax.jit(chex.assert_max_traces(single_write, n=1))
    kv = PagedKV.allocate(cache_spec("int8", 2))
    for _ in range(3):
        kv = traced_once(kv, *tokens(rng), random_slots(rng, 1))


@slow_cases("int8-2-xla", "int8-2-mosaic")
@each_variant
@backends.in_every_run("xla", mosaic=["int8-2"])
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("int8", 2)])
def test_vmap_writes_each_cache(dtype: str, scales: Any, variant: Variant) -> None:
    rng = fresh_rng()
    calls = [(PagedKV.allocate(cache_spec(dtype, scales)), *tokens(rng), random_slots(rng, 1)) for _ in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *calls)
    write_one = lambda *call: write_kv(*call, implementation=variant.implementation)  # noqa: E731
    got = jax.jit(jax.vmap(write_one))(*stacked)
    for i, call in enumerate(calls):
        assert_same_bits(jax.tree.map(lambda a, i=i: a[i], got), write(variant, *call))


@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), *FLOAT8])
def test_exports_for_both_platforms(dtype: str, scales: Any) -> None:
    args = shapes(dtype, scales, 1)
    leaves, treedef = jax.tree.flatten(args)
    exported = jax.export.export(
        jax.jit(lambda *leaves: jax.tree.leaves(single_write(*treedef.unflatten(leaves)))), platforms=["cpu", "cuda"]
    )(*leaves)
    assert [a.shape for a in exported.out_avals] == [a.shape for a in jax.tree.leaves(args[0])]


@backends.every_variant("write_kv", backends.is_compiled)
@backends.in_every_run("xla")
def test_compiled_call_has_no_host_callback_and_has_a_scope_name(variant: Variant) -> None:
    kv, k, v, slots = shapes("int8", 2, 1)
    call = compiled(write_kv, variant)
    assert_no_host_callbacks(call, kv=kv, k=k, v=v, slots=slots)
    assert "write_kv" in scope_names(call, kv=kv, k=k, v=v, slots=slots)


@each_variant
@backends.in_every_run("xla", "mosaic")
def test_call_without_tokens(variant: Variant) -> None:
    kv, (k, v) = stale_cache(fresh_rng(), "int8", 2), tokens(fresh_rng())
    angles = jnp.zeros((0, WIDTH // 2))
    got, q = write(variant, kv, k[:0], v[:0], jnp.zeros((0,), jnp.int32), rope=Rope(angles, angles), q=k[:0])
    assert_same_bits(got, kv)
    assert q.shape == (0, HEADS, WIDTH)


# --- errors


def good_call(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a valid call with `rope` and `q`. `changes` replace fields of `Rope` or arguments, by
    name.
    """
    fields = {field.name for field in dataclasses.fields(Rope)}
    angles = jnp.zeros((NUM_TOKENS, WIDTH // 2), jnp.float32)
    rope = dataclasses.replace(Rope(angles, angles), **{name: changes[name] for name in fields & changes.keys()})
    x = jnp.zeros((NUM_TOKENS, HEADS, WIDTH), jnp.float32)
    call = {"kv": cache("bfloat16", None), "k": x, "v": x, "slots": jnp.zeros((NUM_TOKENS,), jnp.int32)}
    return call | {"rope": rope, "q": x} | {name: changes[name] for name in changes.keys() - fields}


def cache(dtype: str, scales: Any, **changes: Any) -> PagedKV:
    return dataclasses.replace(PagedKV.allocate(cache_spec(dtype, scales)), **changes)


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


T, D = NUM_TOKENS, WIDTH
BAD_CALLS = {
    "k of other heads": ({"k": zeros(T, 3, D)}, "k: expected shape"),
    "k of integers": ({"k": zeros(T, HEADS, D, dtype=jnp.int8)}, "k: expected dtype"),
    "v of other length": ({"v": zeros(T + 1, HEADS, D)}, "v: expected shape"),
    "slots of other length": ({"slots": zeros(T + 1, dtype=jnp.int32)}, "slots: expected shape"),
    "slots of other heads": ({"slots": zeros(T, HEADS + 1, dtype=jnp.int32)}, "slots: expected shape"),
    "slots of rank 3": ({"slots": zeros(T, HEADS, 1, dtype=jnp.int32)}, "slots: expected shape"),
    "slots of floats": ({"slots": zeros(T)}, "slots: expected dtype"),
    "no scales": ({"kv": cache("int8", "head", k_scale=None)}, "kv.k_scale"),
    "scales too many": ({"kv": cache("bfloat16", None, v_scale=zeros(HEADS))}, "kv.v_scale"),
    "groups that do not divide": ({"kv": cache("int8", 2, k_scale=zeros(NUM_PAGES, HEADS, 3))}, "kv.k_scale"),
    "two layouts of scales": ({"kv": cache("int8", 2, v_scale=zeros(NUM_PAGES, HEADS, 4))}, "kv.v_scale"),
    "v of another dtype": (
        {"kv": cache("bfloat16", None, v=zeros(NUM_PAGES, HEADS, PAGE_SIZE, D))},
        "kv.v: expected dtype",
    ),
    "q without rope": ({"rope": None}, "q: expected None without rope"),
    "q of odd heads": ({"q": zeros(T, 3, D)}, "q: its 3 heads"),
    "q of other width": ({"q": zeros(T, HEADS, D + 1)}, "q: expected shape"),
    "q norm without q": ({"q": None, "q_norm": zeros(D)}, "rope.q_norm: expected None without q"),
    "norm of other width": ({"k_norm": zeros(D + 1)}, "rope.k_norm: expected shape"),
    "cos of other length": ({"cos": zeros(T + 1, D // 2)}, "rope.cos: expected shape"),
    "cos of bfloat16": ({"cos": zeros(T, D // 2, dtype=jnp.bfloat16)}, "rope.cos: expected dtype"),
    "sin of other width": ({"sin": zeros(T, D // 4)}, "rope.sin: expected shape"),
    "more angles than pairs": ({"cos": zeros(T, D), "sin": zeros(T, D)}, "rope.cos: expected at most D/2 = 8 columns"),
    "another style": ({"style": "gptj"}, "rope.style"),
    "another order": ({"norm_order": "around"}, "rope.norm_order"),
    "no epsilon": ({"norm_eps": 0.0}, "rope.norm_eps"),
    "no such implementation": ({"implementation": "cuda"}, "implementation"),
}


def test_good_call_is_valid() -> None:
    jax.eval_shape(lambda call: write_kv(**call), good_call())


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_calls_raise_errors_that_name_the_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        write_kv(**good_call(**changes))


def test_missing_named_implementation_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.MODULES, "write_kv", {("xla", None): "xla"})
    with pytest.raises(NotImplementedError, match="write_kv has no 'triton' implementation"):
        write_kv(**good_call(implementation="triton"))
