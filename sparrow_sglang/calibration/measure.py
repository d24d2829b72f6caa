"""Measure acceptance rates of sparse generations, sample by sample, into a work folder.

In: prompts and variants, each a way to decode sparsely. Out: the acceptance rate of every token
that was decoded sparsely, along a fresh sample or the response that a prompt brings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.calibration.choice import CalibrationError, Tokens
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.calibration.work_folder import SampleTokens, WorkFolder
from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import EngineEndpoint
from sparrow_sglang.mismatch.exact_rates import comparing_request, exact_rates, record_into
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.selection import SelectionRule

if TYPE_CHECKING:
    import torch

GIVEN_RESPONSE_ENGINE_ARGS = {
    "enable_custom_logit_processor": True,
    "disable_overlap_schedule": True,
}
"""What an engine needs to decode along given responses: an overlapping scheduler would launch a
step before the request has the token of the previous one."""
_GIVEN = "sparrow_given_response"


@dataclass(frozen=True)
class DecodeVariant:
    """One way to decode: the request's `options` for sparrow, and the `schedule` that they select.

    A `switched` schedule must be made the active one first, as requests cannot ask for it. Steps
    that read the whole KV say nothing about a schedule and are left out.
    """

    schedule: BudgetSchedule
    options: dict[str, Any]
    switched: bool = False

    def measures(self, cached: int) -> bool:
        """Whether the step that attends to `cached` tokens leaves some of them out."""
        return bool(self.schedule.tokens_read(cached) < cached)


@dataclass(frozen=True)
class Sample:
    """One generation of at most `new_tokens` tokens from `prompt` under `variant`."""

    number: int
    prompt: Prompt
    variant: DecodeVariant
    new_tokens: int


def fixed_budget(
    tokens: int,
    page_size: int,
    selection: SelectionRule | None = None,
    dense_layers: Sequence[int] = (0, 1),
) -> DecodeVariant:
    """A fixed budget, asked for per request, so that all budgets run in one batch.

    `selection` and `dense_layers` are those of the engine's schedule; None is the published rule.
    """
    fields = BudgetSchedule.fixed(tokens, page_size).model_dump()
    fields |= {"selection": selection or SelectionRule(), "dense_layers": tuple(dense_layers)}
    return DecodeVariant(BudgetSchedule(**fields), {"kv_budget_tokens": tokens})


def loaded_schedule(schedule: BudgetSchedule) -> DecodeVariant:
    """A schedule that the engine has loaded under its name."""
    return DecodeVariant(schedule, {"schedule": schedule.name})


def plan_samples(
    prompts: Sequence[Prompt],
    variants: Sequence[DecodeVariant],
    repeats: int,
    new_tokens: int,
    context: int,
) -> list[Sample]:
    """All samples; those of a prompt follow each other, so that they share its prefix.

    Samples without a step that their variant measures are left out. The first token comes from
    prefill, and a step whose cached tokens fit into the budget is dense.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        length = len(prompt.input_ids)
        # A sequence that fills the context could be generated, but not scored.
        room, count = min(new_tokens, context - 1 - length), repeats
        if prompt.response_ids:
            # Along a given response all samples would be equal.
            room, count = min(room, len(prompt.response_ids)), 1
        steps = range(length + 1, length + room)
        for variant in variants:
            if any(variant.measures(cached) for cached in steps):
                samples += [Sample(len(samples) + i, prompt, variant, room) for i in range(count)]
    return samples


def measure(
    engine: Any,
    samples: Sequence[Sample],
    work: WorkFolder,
    batch: int,
    progress: Progress,
) -> None:
    """Measure the samples that `work` does not hold yet, `batch` at a time.

    `engine` is an `sglang.Engine` that records at least `batch` generations. Raises
    `CalibrationError` if the engine dies or refuses, or the disk is full. Whatever ends the
    measurement, samples that were measured are kept.
    """
    endpoint = EngineEndpoint(engine)
    done = work.load().keys()
    missing = [sample for sample in samples if sample.number not in done]
    if any(sample.variant.switched for sample in missing):
        missing = _sharing_prefixes(missing, engine.get_server_info()["max_total_num_tokens"])
    finished = len(samples) - len(missing)
    progress.advance(finished)
    active: BudgetSchedule | None = None
    for group in _batches(missing, batch):
        measured: list[SampleTokens] = []
        try:
            variant = group[0].variant
            if variant.switched and variant.schedule != active:
                set_schedule(engine, variant.schedule)
                active = variant.schedule
            progress.where = f"{finished}/{len(samples)} measured, "
            _measure_batch(endpoint, group, measured, progress)
        # Not only EndpointError: if a process of the engine dies, its event loop is stopped, which
        # raises a plain RuntimeError.
        except RuntimeError as error:
            kept = finished + len(measured)
            raise CalibrationError(
                f"the engine failed ({error}); {kept} of {len(samples)} generations are kept in"
                f" {work.path}: repeat the command to go on from there"
            ) from error
        except KeyboardInterrupt:
            kept = finished + len(measured)
            progress.show(f"stopping; {kept} of {len(samples)} generations are kept in {work.path}")
            raise
        finally:
            if measured:
                work.add(sorted(measured, key=lambda tokens: tokens.sample))
        finished += len(group)
        progress.advance(len(group))


def _sharing_prefixes(samples: Sequence[Sample], room: int) -> list[Sample]:
    """Samples in an order in which each prompt is prefilled once, not under every schedule: of as
    many prompts together as fit into a prefix cache of `room` tokens, with what they generate and
    what is scored."""
    part, parts, tokens = 0, dict[str, int](), 0
    for sample in samples:
        if sample.prompt.name not in parts:
            tokens += (own := len(sample.prompt.input_ids) + 2 * sample.new_tokens)
            if tokens > room:
                part, tokens = part + 1, own
            parts[sample.prompt.name] = part
    return sorted(samples, key=lambda sample: parts[sample.prompt.name])


def _batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Up to `size` samples each, of one switched schedule or of none."""
    for _, group in groupby(samples, lambda s: s.variant.switched and s.variant.schedule.name):
        together = list(group)
        for start in range(0, len(together), size):
            yield together[start : start + size]


def tokens_by_schedule(samples: Sequence[Sample], work: WorkFolder) -> dict[str, list[Tokens]]:
    """Everything measured so far, by the name of the variant's schedule."""
    measured = work.load()
    found: dict[str, list[Tokens]] = {sample.variant.schedule.name: [] for sample in samples}
    for sample in samples:
        if (row := measured.get(sample.number)) is not None:
            tokens = Tokens(sample.prompt.name, row.cached, row.rates)
            found[sample.variant.schedule.name].append(tokens)
    return found


def _measure_batch(
    endpoint: EngineEndpoint,
    samples: Sequence[Sample],
    measured: list[SampleTokens],
    progress: Progress,
) -> None:
    """Append to `measured` what each sample gives, as soon as it is scored."""
    count = progress.counter("measuring", len(samples), "generations")

    def compare(slot: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        sample = samples[slot]
        given = list(sample.prompt.response_ids[: sample.new_tokens])
        if given and answer["output_ids"] != given:
            raise CalibrationError(
                f"prompt {sample.prompt.name}: the engine generated other tokens than the given"
                " response; expected SGLang to apply the logit processor of the request"
            )
        return comparing_request(slot, sample.prompt.input_ids, answer["output_ids"])

    def keep(slot: int, answer: Mapping[str, Any]) -> None:
        sample = samples[slot]
        rates = exact_rates(answer)
        # The step that gives the token after n others attends to n cached tokens.
        cached = len(sample.prompt.input_ids) + 1 + np.arange(len(rates))
        kept = np.array([sample.variant.measures(int(n)) for n in cached], dtype=bool)
        kept &= ~np.isnan(rates)
        measured.append(SampleTokens(sample.number, cached[kept], rates[kept]))
        count()

    endpoint.generate_pairs([_request(s, i) for i, s in enumerate(samples)], compare, keep)


def _request(sample: Sample, slot: int) -> dict[str, Any]:
    prompt, variant = sample.prompt, sample.variant
    custom: dict[str, Any] = {"sparrow": variant.options} if variant.options else {}
    custom |= record_into(slot, len(prompt.input_ids))
    if prompt.response_ids:
        custom[_GIVEN] = list(prompt.response_ids)
    return {
        "input_ids": list(prompt.input_ids),
        "custom_logit_processor": _given_response() if prompt.response_ids else None,
        "sampling_params": {
            # Sample without truncation, as the acceptance rate compares whole distributions.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": sample.new_tokens,
            "ignore_eos": bool(prompt.response_ids),
            "custom_params": custom,
        },
    }


@cache
def _given_response() -> str:
    """An SGLang logit processor that allows one token per step, the next of the given response."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class OneToken(CustomLogitProcessor):  # type: ignore[misc]
        def __call__(
            self, logits: "torch.Tensor", custom_param_list: list[dict[str, Any]] | None = None
        ) -> "torch.Tensor":
            steps = [
                # After each chunk of a long prompt SGLang samples, too, and discards the token.
                parameters[_GIVEN][min(len(request.output_ids), len(parameters[_GIVEN]) - 1)]
                for parameters in custom_param_list or ()
                for request in [parameters["__req__"]]
            ]
            logits.fill_(-float("inf"))
            for row, token in enumerate(steps):
                logits[row, token] = 0.0
            return logits

    return str(OneToken.to_str())
