"""The generations of a calibration, and the work folder that keeps what they measured. The folder
belongs to one set of settings and is refused for another. A batch is a Parquet file that appears
whole or not at all, so a killed run resumes where it stopped."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.atomic_write import replacing, write_json
from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.json_values import quoted, read_object
from sparrow_sglang.schedules.schedule import BudgetSchedule

SETTINGS = "settings.json"
_BATCHES = "batch-*.parquet"
_SAMPLES_KEY = b"sparrow_samples"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One generation of at most `new_tokens` tokens. A `switched` schedule is made the active one;
    another is a fixed budget that the request names, so that all budgets share batches."""

    number: int
    prompt: Prompt
    schedule: BudgetSchedule
    new_tokens: int
    switched: bool = False


@dataclass(frozen=True)
class Tokens:
    """Sparsely decoded tokens of one generation: `cached` int64 [T], which their steps attended to
    and which determine the schedule's bins, and `rates` of acceptance, float64 [T]."""

    prompt: str
    cached: NDArray[np.int64]
    rates: NDArray[np.float64]


def plan_samples(
    prompts: Sequence[Prompt],
    schedules: Sequence[BudgetSchedule],
    repeats: int,
    new_tokens: int,
    context: int,
    switched: bool = False,
) -> list[Sample]:
    """All samples; those of a prompt follow each other, so that they share its prefix. Samples
    without a sparse step are left out. The first token comes from prefill, and a step whose cached
    tokens fit into the budget is dense."""
    samples: list[Sample] = []
    for prompt in prompts:
        length = len(prompt.input_ids)
        # A sequence that fills the context could be generated, but not scored.
        room = min(new_tokens, context - 1 - length)
        cached = np.arange(length + 1, length + room)
        for schedule in schedules:
            if (schedule.tokens_read(cached) < cached).any():
                samples += [
                    Sample(len(samples) + i, prompt, schedule, room, switched)
                    for i in range(repeats)
                ]
    return samples


class WorkFolder:
    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` on a folder of other settings, or that cannot be made."""
        self.path = path
        target = path / SETTINGS
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibrationError(
                f"--work {path}: {error.strerror}; expected a folder that can be made or written to"
            ) from None
        stored = read_object(target, "settings of a calibration") if target.exists() else None
        current = json.loads(json.dumps(settings))
        # A command that failed before it measured anything may be corrected.
        if stored is None or not any(path.glob(_BATCHES)):
            write_json(target, current)
            return
        for key in sorted(current.keys() | stored.keys()):
            if current.get(key) != stored.get(key):
                raise CalibrationError(
                    f"--work {path}: {key}={quoted(current.get(key), 80)}: expected"
                    f" {quoted(stored.get(key), 80)}, as it was measured with, or another folder"
                )

    def load(self) -> dict[int, Tokens]:
        """All finished samples by number, without those in damaged files."""
        import pyarrow

        finished: dict[int, Tokens] = {}
        for path in sorted(self.path.glob(_BATCHES)):
            try:
                finished |= _read_batch(path)
            except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
                logger.warning("%s is damaged and will be measured again (%s)", path, error)
        return finished

    def add(self, finished: Mapping[int, Tokens]) -> None:
        """Append a batch, durable when this returns. Raises `OSError` on a full disk."""
        import pyarrow
        from pyarrow import parquet

        lengths = [len(tokens.cached) for tokens in finished.values()]
        columns = {
            "sample": np.repeat(np.array(list(finished), np.int32), lengths),
            "cached": np.concatenate([t.cached.astype(np.int32) for t in finished.values()]),
            "rate": np.concatenate([t.rates.astype(np.float32) for t in finished.values()]),
        }
        prompts = json.dumps({number: tokens.prompt for number, tokens in finished.items()})
        table = pyarrow.table(columns).replace_schema_metadata({_SAMPLES_KEY: prompts.encode()})
        target = self.path / f"batch-{min(finished):08d}.parquet"
        with replacing(target) as draft:
            parquet.write_table(table, draft)

    def by_schedule(self, samples: Sequence[Sample]) -> dict[str, list[Tokens]]:
        finished = self.load()
        measured: dict[str, list[Tokens]] = {sample.schedule.name: [] for sample in samples}
        for sample in samples:
            if sample.number in finished:
                measured[sample.schedule.name].append(finished[sample.number])
        return measured


def _read_batch(path: Path) -> dict[int, Tokens]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    prompts = json.loads(table.schema.metadata[_SAMPLES_KEY])
    sample, cached, rates = (table[name].to_numpy() for name in ("sample", "cached", "rate"))
    return {
        int(number): Tokens(
            prompt,
            cached[sample == int(number)].astype(np.int64),
            rates[sample == int(number)].astype(np.float64),
        )
        for number, prompt in prompts.items()
    }
