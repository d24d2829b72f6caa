"""Sections about learning: loss, correction, optimizer and adapter."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from sparrow_sglang.rl.config.section import Section, TomlArray

_Decay = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(Section):
    """Advantages, correction and loss."""

    # Infinity is allowed, as a cap that no ratio reaches.
    model_config = ConfigDict(allow_inf_nan=True)

    std_normalisation: bool = True
    """Divide advantages by their group's standard deviation (GRPO; verl, slime, TRL). False keeps
    the mean only (prime-rl)."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How the losses of tokens are combined. "token_mean": their mean over all tokens (DAPO).
    "sequence_mean": the mean over each response's tokens, then over responses (GRPO,
    arXiv:2402.03300)."""
    correction: Literal["none", "tis", "mask", "sequence"] = "tis"
    """How the loss corrects for tokens having been sampled by the sparse actor and not by the
    policy: "none"; "tis", truncated importance ratios of tokens; "mask", leaving out tokens whose
    ratio is too low or too high; "sequence", the geometric mean of a response's ratios."""
    tis_cap: PositiveFloat = 2.0
    """Upper end of a token's importance ratio under "tis" (slime, verl, SkyRL: 2.0; TRL: 3.0)."""
    mask_low: float = Field(default=0.5, ge=0, lt=1)
    """Under "mask", tokens with a ratio below this do not count (verl's IcePop preset: 0.5)."""
    mask_high: float = Field(default=5.0, gt=1)
    """Under "mask", tokens with a ratio above this do not count (verl's IcePop preset: 5.0)."""
    sequence_cap: PositiveFloat = 2.0
    """Upper end of a response's geometric mean of ratios under "sequence" (slime mis_upper_bound,
    of all its levels: 2.0)."""
    sequence_veto: float = Field(default=1e-4, ge=0, lt=1)
    """Under "sequence", a response does not count if one of its tokens has a ratio below this; 0
    for no veto (slime mis_veto_threshold: 1e-4; verl rollout_token_veto_threshold: 1e-4 to
    1e-6)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Policy ratios below 1 - clip_low are clipped (Sparrow, slime, DAPO: 0.2)."""
    clip_high: float = Field(default=0.28, gt=0)
    """Policy ratios above 1 + clip_high are clipped (Sparrow, slime, DAPO: 0.28)."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Largest policy ratio that counts at negative advantages (verl clip_ratio_c: 3.0)."""
    kl_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL divergence from the reference policy, which is the model at `model.path`
    (GRPO: 0.04; DAPO and Dr. GRPO: none); 0 for none. The reference policy's weights are kept in
    CPU memory, and each step scores the responses with them."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per rollout batch. With 1, the policy ratio is 1, clipping has no effect, and
    dense log-probs come from the update's own forward pass."""


class OptimizerConfig(Section):
    """AdamW, and its learning rate over the run."""

    lr: PositiveFloat = 1e-6
    """Learning rate (slime and Sparrow's mathematics run: 1e-6; Sparrow's code run: 5e-7; models
    around 0.6B tolerate 3e-6, prime-rl)."""
    warmup_steps: NonNegativeInt = 0
    """Training steps in which the learning rate rises linearly; it reaches `lr` in the last of
    them."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, to `final_lr_share` of `lr` at the end of
    `steps`; "constant" keeps it."""
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a decay (verl min_lr_ratio: 0)."""
    betas: TomlArray[tuple[_Decay, _Decay]] = (0.9, 0.98)
    """Decay rates of the first and second moments (slime)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay (slime: 0.1; verl: 0.01); not on vectors such as norms and biases."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    offload: bool = False
    """Keep moments, fp32 weights and the sum of gradients in CPU memory, and take the optimizer
    step there: this saves 16 bytes per weight on the GPU (verl: param_offload, optimizer_offload).
    Every micro-batch then copies its gradients to the CPU."""


class MismatchConfig(Section):
    """Exact acceptance rates, from the trainer's own dense and sparse distributions."""

    sequences: NonNegativeInt = 8
    """Responses per step that are measured, spread evenly over the batch; 0 for none. Each costs
    two forward passes."""


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
    """Names of the projections in each layer that get an adapter."""
    lr: PositiveFloat = 2e-4
    """Learning rate of the adapter's own AdamW (on the demo model 1e-3 raised tails no further, and
    left a worse policy)."""
    sequences: PositiveInt = 32
    """Responses per step to learn from, spread evenly over the batch."""
    top_k: PositiveInt = 20
    """Likeliest tokens of each side in KL(sparse || dense), which adds up all others in one bucket
    (the public release keeps 20)."""
    entropy: float = Field(default=5.0, ge=0)
    """Weight of the squared difference, in nats, between the mean entropies of the sparse actor and
    the dense policy, which is added to the KL (the paper has no such term). The KL alone lets
    rollouts become sharper than the policy, which then meets fewer of its own mistakes: with 0,
    policies of the demo model ended lower than without an adapter."""
    delivery: Literal["merged", "lora"] = "merged"
    """How rollouts get the adapter: "merged" adds it to the weights that are synced, which costs
    decode nothing; "lora" loads it as unmerged LoRA through SGLang's LoRA manager."""
