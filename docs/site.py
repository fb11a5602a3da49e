"""Lets the documentation site hold files from outside docs/: README, BUILD, LICENSE, benchmarks.

A hook of mkdocs (`mkdocs.yml` names it). Links in the repository lead from file to file, as readers of the repository
follow them; they become links between pages of the site. `Examples` is for the API's pages.
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
OUTSIDE = ("README.md", "BUILD.md", "LICENSE", "benchmarks/**/*.md", "benchmarks/**/*.json", "benchmarks/**/*.png")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


class Examples(griffe.Extension):
    """Shows the example of a docstring as code, which the parser expects under the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = site_path(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    here = repository_path(page.file.src_uri)

    def relink(link: re.Match[str]) -> str:
        start, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), target)))
        return f"{start}{os.path.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(relink, markdown)


def site_path(name: str) -> str:
    """Where the site has a file of the repository: docs/ is its root, and the README its first page."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def repository_path(name: str) -> str:
    """Which file of the repository a page of the site is."""
    if name == "index.md":
        return "README.md"
    return name if (ROOT / name).exists() else f"docs/{name}"
