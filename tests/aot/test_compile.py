"""Every configuration compiles for Hopper, and what comes out is what was meant."""

import pytest

from tests.aot import decode
from tests.aot.cases import CASES, ON_BOTH_PLUGINS, SLOW
from tests.aot.report import complaints


def named(slow):
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else []) for name in CASES]


@pytest.mark.parametrize("name", named(SLOW))
def test_cuda13(compilers, name):
    assert not list(complaints(compilers("cuda13").report(name), CASES[name]))


@pytest.mark.parametrize("name", named(CASES.keys() - ON_BOTH_PLUGINS))
def test_cuda12(compilers, name):
    assert not list(complaints(compilers("cuda12").report(name), CASES[name]))


def test_tunings_are_for_configurations_that_are_compiled():
    known = {configuration.key for configuration in decode.CONFIGURATIONS}
    for keys in decode.tunings().values():
        assert known.issuperset(keys)


def test_a_packaged_tuning_is_compiled(monkeypatch):
    typical = decode.Configuration("fp8-head"), decode.Configuration("int8-head"), decode.Configuration("bf16")
    monkeypatch.setattr(decode, "tunings", lambda: {"nvidia_h200": [typical[0].key], "nvidia_h20": [typical[2].key]})
    assert list(decode.tuned(typical)) == [
        "paged-decode-fp8-head-d128-n8@nvidia_h200",
        "paged-decode-int8-head-d128-n8@nvidia_h200",  # of the same sizes
        "paged-decode-bf16-d128-n8@nvidia_h20",
    ]
