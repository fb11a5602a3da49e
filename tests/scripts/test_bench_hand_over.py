"""Tests of scripts/bench_hand_over.py, the benchmark of KV-cache transfers: a consistent report."""

import json
from pathlib import Path

import pytest

from scripts import bench_hand_over
from scripts.bench.engine import hand_over
from scripts.bench.engine.hand_over import HandOver


@pytest.mark.slow
def test_report_is_consistent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sizes = ["--lengths", "20", "40", "--step-tokens", "16", "--page-size", "4", "--repeats", "2"]
    model = ["--config", "v3-tiny", "--dtype", "float32", "--implementation", "reference"]
    assert bench_hand_over.main([*sizes, *model, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [result["prompt_tokens"] for result in report["results"]] == [20, 40]
    for result in report["results"]:
        whole, layered = (result[name]["median"] for name in ("whole_ttft_s", "layered_ttft_s"))
        assert result["cost"] == pytest.approx(layered / whole - 1)
        assert 0 < result["arrived_before_first_token"] <= 1
        assert 0 <= result["read_by_whole_ttft"] <= 1
        assert result["equal_first_tokens"] == result["equal_to_whole_steps"] == 2
        assert min(result[name]["least"] for name in ("export_s", "two_processes_ttft_s")) > 0
    assert "40 tokens: " in capsys.readouterr().out


def test_secret_is_in_the_environment_and_not_in_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret of a transfer is in the environment of the other process, because all users can read its arguments."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]):
            calls.append((command, env))

        def wait(self, timeout_s: float | None = None) -> None: ...

        def kill(self) -> None: ...

    monkeypatch.setattr(hand_over.subprocess, "Popen", Process)
    for _ in range(2):
        with hand_over._prefill_process(HandOver("v3-tiny", "float32", None, (20,), 16, 4, 1), None):
            pass
    secrets = [env[hand_over.SECRET] for _, env in calls]
    assert len(set(secrets)) == 2
    for secret, (command, _) in zip(secrets, calls, strict=True):
        assert len(secret) == 64
        assert not any(secret in argument for argument in command)


@pytest.mark.slow
@pytest.mark.parametrize("prefill_mesh", ["tensor=2", "data=2"])  # equal weights on equal and on different meshes
def test_whole_prompts_are_transferred_between_meshes(
    prefill_mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # of the second process
    out = tmp_path / "out.json"
    sizes = ["--lengths", "24", "--step-tokens", "16", "--page-size", "4", "--repeats", "2", "--json", str(out)]
    model = ["--config", "v3-tiny", "--dtype", "float32", "--implementation", "reference"]
    assert bench_hand_over.main([*sizes, *model, "--mesh", "tensor=2", "--prefill-mesh", prefill_mesh]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert (result["prompt_tokens"], result["equal_first_tokens"]) == (24, 2)
    parts = [result[f"{name}_s"]["least"] for name in hand_over.PARTS]
    assert min(parts) > 0
    assert result["two_processes_ttft_s"]["largest"] > sum(parts[2:])
    assert result["bytes"] > 24 * 4
    assert "24 tokens: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--repeats", "0"], "--repeats"),
        (["--prefill-mesh", "tensor"], "--prefill-mesh: expected AXIS=N"),
    ],
)
def test_options_are_checked(wrong: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_hand_over.main(wrong)
    assert named in capsys.readouterr().err


def test_impossible_mesh_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_hand_over.main(["--config", "v3-tiny", "--mesh", "tensor=3"]) == 2
    assert "bench_hand_over: error: --mesh: mesh: tensor: devices" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prefill_process_that_ends_is_noticed() -> None:
    work = HandOver("v3-tiny", "float32", None, (20,), 16, 4, 1, prefill_mesh={"rows": 2})
    with (
        pytest.raises(RuntimeError, match="the process that computes prompts ended with status 1"),
        hand_over._prefill_process(work, None) as connect,
    ):
        connect()
