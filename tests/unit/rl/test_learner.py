"""Which responses a learner measures and learns from, at which temperature and learning rate."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distillation import SCHEDULE, batch_of, new_policy
from engines import random_prompt
from transformers import get_scheduler

from sparrow_sglang.mismatch.tail import token_bins
from sparrow_sglang.rl import learner
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import OptimizerConfig, TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy.optimizer import learning_rate

TEMPERATURE = 0.6


def config(**sections: Any) -> TrainConfig:
    fields = {"run_dir": "unused", "task": {"name": "story"}, "mismatch": {"sequences": 3}}
    fields |= {"rollout": {"temperature": TEMPERATURE}}
    return TrainConfig.parse(fields | sections)


def batch(count: int = 6) -> Batch:
    return batch_of([(random_prompt(100 + i, 40), random_prompt(i, 60)) for i in range(count)])


def test_acceptance_rates_are_at_the_temperature_of_the_rollouts(sharp_llama: str) -> None:
    policy = new_policy(sharp_llama)
    found = LocalLearner(config(), policy).acceptance(batch(), SCHEDULE)
    assert found is not None
    chosen = [0, 2, 4]
    assert [rollout.prompt_id for rollout in found.rollouts] == [f"p{index}" for index in chosen]
    sequences = [(one.prompt_ids, one.response_ids) for one in found.rollouts]
    expected = np.concatenate(policy.acceptance(sequences, SCHEDULE, temperature=TEMPERATURE))
    np.testing.assert_allclose(found.rates, expected, atol=1e-6)
    other = np.concatenate(policy.acceptance(sequences, SCHEDULE))
    assert abs(found.rates - other).max() > 1e-3
    # First tokens do not count, and neither do those of dense steps.
    bins = token_bins(SCHEDULE, 40, 60)
    assert (bins < 0).sum() > 1
    np.testing.assert_array_equal(found.bins, np.tile(bins, 3))


def test_tails_are_those_of_the_adapter_that_rollouts_get(sharp_llama: str) -> None:
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, config(distill={"enabled": True}).distill)
    state = adapter.state_dict()
    torch.manual_seed(0)
    state["params"] = [0.3 * torch.randn_like(one) for one in state["params"]]
    adapter.load_state_dict(state)
    rates = []
    for scale in (0.0, 0.5, 1.0):
        adapter.scale = scale
        found = LocalLearner(config(), policy, adapter=adapter).acceptance(batch(), SCHEDULE)
        assert found is not None
        rates.append(found.rates)
        sequences = [(one.prompt_ids, one.response_ids) for one in found.rollouts]
        measured = policy.acceptance(sequences, SCHEDULE, adapter.delivered, TEMPERATURE)
        np.testing.assert_allclose(found.rates, np.concatenate(measured), atol=1e-6)
    assert min(abs(rates[0] - rates[1]).max(), abs(rates[1] - rates[2]).max()) > 0.1


def test_the_adapter_learns_from_other_responses_than_choose_its_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[Any] = []
    gated: list[Any] = []
    adapter = SimpleNamespace(step=lambda sequences, *rest: learnt.extend(sequences) or {})
    monkeypatch.setattr(
        learner,
        "choose_scale",
        lambda adapter, policy, chosen, *rest: gated.append((chosen, rest)) or {},
    )
    nothing: Any = object()
    LocalLearner(config(), nothing, adapter=adapter).distill(batch(), SCHEDULE)  # type: ignore[arg-type]

    def sequences(*indices: int) -> list[Any]:
        return [batch().sequences[index] for index in indices]

    assert learnt == sequences(1, 3, 5)
    ((chosen, rest),) = gated
    assert chosen.sequences == sequences(0, 2, 4) and rest == (SCHEDULE, TEMPERATURE)


def test_an_update_moves_weights_by_its_learning_rate(sharp_llama: str) -> None:
    policy = new_policy(sharp_llama)
    trained, whole = LocalLearner(config(), policy), replace(batch(2), advantages=torch.ones(120))
    before = [one.clone() for _, _, one in policy.named_parameters()]
    moved = []
    for lr in (0.0, 1e-3):
        updated = trained.update(whole, trained.score(whole), lr)
        assert (updated.metrics["actor/lr"], updated.metrics["actor/optimizer_steps"]) == (lr, 1)
        after = (one for _, _, one in policy.named_parameters())
        moved.append(max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)))
    # A step of Adam moves no weight by much more than the rate.
    assert moved[0] == 0 and 1e-4 < moved[1] < 5e-3


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
