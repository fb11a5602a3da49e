"""The mesh of --mesh."""

from __future__ import annotations

import argparse

from jax.sharding import Mesh

from models.decoder import make_mesh
from scripts.cli.command_line import UsageError


def add_mesh(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--mesh",
        type=str,
        metavar="AXIS=N[,AXIS=N...]",
        help="run each step on several devices: tensor=N splits heads, hidden widths and vocabulary over N; data=N"
        " makes N ranks with separate requests and pages, which share the experts; context=N splits the tokens of"
        " every page over N; expert=N splits whole experts over N of the devices of tensor and data (default: one"
        " device)",
    )


def parse_mesh(given: str | None) -> dict[str, int] | None:
    """Parse a value of --mesh: the number of devices along each axis; None for one device.

    Raises:
      UsageError: another form, a size that is not a positive integer, or a repeated axis.
    """
    if given is None:
        return None
    sizes: dict[str, int] = {}
    for entry in given.split(","):
        axis, equals, size = (part.strip() for part in entry.partition("="))
        if not equals:
            raise UsageError(f"--mesh: expected AXIS=N, separated by commas, got {entry!r}")
        if not (size.isascii() and size.isdecimal() and len(size) <= 9 and int(size)):
            raise UsageError(f"--mesh: expected a positive number of devices along {axis}, got {size!r}")
        if axis in sizes:
            raise UsageError(f"--mesh: expected each axis once, got {axis} again")
        sizes[axis] = int(size)
    return sizes


def mesh_of(sizes: dict[str, int] | None) -> Mesh | None:
    """Make the mesh. Raises ValueError or NotImplementedError like `make_mesh`."""
    return None if sizes is None else make_mesh(sizes)
