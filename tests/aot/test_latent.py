"""Tests of compiled `mla_prefill` calls and engine steps on Hopper: names of the kernels, and temporary memory."""

import pytest


@pytest.mark.slow
def test_prefill_memory_does_not_depend_on_table_width(compilers):
    narrow, wide = (compilers("cuda13").report(f"mla-prefill-{width}") for width in ("narrow", "wide"))
    assert wide.temporaries <= narrow.temporaries + 4096


# Not in `make test`, because test_compile.py compiles the same call.
@pytest.mark.slow
def test_prefill_uses_the_gather_kernel(compilers):
    report = compilers("cuda13").report("mla-prefill-narrow")
    assert "gather_latent" in {kernel.name for kernel in report.kernels}


@pytest.mark.slow
def test_engine_step_uses_kernels(compilers):
    """The model has one dense layer and two mixture-of-experts layers. Layers of one kind share a compiled kernel, so
    `write_latent` is compiled twice.
    """
    report = compilers("cuda13").report("engine-mixed")
    names = [kernel.name for kernel in report.kernels]
    assert {"write_latent", "gather_latent", "ragged_attention"} <= set(names)
    assert names.count("write_latent") == 2
