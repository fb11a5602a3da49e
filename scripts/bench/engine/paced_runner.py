"""A device that waits instead of computing, to measure the host's work of an engine and of a server without a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_attn.models.engine import Engine
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.step.result import StepResult

LAUNCH_SHARE = 0.4
"""Share of a step's time for which a launch waits without Python's global lock, like XLA's launches of kernels."""

PROMPT_TOKEN_S = 1e-5
"""Seconds of a step for each prompt token of its bucket."""


class PacedRunner:
    """Replaces `Runner.launch` of an engine. The scheduler, the packing of steps, and all work on tokens stay.

    The device runs one step at a time, in the order of the launches. Each row gets a token from a fixed sequence.

    Args:
      engine: the engine, on one device, without drafts. Its steps need not be compiled.
      tokens: token ids that are generated cyclically.
      step_s: seconds of a step without prompts.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], step_s: float):
        self._runner: Any = engine._runner
        self._tokens, self._step_s = tokens, step_s
        self._free_s, self._steps = 0.0, 0
        self._runner.launch = self._launch
        self._runner.compile = lambda buckets, on_compiled=None: None

    def _launch(self, plans: Sequence[StepPlan | None], all_logits: bool = False, **ignored: object) -> StepResult:
        bucket = self._runner.bucket_of(plans, all_logits)
        jax.device_put(self._runner._pack(bucket, plans))
        time.sleep(LAUNCH_SHARE * self._step_s)
        step_s = self._step_s + PROMPT_TOKEN_S * bucket.prefill_tokens
        self._free_s = ready_s = max(self._free_s, time.perf_counter()) + step_s
        self._steps += 1
        number = bucket.decode_rows + sum(len(plan.prefill) for plan in plans if plan is not None)
        first = self._steps * 997
        tokens = [self._tokens[(first + i) % len(self._tokens)] for i in range(number)]

        def read(array: jax.Array) -> np.ndarray:
            time.sleep(max(ready_s - time.perf_counter(), 0.0))
            return np.asarray(array)

        on_device = jax.device_put(np.asarray(tokens, np.int32))
        return StepResult(tuple(plans), bucket, None, read=read, tokens=on_device)
