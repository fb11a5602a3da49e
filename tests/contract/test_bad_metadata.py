"""Calls with wrong metadata: lengths, prefix sums, block tables, slots and windows with invalid values.

All backends return the same result, access no memory outside the arrays, and finish in bounded time. Sequences with
valid metadata have the result of a call without wrong values.

Interpreted kernels raise on an access out of bounds. On a GPU, compute-sanitizer checks compiled kernels, with a
separate allocation for every array:

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer python -m pytest -m "not slow" -k mosaic tests/contract/test_bad_metadata.py

The sanitizer of CUDA 13.0 crashed in 13 of 19 runs, at different places. A run that does not crash reports all of
its findings.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn import (
    PagedLatent,
    mla_prefill,
)
from pallas_attn.mosaic.primitives.row_io import RowLayout
from tests.contract import backends, naive
from tests.contract.backends import BACKENDS, Backend, all_but, every_backend, in_every_run, unsupported
from tests.contract.targets import (
    CU_Q_LENS,
    HQ,
    LATENTS_8BIT,
    LATENTS_F32,
    LENGTHS,
    REFERENCE,
    TABLES,
    TARGETS,
    B,
    Change,
    D,
    P,
    Target,
    ints,
    latent_prefill,
)
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

WRONG = (-(2**31), -harness.GARBAGE, -17, -1, 0, 1, 13, 40, 64, 65, 1000, 4_000_000, 2**30, harness.GARBAGE, 2**31 - 1)


def others(op: str) -> list[Backend]:
    """Return all backends of an operation except `reference`."""
    return backends.backends_of(op, lambda backend: backend is not REFERENCE)


every_target = pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, id=f"{backend.id}-{name}")
        for name, target in TARGETS.items()
        if target.metadata
        for backend in others(target.op)
    ],
    indirect=["backend"],
)


@contextlib.contextmanager
def indices_are_checked(backend: Backend) -> Iterator[None]:
    """Return a context in which interpreted kernels raise on indices outside their arrays."""
    take = RowLayout.take

    def check(index: Any, size: int) -> None:
        if np.any((index < 0) | (index >= size)):
            raise IndexError(f"took numbers {index.min()} to {index.max()} of {size}")

    def checked(self: RowLayout, ref: Any, index: Any, layout: Any = None) -> Any:
        jax.debug.callback(lambda index: check(index, math.prod(ref.shape)), index)
        return take(self, ref, index, layout)

    with mock.patch.object(RowLayout, "take", checked) if backend.interpreted else contextlib.nullcontext():
        yield


def distinct_slots(changes: list[Change]) -> list[Change]:
    """Return the changes without duplicate slots. If two tokens have the same slot, the contents of the slot are
    undefined.
    """
    kept: dict[int, Change] = {}
    for change in changes:
        kept.setdefault(change[2], change)
    lists = ("slots", "extra_slots")
    return [change for change in kept.values() if change[0] not in lists or not 0 <= change[2] < 2000]


def assert_agrees(target: Target, backend: Backend, arrays: dict[str, Any]) -> Any:
    """Check the result of a backend against `reference`, and return the result of `reference`."""
    with indices_are_checked(backend):
        got = target.run(backend, arrays)
    want = target.run(REFERENCE, arrays)
    if target.exact:
        harness.assert_same_bits(got, want)
    else:
        harness.assert_attention_close(got, want, backend.variant.tolerance("bfloat16"))
    return want


def check(backend: Backend, name: str, changes: list[Change]) -> None:
    """Check that a backend and `reference` return the same result for wrong metadata, and that sequences without a
    changed value have the result of the unchanged call.
    """
    target = TARGETS[name]
    arrays = target.changed(distinct_slots(changes))
    want = assert_agrees(target, backend, arrays)
    if {"cu_q_lens", "window"} & {name for name, *_ in changes} or target.op not in ATTENTION:
        return
    right = target.run(REFERENCE, target.arrays)
    for row in untouched_rows(target, arrays):
        harness.assert_same_bits(*([x[row] for x in jax.tree.leaves(result)] for result in (want, right)))


ATTENTION = ("paged_decode", "mla_decode", "paged_prefill", "index_scores", "index_top_k")


def untouched_rows(target: Target, arrays: Mapping[str, Any]) -> list[Any]:
    """Return the indices of sequences whose metadata is unchanged, or the slices of their packed tokens."""
    same = [
        s
        for s in range(B)
        if all(np.array_equal(arrays[name][s], target.arrays[name][s]) for name in LENGTHS if name in arrays)
    ]
    if "cu_q_lens" not in arrays:
        return same
    return [slice(CU_Q_LENS[s], CU_Q_LENS[s + 1]) for s in same]


def check_examples(backend: Backend, name: str, examples: int) -> None:
    change = st.tuples(st.sampled_from(TARGETS[name].metadata), st.integers(0, 99), st.sampled_from(WRONG))

    @hypothesis.settings(max_examples=examples, deadline=None, database=None)
    @hypothesis.given(st.lists(change, max_size=8))
    def run(changes: list[Change]) -> None:
        check(backend, name, changes)

    run()


NO_LATENTS_8BIT = dict.fromkeys(("gather, 8 bits", "write of latents, 8 bits"), "takes no quantised latents")
no_quantised_latents = unsupported(
    mosaic=NO_LATENTS_8BIT, mosaic_sm100=NO_LATENTS_8BIT | {"latents, 8 bits": "takes no quantised latents"}
)


@slow_cases(
    "xla-write of latents, 8 bits", "xla-gather", "xla-chosen latents, 8 bits", "xla-index scores",
    "xla-latents, 8 bits", "mosaic-chosen latents", "mosaic-chosen latents, 8 bits", "mosaic-ragged", "triton-ragged",
)  # fmt: skip
@every_target
@in_every_run(
    xla=[
        "latents, 8 bits", "gather", "write", "write of latents", "write of latents, 8 bits",
        "index scores", "chosen latents, 8 bits", "write of index keys, 8 bits", "ranges of two caches",
    ],
    mosaic=[
        "ragged", "gather", "gather, 8 bits", "write of latents", "write of latents, 8 bits",
        "chosen latents", "chosen latents, 8 bits", "chosen records of two caches", "ranges of two caches",
    ],
    triton=[
        "ragged", "gather, 8 bits", "write", "write of latents", "write of latents, 8 bits",
        "write of index keys", "write of index keys, 8 bits", "ranges of two caches",
    ],
)  # fmt: skip
@no_quantised_latents
def test_garbage_is_followed_alike(backend: Backend, name: str) -> None:
    """Change random values of the metadata. Interpreted kernels run once, with six changes; other backends run 20 times
    with up to eight changes.
    """
    if backend.interpreted:
        rng, metadata = harness.fresh_rng(), TARGETS[name].metadata
        check(
            backend,
            name,
            [(str(rng.choice(metadata)), int(rng.integers(100)), int(rng.choice(WRONG))) for _ in range(6)],
        )
        return
    check_examples(backend, name, 20)


@pytest.mark.slow
@every_target
@in_every_run()
@no_quantised_latents
def test_more_garbage_is_followed_alike(backend: Backend, name: str) -> None:
    check_examples(backend, name, 40 if backend.interpreted else 300)


# --- prefix sums

SUM_CASES = {
    "padded with zeros": (0, 2, 5, 0),
    "padded with its last": (0, 2, 5, 5),
    "begins past 0": (3, 5, 9, 9),
    "begins past 0, padded": (1, 5, 0, 0),
    "falls": (0, 5, 3, 7),
    "past the tokens": (0, 5, 30, 40),
    "below 0": (-4, 2, 5, 6),
}


def segments(sums: tuple[int, ...], total: int) -> list[tuple[int, int]]:
    """Return the first token and the end of each sequence. A prefix sum below an earlier sum counts as the largest
    earlier sum, and sums are clipped to 0 and the number of tokens.
    """
    bounded = [min(max(0, *sums[: i + 1]), total) for i in range(len(sums))]
    return list(itertools.pairwise(bounded))


@slow_cases("mosaic-padded with zeros")
@pytest.mark.parametrize("sums", SUM_CASES.values(), ids=SUM_CASES)
@every_backend("ragged_attention")
@in_every_run(
    "xla",
    mosaic=["padded with zeros", "begins past 0, padded"],
    triton=all_but("padded with zeros"),
)  # fmt: skip
def test_sums_of_packed_keys(backend: Backend, sums: tuple[int, ...]) -> None:
    """The result equals attention in NumPy. Tokens of no sequence have output 0 and LSE -inf, and keys of no sequence
    are invisible.
    """
    target = TARGETS["ragged"]
    cu_kv_lens = ints(2, 31, 50, 0)
    visible = np.zeros((9, 70), bool)
    for (first, end), (first_key, end_key) in zip(segments(sums, 9), segments((2, 31, 50, 0), 70), strict=True):
        for query in range(first, end):
            visible[query, first_key : max(first_key, end_key - (end - 1 - query))] = True
    arrays = {**target.arrays, "cu_q_lens": ints(*sums), "cu_kv_lens": cu_kv_lens}
    q, k, v = (np.asarray(arrays[name]) for name in "qkv")
    want = naive.attend_all(q, k, v, visible, D**-0.5)
    got = target.run(backend, arrays)
    harness.assert_attention_close(got, want, backend.variant.tolerance("bfloat16"))


@slow_cases("xla-padded with zeros", "mosaic-padded with zeros", "triton-falls")
@pytest.mark.parametrize("sums", SUM_CASES.values(), ids=SUM_CASES)
@every_backend("paged_prefill")
@in_every_run("reference", "xla", mosaic=["padded with zeros"], triton=["falls"])
def test_sums_of_a_chunk(backend: Backend, sums: tuple[int, ...]) -> None:
    """Each sequence has the result of a call with this sequence alone. Tokens of no sequence have output 0 and LSE
    -inf.
    """
    target = TARGETS["prefill"]
    out, lse = np.zeros((9, HQ, D), np.float32), np.full((9, HQ), -np.inf, np.float32)
    for s, (first, end) in enumerate(segments(sums, 9)):
        alone = {"cu_q_lens": ints(*([first] * (s + 1)), *([end] * (B - s)))}
        result = target.run(REFERENCE, {**target.arrays, **alone})
        out[first:end], lse[first:end] = (x[first:end] for x in result)
    got = target.run(backend, {**target.arrays, "cu_q_lens": ints(*sums)})
    harness.assert_attention_close(got, (out, lse), backend.variant.tolerance("bfloat16"))


# --- lengths beyond the block table


@slow_cases("paged_prefill")
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_time_is_bounded_by_the_table(op: str) -> None:
    """A call with a length of a million tokens and a block table for 64 tokens visits only the tiles of 64 tokens."""
    target = TARGETS["decode" if op == "paged_decode" else "prefill"]
    backend = next(backend for backend in BACKENDS if backend.name == "xla")
    call = jax.jit(functools.partial(target.function, implementation="xla"))
    with harness.recorded_tiles() as tiles, backend.variant.settings():
        call(**{**target.arrays, "kv_lens": ints(1_000_000, 2**31 - 1, 65)})
    assert max(number for _, number in tiles) < P
    longest = target.run(backend, {**target.arrays, "kv_lens": ints(64, 64, 64)})
    harness.assert_same_bits(target.run(backend, {**target.arrays, "kv_lens": ints(1_000_000, 2**31 - 1, 65)}), longest)


@pytest.mark.slow
@slow_cases("xla, 8 bits", "reference")
@pytest.mark.parametrize(
    ("implementation", "cache"),
    [("reference", LATENTS_F32), ("xla", LATENTS_F32), ("xla", LATENTS_8BIT)],
    ids=["reference", "xla", "xla, 8 bits"],
)
def test_prefill_of_latents_follows_garbage_alike(implementation: str, cache: PagedLatent) -> None:
    arrays = latent_prefill(cache)
    prefill = jax.jit(functools.partial(mla_prefill, sm_scale=0.2, implementation=implementation))

    def run(cu_q_lens: Any, kv_lens: Any, tables: Any = TABLES) -> Any:
        return prefill(*arrays.values(), tables, cu_q_lens, kv_lens)

    right = run(ints(0, 2, 5, 5), ints(30, 66, 64))
    harness.assert_close("zeros", run(ints(0, 2, 5, 0), ints(30, 66, 2**31 - 1)), right, harness.F32_OUT)
    harness.assert_close("too long", run(ints(0, 2, 5, 0), ints(30, 2**31 - 1, 0))[:2], right[:2], harness.F32_OUT)
    past = run(ints(3, 5, 8, 8), ints(30, 66, 64))
    assert not np.asarray(past[:3]).any()
    assert np.isfinite(run(ints(*WRONG[:4]), ints(*WRONG[-3:]), np.full_like(TABLES, harness.GARBAGE))).all()
