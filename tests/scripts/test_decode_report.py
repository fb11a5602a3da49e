"""Tests of the output of run_decode.py (table, JSON, plot) and of its demonstration prompts, without a model."""

import dataclasses
import io
import re
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from pallas_attn.models.cli.command_line import UsageError
from pallas_attn.models.cli.decode.plot import plot_run
from pallas_attn.models.cli.decode.progress import Display
from pallas_attn.models.cli.decode.report import Loading, Report
from pallas_attn.models.cli.prompts import demo_ids, demo_texts
from pallas_attn.models.cli.speculate import SpeculateOption, parse_speculate
from pallas_attn.models.engine import (
    Difference,
    Engine,
    EngineConfig,
    EngineStats,
    RequestCheck,
    RequestOutput,
    StepRecord,
    Verification,
)
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.step.compiler import StepCompiler
from pallas_attn.models.engine.verify import RoundingLoss
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case

WIDTH = 80


def report(num_requests=2, num_steps=4, texts=None, verification=None, **changes):
    outputs = [
        RequestOutput(i, 1000 + i, 16, [*range(32)], "length", None, 1.5, [0.004, 0.001, 0.9])
        for i in range(num_requests)
    ]
    steps = tuple(StepRecord(0.1 * i, 0.1, 60 if i == 0 else 0, i, 16, 8) for i in range(num_steps))
    stats = EngineStats(
        steps=steps,
        prefill_tokens=60,
        decode_tokens=6,
        prefill_tokens_per_s=12345.6,
        decode_tokens_per_s=789.1,
        prefix_hit_rate=0.42,
        used_pages=0,
        peak_pages=8,
        num_pages=10,
        preemptions=0,
        compilations=3,
        compile_s=4.2,
        cache_bytes=3 * 2**20,
        num_steps=num_steps,
    )
    made = Report("tiny", outputs, texts, stats, 16, 0.5, {"write_latent": "xla"}, verification)
    return dataclasses.replace(made, **changes)


def printed(made):
    console = Console(file=io.StringIO(), width=WIDTH)
    made.print(console)
    return console.file.getvalue()  # pyrefly: ignore[missing-attribute]


def test_table_has_a_line_per_request():
    line = next(line for line in printed(report()).splitlines() if line.startswith(" 1 "))
    assert line.split() == ["1", "1001", "16", "32", "1,500", "ms", "4.0", "ms", "810", "ms", "length"]


def test_table_has_the_statistics_of_the_run():
    text = printed(report())
    for words in (
        "12,346 tokens/s",
        "789 tokens/s",
        "42%",
        "8 of 10",
        "3.0 MiB",
        "4.2 s",
        "3 shapes",
        "xla: write_latent",
    ):
        assert words in text


def test_summary_has_the_main_statistics_in_one_line():
    one = report(1, loading=Loading(1.5, 0)).summary()
    decoded = "1,000 prompt tokens (16 cached), 32 tokens, 3 tokens/s, first token after 1,500 ms"
    assert one == f"{decoded}; loaded in 1.5 s; 3 programs ready after 4.2 s"
    assert report(2).summary() == "2 requests, 64 tokens, decode 789 tokens/s; 3 programs ready after 4.2 s"
    nothing = RequestOutput(0, 3, 0, [], "abort", None, None, [])
    assert report(outputs=[nothing]).summary() == "3 prompt tokens, 0 tokens; 3 programs ready after 4.2 s"


def test_output_without_tokens_has_no_times():
    nothing = RequestOutput(0, 3, 0, [], "abort", None, None, [])
    line = next(line for line in printed(report(outputs=[nothing])).splitlines() if line.startswith(" 0 "))
    assert line.split() == ["0", "3", "0", "0", "-", "-", "-", "abort"]


def test_differences_and_ties_are_shown():
    right = Verification((RequestCheck(30, 2, None),), 1e-3)
    assert "30 of 32 tokens" in printed(report(verification=right))
    assert "2 tied within 0.001" in " ".join(printed(report(verification=right)).split())
    wrong = Verification((RequestCheck(32, 0, None), RequestCheck(1, 0, Difference(1, None, 7, 0.25))), 1e-3)
    assert "request 1, output position 1: got the end, wanted 7, margin 0.25" in printed(report(verification=wrong))
    many = Verification((RequestCheck(4, 8, None),), 5.0)
    assert "8 of 12 tokens differ, each within 5" in " ".join(printed(report(verification=many)).split())
    rounded = Verification((RequestCheck(30, 2, None, RoundingLoss(1.5, 1.0, 0.25, 0.5)),), None)
    text = " ".join(printed(report(verification=rounded)).split())
    assert "30 of 32 tokens equal" in text
    assert "2 differ by rounding errors (loss 1.5 in logits, allowed 4.5)" in text
    assert report(verification=rounded).to_json()["run"]["verified_loss_allowed"] == 4.5
    lost = Verification((RequestCheck(30, 2, None, RoundingLoss(5.5, 1.0, 0.25, 0.5)),), None)
    text = " ".join(printed(report(verification=lost)).split())
    assert "2 of 32 tokens differ, with a loss of 5.5 in float32 logits; rounding explains at most 4.5" in text


def test_json_omits_missing_values():
    assert "text" not in report().to_json()["requests"][0]
    assert "verified" not in report().to_json()["run"]
    assert report(1, texts=["hi"]).to_json()["requests"][0]["text"] == "hi"
    assert report().to_json()["run"]["steps"] == 4


def test_drafts_are_shown_by_position():
    drafting = [
        RequestOutput(0, 9, 0, [1, 2, 3], "length", None, 1.5, [0.1], (8, 8, 4), (6, 2, 0)),
        RequestOutput(1, 9, 0, [1], "length", None, 1.5, [], (2,), (1,)),
        RequestOutput(2, 9, 0, [1], "length", None, 1.5, []),
    ]
    made = report(outputs=drafting, speculate="ngram:3")
    text = printed(made)
    assert "ngram:3, 9 of 22 accepted; by position 70%, 25%, 0%" in " ".join(text.split())
    assert [line.split()[4] for line in text.splitlines() if line[:3] in (" 0 ", " 1 ", " 2 ")] == ["40%", "50%", "-"]
    written = made.to_json()
    assert (written["run"]["drafted"], written["run"]["accepted"]) == ([10, 8, 4], [7, 2, 0])
    assert written["requests"][0]["drafted"] == [8, 8, 4]
    assert "speculate" not in report().to_json()["run"]


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("none", None),
        ("ngram", SpeculateOption("ngram", "", 4)),
        ("ngram:7", SpeculateOption("ngram", "", 7)),
        ("mtp:2", SpeculateOption("mtp", "", 2)),
        ("mtp:6:3", SpeculateOption("mtp", "", 6, 3)),
        ("draft:a/dir", SpeculateOption("draft", "a/dir", 4)),
        ("draft:C:/dir:2", SpeculateOption("draft", "C:/dir", 2)),
    ],
)
def test_speculate_values_are_parsed(given, option):
    assert parse_speculate(given) == option


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("guess:4", r"expected none, ngram.*, got 'guess:4'"),
        ("", r"expected none, ngram.*, got ''"),
        ("ngram:0", "expected 1 to 64 drafts, got '0'"),
        ("ngram:many", "expected 1 to 64 drafts, got 'many'"),
        ("ngram:x:4", "expected ngram or ngram:N, got 'ngram:x:4'"),
        ("mtp:6:9", "expected mtp:N:M with 1 to 8 alternatives, got 'mtp:6:9'"),
        ("mtp:many:2", "expected 1 to 64 drafts, got 'many'"),
        ("draft:4", "expected draft:DIR or draft:DIR:N, got 'draft:4'"),
        ("draft:dir:65", "expected 1 to 64 drafts, got '65'"),
    ],
)
def test_invalid_speculate_values_are_errors(given, why):
    with pytest.raises(UsageError, match=f"--speculate: {why}"):
        parse_speculate(given)


@slow_cases("1-0", "100-3000")
@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 0), (1, 1), (100, 3000)])
def test_plot_of_any_run(tmp_path, num_requests, num_steps):
    path = tmp_path / "picture"
    with path.open("wb") as file:
        plot_run(file, report(num_requests, num_steps))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("page_size", [1, 16, 64, 10**12])
@pytest.mark.parametrize("vocab_size", [1, 512])
def test_demonstration_ids_share_pages(page_size, vocab_size):
    prompts = demo_ids(vocab_size, page_size)
    assert prompts == demo_ids(vocab_size, page_size)
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)
    assert max(map(len, prompts)) < 1024
    shared = 3 * min(page_size, 64)
    assert sum(prompt[:shared] == prompts[0][:shared] for prompt in prompts) >= len(prompts) - 1
    assert len({len(prompt) for prompt in prompts}) == len(prompts) - 1


def test_demonstration_texts_share_a_preface():
    texts = demo_texts()
    shared = min(np.flatnonzero([len(set(characters)) > 1 for characters in zip(*texts, strict=False)]))
    assert shared > 200
    assert texts[0] == texts[-1]


class TestCompilationProgress:
    def test_lines_at_start_and_end_without_a_terminal(self, capsys):
        with Display("run_decode", shown=True).compiling() as on_compiled:
            for done in range(4):
                on_compiled(done, 3)
        first, last = capsys.readouterr().err.splitlines()
        assert first == "run_decode: compiling 3 programs ..."
        assert re.fullmatch(r"run_decode: compiled 3 programs in \d+\.\d s", last)

    def test_numbers_and_seconds_on_a_terminal(self, capsys, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with Display("run_decode", shown=True).compiling() as on_compiled:
            on_compiled(0, 7)
            on_compiled(1, 7)
        captured = capsys.readouterr()
        assert re.search(r"compiling program 2 of 7, \d+ s", captured.err)
        assert "run_decode" not in captured.err
        assert captured.out == ""

    @pytest.mark.parametrize("on_terminal", [True, False])
    def test_nothing_is_shown_if_not_requested(self, capsys, monkeypatch, on_terminal):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
        with Display("run_decode", shown=False).compiling() as on_compiled:
            on_compiled(0, 7)
            on_compiled(7, 7)
        assert capsys.readouterr() == ("", "")

    def test_engine_reports_each_program(self, monkeypatch):
        """`Engine.warmup` reports the numbers at the start and after each program, and nothing if all are compiled."""
        monkeypatch.setattr(StepCompiler, "lower", lambda *_: jax.jit(lambda: 0).lower())
        monkeypatch.setattr(Runner, "compile_writes", lambda _: None)
        engine = Engine(engine_case.model(), EngineConfig(num_pages=8, decode_buckets=(16,), prefill_buckets=(512,)))
        reported = []
        engine.warmup(lambda *numbers: reported.append(numbers))
        engine.warmup(lambda *numbers: reported.append(numbers))
        assert reported == [(0, 3), (1, 3), (2, 3), (3, 3)]
