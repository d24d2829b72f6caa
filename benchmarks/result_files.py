"""Result files that are committed in this checkout."""

import json
from pathlib import Path

from sparrow_sglang.report.result_files import Run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")


class ResultError(ValueError):
    """A result cannot be used; the message names the file and what is allowed."""


def load_runs(root: Path, key: str) -> list[Run]:
    """Result files under `root` whose rows have `key`, by path; sweeps of variants are left out.

    Raises `ResultError` on a file that is not JSON, or that lacks what a result carries.
    """
    runs = []
    for path in sorted((root / RESULTS).rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ResultError(
                f"{path}: not JSON ({error}); expected a benchmark's result"
            ) from None
        rows = content.get("rows") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not rows or key not in rows[0]:
            continue
        missing = {"device", "packages", "commit", "command"} - content.keys()
        if missing:
            raise ResultError(f"{path}: lacks {', '.join(sorted(missing))}; measure it again")
        if "--sweep" not in content["command"]:
            runs.append(Run(path.relative_to(root).as_posix(), content))
    return runs
