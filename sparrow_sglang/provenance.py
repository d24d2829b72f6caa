"""Provenance of the results of measurements and training: device, versions, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("sparrow-sglang", "sglang", "torch", "triton", "flashinfer-python", "transformers")
_CLI = Path(__file__).parent / "commands" / "cli.py"


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on; None for those that are not installed."""
    return {package: package_version(package) for package in _PACKAGES}


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit_of(file: Path) -> str | None:
    """Commit of the working tree that tracks `file`; None without one, and without git."""
    # A file that is installed or copied may lie within another project's working tree.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def device_name() -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return device or platform.machine()


def provenance(device: str | None = None) -> dict[str, Any]:
    """Device, versions, commit and command of this process; `device` may be one that it uses. The
    commit is SPARROW_COMMIT where the working tree travels without its history."""
    program = Path(sys.argv[0])
    # `python -m sparrow_sglang.commands.cli` is the command `sparrow` of this interpreter.
    name = "sparrow" if program == _CLI else program.name
    return {
        "device": device or device_name(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": commit_of(Path(__file__)) or os.environ.get("SPARROW_COMMIT", "unknown"),
        "command": shlex.join([name, *sys.argv[1:]]),
    }
