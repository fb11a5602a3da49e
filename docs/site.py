"""mkdocs hook that adds files outside docs/ to the site: README, BUILD, CHANGELOG, LICENSE, benchmarks.

`mkdocs.yml` loads it. Links between files of the repository become links between pages of the site. `Examples` is for
the API pages.
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
    "LICENSE",
    "benchmarks/**/*.md",
    "benchmarks/**/*.json",
    "benchmarks/**/*.png",
)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


class Examples(griffe.Extension):
    """Rename the docstring section `Example` to `Examples`, which the parser shows as code."""

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
    """Path on the site of a file of the repository. docs/ is the root, README.md the first page."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def repository_path(name: str) -> str:
    """Path in the repository of a page of the site."""
    if name == "index.md":
        return "README.md"
    return name if (ROOT / name).exists() else f"docs/{name}"
