"""Measure acceptance rates of sparse generations, unit by unit, into a work folder.

In: prompts and arms, each a way to decode sparsely. Out: the acceptance rate of every token that
was decoded sparsely, along a fresh sample or the response that a prompt brings. A unit of work is
one sample of one prompt under one arm.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from sparrow_sglang.calibration.choice import CalibrationError, Tokens
from sparrow_sglang.calibration.given_response import given_response
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.calibration.store import UnitTokens, WorkFolder
from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.client.exact_rates import comparing_request, exact_rates, record_into
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.selection import SelectionRule


@dataclass(frozen=True)
class Arm:
    """One way to decode: the request's `options` for sparrow, and the `schedule` that they select.

    A `switched` schedule must be made the active one first, as requests cannot ask for it. Steps
    that read the whole KV say nothing about a schedule and are left out, unless `every_step`.
    """

    schedule: BudgetSchedule
    options: dict[str, Any]
    switched: bool = False
    every_step: bool = False

    def measures(self, cached: int) -> bool:
        """Whether the step that attends to `cached` tokens is measured."""
        return self.every_step or bool(self.schedule.tokens_read(cached) < cached)


@dataclass(frozen=True)
class Unit:
    """One generation: sample `sample` of `prompt` under `arm`, of at most `new_tokens` tokens."""

    number: int
    prompt: Prompt
    arm: Arm
    sample: int
    new_tokens: int


def fixed_arm(
    tokens: int,
    page_size: int,
    selection: SelectionRule | None = None,
    dense_layers: Sequence[int] = (0, 1),
) -> Arm:
    """A fixed budget, asked for per request, so that all budgets run in one batch.

    `selection` and `dense_layers` are those of the engine's schedule; None is the published rule.
    """
    fields = BudgetSchedule.fixed(tokens, page_size).model_dump()
    fields |= {"selection": selection or SelectionRule(), "dense_layers": tuple(dense_layers)}
    return Arm(BudgetSchedule(**fields), {"kv_budget_tokens": tokens})


def dense_arm(context: int, page_size: int) -> Arm:
    """Dense decode of up to `context` tokens, a multiple of the page size.

    Its rates are below 1 only because decode and prefill round differently.
    """
    return Arm(BudgetSchedule.fixed(context, page_size), {"dense": True}, every_step=True)


def schedule_arm(schedule: BudgetSchedule) -> Arm:
    """The arm of a schedule that the server has loaded under its name."""
    return Arm(schedule, {"schedule": schedule.name})


def switched_arm(schedule: BudgetSchedule) -> Arm:
    """The arm of a schedule that the server has not loaded."""
    return Arm(schedule, {}, switched=True)


def units_of_work(
    prompts: Sequence[Prompt], arms: Sequence[Arm], samples: int, new_tokens: int, context: int
) -> list[Unit]:
    """All units; those of a prompt follow each other, so that they share its prefix.

    Units without a step that their arm measures are left out. The first token comes from prefill,
    and a step whose cached tokens fit into the budget is dense.
    """
    units: list[Unit] = []
    for prompt in prompts:
        length = len(prompt.input_ids)
        # A sequence that fills the context could be generated, but not scored.
        room = min(new_tokens, context - 1 - length)
        repeats = samples
        if prompt.response_ids:
            # Along a given response all samples would be equal.
            room, repeats = min(room, len(prompt.response_ids)), 1
        steps = range(length + 1, length + room)
        for arm in arms:
            if any(arm.measures(cached) for cached in steps):
                units += [Unit(len(units) + i, prompt, arm, i, room) for i in range(repeats)]
    return units


def measure(
    target: Any,
    units: Sequence[Unit],
    work: WorkFolder,
    batch: int,
    progress: Progress,
) -> None:
    """Measure the units that `work` does not hold yet, `batch` at a time.

    `target` is an `sglang.Engine` that records at least `batch` generations. Units under one
    switched schedule follow each other. Raises `CalibrationError` if the server dies or refuses, or
    the disk is full; all finished batches are kept.
    """
    done = work.load().keys()
    open_units = [unit for unit in units if unit.number not in done]
    finished = len(units) - len(open_units)
    progress.advance(finished)
    active: BudgetSchedule | None = None
    for group in _batches(open_units, batch):
        try:
            arm = group[0].arm
            if arm.switched and arm.schedule != active:
                set_schedule(target, arm.schedule)
                active = arm.schedule
            progress.where = f"{finished}/{len(units)} measured, "
            measured = _measure_batch(target, group, progress)
        # Not only EndpointError: if a process of the engine dies, its event loop is stopped, which
        # raises a plain RuntimeError.
        except RuntimeError as error:
            raise CalibrationError(
                f"the engine failed ({error}); {finished} of {len(units)} generations are kept in"
                f" {work.path}: repeat the command to go on from there"
            ) from error
        work.add(measured)
        finished += len(group)
        progress.advance(len(group))


def _batches(units: Sequence[Unit], size: int) -> Iterator[list[Unit]]:
    """Up to `size` units each, of one switched schedule or of none."""
    for _, group in groupby(units, lambda unit: unit.arm.switched and unit.arm.schedule.name):
        together = list(group)
        for start in range(0, len(together), size):
            yield together[start : start + size]


def tokens_by_arm(units: Sequence[Unit], work: WorkFolder) -> dict[str, list[Tokens]]:
    """Everything measured so far, by the name of the arm's schedule."""
    measured = work.load()
    found: dict[str, list[Tokens]] = {unit.arm.schedule.name: [] for unit in units}
    for unit in units:
        if (row := measured.get(unit.number)) is not None:
            found[unit.arm.schedule.name].append(Tokens(unit.prompt.name, row.cached, row.rates))
    return found


def _measure_batch(target: Any, units: Sequence[Unit], progress: Progress) -> list[UnitTokens]:
    endpoint = connect(target)
    answers = endpoint.generate(
        [_request(unit, slot) for slot, unit in enumerate(units)],
        progress.counter("generating", len(units), "generations"),
    )
    _require_given_responses(units, answers)
    # Use a new namespace, so that no response is found in the prefix cache.
    namespace = f"sparrow-calibration-{uuid.uuid4().hex}"
    compared = endpoint.generate(
        [
            comparing_request(slot, unit.prompt.input_ids, answer["output_ids"], namespace)
            for slot, (unit, answer) in enumerate(zip(units, answers, strict=True))
        ],
        progress.counter("scoring", len(units), "generations"),
    )
    measured = []
    for unit, answer in zip(units, compared, strict=True):
        rates = exact_rates(answer)
        # The step that gives the token after n others attends to n cached tokens.
        cached = len(unit.prompt.input_ids) + 1 + np.arange(len(rates))
        kept = np.array([unit.arm.measures(int(n)) for n in cached], dtype=bool) & ~np.isnan(rates)
        measured.append(UnitTokens(unit.number, cached[kept], rates[kept]))
    return measured


def _require_given_responses(units: Sequence[Unit], answers: Sequence[Mapping[str, Any]]) -> None:
    for unit, answer in zip(units, answers, strict=True):
        given = list(unit.prompt.response_ids[: unit.new_tokens])
        if given and answer["output_ids"] != given:
            raise CalibrationError(
                f"prompt {unit.prompt.name}: the engine generated other tokens than the given"
                " response; expected SGLang to apply the logit processor of the request"
            )


def _request(unit: Unit, slot: int) -> dict[str, Any]:
    prompt = list(unit.prompt.input_ids)
    options = {"sparrow": unit.arm.options} if unit.arm.options else {}
    given = given_response(unit.prompt.response_ids) if unit.prompt.response_ids else None
    return {
        "input_ids": prompt,
        "custom_logit_processor": given and given.processor,
        "sampling_params": {
            # Sample without truncation, as the acceptance rate compares whole distributions.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": unit.new_tokens,
            "ignore_eos": given is not None,
            "custom_params": options
            | record_into(slot, len(prompt))
            | (given.parameters if given else {}),
        },
    }
