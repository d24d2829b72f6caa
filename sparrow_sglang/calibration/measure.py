"""Measure samples with an SGLang engine: the acceptance rate of every sparsely decoded token."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.job import Job, engine_dtype
from sparrow_sglang.calibration.samples import Sample, Tokens, WorkFolder
from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import EngineEndpoint
from sparrow_sglang.client.engine import start_engine
from sparrow_sglang.mismatch.exact_rates import (
    comparing_request,
    exact_rates,
    record_into,
    recording,
)
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedules.schedule import BudgetSchedule


def measure_missing(job: Job) -> dict[str, float]:
    """Measure the samples that the job's work folder lacks, if any. Returns the cost: seconds, and
    GiB in use on the first GPU; empty if nothing was missing. Raises as `measure`."""
    if len(job.work.load()) == len(job.samples):
        return {}
    import torch

    began = time.monotonic()
    with ExitStack() as stack, closing(Progress(len(job.samples), "generation")) as progress:
        start = Path(stack.enter_context(TemporaryDirectory())) / "schedule.json"
        job.start.save(start)
        engine_args = job.engine_args | {"sparrow_schedule": str(start)}
        progress.show("starting the engine")
        with recording(job.options.batch, min(job.options.new_tokens, job.model.context)):
            engine = stack.enter_context(running_engine(job.model.path, engine_args))
        measure(engine, job.samples, job.work, job.options.batch, progress)
        cost: dict[str, float] = {"seconds": round(time.monotonic() - began)}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(0)
            cost["gpu_memory_gib"] = round((total - free) / 2**30, 1)
    return cost


@contextmanager
def running_engine(model_path: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    """An engine with sparse decode that takes token ids; `CalibrationError` if it does not start.
    Without a GPU it has room for four sequences of full length."""
    import torch

    defaults: dict[str, Any] = {
        "attention_backend": BACKEND,
        "skip_tokenizer_init": True,
        # A prefill pass replayed from a CUDA graph would not run the comparison.
        "disable_prefill_cuda_graph": True,
    }
    if dtype := engine_dtype(engine_args):
        defaults["dtype"] = dtype
    if not torch.cuda.is_available():
        defaults["max_total_tokens"] = 4 * int(engine_args.get("context_length", 4096))
    try:
        arguments = {"model_path": model_path} | defaults | engine_args
        engine = start_engine(arguments, on_death=stop_waiting)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise CalibrationError(f"the engine does not start: {error}") from error
    try:
        yield engine
    finally:
        engine.shutdown()


def stop_waiting(engine: Any) -> None:
    """Make the call that waits for the engine, or the next one, raise `RuntimeError`."""
    engine.loop.call_soon_threadsafe(engine.loop.stop)


def measure(
    engine: Any, samples: Sequence[Sample], work: WorkFolder, batch: int, progress: Progress
) -> None:
    """Measure the samples that `work` does not hold yet, at most `batch` at a time. Raises
    `CalibrationError` if the engine dies or refuses, `OSError` on a full disk. Whatever ends the
    measurement, finished samples are kept."""
    endpoint = EngineEndpoint(engine)
    done = work.load().keys()
    missing = [sample for sample in samples if sample.number not in done]
    room: int = engine.get_server_info()["max_total_num_tokens"]
    if any(sample.switched for sample in missing):
        missing = _sharing_prefixes(missing, room)
    finished = len(samples) - len(missing)
    progress.advance(finished)
    active: BudgetSchedule | None = None
    for group in _batches(missing, batch, room):
        measured: dict[int, Tokens] = {}
        try:
            schedule = group[0].schedule
            if group[0].switched and schedule != active:
                set_schedule(engine, schedule)
                active = schedule
            progress.prefix = f"{finished}/{len(samples)} measured, "
            _measure_batch(endpoint, group, measured, progress)
        # Not only EndpointError: if a process of the engine dies, its event loop is stopped, which
        # raises a plain RuntimeError.
        except RuntimeError as error:
            raise CalibrationError(
                f"the engine failed ({error}); {finished + len(measured)} of {len(samples)}"
                f" generations are kept in {work.path}: repeat the command to resume"
            ) from error
        except KeyboardInterrupt:
            kept = f"{finished + len(measured)} of {len(samples)} generations are kept in"
            progress.print_line(f"stopping; {kept} {work.path}")
            raise
        finally:
            if measured:
                work.add(dict(sorted(measured.items())))
        finished += len(group)
        progress.advance(len(group))


def _sharing_prefixes(samples: Sequence[Sample], room: int) -> list[Sample]:
    """Samples schedule by schedule, of as many prompts together as fit into a prefix cache of
    `room` tokens: each prompt is prefilled once."""
    part, parts, tokens = 0, dict[str, int](), 0
    for sample in samples:
        if sample.prompt.name not in parts:
            tokens += _tokens(sample, ())
            if tokens > room:
                part, tokens = part + 1, _tokens(sample, ())
            parts[sample.prompt.name] = part
    order = {name: i for i, name in enumerate(dict.fromkeys(s.schedule.name for s in samples))}
    return sorted(samples, key=lambda s: (parts[s.prompt.name], order[s.schedule.name]))


def _batches(samples: Sequence[Sample], size: int, room: int) -> Iterator[list[Sample]]:
    """Up to `size` samples each, of one switched schedule or of none, that fit into `room` tokens.
    Where they do not fit, SGLang scores a generation only after all that are waiting."""
    for _, group in groupby(samples, lambda sample: sample.switched and sample.schedule.name):
        batch: list[Sample] = []
        tokens = 0
        for sample in group:
            more = _tokens(sample, batch)
            if batch and (len(batch) == size or tokens + more > room):
                yield batch
                batch, tokens, more = [], 0, _tokens(sample, ())
            batch.append(sample)
            tokens += more
        yield batch


def _tokens(sample: Sample, others: Sequence[Sample]) -> int:
    """KV tokens of a sample and of its scoring beside `others`, which may share its prefix."""
    shared = any(other.prompt is sample.prompt for other in others)
    return (0 if shared else len(sample.prompt.input_ids)) + 2 * sample.new_tokens


def _measure_batch(
    endpoint: EngineEndpoint,
    samples: Sequence[Sample],
    measured: dict[int, Tokens],
    progress: Progress,
) -> None:
    count = progress.counter("measuring", len(samples), "generations")

    def compare(slot: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        return comparing_request(slot, samples[slot].prompt.input_ids, answer["output_ids"])

    def keep(slot: int, answer: Mapping[str, Any]) -> None:
        sample = samples[slot]
        rates = exact_rates(answer)
        # The step that gives the token after n others attends to n cached tokens.
        cached = len(sample.prompt.input_ids) + 1 + np.arange(len(rates))
        sparse = (sample.schedule.tokens_read(cached) < cached) & ~np.isnan(rates)
        measured[sample.number] = Tokens(sample.prompt.name, cached[sparse], rates[sparse])
        count()

    endpoint.generate_pairs([_request(s, i) for i, s in enumerate(samples)], compare, keep)


def _request(sample: Sample, slot: int) -> dict[str, Any]:
    prompt = sample.prompt
    custom = record_into(slot, len(prompt.input_ids))
    if not sample.switched:
        custom["sparrow"] = {"kv_budget_tokens": sample.schedule.budget_tokens[0]}
    return {
        "input_ids": list(prompt.input_ids),
        "sampling_params": {
            # Sample without truncation, as the acceptance rate compares whole distributions.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": sample.new_tokens,
            "custom_params": custom,
        },
    }
