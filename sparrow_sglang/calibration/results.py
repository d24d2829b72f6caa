"""Schedule files with their evidence, reports of checks, and both as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.choice import (
    CONFIDENCE,
    MeasuredTails,
    bin_tails,
    choose,
    holds,
    shortage,
    tail_fields,
)
from sparrow_sglang.calibration.job import Job
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.command_line import table
from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE, tail_bin_tokens
from sparrow_sglang.schedules.schedule import BudgetSchedule


def write_schedules(job: Job, cost: Mapping[str, float]) -> Iterator[str]:
    """Write schedule files from the stored measurements, with their `cost`; yields lines to print.
    If a target is held nowhere, raises `CalibrationError` after writing everything else."""
    measured = job.work.by_schedule(job.samples)
    budgets = {s.schedule.name: s.schedule.budget_tokens[0] for s in job.samples}
    num_bins = -(-job.model.context // job.bin_tokens)
    by_budget = {
        budgets[name]: bin_tails(tokens, job.bin_tokens, job.page_size, num_bins)
        for name, tokens in measured.items()
    }
    tails = MeasuredTails(by_budget, job.bin_tokens, job.options.min_tokens)
    rows = {
        str(budget): [{"bin": index} | tail_fields(tail) for index, tail in bins.items()]
        for budget, bins in sorted(by_budget.items())
    }
    evidence = job.origin() | {"settings": job.settings, "cost": cost, "tails": rows}
    yield f"measured: {TAIL_PERCENTILE:g}th percentile of the acceptance rate per bin and budget"
    yield f"{describe_tails(tails, job.targets)}\n"
    failures = []
    for path, target in job.files.items():
        try:
            schedule = make_schedule(
                path.stem, target, tails, job.start, job.model.context, evidence
            )
        except CalibrationError as error:
            failures.append(str(error))
            continue
        schedule.save(path)
        bins = _table(schedule.provenance["bins"], schedule.bin_tokens, "basis")
        yield f"{path} (target {target})\n{bins}\n"
    if failures:
        raise CalibrationError(
            f"{'; '.join(failures)}; the measurements are kept in {job.work.path}"
        )


def write_check(job: Job) -> list[dict[str, Any]]:
    measured = job.work.by_schedule(job.samples)
    reports = [
        check_schedule(schedule, target, measured.get(schedule.name, []), job.options.min_tokens)
        for schedule, target in zip(job.under, job.targets, strict=True)
    ]
    write_json(job.out, {"checks": reports, **job.origin(), "settings": job.settings})
    return reports


def make_schedule(
    name: str,
    target: float,
    tails: MeasuredTails,
    under: BudgetSchedule,
    context: int,
    origin: Mapping[str, Any],
) -> BudgetSchedule:
    """The cheapest schedule that holds `target`, up to `context`, with its evidence per bin. It has
    the pages, dense layers and selection rule of the one that was measured `under`. `origin` has
    "model", "model_match" and further entries of the provenance. Raises `CalibrationError` as
    `choose` does, and if no measured budget holds the target in any bin."""
    bins = choose(tails, target, -(-context // tails.bin_tokens))
    if not any(row["basis"] == "measured" for row in bins):
        raise CalibrationError(
            f"target {target:g}: no measured budget holds it in any bin: expected larger --budgets,"
            " more prompts or --samples, or a lower --target"
        )
    rest = {key: value for key, value in origin.items() if key not in ("model", "model_match")}
    return BudgetSchedule(
        name=name,
        page_size=under.page_size,
        dense_layers=under.dense_layers,
        selection=under.selection,
        bin_tokens=tails.bin_tokens,
        budget_tokens=tuple(row["budget_tokens"] for row in bins),
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
            "bins": bins,
            **rest,
        },
    )


def check_schedule(
    schedule: BudgetSchedule, target: float, generations: Sequence[Tokens], min_tokens: int
) -> dict[str, Any]:
    """Tail per bin of generations under the schedule, against the target, as JSON values. A bin
    "holds" if its tail reaches the target, "fails" if its whole confidence interval lies below, and
    is "undecided" in between; "too few tokens" or "too few prompts" where it cannot be judged,
    "dense" where every layer reads all of it. `holds`: no bin fails, and at least one holds."""
    width, page = tail_bin_tokens(schedule), schedule.page_size
    tails = bin_tails(generations, width, page)
    of_schedule = range(len(schedule.budget_tokens)) if width == schedule.bin_tokens else ()
    rows: list[dict[str, Any]] = []
    for index in sorted({*tails, *of_schedule}):
        # Lengths count in whole pages, so the longest one of a bin ends before the next bin's page.
        start, longest = index * width, ((index + 1) * width - 1) // page * page
        budget = schedule.budget_at(max(1, start))
        row = {"bin": index, "first_position": start, "budget_tokens": budget, "tokens": 0}
        tail = tails.get(index)
        if tail is not None:
            row |= tail_fields(tail)
        if schedule.tokens_read(longest) == longest:
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
        "bin_tokens": width,
        "target": target,
        "percentile": TAIL_PERCENTILE,
        "confidence": CONFIDENCE,
        "min_tokens": min_tokens,
        "holds": "fails" not in verdicts and "holds" in verdicts,
        "bins": rows,
    }


def describe_check(report: Mapping[str, Any]) -> str:
    verdict = "holds" if report["holds"] else "does not hold"
    if not any(row["verdict"] in ("holds", "fails", "undecided") for row in report["bins"]):
        verdict = "has no judged bin for"
    bins = _table(report["bins"], report["bin_tokens"], "verdict")
    return f"{bins}\n{report['schedule']}: {verdict} {report['target']:g}\n"


def describe_tails(tails: MeasuredTails, targets: Sequence[float]) -> str:
    """Tail, interval and tokens of each bin and budget, and the targets that the budget holds."""
    rows = []
    for index in tails.bins:
        for budget in sorted(tails.by_budget):
            tail = tails.by_budget[budget].get(index)
            if tail is None:
                continue
            held = " ".join(f"{target:g}" for target in sorted(targets) if holds(tail, target))
            verdict = shortage(tail, tails.min_tokens) or held or "-"
            row = {"bin": index, "budget_tokens": budget, "holds": verdict}
            rows.append(row | tail_fields(tail))
    return _table(rows, tails.bin_tokens, "holds")


def _table(rows: Any, bin_tokens: int, last: str) -> str:
    lines: list[list[str]] = [["positions", "budget", "tail", "95 % interval", "tokens", last]]
    for row in rows:
        start, tail, bounds = row["bin"] * bin_tokens, "", ""
        if "tail" in row:
            tail = f"{row['tail']:.3f}"
            if row["tail_low"] is not None:
                bounds = f"{row['tail_low']:.3f}-{row['tail_high']:.3f}"
        cells = [f"{start}-{start + bin_tokens - 1}", f"{row['budget_tokens']}", tail, bounds]
        lines.append([*cells, f"{row['tokens']}", row[last]])
    return table(lines, ">")
