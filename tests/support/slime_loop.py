"""slime's own training loop with a trainer in place of Megatron, to test its rollouts without that.
Takes slime's arguments and runs its `train.py`. The trainer takes one optimizer step of policy
gradient with truncated importance sampling per rollout, on one device, with transformers. It writes
its batches to `--save-debug-train-data`. Without a GPU, Ray and slime are told of GPUs that do not
exist."""

import argparse
import functools
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import torch
from slime.ray.ray_actor import RayActor
from slime.utils.data import process_rollout_data

# The arguments of Megatron that slime reads when it parses and checks its own.
OF_MEGATRON = {
    "fp16": False,
    "seq_length": None,
    "max_position_embeddings": None,
    "vocab_size": None,
    "tokenizer_model": None,
    "tokenizer_type": None,
    "pipeline_model_parallel_size": 1,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
}


class Trainer(RayActor):
    """The methods that slime calls on a trainer."""

    train_parallel_config = {
        "dp_size": 1,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }

    def __init__(self, world_size: int, rank: int, master_addr: Any, master_port: Any) -> None:
        self.master_addr = self.master_port = None
        self.version = 0

    def init(self, args: argparse.Namespace, role: str, **_: Any) -> int:
        """Load the checkpoint; returns the number of the first rollout."""
        from transformers import AutoModelForCausalLM

        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=torch.float32)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        return 0

    def set_rollout_manager(self, manager: Any) -> None:
        ray.get(manager.set_train_parallel_config.remote(self.train_parallel_config))

    def train(self, rollout_id: int, refs: list[Any], external_data: Any = None) -> None:
        batch = process_rollout_data(self.args, refs, dp_rank=0, dp_size=1)
        if self.args.save_debug_train_data:
            path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(batch, path)
        difference, tokens = 0.0, sum(int(mask.sum()) for mask in batch["loss_masks"])
        names = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs")
        for ids, length, advantage, mask, recorded in zip(*map(batch.get, names), strict=True):
            log_probs = self.log_probs(ids.to(self.device), length)
            gap = log_probs.detach() - recorded.to(self.device)
            weights = gap.exp().clamp(max=self.args.tis_clip) * mask.to(self.device)
            (-advantage * (weights * log_probs).sum() / tokens).backward()
            difference += float((gap.abs() * mask.to(self.device)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        line = {
            "rollout": rollout_id,
            "samples": len(batch["tokens"]),
            "tokens": tokens,
            "reward": sum(batch["raw_reward"]) / len(batch["raw_reward"]),
            "logprob_abs_diff": difference / tokens,
        }
        print(json.dumps(line), flush=True)

    def log_probs(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """Log-probs of the last `length` of `ids`, at the temperature of rollouts."""
        # Servers round weights to bf16, which changes them by more than a step of the optimizer.
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(ids[None], logits_to_keep=length + 1).logits[0, :-1]
        rows = (logits.float() / self.args.rollout_temperature).log_softmax(-1)
        return rows.gather(1, ids[-length:, None])[:, 0]

    def update_weights(self) -> None:
        """Write a checkpoint where slime has its servers load it from."""
        self.version += 1
        folder = Path(self.args.update_weight_disk_dir, f"weight_v{self.version:06d}")
        shutil.rmtree(folder, ignore_errors=True)
        self.model.save_pretrained(folder)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self.model.save_pretrained(Path(self.args.save, f"rollout_{rollout_id}"))

    def clear_memory(self) -> None:
        pass


def stand_in_for_megatron() -> None:
    """Make the two modules importable that slime takes its parser from, if Megatron is not here."""
    if find_spec("megatron"):
        return

    def parse_args(extra_args_provider: Any, ignore_unknown_args: bool) -> argparse.Namespace:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        # slime compares this value with the checkpoint's.
        parser.add_argument("--rotary-base", type=float, default=10000)
        extra_args_provider(parser)
        parser.set_defaults(**OF_MEGATRON)
        return parser.parse_known_args()[0]

    def nothing(*_: Any) -> None:
        pass

    arguments: Any = ModuleType("megatron.training.arguments")
    arguments.parse_args, arguments.validate_args = parse_args, nothing
    tokenizer: Any = ModuleType("megatron.training.tokenizer.tokenizer")
    tokenizer._vocab_size_with_padding = nothing
    for package in ("megatron", "megatron.training", "megatron.training.tokenizer"):
        sys.modules[package] = ModuleType(package)
    for module in (arguments, tokenizer):
        sys.modules[module.__name__] = module


def accept_no_gpu() -> None:
    """Register with slime, in each process of Ray, an accelerator that only numbers devices."""
    from slime.utils import accelerator
    from slime.utils.accelerator.cuda import CUDAAccelerator

    class NoGpu(CUDAAccelerator):
        name = "none"

        def is_available(self) -> bool:
            return True

    accelerator.register_accelerator("no_gpu", NoGpu, lambda: True)


def main() -> None:
    stand_in_for_megatron()
    import train  # of slime, beside the package
    from slime.utils.arguments import parse_args

    args = parse_args()
    gpu = torch.cuda.is_available()
    ray.init(
        # A cluster of its own, also where another runs on this machine.
        "local",
        num_cpus=None if gpu else 8,
        num_gpus=None if gpu else 2,
        include_dashboard=False,
        runtime_env=None if gpu else {"worker_process_setup_hook": accept_no_gpu},
    )
    train.create_training_models = functools.partial(
        train.create_training_models, actor_cls=Trainer
    )
    try:
        train.train(args)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
