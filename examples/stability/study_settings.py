"""What the study may be told: one table of study.toml, checked before anything starts.

In: a TOML file and the name of a scale. Out: `StudySettings`, and a plan per arm and seed.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from graph_walk import WalkOptions
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from sparrow_sglang.benchmarks.training.parallel_runs import RunPlan, merged
from sparrow_sglang.config import read_toml
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.server_args import unknown_argument
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.validation import first_problem

CALIBRATED = "calibrated-"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PretrainSettings(_Section):
    """Supervised training, from graphs of one node to those of the task."""

    steps: PositiveInt
    """Optimizer steps at most."""
    tokens_per_step: PositiveInt
    """Tokens of a batch, in whole walks of one length."""
    walks_per_step: PositiveInt
    """Walks of a batch at most."""
    lr: PositiveFloat
    """Peak of the learning rate, which rises over `warmup_steps` and falls to a tenth."""
    warmup_steps: PositiveInt
    grow_below: PositiveFloat
    """Loss, in nats a response token, at which the largest graphs double."""
    evaluate_every: PositiveInt
    """Steps between measurements of the reward, once graphs are those of the task."""
    evaluate_walks: PositiveInt
    """Held-out walks that the reward is measured on."""
    evaluate_lines: PositiveInt
    """First lines of each walk that the reward is measured on."""
    reward: float = Field(gt=0, lt=1)
    """Reward of held-out walks at which training ends, to leave something to learn."""


class CalibrationSettings(_Section):
    """`sparrow calibrate`, once for all targets."""

    targets: tuple[float, ...] = Field(min_length=1)
    prompts: PositiveInt
    budgets: tuple[Annotated[int, Field(gt=0, multiple_of=PAGE_SIZE)], ...] = Field(min_length=1)
    bin_tokens: int = Field(gt=0, multiple_of=PAGE_SIZE)
    min_tokens: PositiveInt


class DistillationSettings(_Section):
    """An adapter trained by itself, at fixed schedules: `benchmarks.distill_gain`."""

    schedules: tuple[str, str]
    """The given one and a more aggressive one, named as in arms."""
    lr: PositiveFloat
    steps: tuple[PositiveInt, ...] = Field(min_length=1)
    """Adapter steps to measure after."""
    responses: PositiveInt
    """Responses that a step learns from, each to a graph of its own."""
    heldout: PositiveInt
    """Graphs that the tails are measured on."""


class Arm(_Section):
    """One way to roll out."""

    schedule: str
    """"dense", calibrated-<target>, or anything else that engine.schedule takes."""
    distill: bool = False
    """Train an adapter and roll out with it."""
    attention_backend: str | None = None
    """Backend of dense rollouts, by SGLang's name; default: the one that SGLang chooses."""
    correction: str | None = None
    """`algorithm.correction` of its runs; default: that of `train`."""
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Some of the study's seeds; default: all of them."""


class StudySettings(_Section):
    """One table of the file."""

    seeds: tuple[int, ...] = Field(min_length=1)
    parallel: PositiveInt
    """Runs at a time on each GPU."""
    arms: dict[str, Arm] = Field(min_length=1)
    walk: WalkOptions
    model: dict[str, PositiveInt]
    """Shapes of a Qwen3 model, as its config names them. Layers 0 and 1 are always dense."""
    pretrain: PretrainSettings
    calibration: CalibrationSettings
    distillation: DistillationSettings
    server_args: dict[str, Any]
    """Arguments of SGLang, for calibration and for rollouts."""
    train: dict[str, Any]
    """Settings of `sparrow train` that all runs share."""

    @field_validator("server_args")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := unknown_argument(value):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        lines = self.pretrain.evaluate_lines
        if lines > self.walk.steps:
            raise ValueError(
                f"pretrain.evaluate_lines={lines}: expected at most walk.steps={self.walk.steps}"
            )
        for name, arm in self.arms.items():
            if others := set(arm.seeds or ()) - set(self.seeds):
                raise ValueError(
                    f"arms.{name}.seeds: {min(others)} is none of seeds={list(self.seeds)}"
                )
        known = [f"{CALIBRATED}{target}" for target in self.calibration.targets]
        used = [(f"arms.{name}.schedule", arm.schedule) for name, arm in self.arms.items()]
        used += [
            (f"distillation.schedules[{i}]", name)
            for i, name in enumerate(self.distillation.schedules)
        ]
        for field, schedule in used:
            if schedule.startswith(CALIBRATED) and schedule not in known:
                raise ValueError(f"{field}={schedule!r}: expected one of {', '.join(known)}")
        return self

    @property
    def context_tokens(self) -> int:
        """Longest sequence, with room for the token that SGLang wants left when it scores."""
        return self.walk.prompt_tokens() + self.walk.response_tokens() + 16

    @classmethod
    def load(cls, path: Path, scale: str) -> Self:
        """The table `scale` of a TOML file.

        Raises `InputError`: the file cannot be read, or a key is unknown, missing or not allowed.
        """
        tables = read_toml(path)
        if scale not in tables:
            raise InputError(
                f"--scale {scale}: {path} has no such table; it has {', '.join(tables)}"
            )
        try:
            return cls.model_validate(tables[scale])
        except ValidationError as error:
            raise InputError(f"{path}: {first_problem(error, cls, prefix=scale)}") from None

    def plan_runs(self, model: Path, schedules: Mapping[str, Path], runs: Path) -> list[RunPlan]:
        """`sparrow train` configurations, the first seed of every arm before the second.

        `schedules` are the files of the calibrated ones by the names that arms use. Raises
        `InputError` if a setting of `train` is not allowed.
        """
        plans = []
        for seed, (arm, how) in itertools.product(self.seeds, self.arms.items()):
            if how.seeds is not None and seed not in how.seeds:
                continue
            server_args = dict(self.server_args)
            if how.attention_backend:
                server_args["attention_backend"] = how.attention_backend
            ours: dict[str, Any] = {
                "run_dir": str(runs / f"{arm}-seed{seed}"),
                "seed": seed,
                "model": {"path": str(model)},
                "task": {"name": "graph_walk:load", "options": self.walk.model_dump()},
                "engine": {
                    "schedule": str(schedules.get(how.schedule, how.schedule)),
                    "server_args": server_args,
                },
                "rollout": {
                    "max_prompt_tokens": self.walk.prompt_tokens(),
                    "max_new_tokens": self.walk.response_tokens(),
                },
                "distill": {"enabled": how.distill},
            }
            if how.correction:
                ours["algorithm"] = {"correction": how.correction}
            values = merged(self.train, ours)
            config = TrainConfig.parse(values, f"study.toml, arm {arm}")
            plans.append(RunPlan(arm, seed, config, values))
        return plans
