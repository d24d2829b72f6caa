"""Several ranks compute what one computes: log-probs, acceptance rates, gradients and weights."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.dense_policy import DensePolicy, assign_to_ranks, pack
from sparrow_sglang.rl.policy.shards import ALONE, Ranks
from sparrow_sglang.schedules.schedule import BudgetSchedule


def on_ranks(world: int, job: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """Results of `job` in `world` processes; the exit code of a process in which it fails."""

    def run(rank: int) -> None:
        try:
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            torch.save(job(Ranks(rank, world)), folder / f"result-{rank}")
            dist.destroy_process_group()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
        if child.exitcode is None:
            child.kill()
    return [
        child.exitcode or torch.load(folder / f"result-{rank}", weights_only=False)
        for rank, child in enumerate(children)
    ]


# No number of rows is a multiple of the ranks.
SIZES = {
    "vocab_size": 199,
    "hidden_size": 36,
    "intermediate_size": 45,
    # Under a fixed schedule the first sparse layer is the third one.
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "initializer_range": 0.2,
}
LENGTHS = [(5, 9), (1, 1), (12, 40), (2, 30), (7, 7), (3, 60)]


def sequences(seed: int) -> list[tuple[list[int], list[int]]]:
    draw = np.random.default_rng(seed)
    return [
        (draw.integers(0, 199, p).tolist(), draw.integers(0, 199, r).tolist()) for p, r in LENGTHS
    ]


def weighted(scale: torch.Tensor, logprobs: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return (logprobs * scale[where]).sum()


def trained(ranks: Ranks, tied: bool, **settings: Any) -> dict[str, Any]:
    """Results of three optimizer steps of a small policy, and of measurements after them."""
    torch.manual_seed(0)
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
        if tied
        else LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    )
    offload = settings.pop("offload", False)
    optimizer = OptimizerConfig(lr=1e-3, grad_clip=0.5, offload=offload)
    policy = DensePolicy(
        model, ModelConfig(micro_batch_tokens=64, **settings), optimizer, "cpu", ranks
    )
    steps = []
    for step in range(3):
        batch = sequences(step)[: 1 if step == 2 else None]
        entropies = torch.zeros(sum(len(response) for _, response in batch))
        loss = partial(weighted, torch.linspace(-1, 1, len(entropies)))
        steps.append((policy.loss_step(batch, loss, 0.8, entropies), entropies))
    schedule = BudgetSchedule.fixed(48)
    return {
        "steps": steps,
        "logprobs": torch.cat(policy.score(sequences(9), 0.8)[0]),
        "rates": np.concatenate(policy.acceptance(sequences(9), schedule)),
        "weights": {name: weight.clone() for name, weight in policy.named_weights()},
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"tied": True},
        {"tied": False, "gradient_checkpointing": False},
        {"tied": True, "dtype": "bfloat16"},
        {"tied": False, "offload": True},
    ],
    ids=str,
)
def test_two_ranks_train_as_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone = trained(ALONE, **settings)

    both = on_ranks(2, lambda ranks: trained(ranks, **settings), tmp_path / "two")
    # Gradients of bf16 weights are rounded once per micro-batch, and two ranks form other ones.
    close = {"atol": 5e-3, "rtol": 5e-2} if "dtype" in settings else {"atol": 1e-5, "rtol": 1e-5}
    for rank in both:
        torch.testing.assert_close(rank, alone, **close)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[7], [9, 3, 5, 30, 2, 8, 8], [16] * 9, [40, 1]], ids=str)
def test_ranks_are_dealt_every_sequence_once_in_rounds_of_like_length(
    ranks: int, lengths: list[int]
) -> None:
    packs = pack(lengths, 16)
    dealt = assign_to_ranks(packs, lengths, ranks)
    assert sorted(i for share in dealt for members in share for i in members) == list(
        range(len(lengths))
    )
    assert len({len(share) for share in dealt}) == 1
    # There are no more rounds than needed, and longer sequences never come in a later round.
    assert len(dealt[0]) == -(-len(packs) // ranks)
    longest = [
        [max((lengths[i] for i in members), default=0) for members in together]
        for together in zip(*dealt, strict=True)
    ]
    if ranks > 1:
        flat = [length for together in longest for length in together]
        assert flat == sorted(flat, reverse=True)
