"""Calls of Triton kernels as XLA compiles them for an H200: donated caches stay where they are."""

from __future__ import annotations

from tests.aot.case import Case
from tests.aot.triton_cases import TRITON_CASES

TRITON = {
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
    )
}
