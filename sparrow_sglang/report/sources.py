"""Finding and reading what is reported on."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.run_folder import METRICS_FILE, REWARD, RUN_FILE, read_rows, read_starts

Row = Mapping[str, Any]
PASS_RATE = "eval/pass_rate"
GAP = f"{REWARD} - {PASS_RATE}"
_EXPECTED = (
    f"the {METRICS_FILE} of a training run, schedules with their evidence and checks by `sparrow"
    " calibrate`, files of `sparrow bench step`, or one of `sparrow bench rollout`"
)


class ReportError(InputError):
    """Something cannot be reported on; the message names the file and what is expected."""


@dataclass
class Sources:
    runs: list[Path] = field(default_factory=list)
    schedules: dict[Path, Row] = field(default_factory=dict)
    checks: dict[Path, Row] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def find_sources(paths: Sequence[Path]) -> Sources:
    """Everything in these files and folders, except in hidden folders. Raises `ReportError` if a
    path does not exist or nothing can be reported on."""
    sources = Sources()
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path}: no such file or folder; expected {_EXPECTED}")
        for file in _files(path):
            if file.name == METRICS_FILE:
                sources.runs.append(file.parent)
                continue
            try:
                content = json.loads(file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                sources.left_out.append(f"{file}: not JSON ({error}); expected {_EXPECTED}")
                continue
            if isinstance(content, dict) and {"budget_tokens", "bin_tokens"} <= content.keys():
                sources.schedules[file] = content
            elif isinstance(content, dict) and "checks" in content:
                sources.checks[file] = content
    if not (sources.runs or sources.schedules or sources.checks):
        nothing = f"{', '.join(map(str, paths))}: nothing to report on; looked for {_EXPECTED}"
        raise ReportError((sources.left_out or [nothing])[0])
    return sources


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        # Of a run they are large, and hold nothing to report.
        skipped = "checkpoints" if METRICS_FILE in names else ""
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != skipped)
        names = [name for name in names if name == METRICS_FILE or name.endswith(".json")]
        yield from (Path(folder, name) for name in sorted(names))


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors that a damaged file causes in the block into a `ReportError` that names it."""
    try:
        yield
    except ReportError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ReportError(f"{path}: {reason}; expected {_EXPECTED}") from None


@dataclass(frozen=True)
class Run:
    """A training run: rows of metrics by step, and its starts, as `rl.runs.run` records them."""

    folder: Path
    rows: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    @property
    def start(self) -> Row:
        return self.starts[-1] if self.starts else {}

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.start.get("config", {}))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of training steps, without those of evaluations alone."""
        return [row for row in self.rows if "timing_s/step" in row]

    @property
    def steps_done(self) -> int:
        return int(self.steps[-1]["step"]) + 1

    def cut(self, steps: int) -> "Run":
        """The run up to the evaluation after so many steps."""
        rows = [row for row in self.rows if row["step"] < steps]
        rate = self.curve(PASS_RATE).get(steps)
        if rate is not None:
            rows.append({"step": steps, PASS_RATE: rate})
        return replace(self, rows=rows)

    def curve(self, metric: str) -> dict[int, float]:
        """The metric by step. `GAP` is that of one policy: a step evaluates before it samples."""
        if metric == GAP:
            rewards, rates = self.curve(REWARD), self.curve(PASS_RATE)
            return {step: rewards[step] - rates[step] for step in rates if step in rewards}
        return {row["step"]: row[metric] for row in self.rows if metric in row}


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises `ReportError` if it has no step yet, or a file is damaged."""
    with reading(folder / RUN_FILE):
        starts = read_starts(folder / RUN_FILE)
    with reading(folder / METRICS_FILE):
        rows = dict[int, dict[str, Any]]()
        # An evaluation and the step that follows it have rows of their own.
        for row in read_rows(folder / METRICS_FILE):
            rows.setdefault(int(row["step"]), {}).update(row)
    run = Run(folder, [rows[step] for step in sorted(rows)], starts)
    if not run.steps:
        raise ReportError(f"{folder / METRICS_FILE}: holds no training step yet")
    return run
