"""Wheel and sdist hold everything, and what the wheel installs runs, or says what it lacks."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from programs import run

from sparrow_sglang.commands.cli import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = {
    "sparrow_sglang": "sparrow_sglang",
    "attention_backends": "sparrow_sglang/attention_backends",
    "benchmarks": "sparrow_sglang/benchmarks",
    "rl": "sparrow_sglang/rl",
}
# Build with the setuptools that is installed here, so that nothing is downloaded.
LOCAL_BUILD = ("--offline", "--no-build-isolation", "--python", sys.executable)
CALLED = """
import sparrow_sglang
from importlib.resources import files
from sparrow_sglang.schedules.names import load_schedule
print(sparrow_sglang.__file__)
print(load_schedule("qwen3-4b-0.86", 16).budget_at(1))
print("<html" in (files(sparrow_sglang) / "report" / "page.html.j2").read_text())
for name in sparrow_sglang.__all__:
    getattr(sparrow_sglang, name)
"""


def uv() -> str:
    """The uv that tools/bootstrap.sh has noted, or else the one on the PATH."""
    noted = Path(sys.prefix) / ".uv"
    # The noted path is relative to the repository if the script has installed uv there.
    found = shutil.which(ROOT / noted.read_text().strip() if noted.exists() else "uv")
    if found is None:
        pytest.skip("uv is not installed")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, as setuptools leaves build folders in the tree."""
    source = tmp_path_factory.mktemp("source") / "sparrow"
    left = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    return source


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """Folder of wheel and sdist; the wheel is built from the sdist."""
    run(uv(), "build", *LOCAL_BUILD, "--out-dir", source / "dist", source, cwd=source)
    return source / "dist"


def shipped() -> set[str]:
    """Every module and every data file that code reads, by its path in the package."""
    wanted = (
        "*.py",
        "schedules/*.json",
        "planning/*.json",
        "*.j2",
        "models/*/config.json",
        "distill.toml",
        "prompts.jsonl",
        "py.typed",
    )
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for pattern in wanted
        for path in (ROOT / folder).rglob(pattern)
    }


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def test_the_wheel_holds_everything_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == shipped()
    assert len([name for name in names if name.startswith("sparrow_sglang/schedules/q")]) == 26


def test_the_sdist_holds_what_the_pages_and_the_tests_refer_to(dist: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in ("tests", "docs", "examples", "tools", "rl", "benchmarks/results"):
        files = [f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix != ".pyc"]
        assert {f.relative_to(ROOT).as_posix() for f in files} <= names
    assert {"Makefile", "constraints.txt", "CHANGELOG.md"} <= names


def test_in_an_empty_environment_commands_say_what_is_missing(dist: Path, tmp_path: Path) -> None:
    run(uv(), "venv", "--offline", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    options = ("--offline", "--no-deps", "--python", python)
    run(uv(), "pip", "install", *options, only(dist, "*.whl"))
    here = {"cwd": tmp_path, "env": {"PATH": os.environ["PATH"]}}
    printed = run(python, "-c", "import sparrow_sglang as s; print(s.__version__)", **here)
    assert printed.strip() == PROJECT["version"]
    sparrow = python.with_name("sparrow")
    assert "sparrow COMMAND --help" in run(sparrow, "--help", **here)
    for command in ("serve", "doctor", *COMMANDS):
        done = subprocess.run([sparrow, command], capture_output=True, text=True, **here)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"sparrow {command}: error: the package " in done.stderr
        assert "is not installed; pip install sparrow-sglang" in done.stderr


def test_what_the_wheel_installs_runs(dist: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ("--offline", "--no-deps", "--python", sys.executable, "--target", target)
    run(uv(), "pip", "install", *options, only(dist, "*.whl"))
    # Its dependencies come from this environment, everything of ours from the wheel.
    here = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(target)}}
    place, budget, page = run(sys.executable, "-c", CALLED, **here).split()
    assert Path(place).is_relative_to(target)
    assert (budget, page) == ("512", "True")
    said = run(sys.executable, target / "bin" / "sparrow", "--version", **here)
    assert said.strip() == PROJECT["version"]


def test_a_clone_without_symbolic_links_is_refused_in_one_line(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "-c", "core.symlinks=false", "clone", "-q", "--depth", "1", f"file://{ROOT}", clone)
    build = [uv(), "build", *LOCAL_BUILD, "--wheel", "--out-dir", tmp_path / "dist", clone]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and not list(tmp_path.glob("dist/*.whl"))
    lines = [line for line in done.stderr.splitlines() if "symbolic links" in line]
    assert len(lines) == 1 and "sparrow_sglang/attention_backends" in lines[0]
