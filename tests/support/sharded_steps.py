"""Steps of a policy with the embedded model on this process's GPU. torchrun runs this file as a
program on two ranks; a single rank calls `steps`."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "float32": ({"dtype": "float32"}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "offload": ({"dtype": "bfloat16"}, {"offload": True}),
}
"""Fields of `ModelConfig` and of `OptimizerConfig`, by setting."""

LR = 1e-3


def steps(ranks: Any) -> dict[str, dict[str, Any]]:
    """For each setting: log-probs before a step, its loss and gradient norm, and the weights and
    allocated bytes after it."""
    import numpy as np
    import torch

    from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
    from sparrow_sglang.rl.policy.dense_policy import DensePolicy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = np.random.default_rng(0)
    sequences = [
        (draw.integers(0, 49_000, 30).tolist(), draw.integers(0, 49_000, length).tolist())
        for length in (400, 17, 90, 250, 33)
    ]
    weights = torch.linspace(-1, 1, sum(len(response) for _, response in sequences))

    def loss(logprobs: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return -(logprobs * weights.to(device)[where]).sum() / len(weights)

    results = {}
    for name, (model, optimizer) in SETTINGS.items():
        policy = DensePolicy.load(
            ModelConfig(**model, micro_batch_tokens=300),
            OptimizerConfig(lr=LR, grad_clip=1e9, **optimizer),
            device,
            ranks,
        )
        logprobs = torch.cat(policy.score(sequences)[0])
        result = policy.loss_step(sequences, loss)
        results[name] = {
            "norm": result.grad_norm,
            "loss": result.loss,
            "bytes": torch.cuda.memory_allocated(),
            "logprobs": logprobs,
            "weights": {name: w.float().cpu() for name, w in policy.named_weights()},
        }
        del policy
        # FSDP's shards are in reference cycles; without collection they would count for the next
        # setting.
        gc.collect()
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    from sparrow_sglang.rl.ranks import Ranks

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    torch.save(steps(ranks), Path(sys.argv[1]) / f"rank-{ranks.rank}")
    dist.destroy_process_group()
