"""The job of a calibration, complete and checked before an engine starts.

In: the parsed command line. Out: the model's context, prompts, defaults and the settings that a
work folder belongs to.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sparrow_sglang.calibration import given_response
from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.measure import Unit, fixed_arm, schedule_arm, units_of_work
from sparrow_sglang.calibration.prompts import (
    UNSCORED,
    Prompt,
    builtin_prompts,
    prompts_digest,
    read_prompts,
    tokenizer_of,
)
from sparrow_sglang.calibration.rule import RuleChoice, rule_settings
from sparrow_sglang.calibration.store import WorkFolder
from sparrow_sglang.hf_config import linear_layers, model_value
from sparrow_sglang.json_values import cut
from sparrow_sglang.mismatch.token_bins import BIN_TOKENS, whole_pages
from sparrow_sglang.models import model_folder, model_problem, path_problem
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedule import NAME, PAGE_SIZE, BudgetSchedule
from sparrow_sglang.selection import SelectionRule

MATCHED_FIELDS = ("architectures", "hidden_size", "num_hidden_layers")
DEFAULT_TARGET = 0.86
PUBLISHED = "published"
CALIBRATED = "calibrated"
RULES = (PUBLISHED, CALIBRATED)
# Each is a fifth to a half larger than the one before, from what an 8K model needs to what a 40K
# model needs.
BUDGETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288)
SHORT_CONTEXT = 16384
# Arguments of the engine that the command sets, and what to do instead of setting them.
_OWN_ARGUMENTS = {
    "page_size": "pass --page-size",
    "random_seed": "pass --seed",
    "sparrow_schedule": "each budget is measured under a schedule of its own",
}
SHORT_BIN_TOKENS = 1024


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
        options: the command line's options, such as min_tokens, batch, new_tokens.
    """

    model: str
    model_path: str
    hf_config: Any
    context: int
    page_size: int
    bin_tokens: int
    prompts: list[Prompt]
    units: list[Unit]
    settings: dict[str, Any]
    folder: Path
    engine_args: dict[str, Any]
    targets: list[float]
    schedules: list[BudgetSchedule]
    out: Path
    options: argparse.Namespace
    rule: RuleChoice | None = None

    @cached_property
    def work(self) -> WorkFolder:
        """The finished units. Raises `CalibrationError` if the folder holds other settings."""
        return WorkFolder(self.folder, self.settings)

    @property
    def files(self) -> dict[Path, float]:
        """Schedule files to write and their targets."""
        return dict(zip(_schedule_files(self.out, self.targets), self.targets, strict=True))


def _untokenized(text: str | list[dict[str, Any]], add_special_tokens: bool = True) -> list[int]:
    """Two tokens for any text, to check a file's form without a tokenizer."""
    return [0, 0]


def require_files(args: argparse.Namespace) -> None:
    """Refuse missing or malformed files, before torch and SGLang are imported."""
    if problem := path_problem(args.model_path):
        raise CalibrationError(f"--model-path {args.model_path}: {problem}")
    if args.prompts is not None:
        read_prompts(args.prompts, _untokenized, sys.maxsize)
    for path in args.check or ():
        BudgetSchedule.from_json(path)


def calibration_job(args: argparse.Namespace) -> Job:
    """The job that calibrates schedules; raises `ValueError` on options that cannot work."""
    model, model_path, hf_config, context = find_model(args.model_path, args.engine_args)
    if args.rule != PUBLISHED and linear_layers(hf_config):
        raise CalibrationError(
            f"--rule {args.rule}: {model} has layers with linear attention, and rotates a part of"
            f" each head, which a choice of rotary pairs leaves out of account; expected --rule"
            f" {PUBLISHED}"
        )
    targets = args.target or [DEFAULT_TARGET]
    out = args.out or Path(f"{model}.json" if len(targets) > 1 else f"{model}-{targets[0]}.json")
    _require_names(_schedule_files(out, targets))
    bin_tokens = args.bin_tokens or default_bin_tokens(context, args.page_size)
    budgets = sorted(set(args.budgets or default_budgets(context, args.page_size)))
    arms = [fixed_arm(budget, args.page_size) for budget in budgets]
    if bin_tokens < 1 or bin_tokens % args.page_size:
        raise CalibrationError(
            f"--bin-tokens={bin_tokens}: expected a multiple of the page size {args.page_size}"
        )
    prompts = load_prompts(args, model_path, context, bin_tokens, "calibration")
    units = units_of_work(prompts, arms, args.samples, args.new_tokens, context - UNSCORED)
    settings = settings_of(args, model_path, prompts, context) | {"budgets": budgets}
    suffix = "" if args.rule == PUBLISHED else f"-{args.rule}"
    folder = args.work or out.parent / f"{model}-page{args.page_size}{suffix}.calibration"
    whole = whole_pages(context, args.page_size)
    return Job(
        model=model,
        model_path=model_path,
        hf_config=hf_config,
        context=context,
        page_size=args.page_size,
        bin_tokens=bin_tokens,
        prompts=prompts,
        units=units,
        settings=settings,
        folder=folder,
        engine_args=_engine_args(args, context, args.page_size, f"fixed-{whole}", prompts),
        targets=targets,
        schedules=[],
        out=out,
        options=args,
    )


def check_job(args: argparse.Namespace) -> Job:
    """The job that checks schedules; raises `ValueError` on options that cannot work."""
    model, model_path, hf_config, context = find_model(args.model_path, args.engine_args)
    schedules = [BudgetSchedule.from_json(path) for path in args.check]
    page_size = schedules[0].page_size
    names = [schedule.name for schedule in schedules]
    if len(set(names)) < len(names) or any(s.page_size != page_size for s in schedules):
        raise CalibrationError(
            f"--check: got the schedules {', '.join(names)} of page sizes"
            f" {sorted({s.page_size for s in schedules})}: expected different names and one page"
            " size; check them one after the other"
        )
    if args.target and len(args.target) > 1:
        raise CalibrationError(
            f"--target {' '.join(map(str, args.target))} with --check: expected one, or none to"
            " judge each schedule by its own"
        )
    if args.page_size not in (PAGE_SIZE, page_size):
        raise CalibrationError(
            f"--page-size {args.page_size} with --check: {names[0]} has pages of {page_size}; leave"
            " it out"
        )
    own = args.target[0] if args.target else None
    targets = []
    for schedule in schedules:
        if (target := own or schedule.tail_target) is None:
            raise CalibrationError(f"--check: {schedule.name} has no tail_target: pass --target")
        targets.append(target)
    first = Path(args.check[0])
    prompts = load_prompts(args, model_path, context, schedules[0].bin_tokens, "check")
    arms = [schedule_arm(schedule) for schedule in schedules]
    settings = settings_of(args, model_path, prompts, context) | {
        "page_size": page_size,
        "schedules": [
            [s.name, s.bin_tokens, s.budget_tokens, s.sink_pages, s.recent_pages, s.dense_layers]
            + ([rule_settings(s.selection)] if s.selection != SelectionRule() else [])
            for s in schedules
        ],
    }
    units = units_of_work(prompts, arms, args.samples, args.new_tokens, context - UNSCORED)
    return Job(
        model=model,
        model_path=model_path,
        hf_config=hf_config,
        context=context,
        page_size=page_size,
        bin_tokens=schedules[0].bin_tokens,
        prompts=prompts,
        units=units,
        settings=settings,
        folder=args.work or first.with_suffix(".check"),
        engine_args=_engine_args(args, context, page_size, ",".join(map(str, args.check)), prompts),
        targets=targets,
        schedules=schedules,
        out=args.out or first.with_suffix(".check.json"),
        options=args,
    )


def _engine_args(
    args: argparse.Namespace,
    context: int,
    page_size: int,
    schedule: str,
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    defaults = {
        "context_length": context,
        "page_size": page_size,
        "random_seed": args.seed,
        "sparrow_schedule": schedule,
    }
    for name, instead in _OWN_ARGUMENTS.items():
        if name in args.engine_args:
            raise CalibrationError(f"--engine-args {name} is not set there: {instead}")
    if (replicas := args.engine_args.get("dp_size", 1)) != 1:
        raise CalibrationError(
            f"--engine-args dp_size={replicas}: expected 1, as a response is compared on the engine"
            " that generated it; start one calibration for each GPU"
        )
    if any(prompt.response_ids for prompt in prompts):
        defaults |= given_response.ENGINE_ARGS
    return defaults | args.engine_args


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


def find_model(spec: str, engine_args: dict[str, Any]) -> tuple[str, str, Any, int]:
    """Name, path, config and context length of a model."""
    from transformers import AutoConfig

    path = model_folder(spec)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"--model-path {spec}: {model_problem(path, error)}") from None
    context = engine_args.get("context_length") or model_value(config, "max_position_embeddings")
    if context is None:
        raise CalibrationError(
            f"--model-path {spec}: its config has no max_position_embeddings; expected"
            " context_length in --engine-args"
        )
    return Path(spec).name, path, config, int(context)


def load_prompts(
    args: argparse.Namespace,
    model_path: str,
    context: int,
    bin_tokens: int,
    part: Literal["calibration", "check"],
) -> list[Prompt]:
    tokenize = tokenizer_of(model_path)
    if args.prompts is not None:
        return read_prompts(args.prompts, tokenize, context)
    return builtin_prompts(
        tokenize, context, bin_tokens, args.new_tokens, args.prompts_per_bin, part, args.seed
    )


def default_bin_tokens(context: int, page_size: int) -> int:
    tokens = SHORT_BIN_TOKENS if context <= SHORT_CONTEXT else BIN_TOKENS
    return tokens // page_size * page_size


def default_budgets(context: int, page_size: int) -> list[int]:
    least = BudgetSchedule.fixed(context * page_size, page_size)
    kept_pages = least.sink_pages + least.recent_pages
    return [b for b in BUDGETS if kept_pages * page_size < b < context] or [
        (kept_pages + 1) * page_size
    ]


def settings_of(
    args: argparse.Namespace, model_path: str, prompts: Sequence[Prompt], context: int
) -> dict[str, Any]:
    """Everything that the measurements depend on; a work folder belongs to one set of settings."""
    return {
        "model": _identity(args.model_path, model_path),
        "weights": _weights(args.model_path),
        "page_size": args.page_size,
        "context": context,
        "prompts": str(args.prompts or "built in"),
        "prompts_sha256": prompts_digest(prompts),
        "num_prompts": len({prompt.name for prompt in prompts}),
        "samples": args.samples,
        "new_tokens": args.new_tokens,
        "temperature": 1.0,
        "seed": args.seed,
        "engine_args": args.engine_args,
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


def origin(job: Job) -> dict[str, Any]:
    """The model, and the date, machine and versions of the measurement."""
    return {
        "model": job.model,
        "model_match": {
            key: value
            for key in MATCHED_FIELDS
            if (value := model_value(job.hf_config, key)) is not None
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
