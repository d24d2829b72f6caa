"""The trained model: dense log-probs of responses, and the optimizer's step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparrow_sglang.hf_config import FULL, config_value, text_config
from sparrow_sglang.models import model_folder
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.chunked_logprobs import acceptance_between, token_logprobs
from sparrow_sglang.rl.policy.optimizer import MOMENTS, ClippedAdamW, add_gradient
from sparrow_sglang.rl.policy.shards import (
    ALONE,
    Ranks,
    Sharded,
    as_dtensor_like,
    full_tensor,
    local,
)
from sparrow_sglang.rl.policy.sparse_policy import ATTENTION, SparseRule
from sparrow_sglang.schedules.schedule import BudgetSchedule


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch: concatenated sequences, [T]. `predictors` [n] are the positions that predict
    the response tokens `targets` [n]; `indices` [n] are theirs in the batch."""

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    prompt_lengths: tuple[int, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of sequences that share a micro-batch of at most `capacity` tokens, by first-fit
    decreasing; a longer sequence has one of its own."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((k for k, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            packs.append([index])
            room.append(capacity - lengths[index])
        else:
            packs[fit].append(index)
            room[fit] -= lengths[index]
    return packs


def assign_to_ranks(
    packs: list[list[int]], lengths: Sequence[int], ranks: int
) -> list[list[list[int]]]:
    """The packs of each rank, equally many, in rounds of similar longest sequences, as ranks wait
    for each other after every layer. The fullest are halved until every rank has one in every
    round; if there are too few sequences, some are empty."""
    if ranks == 1:
        return [packs]
    packs = list(packs)
    while len(packs) % ranks:
        fullest = max(packs, key=lambda pack: (len(pack) > 1, sum(lengths[i] for i in pack)))
        if len(fullest) > 1:
            packs.remove(fullest)
            packs += [fullest[::2], fullest[1::2]]
        else:
            packs.append([])
    packs.sort(key=lambda pack: -max((lengths[i] for i in pack), default=0))
    return [packs[rank::ranks] for rank in range(ranks)]


def build_micro_batch(
    sequences: Sequence[TokenSequence], indices: np.ndarray, device: torch.device
) -> Packed:
    """`indices` [n] are those of the response tokens of `sequences` in the batch."""
    tokens = np.concatenate([part for sequence in sequences for part in sequence])
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    positions = np.concatenate([np.arange(length) for length in lengths])
    prompts = np.repeat([len(prompt) for prompt, _ in sequences], lengths)
    sampled = np.flatnonzero(positions >= prompts)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return Packed(
        on_device(tokens),
        on_device(positions),
        lengths,
        tuple(len(prompt) for prompt, _ in sequences),
        on_device(sampled - 1),
        on_device(tokens[sampled]),
        on_device(indices),
    )


_Result = TypeVar("_Result")

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs [n] with gradient, indices [n] of these tokens among all response tokens of the
batch, sequences one after the other, both on the policy's device) -> scalar; losses add up."""


class DensePolicy:
    """A transformers causal language model under AdamW. float32 weights are trained themselves, and
    cast to bf16 for each product on a GPU. Of bfloat16 weights the optimizer keeps an fp32 copy,
    from which they are rounded; gradients of micro-batches add up in fp32. With `optimizer.offload`
    the copy is in CPU memory in either case, and steps are taken there. With several `ranks`, each
    holds a shard and computes a share of the micro-batches; all call the same methods with the same
    arguments, and return the results of all."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        device: str | torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """Takes over `model`, of an architecture that is not `unsupported`."""
        self.device = torch.device(device)
        self.ranks = ranks
        # `nn.Module.to` is called directly, as transformers' wrapper hides its signature.
        dtype, several = getattr(torch, config.dtype), ranks.world > 1
        nn.Module.to(model, device=None if several else self.device, dtype=dtype)
        self._sharded = Sharded(model, self.device, ranks) if several else None
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._micro_batch_tokens = config.micro_batch_tokens
        # Parameters are listed before an adapter adds its own to the model.
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in self._named]
        home = torch.device("cpu") if optimizer.offload else self.device
        self._copies = copies = config.dtype != "float32" or optimizer.offload
        self._masters = self._params
        if copies or several:
            shards = [local(p.detach()) for p in self._params]
            self._masters = [nn.Parameter(p.to(home, torch.float32, copy=copies)) for p in shards]
            for master, parameter in zip(self._masters, self._params, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(add_gradient, master))
        self.optimizer = ClippedAdamW(
            "policy",
            self._masters,
            optimizer.grad_clip,
            ranks,
            weight_decay=optimizer.weight_decay,
            lr=optimizer.lr,
            betas=optimizer.betas,
            fused=self.device.type == "cuda" or optimizer.offload,
        )

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        device: str | torch.device,
        ranks: Ranks = ALONE,
    ) -> "DensePolicy":
        model = AutoModelForCausalLM.from_pretrained(
            model_folder(config.path), dtype=getattr(torch, config.dtype)
        )
        return cls(model, config, optimizer, device, ranks)

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return torch.bfloat16 if self.device.type == "cuda" else dtype

    @torch.no_grad()
    def score(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        schedule: BudgetSchedule | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs fp32 [T] per response, on the CPU, dense or by `schedule`, and the
        distributions' entropies in nats."""
        self.model.eval()
        counts = [len(response) for _, response in sequences]
        logprobs, entropies = torch.zeros(sum(counts)), torch.zeros(sum(counts))
        for packed in self.micro_batches(sequences):
            rule = SparseRule(schedule, packed.prompt_lengths) if schedule else None
            indices = packed.indices.cpu()
            part, entropy = self._logprobs(packed, temperature, True, rule)
            logprobs[indices], entropies[indices] = part.cpu(), entropy.cpu()
        logprobs, entropies = self.ranks.all_reduce(logprobs), self.ranks.all_reduce(entropies)
        return list(logprobs.split(counts)), list(entropies.split(counts))

    def _logprobs(
        self, packed: Packed, temperature: float, entropies: bool, rule: SparseRule | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gathered(
            lambda: token_logprobs(
                self.hidden(packed, rule), self.head, packed.targets, temperature, entropies
            )
        )

    def gathered(self, compute: Callable[[], _Result]) -> _Result:
        """Run `compute()` with the head gathered from all ranks, and each layer during `hidden`."""
        if self._sharded is None:
            return compute()
        result: _Result = self._sharded(compute)
        return result

    @property
    def head(self) -> torch.Tensor:
        """[V, H]; inside `gathered` only."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    def acceptance(
        self,
        sequences: Sequence[TokenSequence],
        schedule: BudgetSchedule,
        adapted: Callable[[], AbstractContextManager[Any]] = nullcontext,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Exact acceptance rates, float64 [T] per response, of this model's dense distribution and
        that of a server with `schedule`, computed in the context `adapted`; both at
        `temperature`."""
        return self.acceptances(sequences, schedule, [adapted], temperature)[0]

    @torch.no_grad()
    def acceptances(
        self,
        sequences: Sequence[TokenSequence],
        schedule: BudgetSchedule,
        actors: Sequence[Callable[[], AbstractContextManager[Any]]],
        temperature: float = 1.0,
    ) -> list[list[np.ndarray]]:
        """What `acceptance` gives with each of `actors` as `adapted`; one dense pass serves all."""
        self.model.eval()
        rates = torch.zeros(len(actors), sum(len(response) for _, response in sequences))
        packs = list(self.micro_batches(sequences))
        # On the CPU: the head's input of all responses, so that each actor is entered once.
        targets = [self.gathered(partial(self.hidden, packed)).cpu() for packed in packs]

        def measure(packed: Packed, dense: torch.Tensor) -> torch.Tensor:
            sparse = self.hidden(packed, SparseRule(schedule, packed.prompt_lengths))
            return acceptance_between(sparse, dense.to(sparse.device), self.head, temperature)

        for row, adapted in zip(rates, actors, strict=True):
            with adapted():
                for packed, dense in zip(packs, targets, strict=True):
                    row[packed.indices.cpu()] = self.gathered(partial(measure, packed, dense)).cpu()
        self.ranks.all_reduce(rates)
        counts = [len(response) for _, response in sequences]
        return [[part.double().numpy() for part in row.split(counts)] for row in rates]

    def loss_step(
        self,
        sequences: Sequence[TokenSequence],
        loss: Loss,
        temperature: float = 1.0,
        entropies: torch.Tensor | None = None,
    ) -> float:
        """One optimizer step with the clipped gradient of the summed micro-batch losses. Fills
        `entropies`, [N] zeros on the CPU. Returns the gradient's norm before clipping; one that is
        not finite is logged, and the step skipped."""
        self.model.train()
        # If the loss raised in an earlier call, that call has left gradients behind.
        self.model.zero_grad()
        self.optimizer.zero_grad()
        for packed in self.micro_batches(sequences):
            logprobs, entropy = self._logprobs(packed, temperature, entropies is not None)
            if entropies is not None:
                entropies[packed.indices.cpu()] = entropy.cpu()
            part = loss(logprobs, packed.indices) if len(logprobs) else logprobs.sum()
            # FSDP averages gradients over ranks; the factor turns the mean into a sum.
            (part * self.ranks.world).backward()
        if entropies is not None:
            self.ranks.all_reduce(entropies)
        norm = self.optimizer.clipped_step()
        self._round_masters()
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Name, parameter (maybe sharded), and the optimizer's fp32 weights (own rows)."""
        for (name, parameter), master in zip(self._named, self._masters, strict=True):
            yield name, parameter, master.detach()

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their checkpoint names, tied ones once; rounded to `dtype` if given. On one
        rank they may share memory with the parameters; with several, all ranks must iterate."""
        for name, parameter in self._named:
            # Rounded first: this halves what is gathered, and the memory that it takes.
            yield name, full_tensor(parameter.detach().to(dtype or parameter.dtype))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        for parameter in self._params:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._params:
                parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """fp32 weights, moments and step counts, for `torch.distributed.checkpoint`; they share
        memory, and each rank gives its own rows."""
        state = {}
        for (name, parameter), master, moments in zip(
            self._named, self._masters, self.optimizer.moments(), strict=True
        ):
            state[f"{name}.step"] = moments.pop("step")
            for kind, rows in {"master": master.detach(), **moments}.items():
                state[f"{name}.{kind}"] = as_dtensor_like(rows, parameter)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        moments = []
        for (name, _), master in zip(self._named, self._masters, strict=True):
            master.copy_(local(state[f"{name}.master"]))
            moments.append({kind: local(state[f"{name}.{kind}"]) for kind in MOMENTS})
        self.optimizer.load_moments(moments)
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        if self._copies:
            for master, parameter in zip(self._masters, self._params, strict=True):
                local(parameter).copy_(master)

    def hidden(self, packed: Packed, rule: SparseRule | None = None) -> torch.Tensor:
        """[n, H] that predict the targets; by full attention or by `rule`."""
        on_gpu = self.device.type == "cuda"
        cache = self._sharded is None  # Else autocast would cache a copy of each gathered layer.
        runs_twice = self.model.is_gradient_checkpointing and self.model.training
        with torch.autocast(self.device.type, torch.bfloat16, on_gpu, cache_enabled=cache):
            hidden = self.model.base_model(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                sequence_lengths=packed.lengths,
                sparse_rule=rule,
                runs_twice=runs_twice and torch.is_grad_enabled(),
            ).last_hidden_state[0]
        hidden = hidden[packed.predictors]
        return hidden.bfloat16() if on_gpu else hidden

    def micro_batches(self, sequences: Sequence[TokenSequence]) -> Iterator[Packed]:
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        starts = np.cumsum([0, *(len(response) for _, response in sequences)])
        packs = pack(lengths, self._micro_batch_tokens)
        for members in assign_to_ranks(packs, lengths, self.ranks.world)[self.ranks.rank]:
            # An idle rank computes one prompt token, as the ranks gather each layer together.
            chosen = [sequences[i] for i in members] or [((0,), ())]
            parts = [np.arange(starts[i], starts[i + 1]) for i in members]
            indices = np.concatenate([np.arange(0), *parts])
            yield build_micro_batch(chosen, indices, self.device)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unsupported(hf_config: Any, head: nn.Module | None = None) -> str | None:
    """Why a model with this Hugging Face config and vocabulary projection cannot be trained; None
    if it can."""
    config = text_config(hf_config)
    # transformers holds the experts of a layer in one tensor, under a name that SGLang's loader
    # skips without an error: rollouts would keep using the initial experts.
    experts = next(filter(None, (config_value(config, name) for name in _EXPERTS)), None)
    reasons = [f"a mixture of {experts} experts"] if experts else []
    layers = set(config_value(config, "layer_types") or ()) - {FULL}
    reasons += [f"layers of type {kind}" for kind in sorted(layers)]
    if not layers and (window := config_value(config, "sliding_window")):
        used = getattr(config, "use_sliding_window", True)
        reasons += [f"sliding_window={window}"] if used else []
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        reasons += [f"{name}={value}"] if (value := config_value(config, name)) else []
    for name in ("logits_scaling", "logit_scale"):
        reasons += [name] if config_value(config, name) not in (None, 1.0) else []
    bias = getattr(head, "bias", None)
    reasons += ["a bias of the vocabulary projection"] if bias is not None else []
    if not reasons:
        return None
    return (
        f"model of type {hf_config.model_type} has {', '.join(reasons)}: expected full causal"
        " attention, no mixture of experts and a plain vocabulary projection, such as Llama, Qwen2"
        " and Qwen3 have"
    )
