"""The configuration of a training run, read from TOML. Imports neither torch nor SGLang."""

import json
import os
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import cut, read_text
from sparrow_sglang.schedules.schedule import DENSE
from sparrow_sglang.validation import first_problem


def _usable(path: object) -> object:
    if path == "":
        raise ValueError("expected a path, not an empty string")
    if "\0" in str(path):
        raise ValueError("expected a path without NUL characters")
    return os.path.expanduser(path) if isinstance(path, str) else path


_Array = TypeVar("_Array")
# Paths and tuples, for which TOML has no types: strings and arrays are accepted for them.
TomlPath = Annotated[Path, Strict(False), BeforeValidator(_usable)]
TomlArray = Annotated[_Array, Strict(False)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    # Without `strict`, `steps = true` would mean one step, and "16" would be taken as a number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class TaskSource(Section):
    """Prompts and their reward, from a task."""

    name: str
    """A registered task, "mix" of several, or module:function for one of your own."""
    train_path: TomlPath | None = None
    """Training prompts: a JSONL or Parquet file, or hf:NAME[:CONFIG][@SPLIT] with a data set of the
    Hugging Face hub or a folder of `datasets`; the default split is "train"."""
    heldout_path: TomlPath | None = None
    """Held-out prompts, in the same forms; by default the task holds out a part of its data."""
    heldout_sets: dict[Name, TomlPath] = Field(default_factory=dict)
    """Several held-out sets instead, evaluated separately: each name gives eval/NAME/pass_rate."""
    columns: dict[Name, Name] = Field(default_factory=dict)
    """Columns of the data by the task's fields, nested ones with dots: for verl's files, answer =
    "reward_model.ground_truth"."""
    duplicates: Literal["merge", "keep"] = "merge"
    """Rows with the same prompt: "merge" keeps the first, "keep" all of them."""
    max_bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Share of rows that may be skipped because they cannot be used; more of them end the run."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task itself, which are checked by the task."""

    @model_validator(mode="after")
    def _one_kind_of_heldout_sets(self) -> Self:
        if self.heldout_sets and self.heldout_path:
            raise ValueError(
                f"heldout_path={str(self.heldout_path)!r} with heldout_sets: expected one of them"
            )
        return self


class TaskConfig(TaskSource):
    """Where prompts come from and how responses are rewarded."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as Qwen3's enable_thinking = false."""
    reward_workers: PositiveInt = 4
    """Processes that compute rewards."""
    reward_timeout_s: PositiveFloat = 30.0
    """Seconds for one call of the reward, after which the response earns the lowest reward of its
    task so far, that of an empty response included, at most 0; after a call for a whole group its
    rewards are missing."""
    rewards_timeout_s: PositiveFloat = 300.0
    """Seconds for all rewards of a step after its last response; later ones are missing."""


class RolloutConfig(Section):
    """What is sampled for one training step."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step, each with one group of samples (slime run-qwen3-4B.sh: 32)."""
    samples_per_prompt: PositiveInt = Field(default=8, ge=2)
    """Group size, within which rewards are compared (Sparrow's examples, slime, TRL: 8)."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out of the data."""
    max_new_tokens: PositiveInt = 4096
    """Response length at which sampling stops."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Sampling temperature (slime, verl, Sparrow: 1), also of log-probs and acceptance rates."""
    timeout_s: PositiveFloat = 7200.0
    """Seconds without a finished response after which an engine counts as dead."""


class EvaluationConfig(Section):
    """Held-out pass rate: dense decode, without adapter."""

    every_steps: NonNegativeInt = 10
    """Steps between evaluations, the first of which is before training; 0 for none."""
    prompts: NonNegativeInt = 128
    """Held-out prompts of each set, the first ones; 0 for all."""
    samples_per_prompt: PositiveInt = 1
    """Responses per prompt, over which the reward is averaged."""
    pass_at: TomlArray[tuple[PositiveInt, ...]] = ()
    """Each k gives eval/pass@k, the probability that one of k responses passes, unbiased."""
    pass_reward: float = 1.0
    """Smallest reward with which a response passes in eval/pass@k."""
    max_new_tokens: PositiveInt | None = None
    """Length limit of responses; without it, the limit of [rollout] applies."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the likeliest tokens that are sampled from; 1 for all tokens."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of likeliest tokens that are sampled from; -1 for all tokens."""

    @field_validator("top_k")
    @classmethod
    def _some_tokens(cls, value: int) -> int:
        if value == 0:
            raise ValueError("expected 1 or more, or -1 for all tokens")
        return value

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        most = max(self.pass_at, default=0)
        if most > self.samples_per_prompt:
            raise ValueError(
                f"pass_at={list(self.pass_at)} with samples_per_prompt={self.samples_per_prompt}:"
                f" expected at least {most} samples"
            )
        return self


_Decay = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(Section):
    """Advantages, correction and loss: the mean over tokens (DAPO). Groups of equal rewards are not
    in that mean: they have no policy gradient, their forward and backward passes are saved, and
    their number does not scale the others' step. In verl they count."""

    # Infinity is allowed, as a cap that no ratio reaches.
    model_config = ConfigDict(allow_inf_nan=True)

    std_normalisation: bool = True
    """Divide advantages by their group's standard deviation (GRPO; verl, slime, TRL)."""
    correction: Literal["none", "tis"] = "tis"
    """How the loss corrects for the sparse actor: "none", or "tis", truncated importance ratios of
    tokens."""
    tis_cap: PositiveFloat = 2.0
    """Upper end of a token's importance ratio under "tis" (slime, verl, SkyRL: 2.0; TRL: 3.0)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Policy ratios below 1 - clip_low are clipped (Sparrow, slime, DAPO: 0.2)."""
    clip_high: float = Field(default=0.28, gt=0)
    """Policy ratios above 1 + clip_high are clipped (Sparrow, slime, DAPO: 0.28)."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Largest policy ratio that counts at negative advantages (verl clip_ratio_c: 3.0)."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per rollout batch. With 1, clipping has no effect."""


class OptimizerConfig(Section):
    """AdamW, and its learning rate over the run."""

    lr: PositiveFloat = 1e-6
    """Learning rate (slime and Sparrow's mathematics run: 1e-6; Sparrow's code run: 5e-7; models
    around 0.6B tolerate 3e-6, prime-rl)."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly, up to `lr` in the last of them."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Fall of the learning rate after the warm-up, to `final_lr_share` of `lr` in the end."""
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a decay (verl min_lr_ratio: 0)."""
    betas: TomlArray[tuple[_Decay, _Decay]] = (0.9, 0.98)
    """Decay rates of the first and second moments (slime)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay (slime: 0.1; verl: 0.01); not on vectors such as norms and biases."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    offload: bool = False
    """Keep moments, fp32 weights and gradient sums in CPU memory, and step there: saves 16 bytes
    per weight on the GPU (verl: param_offload, optimizer_offload)."""


class MismatchConfig(Section):
    """Exact acceptance rates, from the trainer's own dense and sparse distributions."""

    sequences: NonNegativeInt = 8
    """Responses measured per step, spread evenly; 0 for none. Each takes two forward passes."""


class DistillConfig(Section):
    """DistillSparse: a LoRA adapter, used by rollouts only, that makes the sparse actor match the
    dense policy."""

    enabled: bool = False
    """Train an adapter and roll out with it."""
    rank: PositiveInt = 16
    """Rank of the adapter (the paper gives none)."""
    alpha: PositiveInt = 32
    """Sets the LoRA scale, which is alpha / rank (the public release: 16)."""
    target_modules: TomlArray[tuple[str, ...]] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1
    )
    """Names of the projections in each layer that are adapted."""
    lr: PositiveFloat = 2e-4
    """Learning rate of the adapter (1e-3 left the demo model a worse policy)."""
    sequences: PositiveInt = 32
    """Responses per step to learn from, spread evenly over the batch."""
    top_k: PositiveInt = 20
    """Likeliest tokens of each side in KL(sparse || dense); others form one bucket."""
    entropy: float = Field(default=5.0, ge=0)
    """Weight of the squared gap in nats between the mean entropies of sparse actor and dense
    policy, added to the KL (not in the paper). With 0, rollouts become sharper than the policy, and
    policies of the demo model ended lower than without an adapter."""
    delivery: Literal["merged", "lora"] = "merged"
    """"merged" adds the adapter to the weights that are synced, which costs decode nothing; "lora"
    loads it as unmerged LoRA through SGLang's LoRA manager."""


_SETTING_OF_ARGUMENT = {
    "model_path": "model.path",
    "random_seed": "seed",
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
    """Dtype of the weights; the optimizer keeps an fp32 copy of "bfloat16". Gradients add up in
    fp32. On a GPU both compute, serve and export in bf16."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens packed into one forward pass; a longer sequence gets a pass of its own."""


class EngineConfig(Section):
    """Where responses are sampled."""

    schedule: str = "auto"
    """Shipped schedule, path of a .json, fixed-<tokens>, "auto" for the model's, or "dense"."""
    lossless: bool = False
    """Sample from the policy itself: sparse steps draft, one dense pass verifies. "auto" is then a
    schedule for drafts, and `algorithm.correction` is "none" by default."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `sglang.Engine`, passed unchanged."""

    @model_validator(mode="after")
    def _arguments_fit(self) -> Self:
        arguments = self.server_args
        for name, setting in _SETTING_OF_ARGUMENT.items():
            free = self.schedule == DENSE and name in _FOR_DENSE
            # The value "sparrow" of either would make dense rollouts sparse or lossless.
            if name in arguments and not (free and str(arguments[name]).lower() != "sparrow"):
                raise ValueError(f"server_args.{name} is not set there: set {setting} instead")
        if self.lossless and self.schedule == DENSE:
            raise ValueError("lossless=true with schedule='dense': expected a schedule of drafts")
        if arguments.get("skip_tokenizer_init"):
            raise ValueError("server_args.skip_tokenizer_init=true: expected false, for rewards")
        dp_size = arguments.get("dp_size", 1)
        if dp_size != 1 and not arguments.get("enable_dp_attention"):
            raise ValueError(
                f"server_args.dp_size={dp_size}: weights would reach the first replica only; set"
                f" cluster.engines = {dp_size} instead"
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
    """Engines share the trainers' GPUs, and sleep during updates."""
    max_restarts: NonNegativeInt = 3
    """Restarts from the newest checkpoint after the death of a trainer worker or engine, without a
    new checkpoint in between, before the run ends."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Seconds that a trainer worker waits for the others before it gives them up."""

    @property
    def gpus(self) -> int:
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
    """Steps between checkpoints; 0 writes a checkpoint only at the end. Until the first of them
    there is one after the first step, and then every ten minutes."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept, besides that of the best evaluation."""


class LoggingConfig(Section):
    """What is logged besides metrics.jsonl."""

    response_groups: NonNegativeInt = 2
    """Groups per step in responses.jsonl, spread evenly; 0 for none."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run's folder."""


_REMOVED = {
    "rollout.oversubscribe": "a step waits for all responses; shorten it by rollout.max_new_tokens",
    "rollout.max_staleness": "all responses of a step are of one policy",
    "rollout.dynamic_sampling": "raise rollout.prompts_per_step; equal groups are not in the loss",
    "rollout.truncated": "truncated responses keep their reward; a reward function receives"
    " finish_reason",
    "rollout.overlong_tokens": "lower the reward of long responses in a reward function",
    "rollout.overlong_penalty": "lower the reward of long responses in a reward function",
    "algorithm.aggregation": "the loss is the mean over tokens",
    "algorithm.mask_low": 'set algorithm.correction = "tis", with algorithm.tis_cap',
    "algorithm.mask_high": 'set algorithm.correction = "tis", with algorithm.tis_cap',
    "algorithm.sequence_cap": 'set algorithm.correction = "tis", with algorithm.tis_cap',
    "algorithm.sequence_veto": 'set algorithm.correction = "tis", with algorithm.tis_cap',
    "algorithm.kl_coefficient": "lower optimizer.lr to stay nearer to the first policy",
}
"""What to use in place of settings of earlier versions."""


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
    def _sections_fit(self) -> Self:
        prompts, parts = self.rollout.prompts_per_step, self.algorithm.mini_batches
        if prompts % parts:
            raise ValueError(
                f"algorithm.mini_batches={parts}: expected a divisor of rollout.prompts_per_step="
                f"{prompts}"
            )
        sizes = {"tp_size": self.cluster.gpus_per_engine, "pp_size": 1} if self.cluster else {}
        for name, expected in sizes.items():
            if (size := self.engine.server_args.get(name, expected)) != expected:
                raise ValueError(
                    f"engine.server_args.{name}={size} with [cluster]: expected {expected}"
                )
        if self.distill.enabled:
            for conflict, present in {
                "engine.lossless=true": self.engine.lossless,
                "engine.schedule='dense'": self.engine.schedule == DENSE,
                # Tails of measured responses choose the adapter's scale.
                "mismatch.sequences=0": self.mismatch.sequences == 0,
            }.items():
                if present:
                    raise ValueError(f"distill.enabled=true with {conflict}: expected only one")
        return self

    @model_validator(mode="after")
    def _lossless_rollouts_need_no_correction(self) -> Self:
        if self.engine.lossless and "correction" not in self.algorithm.model_fields_set:
            algorithm = self.algorithm.model_copy(update={"correction": "none"})
            object.__setattr__(self, "algorithm", algorithm)
        return self

    @property
    def evaluation_tokens(self) -> int:
        return self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[str] = ()) -> Self:
        """The configuration in a TOML file, overridden by `settings`, KEY=VALUE each.

        Raises `InputError` on a file that cannot be read, unknown keys and invalid values.
        """
        text = read_text(path)
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Besides TOMLDecodeError, tomllib raises these on long numbers and deep arrays.
            raise InputError(f"{path}: not TOML ({cut(str(error))})") from None
        values = with_overrides(values, settings)
        return cls.parse(values, " ".join([str(path), *(f"--set {text}" for text in settings)]))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Raises `InputError` as `load` does."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            keys = (".".join(map(str, problem["loc"])) for problem in error.errors())
            removed = (f"{key} was removed: {_REMOVED[key]}" for key in keys if key in _REMOVED)
            raise InputError(f"{source}: {next(removed, first_problem(error, cls))}") from None


def with_overrides(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` overridden by each KEY=VALUE of `settings`, whose values are TOML or plain text.
    Raises `InputError` on any other form."""
    result = deepcopy(dict(values))
    for setting in settings:
        key, equals, text = setting.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not all((*sections, name)):
            raise InputError(f"--set {setting!r}: expected KEY=VALUE, such as optimizer.lr=3e-6")
        table = result
        for section in sections:
            if not isinstance(table.get(section), dict):
                table[section] = {}
            table = table[section]
        table[name] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    # No setting is a date; a folder may be named by one.
    return text if isinstance(value, date | time) else value


# Example values of the settings that have no default.
EXAMPLES = {"run_dir": "runs/my-run", "name": "story"}
_WIDTH = 98


def commented_defaults() -> str:
    """TOML that `TrainConfig.load` reads; settings without a value are commented out."""
    return "".join(f"{line}\n" for line in _section("", TrainConfig))


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    tables: list[tuple[str, type[BaseModel], bool]] = []
    for name, field in section.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        if isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            tables.append((name, kinds[0], types.NoneType in kinds))
            continue
        value = (
            EXAMPLES.get(name)
            if field.is_required()
            else field.get_default(call_default_factory=True)
        )
        yield from _comment(field.description)
        # Strings, numbers, booleans and arrays are written in TOML as in JSON, and so is {}.
        yield f"# {name} = ..." if value is None else f"{name} = {json.dumps(value)}"
    for name, kind, optional in tables:
        yield ""
        yield from _comment(kind.__doc__)
        # A section that changes what a run does by being there is commented out.
        for line in (f"[{path}{name}]", *_section(f"{path}{name}.", kind)):
            yield f"# {line}" if optional and not line.startswith("#") else line


def _comment(text: str | None) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join((text or "").split()), _WIDTH)]
