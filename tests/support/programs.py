"""Programs that tests run to their end."""

import subprocess
from pathlib import Path
from typing import Any


def run(*command: str | Path, timeout: float = 300, **options: Any) -> str:
    """What a program prints; fails with the ends of all that it printed unless it exits with 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout
