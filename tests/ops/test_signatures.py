"""Arguments with equal names have equal defaults in all operations, except for the differences that docs/concepts.md
lists.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import pallas_attn
from pallas_attn.runtime.explain import CANDIDATES_OF

REQUIRED = inspect.Parameter.empty
LATENT_OPERATIONS = ("mla_decode", "mla_prefill", "mla_sparse", "mla_ragged_paged_attention")
DIFFERENCES: dict[str, dict[str, Any]] = {
    "sm_scale": {"ragged_paged_attention": 1.0} | dict.fromkeys(LATENT_OPERATIONS, REQUIRED),
    "ratio": {"compress_and_write": REQUIRED},  # the index operations have 1: a key per token
    "q": {"write_kv": None},  # optional: queries are only rotated
}
SIGNATURES = {name: inspect.signature(getattr(pallas_attn, name)) for name in CANDIDATES_OF}
DEFAULTS: dict[str, dict[str, Any]] = defaultdict(dict)
for op, signature in SIGNATURES.items():
    for name, parameter in signature.parameters.items():
        DEFAULTS[name][op] = parameter.default


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_equal(name: str) -> None:
    differing = DIFFERENCES.get(name, {})
    assert {op: DEFAULTS[name][op] for op in differing} == differing
    rest = {op: default for op, default in DEFAULTS[name].items() if op not in differing}
    assert len(set(rest.values())) <= 1, rest


def test_options_are_keywords() -> None:
    """Arguments with a default are keyword-only, except for `distribution`, whose place JAX engines for TPUs fix."""
    for op, signature in SIGNATURES.items():
        for name, parameter in signature.parameters.items():
            optional = parameter.default is not REQUIRED and name != "distribution"
            assert not optional or parameter.kind is parameter.KEYWORD_ONLY, (op, name)


@pytest.mark.parametrize(
    ("name", "instead"), [("page_indices", "block_tables"), ("sliding_window", "window"), ("attention_sink", "sinks")]
)
def test_names_of_other_engines_are_documented(name: str, instead: str) -> None:
    """Only the operations with the signature of engines for TPUs have their names, and docs/concepts.md says so."""
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    assert {op for op in SIGNATURES if name in SIGNATURES[op].parameters} <= {
        "ragged_paged_attention",
        "mla_ragged_paged_attention",
    }
    (row,) = (row for row in page.splitlines() if row.startswith("|") and f"`{name}`" in row)
    assert f"`{instead}`" in row
