"""The job of a calibration or a check, complete and validated before an engine starts."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.prompts import (
    UNSCORED,
    Prompt,
    builtin_prompts,
    prompts_digest,
    read_prompts,
    tokenizer_of,
)
from sparrow_sglang.calibration.samples import Sample, WorkFolder, plan_samples
from sparrow_sglang.hf_config import linear_layers, model_value
from sparrow_sglang.json_values import cut
from sparrow_sglang.mismatch.tail import BIN_TOKENS, tail_bin_tokens, whole_pages
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder, model_problem, path_problem
from sparrow_sglang.provenance import device_name, provenance
from sparrow_sglang.schedules.names import read_schedule
from sparrow_sglang.schedules.schedule import (
    INT4,
    NAME,
    PAGE_SIZE,
    PUBLISHED,
    BudgetSchedule,
    SelectionRule,
)

DEFAULT_TARGET = 0.86
# Each is a fifth to a half larger than the one before. Models with two KV heads need half of the
# context and more.
BUDGETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288,
           16384, 24576)  # fmt: skip
SHORT_CONTEXT = 16384
SHORT_BIN_TOKENS = 1024
PROMPTS_PER_BIN = 24
_DECODED_BY = (
    *("name", "bin_tokens", "budget_tokens", "sink_pages", "recent_pages", "dense_layers"),
    "selection",
)
_MORE_SPARSE = "longer prompts, more --new-tokens or smaller budgets"
# dp_size is one, as a response is compared on the engine that generated it.
RESERVED = (
    *("model_path", "attention_backend", "page_size", "random_seed", "sparrow_schedule"),
    *("speculative_algorithm", "dp_size"),
)


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of `sparrow calibrate`, named as its flags are; what is empty has a default.
    Raises `CalibrationError` on a target out of range, and on options that a check refuses."""

    model_path: str = EMBEDDED_MODEL_NAME
    prompts: Path | None = None
    target: Sequence[float] = ()
    out: Path | None = None
    check: Sequence[str] = ()
    work: Path | None = None
    budgets: Sequence[int] = ()
    rule: SelectionRule | None = None
    page_size: int | None = None
    bin_tokens: int | None = None
    new_tokens: int = 128
    samples: int = 1
    prompts_per_bin: int | None = None
    min_tokens: int = 1000
    batch: int = 128
    seed: int = 0
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target in self.target:
            if not 0 < target < 1:
                raise CalibrationError(
                    f"--target {target}: expected a tail between 0 and 1, e.g. 0.86"
                )
        for name in ("rule", "budgets", "bin_tokens", "page_size"):
            if self.check and getattr(self, name):
                flag = name.replace("_", "-")
                raise CalibrationError(f"--{flag} with --check: expected one of the two")
        if self.prompts and self.prompts_per_bin:
            raise CalibrationError("--prompts-per-bin with --prompts: expected one of the two")
        if self.out is not None and self.out in map(Path, self.check):
            raise CalibrationError(f"--out {self.out}: expected another file than in --check")

    def require_files(self) -> None:
        """Refuse missing or malformed files, before torch and SGLang are imported."""
        if problem := path_problem(self.model_path):
            raise CalibrationError(f"--model-path {self.model_path}: {problem}")
        if self.prompts is not None:
            # One token for any text checks a file's form without a tokenizer.
            read_prompts(self.prompts, lambda text: [0], sys.maxsize)
        for path in self.check:
            read_schedule(path)
        if self.out is not None and (self.out.suffix != ".json" or self.out.is_dir()):
            raise CalibrationError(f"--out {self.out}: expected the name of a .json file")


class ServedModel(NamedTuple):
    """`path`: folder or hub name that the engine loads. `context`: tokens of a whole sequence."""

    path: str
    hf_config: Any
    context: int


@dataclass(frozen=True)
class Job:
    """The measurements to make. Raises `CalibrationError` if some could not be made.

    Attributes:
        under: the schedules to decode under: fixed budgets, or those that are checked.
        start: the schedule that the engine starts with; a calibration writes schedules of its
            page size, dense layers and selection rule.
        targets: tails to hold, one for each schedule that is written or checked.
        folder: keeps the finished samples.
        out: the file to write; for several schedules, their common name.
    """

    options: CalibrationOptions
    model: ServedModel
    under: list[BudgetSchedule]
    start: BudgetSchedule
    bin_tokens: int
    targets: list[float]
    folder: Path
    out: Path

    def __post_init__(self) -> None:
        if not self.samples:
            raise CalibrationError(f"no generation would decode sparsely: expected {_MORE_SPARSE}")
        for schedule in self.under if self.is_check else ():
            if not any(sample.schedule is schedule for sample in self.samples):
                raise CalibrationError(f"--check {schedule.name}: no sparse step: {_MORE_SPARSE}")

    @property
    def is_check(self) -> bool:
        return bool(self.options.check)

    @property
    def page_size(self) -> int:
        return self.start.page_size

    @cached_property
    def prompts(self) -> list[Prompt]:
        options, (path, hf_config, context) = self.options, self.model
        tokenize = tokenizer_of(path)
        if options.prompts is None:
            per_bin = options.prompts_per_bin or PROMPTS_PER_BIN
            sizes = context, self.bin_tokens, options.new_tokens, per_bin
            part: Literal["check", "calibration"] = "check" if self.is_check else "calibration"
            return builtin_prompts(tokenize, *sizes, part, options.seed)
        prompts = read_prompts(options.prompts, tokenize, context)
        vocab_size = model_value(hf_config, "vocab_size")
        for prompt in prompts:
            if vocab_size and (most := max(prompt.input_ids)) >= vocab_size:
                line = prompt.name.partition("-")[0]
                raise CalibrationError(
                    f"{options.prompts}:{line}: token {most}: expected less than {vocab_size}"
                )
        return prompts

    @cached_property
    def samples(self) -> list[Sample]:
        repeats, new_tokens = self.options.samples, self.options.new_tokens
        room = self.model.context - UNSCORED
        return plan_samples(self.prompts, self.under, repeats, new_tokens, room, self.is_check)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the measurements depend on."""
        options, (path, hf_config, context) = self.options, self.model
        dtype = engine_dtype(options.engine_args) or str(model_value(hf_config, "dtype"))
        if self.is_check:
            fields = [[getattr(schedule, name) for name in _DECODED_BY] for schedule in self.under]
            decoded: dict[str, Any] = {"schedules": fields}
        else:
            budgets = [schedule.budget_tokens[0] for schedule in self.under]
            decoded = {"rule": self.start.selection, "budgets": budgets}
        return {
            **_identity(options.model_path, path),
            "device": device_name(),
            "dtype": dtype,
            "sglang": version("sglang"),
            "page_size": self.page_size,
            "context": context,
            "prompts": str(options.prompts or "built in"),
            "prompts_sha256": prompts_digest(self.prompts),
            "num_prompts": len({prompt.name for prompt in self.prompts}),
            "samples": options.samples,
            "new_tokens": options.new_tokens,
            "temperature": 1.0,
            "seed": options.seed,
            "engine_args": options.engine_args,
            **decoded,
        }

    @property
    def engine_args(self) -> dict[str, Any]:
        return {
            "context_length": self.model.context,
            "page_size": self.page_size,
            "random_seed": self.options.seed,
            **self.options.engine_args,
        }

    @cached_property
    def work(self) -> WorkFolder:
        """The finished samples. Raises `CalibrationError` if the folder holds other settings."""
        return WorkFolder(self.folder, self.settings)

    @property
    def files(self) -> dict[Path, float]:
        return dict(zip(_schedule_files(self.out, self.targets), self.targets, strict=True))

    def origin(self) -> dict[str, Any]:
        fields = ("architectures", "hidden_size", "num_hidden_layers")
        values = {key: model_value(self.model.hf_config, key) for key in fields}
        return {
            "model": Path(self.options.model_path).name,
            "model_match": {key: value for key, value in values.items() if value is not None},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **provenance(),
        }


def calibration_job(options: CalibrationOptions) -> Job:
    model = _model(options)
    name = Path(options.model_path).name
    linear = linear_layers(model.hf_config)
    rule = options.rule or (PUBLISHED if linear else INT4)
    if rule == INT4 and linear:
        raise CalibrationError(f"--rule {INT4}: expected {PUBLISHED} with linear attention")
    targets = list(options.target) or [DEFAULT_TARGET]
    out = options.out or Path(f"{name if len(targets) > 1 else f'{name}-{targets[0]}'}.json")
    for path in _schedule_files(out, targets):
        if not NAME.fullmatch(path.stem):
            raise CalibrationError(
                f"--out {cut(str(path))}: expected a schedule's name, {NAME.pattern}, and .json"
            )
    context, page_size = model.context, options.page_size or PAGE_SIZE
    default = SHORT_BIN_TOKENS if context <= SHORT_CONTEXT else BIN_TOKENS
    bin_tokens = options.bin_tokens or default // page_size * page_size
    if bin_tokens % page_size:
        raise CalibrationError(
            f"--bin-tokens={bin_tokens}: expected a multiple of the page size {page_size}"
        )
    fields = {"selection": INT4, "dense_layers": ()} if rule == INT4 else {}
    start = BudgetSchedule.fixed(whole_pages(context, page_size), page_size, **fields)
    least = start.least_pages * page_size
    usual = [b for b in BUDGETS if least < b < context] or [least + page_size]
    budgets = sorted(set(options.budgets or usual))
    suffix = "" if rule == PUBLISHED else f"-{rule}"
    return Job(
        options,
        model,
        under=[start.as_fixed(budget) for budget in budgets],
        start=start,
        bin_tokens=bin_tokens,
        targets=targets,
        folder=options.work or out.parent / f"{name}-page{page_size}{suffix}.calibration",
        out=out,
    )


def check_job(options: CalibrationOptions) -> Job:
    model = _model(options)
    schedules = [read_schedule(spec) for spec in options.check]
    if len({schedule.name for schedule in schedules}) < len(schedules):
        raise CalibrationError(f"--check {' '.join(options.check)}: expected different names")
    # One engine serves them all in turn.
    for schedule in schedules:
        schedule.require_switch_from(schedules[0])
    if len(options.target) > 1:
        raise CalibrationError(f"--target with --check: expected one, got {options.target}")
    targets = []
    for schedule in schedules:
        target = options.target[0] if options.target else schedule.tail_target
        if target is None:
            raise CalibrationError(f"--check: {schedule.name} has no tail_target: pass --target")
        targets.append(target)
    first = options.check[0].removesuffix(".json")
    return Job(
        options,
        model,
        under=schedules,
        start=schedules[0],
        bin_tokens=tail_bin_tokens(schedules[0]),
        targets=targets,
        folder=options.work or Path(f"{first}.check"),
        out=options.out or Path(f"{first}.check.json"),
    )


def _schedule_files(out: Path, targets: Sequence[float]) -> list[Path]:
    """One file per target; each schedule has the name of its file, without .json."""
    if len(targets) == 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{target}") for target in targets]


def _model(options: CalibrationOptions) -> ServedModel:
    from transformers import AutoConfig

    path = model_folder(options.model_path)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises anything on a config that it does not expect
        problem = model_problem(path, error)
        raise CalibrationError(f"--model-path {options.model_path}: {problem}") from None
    limit = model_value(config, "max_position_embeddings")
    context = options.engine_args.get("context_length") or limit
    if context is None:
        raise CalibrationError("--engine-args: expected context_length, which the model lacks")
    return ServedModel(path, config, int(context))


def engine_dtype(engine_args: dict[str, Any]) -> str | None:
    """The dtype that the engine computes in; None for the model's own. Without a GPU that is
    float32, which is fastest on most CPUs."""
    import torch

    dtype: str | None = engine_args.get("dtype")
    return dtype or (None if torch.cuda.is_available() else "float32")


def _identity(spec: str, path: str) -> dict[str, str]:
    """A model's full path if it is a folder, else its name: all checkpoints of a run are in folders
    called `model`, but an embedded model is in this machine's cache. And a digest of weights."""
    if not Path(spec).is_dir():
        return {"model": spec if path == spec else Path(path).name, "weights": ""}
    files = [file for kind in ("*.safetensors", "*.bin") for file in Path(spec).glob(kind)]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    digest = hashlib.sha256(repr(stats).encode()).hexdigest()
    return {"model": str(Path(path).resolve()), "weights": digest}
