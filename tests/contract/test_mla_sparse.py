"""Contract of `mla_sparse`, attention to selected latents: every backend is tested with unusual inputs.

Poisoned inputs have NaN, infinities or garbage in all elements that must not affect the result.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_attn import PagedLatent, SlotRange, latent_cache_spec, mla_decode, mla_sparse, token_slots
from tests.contract import backends, naive, transformations
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked latents. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

every_backend = backends.every_backend("mla_sparse")
SM_SCALE, PAGES, PS = 0.0625, 12, 16
EXTRA_PAGES, EXTRA_TOP_K = 9, 70  # pages of the second cache, and entries of its slots


@dataclass(frozen=True)
class SparseCase:
    """One call of `mla_sparse`.

    Attributes:
      chosen: number of cache slots that each token selects.
      top_k: number of entries of each token in the argument `slots`.
      garbage: values of unused entries: -1, or slots outside the pool.
      scaled: number of columns that are stored in 8 bits with scales that are powers of two, before bfloat16 columns; 0
        for none.
      extra: number of slots of a second cache that each token selects, or () for one cache.
      sinks: whether heads have learned sinks.
      scattered: whether unused entries are between used entries, instead of after them.
      ranges: whether slots are ranges of keys. Some keys are on absent pages then, and pages of a second cache have two
        tokens.
      dtype: dtype of the queries, or None for `Backend.dtype`.
      cache_dtype: dtype of the cache, or None for the dtype of the queries. With float8_e4m3fn, latents have scales and
        rope columns are bfloat16.
    """

    chosen: tuple[int, ...] = (0, 1, 15, 16, 17, 40, 0)
    top_k: int = 40
    heads: int = 3
    latent_dim: int = 128
    rope_dim: int = 64
    dtype: str | None = None
    cache_dtype: str | None = None
    garbage: tuple[int, ...] = (-1,)
    scattered: bool = False
    scaled: int = 0
    extra: tuple[int, ...] = ()
    sinks: bool = False
    ranges: bool = False


@dataclass(frozen=True)
class Pool:
    """Random latents of a cache, and slots that tokens select.

    Attributes:
      latents: [N·ps, L + R], latents after dequantisation.
      stored: arrays of the cache.
      slots: [T, K].
      dead: bool [N, ps], true for cache slots that no token selects.
      ranges: the slots as ranges of keys, or None.
    """

    latents: np.ndarray
    stored: tuple[np.ndarray, ...]
    slots: np.ndarray
    dead: np.ndarray
    ranges: SlotRange | None

    @staticmethod
    def draw(
        case: SparseCase,
        rng: np.random.Generator,
        dtype: str,
        chosen: tuple[int, ...],
        top_k: int,
        pages: int,
        page_size: int = PS,
    ) -> Pool:
        """Draw a pool of which each token selects `chosen` slots, in `top_k` entries."""
        scale, ranges = 1.0 if dtype == "float32" else harness.HALF_SCALE, None
        garbage = case.garbage if case.garbage == (-1,) else (*case.garbage, pages * page_size)  # also the end
        slots = rng.choice(garbage, (len(chosen), top_k)).astype(np.int32)
        if case.ranges:
            ranges, slots = draw_ranges(rng, chosen, top_k, pages, page_size)
        for row, count in zip(slots, chosen, strict=True):
            if case.ranges:
                break
            places = rng.permutation(top_k)[:count] if case.scattered else np.arange(count)
            row[places] = rng.permutation(np.arange(PS, pages * PS))[:count]  # several tokens may select the same slot
        dead = np.ones(pages * page_size, bool)
        dead[slots[(slots >= 0) & (slots < dead.size)]] = False
        width = case.latent_dim + case.rope_dim
        latents = rng.standard_normal((pages, page_size, width)) * scale
        if case.cache_dtype != "float8_e4m3fn":
            latents = latents.astype(case.cache_dtype or dtype)
            stored = (latents,)
        else:
            stored_dim = case.scaled or case.latent_dim
            rope = latents[..., stored_dim:].astype(ml_dtypes.bfloat16)
            groups = latents[..., :stored_dim].reshape(pages, page_size, -1, 64 if case.scaled else 128)
            scales = (scale * rng.uniform(0.02, 0.1, groups.shape[:-1])).astype(np.float32)
            if case.scaled:
                scales = (2.0 ** rng.integers(-9, -5, scales.shape)).astype(np.float32)
            quantised = np.clip(groups / scales[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
            meant = (quantised.astype(np.float32) * scales[..., None]).reshape(pages, page_size, -1)
            kept = scales.astype(ml_dtypes.float8_e8m0fnu) if case.scaled else scales
            stored = quantised.reshape(meant.shape), kept, rope
            latents = np.concatenate([meant, rope.astype(np.float32)], axis=-1)
        return Pool(latents.reshape(-1, width), stored, slots, dead.reshape(pages, page_size), ranges)

    def cache(self, fill: Any) -> PagedLatent:
        return PagedLatent(*(jnp.asarray(fill(part, self.dead)) for part in self.stored))

    def keys(self, token: int) -> np.ndarray:
        """Return the keys that a token selects, [keys, 1, L + R]."""
        slots = self.slots[token]
        return self.latents[slots[(slots >= 0) & (slots < self.latents.shape[0])]][:, None]


def draw_ranges(
    rng: np.random.Generator, chosen: tuple[int, ...], top_k: int, pages: int, page_size: int
) -> tuple[SlotRange, np.ndarray]:
    """Draw ranges of `chosen` keys, and return them with their slots; -1 for no slot.

    Two tokens of a step belong to each of three sequences, further tokens to none. Sequences share pages. Every third
    page of a sequence is absent or not in the pool, and so are the pages without a key of a token.
    """
    table_pages = min(-(-top_k // page_size) + 1, pages - 1)
    tables = np.stack([rng.permutation(np.arange(1, pages))[:table_pages] for _ in range(3)]).astype(np.int32)
    tables[:, 2::3] = rng.choice((-1, pages, harness.GARBAGE, -(2**31), 2**31 - 1), tables[:, 2::3].shape)
    sequence = np.arange(len(chosen), dtype=np.int32) // 2
    first = rng.integers(0, table_pages * page_size - np.array(chosen) + 1).astype(np.int32)
    slots, used = np.full((len(chosen), top_k), -1, np.int32), np.zeros(tables.shape, bool)
    for token, (s, count) in enumerate(zip(sequence, chosen, strict=True)):
        for i, position in enumerate(range(first[token], first[token] + count) if s < len(tables) else ()):
            page = tables[s, position // page_size]
            used[s, position // page_size] = True
            if 0 <= page < pages:
                slots[token, i] = page * page_size + position % page_size
    ranges = SlotRange(*map(jnp.asarray, (tables, sequence, first, np.array(chosen, np.int32))), size=top_k)
    return replace(ranges, block_tables=jnp.where(used, tables, harness.GARBAGE)), slots


@dataclass(frozen=True)
class SparseInputs:
    """Random inputs of a case.

    Attributes:
      q: [T, Hq, L + R].
      pools: one or two caches with their slots.
      sinks: [Hq], or None.
    """

    case: SparseCase
    rng: np.random.Generator
    q: np.ndarray
    pools: tuple[Pool, ...]
    sinks: np.ndarray | None

    @staticmethod
    def draw(case: SparseCase, rng: np.random.Generator, dtype: str) -> SparseInputs:
        dtype = case.dtype or dtype
        scale = 1.0 if dtype == "float32" else harness.HALF_SCALE
        pools = [Pool.draw(case, rng, dtype, case.chosen, case.top_k, PAGES)]
        if case.extra:
            size = 2 if case.ranges else PS
            pools.append(Pool.draw(case, rng, dtype, case.extra, EXTRA_TOP_K, EXTRA_PAGES * PS // size, size))
        q = rng.standard_normal((len(case.chosen), case.heads, case.latent_dim + case.rope_dim)) / scale
        sinks = rng.normal(3, 2, case.heads).astype(np.float32) if case.sinks else None
        return SparseInputs(case, rng, q.astype(dtype), tuple(pools), sinks)

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments. Latents that no token selects are NaN or infinite if `poisoned`, else 0."""
        fill = functools.partial(harness.poison, self.rng) if poisoned else harness.zero
        arguments = {
            "q_latent": self.q[..., : self.case.latent_dim],
            "q_rope": self.q[..., self.case.latent_dim :] if self.case.rope_dim else None,
            "cache": self.pools[0].cache(fill),
            "slots": self.pools[0].ranges or self.pools[0].slots,
        }
        for pool in self.pools[1:]:
            arguments |= {"extra_cache": pool.cache(fill), "extra_slots": pool.ranges or pool.slots}
        return arguments if self.sinks is None else arguments | {"sinks": self.sinks}

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return output [T, Hq, L] and LSE [T, Hq], computed in NumPy in float64."""
        rows = []
        for token, q in enumerate(self.q):
            keys = np.concatenate([pool.keys(token) for pool in self.pools])
            rows.append(naive.attend(q, keys, keys[..., : self.case.latent_dim], SM_SCALE, sinks=self.sinks))
        out, lse = zip(*rows, strict=True)
        return np.stack(out), np.stack(lse)


BASE = SparseCase()
CASES = {
    "rows of all kinds": BASE,
    "float32": replace(BASE, dtype="float32"),
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "float16, latents of 96": replace(BASE, dtype="float16", latent_dim=96, rope_dim=16),
    "one slot": replace(BASE, chosen=(1, 0, 1), top_k=1),
    "nothing chosen": replace(BASE, chosen=(0,) * 7),
    "none between slots": replace(BASE, scattered=True),
    "garbage for none": replace(BASE, scattered=True, garbage=(-(2**31), -7, PAGES * PS, 2**31 - 1, harness.GARBAGE)),
    "rotated columns of 32": replace(BASE, rope_dim=32),
    "40 heads, wide latents": replace(BASE, heads=40, latent_dim=512),
    "67 heads, pairs of tiles": replace(BASE, chosen=(170, 0, 131, 64), top_k=260, heads=67, scattered=True),
    "8 bits": replace(BASE, cache_dtype="float8_e4m3fn", latent_dim=256),
    "bfloat16 over 8 bits": replace(BASE, dtype="bfloat16", cache_dtype="float8_e4m3fn"),
    "pairs of tiles over 8 bits": replace(
        BASE,
        chosen=(170, 0, 131, 64),
        top_k=260,
        heads=67,
        scattered=True,
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        latent_dim=256,
    ),
    "no rotated columns": replace(BASE, rope_dim=0),
    "no rotated columns, wide": replace(BASE, rope_dim=0, heads=40, latent_dim=512, scattered=True, sinks=True),
    "two caches": replace(BASE, rope_dim=0, extra=(0, 0, 3, 70, 33, 64, 17), sinks=True),
    "two caches, wide": replace(
        BASE, rope_dim=0, heads=64, latent_dim=512, extra=(0, 0, 3, 70, 33, 64, 17), scattered=True, sinks=True
    ),
    "two caches with rotated columns": replace(BASE, extra=(5, 0, 3, 70, 33, 64, 0), garbage=(-7, 2**31 - 1)),
    "two caches, 8 bits": replace(BASE, extra=(5, 0, 3, 70, 33, 64, 0), cache_dtype="float8_e4m3fn", sinks=True),
    "8 bits, all columns are values": replace(
        BASE, rope_dim=0, latent_dim=192, scaled=128, cache_dtype="float8_e4m3fn", sinks=True, extra=BASE.chosen
    ),
    "8 bits, all columns are values, wide": replace(
        BASE, rope_dim=0, latent_dim=512, scaled=448, heads=40, cache_dtype="float8_e4m3fn", scattered=True
    ),
    "two caches, 8 bits, all columns are values": replace(
        BASE,
        rope_dim=0,
        latent_dim=512,
        scaled=448,
        heads=64,
        cache_dtype="float8_e4m3fn",
        extra=(0, 0, 3, 70, 33, 64, 17),
        garbage=(-7, 2**31 - 1),
        scattered=True,
        sinks=True,
    ),
    "ranges": replace(BASE, ranges=True, chosen=(15, 40, 17, 0, 1, 33, 9)),
    "ranges of two caches": replace(
        BASE, ranges=True, rope_dim=0, chosen=(15, 40, 17, 0, 1, 33, 9), extra=(0, 70, 3, 40, 33, 0, 17), sinks=True
    ),
    "ranges of two caches, 8 bits": replace(
        BASE,
        ranges=True,
        rope_dim=0,
        latent_dim=192,
        scaled=128,
        cache_dtype="float8_e4m3fn",
        chosen=(15, 40, 17, 0, 1, 33, 9),
        extra=(0, 70, 3, 40, 33, 0, 17),
        sinks=True,
    ),
    "sinks": replace(BASE, sinks=True),
    "sinks, pairs of tiles": replace(BASE, chosen=(170, 0, 131, 64), top_k=260, heads=67, scattered=True, sinks=True),
    "float32 over bfloat16": replace(BASE, dtype="float32", cache_dtype="bfloat16"),
    "float16 over 8 bits": replace(BASE, dtype="float16", cache_dtype="float8_e4m3fn"),
}


def attend(backend: Backend, **static: Any) -> harness.Jitted:
    return backends.compiled(mla_sparse, backend, sm_scale=SM_SCALE, return_lse=True, **static)


def draw(backend: Backend, case: SparseCase = BASE) -> SparseInputs:
    return SparseInputs.draw(case, harness.fresh_rng(), backend.dtype)


@slow_cases(
    "mosaic-8 bits", "mosaic-40 heads, wide latents", "mosaic-bfloat16 over 8 bits", "mosaic-bfloat16",
    "mosaic-67 heads, pairs of tiles", "mosaic-two caches, wide", "triton-float16, latents of 96",
    "mosaic-8 bits, all columns are values, wide", "mosaic-two caches, 8 bits, all columns are values",
    "mosaic-8 bits, all columns are values",
)  # fmt: skip
@backends.every_case("mla_sparse", CASES)
@in_every_run(
    reference=all_but(
        "float16, latents of 96", "rotated columns of 32", "40 heads, wide latents",
        "67 heads, pairs of tiles", "bfloat16 over 8 bits", "pairs of tiles over 8 bits",
        "two caches, wide", "two caches, 8 bits", "8 bits, all columns are values, wide",
    ),
    xla=[
        "float32", "one slot", "nothing chosen", "none between slots", "garbage for none",
        "no rotated columns", "two caches with rotated columns", "8 bits, all columns are values",
        "two caches, 8 bits, all columns are values", "sinks", "ranges", "ranges of two caches",
    ],
    mosaic=all_but(
        "rows of all kinds", "nothing chosen", "none between slots", "pairs of tiles over 8 bits",
        "no rotated columns, wide", "two caches", "sinks, pairs of tiles", "ranges",
    ),
    triton=[
        "float32", "float16, latents of 96", "one slot", "garbage for none", "8 bits",
        "float32 over bfloat16", "float16 over 8 bits", "no rotated columns",
        "two caches with rotated columns", "sinks", "ranges of two caches",
    ],
)  # fmt: skip
@unsupported(
    mosaic={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float16, latents of 96": "takes latents of 128 to 512 columns",
        "rotated columns of 32": "and 0 or 64 rotated ones, got 128 and 32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "float16 over 8 bits": "one dtype|takes bfloat16 queries over quantised",
        "two caches, 8 bits": "takes one cache of latents with float32 scales, without learned sinks",
    },
    triton={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "float16 over 8 bits": "takes queries and rotated keys of one dtype",
        "two caches, 8 bits": "does not take two caches with float32 scales",
    },
)  # fmt: skip
def test_values(backend: Backend, name: str) -> None:
    """The result equals attention in NumPy, and has the same bits for poisoned and clean inputs.

    The tolerance of the cosine distance is `harness.ROUNDED_TWICE` for 8-bit latents. A token with a single key has the
    largest outputs, and all of its columns have the rounding error of one number: the weight times the scale of the
    key. In a simulation of 300 inputs, 2% exceeded `HALF_OUT.cosine`, and none did with unrounded weights.
    """
    inputs = draw(backend, CASES[name])
    exact = {"out_dtype": "float32"} if backend.name == "reference" else {}
    call = attend(backend, **exact)
    got = call(**inputs.arguments())
    of_output, of_lse = backend.variant.tolerance("float32" if exact else inputs.q.dtype)
    if len(inputs.pools[0].stored) > 1 and not exact:
        of_output = replace(of_output, cosine=harness.ROUNDED_TWICE)
    harness.assert_attention_close(got, inputs.expected(), (of_output, of_lse))
    harness.assert_same_bits(got, call(**inputs.arguments(poisoned=False)))


@pytest.mark.slow
@every_backend
@in_every_run("xla")
def test_all_keys_of_a_sequence_give_dense_attention(backend: Backend) -> None:
    """If each token selects all keys that it sees, the result equals `mla_decode`. The sequences have draft tokens,
    permuted pages and an absent page.
    """
    rng = harness.fresh_rng()
    scale = 1.0 if backend.dtype == "float32" else harness.HALF_SCALE
    spec = latent_cache_spec(num_pages=PAGES, page_size=PS, latent_dim=128, rope_dim=64, dtype=backend.dtype)
    cache = PagedLatent(jnp.asarray(scale * rng.standard_normal(spec.arrays["pages"].shape), backend.dtype))
    tables = jnp.array([[3, 1, 4, 9], [2, 6, -1, 5], [8, 7, 0, 0]], jnp.int32)
    kv_lens, queries = jnp.array([64, 50, 17], jnp.int32), 2
    q = jnp.asarray(rng.standard_normal((3, queries, 5, 192)) / scale, backend.dtype)
    want = mla_decode(q[..., :128], q[..., 128:], cache, tables, kv_lens, sm_scale=SM_SCALE, return_lse=True)
    last = (np.asarray(kv_lens)[:, None] - queries + np.arange(queries)).reshape(-1, 1)
    t = np.arange(64)[None]
    positions = jnp.asarray(np.where(t <= last, t, -1), jnp.int32)
    slots = token_slots(positions, tables, jnp.array([0, 2, 4, 6], jnp.int32), page_size=PS)
    packed = q.reshape(-1, 5, 192)
    got = attend(backend)(q_latent=packed[..., :128], q_rope=packed[..., 128:], cache=cache, slots=slots)
    want = want[0].reshape(6, 5, 128), want[1].reshape(6, 5)
    harness.assert_attention_close(got, want, backend.variant.tolerance(backend.dtype))


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_other_tokens_and_the_order_of_slots_change_little(backend: Backend) -> None:
    inputs = draw(backend)
    arguments, call = inputs.arguments(), attend(backend)
    out, lse = call(**arguments)
    alone = {name: arguments[name][5:6] for name in ("q_latent", "q_rope", "slots")}
    tolerances = backend.variant.tolerance(backend.dtype)
    harness.assert_attention_close(call(**arguments | alone), (out[5:6], lse[5:6]), tolerances)
    reverse = {"slots": arguments["slots"][:, ::-1]}
    harness.assert_attention_close(call(**arguments | reverse), (out, lse), tolerances)


@backends.every_backend("mla_sparse", backends.is_lean)
@in_every_run("xla", "mosaic")
def test_the_configuration_a_user_gets(backend: Backend) -> None:
    inputs = draw(backend)
    got = attend(backends.as_users_get(backend))(**inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), backend.variant.tolerance(backend.dtype))


# --- transformations and compiled programs


@every_backend
@in_every_run("xla")
def test_under_vmap_and_repeated(backend: Backend) -> None:
    rng, call = harness.fresh_rng(), attend(backend)
    drawn = [SparseInputs.draw(BASE, rng, backend.dtype).arguments() for _ in range(2)]
    transformations.assert_vmaps(call, drawn, backend.variant.tolerance(backend.dtype), over="q_latent")
    transformations.assert_repeats(call, drawn[0], backend.repeats)


@backends.every_backend("mla_sparse", backends.is_compiled)
@in_every_run("xla")
def test_exported(backend: Backend) -> None:
    transformations.assert_exports(attend(backend), draw(backend).arguments())


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_inside_a_scan(backend: Backend) -> None:
    arguments = draw(backend).arguments()
    tolerances = backend.variant.tolerance(backend.dtype)
    transformations.assert_scans(attend(backend), arguments, tolerances, cache="cache", over="q_latent")


@backends.every_backend("mla_sparse", backends.is_compiled)
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    calls = [draw(backend, CASES[name]).arguments() for name in ("rows of all kinds", "nothing chosen")]
    transformations.assert_traced_once(functools.partial(mla_sparse, sm_scale=SM_SCALE), backend.variant, calls)
    harness.assert_no_host_callbacks(attend(backend), **calls[0])
    assert "mla_sparse" in harness.scope_names(attend(backend), **calls[0])


@backends.every_backend("mla_sparse", backends.is_compiled_and_lean)
def test_memory_is_that_of_some_tokens(backend: Backend) -> None:
    """Temporary memory is at most five times the size of the float32 outputs (64 MiB). The selected latents of all
    2,048 tokens would take 4.5 GiB.
    """
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    used = harness.temp_bytes(
        attend(backends.as_users_get(backend)),
        q_latent=bf16((2048, 16, 512)),
        q_rope=bf16((2048, 16, 64)),
        cache=jax.eval_shape(lambda: PagedLatent(jnp.zeros((1024, 64, 576), jnp.bfloat16))),
        slots=jax.ShapeDtypeStruct((2048, 2048), jnp.int32),
    )
    assert used < 5 * (64 << 20)


# --- bad arguments

GOOD: dict[str, Any] = {
    "q_latent": jnp.zeros((4, 3, 128)),
    "q_rope": jnp.zeros((4, 3, 32)),
    "cache": PagedLatent(jnp.zeros((8, 4, 160))),
    "slots": jnp.zeros((4, 6), jnp.int32),
    "sm_scale": 0.1,
}
RANGE = SlotRange(jnp.zeros((2, 3), jnp.int32), *[jnp.zeros(4, jnp.int32)] * 3, size=6)
EXTRA = {"extra_slots": jnp.zeros((4, 6), jnp.int32)}


def records(latent_dim: int) -> PagedLatent:
    """Return records of DeepSeek-V4 with 512 columns, of which `latent_dim` are in fp8."""
    spec = latent_cache_spec(
        num_pages=2,
        page_size=3,
        latent_dim=latent_dim,
        rope_dim=512 - latent_dim,
        dtype=jnp.float8_e4m3fn,
        scale_dtype=jnp.float8_e8m0fnu,
    )
    return PagedLatent.allocate(spec)


BAD = {
    "q_latent of rank 4": ("q_latent", {"q_latent": jnp.zeros((4, 1, 3, 128))}),
    "q_rope of other heads": ("q_rope", {"q_rope": jnp.zeros((4, 2, 32))}),
    "q_rope of another dtype": ("q_rope", {"q_rope": jnp.zeros((4, 3, 32), jnp.bfloat16)}),
    "pages of another width": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 150)))}),
    "slots of other tokens": ("slots", {"slots": jnp.zeros((3, 6), jnp.int32)}),
    "float slots": ("slots", {"slots": jnp.zeros((4, 6))}),
    "sm_scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "no sm_scale": ("sm_scale", {"sm_scale": None}),
    "integer outputs": ("out_dtype", {"out_dtype": "int8"}),
    "rotated queries without rotated keys": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 128)))}),
    "no rotated queries": ("cache.pages", {"q_rope": None}),
    "a second cache without slots": ("extra_slots", {"extra_cache": PagedLatent(jnp.zeros((2, 3, 160)))}),
    "slots without a second cache": ("extra_slots", {"extra_slots": jnp.zeros((4, 6), jnp.int32)}),
    "a second cache of another width": (
        "extra_cache.pages",
        {"extra_cache": PagedLatent(jnp.zeros((2, 3, 150))), **EXTRA},
    ),
    "a second cache of another dtype": (
        "extra_cache.pages",
        {"extra_cache": PagedLatent(jnp.zeros((2, 3, 160), jnp.bfloat16)), **EXTRA},
    ),
    "a second cache with fewer columns in fp8": (
        "extra_cache.pages",
        {
            "q_latent": jnp.zeros((4, 3, 512), jnp.bfloat16),
            "q_rope": None,
            "cache": records(448),
            "extra_cache": records(384),
            **EXTRA,
        },
    ),
    "an array for a second cache": ("extra_cache", {"extra_cache": jnp.zeros((2, 3, 160)), **EXTRA}),
    "slots of other tokens in a second cache": (
        "extra_slots",
        {"extra_cache": PagedLatent(jnp.zeros((2, 3, 160))), "extra_slots": jnp.zeros((3, 6), jnp.int32)},
    ),
    "a range of other tokens": ("slots.first", {"slots": replace(RANGE, first=jnp.zeros(3, jnp.int32))}),
    "float positions in a range": ("slots.count", {"slots": replace(RANGE, count=jnp.zeros(4))}),
    "a range of no pages": ("slots.block_tables", {"slots": replace(RANGE, block_tables=jnp.zeros((2, 0), jnp.int32))}),
    "a range of no keys": ("slots.size", {"slots": replace(RANGE, size=0)}),
    "slots of a second cache next to a range": (
        "extra_slots",
        {"slots": RANGE, "extra_cache": PagedLatent(jnp.zeros((2, 3, 160))), **EXTRA},
    ),
    "a range next to slots": (
        "extra_slots",
        {"extra_cache": PagedLatent(jnp.zeros((2, 3, 160))), "extra_slots": RANGE},
    ),
    "sinks of other heads": ("sinks", {"sinks": jnp.zeros(4)}),
    "16-bit sinks": ("sinks", {"sinks": jnp.zeros(3, jnp.bfloat16)}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}:"):
        mla_sparse(**(GOOD | change))


def test_no_tokens_and_a_missing_implementation() -> None:
    empty = {name: GOOD[name][:0] for name in ("q_latent", "q_rope", "slots")}
    out, lse = mla_sparse(**GOOD | empty, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 3, 128), (0, 3))
    with pytest.raises(
        NotImplementedError, match="needs a GPU of compute capability 9.0|takes bfloat16 and float16 queries"
    ):
        mla_sparse(**GOOD, implementation="mosaic")
