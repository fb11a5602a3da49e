"""Proposer of drafts (guesses of the next tokens) by prompt look-up: the newest tokens of a request are searched in its
earlier tokens, and the tokens that followed there are proposed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_attn.models.engine.speculation.proposer import NO_DRAFT, DraftRows, Proposer


@dataclasses.dataclass(frozen=True)
class NGramProposer(Proposer):
    """Finds an earlier occurrence of a request's newest n tokens in its prompt and output, and proposes the tokens that
    followed this occurrence (prompt look-up decoding, Saxena 2023). It needs no weights and works with any model.

    The longest match is used; of several matches of equal length, the latest one. If fewer tokens follow the match than
    drafts are needed, the drafts repeat these tokens, as in a text that repeats itself.

    Attributes:
      longest, shortest: maximum and minimum of n, the number of matching tokens.

    Raises:
      ValueError: not 1 <= shortest <= longest <= 16.
    """

    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 16:
            wanted = "1 <= shortest <= longest <= 16"
            raise ValueError(f"shortest, longest: expected {wanted}, got {self.shortest} and {self.longest}")

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Any]:
        return continue_ngrams(rows.history(), rows.lens, num_drafts, self.longest, self.shortest), state


def continue_ngrams(
    tokens: Int32[Array, "B N"], lens: Int32[Array, "B"], num_drafts: int, longest: int, shortest: int
) -> Int32[Array, "B num_drafts"]:
    """Propose a continuation of each sequence, as described in `NGramProposer`.

    Args:
      tokens: token ids by position; negative for unknown tokens.
      lens: number of tokens of each sequence, including the newest.
      num_drafts: number of drafts per sequence.
      longest, shortest: maximum and minimum number of matching tokens.

    Returns:
      Drafts; NO_DRAFT in rows without a match of `shortest` tokens.
    """
    batch, length = tokens.shape
    position = jnp.arange(length, dtype=jnp.int32)[None]
    before = jnp.pad(tokens, ((0, 0), (longest, 0)), constant_values=-1)
    matched = jnp.zeros((batch, length), jnp.int32)  # [B, N], length of the match that ends before each position
    matches = (position > 0) & (position < lens[:, None])
    for back in range(1, longest + 1):
        newest = jnp.take_along_axis(tokens, jnp.maximum(lens - back, 0)[:, None], axis=1)
        matches &= (before[:, longest - back : longest - back + length] == newest) & (newest >= 0)
        matched += matches.astype(jnp.int32)
    score = jnp.where(matched >= shortest, matched * length + position, -1)
    best = jnp.max(score, axis=1)
    start = best % length
    ahead = jnp.arange(num_drafts, dtype=jnp.int32)[None] % jnp.maximum(lens - start, 1)[:, None]
    drafts = jnp.take_along_axis(tokens, start[:, None] + ahead, axis=1)
    return jnp.where(best[:, None] >= 0, drafts, NO_DRAFT)
