"""Cache of compiled XLA programs on disk, used by the command line and by `LLM`.

`enable_compilation_cache` turns on JAX's persistent compilation cache with a folder of this user, so that a second
process loads the programs of the engine instead of compiling them. The setting applies to the whole process, including
programs of other code. `import pallas_attn` does not change it.

JAX executes the programs in the folder. Therefore the folder and its files must belong to this user or to root, other
users must not be able to write to the folder or to replace it, and a new folder has mode 0700. Parent folders may be
writable for the user's private group.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import warnings
from pathlib import Path

import jax

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_COMPILATION_CACHE"
"""Variable that names the folder, or is "off"."""

OFF = "off"
"""Value of the variable, and of --compilation-cache, that disables the cache."""

MAX_BYTES = 8 * 2**30
"""Maximum size of the folder. JAX then deletes the programs that were not used for the longest time."""

_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # JAX's default of 1 s would skip small programs
    "jax_compilation_cache_max_size": MAX_BYTES,
}
"""JAX settings of the cache. A setting with an environment variable of this name in upper case is not changed."""


def default_folder() -> Path:
    """Return the default folder: `pallas_attn/xla` in $XDG_CACHE_HOME or, without this variable, in ~/.cache.

    Raises:
      RuntimeError: the home folder is unknown.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # the XDG standard ignores relative paths
    return cache / "pallas_attn" / "xla"


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Use a folder as JAX's persistent compilation cache in this process, before the first program is compiled.

    In order of precedence, the folder is:

    1. the current value of `jax_compilation_cache_dir`, which JAX_COMPILATION_CACHE_DIR or the application has set; no
       setting is changed then;
    2. the argument `folder`;
    3. the environment variable PALLAS_ATTN_COMPILATION_CACHE;
    4. `default_folder()`.

    If the folder cannot be used, the function emits a warning with the reason, and programs are not cached. This
    happens if the folder cannot be created or written, if it or one of its files belongs to another user, or if other
    users can write to it or replace it.

    The cache also stores lowered kernels, in the subfolder `pallas_attn_kernels`.

    Args:
      folder: the folder, which is created if it does not exist; "off" for no cache; None for the default.

    Returns:
      The folder; None without a cache.

    Example:
      >>> enable_compilation_cache("off") is None
      True
    """
    current = jax.config.jax_compilation_cache_dir
    if current:
        return Path(current)
    chosen = folder or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if str(chosen) == OFF:
        return None
    try:
        path = Path(os.path.realpath(chosen or default_folder()))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trusted(path)
    except (OSError, RuntimeError, _Untrusted) as error:
        name = "" if isinstance(error, _Untrusted) else f"cannot use {chosen or 'the default folder'}: "
        reason = f"{name}{getattr(error, 'strerror', None) or error}"
        warnings.warn(f"pallas_attn: compiled programs are not cached: {reason}", stacklevel=2)
        return None
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path


class _Untrusted(Exception):
    """The programs in a folder must not be executed, or none can be stored. The message has the reason."""


def _check_trusted(folder: Path) -> None:
    """Check that only this user and root can change the programs in a folder, and that the folder can be written.

    Args:
      folder: an existing folder, without symbolic links in its path.

    Raises:
      _Untrusted: the check failed.
      OSError: the folder or its parents cannot be read.
    """
    status = os.stat(folder)
    # JAX creates files with the permissions of the umask, which may let a group write them.
    if not _is_ours(status) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _Untrusted(
            f"other users own {folder} or can access it; expected a folder of this user without permissions for others"
            f" (chmod 700 {folder})"
        )
    for parent in folder.parents:
        status = os.stat(parent)
        others_write = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
        )
        if not _is_ours(status) or (others_write and not status.st_mode & stat.S_ISVTX):  # the sticky bit: no renaming
            raise _Untrusted(f"other users can replace {folder}, because they own {parent} or can write it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _Untrusted(f"{folder} cannot be written")
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process may delete it
                if not _is_ours(entry.stat(follow_symlinks=False)) or entry.is_symlink():
                    raise _Untrusted(f"{entry.path} is a symbolic link or belongs to another user; delete it")


def _is_private(group_id: int) -> bool:
    """Return whether only this user is in a group: the primary group of the user with the user's name. Many systems
    have one for each user, and a umask that lets it write."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and user.pw_name == group.gr_name and {*group.gr_mem} <= {user.pw_name}


def _is_ours(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root."""
    return status.st_uid in (os.geteuid(), 0)
