"""The files of a training run: metrics by step, events, its starts, the newest schedule."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow_sglang.report.page import ReportError
from sparrow_sglang.run_folder import EVENTS_FILE, METRICS_FILE, RUN_FILE, read_starts

Row = dict[str, float]


@dataclass(frozen=True)
class RunFiles:
    """Rows by step, events, starts as `rl.runs.run` records them, and the active schedule
    of the newest checkpoint."""

    rows: Sequence[Row]
    events: Sequence[dict[str, Any]]
    starts: Sequence[dict[str, Any]]
    schedule: str

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the newest start."""
        config: dict[str, Any] = self.starts[-1]["config"] if self.starts else {}
        return config

    @property
    def steps(self) -> list[Row]:
        """Rows of training steps, without rows of evaluations alone, such as the last one."""
        return [row for row in self.rows if "timing_s/step" in row]

    def has(self, name: str) -> bool:
        """Whether any row has the metric."""
        return any(name in row for row in self.rows)


def read_run(folder: Path) -> RunFiles:
    """The run in `folder`. Raises `ReportError` if it has no step yet, or a file is damaged."""
    rows: list[Row] = json_lines(folder / METRICS_FILE)
    try:
        starts = read_starts(folder / RUN_FILE)
    except ValueError as error:
        raise ReportError(str(error)) from None
    run = RunFiles(
        rows=sorted(rows, key=lambda row: row["step"]),
        events=json_lines(folder / EVENTS_FILE),
        starts=starts,
        schedule=_newest_state(folder).get("schedule", ""),
    )
    if not run.steps:
        raise ReportError(
            f"{folder / METRICS_FILE}: holds no training step yet; expected one or more"
        )
    return run


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, each with a step. A last row that a killed run cut is left out."""
    if not path.exists():
        return []
    rows = []
    for count, line in enumerate(path.read_text("utf-8", "replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ReportError(
                f'{path}:{count}: {line.strip()[:60]!r}: expected a JSON object with "step", as'
                " `sparrow train` writes it"
            )
        rows.append(row)
    return rows


def _newest_state(folder: Path) -> dict[str, Any]:
    states = sorted(
        folder.glob("checkpoints/step-*/state.json"),
        key=lambda path: int(path.parent.name.partition("-")[2]),
    )
    if not states:
        return {}
    try:
        state: dict[str, Any] = json.loads(states[-1].read_text("utf-8"))
    except ValueError as error:
        raise ReportError(
            f"{states[-1]}: not JSON ({error}); expected what `sparrow train` writes"
        ) from None
    return state
