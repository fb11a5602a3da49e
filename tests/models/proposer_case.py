"""A proposer that knows the next tokens and proposes them with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from models.engine import DraftRows, DraftTree, Engine, Proposer

LONGEST = 128


class KnowingProposer(Proposer):
    """Finds a request among known sequences by all of its tokens, which also checks the tokens that the proposer gets.

    Attributes:
      weights: int32 [sequences, LONGEST] tokens, -1 after their ends; and float32 share of right drafts.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], share: float, vocab_size: int):
        self.vocab_size = vocab_size
        self.weights = _weights(sequences, share)

    def propose(self, weights: Any, state: Any, rows: DraftRows, num_drafts: int) -> tuple[Any, Any]:
        return self.drafts(weights, rows, range(1, num_drafts + 1)), state

    def drafts(self, weights: Any, rows: DraftRows, depths: Sequence[int]) -> Int32[Array, "B d"]:
        """Drafts for positions at the given distances after the newest token; each is right with the given
        probability."""
        known, share = weights
        history = rows.history()[:, :LONGEST]
        history = jnp.pad(history, ((0, 0), (0, LONGEST - history.shape[1])), constant_values=-1)
        differs = (history[:, None] != known[None]) & (history >= 0)[:, None]
        which = jnp.argmin(jnp.sum(differs, axis=2, dtype=jnp.int32), axis=1)
        at = jnp.minimum(rows.lens[:, None] + jnp.asarray(depths, jnp.int32)[None] - 1, LONGEST - 1)
        right = jnp.take_along_axis(known[which], at, axis=1)
        of_row = (rows.slots * 31 + jnp.sum(history, axis=1))[:, None]
        each = at + 577 * jnp.arange(len(depths), dtype=jnp.int32)[None]
        draw = ((each * 7919 + of_row) % 1000).astype(jnp.float32) / 1000
        wrong = (right + 1) % self.vocab_size
        return jnp.where(right < 0, -1, jnp.where(draw < share, right, wrong))


class KnowingTreeProposer(KnowingProposer):
    """Proposes trees of such drafts, with interleaved branches."""

    makes_trees = True
    PARENTS = (-1, -1, 1, 0, 1, 4, 2, 5)

    def depths(self, num_drafts: int) -> list[int]:
        """Distance of each draft from the newest token."""
        depths: list[int] = []
        for parent in self.PARENTS[:num_drafts]:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def depth(self, num_drafts: int) -> int:
        return max(self.depths(num_drafts), default=0)

    def propose(self, weights: Any, state: Any, rows: DraftRows, num_drafts: int) -> tuple[DraftTree, Any]:
        drafts = self.drafts(weights, rows, self.depths(num_drafts))
        return DraftTree(
            drafts, jnp.broadcast_to(jnp.asarray(self.PARENTS[:num_drafts], jnp.int32), drafts.shape)
        ), state


def tell(engine: Engine, sequences: Sequence[Sequence[int]], share: float) -> None:
    """Replace the sequences or the share of right drafts of an engine's proposer, without compilation."""
    assert engine.config.speculate is not None
    engine.config.speculate.proposer.weights = _weights(sequences, share)


def _weights(sequences: Sequence[Sequence[int]], share: float) -> tuple[Array, Array]:
    known = np.full((16, LONGEST), -1, np.int32)
    for row, tokens in zip(known, sequences, strict=False):
        row[: len(tokens)] = tokens
    return jnp.asarray(known), jnp.asarray(share, jnp.float32)
