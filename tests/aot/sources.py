"""Hash of everything on which the report of a case depends: the reachable code, and the pinned compiler versions.

Docstrings, comments and formatting do not change the hash.

The reachable code of a file consists of its imports, including imports inside functions, and their imports. There are
two special cases:
- An operation depends on all files of its folder, because it loads its implementations by name.
- `import pallas_attn` depends on the modules directly in the package and in `runtime`, and on the operations that the
  importing file names.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_attn", "models", "scripts", "tests")
LIBRARY, OPS = ROOT / "pallas_attn", ROOT / "pallas_attn" / "ops"
OVERVIEWS = ("explain", "__main__")
"""Modules of the library that import every operation. No operation depends on them."""
GATE = ("case", "compile", "device", "environment", "report", "sources")
"""Modules of the gate that affect the report of every case."""


@functools.cache
def key(module: str, plugin: str) -> str:
    """Return the hash for the cases of a module, compiled with a plugin."""
    files = reachable(_file(module))
    for name in GATE:
        files |= reachable(_file(f"tests.aot.{name}"), without=_file("tests.aot.cases"))
    files |= {ROOT / "tests" / "aot" / f"{plugin}.txt", *(LIBRARY / "runtime" / "tuned").glob("*.json")}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(code_of(file))
    return digest.hexdigest()


@functools.cache
def code_of(file: Path) -> bytes:
    """Return a hash of a file: for Python, of the code without docstrings and comments; otherwise, of all bytes."""
    contents = file.read_bytes()
    if file.suffix == ".py":
        tree = ast.parse(contents)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [part for part in node.body if not _is_string(part)] or [ast.Pass()]
        contents = ast.dump(tree).encode()
    return hashlib.sha256(contents).digest()


def _is_string(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or a string below a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def reachable(start: Path, without: Path | None = None) -> set[Path]:
    """Return the files of this repository that a file imports, directly or indirectly, and the file itself."""
    found, left = set(), [start]
    while left:
        file = left.pop()
        if file not in found and file != without:
            found.add(file)
            left += neighbours(file)
    return found


@functools.cache
def neighbours(file: Path) -> frozenset[Path]:
    """Return the files of this repository that a file imports directly."""
    if file == LIBRARY / "__init__.py":
        files = (*LIBRARY.glob("*.py"), *(LIBRARY / "runtime").glob("*.py"))
        return frozenset(file for file in files if file.stem not in OVERVIEWS)
    tree = ast.parse(file.read_text())
    found = {_file(module) for module in _imports(tree, file)}
    if LIBRARY / "__init__.py" in found and file.parent not in (LIBRARY, LIBRARY / "runtime"):
        named = {_word(node) for node in ast.walk(tree)}
        found |= {file for file in OPS.glob("*/__init__.py") if file.parent.name in named}
    if file.parent.parent == OPS and file.name == "__init__.py":
        found |= set(file.parent.glob("*.py"))
    return frozenset(found)


def _word(node: ast.AST) -> str:
    """Return the last component of the name that a node refers to; empty if it has no name."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) | ast.Constant(value=str(word)):
            return word.rpartition(".")[2]
    return ""


def _imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Yield the imported modules of this repository.

    `from package import name` yields the package, and also `package.name` if it is a module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                candidates = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                candidates = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.ImportFrom():
                raise ValueError(f"{file}: relative imports are not supported")
            case _:
                continue
        for module in candidates:
            # `import a.b` also runs the `__init__` of a. It is not a dependency unless the file imports names from it.
            if module.partition(".")[0] in PACKAGES and _exists(module):
                yield module


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")
