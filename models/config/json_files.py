"""Reading of JSON that anyone may have written: its size and depth are bounded, and whatever is wrong is one
ValueError that names the file."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

SIZE_LIMIT = 2**28
"""Bytes of a file, at most. The largest tokenizer.json that is published has some 35 MB."""

DEPTH_LIMIT = 50
"""Lists and objects within each other, at most, so that whatever walks or prints what was read cannot recurse too
deeply."""


def is_present(path: Path) -> bool:
    """Whether there is such a file; raises ValueError for a folder, pipe or device in its place."""
    if path.is_file():
        return True
    if path.exists():
        raise ValueError(f"{path}: not a regular file")
    return False


def read_bounded(path: Path) -> bytes:
    """Reads a file; raises ValueError if it has more than SIZE_LIMIT bytes."""
    with path.open("rb") as file:
        content = file.read(SIZE_LIMIT + 1)
    if len(content) > SIZE_LIMIT:
        raise ValueError(f"{path}: expected at most {SIZE_LIMIT >> 20} MiB")
    return content


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
      ValueError: the file is too large, not JSON or nested too deeply.
      OSError: it cannot be read.
    """
    content = read_bounded(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_json(content: bytes) -> Any:
    """Parses JSON that was read from a file; raises ValueError if it is not JSON or nested too deeply."""
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not JSON: {error or type(error).__name__}") from error
    depth, level = 0, [value]
    while level := [child for part in level for child in _children(part)]:
        depth += 1
        if depth > DEPTH_LIMIT:
            raise ValueError(f"expected JSON of at most {DEPTH_LIMIT} lists and objects within each other")
    return value


def _children(value: Any) -> list[Any]:
    """The lists and objects directly within a list or an object."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


_shortening = reprlib.Repr(maxstring=80, maxother=80, maxlong=80)


def shown(value: Any) -> str:
    """Formats a value from a file for a message: as `repr`, but short whatever its size."""
    return _shortening.repr(value)
