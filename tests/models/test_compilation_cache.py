"""Tests of the folder of compiled programs: which folder is used, which folders are refused, and a start without
compilation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_attn.models.checkpoints.weights import save_random_checkpoint
from pallas_attn.models.compilation_cache import ENVIRONMENT_VARIABLE, MAX_BYTES, enable_compilation_cache
from pallas_attn.models.llm import LLM
from tests.models import engine_case

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)
ROOT = Path(__file__).parents[2]
HITS, MISSES, REQUESTS = (
    f"/jax/compilation_cache/{name}" for name in ("cache_hits", "cache_misses", "compile_requests_use_cache")
)
"""Events of JAX: a program was loaded from the folder, was stored in the folder, and was requested."""


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without a cache in JAX's settings and environment, and restore the settings."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def enabled(folder: str | Path | None = None) -> Path | None:
    """Call the function, which must emit no warning, and check that JAX uses the folder that it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = enable_compilation_cache(folder)
    assert jax.config.jax_compilation_cache_dir == (None if result is None else str(result))
    return result


def refused(folder: Path, match: str) -> None:
    """Check that a folder is not used and that the warning has the reason."""
    with pytest.warns(UserWarning, match=match):
        assert enable_compilation_cache(folder) is None
    assert jax.config.jax_compilation_cache_dir is None


class TestFolder:
    def test_default_is_a_private_folder_in_the_cache_of_the_user(self, tmp_path: Path) -> None:
        assert enabled() == tmp_path / "cache" / "pallas_attn" / "xla"
        assert stat.S_IMODE((tmp_path / "cache" / "pallas_attn" / "xla").stat().st_mode) == 0o700
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
        assert jax.config.jax_compilation_cache_max_size == MAX_BYTES

    def test_home_folder_without_a_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for given in ("", "relative/folder"):
            monkeypatch.setenv("XDG_CACHE_HOME", given)
            jax.config.update("jax_compilation_cache_dir", None)
            assert enabled() == tmp_path / ".cache" / "pallas_attn" / "xla"

    def test_argument_precedes_the_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "variable"))
        assert enabled(tmp_path / "argument") == tmp_path / "argument"
        jax.config.update("jax_compilation_cache_dir", None)
        assert enabled() == tmp_path / "variable"

    def test_off(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert enabled("off") is None
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "off")
        assert enabled() is None
        assert not (tmp_path / "cache").exists()

    def test_folder_of_jax_is_not_changed(self, tmp_path: Path) -> None:
        before = [getattr(jax.config, name) for name in NAMES[1:]]
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
        for folder in (None, tmp_path / "other", "off"):
            assert enabled(folder) == tmp_path / "jax"
        assert [getattr(jax.config, name) for name in NAMES[1:]] == before
        assert [*tmp_path.iterdir()] == []

    def test_settings_of_the_environment_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jax.config.update(NAMES[1], 5.0)
        monkeypatch.setenv(NAMES[1].upper(), "5")
        assert enabled() is not None
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 5


def test_llm_uses_the_folder(tmp_path: Path) -> None:
    """`LLM` turns on the cache before it loads the model, and its folder is an argument."""
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(tmp_path, compilation_cache=tmp_path / "programs")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")


class TestHostileFolder:
    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720, 0o702])
    def test_folder_that_others_can_write(self, tmp_path: Path, mode: int) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        folder.chmod(mode)
        refused(folder, "other users own .*folder or can access it")

    def test_folder_of_another_user(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir(mode=0o700)
        user = os.geteuid() + 1
        if os.geteuid() == 0:
            os.chown(folder, 2, -1)
        with mock.patch.object(os, "geteuid", return_value=user):  # another user runs the process
            refused(folder, "other users own .*folder or can access it")

    @pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o1777, True), (0o757, False), (0o1775, True)])
    def test_parent_folder_in_which_others_can_rename(self, tmp_path: Path, mode: int, is_used: bool) -> None:
        parent = tmp_path / "parent"
        (parent / "folder").mkdir(parents=True)
        (parent / "folder").chmod(0o700)
        parent.chmod(mode)
        if is_used:
            assert enabled(parent / "folder") == parent / "folder"
        else:
            refused(parent / "folder", "other users can replace .*folder, because they own .*parent or can write it")

    @pytest.mark.parametrize(
        ("group", "members", "primary", "is_used"),
        [
            ("ada", [], True, True),
            ("ada", ["ada"], True, True),
            ("ada", ["ada", "eve"], True, False),
            ("staff", [], True, False),
            ("ada", [], False, False),
            (None, [], True, False),
        ],
    )
    def test_parent_folder_that_a_group_can_write(
        self, tmp_path: Path, group: str | None, members: list[str], primary: bool, is_used: bool
    ) -> None:
        """Only a group that has no other member may write."""
        parent = tmp_path / "parent"
        (parent / "folder").mkdir(mode=0o700, parents=True)
        parent.chmod(0o775)
        gid = parent.stat().st_gid
        user = mock.Mock(pw_name="ada", pw_gid=gid if primary else gid + 1)
        with mock.patch("pwd.getpwuid", return_value=user), mock.patch("grp.getgrgid") as getgrgid:
            getgrgid.return_value = mock.Mock(gr_mem=members, gr_name=group)
            if group is None:
                getgrgid.side_effect = KeyError(gid)
            if is_used:
                assert enabled(parent / "folder") == parent / "folder"
            else:
                refused(parent / "folder", "other users can replace .*folder, because they own .*parent or can write")

    def test_link_to_a_folder_that_others_can_write(self, tmp_path: Path) -> None:
        folder, link = tmp_path / "folder", tmp_path / "link"
        folder.mkdir()
        folder.chmod(0o777)
        link.symlink_to(folder)
        refused(link, "other users own .*folder or can access it")

    def test_link_in_the_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir(mode=0o700)
        (folder / "jit_step-00-cache").symlink_to("/dev/zero")
        refused(folder, "jit_step-00-cache is a symbolic link or belongs to another user")

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the owner of a file")
    def test_file_of_another_user_in_the_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir(mode=0o700)
        (folder / "jit_step-00-cache").write_bytes(b"")
        os.chown(folder / "jit_step-00-cache", 12345, -1)
        refused(folder, "jit_step-00-cache is a symbolic link or belongs to another user")

    def test_folder_that_cannot_be_created(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        refused(tmp_path / "file" / "folder", "cannot use .*folder: Not a directory")
        refused(tmp_path / "file", "cannot use .*file: File exists")


RUN = """
import collections, json, sys
from jax import monitoring
events = collections.Counter()
monitoring.register_event_listener(lambda event, **_: events.update([event]))
from pallas_attn.models.cli.decode.command import main
status = main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(events, file)
sys.exit(status)
"""


def run(folder: Path, tmp_path: Path, *more: Any) -> tuple[dict[str, int], str, str]:
    """Run run_decode in a new process with a cache in `folder`. Return the counts of JAX's events, and the output."""
    events, ids = tmp_path / "events.json", tmp_path / "ids.json"
    ids.write_text("[[1, 2, 3]]")
    flags = ["--model", tmp_path / "model", "--prompt-ids", ids, "--max-tokens", 4, "--implementation", "reference"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, events, *map(str, [*flags, "--compilation-cache", folder, *more])],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(events.read_text()), done.stdout, done.stderr


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Save a model with one layer, which compiles fast, as `run` expects it."""
    config = dataclasses.replace(engine_case.CONFIG, num_hidden_layers=1)
    save_random_checkpoint(tmp_path / "model", config)
    return tmp_path / "model"


@pytest.mark.usefixtures("model_folder")
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    """The first process stores every program, and the second one loads every program."""
    folder = tmp_path / "xla"
    cold, printed, said = run(folder, tmp_path)
    assert cold[MISSES] == cold[REQUESTS] > 2
    assert "run_decode: compiled 2 programs in " in said
    names = [path.name for path in folder.iterdir()]
    for program, number in {"forward": 2, "score_prompts": 1, "sample": 1}.items():
        assert sum(f"jit_{program}-" in name and name.endswith("-cache") for name in names) == number
    warm, printed_again, _ = run(folder, tmp_path, "--seed", 1)
    assert warm[HITS] == warm[REQUESTS] == cold[REQUESTS]
    assert MISSES not in warm
    assert printed_again == printed


@pytest.mark.slow
@pytest.mark.usefixtures("model_folder")
def test_damaged_programs_are_compiled_again(tmp_path: Path) -> None:
    folder = tmp_path / "xla"
    _, printed, _ = run(folder, tmp_path)
    for path in folder.glob("*-cache"):
        path.write_bytes(b"garbage")
    damaged, printed_again, said = run(folder, tmp_path)
    assert HITS not in damaged
    assert printed_again == printed
    assert "Error reading persistent compilation cache entry" in said


@pytest.mark.slow
@pytest.mark.usefixtures("model_folder")
def test_folder_that_others_can_write_is_not_used_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "xla"
    folder.mkdir()
    folder.chmod(0o777)
    events, _, said = run(folder, tmp_path)
    assert said.startswith("run_decode: warning: pallas_attn: compiled programs are not cached: other users own")
    assert MISSES not in events
    assert [*folder.iterdir()] == []
