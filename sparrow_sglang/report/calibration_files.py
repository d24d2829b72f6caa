"""What the files of `sparrow calibrate` hold, as far as a page shows it, checked when read.

In: provenance of a schedule, or a check report. Out: typed fields; others are left alone.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sparrow_sglang.report.page import ReportError
from sparrow_sglang.validation import first_problem

Model = TypeVar("Model", bound=BaseModel)


class TailRow(BaseModel):
    """Tail of one bin under one fixed budget, with its confidence interval."""

    bin: int
    tokens: int
    tail: float
    low: float | None
    high: float | None


class BinRow(BaseModel):
    """One bin of a schedule (`basis`) or of a check (`verdict`)."""

    bin: int
    budget_tokens: int
    tokens: int
    basis: str = ""
    verdict: str = ""
    tail: float | None = None
    tail_low: float | None = None
    tail_high: float | None = None

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Tail with its confidence interval, where there are tokens enough for one."""
        if self.tail is None or self.tail_low is None or self.tail_high is None:
            return None
        return self.tail, self.tail_low, self.tail_high


class Evidence(BaseModel):
    """What a calibrated schedule rests on; `tails` are budget in tokens -> bins."""

    bins: list[BinRow]
    tails: dict[int, list[TailRow]]
    min_tokens: int
    settings: dict[str, Any]


class Check(BaseModel):
    """Tails of fresh generations under one schedule."""

    schedule: str
    target: float
    min_tokens: int
    holds: bool
    bins: list[BinRow]


class CheckFile(BaseModel):
    """A report of `sparrow calibrate --check`."""

    checks: list[Check]
    model: str
    settings: dict[str, Any]


def parse(path: Path, model: type[Model], fields: Any) -> Model:
    """`fields` as a `model`; `ReportError` names what is missing or wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ReportError(
            f"{path}: {first_problem(error)}; expected what `sparrow calibrate` writes"
        ) from None
