"""Contract of `mla_decode`: every backend is tested with unusual inputs.

Poisoned inputs have NaN, infinities or garbage in all elements that must not affect the result.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    FULL,
    PAGE_NONE,
    DecodePlan,
    PagedLatent,
    gather_latent,
    latent_cache_spec,
    mla_decode,
    write_latent,
)
from tests.contract import backends, transformations
from tests.contract.backends import Backend, all_but, in_every_run, unsupported
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked latents. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

every_backend = backends.every_backend("mla_decode")
compiled_backend = backends.every_backend("mla_decode", backends.is_compiled)
bounded_backend = backends.every_backend("mla_decode", backends.is_compiled_and_lean)

PS = 16
LENGTHS = (0, 1, PS - 1, PS, 65, 128)  # tokens per sequence; tables have 8 pages per sequence
BASE = MlaCase(kv_lens=LENGTHS, page_size=PS, pages_per_row=8, num_pages=56, dtype=None)
MANY_HEADS = 40
"""Number of query heads. Mosaic runs the kernel for many query rows, and the block of the kernel does not divide it."""


def decode(backend: Backend, **static: Any) -> harness.Jitted:
    return backends.compiled(mla_decode, backend, sm_scale=SM_SCALE, **static)


def run(backend: Backend, arguments: dict[str, Any], **static: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = decode(backend, return_lse=True, **static)(**arguments)
    return np.asarray(out), np.asarray(lse)


def draw(backend: Backend, case: MlaCase, rng: np.random.Generator | None = None) -> Inputs:
    return Inputs.draw(replace(case, dtype=case.dtype or backend.dtype), rng or harness.fresh_rng())


def planned(
    backend: Backend, arguments: dict[str, Any], mode: str = "balanced", window: int | None = None
) -> dict[str, Any]:
    """Return the arguments, with a plan (the assignment of pages to CTAs) if the backend uses plans."""
    return arguments | {"plan": plan_for(backend, arguments, mode, window)} if backend.plans else arguments


def plan_for(backend: Backend, arguments: dict[str, Any], mode: str, window: int | None = None) -> DecodePlan:
    return backends.plan_of(backend, arguments, window=window, num_programs=3, mode=mode)


def check(backend: Backend, case: MlaCase, *, clean: bool | None = None) -> None:
    """Check that the result for poisoned inputs equals attention in NumPy.

    If `clean`, check that inputs without poison give the same bits. The default is True, except for interpreted
    kernels, which are slow.
    """
    inputs = draw(backend, case)
    # The reference computes in float32 and rounds only its result, so the float32 tolerances apply to all dtypes.
    exact = {"out_dtype": "float32"} if backend.name == "reference" else {}

    def result(poisoned: bool) -> tuple[np.ndarray, np.ndarray]:
        arguments = planned(backend, inputs.arguments(poisoned=poisoned), window=case.window)
        return run(backend, arguments, **case.static, **exact)

    got = result(poisoned=True)
    tolerances = backend.variant.tolerance("float32" if exact else inputs.case.dtype)
    harness.assert_attention_close(got, inputs.expected(), tolerances)
    if not backend.interpreted if clean is None else clean:
        harness.assert_same_bits(got, result(poisoned=False))


VALUES = {
    "lengths": BASE,
    "all idle": replace(BASE, kv_lens=(0,) * 6),
    "one of maximum length, the others idle": replace(BASE, kv_lens=(0, 0, 0, 128, 0, 0)),
    "all of maximum length": replace(BASE, kv_lens=(128,) * 6),
    "absent pages": replace(BASE, absent_pages=True),
    "large scores of either sign": replace(BASE, exact=True),
    "large scores over absent pages": replace(BASE, kv_lens=(127,) * 6, absent_pages=True, exact=True),
}
few_and_many_heads = pytest.mark.parametrize("heads", [BASE.heads, MANY_HEADS], ids=["few heads", "many heads"])


@slow_cases("mosaic-few heads-large scores over absent pages", "mosaic-many heads-large scores over absent pages")
@slow_cases(
    "mosaic-few heads-absent pages", "mosaic-few heads-all of maximum length", "mosaic-many heads-absent pages",
)  # fmt: skip
@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
@few_and_many_heads
@every_backend
@in_every_run(
    reference=[
        "few heads-lengths", "few heads-all idle", "few heads-one of maximum length, the others idle",
        "few heads-all of maximum length", "few heads-absent pages", "few heads-large scores of either sign",
        "few heads-large scores over absent pages",
    ],
    xla=[
        "few heads-lengths", "few heads-all idle", "few heads-one of maximum length, the others idle",
        "few heads-all of maximum length", "few heads-absent pages", "few heads-large scores of either sign",
        "few heads-large scores over absent pages",
    ],
    mosaic=[
        "few heads-all of maximum length", "few heads-absent pages", "few heads-large scores over absent pages",
        "many heads-absent pages", "many heads-large scores over absent pages",
    ],
)  # fmt: skip
def test_values_of_one_shape(backend: Backend, heads: int, case: MlaCase) -> None:
    check(backend, replace(case, heads=heads))


@slow_cases("mosaic-many heads", "mosaic_sm100-few heads")
@few_and_many_heads
@backends.every_backend("mla_decode", lambda backend: backend.kernels)
@in_every_run("mosaic", mosaic_sm100=["few heads"])
def test_poison_changes_no_bit(backend: Backend, heads: int) -> None:
    """Poisoned and clean inputs give the same bits. In the other tests, interpreted kernels run on poisoned inputs
    only.
    """
    check(backend, replace(VALUES["absent pages"], heads=heads), clean=True)


@few_and_many_heads
@every_backend
@in_every_run(xla=["few heads"], mosaic=["few heads"])
def test_an_absent_page_between_others_of_a_tile(backend: Backend, heads: int) -> None:
    inputs = draw(backend, replace(BASE, kv_lens=(128,) * 6, heads=heads))
    inputs.tables[:, 1] = PAGE_NONE
    inputs.visible[:, :, PS : 2 * PS] = False
    got = run(backend, planned(backend, inputs.arguments()))
    harness.assert_attention_close(got, inputs.expected(), backend.variant.tolerance(inputs.case.dtype))


@slow_cases("mosaic-few heads")
@few_and_many_heads
@every_backend
@in_every_run(xla=["few heads"], mosaic=["few heads"])
def test_a_query_of_nan_spoils_no_other_head(backend: Backend, heads: int) -> None:
    """A kernel may omit the mask for a tile of keys that all queries see. NaN queries of one head must not change the
    results of other heads.
    """
    inputs = draw(backend, replace(QUERIES["4, tree"], heads=heads))
    arguments = planned(backend, inputs.arguments())
    clean = run(backend, arguments)
    q_rope = arguments["q_rope"].copy()
    q_rope[:, :, 1] = np.nan
    got = run(backend, arguments | {"q_rope": q_rope})
    harness.assert_same_bits([np.delete(x, 1, axis=2) for x in got], [np.delete(x, 1, axis=2) for x in clean])


@bounded_backend
def test_the_configuration_a_user_gets(backend: Backend) -> None:
    check(backends.as_users_get(backend), BASE)


TREE = replace(BASE, kv_lens=(0, 3, 20, 66, 65, 128), tree=True, absent_pages=True)
QUERIES = {
    "2, tree": replace(TREE, queries=2, q_lens=(0, 1, 2, 2, 1, 2)),
    "4, tree": replace(TREE, queries=4, q_lens=(0, 1, 4, 3, 2, 4)),
    "8, tree": replace(TREE, queries=8, q_lens=(0, 1, 7, 8, 5, 8)),
    "4, tree, draft alone": replace(TREE, queries=4, kv_lens=(0, 3, 1, 2, 4, 0), q_lens=(0, 3, 1, 2, 4, 0)),
    "4, tree over large scores": replace(TREE, queries=4, q_lens=(4, 1, 4, 3, 2, 4), exact=True),
    "4, causal": replace(BASE, queries=4, q_lens=(0, 1, 4, 3, 2, 4)),
    "4 each": replace(BASE, queries=4, kv_lens=(0, 4, PS - 1, PS, 65, 128)),
    "4 each, of rows with fewer tokens": replace(BASE, queries=4, kv_lens=(0, 1, 2, 3, 65, 0)),
}


@slow_cases("mosaic-few heads-4, tree, draft alone")
@slow_cases(
    "mosaic-few heads-4, causal", "triton-few heads-4 each, of rows with fewer tokens",
    "mosaic_sm100-many heads-4, tree", "triton-many heads-4, tree",
)  # fmt: skip
@pytest.mark.parametrize("case", QUERIES.values(), ids=QUERIES)
@few_and_many_heads
@every_backend
@in_every_run(
    reference=[
        "few heads-2, tree", "few heads-4, tree", "few heads-8, tree", "few heads-4, tree, draft alone",
        "few heads-4, tree over large scores", "few heads-4, causal", "few heads-4 each",
        "few heads-4 each, of rows with fewer tokens",
    ],
    xla=[
        "few heads-2, tree", "few heads-4, tree", "few heads-4, tree, draft alone",
        "few heads-4, tree over large scores", "few heads-4, causal",
        "few heads-4 each, of rows with fewer tokens",
    ],
    mosaic=["few heads-4, tree, draft alone", "few heads-4, tree over large scores", "few heads-4, causal"],
    mosaic_sm100=["many heads-4, tree"],
    triton=["few heads-4 each, of rows with fewer tokens", "many heads-4, tree"],
)  # fmt: skip
def test_several_queries(backend: Backend, heads: int, case: MlaCase) -> None:
    check(backend, replace(case, heads=heads if heads == BASE.heads else 20))


@every_backend
@in_every_run("xla")
def test_a_triangular_mask_is_causality(backend: Backend) -> None:
    inputs = draw(backend, QUERIES["4, causal"])
    arguments = inputs.arguments()
    triangle = np.broadcast_to(np.tri(4, dtype=bool), (6, 4, 4))
    got, want = run(backend, arguments | {"draft_mask": triangle}), run(backend, arguments)
    if backend.tree_tiles:
        harness.assert_attention_close(got, want, backend.variant.tolerance(inputs.case.dtype))
    else:
        harness.assert_same_bits(got, want)


WIDTHS = [
    *[(1, 512, 64), (3, 256, 32), (9, 128, 32), (20, 256, 64), (63, 448, 64)],
    *[(64, 512, 64), (126, 128, 32), (128, 512, 64)],
]


@slow_cases("mosaic-63-448-64")
@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), WIDTHS)
@every_backend
@in_every_run(xla=["1-512-64", "128-512-64"], mosaic=["63-448-64"])
def test_heads_and_widths(backend: Backend, heads: int, latent_dim: int, rope_dim: int) -> None:
    few = MlaCase(kv_lens=(5, 0, 66), page_size=PS, pages_per_row=5, num_pages=12, dtype=None)
    check(backend, replace(few, heads=heads, latent_dim=latent_dim, rope_dim=rope_dim))


PAGES = {
    "pages of 64": replace(BASE, kv_lens=(0, 63, 64, 200), page_size=64, pages_per_row=4, num_pages=14),
    "pages of 128, many heads": replace(
        BASE, kv_lens=(100, 129, 256), heads=64, rope_dim=64, page_size=128, pages_per_row=2, num_pages=8
    ),
    "pages of 8": replace(BASE, page_size=8, pages_per_row=16, num_pages=112),
}


@slow_cases("mosaic-pages of 128, many heads")
@pytest.mark.parametrize("case", PAGES.values(), ids=PAGES)
@every_backend
@in_every_run(xla=all_but("pages of 64"), mosaic=all_but("pages of 64"))
@unsupported(mosaic={"pages of 8": "takes pages of 16, 32, 64 or 128 tokens, got 8"})
def test_pages(backend: Backend, case: MlaCase) -> None:
    check(backend, case)


DTYPES = {
    "float32": replace(BASE, dtype="float32"),
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "float16": replace(BASE, dtype="float16"),
    "bfloat16, large scores": replace(BASE, dtype="bfloat16", exact=True),
    "float32 over bfloat16": replace(BASE, dtype="float32", cache_dtype="bfloat16"),
    "bfloat16 over float32": replace(BASE, dtype="bfloat16", cache_dtype="float32"),
    "bfloat16 over float16": replace(BASE, dtype="bfloat16", cache_dtype="float16"),
    "latents of 96": replace(BASE, latent_dim=96),
    "rotated columns of 16": replace(BASE, rope_dim=16),
}


@slow_cases("mosaic-bfloat16", "triton-bfloat16, large scores")
@pytest.mark.parametrize("case", DTYPES.values(), ids=DTYPES)
@every_backend
@in_every_run(
    xla=["bfloat16 over float32", "latents of 96", "rotated columns of 16"],
    mosaic=all_but("float16", "bfloat16, large scores"),
    triton=all_but("bfloat16", "float16", "rotated columns of 16"),
)  # fmt: skip
@unsupported(
    mosaic={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "bfloat16 over float32": "takes queries and an unquantised cache of one dtype",
        "bfloat16 over float16": "takes queries and an unquantised cache of one dtype",
        "latents of 96": "takes latents of a multiple of 64 columns up to 512, got 96",
        "rotated columns of 16": "takes 32 or 64 rotated columns, got 16",
    },
    triton={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "float32 over bfloat16": "takes bfloat16 and float16 queries, got float32",
        "bfloat16 over float32": "takes queries and an unquantised cache of one dtype",
        "bfloat16 over float16": "takes queries and an unquantised cache of one dtype",
    },
)  # fmt: skip
def test_dtypes(backend: Backend, case: MlaCase) -> None:
    check(backend, case)


SCORES = {
    "a window of 1": replace(BASE, window=1),
    "a window past a page, many heads": replace(BASE, window=PS + 1, heads=MANY_HEADS),
    "a window that hides nothing": replace(BASE, window=FULL),
    "a window, 4 causal, a soft cap": replace(QUERIES["4, causal"], window=PS - 1, soft_cap=2.0),
    "a window, 4 each, of rows with fewer tokens": replace(
        QUERIES["4 each, of rows with fewer tokens"], kv_lens=(0, 1, 2, 3, 65, 40), window=FULL
    ),
    "a window, 4, tree": replace(QUERIES["4, tree"], window=3),
    "a window over 8 bits in short pages": replace(
        BASE, cache_dtype="float8_e4m3fn", page_size=8, pages_per_row=16, num_pages=112, window=20, soft_cap=5.0
    ),
    "a soft cap of 5000": replace(BASE, soft_cap=5000.0),
}


@slow_cases("triton-a window, 4 causal, a soft cap")
@pytest.mark.parametrize("case", SCORES.values(), ids=SCORES)
@every_backend
@in_every_run(
    "mosaic",
    xla=["a window of 1", "a window, 4, tree"],
    triton=["a window, 4 causal, a soft cap"],
)  # fmt: skip
@unsupported(mosaic="takes no (window|soft cap) over latents")
def test_windows_and_soft_caps(backend: Backend, case: MlaCase) -> None:
    check(backend, case)


EIGHT = replace(BASE, cache_dtype="float8_e4m3fn")
EIGHT_BITS = {
    "lengths": EIGHT,
    "float32": replace(EIGHT, dtype="float32"),
    "absent pages, many heads": replace(EIGHT, absent_pages=True, heads=MANY_HEADS),
    "large scores": replace(EIGHT, exact=True),
    "4, tree": replace(QUERIES["4, tree"], cache_dtype="float8_e4m3fn"),
    "512 and 64": replace(EIGHT, kv_lens=(5, 0, 66), num_pages=12, heads=16, latent_dim=512, rope_dim=64),
    "pages of 8": replace(EIGHT, page_size=8, pages_per_row=16, num_pages=112, latent_dim=256, rope_dim=16),
}


@slow_cases("triton-4, tree", "mosaic-lengths")
@pytest.mark.parametrize("case", EIGHT_BITS.values(), ids=EIGHT_BITS)
@every_backend
@in_every_run(
    xla=all_but("absent pages, many heads", "512 and 64", "pages of 8"),
    mosaic=all_but("large scores", "4, tree", "512 and 64"),
    triton=["float32", "4, tree"],
)  # fmt: skip
@unsupported(
    mosaic={
        "float32": "takes bfloat16 and float16 queries, got float32",
        "absent pages, many heads": "takes bfloat16 queries and 64 rotated columns over quantised latents",
        "pages of 8": "takes pages of 16, 32, 64 or 128 tokens, got 8",
    },
    mosaic_sm100="takes no quantised latents",
    triton={"float32": "takes bfloat16 and float16 queries, got float32"},
)  # fmt: skip
def test_latents_in_8_bits(backend: Backend, case: MlaCase) -> None:
    check(backend, case)


@every_backend
@in_every_run("xla", "triton")
@unsupported(mosaic="takes 8-bit latents with a scale per 128 columns", mosaic_sm100="takes no quantised latents")
def test_one_scale_for_queries_and_one_for_latents(backend: Backend) -> None:
    """Latents and queries in float8 with one scale each, as in FlashMLA's dense fp8 kernel. The scales are factors of
    `sm_scale` and of the output (docs/coming_from.md).
    """
    inputs = draw(backend, replace(BASE, absent_pages=True))
    descale = {"q": float(np.abs(inputs.q).max()) / 448, "pages": float(np.abs(inputs.pages).max()) / 448}
    stored: dict[str, Any] = {
        name: (getattr(inputs, name).astype(np.float32) / scale).astype(jnp.float8_e4m3fn)
        for name, scale in descale.items()
    }
    meant: dict[str, Any] = {name: x.astype(np.float32) * descale[name] for name, x in stored.items()}
    stored["q"] = stored["q"].astype(jnp.dtype(backend.dtype))  # exact
    scaled = {"sm_scale": SM_SCALE * descale["q"] * descale["pages"], "out_dtype": "float32", "return_lse": True}
    out, lse = backends.compiled(mla_decode, backend, **scaled)(**replace(inputs, **stored).arguments())
    got = np.asarray(out) * descale["pages"], np.asarray(lse)
    harness.assert_attention_close(got, replace(inputs, **meant).expected(), backend.variant.tolerance(backend.dtype))


@every_backend
@in_every_run("xla")
def test_output_dtype_and_lse_are_as_asked(backend: Backend) -> None:
    arguments = draw(backend, replace(BASE, dtype="bfloat16")).arguments()
    out, lse = decode(backend, return_lse=True)(**arguments)
    alone = decode(backend)(**arguments)
    wide = decode(backend, out_dtype="float32")(**arguments)
    chex.assert_type([out, alone, wide, lse], [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32])
    harness.assert_same_bits([alone, wide.astype(jnp.bfloat16)], [out, out])


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_a_visible_nan_shows_in_its_own_row_only(backend: Backend) -> None:
    inputs = draw(backend, replace(BASE, kv_lens=(20,) * 6))
    inputs.tables[:, :3] = 1 + np.arange(18).reshape(6, 3)  # sequences share no page
    inputs.dead[:] = True
    arguments = inputs.arguments(poisoned=False) | {"cache": PagedLatent(jnp.asarray(inputs.pages))}
    arguments = planned(backend, arguments)
    want = run(backend, arguments)
    inputs.pages[inputs.tables[5, 1], 3, -1] = np.nan  # a rope column, which is in the key and not in the value
    got = run(backend, arguments | {"cache": PagedLatent(jnp.asarray(inputs.pages))})
    for g, w in zip(got, want, strict=True):
        assert np.isnan(g[5]).all()
        harness.assert_same_bits(np.delete(g, 5, axis=0), np.delete(w, 5, axis=0))


@slow_cases("mosaic-few heads")
@few_and_many_heads
@every_backend
@in_every_run(reference=["few heads"], xla=["few heads"], mosaic=["few heads"])
def test_queries_that_see_nothing(backend: Backend, heads: int) -> None:
    """Queries without visible keys have output 0, also if all keys of the other queries are NaN."""
    inputs = draw(backend, replace(QUERIES["4 each, of rows with fewer tokens"], heads=heads, q_lens=(4,) * 6))
    empty = np.isneginf(inputs.expected()[1])
    inputs.pages[~inputs.dead] = np.nan
    # This mask has no effect. With a mask, the call is equal to calls of other tests, so it is not compiled again.
    arguments = inputs.arguments() | {"draft_mask": np.tile(np.tri(4, dtype=bool), (6, 1, 1))}
    harness.assert_empty(run(backend, planned(backend, arguments, "fixed")), empty)


@every_backend
@in_every_run("reference", "xla", "mosaic")
def test_queries_of_nan_that_see_nothing(backend: Backend) -> None:
    """NaN queries without visible keys have output 0 and LSE -inf. All entries of the tables are PAGE_NONE."""
    inputs = draw(backend, BASE)
    arguments = inputs.arguments()
    spoilt = {name: np.full_like(arguments[name], np.nan) for name in ("q_latent", "q_rope")}
    absent = {"block_tables": np.full_like(arguments["block_tables"], -1)}
    out, lse = run(backend, planned(backend, arguments | spoilt | absent))
    assert not np.count_nonzero(out)
    assert np.isneginf(lse).all()


# --- order and number of sequences, plans


def rows(arguments: dict[str, Any], order: Any) -> dict[str, Any]:
    """Return the arguments for the sequences `order`: a permutation or a subset."""
    return {name: value if name == "cache" else value[order] for name, value in arguments.items()}


def pick(result: tuple[np.ndarray, np.ndarray], order: Any) -> tuple[np.ndarray, np.ndarray]:
    return result[0][order], result[1][order]


def assert_same_rows(backend: Backend, got: tuple[Any, Any], want: tuple[Any, Any], dtype: Any) -> None:
    if backend.plans:
        harness.assert_same_bits(got, want)
    else:
        harness.assert_attention_close(got, want, backend.variant.tolerance(dtype))


@slow_cases("mosaic-few heads")
@slow_cases("triton-few heads")
@few_and_many_heads
@every_backend
@in_every_run(xla=["few heads"], mosaic=["few heads"], triton=["few heads"])
def test_a_row_does_not_depend_on_the_batch(backend: Backend, heads: int) -> None:
    """A sequence has the same result in a shuffled batch and among idle sequences. With plans of `fixed` mode, the bits
    are equal; without plans, results are close.
    """
    changes: dict[str, Any] = {"heads": heads, "kv_lens": (0, 128, 40, 0, 7, 0), "q_lens": (0, 4, 1, 0, 2, 0)}
    inputs = draw(backend, replace(QUERIES["4, tree"], **changes))
    arguments = inputs.arguments()

    def attend(changed: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        return run(backend, planned(backend, changed, "fixed"))

    want = attend(arguments)
    harness.assert_attention_close(want, inputs.expected(), backend.variant.tolerance(inputs.case.dtype))
    order = inputs.rng.permutation(6)
    assert_same_rows(backend, attend(rows(arguments, order)), pick(want, order), inputs.case.dtype)
    for b in backend.alone(6):
        alone = rows(arguments, np.roll(np.arange(6), -b))
        alone |= {name: np.where(np.arange(6) == 0, alone[name], 0) for name in ("kv_lens", "q_lens")}
        assert_same_rows(backend, pick(attend(alone), [0]), pick(want, [b]), inputs.case.dtype)


@slow_cases("mosaic-few heads-balanced")
@pytest.mark.parametrize("mode", ["balanced", "fixed"])
@few_and_many_heads
@every_backend
@in_every_run(xla=["few heads-fixed"], mosaic=["few heads-balanced", "few heads-fixed"])
def test_a_plan_changes_no_meaning(backend: Backend, heads: int, mode: str) -> None:
    """Results are correct with plans that split the pages of a sequence between CTAs, assign several sequences to one
    CTA, and leave CTAs without work.
    """
    inputs = draw(backend, replace(QUERIES["4, tree"], heads=heads, kv_lens=BASE.kv_lens))
    arguments = inputs.arguments()
    plan = plan_for(backend, arguments, mode)
    assert np.diff(plan.split_indptr).max() > 1
    got = run(backend, arguments | {"plan": plan})
    harness.assert_attention_close(got, inputs.expected(), backend.variant.tolerance(inputs.case.dtype))


@few_and_many_heads
@every_backend
@in_every_run(xla=["few heads"])
def test_without_a_plan(backend: Backend, heads: int) -> None:
    """A call without the argument `plan` makes its own plan."""
    inputs = draw(backend, replace(BASE, heads=heads))
    got = run(backend, inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), backend.variant.tolerance(inputs.case.dtype))


@slow_cases("mosaic")
@every_backend
@in_every_run("xla", "mosaic")
def test_repeats_are_equal_bit_for_bit(backend: Backend) -> None:
    inputs = draw(backend, BASE)
    arguments = planned(backend, inputs.arguments())
    transformations.assert_repeats(decode(backend, return_lse=True), arguments, backend.repeats)


# --- transformations and compiled programs


@pytest.mark.slow
@every_backend
@in_every_run("xla")
def test_under_vmap(backend: Backend) -> None:
    rng = harness.fresh_rng()
    drawn = [draw(backend, replace(BASE, kv_lens=kv_lens, num_pages=20), rng) for kv_lens in ((0, 37), (65, 1))]
    calls = [planned(backend, inputs.arguments()) for inputs in drawn]
    call = decode(backend, return_lse=True)
    transformations.assert_vmaps(call, calls, backend.variant.tolerance(drawn[0].case.dtype), over="q_latent")


@compiled_backend
@in_every_run("xla")
def test_exported(backend: Backend) -> None:
    arguments = draw(backend, BASE).arguments()
    transformations.assert_exports(decode(backend, return_lse=True), arguments)


def decode_loop(backend: Backend, cache: PagedLatent, steps: Any, tables: jax.Array) -> tuple[PagedLatent, Any]:
    """Run a loop on the device. Each step writes one latent per sequence, and computes attention."""

    def step(cache: PagedLatent, now: Any) -> tuple[PagedLatent, Any]:
        latent, slots, q_latent, q_rope, kv_lens = now
        cache = write_latent(cache, latent, slots)
        with backend.variant.settings():
            attended = mla_decode(
                q_latent, q_rope, cache, tables, kv_lens,
                sm_scale=SM_SCALE, return_lse=True, implementation=backend.name,
            )  # fmt: skip
        return cache, attended

    return jax.lax.scan(step, cache, steps)


@compiled_backend
@in_every_run("xla")
def test_inside_a_scan_that_writes(backend: Backend) -> None:
    """Each step of the loop equals attention over the final cache with the lengths of the step. The cache is not
    copied.
    """
    inputs = draw(backend, replace(BASE, kv_lens=(1, 3, 8, 9), num_pages=256))
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
    if backend.name != "reference":
        harness.assert_stays_put(loop, inputs.pages, backend, PagedLatent(jnp.asarray(before)), *arrays)
    cache, (out, lse) = loop(backend, PagedLatent(jnp.array(before)), *arrays)
    harness.assert_same_bits(cache.pages, inputs.pages)
    for i in range(steps):
        case = replace(inputs.case, kv_lens=tuple(kv_lens[i].tolist()))
        visible = np.arange(128) < kv_lens[i][:, None, None]
        want = replace(inputs, case=case, q=q[i], visible=visible).expected()
        harness.assert_attention_close((out[i], lse[i]), want, backend.variant.tolerance(inputs.case.dtype))


@compiled_backend
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    rng = harness.fresh_rng()
    calls = [draw(backend, case, rng).arguments() for case in VALUES.values()]
    transformations.assert_traced_once(functools.partial(mla_decode, sm_scale=SM_SCALE), backend.variant, calls)
    harness.assert_no_host_callbacks(decode(backend), **calls[0])
    assert "mla_decode" in harness.scope_names(decode(backend), **calls[0])


def shapes(batch: int, table_width: int, dtype: Any = jnp.float32, num_pages: int = 4096) -> dict[str, Any]:
    """Return shapes of the arguments of a call with 16 heads, latents of 512 columns and rope keys of 64 columns."""
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
@bounded_backend
@in_every_run(xla=["float32"])
def test_memory_does_not_grow_with_the_table(backend: Backend, dtype: Any) -> None:
    """Temporary memory does not depend on the width of the block table. The call has its default configuration."""
    call = decode(backends.as_users_get(backend))
    narrow, wide = (harness.temp_bytes(call, **shapes(32, width, dtype)) for width in (64, 4096))
    assert wide <= narrow + 4096
    one_row = 64 * 16 * 576 * jnp.dtype(dtype).itemsize  # bytes of the latents of one of 32 sequences with 64 pages
    assert wide < 16 * one_row


@pytest.mark.gpu
@bounded_backend
def test_a_pool_of_more_than_2_to_the_32_elements(backend: Backend) -> None:
    """Writes, gathers and attention are correct for pages whose element offsets exceed 32 bits."""
    small = {"page_size": 64, "pages_per_row": 5, "num_pages": 64}
    case = MlaCase((300, 64, 0, 101), heads=16, latent_dim=512, rope_dim=64, dtype="bfloat16", **small)
    inputs = Inputs.draw(case, harness.fresh_rng())
    arguments = jax.tree.map(jnp.asarray, inputs.arguments())
    spec = {"num_pages": 2**32 // (64 * 576) + 1000, "page_size": 64, "latent_dim": 512, "rope_dim": 64}
    far = inputs.rng.choice(1000, 64, replace=False) + spec["num_pages"] - 1000  # page id in the large pool
    far[::2] -= spec["num_pages"] - 1000
    slots = jnp.asarray(far[:, None] * 64 + np.arange(64), jnp.int32).reshape(-1)
    write = jax.jit(functools.partial(write_latent, implementation=backend.name), donate_argnums=0)
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
    got = run(backends.as_users_get(backend), arguments | {"cache": cache, "block_tables": tables})
    harness.assert_attention_close(got, inputs.expected(), backend.variant.tolerance("bfloat16"))


# --- bad arguments

GOOD = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes(4, 6, num_pages=8))
E4M3 = jnp.float8_e4m3fn


def eight_bits(**changes: Any) -> PagedLatent:
    """Return a cache of 8-bit latents with some arrays replaced."""
    spec = latent_cache_spec(num_pages=8, page_size=4, latent_dim=512, rope_dim=64, dtype=E4M3)
    return replace(PagedLatent.allocate(spec), **changes)


BAD = {
    "q_latent of rank 3": ("q_latent", {"q_latent": jnp.zeros((4, 16, 512))}),
    "an integer q_latent": ("q_latent", {"q_latent": jnp.zeros((4, 1, 16, 512), jnp.int32)}),
    "q_rope of other heads": ("q_rope", {"q_rope": jnp.zeros((4, 1, 15, 64))}),
    "q_rope of another batch": ("q_rope", {"q_rope": jnp.zeros((1, 1, 16, 64))}),
    "q_rope of another dtype": ("q_rope", {"q_rope": jnp.zeros((4, 1, 16, 64), jnp.bfloat16)}),
    "pages of rank 4": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 1, 4, 576)))}),
    "pages of another width": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 512)))}),
    "quantised pages": ("cache.pages", {"cache": PagedLatent(jnp.zeros((8, 4, 576), jnp.int8))}),
    "8 bits without scales": ("cache.scale", {"cache": eight_bits(scale=None)}),
    "8 bits without rotated keys": ("cache.rope", {"cache": eight_bits(rope=None)}),
    "8 bits of another width": ("cache.pages", {"cache": eight_bits(pages=jnp.zeros((8, 4, 256), E4M3))}),
    "a scale a token": ("cache.scale", {"cache": eight_bits(scale=jnp.ones((8, 4, 1)))}),
    "16-bit scales": ("cache.scale", {"cache": eight_bits(scale=jnp.ones((8, 4, 4), jnp.bfloat16))}),
    "rotated keys of another pool": ("cache.rope", {"cache": eight_bits(rope=jnp.zeros((9, 4, 64), jnp.bfloat16))}),
    "32-bit rotated keys": ("cache.rope", {"cache": eight_bits(rope=jnp.zeros((8, 4, 64)))}),
    "16 bits with scales": ("cache.scale", {"cache": eight_bits(pages=jnp.zeros((8, 4, 576), jnp.bfloat16))}),
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


def test_each_implementation_named_says_why_it_refuses() -> None:
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float16 queries, got float32"):
        mla_decode(**GOOD, sm_scale=SM_SCALE, implementation="triton")
    with pytest.raises(ExceptionGroup) as refused:
        mla_decode(**GOOD, sm_scale=SM_SCALE, implementation=["mosaic", "triton"])
    assert all(isinstance(reason, NotImplementedError) for reason in refused.value.exceptions)
    assert len(refused.value.exceptions) == 2
