"""Output files of all scripts.

The content is written to a temporary file next to the target, which is renamed to the target when it is complete.
Therefore an existing target is unchanged after a crash or an interrupt, or if the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def output_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. It replaces `path` when the block ends without an exception.

    Symbolic links are followed. A new file has the permissions that the umask gives; an existing file keeps its
    permissions. Pipes, character devices, and the files of standard output and standard error are opened directly.

    Args:
      path: the file.
      private: whether only the owner may read and write the file (mode 0600), also if `path` has other permissions. The
        mode is set before the first byte is written.

    Raises:
      OSError: the file cannot be written.
    """
    check_output(path)
    found = _status(path)
    if found is not None and not _replaceable(found):
        with _open_in_place(path, found) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{secrets.token_hex(8)}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if found is not None and not private:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)  # some file systems report a full disk only here
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def is_replaced(path: Path) -> bool:
    """Return whether `output_file` creates or replaces a file here, so that a file can be written twice. A pipe or
    device would receive both contents."""
    found = _status(path)
    return found is None or _replaceable(found)


def check_output(path: Path) -> None:
    """Raise OSError, with the reason in `strerror`, if `output_file` cannot write to this path."""
    found = _status(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if found is not None and not _replaceable(found):
        if not any(kind(found.st_mode) for kind in (stat.S_ISREG, stat.S_ISFIFO, stat.S_ISCHR)):
            raise OSError(errno.EINVAL, "it is neither a regular file nor a pipe nor a character device", str(path))
        return
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {folder}", str(path))
    if not os.access(folder, os.W_OK | os.X_OK) or (found is not None and not os.access(path, os.W_OK)):
        raise PermissionError(errno.EACCES, "permission denied", str(path))


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file, following links; None if it does not exist."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _replaceable(found: os.stat_result) -> bool:
    """Return whether an existing file can be replaced by another file."""
    return stat.S_ISREG(found.st_mode) and _standard_stream(found) is None


def _standard_stream(found: os.stat_result) -> int | None:
    """Return the descriptor of standard output or standard error if this file is one of them, else None. A file with a
    descriptor must not be replaced, because later output of the script goes to it, too."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the stream is closed
            if os.path.samestat(os.fstat(descriptor), found):
                return descriptor
    return None


def _open_in_place(path: Path, found: os.stat_result) -> BinaryIO:
    """Open a pipe, a character device, or the file of standard output or standard error for writing."""
    descriptor = _standard_stream(found)
    if descriptor is None:
        return open(path, "wb")
    sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")
