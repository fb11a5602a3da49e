"""Several processes that run one engine on a common mesh.

The processes check that they agree on each step. If one process fails, all processes end.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.engine import ProcessError, Processes, SamplingParams
from pallas_attn.models.engine.distributed import processes
from tests.models.filter_case import Third
from tests.models.process_case import ROOT, WORKER, Group, fixture_group, free_port  # noqa: F401
from tests.models.sampling_oracle import PlainLoop
from tests.models.test_parity import GOLDENS, MARGIN, NAMES, golden

TIMEOUT_S = 1.0


# --- agreement, with threads of one process


@dataclasses.dataclass
class Store:
    """Replacement of the key-value store of the coordination service, shared by the `Processes` objects of a test."""

    entries: dict[str, str] = dataclasses.field(default_factory=dict)
    reachable: bool = True
    given_up: dict[int, str] = dataclasses.field(default_factory=dict)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self._answer()
        self.entries[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        self._answer()
        return [(key, value) for key, value in self.entries.items() if key.startswith(prefix)]

    def shutdown(self) -> None:
        pass

    def _answer(self) -> None:
        if not self.reachable:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    def join(self, count: int) -> list[Processes]:
        return [
            Processes(
                "host:1", count, i, timeout_s=TIMEOUT_S, give_up=lambda verdict, i=i: self.given_up.update({i: verdict})
            )
            for i in range(count)
        ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(processes, "_start_program", lambda *args, **kwargs: (None, "path"))
    monkeypatch.setattr(processes, "_write_line", lambda *args: None)
    monkeypatch.setattr(processes, "_connect", lambda *args: store)
    monkeypatch.setattr(processes, "BEAT_S", 0.05)
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    yield store
    for thread in threading.enumerate():
        assert thread.name != "processes" or store.given_up, "a process still watches the others"


def expect_verdict(process: Processes, number: int, message: str) -> None:
    """Check that `confirm` raises the verdict `message` each time it is called, then leave."""
    for _ in range(2):
        with pytest.raises(ProcessError, match=f"^{message}$"):
            process.confirm(number)
    process.leave(message)


def test_processes_agree_and_leave_together(store: Store):
    first, second = store.join(2)
    for step in range(20):
        numbers = [process.publish(f"step {step}", b"plan", bytes([step])) for process in (second, first)]
        assert numbers == [step, step]
        first.confirm(step)
        second.confirm(step)
    first.publish("step 20")
    threading.Timer(0.1, second.publish, ["step 20", b"more"]).start()
    for process in (first, second):
        expect_verdict(process, 20, "process 1 disagrees with process 0 on step 20")


def test_processes_wait_for_each_other_at_the_end(store: Store):
    both = store.join(2)
    thread = threading.Thread(target=both[0].leave)
    thread.start()
    time.sleep(1.5 * TIMEOUT_S)  # `leave` waits longer than the time limit of other operations
    assert thread.is_alive()
    both[1].leave()
    thread.join(5)
    assert not thread.is_alive()


def test_digests_cover_all_earlier_points(store: Store):
    first, second = store.join(2)
    for step in range(3):
        first.publish(f"step {step}", b"a")
    second.publish("step 0", b"b")
    for process in (first, second):
        expect_verdict(process, 0, "process 1 disagrees with process 0 on step 0")


def test_verdict_names_a_process_without_heartbeat(store: Store):
    gone, *others = store.join(3)[::-1]
    gone._close()  # ends the heartbeats of this process
    numbers = [process.publish("step 0") for process in others]
    for process, number in zip(others, numbers, strict=True):
        expect_verdict(process, number, "process 2 sent no heartbeat for 1 s")


def test_verdict_names_a_process_without_progress(store: Store):
    first, second = store.join(2)
    for process in (first, second):
        process.publish("step 0")
    expect_verdict(first, first.publish("step 1"), "process 1 did not get to step 1 within 1 s")
    while 1 not in store.given_up:
        time.sleep(0.01)
    assert store.given_up == {1: "process 1 did not get to step 1 within 1 s"}
    second._close()


@pytest.mark.slow
def test_compilation_and_patient_points_have_no_time_limit(store: Store):
    first, second = store.join(2)
    waiting = threading.Thread(target=first.agree, args=["the model"])
    waiting.start()
    time.sleep(1.5 * TIMEOUT_S)
    second.agree("the model")
    waiting.join(5)
    number = first.publish("step 0")
    with second.busy():
        time.sleep(1.5 * TIMEOUT_S)
    second.publish("step 0")
    first.confirm(number)
    for process in (first, second):
        process.leave("done with it")


def test_process_that_ends_reports_its_reason(store: Store):
    first, second = store.join(2)
    second.leave("its file is gone")
    expect_verdict(first, first.publish("step 0"), "process 1 ended: its file is gone")


def test_verdict_names_process_0_if_it_cannot_be_reached(store: Store):
    first, second = store.join(2)
    store.reachable = False
    expect_verdict(second, second.publish("step 0"), "process 0 cannot be reached: no answer at its address for 1 s")
    first._close()


def test_failed_computation_raises_the_verdict(store: Store):
    first, second = store.join(2)
    second._close()
    with pytest.raises(ProcessError, match="process 1 sent no heartbeat"), first.blamed():
        raise jax.errors.JaxRuntimeError("Connection closed by peer")
    first.leave("failed")


def test_failed_computation_without_a_verdict_raises_its_error(store: Store):
    (only,) = store.join(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), only.blamed():
        raise jax.errors.JaxRuntimeError("out of memory")
    np.testing.assert_array_equal(only.announce("step 0", b"plan")(jnp.arange(3)), [0, 1, 2])
    only.leave()


# --- real processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("killed", "process 1 sent no heartbeat for 2 s"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("stopped", "process 1 sent no heartbeat for 2 s"),
                ("hanging", "process 1 did not get to step 5 within 2 s"),
                ("disagreeing", "process 1 disagrees with process 0 on step 5"),
                ("none", "left"),
            )
        ),
    ],
)
def test_collectives_end_when_a_process_fails(group: Group, fault: str, message: str):
    port = str(free_port())
    group.start([["-c", WORKER, index, port, fault] for index in "01"])
    status, out, err = group.wait(0)
    assert (status, out) == (0 if fault == "none" else 3, [message]), err
    if fault == "hanging":
        assert group.wait(1)[:2] == (4, [f"given up: {message}"])
    if fault in ("disagreeing", "none"):
        assert group.wait(1)[:2] == (status, [message])


# --- run_decode as several processes

FAULTY = """
import os, signal, sys, time
from pallas_attn.models.engine import Engine
from pallas_attn.models.cli.decode.command import main

right, steps = Engine.step, 0

def step(engine):
    global steps
    steps += 1
    if steps == 12:
        FAULT
    return right(engine)

Engine.step = step
sys.exit(main(sys.argv[1:]))
"""


def commands(name: str, mesh: str, out: Path, *more: str, fault: str = "", at: int = 1) -> list[list[str]]:
    """Return the command lines of two processes. Process `at` executes the statement `fault` in a step."""
    options = ["--model", str(GOLDENS / name), "--prompt-ids", str(GOLDENS / name / "prompts.json"), "--ignore-eos"]
    options += ["--mesh", mesh, "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    options += ["--dtype", "float32", "--page-size", "4", "--json", str(out), "--quiet", *more]  # as the goldens
    programs = [[str(ROOT / "scripts" / "run_decode.py")] for _ in range(2)]
    if fault:
        programs[at] = ["-c", FAULTY.replace("FAULT", fault)]
    return [[*program, *options, "--process-id", str(index)] for index, program in enumerate(programs)]


def expect_golden(name: str, results: dict[str, Any], num_tokens: int) -> None:
    """Check that tokens equal transformers up to the first near tie, where rounding could change the token."""
    expected = golden(name)
    found = [request["output_ids"] for request in results["requests"]]
    for got, wanted, margins in zip(found, expected["tokens"], expected["margins"], strict=True):
        sure = min(int(np.argmax(np.append(margins, 0) < MARGIN)), num_tokens)
        assert len(got) == num_tokens
        assert got[:sure] == wanted[:sure].tolist()


MESHES = {
    "v2-greedy": "data=2,expert=4",
    "llama": "data=2,tensor=2",
    **dict.fromkeys(("glm-dsa", "glm-shared", "qwen3-window"), "tensor=4"),
}
"""Mesh of each model for two processes with two devices each. Other models use data=4, which all models support."""


@pytest.mark.parametrize(
    ("name", "mesh", "num_devices"),
    [
        ("llama", "data=2,tensor=2", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((name, MESHES.get(name, "data=4"), 2) for name in NAMES if name != "llama"),
                ("llama", "tensor=4", 2),
                ("gpt-oss", "data=2,tensor=2", 2),
                ("llama", "tensor=8", 4),
                ("llama", "data=2,tensor=4", 4),
                ("v2-greedy", "data=4,expert=8", 4),
                ("v3", "data=8", 4),
            )
        ),
    ],
)
def test_tokens_of_two_processes_equal_goldens(group: Group, tmp_path: Path, name: str, mesh: str, num_devices: int):
    """Two processes give the tokens of transformers. Only process 0 writes results.

    Depending on the mesh, requests, heads or experts are split over both processes.
    """
    out, num_tokens = tmp_path / "out.json", 8 if (name, num_devices) == ("llama", 2) else 24
    sizes = ["--max-tokens", str(num_tokens), "--max-num-seqs", "2", "--max-batched-tokens", "32"]
    group.start(commands(name, mesh, out, *sizes, "--implementation", "reference"), num_devices)
    status, lines, err = group.wait(0)
    assert status == 0, err
    assert sum(line.startswith("[") for line in lines) == len(golden(name).prompts)
    assert group.wait(1)[:2] == (0, [])
    results = json.loads(out.read_text())
    expect_golden(name, results, num_tokens)
    assert results["run"]["load_s"] > 0
    assert results["run"]["load_peak_host_bytes"] > 2**26


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "places"),
    [
        ("ngram:2", 2),
        (f"draft:{GOLDENS / 'llama'}:2", 0),
        # The second engine drafts nothing, because by the cost estimate a draft of this model costs as much as a step.
    ],
)
def test_processes_agree_on_drafts(group: Group, tmp_path: Path, proposer: str, places: int):
    """Processes choose the same number of drafts, because the choice does not depend on times.

    Each process measures the times of steps separately.
    """
    out, sizes = tmp_path / "out.json", ["--max-tokens", "24", "--max-num-seqs", "2", "--max-batched-tokens", "32"]
    group.start(commands("llama", "data=2,tensor=2", out, *sizes, "--speculate", proposer))
    status, _, err = group.wait(0)
    assert status == 0, err
    assert group.wait(1)[:2] == (0, [])
    results = json.loads(out.read_text())
    expect_golden("llama", results, 24)
    assert len(results["run"]["drafted"]) == places


FILTERED = """
import sys
from pallas_attn.models.engine import Engine
from pallas_attn.models.cli.decode.command import main
from tests.models.filter_case import Third

add = Engine._add
Engine._add = lambda *given, **named: add(*given, **{**named, "token_filter": Third(256)})
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_filtered_requests_with_drafts_in_two_processes(group: Group, tmp_path: Path):
    """Every process computes the token masks of all requests, from the drafts of all data ranks."""
    out, sizes = tmp_path / "out.json", ["--max-tokens", "40", "--max-num-seqs", "2", "--max-batched-tokens", "32"]
    started = commands("llama", "data=2,tensor=2", out, *sizes, "--speculate", "ngram:2")
    group.start([["-c", FILTERED, *command[1:]] for command in started])
    status, _, err = group.wait(0)
    assert status == 0, err
    assert group.wait(1)[:2] == (0, [])
    results, loop = json.loads(out.read_text()), PlainLoop(load_model(GOLDENS / "llama", jnp.float32))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt, request in zip(golden("llama").prompts, results["requests"], strict=True):
        assert request["output_ids"] == loop.generate(prompt, params, Third(256))
    assert sum(results["run"]["drafted"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "at", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "process 1 sent no heartbeat for 3 s"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 0, "process 0 sent no heartbeat for 3 s"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 1, "process 1 sent no heartbeat for 3 s"),
        ("time.sleep(1000)", 1, "process 1 did not get to step 11 within 3 s"),
        ("engine.abort(0)", 1, "process 1 disagrees with process 0 on step 11"),
        ("engine.abort(0)", 0, "process 1 disagrees with process 0 on step 11"),
        ("raise RuntimeError('its disk is full')", 1, "process 1 ended: RuntimeError: its disk is full"),
        ("raise KeyboardInterrupt", 0, "process 0 ended: interrupted"),
    ],
)
def test_failure_of_a_process_ends_all_processes(group: Group, tmp_path: Path, fault: str, at: int, message: str):
    """A fault in the twelfth step of a process ends both processes.

    An error line names the failed process, and process 0 writes the results of the completed steps.
    """
    out = tmp_path / "out.json"
    sizes = ["--max-tokens", "40", "--max-num-seqs", "4", "--process-timeout", "3", "--implementation", "reference"]
    group.start(commands("llama", "tensor=4", out, *sizes, fault=fault, at=at))
    status, lines, err = group.wait(1 - at)
    assert status == 3, err
    assert [line for line in err.splitlines() if line.startswith("run_decode:")] == [f"run_decode: error: {message}"]
    if at == 1:
        found = [request["output_ids"] for request in json.loads(out.read_text())["requests"]]
        wanted = golden("llama")["tokens"]
        assert all(got and got == all_of_it[: len(got)].tolist() for got, all_of_it in zip(found, wanted, strict=True))
    else:
        assert lines == []
    if "abort" in fault or "sleep" in fault:
        assert group.wait(at)[0] == 3


@pytest.mark.slow
def test_processes_with_different_options_do_not_start(group: Group, tmp_path: Path):
    both = commands("llama", "tensor=4", tmp_path / "out.json", "--implementation", "reference")
    both[1] += ["--max-tokens", "9"]
    group.start(both)
    wanted = "process 1 disagrees with process 0 on the model, the sizes of the engine or the requests"
    for index in range(2):
        status, lines, err = group.wait(index)
        assert (status, lines) == (3, [])
        assert f"run_decode: error: {wanted}" in err
