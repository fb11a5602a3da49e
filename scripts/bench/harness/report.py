"""Output of benchmarks: one line per case during the run, a table of operations, and the report as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pallas_attn.models.cli.command_line import write_report


def report_each(
    results: Iterable[dict[str, Any]], line: Callable[[dict[str, Any]], str], report: dict[str, Any], out: Path | None
) -> None:
    """Print a line for each result when it is measured, add it to the list `results` of the report, and write the
    report to `out`, the file of --json, if it is given.
    """
    console = Console()
    report["results"] = []
    for result in results:
        report["results"].append(result)
        console.print(line(result), highlight=False, soft_wrap=True)
        if out is not None:
            write_report("--json", out, report)


def cell(entry: dict[str, Any]) -> str:
    """Format the result of one implementation or baseline in a few characters.

    "of the host" marks a time in which the device waited for the host's launches.
    """
    if "median_us" not in entry:
        return "absent" if "absent" in entry else "failed"
    waits = " of the host" if entry.get("host_us", 0.0) > 0.9 * entry["median_us"] else ""
    kernels = f" ({sum(entry['kernels_us'].values()):,.1f} in kernels)" if "kernels_us" in entry else ""
    return f"{entry['median_us']:,.1f} us{waits}{kernels} {entry['fraction_of_floor']:.0%}"


def summary(case: dict[str, Any]) -> str:
    """Format a case as one line."""
    if "skipped" in case:
        return f"{case['case']}: skipped, {case['skipped']}"
    return f"{case['case']}: " + ", ".join(f"{name} {cell(entry)}" for name, entry in case["results"].items())


def results_table(report: dict[str, Any]) -> Table:
    """Return a table of median times and of floor / median, where floor is the roofline time of the case."""
    names = list(dict.fromkeys(name for case in report["cases"] for name in case.get("results", ())))
    title = f"{report['operation']} on {report['device']}: median, and floor / median"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("case")
    for heading in ("bytes", "floor", *names):
        table.add_column(heading, justify="right")
    for case in report["cases"]:
        floor = f"{case['floor_us']:,.1f} us {case['bound']}"
        cells = [cell(case["results"][name]) for name in names] if "results" in case else ["skipped"] * len(names)
        table.add_row(case["case"], f"{case['bytes'] / 1e6:,.1f} MB", floor, *cells)
    table.caption = "\n".join(reasons(report))
    table.caption_justify = "left"
    return table


def reasons(report: dict[str, Any]) -> list[str]:
    """Return the reasons for missing results, each reason once with the first case that has it."""
    found = {}
    for case in report["cases"]:
        if "skipped" in case:
            found.setdefault(f"skipped: {case['skipped']}", case["case"])
        for name, entry in case.get("results", {}).items():
            for kind in ("absent", "error"):
                if kind in entry:
                    found.setdefault(f"{name} {kind}: {entry[kind]}", case["case"])
    return [f"{text} ({case})" for text, case in found.items()]


def cache_ratios(report: dict[str, Any]) -> list[str]:
    """Return lines with the time of each case relative to the same case with a bfloat16 cache."""
    plain: dict[str, dict[str, Any]] = {}
    lines = []
    for case in report["cases"]:
        if case["arguments"].get("cache") == "bf16":
            plain[case["case"].removesuffix("bf16")] = case.get("results", {})
    for case in report["cases"]:
        cache = case["arguments"].get("cache", "")
        base = plain.get(case["case"].removesuffix(cache), {})
        ratios = [
            f"{name} {entry['median_us'] / base[name]['median_us']:.2f}x"
            for name, entry in case.get("results", {}).items()
            if cache != "bf16" and "median_us" in entry and "median_us" in base.get(name, {})
        ]
        if ratios:
            lines.append(f"{case['case']} relative to bf16: {', '.join(ratios)}")
    return lines
