"""Bar and line charts as SVG text, drawn by matplotlib. Every value is a percentage of a roofline.

The text depends only on the values and on the version of matplotlib, so a test can compare charts with the committed
files. Lengths are CSS pixels. A chart is as wide as the text of a page, so its labels have their size on the page.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLORS = ("#1f6feb", "#8c959f", "#d29922", "#2da44e", "#a371f7", "#cf6679")
"""Colors of the series, in order. The first series is pallas_attn."""

TEXT, GRID, PAPER = "#1f2328", "#d0d7de", "#ffffff"
DARK = {TEXT: "#e6edf3", GRID: "#3d444d", PAPER: "#0d1117"}
"""Replacements of these colors if the reader prefers a dark page."""

WIDTH = 740
BAR_HEIGHT, CASE_GAP = 12, 8
LABEL_WIDTH = 176
"""Width of the labels of cases."""
LABEL_SIZE, TITLE_SIZE = 11, 14
PIXELS_PER_INCH, POINTS_PER_PIXEL = 96, 0.75
FONT = "DejaVu Sans"
"""Font of matplotlib, which determines the layout."""
SETTINGS = {
    "svg.hashsalt": "pallas_attn",  # identifiers in the SVG text
    "svg.fonttype": "none",  # text instead of outlines
    "font.family": FONT,
    "font.size": LABEL_SIZE * POINTS_PER_PIXEL,
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
}


@dataclass(frozen=True)
class Panel:
    """A titled group of bars. `cases` has a label and the percentage of each series for each case."""

    title: str
    cases: list[tuple[str, dict[str, float]]]

    @property
    def height(self) -> float:
        """Height of the title and of all bars."""
        return 40 + sum(BAR_HEIGHT * len(values) + CASE_GAP for _, values in self.cases)


@dataclass(frozen=True)
class Line:
    """One series of a line chart: a percentage per label of the x axis, None for a label that was not measured."""

    series: str
    percents: list[float | None]


class Chart:
    """A figure of `height` pixels with a title and a legend. Positions are pixels from the upper left corner."""

    HEAD = 58
    """Height of the title and the legend."""

    def __init__(self, title: str, names: list[str], height: float) -> None:
        self.height = height
        self.figure = Figure((WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH), facecolor=PAPER)
        FigureCanvasSVG(self.figure)
        size = TITLE_SIZE * POINTS_PER_PIXEL
        self.figure.text(16 / WIDTH, 1 - 24 / height, title, fontsize=size, fontweight="bold")
        patches = [Patch(color=color, label=name) for name, color in colors_of(names).items()]
        anchor = (10 / WIDTH, 1 - 30 / height)
        legend: dict[str, Any] = {
            "ncols": len(names),
            "frameon": False,
            "handlelength": 1,
            "columnspacing": 1.4,
            "borderpad": 0.4,
        }
        self.figure.legend(handles=patches, loc="upper left", bbox_to_anchor=anchor, **legend)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = self.height - top - height
        axes = self.figure.add_axes((left / WIDTH, bottom / self.height, width / WIDTH, height / self.height))
        axes.set_facecolor("none")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        return axes

    def heading(self, left: float, top: float, text: str) -> None:
        """Write the heading of a part of the chart. `top` is its baseline."""
        size = 12 * POINTS_PER_PIXEL
        self.figure.text(left / WIDTH, 1 - top / self.height, text, fontsize=size, fontweight="bold")

    def svg(self) -> str:
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = re.sub(r" +$", "", file.getvalue(), flags=re.MULTILINE)
        text = text.replace(f"'{FONT}'", f"'{FONT}', Arial, sans-serif")  # for readers without this font
        return text.replace("<defs>", f"<style>{dark_style()}</style>\n <defs>", 1)


def dark_style() -> str:
    """Return CSS that replaces the colors of text, lines and paper if the reader prefers a dark page."""
    rules = [
        f'[style*="{kind}: {color}"] {{ {kind}: {dark} !important }}'
        for color, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def colors_of(names: list[str]) -> dict[str, str]:
    return dict(zip(names, COLORS, strict=False))


def bars(title: str, panels: list[Panel], *, columns: int = 1) -> str:
    """Return a chart of horizontal bars with its panels in rows of `columns`. A dashed line marks the roofline."""
    names = list(dict.fromkeys(name for panel in panels for _, values in panel.cases for name in values))
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    with matplotlib.rc_context(SETTINGS):
        chart = Chart(title, names, Chart.HEAD + sum(heights) + 8)
        top = Chart.HEAD
        for row, height in zip(rows, heights, strict=True):
            for column, panel in enumerate(row):
                left = column * WIDTH / columns + LABEL_WIDTH
                width = WIDTH / columns - LABEL_WIDTH - 16
                axes = chart.axes(left, top + 26, width, panel.height - 40)
                chart.heading(column * WIDTH / columns + 16, top + 18, panel.title)
                draw_bars(axes, panel, colors_of(names), width)
            top += height
        return chart.svg()


def draw_bars(axes: Axes, panel: Panel, colors: dict[str, str], width: float) -> None:
    """Draw the bars of a panel. The x axis goes to 100% of the roofline, with space for longer bars and numbers."""
    y, middles = 0.0, []
    for _, values in panel.cases:
        middles.append(y + BAR_HEIGHT * len(values) / 2)
        for name, percent in values.items():
            axes.barh(y, percent, BAR_HEIGHT - 1, align="edge", color=colors[name])
            end = (percent, y + BAR_HEIGHT / 2 - 0.5)
            paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.2}  # hides the dashed line behind the number
            axes.annotate(f"{percent:.0f}%", end, (3, 0), textcoords="offset points", va="center", bbox=paper)
            y += BAR_HEIGHT
        y += CASE_GAP
    axes.plot([100, 100], [-4, y - 4], color=TEXT, linestyle=(0, (4, 3)), linewidth=0.8, zorder=0)
    axes.set_yticks(middles, [label for label, _ in panel.cases])
    axes.set_xticks([])
    axes.set_xlim(0, 100 / (1 - 52 / width))
    axes.set_ylim(y, 0)


def lines(title: str, charts: list[tuple[str, list[Line]]], labels: list[str], *, columns: int = 2) -> str:
    """Return small line charts in rows of `columns` charts. Their y axes go from 0 to 110% of the roofline, and their x
    axes have the same labels.
    """
    names = list(dict.fromkeys(line.series for _, series in charts for line in series))
    height, rows = 190, -(-len(charts) // columns)
    with matplotlib.rc_context(SETTINGS):
        chart = Chart(title, names, Chart.HEAD + rows * (height + 54))
        for i, (heading, series) in enumerate(charts):
            left, top = (i % columns) * WIDTH / columns + 54, Chart.HEAD + (i // columns) * (height + 54) + 26
            axes = chart.axes(left, top, WIDTH / columns - 78, height)
            chart.heading(left, top - 8, heading)
            for percent in (0, 25, 50, 75, 100):
                style: dict[str, Any] = {"color": TEXT, "linestyle": (0, (4, 3))} if percent == 100 else {"color": GRID}
                axes.axhline(percent, linewidth=0.8, zorder=0, **style)
            for line in series:
                points = [(x, percent) for x, percent in enumerate(line.percents) if percent is not None]
                axes.plot(*zip(*points, strict=True), color=colors_of(names)[line.series], marker="o", markersize=4)
            axes.set_xticks(range(len(labels)), labels)
            axes.set_yticks([0, 25, 50, 75, 100], [f"{percent}%" for percent in (0, 25, 50, 75, 100)])
            axes.set_xlim(-0.2, len(labels) - 0.8)
            axes.set_ylim(0, 110)
        return chart.svg()
