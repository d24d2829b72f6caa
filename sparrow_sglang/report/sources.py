"""Find the files in a folder that can be reported on.

In: a folder or one file. Out: paths by kind; JSON files are told apart by content, not by name.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow_sglang.calibration.work_folder import SETTINGS
from sparrow_sglang.report.page import ReportError
from sparrow_sglang.run_folder import METRICS_FILE

LOOKED_FOR = (
    f"the {METRICS_FILE} of a training run, schedules and checks of `sparrow calibrate` (*.json)"
)

# Folders of a run that are large, are meant for other tools, and hold nothing to report.
_CLOSED_FOLDERS = ("checkpoints", "tensorboard", "wandb")


@dataclass
class Sources:
    """JSON contents by path, and folders of training runs.

    `left_out` are reasons why a file cannot be used, `measuring` folders of calibrations that have
    not written their schedule there.
    """

    schedules: dict[Path, dict[str, Any]] = field(default_factory=dict)
    checks: dict[Path, dict[str, Any]] = field(default_factory=dict)
    runs: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    measuring: list[Path] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many things there are to report on."""
        return sum(map(len, (self.schedules, self.checks, self.runs)))


def find_sources(places: Sequence[Path]) -> Sources:
    """Everything in folders and their subfolders, except hidden ones, and in single files.

    Raises `ReportError` if a place does not exist, or holds nothing to report on.
    """
    found = Sources()
    for place in places:
        if not place.exists():
            raise ReportError(
                f"{place}: no such file or folder; expected {LOOKED_FOR}, or a folder with some"
            )
        before = found.count
        for path in _files(place, found):
            _classify(path, found)
        if found.count == before:
            raise ReportError(_nothing_in(place, found))
    return found


def _nothing_in(place: Path, found: Sources) -> str:
    if found.left_out:
        return found.left_out[0]
    message = f"{place}: nothing to report on; looked for {LOOKED_FOR}"
    if found.measuring:
        message += (
            f"; {found.measuring[0]} holds measurements of a calibration, whose schedule files are"
            " where its --out says, once it is done"
        )
    return message


def _files(place: Path, found: Sources) -> Iterator[Path]:
    if place.is_file():
        if place.name == METRICS_FILE:
            found.runs.append(place.parent)
        else:
            yield place
        return
    for folder, folders, names in os.walk(place):
        is_run = METRICS_FILE in names
        if is_run:
            found.runs.append(Path(folder))
        if SETTINGS in names and any(name.endswith(".parquet") for name in names):
            found.measuring.append(Path(folder))
        closed = _CLOSED_FOLDERS if is_run else ()
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in closed
        )
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".json"))


def _classify(path: Path, found: Sources) -> None:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        found.left_out.append(f"{path}: cannot be read as JSON ({error}); expected {LOOKED_FOR}")
        return
    if not isinstance(content, dict):
        return
    if "budget_tokens" in content and "bin_tokens" in content:
        found.schedules[path] = content
    elif "checks" in content:
        found.checks[path] = content
