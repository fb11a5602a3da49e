"""Exchanges of two cards: heads once, when contexts are split over them, sums and logits, when heads of a model are,
nothing, when those of one operation are; no cache."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aot import engine, environment


def exchanged(what: str, kernels: Path) -> Any:
    """Output of `several_cards`, which keeps the kernels it lowers in a folder."""
    if reason := environment.missing("cuda13"):
        pytest.skip(reason)
    run = subprocess.run(
        [sys.executable, "-m", "tests.aot.several_cards", what],
        env=environment.variables("cuda13") | {"PALLAS_ATTN_KERNEL_CACHE": str(kernels)},
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_compiled_kernels_gather_no_cache(tmp_path):
    assert exchanged("contexts", tmp_path) == {"heads": ["all-to-all"], "latents": ["all-to-all"]}
    assert len(list(tmp_path.iterdir())) == 4  # a planner and a decode kernel each, for both cards


@pytest.mark.slow  # tests/runtime/test_sharded_calls.py has both types of meshes, on CPUs
def test_outside_a_shard_map_nothing_is_exchanged_or_copied(tmp_path):
    """Kernels of both languages, under a plain `jax.jit`, with either type of axes; also a write in place."""
    found = exchanged("plain", tmp_path)
    assert len(found) == 16
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.slow
def test_steps_of_split_models_add_up_twice_a_layer(tmp_path):
    """The embedding is added up and the logits are gathered, too. Data ranks gather the tokens of a layer with experts,
    with their experts, weights and which are live at once, and add up what these give, and nothing else."""
    sums = {"gpt-oss": 1 + 2 * engine.GPT_OSS.num_hidden_layers, "v2-lite": 1 + 2 * engine.V2_LITE.num_hidden_layers}
    wanted = {name: {"all-reduce": count, "all-gather": 1} for name, count in sums.items()}
    layers = engine.V2_LITE.num_moe_layers
    wanted["v2-lite, experts of data ranks"] = {"all-gather": layers, "reduce-scatter": layers}
    assert exchanged("steps", tmp_path) == wanted
