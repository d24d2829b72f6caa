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
        sequences, tokens = batch.part(batch.in_loss)
        if sequences:
            with self._in_place():
                result[tokens] = torch.cat(self._policy.score(sequences, temperature))
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
