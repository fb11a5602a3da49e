"""Plan of one step of the engine: made by the scheduler, executed by the runner."""

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
      request: Owner of the tokens. Its pages are not released before the step has been launched.
      request_slot: Index of the request in the pools and in device arrays with one entry per running request.
      start: Position of the first new token, equal to the number of tokens before it in the cache. With drafts it is a
        lower bound, because only the device knows the number of accepted drafts in flight.
      num_tokens: New tokens, without drafts.
      samples: Whether a token is sampled after the last new token; False if the prompt continues.
      num_drafts: Maximum number of drafts after the newest token. Pages for them are allocated.
      limit: Maximum length of the sequence in tokens; decode rows only.
    """

    request: Request
    request_slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    limit: int = 0


class RowTokens(NamedTuple):
    """Tokens sampled for a row of a step.

    Attributes:
      tokens: Sampled ids in order: one, plus one per accepted draft. The last id is NONFINITE if the logits were not
        finite.
      drafted: Number of verified drafts.
    """

    tokens: Sequence[int]
    drafted: int = 0


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of the engine. In the packed arrays `decode` rows come before `prefill` rows.

    A decode row has one token: the last token sampled at its request slot, which the host may not have read yet. A
    prefill row's tokens are `request.token_ids[start : start + num_tokens]`.

    Attributes:
      decode, prefill: The rows.
      tables: Page rows of all `rows` by page, int32 [rows, heads, P] for each cache group. If the heads of a group have
        different windows, each head has page rows of its own. Otherwise heads is 1 and a page row is a page id.
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
        """Largest number of drafts of a row."""
        return max((row.num_drafts for row in self.decode), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
