"""Compile-gate cases of calls with Triton kernels in an XLA program for an H200.

test_triton.py compiles the kernels alone. These cases check that XLA neither copies a cache nor needs much temporary
memory, updates donated caches in place, and adds no kernels to a decode call without a plan.
"""

from __future__ import annotations

from tests.aot.case import Case, DeferredCase
from tests.aot.steps import unplanned_decode
from tests.aot.triton_cases import TRITON_CASES

TRITON: dict[str, Case | DeferredCase] = {
    f"triton-{name}": Case(
        TRITON_CASES[name].function,
        TRITON_CASES[name].arguments,
        cache=cache,
        donated=donated,
        kernels=False,
        tensor_cores=False,
        temporaries=temporaries,
    )
    for name, cache, donated, temporaries in (
        ("write-latent-bf16-512-64", "cache", True, 1024),
        ("write-latent-fp8-512-64", "cache", True, 1024),
        ("paged-decode-tree", "kv", False, 64 * 2**20),
        ("paged-prefill-bf16-d128-8192-windows", "kv", False, 2**20),
        ("write-kv-bf16-d128", "kv", True, 1024),
        # Temporary memory has, for each slot of the pool, the index of the token that is written to it (4 bytes).
        ("write-kv-fp8-4-d128", "kv", True, 2**20),
    )
} | {"triton-unplanned-decode": unplanned_decode("triton")}
