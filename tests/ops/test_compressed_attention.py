"""Attention of DeepSeek-V4 to a window and to compressed entries: the operations together, compared with float64.

Sequences are computed in chunks of any length, so that each chunk needs state of earlier chunks.
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
    PagedLatent,
    compress_and_write,
    entry_slots,
    index_top_k,
    mla_sparse,
    slot_mapping,
    token_slots,
    window_slots,
    write_latent,
)
from tests.contract.test_compress_and_write import NORM_EPS, CompressCase, angles, entry
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

WINDOW, HEADS, INDEX_HEADS, TOP_K, SCALE = 6, 3, 2, 3, 0.3
CSA = CompressCase(kv_lens=(30, 3, 18), q_lens=(0, 0, 0), state_pages=8)
HCA = replace(CSA, overlap=False, ratio=8)
STEPS = 8
"""Most new tokens of a sequence in a chunk."""


def expected(case: CompressCase, x: dict[str, Any], p: int) -> np.ndarray:
    """Return the attention output of the token at position p of a sequence, float64 [heads, D].

    Args:
      x: queries, window keys, rows and index arrays of the sequence, and weights, by name.
    """
    count, exists = (p + 1) // case.ratio, np.ones(len(x["rows"]), bool)
    entries = [entry(case, x["rows"], exists, e, x["norm"]) for e in range(count)]
    if case.overlap and count > TOP_K:
        keys = np.stack([entry(case, x["index_rows"], exists, e, x["norm"]) for e in range(count)])
        scores = x["weights"][p] @ np.maximum(x["index_q"][p] @ keys.T * case.width**-0.5, 0)
        entries = [entries[e] for e in sorted(np.argsort(-scores, stable=True)[:TOP_K])]
    keys = np.stack([*x["keys"][max(p - WINDOW + 1, 0) : p + 1], *entries]).astype(np.float64)
    weights = np.exp(SCALE * x["q"][p].astype(np.float64) @ keys.T)
    return weights @ keys / (weights.sum(axis=1) + np.exp(x["sinks"]))[:, None]


def step(case: CompressCase, implementation: str, caches: tuple[Any, ...], x: dict[str, Any]) -> tuple[Any, Any]:
    """Write the new tokens of a chunk, and return the caches and the attention output."""
    state, entries, index_state, index, window = caches
    lengths = {"cu_q_lens": x["cu_q_lens"], "kv_lens": x["kv_lens"]}
    length, tables = x["q"].shape[0], x["tables"]
    pages = {"page_size": case.page_size, "length": length}
    compress: Any = functools.partial(
        compress_and_write, ratio=case.ratio, norm_eps=NORM_EPS, implementation=implementation
    )
    shared = [x[name] for name in ("norm", "cos", "sin", "tables", "entry_tables", "cu_q_lens", "kv_lens")]
    state, entries = compress(state, entries, x["rows"], *shared)
    window = write_latent(window, x["keys"], slot_mapping(tables, **lengths, **pages))
    entry_pages = {"page_size": case.entry_page_size}
    if case.overlap:
        index_state, index = compress(index_state, index, x["index_rows"], *shared)
        chosen = index_top_k(
            *(x["index_q"], x["weights"], index, x["entry_tables"]),
            **lengths,
            top_k=TOP_K,
            ratio=case.ratio,
            implementation="xla",
        )
        slots = token_slots(chosen, x["entry_tables"], x["cu_q_lens"], **entry_pages)
    else:
        slots = entry_slots(x["entry_tables"], **lengths, ratio=case.ratio, length=length, **entry_pages)
    out = mla_sparse(
        *(x["q"], None, window, window_slots(tables, **lengths, window=WINDOW, **pages)),
        extra_cache=entries,
        extra_slots=slots,
        sinks=x["sinks"],
        sm_scale=SCALE,
        implementation="xla",
    )
    return (state, entries, index_state, index, window), out


@slow_cases("CSA-reference", "HCA-xla")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", [CSA, HCA], ids=["CSA", "HCA"])
def test_chunks_of_sequences(case: CompressCase, implementation: str) -> None:
    rng = harness.fresh_rng()
    sequences, columns, num_pages = len(case.kv_lens), 2 * case.halves * case.width, 24
    widths = {"keys": (case.width,), "rows": (columns,), "index_rows": (columns,), "weights": (INDEX_HEADS,)}
    widths |= {"q": (HEADS, case.width), "index_q": (INDEX_HEADS, case.width)}
    drawn = [
        {name: rng.standard_normal((n, *shape)).astype(np.float32) for name, shape in widths.items()}
        for n in case.kv_lens
    ]
    fixed: dict[str, Any] = {
        "norm": rng.uniform(0.5, 2, case.width).astype(np.float32),
        "sinks": rng.normal(size=HEADS),
    }
    fixed["sinks"] = fixed["sinks"].astype(np.float32)
    tables, entry_tables = (rng.permutation(num_pages).reshape(sequences, -1).astype(np.int32) for _ in range(2))
    state, entries = case.allocate(num_pages)
    index = PagedIndexKeys(*jax.tree.leaves(entries))
    window = PagedLatent(jnp.zeros((num_pages, case.page_size, case.width)))
    caches = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), (state, entries, state, index, window))
    compiled = jax.jit(functools.partial(step, case, implementation))
    done, length = np.zeros(sequences, int), sequences * STEPS
    while (done < case.kv_lens).any():
        new = np.minimum(rng.integers(0, STEPS + 1, sequences), np.array(case.kv_lens) - done)
        places = [(s, t) for s in range(sequences) for t in range(done[s], done[s] + new[s])]
        done += new
        position = np.array([t for _, t in places] + [0] * (length - len(places)))
        packed = {name: np.full((length, *shape), np.nan, np.float32) for name, shape in widths.items()}
        for i, (s, t) in enumerate(places):
            for name in widths:
                packed[name][i] = drawn[s][name][t]
        angle = angles(case, position)
        caches, out = compiled(
            caches,
            packed
            | fixed
            | {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
            | {"tables": tables, "entry_tables": entry_tables, "kv_lens": done.astype(np.int32)}
            | {"cu_q_lens": np.cumsum((0, *new)).astype(np.int32)},
        )
        for i, (s, t) in enumerate(places):
            want = expected(case, drawn[s] | fixed, t)
            harness.assert_close(f"token {t} of sequence {s}", out[i], want, harness.Tolerance(1e-4, 1e-4, 1e-8))
        assert not np.count_nonzero(np.asarray(out)[len(places) :])
