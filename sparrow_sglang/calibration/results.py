"""Output of a calibration: schedule files with their evidence, or a check's report.

In: tails per budget and bin, and the choices made from them. Out: `BudgetSchedule`s, JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.calibration.choice import (
    CONFIDENCE,
    CalibrationError,
    Choice,
    MeasuredTails,
    Tokens,
    bin_tails,
    choose,
    shortage,
)
from sparrow_sglang.calibration.describe import (
    describe,
    describe_misses,
    describe_tails,
    interval,
    nothing_holds,
)
from sparrow_sglang.calibration.job import Job, origin
from sparrow_sglang.calibration.measure import tokens_by_schedule
from sparrow_sglang.calibration.rule import RuleChoice
from sparrow_sglang.calibration.work_folder import WorkFolder
from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE
from sparrow_sglang.schedule import BudgetSchedule


def write_schedules(job: Job, cost: Mapping[str, float]) -> Iterator[str]:
    """Write schedule files from the stored measurements; yields lines to print.

    `cost` is what this run of the command spent on them, for the files.

    If a target is held nowhere, raises `CalibrationError` after writing everything else.
    """
    measured = tokens_by_schedule(job.samples, job.work)
    schedules = {sample.variant.schedule.name: sample.variant.schedule for sample in job.samples}
    by_budget = {
        schedule.budget_tokens[0]: bin_tails(measured[name], job.bin_tokens, job.page_size)
        for name, schedule in schedules.items()
    }
    rule = job.rule
    least = 1.0 if rule is None else min(rule.selection.sparse_weights(rule.dense_layers))
    tails = MeasuredTails(by_budget, job.bin_tokens, job.options.min_tokens, least)
    rows = {
        str(budget): [{"bin": index} | interval(tail) for index, tail in bins.items()]
        for budget, bins in sorted(by_budget.items())
    }
    evidence = origin(job.model) | {"settings": job.settings, "cost": cost, "tails": rows}
    yield f"measured: {TAIL_PERCENTILE:g}th percentile of the acceptance rate per bin and budget"
    yield f"{describe_tails(tails, job.targets)}\n"
    failures = []
    for path, target in job.files.items():
        yield from describe_misses(tails, target)
        try:
            schedule = make_schedule(
                path.stem, target, tails, job.page_size, job.model.context, evidence, rule
            )
        except CalibrationError as error:
            failures.append(str(error))
            continue
        with _kept(job.work):
            schedule.save(path)
        yield f"{path} (target {target})\n{describe(schedule)}\n"
    if failures:
        raise CalibrationError(
            f"{'; '.join(failures)}; the measurements are kept in {job.work.path}"
        )


def write_check(job: Job) -> list[dict[str, Any]]:
    """Write how each schedule holds its target; returns the same, one report per schedule."""
    measured = tokens_by_schedule(job.samples, job.work)
    reports = [
        check_schedule(schedule, target, measured.get(schedule.name, []), job.options.min_tokens)
        for schedule, target in zip(job.schedules, job.targets, strict=True)
    ]
    with _kept(job.work):
        write_json(job.out, {"checks": reports, **origin(job.model), "settings": job.settings})
    return reports


def make_schedule(
    name: str,
    target: float,
    tails: MeasuredTails,
    page_size: int,
    context: int,
    origin: Mapping[str, Any],
    rule: RuleChoice | None = None,
) -> BudgetSchedule:
    """The cheapest schedule that holds `target`, up to `context`, with its evidence per bin.

    `origin` says how the tails were measured ("model", "model_match" and further entries of the
    provenance). Raises `CalibrationError` as `choose` does, and if no measured budget holds the
    target in any bin, because such a schedule would be calibrated in name only.
    """
    choices = choose(tails, target, -(-context // tails.bin_tokens))
    if not any(choice.basis == "measured" for choice in choices):
        raise CalibrationError(nothing_holds(tails, target))
    rest = {key: value for key, value in origin.items() if key not in ("model", "model_match")}
    fields: dict[str, Any] = {}
    if rule is not None:
        fields = {"selection": rule.selection, "dense_layers": rule.dense_layers}
        rest["selection"] = rule.evidence
    return BudgetSchedule(
        **fields,
        name=name,
        page_size=page_size,
        bin_tokens=tails.bin_tokens,
        budget_tokens=tuple(choice.budget for choice in choices),
        calibrated=True,
        model=origin["model"],
        tail_target=target,
        model_match=origin["model_match"],
        provenance={
            "rule": "per bin the cheapest budget at which, and at all above it, the lower end of"
            " the confidence interval of the tail holds the target, made monotone; the tail is that"
            " of the exact acceptance rate over sparsely decoded tokens",
            "percentile": TAIL_PERCENTILE,
            "confidence": CONFIDENCE,
            "interval": "jackknife over prompts, Student's t",
            "min_tokens": tails.min_tokens,
            "bins": [_bin_evidence(choice) for choice in choices],
            **rest,
        },
    )


def _bin_evidence(choice: Choice) -> dict[str, Any]:
    row: dict[str, Any] = {
        "bin": choice.bin,
        "budget_tokens": choice.budget,
        "needed_tokens": choice.needed,
        "basis": choice.basis,
        "tokens": 0,
    }
    if choice.evidence is not None:
        row |= interval(choice.evidence)
    return row


def check_schedule(
    schedule: BudgetSchedule, target: float, generations: Sequence[Tokens], min_tokens: int
) -> dict[str, Any]:
    """Tail per bin of generations under the schedule, against the target, as JSON values.

    A bin "holds" if its tail reaches the target, "fails" if its whole confidence interval lies
    below, and is "undecided" in between; "too few tokens" or "too few prompts" where it cannot be
    judged, "dense" where every layer reads the whole bin. `holds` is true if no bin fails and at
    least one holds or is dense.
    """
    tails = bin_tails(generations, schedule.bin_tokens, schedule.page_size)
    least_read = schedule.layer_budgets(min(schedule.sparse_weights))
    rows: list[dict[str, Any]] = []
    for index in sorted(tails.keys() | set(range(len(schedule.budget_tokens)))):
        start = index * schedule.bin_tokens
        budget = schedule.kv_budget_tokens(max(1, start))
        row = {"bin": index, "first_position": start, "budget_tokens": budget, "tokens": 0}
        tail = tails.get(index)
        if tail is not None:
            row |= interval(tail)
        if least_read[min(index, len(least_read) - 1)] >= (index + 1) * schedule.bin_pages:
            verdict = "dense"
        elif tail is None or tail.tail_high is None or tail.tokens < min_tokens:
            verdict = shortage(tail, min_tokens)
        elif tail.tail_high < target:
            verdict = "fails"
        else:
            verdict = "holds" if tail.tail >= target else "undecided"
        rows.append(row | {"verdict": verdict})
    verdicts = [row["verdict"] for row in rows]
    return {
        "schedule": schedule.name,
        "target": target,
        "percentile": TAIL_PERCENTILE,
        "confidence": CONFIDENCE,
        "min_tokens": min_tokens,
        "holds": "fails" not in verdicts and bool({"holds", "dense"} & set(verdicts)),
        "bins": rows,
    }


@contextmanager
def _kept(work: WorkFolder) -> Iterator[None]:
    """Turn a failed write of results into an error that says that the measurements are kept."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write {error.filename or 'the results'} ({error.strerror or error}); the"
            f" measurements are kept in {work.path}: make room and repeat the command"
        ) from None
