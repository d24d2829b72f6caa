"""Measure for a selection rule: rotary pairs, each layer alone, then sets of dense layers.

In: a calibration job. Out: the same job under the chosen rule. The measurements of each step are
kept in a folder of their own, so that a killed run goes on where it stopped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparrow_sglang.calibration.choice import CalibrationError, Tokens
from sparrow_sglang.calibration.engine import measure_missing
from sparrow_sglang.calibration.job import Job
from sparrow_sglang.calibration.measure import (
    fixed_arm,
    switched_arm,
    tokens_by_arm,
    units_of_work,
)
from sparrow_sglang.calibration.pairs import pair_variances
from sparrow_sglang.calibration.prompts import UNSCORED, Prompt
from sparrow_sglang.calibration.rule import (
    RuleChoice,
    choose_rule,
    chosen_pairs,
    dense_candidates,
    dense_schedule,
    even_schedule,
    landmark_rule,
    rule_settings,
    sensitivities,
    sensitivity_schedule,
    variance_kept,
)
from sparrow_sglang.hf_config import num_layers_of, partial_layers
from sparrow_sglang.mismatch.token_bins import whole_pages
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.selection import SelectionRule

PROMPTS = 16


def with_chosen_rule(job: Job) -> Job:
    """Choose rotary pairs, layer weights and dense layers by measuring; return the job under them.

    Raises `CalibrationError` as `measure_missing` does.
    """
    layers, partial = num_layers_of(job.hf_config), partial_layers(job.hf_config)
    whole = [layer for layer in range(layers) if layer not in partial]
    variances = pair_variances(job, _longest(job.prompts))
    pairs = chosen_pairs(variances)
    rule = landmark_rule(pairs, job.page_size)
    size = (rule, layers, job.page_size, job.context)
    alone = {layer: sensitivity_schedule(layer, *size, partial) for layer in whole}
    measured = _measured(job, "layers", list(alone.values()), rule, layers)
    sensitivity = sensitivities(
        {layer: measured[schedule.name] for layer, schedule in alone.items()}, layers
    )
    candidates = {
        dense: dense_schedule(dense, sensitivity, rule, job.page_size, job.context, partial)
        for dense in dense_candidates(sensitivity, partial)
    }
    measured = _measured(job, "dense", list(candidates.values()), rule, layers)
    tails = {dense: measured[schedule.name] for dense, schedule in candidates.items()}
    kept = variance_kept(variances, pairs)
    return _under(job, choose_rule(rule, kept, sensitivity, tails, partial))


def _measured(
    job: Job, step: str, schedules: Sequence[BudgetSchedule], rule: SelectionRule, layers: int
) -> dict[str, list[Tokens]]:
    """Tokens of each schedule, by its name, from the longest prompts."""
    prompts = _longest(job.prompts)
    arms = [switched_arm(schedule) for schedule in schedules]
    room = job.context - UNSCORED
    units = [
        replace(unit, number=number)
        for number, unit in enumerate(
            unit
            for arm in arms
            for unit in units_of_work(prompts, [arm], 1, job.options.new_tokens, room)
        )
    ]
    folder = job.folder / step
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "first-schedule.json"
    whole = whole_pages(job.context, job.page_size)
    even_schedule("first", rule, layers, job.page_size, whole).save(first)
    of_step = replace(
        job,
        units=units,
        folder=folder,
        settings=job.settings | {"step": step, "schedules": _settings(schedules)},
        engine_args=job.engine_args | {"sparrow_schedule": str(first)},
    )
    measure_missing(of_step)
    measured = tokens_by_arm(units, of_step.work)
    for schedule in schedules:
        if not any(len(tokens.rates) for tokens in measured.get(schedule.name, [])):
            raise CalibrationError(
                f"--rule: no token was decoded sparsely under {schedule.name}: expected prompts of"
                f" more than {schedule.first_sparse_length()} tokens, or more --new-tokens"
            )
    return measured


def _longest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The longest prompts, where most pages are left out, in their original order."""
    keep = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].input_ids))[:PROMPTS]
    return [prompts[i] for i in sorted(keep)]


def _under(job: Job, choice: RuleChoice) -> Job:
    """The job with its budgets under the chosen rule."""
    budgets = job.settings["budgets"]
    arms = [
        fixed_arm(budget, job.page_size, choice.selection, choice.dense_layers)
        for budget in budgets
    ]
    options = job.options
    path = job.folder / "rule.json"
    room = job.context - UNSCORED
    whole = whole_pages(job.context, job.page_size)
    whole_arm = fixed_arm(whole, job.page_size, choice.selection, choice.dense_layers)
    whole_arm.schedule.save(path)
    chosen = rule_settings(choice.selection)
    return replace(
        job,
        units=units_of_work(job.prompts, arms, options.samples, options.new_tokens, room),
        settings=job.settings | {"selection": chosen, "dense_layers": list(choice.dense_layers)},
        engine_args=job.engine_args | {"sparrow_schedule": str(path)},
        rule=choice,
    )


def _settings(schedules: Sequence[BudgetSchedule]) -> list[Any]:
    return [
        schedule.model_dump(mode="json") | {"selection": rule_settings(schedule.selection)}
        for schedule in schedules
    ]
