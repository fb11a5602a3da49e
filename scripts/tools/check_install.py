"""Check an installed wheel: `.venv-dist/engine/bin/python -I scripts/tools/check_install.py engine`.

Run it with the Python of an environment in which only the wheel and one of its extras are installed ("core": no extra).
It runs the example of README.md and the command, and prints the number of packages and their size as a row of a
Markdown table. It uses the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITH_ENGINE = ("engine", "all")

MODULES = {
    "core": ["pallas_attn.cache", "pallas_attn.parallel"],
    "engine": ["pallas_attn.models.cli.decode.command"],
    "plot": ["matplotlib.figure"],
    "triton": ["pallas_attn.ops.paged_decode.triton"],
}
MODULES["all"] = [name for names in MODULES.values() for name in names]
"""Modules that must be importable with each extra."""


def run(*command: str | Path, status: int = 0) -> str:
    """Run a command and return its standard output, or its standard error if `status` is not 0.

    Raises:
      RuntimeError: the command has another exit status than `status`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != status:
        raise RuntimeError(
            f"{' '.join(map(str, command))}: expected exit status {status}, got {result.returncode}\n"
            f"{result.stdout}{result.stderr}"
        )
    return result.stderr if status else result.stdout


def expect(what: str, expected: str, got: str) -> None:
    """Raise RuntimeError unless `got` contains `expected`."""
    if expected not in got:
        raise RuntimeError(f"{what}: expected {expected!r}, got {got!r}")


def size() -> tuple[int, int]:
    """Return the number of installed packages, and the bytes of their files without cached bytecode."""
    packages = Path(sysconfig.get_path("purelib"))
    files = (path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return len(list(importlib.metadata.distributions())), sum(path.stat().st_size for path in files)


def check_names() -> None:
    """Check that the wheel installs `pallas_attn`, its metadata and the command only."""
    names = {file.parts[0] for file in importlib.metadata.files("pallas_attn") or ()}
    metadata = f"pallas_attn-{importlib.metadata.version('pallas_attn')}.dist-info"
    if names - {"..", metadata} != {"pallas_attn"}:
        raise RuntimeError(f"top-level names: expected pallas_attn only, got {', '.join(sorted(names))}")


def check_imports(extra: str) -> None:
    """Import the modules of an extra, and check that no module comes from the checkout."""
    for name in MODULES[extra]:
        importlib.import_module(name)
    prefixes = (sys.prefix, sys.base_prefix)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file is not None and file.startswith(str(ROOT)) and not file.startswith(prefixes):
            raise RuntimeError(f"{name}: expected a module of the environment, got {file}")


def check_command(extra: str) -> None:
    """Run the command: the report, and a small batch of prompts. Missing extras must be reported in one line."""
    command = Path(sysconfig.get_path("scripts")) / "pallas-attn"
    expect("pallas-attn", "\npaged_decode ", run(command))
    expect("pallas-attn --version", importlib.metadata.version("pallas_attn"), run(command, "--version"))
    if extra not in WITH_ENGINE:
        printed = run(command, "decode", status=2)
        expect("pallas-attn decode", "pip install 'pallas_attn[engine]'\n", printed)
        if printed.count("\n") != 1:
            raise RuntimeError(f"pallas-attn decode: expected an error of one line, got {printed!r}")
        return
    plot = Path("plot.png")
    if extra == "all":
        expect("pallas-attn decode", "\n", run(command, "decode", "--max-tokens", "4", "--plot", plot))
        plot.unlink()  # raises FileNotFoundError if there is no plot
    else:
        expect("pallas-attn decode", "\n", run(command, "decode", "--max-tokens", "4"))
        expect("--plot", "pip install 'pallas_attn[plot]'\n", run(command, "decode", "--plot", plot, status=2))


def main(extra: str) -> int:
    """Check an installation with an extra and print its row of the table. Return the exit status."""
    packages, num_bytes = size()
    check_names()
    check_imports(extra)
    run(sys.executable, "-I", ROOT / "scripts" / "tools" / "readme_example.py", ROOT / "README.md")
    check_command(extra)
    print(f"| `{extra}` | {packages} | {num_bytes / 1e6:.0f} MB |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
