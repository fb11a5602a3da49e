"""Tests of fp8 latents: the bytes that `write_latent` stores, and the values that `gather_latent` and `mla_prefill`
read.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_attn import PagedLatent, explain, gather_latent, mla_decode, mla_prefill, plan_decode, write_latent
from tests.contract import backends
from tests.kit.harness import (
    F32_OUT,
    GARBAGE,
    Variant,
    any_bits,
    assert_close,
    assert_same_bits,
    compiled,
    fresh_rng,
    interpreting,
    poison,
)
from tests.kit.slow_cases import slow_cases
from tests.ops.write_kv_case import numpy_quantise

every_variant = backends.every_variant("write_latent", backends.is_compiled)


def supports_8_bits(backend: backends.Backend) -> bool:
    return backend.name != "mosaic"


every_writer = backends.every_variant("write_latent", supports_8_bits)
every_gatherer = backends.every_variant("gather_latent", supports_8_bits)
lean_variant = backends.every_variant("write_latent", backends.is_compiled_and_lean)

NUM_PAGES, PAGE_SIZE, LATENT, ROPE = 12, 4, 256, 16
WIDTH, NUM_SLOTS = LATENT + ROPE, NUM_PAGES * PAGE_SIZE


def numpy_stored(latent: np.ndarray) -> PagedLatent:
    """Quantise latents [..., L + R] in numpy. Return them as a cache."""
    groups = latent[..., :LATENT].astype(np.float32).reshape(*latent.shape[:-1], -1, 128)
    scale = np.abs(groups).max(axis=-1) / np.float32(448)
    scale[scale < np.finfo(np.float32).tiny] = 1
    stored = numpy_quantise(groups, scale[..., None], "float8_e4m3fn").reshape(*latent.shape[:-1], LATENT)
    return PagedLatent(*map(jnp.asarray, (stored, scale, latent[..., LATENT:].astype(ml_dtypes.bfloat16))))


def numpy_meant(cache: PagedLatent, dtype: Any) -> np.ndarray:
    """Dequantise a cache in numpy. Return the latents [..., L + R]."""
    stored, scale, rope = (np.asarray(part) for part in (cache.pages, cache.scale, cache.rope))
    groups = stored.astype(np.float32).reshape(*scale.shape, 128) * scale[..., None]
    return np.concatenate([groups.reshape(stored.shape).astype(dtype), rope.astype(dtype)], axis=-1)


def drawn(rng: np.random.Generator, *rows: int) -> np.ndarray:
    """Draw latents: groups of columns with different magnitudes, a group of zeros, a group whose scale would be
    subnormal, a latent of zeros, and a group with one nonzero value.
    """
    size = 10.0 ** rng.uniform(-4, 4, (*rows, WIDTH // 16, 1))
    latent = (rng.standard_normal((*rows, WIDTH // 16, 16)) * size).reshape(*rows, WIDTH).astype(np.float32)
    flat = latent.reshape(-1, WIDTH)
    flat[0, :128], flat[1, 128:LATENT], flat[2] = 0, 1e-37, 0
    flat[3, 1:128] = 0
    return latent


def any_cache(rng: np.random.Generator) -> PagedLatent:
    """Return a cache of random bytes."""

    def bits(width: int, dtype: Any) -> jax.Array:
        return jnp.asarray(any_bits(rng, (NUM_PAGES, PAGE_SIZE, width), dtype))

    return PagedLatent(bits(LATENT, ml_dtypes.float8_e4m3fn), bits(2, np.float32), bits(ROPE, ml_dtypes.bfloat16))


def numpy_write(cache: PagedLatent, latent: np.ndarray, slots: np.ndarray) -> PagedLatent:
    def put(pool: Any, rows: Any) -> np.ndarray:
        out = np.array(pool).reshape(NUM_SLOTS, -1)
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < NUM_SLOTS:
                out[slot] = row
        return out.reshape(pool.shape)

    return jax.tree.map(put, cache, numpy_stored(latent))


SLOTS = np.array([5, -1, 47, NUM_SLOTS, 16, GARBAGE, 1, -GARBAGE], np.int32)


@slow_cases("triton-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_writer
@backends.in_every_run("xla", triton=["float32"])
def test_write_quantises_groups_and_changes_no_other_bytes(variant: Variant, dtype: str) -> None:
    rng = fresh_rng()
    with np.errstate(over="ignore"):
        latent = np.clip(drawn(rng, 8), -6e4, 6e4).astype(dtype)
    cache = any_cache(rng)
    got = compiled(write_latent, variant)(cache=cache, latent=latent, slots=SLOTS)
    assert_same_bits(got, numpy_write(cache, latent, SLOTS))


@every_writer
@backends.in_every_run("xla", "triton")
def test_write_under_vmap_and_with_x64(variant: Variant) -> None:
    rng = fresh_rng()
    layers = [any_cache(rng) for _ in range(2)]
    latent, slots = jnp.asarray(drawn(rng, 2, 8)), jnp.stack([SLOTS, SLOTS[::-1]])
    write = jax.jit(jax.vmap(functools.partial(write_latent, implementation=variant.implementation)))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    want = [numpy_write(*call) for call in zip(layers, np.asarray(latent), np.asarray(slots), strict=True)]
    want = jax.tree.map(lambda *parts: np.stack(parts), *want)
    assert_same_bits(write(stacked, latent, slots), want)
    with jax.enable_x64(True):
        assert_same_bits(write(stacked, latent, slots), want)


def test_pool_is_not_converted() -> None:
    """XLA's CPU backend copies the pool, which is accepted, but it must not convert the pool to float16. The compile
    gate checks that GPUs do neither.
    """
    cache = jax.tree.map(lambda part: jax.ShapeDtypeStruct((512, *part.shape[1:]), part.dtype), any_cache(fresh_rng()))
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    latent = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)

    def step(cache: PagedLatent, latent: jax.Array, slots: jax.Array, tables: jax.Array, lens: jax.Array) -> Any:
        cache = write_latent(cache, latent, slots, implementation="xla")
        queries = latent[:2, None, None, :LATENT], latent[:2, None, None, LATENT:]
        return cache, mla_decode(*queries, cache, tables, lens, sm_scale=1.0, implementation="xla")

    module = jax.jit(step, donate_argnums=0).lower(cache, latent, ints((8,)), ints((2, 9)), ints((2,))).compile()
    assert not re.search(r"\w+\[512,4,256\]\S* convert\(", str(module.as_text()))


def held(rng: np.random.Generator, dead: np.ndarray) -> PagedLatent:
    """Return a cache of random latents, with NaN in the slots of the mask `dead`."""
    stored = numpy_stored(drawn(rng, NUM_PAGES, PAGE_SIZE))
    return jax.tree.map(lambda part: jnp.asarray(poison(rng, np.asarray(part), dead)), stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_gatherer
@backends.in_every_run("xla", "reference", triton=["float32"])
def test_gather_dequantises_cached_and_rounds_new_tokens(variant: Variant, dtype: str) -> None:
    """The result has the dtype of the new latents. Tokens of absent pages are 0."""
    rng = fresh_rng()
    tables = np.array([[9, 2, GARBAGE], [4, -1, 0]], np.int32)
    dead = np.ones((NUM_PAGES, PAGE_SIZE), bool)
    dead[9], dead[2, :3], dead[4], dead[0, :1] = False, False, False, False
    cache = held(rng, dead)
    with np.errstate(over="ignore"):
        new = drawn(rng, 5).astype(dtype)
    got = compiled(gather_latent, variant, length=20)(
        cache=cache,
        latent_new=new,
        block_tables=tables,
        cu_q_lens=np.array([0, 2, 4], np.int32),
        kv_lens=np.array([9, 11], np.int32),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        meant, new = numpy_meant(cache, dtype), numpy_meant(numpy_stored(new), dtype)
    cached = [meant[9], meant[2, :3], new[:2], meant[4], np.zeros((PAGE_SIZE, WIDTH), dtype), meant[0, :1], new[2:4]]
    wanted = np.concatenate([*cached, np.zeros((0, WIDTH), dtype)])
    assert_same_bits(got, np.concatenate([wanted, np.zeros((20 - len(wanted), WIDTH), dtype)]))


# --- mla_prefill

HEADS, NOPE, VALUE = 3, 16, 12
CACHED, NEW = np.array([7, 0, 12]), np.array([3, 4, 5])


def prefill_arguments(rng: np.random.Generator, new: np.ndarray) -> dict[str, Any]:
    """Return arguments of `mla_prefill`: new tokens after cached prefixes. Unused slots are NaN."""
    tables = rng.permutation(NUM_PAGES).reshape(3, 4).astype(np.int32)
    dead = np.ones((NUM_PAGES, PAGE_SIZE), bool)
    for s, cached in enumerate(CACHED):
        for token in range(cached):
            dead[tables[s, token // PAGE_SIZE], token % PAGE_SIZE] = False
    latents = rng.standard_normal((NUM_PAGES, PAGE_SIZE, WIDTH)).astype(np.float32)
    stored = numpy_stored(latents)
    return {
        "q_nope": rng.standard_normal((new.sum(), HEADS, NOPE)).astype(np.float32),
        "q_rope": rng.standard_normal((new.sum(), HEADS, ROPE)).astype(np.float32),
        "latent_new": rng.standard_normal((new.sum(), WIDTH)).astype(np.float32),
        "cache": jax.tree.map(lambda part: jnp.asarray(poison(rng, np.asarray(part), dead)), stored),
        "w_uk": (rng.standard_normal((HEADS, NOPE, LATENT)) * LATENT**-0.5).astype(np.float32),
        "w_uv": (rng.standard_normal((HEADS, VALUE, LATENT)) * LATENT**-0.5).astype(np.float32),
        "block_tables": tables,
        "cu_q_lens": np.cumsum([0, *new], dtype=np.int32),
        "kv_lens": (CACHED + new).astype(np.int32),
    }


@pytest.mark.slow
@lean_variant
def test_prefill_equals_prefill_over_float32_pages(variant: Variant) -> None:
    """The result equals the result for a float32 cache with the dequantised values, for prompts in one chunk and in
    two.
    """
    arguments = prefill_arguments(fresh_rng(), NEW)
    meant = arguments | {
        "cache": PagedLatent(jnp.asarray(numpy_meant(arguments["cache"], np.float32))),
        "latent_new": numpy_meant(numpy_stored(arguments["latent_new"]), np.float32),
    }
    prefill = compiled(mla_prefill, variant, sm_scale=0.2, piece_tokens=8)
    got, want = np.asarray(prefill(**arguments)), prefill(**meant)
    assert np.abs(np.asarray(want)).max() > 0.1
    assert_close("whole", got, want, F32_OUT)

    written, rest = (
        np.array([0, 1, 3, 4, 5, 7, 8]),
        np.array([2, 6, 9, 10, 11]),
    )  # the first chunk has 2, 3 and 2 new tokens
    sequence = np.repeat(np.arange(3), [2, 3, 2])
    token = np.concatenate([CACHED[0] + np.arange(2), np.arange(3), CACHED[2] + np.arange(2)])
    slots = arguments["block_tables"][sequence, token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE
    cache = write_latent(arguments["cache"], jnp.asarray(arguments["latent_new"][written]), jnp.asarray(slots))
    chunk = {name: arguments[name][rest] for name in ("q_nope", "q_rope", "latent_new")}
    cut = prefill(**(arguments | chunk | {"cache": cache, "cu_q_lens": np.array([0, 1, 2, 5], np.int32)}))
    assert_close("cut", cut, got[rest], F32_OUT)


# --- unsupported calls


@pytest.mark.slow
def test_mosaic_states_why_8_bits_are_unsupported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = any_cache(fresh_rng())
    latent, slots = jnp.zeros((8, WIDTH), jnp.bfloat16), jnp.asarray(SLOTS)
    tables, lens, sums = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2,), jnp.int32), jnp.zeros((3,), jnp.int32)
    q_latent, q_rope = jnp.zeros((2, 1, 4, LATENT), jnp.bfloat16), jnp.zeros((2, 1, 4, ROPE), jnp.bfloat16)
    many = [jnp.repeat(q, 16, axis=2) for q in (q_latent, q_rope)]
    with interpreting(capsys):
        explanations = [
            explain("write_latent", cache, latent, slots),
            explain("gather_latent", cache, latent, tables, sums, lens, length=8),
            explain("mla_decode", q_latent, q_rope, cache, tables, lens, sm_scale=1.0),
            explain("mla_decode", *many, cache, tables, lens, sm_scale=1.0),
        ]
        plan = plan_decode((q_latent, q_rope), cache, tables, lens)
    none = "takes no quantised latents, got float8_e4m3fn"
    pages = f"takes pages of 16, 32, 64 or 128 tokens, got {cache.page_size}"
    for explanation, why in zip(explanations, (none, none, pages, pages), strict=True):
        assert explanation.chosen == "xla"
        assert explanation.refused["mosaic"] == why
    assert plan.implementation == "xla"
