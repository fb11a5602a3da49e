"""Inputs of `paged_decode` and `paged_prefill`, and the expected results in plain numpy.

A `PagedCase` describes a call. `Inputs.draw` draws its values. The numpy code shares no code with the library, so tests
also compare the library's `reference` implementation with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_attn import FULL, HeadWindow, PagedKV, kv_cache_spec, to_nhd, token_tables, view_fused, view_nhd
from pallas_attn.types import QMAX, ScaleLayout
from tests.kit import harness


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """One call of `paged_decode` or `paged_prefill`.

    Attributes:
      kv_lens: number of tokens of each sequence, including new tokens.
        q_lens: number of queries (new tokens) of each sequence; None if each sequence has `queries` (decode only).
        queries: minimum Q of a decode call's queries [B, Q, Hq, D]; Q is larger if a sequence has more queries.
        tokens: T of a prefill call's queries [T, Hq, D], including padding; None for no padding.
        dtype: dtype of the queries; None for `Backend.dtype`.
        cache_dtype: dtype of the cache; None for the dtype of the queries.
        value_dtype: dtype of the values if it is not `cache_dtype` (decode only). Arrays of 16 bits have no scales.
        scales: argument `scales` of `kv_cache_spec`.
        value_dim: width of values; None for head_dim.
        tokens_first: whether the cache is a view of pages with tokens before heads, with an entry per token in block
        tables.
        fused: number of columns for keys, and for values, if both are in one array; None for separate arrays.
        head_windows: (window, sink tokens) of each KV head, for a `HeadWindow`.
        head_wise: whether each KV head has a block table, [B, Hkv, P], whose ids are page rows of any KV head.
        absent_pages: whether some pages between visible tokens are absent (PAGE_NONE), so that their tokens are not
        visible.
        sinks: sink logits: "ordinary" (standard normal), "large" (all 40), "-inf" (all), or "mixed"; None for no sinks.
        causal: whether a query sees only keys up to its position; False for prefill calls with `causal=False`.
        tree: whether the call has a random draft mask, which is not causal and often hides the first draft column.
        q_scales: whether queries are quantised to 8 bits, with a scale per head or per token and head (decode only).
        one_q_scale: scale of all queries, which are quantised to 8 bits; None for no quantisation.
        exact: whether inputs are integers with exact scores, near +5e5 for some sequences and near -5e5 for others.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    queries: int = 1
    tokens: int | None = None
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    fused: int | None = None
    tokens_first: bool = False
    page_size: int = 8
    pages_per_row: int = 8
    num_pages: int = 72
    dtype: str | None = "float32"
    cache_dtype: str | None = None
    value_dtype: str | None = None
    scales: ScaleLayout = None
    window: int | None = None
    head_windows: tuple[tuple[int, int], ...] | None = None
    head_wise: bool = False
    absent_pages: bool = False
    sinks: Literal["ordinary", "large", "-inf", "mixed"] | None = None
    causal: bool = True
    tree: bool = False
    q_scales: Literal["head", "token"] | None = None
    one_q_scale: float | None = None
    exact: bool = False
    soft_cap: float | None = None
    sm_scale: float | None = None

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (self.queries,) * len(self.kv_lens) if self.q_lens is None else self.q_lens

    @property
    def output_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def padding(self) -> int:
        """Number of queries of a prefill call that belong to no sequence, at the end."""
        return 0 if self.tokens is None else self.tokens - sum(self.query_lens)

    @property
    def static(self) -> dict[str, Any]:
        """Static arguments of the call."""
        static = {"window": self.window, "soft_cap": self.soft_cap, "sm_scale": self.sm_scale}
        static["q_scale"] = self.one_q_scale
        static |= {} if self.causal else {"causal": False}
        return {name: value for name, value in static.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case with drawn values.

    Attributes:
      q: queries [q_len, Hq, D] of each sequence.
      kv: arrays of the cache by name, with random values in every slot.
      tables: block tables, int32 [B, P] or [B, Hkv, P].
      visible: bool [B, Hkv, max(q_lens), K], whether a query sees a token; K = P * page size.
      dead: bool [N, Hkv, ps], slots that no query sees.
      q_scale: float32 scales of 8-bit queries, [Hq] or [B, Q, Hq]; None without scales.
    """

    case: PagedCase
    rng: np.random.Generator
    q: list[np.ndarray]
    kv: dict[str, np.ndarray]
    tables: np.ndarray
    visible: np.ndarray
    dead: np.ndarray
    draft_mask: np.ndarray | None
    sinks: np.ndarray | None
    q_scale: np.ndarray | None

    @staticmethod
    def draw(case: PagedCase, rng: np.random.Generator) -> Inputs:
        batch, width = len(case.kv_lens), max(case.queries, *case.query_lens, 1)
        mask = rng.random((batch, width, width)) < 0.6 if case.tree else None
        if mask is not None:
            mask[:, :, 0] = rng.random((batch, width)) < 0.3
        absent = np.zeros((batch, case.kv_heads, case.pages_per_row), bool)
        if case.absent_pages:
            absent = rng.random(absent.shape) < 0.25
            absent = absent if case.head_wise else np.repeat(absent[:, :1], case.kv_heads, axis=1)
        visible = _visible(case, mask, absent)
        seen = visible.any(axis=2)
        tables = harness.paginate(
            rng,
            seen,
            page_size=case.page_size,
            num_pages=case.num_pages,
            head_wise=case.head_wise,
            absent=absent if case.absent_pages else None,
        )
        q, kv = _draw_exact(case, rng, tables) if case.exact else _draw_normal(case, rng)
        dead = harness.dead_slots(tables, seen, page_size=case.page_size, num_pages=case.num_pages)
        sinks, q_scale = _draw_sinks(case, rng), None
        if case.q_scales:  # the scales are so small that some quantised queries saturate
            of_tokens = (batch, width) if case.q_scales == "token" else ()
            q_scale = rng.uniform(0.002, 0.02, (*of_tokens, case.q_heads)).astype(np.float32)
        if case.one_q_scale is not None:
            q_scale = np.full(case.q_heads, case.one_q_scale, np.float32)
        return Inputs(case, rng, q, kv, tables, visible, dead, mask, sinks, q_scale)

    def decode(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments of `paged_decode`. Elements that must not affect the result are NaN or garbage if
        `poisoned`, otherwise 0.
        """
        queries = max(self.case.queries, *self.case.query_lens)
        q = self._filler((len(self.q), queries, self.case.q_heads, self.case.head_dim), poisoned)
        for b, rows in enumerate(self.q):
            q[b, : len(rows)] = rows
        arguments = self._shared(poisoned) | {"q": q, "draft_mask": self.draft_mask}
        if self.case.q_scales:
            scales = np.full(q.shape[:3], np.nan if poisoned else 0, np.float32)
            for b, rows in enumerate(self.q):
                scales[b, : len(rows)] = self._scales_of(b)
            arguments["q_scale"] = scales if self.case.q_scales == "token" else self.q_scale
        if (queries > 1 and self.case.q_lens is not None) or any(n == 0 < k for n, k in self._lens):
            arguments["q_lens"] = np.array(self.case.query_lens, np.int32)
        return arguments

    def prefill(self, *, poisoned: bool = True) -> dict[str, Any]:
        """Return the array arguments of `paged_prefill`. Elements that must not affect the result are NaN or garbage if
        `poisoned`, otherwise 0.
        """
        padding = self._filler((self.case.padding, self.case.q_heads, self.case.head_dim), poisoned)
        cu_q_lens = np.cumsum((0, *self.case.query_lens), dtype=np.int32)
        arguments = self._shared(poisoned) | {"q": np.concatenate([*self.q, padding]), "cu_q_lens": cu_q_lens}
        if self.draft_mask is not None:
            rows = [mask[: len(rows)] for mask, rows in zip(self.draft_mask, self.q, strict=True)]
            padding_rows = self.rng.random((self.case.padding, self.draft_mask.shape[2])) < 0.5
            arguments["draft_mask"] = np.concatenate([*rows, padding_rows])
        return arguments

    @property
    def _lens(self) -> list[tuple[int, int]]:
        """(queries, tokens) of each sequence."""
        return list(zip(self.case.query_lens, self.case.kv_lens, strict=True))

    def _shared(self, poisoned: bool) -> dict[str, Any]:
        case = self.case
        kv, tables = self._cache(poisoned), self.tables
        if case.tokens_first:
            if case.fused is None:
                kv = view_nhd(*to_nhd(kv))
            else:
                kv = view_fused(jnp.swapaxes(kv.k, 1, 2), case.kv_heads, kv.k_scale, kv.v_scale)
            tables = np.asarray(token_tables(jnp.asarray(tables), page_size=case.page_size))
        arguments: dict[str, Any] = {"kv": kv, "block_tables": tables, "sinks": self.sinks}
        if case.head_windows is not None:
            window, sink_tokens = np.array(case.head_windows, np.int32).T
            arguments["window"] = HeadWindow(jnp.asarray(window), jnp.asarray(sink_tokens))
        return arguments | {"kv_lens": np.array(case.kv_lens, np.int32)}

    def _cache(self, poisoned: bool) -> PagedKV:
        arrays = {}
        for name, values in self.kv.items():
            dead = self.dead
            if name.endswith("_scale"):
                # A scale of a group of tokens is dead if all slots of the group are dead. Static scales are always
                # used.
                dynamic = values.ndim == 3
                dead = dead.reshape(*values.shape, -1).all(-1) if dynamic else np.zeros(values.shape, bool)
            values = harness.poison(self.rng, values, dead) if poisoned else harness.zero(values, dead)
            arrays[name] = jnp.asarray(values)
        if self.case.fused is None:
            return PagedKV(**arrays)
        k = arrays["k"]
        lanes = jnp.asarray(self._filler((*k.shape[:3], self.case.fused - k.shape[3]), poisoned, k.dtype))
        arrays["k"] = jnp.concatenate([k, lanes, arrays.pop("v"), lanes], axis=-1)
        return PagedKV(**arrays)

    def _filler(self, shape: tuple[int, ...], poisoned: bool, dtype: Any = None) -> np.ndarray:
        zeros = np.zeros(shape, dtype or self.case.dtype)
        return harness.poison(self.rng, zeros, np.ones(shape, bool)) if poisoned else zeros

    def make_live_values_infinite(self) -> None:
        """Set the values V of all visible slots to infinity."""
        self.kv["v"][~self.dead] = np.inf

    def expected_decode(self) -> tuple[np.ndarray, np.ndarray]:
        """Return output and LSE in float64, computed for one head of one query at a time."""
        case = self.case
        out = np.zeros((len(self.q), max(case.queries, *case.query_lens), case.q_heads, case.output_dim))
        lse = np.full(out.shape[:-1], -np.inf)
        for b, (rows_out, rows_lse) in enumerate(self._expected()):
            out[b, : len(rows_out)], lse[b, : len(rows_out)] = rows_out, rows_lse
        return out, lse

    def expected_prefill(self) -> tuple[np.ndarray, np.ndarray]:
        """Return output and LSE in float64, computed for one head of one query at a time."""
        case = self.case
        outs, lses = zip(*self._expected(), strict=True)
        padding = np.zeros((case.padding, case.q_heads, case.output_dim))
        return np.concatenate([*outs, padding]), np.concatenate([*lses, np.full(padding.shape[:2], -np.inf)])

    def _expected(self) -> list[tuple[np.ndarray, np.ndarray]]:
        case = self.case
        group = case.q_heads // case.kv_heads
        results = []
        for b, rows in enumerate(self.q):
            out, lse = np.zeros((*rows.shape[:2], case.output_dim)), np.full(rows.shape[:2], -np.inf)
            meant = rows.astype(np.float64)
            if self.q_scale is not None:
                meant = (
                    in_8_bits(rows, self._scales_of(b), case.cache_dtype or "").astype(np.float64)
                    * self._scales_of(b)[..., None]
                )
            for head in range(case.kv_heads if len(rows) else 0):
                tokens = np.flatnonzero(self.visible[b, head].any(axis=0)).tolist()
                k, v = ({t: self._meant(name, b, head, t) for t in tokens} for name in ("k", "v"))
                for i, h in itertools.product(range(len(rows)), range(head * group, (head + 1) * group)):
                    seen = np.flatnonzero(self.visible[b, head, i]).tolist()
                    if seen:
                        keys, values = (np.stack([x[t] for t in seen]) for x in (k, v))
                        sink = None if self.sinks is None else float(self.sinks[h])
                        out[i, h], lse[i, h] = _softmax_attention(case, meant[i, h], keys, values, sink)
            results.append((out, lse))
        return results

    def _scales_of(self, b: int) -> np.ndarray:
        """Return the scales [q_len, Hq] of the queries of sequence `b`."""
        if self.q_scale is None:
            raise ValueError("the case has no 8-bit queries")
        shape = len(self.q[b]), self.case.q_heads
        return np.broadcast_to(self.q_scale, shape) if self.q_scale.ndim == 1 else self.q_scale[b, : shape[0]]

    def _meant(self, name: str, b: int, head: int, token: int) -> np.ndarray:
        """Return the dequantised key (`name` "k") or value ("v") [D] of a KV head and a token in float64."""
        entry, offset = divmod(token, self.case.page_size)
        if self.case.head_wise:
            page, owner = divmod(int(self.tables[b, head, entry]), self.case.kv_heads)
        else:
            page, owner = int(self.tables[b, entry]), head
        values = self.kv[name][page, owner, offset].astype(np.float64)
        scale = self.kv.get(f"{name}_scale")
        if scale is None:
            return values
        if scale.ndim < 3:  # a static scale is of the head that reads, not of the page's owner
            return values * scale[head]
        return values * scale[page, owner, offset * scale.shape[2] // self.case.page_size]


def _visible(case: PagedCase, mask: np.ndarray | None, absent: np.ndarray) -> np.ndarray:
    t = np.arange(case.pages_per_row * case.page_size)
    queries = max(case.queries, *case.query_lens, 1)
    visible = np.zeros((len(case.kv_lens), case.kv_heads, queries, t.size), bool)
    for b, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
        for h in range(case.kv_heads):
            window, sink_tokens = case.head_windows[h] if case.head_windows else (case.window or FULL, 0)
            for i in range(q_len):
                position = kv_len - q_len + i
                column = t - (kv_len - q_len)
                shown = (t <= position) | (not case.causal)
                if mask is not None:
                    shown = (column < 0) | mask[b, i, np.clip(column, 0, mask.shape[-1] - 1)]
                in_window = (t < sink_tokens) | (t > position - window)
                visible[b, h, i] = shown & in_window & (t < kv_len) & ~np.repeat(absent[b, h], case.page_size)
    return visible


def _draw_normal(case: PagedCase, rng: np.random.Generator) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    cache_dtype = case.cache_dtype or case.dtype
    if cache_dtype is None:
        raise ValueError("dtype: expected a backend's own in place of None")
    dtype = np.dtype(case.dtype)
    q = [harness.normal(rng, (n, case.q_heads, case.head_dim), dtype) for n in case.query_lens]
    keys, values = (
        kv_cache_spec(
            num_pages=case.num_pages,
            page_size=case.page_size,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=dtype,
            scales=case.scales if np.dtype(dtype) in QMAX or case.value_dtype is None else None,
            value_dim=case.value_dim,
        ).arrays
        for dtype in (cache_dtype, case.value_dtype or cache_dtype)
    )
    arrays = ((name, (values if name[0] == "v" else keys).get(name)) for name in ("k", "v", "k_scale", "v_scale"))
    return q, {name: _draw_array(rng, name, array.shape, array.dtype) for name, array in arrays if array is not None}


def _draw_array(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if name.endswith("_scale"):
        return rng.uniform(0.002, 0.03, shape).astype(dtype)
    if dtype == np.int8:
        return rng.integers(-127, 128, shape).astype(dtype)
    if dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return (100 * rng.standard_normal(shape)).clip(-448, 448).astype(dtype)
    # The tolerances of 16-bit dtypes are FlashMLA's and assume values V with a standard deviation of about 0.1.
    size = 0.1 if name == "v" and dtype.itemsize == 2 else 1.0
    return (size * rng.standard_normal(shape, np.float32)).astype(dtype)


def _draw_exact(
    case: PagedCase, rng: np.random.Generator, tables: np.ndarray
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Draw integer inputs with exact scores near +5e5 and -5e5.

    All queries and keys are the same vector u with u·u near 5e5, except the last column, which is random so that scores
    differ. The keys of every other sequence are negated.
    """
    u = rng.integers(0, 5, case.head_dim) + int((5e5 / case.head_dim) ** 0.5)
    q = [np.tile(u, (n, case.q_heads, 1)) for n in case.query_lens]
    for rows in q:
        rows[..., -1] = rng.integers(1, 4, rows.shape[:-1])
    sign = np.ones(case.num_pages, int)
    sign[[page for page in tables[::2].flat if 0 < page < case.num_pages]] = -1
    k = np.tile(sign[:, None, None, None] * u, (1, case.kv_heads, case.page_size, 1))
    k[..., -1] = rng.integers(-8, 9, k.shape[:-1])
    v = _draw_array(rng, "v", k.shape, np.dtype(case.dtype))
    return [rows.astype(case.dtype) for rows in q], {"k": k.astype(case.dtype), "v": v}


def in_8_bits(q: np.ndarray, scale: np.ndarray, dtype: str = "float8_e4m3fn") -> np.ndarray:
    """Quantise queries [..., D]: divide them by their scales [...] and convert to the float8 type `dtype`."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return (q.astype(np.float32) / scale[..., None]).clip(-limit, limit).astype(dtype)


def _draw_sinks(case: PagedCase, rng: np.random.Generator) -> np.ndarray | None:
    ordinary = rng.standard_normal(case.q_heads).astype(np.float32)
    choices = {"ordinary": ordinary, "large": np.full_like(ordinary, 40), "-inf": np.full_like(ordinary, -np.inf)}
    if case.sinks == "mixed":
        return np.choose(np.arange(case.q_heads) % 3, list(choices.values()))
    return choices[case.sinks] if case.sinks else None


def _softmax_attention(
    case: PagedCase, q: np.ndarray, k: np.ndarray, v: np.ndarray, sink: float | None
) -> tuple[np.ndarray, float]:
    """Return the output [Dv] and the LSE of one query head q [D] for its visible keys [K, D] and values [K, Dv]."""
    scores = k @ q * (case.sm_scale or case.head_dim**-0.5)
    if case.soft_cap is not None:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    weights = np.exp(scores - scores.max())
    lse = scores.max() + np.log(weights.sum())
    kept = 1.0 if sink is None else 1 / (1 + np.exp(min(sink - lse, 700.0)))  # exp(710) overflows float64
    return kept * (weights @ v) / weights.sum(), lse
