"""What `sparrow calibrate` was asked for, checked before anything slow is imported."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.prompts import read_prompts
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, path_problem
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.schedule_names import read_schedule

DEFAULT_TARGET = 0.86
PUBLISHED = "published"
CALIBRATED = "calibrated"
RULES = (PUBLISHED, CALIBRATED)


@dataclass(frozen=True)
class CalibrationOptions:
    """What `sparrow calibrate` was asked for; fields are named as its options are.

    Raises `CalibrationError` on a target that is none, and on options that a check does not take.

    Attributes:
        target: tails to hold, one schedule each; empty for the default.
        check: files or shipped names of schedules to check; empty to calibrate.
        budgets: in tokens; empty for those that suit the model's context.
        rule: one of `RULES`; None for `calibrated`, or `published` where the model has layers with
            linear attention.
        bin_tokens: positions per bin; None for what suits the model's context.
        batch: generations that are measured at the same time.
        engine_args: further arguments of `sglang.Engine`.
    """

    model_path: str = EMBEDDED_MODEL_NAME
    prompts: Path | None = None
    target: Sequence[float] = ()
    out: Path | None = None
    check: Sequence[str] = ()
    work: Path | None = None
    budgets: Sequence[int] = ()
    rule: str | None = None
    page_size: int = PAGE_SIZE
    bin_tokens: int | None = None
    new_tokens: int = 128
    samples: int = 1
    prompts_per_bin: int = 24
    min_tokens: int = 1000
    batch: int = 128
    seed: int = 0
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target in self.target:
            if not 0 < target < 1:
                raise CalibrationError(
                    f"--target {target}: expected a tail between 0 and 1, e.g. 0.86"
                )
        chosen = {
            "rule": [] if self.rule is None else [self.rule],
            "budgets": self.budgets,
            "bin-tokens": [] if self.bin_tokens is None else [self.bin_tokens],
        }
        for name, values in chosen.items():
            if self.check and values:
                raise CalibrationError(
                    f"--{name} {' '.join(map(str, values))} has no meaning with --check, which"
                    " generates under each schedule as its file says: leave it out"
                )

    def require_files(self) -> None:
        """Refuse missing or malformed files, before torch and SGLang are imported."""
        if problem := path_problem(self.model_path):
            raise CalibrationError(f"--model-path {self.model_path}: {problem}")
        if self.prompts is not None:
            # Two tokens for any text check a file's form without a tokenizer.
            read_prompts(self.prompts, lambda text, add_special_tokens=True: [0, 0], sys.maxsize)
        for path in self.check:
            read_schedule(path)
        if self.out is not None and (self.out.suffix != ".json" or self.out.is_dir()):
            raise CalibrationError(f"--out {self.out}: expected the name of a .json file")
