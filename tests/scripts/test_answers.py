"""Tests of answers on standard output: streaming, control characters, and the interactive chat."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.checkpoints.weights import save_random_checkpoint
from pallas_attn.models.cli.command_line import Failure
from pallas_attn.models.cli.decode import command as run_decode
from pallas_attn.models.cli.decode.answers import Output, Streamed, print_answers, printable
from pallas_attn.models.cli.decode.chat import NOTE, _lines
from pallas_attn.models.engine import Engine, RequestCheck, Verification
from tests.models import engine_case

pytestmark = pytest.mark.usefixtures("shared_steps")

ESCAPE = "\x1b]0;owned\x07"
"""Control sequence that changes the title of a terminal."""

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
WORDS = ["system", "user", "assistant", "hello", "again", "brief"]


def save_tokenizer(folder: Path, words: list[str]) -> None:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that compiles in seconds, whose tokens are words, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    save_random_checkpoint(folder, engine_case.CONFIG)
    words = WORDS + [f"w{i}" for i in range(len(WORDS), engine_case.VOCAB_SIZE)]
    save_tokenizer(folder, words)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def flags(folder: Path, *more: Any) -> list[str]:
    """Return arguments with sizes that all tests share, so that two programs are compiled for all of them."""
    given = ["--model", folder, "--page-size", 4, "--num-pages", 32, "--max-model-len", 40, "--max-num-seqs", 2]
    given += ["--decode-buckets", 2, "--prefill-buckets", 32, "--implementation", "reference", "--no-progress"]
    return [*map(str, [*given, "--ignore-eos", *more])]


def answer(folder: Path, tmp_path: Path, *more: Any, status: int = 0) -> list[dict[str, Any]]:
    """Run prompts and return the requests of the JSON report."""
    out = tmp_path / "out.json"
    assert run_decode.main(flags(folder, "--max-tokens", 6, "--json", out, *more)) == status
    return json.loads(out.read_text())["requests"]


class TestPrintable:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("plain\n\ttext", "plain\n\ttext"),
            ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
            (ESCAPE, "\\x1b]0;owned\\x07"),
            ("\x9b31m", "\\x9b31m"),  # CSI in one character
            ("hidden\rshown\b\x7f", "hidden\\rshown\\x08\\x7f"),
            ("\udcff", "\\udcff"),
            ("é 日本 👩‍👩‍👧 a\u00a0b", "é 日本 👩‍👩‍👧 a\u00a0b"),
        ],
    )
    def test_control_characters_are_escaped(self, text: str, shown: str) -> None:
        assert printable(text) == shown

    def test_every_control_character_is_escaped(self) -> None:
        controls = {chr(c) for c in [*range(32), 127, *range(128, 160)]} - {"\n", "\t"}
        assert not controls & set(printable("".join(sorted(controls))))


class TestOutput:
    def test_answer_is_printed_token_by_token(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[str] = []
        output = Output()
        monkeypatch.setattr(output, "write", written.append)
        streamed = Streamed(output, load_tokenizer(folder))
        for count in (1, 2, 2, 4):
            streamed.update([3, 4, 7, 8][:count])
        streamed.finish([3, 4, 7, 8, 9])
        assert written == ["hello", " again", "", " w7 w8", " w9", "", "\n"]
        assert streamed.text == "hello again w7 w8 w9"

    def test_token_ids_are_printed_without_a_tokenizer(self, capsys: pytest.CaptureFixture[str]) -> None:
        streamed = Streamed(Output(), None)
        streamed.update([5])
        streamed.update([5, 17])
        streamed.finish([5, 17, 2])
        assert capsys.readouterr().out == "5 17 2\n"

    def test_tokenizer_that_cannot_stream_prints_the_whole_answer(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unsupported(*args: Any) -> None:
            raise NotImplementedError("a decoder with a regular expression")

        monkeypatch.setattr("pallas_attn.models.cli.decode.answers.IncrementalDetokenizer", unsupported)
        streamed = Streamed(Output(), load_tokenizer(folder))
        streamed.update([3])
        assert capsys.readouterr().out == ""
        streamed.finish([3, 4])
        assert capsys.readouterr().out == "hello again\n"

    def test_text_is_flushed_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads, writes = os.pipe()
        with os.fdopen(reads, "rb", buffering=0) as pipe, os.fdopen(writes, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            Output().write("a")
            assert pipe.read(10) == b"a"

    @pytest.mark.parametrize(
        ("path", "message"),
        [(None, "standard output was closed"), ("/dev/full", "cannot write to standard output: No space left")],
    )
    def test_failed_output_is_reported_once(
        self, monkeypatch: pytest.MonkeyPatch, path: str | None, message: str
    ) -> None:
        reads, writes = os.pipe()
        os.close(reads)
        if path is not None:
            os.close(writes)
            writes = os.open(path, os.O_WRONLY)
        with os.fdopen(writes, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            output = Output()
            with pytest.raises(Failure, match=message):
                output.write("a")
            output.write("b")

    def test_characters_that_the_encoding_lacks_are_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        Output().write("é")
        assert stdout.buffer.getvalue() == b"\\xe9"  # pyrefly: ignore[missing-attribute]

    def test_headings_are_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_answers(Output(), ["What\nis\x1b it?", "x" * 200], ["one\ntwo", "three"])
        first, second = capsys.readouterr().out.split("\n\n")
        assert first == "[0] What is\\x1b it?\none\ntwo"
        heading, text = second.splitlines()
        assert (heading[:5], heading[-1], len(heading), text) == ("[1] x", "…", 80, "three")


class TestPrompts:
    def test_single_answer_is_streamed_and_statistics_go_to_stderr(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        printed: list[str] = []
        step = Engine.step

        def watched(engine: Engine) -> Any:
            printed.append(capsys.readouterr().out)  # output of earlier steps
            return step(engine)

        monkeypatch.setattr(Engine, "step", watched)
        (request,) = answer(folder, tmp_path, "--prompt", "hello")
        rest, err = capsys.readouterr()
        assert "".join(printed) + rest == request["text"] + "\n"
        assert sum(bool(part) for part in printed) >= 4
        assert re.fullmatch(r"run_decode: 3 prompt tokens, 6 tokens, .* tokens/s, first token after .*\n", err)

    def test_all_answers_are_printed_in_full(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = answer(folder, tmp_path, "--prompt", "hello", "again w9", "--quiet")
        captured = capsys.readouterr()
        assert captured.out == f"[0] hello\n{first['text']}\n\n[1] again w9\n{second['text']}\n"
        assert captured.err == ""

    def test_control_characters_do_not_reach_the_terminal(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hostile = tmp_path / "model"
        save_random_checkpoint(hostile, engine_case.CONFIG)
        save_tokenizer(hostile, [f"w{i}{ESCAPE}" for i in range(engine_case.VOCAB_SIZE)])
        (request,) = answer(hostile, tmp_path, "--prompt", "hello", "--stats")
        captured = capsys.readouterr()
        assert ESCAPE in request["text"]
        assert captured.out == printable(request["text"]) + "\n"
        assert not {"\x1b", "\x07"} & set(captured.out + captured.err)

    def test_verification_is_reported_on_stderr(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_decode, "verify", lambda *_, **__: Verification((RequestCheck(6, 0, None),), 1e-3))
        answer(folder, tmp_path, "--prompt", "hello", "--verify")
        assert capsys.readouterr().err.endswith(
            "run_decode: verified: yes: 6 of 6 tokens equal the uncached, unchunked run's\n"
        )


class TestChat:
    def chat(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *more: Any, status: int = 0) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape"))))
        assert run_decode.main(flags(folder, "--chat", "--max-tokens", 6, *more)) == status

    def test_answers_depend_on_earlier_turns_and_reuse_their_pages(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.chat(folder, monkeypatch, "hello\n\nhello\n", "--system", "brief", "--stats")
        captured = capsys.readouterr()
        first, second = captured.out.splitlines()
        assert [len(line.split()) for line in (first, second)] == [6, 6]
        assert first != second
        said = [line for line in captured.err.splitlines() if "prompt tokens" in line]
        assert re.match(r"run_decode: 5 prompt tokens, 6 tokens", said[0])  # system brief user hello assistant
        # The second prompt has the first prompt, the answer and three more tokens. Pages have four tokens.
        assert re.match(r"run_decode: 14 prompt tokens \(8 cached\), 6 tokens", said[1])

    def test_interrupt_stops_an_answer_and_not_the_chat(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        step, steps = Engine.step, 0

        def interrupted(engine: Engine) -> Any:
            nonlocal steps
            steps += 1
            if steps == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return step(engine)

        before = signal.getsignal(signal.SIGINT)
        monkeypatch.setattr(Engine, "step", interrupted)
        self.chat(folder, monkeypatch, "hello\nhello\n", "--max-tokens", 12, "--stats")
        first, second = capsys.readouterr().out.splitlines()
        assert 1 <= len(first.split()) < 6
        assert len(second.split()) == 12
        assert signal.getsignal(signal.SIGINT) == before

    def test_long_conversation_starts_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.chat(folder, monkeypatch, "hello\n" * 6 + "hello " * 60 + "\nhello\n")
        captured = capsys.readouterr()
        answers = captured.out.splitlines()
        assert len(answers) == 7  # the message of 60 words has no answer
        assert answers[0] in answers[1:]
        assert "run_decode: the prompt has" in captured.err
        assert captured.err.count("run_decode: starting a new conversation\n") == 2

    def test_invalid_text_is_skipped(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.chat(folder, monkeypatch, "\udcff\nhello\n")
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 1
        assert "run_decode: expected text in UTF-8, got '\\udcff' at character 0\n" in captured.err

    def test_device_failure_ends_the_chat(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(engine: Engine) -> None:
            raise MemoryError

        monkeypatch.setattr(Engine, "step", fail)
        self.chat(folder, monkeypatch, "hello\n", status=3)
        assert capsys.readouterr().err == "run_decode: error: decoding: MemoryError\n"

    def test_lines_of_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Ctrl-C discards a line, and Ctrl-D ends the chat."""
        events = iter(["one", KeyboardInterrupt, "two", EOFError])

        def typed(prompt: str) -> str:
            event = next(events)
            if isinstance(event, str):
                return event
            raise event

        monkeypatch.setattr(builtins, "input", typed)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert [*_lines()] == ["one", "two"]
        assert capsys.readouterr().err.count(NOTE) == 2
