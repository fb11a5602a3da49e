"""Every case compiles for Hopper and meets its requirements."""

import jax.numpy as jnp
import pytest

from tests.aot import decode
from tests.aot.cases import CASES, IN_EVERY_RUN, MODULES, ON_BOTH_PLUGINS
from tests.aot.report import complaints


def named(in_every_run):
    assert in_every_run <= CASES.keys()
    return [pytest.param(name, marks=[] if name in in_every_run else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", named(IN_EVERY_RUN))
def test_cuda13(compilers, name):
    assert not list(complaints(compilers("cuda13").report(name), CASES[name]))


@pytest.mark.parametrize("name", named(ON_BOTH_PLUGINS))
def test_cuda12(compilers, name):
    assert not list(complaints(compilers("cuda12").report(name), CASES[name]))


def test_every_case_has_a_module() -> None:
    """The key of a kept report follows from its case's module."""
    assert MODULES.keys() == CASES.keys()


def test_packaged_tunings_are_compiled():
    compiled = {(device, configuration.key) for device, configuration in decode.tuned()}
    assert compiled == {(device, key) for device, keys in decode.tunings().items() for key in keys}


def test_a_tuning_is_for_every_cache_of_its_sizes(monkeypatch):
    fp8, bf16 = (
        decode.Configuration("fp8-head", columns=24, page_size=16),
        decode.Configuration("bf16", out=jnp.float32),
    )
    monkeypatch.setattr(decode, "tunings", lambda: {"nvidia_h200": [fp8.key], "nvidia_h20": [bf16.key]})
    assert [f"{configuration}@{device}" for device, configuration in decode.tuned()] == [
        "paged-decode-int8-head-d128-n24-p16@nvidia_h200",
        "paged-decode-fp8-head-d128-n24-p16@nvidia_h200",
        "paged-decode-bf16-d128-n8-f32-out@nvidia_h20",
        "paged-decode-f16-d128-n8-f32-out@nvidia_h20",
    ]
