"""All cases that have to pass the gate, by name."""

from __future__ import annotations

from tests.aot.case import Case
from tests.aot.decode import DECODE, DECODE_MORE
from tests.aot.engine import ENGINE
from tests.aot.latent import LATENT, LATENT_MORE
from tests.aot.mla_seesaw import MLA_SEESAW, MLA_SEESAW_MORE
from tests.aot.mla_swap_ab import MLA_SWAP_AB, MLA_SWAP_AB_MORE
from tests.aot.plans import PLANS
from tests.aot.portable import PORTABLE
from tests.aot.prefill import PREFILL, PREFILL_MORE
from tests.aot.real import REAL
from tests.aot.triton_xla import TRITON
from tests.aot.writes import WRITES, WRITES_MORE

CASES: dict[str, Case] = {
    **(PORTABLE | PLANS | DECODE_MORE | DECODE | WRITES | WRITES_MORE | LATENT | LATENT_MORE),
    **(MLA_SWAP_AB | MLA_SWAP_AB_MORE | MLA_SEESAW | MLA_SEESAW_MORE | PREFILL_MORE | PREFILL | ENGINE | REAL),
    **TRITON,
}

MODULES = {
    **dict.fromkeys(PORTABLE, "portable"),
    **dict.fromkeys(PLANS, "plans"),
    **dict.fromkeys(DECODE_MORE | DECODE, "decode"),
    **dict.fromkeys(WRITES | WRITES_MORE, "writes"),
    **dict.fromkeys(LATENT | LATENT_MORE, "latent"),
    **dict.fromkeys(MLA_SWAP_AB | MLA_SWAP_AB_MORE, "mla_swap_ab"),
    **dict.fromkeys(MLA_SEESAW | MLA_SEESAW_MORE, "mla_seesaw"),
    **dict.fromkeys(PREFILL_MORE | PREFILL, "prefill"),
    **dict.fromkeys(ENGINE, "engine"),
    **dict.fromkeys(REAL, "real"),
    **dict.fromkeys(TRITON, "triton_xla"),
}
"""Module of this package that defines each case."""

SLOW = (
    (DECODE_MORE.keys() - DECODE.keys())
    | WRITES_MORE.keys()
    | LATENT_MORE.keys()
    | ENGINE.keys()
    | REAL.keys()
    | {"triton-write-latent-bf16-512-64"}
    | (MLA_SWAP_AB_MORE.keys() - MLA_SWAP_AB.keys())
    | (MLA_SEESAW_MORE.keys() - MLA_SEESAW.keys())
    | (PREFILL_MORE.keys() - PREFILL.keys())
    | {f"experts-{tokens}-tokens" for tokens in (5, 171, 1024)}
    | {"biased-experts-4-tokens", "biased-experts-1024-tokens"}
    | {f"xla-write-kv-{kind}" for kind in ("int8", "fp8", "int8-groups", "fp8-groups", "int8-groups-decode")}
    | {f"paged-decode-{kind}" for kind in ("bf16-d64-n8", "bf16-d256-n8", "int8-head-d64-n8", "int8-head-d256-n8")}
    | {f"paged-decode-fp8-{kind}" for kind in ("head-d128-n8", "token-d64-n8", "token-d256-n8")}
    | {f"paged-decode-{kind}" for kind in ("bf16-d64-group-of-4", "bf16-d256-group-of-4", "one-sequence", "vmap")}
    | {"write-kv-bf16-interleaved", "write-kv-int8-by-64", "write-kv-vmap", "mla-swap-ab-256-32-n16"}
    | {"ragged-64-64", "ragged-256-256", "ragged-vmap", "ragged-export"}
    | {f"paged-prefill-{kind}" for kind in ("p16", "p128", "group1", "group2", "group16", "window", "d64", "d256")}
    | {f"paged-prefill-{kind}" for kind in ("d64-group8-window-sinks", "fp8-head-d64", "fp8-head-d256-but-cap")}
    | {f"paged-decode-{kind}" for kind in ("bf16-d128-n64", "f16-d128-n8", "bf16-d128-group-of-4", "fixed-plan")}
    | {f"paged-decode-int8-head-{kind}" for kind in ("d128-n8", "d128-n32", "d64-n8@nvidia_h200")}
    | {f"paged-decode-fp8-token-{kind}" for kind in ("d128-n8", "d128-n32", "d256-n16")}
    | {f"{kind}-large-pool" for kind in ("write-kv", "write-latent", "gather-latent")}
    | {"mla-decode-layers", "mla-decode-one-sequence", "mla-prefill-narrow", "plan-decode-1", "plan-decode-fixed-1024"}
    | {"biased-experts-64-tokens", "xla-paged-decode-int8", "xla-mla-prefill", "write-kv-bf16", "write-kv-fp8-by-1"}
)
"""Cases of the slow run: more of a kind, or of a kind of which the ordinary run has one that asks for more."""

ON_BOTH_PLUGINS = frozenset(
    {
        "mla-swap-ab-512-64-n16",
        "mla-seesaw-512-64-h128",
        "gather-latent-bf16",
        "paged-decode-bf16-d128-n8",
        "paged-decode-int8-channel-d128-n8",
        "plan-decode-64-windows",
        "paged-decode-fp8-token-d128-n8",
        "ragged-128-128",
        "write-kv-bf16-no-norm",
        "write-kv-scan",
        "write-latent-scan",
    }
)
"""Cases that the ordinary run compiles with the other plugin, too: one of each kernel."""
