"""run.json: which software, device and settings each part of a run came from.

A run that is stopped and resumed has one entry per start, with the steps that it had taken by then.
Entries whose steps a later start took again are dropped, as their rows of metrics are.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import EngineConfig, TrainConfig

RUN_FILE = "run.json"


def record_start(config: TrainConfig, engine: EngineConfig, step: int) -> None:
    """Note in `config.run_dir` that a run starts, or goes on, after `step` steps.

    `engine` is the configured one with the schedule named that "auto" stands for.
    """
    resolved = config.model_copy(update={"engine": engine})
    start = {
        "step": step,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "config": resolved.model_dump(mode="json"),
    }
    path = config.run_dir / RUN_FILE
    earlier = [before for before in read_starts(path) if before["step"] < step]
    write_json(path, {"starts": [*earlier, start]})


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts noted in a run.json, in order; none if there is no such file.

    Raises `ValueError` if it holds something else.
    """
    if not path.exists():
        return []
    try:
        starts: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["starts"]
        sound = all(
            isinstance(start["step"], int) and isinstance(start["config"], dict) for start in starts
        )
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(
            f'{path}: is damaged; expected {{"starts": [...]}} with step and config of each, as'
            " `sparrow train` writes it"
        )
    return starts
