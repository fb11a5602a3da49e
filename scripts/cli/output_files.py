"""Output files of all commands. A file is written beside its target and renamed, so that what was complete stays until
the next is: after a full disk, a crash or an interrupt, the target is what it was."""

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
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing; what is at `path` becomes it when the block ends without an exception.

    Links are followed to their file. A new file has the permissions that the umask leaves, an old one keeps its own.
    Pipes, character devices and the file that standard output or error goes to are written to as they are.

    Raises:
      OSError: it cannot be written.
    """
    check_output(path)
    found = _status(path)
    if found is not None and not _replaceable(found):
        with _open_in_place(path, found) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{secrets.token_hex(8)}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if found is not None:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)  # some file systems tell only now that they are full
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def is_replaced(path: Path) -> bool:
    """Whether writing makes or replaces a file, and so can be repeated; a pipe or device takes a report only once."""
    found = _status(path)
    return found is None or _replaceable(found)


def check_output(path: Path) -> None:
    """Raises OSError, whose strerror says why, if `output_file` cannot write there."""
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
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _replaceable(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and _standard_stream(found) is None


def _standard_stream(found: os.stat_result) -> int | None:
    """Descriptor of standard output or error, if that is this file: what is printed later has to go there, too."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(os.fstat(descriptor), found):
                return descriptor
    return None


def _open_in_place(path: Path, found: os.stat_result) -> BinaryIO:
    descriptor = _standard_stream(found)
    if descriptor is None:
        return open(path, "wb")
    sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")
