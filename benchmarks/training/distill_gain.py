"""Gains and costs of a rollout adapter.

`python -m sparrow_sglang.benchmarks.training.distill_gain` runs it.

There is an arm for each learning rate and schedule to train under; each is measured on held-out
prompts before and after, under both schedules. Decode speed of both deliveries, the acceptance rate
between them and the seconds of a step are measured with the adapter that has the best worst tail
under the more aggressive schedule.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from sparrow_sglang.benchmarks.options import (
    add_engine_arguments,
    benchmark_parser,
    prepare_out,
    settings,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.training.adapter_delivery import (
    Learner,
    adapter_cost,
    agreement,
    decode_speed,
)
from sparrow_sglang.benchmarks.training.distill_arms import Rig, run_arm
from sparrow_sglang.benchmarks.training.distill_result import AGGRESSIVE, GIVEN, PAIRS, Tails, gains
from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.prompts import (
    NEEDED_ROOM,
    Tokenize,
    builtin_prompts,
    read_prompts,
    tokenizer_of,
)
from sparrow_sglang.calibration.prompts import Prompt as CalibrationPrompt
from sparrow_sglang.command_line import OneLineParser, count
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, model_folder
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.rl.config import DistillConfig
from sparrow_sglang.rl.distill import ADAPTER, lora_arguments
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

DESCRIPTION = """\
Train the rollout adapter on the sparse actor's own responses to built-in or given prompts, the
model itself frozen, and measure the exact tail of the acceptance rate on held-out prompts under a
given schedule and a more aggressive one, before and after; then the speed of both deliveries, and
the cost of a step. Runs on a GPU, or with small numbers on a CPU.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.distill_gain
  python -m sparrow_sglang.benchmarks.training.distill_gain --schedules a.json b.json --lr 1e-4 3e-4
  python -m sparrow_sglang.benchmarks.training.distill_gain --model M --prompts P.jsonl --heldout 64
"""


def measure(options: argparse.Namespace, model_path: str) -> None:
    """Measure all arms, then deliveries and cost; write `options.out` after each arm and at last.

    Raises `CalibrationError` if `--context` is too short for a prompt, or prompts are missing.
    """
    start = time.perf_counter()
    schedules = dict(zip((GIVEN, AGGRESSIVE), loaded(options.schedules), strict=True))
    results = Results(
        options.out,
        settings=settings(options),
        schedules={name: each.model_dump(mode="json") for name, each in schedules.items()},
    )
    training, heldout = prompts_for(options, model_path)
    arguments = serving_arguments(options)
    with closing(LocalEngine(model_path, options.schedules[0], **arguments)) as engine:
        rig = Rig(
            engine, model_path, schedules, training, heldout, options.new_tokens, options.bin_tokens
        )
        before = results.fields["before"] = rig.tails(rig.new_learner(options.lr[0]))
        print(f"before, after {time.perf_counter() - start:.0f} s", flush=True)
        best: tuple[float, Learner] | None = None
        for lr, under in itertools.product(options.lr, options.train_under):
            learner = rig.new_learner(lr)
            arm = run_arm(rig, learner, under, options.steps, options.steps_per_rollout)
            results.add({"lr": lr} | arm)
            after: Tails = arm["tails"][-1]
            show_gains(before, after, schedules)
            worst = min((row["tail"] for row in after[AGGRESSIVE]), default=0.0)
            if best is None or worst > best[0]:
                best = worst, learner
        assert best is not None, "the parser wants a learning rate and a schedule"
        learner = best[1]
        rig.deliver(learner)
        sequences = rig.roll_out(training[: options.responses], GIVEN)
        speed = {"merged": decode_speed(engine, heldout, options.new_tokens)}
    lora = lora_arguments(DistillConfig(enabled=True, delivery="lora"))
    with closing(LocalEngine(model_path, options.schedules[0], **arguments | lora)) as engine:
        engine.set_adapter(ADAPTER, learner.adapter.tensors(), learner.adapter.lora_config())
        speed["lora"] = decode_speed(engine, heldout, options.new_tokens, ADAPTER)
    measured = {
        "decode": speed,
        "agreement": agreement(learner, model_path, sequences, schedules[GIVEN]),
        "cost": adapter_cost(learner, sequences, schedules[GIVEN]),
        "seconds": time.perf_counter() - start,
    }
    results.save(**measured)
    print(json.dumps(measured, indent=1))


def loaded(names: Sequence[str]) -> tuple[BudgetSchedule, ...]:
    """Schedules by name or path; raises `ScheduleError` unless one engine can serve them all."""
    return LoadedSchedules.of([load_schedule(name, PAGE_SIZE) for name in names]).named


def prompts_for(options: argparse.Namespace, model_path: str) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, one for each response, and held-out ones."""
    tokenize = tokenizer_of(model_path)
    if options.prompts:
        return given_prompts(options, tokenize)
    context = options.context - NEEDED_ROOM

    def draw(part: Literal["calibration", "check"], wanted: int) -> list[Prompt]:
        bins = max(1, math.ceil((context - options.new_tokens) / options.bin_tokens))
        per_bin = math.ceil(wanted / bins)
        found: list[CalibrationPrompt] = []
        # Bins too short for a question give fewer prompts than `per_bin`.
        while len(found) < wanted:
            found = builtin_prompts(
                tokenize, context, options.bin_tokens, options.new_tokens, per_bin, part
            )
            per_bin = max(per_bin + 1, math.ceil(per_bin * wanted / len(found)))
        # Shuffled, so that each step learns from all lengths.
        random.Random(0).shuffle(found)
        return [Prompt(each.name, "builtin", each.input_ids) for each in found[:wanted]]

    return draw("calibration", max(options.steps) * options.responses), draw(
        "check", options.heldout
    )


def given_prompts(
    options: argparse.Namespace, tokenize: Tokenize
) -> tuple[list[Prompt], list[Prompt]]:
    """As `prompts_for`, from a file: the first prompts are held out, the others are trained on.

    Training prompts are repeated until there are enough. Lines that repeat a prompt are left out.
    """
    given = read_prompts(options.prompts, tokenize, options.context)
    ids = {each.name: each.input_ids for each in given}
    found = [Prompt(name, "given", input_ids) for name, input_ids in ids.items()]
    longest = max(len(prompt.input_ids) for prompt in found)
    if longest + options.new_tokens + NEEDED_ROOM > options.context:
        raise CalibrationError(
            f"--prompts {options.prompts}: a prompt has {longest} tokens; with --new-tokens"
            f" {options.new_tokens} and --context {options.context} expected at most"
            f" {options.context - options.new_tokens - NEEDED_ROOM}"
        )
    heldout, training = found[: options.heldout], found[options.heldout :]
    if not training:
        raise CalibrationError(
            f"--prompts {options.prompts}: has {len(found)} prompts; expected more than --heldout"
            f" {options.heldout}, as the others are trained on"
        )
    wanted = max(options.steps) * options.responses
    return [training[i % len(training)] for i in range(wanted)], heldout


def serving_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """SGLang's arguments: defaults that leave room for the trainer, overridden by the user's."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "page_size": PAGE_SIZE,
        "context_length": options.context,
        # The engine releases no memory while the trainer works between rollouts.
        "enable_memory_saver": False,
        # Capturing prefill takes minutes.
        "disable_prefill_cuda_graph": True,
    }
    if torch.cuda.is_available():
        defaults["mem_fraction_static"] = 0.4
    else:
        defaults["max_total_tokens"] = 4 * options.context
    return defaults | engine_arguments(options.engine_args)


def show_gains(before: Tails, after: Tails, schedules: dict[str, BudgetSchedule]) -> None:
    """Print the gains per bin under each schedule, and from given before to aggressive after."""
    for old, new in PAIRS:
        for row in gains(before[old], after[new]):
            print(f"    {schedules[old].name} -> {schedules[new].name}: {row}", flush=True)


def _parser() -> OneLineParser:
    parser = benchmark_parser("training.distill_gain", DESCRIPTION, EXAMPLES, "distill_gain.json")
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL_NAME, help="folder or hub name (default: %(default)s)")
    add(
        "--schedules",
        nargs=2,
        default=["fixed-512", "fixed-256"],
        metavar=("GIVEN", "AGGRESSIVE"),
        help="shipped names, .json files or fixed-<tokens> (default: fixed-512 fixed-256)",
    )
    add("--prompts", type=Path, help="JSONL file, as of sparrow calibrate (default: built-in ones)")
    add("--train-under", nargs="+", choices=[GIVEN, AGGRESSIVE], default=[AGGRESSIVE])
    add("--lr", nargs="+", type=float, default=[DistillConfig().lr], help="learning rates to try")
    add("--context", type=count, default=4096, help="longest sequence, response included")
    add("--new-tokens", type=count, default=512, help="longest response")
    add("--steps", nargs="+", type=count, default=[8, 32], help="adapter steps to measure after")
    add("--responses", type=count, default=32, help="that a step learns from")
    add("--steps-per-rollout", type=count, default=4, help="steps on responses of the same adapter")
    add("--heldout", type=count, default=144, help="prompts that are measured on")
    add("--bin-tokens", type=count, default=1024, help="positions per bin of the tails")
    add_engine_arguments(parser)
    return parser


def _checked(parser: OneLineParser, options: argparse.Namespace) -> str:
    """The model's folder; ends with exit code 2 on an option that cannot work."""
    for lr in options.lr:
        if not 0 < lr < math.inf:
            parser.error(f"--lr {lr}: expected a number above 0")
    try:
        engine_arguments(options.engine_args)
        loaded(options.schedules)
        folder = model_folder(options.model)
        config = AutoConfig.from_pretrained(folder)
    except (ModelError, ValueError, OSError) as error:
        parser.error(str(error).splitlines()[0])
    if not options.new_tokens < options.context <= config.max_position_embeddings:
        parser.error(
            f"--context {options.context}: expected more than --new-tokens {options.new_tokens} and"
            f" at most the model's {config.max_position_embeddings}"
        )
    prepare_out(parser, options.out)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options."""
    parser = _parser()
    options = parser.parse_args(argv)
    model_path = _checked(parser, options)
    try:
        measure(options, model_path)
    except CalibrationError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
