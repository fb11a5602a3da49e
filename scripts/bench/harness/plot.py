"""Plots of a benchmark: results under the roofline of the card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

# Okabe and Ito's colors, which are distinct for all kinds of color vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_MARKERS = "osD^vPX"
_GREY = "#666666"


def plot_report(file: BinaryIO, report: dict[str, Any]) -> None:
    """Write a PNG with two plots: operations per second by operations per byte, under the roofline; and the fraction
    floor / time by the bytes of a call, where floor is the roofline time of the case.


    Raises:
      ImportError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(12, 5), layout="constrained")
    roof, parts = figure.subplots(1, 2)
    _draw_roof(roof, report)
    parts.axhline(1.0, color=_GREY, linestyle="--", label="floor")
    for name, style in _styles(report):
        of_name = list(_measured(report, name))
        with_flops = [(case["flops"] / case["bytes"], entry["flops_per_s"]) for case, entry in of_name if case["flops"]]
        if with_flops:
            roof.loglog(*zip(*with_flops, strict=True), **style, label=name)
        by_bytes = [(case["bytes"], entry["fraction_of_floor"]) for case, entry in of_name]
        parts.semilogx(*zip(*by_bytes, strict=True), **style, label=name)
    parts.set(xlabel="bytes of a call", ylabel="floor / time", ylim=(0, None), title="Part of the floor")
    for axes in (roof, parts):
        axes.grid(which="both", linewidth=0.3, alpha=0.5)
        axes.legend(frameon=False)
    figure.suptitle(f"{report['operation']} on {report['device']}, grid {report['grid']}", fontweight="bold")
    figure.savefig(file, format="png", dpi=150)


def _draw_roof(axes: Any, report: dict[str, Any]) -> None:
    """Draw the roofline over the range of operations per byte of the report's cases, with a margin."""
    rates = report["rates"]
    ridge = rates["matrix"] / rates["copy"]
    intensities = [case["flops"] / case["bytes"] for case in report["cases"] if case["flops"]] or [ridge]
    span = np.geomspace(min(intensities) / 2, max(*intensities, ridge) * 2, 100)
    label = f"{rates['copy'] / 1e12:.2f} TB/s, {rates['matrix'] / 1e12:.0f} TFLOP/s"
    axes.loglog(span, np.minimum(span * rates["copy"], rates["matrix"]), color=_GREY, linestyle="--", label=label)
    axes.set(xlabel="operations per byte", ylabel="operations per second", title="Roofline")


def _styles(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the plot style of each implementation or baseline that has a result."""
    names = list(dict.fromkeys(name for case in report["cases"] for name in case.get("results", ())))
    for number, name in enumerate(name for name in names if any(_measured(report, name))):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        yield name, {"color": colour, "marker": marker, "linestyle": "none", "fillstyle": "none"}


def _measured(report: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the cases in which the implementation or baseline `name` has a time, and its entry in the report."""
    for case in report["cases"]:
        entry = case.get("results", {}).get(name, {})
        if "median_us" in entry:
            yield case, entry
