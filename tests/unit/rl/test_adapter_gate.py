"""What rollouts get of an adapter: what measures best, and nothing of one that does harm."""

import copy

import numpy as np
import pytest
import torch
from distillation import SCHEDULE, SEQUENCES, new_policy, settings
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl.adapter_gate import MIN_TOKENS, best_scale, choose_scale, lowest_tail
from sparrow_sglang.rl.distill import SparseAdapter


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
    metrics = choose_scale(adapter, policy, SEQUENCES, SCHEDULE, 1.0)
    assert adapter.scale == metrics["sparrow/distill_scale"] == 0
    assert metrics["sparrow/distill_p05_scale1"] < metrics["sparrow/distill_p05_scale0"]
    delivered = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE, adapter.delivered))
    np.testing.assert_array_equal(delivered, without)
    for (name, merged), (_, weight) in zip(
        adapter.merged_weights(), new_policy(sharp_llama).named_weights(), strict=True
    ):
        assert torch.equal(merged, weight), name
    assert all(not value.any() for name, value in adapter.tensors().items() if "lora_B" in name)


@pytest.mark.parametrize("delivery", ["merged", "lora"])
def test_a_good_adapter_is_delivered(sharp_llama, delivery):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(delivery=delivery, lr=1e-2))
    for _ in range(8):
        adapter.step(SEQUENCES, SCHEDULE)
    metrics = choose_scale(adapter, policy, SEQUENCES, SCHEDULE, 1.0)
    assert adapter.scale > 0
    tails = {scale: metrics[f"sparrow/distill_p05_scale{scale:g}"] for scale in (0, 0.5, 1)}
    assert tails[adapter.scale] == max(tails.values()) > tails[0] + 0.03
    rates = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE, adapter.delivered))
    assert np.percentile(rates, 5, method="inverted_cdf") == pytest.approx(tails[adapter.scale])


@pytest.mark.parametrize("delivery", ["merged", "lora"])
def test_half_an_adapter_is_measured_and_saved_as_it_is_delivered(sharp_llama, tmp_path, delivery):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(delivery=delivery))
    adapter.step(SEQUENCES, SCHEDULE)
    before = [weight.clone() for _, weight in policy.named_weights()]
    adapter.scale = 0.5
    with adapter.delivered():
        scored = policy.score(SEQUENCES)
    # The reference is PEFT's own merge of a base model and the saved adapter.
    from peft import PeftModel

    adapter.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path)).merge_and_unload()
    for (prompt, response), found in zip(SEQUENCES, scored, strict=True):
        with torch.no_grad():
            logits = merged(torch.tensor([[*prompt, *response]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    # Afterwards the policy is what it was.
    assert all(map(torch.equal, before, (weight for _, weight in policy.named_weights())))


def test_merged_measurement_rounds_as_an_engine_in_bfloat16_does(sharp_llama):
    policy = new_policy(sharp_llama, "bfloat16")
    adapter = SparseAdapter(policy, settings(lr=1e-7))
    adapter.step(SEQUENCES, SCHEDULE)
    # So small a change is lost in bf16, and so is any effect of it.
    plain = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE))
    delivered = np.concatenate(policy.acceptance(SEQUENCES, SCHEDULE, adapter.delivered))
    np.testing.assert_array_equal(delivered, plain)


def test_the_scale_survives_a_checkpoint(sharp_llama):
    adapter = SparseAdapter(new_policy(sharp_llama), settings())
    adapter.scale = 0.5
    saved = copy.deepcopy(adapter.state_dict())
    restored = SparseAdapter(new_policy(sharp_llama), settings())
    restored.load_state_dict(saved)
    assert restored.scale == 0.5
    del saved["scale"]
    restored = SparseAdapter(new_policy(sharp_llama), settings())
    restored.load_state_dict(saved)
    assert restored.scale == 1


def test_the_lowest_tail_is_that_of_a_bin_with_enough_tokens():
    few = np.full(MIN_TOKENS - 1, 0.1)
    first, second = np.linspace(0.5, 1, 400), np.linspace(0.7, 1, 400)
    rates = np.concatenate([first, second, few])
    positions = np.repeat([10, 2010, 4010], [len(first), len(second), len(few)])
    assert lowest_tail(rates, positions) == np.percentile(first, 5, method="inverted_cdf")
    assert lowest_tail(few, np.zeros(len(few), np.int64)) == 0.1


def test_of_equal_scales_the_smallest_is_taken():
    assert best_scale({1.0: 0.8, 0.0: 0.8, 0.5: 0.7}) == 0
    assert best_scale({0.0: 0.7, 0.5: 0.8, 1.0: 0.8}) == 0.5
