"""Files and folders that appear under their name whole or not at all. A draft is filled beside its
target, flushed to the disk and renamed."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRAFT_PREFIX = ".draft-"


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Name `target` in an `OSError` of the block that names no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(target)
        raise


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path for the block to write a file or a folder to, which then replaces `target`. The folder
    of `target` is created if needed. If the block or the renaming raises, `target` is unchanged and
    the draft is deleted. Several processes may write the same target; the last one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        naming(target),
        tempfile.TemporaryDirectory(prefix=DRAFT_PREFIX, dir=target.parent) as folder,
    ):
        draft = Path(folder) / target.name
        yield draft
        for path in (*draft.rglob("*"), draft):
            _flush(path)
        # A folder cannot be renamed over another. The old one is deleted with the draft's folder,
        # after the renaming: a process that is killed while it deletes leaves the new one.
        old = Path(folder) / f"{DRAFT_PREFIX}old"
        if draft.is_dir():
            with suppress(FileNotFoundError):
                os.replace(target, old)
        try:
            os.replace(draft, target)
        except OSError:
            if old.exists():
                os.replace(old, target)
            raise
        _flush(target.parent)


def delete_drafts(folder: Path) -> None:
    """Delete what killed processes left half written in `folder`, while no process writes there."""
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        shutil.rmtree(draft, ignore_errors=True)


def write_text(target: Path, content: str) -> None:
    with replacing(target) as draft:
        draft.write_text(content, "utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write indented JSON. Raises `OSError`."""
    write_text(target, json.dumps(value, indent=1) + "\n")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
