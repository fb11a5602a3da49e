"""A step computes one decode plan, which assigns the work of decode attention to CTAs, for all its layers.

The plan covers the rows whose attention runs over latents ("absorb"). No plan is made if the implementation uses none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import PRESETS
from pallas_attn.models.decoder import AttentionSettings, split_model
from tests.kit import harness
from tests.models import step_case
from tests.models.step_case import Pages, step

LAYERS = 3
MODEL = dataclasses.replace(
    PRESETS["v3-tiny"], num_hidden_layers=LAYERS, kv_lora_rank=64, qk_rope_head_dim=32, vocab_size=32
)


def kernels(jaxpr: Any) -> Iterator[str]:
    """Yield the name of the Mosaic GPU kernel of each kernel call in a program."""
    for equation in jaxpr.eqns:
        if "meshes" in equation.params:
            yield equation.params["name"]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from kernels(getattr(inner, "jaxpr", inner))


def traced(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """Return the names of the kernels that a step with two decode rows and a prompt calls."""
    monkeypatch.setattr(step_case, "PAGE_SIZE", 16)
    model = random_model(MODEL, seed=0, dtype=jnp.bfloat16, settings=AttentionSettings(**settings))
    run, weights = split_model(model)
    pages = Pages.scatter(3, 4)
    metadata = step(pages, decode=[(0, 5), (1, 40)], prefill=[(2, 0, 9)])
    tokens = jnp.zeros(metadata.num_tokens, jnp.int32)
    return list(kernels(jax.make_jaxpr(run)(weights, tokens, pages.allocate(model), metadata).jaxpr))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mla", "parts"),
    [("absorb", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("auto", 1), ("expand", 0)))],
)
def test_step_has_one_plan_for_all_layers(
    mla: str, parts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with harness.interpreting(capsys):
        names = traced(monkeypatch, mla=mla, implementation=("mosaic", "xla"))
    assert names.count("plan_decode") == parts
    assert names.count("mla_decode") == parts * LAYERS


@pytest.mark.slow
def test_implementations_without_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with harness.interpreting(capsys):
        assert not traced(monkeypatch, implementation="xla")
        assert "plan_decode" not in traced(monkeypatch, implementation=("reference", "mosaic"))
