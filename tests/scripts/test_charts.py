"""Tests of scripts/tools/charts.py: the same values give the same SVG text, and charts are legible on a page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.tools import performance
from scripts.tools.charts import DARK, PAPER, POINTS_PER_PIXEL, Line, Panel, bars, lines

PAGE_WIDTH = 748
"""Pixels of the text of a page of the site in a window of 1,280 pixels."""
FIGURES = sorted((performance.ROOT / "docs" / "figures").glob("*.svg"))
CASES = [("16 x 2k", {"pallas_attn": 82.4, "FlashMLA": 77.0}), ("64 x 8k", {"pallas_attn": 107.2})]


def labels(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]


def bar_widths(svg: str) -> list[float]:
    """Return the widths of the bars in the order in which they are drawn."""
    shapes = re.findall(r'<path d="M ([\d.]+) \S+\s+L ([\d.]+) [^"]*" clip-path="[^"]*" style="fill: #', svg)
    return [float(right) - float(left) for left, right in shapes]


def test_bars_show_names_cases_and_numbers() -> None:
    svg = bars("Title", [Panel("Decode", CASES)])
    assert {"Title", "pallas_attn", "FlashMLA", "Decode", "16 x 2k", "64 x 8k", "82%", "77%", "107%"} <= set(
        labels(svg)
    )
    first, second, third = bar_widths(svg)
    assert second / first == pytest.approx(77.0 / 82.4, rel=1e-3)
    assert third / first == pytest.approx(107.2 / 82.4, rel=1e-3)


def test_lines_leave_out_what_was_not_measured() -> None:
    svg = lines("Title", [("1 query", [Line("pallas_attn", [50.0, 75.0, None])])], ["1k", "2k", "4k"])
    assert {"Title", "1 query", "pallas_attn", "1k", "2k", "4k", "100%"} <= set(labels(svg))
    assert svg.count("<use ") == 2


def test_equal_values_give_equal_text() -> None:
    panel = Panel("Decode", CASES)
    assert bars("Title", [panel]) == bars("Title", [panel])
    assert "<dc:date>" not in bars("Title", [panel])


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_labels_have_at_least_10_pixels_on_a_page(figure: Path) -> None:
    svg = figure.read_text()
    width = ElementTree.fromstring(svg).attrib["width"]
    pixels_per_unit = 1 / POINTS_PER_PIXEL if width.endswith("pt") else 1  # of the drawing without scaling
    assert float(width.removesuffix("pt")) * pixels_per_unit <= PAGE_WIDTH
    sizes = [float(size) * pixels_per_unit for size in re.findall(r"font-size(?:: |=')([\d.]+)", svg)]
    assert len(sizes) >= len(labels(svg)) > 5
    assert min(sizes) >= 10


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_dark_pages_get_light_text_on_dark_paper(figure: Path) -> None:
    """Every color of text and paper has a replacement, except white text, which is on colored boxes."""
    svg = figure.read_text()
    style = svg.partition("@media (prefers-color-scheme: dark) {")[2].partition("</style>")[0]
    texts = [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]
    for text in texts:
        fill = text.get("fill") or text.attrib["style"].partition("fill: ")[2]
        assert fill == "white" or f'fill: {fill}"' in style or f'fill="{fill}"' in style
    assert f"fill: {DARK[PAPER]}" in style
