"""The command `pallas-attn`, also `python -m pallas_attn`. It runs a subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pallas_attn import __version__

COMMANDS = {
    "info": ("pallas_attn.info", "print the device and the implementations that run on it"),
    "decode": ("pallas_attn.models.cli.decode.command", "decode prompts with a model"),
    "serve": ("pallas_attn.models.cli.serve", "serve a model over HTTP, with the API of OpenAI"),
    "calibrate": ("pallas_attn.models.cli.calibrate", "compute static scales of a quantised KV cache"),
}
"""For each subcommand: a module, whose function `main(argv, prog)` returns the exit status, and a description."""

DEFAULT = "info"
WRONG_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first argument names, with the other arguments. Return its exit status.

    Without arguments, `info` runs. If a package that the subcommand needs is not installed, print one line and return
    `WRONG_INPUT`.

    Raises:
      SystemExit: the first argument is --help, --version or no subcommand.
    """
    prog = "python -m pallas_attn" if Path(sys.argv[0]).name == "__main__.py" else "pallas-attn"
    name, *options = (sys.argv[1:] if argv is None else argv) or [DEFAULT]
    if name not in COMMANDS:
        name = _parser(prog).parse_args([name]).command
    try:
        command = importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pallas_attn"):
            raise
        print(f"{prog} {name}: error: {error}", file=sys.stderr)
        return WRONG_INPUT
    return command.main(options, prog=f"{prog} {name}")


def _parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the first argument."""
    commands = "\n".join(f"  {name:10}  {description}" for name, (_, description) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [COMMAND [OPTION ...]]",
        description=f"commands (default: {DEFAULT}):\n{commands}",
        epilog=f"`{prog} COMMAND --help` describes a command and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs="?", choices=COMMANDS, default=DEFAULT, metavar="COMMAND", help=argparse.SUPPRESS
    )
    parser.add_argument("--version", action="version", version=f"pallas_attn {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
