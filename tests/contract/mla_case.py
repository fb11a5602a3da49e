"""Inputs of `mla_decode`, and the expected results in plain numpy.

An `MlaCase` describes a call. `Inputs.draw` draws its values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_attn import PagedLatent
from tests.contract import naive
from tests.kit import harness

SM_SCALE = 0.0625  # a power of two: scaling an exact score does not round it


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """One call of `mla_decode`.

    Attributes:
      kv_lens: number of tokens of each sequence, including new tokens.
        q_lens: number of queries (new tokens) of each sequence; None if each sequence has `queries`.
        queries: Q of the queries [B, Q, Hq, L + R].
        dtype: dtype of the queries; None for `Backend.dtype`.
        cache_dtype: dtype of the cache; None for the dtype of the queries. With float8_e4m3fn, latents have scales and
        rotated keys are bfloat16.
        absent_pages: whether some pages between visible tokens are absent (PAGE_NONE), so that their tokens are not
        visible.
        tree: whether the call has a random draft mask, which is not causal and often hides the first draft column.
        window, soft_cap: arguments of the call.
        exact: whether inputs give exact scores, near +5e5 for some sequences and near -5e5 for others.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    queries: int = 1
    heads: int = 3
    latent_dim: int = 128
    rope_dim: int = 32
    page_size: int = 8
    pages_per_row: int = 6
    num_pages: int = 64
    dtype: str | None = "float32"
    cache_dtype: str | None = None
    absent_pages: bool = False
    tree: bool = False
    window: int | None = None
    soft_cap: float | None = None
    exact: bool = False

    @property
    def static(self) -> dict[str, Any]:
        """Static arguments of the call."""
        options = {"window": self.window, "soft_cap": self.soft_cap}
        return {name: option for name, option in options.items() if option is not None}

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (self.queries,) * len(self.kv_lens) if self.q_lens is None else self.q_lens

    @property
    def value_scale(self) -> float:
        return 1.0 if self.dtype == "float32" else harness.HALF_SCALE


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case with drawn values.

    Attributes:
      q: queries [B, Q, Hq, L + R].
      pages: latents and rotated keys [N, ps, L + R], with random values in every slot.
      tables: block tables, int32 [B, P].
      quantised: arrays (latents, scales, rotated keys) of an fp8 cache whose dequantised values are `pages`; None for
      other dtypes.
      visible: bool [B, Q, K], whether a query sees a token; K = P * page size.
      dead: bool [N, ps], slots that no query sees.
    """

    case: MlaCase
    rng: np.random.Generator
    q: np.ndarray
    pages: np.ndarray
    tables: np.ndarray
    visible: np.ndarray
    dead: np.ndarray
    draft_mask: np.ndarray | None
    quantised: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @staticmethod
    def draw(case: MlaCase, rng: np.random.Generator) -> Inputs:
        batch = len(case.kv_lens)
        mask = rng.random((batch, case.queries, case.queries)) < 0.6 if case.tree else None
        if mask is not None:
            mask[:, :, 0] = rng.random((batch, case.queries)) < 0.3
        absent = rng.random((batch, 1, case.pages_per_row)) < (0.25 if case.absent_pages else 0.0)
        visible = _visible(case, mask) & ~np.repeat(absent, case.page_size, axis=2)
        seen = visible.any(axis=1)[:, None]
        size = {"page_size": case.page_size, "num_pages": case.num_pages}
        tables = harness.paginate(rng, seen, **size, absent=absent if case.absent_pages else None)
        dead = harness.dead_slots(tables, seen, **size)[:, 0]
        q, pages = (_draw_exact if case.exact else _draw_normal)(case, rng)
        quantised = None
        if case.cache_dtype == "float8_e4m3fn":
            quantised, pages = _quantise(case, rng, pages)
        return Inputs(case, rng, q.astype(case.dtype), pages, tables, visible, dead, mask, quantised)

    def arguments(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments of `mla_decode`. Elements that must not affect the result are NaN or garbage if
        `poisoned`, otherwise 0.
        """
        case, fill = self.case, harness.poison if poisoned else lambda _, *arrays: harness.zero(*arrays)
        unused = np.arange(case.queries) >= np.array(case.query_lens)[:, None]
        q = fill(self.rng, self.q, unused)
        arguments = {
            "q_latent": q[..., : case.latent_dim],
            "q_rope": q[..., case.latent_dim :],
            "cache": PagedLatent(
                *(jnp.asarray(fill(self.rng, part, self.dead)) for part in self.quantised or (self.pages,))
            ),
            "block_tables": self.tables,
            "kv_lens": np.array(case.kv_lens, np.int32),
        }
        if case.q_lens is not None:
            arguments["q_lens"] = np.array(case.q_lens, np.int32)
        if self.draft_mask is not None:
            arguments["draft_mask"] = self.draft_mask
        return arguments

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected output [B, Q, Hq, L] and LSE [B, Q, Hq] in float64."""
        case = self.case
        out = np.zeros((*self.q.shape[:-1], case.latent_dim))
        lse = np.full(self.q.shape[:-1], -np.inf)
        for b, i in np.ndindex(self.q.shape[:2]):
            token = np.flatnonzero(self.visible[b, i])
            keys = self.pages[self.tables[b, token // case.page_size], token % case.page_size][:, None]
            out[b, i], lse[b, i] = naive.attend(
                self.q[b, i], keys, keys[..., : case.latent_dim], SM_SCALE, soft_cap=case.soft_cap
            )
        return out, lse


def _visible(case: MlaCase, mask: np.ndarray | None) -> np.ndarray:
    t = np.arange(case.pages_per_row * case.page_size)
    visible = np.zeros((len(case.kv_lens), case.queries, t.size), bool)
    for b, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
        for i in range(q_len):
            shown = t <= kv_len - q_len + i
            if mask is not None:
                column = t - (kv_len - q_len)
                shown = (column < 0) | mask[b, i, np.clip(column, 0, case.queries - 1)]
            if case.window is not None:
                shown = shown & (t > kv_len - q_len + i - case.window)
            visible[b, i] = shown & (t < kv_len)
    return visible


def _draw_normal(case: MlaCase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    width = case.latent_dim + case.rope_dim
    q = rng.standard_normal((len(case.kv_lens), case.queries, case.heads, width)) / case.value_scale
    pages = rng.standard_normal((case.num_pages, case.page_size, width)) * case.value_scale
    return q, _unquantised(case, pages)


def _unquantised(case: MlaCase, pages: np.ndarray) -> np.ndarray:
    """Round values to the dtype of an unquantised cache. Values of an fp8 cache are returned unchanged."""
    return pages if case.cache_dtype == "float8_e4m3fn" else pages.astype(case.cache_dtype or case.dtype)


def _quantise(
    case: MlaCase, rng: np.random.Generator, pages: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Quantise `pages` to fp8 with random scales.

    Returns:
      The arrays of the cache (latents, scales, rotated keys), and the dequantised pages [N, ps, L + R].

    """
    latent, rope = pages[..., : case.latent_dim], pages[..., case.latent_dim :].astype(ml_dtypes.bfloat16)
    groups = latent.reshape(*latent.shape[:2], -1, 128)
    scale = np.ones(groups.shape[:-1], np.float32)
    if not case.exact:
        scale = (case.value_scale * rng.uniform(0.02, 0.1, scale.shape)).astype(np.float32)
    stored = np.clip(groups / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    meant = (stored.astype(np.float32) * scale[..., None]).reshape(latent.shape)
    quantised = stored.reshape(latent.shape), scale, rope
    return quantised, np.concatenate([meant, rope.astype(np.float32)], axis=-1)


def _draw_exact(case: MlaCase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs with exact scores near +5e5 and -5e5.

    All keys are the same integer vector u with u·u near 5e5, and queries are u or, for every other sequence, -u. The
    last column is random so that scores differ. In the first half of the latent, queries are 0 and keys are random real
    numbers, which affect only the output.
    """
    width, values = case.latent_dim + case.rope_dim, case.latent_dim // 2
    u = rng.integers(0, 5, width) + int((5e5 / (width - values)) ** 0.5)
    if case.cache_dtype == "float8_e4m3fn":
        u = u.astype(ml_dtypes.float8_e4m3fn).astype(np.int64)
    pages = np.tile(u, (case.num_pages, case.page_size, 1)).astype(np.float64)
    pages[..., :values] = rng.standard_normal((*pages.shape[:2], values)) * case.value_scale
    pages[..., -1] = rng.integers(-8, 9, pages.shape[:2])
    q = np.tile(u, (len(case.kv_lens), case.queries, case.heads, 1))
    q[1::2] *= -1
    q[..., :values] = 0
    q[..., -1] = rng.integers(1, 4, q.shape[:-1])
    return q, _unquantised(case, pages)
