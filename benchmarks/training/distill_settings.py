"""Comparison of DistillSparse settings.

`python -m sparrow_sglang.benchmarks.training.distill_settings` runs it.

Adapters are trained on the same recorded responses, in the same order, each under another setting.
Divergence from the dense distribution and tails of the acceptance rate are measured along held-out
responses before, during and after training. No engine is needed.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError
from transformers import AutoConfig

from sparrow_sglang.benchmarks.options import benchmark_parser, settings
from sparrow_sglang.benchmarks.training.adapter_steps import (
    acting_on,
    add_gradients,
    trained_factors,
)
from sparrow_sglang.benchmarks.training.heldout import (
    add_options,
    dense_targets,
    fidelity,
    resumed,
    run,
    seconds,
)
from sparrow_sglang.benchmarks.training.recorded_responses import prompts_for
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.command_line import OneLineParser, count
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.policy.packing import Packed
from sparrow_sglang.rl.policy.sparse_policy import SparseRule
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.schedule_names import load_schedule
from sparrow_sglang.validation import first_problem

DESCRIPTION = """\
Train rollout adapters on the same responses under several settings, the model frozen, and measure
each on held-out responses: divergence from the dense distribution after steps, tails of the
acceptance rate before and after, of the average of the later steps' weights, and under dense
decode, where they should be 1. Responses are read from a file, or sampled from the model. A run
that was killed goes on if it is started again.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.distill_settings
  python -m sparrow_sglang.benchmarks.training.distill_settings --settings lr=1e-4 lr=3e-4,loss=band
  python -m sparrow_sglang.benchmarks.training.distill_settings --prompts P.jsonl --heldout 8
"""
DEFAULTS = [
    "lr=1e-3",
    "lr=1e-3,decay=true",
    "lr=3e-4",
    "lr=1e-4",
    "lr=5e-5",
    "lr=1e-3,decay=true,loss=total_variation",
    "lr=1e-3,decay=true,loss=forward_kl",
    "lr=1e-3,decay=true,loss=band",
    "lr=1e-3,decay=true,loss=clamped",
    "lr=1e-3,decay=true,modules=vo",
    "lr=1e-3,decay=true,positions=sparse",
]


class Setting(BaseModel):
    """How an adapter is trained; the defaults are those of `[distill]`.

    With `decay` the learning rate rises over the first twentieth of the steps, then falls to 0,
    both linearly. `modules` are the projections by their first letters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: PositiveFloat = DistillConfig().lr
    decay: bool = False
    loss: Literal["top_k", "forward_kl", "total_variation", "clamped", "band"] = "top_k"
    modules: Literal["qkvo", "vo"] = "qkvo"
    positions: Literal["all", "sparse"] = "all"

    @classmethod
    def parse(cls, spec: str) -> "Setting":
        """Parse comma-separated `name=value` pairs."""
        try:
            return cls.model_validate(dict(pair.partition("=")[::2] for pair in spec.split(",")))
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{spec}: {first_problem(error, cls)}") from None


class Bench:
    """Responses to train on and to measure on, and their dense hidden states.

    Each adapter gets its own copy of the model, loaded from the checkpoint in `folder`.
    """

    def __init__(self, options: argparse.Namespace, folder: str, prompts: list[Prompt]) -> None:
        self._options = options
        self._folder = folder
        self._schedule = load_schedule(options.schedule, PAGE_SIZE)
        policy = self.new_policy()
        self._heldout = prompts[: options.heldout]
        self._targets = dense_targets(policy, self._heldout)
        rest, size = prompts[options.heldout :], options.responses
        parts = [rest[i : i + size] for i in range(0, options.steps * size, size)]
        start = seconds()
        self._batches = [dense_targets(policy, part) for part in parts]
        self._dense_s = (seconds() - start) / len(parts)
        sequences = [(prompt.input_ids, prompt.response_ids) for prompt in parts[0]]
        start = seconds()
        policy.loss_step(sequences, lambda logprobs, _: -logprobs.mean())
        self.dense_update_s = seconds() - start

    def new_policy(self) -> DensePolicy:
        on_gpu = torch.cuda.is_available()
        # On a CPU sequences are short, so their activations fit without checkpointing.
        config = ModelConfig(path=self._folder, gradient_checkpointing=on_gpu)
        return DensePolicy.load(config, OptimizerConfig(), "cuda" if on_gpu else "cpu")

    def without_adapter(self) -> dict[str, Any]:
        policy = self.new_policy()
        return self._measure(policy, SparseAdapter(policy, DistillConfig(enabled=True)), Setting())

    def train(self, setting: Setting) -> dict[str, Any]:
        """Train an adapter; return its fidelity on the held-out responses and seconds per step."""
        torch.manual_seed(0)
        policy, steps = self.new_policy(), len(self._batches)
        modules = tuple(f"{letter}_proj" for letter in setting.modules)
        adapter = SparseAdapter(policy, DistillConfig(enabled=True, target_modules=modules))
        factors, optimizer = trained_factors(policy, adapter, setting.lr)
        decay: Literal["linear", "constant"] = "linear" if setting.decay else "constant"
        pace = OptimizerConfig(lr=setting.lr, warmup_steps=steps // 20 * setting.decay, decay=decay)
        average = [torch.zeros_like(factor) for factor in factors]
        averaged = steps - steps // 2
        during, spent = [], 0.0
        for step, batch in enumerate(self._batches, 1):
            start = seconds()
            optimizer.set_learning_rate(learning_rate(pace, step - 1, steps))
            sparse_only = setting.positions == "sparse"
            add_gradients(setting.loss, policy, adapter, batch, self._schedule, sparse_only)
            optimizer.step()
            spent += seconds() - start
            if step > steps - averaged:
                for total, factor in zip(average, factors, strict=True):
                    total += factor.detach() / averaged
            if step % self._options.measure_every == 0 or step == steps:
                during.append({"step": step} | self._measure(policy, adapter, setting))
        row = {"after": during[-1], "dense": self._measure(policy, adapter, setting, dense=True)}
        for total, factor in zip(average, factors, strict=True):
            factor.data = total
        return row | {
            "averaged": self._measure(policy, adapter, setting),
            "during": during,
            "step_s": spent / steps + self._dense_s,
        }

    def _measure(
        self, policy: DensePolicy, adapter: SparseAdapter, setting: Setting, dense: bool = False
    ) -> dict[str, Any]:
        """The adapter's `fidelity` on the held-out responses.

        It is measured under sparse decode, or with `dense` under dense decode; either is compared
        with dense decode without the adapter.
        """
        sparse_only = setting.positions == "sparse"

        def hidden(packed: Packed) -> torch.Tensor:
            rule = None if dense else SparseRule(self._schedule, packed.prompt_lengths)
            with acting_on(policy, packed, self._schedule, sparse_only), adapter.enabled():
                return policy.hidden(packed, rule)

        return fidelity(policy, self._heldout, self._targets, hidden, self._options.bin_tokens)


def _parser() -> OneLineParser:
    parser = benchmark_parser(
        "training.distill_settings", DESCRIPTION, EXAMPLES, "distill_settings.json"
    )
    add = parser.add_argument
    add_options(parser, context=384)
    add("--schedule", default="fixed-96", help="name, .json file or fixed-<tokens> (fixed-96)")
    add(
        "--settings",
        nargs="+",
        type=Setting.parse,
        default=[Setting.parse(spec) for spec in DEFAULTS],
        metavar="NAME=VALUE,...",
        help=f"of {', '.join(Setting.model_fields)} (default: {' '.join(DEFAULTS)})",
    )
    add("--steps", type=count, default=10, help="of each adapter")
    add("--responses", type=count, default=2, help="that a step learns from")
    add("--measure-every", type=count, default=5, help="steps between measurements")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print and write; the exit code is 2 without usable options."""
    return run(_parser(), argv, check, compare)


def check(options: argparse.Namespace, folder: str) -> None:
    """Raise `ScheduleError` on a bad schedule, `ValueError` or `OSError` on a bad model folder."""
    load_schedule(options.schedule, PAGE_SIZE)
    AutoConfig.from_pretrained(folder)


def compare(options: argparse.Namespace, folder: str) -> None:
    """Add a row for each setting that `options.out` does not have yet.

    Raises `CalibrationError` on unusable prompts, and `InputError` on results of another run.
    """
    wanted = f"--steps {options.steps} of --responses {options.responses}"
    prompts = prompts_for(options, folder, options.steps * options.responses, wanted)
    given = settings(options)
    del given["settings"]
    results = resumed(options.out, given, prompts, ("before", "dense_update_s"))
    bench = Bench(options, folder, prompts)
    if "before" not in results.fields:
        results.save(before=bench.without_adapter(), dense_update_s=bench.dense_update_s)
    finished = [row["setting"] for row in results.rows]
    for setting in options.settings:
        fields = setting.model_dump()
        if fields not in finished:
            results.add({"setting": fields} | bench.train(setting))


if __name__ == "__main__":
    raise SystemExit(main())
