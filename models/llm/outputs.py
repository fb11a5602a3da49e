"""Outputs of prompts while the engine computes them: their state, their results, and streams."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from pallas_attn.models.checkpoints import IncrementalDetokenizer, Tokenizer
from pallas_attn.models.engine import Engine, RequestOutput, SamplingParams, TokenLogprobs
from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.llm.results import Completion, Delta, Generation, Logprob, OutputTimes, TokenLogprobTable
from pallas_attn.models.llm.text_output import TextOutput
from pallas_attn.models.llm.token_filters import BadWords, GrammarFilter

if TYPE_CHECKING:
    from pallas_attn.models.llm.llm import LLM


@dataclasses.dataclass(eq=False)
class OutputSequence:
    """One output of a prompt.

    Attributes:
      request_id: id of the request in the engine; -1 until it is added.
      grammar: filter of the grammar of the request; None without a grammar.
      text: tokens and text that the engine has returned.
      result: output of the engine, after the sequence has ended.
    """

    text: TextOutput
    request_id: RequestId = -1
    grammar: GrammarFilter | None = None
    result: RequestOutput | None = None


@dataclasses.dataclass(eq=False)
class PromptOutputs:
    """A prompt with its outputs.

    Attributes:
      prepared: the prompt.
      salt: salt of the prefix cache.
      sequences: outputs. Sequences after the first may be added to the engine later than the first.
    """

    prepared: PreparedPrompt
    salt: str
    sequences: list[OutputSequence]

    @property
    def is_finished(self) -> bool:
        return all(sequence.result is not None for sequence in self.sequences)


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedPrompt:
    """A prompt with its token ids and filters, made by `LLM.prepare` for one call of `LLM.add`.

    Attributes:
      text: text of the prompt; None for a prompt of token ids.
      ids: token ids, at least one.
      params: sampling parameters.
      bad_words: filter of `SamplingParams.bad_words`, which all outputs share; None without bad words.
      grammars: filter of `SamplingParams.structured_outputs` for each output; empty without a grammar.
    """

    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    bad_words: BadWords | None
    grammars: tuple[GrammarFilter, ...]


class ResultMaker:
    """Makes the results of prompts from the outputs of the engine.

    Args:
      engine: the engine.
      tokenizer: the tokenizer; None if the model has none.
      unfinished: sequences whose request the engine has, by id of the request.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, unfinished: Mapping[RequestId, OutputSequence]):
        self._engine = weakref.proxy(engine)  # `LLM.close` releases the engine
        self._tokenizer, self._open = tokenizer, unfinished
        self._token_texts: dict[int, str] = {}

    def generation(self, prompt: PromptOutputs) -> Generation:
        """Return the current state of a prompt."""
        results = [self.result(sequence) for sequence in prompt.sequences]
        return Generation(
            prompt=prompt.prepared.text,
            prompt_token_ids=[*prompt.prepared.ids],
            prompt_logprobs=self.prompt_logprobs(results[0]),
            outputs=[self._completion(i, s, r) for i, (s, r) in enumerate(zip(prompt.sequences, results, strict=True))],
        )

    def result(self, sequence: OutputSequence) -> RequestOutput | None:
        """Return the output of the engine for a sequence; None if the sequence was dropped or is not added yet."""
        if sequence.result is not None or sequence.request_id not in self._open:
            return sequence.result
        return self._engine.output(sequence.request_id)

    def prompt_logprobs(self, result: RequestOutput | None) -> list[TokenLogprobTable | None] | None:
        if result is None or result.prompt_logprobs is None:
            return None
        return [None if entry is None else self.table(entry) for entry in result.prompt_logprobs]

    def logprobs(self, sequence: OutputSequence, first: int, end: int) -> Sequence[TokenLogprobs]:
        """Return the log probabilities of the output tokens from `first` to `end`, without a copy of all others."""
        if sequence.result is not None:
            return (sequence.result.logprobs or ())[first:end]
        if sequence.request_id not in self._open:
            return ()
        return self._engine.output_logprobs(sequence.request_id, first, end)

    def _completion(self, index: int, sequence: OutputSequence, result: RequestOutput | None) -> Completion:
        text = sequence.text
        number = len(text.token_ids)
        first = None if result is None or not number else result.ttft_s
        entries = None if result is None or result.logprobs is None else result.logprobs[:number]
        return Completion(
            index=index,
            text=text.text,
            token_ids=[*text.token_ids],
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            cumulative_logprob=None if entries is None else sum(entry.logprob for entry in entries),
            logprobs=None if entries is None else [self.table(entry) for entry in entries],
            cached_tokens=0 if result is None else result.cached_tokens,
            timing=OutputTimes(
                first_token_s=first,
                total_s=None if result is None or first is None else first + sum(result.itl_s[: number - 1]),
                queue_s=None if result is None else result.queue_s,
            ),
        )

    def table(self, entry: TokenLogprobs) -> TokenLogprobTable:
        """Return the log probabilities at one position by token id: the token, then the likeliest tokens."""
        table = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            table.setdefault(token, Logprob(logprob, rank, self._token_text(token)))
        return table

    def _token_text(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if token not in self._token_texts:
            detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
            self._token_texts[token] = detokenizer.add([token]) + detokenizer.finish()
        return self._token_texts[token]


class Stream:
    """Iterator over the deltas of a prompt, made by `LLM.stream`.

    The prompt has `SamplingParams.n` texts, whose deltas alternate. The last delta of a text has a finish reason.
    """

    def __init__(self, llm: LLM, prompt: PromptOutputs):
        self._llm, self._prompt = llm, prompt
        self._ready: deque[Delta] = deque()
        self._has_ended = [False] * len(prompt.sequences)
        # A finalizer may run at any time, therefore the requests are aborted by the next step.
        weakref.finalize(self, llm._abandoned.append, prompt)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._ready:
            if all(self._has_ended):
                raise StopIteration
            self._ready = deque(self.take())
            if not self._ready:
                self._llm.step()
        return self._ready.popleft()

    def take(self) -> list[Delta]:
        """Return the deltas that earlier steps have made available, without running the engine."""
        results = self._llm._results
        deltas, self._ready = [*self._ready], deque()
        for index, sequence in enumerate(self._prompt.sequences):
            if self._has_ended[index]:
                continue
            # The result is stored after the text has ended. It has the log probabilities.
            output, first = sequence.text, sequence.text.num_taken
            ended = sequence.result is not None
            text, tokens = output.take() if output.finish_reason is None or ended else ("", [])
            if not (text or tokens or ended):
                continue
            logprobs = None
            if self._prompt.prepared.params.logprobs is not None:
                entries = results.logprobs(sequence, first, first + len(tokens))
                logprobs = [results.table(entry) for entry in entries]
            self._has_ended[index] = ended
            reason, stop = (output.finish_reason, output.stop_reason) if ended else (None, None)
            deltas.append(Delta(index, text, tokens, reason, stop, logprobs))
        return deltas

    @property
    def generation(self) -> Generation:
        """The prompt, and the texts that have been generated so far."""
        return self._llm._results.generation(self._prompt)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobTable | None] | None:
        """Log probabilities of the prompt as in `Generation`. They are complete after the first token."""
        results = self._llm._results
        return results.prompt_logprobs(results.result(self._prompt.sequences[0]))

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that the first output found in the prefix cache; 0 until the output has ended."""
        result = self._prompt.sequences[0].result
        return 0 if result is None else result.cached_tokens

    @property
    def is_finished(self) -> bool:
        """Whether `take` has returned the last delta, or the stream is closed."""
        return all(self._has_ended)

    def close(self) -> None:
        """Abort the unfinished requests, and end the iteration."""
        if not self._llm._is_closed:
            self._llm._drop(self._prompt)
        self._ready.clear()
        self._has_ended = [True] * len(self._has_ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
