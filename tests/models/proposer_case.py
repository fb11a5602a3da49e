"""A proposer that knows what comes next, and says it as often as it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from models.engine import DraftRows, Engine, Proposer

LONGEST = 128


class KnowingProposer(Proposer):
    """Looks a request up among known sequences by all of its tokens, so that it also tells whether those are right.

    Attributes:
      weights: int32 [sequences, LONGEST] tokens, -1 past their ends; float32 share of the drafts that are right.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], share: float, vocab_size: int):
        self.vocab_size = vocab_size
        self.weights = _weights(sequences, share)

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Any]:
        known, share = weights
        history = rows.history()[:, :LONGEST]
        history = jnp.pad(history, ((0, 0), (0, LONGEST - history.shape[1])), constant_values=-1)
        differs = (history[:, None] != known[None]) & (history >= 0)[:, None]
        which = jnp.argmin(jnp.sum(differs, axis=2, dtype=jnp.int32), axis=1)
        at = jnp.minimum(rows.lens[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None], LONGEST - 1)
        right = jnp.take_along_axis(known[which], at, axis=1)
        draw = ((at * 7919 + (rows.slots * 31 + jnp.sum(history, axis=1))[:, None]) % 1000).astype(jnp.float32) / 1000
        wrong = (right + 1) % self.vocab_size
        return jnp.where(right < 0, -1, jnp.where(draw < share, right, wrong)), state


def tell(engine: Engine, sequences: Sequence[Sequence[int]], share: float) -> None:
    """Gives an engine's proposer other sequences, or another share of right drafts, and compiles nothing."""
    assert engine.config.speculate is not None
    engine.config.speculate.proposer.weights = _weights(sequences, share)


def _weights(sequences: Sequence[Sequence[int]], share: float) -> tuple[Array, Array]:
    known = np.full((16, LONGEST), -1, np.int32)
    for row, tokens in zip(known, sequences, strict=False):
        row[: len(tokens)] = tokens
    return jnp.asarray(known), jnp.asarray(share, jnp.float32)
