"""Tests of the collective operations of programs that are compiled for two GPUs. No program gathers a cache."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aot import engine, environment


def exchanged(what: str, kernels: Path) -> Any:
    """Run `several_cards` with the argument `what` and return its output. Lowered kernels are stored in the folder
    `kernels`.
    """
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


@pytest.mark.slow  # compiles for two GPUs; in `make test`, tests/contract/test_surroundings.py only traces
def test_compiled_kernels_gather_no_cache(tmp_path):
    assert exchanged("contexts", tmp_path) == {"heads": ["all-to-all"], "latents": ["all-to-all"]}
    assert len(list(tmp_path.iterdir())) == 4  # a plan kernel and a decode kernel for each of the two operations


@pytest.mark.slow  # in `make test`, tests/runtime/test_sharded_calls.py tests both types of meshes on CPU devices
def test_operations_outside_shard_map_exchange_and_copy_nothing(tmp_path):
    """Operations in a `jax.jit` without `shard_map`, with Mosaic and Triton kernels, on meshes with `AxisType.Auto` and
    `AxisType.Explicit`. One of the operations writes to a donated cache.
    """
    found = exchanged("plain", tmp_path)
    assert len(found) == 16
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.slow
def test_steps_of_split_models_have_two_sums_per_layer(tmp_path):
    """With split heads, each layer has an all-reduce after attention and one after the MLP. The step also has an
    all-reduce of the embedding and an all-gather of the logits.

    Data ranks, which compute different tokens, have none of them. For each mixture-of-experts layer they all-gather the
    tokens with their expert ids and weights, and reduce-scatter the results.
    """
    sums = {"gpt-oss": 1 + 2 * engine.GPT_OSS.num_hidden_layers, "v2-lite": 1 + 2 * engine.V2_LITE.num_hidden_layers}
    wanted = {name: {"all-reduce": count, "all-gather": 1} for name, count in sums.items()}
    layers = engine.V2_LITE.num_moe_layers
    wanted["v2-lite, experts of data ranks"] = {"all-gather": layers, "reduce-scatter": layers}
    assert exchanged("steps", tmp_path) == wanted
