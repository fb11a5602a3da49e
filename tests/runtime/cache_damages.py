"""Damages of a file of cached kernels.

Separate from `test_hostile_cache_folder`, which imports Mosaic: `test_cached_kernels` must not import it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pallas_attn.runtime import kernel_cache


def link_to_other_kernel(file: Path) -> None:
    """Replace the file by a symbolic link to a copy of it, which is a valid kernel of this user."""
    copy = file.parent.parent / f"copy-{file.name}"
    file.rename(copy)
    file.symlink_to(copy)


def with_right_digest(body: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        digest = hashlib.sha256(file.name.encode() + body).digest()
        file.unlink()
        file.write_bytes(kernel_cache.MAGIC + digest + body)
        file.chmod(0o600)

    return write


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


DAMAGES = {
    "FIFO": replaced_by(os.mkfifo),
    "link to endless file": replaced_by(lambda file: file.symlink_to("/dev/zero")),
    "link to itself": replaced_by(lambda file: file.symlink_to(file)),
    "link to nothing": replaced_by(lambda file: file.symlink_to("/nonexistent/file")),
    "link to kernel": link_to_other_kernel,
    "empty": lambda file: os.truncate(file, 0),
    "sparse file of a terabyte": lambda file: os.truncate(file, 2**40),
    "garbage": with_right_digest(b"garbage"),
    "no body": with_right_digest(b""),
    "zeros": with_right_digest(bytes(4096)),
    "random bytes": with_right_digest(np.random.default_rng(0).bytes(4096)),
}

UNREADABLE = ("garbage", "no body", "zeros", "random bytes")
"""Damages after which the file is complete, but JAX cannot deserialize it."""
