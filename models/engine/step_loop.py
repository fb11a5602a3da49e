"""The main loop of the engine: plans a step, launches it, and reads the tokens of the previous step.

A step is one forward pass of the model over a batch. The batch has at most one row per running request: a decode row
with the newest token of the request, or a prefill row with a chunk of its prompt. A token is sampled after each decode
row, and after a prefill row that ends the prompt. With speculation, a decode row also has drafts (guesses of later
tokens), and yields one more token per accepted draft.

Call n of `StepLoop.step` does:

    plans = ranks.schedule()               # choose the rows of step n and allocate cache pages for them
    step_n = runner.launch(plans)          # asynchronous: the device runs step n after step n - 1
    tokens = step_n_minus_1.sampled()      # blocks until step n - 1 has ended; step n is queued on the device meanwhile
    ranks.retire(tokens)                   # append the tokens to the requests; end requests and release their pages
    runner.sample(step_n)                  # only if a request of step n has a token filter, see below

A step is at least two programs: one computes logits, the other samples tokens. A token filter needs all earlier tokens
of its request. Therefore the host computes its mask for step n after it has read step n - 1, while the device computes
the logits of step n. In a step without token filters, `launch` starts both programs.

A data rank is a group of devices with its own requests, scheduler and page pools. All data ranks run the same step
together. Without data parallelism there is one data rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.engine.kv_transfer.engine_transfers import EngineTransfers
from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.engine.request_table import RequestTable
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.step_log import LaunchedStep, StepLog


class StepLoop:
    """Runs the steps of an engine. At most one launched step has tokens that the host has not read.

    An exception in a method may leave the schedulers, the caches and this object inconsistent. The requests and their
    tokens that have been read are consistent.
    """

    def __init__(
        self,
        runner: Runner,
        ranks: DataRanks,
        transfers: EngineTransfers,
        requests: RequestTable,
        log: StepLog,
        *,
        capture_logits: bool,
    ):
        """Start without a launched step.

        Args:
          runner: samples, and has the engine's clock.
          ranks: plan steps and receive their tokens.
          transfers: launches steps, and receives pages of prompts from other engines.
          requests: records of all requests.
          log: receives a record of each step.
          capture_logits: whether to store the logits of all prompt tokens in `requests`.
        """
        self._runner, self._ranks, self._transfers = runner, ranks, transfers
        self._requests, self._log, self._capture_logits = requests, log, capture_logits
        self._launched: LaunchedStep | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or the tokens of a launched step have not been read."""
        return self._ranks.has_unfinished or self._launched is not None

    def step(self, *, records_time: bool) -> list[RequestId]:
        """Launch the next step, then read the tokens of the previous step.

        Args:
          records_time: whether the durations of steps affect the number of drafts of later steps.

        Returns:
          Ids of the requests that received a token.
        """
        launched = self._launch()
        progressed = self.read(records_time=records_time)
        if launched is not None and not launched.result.is_sampled:
            self._sample(launched)
        self._launched = launched
        return progressed

    def read(self, *, records_time: bool) -> list[RequestId]:
        """Wait until the device has finished the launched step, read its tokens, and append them to the requests.
        Without a launched step, do nothing. Argument and result as `step`."""
        step = self._launched
        if step is None:
            return []
        plans, rows = step.result.plans, step.result.sampled()
        for request, start, logprobs in step.result.prompt_logprobs():
            # After an exception the prompt is computed again, so the list may have later entries already.
            request.prompt_logprobs.write(start, logprobs)
        if step.result.logits is not None:
            self._requests.store_logits(plans, step.result.read(step.result.logits))
        now = self._runner.now()
        progressed = self._requests.record_tokens(self._ranks.retire(plans, rows), now)
        record = self._log.add(step, rows, now)
        if records_time:
            self._ranks.record_time(plans, record.duration_s)
        self._launched = None
        return progressed

    def drop(self) -> None:
        """Drop the launched step, whose results an exception has made invalid."""
        self._launched = None

    def _launch(self) -> LaunchedStep | None:
        """Plan a step and start it on the device. Return None if no request has tokens to compute."""
        planned_s, hits = self._runner.now(), self._ranks.hit_tokens
        plans = self._schedule()
        if plans is None:
            return None
        self._requests.record_start(plans, planned_s)
        cached, used = self._ranks.hit_tokens - hits, self._ranks.used_rows
        self._log.record_use(used)
        result = self._transfers.launch(plans, self._capture_logits)
        return LaunchedStep(result, planned_s, self._runner.now(), cached, used)

    def _schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plan a step. If arriving pages occupy all free pages of a data rank, so that none of its requests can run,
        release them."""
        plans = self._ranks.schedule()
        self._transfers.remove_closed()
        stuck = {incoming.rank for incoming in self._transfers.incoming} & self._idle_ranks(plans)
        for rank in stuck:
            self._transfers.give_up_incoming(rank)
        if plans is None and stuck:
            plans = self._ranks.schedule()
        self._transfers.close_found()
        return plans

    def _idle_ranks(self, plans: Sequence[StepPlan | None] | None) -> set[int]:
        """Return the data ranks with unfinished requests that have rows neither in this step nor in the last one."""
        schedulers = self._ranks.schedulers
        no_rows = [None] * len(schedulers)
        launched = no_rows if self._launched is None else self._launched.result.plans
        return {
            rank
            for rank, (planned, last) in enumerate(zip(plans or no_rows, launched, strict=True))
            if planned is None and last is None and schedulers[rank].has_unfinished
        }

    def _sample(self, step: LaunchedStep) -> None:
        """Compute the token masks of a step and start its sampling. End the requests whose token filter failed."""
        for request, error in self._runner.sample(step.result):
            request.error = error  # before the finish reason, so that a request that ended has its error
            self._ranks.abort(request.request_id, "filter_error")
            self._requests.record_filter_error(request)
