"""The trained model: dense log-probs of responses, and the optimizer's step.

In: sequences of prompt and response token ids, and a loss in their log-probs. Out: log-probs, and
weights for the rollout engines. Sequences are packed into micro-batches without padding; each
attends to itself only, by full causal attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.models import model_folder
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.attention import ATTENTION, check_supported
from sparrow_sglang.rl.policy.chunked_logprobs import (
    CHUNK_ELEMENTS,
    product,
    token_logprobs,
    token_logprobs_and_entropies,
)
from sparrow_sglang.rl.policy.optimizer import ClippedAdamW, adamw, add_gradient
from sparrow_sglang.rl.policy.packing import Packed, lay_out, pack
from sparrow_sglang.rl.policy.sparse_policy import Selections, SparseRule
from sparrow_sglang.schedule import BudgetSchedule

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs [n] with gradient, indices [n] of these tokens among all response tokens of the
batch, sequences one after the other, both on the policy's device) -> scalar; losses add up."""


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step: summed loss, gradient norm before clipping, micro-batches.

    No step was `taken` if the norm is not finite.
    """

    loss: float
    grad_norm: float
    micro_batches: int

    @property
    def taken(self) -> bool:
        return isfinite(self.grad_norm)


class DensePolicy:
    """A transformers causal language model under AdamW with a constant learning rate.

    Weights of dtype float32 are trained themselves and cast to bf16 for each product on a GPU; of
    weights in bfloat16 the optimizer keeps an fp32 copy that it updates and rounds from, and the
    gradients of micro-batches are added up in fp32. With `optimizer.offload` it keeps such a copy
    in either case, in the memory of the CPU, where gradients are added up and steps are taken.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        device: str | torch.device,
    ) -> None:
        """Takes over `model`. Raises `ValueError` on architectures it would compute wrongly."""
        check_supported(model)
        self.device = torch.device(device)
        # Of nn.Module, because transformers' wrapper of it hides its signature.
        nn.Module.to(model, device=self.device, dtype=getattr(torch, config.dtype))
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._micro_batch_tokens = config.micro_batch_tokens
        # Before anything else is put into the model, such as an adapter.
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in self._named]
        home = torch.device("cpu") if optimizer.offload else self.device
        self._masters = (
            self._params
            if config.dtype == "float32" and not optimizer.offload
            else [nn.Parameter(p.detach().to(home, torch.float32, copy=True)) for p in self._params]
        )
        self.optimizer = ClippedAdamW(
            "policy", self._masters, adamw(self._masters, optimizer, home), optimizer.grad_clip
        )
        if self._masters is not self._params:
            for master, parameter in zip(self._masters, self._params, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(add_gradient, master))

    @classmethod
    def load(
        cls, config: ModelConfig, optimizer: OptimizerConfig, device: str | torch.device
    ) -> "DensePolicy":
        """The policy from the checkpoint that `config.path` names."""
        model = AutoModelForCausalLM.from_pretrained(
            model_folder(config.path), dtype=getattr(torch, config.dtype)
        )
        return cls(model, config, optimizer, device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products, in which the weights are served and exported."""
        dtype: torch.dtype = self.model.dtype
        return torch.bfloat16 if self.device.type == "cuda" else dtype

    @torch.no_grad()
    def score(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        schedule: BudgetSchedule | None = None,
    ) -> list[torch.Tensor]:
        """Log-probs of each response's tokens: fp32 [T] per sequence, on the CPU.

        Dense ones, or those of the distribution that a server with `schedule` samples from.
        """
        return self.score_with_entropy(sequences, temperature, schedule)[0]

    @torch.no_grad()
    def score_with_entropy(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        schedule: BudgetSchedule | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What `score` gives, and the entropies in nats of the distributions that these tokens were
        drawn from, at the same temperature: fp32 [T] per sequence, on the CPU."""
        self.model.eval()
        counts = [len(response) for _, response in sequences]
        logprobs, entropies = torch.empty(sum(counts)), torch.empty(sum(counts))
        for packed in self.micro_batches(sequences):
            rule = SparseRule(schedule, packed.prompt_lengths) if schedule else None
            where = packed.where.cpu()
            part, entropy = token_logprobs_and_entropies(
                self.hidden(packed, rule), self.head, packed.targets, temperature
            )
            logprobs[where], entropies[where] = part.cpu(), entropy.cpu()
        return list(logprobs.split(counts)), list(entropies.split(counts))

    @property
    def head(self) -> torch.Tensor:
        """The vocabulary projection, [V, H]."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    def acceptance(
        self,
        sequences: Sequence[TokenSequence],
        schedule: BudgetSchedule,
        adapted: Callable[[], AbstractContextManager[Any]] = nullcontext,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Exact acceptance rates of each response's tokens: float64 [T] per sequence.

        Both distributions come from this model at `temperature`: the dense one, and the one that a
        server with `schedule` samples from. `adapted` is open while the latter is computed.
        """
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
        rates = torch.empty(len(actors), sum(len(response) for _, response in sequences))
        for packed in self.micro_batches(sequences):
            rule = SparseRule(schedule, packed.prompt_lengths)
            dense = self.hidden(packed)
            for row, adapted in zip(rates, actors, strict=True):
                with adapted():
                    sparse = self.hidden(packed, rule)
                alpha = acceptance_between(sparse, dense, self.head, temperature)
                row[packed.where.cpu()] = alpha.cpu()
        counts = [len(response) for _, response in sequences]
        return [[part.double().numpy() for part in row.split(counts)] for row in rates]

    def loss_step(
        self,
        sequences: Sequence[TokenSequence],
        loss: Loss,
        temperature: float = 1.0,
        entropies: torch.Tensor | None = None,
    ) -> StepResult:
        """Gradient of the summed micro-batch losses, clipped, then one optimizer step.

        `entropies` [N] on the CPU is filled with those that `score_with_entropy` would give.
        A gradient that is not finite is logged, and weights and optimizer stay as they are.
        """
        self.model.train()
        # A loss that raised in an earlier call has left its gradients behind.
        self.model.zero_grad()
        self.optimizer.zero_grad()
        total, count = 0.0, 0
        for packed in self.micro_batches(sequences):
            inputs = self.hidden(packed), self.head, packed.targets, temperature
            if entropies is None:
                logprobs = token_logprobs(*inputs)
            else:
                logprobs, entropy = token_logprobs_and_entropies(*inputs)
                entropies[packed.where.cpu()] = entropy.cpu()
            part = loss(logprobs, packed.where)
            part.backward()
            total, count = total + float(part.detach()), count + 1
        norm = self.optimizer.step()
        self._round_masters()
        return StepResult(total, norm, count)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their checkpoint names, tied ones once; views that a step changes."""
        for name, parameter in self._named:
            yield name, parameter.detach()

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The fp32 weights that the optimizer updates, under the same names, where they lie."""
        for (name, _), master in zip(self._named, self._masters, strict=True):
            yield name, master.detach()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients for the policy's own weights."""
        for parameter in self._params:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._params:
                parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, Any]:
        """Model, the fp32 weights that the optimizer updates, optimizer, and the model's dtype."""
        return {
            "model": {
                _own_name(name): value
                for name, value in self.model.state_dict().items()
                if not _is_adapters(name)
            },
            "masters": [master.detach() for master in self._masters],
            "optimizer": self.optimizer.state_dict(),
            "dtype": str(self.model.dtype),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, for which "model" is not needed: its weights are the
        fp32 ones, rounded. Raises `ValueError` if `dtype` was another then."""
        if state["dtype"] != str(self.model.dtype):
            raise ValueError(
                f"the checkpoint was written with another model.dtype than {self.model.dtype}:"
                " set it back, or start without --resume"
            )
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._round_masters()
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _round_masters(self) -> None:
        if self._masters is not self._params:
            for master, parameter in zip(self._masters, self._params, strict=True):
                parameter.copy_(master)

    def hidden(self, packed: Packed, rule: SparseRule | None = None) -> torch.Tensor:
        """Last hidden states that predict the targets: [n, H]; by full attention or by `rule`."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            hidden = self.model.base_model(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                sequence_lengths=packed.lengths,
                sparse_rule=rule,
                selections=Selections() if self._runs_twice() else None,
            ).last_hidden_state[0]
        hidden = hidden[packed.predictors]
        return hidden.bfloat16() if on_gpu else hidden

    def _runs_twice(self) -> bool:
        """Whether gradient checkpointing will repeat a forward pass that begins now."""
        checkpointing: bool = self.model.is_gradient_checkpointing
        return checkpointing and self.model.training and torch.is_grad_enabled()

    def micro_batches(self, sequences: Sequence[TokenSequence]) -> Iterator[Packed]:
        for index, (prompt, response) in enumerate(sequences):
            if not len(prompt) or not len(response):
                raise ValueError(
                    f"sequences[{index}] has {len(prompt)} prompt and {len(response)} response"
                    " tokens: expected at least one of each"
                )
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        starts = np.cumsum([0, *(len(response) for _, response in sequences)])
        for members in pack(lengths, self._micro_batch_tokens):
            chosen = [sequences[i] for i in members]
            where = [np.arange(starts[i], starts[i + 1]) for i in members]
            yield lay_out(chosen, np.concatenate(where), self.device)


def acceptance_between(
    sparse: torch.Tensor, dense: torch.Tensor, head: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Exact acceptance rates, fp32 [n], of the distributions that last hidden states [n, H] give.

    `head` is the vocabulary projection of both, [V, H]; its products are taken in chunks.
    """
    projection = head.to(dense.dtype).t()
    rows = max(1, CHUNK_ELEMENTS // head.shape[0])
    parts = [
        acceptance_rate(product(left, projection), product(right, projection), temperature)
        for left, right in zip(sparse.split(rows), dense.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _is_adapters(name: str) -> bool:
    """Whether a weight belongs to a PEFT LoRA layer, by PEFT's naming."""
    return ".lora_" in name


def _own_name(name: str) -> str:
    """The name that a weight had before PEFT wrapped its layer."""
    return name.replace(".base_layer.", ".")
