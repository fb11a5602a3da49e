"""Inputs of `index_scores` and `index_top_k`, and the expected results in plain numpy.

An `IndexCase` describes a call. `IndexInputs.draw` draws its values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn import PagedIndexKeys
from tests.kit import harness

SM_SCALE = 0.25  # a power of two: scaling an exact score does not round it


@dataclasses.dataclass(frozen=True)
class IndexCase:
    """One call of `index_scores` or `index_top_k`.

    Attributes:
      kv_lens: number of tokens of each sequence, including new tokens.
      q_lens: number of new tokens of each sequence.
      padding: number of tokens at the end that belong to no sequence.
      dtype: dtype of the queries; None for the `dtype` of `IndexInputs.draw`.
      cache_dtype: dtype of the index keys; None for the dtype of the queries. With float8_e4m3fn, keys have scales.
      tree: number of columns of a random draft mask, which covers the newest keys of each token; 0 for no mask.
      absent_pages: whether some pages between visible tokens are absent (PAGE_NONE), so that their tokens are not
      visible.
      ratio: tokens per key; above 1, kv_lens counts tokens, and the last keys of a token belong to complete blocks.
      exact: whether inputs are small integers, so that scores are exact in any order of summation, and often equal.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    padding: int = 3
    heads: int = 3
    index_dim: int = 32
    page_size: int = 8
    pages_per_row: int = 9
    num_pages: int = 64
    dtype: str | None = None
    cache_dtype: str | None = None
    tree: int = 0
    absent_pages: bool = False
    ratio: int = 1
    exact: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.padding


@dataclasses.dataclass(frozen=True)
class IndexInputs:
    """A case with drawn values.

    Attributes:
      q: index queries [T, Hi, Di].
      weights: weights of the index heads [T, Hi].
      keys: dequantised index keys of every slot, [N, ps, Di].
      stored: arrays of the cache: keys, and scales with float8_e4m3fn.
      draft_mask: bool [T, tree], or None.
      tables: block tables, int32 [S, P].
      sequence: sequence of each token, [T]; -1 for padding.
      visible: bool [T, K], whether a token sees a key; K = P * page size.
      dead: bool [N, ps], slots that no token sees.
    """

    case: IndexCase
    rng: np.random.Generator
    q: np.ndarray
    weights: np.ndarray
    keys: np.ndarray
    stored: tuple[np.ndarray, ...]
    draft_mask: np.ndarray | None
    tables: np.ndarray
    sequence: np.ndarray
    visible: np.ndarray
    dead: np.ndarray

    @staticmethod
    def draw(case: IndexCase, rng: np.random.Generator, dtype: str = "float32") -> IndexInputs:
        batch, dtype = len(case.kv_lens), case.dtype or dtype
        sequence = np.append(np.repeat(np.arange(batch), case.q_lens), np.full(case.padding, -1))
        absent = rng.random((batch, 1, case.pages_per_row)) < (0.25 if case.absent_pages else 0.0)
        t = np.arange(case.pages_per_row * case.page_size)
        visible = np.zeros((case.num_tokens, t.size), bool)
        mask = rng.random((case.num_tokens, case.tree)) < 0.5
        for s, (kv_len, q_len, first) in enumerate(
            zip(case.kv_lens, case.q_lens, np.cumsum((0, *case.q_lens)), strict=False)
        ):
            for i in range(q_len):
                position = kv_len - q_len + i
                visible[first + i] = (t < (position + 1) // case.ratio) & ~np.repeat(absent[s, 0], case.page_size)
                for j, shown in enumerate(mask[first + i]):
                    if position - case.tree + 1 + j >= 0:
                        visible[first + i, position - case.tree + 1 + j] &= shown
        seen = np.stack([visible[sequence == s].any(axis=0) for s in range(batch)])[:, None]
        size = {"page_size": case.page_size, "num_pages": case.num_pages}
        tables = harness.paginate(rng, seen, **size, absent=absent if case.absent_pages else None)
        dead = harness.dead_slots(tables, seen, **size)[:, 0]
        draw = (lambda *shape: rng.integers(-3, 4, shape)) if case.exact else (lambda *shape: rng.normal(size=shape))
        q = draw(case.num_tokens, case.heads, case.index_dim).astype(dtype)
        weights = draw(case.num_tokens, case.heads).astype(np.float32)
        keys = draw(case.num_pages, case.page_size, case.index_dim).astype(case.cache_dtype or dtype)
        stored = (keys,)
        if case.cache_dtype == "float8_e4m3fn":
            scale = 2.0 ** rng.integers(-2, 3, (*keys.shape[:2], 1)).astype(np.float32)
            stored, keys = (keys, scale), keys.astype(np.float32) * scale
        draft_mask = mask if case.tree else None
        return IndexInputs(case, rng, q, weights, keys, stored, draft_mask, tables, sequence, visible, dead)

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments. Elements that must not affect the result are NaN or garbage if `poisoned`,
        otherwise 0.
        """
        fill = harness.poison if poisoned else lambda _, *arrays: harness.zero(*arrays)
        padding = self.sequence < 0
        trees = {} if self.draft_mask is None else {"draft_mask": self.draft_mask}
        return trees | {
            "q": fill(self.rng, self.q, padding),
            "weights": fill(self.rng, self.weights, padding),
            "index": PagedIndexKeys(*(jnp.asarray(fill(self.rng, part, self.dead)) for part in self.stored)),
            "block_tables": self.tables,
            "cu_q_lens": np.cumsum((0, *self.case.q_lens)).astype(np.int32),
            "kv_lens": np.array(self.case.kv_lens, np.int32),
        }

    def scores(self) -> np.ndarray:
        """Return scores [T, K] in float64, -inf for invisible keys."""
        ps, scores = self.case.page_size, np.full(self.visible.shape, -np.inf)
        for token, position in np.argwhere(self.visible):
            key = self.keys[self.tables[self.sequence[token], position // ps], position % ps].astype(np.float64)
            products = np.maximum(self.q[token].astype(np.float64) @ key * SM_SCALE, 0)
            scores[token, position] = self.weights[token].astype(np.float64) @ products
        return scores


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Return the positions [T, top_k] of the highest scores in ascending order. Of equal scores, the lowest positions
    are selected. Rows with fewer finite scores are padded with -1.
    """
    chosen = np.full((scores.shape[0], top_k), -1, np.int32)
    for row, values in zip(chosen, scores, strict=True):
        ranked = sorted(np.flatnonzero(values > -np.inf), key=lambda t: (-values[t], t))[:top_k]
        row[: len(ranked)] = sorted(ranked)
    return chosen
