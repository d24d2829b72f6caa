"""The learning rate over a run, and the reference policy of the KL term."""

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.reference_policy import ReferencePolicy
from sparrow_sglang.rl.types import Rollout


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_learning_rate_after_its_warm_up_is_that_of_transformers(decay: str) -> None:
    settings = OptimizerConfig(lr=2.0, warmup_steps=4, decay=decay)
    names = {"constant": "constant_with_warmup"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    stock = get_scheduler(names.get(decay, decay), optimizer, 4, 20)
    rates = [stock.lr_lambdas[0](step) * 2.0 for step in range(20)]
    assert [learning_rate(settings, step, 20) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert [learning_rate(settings, step, 20) for step in range(4, 20)] == pytest.approx(rates[4:])
    half = settings.model_copy(update={"final_lr_share": 0.5})
    assert learning_rate(half, 25, 20) == (2.0 if decay == "constant" else 1.0)


def test_the_reference_scores_with_the_weights_from_before_training(tiny_llama) -> None:
    policy = DensePolicy.load(
        ModelConfig(path=tiny_llama, dtype="bfloat16"), OptimizerConfig(lr=0.1), "cpu"
    )
    reference = ReferencePolicy(policy)
    rollouts = tuple(
        Rollout(f"p{i}", 0, (1, 2 + i), (5, 6 + i, 7), np.zeros(3), "stop", "0", "dense", "")
        for i in range(3)
    )
    kept = torch.tensor([True, False, True])
    batch = Batch(rollouts, torch.zeros(9), torch.zeros(9), torch.arange(3), kept)
    # Packed as the reference packs them, because matrix products round by their shapes.
    before = policy.score([batch.sequences[0], batch.sequences[2]])
    policy.loss_step(batch.sequences, lambda logprobs, where: logprobs.sum())
    after = policy.score(batch.sequences)
    assert (after[0] - before[0]).abs().max() > 0.01
    expected = torch.cat([before[0], torch.zeros(3), before[1]])
    assert torch.equal(reference.logprobs(batch, 1.0), expected)
    assert torch.equal(policy.score(batch.sequences)[1], after[1])
