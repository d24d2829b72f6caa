"""run.json: the software, device and settings of each part of a run.

A run that is stopped and resumed has one entry per start, with the steps taken by then. If a later
start repeats all steps of an entry, the entry is dropped, as are its rows of metrics.
"""

from datetime import UTC, datetime

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.mismatch.token_bins import tail_bin_tokens
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.run_folder import RUN_FILE, read_starts
from sparrow_sglang.schedule import BudgetSchedule


def record_start(
    config: TrainConfig, engine: EngineConfig, step: int, schedule: BudgetSchedule | None
) -> None:
    """Record in `config.run_dir` that a run starts, or resumes, after `step` steps.

    `engine` is the configured engine with "auto" replaced by the name of `schedule`, whose bins the
    tails of the acceptance rate have; None for dense rollouts.
    """
    resolved = config.model_copy(update={"engine": engine})
    start = {
        "step": step,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "tail_bin_tokens": None if schedule is None else tail_bin_tokens(schedule),
        "config": resolved.model_dump(mode="json"),
    }
    path = config.run_dir / RUN_FILE
    earlier = [before for before in read_starts(path) if before["step"] < step]
    write_json(path, {"starts": [*earlier, start]})
