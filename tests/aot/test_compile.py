"""Every configuration compiles for Hopper, and what comes out is what was meant."""

import pytest

from tests.aot.cases import CASES, ON_BOTH_PLUGINS
from tests.aot.report import complaints


@pytest.mark.parametrize("name", CASES)
def test_cuda13(compilers, name):
    assert not list(complaints(compilers("cuda13").report(name), CASES[name]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ON_BOTH_PLUGINS else pytest.mark.slow) for name in CASES]
)
def test_cuda12(compilers, name):
    assert not list(complaints(compilers("cuda12").report(name), CASES[name]))
