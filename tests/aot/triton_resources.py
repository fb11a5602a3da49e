"""Write the registers and shared memory of typical Triton kernels for each GPU.

python -m tests.aot.triton_resources

The result is benchmarks/results/triton_resources.json, from which `scripts.tools.performance` generates the table
in docs/kernels/triton.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys

from pallas_attn.models.cli.output_files import output_file
from scripts.bench.harness.device import commit, versions
from tests.aot.environment import ROOT
from tests.aot.triton_cases import CARDS
from tests.aot.triton_compile import TritonCompiler

RESULT = ROOT / "benchmarks" / "results" / "triton_resources.json"
SHOWN = (
    *("paged-decode-bf16-d128", "paged-decode-bf16-d256", "paged-decode-bf16-d128-g40"),
    *("paged-decode-int8-channel-d128", "paged-decode-fp8-16-d128", "paged-decode-fp8-16-d256"),
    *("mla-decode-bf16-h16", "mla-decode-bf16-h128", "mla-decode-fp8-h128"),
    *("mla-sparse-bf16-h16", "mla-sparse-bf16-h128", "mla-sparse-fp8-h128"),
    *("index-scores-bf16", "index-top-k-bf16-4096", "select-top-k"),
    *("paged-prefill-bf16-d128-8192", "paged-prefill-bf16-d256-8192", "paged-prefill-fp8-64-d128-8192"),
    *("ragged-192-128-8192", "ragged-128-128-8192", "ragged-64-64-8192"),
    *("write-kv-bf16-d128", "write-kv-fp8-4-d128", "write-latent-bf16-512-64", "write-latent-fp8-512-64"),
    *("gather-latent-bf16-512-64", "write-index-keys-fp8"),
)
"""Names of the cases in the table: typical ones of each operation and kind of cache."""


def main() -> int:
    compiler, cases = TritonCompiler(), []
    for name in SHOWN:
        kernels = {card: compiler.kernels(name, card) for card in CARDS}
        cases.append({"case": name, "kernels": {c: [dataclasses.asdict(k) for k in ks] for c, ks in kernels.items()}})
        print(name, flush=True)
    compiler.close()
    cards = {card: device.name for card, device in CARDS.items()}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = {"device": "none: compiled for described cards", "cards": cards, "versions": versions(), **commit()}
    with output_file(RESULT) as file:
        file.write(f"{json.dumps(report | {'date': today, 'cases': cases}, indent=1)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
