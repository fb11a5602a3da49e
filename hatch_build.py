"""Metadata of the package that depends on the address of the repository. hatchling runs this file in each build.

The environment variable REPO_URL has the address, for example in `REPO_URL=https://host/owner/name make dist`. With it,
the package has project URLs, and relative links of README.md become links to the files of the tagged version: a package
index shows the text without the files next to it. Without it, the package has no URLs and README.md is unchanged.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<path>[^)\s:#][^)\s:]*)\)")
"""A link or image with a relative path: not an address such as https://..., and not only an anchor."""


def with_absolute_links(markdown: str, address: str, version: str) -> str:
    """Return Markdown in which relative paths are addresses of files in the tag v<version> of the repository."""

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}{link['text']}({address}/{view}/v{version}/{link['path']})"

    return LINK.sub(absolute, markdown)


class RepositoryMetadata(MetadataHookInterface):
    """Sets the fields `readme` and `urls` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if address := os.environ.get("REPO_URL", "").rstrip("/"):
            text = with_absolute_links(text, address, metadata["version"])
            metadata["urls"] = {
                "Repository": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/v{metadata['version']}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
