"""The contract of `mla_decode`: every implementation, every awkward input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    DecodePlan,
    PagedLatent,
    dispatch,
    gather_latent,
    latent_cache_spec,
    mla_decode,
    write_latent,
)
from tests.ops import harness, transformations
from tests.ops.harness import Variant
from tests.ops.mla_case import SM_SCALE, Inputs, MlaCase

PORTABLE = [
    name for name in dispatch.implementations("mla_decode") if name != "mosaic"
]  # see test_mla_decode_mosaic.py
every_variant = harness.variants(PORTABLE)
bounded_variant = harness.variants(name for name in PORTABLE if name != "reference")

PS = 8
LENGTHS = (0, 1, PS - 1, PS, PS + 1, 29, 48, 47)  # pages of 8, rows of 6 pages
BASE = MlaCase(kv_lens=LENGTHS)


def decode(variant: Variant, **static: Any) -> harness.Jitted:
    return harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, **static)


def run(variant: Variant, arguments: dict[str, Any], **static: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = decode(variant, return_lse=True, **static)(**arguments)
    return np.asarray(out), np.asarray(lse)


def check(variant: Variant, case: MlaCase) -> None:
    """Poison changes no bit, and the result is the one spelt out in numpy."""
    inputs = Inputs.draw(case, harness.fresh_rng())
    # The reference rounds nothing but its result, so it is held to float32 whatever the inputs.
    exact = {"out_dtype": "float32"} if variant.implementation == "reference" else {}
    got = run(variant, inputs.arguments(), **exact)
    harness.assert_same_bits(got, run(variant, inputs.arguments(poisoned=False), **exact))
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance("float32" if exact else case.dtype))


VALUES = {
    "lengths": BASE,
    "all idle": replace(BASE, kv_lens=(0,) * 8),
    "one of maximum length, the others idle": replace(BASE, kv_lens=(0, 0, 0, 48, 0, 0, 0, 0)),
    "all of maximum length": replace(BASE, kv_lens=(48,) * 8),
    "absent pages": replace(BASE, absent_pages=True),
    "large scores of either sign": replace(BASE, exact=True),
    "large scores over absent pages": replace(BASE, kv_lens=(47,) * 8, absent_pages=True, exact=True),
}


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
@every_variant
def test_values_of_one_shape(variant: Variant, case: MlaCase) -> None:
    check(variant, case)


@bounded_variant
def test_the_configuration_a_user_gets(variant: Variant) -> None:
    check(Variant(variant.implementation), BASE)


TREE = replace(BASE, tree=True, absent_pages=True)
QUERIES = {
    "2, tree": replace(TREE, queries=2, q_lens=(2, 1, 2, 0, 1, 2, 2, 1)),
    "3, tree": replace(TREE, queries=3, q_lens=(0, 1, 2, 3, 3, 0, 3, 2)),
    "4, tree": replace(TREE, queries=4, q_lens=(0, 1, 4, 3, 2, 1, 4, 0)),
    "8, tree": replace(TREE, queries=8, q_lens=(0, 1, 7, 8, 5, 8, 1, 0)),
    "8, tree over large scores": replace(TREE, queries=8, q_lens=(8, 1, 7, 8, 5, 8, 1, 0), exact=True),
    "4, causal": replace(BASE, queries=4, q_lens=(0, 1, 4, 3, 2, 1, 4, 0)),
    "4 each": replace(BASE, queries=4, kv_lens=(0, 4, PS - 1, PS, PS + 1, 29, 48, 47)),
    "4 each, of rows with fewer tokens": replace(BASE, queries=4, kv_lens=(0, 1, 2, 3, 4, 5, 48, 0)),
}


@pytest.mark.parametrize("case", QUERIES.values(), ids=QUERIES)
@every_variant
def test_several_queries(variant: Variant, case: MlaCase) -> None:
    check(variant, case)


@every_variant
def test_a_triangular_mask_is_causality(variant: Variant) -> None:
    inputs = Inputs.draw(QUERIES["4, causal"], harness.fresh_rng())
    arguments = inputs.arguments()
    triangle = np.broadcast_to(np.tri(4, dtype=bool), (8, 4, 4))
    got = run(variant, arguments | {"draft_mask": triangle})
    harness.assert_same_bits(got, run(variant, arguments))


WIDTHS = [
    *[(1, 512, 64), (3, 256, 32), (9, 128, 32), (20, 256, 64), (63, 448, 64)],
    *[(64, 512, 64), (126, 128, 32), (128, 512, 64)],
]


@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), WIDTHS)
@every_variant
def test_heads_and_widths(variant: Variant, heads: int, latent_dim: int, rope_dim: int) -> None:
    few = MlaCase(kv_lens=(5, 0, 12), page_size=4, pages_per_row=3, num_pages=8)
    check(variant, replace(few, heads=heads, latent_dim=latent_dim, rope_dim=rope_dim))


DTYPES = {
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "bfloat16, large scores": replace(BASE, dtype="bfloat16", exact=True),
    "float16": replace(BASE, dtype="float16"),
    "bfloat16 cache, float32 queries": replace(BASE, cache_dtype="bfloat16"),
    "float32 cache, bfloat16 queries": replace(BASE, dtype="bfloat16", cache_dtype="float32"),
}


@pytest.mark.parametrize("case", DTYPES.values(), ids=DTYPES)
@every_variant
def test_dtypes(variant: Variant, case: MlaCase) -> None:
    check(variant, case)


@every_variant
def test_output_dtype_and_lse_are_as_asked(variant: Variant) -> None:
    arguments = Inputs.draw(replace(BASE, dtype="bfloat16"), harness.fresh_rng()).arguments()
    out, lse = decode(variant, return_lse=True)(**arguments)
    alone = decode(variant)(**arguments)
    wide = decode(variant, out_dtype="float32")(**arguments)
    chex.assert_type([out, alone, wide, lse], [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32])
    harness.assert_same_bits([alone, wide.astype(jnp.bfloat16)], [out, out])


@every_variant
def test_a_visible_nan_shows_in_its_own_row_only(variant: Variant) -> None:
    inputs = Inputs.draw(replace(BASE, kv_lens=(20,) * 8), harness.fresh_rng())
    inputs.tables[:, :3] = 1 + np.arange(24).reshape(8, 3)  # no page is shared
    inputs.dead[:] = True
    arguments = inputs.arguments(poisoned=False) | {"cache": PagedLatent(jnp.asarray(inputs.pages))}
    want = run(variant, arguments)
    inputs.pages[inputs.tables[5, 1], 3, -1] = np.nan  # in the key, not in the value
    got = run(variant, arguments | {"cache": PagedLatent(jnp.asarray(inputs.pages))})
    for g, w in zip(got, want, strict=True):
        assert np.isnan(g[5]).all()
        harness.assert_same_bits(np.delete(g, 5, axis=0), np.delete(w, 5, axis=0))


def check_queries_that_see_nothing(call: Callable[[dict[str, Any]], tuple[Any, Any]], case: MlaCase) -> None:
    """They are 0, although all that others of their sequence see is NaN."""
    inputs = Inputs.draw(case, harness.fresh_rng())
    empty = np.isneginf(inputs.expected()[1])
    inputs.pages[~inputs.dead] = np.nan
    harness.assert_empty(call(inputs.arguments()), empty)


@every_variant
def test_queries_that_see_nothing(variant: Variant) -> None:
    check_queries_that_see_nothing(functools.partial(run, variant), QUERIES["4 each, of rows with fewer tokens"])


# --- rows and batches


def rows(arguments: dict[str, Any], order: Any) -> dict[str, Any]:
    """The call with its sequences in another order, or only some of them."""
    return {name: value if name == "cache" else value[order] for name, value in arguments.items()}


def plan_for(variant: Variant, arguments: dict[str, Any], mode: Any) -> DecodePlan:
    return harness.plan_for(arguments, num_programs=5, mode=mode, implementation=variant.implementation)


def fixed_plan(variant: Variant, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"plan": plan_for(variant, arguments, "fixed")}


def pick(result: tuple[np.ndarray, np.ndarray], order: Any) -> tuple[np.ndarray, np.ndarray]:
    return result[0][order], result[1][order]


def assert_same_rows(variant: Variant, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    if variant.honours_plans:
        harness.assert_same_bits(got, want)
    else:
        harness.assert_attention_close(got, want, variant.tolerance("float32"))


@every_variant
def test_a_row_does_not_depend_on_the_batch(variant: Variant) -> None:
    rng = harness.fresh_rng()
    arguments = Inputs.draw(QUERIES["4, tree"], rng).arguments()
    want = run(variant, fixed_plan(variant, arguments))
    order = rng.permutation(8)
    shuffled = run(variant, fixed_plan(variant, rows(arguments, order)))
    assert_same_rows(variant, shuffled, pick(want, order))
    for b in range(8):
        alone = run(variant, fixed_plan(variant, rows(arguments, [b])))
        assert_same_rows(variant, alone, pick(want, [b]))
    company = arguments | {"kv_lens": arguments["kv_lens"].copy()}
    company["kv_lens"][[0, 2, 4, 5, 7]] = 0  # rows 1, 3 and 6 among idle ones
    kept = run(variant, fixed_plan(variant, company))
    assert_same_rows(variant, pick(kept, [1, 3, 6]), pick(want, [1, 3, 6]))


@pytest.mark.parametrize("mode", ["balanced", "fixed"])
@every_variant
def test_a_plan_changes_no_meaning(variant: Variant, mode: str) -> None:
    inputs = Inputs.draw(QUERIES["4, causal"], harness.fresh_rng())
    arguments = inputs.arguments()
    got = run(variant, arguments | {"plan": plan_for(variant, arguments, mode)})
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance("float32"))


@every_variant
def test_repeats_are_equal_bit_for_bit(variant: Variant) -> None:
    arguments = Inputs.draw(BASE, harness.fresh_rng()).arguments()
    transformations.assert_repeats(decode(variant, return_lse=True), arguments)


# --- transformations, and what is compiled


@every_variant
def test_under_vmap(variant: Variant) -> None:
    rng = harness.fresh_rng()
    calls = [Inputs.draw(case, rng).arguments() for case in (BASE, replace(BASE, kv_lens=LENGTHS[::-1]))]
    call = decode(variant, return_lse=True)
    transformations.assert_vmaps(call, calls, variant.tolerance("float32"), over="q_latent")


@every_variant
def test_exported(variant: Variant) -> None:
    arguments = Inputs.draw(BASE, harness.fresh_rng()).arguments()
    transformations.assert_exports(decode(variant, return_lse=True), arguments)


def decode_loop(variant: Variant, cache: PagedLatent, steps: Any, tables: jax.Array) -> tuple[PagedLatent, Any]:
    """Writes a latent a sequence and attends, step after step, on the device."""

    def step(cache: PagedLatent, now: Any) -> tuple[PagedLatent, Any]:
        latent, slots, q_latent, q_rope, kv_lens = now
        cache = write_latent(cache, latent, slots)
        with variant.settings():
            attended = mla_decode(
                q_latent, q_rope, cache, tables, kv_lens,
                sm_scale=SM_SCALE, return_lse=True, implementation=variant.implementation,
            )  # fmt: skip
        return cache, attended

    return jax.lax.scan(step, cache, steps)


@every_variant
def test_inside_a_scan_that_writes(variant: Variant) -> None:
    """Each step gives what the finished cache gives for the same lengths, and the cache is never copied."""
    inputs = Inputs.draw(replace(BASE, kv_lens=(1, 3, 8, 9), num_pages=256), harness.fresh_rng())
    steps = 4
    inputs.tables[:] = np.random.default_rng(0).permutation(256)[: inputs.tables.size].reshape(inputs.tables.shape)
    q = harness.normal(inputs.rng, (steps, *inputs.q.shape), "float32")
    kv_lens = np.array(inputs.case.kv_lens, np.int32) + np.arange(steps, dtype=np.int32)[:, None]
    page = np.take_along_axis(inputs.tables, (kv_lens.T - 1) // PS, axis=1).T
    offset = (kv_lens - 1) % PS
    latent = inputs.pages[page, offset]
    before = inputs.pages.copy()
    before[page, offset] = np.nan
    q_latent, q_rope = q[..., : inputs.case.latent_dim], q[..., inputs.case.latent_dim :]
    arrays = jax.device_put((latent, page * PS + offset, q_latent, q_rope, kv_lens)), inputs.tables
    loop = jax.jit(decode_loop, static_argnums=0, donate_argnums=1)
    if variant.implementation != "reference":
        harness.assert_stays_put(loop, inputs.pages, variant, PagedLatent(jnp.asarray(before)), *arrays)
    cache, (out, lse) = loop(variant, PagedLatent(jnp.array(before)), *arrays)
    harness.assert_same_bits(cache.pages, inputs.pages)
    for i in range(steps):
        case = replace(inputs.case, kv_lens=tuple(kv_lens[i].tolist()))
        visible = np.arange(48) < kv_lens[i][:, None, None]
        want = replace(inputs, case=case, q=q[i], visible=visible).expected()
        harness.assert_attention_close((out[i], lse[i]), want, variant.tolerance("float32"))


@every_variant
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(variant: Variant) -> None:
    rng = harness.fresh_rng()
    calls = [Inputs.draw(case, rng).arguments() for case in VALUES.values()]
    transformations.assert_traced_once(functools.partial(mla_decode, sm_scale=SM_SCALE), variant, calls)
    harness.assert_no_host_callbacks(decode(variant), **calls[0])
    assert "mla_decode" in harness.scope_names(decode(variant), **calls[0])


def shapes(batch: int, table_width: int, dtype: Any = jnp.float32, num_pages: int = 4096) -> dict[str, Any]:
    """A call of real widths, by its shapes alone."""
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (dtype, jnp.int32))
    cache = jax.eval_shape(lambda: PagedLatent(jnp.zeros((num_pages, 16, 576), dtype)))
    return {
        "q_latent": f32((batch, 1, 16, 512)),
        "q_rope": f32((batch, 1, 16, 64)),
        "cache": cache,
        "block_tables": i32((batch, table_width)),
        "kv_lens": i32((batch,)),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@bounded_variant
def test_memory_does_not_grow_with_the_table(variant: Variant, dtype: Any) -> None:
    """With the configuration a user gets; a wide table holds 64 times the tokens of a narrow one."""
    call = harness.compiled(mla_decode, Variant(variant.implementation), sm_scale=SM_SCALE)
    narrow, wide = (harness.temp_bytes(call, **shapes(32, width, dtype)) for width in (64, 4096))
    assert wide <= narrow + 4096
    one_row = 64 * 16 * 576 * jnp.dtype(dtype).itemsize  # the narrow table's tokens of one row of 32
    assert wide < 16 * one_row


@pytest.mark.gpu
@bounded_variant
def test_a_pool_of_more_than_2_to_the_32_elements(variant: Variant) -> None:
    """Written, gathered and attended where a 32-bit offset would wrap around to other pages."""
    small = {"page_size": 64, "pages_per_row": 5, "num_pages": 64}
    case = MlaCase((300, 64, 0, 101), heads=16, latent_dim=512, rope_dim=64, dtype="bfloat16", **small)
    inputs = Inputs.draw(case, harness.fresh_rng())
    arguments = jax.tree.map(jnp.asarray, inputs.arguments())
    spec = {"num_pages": 2**32 // (64 * 576) + 1000, "page_size": 64, "latent_dim": 512, "rope_dim": 64}
    far = inputs.rng.choice(1000, 64, replace=False) + spec["num_pages"] - 1000  # where the small pool's pages lie
    far[::2] -= spec["num_pages"] - 1000
    slots = jnp.asarray(far[:, None] * 64 + np.arange(64), jnp.int32).reshape(-1)
    write = jax.jit(functools.partial(write_latent, implementation=variant.implementation), donate_argnums=0)
    cache = PagedLatent.allocate(latent_cache_spec(**spec, dtype=jnp.bfloat16))
    cache = write(cache, arguments["cache"].pages.reshape(-1, 576), slots)
    tables = inputs.tables.copy()
    tables[inputs.visible.any(1)[:, ::64]] = far[tables[inputs.visible.any(1)[:, ::64]]]
    lens = {"cu_q_lens": jnp.zeros(5, jnp.int32), "kv_lens": arguments["kv_lens"], "length": 512}
    empty = jnp.zeros((0, 576), jnp.bfloat16)
    harness.assert_same_bits(
        gather_latent(cache, empty, jnp.asarray(tables), **lens),
        gather_latent(arguments["cache"], empty, arguments["block_tables"], **lens),
    )
    got = run(Variant(variant.implementation), arguments | {"cache": cache, "block_tables": tables})
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance("bfloat16"))


# --- bad arguments

GOOD = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes(4, 6, num_pages=8))
BAD = {
    "q_latent of rank 3": ("q_latent", {"q_latent": jnp.zeros((4, 16, 512))}),
    "an integer q_latent": ("q_latent", {"q_latent": jnp.zeros((4, 1, 16, 512), jnp.int32)}),
    "q_rope of other heads": ("q_rope", {"q_rope": jnp.zeros((4, 1, 15, 64))}),
    "q_rope of another batch": ("q_rope", {"q_rope": jnp.zeros((1, 1, 16, 64))}),
    "q_rope of another dtype": ("q_rope", {"q_rope": jnp.zeros((4, 1, 16, 64), jnp.bfloat16)}),
    "pages of rank 4": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 1, 4, 576)))}),
    "pages of another width": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 512)))}),
    "quantised pages": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 576), jnp.int8))}),
    "head-wise tables": ("block_tables", {"block_tables": jnp.zeros((4, 1, 6), jnp.int32)}),
    "tables of another batch": ("block_tables", {"block_tables": jnp.zeros((3, 6), jnp.int32)}),
    "float tables": ("block_tables", {"block_tables": jnp.zeros((4, 6))}),
    "kv_lens of another batch": ("kv_lens", {"kv_lens": jnp.zeros((5,), jnp.int32)}),
    "kv_lens of rank 2": ("kv_lens", {"kv_lens": jnp.zeros((4, 1), jnp.int32)}),
    "unsigned kv_lens": ("kv_lens", {"kv_lens": jnp.zeros((4,), jnp.uint32)}),
    "q_lens of another batch": ("q_lens", {"q_lens": jnp.zeros((3,), jnp.int32)}),
    "float q_lens": ("q_lens", {"q_lens": jnp.zeros((4,))}),
    "a mask of other queries": ("draft_mask", {"draft_mask": jnp.ones((4, 1, 2), bool)}),
    "a mask for all rows": ("draft_mask", {"draft_mask": jnp.ones((1, 1), bool)}),
    "an integer mask": ("draft_mask", {"draft_mask": jnp.ones((4, 1, 1), jnp.int32)}),
    "sm_scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "negative sm_scale": ("sm_scale", {"sm_scale": -1.0}),
    "sm_scale that is no number": ("sm_scale", {"sm_scale": float("nan")}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
    "no implementation": ("implementation", {"implementation": []}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    jax.eval_shape(functools.partial(mla_decode, sm_scale=SM_SCALE), **GOOD)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        mla_decode(**(GOOD | {"sm_scale": SM_SCALE} | change))


def test_an_implementation_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="triton"):
        mla_decode(**GOOD, sm_scale=SM_SCALE, implementation="triton")
    with pytest.raises(ExceptionGroup) as refused:
        mla_decode(**GOOD, sm_scale=SM_SCALE, implementation=["mosaic", "triton"])
    assert all(isinstance(reason, NotImplementedError) for reason in refused.value.exceptions)
    assert len(refused.value.exceptions) == 2
