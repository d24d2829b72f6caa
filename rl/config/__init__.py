"""The configuration of a training run: frozen sections, read from TOML, checked once.

In: a TOML file or a mapping. Out: `TrainConfig`. Unknown keys and values that are not allowed are
refused here, before a model is loaded. Imports neither torch nor SGLang.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from sparrow_sglang.config import read_toml
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config.data import EvaluationConfig, RolloutConfig, TaskConfig, TaskSource
from sparrow_sglang.rl.config.learning import (
    AlgorithmConfig,
    DistillConfig,
    MismatchConfig,
    OptimizerConfig,
)
from sparrow_sglang.rl.config.overrides import with_overrides
from sparrow_sglang.rl.config.section import Section, TomlPath
from sparrow_sglang.validation import first_problem

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DistillConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "MismatchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "TaskConfig",
    "TaskSource",
    "TrainConfig",
]


DENSE = "dense"
"""Name of the schedule that reads all of the KV cache."""

_OWN_SETTINGS = {
    "model_path": "model.path",
    "attention_backend": "engine.schedule",
    "sparrow_schedule": "engine.schedule",
    "speculative_algorithm": "engine.lossless",
}
_FOR_DENSE = ("attention_backend", "speculative_algorithm")


class ModelConfig(Section):
    """The dense policy."""

    path: str = "smollm2-135m"
    """Folder or hub name of a transformers checkpoint, or "smollm2-135m", the embedded model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model's weights. The optimizer updates fp32 weights in either case: the weights
    themselves, or with "bfloat16" an fp32 copy in its state. Gradients of micro-batches are added
    up in fp32. On a GPU both dtypes compute in bf16, and the engine and the exported checkpoints
    are then in bf16."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens packed into one forward pass; a longer sequence gets a pass of its own."""


class EngineConfig(Section):
    """Where responses are sampled."""

    schedule: str = "auto"
    """KV budget schedule: shipped name, path to a .json file, fixed-<tokens>, "auto" for the
    model's own, or "dense" for rollouts without sparsity."""
    lossless: bool = False
    """Sample from the policy itself: sparse steps draft, one dense pass verifies. "auto" is then a
    schedule for drafts, and `algorithm.correction` is "none" by default."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `sglang.Engine`, passed unchanged."""

    @model_validator(mode="after")
    def _arguments_fit(self) -> Self:
        arguments = self.server_args
        for name, setting in _OWN_SETTINGS.items():
            if name in arguments and not (self.schedule == DENSE and name in _FOR_DENSE):
                raise ValueError(f"server_args.{name} is not set there: set {setting} instead")
        if self.lossless and self.schedule == DENSE:
            raise ValueError("lossless=true with schedule='dense': expected a schedule of drafts")
        if arguments.get("skip_tokenizer_init"):
            raise ValueError(
                "server_args.skip_tokenizer_init=true: rewards are given for texts; expected false"
            )
        dp_size = arguments.get("dp_size", 1)
        if dp_size != 1 and not arguments.get("enable_dp_attention"):
            raise ValueError(
                f"server_args.dp_size={dp_size}: SGLang loads a trainer's weights into the first"
                f" replica only; set cluster.engines = {dp_size} instead"
            )
        return self


class ClusterConfig(Section):
    """Trainer workers and engines as Ray actors, on one host or many. Without this section, one
    process has both."""

    trainers: PositiveInt = 1
    """Trainer workers of one GPU each, among which the policy is sharded (FSDP2)."""
    engines: PositiveInt = 1
    """Engines; each response is sampled by one of them."""
    gpus_per_engine: PositiveInt = 1
    """GPUs of an engine, all of one host, among which it is split by tensor parallelism."""
    colocate: bool = False
    """Engines share the trainers' GPUs, and sleep during the update. Otherwise they have GPUs of
    their own, and get the weights by a broadcast."""
    max_restarts: NonNegativeInt = 3
    """How often a run starts again from the newest checkpoint after the death of a trainer worker
    or engine, without a new checkpoint in between, before it ends with the reason."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Seconds that a trainer worker waits for the others before it gives them up."""

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.trainers + (0 if self.colocate else self.engines * self.gpus_per_engine)

    @model_validator(mode="after")
    def _engines_cover_trainers(self) -> Self:
        shared = self.engines * self.gpus_per_engine
        if self.colocate and shared != self.trainers:
            raise ValueError(
                f"engines={self.engines} of {self.gpus_per_engine} GPUs with colocate=true and"
                f" trainers={self.trainers}: expected as many GPUs of engines as trainers"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints of the run."""

    every_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 writes a checkpoint only at the end."""
    keep: PositiveInt = 2
    """Number of checkpoints kept, the newest ones; that of the best evaluation is kept as well."""


class LoggingConfig(Section):
    """What is logged besides metrics.jsonl."""

    response_groups: NonNegativeInt = 2
    """Groups per step whose responses go to responses.jsonl, spread evenly over the step; 0 for
    none."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run's folder."""


class TrainConfig(Section):
    """One training run."""

    run_dir: TomlPath
    """Folder of metrics, event files and checkpoints."""
    steps: PositiveInt = 100
    """Training steps."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of data order, sampling and initialisation."""
    task: TaskConfig
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mismatch: MismatchConfig = MismatchConfig()
    distill: DistillConfig = DistillConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        prompts, parts = self.rollout.prompts_per_step, self.algorithm.mini_batches
        if prompts % parts:
            raise ValueError(
                f"algorithm.mini_batches={parts} does not divide rollout.prompts_per_step="
                f"{prompts}: expected a divisor, so that every optimizer step sees as many groups"
            )
        return self

    @model_validator(mode="after")
    def _engines_are_split_by_cluster(self) -> Self:
        sizes = {"tp_size": self.cluster.gpus_per_engine, "pp_size": 1} if self.cluster else {}
        for name, expected in sizes.items():
            if (size := self.engine.server_args.get(name, expected)) != expected:
                raise ValueError(
                    f"engine.server_args.{name}={size} with [cluster]: expected {expected}, as an"
                    " engine is split by tensor parallelism among cluster.gpus_per_engine GPUs"
                )
        return self

    @model_validator(mode="after")
    def _lossless_rollouts_need_no_correction(self) -> Self:
        if not self.engine.lossless:
            return self
        if self.distill.enabled:
            raise ValueError(
                "distill.enabled=true with engine.lossless=true: rollouts are the policy's own, and"
                " drafts carry no adapter; expected false"
            )
        # Responses that are continued after an update are partly of older weights.
        of_one_policy = self.rollout.oversubscribe == 1
        if of_one_policy and "correction" not in self.algorithm.model_fields_set:
            algorithm = self.algorithm.model_copy(update={"correction": "none"})
            object.__setattr__(self, "algorithm", algorithm)
        return self

    @model_validator(mode="after")
    def _tails_are_measured(self) -> Self:
        schedule, measured = self.engine.schedule, self.mismatch.sequences
        if self.distill.enabled and schedule == DENSE:
            raise ValueError(
                "distill.enabled=true with engine.schedule='dense': a dense actor is the policy"
                " already; expected a sparse schedule, or false"
            )
        if self.distill.enabled and not measured:
            raise ValueError(
                "distill.enabled=true with mismatch.sequences=0: tails of measured responses say"
                " how much of the adapter rollouts get; expected mismatch.sequences of 1 or more"
            )
        return self

    @property
    def evaluation_tokens(self) -> int:
        """Length limit of responses in evaluation."""
        return self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[str] = ()) -> Self:
        """The configuration in a TOML file, overridden by `settings`, KEY=VALUE each.

        Raises:
            InputError: the file cannot be read, is no TOML, or holds an unknown key or a value
                that is not allowed; one line names file, key, value and what is allowed.
        """
        values = with_overrides(read_toml(path), settings)
        return cls.parse(values, " ".join([str(path), *(f"--set {text}" for text in settings)]))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """The configuration in a mapping; raises `InputError` as `load` does."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {first_problem(error, cls)}") from None
