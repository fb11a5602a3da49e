"""Interactive chat of run_decode: --chat."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from pallas_attn.models.checkpoints import Tokenizer, TokenizerError
from pallas_attn.models.checkpoints.tokenizer import check_unicode
from pallas_attn.models.cli.command_line import Failure, as_failure
from pallas_attn.models.cli.decode.answers import Output, Streamed, printable
from pallas_attn.models.cli.decode.report import answer_summary, nonfinite
from pallas_attn.models.engine import Engine, RequestOutput, SamplingParams

NOTE = "Ctrl-C stops an answer, Ctrl-D ends the chat."


class Chat:
    """A conversation with a model. Each turn is a request whose prompt is the whole conversation; the prefix cache has
    the keys and values of earlier turns.

    Args:
      prog: name of the command, for messages.
      engine: an engine without unfinished requests.
      tokenizer: tokenizer with a chat template.
      params: sampling parameters of the answers.
      system: system prompt; None for none.
      stats: whether to print statistics of each answer to stderr.
    """

    def __init__(
        self,
        prog: str,
        engine: Engine,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        system: str | None = None,
        stats: bool = False,
    ):
        self._prog, self._engine, self._tokenizer, self._params, self._stats = prog, engine, tokenizer, params, stats
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._start]
        self._output = Output()

    def run(self) -> None:
        """Read messages from standard input and print the answers, until standard input ends.

        Raises:
          Failure: an answer cannot be computed or printed.
          KeyboardInterrupt: a second Ctrl-C during an answer, or Ctrl-C while messages are read from a pipe.
        """
        for message in _lines():
            if not message.strip():
                continue
            try:
                check_unicode(message)
            except ValueError as error:
                self._say(str(error))
                continue
            self._answer(message)

    def _answer(self, message: str) -> None:
        """Print the answer to a message, and add both to the conversation."""
        turn = {"role": "user", "content": message}
        request_id = self._add([*self._messages, turn])
        if request_id is None and self._messages != self._start:
            self._say("starting a new conversation")
            self._messages = [*self._start]
            request_id = self._add([*self._messages, turn])
        if request_id is None:
            return
        streamed = Streamed(self._output, self._tokenizer)
        with _stopping() as stopped, as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="decoding: "):
            while self._engine.has_unfinished:
                self._engine.step()
                streamed.update(self._engine.output(request_id).output_ids)
                if stopped():
                    self._engine.abort(request_id)
        output = self._engine.output(request_id)
        streamed.finish(output.output_ids)
        self._engine.forget(request_id)
        self._report(output)
        self._messages += [turn, {"role": "assistant", "content": streamed.text}]

    def _add(self, messages: Sequence[dict[str, str]]) -> int | str | None:
        """Queue a request for the next answer. Return its id; None if the conversation is too long, which is reported.

        Raises:
          Failure: the chat template or the tokenizer fails.
        """
        with as_failure(TokenizerError):
            prompt = self._tokenizer.encode_chat(messages)
        request_id = self._engine.add_request(prompt, self._params)
        refusal = self._engine.output(request_id).refusal
        if refusal is None:
            return request_id
        self._engine.forget(request_id)
        self._say(refusal)
        return None

    def _report(self, output: RequestOutput) -> None:
        """Print statistics and problems of an answer to stderr.

        Raises:
          Failure: logits were NaN or infinite.
        """
        if self._stats:
            self._say(answer_summary(output))
        if output.finish_reason == "length":
            self._say(f"the answer was cut after {len(output.output_ids)} tokens (--max-tokens, --max-model-len)")
        for sentence in nonfinite([output]):
            raise Failure(sentence)

    def _say(self, message: str) -> None:
        print(f"{self._prog}: {printable(message)}", file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input without line breaks. On a terminal, a prompt is shown for each line, and Ctrl-C
    discards a line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` line editing and a history
    print(NOTE, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{NOTE}", file=sys.stderr)


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Context manager in which the first Ctrl-C raises no exception. It yields a function that returns whether Ctrl-C
    was pressed. A second Ctrl-C raises KeyboardInterrupt.

    An exception inside the engine would discard the prefix cache.
    """
    presses: list[int] = []

    def press(number: int, frame: object) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set a handler
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, previous)
