"""All cases that have to pass the gate, by name."""

from __future__ import annotations

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
from tests.aot.steps import STEPS
from tests.aot.triton_xla import TRITON
from tests.aot.writes import WRITES, WRITES_MORE

SM100_WRITES = on_b200(WRITES | WRITES_MORE)
SM100_PLANS = on_b200(PLANS)
SM100_REAL, SM100_STEPS = on_b200(REAL), on_b200(STEPS)
SM100_LATENT = on_b200(
    {name: case for name, case in (LATENT | LATENT_MORE).items() if not name.startswith("mla-prefill")}
)

ALL: dict[str, Case | DeferredCase] = {
    **(PORTABLE | PLANS | DECODE_MORE | DECODE | WRITES | WRITES_MORE | LATENT | LATENT_MORE),
    **(MLA_SWAP_AB | MLA_SWAP_AB_MORE | MLA_TWO_WARPGROUP | MLA_TWO_WARPGROUP_MORE | MLA_SPARSE | MLA_SPARSE_MORE),
    **(PREFILL_MORE | PREFILL | ENGINE | REAL | STEPS),
    **(SM100_WRITES | SM100_PLANS | SM100_LATENT | SM100_DECODE | SM100_PREFILL),
    **(MLA_TCGEN05 | MLA_TCGEN05_MORE | SM100_ENGINE | SM100_REAL | SM100_STEPS),
    **(TRITON | TRITON_ENGINE),
}
CASES = Cases(ALL)

MODULES = {
    **dict.fromkeys(PORTABLE, "portable"),
    **dict.fromkeys(PLANS, "plans"),
    **dict.fromkeys(DECODE_MORE | DECODE, "decode"),
    **dict.fromkeys(WRITES | WRITES_MORE, "writes"),
    **dict.fromkeys(LATENT | LATENT_MORE, "latent"),
    **dict.fromkeys(MLA_SWAP_AB | MLA_SWAP_AB_MORE, "mla_swap_ab"),
    **dict.fromkeys(MLA_TWO_WARPGROUP | MLA_TWO_WARPGROUP_MORE, "mla_two_warpgroup"),
    **dict.fromkeys(MLA_SPARSE | MLA_SPARSE_MORE, "mla_sparse"),
    **dict.fromkeys(PREFILL_MORE | PREFILL, "prefill"),
    **dict.fromkeys(ENGINE | TRITON_ENGINE, "engine"),
    **dict.fromkeys(REAL, "real"),
    **dict.fromkeys(TRITON, "triton_xla"),
    **dict.fromkeys(STEPS, "steps"),
    **dict.fromkeys(SM100_WRITES, "writes"),
    **dict.fromkeys(MLA_TCGEN05 | MLA_TCGEN05_MORE, "mla_tcgen05"),
    **dict.fromkeys(SM100_LATENT, "latent"),
    **dict.fromkeys(SM100_PLANS, "plans"),
    **dict.fromkeys(SM100_DECODE, "decode"),
    **dict.fromkeys(SM100_PREFILL, "prefill"),
    **dict.fromkeys(SM100_ENGINE, "engine"),
    **dict.fromkeys(SM100_REAL, "real"),
    **dict.fromkeys(SM100_STEPS, "steps"),
}
"""Module of this package that defines each case."""

IN_EVERY_RUN = frozenset(
    {
        # Portable implementations: quantised ones do what others do, and more.
        "xla-paged-decode-fp8", "xla-write-kv-fp8-groups-decode", "xla-mla-decode-fp8", "xla-write-latent-fp8",
        "xla-gather-latent-fp8", "xla-ragged-attention",
        "experts-21-tokens", "experts-576-tokens", "experts-1024-tokens",
        "plan-decode-64-windows",
        # Decode: the plainest, each kind of scales, the widest heads, all options at once, and what stands alone.
        "paged-decode-bf16-d128-n8", "paged-decode-int8-head-d256-n16",
        "paged-decode-fp8-token-d128-n32-p16-all-features",
        "write-kv-bf16-neox-partial-norm-after", "write-kv-bf16-no-norm", "write-kv-int8-channel",
        "write-kv-fp8-by-16-head-slots",
        "write-latent-bf16", "write-latent-scan", "gather-latent-cached-only",
        "mla-swap-ab-draft-tree", "mla-swap-ab-fp8-draft-tree", "mla-seesaw-512-64-h128", "mla-seesaw-512-64-h128-fp8",
        "mla-sparse-512-h128", "mla-sparse-512-h128-t8-fp8",
        "ragged-192-128", "ragged-64-64-all-options",
        "paged-prefill-d128-all-features", "paged-prefill-fp8-token-d256-p16-all-features",
        "triton-write-latent-fp8-512-64", "triton-paged-decode-tree", "engine-triton-decode",
        # For a B200.
        "sm100-plan-decode-64-windows", "sm100-write-kv-bf16-no-norm", "sm100-write-kv-fp8-by-16-head-slots",
        "sm100-write-latent-bf16", "sm100-gather-latent-bf16",
        "sm100-ragged-192-128", "sm100-ragged-64-64-all-options", "sm100-paged-prefill-fp8-token-d128-p16",
        "sm100-mla-decode-512-64-h128", "sm100-mla-decode-512-64-h64",
        "sm100-paged-decode-bf16-d128-n16", "sm100-paged-decode-int8-channel-d128-n32",
        "sm100-paged-decode-bf16-d64-n32-p16-all-features", "sm100-paged-decode-fp8-token-d256-n32-p16-all-features",
    }
)  # fmt: skip
"""Cases of the ordinary run: of each kernel, those that ask for most. The slow run and `make test-aot` have all."""

ON_BOTH_PLUGINS = frozenset(
    {
        "write-kv-bf16-no-norm",
        "write-latent-scan",
        "ragged-128-128",
    }
)
"""Cases that the ordinary run compiles with the other plugin, too: one for each way in which kernels use the card."""
