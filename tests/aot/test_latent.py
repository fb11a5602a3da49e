"""Composition of `mla_prefill` and of steps of the engine on Hopper; and long prefixes take no memory."""

import pytest


@pytest.mark.slow
def test_prefill_takes_no_more_memory_for_wider_tables(compilers):
    narrow, wide = (compilers("cuda13").report(f"mla-prefill-{width}") for width in ("narrow", "wide"))
    assert wide.temporaries <= narrow.temporaries + 4096


def test_prefill_gathers_with_the_kernel(compilers):
    report = compilers("cuda13").report("mla-prefill-narrow")
    assert "gather_latent" in {kernel.name for kernel in report.kernels}


@pytest.mark.slow
def test_steps_of_the_engine_run_on_kernels(compilers):
    """Layers that are alike are compiled once, and of three layers one is dense."""
    report = compilers("cuda13").report("engine-mixed")
    names = [kernel.name for kernel in report.kernels]
    assert {"write_latent", "gather_latent", "ragged_attention"} <= set(names)
    assert names.count("write_latent") == 2
