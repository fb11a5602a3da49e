"""Contract suite of `mla_prefill`: the result equals attention to all keys.

It must not depend on the number of prefix tokens that are expanded at a time, nor on the form: expanded (latents become
keys and values of each head) or absorbed (W_UK and W_UV are multiplied into queries and outputs).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedLatent, latent_cache_spec, merge_states, mla_decode, mla_prefill, write_latent
from pallas_attn.ops.mla_prefill import composition, config
from pallas_attn.runtime import dispatch
from tests.contract import naive, transformations
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Implementations without kernels of both `ragged_attention` and `gather_latent`. test_mla_prefill_mosaic.py tests the
# kernels.
PORTABLE = [
    name
    for name in dispatch.implementations("ragged_attention")
    if name in dispatch.implementations("gather_latent") and name not in dispatch.KERNELS
]


def slow_if_reference(name: str, *values: Any, case: str | None = None, unless: bool = False) -> Any:
    """Return `pytest.param` for implementation `name`. The reference implementation is marked slow, unless `unless`.

    `mla_prefill` is composed of other operations, whose suites test their reference implementations in `make test`.
    """
    marks = [pytest.mark.slow] if name == "reference" and not unless else []
    return pytest.param(harness.VARIANTS[name], *values, id=name if case is None else f"{name}-{case}", marks=marks)


every_variant = pytest.mark.parametrize("variant", [slow_if_reference(name) for name in PORTABLE])
bounded_variant = harness.variants(name for name in PORTABLE if name != "reference")

SM_SCALE = 0.2
PS, TABLE_WIDTH = 4, 8


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """One call of `mla_prefill`.

    Attributes:
      cached, new: numbers of cached and of new tokens of each sequence.
        tokens: T of the queries. Queries after the new tokens of all sequences are padding.
        table_width: number of columns of the block table.
        num_pages: pages of the pool.
        window, soft_cap: arguments of the call.
        value_scale: factor of the latents and inverse factor of the queries; below 1 for 16-bit inputs, see
        `harness.HALF_SCALE`.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    tokens: int = 24
    table_width: int = TABLE_WIDTH
    num_pages: int = 48
    heads: int = 3
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 12
    latent_dim: int = 32
    dtype: str = "float32"
    cache_dtype: str | None = None
    value_scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case with drawn values. `pages` have the cached tokens. The mask `dead` has the slots without a cached
    token.
    """

    case: PrefillCase
    rng: np.random.Generator
    q: np.ndarray
    latent_new: np.ndarray
    pages: np.ndarray
    w_uk: np.ndarray
    w_uv: np.ndarray
    tables: np.ndarray
    dead: np.ndarray

    @staticmethod
    def draw(case: PrefillCase, rng: np.random.Generator) -> Inputs:
        width = case.latent_dim + case.rope_dim
        q = rng.standard_normal((case.tokens, case.heads, case.nope_dim + case.rope_dim)) / case.value_scale
        latent_new = rng.standard_normal((case.tokens, width)) * case.value_scale
        pages = rng.standard_normal((case.num_pages, PS, width)) * case.value_scale
        w_uk, w_uv = (
            (rng.standard_normal((case.heads, rows, case.latent_dim)) * case.latent_dim**-0.5).astype(case.dtype)
            for rows in (case.nope_dim, case.value_dim)
        )
        prefix = np.arange(case.table_width * PS) < np.array(case.cached)[:, None, None]
        size = {"page_size": PS, "num_pages": case.num_pages}
        tables = harness.paginate(rng, prefix, **size)
        dead = harness.dead_slots(tables, prefix, **size)[:, 0]
        cache_dtype = case.cache_dtype or case.dtype
        latents = latent_new.astype(cache_dtype), pages.astype(cache_dtype)
        return Inputs(case, rng, q.astype(case.dtype), *latents, w_uk, w_uv, tables, dead)

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments. Elements that must not affect the result are NaN or garbage if `poisoned`,
        otherwise 0.
        """
        fill = harness.poison if poisoned else lambda _, *arrays: harness.zero(*arrays)
        padding = np.arange(self.case.tokens) >= sum(self.case.new)
        q = fill(self.rng, self.q, padding)
        return {
            "q_nope": q[..., : self.case.nope_dim],
            "q_rope": q[..., self.case.nope_dim :],
            "latent_new": fill(self.rng, self.latent_new, padding),
            "cache": PagedLatent(jnp.asarray(fill(self.rng, self.pages, self.dead))),
            "w_uk": self.w_uk,
            "w_uv": self.w_uv,
            "block_tables": self.tables,
            "cu_q_lens": np.cumsum((0, *self.case.new), dtype=np.int32),
            "kv_lens": np.array(self.case.cached, np.int32) + np.array(self.case.new, np.int32),
        }

    def expected(self) -> np.ndarray:
        """Compute the output [T, Hq, v] in float64. Keys and values are rounded to the dtype of the queries."""
        case = self.case
        out, start = np.zeros((*self.q.shape[:2], case.value_dim)), 0
        for s, (cached, new) in enumerate(zip(case.cached, case.new, strict=True)):
            token = np.arange(cached)
            prefix = self.pages[self.tables[s, token // PS], token % PS]
            latent = np.concatenate([prefix, self.latent_new[start : start + new]]).astype(np.float64)
            normed, rotated = latent[:, : case.latent_dim], latent[:, None, case.latent_dim :]
            k_nope = np.einsum("ul,hnl->uhn", normed, self.w_uk.astype(np.float64))
            k = np.concatenate([k_nope, np.repeat(rotated, case.heads, axis=1)], axis=2)
            v = np.einsum("ul,hvl->uhv", normed, self.w_uv.astype(np.float64))
            k, v = (x.astype(case.dtype).astype(np.float64) for x in (k, v))
            for i in range(new):
                end = cached + i + 1
                seen = slice(0 if case.window is None else max(0, end - case.window), end)
                out[start + i], _ = naive.attend(self.q[start + i], k[seen], v[seen], SM_SCALE, soft_cap=case.soft_cap)
            start += new
        return out


def prefill(variant: Variant, piece_tokens: int | None = None, **options: Any) -> harness.Jitted:
    return harness.compiled(mla_prefill, variant, sm_scale=SM_SCALE, piece_tokens=piece_tokens, **options)


def assert_close(variant: Variant, case: PrefillCase, got: Any, want: Any) -> None:
    harness.assert_close("output", got, want, variant.tolerance(case.dtype)[0])


def check(variant: Variant, case: PrefillCase, piece_tokens: int | None = None, **options: Any) -> None:
    """Assert that poisoned inputs change no bit, that the output of padding is 0, and that the result agrees with
    numpy.
    """
    inputs = Inputs.draw(case, harness.fresh_rng())
    options |= {name: option for name in ("window", "soft_cap") if (option := getattr(case, name)) is not None}
    attend = prefill(variant, piece_tokens, **options)
    got = attend(**inputs.arguments())
    harness.assert_same_bits(got, attend(**inputs.arguments(poisoned=False)))
    assert not np.asarray(got)[sum(case.new) :].any()
    assert got.dtype == case.dtype
    assert_close(variant, case, got, inputs.expected())


LENGTHS = {
    "nothing cached": ((0, 0, 0, 0), (7, 1, 4, 9)),
    "whole pages": ((4, 8, 0, 12), (5, 4, 1, 8)),
    "parts of pages": ((1, PS - 1, PS + 1, 10), (2, 3, 6, 1)),
    "one long prefix": ((TABLE_WIDTH * PS, 0, 3, 1), (2, 5, 1, 3)),
    "every table full": ((TABLE_WIDTH * PS,) * 4, (6, 6, 6, 6)),
    "one new token each": ((7, 8, 9, 0), (1, 1, 1, 1)),
    "idle between": ((0, 9, 0, 6), (0, 3, 0, 2)),
    "prefixes without new tokens": ((9, 4, 0, 8), (0, 3, 0, 2)),
    "all idle": ((0, 0, 0, 0), (0, 0, 0, 0)),
}
BASE = PrefillCase(*LENGTHS["parts of pages"])
CHUNKS = {"one page": PS, "rounded up to three pages": 2 * PS + 1, "all": 1000}


@slow_cases(
    "xla-one page-nothing cached", "xla-one page-whole pages",
    "xla-rounded up to three pages-nothing cached", "xla-rounded up to three pages-whole pages",
    "xla-all-nothing cached", "reference-all-nothing cached",
)  # fmt: skip
@pytest.mark.parametrize(("cached", "new"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("variant", "piece_tokens"),
    [
        slow_if_reference(name, tokens, case=chunks, unless=chunks == "all")
        for name in PORTABLE
        for chunks, tokens in CHUNKS.items()
    ],
)
def test_expanded_form_agrees_with_numpy(
    variant: Variant, piece_tokens: int, cached: tuple[int, ...], new: tuple[int, ...]
) -> None:
    check(variant, replace(BASE, cached=cached, new=new), piece_tokens, absorbed=False)


@slow_cases("reference-all idle", "xla-nothing cached")
@pytest.mark.parametrize(
    ("variant", "cached", "new"),
    [
        slow_if_reference(name, *lengths, case=which, unless=which == "all idle")
        for name in PORTABLE
        for which, lengths in LENGTHS.items()
    ],
)
def test_absorbed_form_agrees_with_numpy(variant: Variant, cached: tuple[int, ...], new: tuple[int, ...]) -> None:
    check(variant, replace(BASE, cached=cached, new=new, soft_cap=3.0), absorbed=True)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of new tokens per block. The absorbed form computes the new tokens in
    blocks.
    """

    def set_to(tokens: int) -> None:
        monkeypatch.setattr(config, "block_tokens", lambda num_tokens, heads: min(num_tokens, tokens))

    return set_to


@slow_cases("xla-5-3", "xla-5-130", "xla-16-3", "xla-16-130")
@pytest.mark.parametrize("heads", [3, 130])
@pytest.mark.parametrize("tokens", [5, 16])
@every_variant
def test_absorbed_blocks_agree_with_numpy(
    variant: Variant, blocks: Callable[[int], None], tokens: int, heads: int
) -> None:
    """If blocks do not divide the tokens, the last block starts earlier and includes tokens of the block before. In the
    last call of the test, no sequence of a block has both new and cached tokens.
    """
    blocks(tokens)
    for lengths in ("parts of pages", "one long prefix", "prefixes without new tokens", "nothing cached"):
        cached, new = LENGTHS[lengths]
        check(variant, replace(BASE, heads=heads, cached=cached, new=new), absorbed=True)
    check(variant, replace(BASE, heads=heads, cached=(0, 9, 0, 0), new=(14, 3, 4, 3)), absorbed=True)


def test_last_block_includes_earlier_tokens() -> None:
    """Tokens that the block before has already computed belong to no sequence in the last block."""
    block = composition.TokenBlock(jnp.array([0, 14, 17, 21, 24], jnp.int32), jnp.int32(22), 4, 24)
    assert block.cu_q_lens.tolist() == [2, 2, 2, 2, 4]
    assert block.take(jnp.arange(24)).tolist() == [20, 21, 22, 23]
    assert block.put(jnp.zeros(24, jnp.int32), jnp.arange(1, 5))[18:].tolist() == [0, 0, 1, 2, 3, 4]


@slow_cases("xla-50")
@pytest.mark.parametrize("heads", [50, 130])
@every_variant
def test_absorbed_form_of_many_heads_agrees_with_numpy(variant: Variant, heads: int) -> None:
    """The absorbed form calls `mla_decode` with two tokens per row for 50 heads, and with one for 130 heads."""
    check(variant, replace(BASE, heads=heads, cached=(9, 4, 0, 8), new=(1, 3, 0, 2)), absorbed=True)


@pytest.fixture
def max_absorbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the maximum average number of new tokens for which the absorbed form is chosen."""

    def set_to(most: int) -> None:
        monkeypatch.setattr(composition, "max_absorbed_tokens", lambda *_: most)

    return set_to


AVERAGES = {
    "exactly the limit": ((0, 13, 28, 8), (6, 6, 6, 6), True),
    "more new tokens for the longest prefix": ((0, 13, 28, 8), (3, 2, 14, 5), False),
    "more new tokens without a prefix": ((0, 13, 28, 8), (14, 5, 3, 2), True),
    "sums beyond 2**24": ((0, 2**30, 2**30, 0), (0, 4, 9, 0), False),
}


@pytest.mark.parametrize(("cached", "new", "is_short"), AVERAGES.values(), ids=AVERAGES)
def test_form_follows_the_average_of_new_tokens(cached: tuple[int, ...], new: tuple[int, ...], is_short: bool) -> None:
    """The absorbed form is chosen if the average number of new tokens per sequence, weighted by cached tokens, is at
    most 6.
    """
    decide = jax.jit(lambda cu_q_lens, cached: composition.is_short(6, cu_q_lens, cached))
    assert decide(np.cumsum((0, *new), dtype=np.int32), np.array(cached, np.int32)) == is_short


@slow_cases("xla-(0, 28, 2, 1)")
@slow_cases("xla-(0, 13, 28, 8)")
@pytest.mark.parametrize("cached", [(0, 13, 28, 8), (0, 28, 2, 1), (0, 0, 0, 0)], ids=str)
@every_variant
def test_form_chosen_on_the_device(
    variant: Variant, max_absorbed: Callable[..., None], blocks: Callable[[int], None], cached: tuple[int, ...]
) -> None:
    max_absorbed(6)
    blocks(10)
    check(variant, replace(BASE, cached=cached, new=(7, 8, 4, 4)), PS)


@slow_cases("24-23-scopes1", "23-24-scopes2")
@pytest.mark.parametrize(
    ("most", "block", "scopes"),
    [
        (24, 24, (True, False)),
        (24, 23, (True, True)),
        (23, 24, (True, True)),
        (1, 24, (True, True)),
        (0, 24, (False, True)),
    ],
)
def test_forms_that_are_compiled(
    max_absorbed: Callable[..., None],
    blocks: Callable[[int], None],
    most: int,
    block: int,
    scopes: tuple[bool, bool],
) -> None:
    """A call with 24 tokens compiles the absorbed form (`mla_decode`), the expanded form (`gather_latent`), or both."""
    max_absorbed(most)
    blocks(block)
    arguments = jax.tree.map(jnp.asarray, Inputs.draw(BASE, harness.fresh_rng()).arguments())
    names = harness.scope_names(jax.jit(functools.partial(mla_prefill, sm_scale=SM_SCALE)), **arguments)
    assert ("mla_decode" in names, "gather_latent" in names) == scopes


@slow_cases("xla-absorbed")
@pytest.mark.parametrize("absorbed", [None, True], ids=["expanded", "absorbed"])
@every_variant
def test_any_lengths(variant: Variant, blocks: Callable[[int], None], absorbed: bool | None) -> None:
    blocks(7)
    rng = harness.fresh_rng()
    for _ in range(15):
        cached = rng.integers(0, TABLE_WIDTH * PS + 1, 4) * rng.integers(0, 2, 4)
        new = rng.multinomial(rng.integers(25), [0.25] * 4)
        check(variant, replace(BASE, cached=tuple(cached.tolist()), new=tuple(new.tolist())), PS, absorbed=absorbed)


DTYPES = {
    "bfloat16": replace(BASE, dtype="bfloat16", value_scale=harness.HALF_SCALE),
    "bfloat16 cache, float32 queries": replace(BASE, cache_dtype="bfloat16"),
}


@slow_cases("xla-bfloat16")
@pytest.mark.parametrize("case", DTYPES.values(), ids=DTYPES)
@every_variant
def test_dtypes(variant: Variant, case: PrefillCase) -> None:
    check(variant, case, PS)


FEW_WINDOWS, MORE_WINDOWS = [1, PS + 2, 2**31 - 1], [2, PS, 3 * PS, 1000]


@slow_cases("xla-2147483647")
@pytest.mark.parametrize("window", [*FEW_WINDOWS, *(pytest.param(w, marks=pytest.mark.slow) for w in MORE_WINDOWS)])
@every_variant
def test_windows(variant: Variant, window: int) -> None:
    """The windows begin among the new tokens, inside a page, at the start of a page, and before all tokens."""
    check(variant, replace(BASE, cached=(0, 13, 28, 8), new=(3, 1, 6, 9), window=window, soft_cap=2.0))


@pytest.mark.slow
@every_variant
def test_windows_over_an_fp8_cache(variant: Variant) -> None:
    """The result does not depend on the chunks of a prompt, because new tokens are rounded like tokens in the cache."""
    rng = harness.fresh_rng()
    spec = latent_cache_spec(num_pages=8, page_size=PS, latent_dim=128, rope_dim=8, dtype="float8_e4m3fn")
    q, latent = (jnp.asarray(rng.standard_normal((12, *shape)), jnp.float32) for shape in ((3, 24), (136,)))
    weights = {"w_uk": jnp.ones((3, 16, 128)) / 11, "w_uv": jnp.asarray(rng.standard_normal((3, 12, 128)), jnp.float32)}
    attend = prefill(variant, window=5)

    def step(cache: PagedLatent, start: int, end: int) -> Any:
        lens = {"cu_q_lens": jnp.array([0, end - start], jnp.int32), "kv_lens": jnp.array([end], jnp.int32)}
        table = jnp.array([[6, 2, 5]], jnp.int32)
        queries = {"q_nope": q[start:end, :, :16], "q_rope": q[start:end, :, 16:], "latent_new": latent[start:end]}
        out = attend(**queries, **weights, **lens, cache=cache, block_tables=table)
        position = np.arange(start, end)
        return out, write_latent(cache, latent[start:end], table[0, position // PS] * PS + position % PS)

    want, _ = step(PagedLatent.allocate(spec), 0, 12)
    first, cache = step(PagedLatent.allocate(spec), 0, 7)
    second, _ = step(cache, 7, 12)
    harness.assert_close("output", jnp.concatenate([first, second]), want, harness.F32_OUT)


def test_window_needs_latent_new_and_the_expanded_form() -> None:
    arguments = jax.tree.map(jnp.asarray, Inputs.draw(BASE, harness.fresh_rng()).arguments())
    with pytest.raises(NotImplementedError, match="^absorbed: takes None or False with a window"):
        mla_prefill(**arguments, sm_scale=SM_SCALE, window=3, absorbed=True)
    arguments |= {"latent_new": None}
    with pytest.raises(NotImplementedError, match="^window: takes None without latent_new"):
        mla_prefill(**arguments, sm_scale=SM_SCALE, window=3)


@slow_cases("xla")
@every_variant
def test_widths_of_deepseek_with_default_settings(variant: Variant) -> None:
    widths = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}
    check(Variant(variant.implementation), replace(BASE, heads=2, value_scale=0.5, **widths))


@slow_cases("xla")
@every_variant
def test_error_does_not_grow_with_the_number_of_chunks(variant: Variant) -> None:
    """The prefix is expanded in 64 steps. If partial results were rounded to bfloat16, the errors would add up to
    several times the tolerance.
    """
    long = PrefillCase(
        (253,), (3,), tokens=3, table_width=64, num_pages=65, dtype="bfloat16", value_scale=harness.HALF_SCALE
    )
    check(variant, long, PS)


# --- independence of other sequences and of the chunks of a prompt


@every_variant
def test_new_tokens_may_be_in_the_pages_already(variant: Variant) -> None:
    inputs = Inputs.draw(replace(BASE, cached=(0, 3, 4, 17), new=(4, 6, 1, 9)), harness.fresh_rng())
    own_pages = 1 + inputs.rng.permutation(inputs.case.num_pages - 1)[: inputs.tables.size].reshape(inputs.tables.shape)
    inputs = replace(inputs, tables=own_pages.astype(np.int32))
    arguments = inputs.arguments(poisoned=False) | {"cache": PagedLatent(jnp.asarray(inputs.pages))}
    position = np.concatenate([c + np.arange(n) for c, n in zip(inputs.case.cached, inputs.case.new, strict=True)])
    sequence = np.repeat(np.arange(4), inputs.case.new)
    slots = np.full(inputs.case.tokens, -1, np.int32)
    slots[: position.size] = inputs.tables[sequence, position // PS] * PS + position % PS
    written = write_latent(arguments["cache"], jnp.asarray(inputs.latent_new), jnp.asarray(slots))
    got = prefill(variant, PS)(**(arguments | {"cache": written}))
    harness.assert_same_bits(got, prefill(variant, PS)(**arguments))
    assert_close(variant, inputs.case, got, inputs.expected())


@pytest.mark.slow
@slow_cases("xla-expanded")
@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@every_variant
def test_prefix_and_new_tokens_merge_to_the_whole(variant: Variant, absorbed: bool) -> None:
    """Attention to the prefixes (one is empty) and attention to the new tokens are merged with `merge_states`."""
    case = PrefillCase(cached=(0, 13, 28), new=(3, 1, 6))
    inputs = Inputs.draw(case, harness.fresh_rng())
    arguments = inputs.arguments()
    attend = prefill(variant, 8, return_lse=True, absorbed=absorbed)
    whole, lse = attend(**arguments)
    prefix = attend(**arguments | {"latent_new": None, "kv_lens": np.array(case.cached, np.int32)})
    chunk = attend(**arguments | {"kv_lens": np.array(case.new, np.int32)})
    merged, merged_lse = merge_states(*(jnp.stack(both) for both in zip(prefix, chunk, strict=True)))
    assert_close(variant, case, merged, whole)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.asarray(prefix[1])[:3]).all()
    assert np.isneginf(np.asarray(lse)[10:]).all()


@every_variant
def test_prompt_in_chunks_equals_one_call(variant: Variant) -> None:
    """Each chunk is written to the cache after its attention, as in an engine."""
    whole = Inputs.draw(replace(BASE, cached=(0, 0, 0, 0), new=(5, 1, 8, 10)), harness.fresh_rng())
    tables = 1 + whole.rng.permutation(whole.case.num_pages - 1)[: whole.tables.size].reshape(whole.tables.shape)
    arguments = whole.arguments() | {"block_tables": tables.astype(np.int32)}
    want = prefill(variant, PS)(**arguments)
    starts = arguments["cu_q_lens"][:-1]
    cached, got = np.zeros(4, int), np.zeros(want.shape)
    for new in ((2, 1, 4, 3), (3, 0, 1, 0), (0, 0, 3, 7)):
        token = np.concatenate([starts[s] + cached[s] + np.arange(n) for s, n in enumerate(new)])
        packed = np.concatenate([token, np.zeros(24 - token.size, int)])
        chunk = {name: np.asarray(arguments[name])[packed] for name in ("q_nope", "q_rope", "latent_new")}
        chunk["cu_q_lens"] = np.cumsum((0, *new), dtype=np.int32)
        chunk["kv_lens"] = (cached + new).astype(np.int32)
        got[token] = prefill(variant, PS)(**(arguments | chunk))[: token.size]
        position = token - np.repeat(starts, new)
        slots = np.full(24, -1, np.int32)
        slots[: token.size] = tables[np.repeat(np.arange(4), new), position // PS] * PS + position % PS
        cache = write_latent(arguments["cache"], jnp.asarray(chunk["latent_new"]), jnp.asarray(slots))
        arguments, cached = arguments | {"cache": cache}, cached + new
    assert cached.tolist() == [5, 1, 8, 10]
    assert_close(variant, whole.case, got, want)


@every_variant
def test_sequence_does_not_depend_on_the_batch(variant: Variant) -> None:
    inputs = Inputs.draw(BASE, harness.fresh_rng())
    arguments = inputs.arguments()
    want = np.asarray(prefill(variant, PS)(**arguments))
    starts = arguments["cu_q_lens"]
    for s in range(4):
        alone = {name: np.roll(arguments[name], -starts[s], axis=0) for name in ("q_nope", "q_rope", "latent_new")}
        alone["cu_q_lens"] = np.array([0, 0, *[inputs.case.new[s]] * 3], np.int32)
        alone["kv_lens"] = np.array([0, arguments["kv_lens"][s], 0, 0], np.int32)
        alone["block_tables"] = np.roll(inputs.tables, 1 - s, axis=0)
        got = np.asarray(prefill(variant, PS)(**(arguments | alone)))
        assert_close(variant, inputs.case, got[: inputs.case.new[s]], want[starts[s] : starts[s + 1]])
        assert not got[inputs.case.new[s] :].any()


@every_variant
def test_fewer_keys_than_queries_do_not_affect_other_sequences(variant: Variant) -> None:
    """The first sequence has an invalid length: fewer keys than queries. The prefix of the second sequence is expanded
    in several steps.
    """
    inputs = Inputs.draw(replace(BASE, cached=(0, 3 * PS, 0, 0), new=(3 * PS, 2, 1, 0)), harness.fresh_rng())
    arguments = inputs.arguments()
    want = prefill(variant, PS)(**arguments)
    got = prefill(variant, PS)(**arguments | {"kv_lens": arguments["kv_lens"] - np.array([3 * PS, 0, 0, 0], np.int32)})
    harness.assert_same_bits(got[3 * PS :], want[3 * PS :])


@every_variant
def test_visible_nan_affects_its_sequence_only(variant: Variant) -> None:
    inputs = Inputs.draw(replace(BASE, cached=(6, 9, 5, 0), new=(4, 3, 5, 2)), harness.fresh_rng())
    tables = 1 + np.arange(32, dtype=np.int32).reshape(4, 8)  # sequences share no page
    arguments = inputs.arguments(poisoned=False) | {"block_tables": tables}
    pages = inputs.pages.copy()
    want = np.asarray(prefill(variant, PS)(**(arguments | {"cache": PagedLatent(jnp.asarray(pages))})))
    pages[tables[1, 1], 2, -1] = np.nan  # the last column belongs to the rotated key
    got = np.asarray(prefill(variant, PS)(**(arguments | {"cache": PagedLatent(jnp.asarray(pages))})))
    assert np.isnan(got[4:7]).all()
    harness.assert_same_bits(np.delete(got, range(4, 7), axis=0), np.delete(want, range(4, 7), axis=0))


@every_variant
def test_one_new_token_equals_mla_decode(variant: Variant) -> None:
    """`mla_decode` gets absorbed queries: q·(W_UK c) = (W_UKᵀ q)·c, and for outputs Σ p W_UV c = W_UV Σ p c."""
    inputs = Inputs.draw(replace(BASE, cached=(7, 8, 9, 0), new=(1, 1, 1, 1)), harness.fresh_rng())
    arguments = inputs.arguments(poisoned=False)
    tables = 1 + np.arange(32, dtype=np.int32).reshape(4, 8)
    position = np.array(inputs.case.cached)
    slots = (tables[np.arange(4), position // PS] * PS + position % PS).astype(np.int32)
    cache = write_latent(PagedLatent(jnp.asarray(inputs.pages)), jnp.asarray(inputs.latent_new[:4]), jnp.asarray(slots))
    out = harness.compiled(mla_decode, variant, sm_scale=SM_SCALE)(
        q_latent=np.einsum("bhn,hnl->bhl", arguments["q_nope"][:4], inputs.w_uk)[:, None],
        q_rope=arguments["q_rope"][:4, None],
        cache=cache,
        block_tables=tables,
        kv_lens=arguments["kv_lens"],
    )
    absorbed = np.einsum("bhl,hvl->bhv", np.asarray(out)[:, 0], inputs.w_uv)
    got = prefill(variant, PS)(**(arguments | {"cache": cache, "block_tables": tables}))
    assert_close(variant, inputs.case, got[:4], absorbed)
    assert_close(variant, inputs.case, got, replace(inputs, tables=tables).expected())


# --- transformations and compilation


@every_variant
def test_repeats_are_bitwise_equal(variant: Variant) -> None:
    transformations.assert_repeats(prefill(variant, PS), Inputs.draw(BASE, harness.fresh_rng()).arguments())


@pytest.mark.slow
@every_variant
def test_under_vmap(variant: Variant) -> None:
    """The mapped calls have different lengths, and therefore expand their prefixes in different numbers of steps."""
    rng = harness.fresh_rng()
    inputs = [Inputs.draw(replace(BASE, cached=c, new=n), rng) for c, n in list(LENGTHS.values())[:4]]
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(each) for each in x]), *(i.arguments() for i in inputs))
    call = prefill(variant, PS)
    for got, i in zip(jax.jit(jax.vmap(lambda arrays: call(**arrays)))(stacked), inputs, strict=True):
        assert_close(variant, BASE, got, i.expected())


@slow_cases("xla")
@every_variant
def test_exported(variant: Variant) -> None:
    transformations.assert_exports(prefill(variant, PS), Inputs.draw(BASE, harness.fresh_rng()).arguments())


@pytest.mark.slow
@every_variant
def test_inside_a_scan(variant: Variant) -> None:
    """Each iteration is a layer with other weights. All other arguments are shared."""
    inputs = Inputs.draw(BASE, harness.fresh_rng())
    arguments = {name: jax.tree.map(jnp.asarray, value) for name, value in inputs.arguments().items()}
    layers = {name: jnp.stack([w, w[::-1]]) for name in ("w_uk", "w_uv") for w in [arguments.pop(name)]}
    call = prefill(variant, PS)
    _, got = jax.jit(lambda layers: jax.lax.scan(lambda _, w: (None, call(**w, **arguments)), None, layers))(layers)
    assert_close(variant, BASE, got[0], inputs.expected())
    assert_close(variant, BASE, got[1], replace(inputs, w_uk=inputs.w_uk[::-1], w_uv=inputs.w_uv[::-1]).expected())


@every_variant
def test_compiled_once_without_host_callbacks_in_a_named_scope(variant: Variant) -> None:
    rng = harness.fresh_rng()
    calls = [Inputs.draw(replace(BASE, cached=c, new=n), rng).arguments() for c, n in LENGTHS.values()]
    op = functools.partial(mla_prefill, sm_scale=SM_SCALE, piece_tokens=PS)
    transformations.assert_traced_once(op, variant, calls)
    harness.assert_no_host_callbacks(prefill(variant, PS), **calls[0])
    assert "mla_prefill" in harness.scope_names(prefill(variant, PS), **calls[0])


def shapes(table_width: int) -> dict[str, Any]:
    """Return the shapes of the arguments of a call with 64 new tokens of 4 sequences, and a pool of 65,536 tokens."""
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.float32, jnp.int32))
    return {
        "q_nope": f32((64, 4, 32)),
        "q_rope": f32((64, 4, 16)),
        "latent_new": f32((64, 80)),
        "cache": jax.eval_shape(lambda: PagedLatent(jnp.zeros((4096, 16, 80), jnp.float32))),
        "w_uk": f32((4, 32, 64)),
        "w_uv": f32((4, 32, 64)),
        "block_tables": i32((4, table_width)),
        "cu_q_lens": i32((5,)),
        "kv_lens": i32((4,)),
    }


@pytest.mark.slow
@bounded_variant
def test_memory_does_not_grow_with_the_table(variant: Variant) -> None:
    call = prefill(Variant(variant.implementation), 256)
    narrow, wide = (harness.temp_bytes(call, **shapes(width)) for width in (64, 4096))
    assert wide <= narrow + 4096
    expanded_row = 4096 * 16 * 4 * (32 + 16 + 32) * 4  # bytes of the keys and values of a sequence with a full table
    assert wide < expanded_row / 16


# --- bad arguments

GOOD = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes(6))
ZEROS, LENS = functools.partial(jnp.zeros, dtype=jnp.float32), functools.partial(jnp.zeros, dtype=jnp.int32)
BAD = {
    "q_nope of rank 1": ("q_nope", {"q_nope": ZEROS((64,))}),
    "q_nope of rank 4": ("q_nope", {"q_nope": ZEROS((1, 64, 4, 32))}),
    "an integer q_nope": ("q_nope", {"q_nope": LENS((64, 4, 32))}),
    "q_rope of other tokens": ("q_rope", {"q_rope": ZEROS((63, 4, 16))}),
    "q_rope of rank 2": ("q_rope", {"q_rope": ZEROS((64, 16))}),
    "q_rope of another dtype": ("q_rope", {"q_rope": ZEROS((64, 4, 16)).astype(jnp.bfloat16)}),
    "w_uk of other heads": ("w_uk", {"w_uk": ZEROS((3, 32, 64))}),
    "w_uk of another width": ("w_uk", {"w_uk": ZEROS((4, 16, 64))}),
    "w_uk of rank 1": ("w_uk", {"w_uk": ZEROS((64,))}),
    "w_uk of another dtype": ("w_uk", {"w_uk": ZEROS((4, 32, 64)).astype(jnp.float16)}),
    "w_uv of another latent": ("w_uv", {"w_uv": ZEROS((4, 32, 32))}),
    "w_uv of rank 2": ("w_uv", {"w_uv": ZEROS((128, 64))}),
    "pages of another width": ("cache.pages", {"cache": PagedLatent(ZEROS((8, 16, 64)))}),
    "pages of rank 4": ("cache.pages", {"cache": PagedLatent(ZEROS((8, 1, 16, 80)))}),
    "latent_new of another width": ("latent_new", {"latent_new": ZEROS((64, 64))}),
    "latent_new of another dtype": ("latent_new", {"latent_new": ZEROS((64, 80)).astype(jnp.bfloat16)}),
    "head-wise tables": ("block_tables", {"block_tables": LENS((4, 1, 6))}),
    "float tables": ("block_tables", {"block_tables": ZEROS((4, 6))}),
    "lengths instead of prefix sums": ("cu_q_lens", {"cu_q_lens": LENS((4,))}),
    "kv_lens of another batch": ("kv_lens", {"kv_lens": LENS((5,))}),
    "float kv_lens": ("kv_lens", {"kv_lens": ZEROS((4,))}),
    "sm_scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "a number for absorbed": ("absorbed", {"absorbed": 1}),
    "no prefix tokens": ("piece_tokens", {"piece_tokens": 0}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    jax.eval_shape(functools.partial(mla_prefill, sm_scale=SM_SCALE), **GOOD)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        mla_prefill(**(GOOD | {"sm_scale": SM_SCALE} | change))


def test_named_implementation_has_no_fallback() -> None:
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float16 queries, got float32"):
        mla_prefill(**GOOD, sm_scale=SM_SCALE, implementation="triton")
