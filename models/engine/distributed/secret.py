"""The secret that the processes of one engine share."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

VARIABLE = "PALLAS_ATTN_SECRET"
"""Environment variable with the secret, for processes that do not have the same file, such as on several hosts."""

MIN_BYTES = 16
"""Minimum length of a secret in bytes."""


class SecretError(ValueError):
    """There is no usable secret. The message gives the reason."""


def shared_secret() -> bytes:
    """Return the secret in the environment variable `PALLAS_ATTN_SECRET`. If it is not set, read this user's file.

    The file is `pallas_attn/secret` in `$XDG_CONFIG_HOME` or `~/.config`. If it does not exist, it is created with a
    random secret and mode 0600. Processes with the same configuration folder therefore have the same secret.

    Raises:
      SecretError: the secret is shorter than `MIN_BYTES`; or the file cannot be created or read, is not a regular file
        of this user, or can be accessed by other users.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        if len(given.encode()) < MIN_BYTES:
            raise SecretError(f"{VARIABLE}: expected at least {MIN_BYTES} bytes, got {len(given.encode())}")
        return given.encode()
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pallas_attn"
    try:
        return _read(folder / "secret") or _create(folder / "secret")
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise SecretError(
            f"no secret for the processes ({reason}); set {VARIABLE} to the same value in all processes"
        ) from error


def _read(path: Path) -> bytes | None:
    """Return the secret in a file, or None if the file does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise SecretError(f"{path}: expected a file that only its owner, this user, can read (chmod 600)")
        secret = file.read(4096).strip()
    if len(secret) < MIN_BYTES:
        raise SecretError(f"{path}: expected at least {MIN_BYTES} bytes, got {len(secret)}; remove the file")
    return secret


def _create(path: Path) -> bytes:
    """Create the file, unless another process has just created it. Return the secret in the file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # atomic: the file has its whole content, and an existing file is not replaced
    finally:
        os.unlink(temporary)
    secret = _read(path)
    if secret is None:
        raise SecretError(f"{path}: was removed while it was created")
    return secret
