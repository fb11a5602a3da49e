"""The option --mesh: the devices that run each step together."""

from __future__ import annotations

import argparse

from jax.sharding import Mesh

from pallas_attn.models.cli.command_line import UsageError, decimal
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.decoder import make_mesh


def add_mesh(group: argparse._ActionsContainer) -> None:
    """Add the option."""
    group.add_argument(
        "--mesh",
        type=str,
        metavar="AXIS=N[,AXIS=N...]",
        help="run each step on several devices: tensor=N splits heads, hidden columns and vocabulary over N devices;"
        " data=N makes N ranks, which have separate requests and pages and divide the experts; context=N splits the"
        " tokens of every page over N devices; expert=N splits whole experts over N of the devices of tensor and data"
        " (default: one device)",
    )


def parse_mesh(given: str | None) -> dict[str, int] | None:
    """Parse the value of --mesh. Return the number of devices along each axis; None without the option.

    Raises:
      UsageError: the value is not of the form AXIS=N[,AXIS=N...], a size is not a positive integer, or an axis is
        repeated.
    """
    if given is None:
        return None
    sizes: dict[str, int] = {}
    for entry in given.split(","):
        axis, equals, size = (part.strip() for part in entry.partition("="))
        if not equals:
            raise UsageError(f"--mesh: expected AXIS=N, separated by commas, got {entry!r}")
        if not (count := decimal(size)):
            raise UsageError(f"--mesh: expected a positive number of devices along {axis}, got {shown(size)}")
        if axis in sizes:
            raise UsageError(f"--mesh: expected each axis once, got {axis} again")
        sizes[axis] = count
    return sizes


def mesh_of(sizes: dict[str, int] | None) -> Mesh | None:
    """Make the mesh with these sizes; None for one device. Raises the errors of `make_mesh`."""
    return None if sizes is None else make_mesh(sizes)
