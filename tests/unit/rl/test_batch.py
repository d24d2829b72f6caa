"""Order of prompts, batches as flat tensors, and the rows that a run writes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.metrics import Acceptance, kv_metrics
from sparrow_sglang.rl.runs.log import response_rows
from sparrow_sglang.rl.trainer import prompts_from
from sparrow_sglang.rl.types import Group, Prompt, Rollout
from sparrow_sglang.schedules.schedule import BudgetSchedule


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5))
def test_every_prompt_is_used_once_before_any_is_used_again(size, count, seed):
    prompts = [Prompt(str(i), "t", (1,)) for i in range(size)]
    steps = -(-3 * size // count)
    used = [p.id for step in range(steps) for p in prompts_from(prompts, step * count, count, seed)]
    for epoch in range(3):
        assert set(Counter(used[epoch * size : (epoch + 1) * size]).values()) == {1}


def rollout(name: str, sample: int, prompt: int, length: int) -> Rollout:
    logprobs = -np.arange(1, length + 1, dtype=np.float32) - 100 * int(name) - 10 * sample
    ids = tuple(range(10 * sample, 10 * sample + length))
    return Rollout(name, sample, (1,) * prompt, ids, logprobs, "stop", "0", "s", "")


def batch(lengths: list[list[int]], rewards: list[list[float]]) -> Batch:
    groups = [
        Group(
            Prompt(str(g), "t", (1,)),
            tuple(rollout(str(g), i, g + 1, length) for i, length in enumerate(group)),
        )
        for g, group in enumerate(lengths)
    ]
    return Batch.of(groups, group_advantages(rewards, std_normalisation=False))


def test_a_prompt_that_a_step_samples_twice_has_the_tail_of_each_response():
    both = rollout("0", 0, 3, 40), rollout("0", 0, 3, 41)
    owners = np.repeat([0, 1], [40, 41])
    tails = Acceptance(both, owners / 2 + 0.25, np.zeros(81, np.int64), owners).tails()
    rows = response_rows([Group(Prompt("0", "t", (1,)), both)], [(0, 0)], (), str, tails)
    assert [row["tail"] for row in rows] == [0.25, 0.75]


def test_every_token_carries_its_responses_advantage():
    flat = batch([[2, 3], [1, 4], [2, 2]], [[0, 1], [1, 1], [4, 2]])
    assert flat.lengths == [2, 3, 1, 4, 2, 2]
    assert flat.advantages.tolist() == [-0.5] * 2 + [0.5] * 3 + [0.0] * 5 + [1.0] * 2 + [-1.0] * 2
    assert flat.rollout_logprobs[:5].tolist() == [-1, -2, -11, -12, -13]
    assert flat.rollout_logprobs[-1] == -212


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mini_batches_hold_each_token_that_teaches_once(count):
    flat = batch([[2, 3], [1, 4], [2, 2]], [[0, 1], [1, 1], [4, 2]])
    parts = list(flat.mini_batches(count))
    assert len(parts) == min(count, 2)
    tokens = torch.cat([where for _, where in parts])
    assert sorted(tokens.tolist()) == [*range(5), *range(10, 14)]
    for sequences, where in parts:
        assert len(where) == sum(len(response) for _, response in sequences)
    # The middle group has zero advantages; the others are in different optimizer steps.
    assert count == 1 or [len(sequences) for sequences, _ in parts] == [2, 2]


def test_kv_tokens_read_are_those_of_the_schedule():
    one = rollout("0", 0, 171, 11)
    metrics = kv_metrics([one], BudgetSchedule.fixed(48))
    # Ten steps, whose last page is filled up.
    lengths = range(172, 182)
    read = [32 + (n - 1) % 16 + 1 for n in lengths]
    assert metrics["sparrow/kv_tokens_read"] == pytest.approx(np.mean(read))
    assert metrics["sparrow/kv_tokens_cached"] == pytest.approx(np.mean(lengths))
    assert kv_metrics([one], None)["sparrow/kv_tokens_read"] == np.mean(lengths)
    assert kv_metrics([rollout("0", 0, 9, 1)], None) == {}


def test_a_part_of_a_batch_keeps_what_belongs_to_its_responses():
    whole = batch([[3, 1], [4, 2], [5, 2]], [[0, 1], [1, 1], [4, 2]])
    part, chosen = whole.sample_evenly(3), [0, 2, 4]
    assert part.rollouts == tuple(whole.rollouts[index] for index in chosen)
    for name in ("rollout_logprobs", "advantages"):
        of_responses = getattr(whole, name).split(whole.lengths)
        assert torch.equal(getattr(part, name), torch.cat([of_responses[i] for i in chosen]))
    for name in ("group", "in_loss"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[chosen])
    assert whole.sample_evenly(9).rollouts == whole.rollouts


def test_retracted_responses_are_in_no_part_of_a_batch():
    whole = batch([[2] * 6], [[0, 1, 0, 1, 0, 1]])

    def retracting(*samples: int) -> Batch:
        rollouts = (replace(one, retracted=one.sample in samples) for one in whole.rollouts)
        return replace(whole, rollouts=tuple(rollouts))

    def samples(part: Batch) -> list[int]:
        return [one.sample for one in part.rollouts]

    some, nothing = retracting(0, 3), retracting(*range(6))
    assert samples(some.sample_evenly(2)) == [1, 4]
    assert samples(some.holdout_of(2)) == [2, 5]
    assert samples(some.holdout_of(9)) == samples(some.sample_evenly(9)) == [1, 2, 4, 5]
    assert nothing.sample_evenly(2).rollouts == nothing.holdout_of(2).rollouts == ()
    # If all responses were retracted, nothing is measured and the adapter is not trained.
    config = TrainConfig.parse({"run_dir": "unused", "task": {"name": "story"}})
    learner, schedule = LocalLearner(config, Any, adapter=Any), BudgetSchedule.fixed(48)
    assert learner.acceptance(nothing, schedule) is None
    assert learner.distill(nothing, schedule) == {}
