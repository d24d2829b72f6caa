"""Sections about prompts, rewards, sampling and evaluation."""

from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from sparrow_sglang.rl.config.section import Name, Section, TomlArray, TomlPath


class TaskSource(Section):
    """Prompts and their reward, from a task."""

    name: str
    """A registered task, or module:function for a task of your own; "mix" combines several
    tasks."""
    train_path: TomlPath | None = None
    """Training prompts, for tasks that read files: a JSONL or Parquet file, or
    hf:NAME[:CONFIG][@SPLIT], where NAME is a data set of the Hugging Face hub or a folder that
    `datasets` has saved or can load. Without a split, "train" is read."""
    heldout_path: TomlPath | None = None
    """Held-out prompts for evaluation, in the same forms; without it the task holds out a part of
    its data, also in a run without evaluation."""
    heldout_sets: dict[Name, TomlPath] = Field(default_factory=dict)
    """Several held-out sets instead, evaluated separately: each name gives eval/NAME/pass_rate."""
    columns: dict[Name, Name] = Field(default_factory=dict)
    """The column of the data from which each field of the task is read; nested columns are written
    with dots: for verl's files, answer = "reward_model.ground_truth"."""
    duplicates: Literal["merge", "keep"] = "merge"
    """Rows with the same prompt: "merge" keeps the first, "keep" all of them."""
    max_bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Share of rows that may be skipped because they cannot be used; more of them end the run."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task itself, which are checked by the task."""

    @model_validator(mode="after")
    def _one_kind_of_heldout_sets(self) -> Self:
        if self.heldout_sets and self.heldout_path:
            sets = {name: str(path) for name, path in self.heldout_sets.items()}
            raise ValueError(
                f"heldout_path={str(self.heldout_path)!r} with heldout_sets={sets}: expected one of"
                " them"
            )
        return self


class TaskConfig(TaskSource):
    """Where prompts come from and how responses are rewarded."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as Qwen3's enable_thinking = false."""
    reward_workers: PositiveInt = 4
    """Processes that compute rewards."""
    reward_timeout_s: PositiveFloat = 30.0
    """Wall-clock limit in seconds for one reward, or one batch of rewards; a reward that takes
    longer is missing: its response is in no loss and no mean."""
    rewards_timeout_s: PositiveFloat = 300.0
    """Wall-clock limit in seconds for all rewards of a step, counted from its last response."""


class RolloutConfig(Section):
    """What is sampled for one training step."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step, each with one group of samples (slime run-qwen3-4B.sh: 32 prompts x 8
    samples)."""
    samples_per_prompt: PositiveInt = Field(default=8, ge=2)
    """Group size (Sparrow's examples, slime, TRL: 8); at least 2, because rewards are compared
    within a group."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out of the data."""
    max_new_tokens: PositiveInt = 4096
    """Response length at which sampling stops."""
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    """Responses that were cut off at `max_new_tokens`: "keep" trains on them with the reward that
    the task gives, "mask" leaves their tokens out of the loss (DAPO), "penalty" gives them the
    lowest reward of their group, or 0 if that is lower."""
    overlong_tokens: NonNegativeInt = 0
    """Length of the range before `max_new_tokens` in which a response loses reward, linearly up to
    `overlong_penalty` at the limit; 0 for no such penalty (DAPO's soft overlong punishment: 4096 of
    20480; verl overlong_buffer.len)."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward lost by a response of `max_new_tokens` tokens, if `overlong_tokens` is above 0 (DAPO:
    1)."""
    dynamic_sampling: PositiveInt = 1
    """Above 1, groups whose samples all earned the same reward are replaced by groups of further
    prompts, up to this many times `prompts_per_step` groups in all (DAPO; verl max_num_gen_batches:
    10); 1 replaces none."""
    oversubscribe: float = Field(default=1.0, ge=1, le=2)
    """Groups that are sampled at the same time, in multiples of `prompts_per_step`. Above 1, a step
    ends its rollout once `prompts_per_step` of them are finished, and the next step continues the
    unfinished ones (partial rollouts: Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521; slime
    --partial-rollout)."""
    max_staleness: PositiveInt = 4
    """Partial rollouts: the largest age, in training steps, of the weights that a trained token was
    sampled with. A step waits for groups that would exceed it in the next step (AReaL's guide:
    max_head_offpolicyness 4)."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Sampling temperature of rollouts (slime, verl, Sparrow: 1). SGLang records log-probs at this
    temperature; the policy's log-probs, the acceptance rates and DistillSparse are computed at the
    same temperature."""
    timeout_s: PositiveFloat = 7200.0
    """Seconds without a finished response after which an engine counts as dead: more than the
    longest response takes."""

    @model_validator(mode="after")
    def _one_order_of_groups(self) -> Self:
        if self.oversubscribe > 1 and self.dynamic_sampling > 1:
            raise ValueError(
                f"oversubscribe={self.oversubscribe:g} with dynamic_sampling="
                f"{self.dynamic_sampling}: one takes the groups that are finished first, the other"
                " those that come first in the data; expected 1 for one of them"
            )
        return self

    @model_validator(mode="after")
    def _overlong_range_fits(self) -> Self:
        if self.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"overlong_tokens={self.overlong_tokens} with max_new_tokens="
                f"{self.max_new_tokens}: expected at most as many"
            )
        return self


class EvaluationConfig(Section):
    """Held-out pass rate: dense decode, without adapter."""

    every_steps: NonNegativeInt = 10
    """Steps between evaluations, the first of which is before training; 0 for none."""
    prompts: NonNegativeInt = 128
    """Number of held-out prompts, the first ones of each set of the task; 0 for all."""
    samples_per_prompt: PositiveInt = 1
    """Responses per prompt, over which the reward is averaged."""
    pass_at: TomlArray[tuple[PositiveInt, ...]] = ()
    """Each k gives eval/pass@k, the probability that at least one of k responses to a prompt
    passes, estimated without bias from `samples_per_prompt` responses (arXiv:2107.03374)."""
    pass_reward: float = 1.0
    """Smallest reward with which a response passes in eval/pass@k."""
    max_new_tokens: PositiveInt | None = None
    """Length limit of responses; without it, the limit of [rollout] applies."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy. Any value is allowed, because nothing is learnt from these
    samples."""
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
                f" expected at least {most} samples, as pass@{most} is of as many responses"
            )
        return self
