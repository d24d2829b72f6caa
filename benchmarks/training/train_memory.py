"""Memory and time of a long training step, on one GPU or sharded over several.

`python -m sparrow_sglang.benchmarks.training.train_memory` runs it.

Long sequences run through forward, backward and optimizer step of the dense policy, and through a
step of a rollout adapter, in the shape of a real model with random weights. One layer's attention
over packed shorter sequences is timed, too.
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparrow_sglang.benchmarks.gpu_times import seconds_of
from sparrow_sglang.benchmarks.options import (
    MODELS,
    benchmark_parser,
    known_models,
    prepare_out,
    require_cuda,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.steps.decode_step import model_shape
from sparrow_sglang.benchmarks.training.attention_times import attention_times
from sparrow_sglang.command_line import OneLineParser, at_least, count
from sparrow_sglang.planning.cost_model import GPUS, Hardware
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.ranks import ALONE, Ranks
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule, ScheduleError
from sparrow_sglang.schedule_names import load_schedule

PROMPT_TOKENS = 64
GIB = 2**30

DESCRIPTION = """\
Peak memory and time of one training step of the dense policy on long sequences, one for each GPU,
and of a step of a DistillSparse adapter on them, with random weights in the shape of a real model
(nothing is downloaded).
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.train_memory --out train-memory.json
  python -m sparrow_sglang.benchmarks.training.train_memory --tokens 8192 --dtypes bfloat16
  torchrun --nproc-per-node 2 -m sparrow_sglang.benchmarks.training.train_memory \\
      --model qwen3-8b --tokens 32768 --without-adapter
"""


def new_model(config: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model of a Hugging Face config with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=getattr(torch, dtype)
        )
    return model


def random_sequence(vocab_size: int, tokens: int, seed: int) -> TokenSequence:
    ids = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed))
    return ids[:PROMPT_TOKENS].tolist(), ids[PROMPT_TOKENS:].tolist()


def step_flops(shape: ModelShape, tokens: int) -> float:
    """FLOPs of a training step on a sequence, without recomputation by gradient checkpointing.

    A token takes six FLOPs for each weight, and a layer 6 H_q D T^2 for causal attention, half of
    what all pairs would take (PaLM, arXiv:2204.02311, appendix B).
    """
    attention = 6 * shape.num_q_heads * shape.head_dim * tokens**2
    return 6.0 * shape.parameters * tokens + shape.num_layers * attention


def measure(
    options: argparse.Namespace,
    dtype: str,
    tokens: int,
    schedule: BudgetSchedule,
    device: str,
    ranks: Ranks,
) -> dict[str, Any]:
    """Seconds and peak GiB of training steps, of scoring, and of as many adapter steps.

    A first training step and a first adapter step warm up. The first training step allocates the
    optimizer's state; `step_peak_gib` includes it. Tokens per second are those of the fastest step.
    All ranks must call this; peaks are the largest over the ranks.
    """
    policy = DensePolicy(
        new_model(MODELS / options.model, dtype, device),
        ModelConfig(dtype=dtype),
        OptimizerConfig(offload=options.offload),
        device,
        ranks,
    )
    count = options.sequences or ranks.world
    vocab_size = policy.model.config.vocab_size
    sequences = [random_sequence(vocab_size, tokens, tokens + index) for index in range(count)]
    # Each rank has drawn the whole model before it was sharded; free the rest.
    torch.cuda.empty_cache()
    weights = _most(ranks, torch.cuda.memory_allocated())

    def update() -> object:
        return policy.loss_step(sequences, lambda logprobs, _: -logprobs.mean())

    def measured(work: Callable[[], object], repeats: int) -> tuple[list[float], float]:
        torch.cuda.reset_peak_memory_stats()
        times = [seconds_of(work) for _ in range(repeats)]
        return times, _most(ranks, torch.cuda.max_memory_allocated())

    (warm_up, *times), step_peak = measured(update, options.steps + 1)
    reserved = _most(ranks, torch.cuda.max_memory_reserved())
    idle = _most(ranks, torch.cuda.memory_allocated())
    (score,), score_peak = measured(lambda: policy.score(sequences), 1)
    (gather,), _ = measured(lambda: [None for _ in policy.named_weights()], 1)
    hardware = _hardware()
    flops = count * step_flops(model_shape(options.model), tokens)
    row = {
        "dtype": dtype,
        "tokens": tokens,
        "ranks": ranks.world,
        "sequences": count,
        "offload": options.offload,
        "weights_gib": weights,
        "idle_gib": idle,
        "step_peak_gib": step_peak,
        "reserved_gib": reserved,
        "score_peak_gib": score_peak,
        "score_s": score,
        "step_s": times,
        "warm_up_s": warm_up,
        "tokens_per_s": count * tokens / min(times),
        "peak_share": flops / min(times) / ranks.world / hardware.flops_per_s if hardware else None,
        "gather_s": gather,
    }
    if options.without_adapter:
        return row
    adapter = SparseAdapter(policy, DistillConfig(enabled=True))
    seconds_of(lambda: adapter.step(sequences, schedule))
    adapted, adapter_peak = measured(lambda: adapter.step(sequences, schedule), options.steps)
    return row | {
        "schedule": schedule.name,
        "adapter_peak_gib": adapter_peak,
        "adapter_step_s": adapted,
    }


def _most(ranks: Ranks, size: int) -> float:
    return max(ranks.each(size)) / GIB


def _hardware() -> Hardware | None:
    """This GPU's data sheet values, or None if the GPU is not known."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((gpu for key, gpu in GPUS.items() if key in name), None)


def measure_all(options: argparse.Namespace, schedule: BudgetSchedule, ranks: Ranks) -> None:
    """Measure all dtypes and lengths; the first rank writes the rows."""
    results = Results(options.out, model=options.model) if ranks.rank == 0 else None
    packed: dict[int, dict[str, float | None]] = {}
    for dtype, tokens in product(options.dtypes, options.tokens):
        gc.collect()
        torch.cuda.empty_cache()
        # Attention is timed in 16 bits whatever the dtype of the weights, so once per length. It
        # comes before the steps, whose results would be lost if it failed.
        if tokens not in packed:
            packed[tokens] = attention_times(model_shape(options.model), tokens)
        row = measure(options, dtype, tokens, schedule, "cuda", ranks)
        row["packed_attention"] = packed[tokens]
        if results is not None:
            results.add(row)


def _parser() -> OneLineParser:
    parser = benchmark_parser("training.train_memory", DESCRIPTION, EXAMPLES, "train-memory.json")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-1.7b",
        choices=known_models(),
        help="shapes (default: %(default)s)",
    )
    add("--tokens", nargs="+", type=at_least(PROMPT_TOKENS + 1), default=[8192, 32768],
        help="lengths of the sequences")  # fmt: skip
    add("--sequences", type=count, help="per step (default: one for each GPU)")
    add("--offload", action="store_true", help="keep the optimizer's state in the CPU's memory")
    add("--without-adapter", action="store_true", help="leave out the adapter's steps")
    add(
        "--schedule", default="qwen3-1.7b-0.86", help="of the adapter's step (default: %(default)s)"
    )
    dtypes = ["float32", "bfloat16"]
    add("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    add("--steps", type=count, default=2, help="timed steps, after one to warm up")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options or GPUs."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = load_schedule(args.schedule, PAGE_SIZE)
    except ScheduleError as error:
        parser.error(str(error))
    prepare_out(parser, args.out)
    require_cuda(parser, 80, "one training step")
    with _joined() as ranks:
        measure_all(args, schedule, ranks)
    return 0


@contextmanager
def _joined() -> Iterator[Ranks]:
    """The processes that torchrun has started, or this process alone."""
    if "LOCAL_RANK" not in os.environ:
        yield ALONE
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
