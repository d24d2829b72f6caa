"""What rollouts get of an adapter: what measures best, and nothing of one that does harm."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from distillation import SCHEDULE, SEQUENCES, batch_of, new_policy, settings
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl.adapter_gate import best_scale, choose_scale, gains
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.metrics import Acceptance
from sparrow_sglang.rl.types import Rollout

# Each sequence once for a prompt of its own, as the scale needs eight.
BATCH = batch_of(SEQUENCES * 4)


def damaged(adapter: SparseAdapter) -> None:
    """Make the adapter one that does harm."""
    torch.manual_seed(0)
    state = adapter.state_dict()
    state["params"] = [torch.randn_like(parameter) for parameter in state["params"]]
    adapter.load_state_dict(state)


@pytest.mark.parametrize("delivery", ["merged", "lora"])
def test_nothing_of_a_bad_adapter_is_delivered(sharp_llama, delivery):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(delivery=delivery))
    without = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE))
    damaged(adapter)
    adapter.scale = 1.0
    metrics = choose_scale(adapter, policy, BATCH, SCHEDULE, 1.0)
    assert adapter.scale == metrics["sparrow/distill_scale"] == 0
    assert metrics["sparrow/distill_p05_scale1"] < metrics["sparrow/distill_p05_scale0"]
    delivered = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE, adapter.delivered))
    np.testing.assert_array_equal(delivered, without)
    for (name, merged), (_, weight) in zip(
        adapter.merged_weights(), new_policy(sharp_llama).named_weights(), strict=True
    ):
        assert torch.equal(merged, weight), name
    assert all(not value.any() for name, value in adapter.tensors().items() if "lora_B" in name)


def test_a_good_adapter_is_delivered(sharp_llama):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(lr=1e-2))
    for _ in range(8):
        adapter.step(SEQUENCES, SCHEDULE)
    metrics = choose_scale(adapter, policy, BATCH, SCHEDULE, 1.0)
    assert adapter.scale > 0
    tails = {scale: metrics[f"sparrow/distill_p05_scale{scale:g}"] for scale in (0, 0.5, 1)}
    assert tails[adapter.scale] > tails[0] + 0.03
    rates = np.concatenate(policy.acceptance(BATCH.sequences, SCHEDULE, adapter.delivered))
    counted = Acceptance.of(BATCH.rollouts, rates, SCHEDULE).counted
    tail = np.percentile(rates[counted], 5, method="inverted_cdf")
    assert tail == pytest.approx(tails[adapter.scale])


@pytest.mark.parametrize("delivery", ["merged", "lora"])
def test_half_an_adapter_is_measured_and_saved_as_it_is_delivered(sharp_llama, tmp_path, delivery):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(delivery=delivery))
    adapter.step(SEQUENCES, SCHEDULE)
    before = [weight.clone() for _, weight in policy.named_weights()]
    adapter.scale = 0.5
    with adapter.delivered():
        scored = policy.score(SEQUENCES)[0]
    # The reference is PEFT's own merge of a base model and the saved adapter.
    from peft import PeftModel

    adapter.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path)).merge_and_unload()
    fields = {"run_dir": tmp_path, "task": {"name": "story"}, "distill": {"delivery": delivery}}
    learner = LocalLearner(TrainConfig.parse(fields), policy, adapter=adapter)
    for name, weight in learner.weights(adapted=True, dtype=torch.float32):
        wanted = dict(policy.named_weights()) if delivery == "lora" else merged.state_dict()
        torch.testing.assert_close(weight, wanted[name], atol=1e-6, rtol=1e-6)
    for (prompt, response), found in zip(SEQUENCES, scored, strict=True):
        with torch.no_grad():
            logits = merged(torch.tensor([[*prompt, *response]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    # Afterwards the policy is what it was.
    assert all(map(torch.equal, before, (weight for _, weight in policy.named_weights())))


def measured(*shares: float, prompts: int = 8, tokens: int = 500) -> list[Acceptance]:
    """For each scale an acceptance in which a share of each prompt's tokens is low."""
    rollouts = tuple(
        Rollout(f"p{i}", 0, (1,), (7,), np.zeros(1), "stop", "0", "s", "") for i in range(prompts)
    )
    owners = np.repeat(np.arange(prompts), tokens)
    draw = np.random.default_rng(0)
    bins = np.zeros(len(owners), np.int64)
    found = []
    for share in shares:
        low = draw.random(len(owners)) < share
        found.append(
            Acceptance(rollouts, np.where(low, 0.3, 0.9 + 0.1 * draw.random()), bins, owners)
        )
    return found


def best(current: float, found: list[Acceptance]) -> float:
    return best_scale(current, [gains(current, found)])


def test_the_scale_changes_only_where_the_measurement_proves_another_better():
    # Differences within the noise: whatever is used stays.
    for scale in (0.0, 0.5, 1.0):
        assert best(scale, measured(0.05, 0.051, 0.052)) == scale
    assert best(1.0, measured(0.05, 0.1, 0.2)) == 0.0
    assert best(0.0, measured(0.2, 0.1, 0.05)) == 1.0
    assert best(0.0, measured(0.2, 0.05, 0.1)) == 0.5
    # Seven prompts prove nothing, and neither do eight responses to seven.
    assert best(1.0, measured(0.05, 0.1, 0.2, prompts=7)) == 1.0
    found = measured(0.05, 0.1, 0.2)
    for one in found:
        object.__setattr__(one, "rollouts", (*one.rollouts[:7], one.rollouts[6]))
    assert best(1.0, found) == 1.0


def test_the_tail_is_that_of_each_bin():
    """In a bin of high rates the whole adapter lowers the tail, far above that of the other bin."""
    found = measured(0.0, 0.0, 0.0)
    draw = np.random.default_rng(3)
    for one, share in zip(found, (0.05, 0.05, 0.3), strict=True):
        one.bins[1::2] = 1
        low = draw.random(len(one.rates)) < share
        one.rates[:] = np.where(low, 0.9, 0.99)
        one.rates[::2] = draw.uniform(0, 0.5, len(one.rates[::2]))
    assert best(1.0, found) in (0.0, 0.5)


def test_measurements_of_several_steps_under_one_schedule_count_together(sharp_llama):
    """With two prompts a step, the scale of a harmful adapter falls after four steps."""
    adapter = SparseAdapter(new_policy(sharp_llama), settings())
    damaged(adapter)
    adapter.scale, scales = 1.0, []
    parts = [BATCH.sample_evenly(8)._subset([2 * step, 2 * step + 1]) for step in range(4)]
    for step, part in enumerate(parts):
        metrics = choose_scale(adapter, adapter._policy, part, SCHEDULE, 1.0)
        scales.append(adapter.scale)
        assert metrics["sparrow/distill_gate_prompts"] == 2 * (step + 1)
        adapter.load_state_dict(adapter.state_dict())
    assert scales == [1.0, 1.0, 1.0, 0.0] and adapter.gains == []
    other = SCHEDULE.model_copy(update={"name": "other"})
    for schedule, part, prompts in ((SCHEDULE, 0, 2), (SCHEDULE, 1, 4), (other, 2, 2)):
        metrics = choose_scale(adapter, adapter._policy, parts[part], schedule, 1.0)
        assert metrics["sparrow/distill_gate_prompts"] == prompts


def test_noise_hardly_ever_moves_the_scale():
    """Four responses to each of eight prompts, which differ, while scales do not."""
    draw, moved = np.random.default_rng(1), 0
    for _ in range(300):
        found = measured(0.05, 0.05, 0.05, prompts=32, tokens=125)
        share = 0.05 * draw.gamma(2, 0.5, (3, 8))
        rollouts = tuple(
            replace(one, prompt_id=f"p{i % 8}") for i, one in enumerate(found[0].rollouts)
        )
        for one, of_prompt in zip(found, share, strict=True):
            object.__setattr__(one, "rollouts", rollouts)
            low = of_prompt[one.owners % 8]
            one.rates[:] = np.where(draw.random(len(low)) < low, 0.3, 0.95)
        moved += best(1.0, found) != 1.0
    assert moved / 300 <= 0.05
