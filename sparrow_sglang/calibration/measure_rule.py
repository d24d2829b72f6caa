"""Measure for a selection rule: rotary pairs, each layer alone, then sets of dense layers. The
measurements of each step are kept in a folder of their own, so that a killed run resumes."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.calibration import CalibrationError, measure
from sparrow_sglang.calibration.job import INT4, Job
from sparrow_sglang.calibration.prompts import UNSCORED, Prompt
from sparrow_sglang.calibration.rule import (
    RuleChoice,
    choose_rule,
    chosen_pairs,
    dense_candidates,
    dense_schedule,
    rule_settings,
    sensitivities,
    sensitivity_schedule,
    variance_kept,
    weighted_schedule,
)
from sparrow_sglang.calibration.samples import VARIANCES, Tokens, plan_samples
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.hf_config import head_dim_of, num_kv_heads_of, num_layers_of, partial_layers
from sparrow_sglang.mismatch.token_bins import whole_pages
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.schedules.selection import SelectionRule, int4_landmark_tokens

PROMPTS = 16


def with_chosen_rule(job: Job, measuring: measure.MeasuringEngine) -> Job:
    """Choose rotary pairs, layer weights and dense layers by measuring; return the job under them.
    Raises `CalibrationError` as `MeasuringEngine.measure_missing` does."""
    hf_config, context = job.hf_config, job.context
    layers, partial = num_layers_of(hf_config), partial_layers(hf_config)
    if job.options.rule == INT4:
        rule = SelectionRule(landmark_bits=4)
        return _with_rule(job, RuleChoice(rule, tuple(partial), {}, tuple(partial)))
    whole = [layer for layer in range(layers) if layer not in partial]
    longest = sorted(range(len(job.prompts)), key=lambda i: -len(job.prompts[i].input_ids))
    prompts = [job.prompts[i] for i in sorted(longest[:PROMPTS])]
    variances = _pair_variances(job, prompts)
    pairs = chosen_pairs(variances)
    rule = SelectionRule(landmark_bits=4, landmark_pairs=pairs)
    size = (rule, layers, job.page_size, context)
    alone = {layer: sensitivity_schedule(layer, *size, partial) for layer in whole}
    measured = _measured(job, prompts, "layers", list(alone.values()), rule, measuring)
    sensitivity = sensitivities(
        {layer: measured[schedule.name] for layer, schedule in alone.items()}, layers
    )
    candidates = {
        dense: dense_schedule(dense, sensitivity, rule, job.page_size, context, partial)
        for dense in dense_candidates(sensitivity, partial)
    }
    measured = _measured(job, prompts, "dense", list(candidates.values()), rule, measuring)
    tails = {dense: measured[schedule.name] for dense, schedule in candidates.items()}
    kept = variance_kept(variances, pairs)
    return _with_rule(job, choose_rule(rule, kept, sensitivity, tails, partial))


def _step_of(job: Job, name: str, schedule: BudgetSchedule, **settings: Any) -> Job:
    """The job of one step, in a folder of its own, on an engine that starts with `schedule`."""
    folder, first = job.folder / name, "first-schedule.json"
    step = replace(
        job,
        folder=folder,
        settings=job.settings | {"step": name} | settings,
        engine_args=job.engine_args | {"sparrow_schedule": str(folder / first)},
    )
    with step.work.writing(first) as draft:
        schedule.save(draft)
    return step


def _first_schedule(job: Job, rule: SelectionRule) -> BudgetSchedule:
    weights, whole = [1.0] * num_layers_of(job.hf_config), whole_pages(job.context, job.page_size)
    return weighted_schedule("first", rule, weights, job.page_size, whole)


def _pair_variances(job: Job, prompts: Sequence[Prompt]) -> NDArray[np.float64]:
    """Variance over landmarks of each pair's part of the scores, [layers, KV heads, D/2].
    `attention_backends.pair_variance` sums it over the latest queries of each prefill pass; it is 0
    in layers without landmarks. Raises `CalibrationError` if the engine dies."""
    tokens = int4_landmark_tokens(job.page_size)
    step = _step_of(job, "pairs", _first_schedule(job, SelectionRule()), landmark_tokens=tokens)
    path = step.work.path / VARIANCES
    if path.exists():
        return np.array(json.loads(path.read_text("utf-8")))
    room = job.context - UNSCORED
    # Only prefill is measured.
    engine_args = {"disable_cuda_graph": True} | step.engine_args
    with closing(Progress(len(prompts), "prompt")) as progress:
        progress.show("starting the engine")
        with measure.running_engine(job.path, engine_args) as running:
            try:
                endpoint = connect(running)
                endpoint.call_sparrow("pairs", landmark_tokens=tokens)
                # Send prompts one by one, so that every run sums in the same order.
                for prompt in prompts:
                    request = {
                        "input_ids": [*prompt.input_ids, *prompt.response_ids][:room],
                        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                        "log_metrics": False,
                    }
                    endpoint.generate([request])
                    progress.advance()
                sums = endpoint.call_sparrow("pairs")
            except RuntimeError as error:
                raise CalibrationError(f"engine failed ({error}): repeat the command") from error
    config = job.hf_config
    shape = (num_layers_of(config), num_kv_heads_of(config), head_dim_of(config) // 2)
    variances = np.zeros(shape)
    for layer, rows in sums["layers"].items():
        variances[int(layer)] = rows
    with step.work.writing(path.name) as draft:
        write_json(draft, variances.tolist())
    return variances


def _measured(
    job: Job,
    prompts: Sequence[Prompt],
    name: str,
    schedules: Sequence[BudgetSchedule],
    rule: SelectionRule,
    measuring: measure.MeasuringEngine,
) -> dict[str, list[Tokens]]:
    """Tokens of each schedule, by its name, along one sample of each prompt."""
    room = job.context - UNSCORED
    samples = plan_samples(prompts, schedules, 1, job.options.new_tokens, room, switched=True)
    settings = [
        schedule.model_dump(mode="json") | {"selection": rule_settings(schedule.selection)}
        for schedule in schedules
    ]
    step = replace(
        _step_of(job, name, _first_schedule(job, rule), schedules=settings), samples=samples
    )
    measuring.measure_missing(step)
    measured = step.work.by_schedule(samples)
    for schedule in schedules:
        if not any(len(tokens.rates) for tokens in measured.get(schedule.name, [])):
            least = schedule.first_sparse_length()
            raise CalibrationError(f"--rule: expected prompts of more than {least} tokens")
    return measured


def _with_rule(job: Job, choice: RuleChoice) -> Job:
    whole, *budgets = (
        BudgetSchedule(
            **BudgetSchedule.fixed(tokens, job.page_size).model_dump()
            | {"selection": choice.selection, "dense_layers": choice.dense_layers}
        )
        for tokens in (whole_pages(job.context, job.page_size), *job.settings["budgets"])
    )
    path = job.folder / "rule.json"
    whole.save(path)
    rule = {"selection": rule_settings(choice.selection), "dense_layers": [*choice.dense_layers]}
    samples = plan_samples(
        job.prompts, budgets, job.options.samples, job.options.new_tokens, job.context - UNSCORED
    )
    return replace(
        job,
        samples=samples,
        settings=job.settings | rule,
        engine_args=job.engine_args | {"sparrow_schedule": str(path)},
        rule=choice,
    )
