"""Gain of page selection when a learned matrix changes the queries that score pages.

`python -m sparrow_sglang.benchmarks.training.learned_selection` runs it.

A matrix for each layer and KV head, or query head, is learned from recorded responses under dense
decode. Selection with and without it is then measured along held-out responses, under the published
rule and under int4 landmarks, at the same budgets; and also an oracle that knows the attention of
each page.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig

from sparrow_sglang.benchmarks.options import benchmark_parser, settings
from sparrow_sglang.benchmarks.training.adapter_steps import (
    Targets,
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
from sparrow_sglang.benchmarks.training.query_matrices import (
    LearningRule,
    MeasuredRule,
    QueryMatrices,
)
from sparrow_sglang.benchmarks.training.recorded_responses import prompts_for
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.calibration.rule import landmark_rule, with_weights
from sparrow_sglang.command_line import OneLineParser, count
from sparrow_sglang.hf_config import head_dim_of, num_kv_heads_of, num_layers_of
from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.policy.packing import Packed
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule
from sparrow_sglang.selection import SelectionRule

DESCRIPTION = """\
Learn matrices on the query side of page scores, towards the attention that pages get under dense
decode, and measure on held-out responses what they change: the share of attention that is kept,
divergence from the dense distribution, tails of the acceptance rate; under the published rule and
int4 landmarks, by query as it is, by matrices, and by an oracle. Layers 0 and 1 are dense, all
others have the same budget. A run that was killed goes on if it is started again.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.learned_selection
  python -m sparrow_sglang.benchmarks.training.learned_selection --int4 my-calibrated.json
  python -m sparrow_sglang.benchmarks.training.learned_selection --adapter-steps 20
"""
PLAIN, ORACLE = "query", "attention"
KINDS = ("kv_head", "query_head")
"""Kinds of heads that have a matrix each."""
RESPONSES_PER_ADAPTER_STEP = 4


class Row(NamedTuple):
    """A selection that is measured: `scores` are `PLAIN`, one of `KINDS` or `ORACLE`.

    If `adapter` is not 0, a DistillSparse adapter is first trained under this selection for
    `adapter` steps.
    """

    rule: str
    scores: str
    budget_tokens: int
    adapter: int = 0


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Rows that `options` ask for; those with adapters come last and have the middle budget."""
    budgets = sorted(options.budgets)
    for budget in budgets:
        yield Row("oracle", ORACLE, budget)
        for rule in ("published", "int4"):
            for scores in (PLAIN, *KINDS):
                yield Row(rule, scores, budget)
    if options.adapter_steps:
        for rule in ("published", "int4"):
            for scores in (PLAIN, KINDS[0]):
                yield Row(rule, scores, budgets[len(budgets) // 2], options.adapter_steps)


class Bench:
    """Responses to learn from and to measure on, and the matrices of each rule."""

    def __init__(self, options: argparse.Namespace, folder: str, prompts: list[Prompt]) -> None:
        self._options = options
        self._folder = folder
        self._config = AutoConfig.from_pretrained(folder)
        self._policy = self.new_policy()
        self._heldout, self._training = prompts[: options.heldout], prompts[options.heldout :]
        self._targets = dense_targets(self._policy, self._heldout)
        self._rules = {"published": SelectionRule(), "int4": int4_rule(options, self._config)}
        self._rules["oracle"] = self._rules["published"]
        self._matrices: dict[tuple[str, str], QueryMatrices] = {}

    def new_policy(self) -> DensePolicy:
        on_gpu = torch.cuda.is_available()
        # One token per micro-batch puts each sequence into its own, as `MeasuredRule` needs it.
        config = ModelConfig(path=self._folder, gradient_checkpointing=on_gpu, micro_batch_tokens=1)
        return DensePolicy.load(config, OptimizerConfig(), "cuda" if on_gpu else "cpu")

    def schedule(self, rule: str, tokens: int) -> BudgetSchedule:
        return BudgetSchedule(
            name=f"{rule}-{tokens}",
            page_size=PAGE_SIZE,
            bin_tokens=PAGE_SIZE,
            budget_tokens=(tokens,),
            selection=self._rules[rule],
        )

    def learn(self) -> dict[str, Any]:
        """Learn all matrices at once; return divergences in nats before and after, and seconds."""
        options, start = self._options, seconds()
        layers, dim = num_layers_of(self._config), head_dim_of(self._config)
        heads = dict(zip(KINDS, (num_kv_heads_of(self._config), self._query_heads()), strict=True))
        for rule in ("published", "int4"):
            for kind in KINDS:
                self._matrices[rule, kind] = QueryMatrices(
                    layers, heads[kind], dim, self._policy.device
                )
        learning = [
            (self.schedule(rule, min(options.budgets)), matrices)
            for (rule, _), matrices in self._matrices.items()
        ]
        values = [matrices.values for _, matrices in learning]
        optimizer = torch.optim.Adam(values, lr=options.lr)
        steps = options.passes * len(self._training)
        pace = OptimizerConfig(lr=options.lr, decay="linear")
        draw = torch.Generator().manual_seed(0)
        sequences = [(each.input_ids, each.response_ids) for each in self._training]
        divergences = []
        for step in range(steps):
            if step % len(sequences) == 0:
                order = torch.randperm(len(sequences), generator=draw).tolist()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(pace, step, steps)
            optimizer.zero_grad()
            (packed,) = self._policy.micro_batches([sequences[order[step % len(sequences)]]])
            schedule = self.schedule("published", min(options.budgets))
            rule = LearningRule(schedule, packed.prompt_lengths, matrices=learning, draw=draw)
            with torch.no_grad():
                self._policy.hidden(packed, rule)
            optimizer.step()
            divergences.append(torch.stack(rule.losses).mean(0).cpu())
        for matrix in values:
            matrix.requires_grad_(False)
        found = torch.stack(divergences)
        part = max(1, len(self._training) // 2)
        return {
            "matrices": [
                {
                    "rule": rule,
                    "scores": kind,
                    "divergence_before": float(before),
                    "divergence_after": float(after),
                }
                for (rule, kind), before, after in zip(
                    self._matrices, found[0], found[-part:].mean(0), strict=True
                )
            ],
            "optimizer_steps": steps,
            "seconds": seconds() - start,
        }

    def measure(self, row: Row) -> dict[str, Any]:
        """Measure the selection of `row` on the held-out responses, with intervals."""
        start = seconds()
        schedule = self.schedule(row.rule, row.budget_tokens)
        rule_of = partial(
            MeasuredRule,
            matrices=self._matrices.get((row.rule, row.scores)),
            by_attention=row.scores == ORACLE,
        )
        policy = self._policy
        acting: Callable[[], AbstractContextManager[None]] = nullcontext
        if row.adapter:
            policy = self.new_policy()
            acting = self._distilled(policy, schedule, rule_of, row.adapter).enabled
        longest = max(len(each.input_ids) + len(each.response_ids) for each in self._heldout)
        recalls = {name: TailStatistics(longest + 1) for name in ("recall", "recall_ranked")}
        starts = np.cumsum([0, *(len(each.response_ids) for each in self._heldout)])

        def hidden(packed: Packed) -> torch.Tensor:
            rule = rule_of(schedule, packed.prompt_lengths)
            with acting():
                states = policy.hidden(packed, rule)
            if rule.kept:
                index = np.searchsorted(starts, int(packed.where[0]), side="right") - 1
                self._count(recalls, self._heldout[index].name, rule)
            return states

        found = fidelity(policy, self._heldout, self._targets, hidden, self._options.bin_tokens)
        for name, statistics in recalls.items():
            found[name] = None
            for tail in statistics.bins():
                fields = asdict(tail)
                found[name] = {key: fields[key] for key in ("mean", "mean_low", "mean_high")}
        return row._asdict() | found | {"seconds": seconds() - start}

    def _count(self, recalls: dict[str, TailStatistics], name: str, rule: MeasuredRule) -> None:
        """Add the kept shares of a sequence's attention, at positions that leave out a page."""
        kept, among, ranked = torch.stack(rule.kept).mean(0).double().cpu().numpy()
        positions = rule.first[0] + np.arange(len(kept))
        late = rule.schedule.tokens_read(positions + 1) < positions + 1
        shares = {"recall": kept, "recall_ranked": among / np.maximum(ranked, 1e-30)}
        for key, share in shares.items():
            recalls[key].add(name, np.zeros_like(positions[late]), np.clip(share[late], 0, 1))

    def _distilled(
        self, policy: DensePolicy, schedule: BudgetSchedule, rule_of: Any, steps: int
    ) -> SparseAdapter:
        """An adapter with default settings, trained under this selection."""
        torch.manual_seed(0)
        config = DistillConfig(enabled=True)
        adapter = SparseAdapter(policy, config)
        _, optimizer = trained_factors(policy, adapter, config.lr)
        for batch in self._adapter_batches(policy, steps):
            add_gradients("top_k", policy, adapter, batch, schedule, False, rule_of)
            optimizer.step()
        return adapter

    def _adapter_batches(self, policy: DensePolicy, steps: int) -> Iterator[Targets]:
        for step in range(steps):
            first = step * RESPONSES_PER_ADAPTER_STEP
            places = range(first, first + RESPONSES_PER_ADAPTER_STEP)
            yield dense_targets(policy, [self._training[i % len(self._training)] for i in places])

    def _query_heads(self) -> int:
        heads: int = self._config.get_text_config().num_attention_heads
        return heads


def int4_rule(options: argparse.Namespace, config: Any) -> SelectionRule:
    """The selection rule of the schedule `--int4`, with the same budget in each layer.

    Without `--int4`, landmarks of four tokens in the slower three quarters of the rotary pairs.
    """
    if options.int4 is None:
        return landmark_rule(head_dim_of(config) // 2 * 3 // 4)
    rule = load_schedule(options.int4, PAGE_SIZE).selection
    return with_weights(rule, [1.0] * num_layers_of(config))


def _parser() -> OneLineParser:
    parser = benchmark_parser(
        "training.learned_selection", DESCRIPTION, EXAMPLES, "learned_selection.json"
    )
    add = parser.add_argument
    add_options(parser, context=512)
    add("--int4", metavar="SCHEDULE", help="whose landmarks to compare with the published ones")
    add("--budgets", nargs="+", type=count, default=[64, 128], help="KV tokens of a sparse layer")
    add("--responses", type=count, default=8, help="to learn from")
    add("--passes", type=count, default=4, help="over the responses, a step for each")
    add("--lr", type=float, default=3e-3, help="of the matrices at first (default: %(default)s)")
    add("--adapter-steps", type=int, default=0, help="of adapters under both rules (default: none)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, measure, print and write; the exit code is 2 without usable options."""
    return run(_parser(), argv, check, compare)


def check(options: argparse.Namespace, folder: str) -> None:
    """Raise `ScheduleError` or `ValueError` on options that do not fit the model.

    A folder without a usable model raises `OSError` or `ValueError`.
    """
    config = AutoConfig.from_pretrained(folder)
    int4_rule(options, config).require_model(config)
    for tokens in options.budgets:
        BudgetSchedule.fixed(tokens)


def compare(options: argparse.Namespace, folder: str) -> None:
    """Add a row for each selection that `options.out` does not have yet.

    Raises `CalibrationError` on unusable prompts, and `InputError` on results of another run.
    """
    wanted = f"--responses {options.responses}"
    prompts = prompts_for(options, folder, options.responses, wanted)
    results = resumed(options.out, settings(options), prompts, ("learned",))
    finished = [tuple(row[name] for name in Row._fields) for row in results.rows]
    missing = [row for row in rows_of(options) if row not in finished]
    if missing:
        bench = Bench(options, folder, prompts)
        results.save(learned=bench.learn())
    for row in missing:
        results.add(bench.measure(row))


if __name__ == "__main__":
    raise SystemExit(main())
