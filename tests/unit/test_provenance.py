"""The commit and the command that results record."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow_sglang import provenance
from sparrow_sglang.commands import cli


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit, that holds a copy of the module but does not track it."""
    monkeypatch.delenv("SPARROW_COMMIT", raising=False)
    shutil.copy(provenance.__file__, tmp_path / "provenance.py")
    (tmp_path / "theirs").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "theirs")
    commit(tmp_path)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "c")


def test_the_commit_is_that_of_a_checkout(project: Path) -> None:
    git(project, "add", "provenance.py")
    commit(project)
    assert provenance.provenance()["commit"] == git(project, "rev-parse", "--short=12", "HEAD")
    (project / "theirs").write_text("changed")
    assert provenance.provenance()["commit"].endswith("-dirty")


def test_an_installed_copy_within_another_project_has_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.provenance()["commit"] == "unknown"
    monkeypatch.setenv("SPARROW_COMMIT", "0123abc")
    assert provenance.provenance()["commit"] == "0123abc"


@pytest.mark.parametrize(
    ("program", "named"),
    [("/opt/bin/sparrow", "sparrow"), (cli.__file__, "sparrow"), ("mine/cli.py", "cli.py")],
)
def test_the_command_is_what_a_user_types(
    program: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m`, by which `sparrow bench all` runs its parts, names the file of the module."""
    monkeypatch.setattr(sys, "argv", [program, "bench", "step", "--out", "a b.json"])
    assert provenance.provenance()["command"] == f"{named} bench step --out 'a b.json'"
