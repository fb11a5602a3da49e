"""Hash of everything on which the report of a case depends: reachable code and pinned compiler versions.

The hash is the key of cached reports (`gate.py`). Docstrings, comments and formatting do not change it.

The reachable code of a file is the file itself, the files of this repository that it imports (also inside functions),
and their reachable code. There are two special cases:

- `ops/<operation>/__init__.py` reaches all files of its folder, because implementations are imported by name.
- `import pallas_attn` would reach all operations. It reaches the modules directly in the package and in `runtime`, and
only the operations whose names occur in the importing file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pallas_attn", "scripts", "tests")
LIBRARY, OPS = ROOT / "pallas_attn", ROOT / "pallas_attn" / "ops"
OVERVIEWS = ("explain", "info", "__main__")
"""Modules of the library that import every operation. They do not affect compiled kernels and are left out."""
GATE = ("case", "compile", "device", "environment", "report", "sources")
"""Modules of the compile gate on which the report of every case depends."""


@functools.cache
def key(module: str, plugin: str) -> str:
    """Return the hash for the cases of a module (such as "tests.aot.decode") and a CUDA plugin."""
    files = reachable(_file(module))
    for name in GATE:
        files |= reachable(_file(f"tests.aot.{name}"), without=_file("tests.aot.cases"))
    return _hash(files | {ROOT / "tests" / "aot" / f"{plugin}.txt"})


@functools.cache
def triton_key() -> str:
    """Return the hash for the Triton cases, with the versions of triton, which has the compiler, and of jax."""
    files = reachable(_file("tests.aot.triton_cases")) | reachable(_file("tests.aot.triton_compile"))
    return _hash(files, *(f"{package} {metadata.version(package)}" for package in ("triton", "jax")))


def _hash(files: set[Path], *words: str) -> str:
    """Return the hash of the code of files, of the tuned settings, and of words."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(f"{word}\n".encode())
    for file in sorted(files | {*(LIBRARY / "runtime" / "tuned").glob("*.json")}):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(code_of(file))
    return digest.hexdigest()


@functools.cache
def code_of(file: Path) -> bytes:
    """Return the hash of a file. For a Python file, docstrings and comments are left out."""
    contents = file.read_bytes()
    if file.suffix == ".py":
        tree = ast.parse(contents)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [part for part in node.body if not _is_string(part)] or [ast.Pass()]
        contents = ast.dump(tree).encode()
    return hashlib.sha256(contents).digest()


def _is_string(node: ast.stmt) -> bool:
    """Return whether a statement is a string, such as a docstring or the documentation of a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def reachable(start: Path, without: Path | None = None) -> set[Path]:
    """Return the reachable files of a file, see the module docstring. The file `without` is not followed."""
    found, left = set(), [start]
    while left:
        file = left.pop()
        if file not in found and file != without:
            found.add(file)
            left += neighbours(file)
    return found


@functools.cache
def neighbours(file: Path) -> frozenset[Path]:
    """Return the files that a file reaches directly."""
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
    """Return the name or string of a node, without the part before its last dot; "" for other nodes."""
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
            # `import a.b` also runs a/__init__.py. It counts as a dependency only if the file imports names from it.
            if module.partition(".")[0] in PACKAGES and _exists(module):
                yield module


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")
    return file.resolve()  # pallas_attn/models is a link to models
