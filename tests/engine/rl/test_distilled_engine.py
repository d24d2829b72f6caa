"""DistillSparse: divergences against float64 loops, and what an adapter step moves."""

import numpy as np
import pytest
import torch
from distillation import SEQUENCES, new_policy, settings
from engines import import_for_fork, random_prompt
from training import SERVER_ARGS

from sparrow_sglang.rl.distill import (
    ADAPTER,
    SparseAdapter,
    lora_arguments,
)
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.schedule import BudgetSchedule


@pytest.fixture(scope="module")
def growing(tmp_path_factory) -> BudgetSchedule:
    return BudgetSchedule(
        name="grows", page_size=16, bin_tokens=64, budget_tokens=(48, 64, 80), dense_layers=(0,)
    )


@pytest.fixture(scope="module")
def engine(sharp_llama, growing, tmp_path_factory):
    import_for_fork()
    path = tmp_path_factory.mktemp("schedule") / "grows.json"
    growing.save(path)
    arguments = SERVER_ARGS | lora_arguments(settings(delivery="lora"))
    engine = LocalEngine(sharp_llama, str(path), **arguments)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_server_records_the_tempered_sparse_distribution(
    engine, growing, sharp_llama, temperature
):
    policy = new_policy(sharp_llama)
    engine.update_weights(policy.named_weights(), "tempered")
    prompts = [Prompt("a", "test", tuple(random_prompt(5, 65)))]
    (group,) = engine.generate(prompts, 4, Sampling(90, temperature))
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in group.rollouts]
    recorded = np.concatenate([rollout.logprobs for rollout in group.rollouts])
    scores = {
        t: torch.cat(policy.score(sequences, t, growing)[0]).numpy() for t in (1.0, temperature)
    }
    np.testing.assert_allclose(recorded, scores[temperature], atol=2e-4)
    assert np.abs(recorded - scores[1.0]).max() > 0.1


@pytest.mark.parametrize("delivery", ["none", "lora", "merged"])
def test_the_server_samples_from_the_trainers_sparse_distribution(
    engine, growing, sharp_llama, delivery
):
    """Prompts end and responses begin around every edge of a page and of a bin."""
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings())
    adapter.scale = 1.0
    for _ in range(3):
        adapter.step(SEQUENCES, growing)
    prompts = [
        Prompt(f"{n}", "test", tuple(random_prompt(n, n))) for n in (1, 47, 48, 49, 63, 64, 65, 127)
    ]
    weights = adapter.merged_weights() if delivery == "merged" else policy.named_weights()
    engine.update_weights(weights, delivery)
    name = None
    if delivery == "lora":
        name = ADAPTER
        # Set the adapter twice, as two steps in a row do.
        engine.set_adapter(
            ADAPTER,
            SparseAdapter(new_policy(sharp_llama), settings()).tensors(),
            adapter.lora_config(),
        )
        engine.set_adapter(ADAPTER, adapter.tensors(), adapter.lora_config())
    groups = engine.generate(prompts, 2, Sampling(max_new_tokens=90, adapter=name))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
    recorded = np.concatenate([rollout.logprobs for rollout in rollouts])
    plain = torch.cat(policy.score(sequences, schedule=growing)[0]).numpy()
    with adapter.enabled():
        adapted = torch.cat(policy.score(sequences, schedule=growing)[0]).numpy()
    expected, other = (plain, adapted) if delivery == "none" else (adapted, plain)
    np.testing.assert_allclose(recorded, expected, atol=1e-4)
    assert np.abs(recorded - other).max() > 0.01
    # Evaluation is dense and without the adapter, whether or not one is loaded.
    if delivery != "merged":
        (group,) = engine.generate(prompts[-1:], 1, Sampling(max_new_tokens=40, dense=True))
        (rollout,) = group.rollouts
        (dense,) = policy.score([(rollout.prompt_ids, rollout.response_ids)])[0]
        np.testing.assert_allclose(rollout.logprobs, dense.numpy(), atol=1e-4)
