"""Benchmark of `mla_prefill`: MLA attention of prompt chunks to themselves and to a prefix of cached latents.

In the expanded form, latents become keys and values of each head. In the absorbed form, W_UK and W_UV are multiplied
into queries and outputs instead. The contenders "expanded" and "absorbed" are the Mosaic implementation with a given
form; the contender "mosaic" selects the form itself.
"""

from __future__ import annotations

import functools
from typing import Any

from pallas_attn import mla_prefill
from scripts.bench import shapes
from scripts.bench.cases.prefill import LENGTHS, MlaPrefillCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.shapes import MlaPrefill


def ours(
    implementation: str,
    case: MlaPrefillCase,
    arrays: dict[str, Any],
    stopwatch: Stopwatch,
    absorbed: bool | None = None,
) -> Timing:
    case.check_portable(implementation, case.flops)

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        options: dict[str, Any] = {"piece_tokens": case.piece_tokens, "sm_scale": case.sm_scale}
        options |= {"absorbed": absorbed}
        return None, mla_prefill(**own, **shared, **options, implementation=implementation)

    return stopwatch.chain(call, arrays["owns"], shared=arrays["shared"])


FORMS = [
    *(
        MlaPrefillCase(MlaPrefill(1, new, cached, heads))
        for heads, cached, news in (
            (128, 8192, (128, 256, 512, 16)),
            (16, 8192, (128, 256, 512, 16)),
            (128, 32768, (128, 256, 512, 16)),
            (128, 2048, (128, 256, 16)),
            (16, 32768, (128, 256)),
            (16, 2048, (128, 256)),
        )
        for new in news
    ),
    MlaPrefillCase(MlaPrefill(1, 128, 0, 128)),
    MlaPrefillCase(MlaPrefill(8, 64, 8192, 128)),
    MlaPrefillCase(MlaPrefill(8, 64, 8192, 16)),
]
"""Short chunks with long prefixes, for which the absorbed form can be faster than the expanded form."""

BENCH = Bench(
    grids={
        "prefill": [MlaPrefillCase(MlaPrefill(1, *size, heads)) for heads in (128, 16) for size in LENGTHS],
        "prefill-quick": [
            MlaPrefillCase(MlaPrefill(1, *size, heads))
            for heads in (128, 16)
            for size in ((8192, 0), (2048, 8192), (512, 32768))
        ],
        "pieces": [
            MlaPrefillCase(MlaPrefill(1, 2048, 32768, heads), piece_tokens=piece_tokens)
            for heads in (128, 16)
            for piece_tokens in (1024, 2048, 4096, 8192, 16384)
        ],
        "forms": FORMS,
        "models": [MlaPrefillCase(shape) for shape in shapes.MLA_PREFILL.values()],
        "small": [MlaPrefillCase(MlaPrefill(2, 8, 40, 2, 8, 8, 16, 8, 16), "f32", piece_tokens=32)],
    },
    contenders=by_name(ours)
    | {name: functools.partial(ours, "mosaic", absorbed=name == "absorbed") for name in ("expanded", "absorbed")},
    inputs=MlaPrefillCase.inputs,
)
