"""`sparrow bench train`: memory and time of one training step on long sequences.

Forward, backward and optimizer step of the dense policy, its scoring, and a step of a DistillSparse
adapter, in the shape of a real model with random weights, on one GPU.
"""

import argparse
import gc
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

from sparrow_sglang.benchmarks.common import (
    MODELS,
    add_row,
    begin,
    bench_parser,
    known_models,
    require_cuda,
)
from sparrow_sglang.benchmarks.step import model_shape
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.planning.cost_model import GPUS
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

PROMPT_TOKENS = 64
GIB = 2**30
DEVICE = "cuda"
DTYPES = ("float32", "bfloat16")

DESCRIPTION = """\
Peak memory and time of one training step of the dense policy on long sequences, and of a step of a
DistillSparse adapter on them, with random weights in the shape of a real model (nothing is
downloaded), on one GPU. On several, `sparrow train` writes the times of its steps as timing_s/*.
"""
EXAMPLES = """\
  sparrow bench train
  sparrow bench train --tokens 8192 --dtypes bfloat16
  sparrow bench train --model qwen3-4b --tokens 32768 --offload --without-adapter
"""


def step_flops(shape: ModelShape, tokens: int) -> float:
    """FLOPs of a training step on a sequence, without recomputation by gradient checkpointing.

    A token takes six FLOPs for each weight, and a layer 6 H_q D T^2 for causal attention, half of
    what all pairs would take (PaLM, arXiv:2204.02311, appendix B).
    """
    attention = 6 * shape.num_q_heads * shape.head_dim * tokens**2
    return 6.0 * shape.parameters * tokens + shape.num_layers * attention


def measure(
    options: argparse.Namespace,
    dtype: Literal["float32", "bfloat16"],
    tokens: int,
    schedule: BudgetSchedule,
) -> dict[str, Any]:
    """Seconds and peak GiB of training steps, of scoring, and of as many adapter steps.

    A first training step and a first adapter step warm up. The first training step allocates the
    optimizer's state; `step_peak_gib` includes it. Tokens per second are those of the fastest step.
    """
    # Imported here because wrong options are to be answered at once.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sparrow_sglang.benchmarks.gpu_times import seconds_of
    from sparrow_sglang.rl.distill import SparseAdapter
    from sparrow_sglang.rl.policy.dense_policy import DensePolicy

    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(MODELS / options.model), dtype=getattr(torch, dtype)
        )
    policy = DensePolicy(
        model,
        ModelConfig(dtype=dtype),
        OptimizerConfig(offload=options.offload),
        DEVICE,
    )
    sequences = []
    for index in range(options.sequences):
        generator = torch.Generator().manual_seed(tokens + index)
        ids = torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist()
        sequences.append((ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]))
    weights = torch.cuda.memory_allocated()

    def update() -> object:
        return policy.loss_step(sequences, lambda logprobs, _: -logprobs.mean())

    def measured(work: Callable[[], object], repeats: int) -> tuple[list[float], float]:
        torch.cuda.reset_peak_memory_stats()
        times = [seconds_of(work) for _ in range(repeats)]
        return times, torch.cuda.max_memory_allocated() / GIB

    (warm_up, *times), step_peak = measured(update, options.steps + 1)
    reserved, idle = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    (score,), score_peak = measured(lambda: policy.score(sequences), 1)
    flops = len(sequences) * step_flops(model_shape(options.model), tokens)
    name = torch.cuda.get_device_name().lower()
    peak_flops = next((gpu.flops_per_s for key, gpu in GPUS.items() if key in name), None)
    row = {
        "dtype": dtype,
        "tokens": tokens,
        "sequences": len(sequences),
        "offload": options.offload,
        "weights_gib": weights / GIB,
        "idle_gib": idle / GIB,
        "step_peak_gib": step_peak,
        "reserved_gib": reserved / GIB,
        "score_peak_gib": score_peak,
        "score_s": score,
        "step_s": times,
        "warm_up_s": warm_up,
        "tokens_per_s": len(sequences) * tokens / min(times),
        "peak_share": flops / min(times) / peak_flops if peak_flops else None,
    }
    if options.without_adapter:
        return row
    adapter = SparseAdapter(policy, DistillConfig(enabled=True))
    adapter.step(sequences, schedule)
    adapted, adapter_peak = measured(lambda: adapter.step(sequences, schedule), options.steps)
    return row | {
        "schedule": schedule.name,
        "adapter_peak_gib": adapter_peak,
        "adapter_step_s": adapted,
    }


def summary(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    text = (
        f"{row['dtype']} {row['sequences']} x {row['tokens']}: step {min(row['step_s']):.2f} s,"
        f" peak {row['step_peak_gib']:.1f} GiB; score {row['score_s']:.2f} s;"
        f" {row['tokens_per_s']:,.0f} tokens/s"
    )
    if "adapter_step_s" in row:
        text += f"; adapter step {min(row['adapter_step_s']):.2f} s"
        text += f", peak {row['adapter_peak_gib']:.1f} GiB"
    return text


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("train", DESCRIPTION, EXAMPLES, "train_step.json")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-1.7b",
        choices=known_models(),
        help="shapes (default: %(default)s)",
    )
    add(
        "--tokens",
        nargs="+",
        type=at_least(PROMPT_TOKENS + 1),
        default=[8192, 32768],
        help="lengths of the sequences (default: 8192 32768)",
    )
    add("--sequences", type=count, default=1, help="per step (default: %(default)s)")
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of the weights (default: all)")
    add("--offload", action="store_true", help="keep the optimizer's state in the CPU's memory")
    add("--without-adapter", action="store_true", help="leave out the adapter's steps")
    add(
        "--schedule", default="qwen3-1.7b-0.86", help="of the adapter's step (default: %(default)s)"
    )
    add("--steps", type=count, default=2, help="timed steps, after one to warm up")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options or a GPU."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        schedule = load_schedule(options.schedule, PAGE_SIZE)
    except ValueError as error:
        parser.error(str(error))
    require_cuda(parser, 80, "one training step")
    begin(parser, options)
    for dtype, tokens in product(options.dtypes, options.tokens):
        row = {"model": options.model} | measure(options, dtype, tokens, schedule)
        add_row(options.out, row)
        print(summary(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
