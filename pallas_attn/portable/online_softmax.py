"""Attention in bounded memory with XLA loops, used by the `xla.py` of every attention operation.

A row is a block of queries that read the same keys. Rows are sorted by their number of key tiles and processed in
groups. A group iterates over key tiles with an online softmax (arXiv:1805.02867) until its longest row is finished.
Memory is bounded by one tile per row of a group. The time of a row is proportional to the number of tiles of the
longest row of its group, which is close to its own number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.merge import finite_or_zero
from pallas_attn.portable.segments import segment_of


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """Tile and group sizes of the portable implementations.

    Attributes:
      tile_tokens: keys per row and loop iteration.
      group_rows: rows per group.
      tile_queries: query tokens per row, for operations over packed tokens.
    """

    tile_tokens: int
    group_rows: int
    tile_queries: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


def decode_heuristic(rows: int, elements_per_token: int) -> XlaConfig:
    """Return sizes for rows of few queries, whose time is dominated by loading keys.

    About 2**18 elements of K per iteration keep a CPU's caches and a GPU's multiprocessors busy. More elements only use
    more memory.
    """
    group_rows = min(rows, 8)
    tile_tokens = 2**18 // (elements_per_token * group_rows)
    return XlaConfig(tile_tokens=min(1024, max(64, tile_tokens)), group_rows=group_rows)


def tile_queries(num_tokens: int, num_sequences: int) -> int:
    """Return the number of queries per tile: about twice the average per sequence.

    Every tile reads all keys of its sequence, so large tiles read keys less often. Small tiles have less padding.
    """
    average = -(-2 * num_tokens // num_sequences)
    return min(64, 1 << (average - 1).bit_length())


def prefill_heuristic(rows: int, tile_queries: int) -> XlaConfig:
    """Return sizes for rows of many queries, whose time is dominated by matrix products."""
    return XlaConfig(tile_tokens=256, group_rows=min(rows, 2), tile_queries=tile_queries)


type Tile = tuple[Float[Array, "W H K Dk"], Float[Array, "W H K Dv"], Bool[Array, "W #H M K"]]
"""Keys, values and mask of visible keys. Keys and values that no query sees may be anything, including NaN."""


def attend_rows(
    q: Float[Array, "R H M Dk"],
    num_tiles: Int32[Array, "R"],
    load_tile: Callable[[Int32[Array, "W"], Int32[Array, ""]], Tile],
    *,
    sources: Any,
    value_dim: int,
    sm_scale: float,
    soft_cap: float | None,
    group_rows: int,
) -> tuple[Float[Array, "R H M Dv"], Float[Array, "R H M"]]:
    """Compute attention of R rows, each of M queries on H heads, over the key tiles that `load_tile` returns.

    Args:
      num_tiles: number of tiles of each row.
      load_tile: (rows [W], j) -> the j-th tile of each row; all invisible if j is past a row's last tile.
      sources: the arrays that tiles are made of.
      value_dim: Dv.
      group_rows: rows per group, W of load_tile.

    Returns:
      Normalized outputs in float32 and their LSE; 0 and -inf for queries that see no key.
    """

    def group(members: Int32[Array, "W"]) -> tuple[Float[Array, "W H M Dv"], Float[Array, "W H M"]]:
        q_group = q[members]
        steps = jnp.max(num_tiles[members])
        highest = jnp.full(q_group.shape[:-1], -jnp.inf, jnp.float32)
        state = (highest, jnp.zeros_like(highest), _zeros(q_group, value_dim))
        state = (jnp.zeros((), jnp.int32), *varying_like(state, (q, num_tiles, sources)))

        def step(state):
            j, highest, total, acc = state
            return (j + 1, *_absorb(q_group, *load_tile(members, j), highest, total, acc, sm_scale, soft_cap))

        _, highest, total, acc = lax.while_loop(lambda state: state[0] < steps, step, state)
        seen = total != 0  # not > 0: a visible NaN must show in the output and in the LSE
        # The accumulator of queries that see no key may be 0 times infinity.
        out = jnp.where(seen[..., None], acc / jnp.where(seen, total, 1.0)[..., None], 0.0)
        return out, jnp.where(seen, finite_or_zero(highest) + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)

    return map_groups(group, num_tiles, group_rows)


def map_groups[Tree](group: Callable[[Int32[Array, "W"]], Tree], num_tiles: Int32[Array, "R"], group_rows: int) -> Tree:
    """Apply `group`, which maps row indices [W] to arrays [W, ...], to all rows, and return arrays [R, ...]."""
    rows = num_tiles.shape[0]
    group_rows = min(group_rows, rows)
    if group_rows == rows:
        return group(jnp.arange(rows, dtype=jnp.int32))
    # Rows that are adjacent in this order have similar numbers of tiles, so few rows of a group wait for the longest.
    order = jnp.argsort(-num_tiles).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    groups = -(-rows // group_rows)
    order = jnp.concatenate([order, jnp.broadcast_to(order[-1:], (groups * group_rows - rows,))])
    results = lax.map(group, order.reshape(groups, group_rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], results)


def _zeros(q: Float[Array, "W H M Dk"], value_dim: int) -> Float[Array, "W H M Dv"]:
    return jnp.zeros((*q.shape[:-1], value_dim), jnp.float32)


def _absorb(q, k, v, visible, highest, total, acc, sm_scale, soft_cap):
    """Update the state of the online softmax (running maximum, denominator, weighted values) with one tile."""
    scores = dot_f32("whmd,whkd->whmk", q, k) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
    shift = finite_or_zero(new_highest)
    weights = jnp.exp(scores - shift[..., None])
    shrink = jnp.exp(highest - shift)
    # Invisible values may be NaN, and 0 · NaN is NaN.
    v = jnp.where(jnp.any(visible, axis=-2)[..., None], v, jnp.zeros((), v.dtype))
    total = total * shrink + jnp.sum(weights, axis=-1)
    # Weights are rounded only where the queries are too: float32 queries over a 16-bit cache get float32 results.
    weights = weights.astype(v.dtype) if q.dtype == v.dtype else weights
    acc = acc * shrink[..., None] + dot_f32("whmk,whkd->whmd", weights, v)
    return new_highest, total, acc


def dot_f32(subscripts: str, a: Array, b: Array) -> Float[Array, "..."]:
    """Return products accumulated in float32. Operands of the same 16-bit dtype are not converted, for tensor cores."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


class QueryTiles:
    """Packed query tokens divided into tiles of one sequence each.

    Attributes:
      sequence: int32 [R], sequence of each tile; R = ceil(T / tile) + S is enough for all lengths.
      token: int32 [R, tile], indices of packed tokens; in range also where `real` is False.
      index: int32 [R, tile], index among the sequence's new tokens.
      real: bool [R, tile], False for the padding of a sequence's last tile.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int, tile: int):
        num_sequences = cu_q_lens.shape[0] - 1
        lens = jnp.diff(cu_q_lens)
        self._ends = jnp.cumsum(-(-lens // tile), dtype=jnp.int32)
        self._cu_q_lens, self._tile = cu_q_lens, tile
        row = jnp.arange(-(-num_tokens // tile) + num_sequences, dtype=jnp.int32)
        self.sequence = jnp.minimum(segment_of(self._ends, row), num_sequences - 1)
        first = (row - self._first_tile(self.sequence)) * tile
        self.index = first[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]
        self.real = self.index < lens[self.sequence][:, None]  # False for tiles past the last tile
        self.token = jnp.where(self.real, cu_q_lens[self.sequence][:, None] + self.index, 0)

    def _first_tile(self, sequence: Int32[Array, "n"]) -> Int32[Array, "n"]:
        return jnp.where(sequence > 0, self._ends[jnp.maximum(sequence - 1, 0)], 0)

    def unpack(self, tiles: Float[Array, "R tile *rest"], num_tokens: int, fill: float) -> Float[Array, "T *rest"]:
        """Return the values of tiles in the order of the packed tokens; `fill` for padding tokens."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        sequence = segment_of(self._cu_q_lens[1:], token)
        real = (sequence < self._cu_q_lens.shape[0] - 1) & (token >= self._cu_q_lens[0])
        sequence = jnp.where(real, sequence, 0)
        index = jnp.where(real, token - self._cu_q_lens[sequence], 0)
        values = tiles[self._first_tile(sequence) + index // self._tile, index % self._tile]
        real = real.reshape(-1, *(1,) * (values.ndim - 1))
        return jnp.where(real, values, jnp.asarray(fill, values.dtype))
