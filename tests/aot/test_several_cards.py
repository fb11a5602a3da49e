"""Collectives of two cards: one exchange of heads if contexts are split, sums and a gather of logits if a model's heads
are split, none for a single operation. No cache is gathered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aot import engine, environment


def exchanged(what: str, kernels: Path) -> Any:
    """Return the output of `several_cards`, which stores its lowered kernels in a folder."""
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


@pytest.mark.slow  # compiles for two cards; tests/contract/test_surroundings.py traces for several
def test_compiled_kernels_gather_no_cache(tmp_path):
    assert exchanged("contexts", tmp_path) == {"heads": ["all-to-all"], "latents": ["all-to-all"]}
    assert len(list(tmp_path.iterdir())) == 4  # a planner and a decode kernel each, for both cards


@pytest.mark.slow  # tests/runtime/test_sharded_calls.py has both types of meshes, on CPUs
def test_operations_outside_shard_map_exchange_and_copy_nothing(tmp_path):
    """Mosaic and Triton kernels under a plain `jax.jit`, with both types of axes; also an in-place write."""
    found = exchanged("plain", tmp_path)
    assert len(found) == 16
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.slow
def test_steps_of_split_models_have_two_sums_per_layer(tmp_path):
    """Models with split heads also sum the embedding and gather the logits once. Data ranks do neither: for each layer
    with experts they gather the tokens with their expert ids and weights, and reduce-scatter the results.
    """
    sums = {"gpt-oss": 1 + 2 * engine.GPT_OSS.num_hidden_layers, "v2-lite": 1 + 2 * engine.V2_LITE.num_hidden_layers}
    wanted = {name: {"all-reduce": count, "all-gather": 1} for name, count in sums.items()}
    layers = engine.V2_LITE.num_moe_layers
    wanted["v2-lite, experts of data ranks"] = {"all-gather": layers, "reduce-scatter": layers}
    assert exchanged("steps", tmp_path) == wanted
