"""What results carry to be traced to what produced them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sparrow_sglang import provenance as record


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit, that holds a copy of the module but does not track it."""
    monkeypatch.delenv("SPARROW_COMMIT", raising=False)
    shutil.copy(record.__file__, tmp_path / "record.py")
    (tmp_path / "theirs").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "theirs")
    commit(tmp_path)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "c")


def test_the_commit_is_that_of_a_checkout(project: Path) -> None:
    git(project, "add", "record.py")
    commit(project)
    assert record.provenance()["commit"] == git(project, "rev-parse", "--short=12", "HEAD")
    (project / "theirs").write_text("changed")
    assert record.provenance()["commit"].endswith("-dirty")


def test_an_installed_copy_within_another_project_has_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record.provenance()["commit"] == "unknown"
    monkeypatch.setenv("SPARROW_COMMIT", "0123abc")
    assert record.provenance()["commit"] == "0123abc"
