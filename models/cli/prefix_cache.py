"""The file of --prefix-cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from pallas_attn.models.cli.command_line import as_failure, as_usage_error, writing
from pallas_attn.models.engine import CachedPages, Engine


def load_prefixes(engine: Engine, path: Path) -> None:
    """Load the pages of a file into the engine's prefix cache, if the file exists. Raise UsageError if this is not
    possible."""
    if not os.path.lexists(path):
        return
    with (
        as_usage_error(OSError, prefix=f"--prefix-cache: cannot read {path}: "),
        as_usage_error(ValueError, MemoryError, jax.errors.JaxRuntimeError, prefix=f"--prefix-cache: {path}: "),
    ):
        if not path.is_file():
            raise ValueError("not a regular file")
        engine.import_pages(CachedPages.from_bytes(path.read_bytes()))


def save_prefixes(engine: Engine, path: Path) -> None:
    """Write the pages of the engine's prefix cache to a file. Raise Failure if this is not possible."""
    with as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="--prefix-cache: "):
        pages = engine.export_prefix_cache().to_bytes()
        with writing("--prefix-cache", path, private=True) as file:  # has tokens and salts
            file.write(pages)
