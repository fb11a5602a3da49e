"""mkdocs hook that adds files outside docs/ to the site: README, BUILD, CHANGELOG, LICENSE, benchmarks.

`mkdocs.yml` loads it. Links between files of the repository become links between pages of the site. `Docstrings` is
for the API pages.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "README.md",
    "BUILD.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "tests/durations.md",
    "LICENSE",
    "benchmarks/**/*.md",
    "benchmarks/**/*.json",
    "benchmarks/**/*.png",
)
SEARCH_BOOSTS = {
    "tutorial": 2.0,
    "concepts": 2.0,
    "engine": 2.0,
    "support": 1.5,
    "api": 0.5,
    "engine_api": 0.5,
    "lessons": 0.2,
    "performance": 0.3,
    "benchmarks": 0.3,
    "BUILD": 0.3,
    "CHANGELOG": 0.2,
}
"""Factors of the rank in search results by first part of the page's path. Explanations come before measurements."""
CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
NAME = re.compile(r"<code>([^<\s]{1,32})</code>")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


ENTRY = re.compile(r"^(  +)(\*{0,2}\w+(?:, \*{0,2}\w+)+):(.*(?:\n\1  .*)*)$", re.MULTILINE)
"""Entry of a docstring section that describes several names, such as `k, v: keys and values`, with its next lines."""


class Docstrings(griffe.Extension):
    """Adapt docstrings to the parser. The section `Example` becomes `Examples`, which the parser shows as code. An
    entry with several names becomes one entry per name, because the parser takes the types of names from signatures.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = ENTRY.sub(split_entry, text)


def split_entry(entry: re.Match[str]) -> str:
    indent, names, description = entry.groups()
    return "\n".join(f"{indent}{name}:{description}" for name in names.split(", "))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = site_path(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    boost = SEARCH_BOOSTS.get(page.file.src_uri.partition("/")[0].removesuffix(".md"))
    if boost is not None:
        page.meta.setdefault("search", {"boost": boost})
    here = repository_path(page.file.src_uri)

    def relink(link: re.Match[str]) -> str:
        start, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), target)))
        return f"{start}{os.path.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(relink, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the names in tables, for which site.css forbids line breaks."""
    return CELL.sub(lambda cell: NAME.sub(r'<code class="name">\1</code>', cell[0]), html)


def site_path(name: str) -> str:
    """Path on the site of a file of the repository. docs/ is the root, README.md the first page."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def repository_path(name: str) -> str:
    """Path in the repository of a page of the site."""
    if name == "index.md":
        return "README.md"
    return name if (ROOT / name).exists() else f"docs/{name}"
