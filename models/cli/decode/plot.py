"""Plot of a run: tokens per step, pages in use, and latencies of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from pallas_attn.models.cli.decode.report import Report
from pallas_attn.models.engine import EngineStats, RequestOutput, StepRecord

# Colors of Okabe and Ito, which people with any kind of color vision can distinguish.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#666666"


def plot_run(file: BinaryIO, report: Report) -> None:
    """Write the plot as PNG, with three panels.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(10, 9), layout="constrained")
    figure.get_layout_engine().set(hspace=0.06)  # pyrefly: ignore[missing-attribute]
    steps, pages, latencies = figure.subplots(3, 1)
    pages.sharex(steps)
    _draw_steps(steps, report.stats.steps)
    _draw_pages(pages, report.stats)
    _draw_latencies(latencies, report.outputs)
    figure.suptitle(report.title, fontweight="bold")
    figure.savefig(file, format="png", dpi=150)


def _draw_steps(axes: Any, steps: Sequence[StepRecord]) -> None:
    below = np.zeros(max(1, len(steps)))
    edges = np.arange(below.size + 1)
    rejected = _of_steps(steps, "drafted_tokens") - _of_steps(steps, "accepted_tokens")
    parts = [
        ("decode", _of_steps(steps, "decode_tokens"), _GREEN),
        ("prefill", _of_steps(steps, "prefill_tokens"), _BLUE),
        ("prefill saved by cached prefixes", _of_steps(steps, "cached_tokens"), _ORANGE),
    ]
    if any(step.drafted_tokens for step in steps):
        parts.insert(1, ("rejected drafts", rejected, _GREY))
    for label, tokens, colour in parts:
        top = below + tokens
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label)
        below = top
    axes.set(xlabel="step", ylabel="tokens", xlim=(0, edges[-1]), ylim=(0, 1.05 * max(1, *below)))
    _finish(axes, "Tokens of each step")


def _of_steps(steps: Sequence[StepRecord], field: str) -> np.ndarray:
    """Return a field of each step's record, int [steps]; a single 0 if the run was interrupted before the first
    step."""
    return np.array([getattr(step, field) for step in steps] or [0])


def _draw_pages(axes: Any, stats: EngineStats) -> None:
    used = _of_steps(stats.steps, "used_pages")
    edges = np.arange(used.size + 1)
    axes.stairs(used, edges, fill=True, color=_BLUE, alpha=0.35)
    axes.stairs(used, edges, color=_BLUE, baseline=None, label="of running requests")
    axes.axhline(stats.num_pages, color=_GREY, linestyle="--", label=f"all {stats.num_pages:,}")
    axes.set(xlabel="step", ylabel="pages", ylim=(0, 1.08 * stats.num_pages))
    noun = "preemption" if stats.preemptions == 1 else "preemptions"
    _finish(axes, f"Pages, {stats.peak_pages / stats.num_pages:.0%} at the peak, {stats.preemptions} {noun}")


def _draw_latencies(axes: Any, outputs: Sequence[RequestOutput]) -> None:
    first = [(i, 1e3 * output.ttft_s) for i, output in enumerate(outputs) if output.ttft_s is not None]
    between = [(i, 1e3 * np.percentile(output.itl_s, [5, 50, 95])) for i, output in enumerate(outputs) if output.itl_s]
    size = 7 if len(outputs) <= 40 else 3
    if first:
        axes.plot(*zip(*first, strict=True), "D", color=_ORANGE, markersize=size, label="time to first token")
    if between:
        index, (low, median, high) = [i for i, _ in between], np.transpose([times for _, times in between])
        axes.vlines(index, low, high, color=_BLUE, linewidth=size / 2, alpha=0.5, label="between tokens, 5% to 95%")
        axes.plot(index, median, "o", color=_BLUE, markersize=size, label="between tokens, median")
    axes.set(xlabel="request", ylabel="ms", xlim=(-0.5, len(outputs) - 0.5))
    if first:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
    _finish(axes, "Latency")


def _finish(axes: Any, title: str) -> None:
    """Set title, legend, ticks and grid of a panel."""
    axes.set_title(title, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=3, frameon=False)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if axes.get_yscale() == "linear":
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
