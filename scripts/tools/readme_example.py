"""Run the Python blocks of a Markdown file, in order, in one namespace.

python scripts/tools/readme_example.py README.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def python_blocks(markdown: str) -> list[str]:
    """Return the contents of the fenced blocks marked python."""
    return re.findall(r"^```python\n(.*?)^```", markdown, flags=re.DOTALL | re.MULTILINE)


def main(path: str) -> int:
    blocks = python_blocks(Path(path).read_text())
    if not blocks:
        print(f"{path} has no python block", file=sys.stderr)
        return 1
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, path, "exec"), namespace)
    print(f"ran {len(blocks)} python block(s) of {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
