"""Choice of the number of drafts per step from measured acceptance and step times. Plain Python on the host."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from models.engine.request import Request

PROBE_STEPS = 32
"""Initial probe interval in steps. While drafts are not worthwhile, one step per interval verifies drafts anyway, to
detect a change."""

RAREST_PROBE_STEPS = 256
"""Maximum probe interval in steps. A rejected probe doubles the interval; an accepted probe resets it."""

DRAFTING_COST = 0.03
"""Minimum share by which drafts are assumed to lengthen a step.

A larger number of drafts is assumed to take at least this share longer than a smaller number, even if both are
measured.
"""

FORGOTTEN_STEPS = 128
"""Number of steps after which a measured time expires. Otherwise a number of drafts that was slow once would never be
tried again. Context lengths change, too."""

SETTLING_STEPS = 4
"""Number of steps after a step with prompts whose times are ignored, because the first runs of a program are slower."""

OPERATIONS_PER_BYTE = 200.0
"""Arithmetic operations that take as long as reading one byte of weights, for 16-bit matrix products on Hopper."""

_REQUEST_MEMORY, _ENGINE_MEMORY = 0.95, 0.98  # decay factors of older measurements per step
_FEWEST_TIMES, _NEWEST_TIMES = 3, 8  # measured times of a kind of step: required, and stored


def step_cost(dense_bytes: float, routed_bytes: float, chosen_share: float, itemsize: int) -> Callable[[int], float]:
    """Make a function that estimates a decode step's time, in units of bytes read, from its number of tokens.

    A step reads all weights except weights of experts that no token selects, and computes with each token. The estimate
    leaves out the caches, because drafts of a row share one read of the row's cache.

    Args:
      dense_bytes: bytes of the weights that every token uses.
      routed_bytes: bytes of the weights of all routed experts.
      chosen_share: share of the experts that a token selects.
      itemsize: bytes per weight.
    """
    operations = 2 * (dense_bytes + routed_bytes * chosen_share) / itemsize

    def cost(num_tokens: int) -> float:
        read = dense_bytes + routed_bytes * (1 - (1 - chosen_share) ** num_tokens)
        return read + num_tokens * operations / OPERATIONS_PER_BYTE

    return cost


class DraftControl:
    """Chooses the number of drafts that maximises the expected number of tokens per second.

    Tokens. With acceptance rate p, a row with drafts for n positions gets 1 + p + ... + p^n tokens on average. The rate
    is measured for each request in its newest steps. New requests start from the engine's average of recent steps.

    Time. The time of a step is measured for each number of drafts and each power of two of rows. Of the newest
    measurements the second-shortest counts: delays of the host make some steps seem long, and a step after a pause
    seems short. Until anything has been measured, all times are estimates of the cost function. Afterwards a missing
    time is assumed to be as short as possible, so that the number of drafts is tried if it could be worthwhile: the
    time of the nearest measured smaller number of drafts plus 3%, or the time of the nearest measured larger number
    scaled by the cost function. A step is never assumed to take longer than a step with more drafts.

    Without recorded times the choice depends only on the requests, so equal traffic gives equal choices.
    """

    def __init__(
        self,
        widths: Sequence[int],
        cost: Callable[[int], float],
        draft_cost: float = 0.0,
        depth: Callable[[int], int] = lambda num_drafts: num_drafts,
    ) -> None:
        """Start with an acceptance rate of 1/2.

        Args:
            widths: Numbers of drafts to choose from, ascending.
            cost: Function from the number of tokens to the time of a step, in any unit.
            draft_cost: Time of the proposer for one position of every row, in the same unit.
            depth: Function from the number of drafts to the number of positions they cover.

        Raises:
            ValueError: widths are empty, negative, or not ascending.
        """
        if not widths or list(widths) != sorted(set(widths)) or widths[0] < 0:
            raise ValueError(f"widths must be ascending numbers from 0 or more, got {list(widths)}")
        self._widths, self._cost, self._draft_cost, self.depth = tuple(widths), cost, draft_cost, depth
        self._hits, self._trials = 0.5, 1.0
        self._steps_without, self._probe_after = 0, PROBE_STEPS
        self._times: dict[tuple[int, int], _Times] = {}
        self._num_steps, self._settled_after = 0, 0

    def num_drafts(self, requests: Sequence[Request]) -> int:
        """Choose the number of drafts per row for a step that decodes these requests."""
        if len(self._widths) == 1 or not requests:
            return self._widths[0]
        rates = [self.rate(request) for request in requests]
        seconds = self._step_times(len(requests))

        def tokens_a_time(num_drafts: int) -> float:
            places = self.depth(num_drafts)
            return sum(sum(rate**i for i in range(places + 1)) for rate in rates) / seconds[num_drafts]

        best = max(self._widths, key=tokens_a_time)  # among equals the smallest
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without >= self._probe_after:
            self._steps_without = 0
            self._probe_after = min(2 * self._probe_after, RAREST_PROBE_STEPS)
            return self._widths[1]
        return best

    def _step_times(self, num_rows: int) -> dict[int, float]:
        """Time of a step with `num_rows` rows, for each number of drafts."""
        estimated = {n: self._estimate(num_rows, n) for n in self._widths}
        known = {n: time for n in self._widths if (time := self._measured(num_rows, n)) is not None}
        if not known:
            return estimated
        seconds: dict[int, float] = {}
        for n in reversed(self._widths):
            if n in known:
                possible = [known[n]]
            else:
                beyond_fewer = [known[m] * (1 + DRAFTING_COST) for m in known if m < n]
                below_more = [known[m] * estimated[n] / estimated[m] for m in known if m > n]
                possible = [*beyond_fewer[-1:], *below_more[:1]]
            seconds[n] = min([*possible, *(longer / (1 + DRAFTING_COST) for longer in seconds.values())])
        return seconds

    def _estimate(self, num_rows: int, num_drafts: int) -> float:
        cost = self._cost(num_rows * (1 + num_drafts)) + self.depth(num_drafts) * self._draft_cost
        return cost + (DRAFTING_COST * self._cost(num_rows) if num_drafts else 0.0)

    def _measured(self, num_rows: int, num_drafts: int) -> float | None:
        times = self._times.get(_load(num_rows, num_drafts))
        if times is None or len(times.newest) < _FEWEST_TIMES or self._num_steps - times.step > FORGOTTEN_STEPS:
            return None
        return sorted(times.newest)[1]

    def record_prompts(self) -> None:
        """Record a step that computed prompts."""
        self._settled_after = self._num_steps + SETTLING_STEPS

    def record_time(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the time of a step without prompts. `num_drafts` is the largest number of drafts of its rows."""
        self._num_steps += 1
        if self._num_steps <= self._settled_after:
            return
        padded = next(width for width in self._widths if num_drafts <= width)
        times = self._times.setdefault(_load(num_rows, padded), _Times())
        if self._num_steps - times.step > FORGOTTEN_STEPS:
            times.newest.clear()
        times.newest.append(seconds)
        times.step = self._num_steps

    def rate(self, request: Request) -> float:
        """Estimate the probability that a draft of a request is accepted if all drafts before it are accepted."""
        hits, trials = request.draft_trials
        return (hits + self._hits / self._trials) / (trials + 1)

    def record(self, request: Request, num_drafts: int, accepted: int) -> None:
        """Record a row with room for `num_drafts`. Drafts that the proposer did not make count as rejected."""
        trials = min(accepted + 1, self.depth(num_drafts))
        hits, before = request.draft_trials
        if accepted:
            self._probe_after = PROBE_STEPS
        request.draft_trials = (hits * _REQUEST_MEMORY + accepted, before * _REQUEST_MEMORY + trials)
        self._hits = self._hits * _ENGINE_MEMORY + accepted
        self._trials = self._trials * _ENGINE_MEMORY + trials


@dataclasses.dataclass
class _Times:
    """Times of the newest steps of one kind in seconds, and the step number of the newest one."""

    newest: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_NEWEST_TIMES))
    step: int = 0


def _load(num_rows: int, num_drafts: int) -> tuple[int, int]:
    """Kind of a step: its number of drafts, and its number of rows rounded up to a power of two."""
    return (num_rows - 1).bit_length(), num_drafts


def counted(counts: tuple[int, ...], first: int, places: int) -> tuple[int, ...]:
    """Pad counts to `places` entries and add 1 to the first `first` entries."""
    padded = counts + (0,) * (places - len(counts))
    return tuple(count + (i < first) for i, count in enumerate(padded))
