"""What a training run may be told: frozen sections, read from TOML, checked once.

In: a TOML file or a mapping. Out: `TrainConfig`. Unknown keys and values that would make the run
something else than its name says are refused here, before a model is loaded. Imports neither
torch nor SGLang.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
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

from sparrow_sglang.config import read_toml
from sparrow_sglang.errors import InputError
from sparrow_sglang.renamed import accept_renamed
from sparrow_sglang.validation import first_problem

_UNTRUNCATED = (
    "the sampler records log-probs of the untruncated distribution, so tokens drawn from a"
    " truncated one would be corrected by ratios of a distribution that they do not follow"
)


def _usable(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("expected a path without NUL characters")
    return path


_Array = TypeVar("_Array")
# What TOML has no type of its own for.
TomlPath = Annotated[Path, Strict(False), AfterValidator(_usable)]
TomlArray = Annotated[_Array, Strict(False)]


class _Section(BaseModel):
    # Strict, or `steps = true` would be one step and "16" a number.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
    )


class ModelConfig(_Section):
    """The dense policy."""

    path: str = "smollm2-135m"
    """Folder or hub name of a transformers checkpoint, or "smollm2-135m", the embedded model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model's weights. The optimizer updates fp32 weights either way: these
    themselves, or a copy in its state; gradients of micro-batches add up in fp32. On a GPU both
    compute in bf16, which is the dtype of the engine and of the exported checkpoints then."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens packed into one forward pass; a longer sequence goes alone."""


class EngineConfig(_Section):
    """Where responses are sampled."""

    kind: Literal["local", "ray"] = "local"
    """An SGLang engine in this process, or Ray actors with one engine each."""
    num_engines: PositiveInt = 1
    """Number of Ray actors."""
    schedule: str = "auto"
    """KV budget schedule: shipped name, path to a .json file, fixed-<tokens>, "auto" for the
    model's own, or "dense" for rollouts without sparsity."""
    transfer: Literal["object_store", "broadcast"] = "object_store"
    """How weights reach Ray actors: through Ray's object store, or by one broadcast from the
    trainer, NCCL between GPUs."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to `sglang.Engine` as they are."""

    @model_validator(mode="after")
    def _one_local_engine(self) -> Self:
        if self.kind == "local" and self.num_engines != 1:
            raise ValueError(
                f"num_engines={self.num_engines} with kind='local': expected 1, the engine of this"
                ' process; set kind = "ray" for more'
            )
        return self


class RolloutConfig(_Section):
    """What is sampled for one training step."""

    prompts_per_step: PositiveInt = 32
    """Groups per step (slime run-qwen3-4B.sh: 32 prompts x 8 samples)."""
    samples_per_prompt: PositiveInt = Field(default=8, ge=2)
    """Group size (Sparrow's examples, slime, TRL: 8); at least 2, to have something to compare."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out of the data."""
    max_new_tokens: PositiveInt = 4096
    """Response length at which sampling stops."""
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    """Responses that were cut there: "keep" trains on them with the reward that the task gives,
    "mask" leaves their tokens out of the loss (DAPO), "penalty" gives them reward 0."""
    dynamic_sampling: PositiveInt = 1
    """Groups whose samples all earned the same reward are replaced by groups of further prompts, up
    to this many times `prompts_per_step` in all (DAPO; verl max_num_gen_batches: 10); 1: none."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Of the rollouts (slime, verl, Sparrow: 1). SGLang records log-probs at this temperature; the
    policy's log-probs, the acceptance rates and DistillSparse are computed at the same."""
    top_p: float = 1.0
    """Only 1 is accepted."""
    top_k: int = -1
    """Only -1, no truncation, is accepted."""

    @field_validator("top_p", "top_k")
    @classmethod
    def _sampled_distribution_is_recorded(cls, value: float, info: Any) -> float:
        expected = cls.model_fields[info.field_name].default
        if value != expected:
            raise ValueError(f"expected {expected:g}: {_UNTRUNCATED}")
        return value


class TaskConfig(_Section):
    """Where prompts come from and how responses are rewarded."""

    name: str
    """A registered task, or module:function of one of your own."""
    train_path: TomlPath | None = None
    """JSONL or Parquet with training prompts, for tasks that read files."""
    heldout_path: TomlPath | None = None
    """The same for evaluation; without it the task splits its data."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task itself, which it checks."""
    reward_workers: PositiveInt = 4
    """Processes that compute rewards."""
    reward_timeout_s: PositiveFloat = 30.0
    """Wall-clock limit for one reward, after which it is 0."""
    overlap_rewards: bool = False
    """Reward each group while others are still sampled (slime's generate_and_rm_group)."""


class AlgorithmConfig(_Section):
    """Advantages, correction and loss."""

    # A cap that nothing reaches.
    model_config = ConfigDict(allow_inf_nan=True)

    std_normalisation: bool = True
    """Divide advantages by their group's standard deviation (GRPO; verl, slime, TRL). False keeps
    the mean only (prime-rl)."""
    correction: Literal["none", "tis", "mask", "sequence"] = "tis"
    """How the loss makes up for tokens that the sparse actor, not the policy, has drawn: not at
    all, by truncated ratios of tokens, by masking tokens, or by the geometric mean of a response's
    ratios."""
    tis_cap: PositiveFloat = 2.0
    """Upper end of a token's importance ratio under "tis" (slime, verl, SkyRL: 2.0; TRL: 3.0)."""
    mask_low: float = Field(default=0.5, ge=0, lt=1)
    """Under "mask", tokens with a ratio below do not count (verl's IcePop preset: 0.5)."""
    mask_high: float = Field(default=5.0, gt=1)
    """Under "mask", tokens with a ratio above do not count (verl's IcePop preset: 5.0)."""
    sequence_cap: PositiveFloat = 2.0
    """Upper end of a response's geometric mean of ratios under "sequence" (slime mis_upper_bound,
    of all its levels: 2.0)."""
    sequence_veto: float = Field(default=1e-4, ge=0, lt=1)
    """Under "sequence", a response with a token of a ratio below does not count; 0 for no veto
    (slime mis_veto_threshold: 1e-4; verl rollout_token_veto_threshold: 1e-4 to 1e-6)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Policy ratios below 1 - clip_low are clipped (Sparrow, slime, DAPO: 0.2)."""
    clip_high: float = Field(default=0.28, gt=0)
    """Policy ratios above 1 + clip_high are clipped (Sparrow, slime, DAPO: 0.28)."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Largest policy ratio that counts at negative advantages (verl clip_ratio_c: 3.0)."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per rollout batch. With 1 the policy ratio is 1 and the clip idle."""
    old_logprobs: Literal["scored", "update"] = "scored"
    """Where dense log-probs of the batch come from: a pass of their own, or, with one mini-batch,
    the update's forward pass, which computes the same (verl and TRL do so on policy)."""


class MismatchConfig(_Section):
    """Exact acceptance rates, from the trainer's own dense and sparse distributions."""

    sequences: NonNegativeInt = 8
    """Responses per step that are measured, spread evenly over the batch; 0 for none. Each costs
    two forward passes."""


class DistillConfig(_Section):
    """DistillSparse: a LoRA adapter, used by rollouts only, that makes the sparse actor match the
    dense policy."""

    enabled: bool = False
    """Train an adapter and roll out with it."""
    rank: PositiveInt = 16
    """Rank of the adapter (the paper gives none)."""
    alpha: PositiveInt = 32
    """LoRA scale: alpha / rank (the public release: 16)."""
    target_modules: TomlArray[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the adapted projections."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the adapter's own AdamW (1e-3 raised the demo model's tails on an H200)."""
    sequences: PositiveInt = 32
    """Responses per step to learn from, spread evenly over the batch."""
    loss: Literal["top_k", "exact"] = "top_k"
    """KL(sparse || dense) over the likeliest tokens of both sides and the rest as one bucket, or
    over the whole vocabulary."""
    top_k: PositiveInt = 20
    """Tokens of each side under "top_k" (the public release keeps 20)."""
    policy_loss: float = Field(default=0.0, ge=0)
    """Weight of the sparse actor's own policy loss, added to the KL, corrected as `algorithm` says
    (the paper's Algorithm 1 adds the two up and gives no weight); 0 for the KL alone."""
    delivery: Literal["merged", "lora"] = "merged"
    """How rollouts get the adapter: added to the weights that are synced, for which decode pays
    nothing, or loaded as unmerged LoRA through SGLang's LoRA manager."""


class LadderConfig(_Section):
    """More aggressive schedules as the measured tails allow them."""

    schedules: TomlArray[tuple[str, ...]] = ()
    """What may follow `engine.schedule`, each more aggressive than the one before; none keeps it.
    They share its page size, sinks, recent pages and dense layers."""
    target: float = Field(default=0.86, gt=0, lt=1)
    """Tail percentile that every well-filled bin has to reach (the paper: 0.86)."""
    patience: PositiveInt = 3
    """Steps in a row in which it must be reached before the next schedule is taken."""
    min_tokens: PositiveInt = 2000
    """Measured tokens that make a bin well filled."""


class OptimizerConfig(_Section):
    """AdamW with a constant learning rate."""

    lr: PositiveFloat = 1e-6
    """Learning rate (slime and Sparrow's mathematics run: 1e-6; Sparrow's code run: 5e-7; models
    around 0.6B bear 3e-6, prime-rl)."""
    betas: TomlArray[tuple[float, float]] = (0.9, 0.98)
    """Decay of both moments (slime)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay (slime: 0.1; verl: 0.01); not on vectors such as norms and biases."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    offload: bool = False
    """Keep moments, fp32 weights and the sum of gradients in the memory of the CPU, where the step
    is taken: 16 bytes a weight that the GPU does not hold (verl: param_offload, optimizer_offload).
    Every micro-batch then copies its gradients there."""


class CheckpointConfig(_Section):
    """What survives the process."""

    every_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: PositiveInt = 2
    """Checkpoints kept, the newest ones."""


class LoggingConfig(_Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Event files in the run's folder."""
    wandb_project: str | None = None
    """Project on Weights & Biases, if its package is installed."""


class EvaluationConfig(_Section):
    """Held-out pass rate: dense decode, without adapter."""

    every_steps: NonNegativeInt = 10
    """Steps between evaluations, the first before training; 0 for none."""
    prompts: PositiveInt = 128
    """Held-out prompts, the first ones of the task."""
    samples_per_prompt: PositiveInt = 1
    """Responses per prompt, of which the mean reward is taken."""
    temperature: float = Field(default=1.0, ge=0)
    """Nothing is learnt from these samples, so any temperature goes; 0 is greedy."""


class TrainConfig(_Section):
    """One training run."""

    run_dir: TomlPath
    """Folder of metrics, event files and checkpoints."""
    steps: PositiveInt = 100
    """Training steps."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of data order, sampling and initialisation."""
    task: TaskConfig
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mismatch: MismatchConfig = MismatchConfig()
    distill: DistillConfig = DistillConfig()
    ladder: LadderConfig = LadderConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _accept_renamed(cls, values: Any) -> Any:
        return accept_renamed(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        prompts, parts = self.rollout.prompts_per_step, self.algorithm.mini_batches
        if prompts % parts:
            raise ValueError(
                f"algorithm.mini_batches={parts} does not divide rollout.prompts_per_step="
                f"{prompts}: expected a divisor, so that every optimizer step sees as many groups"
            )
        if parts > 1 and self.algorithm.old_logprobs == "update":
            raise ValueError(
                f"algorithm.old_logprobs='update' with mini_batches={parts}: later steps need"
                " log-probs from before the first; expected 'scored', or mini_batches = 1"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The configuration in a TOML file.

        Raises:
            InputError: the file cannot be read, is no TOML, or holds an unknown key or a value
                that is not allowed; one line names file, key, value and what is allowed.
        """
        return cls.parse(read_toml(path), str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """The configuration in a mapping; raises `InputError` as `load` does."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {first_problem(error, cls)}") from None
