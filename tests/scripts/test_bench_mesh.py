"""Tests of scripts/bench_mesh.py: random weights on several devices, and a consistent report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn.models.checkpoints import random_model as model_from_files
from pallas_attn.models.config import PRESETS
from pallas_attn.models.decoder import AttentionSettings, make_mesh
from scripts import bench_mesh
from scripts.bench.engine import several_devices
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.several_devices import MeshWork, SplitDecode
from scripts.bench.harness.timing import Stopwatch


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "expert": 4}, {"context": 2}])
def test_random_weights_have_the_sharding_of_a_checkpoint(layout: dict[str, int]):
    mesh, config = make_mesh(layout), PRESETS["v3-tiny"]
    made, read = (
        dict(nnx.to_flat_state(nnx.state(model)))
        for model in (
            random_model(config, jnp.float32, AttentionSettings(), mesh=mesh),
            model_from_files(config, mesh=mesh),
        )
    )
    assert made.keys() == read.keys()
    for path, weight in made.items():
        assert (weight.shape, weight.dtype) == (read[path].shape, read[path].dtype), path
        assert weight[...].sharding.is_equivalent_to(read[path][...].sharding, weight.ndim), path


def test_requests_of_a_layout_follow_its_devices():
    work = MeshWork("v3-tiny", ({}, {"data": 2}), (4, 6), (64,), new_tokens=8, per_device=True)
    assert work.serving(None).batches == (4, 6)
    assert work.serving(make_mesh({"data": 2})).batches == (4, 6)
    assert work.serving(make_mesh({"tensor": 2})).batches == (8, 12)
    split = MeshWork("v3-tiny", ({},), (4, 5), (64,), new_tokens=8).serving(make_mesh({"data": 2}))
    assert split.batches == (2, 3)


@pytest.mark.slow
def test_report_of_a_small_model(tmp_path: Path, capsys):
    out = tmp_path / "mesh.json"
    sizes = ["--batch", "4", "--contexts", "24", "--new-tokens", "4", "--step-tokens", "16", "--dtype", "float32"]
    assert bench_mesh.main(["--config", "v3-tiny", "--mesh", "data=2", *sizes, "--json", str(out)]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert (result["mesh"], result["devices"]) == ({"data": 2}, 2)
    [case] = result["cases"]
    assert (case["batch"], case["context"]) == (4, 24)
    assert min(case["prefill_tokens_per_s"], case["decode_tokens_per_s"]) > 0
    assert "data=2, batch 4, context 24: prefill" in capsys.readouterr().out


@pytest.mark.slow  # `make test` tests split contexts in tests/test_parallel.py
def test_latent_decode_over_split_contexts_is_timed():
    stopwatch = Stopwatch(samples=1, sample_seconds=0.001)
    found = [*several_devices.decode_over_contexts(SplitDecode(2, 256, 8, 16, 2), stopwatch)]
    assert [result["devices"] for result in found] == [1, 2, 4, 8]
    assert all(np.isfinite(result["us"]) for result in found)


def test_sizes_of_split_contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    measured: list[SplitDecode] = []
    monkeypatch.setattr(
        several_devices, "decode_over_contexts", lambda work, _: measured.append(work) or [{"devices": 8, "us": 1.0}]
    )
    monkeypatch.setattr(several_devices, "run", lambda *args: [])
    monkeypatch.setattr(bench_mesh, "measure_rates", lambda _: SplitDecode())
    out = tmp_path / "mesh.json"
    for given, wanted in (
        ([], [(64, 32768), (16, 131072), (2, 1048576)]),
        (["3x512", "1x1048576"], [(3, 512), (1, 1048576)]),
    ):
        assert bench_mesh.main(["--config", "v3-tiny", "--json", str(out), "--operation", *given]) == 0
        assert [(work.batch, work.context) for work in measured] == wanted
        assert len(json.loads(out.read_text())["mla_decode"]) == len(wanted)
        measured.clear()
    assert bench_mesh.main(["--config", "v3-tiny", "--operation", "2x1000"]) == 2
    assert measured == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--mesh", "tensor"], "--mesh: expected AXIS=N"),
        (["--most-tokens", "9"], "--most-tokens: expected at least the tokens of the smallest case, got 9"),
        (
            ["--coordinator=host:1", "--num-processes=2", "--process-id=0"],
            "--coordinator: expected layouts of a mesh, without --exchanges and --operation",
        ),
        (["--mesh", "tensor=2", "--process-id=0"], "--coordinator, --num-processes and --process-id"),
        (["--new-tokens", "1"], "--new-tokens 2"),
        (["--operation", "32768"], "--operation: expected BATCHxTOKENS, such as 16x131072, got '32768'"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_unsupported_measurements_are_errors(wrong, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_mesh.main(["--config", "v3-tiny", *wrong])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "message"), [("tensor=3", "mesh: tensor: devices"), ("rows=2", "mesh: expected axes")]
)
def test_impossible_layouts_are_errors(mesh: str, message: str, capsys):
    assert bench_mesh.main(["--config", "v3-tiny", "--mesh", mesh]) == 2
    assert f"bench_mesh: error: --mesh: {message}" in capsys.readouterr().err


def test_cases_with_too_many_tokens_are_skipped():
    work = MeshWork("v3-tiny", ({},), (1, 4), (64, 512), new_tokens=8, most_tokens=600).serving(None)
    assert work.cases == [(1, 64), (4, 64), (1, 512)]
    assert work.engine_config().num_pages < 4 * 512 // 64


@pytest.mark.slow  # `make test` tests engines in two processes in tests/models/test_processes.py
def test_two_processes_measure_one_model(tmp_path: Path):
    out = tmp_path / "mesh.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--config=v3-tiny", "--mesh=tensor=2", "--batch=2", "--contexts=16", "--new-tokens=4", "--dtype=float32"]
    options += ["--step-tokens=16", f"--json={out}", f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, bench_mesh.__file__, *options]
    both = [
        subprocess.Popen([*command, f"--process-id={i}"], env=environment, stdout=subprocess.DEVNULL) for i in (0, 1)
    ]
    assert [process.wait(timeout=240) for process in both] == [0, 0]
    report = json.loads(out.read_text())
    assert (report["processes"], report["results"][0]["devices"]) == (2, 2)
    assert report["results"][0]["cases"][0]["decode_tokens_per_s"] > 0
