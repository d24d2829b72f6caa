"""What results of measurements and of training carry, to be traced to what produced them."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("sparrow-sglang", "sglang", "torch", "triton", "flashinfer-python", "transformers")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Commit of the working tree; SPARROW_COMMIT where the tree travels without its history."""
    # Installed, this file may lie within another project's working tree.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is not None:
        commit = _git("describe", "--always", "--dirty", "--abbrev=12")
        if commit is not None:
            return commit
    return os.environ.get("SPARROW_COMMIT", "unknown")


def _git(*words: str) -> str | None:
    """What git says of this file's folder; None if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance() -> dict[str, Any]:
    """Device, versions, commit and command of this process."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device or platform.machine(),
        "python": platform.python_version(),
        "packages": {package: _installed(package) for package in _PACKAGES},
        "commit": _commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
