"""Memory and time of a long training step.

`python -m sparrow_sglang.benchmarks.training.train_memory` runs it.

One sequence through forward, backward and optimizer step of the dense policy, and through a step of
a rollout adapter, in the shape of a real model with random weights.
"""

import gc
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
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
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule, ScheduleError
from sparrow_sglang.schedule_names import load_schedule

PROMPT_TOKENS = 64
GIB = 2**30

DESCRIPTION = """\
Peak memory and time of one training step of the dense policy on one long sequence, and of a step of
a DistillSparse adapter on it, with random weights in the shape of a real model (nothing is
downloaded).
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.train_memory --out train-memory.json
  python -m sparrow_sglang.benchmarks.training.train_memory --tokens 8192 --dtypes bfloat16
"""


def new_model(config: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model of a Hugging Face config with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=getattr(torch, dtype)
        )
    return model


def random_sequence(vocab_size: int, tokens: int) -> TokenSequence:
    ids = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return ids[:PROMPT_TOKENS].tolist(), ids[PROMPT_TOKENS:].tolist()


def measure(
    config: Path, dtype: str, tokens: int, steps: int, schedule: BudgetSchedule, device: str
) -> dict[str, Any]:
    """Seconds and peak bytes of `steps` training steps, of scoring, and of as many adapter steps.

    All come after one to warm up. It makes the optimizer's state, so its peak is the one of the
    first step.
    """
    policy = DensePolicy(
        new_model(config, dtype, device), ModelConfig(dtype=dtype), OptimizerConfig(), device
    )
    sequence = random_sequence(policy.model.config.vocab_size, tokens)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def update() -> object:
        return policy.loss_step([sequence], lambda logprobs, _: -logprobs.mean())

    warm_up = seconds_of(update)
    times = [seconds_of(update) for _ in range(steps)]
    step_peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    idle = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    score = seconds_of(lambda: policy.score([sequence]))
    score_peak = torch.cuda.max_memory_allocated()
    adapter = SparseAdapter(policy, DistillConfig(enabled=True))
    seconds_of(lambda: adapter.step([sequence], schedule))
    torch.cuda.reset_peak_memory_stats()
    adapted = [seconds_of(lambda: adapter.step([sequence], schedule)) for _ in range(steps)]
    return {
        "dtype": dtype,
        "tokens": tokens,
        "weights_gib": weights / GIB,
        "idle_gib": idle / GIB,
        "step_peak_gib": step_peak / GIB,
        "reserved_gib": reserved / GIB,
        "score_peak_gib": score_peak / GIB,
        "score_s": score,
        "step_s": times,
        "warm_up_s": warm_up,
        "schedule": schedule.name,
        "adapter_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "adapter_step_s": adapted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options or a GPU."""
    parser = benchmark_parser("training.train_memory", DESCRIPTION, EXAMPLES, "train-memory.json")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-1.7b",
        choices=known_models(),
        help="shapes (default: %(default)s)",
    )
    add("--tokens", nargs="+", type=at_least(PROMPT_TOKENS + 1), default=[8192, 32768],
        help="lengths of the sequence")  # fmt: skip
    add(
        "--schedule", default="qwen3-1.7b-0.86", help="of the adapter's step (default: %(default)s)"
    )
    dtypes = ["float32", "bfloat16"]
    add("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    add("--steps", type=count, default=2, help="timed steps, after one to warm up")
    args = parser.parse_args(argv)
    try:
        schedule = load_schedule(args.schedule, PAGE_SIZE)
    except ScheduleError as error:
        parser.error(str(error))
    prepare_out(parser, args.out)
    require_cuda(parser, 80, "one training step")
    shapes = MODELS / args.model
    results = Results(args.out, model=args.model)
    for dtype, tokens in product(args.dtypes, args.tokens):
        gc.collect()
        torch.cuda.empty_cache()
        results.add(measure(shapes, dtype, tokens, args.steps, schedule, "cuda"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
