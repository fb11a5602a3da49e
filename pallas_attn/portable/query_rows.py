"""Packed tokens of sequences as rows of a few, as decode takes them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.schedule import ratio
from pallas_attn.portable.segments import segment_of


class QueryRows:
    """New tokens cut into rows of up to Q, each of one sequence.

    With Q = 1 rows are the packed tokens themselves, padding included, so that nothing is gathered or scattered.

    Attributes:
      sequence: int32 [rows]; min(T, T // Q + S) rows are enough for any lengths.
      index: int32 [rows], of the row's first token among the new ones of its sequence.
      count: int32 [rows], tokens of each row; 0 for rows without any.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int, queries: int):
        """Cut sequences with these prefix sums of new tokens, never falling, of T = `num_tokens` packed ones."""
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
        column = jnp.arange(queries, dtype=jnp.int32)[None]
        self._queries, self._num_tokens = queries, num_tokens
        self._token = (cu_q_lens[:-1][self.sequence] + self.index)[:, None] + column
        self._cu_q_lens, self._first = cu_q_lens, first

    def pack(self, x: Float[Array, "T *rest"]) -> Float[Array, "rows Q *rest"]:
        """Values of the tokens of each row; anything behind its last."""
        return x[:, None] if self._queries == 1 else x[jnp.minimum(self._token, self._num_tokens - 1)]

    def unpack(self, x: Float[Array, "rows Q *rest"], empty: float = 0.0) -> Float[Array, "T *rest"]:
        """Values in the order of the packed tokens, `empty` for those of no sequence; with Q = 1 what rows without
        tokens have.
        """
        if self._queries == 1:
            return x[:, 0]
        # A gather by token: XLA's scatter of 4,096 rows of 16 KB took 485 us, and the gather of `pack` takes 45
        # (benchmarks/log/102).
        token = jnp.arange(self._num_tokens, dtype=jnp.int32)
        sequence = segment_of(self._cu_q_lens[1:], token)
        is_real = (token >= self._cu_q_lens[0]) & (sequence < len(self._first))
        sequence = jnp.minimum(sequence, len(self._first) - 1)
        index = token - self._cu_q_lens[:-1][sequence]
        place = self._first[sequence] * self._queries + index
        found = x.reshape(-1, *x.shape[2:])[jnp.where(is_real, place, 0)]
        return jnp.where(is_real.reshape(-1, *[1] * (x.ndim - 2)), found, jnp.asarray(empty, x.dtype))
