"""The compile gate: every case compiles without a GPU and meets its requirements.

`make test` runs the cases `IN_EVERY_RUN` and `ON_BOTH_PLUGINS`, `make test-slow` the others.
"""

import jax.numpy as jnp
import pytest

from tests.aot import decode
from tests.aot.cases import (
    CASES,
    FEW_SPILLS_WITH_CUDA12,
    IN_EVERY_RUN,
    MODULES,
    ON_BOTH_PLUGINS,
    permitted_spills_with_cuda12,
)
from tests.aot.report import complaints


def named(in_every_run):
    assert in_every_run <= CASES.keys()
    return [pytest.param(name, marks=[] if name in in_every_run else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", named(IN_EVERY_RUN))
def test_case_meets_its_requirements_with_cuda13(compilers, name):
    assert not list(complaints(compilers("cuda13").report(name), CASES[name]))


@pytest.mark.parametrize("name", named(ON_BOTH_PLUGINS))
def test_case_meets_its_requirements_with_cuda12(compilers, name):
    report = compilers("cuda12").report(name)
    assert not list(complaints(report, CASES[name], permitted_spills_with_cuda12(name)))


def test_permitted_spills_name_cases():
    assert CASES.keys() >= FEW_SPILLS_WITH_CUDA12


def test_every_case_has_a_module() -> None:
    """The module is needed for the key of the case's cached report."""
    assert MODULES.keys() == CASES.keys()


def test_every_packaged_tuning_has_a_case():
    compiled = {(device, configuration.key) for device, configuration in decode.tuned()}
    assert compiled == {(device, key) for device, keys in decode.tunings().items() for key in keys}


def test_tuning_has_a_case_for_each_cache_dtype_of_its_size(monkeypatch):
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
