"""All cases of the compile gate by name, and the names of the cases that `make test` compiles."""

from __future__ import annotations

from collections.abc import Mapping

from tests.aot.case import Case, Cases, DeferredCase, on_b200
from tests.aot.decode import DECODE, DECODE_MORE, SM100_DECODE
from tests.aot.engine import ENGINE, SM100_ENGINE, TRITON_ENGINE
from tests.aot.latent import LATENT, LATENT_MORE
from tests.aot.mla_sparse import MLA_SPARSE, MLA_SPARSE_MORE
from tests.aot.mla_swap_ab import MLA_SWAP_AB, MLA_SWAP_AB_MORE
from tests.aot.mla_tcgen05 import MLA_TCGEN05, MLA_TCGEN05_MORE
from tests.aot.mla_two_warpgroup import MLA_TWO_WARPGROUP, MLA_TWO_WARPGROUP_MORE
from tests.aot.plans import PLANS
from tests.aot.portable import PORTABLE
from tests.aot.prefill import PREFILL, PREFILL_MORE, SM100_PREFILL
from tests.aot.real import REAL
from tests.aot.steps import STEPS, STEPS_OF_ARRAYS
from tests.aot.triton_xla import TRITON
from tests.aot.writes import WRITES, WRITES_MORE

MLA_ON_HOPPER_ONLY = "mla-prefill"
"""Prefix of the names of cases of latent.py whose Mosaic kernels exist for Hopper only."""

FAMILIES: tuple[tuple[str, Mapping[str, Case | DeferredCase]], ...] = (
    ("portable", PORTABLE),
    ("plans", PLANS),
    ("decode", DECODE_MORE | DECODE),
    ("writes", WRITES | WRITES_MORE),
    ("latent", LATENT | LATENT_MORE),
    ("mla_swap_ab", MLA_SWAP_AB | MLA_SWAP_AB_MORE),
    ("mla_two_warpgroup", MLA_TWO_WARPGROUP | MLA_TWO_WARPGROUP_MORE),
    ("mla_sparse", MLA_SPARSE | MLA_SPARSE_MORE),
    ("prefill", PREFILL_MORE | PREFILL),
    ("engine", ENGINE),
    ("real", REAL),
    ("steps", STEPS | STEPS_OF_ARRAYS),
    ("writes", on_b200(WRITES | WRITES_MORE)),
    ("plans", on_b200(PLANS)),
    (
        "latent",
        on_b200({k: v for k, v in (LATENT | LATENT_MORE).items() if not k.startswith(MLA_ON_HOPPER_ONLY)}),
    ),
    ("decode", SM100_DECODE),
    ("prefill", SM100_PREFILL),
    ("mla_tcgen05", MLA_TCGEN05 | MLA_TCGEN05_MORE),
    ("engine", SM100_ENGINE),
    ("real", on_b200(REAL)),
    ("steps", on_b200(STEPS)),
    ("triton_xla", TRITON),
    ("engine", TRITON_ENGINE),
)
"""Pairs of a module of this package and a table of cases, which the module defines or which are its cases for a
B200.
"""

ALL: dict[str, Case | DeferredCase] = {name: case for _, cases in FAMILIES for name, case in cases.items()}
CASES = Cases(ALL)
MODULES = {name: module for module, cases in FAMILIES for name in cases}
"""Name of the module that defines each case."""

IN_EVERY_RUN = frozenset(
    {
        # XLA implementations. Cases with quantised caches also run the code of unquantised caches.
        "xla-paged-decode-fp8", "xla-write-kv-fp8-groups-decode", "xla-mla-decode-fp8", "xla-write-latent-fp8",
        "xla-gather-latent-fp8", "xla-ragged-attention",
        "experts-21-tokens", "experts-576-tokens", "experts-1024-tokens",
        "plan-decode-64-windows",
        # Hopper and Triton kernels. paged_decode: the kernel without options, one case with the widest heads, and one
        # with all options together. Other operations: at least one case per kernel.
        "paged-decode-bf16-d128-n8", "paged-decode-int8-head-d256-n16",
        "paged-decode-fp8-token-d128-n32-p16-all-features",
        "paged-decode-bf16-d512-n24-f32-out", "paged-decode-int8-channel-d512-n16-p16-all-features",
        "write-kv-bf16-neox-partial-norm-after", "write-kv-bf16-no-norm", "write-kv-int8-channel",
        "write-kv-fp8-by-16-head-slots",
        "write-latent-bf16", "write-latent-scan", "gather-latent-cached-only",
        "mla-swap-ab-draft-tree", "mla-swap-ab-fp8-draft-tree", "mla-seesaw-512-64-h128", "mla-seesaw-512-64-h128-fp8",
        "mla-sparse-512-h128", "mla-sparse-512-h128-t8-fp8", "mla-sparse-512-h128-fp8-v4",
        "ragged-192-128", "ragged-64-64-all-options",
        "paged-prefill-d128-all-features", "paged-prefill-fp8-token-d256-p16-all-features",
        "paged-prefill-d512-all-features",
        "triton-write-latent-fp8-512-64", "triton-paged-decode-tree", "engine-triton-decode",
        # Kernels for a B200.
        "sm100-plan-decode-64-windows", "sm100-write-kv-bf16-no-norm", "sm100-write-kv-fp8-by-16-head-slots",
        "sm100-write-latent-bf16", "sm100-gather-latent-bf16",
        "sm100-ragged-192-128", "sm100-ragged-64-64-all-options", "sm100-paged-prefill-fp8-token-d128-p16",
        "sm100-mla-decode-512-64-h128", "sm100-mla-decode-512-64-h64",
        "sm100-paged-decode-bf16-d128-n16", "sm100-paged-decode-int8-channel-d128-n32",
        "sm100-paged-decode-bf16-d64-n32-p16-all-features", "sm100-paged-decode-fp8-token-d256-n32-p16-all-features",
    }
)  # fmt: skip
"""Names of the cases of `make test`: for each kernel, a case that needs the most registers or shared memory. `make
test-slow` compiles all cases.
"""

ON_BOTH_PLUGINS = frozenset(
    {
        "write-kv-bf16-no-norm",
        "write-latent-scan",
        "ragged-128-128",
    }
)
"""Names of the cases that `make test` also compiles with jax's CUDA 12 plugin: two kernels that copy, and one that uses
tensor cores.
"""

FEW_SPILLS_WITH_CUDA12 = frozenset(
    {
        *(f"paged-prefill-{cache}-d256-p16-few-but-cap" for cache in ("int8-head", "fp8-head")),
        *(
            f"paged-prefill-{cache}-d128{form}-all-features"
            for cache in ("int8-group", "fp8-token")
            for form in ("", "-few", "-p16")
        ),
    }
)
"""Names of the Hopper cases in which ptxas 12.9, the compiler of the CUDA 12 plugin, spills 12 bytes per thread. ptxas
13 spills in none of them.
"""


def permitted_spills_with_cuda12(name: str) -> int:
    """Return the permitted bytes of register spills per thread of a case. Kernels for Blackwell are experimental; ptxas
    12.9 spills 8 to 48 bytes in 33 of them.
    """
    if name.startswith("sm100-"):
        return 48
    return 12 if name in FEW_SPILLS_WITH_CUDA12 else 0
