"""run.json: which software, device and settings each part of a run came from.

A run that is stopped and resumed has one entry per start, with the steps that it had taken by then.
Entries whose steps a later start took again are dropped, as their rows of metrics are.
"""

from datetime import UTC, datetime

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.run_folder import RUN_FILE, read_starts


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
