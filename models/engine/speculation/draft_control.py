"""Number of drafts that a step verifies: as many as measured acceptance pays for, down to none. It is
plain Python, on the host."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from models.engine.request import Request

PROBE_STEPS = 32
"""While drafts do not pay, one step in so many verifies some all the same, to see whether that has changed."""

RAREST_PROBE_STEPS = 256
"""Each such step in vain doubles the number until the next, up to this; one whose drafts are accepted resets it."""

DRAFTING_COST = 0.03
"""Share of a step that drafts are taken to cost at least, as long as that is not measured."""

FORGOTTEN_STEPS = 128
"""A step's time is forgotten after so many others. Otherwise a number of drafts that seemed slow once would never be
tried again; contexts are longer by then, or shorter, too."""

SETTLING_STEPS = 4
"""Steps after one with prompts whose time is not counted: after another program the first ones take longer."""

OPERATIONS_PER_BYTE = 200.0
"""Operations that take as long as reading a byte of weights; about what 16-bit matrix products reach on Hopper."""

_REQUEST_MEMORY, _ENGINE_MEMORY = 0.95, 0.98  # what is left of older measurements after each step
_FEWEST_TIMES, _NEWEST_TIMES = 3, 8  # of a kind of steps: until they count, and kept


def step_cost(dense_bytes: float, routed_bytes: float, chosen_share: float, itemsize: int) -> Callable[[int], float]:
    """Makes a function that estimates a decode step's time from its number of tokens, in bytes read.

    A step reads all weights but those of experts that no token chooses, and computes with each token. Caches are left
    out: drafts share their row's reading of them.

    Args:
      dense_bytes: weights that every token uses.
      routed_bytes: weights of all routed experts.
      chosen_share: share of the experts that a token chooses.
      itemsize: bytes of a weight.
    """
    operations = 2 * (dense_bytes + routed_bytes * chosen_share) / itemsize

    def cost(num_tokens: int) -> float:
        read = dense_bytes + routed_bytes * (1 - (1 - chosen_share) ** num_tokens)
        return read + num_tokens * operations / OPERATIONS_PER_BYTE

    return cost


class DraftControl:
    """Chooses the number of drafts that promises the most tokens in a step's time.

    With acceptance rate p, a row with drafts for n places gets 1 + p + ... + p^n tokens. Each request has its own p,
    measured in its newest steps, and begins with that of the engine's newest requests.

    A step's time is that of the newest ones with about as many rows and as many drafts: the second-shortest, since the
    host makes steps seem long, and the one after a pause short. Before there are any, all are estimated by a function.
    Then those that are missing are what would be best: next to nothing more than the nearest known one with fewer
    drafts, or what the function says beside that with more, so that they are tried if that could pay. No step takes
    longer than one with more drafts. Without times, as nothing else enters, the same traffic gives the same choices.
    """

    def __init__(
        self,
        widths: Sequence[int],
        cost: Callable[[int], float],
        draft_cost: float = 0.0,
        depth: Callable[[int], int] = lambda num_drafts: num_drafts,
    ) -> None:
        """Starts from even odds.

        Args:
            widths: Numbers of drafts to choose from, ascending.
            cost: Time of a step by its number of tokens, in any unit.
            draft_cost: Time that the proposer takes for a place of every row, in the same unit.
            depth: Places in a sequence that a number of drafts is for.

        Raises:
            ValueError: no widths, or not ascending from 0 or more.
        """
        if not widths or list(widths) != sorted(set(widths)) or widths[0] < 0:
            raise ValueError(f"widths must be ascending numbers from 0 or more, got {list(widths)}")
        self._widths, self._cost, self._draft_cost, self.depth = tuple(widths), cost, draft_cost, depth
        self._hits, self._trials = 0.5, 1.0
        self._steps_without, self._probe_after = 0, PROBE_STEPS
        self._times: dict[tuple[int, int], _Times] = {}
        self._num_steps, self._settled_after = 0, 0

    def num_drafts(self, requests: Sequence[Request]) -> int:
        """Drafts of every row in a step that decodes these requests."""
        if len(self._widths) == 1 or not requests:
            return self._widths[0]
        rates = [self.rate(request) for request in requests]
        seconds = self._step_times(len(requests))

        def tokens_a_time(num_drafts: int) -> float:
            places = self.depth(num_drafts)
            return sum(sum(rate**i for i in range(places + 1)) for rate in rates) / seconds[num_drafts]

        best = max(self._widths, key=tokens_a_time)  # of equals the smallest
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without >= self._probe_after:
            self._steps_without = 0
            self._probe_after = min(2 * self._probe_after, RAREST_PROBE_STEPS)
            return self._widths[1]
        return best

    def _step_times(self, num_rows: int) -> dict[int, float]:
        """Time of a step with so many rows, by its number of drafts."""
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
        """Takes note of a step that computed prompts, too."""
        self._settled_after = self._num_steps + SETTLING_STEPS

    def record_time(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes note of the time of a step that decoded so many rows and nothing else, of which some had as many drafts
        as this and none had more."""
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
        """Estimates the probability that a draft of a request is accepted if those before it are."""
        hits, trials = request.draft_trials
        return (hits + self._hits / self._trials) / (trials + 1)

    def record(self, request: Request, num_drafts: int, accepted: int) -> None:
        """Takes note of a row with room for `num_drafts`; drafts that the proposer did not give count as rejected."""
        trials = min(accepted + 1, self.depth(num_drafts))
        hits, before = request.draft_trials
        if accepted:
            self._probe_after = PROBE_STEPS
        request.draft_trials = (hits * _REQUEST_MEMORY + accepted, before * _REQUEST_MEMORY + trials)
        self._hits = self._hits * _ENGINE_MEMORY + accepted
        self._trials = self._trials * _ENGINE_MEMORY + trials


@dataclasses.dataclass
class _Times:
    """Seconds of the newest steps of one kind, and the number of the last of them among all steps."""

    newest: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_NEWEST_TIMES))
    step: int = 0


def _load(num_rows: int, num_drafts: int) -> tuple[int, int]:
    """Steps with as many drafts, and rows up to the same power of two, take about as long."""
    return (num_rows - 1).bit_length(), num_drafts


def counted(counts: tuple[int, ...], first: int, places: int) -> tuple[int, ...]:
    """Counts with one more in each of the first places, of at least so many places."""
    padded = counts + (0,) * (places - len(counts))
    return tuple(count + (i < first) for i, count in enumerate(padded))
