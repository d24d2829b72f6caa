"""The job of a calibration, complete and checked before an engine starts.

In: the options of `sparrow calibrate`. Out: the model's context, prompts, the samples to measure,
and the settings that a work folder belongs to.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.measure import (
    GIVEN_RESPONSE_ENGINE_ARGS,
    DecodeVariant,
    Sample,
    fixed_budget,
    loaded_schedule,
    plan_samples,
)
from sparrow_sglang.calibration.options import (
    CALIBRATED,
    DEFAULT_TARGET,
    PUBLISHED,
    CalibrationOptions,
)
from sparrow_sglang.calibration.prompts import (
    UNSCORED,
    Prompt,
    builtin_prompts,
    prompts_digest,
    read_prompts,
    tokenizer_of,
)
from sparrow_sglang.calibration.rule import RuleChoice, rule_settings
from sparrow_sglang.calibration.work_folder import WorkFolder
from sparrow_sglang.hf_config import linear_layers, model_value
from sparrow_sglang.json_values import cut
from sparrow_sglang.mismatch.token_bins import BIN_TOKENS, whole_pages
from sparrow_sglang.models import model_folder, model_problem
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedule import NAME, PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import read_schedule
from sparrow_sglang.selection import SelectionRule

MATCHED_FIELDS = ("architectures", "hidden_size", "num_hidden_layers")
# Each is a fifth to a half larger than the one before, from what an 8K model needs to what a 40K
# model needs.
BUDGETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288)
SHORT_CONTEXT = 16384
SHORT_BIN_TOKENS = 1024
# Arguments of the engine that the command sets, and what to do instead of setting them.
_OWN_ARGUMENTS = {
    "page_size": "pass --page-size",
    "random_seed": "pass --seed",
    "sparrow_schedule": "each budget is measured under a schedule of its own",
}


class Model(NamedTuple):
    """`path` is the folder or hub name that the engine loads, `context` its longest sequence."""

    name: str
    path: str
    hf_config: Any
    context: int


@dataclass(frozen=True)
class Job:
    """The measurements to make, checked and complete before an engine starts.

    Attributes:
        bin_tokens: positions per bin.
        settings: everything that the measurements depend on.
        folder: where the measurements are kept.
        engine_args: arguments for `sglang.Engine`.
        targets: tails to hold, one for each schedule.
        schedules: the schedules to check; empty for a calibration.
        out: the file to write; for several schedules, their common name.
        rule: the selection rule of the schedules to write; None for the published one.
    """

    options: CalibrationOptions
    model: Model
    page_size: int
    bin_tokens: int
    prompts: list[Prompt]
    samples: list[Sample]
    settings: dict[str, Any]
    folder: Path
    engine_args: dict[str, Any]
    targets: list[float]
    schedules: list[BudgetSchedule]
    out: Path
    rule: RuleChoice | None = None

    @cached_property
    def work(self) -> WorkFolder:
        """The finished samples. Raises `CalibrationError` if the folder holds other settings."""
        return WorkFolder(self.folder, self.settings)

    @property
    def files(self) -> dict[Path, float]:
        """Schedule files to write and their targets."""
        return dict(zip(_schedule_files(self.out, self.targets), self.targets, strict=True))

    def samples_of(
        self, variants: Sequence[DecodeVariant], prompts: Sequence[Prompt] | None = None
    ) -> list[Sample]:
        """All samples of the prompts under these variants, as many per prompt as were asked for."""
        return plan_samples(
            self.prompts if prompts is None else prompts,
            variants,
            self.options.samples,
            self.options.new_tokens,
            self.model.context - UNSCORED,
        )


def calibration_job(options: CalibrationOptions) -> Job:
    """The job that calibrates schedules; raises `ValueError` on options that cannot work."""
    model = find_model(options.model_path, options.engine_args)
    linear = linear_layers(model.hf_config)
    if options.rule is None:
        options = replace(options, rule=PUBLISHED if linear else CALIBRATED)
    elif options.rule != PUBLISHED and linear:
        raise CalibrationError(
            f"--rule {options.rule}: {model.name} has layers with linear attention, and rotates a"
            " part of each head, which a choice of rotary pairs leaves out of account; expected"
            f" --rule {PUBLISHED}"
        )
    targets = list(options.target) or [DEFAULT_TARGET]
    name = model.name if len(targets) > 1 else f"{model.name}-{targets[0]}"
    out = options.out or Path(f"{name}.json")
    _require_names(_schedule_files(out, targets))
    page_size = options.page_size
    bin_tokens = options.bin_tokens or default_bin_tokens(model.context, page_size)
    budgets = sorted(set(options.budgets or default_budgets(model.context, page_size)))
    variants = [fixed_budget(budget, page_size) for budget in budgets]
    if bin_tokens < 1 or bin_tokens % page_size:
        raise CalibrationError(
            f"--bin-tokens={bin_tokens}: expected a multiple of the page size {page_size}"
        )
    suffix = "" if options.rule == PUBLISHED else f"-{options.rule}"
    return _job(
        options,
        model,
        page_size,
        bin_tokens,
        variants,
        part="calibration",
        settings={"budgets": budgets},
        schedule=f"fixed-{whole_pages(model.context, page_size)}",
        folder=options.work or out.parent / f"{model.name}-page{page_size}{suffix}.calibration",
        out=out,
        targets=targets,
        schedules=[],
    )


def check_job(options: CalibrationOptions) -> Job:
    """The job that checks schedules; raises `ValueError` on options that cannot work."""
    model = find_model(options.model_path, options.engine_args)
    schedules = [read_schedule(spec) for spec in options.check]
    page_size = schedules[0].page_size
    names = [schedule.name for schedule in schedules]
    if len(set(names)) < len(names) or any(s.page_size != page_size for s in schedules):
        raise CalibrationError(
            f"--check: got the schedules {', '.join(names)} of page sizes"
            f" {sorted({s.page_size for s in schedules})}: expected different names and one page"
            " size; check them one after the other"
        )
    if len(options.target) > 1:
        raise CalibrationError(
            f"--target {' '.join(map(str, options.target))} with --check: expected one, or none to"
            " judge each schedule by its own"
        )
    if options.page_size not in (PAGE_SIZE, page_size):
        raise CalibrationError(
            f"--page-size {options.page_size} with --check: {names[0]} has pages of {page_size};"
            " leave it out"
        )
    targets = []
    for schedule in schedules:
        target = options.target[0] if options.target else schedule.tail_target
        if target is None:
            raise CalibrationError(f"--check: {schedule.name} has no tail_target: pass --target")
        targets.append(target)
    first = options.check[0].removesuffix(".json")
    measured = [
        [s.name, s.bin_tokens, s.budget_tokens, s.sink_pages, s.recent_pages, s.dense_layers]
        + ([rule_settings(s.selection)] if s.selection != SelectionRule() else [])
        for s in schedules
    ]
    return _job(
        options,
        model,
        page_size,
        schedules[0].bin_tokens,
        [loaded_schedule(schedule) for schedule in schedules],
        part="check",
        settings={"page_size": page_size, "schedules": measured},
        schedule=",".join(map(str, options.check)),
        folder=options.work or Path(f"{first}.check"),
        out=options.out or Path(f"{first}.check.json"),
        targets=targets,
        schedules=schedules,
    )


def _job(
    options: CalibrationOptions,
    model: Model,
    page_size: int,
    bin_tokens: int,
    variants: Sequence[DecodeVariant],
    *,
    part: Literal["calibration", "check"],
    settings: dict[str, Any],
    schedule: str,
    **fields: Any,
) -> Job:
    """The job whose prompts are decoded under `variants`; `schedule` is what the engine loads."""
    tokenize = tokenizer_of(model.path)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, tokenize, model.context)
    else:
        prompts = builtin_prompts(
            tokenize,
            model.context,
            bin_tokens,
            options.new_tokens,
            options.prompts_per_bin,
            part,
            options.seed,
        )
    room = model.context - UNSCORED
    samples = plan_samples(prompts, variants, options.samples, options.new_tokens, room)
    if not samples:
        raise CalibrationError(
            "no generation would decode sparsely: the budgets hold every prompt with its new"
            " tokens; expected longer prompts, more --new-tokens or smaller --budgets"
        )
    return Job(
        options=options,
        model=model,
        page_size=page_size,
        bin_tokens=bin_tokens,
        prompts=prompts,
        samples=samples,
        settings=_settings(options, model, prompts) | settings,
        engine_args=_engine_args(options, model.context, page_size, schedule, prompts),
        **fields,
    )


def _engine_args(
    options: CalibrationOptions,
    context: int,
    page_size: int,
    schedule: str,
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    defaults = {
        "context_length": context,
        "page_size": page_size,
        "random_seed": options.seed,
        "sparrow_schedule": schedule,
    }
    for name, instead in _OWN_ARGUMENTS.items():
        if name in options.engine_args:
            raise CalibrationError(f"--engine-args {name} is not set there: {instead}")
    if (replicas := options.engine_args.get("dp_size", 1)) != 1:
        raise CalibrationError(
            f"--engine-args dp_size={replicas}: expected 1, as a response is compared on the engine"
            " that generated it; start one calibration for each GPU"
        )
    if any(prompt.response_ids for prompt in prompts):
        defaults |= GIVEN_RESPONSE_ENGINE_ARGS
    return defaults | options.engine_args


def _schedule_files(out: Path, targets: Sequence[float]) -> list[Path]:
    """One file per target; each schedule has the name of its file, without .json."""
    if len(targets) == 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{target}") for target in targets]


def _require_names(files: Sequence[Path]) -> None:
    for path in files:
        if not NAME.fullmatch(path.stem):
            raise CalibrationError(
                f"--out {cut(str(path))}: expected a file name of 1 to 64 letters, digits, '.', '_'"
                " and '-' before .json, which becomes the name of the schedule"
            )


def find_model(spec: str, engine_args: dict[str, Any]) -> Model:
    """The model that `spec` names. Raises `CalibrationError` if it has no config or context."""
    from transformers import AutoConfig

    path = model_folder(spec)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises anything on a config that it does not expect
        raise CalibrationError(f"--model-path {spec}: {model_problem(path, error)}") from None
    context = engine_args.get("context_length") or model_value(config, "max_position_embeddings")
    if context is None:
        raise CalibrationError(
            f"--model-path {spec}: its config has no max_position_embeddings; expected"
            " context_length in --engine-args"
        )
    return Model(Path(spec).name, path, config, int(context))


def default_bin_tokens(context: int, page_size: int) -> int:
    tokens = SHORT_BIN_TOKENS if context <= SHORT_CONTEXT else BIN_TOKENS
    return tokens // page_size * page_size


def default_budgets(context: int, page_size: int) -> list[int]:
    least = BudgetSchedule.fixed(context * page_size, page_size)
    kept_pages = least.sink_pages + least.recent_pages
    return [b for b in BUDGETS if kept_pages * page_size < b < context] or [
        (kept_pages + 1) * page_size
    ]


def _settings(
    options: CalibrationOptions, model: Model, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Everything that the measurements depend on; a work folder belongs to one set of settings."""
    return {
        "model": _identity(options.model_path, model.path),
        "weights": _weights(options.model_path),
        "page_size": options.page_size,
        "context": model.context,
        "prompts": str(options.prompts or "built in"),
        "prompts_sha256": prompts_digest(prompts),
        "num_prompts": len({prompt.name for prompt in prompts}),
        "samples": options.samples,
        "new_tokens": options.new_tokens,
        "temperature": 1.0,
        "seed": options.seed,
        "engine_args": options.engine_args,
    }


def _identity(spec: str, path: str) -> str:
    """Identify a model by its full path if it is a folder, else by its name.

    The folder's name would not do, as all checkpoints of a run are in folders called `model`. Of an
    embedded model it does: its path is that of this machine's cache.
    """
    if Path(spec).is_dir():
        return str(Path(path).resolve())
    return spec if path == spec else Path(path).name


def _weights(spec: str) -> str:
    """Digest of names, sizes and times of a folder's files of weights; empty for other models."""
    if not Path(spec).is_dir():
        return ""
    files = [file for kind in ("*.safetensors", "*.bin") for file in Path(spec).glob(kind)]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def origin(model: Model) -> dict[str, Any]:
    """The model, and the date, machine and versions of the measurement."""
    return {
        "model": model.name,
        "model_match": {
            key: value
            for key in MATCHED_FIELDS
            if (value := model_value(model.hf_config, key)) is not None
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
