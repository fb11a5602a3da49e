"""Packed tokens of sequences as rows of up to Q tokens, the format of decode operations."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.portable.schedule import ratio
from pallas_attn.portable.segments import segment_of


class QueryRows:
    """New tokens divided into rows of up to Q tokens of one sequence.

    With Q = 1, rows are the packed tokens themselves, including padding, so nothing is gathered or scattered.

    Attributes:
      sequence: int32 [rows]; min(T, T // Q + S) rows are enough for all lengths.
      index: int32 [rows], index of the row's first token among the new tokens of its sequence.
      count: int32 [rows], tokens of each row; 0 for rows without tokens.
      queries: Q.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int, queries: int):
        """Divide T = `num_tokens` packed tokens of sequences with these prefix sums, which never decrease."""
        lens = jnp.diff(cu_q_lens)
        num_sequences = lens.shape[0]
        if queries == 1:
            first, ends = cu_q_lens[:-1], cu_q_lens[1:]
        else:
            counts = ratio(lens + (queries - 1), queries)
            ends = jnp.cumsum(counts, dtype=jnp.int32)
            first = ends - counts
        row = jnp.arange(min(num_tokens, num_tokens // queries + num_sequences), dtype=jnp.int32)
        self.sequence = jnp.minimum(segment_of(ends, row), num_sequences - 1)
        self.index = (row - first[self.sequence]) * queries
        self.count = jnp.where(self.index >= 0, jnp.clip(lens[self.sequence] - self.index, 0, queries), 0)
        self.queries = queries
        if queries > 1:
            column = jnp.arange(queries, dtype=jnp.int32)[None]
            token = (cu_q_lens[:-1][self.sequence] + self.index)[:, None] + column
            places = jnp.minimum(token, num_tokens - 1), *_places(cu_q_lens, first, num_tokens, queries)
            # Otherwise XLA recomputes them for every element that is packed and unpacked.
            self._token, self._place, self._is_real = lax.optimization_barrier(places)

    def pack(self, x: Float[Array, "T *rest"]) -> Float[Array, "rows Q *rest"]:
        """Return the values of the tokens of each row; values after a row's last token are arbitrary."""
        return x[:, None] if self.queries == 1 else x[self._token]

    def unpack(self, x: Float[Array, "rows Q *rest"], empty: float = 0.0) -> Float[Array, "T *rest"]:
        """Return values in the order of the packed tokens; `empty` for tokens of no sequence. With Q = 1, tokens of no
        sequence have the values of their rows.
        """
        if self.queries == 1:
            return x[:, 0]
        # A gather by token is faster than a scatter: XLA's scatter of 4,096 rows of 16 KB took 485 us, the gather of
        # `pack` takes 45 us.
        found = x.reshape(-1, *x.shape[2:])[self._place]
        return jnp.where(self._is_real.reshape(-1, *[1] * (x.ndim - 2)), found, jnp.asarray(empty, x.dtype))


def _places(
    cu_q_lens: Int32[Array, "S_plus_1"], first: Int32[Array, "S"], num_tokens: int, queries: int
) -> tuple[Int32[Array, "T"], Bool[Array, "T"]]:
    """Return the index of each packed token among the queries of all rows, and whether it belongs to a sequence.

    `first` is the first row of each sequence.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = segment_of(cu_q_lens[1:], token)
    is_real = (token >= cu_q_lens[0]) & (sequence < len(first))
    sequence = jnp.minimum(sequence, len(first) - 1)
    place = first[sequence] * queries + token - cu_q_lens[:-1][sequence]
    return jnp.where(is_real, place, 0), is_real
