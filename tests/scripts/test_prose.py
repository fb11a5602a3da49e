"""Tests of scripts/tools/prose.py: it finds hard wordings in prose, and not in code."""

from pathlib import Path

import pytest

from scripts.tools import prose

FILE = Path("package/module.py")


def hits(source: str) -> int:
    return sum(line.hits for line in prose.python_prose(FILE, source))


@pytest.mark.parametrize(
    "text",
    [
        "Rows of those that wait.",
        "A page, of which two are free.",
        "What is left is zero.",
        "Nobody reads the tail.",
        "Copies as many as fit.",
        "A barrier of its own.",
        "More than there are pages.",
        "The kernel is told the length.",
        "Zeros in place of pages.",
        "The scale beside the page.",
        "A kept kernel.",
    ],
)
def test_hard_wording_is_found(text: str) -> None:
    assert hits(f'"""{text}"""') >= 1
    assert hits(f"x = 1  # {text}") >= 1
    assert hits(f"x = {text!r}") == 0


def test_plain_sentence_has_no_hits() -> None:
    assert hits('"""Return the page ids of a sequence, int32 [pages]. Absent pages are -1."""') == 0


def test_examples_and_code_are_skipped() -> None:
    assert hits('"""Return 1.\n\n>>> who()\n"""') == 0
    text = "Plain text.\n\n| who | whom |\n```\nwho\n```\n[text](who.md)\n"
    assert sum(line.hits for line in prose.markdown_prose(Path("page.md"), text)) == 0


def test_small_folders_count_with_their_parent() -> None:
    def lines(folder: str, words: int) -> list[prose.ProseLine]:
        return [prose.ProseLine(Path(folder) / "a.py", 1, "word " * (words - 1) + "who")]

    found = prose.rates([*lines("a/b", 10), *lines("a", 500), *lines("c", 600)])
    assert found == {Path("a"): prose.Rate(510, 2), Path("c"): prose.Rate(600, 1)}
    assert found[Path("a")].per_thousand == pytest.approx(2000 / 510)
