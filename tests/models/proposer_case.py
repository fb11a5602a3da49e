"""Proposers of draft tokens for tests. They know the correct next tokens and draft them with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_attn.models.engine import DraftRows, DraftTree, Engine, Proposer

LONGEST = 128


class KnowingProposer(Proposer):
    """Proposer that finds a request's tokens among known sequences and drafts the tokens that follow.

    It compares all tokens of the request. If the engine passed wrong tokens, it would find a wrong sequence and drafts
    would be rejected.

    Attributes:
      weights: tokens of the known sequences (int32 [16, LONGEST], -1 after the end), and share of right drafts
      (float32).
    """

    def __init__(self, sequences: Sequence[Sequence[int]], share: float, vocab_size: int):
        self.vocab_size = vocab_size
        self.weights = _weights(sequences, share)

    def propose(self, weights: Any, state: Any, rows: DraftRows, num_drafts: int) -> tuple[Any, Any]:
        return self.drafts(weights, rows, range(1, num_drafts + 1)), state

    def drafts(self, weights: Any, rows: DraftRows, depths: Sequence[int]) -> Int32[Array, "B d"]:
        """Return a draft for each position that is `depths` tokens after the newest token. A share of the drafts,
        chosen by a hash, is right. The others are the right token plus one.
        """
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
    """Proposer of draft trees with interleaved branches. `PARENTS[i]` is the parent of draft i; -1 is the newest
    token.
    """

    makes_trees = True
    PARENTS = (-1, -1, 1, 0, 1, 4, 2, 5)

    def depths(self, num_drafts: int) -> list[int]:
        """Return the distance of each draft from the newest token."""
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
    """Replace the known sequences and the share of right drafts of an engine's proposer. Nothing is compiled."""
    assert engine.config.speculate is not None
    engine.config.speculate.proposer.weights = _weights(sequences, share)


def _weights(sequences: Sequence[Sequence[int]], share: float) -> tuple[Array, Array]:
    known = np.full((16, LONGEST), -1, np.int32)
    for row, tokens in zip(known, sequences, strict=False):
        row[: len(tokens)] = tokens
    return jnp.asarray(known), jnp.asarray(share, jnp.float32)
