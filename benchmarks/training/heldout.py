"""Teacher-forced evaluation of a sparse policy on held-out responses, without an engine.

In: recorded responses with their dense hidden states, hidden states of a sparse actor for each
micro-batch. Out: divergence from the dense distribution, tails of the acceptance rate. The module
also holds the command line that such benchmarks share; they go on where they were killed.
"""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow_sglang.benchmarks import result_files
from sparrow_sglang.benchmarks.options import prepare_out
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.training.adapter_steps import Targets
from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.prompts import Prompt, prompts_digest
from sparrow_sglang.command_line import OneLineParser, count
from sparrow_sglang.errors import InputError
from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, model_folder
from sparrow_sglang.rl.adapter_gate import MIN_TOKENS
from sparrow_sglang.rl.distill import exact_kl
from sparrow_sglang.rl.policy.chunked_logprobs import logits_of
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.packing import Packed
from sparrow_sglang.schedule import ScheduleError

ROWS = 1024
"""Tokens whose logits are compared in one go."""


def seconds() -> float:
    """A clock: wall time on a GPU, else CPU time of this process, which other processes do not
    slow down."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@torch.no_grad()
def dense_targets(policy: DensePolicy, prompts: Sequence[Prompt]) -> Targets:
    """Micro-batches of recorded responses with their dense hidden states."""
    policy.model.eval()
    packs = policy.micro_batches([(each.input_ids, each.response_ids) for each in prompts])
    return [(packed, policy.hidden(packed).cpu()) for packed in packs]


@torch.no_grad()
def fidelity(
    policy: DensePolicy,
    prompts: Sequence[Prompt],
    targets: Targets,
    hidden: Callable[[Packed], torch.Tensor],
    bin_tokens: int,
) -> dict[str, Any]:
    """Mean KL and acceptance rate of all response tokens, tails by position, and the lowest tail.

    `targets` belong to `prompts`. `hidden` returns the sparse actor's last hidden states of a
    micro-batch, [n, H], from which the policy's head computes its logits.
    """
    policy.model.eval()
    counts = [len(prompt.response_ids) for prompt in prompts]
    kl, rates = torch.empty(sum(counts)), torch.empty(sum(counts))
    for packed, target in targets:
        sparse = hidden(packed)
        target = target.to(sparse.device)
        for rows in torch.arange(len(target)).split(ROWS):
            ours, theirs = (logits_of(side[rows], policy.head) for side in (sparse, target))
            where = packed.where.cpu()[rows]
            kl[where] = exact_kl(ours, theirs).cpu()
            rates[where] = acceptance_rate(ours, theirs).cpu()
    found = TailStatistics(bin_tokens)
    for prompt, alpha in zip(prompts, rates.split(counts), strict=True):
        positions = len(prompt.input_ids) + np.arange(len(alpha))
        found.add(prompt.name, positions // bin_tokens, alpha.numpy())
    tails = [asdict(row) for row in found.bins()]
    filled = [row["tail"] for row in tails if row["tokens"] >= MIN_TOKENS]
    return {
        "kl": float(kl.mean()),
        "mean": float(rates.mean()),
        "lowest_tail": min(filled) if filled else None,
        "tails": tails,
    }


def add_options(parser: OneLineParser, context: int) -> None:
    """Add the options that these benchmarks share; `context` is the default of --context."""
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL_NAME, help="folder or hub name (default: %(default)s)")
    add("--prompts", type=Path, help="JSONL file, as of sparrow calibrate, best with responses")
    add("--context", type=count, default=context, help="longest sequence, response included")
    add("--new-tokens", type=count, default=256, help="of a response that is sampled")
    add("--heldout", type=count, default=5, help="responses that are measured on")
    add("--bin-tokens", type=count, default=128, help="positions per bin of the tails")


def run(
    parser: OneLineParser,
    argv: Sequence[str] | None,
    check: Callable[[argparse.Namespace, str], None],
    compare: Callable[[argparse.Namespace, str], None],
) -> int:
    """Parse `argv`, `check` the options with the model's folder, then `compare` with it.

    Ends the process with status 2 and one line if `check` raises `ScheduleError`, `ValueError` or
    `OSError`, or `compare` a `CalibrationError` or an `InputError`.
    """
    options = parser.parse_args(argv)
    try:
        folder = model_folder(options.model)
        check(options, folder)
    except (ModelError, ScheduleError, ValueError, OSError) as error:
        parser.error(str(error).splitlines()[0])
    if options.new_tokens >= options.context:
        parser.error(f"--new-tokens {options.new_tokens}: expected less than --context")
    prepare_out(parser, options.out)
    try:
        compare(options, folder)
    except (CalibrationError, InputError) as error:
        parser.error(str(error))
    return 0


def resumed(
    out: Path, settings: dict[str, Any], prompts: list[Prompt], measured: Sequence[str]
) -> Results:
    """As `result_files.resumed`, for a run that starts from `settings` and `prompts`."""
    device = {} if torch.cuda.is_available() else {"device": _cpu_name()}
    fields = {"settings": settings, "responses": prompts_digest(prompts)} | device
    return result_files.resumed(out, fields, measured)


def _cpu_name() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
