"""The cache of the embedded model, and a fake conversion into it that takes no time."""

from pathlib import Path

from sparrow_sglang import models

MODEL = "smollm2-135m-instruct-0.1.2"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def write_files(gguf: Path, folder: Path, **_: object) -> None:
    """A fake conversion that writes all files at once."""
    folder.mkdir()
    for name in models.FILES:
        (folder / name).write_text("x")
