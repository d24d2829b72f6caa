"""What every benchmark result carries, so that a number can be traced to what produced it."""

import json
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
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return (
        git.stdout.strip() if git.returncode == 0 else os.environ.get("SPARROW_COMMIT", "unknown")
    )


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


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def copy_bandwidth(gib: float = 4.0, repeats: int = 20) -> float:
    """Device-to-device copy bandwidth in bytes/s, bytes read plus bytes written."""
    import torch

    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / sorted(times[3:])[repeats // 2]
