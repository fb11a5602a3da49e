"""Tests of models/cli/output_files.py: an existing file stays complete until its replacement is complete, for any kind
of target and any failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_attn.models.cli.command_line import Failure, UsageError, check_outputs, writing
from pallas_attn.models.cli.output_files import is_replaced, output_file
from tests.scripts.command_lines import ROOT


def write(path: Path, content: bytes = b"new") -> None:
    with output_file(path) as file:
        file.write(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Return a context in which the process cannot write more than `size` bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    path.write_text("old")
    return path


def test_file_is_unchanged_until_its_replacement_is_complete(old: Path) -> None:
    with output_file(old) as file:
        file.write(b"new")
        file.flush()
        assert old.read_text() == "old"
    assert old.read_text() == "new"
    assert os.listdir(old.parent) == ["out.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_incomplete_file_leaves_nothing(old: Path, error: type[BaseException]) -> None:
    def write_half() -> None:
        with output_file(old) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert old.read_text() == "old"
    assert os.listdir(old.parent) == ["out.json"]


def test_full_disk_is_a_one_line_error_and_changes_nothing(old: Path) -> None:
    said = f"^--json: cannot write {old}: File too large$"
    with pytest.raises(Failure, match=said), full_disk(1000), writing("--json", old) as file:
        file.write(b"x" * 100_000)
    assert old.read_text() == "old"
    assert os.listdir(old.parent) == ["out.json"]


def test_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    for mask, wanted in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        path = tmp_path / f"{mask}"
        with umask(mask):
            write(path)
        assert mode(path) == wanted


def test_existing_file_keeps_its_permissions(old: Path) -> None:
    old.chmod(0o640)
    with umask(0o077):
        write(old)
    assert (old.read_text(), mode(old)) == ("new", 0o640)


@pytest.mark.parametrize("before", [None, 0o644, 0o400])
def test_private_file_is_readable_by_its_owner_only(tmp_path: Path, before: int | None) -> None:
    """A private file has mode 0600, also while it is written, and if it replaces a file with other permissions."""
    path = tmp_path / "cache"
    if before is not None:
        path.write_text("old")
        path.chmod(before)
    with umask(0o000), output_file(path, private=True) as file:
        file.write(b"new")
        [draft] = [entry for entry in tmp_path.iterdir() if entry != path]
        assert mode(draft) == 0o600
    assert (path.read_text(), mode(path)) == ("new", 0o600)


def test_link_stays_and_its_target_is_replaced(old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "first").symlink_to(old)
    (folder / "second").symlink_to("first")
    (folder / "to nothing").symlink_to("made")
    write(folder / "second")
    write(folder / "to nothing")
    assert (old.read_text(), (folder / "made").read_text()) == ("new", "new")
    assert sorted(os.listdir(folder)) == ["first", "made", "second", "to nothing"]
    assert all((folder / name).is_symlink() for name in ("first", "second", "to nothing"))


def test_pipe_is_written_in_place(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    assert not is_replaced(path)
    write(path)
    reader.join()
    assert read == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_devices_are_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    write(tmp_path / "null")
    write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    said = "^--json: cannot write /dev/full: No space left on device$"
    with pytest.raises(Failure, match=said), writing("--json", Path("/dev/full")) as file:
        file.write(b"new")


def test_file_of_standard_output_also_gets_later_output(tmp_path: Path, capfd) -> None:
    with capfd.disabled():
        terminal, path = os.dup(1), tmp_path / "stdout"
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        try:
            os.write(1, b"before ")
            assert not is_replaced(Path("/dev/stdout"))
            write(Path("/dev/stdout"), b"report ")
            write(path, b"again ")
            os.write(1, b"after")
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
    assert path.read_bytes() == b"before report again after"


def test_unwritable_paths_are_errors_beforehand(tmp_path: Path) -> None:
    def refusal(*paths: Path) -> str:
        with pytest.raises(UsageError) as raised:
            check_outputs({f"--{i}": path for i, path in enumerate(paths)})
        return str(raised.value)

    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "around").symlink_to("around")
    (tmp_path / "loose").symlink_to("none/out")
    assert refusal(folder) == f"--0: cannot write {folder}: it is a directory"
    assert refusal(tmp_path / "none" / "out").endswith(f": there is no directory {tmp_path / 'none'}")
    assert refusal(tmp_path / "loose").endswith(f": there is no directory {tmp_path / 'none'}")
    assert refusal(tmp_path / "around").endswith(": Too many levels of symbolic links")
    assert refusal(tmp_path / ("x" * 300)).endswith(": File name too long")
    assert refusal(Path("/dev/null/out")).endswith(": Not a directory")
    both = tmp_path / "both"
    assert refusal(both, folder / ".." / "both") == f"--1: cannot write {folder}/../both: --0 does"
    check_outputs({"--0": Path("/dev/null"), "--1": Path("/dev/null"), "--2": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # also forbids root to write
        assert refusal(both) == f"--0: cannot write {both}: permission denied"


WRITES = re.compile(r"""\.write_text\(|\.write_bytes\(|\bopen\([^)]*["'][wax]b?["']|\bsave_file\(|savefig\(\w*path""")


def test_every_command_writes_files_with_output_file() -> None:
    """Commands write files with `output_file`. Exceptions are its implementation, and tools that
    write into new folders.
    """
    tools = {
        f"scripts/tools/{name}.py"
        for name in ("make_goldens", "make_tokenizer_goldens", "rope_goldens", "tokenizer_layouts", "wide_latents")
    }
    own = {"models/cli/output_files.py", *tools}
    paths = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "models" / "cli").rglob("*.py")]
    files = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    assert own == {name for name, source in files.items() if WRITES.search(source)}


def test_block_device_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.stat_result((stat.S_IFBLK | 0o666, *os.stat("/dev/null")[1:]))
    monkeypatch.setattr(os, "stat", lambda path, **_: found)
    with pytest.raises(OSError, match="neither a regular file nor a pipe nor a character device"):
        write(Path("/dev/disk"))
