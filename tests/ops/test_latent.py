"""Contract suite of `write_latent` and `gather_latent` with unquantised latents: bytes equal the bytes of numpy."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PAGE_NONE, PagedLatent, gather_latent, write_latent
from pallas_attn.runtime import dispatch
from tests.contract import backends
from tests.kit.harness import (
    GARBAGE,
    Variant,
    any_bits,
    assert_no_host_callbacks,
    assert_same_bits,
    assert_stays_put,
    compiled,
    fresh_rng,
    scope_names,
)
from tests.kit.slow_cases import slow_cases

every_variant = backends.every_variant("write_latent")
every_gather_variant = backends.every_variant("gather_latent")
# gather_latent has the same backends of these two kinds as write_latent.
compiled_variant = backends.every_variant("write_latent", backends.is_compiled)
lean_variant = backends.every_variant("write_latent", backends.is_compiled_and_lean)

NUM_PAGES, PAGE_SIZE, WIDTH = 12, 4, 24
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)


def holding(pages: np.ndarray) -> PagedLatent:
    return PagedLatent(jnp.asarray(pages))


def numpy_write(pages: np.ndarray, latent: np.ndarray, slots: np.ndarray) -> np.ndarray:
    rows = np.array(pages).reshape(-1, pages.shape[-1])
    for token, slot in zip(latent, slots, strict=True):
        if 0 <= slot < len(rows):
            rows[slot] = token
    return rows.reshape(pages.shape)


# --- write_latent

SLOTS = {
    "scattered": [5, 0, 47, 17, 16, 31, 1],
    "a page and the next": [8, 9, 10, 11, 12, 13, 14],
    "some absent": [-1, 7, -1, 46, -1, -1, 2],
    "all absent": [-1] * 7,
    "out of range": [NUM_SLOTS, 3, -2, GARBAGE, -GARBAGE, -(2**31), 2**31 - 1],
    "would wrap": [-NUM_SLOTS, 1 - NUM_SLOTS, -3, -4, -5, 0, NUM_SLOTS + 1],
}


@slow_cases("triton-float32")
@DTYPES
@every_variant
@backends.in_every_run(
    "xla",
    mosaic=backends.all_but("float16"),
    mosaic_sm100=["bfloat16"],
    triton=backends.all_but("float16"),
)  # fmt: skip
def test_write_changes_only_the_slots(variant: Variant, dtype: Any) -> None:
    rng = fresh_rng()
    write = compiled(write_latent, variant)
    for name, slots in SLOTS.items():
        pages, latent = any_bits(rng, (NUM_PAGES, PAGE_SIZE, WIDTH), dtype), any_bits(rng, (7, WIDTH), dtype)
        got = write(cache=holding(pages), latent=latent, slots=np.array(slots, np.int32))
        assert isinstance(got, PagedLatent), name
        assert_same_bits(got.pages, numpy_write(pages, latent, np.array(slots)))


@every_variant
@backends.in_every_run("xla", "mosaic")
def test_write_fills_a_pool_in_random_order(variant: Variant) -> None:
    rng = fresh_rng()
    latent = any_bits(rng, (NUM_SLOTS, WIDTH), np.float32)
    slots = rng.permutation(NUM_SLOTS).astype(np.int32)
    cache = holding(np.zeros((NUM_PAGES, PAGE_SIZE, WIDTH), np.float32))
    got = compiled(write_latent, variant)(cache=cache, latent=latent, slots=slots)
    assert_same_bits(got.pages.reshape(NUM_SLOTS, WIDTH)[slots], latent)


@every_variant
@backends.in_every_run("xla", "mosaic")
def test_write_casts_to_the_cache_dtype(variant: Variant) -> None:
    """Values are rounded to nearest even. Values outside the range of the dtype become infinite."""
    rng = fresh_rng()
    latent = (rng.standard_normal((7, WIDTH)) * 10.0 ** rng.integers(-3, 6, (7, WIDTH))).astype(np.float32)
    slots = np.array(SLOTS["scattered"], np.int32)
    for dtype in (jnp.bfloat16, jnp.float16):
        pages = any_bits(rng, (NUM_PAGES, PAGE_SIZE, WIDTH), dtype)
        got = compiled(write_latent, variant)(cache=holding(pages), latent=latent, slots=slots)
        with np.errstate(over="ignore"):
            assert_same_bits(got.pages, numpy_write(pages, latent.astype(dtype), slots))


@every_variant
@backends.in_every_run("xla", "mosaic", "triton")
def test_write_without_tokens_returns_the_cache(variant: Variant) -> None:
    pages = any_bits(fresh_rng(), (NUM_PAGES, PAGE_SIZE, WIDTH), np.float32)
    latent, slots = np.zeros((0, WIDTH), np.float32), np.zeros((0,), np.int32)
    got = compiled(write_latent, variant)(cache=holding(pages), latent=latent, slots=slots)
    assert_same_bits(got.pages, pages)


@DTYPES
@lean_variant
def test_write_to_a_donated_cache_is_in_place(variant: Variant, dtype: Any) -> None:
    def write(cache: PagedLatent, latent: jax.Array, slots: jax.Array) -> PagedLatent:
        return write_latent(cache, latent, slots, implementation=variant.implementation)

    cache = jax.eval_shape(lambda: PagedLatent(jnp.zeros((64, 16, WIDTH), dtype)))
    arrays = jax.ShapeDtypeStruct((7, WIDTH), dtype), jax.ShapeDtypeStruct((7,), jnp.int32)
    donating = jax.jit(write, donate_argnums=0)
    assert_stays_put(donating, cache.pages, cache, *arrays)
    memory = donating.lower(cache, *arrays).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == cache.pages.size * np.dtype(dtype).itemsize


def steps_of_writes(variant: Variant, cache: PagedLatent, latent: jax.Array, slots: jax.Array) -> PagedLatent:
    """Write in each iteration of a scan whose carry is the cache."""

    def step(cache: PagedLatent, token: tuple[jax.Array, jax.Array]) -> tuple[PagedLatent, None]:
        return write_latent(cache, *token, implementation=variant.implementation), None

    return jax.lax.scan(step, cache, (latent, slots))[0]


@compiled_variant
@backends.in_every_run("xla")
def test_write_inside_a_scan(variant: Variant) -> None:
    rng = fresh_rng()
    pages, latent = any_bits(rng, (64, 16, WIDTH), np.float32), any_bits(rng, (5, 3, WIDTH), np.float32)
    slots = rng.permutation(64 * 16)[:15].reshape(5, 3).astype(np.int32)
    slots[2, 1] = -1
    scan = jax.jit(steps_of_writes, static_argnums=0, donate_argnums=1)
    want = numpy_write(pages, latent.reshape(-1, WIDTH), slots.reshape(-1))
    if variant.implementation != "reference":
        assert_stays_put(scan, pages, variant, PagedLatent(jnp.asarray(pages)), latent, slots)
    assert_same_bits(scan(variant, PagedLatent(jnp.array(pages)), latent, slots).pages, want)


@every_variant
@backends.in_every_run("xla", "mosaic", "triton")
def test_write_under_vmap(variant: Variant) -> None:
    """The leading axis is a stack of layers with different slots."""
    rng = fresh_rng()
    pages = any_bits(rng, (2, NUM_PAGES, PAGE_SIZE, WIDTH), np.float32)
    latent = any_bits(rng, (2, 7, WIDTH), np.float32)
    slots = np.array([SLOTS["some absent"], SLOTS["out of range"]], np.int32)

    def write(pages: jax.Array, latent: jax.Array, slots: jax.Array) -> jax.Array:
        return write_latent(PagedLatent(pages), latent, slots, implementation=variant.implementation).pages

    want = np.stack([numpy_write(*arrays) for arrays in zip(pages, latent, slots, strict=True)])
    assert_same_bits(jax.vmap(write)(*map(jnp.asarray, (pages, latent, slots))), want)


# --- gather_latent

TABLE_WIDTH, LENGTH = 5, 40


def ragged_case(
    rng: np.random.Generator, cached: list[int], new: list[int], dtype: Any = np.float32, num_new: int = 16
) -> tuple[dict[str, Any], np.ndarray]:
    """Return arguments of `gather_latent` for sequences of the given lengths, and the expected latents in order.

    Table entries after the cached tokens, and new latents that belong to no sequence, are garbage.
    """
    pages = any_bits(rng, (NUM_PAGES, PAGE_SIZE, WIDTH), dtype)
    latent_new = any_bits(rng, (num_new, WIDTH), dtype)
    cu_q_lens = np.cumsum([0, *new], dtype=np.int32)
    tables = rng.choice([GARBAGE, -GARBAGE, -1], (len(cached), TABLE_WIDTH)).astype(np.int32)
    tokens = [np.zeros((0, WIDTH), dtype)]
    for s, length in enumerate(cached):
        num_pages = -(-length // PAGE_SIZE)
        tables[s, :num_pages] = rng.choice(NUM_PAGES, num_pages)  # sequences may share pages
        tokens.append(pages[tables[s, :num_pages]].reshape(-1, WIDTH)[:length])
        tokens.append(latent_new[cu_q_lens[s] : cu_q_lens[s + 1]])
    arrays = {
        "cache": holding(pages),
        "latent_new": latent_new,
        "block_tables": tables,
        "cu_q_lens": cu_q_lens,
        "kv_lens": np.array(cached, np.int32) + np.array(new, np.int32),
    }
    return arrays, np.concatenate(tokens)


def fitted(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the first `length` tokens, padded with zeros."""
    return np.concatenate([tokens, np.zeros((length, WIDTH), tokens.dtype)])[:length]


FULL_TABLE = TABLE_WIDTH * PAGE_SIZE
CACHED_AND_NEW = {
    "mixed": ([0, 1, PAGE_SIZE - 1, PAGE_SIZE], [3, 0, 5, 1]),
    "around a page": ([PAGE_SIZE + 1, 2 * PAGE_SIZE, 7, 0], [1, 1, 1, 1]),
    "idle between": ([0, 6, 0, 3], [0, 2, 0, 4]),
    "nothing new": ([9, 0, 4, 11], [0, 0, 0, 0]),
    "nothing cached": ([0, 0, 0, 0], [4, 0, 7, 5]),
    "all idle": ([0, 0, 0, 0], [0, 0, 0, 0]),
    "a full table": ([FULL_TABLE, 0, 2, 0], [1, 0, 2, 1]),
    "fills the result": ([10, 5, 4, 5], [10, 2, 3, 1]),
    "longer than the result": ([FULL_TABLE, FULL_TABLE, FULL_TABLE, FULL_TABLE], [1, 2, 3, 10]),
    "the last sequence idle": ([3, 5, 2, 0], [1, 1, 1, 0]),
}


@DTYPES
@every_gather_variant
@backends.in_every_run("reference", "xla", mosaic=backends.all_but("float16"), triton=["bfloat16"])
def test_gather_concatenates_cached_and_new_tokens(variant: Variant, dtype: Any) -> None:
    rng = fresh_rng()
    gather = compiled(gather_latent, variant, length=LENGTH)
    for name, (cached, new) in CACHED_AND_NEW.items():
        print(name)
        arrays, tokens = ragged_case(rng, cached, new, dtype)
        assert_same_bits(gather(**arrays), fitted(tokens, LENGTH))


@every_gather_variant
@backends.in_every_run("reference", "xla")
def test_gather_of_random_lengths(variant: Variant) -> None:
    rng = fresh_rng()
    gather = compiled(gather_latent, variant, length=LENGTH)
    for _ in range(50):
        cached, new = (
            rng.integers(0, FULL_TABLE + 1, 4).tolist(),
            rng.multinomial(rng.integers(17), [0.25] * 4).tolist(),
        )
        arrays, tokens = ragged_case(rng, cached, new)
        assert_same_bits(gather(**arrays), fitted(tokens, LENGTH))


@pytest.mark.parametrize("length", [1, 7, 64])
@every_gather_variant
@backends.in_every_run("reference", "xla", "mosaic", triton=backends.all_but("1"))
def test_gather_of_one_sequence_into_results_of_different_lengths(variant: Variant, length: int) -> None:
    arrays, tokens = ragged_case(fresh_rng(), [6], [3])
    assert_same_bits(compiled(gather_latent, variant, length=length)(**arrays), fitted(tokens, length))


@every_gather_variant
@backends.in_every_run("reference", "xla", "mosaic", "triton")
def test_gather_of_more_sequences_than_a_block(variant: Variant) -> None:
    cached, new = [0, 1, 0, 2, 0] * 14, [0, 0, 1, 0, 0] * 14
    arrays, tokens = ragged_case(fresh_rng(), cached, new)
    assert_same_bits(compiled(gather_latent, variant, length=LENGTH + 20)(**arrays), fitted(tokens, LENGTH + 20))


@every_gather_variant
@backends.in_every_run("reference", "xla", "mosaic", "triton")
def test_gather_without_new_latents(variant: Variant) -> None:
    """`mla_prefill` passes an empty array to expand a prefix."""
    arrays, tokens = ragged_case(fresh_rng(), [6, 0, 9, 1], [0, 0, 0, 0], num_new=0)
    assert_same_bits(compiled(gather_latent, variant, length=LENGTH)(**arrays), fitted(tokens, LENGTH))


@every_gather_variant
@backends.in_every_run("reference", "xla", "mosaic", "triton")
def test_gather_of_absent_pages(variant: Variant) -> None:
    """Tokens of absent pages are 0, in the middle and at the end of a sequence."""
    arrays, tokens = ragged_case(fresh_rng(), [3 * PAGE_SIZE - 1, 0, PAGE_SIZE, 2], [2, 0, 1, 1])
    arrays["block_tables"][0, 1] = arrays["block_tables"][2, 0] = PAGE_NONE
    second = 3 * PAGE_SIZE + 1
    tokens[PAGE_SIZE : 2 * PAGE_SIZE] = tokens[second : second + PAGE_SIZE] = 0
    assert_same_bits(compiled(gather_latent, variant, length=LENGTH)(**arrays), fitted(tokens, LENGTH))


@every_gather_variant
@backends.in_every_run("mosaic", "triton")
def test_gather_under_vmap(variant: Variant) -> None:
    rng = fresh_rng()
    cases = [ragged_case(rng, *CACHED_AND_NEW[name]) for name in ("mixed", "idle between")]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(arrays for arrays, _ in cases))

    def gather(arrays: dict[str, Any]) -> jax.Array:
        return gather_latent(**arrays, length=LENGTH, implementation=variant.implementation)

    assert_same_bits(jax.vmap(gather)(stacked), np.stack([fitted(tokens, LENGTH) for _, tokens in cases]))


# --- both operations


@every_gather_variant
@backends.in_every_run("reference", "xla", "mosaic", "triton")
def test_gather_returns_written_latents(variant: Variant) -> None:
    rng = fresh_rng()
    latent = any_bits(rng, (11, WIDTH), np.float32)
    tables = np.array([[9, 2, GARBAGE], [4, GARBAGE, -1]], np.int32)
    position = [*range(7), *range(4)]
    slots = [int(tables[int(i >= 7), p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for i, p in enumerate(position)]
    cache = holding(any_bits(rng, (NUM_PAGES, PAGE_SIZE, WIDTH), np.float32))
    cache = compiled(write_latent, variant)(cache=cache, latent=latent, slots=np.array(slots, np.int32))
    got = compiled(gather_latent, variant, length=11)(
        cache=cache,
        latent_new=np.zeros((0, WIDTH), np.float32),
        block_tables=tables,
        cu_q_lens=np.zeros(3, np.int32),
        kv_lens=np.array([7, 4], np.int32),
    )
    assert_same_bits(got, latent)


@compiled_variant
@backends.in_every_run("xla")
def test_compiled_call_is_traced_once_without_host_callbacks(variant: Variant) -> None:
    rng = fresh_rng()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def both(arrays: dict[str, Any], slots: jax.Array) -> jax.Array:
        cache = write_latent(arrays["cache"], arrays["latent_new"], slots, implementation=variant.implementation)
        return gather_latent(**(arrays | {"cache": cache}), length=LENGTH, implementation=variant.implementation)

    for cached, new in CACHED_AND_NEW.values():
        arrays, _ = ragged_case(rng, cached, new)
        both(arrays, rng.permutation(NUM_SLOTS)[:16].astype(np.int32))
    assert_no_host_callbacks(both, arrays, np.zeros(16, np.int32))
    names = scope_names(both, arrays, np.zeros(16, np.int32))
    assert "write_latent" in names
    assert "gather_latent" in names


@compiled_variant
@backends.in_every_run("xla")
def test_exported(variant: Variant) -> None:
    arrays, tokens = ragged_case(fresh_rng(), *CACHED_AND_NEW["mixed"])
    gather = jax.export.export(compiled(gather_latent, variant, length=LENGTH))(**arrays)
    assert_same_bits(gather.call(**arrays), fitted(tokens, LENGTH))
    arguments = {
        "cache": arrays["cache"], "latent": arrays["latent_new"][:7], "slots": np.array(SLOTS["out of range"], np.int32)
    }  # fmt: skip
    write = jax.export.export(compiled(write_latent, variant))(**arguments)
    want = numpy_write(arrays["cache"].pages, arguments["latent"], arguments["slots"])
    assert_same_bits(write.call(**arguments), holding(want))


# --- bad arguments

PAGES = jnp.zeros((NUM_PAGES, PAGE_SIZE, WIDTH), jnp.float32)
GOOD_WRITE = {
    "cache": PagedLatent(PAGES),
    "latent": jnp.zeros((7, WIDTH), jnp.float32),
    "slots": jnp.zeros((7,), jnp.int32),
}
BAD_WRITE = {
    "pages of rank 4": ("cache.pages", {"cache": PagedLatent(PAGES[None])}),
    "quantised pages": ("cache.pages", {"cache": PagedLatent(PAGES.astype(jnp.int8))}),
    "a latent of another width": ("latent", {"latent": jnp.zeros((7, WIDTH + 1))}),
    "a latent of rank 3": ("latent", {"latent": jnp.zeros((7, 1, WIDTH))}),
    "an integer latent": ("latent", {"latent": jnp.zeros((7, WIDTH), jnp.int32)}),
    "another number of slots": ("slots", {"slots": jnp.zeros((6,), jnp.int32)}),
    "slots per head": ("slots", {"slots": jnp.zeros((7, 1), jnp.int32)}),
    "unsigned slots": ("slots", {"slots": jnp.zeros((7,), jnp.uint32)}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}
GOOD_GATHER = {
    "cache": PagedLatent(PAGES),
    "latent_new": jnp.zeros((16, WIDTH), jnp.float32),
    "block_tables": jnp.zeros((4, TABLE_WIDTH), jnp.int32),
    "cu_q_lens": jnp.zeros((5,), jnp.int32),
    "kv_lens": jnp.zeros((4,), jnp.int32),
    "length": LENGTH,
}
BAD_GATHER = {
    "pages of rank 2": ("cache.pages", {"cache": PagedLatent(PAGES[0])}),
    "new latents of another width": ("latent_new", {"latent_new": jnp.zeros((16, WIDTH - 1))}),
    "new latents of another dtype": ("latent_new", {"latent_new": jnp.zeros((16, WIDTH), jnp.bfloat16)}),
    "head-wise tables": ("block_tables", {"block_tables": jnp.zeros((4, 1, TABLE_WIDTH), jnp.int32)}),
    "float tables": ("block_tables", {"block_tables": jnp.zeros((4, TABLE_WIDTH))}),
    "lengths instead of sums": ("cu_q_lens", {"cu_q_lens": jnp.zeros((4,), jnp.int32)}),
    "kv_lens of another batch": ("kv_lens", {"kv_lens": jnp.zeros((5,), jnp.int32)}),
    "float kv_lens": ("kv_lens", {"kv_lens": jnp.zeros((4,))}),
    "no length": ("length", {"length": 0}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@slow_cases("gather_latent, pages of rank 2")
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("op", "good", "argument", "change"),
    [
        pytest.param(op, good, argument, change, id=f"{op.__name__}, {name}")
        for op, good, bad in ((write_latent, GOOD_WRITE, BAD_WRITE), (gather_latent, GOOD_GATHER, BAD_GATHER))
        for name, (argument, change) in bad.items()
    ],
)
def test_errors_name_the_argument(op: Any, good: dict[str, Any], argument: str, change: dict[str, Any]) -> None:
    op(**good)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        op(**(good | change))


@pytest.mark.parametrize(("op", "good"), [(write_latent, GOOD_WRITE), (gather_latent, GOOD_GATHER)])
def test_missing_named_implementation_raises(monkeypatch: pytest.MonkeyPatch, op: Any, good: dict[str, Any]) -> None:
    monkeypatch.setitem(dispatch.MODULES, op.__name__, {("xla", None): "xla"})
    with pytest.raises(NotImplementedError, match=f"{op.__name__} has no 'triton' implementation; it has xla"):
        op(**good, implementation="triton")
