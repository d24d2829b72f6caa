"""`sparrow plan`: predicted times of decode steps."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.common import MODELS
from sparrow_sglang.command_line import count, rate, table
from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import hub_config, model_folder
from sparrow_sglang.planning.model_shape import ModelShape, positive_field
from sparrow_sglang.planning.rounds import Plan, plans
from sparrow_sglang.planning.step_time import (
    ASSUMED,
    GPUS,
    Acceptance,
    Prediction,
    constants,
    fits,
    memory_bytes,
    predict,
)
from sparrow_sglang.plugin.names import DEFAULT_DRAFTS
from sparrow_sglang.schedules.names import AUTO, load_schedule, read_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import PAGE_SIZE, BudgetSchedule, ScheduleError

DESCRIPTION = """\
Predict from a model's shapes and measured steps how long a decode step takes:
of stock SGLang, lossless and sparse. Needs no GPU.
"""
EPILOG = None

MODEL, GPU = "qwen3-1.7b", "h200"
ROUNDS = plans(DEFAULT_DRAFTS + 1, looks_up=True)
BATCHES, LENGTHS = (1, 16, 64), (1024, 8192, 32768)
NO_GAIN = "no gain, so decode stays dense"
_LEAST_GAIN = 1.03
_LONGEST = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shown_default = "(default: %(default)s)"
    model = f"folder with a config.json, smollm2-135m, or a name on the hub {shown_default}"
    add("--model-path", default=MODEL, help=model)
    add("--gpu", type=str.lower, choices=sorted(GPUS), default=GPU, help=shown_default)
    add("--batch", type=count, nargs="+", default=BATCHES, help=f"sequences {shown_default}")
    add("--length", type=count, nargs="+", help="cached tokens of a sequence; each gets a row")
    schedule = "of sparse steps: shipped name, .json file, fixed-<tokens>, or auto: the model's own"
    add("--schedule", default=AUTO, help=f"{schedule} {shown_default}")
    drafts = f"acceptance of sparse drafts, for lossless decoding (default: {ASSUMED.drafts})"
    add("--acceptance", type=rate, default=ASSUMED.drafts, help=drafts)
    lookups = f"acceptance of looked-up tokens (default: {ASSUMED.lookups})"
    add("--lookup-acceptance", type=rate, default=ASSUMED.lookups, help=lookups)


def run(args: argparse.Namespace) -> int:
    name, config = _read_config(args.model_path)
    shape, gpu = ModelShape.from_config(config), GPUS[args.gpu]
    schedule = _read_schedule(args.schedule, config)
    cases = [(batch, length) for batch in args.batch for length in _lengths(args.length, config)]
    acceptance = Acceptance(args.acceptance, args.lookup_acceptance)
    fitting = predictions(shape, args.gpu, cases, acceptance, schedule=schedule)
    if not fitting:
        needed = min(memory_bytes(shape, gpu, *case) for case in cases) / 1e9
        raise InputError(
            f"--gpu {args.gpu}: no case fits into {gpu.memory / 1e9:.0f} GB: the smallest needs"
            f" {needed:,.0f} GB for weights and KV, a tenth stays free"
        )
    print(f"{name} on {args.gpu.upper()}\nlossless: {verdict(fitting, 'lossless')}")
    if schedule is None:
        print("sparse: no schedule is shipped for this model; `sparrow calibrate` makes one")
    else:
        state = schedule.describe_calibration(config)
        print(f"sparse: {verdict(fitting, 'sparse')}, by schedule {schedule.name} ({state})")
    print(f"\n{_table(fitting, schedule is not None)}\n")
    if left_out := [case for case in cases if not fits(shape, gpu, *case)]:
        shown = ", ".join(f"{batch} x {length:,}" for batch, length in left_out)
        print(f"do not fit into memory: {shown}")
    print(
        f"lossless ms: for each token, with {args.acceptance} of the sparse drafts and"
        f" {args.lookup_acceptance} of the looked-up tokens accepted"
    )
    fitted = constants()
    on, error = fitted["measured_on"], fitted["mean_error"]
    scaled = "" if args.gpu in on else f"; {args.gpu.upper()} is scaled by its data sheet"
    print(
        f"fitted to {fitted['steps']} measured steps on {', '.join(on).upper()}, with a mean error"
        f" of {error:.0%}{scaled}"
    )
    return 0


def predictions(
    shape: ModelShape,
    gpu: str,
    cases: Sequence[tuple[int, int]],
    acceptance: Acceptance = ASSUMED,
    rounds: Sequence[Plan] = ROUNDS,
    drafting: BudgetSchedule | None = None,
    schedule: BudgetSchedule | None = None,
) -> list[Prediction]:
    """Of those `cases`, batches and lengths, that fit into the GPU's memory."""
    drafting = drafting or BudgetSchedule.drafts()
    return [
        predict(shape, GPUS[gpu], case, acceptance, rounds, drafting, schedule)
        for case in cases
        if fits(shape, GPUS[gpu], *case)
    ]


def verdict(predicted: Sequence[Prediction], mode: str) -> str:
    """The most that "lossless" or "sparse" decode gains over stock, and where, in one line."""
    gain, best = max((each.dense_ms / getattr(each, f"{mode}_ms"), each) for each in predicted)
    if gain < _LEAST_GAIN:
        return NO_GAIN
    return f"up to {gain:.2f}x as fast as stock, at {best.batch} x {best.cached:,} tokens"


def _lengths(chosen: Sequence[int] | None, config: Mapping[str, Any]) -> list[int]:
    config, key = text_config(config), "max_position_embeddings"
    positions = _LONGEST if config.get(key) is None else positive_field(config, key)
    if chosen and max(chosen) > positions:
        raise InputError(f"--length {max(chosen)}: expected the model's {positions} at most")
    fitting = [length for length in LENGTHS if length <= positions]
    return sorted(chosen or fitting or [positions])


def _table(predicted: Sequence[Prediction], with_sparse: bool) -> str:
    heads = ["batch", "cached", "stock ms", "lossless ms", "speed-up", "drafts", "lookups"]
    rows: list[list[str]] = [heads + ["sparse ms", "speed-up"] * with_sparse]
    for each in predicted:
        cells = [str(each.batch), f"{each.cached:,}", f"{each.dense_ms:.2f}"]
        cells += [f"{each.lossless_ms:.2f}", f"{each.dense_ms / each.lossless_ms:.2f}x"]
        cells += [str(each.round.drafts), str(each.round.lookups)]
        if with_sparse:
            cells += [f"{each.sparse_ms:.2f}", f"{each.dense_ms / each.sparse_ms:.2f}x"]
        rows.append(cells)
    return table(rows, ">")


def _read_config(model_path: str) -> tuple[str, Mapping[str, Any]]:
    """A short name of the model and the fields of its config.json."""
    path, folder = Path(model_path), model_folder(model_path)
    if folder != model_path:
        name, path = model_path, Path(folder) / "config.json"
    elif path.is_dir():
        name, path = path.resolve().name, path / "config.json"
    elif path.exists():
        name = path.resolve().parent.name
    else:
        # The benchmarks ship the shapes of some models.
        name, shipped = path.name, MODELS / path.name.lower() / "config.json"
        path = shipped if shipped.exists() else hub_config(model_path)
    return name, read_object(path, "a model's config.json for --model-path")


def _read_schedule(spec: str, config: Mapping[str, Any]) -> BudgetSchedule | None:
    """None for a model without a schedule of its own: drafts read too little for tokens."""
    if spec.endswith(".json"):
        return read_schedule(spec).for_model(config)
    if spec != AUTO:
        return load_schedule(spec, PAGE_SIZE).for_model(config)
    try:
        return schedule_for_model(config, PAGE_SIZE)
    except ScheduleError:
        return None
