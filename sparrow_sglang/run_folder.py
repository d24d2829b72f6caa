"""The folder of a training run: names of its files, and how to read them. `rl` writes them,
`report` reads them."""

import json
from pathlib import Path
from typing import Any

from sparrow_sglang.json_values import read_object

METRICS_FILE = "metrics.jsonl"
RESPONSES_FILE = "responses.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
RUN_FILE = "run.json"

# Metrics that a run's log and its report both name.
ENTROPY = "actor/entropy"
REWARD = "critic/score/mean"
TAIL = "sparrow/accept_p05"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file. A last row that a killed run left incomplete is dropped."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts noted in a run.json, if there is one. Raises `ValueError` on other content."""
    if not path.exists():
        return []
    form = 'an object {"starts": [...]} with step and config of each'
    starts = read_object(path, form).get("starts")
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and {"step", "config"} <= start.keys() for start in starts
    ):
        raise ValueError(f"{path}: is damaged; expected {form}")
    return starts
