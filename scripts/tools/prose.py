"""Count wordings that readers of this project had to read twice, and fail where a folder has too many.

    python -m scripts.tools.prose                 # all tracked Python and Markdown files; exit status 1 above the limit
    python -m scripts.tools.prose --show 20 docs  # also print the lines with the most hits

The check reads docstrings and comments of Python files, and running text of Markdown files (no tables, no code). A hit
is a hint, not an error: some of these wordings are sometimes the best ones. The rate per 1,000 words is limited per
folder. Codebases that are easy to read have 0.2 to 1.4 hits per 1,000 words.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT = 2.0
"""Maximum number of hits per 1,000 words in a folder."""

FEWEST_WORDS = 500
"""Folders with fewer words are counted together with their parent folder, because one hit would change their rate too
much.
"""

WORDINGS = {
    "pronoun instead of a noun": (
        r"\b(?:those|that|the ones?) (?:of|that|which|with|in|for|whose|behind|before|above|below)\b"
    ),
    "relative clause without a noun": r"\bof (?:which|whom|whose|those|these)\b",
    "'what' as a noun": (
        r"(?:^|[.;:,(] )what (?!is\b.*\?)\w+|\b(?:of|from|than|to|by|in|for|with|as|and|is|are|does|do) what\b"
    ),
    "person instead of a component": r"\b(?:who|whom|whoever|nobody|somebody|everybody|anybody|someone)\b",
    "quantity as a noun": r"\b(?:so|as|how|that) many\b|\bso much\b|\bsuch an?\b|\bso far\b",
    "'of its own'": r"\bof (?:its|their|ours|his|her) own\b",
    "'there is' in a relative clause": r"\b(?:that|than|as|where|if) there (?:is|are|was|were)\b",
    "component that speaks or listens": (
        r"\b(?:is|are|was|were|be|been) (?:told|asked|heard|said|spared|dealt|wanted|let)\b"
        r"|\b(?:tells?|hears?|says|said|asks?) (?:what|which|how|whether|that|of|it|them)\b"
    ),
    "idiom": (
        r"\b(?:in place of|in turns?|for want of|in vain|all the same|at the most|as it (?:is|comes|lies)"
        r"|where (?:it|they) (?:lies?|stands?))\b"
    ),
    "'beside' or 'behind'": r"\b(?:besides?|behind)\b",
    "participle as an attribute": (
        r"\b(?:kept|held|taken|meant|mended) (?:ones?|kernels?|programs?|calls?)\b|\bcopy engine\b"
    ),
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in WORDINGS.items()}

SKIPPED_MARKDOWN = re.compile(r"^\s*(\||    |<|!\[)")
"""Pattern of Markdown lines that are not read: tables, indented code, HTML and images."""


class ProseLine(NamedTuple):
    """One line of prose, with its file and line number."""

    file: Path
    number: int
    text: str

    @property
    def hits(self) -> int:
        return sum(len(pattern.findall(self.text)) for pattern in PATTERNS.values())


class Rate(NamedTuple):
    """Words and hits of a folder."""

    words: int
    hits: int

    @property
    def per_thousand(self) -> float:
        return 1000 * self.hits / self.words if self.words else 0.0


def python_prose(file: Path, source: str) -> Iterator[ProseLine]:
    """Yield the lines of docstrings, of strings that document constants, and of comments, without examples in
    docstrings.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, text in enumerate(node.value.value.splitlines()):
                if not text.lstrip().startswith((">>>", "...")):
                    yield ProseLine(file, node.lineno + offset, text.strip())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# noqa", "# type")):
            yield ProseLine(file, token.start[0], token.string.lstrip("# "))


def markdown_prose(file: Path, text: str) -> Iterator[ProseLine]:
    """Yield the lines of running text, without the targets of links."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not SKIPPED_MARKDOWN.match(line):
            yield ProseLine(file, number, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line))


def prose(file: Path) -> Iterator[ProseLine]:
    """Yield the lines of prose of a Python or Markdown file."""
    return (python_prose if file.suffix == ".py" else markdown_prose)(file, file.read_text())


def rates(lines: Iterable[ProseLine]) -> dict[Path, Rate]:
    """Return the rate of each folder that directly contains files. Folders with fewer than `FEWEST_WORDS` words are
    added to their parents.
    """
    words: collections.Counter[Path] = collections.Counter()
    hits: collections.Counter[Path] = collections.Counter()
    for line in lines:
        words[line.file.parent] += len(line.text.split())
        hits[line.file.parent] += line.hits
    for folder in sorted(words, key=lambda folder: -len(folder.parts)):
        if words[folder] < FEWEST_WORDS and folder != folder.parent:
            words[folder.parent] += words.pop(folder)
            hits[folder.parent] += hits.pop(folder)
    return {folder: Rate(words[folder], hits[folder]) for folder in sorted(words)}


def tracked_files(paths: list[str]) -> list[Path]:
    """Return the Python and Markdown files below the paths that git tracks."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.splitlines()]
    return [file for file in files if file.suffix in (".py", ".md") and file.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.tools.prose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=["."])
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the N lines with the most hits")
    options = parser.parse_args()
    lines = [line for file in tracked_files(options.paths) for line in prose(file)]
    found = rates(lines)
    above = [folder for folder, rate in found.items() if rate.per_thousand > LIMIT]
    for folder in found if options.show else above:
        rate = found[folder]
        print(f"{folder}: {rate.per_thousand:.1f} hits per 1,000 words ({rate.words:,} words); limit {LIMIT}")
    for line in sorted((line for line in lines if line.hits), key=lambda line: -line.hits)[: options.show]:
        print(f"{line.file}:{line.number}: {line.text[:140]}")
    total = Rate(sum(rate.words for rate in found.values()), sum(rate.hits for rate in found.values()))
    print(f"prose: {total.per_thousand:.1f} hits per 1,000 words in {total.words:,} words")
    if above and not options.show:
        print("python -m scripts.tools.prose --show 40 FOLDER prints the lines")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
