"""The table of sampling parameters in docs/llm.md lists all fields, and tests that exist."""

import dataclasses
import re
from pathlib import Path

from pallas_attn.models.engine import SamplingParams, StructuredOutputs

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$",
    (ROOT / "docs" / "llm.md").read_text().partition("\n## SamplingParams")[2],
    re.M,
)
NAME = re.compile(r"`([\w./]+)`")


def test_table_lists_every_field():
    supported = {name for names, here, _ in ROWS if not here.startswith("no:") for name in NAME.findall(names)}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == supported - {"detokenize"}
    formats = {field.name for field in dataclasses.fields(StructuredOutputs)}
    (here,) = [here for names, here, _ in ROWS if names == "`structured_outputs`"]
    assert set(NAME.findall(here)) == formats


def test_tests_of_the_table_exist():
    sources = [path.read_text() for path in sorted((ROOT / "tests" / "models").glob("test_*.py"))]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}
    for names, here, tests in ROWS:
        named = NAME.findall(tests)
        assert named or here.startswith("no:"), names
        assert [name for name in named if name not in defined and not (ROOT / name).is_file()] == []


def test_parameters_without_support_have_a_reason():
    assert all(len(here) > 10 for _, here, _ in ROWS if here.startswith("no"))
