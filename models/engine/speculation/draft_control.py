"""Choice of the number of drafts per step from measured acceptance rates and step times. Plain Python on the host.

A draft is a guess of a later token of a request. A step computes all drafts of a decode row together with its newest
token, and accepts the leading drafts that equal the sampled tokens. More drafts give more tokens per step, but make the
step longer. Drafts may form a tree with several drafts per position; d drafts in a line cover d positions.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from pallas_attn.models.engine.request import Request

PROBE_STEPS = 32
"""Initial probe interval in steps. While the best number of drafts is 0, one step per interval (a probe) verifies
drafts nevertheless, to notice if the acceptance rate has risen."""

RAREST_PROBE_STEPS = 256
"""Maximum probe interval in steps. Each probe doubles the interval. An accepted draft resets it to `PROBE_STEPS`."""

DRAFTING_COST = 0.03
"""Minimum relative increase of a step's time from one number of drafts to the next larger number. It is assumed even if
measured times show a smaller increase."""

FORGOTTEN_STEPS = 128
"""Number of steps after which measured times expire. Without expiry, a number of drafts that was slow once would never
be tried again. Step times also change with the lengths of the contexts."""

SETTLING_STEPS = 4
"""Number of steps, after a step that computed prompts, whose times are ignored. The first runs of a program after
another program are slower."""

OPERATIONS_PER_BYTE = 200.0
"""Number of arithmetic operations that take as long as reading one byte of weights, for 16-bit matrix products on
Hopper GPUs."""

# Acceptance counts are multiplied by these factors before the counts of a decode row are added: counts of one request,
# counts of all requests.
_REQUEST_MEMORY, _ENGINE_MEMORY = 0.95, 0.98
# Numbers of measured times for one number of drafts and of rows: required before they are used, and stored.
_FEWEST_TIMES, _NEWEST_TIMES = 3, 8


def step_cost(dense_bytes: float, routed_bytes: float, chosen_share: float, itemsize: int) -> Callable[[int], float]:
    """Make a function that estimates the time of a decode step from its number of tokens. The unit of time is the time
    to read one byte of weights.

    A step reads all weights except the experts that no token selects, and multiplies each token with the weights that
    it uses. The estimate leaves out reading the KV cache: drafts do not add to this time, because all drafts of a row
    share one read.

    Args:
      dense_bytes: bytes of the weights that every token uses.
      routed_bytes: bytes of the weights of all routed experts.
      chosen_share: share of the experts that a token selects, from 0 to 1.
      itemsize: bytes per weight.
    """
    operations = 2 * (dense_bytes + routed_bytes * chosen_share) / itemsize

    def cost(num_tokens: int) -> float:
        read = dense_bytes + routed_bytes * (1 - (1 - chosen_share) ** num_tokens)
        return read + num_tokens * operations / OPERATIONS_PER_BYTE

    return cost


class DraftControl:
    """Chooses the number of drafts per decode row that maximises the expected number of tokens per second.

    Expected tokens. With acceptance rate p, a row with drafts for n positions gains 1 + p + ... + p^n tokens on
    average. The rate of each request is measured in its recent steps. A new request starts with the average of all
    requests.

    Step time. Times are recorded separately for each number of drafts and each number of rows, rounded up to a power of
    two. For each of these kinds of steps, the second-shortest of the newest times is used: the longest times contain
    delays of the host, and the shortest time may be the time of a step after a pause.

    - If no kind with the present number of rows has been measured, all times are estimated with the cost function.
    - Otherwise, the time of a number of drafts that has not been measured is the smaller of two values: the time of the
      next smaller measured number of drafts plus 3%, and the time of the next larger measured number scaled by the cost
      function. The estimate is low on purpose, so that a number of drafts is tried, and measured, if it could be the
      best.
    - A time that is longer than (time with more drafts) / 1.03 is replaced by this value.

    If no times are recorded, the choice depends only on the requests, so the same requests give the same choices.
    """

    def __init__(
        self,
        widths: Sequence[int],
        cost: Callable[[int], float],
        draft_cost: float = 0.0,
        depth: Callable[[int], int] = lambda num_drafts: num_drafts,
    ) -> None:
        """Start with an average acceptance rate of 1/2, and without measured times.

        Args:
            widths: Numbers of drafts per row to choose from, ascending.
            cost: Function from the number of tokens of a step to its estimated time, in any unit.
            draft_cost: Time that the proposer needs to make one draft for every row, in the same unit.
            depth: Function from the number of drafts of a row to the number of positions that they cover.

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

        best = max(self._widths, key=tokens_a_time)  # the smallest of several equally good numbers
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without >= self._probe_after:
            self._steps_without = 0
            self._probe_after = min(2 * self._probe_after, RAREST_PROBE_STEPS)
            return self._widths[1]
        return best

    def _step_times(self, num_rows: int) -> dict[int, float]:
        """Return the assumed time of a step with `num_rows` rows, for each number of drafts (see the class)."""
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
        """Return the time of a step that the cost function estimates, including the time of the proposer."""
        cost = self._cost(num_rows * (1 + num_drafts)) + self.depth(num_drafts) * self._draft_cost
        return cost + (DRAFTING_COST * self._cost(num_rows) if num_drafts else 0.0)

    def _measured(self, num_rows: int, num_drafts: int) -> float | None:
        """Return the second-shortest recorded time in seconds; None if there are too few times or they have expired."""
        times = self._times.get(_load(num_rows, num_drafts))
        if times is None or len(times.newest) < _FEWEST_TIMES or self._num_steps - times.step > FORGOTTEN_STEPS:
            return None
        return sorted(times.newest)[1]

    def record_prompts(self) -> None:
        """Record that a step computed prompts. Its time, and the times of the next `SETTLING_STEPS` steps, are not
        used."""
        self._settled_after = self._num_steps + SETTLING_STEPS

    def record_time(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the time of a step without prompts. Times are ignored in the first `SETTLING_STEPS` steps after a step
        with prompts.

        Args:
            num_rows: Number of decode rows.
            num_drafts: Largest number of drafts of a row.
            seconds: Duration of the step.
        """
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
        """Estimate the probability that a draft of a request is accepted, given that all drafts before it are accepted.
        The average of all requests counts like one additional trial of the request."""
        hits, trials = request.draft_trials
        return (hits + self._hits / self._trials) / (trials + 1)

    def record(self, request: Request, num_drafts: int, accepted: int) -> None:
        """Record how many drafts of a decode row were accepted.

        Args:
            request: The request of the row.
            num_drafts: Number of drafts that the row had room for. If the proposer made fewer, the missing ones count
                as rejected.
            accepted: Number of accepted drafts.
        """
        trials = min(accepted + 1, self.depth(num_drafts))
        hits, before = request.draft_trials
        if accepted:
            self._probe_after = PROBE_STEPS
        request.draft_trials = (hits * _REQUEST_MEMORY + accepted, before * _REQUEST_MEMORY + trials)
        self._hits = self._hits * _ENGINE_MEMORY + accepted
        self._trials = self._trials * _ENGINE_MEMORY + trials


@dataclasses.dataclass
class _Times:
    """Recorded times of steps of one kind (see `_load`).

    Attributes:
        newest: Times of the newest steps in seconds.
        step: Number of the step of the newest time.
    """

    newest: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_NEWEST_TIMES))
    step: int = 0


def _load(num_rows: int, num_drafts: int) -> tuple[int, int]:
    """Return the kind of a step for which times are recorded together: (binary logarithm of the number of rows rounded
    up to a power of two, number of drafts)."""
    return (num_rows - 1).bit_length(), num_drafts


def counted(counts: tuple[int, ...], first: int, places: int) -> tuple[int, ...]:
    """Return counts padded with zeros to at least `places` entries, with 1 added to the first `first` entries."""
    padded = counts + (0,) * (places - len(counts))
    return tuple(count + (i < first) for i, count in enumerate(padded))
