"""Plan of one step of the engine, which the scheduler makes and the runner carries out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from models.engine.request import Request


@dataclass(frozen=True)
class ScheduledRow:
    """New tokens of one request in one step.

    Attributes:
      request: Owner of the tokens; it keeps its pages until the step has been launched.
      slot: The request's batch slot, and its place in device arrays with one entry per running request.
      start: Position of the first new token, which is the number of tokens before it in the cache.
      num_tokens: New tokens, without drafts.
      samples: Whether the token after the last new one is sampled: not within a prompt.
      num_drafts: Drafts after the newest token, at most: all that there are pages for. With drafts `start` is the least
        that it can be, since it is known on the device alone how many of those in flight are accepted.
      limit: Tokens that the sequence can have in the end; decode rows alone.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    limit: int = 0


class RowTokens(NamedTuple):
    """Tokens that a row of a step got.

    Attributes:
      tokens: Sampled ids in order: one, and one more for each accepted draft. NONFINITE, as the last, where there was
        nothing to sample.
      drafted: Drafts that were verified.
    """

    tokens: Sequence[int]
    drafted: int = 0


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of the engine: `decode` rows before `prefill` rows in the packed arrays.

    A decode row has one token, the last one sampled at its slot, perhaps not read back yet. A prefill row's tokens are
    `request.token_ids[start : start + num_tokens]`.

    Attributes:
      decode, prefill: The rows.
      tables: Row ids of all `rows` by page, [rows, heads, P] for each cache group. A group has one head, whose rows are
        page ids, unless its heads have windows of their own.
    """

    decode: tuple[ScheduledRow, ...]
    prefill: tuple[ScheduledRow, ...]
    tables: tuple[Int32[np.ndarray, "rows _ P"], ...]

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.decode + self.prefill

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.samples)

    @property
    def num_drafts(self) -> int:
        """Most drafts of any row."""
        return max((row.num_drafts for row in self.decode), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
