"""DistillSparse (Algorithm 1 of arXiv:2606.08446): a LoRA adapter for rollouts only, trained
towards the dense distribution. It is disabled except inside `SparseAdapter.enabled`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import DistillConfig
from sparrow_sglang.rl.policy.chunked_logprobs import logits_of, rows_at_once
from sparrow_sglang.rl.policy.dense_policy import DensePolicy, Packed
from sparrow_sglang.rl.policy.optimizer import ClippedAdamW
from sparrow_sglang.rl.policy.shards import as_dtensor_like, full_tensor, local, local_chunk
from sparrow_sglang.rl.policy.sparse_policy import SparseRule
from sparrow_sglang.schedules.schedule import BudgetSchedule

ADAPTER = "sparrow"
"""Name of the adapter, in the model and in SGLang's LoRA manager."""

Gains = dict[str, tuple[int, ...]]
"""By prompt: its tokens, and those that each scale gains, see `adapter_gate.gains`."""

# Lower bound of the probability mass outside the top-k lists: rounding hides anything smaller.
_LEAST_REST = 1e-6


class SparseAdapter:
    """The adapter of a policy, and its optimizer. Rollouts, `merged_weights`, `tensors` and `save`
    multiply it by `scale`, which is 0 until `adapter_gate` finds that the adapter helps; `gains`
    are its measurements under the `schedule` of that name. Steps compute with the whole adapter."""

    def __init__(self, policy: DensePolicy, settings: DistillConfig) -> None:
        """Changes nothing in the policy's model yet. Raises as `require_modules`."""
        self.scale = 0.0
        self.gains: list[Gains] = []
        self.schedule = ""
        self._policy = policy
        self._settings = settings
        self._lora = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.target_modules),
            lora_dropout=0.0,
        )
        require_modules(policy.model, settings.target_modules)
        with policy.frozen():
            inject_adapter_in_model(self._lora, policy.model, ADAPTER)
        self._layers: dict[str, Linear] = {
            name: module
            for name, module in policy.model.named_modules()
            if isinstance(module, Linear)
        }
        self._factors = {
            name: parameter
            for name, parameter in policy.model.named_parameters()
            if f".{ADAPTER}." in name
        }
        self._params = list(self._factors.values())
        for parameter in self._params:
            # Each rank has drawn its own initial values; all ranks take those of rank 0.
            drawn = parameter.data.float() * (policy.ranks.rank == 0)
            parameter.data = policy.ranks.all_reduce(drawn)
        self._switch(False)
        # `ClippedAdamW` skips a step whose gradient is not finite: the run can do without a step of
        # the adapter, but not with weights that are not finite.
        self._optimizer = ClippedAdamW("adapter", self._params, grad_clip=1.0, lr=settings.lr)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    @contextmanager
    def delivered(self, scale: float | None = None) -> Iterator[None]:
        """The model computes as the engine does with the adapter at `scale` (None: `self.scale`); a
        merged one is rounded with the weights to the engine's dtype."""
        scale = self.scale if scale is None else scale
        if scale == 0:
            yield
        elif self._settings.delivery == "merged":
            with self._merged(scale):
                yield
        else:
            full = {layer: layer.scaling[ADAPTER] for layer in self._layers.values()}
            for layer in full:
                layer.scaling[ADAPTER] *= scale
            try:
                with self.enabled():
                    yield
            finally:
                for layer, factor in full.items():
                    layer.scaling[ADAPTER] = factor

    @contextmanager
    def _merged(self, scale: float) -> Iterator[None]:
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for name, parameter, master in self._policy.named_parameters():
                layer = self._layers.get(name.removesuffix(".weight"))
                if layer is not None:
                    weight = local(parameter.detach())
                    before.append((weight, weight.clone()))
                    merged = self._merged_rows(layer, parameter, master, scale)
                    weight.copy_(merged.to(self._policy.compute_dtype))
            yield
        finally:
            for weight, values in before:
                weight.copy_(values)

    def step(
        self, sequences: Sequence[TokenSequence], schedule: BudgetSchedule, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on KL(sparse || dense), a mean over response tokens, plus `entropy`
        times the squared mean entropy gap, both at `temperature`. The dense side is the policy as
        it is now, which the next rollouts use. A gradient that is not finite is logged and
        skipped."""
        policy, settings = self._policy, self._settings
        slope = 0.0
        if settings.entropy:
            # The gradient of gap^2 is 2 gap times that of the gap, a sum over tokens. The gap is
            # that of the whole step, so that no split into micro-batches or ranks changes it.
            _, dense_entropies = policy.score(sequences, temperature)
            with self.enabled():
                _, sparse_entropies = policy.score(sequences, temperature, schedule)
            gap = torch.cat(sparse_entropies).double() - torch.cat(dense_entropies).double()
            slope = 2 * settings.entropy * float(gap.mean())
        policy.model.train()
        # A step that raised may have left gradients behind.
        self._optimizer.zero_grad()
        tokens = sum(len(response) for _, response in sequences)

        def means(packed: Packed) -> torch.Tensor:
            with torch.no_grad():
                dense = policy.hidden(packed)
            with self.enabled():
                sparse = policy.hidden(packed, SparseRule(schedule, packed.prompt_lengths))
            sums = kl_and_entropy_gap(sparse, dense, policy.head, temperature, settings.top_k)
            return sums / tokens

        names = ("sparrow/distill_kl", "sparrow/distill_entropy_gap")
        totals = dict.fromkeys(names, 0.0)
        with policy.frozen():
            for packed in policy.micro_batches(sequences):
                kl, gap = policy.gathered(partial(means, packed))
                # The backward pass recomputes checkpointed layers, with the adapter as before.
                with self.enabled():
                    (kl + slope * gap).backward()
                for name, part in zip(names, (kl, gap), strict=True):
                    totals[name] += float(part.detach())
        for parameter in self._params:
            if parameter.grad is not None:
                policy.ranks.all_reduce(parameter.grad)
        totals = policy.ranks.total(totals)
        return totals | {"sparrow/distill_grad_norm": self._optimizer.clipped_step()}

    def merged_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights plus `scale` times the adapter, summed in fp32, then rounded to `dtype`."""
        for name, parameter, master in self._policy.named_parameters():
            layer = self._layers.get(name.removesuffix(".weight"))
            if layer is None or self.scale == 0:
                yield name, full_tensor(parameter.detach().to(dtype or parameter.dtype))
            else:
                rows = self._merged_rows(layer, parameter, master, self.scale)
                yield name, full_tensor(as_dtensor_like(rows.to(dtype or rows.dtype), parameter))

    def tensors(self) -> dict[str, torch.Tensor]:
        """`scale` times the adapter, under PEFT's names, which SGLang's LoRA manager takes too."""
        return {
            "base_model.model." + name.replace(f".{ADAPTER}.", "."): (
                parameter.detach() * self.scale if ".lora_B." in name else parameter.detach()
            )
            for name, parameter in self._factors.items()
        }

    def lora_config(self) -> dict[str, Any]:
        fields: dict[str, Any] = self._lora.to_dict()
        return fields | {
            "target_modules": sorted(self._lora.target_modules or ()),
            "peft_type": "LORA",
        }

    def is_finite(self) -> bool:
        return self._optimizer.is_finite()

    def save(self, folder: Path) -> None:
        self._lora.save_pretrained(str(folder))
        weights = {name: value.contiguous().cpu() for name, value in self.tensors().items()}
        save_file(weights, folder / "adapter_model.safetensors")

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "gains": self.gains,
            "schedule": self.schedule,
            "params": [parameter.detach() for parameter in self._params],
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, saved in zip(self._params, state["params"], strict=True):
                parameter.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.scale, self.gains = state["scale"], state.get("gains", [])
        self.schedule = state.get("schedule", "")

    def _merged_rows(
        self, layer: Linear, parameter: torch.Tensor, master: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """This rank's rows, in fp32."""
        delta = layer.get_delta_weight(ADAPTER).detach().float()
        return master.to(delta.device) + scale * local_chunk(delta, parameter)

    def _switch(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)


def require_modules(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Raises `InputError` unless the layers have a linear module for each of `names`, of which PEFT
    requires one only. The vocabulary projection does not count: log-probs use its weight without
    calling the module, so its adapter would learn nothing."""
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    for target in names:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise InputError(
                f"distill.target_modules={list(names)}: the model's layers have no module"
                f" {target!r}; expected some of {', '.join(known)}"
            )


def lora_arguments(settings: DistillConfig) -> dict[str, Any]:
    if not settings.enabled or settings.delivery == "merged":
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": settings.rank,
        "lora_target_modules": list(settings.target_modules),
        "max_loras_per_batch": 2,
    }


def top_k_kl(sparse: torch.Tensor, dense: torch.Tensor, k: int) -> torch.Tensor:
    """KL(sparse || dense) [n] of log-probs [n, V] reduced to their likeliest tokens; tokens in
    neither side's top k form one bucket. A lower bound of the exact divergence, with gradient in
    `sparse`."""
    k = min(k, sparse.shape[-1])
    ours, theirs = sparse.topk(k).indices, dense.topk(k).indices
    known = (theirs[:, :, None] == ours[:, None, :]).any(-1)
    ids = torch.cat([ours, theirs], dim=1)
    counted = torch.cat([torch.ones_like(known), ~known], dim=1)
    p, q = sparse.gather(1, ids), dense.gather(1, ids)
    listed = torch.where(counted, p.exp() * (p - q), 0.0).sum(1)
    rest_p = (1 - torch.where(counted, p.exp(), 0.0).sum(1)).clamp(min=_LEAST_REST)
    rest_q = (1 - torch.where(counted, q.exp(), 0.0).sum(1)).clamp(min=_LEAST_REST)
    return listed + rest_p * (rest_p.log() - rest_q.log())


def entropies(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def kl_and_entropy_gap(
    sparse: torch.Tensor, dense: torch.Tensor, head: torch.Tensor, temperature: float, k: int
) -> torch.Tensor:
    """Sums [2] over rows: of `top_k_kl`, and of the sparse entropy less the dense one."""

    def part(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sparse, dense = (
            logits_of(hidden, head, temperature).log_softmax(-1) for hidden in (left, right)
        )
        gap = entropies(sparse) - entropies(dense)
        return torch.stack([top_k_kl(sparse, dense, k).sum(), gap.sum()])

    rows = rows_at_once(head)
    parts: list[torch.Tensor] = [
        checkpoint(part, left, right, use_reentrant=False)
        for left, right in zip(sparse.split(rows), dense.split(rows), strict=True)
    ]
    return torch.stack(parts).sum(0)
