"""Plan of one step (a forward pass over a batch of requests): made by the scheduler, executed by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_attn.models.engine.logprob_list import LogprobList
from pallas_attn.models.engine.request import Request


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens of one request that a step computes.

    A draft is a proposed token after the newest token of a decode row. The step verifies it (speculation).

    Attributes:
      request: The request. Its pages are not released before the step has been launched.
      request_slot: Index of the request in the page pools and in device arrays with one entry per running request.
      start: Position of the row's first token in the sequence. Earlier tokens are in the cache. With speculation,
        `start` of a decode row is a lower bound: earlier steps may accept drafts that the host has not read yet.
      num_tokens: Number of tokens of the row, without drafts.
      samples: Whether a token is sampled after the last token; False if the prompt continues in a later step.
      num_drafts: Maximum number of drafts of the row. Pages for them are allocated.
      limit: Maximum length of the sequence in tokens, at which decoding stops. Only used in decode rows.
    """

    request: Request
    request_slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    limit: int = 0

    @property
    def num_scored(self) -> int:
        """Number of leading tokens of a prefill row after which a prompt token follows whose log probability the
        request wants."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(min(self.num_tokens, len(self.request.prompt_ids) - 1 - self.start), 0)


class RowTokens(NamedTuple):
    """Tokens sampled for one row of a step.

    Attributes:
      tokens: Sampled token ids in order of position: one, plus one per accepted draft. The last id is NONFINITE if its
        logits were NaN or infinite. Empty if the row was idle, because the request reached its limit in an earlier
        step.
      drafted: Number of verified drafts. If the drafts form a tree, length of its longest branch of verified drafts.
      logprobs: Log probabilities of `tokens`; None if the request does not want them.
    """

    tokens: Sequence[int]
    drafted: int = 0
    logprobs: LogprobList | None = None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step of the engine, and their block tables.

    A decode row has one input token: the last token sampled for its request, which the host may not have read yet. The
    input tokens of a prefill row are `request.token_ids[start : start + num_tokens]`.

    Attributes:
      decode, prefill: The rows. In arrays with one entry per row, decode rows come first.
      tables: Block tables of all `rows`, int32 [rows, heads, P] for each cache group (layers with equal windows). If
        the KV heads of the group have different windows, entries are indices of page rows: pages of a single KV head.
        Otherwise heads is 1 and entries are page ids.
    """

    decode: tuple[ScheduledRow, ...]
    prefill: tuple[ScheduledRow, ...]
    tables: tuple[Int32[np.ndarray, "rows _ P"], ...]

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.decode + self.prefill

    def without_prefill(self) -> StepPlan:
        """Return the plan of the decode rows alone."""
        return StepPlan(self.decode, (), tuple(tables[: len(self.decode)] for tables in self.tables))

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.samples)

    @property
    def num_drafts(self) -> int:
        """Largest `num_drafts` of any decode row; 0 without decode rows."""
        return max((row.num_drafts for row in self.decode), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether a prefill row computes prompt tokens of a request that wants their log probabilities."""
        return any(row.num_scored for row in self.prefill)
