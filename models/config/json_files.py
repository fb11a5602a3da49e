"""Reading of untrusted JSON. Size and depth are limited; every error is a ValueError that names the file."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE_LIMIT = 2**28
"""Maximum size of a file in bytes. The largest published tokenizer.json has about 35 MB."""

DEPTH_LIMIT = 50
"""Maximum nesting depth of lists and objects, so that recursive functions cannot exceed the recursion limit."""


def is_present(path: Path) -> bool:
    """Return whether a file exists. Raises ValueError if the path is a folder, pipe or device."""
    if path.is_file():
        return True
    if path.exists():
        raise ValueError(f"{path}: not a regular file")
    return False


def read_bounded(path: Path) -> bytes:
    """Read a file. Raises ValueError if it has more than SIZE_LIMIT bytes."""
    with path.open("rb") as file:
        content = file.read(SIZE_LIMIT + 1)
    if len(content) > SIZE_LIMIT:
        raise ValueError(f"{path}: expected at most {SIZE_LIMIT >> 20} MiB")
    return content


def read_json(path: Path, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Read a JSON file.

    Args:
      path: the file.
      convert: function whose result is returned instead of the contents. It raises ValueError for wrong contents.

    Raises:
      ValueError: the file is too large, not JSON, nested too deeply, or has wrong contents.
      OSError: the file cannot be read.
    """
    content = read_bounded(path)
    try:
        return convert(parse_json(content))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_json(content: bytes) -> Any:
    """Parse JSON. Raises ValueError if it is not JSON or nested too deeply."""
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
    """Return the lists and objects directly inside a list or an object."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


_shortening = reprlib.Repr(maxstring=80, maxother=80, maxlong=80)


def shown(value: Any) -> str:
    """Format a value from a file for a message, like `repr` but with limited length."""
    return _shortening.repr(value)
