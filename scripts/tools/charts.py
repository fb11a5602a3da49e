"""Bar and line charts as SVG text. Every value is a percentage of a roofline.

The text is the same on every machine, so that a test can compare charts with the committed files.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

COLORS = ("#1f6feb", "#8c959f", "#d29922", "#2da44e", "#a371f7", "#cf6679")
"""Colors of the series, in order. The first series is pallas_attn."""

FONT = "font-family='DejaVu Sans, Arial, sans-serif'"
LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, CASE_GAP = 250, 360, 12, 8


@dataclass(frozen=True)
class Panel:
    """A titled group of bars. `cases` has a label and the percentage of each series for each case."""

    title: str
    cases: list[tuple[str, dict[str, float]]]


@dataclass(frozen=True)
class Line:
    """One series of a line chart: a percentage per label of the x axis, None for a label that was not measured."""

    series: str
    percents: list[float | None]


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    anchor: str = "start",
    weight: str = "normal",
    color: str = "#1f2328",
) -> str:
    style = f"{FONT} font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='{color}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def document(width: int, height: float, shapes: list[str]) -> str:
    size = f"width='{width}' height='{height:.0f}' viewBox='0 0 {width} {height:.0f}'"
    background = f"<rect width='{width}' height='{height:.0f}' fill='white'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", background, *shapes, "</svg>", ""])


def colors_of(names: list[str]) -> dict[str, str]:
    return dict(zip(names, COLORS, strict=False))


def legend(names: list[str], x: float, y: float) -> list[str]:
    shapes = []
    for name, color in colors_of(names).items():
        shapes += [f"<rect x='{x:.1f}' y='{y - 9:.1f}' width='10' height='10' fill='{color}'/>", text(x + 14, y, name)]
        x += 32 + 6.6 * len(name)
    return shapes


def bars(title: str, panels: list[Panel], *, columns: int = 1) -> str:
    """Return a chart of horizontal bars with its panels in `columns` columns. A dashed line marks the roofline."""
    names = list(dict.fromkeys(name for panel in panels for _, values in panel.cases for name in values))
    panel_width = LABEL_WIDTH + BAR_WIDTH + 50
    shapes = [text(16, 26, title, size=15, weight="bold"), *legend(names, 16, 48)]
    bottoms = [64.0] * columns
    for panel in panels:
        column = bottoms.index(min(bottoms))
        drawn, bottoms[column] = panel_bars(panel, colors_of(names), column * panel_width, bottoms[column])
        shapes += drawn
    return document(panel_width * columns, max(bottoms) + 12, shapes)


def panel_bars(panel: Panel, colors: dict[str, str], left: float, top: float) -> tuple[list[str], float]:
    """Return the SVG shapes of a panel, and the y coordinate of its lower edge. `BAR_WIDTH` is 110% of the roofline."""
    zero, scale = left + LABEL_WIDTH, BAR_WIDTH / 110
    shapes = [text(left + 16, top + 18, panel.title, size=13, weight="bold")]
    y = first = top + 28.0
    for label, values in panel.cases:
        shapes.append(text(zero - 8, y + (BAR_HEIGHT * len(values)) / 2 + 4, label, anchor="end"))
        for name, percent in values.items():
            width = min(percent, 110) * scale
            box = f"x='{zero:.1f}' y='{y:.1f}' width='{width:.1f}' height='{BAR_HEIGHT - 1}'"
            number = text(zero + width - 4, y + 9, f"{percent:.0f}%", size=9, anchor="end", color="white")
            shapes += [f"<rect {box} fill='{colors[name]}'/>", number]
            y += BAR_HEIGHT
        y += CASE_GAP
    roof = zero + 100 * scale
    line = f"<line x1='{roof:.1f}' x2='{roof:.1f}' y1='{first - 4:.1f}' y2='{y - 4:.1f}'"
    return [f"{line} stroke='#1f2328' stroke-dasharray='4 3'/>", *shapes], y + 6


def lines(title: str, charts: list[tuple[str, list[Line]]], labels: list[str]) -> str:
    """Return small line charts next to each other. Their y axes go from 0 to 110% of the roofline, and their x axes
    have the same labels.
    """
    names = list(dict.fromkeys(line.series for _, series in charts for line in series))
    width, height, left, top = 300, 220, 50, 96
    shapes = [text(16, 26, title, size=15, weight="bold"), *legend(names, 16, 48)]
    for i, (heading, series) in enumerate(charts):
        x0 = left + i * (width + 40)
        step = width / (len(labels) - 1)
        shapes.append(text(x0, top - 12, heading, size=12, weight="bold"))
        for percent in (0, 25, 50, 75, 100):
            y = top + height * (1 - percent / 110)
            dashes = "stroke='#1f2328' stroke-dasharray='4 3'" if percent == 100 else "stroke='#d0d7de'"
            shapes.append(f"<line x1='{x0}' x2='{x0 + width}' y1='{y:.1f}' y2='{y:.1f}' {dashes}/>")
            shapes.append(text(x0 - 6, y + 4, f"{percent}%", size=9, anchor="end"))
        shapes += [text(x0 + j * step, top + height + 16, label, anchor="middle") for j, label in enumerate(labels)]
        for line in series:
            points = [
                f"{x0 + j * step:.1f},{top + height * (1 - percent / 110):.1f}"
                for j, percent in enumerate(line.percents)
                if percent is not None
            ]
            color = colors_of(names)[line.series]
            shapes.append(f"<polyline points='{' '.join(points)}' fill='none' stroke='{color}' stroke-width='2'/>")
            shapes += [
                f"<circle cx='{point.split(',')[0]}' cy='{point.split(',')[1]}' r='3' fill='{color}'/>"
                for point in points
            ]
    return document(left + len(charts) * (width + 40), top + height + 32, shapes)
