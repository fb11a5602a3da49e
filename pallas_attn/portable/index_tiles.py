"""Scores of index keys (lightning indexer of DeepSeek-V3.2): all scores at once for `reference`, by tiles for `xla`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.index_keys import meant_index_keys, read_index_keys
from pallas_attn.portable.online_softmax import QueryTiles, XlaConfig, dot_f32, map_groups, tile_queries
from pallas_attn.portable.oracle import HIGHEST
from pallas_attn.portable.page_tiles import HeadRows, PageTiles
from pallas_attn.portable.visibility import head_windows
from pallas_attn.types import PagedIndexKeys


class IndexCall(Protocol):
    """Fields of calls that score index keys; see `index_scores`."""

    @property
    def q(self) -> Float[Array, "T Hi Di"]: ...
    @property
    def weights(self) -> Float32[Array, "T Hi"]: ...
    @property
    def index(self) -> PagedIndexKeys: ...
    @property
    def block_tables(self) -> Int32[Array, "S P"]: ...
    @property
    def cu_q_lens(self) -> Int32[Array, "S_plus_1"]: ...
    @property
    def kv_lens(self) -> Int32[Array, "S"]: ...
    @property
    def draft_mask(self) -> Bool[Array, "T M"] | None: ...
    @property
    def scale(self) -> float: ...
    @property
    def ratio(self) -> int: ...


def newest_key(position: Int32[Array, "*rows"], ratio: int) -> Int32[Array, "*rows"]:
    """Return the last key that a token at a position sees, if the index has a key per `ratio` tokens; -1 for none."""
    return position if ratio == 1 else jnp.maximum(position + 1, 0) // ratio - 1


def seen_keys(
    key: Int32[Array, "*#rows K"], position: Int32[Array, "*rows"], draft_mask: Bool[Array, "*rows M"] | None
) -> Bool[Array, "*rows K"]:
    """Return whether tokens see keys. The last key of a token is at `position`.

    The mask can hide any of the newest M keys.
    """
    ahead = key - position[..., None]
    if draft_mask is None:
        return ahead <= 0
    width = draft_mask.shape[-1]
    column = ahead + width - 1
    shown = jnp.take_along_axis(draft_mask, jnp.clip(column, 0, width - 1), axis=-1)
    return (column < 0) | ((ahead <= 0) & shown)


def dense_scores(call: IndexCall) -> Float32[Array, "T K"]:
    """Return scores of every token over all K = P·ps table entries of its sequence; -inf for invisible keys."""
    num_tokens, num_sequences = call.q.shape[0], call.kv_lens.shape[0]
    num_pages, page_size, _ = call.index.keys.shape
    in_pool = (call.block_tables >= 0) & (call.block_tables < num_pages)
    keys = meant_index_keys(call.index)[jnp.where(in_pool, call.block_tables, 0)]  # [S, P, ps, Di]
    keys = keys.reshape(num_sequences, -1, keys.shape[-1]).astype(jnp.float32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(call.cu_q_lens[1:], token, side="right"), num_sequences - 1)
    position = (call.kv_lens - call.cu_q_lens[1:])[sequence] + token
    real = (token >= call.cu_q_lens[0]) & (token < call.cu_q_lens[-1])
    key = jnp.arange(keys.shape[1], dtype=jnp.int32)
    visible = (
        seen_keys(key[None], newest_key(position, call.ratio), call.draft_mask)
        & real[:, None]
        & jnp.repeat(in_pool, page_size, axis=1)[sequence]
    )
    products = jnp.einsum("thd,tkd->thk", call.q.astype(jnp.float32), keys[sequence], precision=HIGHEST)
    return jnp.where(visible, _weighted("thk,th->tk", products, call.weights, call.scale), -jnp.inf)


def _weighted(subscripts: str, products: Array, weights: Float32[Array, "..."], scale: float) -> Float32[Array, "..."]:
    """Return the sum over heads of weight · relu(scale · product). Negative zeros become 0, so that zeros compare as
    equal.
    """
    scores = jnp.einsum(subscripts, jnp.maximum(products * scale, 0.0), weights, precision=HIGHEST)
    return jnp.where(scores == 0, 0.0, scores)


def index_heuristic(num_tokens: int, num_sequences: int, heads: int) -> XlaConfig:
    """Return sizes with at most 2**24 products of queries and keys of all index heads per step, if tiles allow it."""
    queries = min(16, tile_queries(num_tokens, num_sequences))
    rows = -(-num_tokens // queries) + num_sequences
    group_rows = min(rows, 8 if queries == 1 else 2)
    tile_tokens = 2**24 // (group_rows * queries * heads)
    return XlaConfig(min(4096, max(256, tile_tokens)), group_rows, queries)


type IndexStep = Callable[[Any, Float32[Array, "W M K"], Int32[Array, "W K"], Int32[Array, ""]], Any]
"""(state, scores, key positions, tile number) -> state."""


class IndexTiles:
    """Tiles of query tokens of one sequence each, which iterate over tiles of the sequence's index keys.

    Attributes:
      tile_queries: M, query tokens per query tile.
      tile_tokens: K, keys per key tile.
      most_tiles: maximum number of key tiles of a query tile.
    """

    def __init__(self, call: IndexCall, settings: XlaConfig):
        self._call, self._group_rows = call, settings.group_rows
        self._queries = QueryTiles(call.cu_q_lens, call.q.shape[0], settings.tile_queries)
        num_cached = (call.kv_lens - jnp.diff(call.cu_q_lens))[self._queries.sequence][:, None]
        position = num_cached + self._queries.index
        newest = newest_key(position, call.ratio)
        self._real = self._queries.real & (newest >= 0)
        self._newest = jnp.where(self._real, newest, 0)
        num_pages, page_size, _ = call.index.keys.shape
        self._pages = PageTiles(
            call.block_tables,
            head_windows(None, 1),
            head_rows=HeadRows(heads=1, rows_per_sequence=1),
            sequence=self._queries.sequence,
            first_query=jnp.zeros_like(self._queries.sequence),
            end=jnp.max(jnp.where(self._real, self._newest + 1, 0), axis=1),
            page_size=page_size,
            pool_rows=num_pages,
            tile_tokens=settings.tile_tokens,
        )
        table_pages = call.block_tables.shape[1]
        pages = max(1, min(settings.tile_tokens // page_size, table_pages))
        self.tile_queries, self.tile_tokens = settings.tile_queries, pages * page_size
        self.most_tiles = -(-table_pages // pages)

    def walk(
        self, start: Callable[[int], Any], step: IndexStep, finish: Callable[[Any], Array], *, fill: float
    ) -> Array:
        """Iterate over the keys of each token's sequence in order, and return results [T, ...]; `fill` for padding
        tokens.

        Args:
          start: (W) -> initial state of W query tiles.
          step: updates the state with the scores of the next key tile; scores of invisible keys are -inf.
          finish: state -> results [W, M, ...].
        """
        call = self._call

        def group(members: Int32[Array, "W"]) -> Array:
            token = self._queries.token[members]
            q, weights = call.q[token], call.weights[token]
            mask = None if call.draft_mask is None else call.draft_mask[token]
            steps = jnp.max(self._pages.num_tiles[members])
            state = varying_like(start(members.shape[0]), (call, self._pages.num_tiles))

            def absorb(carry: tuple[Any, Any]) -> tuple[Any, Any]:
                j, state = carry
                page_ids, key, exists = self._pages.locate(members, j)
                keys = read_index_keys(call.index, page_ids[:, 0]).reshape(members.shape[0], -1, q.shape[-1])
                visible = seen_keys(key[:, None], self._newest[members], mask) & self._real[members][..., None]
                scores = _weighted("wmhk,wmh->wmk", dot_f32("wmhd,wkd->wmhk", q, keys), weights, call.scale)
                return j + 1, step(state, jnp.where(visible & exists, scores, -jnp.inf), key, j)

            zero = varying_like(jnp.zeros((), jnp.int32), steps)
            return finish(lax.while_loop(lambda carry: carry[0] < steps, absorb, (zero, state))[1])

        return self._queries.unpack(map_groups(group, self._pages.num_tiles, self._group_rows), call.q.shape[0], fill)


def as_positions(chosen: Int32[Array, "*rows k"], scores: Float32[Array, "*rows k"]) -> Int32[Array, "*rows k"]:
    """Return the selected positions in increasing order, then -1 for each invisible key (score -inf)."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(scores == -jnp.inf, last, chosen.astype(jnp.int32)), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


def comparable(scores: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return scores in the form that a selection compares: -0 becomes 0, and NaN becomes +inf."""
    return jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))


def sorted_choice(scores: Float32[Array, "T K"], top_k: int) -> Int32[Array, "T top_k"]:
    """Return the selection of `select_top_k` by a stable sort of each row."""
    scores = comparable(scores)
    chosen = jnp.argsort(-scores, axis=1, stable=True)[:, :top_k]
    positions = as_positions(chosen, jnp.take_along_axis(scores, chosen, axis=1))
    return jnp.pad(positions, ((0, 0), (0, top_k - chosen.shape[1])), constant_values=-1)
