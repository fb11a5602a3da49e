"""Tests of the description of device, versions and commit in benchmark results (scripts/bench/harness/device.py)."""

import re
import subprocess

import pytest

from scripts.bench.harness import device

SHA = "0123456789abcdef0123456789abcdef01234567"


def git(root, *arguments):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def nobody_names_a_commit(monkeypatch):
    monkeypatch.delenv(device.COMMIT, raising=False)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a git repository with one commit, which has a source file and a benchmark result."""
    monkeypatch.setattr(device, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "kernel.py").write_text("fast = False\n")
    (tmp_path / "benchmarks" / "result.json").write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "A kernel")
    return tmp_path


def test_commit_of_the_tree(repository):
    assert device.commit() == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_kernel_makes_the_tree_dirty(repository):
    (repository / "kernel.py").write_text("fast = True\n")
    assert device.commit() == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": True}


def test_given_commit_overrides_git(repository, monkeypatch):
    monkeypatch.setenv(device.COMMIT, SHA)
    assert device.commit() == {"commit": SHA, "dirty": False}


def test_new_results_leave_the_tree_clean(repository):
    (repository / "benchmarks" / "result.json").write_text("[]\n")
    (repository / "new_result.json").write_text("[]\n")
    assert device.commit()["dirty"] is False


@pytest.mark.parametrize(
    ("given", "commit", "dirty"), [(None, None, None), (SHA, SHA, False), (f"{SHA}-dirty", SHA, True)]
)
def test_tree_without_git_uses_the_given_commit(tmp_path, monkeypatch, given, commit, dirty):
    monkeypatch.setattr(device, "ROOT", tmp_path)
    if given is not None:
        monkeypatch.setenv(device.COMMIT, given)
    assert device.commit() == {"commit": commit, "dirty": dirty}


def test_no_commit_without_the_git_program(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert device.commit() == {"commit": None, "dirty": None}


def test_a_broken_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "ROOT", tmp_path)
    (tmp_path / ".git").write_text("gitdir: /nonexistent\n")
    assert device.commit() == {"commit": None, "dirty": None}


def test_description_has_device_versions_and_commit():
    assert device.description().keys() == {"device", "driver", "versions", "commit", "dirty", "date"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", device.description()["date"])
