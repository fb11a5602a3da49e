"""Compilation of an engine's step programs before steps need them."""

from __future__ import annotations

import gc
import weakref

from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.engine.runner import OnCompiled, Runner
from pallas_attn.models.engine.step.background import BackgroundCompiler


class Warmup:
    """Compiles the programs of all buckets (padded shapes of steps), or only the largest ones and the others in a
    thread.

    Attributes:
      is_compiling: whether the thread compiles, or compiled buckets are not available to steps yet.
    """

    def __init__(self, runner: Runner, ranks: DataRanks, *, all_logits: bool, freeze_objects: bool):
        """Compile nothing.

        Args:
          runner: owns the programs.
          ranks: receive the numbers of prompt tokens for which programs are compiled.
          all_logits: whether steps return the logits of all prompt tokens.
          freeze_objects: as `EngineConfig.freeze_objects`.
        """
        self._runner, self._ranks, self._all_logits = runner, ranks, all_logits
        self._freeze_objects = freeze_objects
        self.is_compiling = False
        self._thread: BackgroundCompiler | None = None  # until all its buckets are available to steps

    @property
    def num_pending(self) -> int:
        """Number of buckets that may still become available to steps."""
        return 0 if self._thread is None else self._thread.num_pending

    @property
    def num_errors(self) -> int:
        """Number of buckets whose compilation failed in the thread."""
        return 0 if self._thread is None else self._thread.num_errors

    def compile(self, on_compiled: OnCompiled | None, *, wait: bool, layers: bool) -> None:
        """Compile the programs of all buckets.

        Args:
          on_compiled: as in `Engine.warmup`.
          wait: whether to compile all buckets in this call, not only the largest ones.
          layers: whether to compile steps that copy pages layer by layer, too; implies `wait`.
        """
        runner, all_logits = self._runner, self._all_logits
        # Steps that compute log probabilities of prompt tokens may be separate buckets.
        scoring = runner.buckets(all_logits, prompt_logprobs=True)
        buckets = [*dict.fromkeys([*runner.buckets(all_logits), *scoring])]
        runner.compile_writes()  # first: loading a program drops the CUDA graphs that `compile` records
        if wait or layers:
            self.finish()
            self.is_compiling = False
            runner.compile(buckets, on_compiled)
            if layers:
                runner.compile_layers(buckets)
        elif not self.num_pending:
            runner.compile(runner.covering_buckets(all_logits), on_compiled)
            if (thread := runner.start_compiling(buckets)) is not None:
                self._thread = runner.background = thread
                weakref.finalize(self, thread.stop)
            self.is_compiling = self.num_pending > 0
        self._set_padded_sizes()

    def take_compiled(self, *, is_idle: bool) -> None:
        """Make one more bucket available to steps, if the thread has compiled one.

        Args:
          is_idle: whether no request is unfinished and no step is in flight. The warm-up ends only in such a call,
            because its end runs all programs.
        """
        if not self.is_compiling:
            return
        if self._take_one():
            self._set_padded_sizes()
        if is_idle and not self.num_pending:
            self._runner.warm_up()
            self.is_compiling = False
            self.freeze()

    def _take_one(self) -> bool:
        """Make the next bucket available that the thread has compiled. Return False if there is none."""
        found = None if self._thread is None else self._thread.next_compiled()
        if self._thread is None or found is None:
            return False
        self._runner.add_compiled(*found)
        self._thread.taken()
        if self._thread.is_complete:
            self._thread = self._runner.background = None
        return True

    def finish(self) -> None:
        """Wait until the thread has ended, and make its buckets available to steps."""
        if self._thread is not None:
            self._thread.join()
            while self._take_one():
                pass
            self._runner.warm_up()

    def stop(self) -> None:
        """End the thread, after the bucket that it compiles."""
        if self._thread is not None:
            self._thread.stop()
            self._thread.join()

    def freeze(self) -> None:
        """Exclude all present objects from garbage collection, if the engine's configuration says so."""
        if self._freeze_objects:
            gc.collect()
            gc.freeze()

    def _set_padded_sizes(self) -> None:
        self._ranks.set_padded_sizes(self._runner.prompt_sizes(self._all_logits))
