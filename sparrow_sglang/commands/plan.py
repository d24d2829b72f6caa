"""`sparrow plan`: predicted times of decode steps."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.common import MODELS
from sparrow_sglang.command_line import count, table
from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import hub_config, model_folder
from sparrow_sglang.planning.model_shape import KV_ITEMSIZES, ModelShape
from sparrow_sglang.planning.step_time import (
    GPUS,
    MEMORY,
    constants,
    fp8_pays,
    local_gpu,
    lossless_ms,
    step_bytes,
    step_time,
)
from sparrow_sglang.plugin.names import DEFAULT_DRAFTS, DRAFT_WEIGHTS, FP8
from sparrow_sglang.schedules.names import AUTO, load_schedule, read_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import PAGE_SIZE, PAGE_SIZES, BudgetSchedule, ScheduleError

MODEL, BATCH, ACCEPTANCE = "qwen3-1.7b", 16, 0.93
LENGTHS = (2048, 4096, 8192, 16384, 32768)
NO_GAIN = 1.03
"""Predicted speed-ups below this one are no gain."""
_LONGEST = 2**20
_SAMPLES = 64
_HEADS = (
    *("cached", "read", "dense ms", "sparse ms", "speed-up", "response"),
    *("lossless ms", "speed-up", "response", "drafts"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is predicted from; `batch` sequences decode together on `gpu`. `drafting` is the
    schedule of drafts of lossless decoding, `draft_weights` one of `DRAFT_WEIGHTS`."""

    shape: ModelShape
    schedule: BudgetSchedule
    drafting: BudgetSchedule
    gpu: str
    batch: int
    draft_weights: str = AUTO

    @cached_property
    def fp8_drafts(self) -> bool:
        if self.draft_weights == AUTO:
            return fp8_pays(self.shape, self.gpu)
        return self.draft_weights == FP8

    def ms(
        self, cached: int, schedule: BudgetSchedule | None = None, fp8_weights: bool = False
    ) -> float:
        """Milliseconds of a step at `cached` tokens; dense without a schedule."""
        return step_time(self.shape, self.gpu, self.batch, cached, schedule, fp8_weights).total

    def speedup(self, cached: int) -> float:
        """Dense over sparse time of a step at `cached` tokens."""
        return self.ms(cached) / self.ms(cached, self.schedule)

    def lossless(
        self, cached: int, acceptance: float, most: int = DEFAULT_DRAFTS
    ) -> tuple[float, int]:
        """Milliseconds a token of lossless decoding at `cached` tokens, and drafts of a round."""
        draft = self.ms(cached, self.drafting, self.fp8_drafts)
        return lossless_ms(self.ms(cached), draft, acceptance, most)

    def response_speedup(self, cached: int, ms: Callable[[int], float]) -> float:
        """Time of all dense steps from an empty cache to `cached` tokens, over that of steps that
        take `ms` each."""
        lengths = [-(-cached * (i + 1) // _SAMPLES) for i in range(_SAMPLES)]
        return sum(map(self.ms, lengths)) / sum(map(ms, lengths))

    def reason(self, cached: int) -> str:
        """Where a step's time goes at `cached` tokens, in a sentence or two."""
        dense = step_time(self.shape, self.gpu, self.batch, cached)
        sparse = step_time(self.shape, self.gpu, self.batch, cached, self.schedule)
        read = step_bytes(self.shape, 1, cached, self.schedule).read
        if read >= cached:
            covers = f"the budget of {self.schedule.budget_at(cached):,}"
            if cached <= self.schedule.dense_tokens:
                covers = f"dense_tokens={self.schedule.dense_tokens}"
            return f"nothing is sparse at {cached:,} tokens: {covers} covers them"
        shares = {"KV": dense.kv, "weights": dense.weights, "fixed cost": dense.fixed}
        shown = ", ".join(f"{name} {ms / dense.total:.0%}" for name, ms in shares.items())
        return (
            f"a dense step at {cached:,} tokens: {shown}; sparse decode reads {read / cached:.0%}"
            f" of the KV and takes {sparse.selection:.2f} ms to select it"
        )

    def verdict(self, lengths: Sequence[int]) -> str:
        """What these cached tokens gain, in one line."""
        best = max(lengths, key=self.speedup)
        if (gain := self.speedup(best)) >= NO_GAIN:
            return f"{gain:.2f}x as fast as dense at {best:,} tokens"
        # `plugin.timing` does not time models with partial layers.
        timed = not self.shape.partial_layers
        why = "decodes densely where that is faster" if timed else "dense decode is as fast"
        return f"no gain up to {lengths[-1]:,} tokens: {why}"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        description="Predict from a model's shapes and measured steps how long a decode step takes,"
        " dense, sparse and lossless. Needs no GPU.",
    )
    add = parser.add_argument
    shown_default = "(default: %(default)s)"
    model = f"folder with a config.json, smollm2-135m, or a name on the hub {shown_default}"
    add("--model-path", default=MODEL, help=model)
    schedule = "shipped name, .json file, fixed-<tokens>, or auto: the model's own, else drafts"
    add("--schedule", default=AUTO, help=f"{schedule} {shown_default}")
    page = f"tokens per page (default: that of a .json file, else {PAGE_SIZE})"
    add("--page-size", type=int, choices=PAGE_SIZES, help=page)
    add("--length", type=count, nargs="+", help="cached tokens of a sequence; each gets a row")
    add("--batch", type=count, default=BATCH, help=f"sequences on one GPU {shown_default}")
    add("--kv-cache-dtype", choices=KV_ITEMSIZES, default="auto", help=shown_default)
    add("--gpu", choices=sorted(GPUS), default=local_gpu(), help=shown_default)
    rate = f"mean acceptance rate of drafts, for lossless decoding {shown_default}"
    add("--acceptance", type=float, default=ACCEPTANCE, help=rate)
    weights = "weights that drafts of lossless decoding use; auto: FP8 copies where they pay"
    add("--draft-weights", choices=DRAFT_WEIGHTS, default=AUTO, help=f"{weights} {shown_default}")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.acceptance < 1:
        raise InputError(f"--acceptance {args.acceptance}: expected a rate from 0 to below 1")
    name, config = _read_config(args.model_path)
    shape = ModelShape.from_config(config)
    shape = dataclasses.replace(shape, kv_itemsize=KV_ITEMSIZES[args.kv_cache_dtype])
    schedule = _read_schedule(args.schedule, config, args.page_size).for_model(config)
    drafts = BudgetSchedule.drafts(args.page_size or PAGE_SIZE)
    drafting = drafts if args.schedule == AUTO else schedule
    plan = Plan(shape, schedule, drafting, args.gpu, args.batch, args.draft_weights)
    lengths = _lengths(args.length, config)
    state = schedule.describe_calibration(config) if schedule.calibrated else "not calibrated"
    print(
        f"{name}, schedule {schedule.name} ({state}), batch of {args.batch} on"
        f" {args.gpu.upper()}: {plan.verdict(lengths)}\n"
    )
    print(_table(plan, lengths, args.acceptance))
    for length in dict.fromkeys((lengths[0], lengths[-1])):
        print(f"\n{plan.reason(length)}", end="")
    moved = step_bytes(shape, args.batch, lengths[-1])
    if (needed := moved.weights + moved.kv) > MEMORY[args.gpu]:
        print(
            f"\n{args.batch} sequences of {lengths[-1]:,} tokens do not fit: they need at least"
            f" {needed / 1e9:,.0f} GB for weights and KV",
            end="",
        )
    measured = {Path(file).parent.name for file in constants()["fitted_to"]}
    scaled = "" if args.gpu in measured else f"; {args.gpu.upper()} is scaled by its bandwidth"
    weights = "FP8 copies of the weights" if plan.fp8_drafts else "the model's weights"
    rate = (
        f"drafts by schedule {drafting.name} and {weights}, accepted at a rate of {args.acceptance}"
    )
    lossless = "" if shape.partial_layers else f"\nlossless: {rate}; 0 drafts are dense steps"
    print(
        "\n\nread: KV tokens per step, mean over layers; response: all steps up to this length"
        f"{lossless}\nfitted to measured steps on {', '.join(sorted(measured)).upper()}{scaled}"
    )
    return 0


def _lengths(chosen: Sequence[int] | None, config: Mapping[str, Any]) -> list[int]:
    positions = text_config(config).get("max_position_embeddings") or _LONGEST
    if chosen and max(chosen) > positions:
        raise InputError(f"--length {max(chosen)}: expected the model's {positions} at most")
    fitting = [length for length in LENGTHS if length <= positions]
    return sorted(chosen or fitting or [positions])


def _table(plan: Plan, lengths: Sequence[int], acceptance: float) -> str:
    rows: list[Sequence[str]] = [_HEADS]
    for cached in lengths:
        dense, sparse = plan.ms(cached), plan.ms(cached, plan.schedule)
        read = step_bytes(plan.shape, 1, cached, plan.schedule).read
        cells = [f"{cached:,}", f"{read:,.0f}" if read < cached else "all"]
        cells += [f"{dense:.2f}", f"{sparse:.2f}", f"{dense / sparse:.2f}x"]
        response = plan.response_speedup(cached, lambda n: plan.ms(n, plan.schedule))
        cells += [f"{response:.2f}x"]
        # Lossless decoding rejects models with partial layers.
        if not plan.shape.partial_layers:
            lossless, drafts = plan.lossless(cached, acceptance)
            response = plan.response_speedup(cached, lambda n: plan.lossless(n, acceptance)[0])
            cells += [f"{lossless:.2f}", f"{dense / lossless:.2f}x", f"{response:.2f}x"]
            cells += [str(drafts)]
        rows.append(cells)
    rows[0] = _HEADS[: len(rows[1])]
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


def _read_schedule(spec: str, config: Mapping[str, Any], page_size: int | None) -> BudgetSchedule:
    if page_size is None and spec.endswith(".json"):
        return read_schedule(spec)
    page_size = page_size or PAGE_SIZE
    if spec == AUTO:
        try:
            return schedule_for_model(config, page_size)
        except ScheduleError:
            return BudgetSchedule.drafts(page_size)
    return load_schedule(spec, page_size)
