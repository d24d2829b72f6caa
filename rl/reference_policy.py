"""The reference policy: the model before training, which a KL term keeps the policy close to.

Its weights are kept in the memory of the CPU, and replace the policy's while it scores, so that the
device holds no second model. Each rank keeps the same rows as it has of the policy.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.shards import local


class ReferencePolicy:
    """`policy` with the weights that it has when this object is made."""

    def __init__(self, policy: DensePolicy) -> None:
        self._policy = policy
        self._weights = _copied(policy)

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """Log-probs of the batch's response tokens, fp32 [N] on the CPU; 0 for tokens outside the
        loss."""
        result = torch.zeros(len(batch.advantages))
        chosen = batch.in_loss.nonzero().flatten().tolist()
        if chosen:
            tokens = batch.in_loss.repeat_interleave(torch.tensor(batch.lengths))
            with self._in_place():
                parts = self._policy.score([batch.sequences[i] for i in chosen], temperature)
            result[tokens] = torch.cat(parts)
        return result

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        trained = _copied(self._policy)
        try:
            _put(self._policy, self._weights)
            yield
        finally:
            _put(self._policy, trained)


def _copied(policy: DensePolicy) -> list[torch.Tensor]:
    return [local(p.detach()).to("cpu", copy=True) for _, p, _ in policy.named_parameters()]


@torch.no_grad()
def _put(policy: DensePolicy, weights: list[torch.Tensor]) -> None:
    for (_, parameter, _), value in zip(policy.named_parameters(), weights, strict=True):
        local(parameter).copy_(value)
