"""Contract of `index_scores`, `select_top_k`, `index_top_k` and `write_index_keys`: every backend is tested with
unusual inputs.

The operations are the indexer of sparse attention: they score all keys of a token and select the keys with the highest
scores. Poisoned inputs have NaN, infinities or garbage in all elements that must not affect the result.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    PagedIndexKeys,
    entry_slots,
    index_cache_spec,
    index_scores,
    index_top_k,
    select_top_k,
    token_slots,
    window_slots,
    write_index_keys,
)
from tests.contract import backends, transformations
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.contract.index_case import SM_SCALE, IndexCase, IndexInputs, best
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

PS = 8
# Sequences of each kind: idle, decode, drafts, whole prompt, prompt chunk after a cached prefix, without new tokens.
BASE = IndexCase(kv_lens=(0, 1, PS, PS + 1, 5, 40, 72, 17), q_lens=(0, 1, 1, 3, 5, 12, 7, 0))
DECODE = replace(BASE, kv_lens=(0, 1, PS - 1, PS, 41, 72), q_lens=(0, 1, 1, 1, 1, 1), padding=0)
# In the Triton kernel, each tile of keys is in one page, and some programs score keys of two sequences.
LARGE_PAGES = replace(
    DECODE, kv_lens=(0, 1, 63, 64, 65, 190), page_size=64, pages_per_row=3, padding=1, absent_pages=True
)
SCORES = {
    "rows of all kinds": BASE,
    "decode": DECODE,
    "decode, pages of 64": LARGE_PAGES,
    "absent pages": replace(BASE, absent_pages=True),
    "trees of drafts": replace(BASE, tree=5, absent_pages=True),
    "entries of 4 tokens": replace(
        BASE, kv_lens=(0, 3, 4, 35, 8, 290, 140, 17), q_lens=(0, 1, 1, 9, 8, 12, 7, 0), ratio=4, absent_pages=True
    ),
    "all padding": replace(BASE, kv_lens=(0,) * 3, q_lens=(0,) * 3),
    "one head, pages of 16": replace(BASE, heads=1, page_size=16, pages_per_row=5),
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "float32": replace(BASE, dtype="float32"),
    "float32 over bfloat16": replace(BASE, dtype="float32", cache_dtype="bfloat16"),
    "bfloat16 over 8 bits": replace(BASE, dtype="bfloat16", cache_dtype="float8_e4m3fn"),
}
CHOICES = {
    "rows of all kinds": replace(BASE, exact=True),
    "trees of drafts": replace(BASE, exact=True, tree=5),
    "decode rows of trees": replace(DECODE, exact=True, tree=9),
    "decode, absent pages": replace(DECODE, exact=True, absent_pages=True),
    "decode, pages of 64, 8 bits": replace(
        LARGE_PAGES, exact=True, dtype="bfloat16", cache_dtype="float8_e4m3fn", absent_pages=False, tree=5
    ),
    "entries of 4 tokens": replace(
        BASE, exact=True, kv_lens=(0, 3, 4, 35, 8, 291, 140, 17), q_lens=(0, 1, 1, 9, 8, 12, 7, 0), ratio=4
    ),
    "decode, entries of 4 tokens": replace(
        DECODE, exact=True, kv_lens=(0, 1, 3, 4, 164, 291), ratio=4, absent_pages=True
    ),
    "bfloat16 over 8 bits": replace(BASE, exact=True, dtype="bfloat16", cache_dtype="float8_e4m3fn"),
}
TOP_K = 11
"""Number of selected keys: more than the short sequences have, fewer than the long sequences have, and no multiple of
the tile size.
"""


def call(op: Any, backend: Backend, **static: Any) -> harness.Jitted:
    return backends.compiled(op, backend, **static)


def draw(backend: Backend, case: IndexCase) -> IndexInputs:
    return IndexInputs.draw(case, harness.fresh_rng(), backend.dtype)


@slow_cases("triton-bfloat16 over 8 bits")
@backends.every_case("index_scores", SCORES)
@in_every_run(
    reference=all_but("decode", "decode, pages of 64"),
    xla=["absent pages", "trees of drafts", "entries of 4 tokens", "all padding", "float32"],
    triton=["float32", "float32 over bfloat16", "bfloat16 over 8 bits"],
)  # fmt: skip
@unsupported(
    triton={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
    },
)  # fmt: skip
def test_scores(backend: Backend, name: str) -> None:
    """Scores equal a computation in NumPy, and have the same bits for poisoned and clean inputs."""
    inputs = draw(backend, SCORES[name])
    scores = call(index_scores, backend, sm_scale=SM_SCALE, ratio=SCORES[name].ratio)
    got = scores(**inputs.arguments())
    # All backends sum in float32, also for 16-bit inputs, so one tolerance applies to all dtypes.
    harness.assert_close("scores", got, inputs.scores(), harness.Tolerance(1e-4, 1e-5, 1e-9))
    harness.assert_same_bits(got, scores(**inputs.arguments(poisoned=False)))


@slow_cases("triton-decode, absent pages", "triton-entries of 4 tokens", "xla-trees of drafts", "xla-rows of all kinds")
@backends.every_case("index_top_k", CHOICES)
@in_every_run(
    xla=["rows of all kinds", "trees of drafts", "entries of 4 tokens"],
    triton=["decode, absent pages", "entries of 4 tokens", "decode, entries of 4 tokens"],
)  # fmt: skip
def test_a_choice_is_exact(backend: Backend, name: str) -> None:
    """The selection equals a sort in NumPy, and has the same bits for poisoned and clean inputs.

    Scores are small integers without rounding, and many are equal, so the order of equal scores is tested too.
    """
    inputs = draw(backend, CHOICES[name])
    scores = inputs.scores()
    for top_k in (1, TOP_K, 200):
        choose = call(index_top_k, backend, sm_scale=SM_SCALE, top_k=top_k, ratio=CHOICES[name].ratio)
        got = choose(**inputs.arguments())
        np.testing.assert_array_equal(got, best(scores, top_k))
        harness.assert_same_bits(got, choose(**inputs.arguments(poisoned=False)))


@backends.every_backend("index_top_k")
@in_every_run("reference", "xla")
def test_a_choice_of_ordinary_scores(backend: Backend) -> None:
    """No unselected key has a higher score than a selected key, except for rounding errors."""
    inputs = draw(backend, replace(BASE, kv_lens=(72, 60), q_lens=(9, 1)))
    chosen = np.asarray(call(index_top_k, backend, sm_scale=SM_SCALE, top_k=TOP_K)(**inputs.arguments()))
    for positions, scores in zip(chosen[:10], inputs.scores(), strict=False):
        assert len(set(positions.tolist())) == TOP_K
        assert scores[positions].min() >= np.delete(scores, positions).max() - 1e-4
    assert (chosen[10:] == -1).all()


@backends.every_backend("index_top_k")
@in_every_run("xla")
def test_the_configuration_a_user_gets(backend: Backend) -> None:
    inputs, backend = draw(backend, CHOICES["rows of all kinds"]), backends.as_users_get(backend)
    got = call(index_top_k, backend, sm_scale=SM_SCALE, top_k=TOP_K)(**inputs.arguments())
    np.testing.assert_array_equal(got, best(inputs.scores(), TOP_K))
    scores = call(index_scores, backend, sm_scale=SM_SCALE)(**inputs.arguments())
    np.testing.assert_array_equal(scores, inputs.scores())


@backends.every_backend("select_top_k")
@in_every_run("reference", "xla")
def test_a_choice_among_equal_and_odd_scores(backend: Backend) -> None:
    rng, inf = harness.fresh_rng(), np.inf
    scores = rng.integers(-2, 3, (40, 30)).astype(np.float32)
    scores *= rng.choice(np.array([1, -1], np.float32), scores.shape)  # zeros of both signs
    scores[rng.random(scores.shape) < 0.3] = -inf
    scores[0], scores[1] = -inf, 0.0
    scores[2, :5] = inf
    for top_k in (1, 7, 30, 33):
        got = call(select_top_k, backend, top_k=top_k)(scores=scores)
        np.testing.assert_array_equal(got, best(scores, top_k))
    odd = np.array([[1, np.nan, inf, -np.nan, -inf, 5]], np.float32)
    assert call(select_top_k, backend, top_k=3)(scores=odd).tolist() == [[1, 2, 3]]


@backends.every_backend("index_top_k")
@in_every_run()
def test_a_token_chooses_alike_in_a_chunk_and_alone(backend: Backend) -> None:
    """A token selects the same keys in a chunk of 61 tokens and as the only new token of a sequence."""
    inputs = draw(backend, replace(CHOICES["rows of all kinds"], kv_lens=(61,), q_lens=(61,), padding=0))
    choose = call(index_top_k, backend, sm_scale=SM_SCALE, top_k=TOP_K)
    arguments = inputs.arguments()
    chunk = np.asarray(choose(**arguments))
    rows = {
        "block_tables": np.repeat(inputs.tables, 61, axis=0),
        "cu_q_lens": np.arange(62, dtype=np.int32),
        "kv_lens": np.arange(1, 62, dtype=np.int32),
    }
    np.testing.assert_array_equal(choose(**arguments | rows), chunk)


# --- transformations and compiled programs


@pytest.mark.slow
@backends.every_backend("index_top_k")
@in_every_run("xla")
def test_under_vmap(backend: Backend) -> None:
    rng, choose = harness.fresh_rng(), call(index_top_k, backend, sm_scale=SM_SCALE, top_k=TOP_K)
    drawn = [IndexInputs.draw(CHOICES["rows of all kinds"], rng, backend.dtype).arguments() for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(each) for each in x]), *drawn)
    got = jax.jit(jax.vmap(lambda each: choose(**each)))(stacked)
    harness.assert_same_bits(got, np.stack([choose(**each) for each in drawn]))


@backends.every_backend("index_top_k", backends.is_compiled)
@in_every_run()
def test_exported(backend: Backend) -> None:
    arguments = draw(backend, CHOICES["rows of all kinds"]).arguments()
    transformations.assert_exports(call(index_top_k, backend, sm_scale=SM_SCALE, top_k=TOP_K), arguments)
    transformations.assert_exports(call(index_scores, backend, sm_scale=SM_SCALE), arguments)


@backends.every_backend("index_top_k", backends.is_compiled)
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    drawn = [draw(backend, case).arguments() for case in (BASE, replace(BASE, kv_lens=(3, 1, 9, 3, 5, 70, 72, 0)))]
    options = {"sm_scale": SM_SCALE, "top_k": TOP_K}
    transformations.assert_traced_once(functools.partial(index_top_k, **options), backend.variant, drawn)
    harness.assert_no_host_callbacks(call(index_top_k, backend, **options), **drawn[0])
    assert "index_top_k" in harness.scope_names(call(index_top_k, backend, **options), **drawn[0])


@pytest.mark.parametrize("tokens", [64, 2048], ids=["decode", "chunk"])
@backends.every_backend("index_top_k", backends.is_compiled_and_lean)
@in_every_run(xla=["decode"])
def test_memory_does_not_grow_with_the_context(backend: Backend, tokens: int) -> None:
    """Temporary memory is the same for contexts of 8k and 128k tokens. With 2,048 new tokens and 128k keys, an array of
    all scores would take 1 GiB.
    """
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.float32, jnp.int32))
    rows = tokens if tokens == 64 else 1

    def temp_bytes(pages: int) -> int:
        return harness.temp_bytes(
            call(index_top_k, backends.as_users_get(backend), top_k=2048),
            q=jax.ShapeDtypeStruct((tokens, 64, 128), jnp.bfloat16),
            weights=f32((tokens, 64)),
            index=jax.eval_shape(lambda: PagedIndexKeys(jnp.zeros((4096, 64, 128), jnp.bfloat16))),
            block_tables=i32((rows, pages)),
            cu_q_lens=i32((rows + 1,)),
            kv_lens=i32((rows,)),
        )

    narrow, wide = temp_bytes(128), temp_bytes(2048)
    assert wide <= narrow + 4096
    assert wide < 256 << 20


# --- writing


def stored(keys: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    """Return the arrays of the cache for these keys. fp8 keys are divided by a scale per token: the largest magnitude
    of the key divided by 448, or 1 if the key is 0.
    """
    if dtype != "float8_e4m3fn":
        return (keys.astype(dtype),)
    amax = np.abs(keys).max(axis=-1, keepdims=True).astype(np.float32)
    scale = np.where(amax == 0, np.float32(1), amax / np.float32(448))
    return np.clip(keys / scale, -448, 448).astype(np.float32).astype(jnp.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@backends.every_backend("write_index_keys")
@in_every_run("xla", "triton")
def test_written_bits(backend: Backend, dtype: str) -> None:
    """Tokens with a valid slot are written. All other bits of the cache stay the same, also bits of NaNs."""
    rng = harness.fresh_rng()
    spec = index_cache_spec(num_pages=6, page_size=PS, index_dim=32, dtype=dtype)
    before = {name: harness.any_bits(rng, a.shape, a.dtype) for name, a in spec.arrays.items()}
    keys = harness.normal(rng, (9, 32), "float32")
    keys[4] = 0
    slots = rng.permutation(6 * PS)[:9].astype(np.int32)
    slots[[2, 5, 7]] = -1, 6 * PS, 2**31 - 1
    index = PagedIndexKeys(**{name: jnp.asarray(a) for name, a in before.items()})
    got = call(write_index_keys, backend)(index=index, keys=keys, slots=slots)
    kept = (slots >= 0) & (slots < 6 * PS)
    for name, values in zip(before, stored(keys, dtype), strict=True):
        before[name].reshape(6 * PS, -1)[slots[kept]] = values[kept]
    harness.assert_same_bits(jax.tree.leaves(got), list(before.values()))


# fp8 needs a GPU: the CPU backend of XLA may allocate a second copy of an fp8 pool, and always does since jax 0.12.
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float8_e4m3fn", marks=pytest.mark.gpu)])
def test_a_write_is_in_place(dtype: str) -> None:
    spec = index_cache_spec(num_pages=512, page_size=16, index_dim=128, dtype=dtype)
    index = jax.eval_shape(lambda: PagedIndexKeys.allocate(spec))
    write = jax.jit(functools.partial(write_index_keys, implementation="xla"), donate_argnums=0)
    keys, slots = jax.ShapeDtypeStruct((4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    harness.assert_stays_put(write, index.keys, index, keys, slots)


# --- slots, and bad arguments


def test_slots_of_positions() -> None:
    tables = jnp.array([[5, 0, -1], [3, 2**30, 7]], jnp.int32)
    positions = jnp.array([[0, 7, 8, 11], [4, 24, -1, -7], [0, 8, 9, 17], [1, 2, 3, 4]], jnp.int32)
    got = token_slots(positions, tables, jnp.array([0, 2, 3], jnp.int32), page_size=8)
    assert got.tolist() == [[40, 47, 0, 3], [44, -1, -1, -1], [24, -1, -1, 57], [-1] * 4]
    assert token_slots(positions, tables[:0], jnp.zeros(1, jnp.int32), page_size=8).tolist() == [[-1] * 4] * 4


def test_slots_of_windows_and_entries() -> None:
    """Slots equal loops over positions: with permuted, shared and absent pages, short tables, padding and idle rows."""
    page_size, window, ratio = 4, 6, 3
    tables = np.array([[5, 0, -1, 7, 2], [3, 5, 2**30, 1, 9], [8, 8, 8, 8, 8], [4, 0, 6, -7, -1]], np.int32)
    kv_lens, q_lens = np.array([20, 2, 0, 23]), np.array([7, 2, 0, 5])
    given: list[Any] = [tables, np.cumsum((0, *q_lens)).astype(np.int32), kv_lens.astype(np.int32)]
    positions = [(s, n - q + i) for s, (n, q) in enumerate(zip(kv_lens, q_lens, strict=True)) for i in range(q)]
    positions += [(0, -1)] * 2  # padding

    def slot(sequence: int, position: int) -> int:
        page = tables[sequence, position // page_size] if position // page_size < tables.shape[1] else -1
        return page * page_size + position % page_size if 0 <= page < 2**29 else -1

    def listed(seen: list[list[int]], width: int) -> list[list[int]]:
        slots = [[slot(s, each) for each in row] for (s, _), row in zip(positions, seen, strict=True)]
        return [row + [-1] * (width - len(row)) for row in slots]

    got = window_slots(*given, page_size=page_size, window=window, length=16)
    assert got.tolist() == listed([list(range(max(p - window + 1, 0), p + 1)) for _, p in positions], window)
    got = entry_slots(*given, ratio=ratio, page_size=page_size, length=16)
    assert got.tolist() == listed([list(range((p + 1) // ratio)) for _, p in positions], 20)
    none: list[Any] = [tables[:0], np.zeros(1, np.int32), np.zeros(0, np.int32)]
    assert window_slots(*none, page_size=page_size, window=2, length=2).tolist() == [[-1] * 2] * 2
    assert entry_slots(*none, ratio=ratio, page_size=page_size, length=1).tolist() == [[-1] * 20]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("window", {"window": 0}),
        ("page_size", {"page_size": 0}),
        ("length", {"length": -1}),
        ("block_tables", {"block_tables": jnp.zeros((2, 3), jnp.int32)}),
        ("kv_lens", {"kv_lens": jnp.zeros((1, 1), jnp.int32)}),
        ("cu_q_lens", {"cu_q_lens": jnp.zeros(3, jnp.int32)}),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments_of_slots_are_named(argument: str, change: dict[str, Any]) -> None:
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    arguments: dict[str, Any] = {"block_tables": ints((1, 3)), "cu_q_lens": ints(2), "kv_lens": ints(1)}
    arguments |= {"page_size": 4, "length": 5}
    with pytest.raises(ValueError, match=f"^{argument}:"):
        window_slots(**arguments | {"window": 2} | change)
    change = {"ratio" if name == "window" else name: value for name, value in change.items()}
    with pytest.raises(ValueError, match=f"^{'ratio' if argument == 'window' else argument}:"):
        entry_slots(**arguments | {"ratio": 2} | change)


def good() -> dict[str, Any]:
    arrays = IndexInputs.draw(BASE, np.random.default_rng(0)).arguments()
    return jax.tree.map(jnp.asarray, arrays)


E4M3_KEYS = jnp.zeros((64, PS, 32), jnp.float8_e4m3fn)
BAD = {
    "q of rank 2": ("q", {"q": jnp.zeros((32, 32))}),
    "weights of other heads": ("weights", {"weights": jnp.ones((32, 4))}),
    "16-bit weights": ("weights", {"weights": jnp.ones((32, 3), jnp.bfloat16)}),
    "an array for a cache": ("index", {"index": jnp.zeros((64, PS, 32))}),
    "keys of another width": ("index.keys", {"index": PagedIndexKeys(jnp.zeros((64, PS, 16)))}),
    "integer keys": ("index.keys", {"index": PagedIndexKeys(jnp.zeros((64, PS, 32), jnp.int8))}),
    "8 bits without scales": ("index.scale", {"index": PagedIndexKeys(E4M3_KEYS)}),
    "scales of groups": ("index.scale", {"index": PagedIndexKeys(E4M3_KEYS, jnp.ones((64, PS, 2)))}),
    "32 bits with scales": (
        "index.scale",
        {"index": PagedIndexKeys(jnp.zeros((64, PS, 32)), jnp.ones((64, PS, 1)))},
    ),
    "float tables": ("block_tables", {"block_tables": jnp.zeros((8, 9))}),
    "sums of other sequences": ("cu_q_lens", {"cu_q_lens": jnp.zeros((8,), jnp.int32)}),
    "lengths of other sequences": ("kv_lens", {"kv_lens": jnp.zeros((9,), jnp.int32)}),
    "a mask of other tokens": ("draft_mask", {"draft_mask": jnp.ones((31, 4), bool)}),
    "a mask of numbers": ("draft_mask", {"draft_mask": jnp.ones((32, 4))}),
    "a mask for entries": ("draft_mask", {"draft_mask": jnp.ones((32, 4), bool), "ratio": 4}),
    "a ratio of 0": ("ratio", {"ratio": 0}),
    "a scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "top_k of 0": ("top_k", {"top_k": 0}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}:"):
        index_top_k(**(good() | {"top_k": 4} | change))


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments_of_the_others_are_named() -> None:
    index = good()["index"]
    for wrong, message in (
        (lambda: select_top_k(jnp.zeros((3, 4), jnp.bfloat16), top_k=2), "scores: expected dtype float32"),
        (lambda: select_top_k(jnp.zeros((3, 4)), top_k=-1), "top_k: expected at least 1"),
        (lambda: write_index_keys(index, jnp.zeros((2, 16)), jnp.zeros(2, jnp.int32)), "keys: expected shape"),
        (lambda: write_index_keys(index, jnp.zeros((2, 32)), jnp.zeros(3, jnp.int32)), "slots: expected shape"),
        (
            lambda: index_cache_spec(num_pages=2, page_size=8, index_dim=4, dtype=jnp.int8),
            "dtype must be one of .* got int8",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrong()


def test_an_implementation_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match="index_top_k has no 'mosaic' implementation; it has triton, xla, reference"
    ):
        index_top_k(**good(), top_k=4, implementation="mosaic")
