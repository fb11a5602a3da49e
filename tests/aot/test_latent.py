"""What `mla_prefill` is made of on Hopper, and that long prefixes cost it no memory."""


def test_prefill_takes_no_more_memory_for_wider_tables(compilers):
    narrow, wide = (compilers("cuda13").report(f"mla-prefill-{width}") for width in ("narrow", "wide"))
    assert wide.temporaries <= narrow.temporaries + 4096


def test_prefill_gathers_with_the_kernel(compilers):
    report = compilers("cuda13").report("mla-prefill-narrow")
    assert "gather_latent" in {kernel.name for kernel in report.kernels}
