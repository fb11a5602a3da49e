"""What one step of the engine computes, as the scheduler tells the runner."""

from dataclasses import dataclass

from models.request import Request


@dataclass(frozen=True)
class ScheduledRow:
    """New tokens of one request in one step.

    Attributes:
      request: Whose tokens; its `pages` hold the row until the step has been launched.
      slot: The request's place in device arrays with one entry per running request.
      start: Position of the first new token, which is the number of tokens before it in the cache.
      num_tokens: New tokens.
      samples: Whether the token after the last new one is sampled: not within a prompt.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """One step of the engine: `decode` rows before `prefill` rows in the packed arrays.

    A decode row has one token, the last one sampled at its slot, perhaps not read back yet. A prefill row's tokens are
    `request.token_ids[start : start + num_tokens]`.
    """

    decode: tuple[ScheduledRow, ...]
    prefill: tuple[ScheduledRow, ...]

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return self.decode + self.prefill

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.samples)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
