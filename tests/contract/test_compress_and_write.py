"""Contract of `compress_and_write`: every backend is tested with unusual inputs, also over several calls.

Poisoned inputs have NaN and infinities in all elements that must not affect the result, and garbage in table entries
that must not be used. Expected entries are computed by NumPy loops in float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    PagedIndexKeys,
    PagedLatent,
    compress_and_write,
    index_cache_spec,
    latent_cache_spec,
)
from tests.contract import backends, transformations
from tests.contract.backends import Backend, in_every_run
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

every_backend = backends.every_backend("compress_and_write")
XLA = next(backend for backend in backends.BACKENDS if backend.name == "xla")
NORM_EPS = 1e-4


@dataclass(frozen=True)
class CompressCase:
    """One call of `compress_and_write`.

    Attributes:
      kv_lens: number of tokens of each sequence, including new tokens.
      q_lens: number of new tokens of each sequence.
      ratio: tokens per block.
      overlap: whether an entry also pools the block before its own (CSA).
      width, rotary: D, R = 2·half.
      padding: number of tokens at the end that belong to no sequence.
      page_size, entry_page_size: tokens per page of the state, entries per page.
      state_pages, entry_pages: table entries per sequence.
      dtype: dtype of the entries.
      index: whether entries are index keys.
      scaled: number of columns of the entries that are stored in 8 bits with scales that are powers of two; 0 for none.
      absent: whether some pages are absent (PAGE_NONE), also pages of new tokens and entries.
      shared: whether sequences 0 and 1 share all pages without new tokens. They must have equally many tokens.
    """

    kv_lens: tuple[int, ...] = (0, 1, 4, 9, 3, 21, 30, 17, 22)
    q_lens: tuple[int, ...] = (0, 1, 4, 2, 3, 13, 1, 0, 3)
    ratio: int = 4
    overlap: bool = True
    width: int = 32
    rotary: int = 8
    padding: int = 3
    page_size: int = 4
    entry_page_size: int = 3
    state_pages: int = 9
    entry_pages: int = 4
    dtype: str = "float32"
    index: bool = False
    scaled: int = 0
    absent: bool = False
    shared: bool = False

    @property
    def halves(self) -> int:
        return 2 if self.overlap else 1

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.padding

    def allocate(self, pages: int) -> tuple[PagedLatent, PagedLatent | PagedIndexKeys]:
        """Return a state and a cache of entries."""
        columns = 2 * self.halves * self.width
        state = latent_cache_spec(
            num_pages=pages, page_size=self.page_size, latent_dim=columns, rope_dim=0, dtype="float32"
        )
        size = {"num_pages": pages, "page_size": self.entry_page_size, "dtype": self.dtype}
        if self.index:
            entries = PagedIndexKeys.allocate(index_cache_spec(index_dim=self.width, **size))
        elif self.scaled:
            widths = {"latent_dim": self.scaled, "rope_dim": self.width - self.scaled}
            entries = PagedLatent.allocate(latent_cache_spec(**size, **widths, scale_dtype=jnp.float8_e8m0fnu))
        else:
            entries = PagedLatent.allocate(latent_cache_spec(latent_dim=self.width, rope_dim=0, **size))
        return PagedLatent.allocate(state), entries


def angles(case: CompressCase, position: np.ndarray) -> np.ndarray:
    """Return the rotation angles [T, half] of the first position of the block of each token."""
    first = position - position % case.ratio
    return first[:, None] * np.array([0.7 * 0.3**i for i in range(case.rotary // 2)])[None]


def entry(case: CompressCase, rows: np.ndarray, exists: np.ndarray, e: int, norm: np.ndarray) -> np.ndarray:
    """Return entry e of a sequence, float64 [D].

    Args:
      rows: [tokens, 2·c·D], all rows of the sequence.
      exists: bool [tokens], rows that are not missing.
    """
    m, d, own = case.ratio, case.width, (case.halves - 1) * case.width
    contents, gates = np.split(rows.astype(np.float64), 2, axis=1)
    pooled = [(t, own) for t in range(m * e, m * e + m)]
    if case.overlap and e > 0:
        pooled += [(t, 0) for t in range(m * e - m, m * e)]
    pooled = [(t, column) for t, column in pooled if exists[t]]
    k, g = (np.stack([part[t, column : column + d] for t, column in pooled]) for part in (contents, gates))
    weights = np.exp(g - g.max(axis=0))
    value = (weights * k).sum(axis=0) / weights.sum(axis=0)
    value = value / np.sqrt((value**2).mean() + NORM_EPS) * norm
    result = value.copy()
    for i, angle in enumerate(angles(case, np.array([m * e]))[0]):
        u = d - case.rotary + 2 * i
        result[u] = value[u] * np.cos(angle) - value[u + 1] * np.sin(angle)
        result[u + 1] = value[u + 1] * np.cos(angle) + value[u] * np.sin(angle)
    return result


@dataclass(frozen=True)
class CompressInputs:
    """A case with drawn values.

    Attributes:
      rows: all rows of each sequence, [tokens, 2·c·D] each.
      norm: [D].
      state: pages of the state before the call, without poison, float32 [N, ps, 2·c·D].
      entries: arrays of the cache of entries before the call; random bits.
      read: bool [N, ps], slots of the state that an entry pools.
      missing: bool [tokens] of each sequence, rows that are neither in a page nor new.
    """

    case: CompressCase
    rng: np.random.Generator
    rows: list[np.ndarray]
    norm: np.ndarray
    state_tables: np.ndarray
    entry_tables: np.ndarray
    state: np.ndarray
    entries: tuple[np.ndarray, ...]
    read: np.ndarray
    missing: list[np.ndarray]

    @staticmethod
    def draw(case: CompressCase, rng: np.random.Generator) -> CompressInputs:
        sequences, m = len(case.kv_lens), case.ratio
        columns = 2 * case.halves * case.width
        rows = [rng.standard_normal((n, columns)).astype(np.float32) for n in case.kv_lens]
        num_pages = 1 + sequences * max(case.state_pages, case.entry_pages)
        drawn = (rng.permutation(np.arange(1, num_pages)) for _ in range(2))
        state_tables, entry_tables = (
            ids[: sequences * pages].reshape(sequences, pages)
            for ids, pages in zip(drawn, (case.state_pages, case.entry_pages), strict=True)
        )
        if case.shared:
            pages = min(n - q for n, q in zip(case.kv_lens[:2], case.q_lens[:2], strict=True)) // case.page_size
            state_tables[1, :pages] = state_tables[0, :pages]
            rows[1][: pages * case.page_size] = rows[0][: pages * case.page_size]
        used = np.zeros(state_tables.shape, bool)
        state = np.zeros((num_pages, case.page_size, columns), np.float32)
        read, missing = np.zeros(state.shape[:2], bool), []
        absent = rng.random(state_tables.shape) < (0.3 if case.absent else 0.0)
        entry_tables[rng.random(entry_tables.shape) < (0.3 if case.absent else 0.0)] = -1
        for s, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
            start = kv_len - q_len
            oldest = m * (start // m) - (case.halves - 1) * m if kv_len // m > start // m else start
            lost = np.zeros(kv_len, bool)
            for t in range(max(oldest, 0), kv_len):
                page, offset = divmod(t, case.page_size)
                used[s, page] = True
                lost[t] = absent[s, page] and t < start
                if t < start and not lost[t]:
                    state[state_tables[s, page], offset] = rows[s][t]
                    read[state_tables[s, page], offset] = True
            missing.append(lost)
        state_tables = np.where(
            absent, -1, np.where(used, state_tables, rng.choice([harness.GARBAGE, -harness.GARBAGE, 0], used.shape))
        )
        _, allocated = case.allocate(num_pages)
        entries = tuple(harness.any_bits(rng, a.shape, a.dtype) for a in jax.tree.leaves(allocated))
        norm = rng.uniform(0.5, 2, case.width).astype(np.float32)
        tables = state_tables.astype(np.int32), entry_tables.astype(np.int32)
        return CompressInputs(case, rng, rows, norm, *tables, state, entries, read, missing)

    @property
    def positions(self) -> np.ndarray:
        """Position of each packed token; -1 for padding."""
        lens = zip(self.case.kv_lens, self.case.q_lens, strict=True)
        return np.concatenate([*(np.arange(n - q, n) for n, q in lens), np.full(self.case.padding, -1)])

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments. Elements that must not affect the result are NaN or infinite if `poisoned`, else
        0. New tokens whose row no entry pools also count as such elements in `cos` and `sin`.
        """
        fill = functools.partial(harness.poison, self.rng) if poisoned else harness.zero
        case, position = self.case, self.positions
        lens = zip(self.rows, case.kv_lens, case.q_lens, strict=True)
        padding = np.zeros((case.padding, self.state.shape[-1]), np.float32)
        rows = np.concatenate([*(rows[n - q :] for rows, n, q in lens), padding])
        completes = (position >= 0) & (position % case.ratio == case.ratio - 1)
        angle = angles(case, position)
        entries = [jnp.asarray(array) for array in self.entries]
        return {
            "state": PagedLatent(jnp.asarray(fill(self.state, ~self.read))),
            "entries": PagedIndexKeys(*entries) if case.index else PagedLatent(*entries),
            "rows": fill(rows, position < 0),
            "norm": self.norm,
            "cos": fill(np.cos(angle).astype(np.float32), ~completes),
            "sin": fill(np.sin(angle).astype(np.float32), ~completes),
            "state_tables": self.state_tables,
            "entry_tables": self.entry_tables,
            "cu_q_lens": np.cumsum((0, *case.q_lens)).astype(np.int32),
            "kv_lens": np.array(case.kv_lens, np.int32),
        }

    def written(self) -> dict[int, np.ndarray]:
        """Return the entry that is written to each slot, float64 [D]."""
        case, found = self.case, {}
        for s, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
            for e in range((kv_len - q_len) // case.ratio, kv_len // case.ratio):
                page, offset = divmod(e, case.entry_page_size)
                if page < case.entry_pages and self.entry_tables[s, page] >= 0:
                    slot = int(self.entry_tables[s, page]) * case.entry_page_size + offset
                    found[slot] = entry(case, self.rows[s], ~self.missing[s], e, self.norm)
        return found

    def state_after(self, before: np.ndarray) -> np.ndarray:
        """Return the pages of the state after the call."""
        after, case = before.copy(), self.case
        for s, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
            for t in range(kv_len - q_len, kv_len):
                page = self.state_tables[s, t // case.page_size]
                if 0 <= page < after.shape[0]:
                    after[page, t % case.page_size] = self.rows[s][t]
        return after


BASE = CompressCase()
HCA = replace(BASE, overlap=False)
CASES = {
    "overlapping": BASE,
    "separate": HCA,
    "decode": replace(BASE, kv_lens=(0, 1, 4, 8, 15, 16, 33, 2), q_lens=(0, 1, 1, 1, 1, 1, 1, 1), padding=0),
    "drafts": replace(HCA, kv_lens=(5, 8, 9, 14, 34), q_lens=(4, 4, 4, 4, 4)),
    "blocks of 16": replace(
        HCA, ratio=16, kv_lens=(16, 40, 17, 90, 15), q_lens=(16, 20, 2, 1, 15), page_size=8, state_pages=12
    ),
    "blocks of 128": replace(
        HCA, ratio=128, kv_lens=(128, 300, 257, 20), q_lens=(1, 290, 2, 20), page_size=64, state_pages=5
    ),
    "blocks of 3, overlapping": replace(BASE, ratio=3, rotary=2, width=16),
    "absent pages": replace(BASE, absent=True),
    "absent pages, separate": replace(HCA, absent=True),
    "shared pages": replace(BASE, kv_lens=(19, 19, 6), q_lens=(3, 1, 3), shared=True),
    "short tables of entries": replace(BASE, entry_pages=1),
    "one sequence": replace(BASE, kv_lens=(33,), q_lens=(33,), padding=0),
    "nothing complete": replace(BASE, kv_lens=(3, 6, 11), q_lens=(3, 2, 3)),
    "all columns rotated": replace(BASE, rotary=32),
    "bfloat16": replace(BASE, dtype="bfloat16", width=128, rotary=64),
    "float16, wide": replace(HCA, dtype="float16", width=512, rotary=64),
    "index keys": replace(BASE, index=True, width=128, dtype="bfloat16"),
    "index keys, 8 bits": replace(BASE, index=True, width=128, dtype="float8_e4m3fn"),
    "8 bits and rotated columns": replace(BASE, scaled=128, width=192, rotary=64, dtype="float8_e4m3fn"),
}
TOLERANCES = {
    "float32": harness.Tolerance(1e-5, 1e-5, 1e-9),
    "float16": harness.Tolerance(1e-5, 2**-10, 1e-6),
    "bfloat16": harness.Tolerance(1e-5, 2**-7, 1e-5),
    "float8_e4m3fn": harness.Tolerance(2e-3, 2**-3, 2e-3),
}


def compress(backend: Backend, case: CompressCase = BASE) -> harness.Jitted:
    return backends.compiled(compress_and_write, backend, ratio=case.ratio, norm_eps=NORM_EPS)


def meant(entries: PagedLatent | PagedIndexKeys, slots: Any) -> np.ndarray:
    """Return the entries in slots, float32 [slots, D]."""
    arrays = [np.asarray(a).reshape(-1, a.shape[-1])[slots].astype(np.float32) for a in jax.tree.leaves(entries)]
    if len(arrays) == 3:
        pages, scale, rotated = arrays
        return np.concatenate([pages * np.repeat(scale, 64, axis=-1), rotated], axis=-1)
    return arrays[0] if len(arrays) == 1 else arrays[0] * arrays[1]


@backends.every_case("compress_and_write", CASES)
@in_every_run(
    reference=["overlapping", "absent pages", "index keys, 8 bits", "8 bits and rotated columns"],
    xla=[
        "decode", "drafts", "blocks of 128", "blocks of 3, overlapping", "absent pages",
        "short tables of entries", "index keys, 8 bits", "8 bits and rotated columns",
    ],
    triton=["overlapping", "absent pages", "index keys, 8 bits", "8 bits and rotated columns"],
)  # fmt: skip
def test_values(backend: Backend, name: str) -> None:
    """Entries equal a computation in NumPy; rows, and all bits of both caches that are not written, are exact."""
    inputs = CompressInputs.draw(CASES[name], harness.fresh_rng())
    arguments = inputs.arguments()
    state, entries = compress(backend, inputs.case)(**arguments)
    harness.assert_same_bits(state.pages, inputs.state_after(np.asarray(arguments["state"].pages)))
    written = inputs.written()
    if not name.startswith("absent pages"):  # the pages of all completed blocks may be absent
        assert bool(written) == (name != "nothing complete")
    slots = sorted(written)
    if slots:
        want = np.stack([written[slot] for slot in slots])
        harness.assert_close("entries", meant(entries, slots), want, TOLERANCES[inputs.case.dtype])
    for got, before in zip(jax.tree.leaves(entries), inputs.entries, strict=True):
        rest = np.delete(np.arange(before.shape[0] * before.shape[1]), slots)
        flat = (np.asarray(array).reshape(-1, array.shape[-1])[rest] for array in (got, before))
        harness.assert_same_bits(*flat)
    clean = inputs.arguments(poisoned=False)
    harness.assert_same_bits(compress(backend, inputs.case)(**clean)[1], entries)


@every_backend
@in_every_run("triton")
def test_the_configuration_a_user_gets(backend: Backend) -> None:
    inputs, backend = CompressInputs.draw(BASE, harness.fresh_rng()), backends.as_users_get(backend)
    _, entries = compress(backend)(**inputs.arguments())
    want = inputs.written()
    harness.assert_close(
        "entries", meant(entries, sorted(want)), [want[i] for i in sorted(want)], TOLERANCES["float32"]
    )


@pytest.mark.parametrize("name", ["overlapping", "separate"])
@every_backend
@in_every_run(reference=["overlapping"], xla=["separate"], triton=["overlapping"])
def test_chunks_drafts_and_reused_pages(backend: Backend, name: str) -> None:
    """Sequences are computed in chunks of any length, each followed by rejected drafts. All entries equal a computation
    over the whole sequence. Pages that leave the window are poisoned, and pages are reused between two generations of
    sequences.
    """
    case, rng = CASES[name], harness.fresh_rng()
    totals, sequences, drafts = (33, 3, 20), 3, 2
    window, step = case.halves * case.ratio, 7
    case = replace(case, kv_lens=(0,) * sequences, q_lens=(0,) * sequences, padding=sequences * (step + drafts) + 1)
    call, norm = compress(backend, case), rng.uniform(0.5, 2, case.width).astype(np.float32)
    num_pages = sequences * case.state_pages
    state, entries = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), case.allocate(num_pages))
    for _ in range(2):
        rows = [rng.standard_normal((n, 2 * case.halves * case.width)).astype(np.float32) for n in totals]
        tables = [rng.permutation(num_pages).reshape(sequences, -1).astype(np.int32) for _ in range(2)]
        tables[1] = tables[1][:, : case.entry_pages]
        done = np.zeros(sequences, int)
        while (done < totals).any():
            accepted = np.minimum(rng.integers(0, step + 1, sequences), np.array(totals) - done)
            new = accepted + np.where(accepted > 0, rng.integers(0, drafts + 1, sequences), 0)
            packed, positions = [], []
            for s, (first, real, count) in enumerate(zip(done, accepted, new, strict=True)):
                packed += [rows[s][first : first + real]]
                packed += [rng.standard_normal((count - real, rows[s].shape[1])).astype(np.float32)]
                positions += [np.arange(first, first + count)]
            positions += [np.zeros(case.padding - new.sum(), int)]
            packed += [np.full((case.padding - new.sum(), rows[0].shape[1]), np.nan, np.float32)]
            kept = np.maximum(done - window + 1, 0) // case.page_size  # first page in the window of the next token
            gone = np.arange(case.state_pages)[None] < kept[:, None]
            poisoned = np.array(state.pages)
            poisoned[tables[0][gone]] = np.nan
            angle = angles(case, np.concatenate(positions))
            state, entries = call(
                state=PagedLatent(jnp.asarray(poisoned)),
                entries=entries,
                rows=np.concatenate(packed),
                norm=norm,
                cos=np.cos(angle).astype(np.float32),
                sin=np.sin(angle).astype(np.float32),
                state_tables=np.where(gone, -1, tables[0]),
                entry_tables=tables[1],
                cu_q_lens=np.cumsum((0, *new)).astype(np.int32),
                kv_lens=(done + new).astype(np.int32),
            )
            done = done + accepted
        for s, total in enumerate(totals):
            for e in range(total // case.ratio):
                slot = tables[1][s, e // case.entry_page_size] * case.entry_page_size + e % case.entry_page_size
                want = entry(case, rows[s], np.ones(total, bool), e, norm)
                harness.assert_close(f"entry {e} of {s}", meant(entries, slot), want, TOLERANCES["float32"])


@every_backend
@in_every_run("xla")
def test_large_gates(backend: Backend) -> None:
    """Gates of large magnitude do not overflow: a row whose gates are largest is the pooled row."""
    case = replace(HCA, kv_lens=(8,), q_lens=(8,), padding=0, rotary=2)
    inputs = CompressInputs.draw(case, harness.fresh_rng())
    inputs.rows[0][:, case.width :] = -1e30
    inputs.rows[0][[1, 6], case.width :] = [[3e38], [-1e29]]
    _, entries = compress(backend, case)(**inputs.arguments())
    want = inputs.written()
    harness.assert_close(
        "entries", meant(entries, sorted(want)), [want[i] for i in sorted(want)], TOLERANCES["float32"]
    )


METADATA = ("state_tables", "entry_tables", "cu_q_lens", "kv_lens")
WRONG = (-(2**31), -harness.GARBAGE, -17, -1, 0, 1, 13, 37, 1000, 4_000_000, 2**30, harness.GARBAGE, 2**31 - 1)


@backends.every_backend("compress_and_write", backends.is_lean)
@in_every_run("xla", "triton")
def test_garbage_is_followed_alike(backend: Backend) -> None:
    """With wrong lengths, prefix sums and page ids, a backend writes what `reference` writes. Page ids stay distinct,
    because two programs must not write one slot: wrong ids are outside the pool, and unused entries are not page 0.
    """
    rng, reference = harness.fresh_rng(), backends.BACKENDS[0]
    right = CompressInputs.draw(BASE, rng).arguments(poisoned=False)
    right["entries"] = jax.tree.map(jnp.zeros_like, right["entries"])
    right["state_tables"] = np.where(right["state_tables"] == 0, -1, right["state_tables"])
    for _ in range(2 if backend.interpreted else 20):
        arguments = right | {name: np.array(right[name]) for name in METADATA}
        for name in rng.choice(METADATA, 5):
            outside = [number for number in WRONG if not 0 <= number < 100]
            arguments[name].flat[rng.integers(arguments[name].size)] = rng.choice(
                outside if name.endswith("tables") else WRONG
            )
        got, want = (compress(each, BASE)(**arguments) for each in (backend, reference))
        harness.assert_same_bits(got[0], want[0])
        harness.assert_close("entries", got[1].pages, want[1].pages, TOLERANCES["float32"])


# --- transformations and compiled programs


@every_backend
@in_every_run("xla")
def test_under_vmap(backend: Backend) -> None:
    rng, call = harness.fresh_rng(), compress(backend)
    drawn = [CompressInputs.draw(BASE, rng).arguments(poisoned=False) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(each) for each in x]), *drawn)
    got = jax.jit(jax.vmap(lambda each: call(**each)))(stacked)
    for i, each in enumerate(drawn):
        state, entries = call(**each)
        harness.assert_same_bits(got[0].pages[i], state.pages)
        pages, want = np.asarray(got[1].pages[i]), np.asarray(entries.pages)
        finite = np.isfinite(want)
        harness.assert_close("entries", pages[finite], want[finite], TOLERANCES["float32"])


@backends.every_backend("compress_and_write", backends.is_compiled)
@in_every_run("xla")
def test_exported(backend: Backend) -> None:
    transformations.assert_exports(compress(backend), CompressInputs.draw(BASE, harness.fresh_rng()).arguments())


@backends.every_backend("compress_and_write", backends.is_compiled)
@in_every_run("xla")
def test_compiled_once_for_all_values_without_the_host_and_under_its_name(backend: Backend) -> None:
    cases = (BASE, replace(BASE, kv_lens=(0, 1, 4, 9, 3, 30, 21, 17, 33), absent=True))
    calls = [CompressInputs.draw(case, harness.fresh_rng()).arguments() for case in cases]
    transformations.assert_traced_once(functools.partial(compress_and_write, ratio=4), backend.variant, calls)
    harness.assert_no_host_callbacks(compress(backend), **calls[0])
    assert "compress_and_write" in harness.scope_names(compress(backend), **calls[0])


def shapes(tokens: int, sequences: int, pages: int, halves: int) -> dict[str, Any]:
    """Return arguments of 512 columns as shapes; state and entries have equally many bytes."""
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    state_pages: Any = f32((pages, 16, 1024 * halves))
    entry_pages: Any = jax.ShapeDtypeStruct((pages, 64 * halves, 512), jnp.bfloat16)
    return {
        "state": PagedLatent(state_pages),
        "entries": PagedLatent(entry_pages),
        "rows": f32((tokens, 1024 * halves)),
        "norm": f32((512,)),
        "cos": f32((tokens, 32)),
        "sin": f32((tokens, 32)),
        "state_tables": i32((sequences, 8)),
        "entry_tables": i32((sequences, 8)),
        "cu_q_lens": i32((sequences + 1,)),
        "kv_lens": i32((sequences,)),
    }


@slow_cases("4-state", "128-entries")
@pytest.mark.parametrize("array", ["state", "entries"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_written_in_place(array: str, ratio: int) -> None:
    arguments = shapes(4, 3, 4096, 2 if ratio == 4 else 1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def call(state: PagedLatent, entries: PagedLatent, rest: dict[str, Any]) -> Any:
        return compress_and_write(state, entries, **rest, ratio=ratio, implementation="xla")

    state, entries = arguments.pop("state"), arguments.pop("entries")
    pages = (state if array == "state" else entries).pages
    harness.assert_stays_put(call, pages, state, entries, arguments)


@slow_cases("128")
@pytest.mark.parametrize("ratio", [4, 128])
def test_memory_is_bounded(ratio: int) -> None:
    """Temporary memory is at most 64 MiB, also for 8,192 new tokens, whose rows take 64 or 32 MiB."""
    call = backends.compiled(compress_and_write, XLA, ratio=ratio)
    for tokens, sequences in ((64, 64), (8192, 1)):
        assert harness.temp_bytes(call, **shapes(tokens, sequences, 512, 2 if ratio == 4 else 1)) < 64 << 20


# --- bad arguments


def good() -> dict[str, Any]:
    return jax.tree.map(jnp.asarray, CompressInputs.draw(BASE, np.random.default_rng(0)).arguments()) | {"ratio": 4}


BAD = {
    "an array for the state": ("state", {"state": jnp.zeros((8, 4, 128))}),
    "a 16-bit state": ("state.pages", {"state": PagedLatent(jnp.zeros((8, 4, 128), jnp.bfloat16))}),
    "a state of another width": ("state.pages", {"state": PagedLatent(jnp.zeros((8, 4, 64)))}),
    "a state with scales": ("state.scale", {"state": PagedLatent(jnp.zeros((8, 4, 128)), jnp.ones((8, 4, 1)))}),
    "an array for the entries": ("entries", {"entries": jnp.zeros((8, 3, 32))}),
    "entries of another width": ("entries.pages", {"entries": PagedLatent(jnp.zeros((8, 3, 64)))}),
    "8-bit entries without scales": (
        "entries.scale",
        {"entries": PagedLatent(jnp.zeros((8, 3, 32), jnp.float8_e4m3fn))},
    ),
    "entries with rotated keys": (
        "entries.rope",
        {"entries": PagedLatent(jnp.zeros((8, 3, 32)), rope=jnp.zeros((8, 3, 2)))},
    ),
    "index keys of another width": ("entries.keys", {"entries": PagedIndexKeys(jnp.zeros((8, 3, 64)))}),
    "16-bit rows": ("rows", {"rows": jnp.zeros((30, 128), jnp.bfloat16)}),
    "three halves of rows": ("rows", {"rows": jnp.zeros((30, 192))}),
    "norm of rank 2": ("norm", {"norm": jnp.ones((1, 32))}),
    "cosines of other tokens": ("cos", {"cos": jnp.ones((29, 4))}),
    "too many cosines": ("cos", {"cos": jnp.ones((30, 17)), "sin": jnp.ones((30, 17))}),
    "other sines": ("sin", {"sin": jnp.ones((30, 3))}),
    "float tables": ("state_tables", {"state_tables": jnp.zeros((9, 9))}),
    "tables of other sequences": ("entry_tables", {"entry_tables": jnp.zeros((8, 4), jnp.int32)}),
    "sums of other sequences": ("cu_q_lens", {"cu_q_lens": jnp.zeros(9, jnp.int32)}),
    "lengths of other sequences": ("kv_lens", {"kv_lens": jnp.zeros(8, jnp.int32)}),
    "a ratio of 0": ("ratio", {"ratio": 0}),
    "no epsilon": ("norm_eps", {"norm_eps": None}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}:"):
        compress_and_write(**good() | change)


def test_no_tokens() -> None:
    arguments = good()
    empty = {name: arguments[name][:0] for name in ("rows", "cos", "sin")} | {"cu_q_lens": jnp.zeros(10, jnp.int32)}
    state, entries = compress_and_write(**arguments | empty)
    harness.assert_same_bits((state, entries), (arguments["state"], arguments["entries"]))
    none = {name: arguments[name][:0] for name in ("state_tables", "entry_tables", "kv_lens")}
    state, entries = compress_and_write(**arguments | none | {"cu_q_lens": jnp.zeros(1, jnp.int32)})
    harness.assert_same_bits((state, entries), (arguments["state"], arguments["entries"]))
