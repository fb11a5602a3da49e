"""Write the performance tables and charts of the documents from the JSON files of benchmarks/results.

python -m scripts.tools.performance

The tool replaces the text between `<!-- table NAME -->` and `<!-- end -->` in `DOCUMENTS` by `TABLES[NAME]`. Charts are
files in docs/figures. Each function below returns a writer of a table: a function of the document's path, for links. A
contender is one of our implementations or a baseline; `stem` is the name of a result file without ".json".
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pallas_attn.models.cli.output_files import output_file
from scripts.tools.charts import Line, Panel, bars, lines
from scripts.tools.jax_versions import GROUPS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    *(f"docs/performance/{page}.md" for page in ("gqa_decode", "mla_decode", "sparse_attention", "prefill")),
    *(f"docs/performance/{page}.md" for page in ("writes_and_plans", "engine", "quantised_caches")),
    "docs/kernels/triton.md",
    "docs/support.md",
)
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NAMES = {
    "mosaic": "pallas_attn",
    "xla": "pallas_attn, XLA",
    "jax-1": "jax, k_splits 1",
    "jax-4": "jax, k_splits 4",
    "jax-16": "jax, k_splits 16",
    "triton": "pallas_attn, Triton",
    "mosaic-unplanned": "pallas_attn without a plan",
    "triton-unplanned": "pallas_attn, Triton, without a plan",
    "flashinfer": "FlashInfer",
    "flashinfer-fa3": "FlashInfer",
    "flash-mla": "FlashMLA",
    "flash-attention-3": "FlashAttention-3",
    "flash-attention-3-unsplit": "FlashAttention-3, keys not split",
    "cudnn": "cuDNN",
    "flash": "torch flash",
    "flex": "torch flex_attention",
    "given": "cascade_decode, given",
    "found": "cascade_decode, found",
    "paged_decode": "paged_decode",
    "one_call": "ragged_paged_attention",
    "split": "split by the caller",
    "prefill_alone": "paged_prefill for all",
}
"""Name in documents by name of the contender in JSON files."""

BUILDS = {"flash-mla": "FlashMLA 9241ae3", "flash-attention-3": "FlashAttention-3 0251105a"}
"""Name and commit of baselines that are built from source and have no package version, by contender."""

BUILDS_OF = {"mla_sparse": BUILDS | {"flash-mla": "FlashMLA of vLLM 0.26.0"}}
"""Exceptions from `BUILDS` by operation."""

IMPLEMENTATIONS = ("xla", "triton", "mosaic")

DTYPES = {"float8_e4m3fn": "fp8"}
"""Names of cache dtypes that documents shorten."""

PACKAGES = {
    "flashinfer-python": ("FlashInfer", "flashinfer"),
    "torch": ("torch", "flash$"),
    "nvidia-cudnn-cu13": ("cuDNN", "cudnn"),
}
"""By package: its name in documents, and a pattern of the contenders that use it."""


@cache
def read(stem: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{stem}.json").read_text())


@dataclass(frozen=True)
class Cases:
    """Cases of one result file that have results and whose names match the regular expression `match`."""

    stem: str
    match: str = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (case for case in read(self.stem)["cases"] if "results" in case and re.search(self.match, case["case"]))

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(name for case in self for name in case["results"] if measured(case, name)))


def measured(case: dict[str, Any], contender: str) -> bool:
    return "median_us" in case["results"].get(contender, {})


# --- tables


def table(headings: list[str], rows: list[list[str]]) -> str:
    ruler = ["---", *["---:"] * (len(headings) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, ruler, *rows))


def from_files(headings: list[str], rows: list[list[str]], files: list[set[str]]) -> str:
    """Return a table whose row i has results of `files[i]`. If the commits of the rows differ, a column names them."""
    commits = [", ".join(sorted({f"`{read(stem)['commit'][:7]}`" for stem in stems})) for stems in files]
    if len(set(commits)) == 1:
        return table(headings, rows)
    return table([*headings, "commit"], [[*row, commit] for row, commit in zip(rows, commits, strict=True)])


def provenance(stem: str, contenders: Iterable[str], document: str) -> str:
    """Format GPU, versions, rates, commit and link of a result file as one line of Markdown, with a remark if the run
    ended before all of its cases."""
    report = read(stem)
    rates = report.get("rates") or next(iter(report.get("results", [{}]))).get("rates")
    versions = [f"jax {report['versions']['jax']}"]
    for package, (name, runs) in PACKAGES.items():
        if package in report["versions"] and any(re.match(runs, contender) for contender in contenders):
            versions.append(f"{name} {report['versions'][package]}")
    builds = BUILDS_OF.get(report.get("operation", ""), BUILDS) | report.get("builds", {})
    parts = [report["device"], *versions, *(builds[name] for name in contenders if name in builds)]
    if rates:
        parts.append(f"copy {rates['copy'] / 1e12:.2f} TB/s, GEMM {rates['matrix'] / 1e12:.0f} TFLOP/s in the run")
    file = os.path.relpath(RESULTS / f"{stem}.json", (ROOT / document).parent)
    changed = " with changes" if report.get("dirty") else ""
    where = f"commit `{report['commit'][:7]}`{changed}, {report['date']}"
    remark = "" if report.get("complete", True) else " The run ended early, so cases are missing."
    return f"- {'; '.join(parts)}; {where}; [{stem}.json]({file}).{remark}"


def cell(case: dict[str, Any], contender: str) -> str:
    if not measured(case, contender):
        return ""
    result = case["results"][contender]
    return f"{microseconds(result['median_us'])} ({result['fraction_of_floor']:.0%})"


def microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def operation(*sources: Cases) -> Callable[[str], str]:
    """Table of an operation. Columns: roofline of the case, and time and per cent of the roofline of each contender."""

    def write(document: str) -> str:
        contenders = list(dict.fromkeys(name for source in sources for name in source.contenders()))
        headings = ["case", "bound", "roofline, µs", *(NAMES[name] for name in contenders)]
        rows = [
            [f"`{case['case']}`", case["bound"], microseconds(case["floor_us"]), *(cell(case, n) for n in contenders)]
            for source in sources
            for case in source
        ]
        files = [{source.stem} for source in sources for _ in source]
        notes = [provenance(source.stem, source.contenders(), document) for source in sources]
        return from_files(headings, rows, files) + "\n" + "\n".join(notes) + "\n"

    return write


def kernels(stem: str) -> Callable[[str], str]:
    """Table of kernel times of the Mosaic implementation, for calls of a few microseconds. Wall time would measure the
    host, which cannot queue calls of this length fast enough.
    """

    def write(document: str) -> str:
        rows = []
        for case in Cases(stem):
            result = case["results"]["mosaic"]
            kernel = sum(result["kernels_us"].values())
            moved = f"{case['bytes'] / 1e6:,.1f}"
            rows.append([f"`{case['case']}`", moved, microseconds(kernel), f"{case['floor_us'] / kernel:.0%}"])
        headings = ["case", "MB moved", "kernel, µs", "of the roofline"]
        return table(headings, rows) + "\n" + provenance(stem, ["mosaic"], document) + "\n"

    return write


def plans(stem: str) -> Callable[[str], str]:
    def write(document: str) -> str:
        rows = [
            [f"`{case['case']}`", microseconds(sum(case["results"]["mosaic"]["kernels_us"].values()))]
            for case in Cases(stem)
        ]
        return table(["case", "kernel, µs"], rows) + "\n" + provenance(stem, ["mosaic"], document) + "\n"

    return write


MLA_CASE = re.compile(r"h(?P<heads>\d+) B128 ~?(?P<context>\d+) p64( Q(?P<queries>\d))? bf16")
MLA_CONTENDERS = ("mosaic", "flash-mla", "flash-attention-3")


def mla_by_context(*sources: Cases) -> Callable[[str], str]:
    """Table of MLA decode times in microseconds. Rows: heads x queries and contender; columns: context lengths."""

    def write(document: str) -> str:
        found = {key: case for source in sources for case in source if (key := mla_key(case)) is not None}
        contexts = sorted({context for _, _, context in found})
        rows = []
        for heads, queries in sorted({key[:2] for key in found}):
            cases = [found.get((heads, queries, context)) for context in contexts]
            for name in MLA_CONTENDERS:
                times = [microseconds(case["results"][name]["median_us"]) if case else "" for case in cases]
                rows.append([f"{heads} x {queries}, {NAMES[name]}", *times])
        headings = ["heads x queries", *(f"{context // 1024}k" for context in contexts)]
        notes = [provenance(source.stem, source.contenders(), document) for source in sources]
        return table(headings, rows) + "\n" + "\n".join(notes) + "\n"

    return write


def mla_key(case: dict[str, Any]) -> tuple[int, int, int] | None:
    parsed = MLA_CASE.search(case["case"])
    return parsed and (int(parsed["heads"]), int(parsed["queries"] or 1), int(parsed["context"]))


def engine(stem: str) -> Callable[[str], str]:
    """Table of the engine's tokens per second and latencies, by number of sequences and context."""

    def write(document: str) -> str:
        rows = [
            [
                f"{case['batch']} x {case['context'] // 1024}k",
                f"{case['prefill_tokens_per_s']:,.0f} ({case['prefill_fraction_of_floor']:.0%})",
                f"{case['decode_tokens_per_s']:,.0f} ({case['decode_fraction_of_floor']:.0%})",
                milliseconds(case["ttft_s"]["median"]),
                milliseconds(case["between_tokens_s"]["median"]),
            ]
            for case in sorted(read(stem)["results"][0]["cases"], key=lambda c: (c["context"], c["batch"]))
        ]
        headings = ["sequences x context", "prefill tokens/s", "decode tokens/s", "first token", "between tokens"]
        return table(headings, rows) + "\n" + provenance(stem, ["mosaic"], document) + "\n"

    return write


def engine_and_vllm(stem: str) -> Callable[[str], str]:
    """Table of the tokens per second of the engine and of vLLM, by number of sequences and context."""

    def write(document: str) -> str:
        vllm = read(stem)["vllm"]
        theirs = {(case["batch"], case["context"]): case for case in vllm["cases"]}
        rows = []
        for case in sorted(read(stem)["results"][0]["cases"], key=lambda c: (c["context"], c["batch"])):
            cells = []
            for kind in ("prefill", "decode"):
                own, other = (c[f"{kind}_tokens_per_s"] for c in (case, theirs[case["batch"], case["context"]]))
                cells += [f"{own:,.0f}", f"{other:,.0f}", f"{own / other:.2f}"]
            rows.append([f"{case['batch']} x {case['context'] // 1024}k", *cells])
        headings = ["sequences x context"] + [
            name for kind in ("prefill", "decode") for name in (f"{kind} tokens/s", "vLLM", "ratio")
        ]
        note = f"- vLLM {vllm['versions']['vllm']} in the same job; copy {vllm['rates']['copy'] / 1e12:.2f} TB/s."
        return "\n".join([table(headings, rows), provenance(stem, ["mosaic"], document), note, ""])

    return write


def arrivals(stem: str) -> Callable[[str], str]:
    """Table of the engine's latencies with random arrivals, by rate and maximum tokens per step."""

    def write(document: str) -> str:
        rows = []
        for result in sorted(read(stem)["results"], key=lambda result: result["rate"]):
            times = [
                " / ".join(f"{result[name][quantile]:.1f}" for quantile in ("p50", "p90", "p99"))
                for name in ("ttft_ms", "between_tokens_ms")
            ]
            longest = f"{result['longest_step_over_median']:.1f}x"
            rows.append([f"{result['rate']:g}", f"{result['step_tokens']:,}", *times, longest])
        headings = ["requests/s", "tokens per step", "first token, ms", "between tokens, ms", "longest / median step"]
        return "\n".join([table(headings, rows), provenance(stem, [], document), ""])

    return write


def first_calls(stem: str) -> Callable[[str], str]:
    """Table of the time to trace and lower the first call of each operation in a new process: medians with empty
    caches, with cached kernels, and with empty caches at an earlier commit.
    """

    def write(document: str) -> str:
        report = read(stem)
        before = report["before"]
        rows = [
            [f"`{operation}`", *(f"{statistics.median(runs):.2f}" for runs in (seconds["cold"], seconds["warm"], was))]
            for operation, seconds in report["seconds"].items()
            for was in [before["seconds"][operation]["cold"]]
        ]
        headings = [
            "first call",
            "empty caches, s",
            "cached kernels, s",
            f"empty caches at `{before['commit'][:7]}`, s",
        ]
        return "\n".join([table(headings, rows), provenance(stem, [], document), ""])

    return write


def milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def engine_on_cpu(stem: str) -> Callable[[str], str]:
    def write(document: str) -> str:
        rows = [
            [
                f"`{model['config']}`, batch {case['batch']}",
                f"{case['prefill_tokens_per_s']:,.0f}",
                f"{case['decode_tokens_per_s']:,.0f}",
                f"{case['speedup_over_transformers']['total']:.1f}x",
            ]
            for model in read(stem)["results"]
            for case in model["batches"]
        ]
        headings = ["model", "prefill tokens/s", "decode tokens/s", "speedup over transformers, whole run"]
        return table(headings, rows) + "\n" + provenance(stem, ["mosaic"], document) + "\n"

    return write


def head_windows(*stems: str) -> Callable[[str], str]:
    """Table of the engine's savings by windows of some KV heads. Cells "A to B" compare without and with recycling of
    pages, or, for latencies, without and with windows.
    """

    def write(document: str) -> str:
        rows = []
        for stem in stems:
            device = read(stem)["device"].removeprefix("NVIDIA ")
            for case in read(stem)["cases"]:
                off, on, plain, windowed = (case[name] for name in ("off", "on", "uniform", "head_wise"))
                decoded = f"{off['decode_tokens_per_s']:,.0f} to {on['decode_tokens_per_s']:,.0f}"
                rows.append(
                    [
                        f"{device}, {case['windowed']} of 8",
                        f"{off['contexts']} to {on['contexts']} ({case['contexts_ratio']:.2f}x)",
                        f"{case['fraction_of_allowed']:.0%}",
                        f"{decoded} ({case['decode_tokens_per_s_ratio']:.2f}x)",
                        f"{case['new_tokens_per_s_ratio']:.3g}x",
                        f"{milliseconds(plain['ttft_s']['median'])} to {milliseconds(windowed['ttft_s']['median'])}",
                        f"{milliseconds(plain['between_tokens_s']['median'])} to "
                        f"{milliseconds(windowed['between_tokens_s']['median'])}",
                    ]
                )
        headings = ["windowed heads", "contexts in one pool", "of the possible gain", "decode tokens/s"]
        headings += ["tokens/s of whole runs", "first token", "between tokens"]
        notes = [provenance(stem, ["mosaic"], document) for stem in stems]
        return table(headings, rows) + "\n" + "\n".join(notes) + "\n"

    return write


def shared_prefix(stem: str) -> Callable[[str], str]:
    """Table of decode steps of requests with a common prefix, without and with cascades."""

    def write(document: str) -> str:
        rows = []
        for case in read(stem)["cases"]:
            off, on = (case["step_s"][name]["median"] for name in ("off", "on"))
            steps = f"{case['cascade_steps']['on']} of {case['steps']['on']}"
            rows.append(
                [
                    str(case["samples"]),
                    f"{case['prefix_tokens']:,}",
                    f"{1e3 * off:.2f}",
                    f"{1e3 * on:.2f}",
                    f"{off / on:.2f}x",
                    steps,
                ]
            )
        headings = ["requests", "shared tokens", "without cascades, ms", "with, ms", "ratio", "steps with a cascade"]
        return table(headings, rows) + "\n" + provenance(stem, ["mosaic"], document) + "\n"

    return write


def sparse_layer(*sources: Cases) -> Callable[[str], str]:
    """Table of the microseconds of sparse and of dense attention of a layer, and their ratio, by cache dtype."""

    def write(document: str) -> str:
        found = [
            (source.stem, case)
            for source in sources
            for case in source
            if measured(case, "sparse") and measured(case, "dense")
        ]
        rows = [
            [
                f"{case['arguments']['heads']}, {case['arguments']['batch']} x {case['arguments']['context'] // 1024}k",
                case["arguments"]["cache"],
                *(microseconds(case["results"][name]["median_us"]) for name in ("sparse", "dense")),
                f"{case['results']['sparse']['median_us'] / case['results']['dense']['median_us']:.2f}",
            ]
            for _, case in found
        ]
        headings = ["heads, sequences x context", "caches", "sparse, µs", "dense, µs", "sparse / dense"]
        notes = [provenance(source.stem, ["mosaic"], document) for source in sources]
        return from_files(headings, rows, [{stem} for stem, _ in found]) + "\n" + "\n".join(notes) + "\n"

    return write


def sparse_engine(*stems: str) -> Callable[[str], str]:
    """Table of the engine's decode tokens per second with sparse and dense attention, by number of sequences, context
    and cache dtype.
    """

    def write(document: str) -> str:
        results = [(stem, result) for stem in stems for result in read(stem)["results"]]
        found = {(r["batch"], r["context"], r["cache"], r["sparse"]): r for _, r in results}
        origin = {(r["batch"], r["context"], r["cache"], r["sparse"]): stem for stem, r in results}
        rows, files = [], []
        for batch, context, dtype in sorted(dict.fromkeys(key[:3] for key in found), key=lambda key: (key[2], key)):
            sparse, dense = (found.get((batch, context, dtype, kind)) for kind in (True, False))
            ratio = f"{sparse['decode_tokens_per_s'] / dense['decode_tokens_per_s']:.2f}x" if sparse and dense else ""
            cells = [
                f"{r['decode_tokens_per_s']:,.0f} ({r['fraction_of_floor']:.0%})" if r else "" for r in (sparse, dense)
            ]
            rows.append([f"{batch} x {context // 1024}k", DTYPES.get(dtype, dtype), *cells, ratio])
            files.append({stem for key, stem in origin.items() if key[:3] == (batch, context, dtype)})
        headings = ["sequences x context", "caches", "sparse, tokens/s", "dense, tokens/s", "sparse / dense"]
        notes = [provenance(stem, ["mosaic"], document) for stem in stems]
        return from_files(headings, rows, files) + "\n" + "\n".join(notes) + "\n"

    return write


def speculation(*stems: str) -> Callable[[str], str]:
    """Table of tokens per second with speculation, relative to decoding without drafts and as a share of the bound of
    scripts/bench/engine/drafting.py. One row per acceptance rate. Cases of later files replace equal cases of earlier
    files.
    """

    def write(document: str) -> str:
        results = [(stem, result) for stem in stems for result in read(stem)["results"]]
        shapes = list(dict.fromkeys((r["batch"], r["context"]) for _, r in results))
        found = {(drafts_of(r), r["batch"], r["context"]): r for _, r in results}
        origin = {(drafts_of(r), r["batch"], r["context"]): stem for stem, r in results}
        kinds = list(dict.fromkeys(key[0] for key in found))
        rows = [[kind, *(multiple(found.get((kind, *shape))) for shape in shapes)] for kind in kinds]
        files = [{stem for key, stem in origin.items() if key[0] == kind} for kind in kinds]
        headings = ["drafts", *(f"{batch} x {context // 1024}k" for batch, context in shapes)]
        notes = [provenance(stem, [], document) for stem in stems]
        return from_files(headings, rows, files) + "\n" + "\n".join(notes) + "\n"

    return write


def drafts_of(result: dict[str, Any]) -> str:
    return f"acceptance {result['rate']:g}" if "rate" in result else f"n-grams, {result['text']} text"


def multiple(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    bound = f" ({result['of_bound']:.0%})" if result.get("rate") else ""
    return f"{result['of_plain']:.2f}x{bound}"


def hand_over(*stems: str) -> Callable[[str], str]:
    """Table of the times to the first token with KV-cache transfers: whole steps, steps launched layer by layer whose
    pages are exported, and prompts computed by a second process (scripts/bench/engine/hand_over.py).
    """

    def write(document: str) -> str:
        rows, files = [], []
        for stem in stems:
            for result in read(stem)["results"]:
                files.append({stem})
                whole, layered, apart = (
                    result[f"{name}_ttft_s"]["median"] for name in ("whole", "layered", "two_processes")
                )
                arrived = f"{result['arrived_before_first_token']:.0%}"
                times = [f"{1e3 * whole:.1f}", f"{1e3 * layered:.1f} ({result['cost']:+.1%})", arrived]
                rows.append([f"{result['prompt_tokens']:,}", *times, str(read(stem)["cards"]), f"{1e3 * apart:.1f}"])
        headings = ["prompt tokens", "whole steps, ms", "layer by layer, ms", "pages received by then"]
        headings += ["GPUs of the two processes", "two processes, ms"]
        notes = [provenance(stem, [], document) for stem in stems]
        return from_files(headings, rows, files) + "\n" + "\n".join(notes) + "\n"

    return write


def resources(stem: str) -> Callable[[str], str]:
    """Table of registers per thread, KiB of shared memory per block and bytes of spilled registers, by GPU. Of the
    kernels of a case, the table has the kernel with the most registers, preferably one that uses tensor cores.
    """

    def write(document: str) -> str:
        cards = list(read(stem)["cards"])
        rows = []
        for case in read(stem)["cases"]:
            kernels = [
                max(case["kernels"][card], key=lambda k: (bool(k["tensor_cores"]), k["registers"])) for card in cards
            ]
            spills = [f" ({k['spills']})" if k["spills"] else "" for k in kernels]
            cells = [
                f"{k['registers']}, {round(k['shared_bytes'] / 1024, 1):g}" + s
                for k, s in zip(kernels, spills, strict=True)
            ]
            rows.append([f"`{case['case']}`", *cells])
        versions, commit = read(stem)["versions"], read(stem)["commit"][:7]
        file = os.path.relpath(RESULTS / f"{stem}.json", (ROOT / document).parent)
        made = f"triton {versions['triton']}, commit `{commit}`"
        note = f"- Registers, KiB (spilled bytes); {made}; [{stem}.json]({file}).\n"
        return table(["call", *cards], rows) + "\n" + note

    return write


def cache_costs(stem: str, cached: str) -> Callable[[str], str]:
    """Table of the differences of logits with a rounded cache (scripts/tools/cache_costs.py). Rows: model and dtype of
    the weights; columns: dtype of the cache.
    """

    def write(document: str) -> str:
        cases = [case for case in read(stem)["cases"] if case["cached"] == cached]
        dtypes = list(dict.fromkeys(case["cache"] for case in cases))
        found = {(case["model"], case["weights"], case["cache"]): case for case in cases}
        deviations = {(case["model"], case["weights"]): case["deviation"] for case in cases}
        rows = []
        for (model, weights), deviation in sorted(
            deviations.items(), key=lambda item: (item[0][1] == "bfloat16", item)
        ):
            cells = [found.get((model, weights, dtype)) for dtype in dtypes]
            rows.append(
                [f"`{model}`, {weights}", f"{deviation:.2f}", *(cost_cell(case) if case else "" for case in cells)]
            )
        headings = ["model, weights", "std of logits", *(DTYPES.get(dtype, dtype) for dtype in dtypes)]
        return table(headings, rows) + "\n" + provenance(stem, [], document) + "\n"

    return write


def index_key_costs(stem: str) -> Callable[[str], str]:
    """Table of the effect of rounded index keys (index_key_costs.py). Rows: models; columns: roundings."""

    def write(document: str) -> str:
        rows: dict[str, dict[str, str]] = {}
        for case in read(stem)["cases"]:
            share = case["kept"] / case["selected"]
            rows.setdefault(case["model"], {})[case["cache"]] = f"{share:.1%}; {cost_cell(case)}"
        names = list(next(iter(rows.values())))
        cells = [[f"`{model}`", *(row[name] for name in names)] for model, row in rows.items()]
        return table(["model", *names], cells) + "\n" + provenance(stem, [], document) + "\n"

    return write


def cost_cell(case: dict[str, Any]) -> str:
    moved = f"{case['rms']:.2g}, {case['largest']:.2g}"
    return f"{moved}; {case['kl_mean']:.1e}; {case['equal_tokens']:.0%}"


def by_rounding(stem: str, cell: Callable[[dict[str, Any]], str], only: str = "") -> str:
    """Table of cases of scripts/tools/fp8_attention_costs.py. Rows: model and dtype of the weights; columns: roundings
    that do not end with `only`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for case in read(stem)["cases"]:
        if not (only and case["rounding"].endswith(only)):
            rows.setdefault((case["weights"], case["model"]), {})[case["rounding"]] = cell(case)
    names = list(next(iter(rows.values())))
    ordered = sorted(rows.items(), key=lambda item: (item[0][0] == "bfloat16", item[0]))
    cells = [[f"`{model}`, {weights}", *(row[name] for name in names)] for (weights, model), row in ordered]
    return table(["model, weights", *names], cells)


def attention_errors(stem: str) -> Callable[[str], str]:
    """Table of the relative errors of attention outputs."""

    def write(document: str) -> str:
        cells = by_rounding(stem, lambda case: f"{case['attention_error']:.1%}")
        return cells + "\n" + provenance(stem, [], document) + "\n"

    return write


def fp8_logits(stem: str) -> Callable[[str], str]:
    """Table of the differences of logits."""
    return lambda document: by_rounding(stem, cost_cell, " only") + "\n" + provenance(stem, [], document) + "\n"


def lost_weights(stem: str) -> Callable[[str], str]:
    """Table of the share of a softmax that rounding to fp8 changes to 0. Rows: tokens; columns: spread of scores."""

    def write(document: str) -> str:
        found = {(case["context"], case["spread"]): case["lost"] for case in read(stem)["lost_weights"]}
        contexts, spreads = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))
        cells = [[f"{context:,}", *(f"{found[context, spread]:.1%}" for spread in spreads)] for context in contexts]
        headings = ["tokens", *(f"standard deviation {spread:g}" for spread in spreads)]
        return table(headings, cells) + "\n" + provenance(stem, [], document) + "\n"

    return write


def jax_versions(stem: str) -> Callable[[str], str]:
    """Return a writer of the table of `make test-jax`: passed, failed and skipped tests by version of jax and group."""

    def write(document: str) -> str:
        rows, notes = [], []
        for entry in read(stem)["jax_versions"]:
            if (missing := entry.get("not_installed") or entry.get("not_run")) is not None:
                rows.append([entry["name"], *[""] * (1 + len(GROUPS))])
                notes.append(f"- {entry['name']}: `{missing}`\n")
                continue
            name, results = f"{entry['versions']['jax']}", entry["results"]
            counts = [[results[group][kind] for kind in ("passed", "failed", "skipped")] for group in GROUPS]
            rows.append([name, entry["versions"]["triton"], *(" / ".join(map(str, count)) for count in counts)])
            notes += [
                f"- {name}, {group}: `{found['first_failed']}`, {found['reason']!r}\n"
                for group, found in results.items()
                if found["failed"]
            ]
        headings = ["jax", "triton", *(f"`{group}`" if group in IMPLEMENTATIONS else group for group in GROUPS)]
        failed = (
            ["\nFirst failed test of each group, and versions that could not be tested:\n\n", *notes] if notes else []
        )
        return table(headings, rows) + "".join(failed) + "\n" + provenance(stem, [], document) + "\n"

    return write


GRID = Cases("mla_decode_grid_nvidia_h200")
TABLES: dict[str, Callable[[str], str]] = {
    "paged_decode": operation(Cases("paged_decode_nvidia_h200")),
    "paged_decode-fa3": operation(Cases("paged_decode_fa3_nvidia_h200")),
    "paged_decode-torch": operation(Cases("paged_decode_torch_nvidia_h200")),
    "paged_decode-caches": operation(Cases("paged_decode_caches_nvidia_h200")),
    "paged_decode-unplanned": operation(Cases("paged_decode_unplanned_nvidia_h200")),
    "paged_decode-gemma4": operation(
        Cases("paged_decode_gemma4_nvidia_h200"), Cases("mla_decode_one_cache_nvidia_h200")
    ),
    "paged_decode-head-wise": operation(Cases("paged_decode_head_wise_nvidia_h200")),
    "paged_decode-layouts": operation(Cases("paged_decode_layouts_nvidia_h200")),
    "jax_paged_attention": operation(Cases("jax_paged_attention_nvidia_h200")),
    "mla_decode": operation(Cases("mla_decode_nvidia_h200")),
    "mla_decode-grid": mla_by_context(GRID),
    "mla_decode-varied": mla_by_context(
        Cases("mla_decode_varied_nvidia_h200"), Cases("mla_decode_varied_128_heads_nvidia_h200")
    ),
    "ragged_attention": operation(Cases("ragged_attention_wide_nvidia_h200"), Cases("ragged_attention_nvidia_h200")),
    "paged_prefill": operation(Cases("paged_prefill_wide_nvidia_h200"), Cases("paged_prefill_nvidia_h200")),
    "paged_prefill-widths": operation(Cases("paged_prefill_widths_nvidia_h200")),
    "paged_prefill-gemma4": operation(
        Cases("paged_prefill_gemma4_nvidia_h200"), Cases("ragged_attention_gemma4_nvidia_h200")
    ),
    "paged_prefill-layouts": operation(Cases("paged_prefill_layouts_nvidia_h200")),
    "mla_prefill": operation(Cases("mla_prefill_nvidia_h200")),
    "write_kv": kernels("write_kv_nvidia_h200"),
    "write_kv-layouts": kernels("write_kv_layouts_nvidia_h200"),
    "write_latent": kernels("write_latent_nvidia_h200"),
    "gather_latent": kernels("gather_latent_nvidia_h200"),
    "plan_decode": plans("plan_decode_varied_nvidia_h200"),
    "engine": engine("engine_v2_lite_nvidia_h200"),
    "engine-vllm": engine_and_vllm("engine_v2_lite_beside_vllm_nvidia_h200"),
    "first-calls": first_calls("startup_in_turns_nvidia_h100"),
    "engine-arrivals": arrivals("serving_v2_lite_nvidia_h100"),
    "engine-sparse": sparse_engine("engine_v32_filled_16_bits_nvidia_h100", "engine_v32_filled_8_bits_nvidia_h100"),
    "cascade": operation(Cases("cascade_decode_large_nvidia_h100"), Cases("cascade_decode_found_nvidia_h100")),
    "mixed": operation(Cases("ragged_paged_attention_nvidia_h100"), Cases("ragged_paged_attention_varied_nvidia_h100")),
    "speculation": speculation("speculation_nvidia_h100", "speculation_nothing_accepted_nvidia_h100"),
    "hand-over": hand_over("hand_over_again_nvidia_h100", "hand_over_two_cards_nvidia_h200"),
    "engine-cpu": engine_on_cpu("engine_cpu"),
    "triton-resources": resources("triton_resources"),
    "mla_sparse": operation(
        Cases("mla_sparse_copied_16_bits_nvidia_h100"),
        Cases("mla_sparse_one_kernel_over_8_bits_nvidia_h100", " fp8"),
        Cases("mla_sparse_prefill_beside_flash_mla_nvidia_h100"),
    ),
    "mla_sparse-two-caches": operation(
        Cases("mla_sparse_two_caches_nvidia_h200"),
        Cases("mla_sparse_two_caches_prefill_nvidia_h200"),
        Cases("mla_sparse_records_nvidia_h200"),
    ),
    "hyper_connection_weights": operation(Cases("hyper_connection_weights_nvidia_h200")),
    "compress_and_write": operation(Cases("compress_and_write_nvidia_h200")),
    "sparse-layer": sparse_layer(Cases("sparse_layer_copied_nvidia_h100"), Cases("sparse_layer_8_bits_nvidia_h100")),
    "cache-costs-latents": cache_costs("cache_costs", "latents"),
    "cache-costs-kv": cache_costs("cache_costs", "keys and values"),
    "index-key-costs": index_key_costs("index_key_costs"),
    "fp8-attention-errors": attention_errors("fp8_attention_costs"),
    "fp8-attention-logits": fp8_logits("fp8_attention_costs"),
    "fp8-lost-weights": lost_weights("fp8_attention_costs"),
    "engine-shared-prefix": shared_prefix("engine_shared_prefix_nvidia_h200"),
    "engine-head-windows": head_windows("engine_head_windows_nvidia_h200"),
    "jax-versions": jax_versions("jax_versions"),
}


# --- charts


def panel(title: str, picked: list[tuple[str, str, str]], contenders: dict[str, list[str]]) -> Panel:
    """Return a panel of bars. `picked` has (label, result file, name of the case) of the shown cases, `contenders` the
    shown contenders by result file.
    """
    cases: dict[str, dict[str, float]] = {}
    for label, stem, name in picked:
        case = next(case for case in read(stem)["cases"] if case["case"] == name)
        for contender in contenders[stem]:
            if measured(case, contender):
                percent = 100 * case["results"][contender]["fraction_of_floor"]
                cases.setdefault(label, {})[NAMES[contender]] = percent
    return Panel(title, list(cases.items()))


def engine_panel() -> Panel:
    cases = {(c["batch"], c["context"]): c for c in read("engine_v2_lite_nvidia_h200")["results"][0]["cases"]}
    shown = []
    for batch, context in ((1, 1024), (64, 1024), (64, 8192), (64, 32768)):
        percent = 100 * cases[batch, context]["decode_fraction_of_floor"]
        shown.append((f"decode, {batch} x {context // 1024}k", {NAMES["mosaic"]: percent}))
    percent = 100 * cases[64, 8192]["prefill_fraction_of_floor"]
    return Panel("Engine, DeepSeek-V2-Lite's widths", [*shown, ("prefill, 64 x 8k", {NAMES["mosaic"]: percent})])


def gqa_panel() -> Panel:
    ours, fa3 = "paged_decode_nvidia_h200", "paged_decode_fa3_nvidia_h200"
    cases = [
        ("bf16, 16 x 2k", "32/8x128 B16 2048 p64 bf16"),
        ("bf16, 1 x 128k", "32/8x128 B1 131072 p64 bf16"),
        ("bf16, 64 x 8k", "32/8x128 B64 8192 p64 bf16"),
        ("bf16, 64 x 8k, 4 queries", "32/8x128 B64 8192 p64 Q4 bf16"),
        ("fp8, 64 x 8k", "32/8x128 B64 8192 p64 fp8-head"),
    ]
    shown = {ours: ["mosaic", "flashinfer"], fa3: ["flash-attention-3"]}
    with_fa3 = {case["case"] for case in read(fa3)["cases"]}
    picked = [(label, stem, name) for label, name in cases for stem in (ours, fa3) if stem == ours or name in with_fa3]
    return panel("GQA decode, 32 heads on 8 of width 128", picked, shown)


def mla_panel() -> Panel:
    stem = "mla_decode_nvidia_h200"
    cases = [
        ("16 heads, 128 x 2k", "512+64 h16 B128 2048 p64 bf16"),
        ("16 heads, 128 x 8k", "512+64 h16 B128 8192 p64 bf16"),
        ("64 heads, 128 x 8k", "512+64 h64 B128 8192 p64 bf16"),
        ("128 heads, 128 x 8k", "512+64 h128 B128 8192 p64 bf16"),
        ("128 heads, 32 x 8k", "512+64 h128 B32 8192 p64 bf16"),
    ]
    contenders = ["mosaic", "flash-mla", "flash-attention-3", "flashinfer-fa3"]
    return panel("MLA decode, latents of 512 + 64", [(label, stem, name) for label, name in cases], {stem: contenders})


def prefill_panel() -> Panel:
    one, wide = "ragged_attention_nvidia_h200", "ragged_attention_wide_nvidia_h200"
    picked = [
        ("128 heads 192/128, 8k", one, "128/128x192/128 S1 8192 on 0 bf16"),
        ("32/8 heads of 128, 8k", one, "32/8x128/128 S1 8192 on 0 bf16"),
        ("32/8 heads, 2k on 8k", one, "32/8x128/128 S1 2048 on 8192 bf16"),
        ("16 heads 192/128, 512 on 32k", one, "16/16x192/128 S1 512 on 32768 bf16"),
        ("16 heads 192/128, 1k on 64k", wide, "16/16x192/128 S1 1000 on 65536 bf16"),
        ("40/8 heads, 5 x 200 on 9k", wide, "40/8x128/128 S5 200 on 9000 bf16"),
    ]
    contenders = ["mosaic", "flash-attention-3", "cudnn"]
    return panel("Prefill, causal, bf16", picked, {one: contenders, wide: contenders})


def roofline() -> str:
    title = "Per cent of the roofline, measured on the same card in the same run (NVIDIA H200)"
    return bars(title, [gqa_panel(), mla_panel(), prefill_panel(), engine_panel()], columns=2)


def mla_lines() -> str:
    """Return line charts of MLA decode: one chart per heads x queries, one line per contender, over the context
    length.
    """
    found = {mla_key(case): case for case in GRID}
    contexts = [1024 * 2**i for i in range(6)]
    parts = []
    for heads, queries in ((16, 1), (64, 1), (128, 1), (128, 2)):
        series = []
        for name in MLA_CONTENDERS:
            cases = [found.get((heads, queries, context)) for context in contexts]
            percents = [100 * case["results"][name]["fraction_of_floor"] if case else None for case in cases]
            series.append(Line(NAMES[name], percents))
        parts.append((f"{heads} heads, {queries} {'query' if queries == 1 else 'queries'}", series))
    title = "MLA decode, 128 sequences: per cent of the roofline by context length"
    return lines(title, parts, [f"{context // 1024}k" for context in contexts])


def cache_kinds() -> str:
    cases = [(case["case"], case) for case in Cases("paged_decode_caches_nvidia_h200")]
    shown = [
        (name.split()[-1], {NAMES["mosaic"]: 100 * case["results"]["mosaic"]["fraction_of_floor"]})
        for name, case in cases
    ]
    return bars("GQA decode by kind of cache, NVIDIA H200", [Panel("32 heads on 8 of width 128, 64 x 8k", shown)])


CHARTS: dict[str, Callable[[], str]] = {
    "docs/figures/roofline.svg": roofline,
    "docs/figures/mla_decode.svg": mla_lines,
    "docs/figures/caches.svg": cache_kinds,
}


# --- writing


def with_tables(document: str, markdown: str) -> str:
    """Return the document's Markdown with the marked tables replaced."""

    def replace(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"{document} has the unknown table {found[2]!r}; known tables: {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]](document)}\n{found[3]}"

    return MARKED.sub(replace, markdown)


def documents() -> dict[str, str]:
    """Return the text of all documents with tables by path."""
    return {name: with_tables(name, (ROOT / name).read_text()) for name in DOCUMENTS}


def charts() -> dict[str, str]:
    """Return the SVG text of all charts by path."""
    return {name: draw() for name, draw in CHARTS.items()}


def main() -> None:
    for name, contents in (documents() | charts()).items():
        if not (ROOT / name).exists() or (ROOT / name).read_text() != contents:
            with output_file(ROOT / name) as file:
                file.write(contents.encode("utf-8"))
            print(f"{name} written")


if __name__ == "__main__":
    main()
