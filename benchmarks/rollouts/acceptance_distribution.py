"""How acceptance rates are distributed over tokens, by budget, by position and by page size.

`python -m sparrow_sglang.benchmarks.rollouts.acceptance_distribution` decodes the prompts of
`sparrow calibrate` under fixed budgets and densely, then with larger pages under budgets that read
as many bytes as a reference budget with pages of 16. In: a model. Out: for each budget the shares
of tokens on which both sides agree, a Beta fit of the other tokens' rates and correlations with
position, and the tails by page size, as JSON. The rate of every token is kept in the work folder.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.options import (
    add_engine_arguments,
    benchmark_parser,
    prepare_out,
    settings,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.rollouts.page_sizes import equal_cost_schedules, page_size_rows
from sparrow_sglang.benchmarks.rollouts.rate_statistics import (
    AGREEMENT,
    EDGES,
    Bootstrap,
    Sample,
    fit_beta,
    histogram,
    span,
)
from sparrow_sglang.calibration.engine import measure_missing
from sparrow_sglang.calibration.job import PUBLISHED, Job, calibration_job
from sparrow_sglang.calibration.measure import (
    Arm,
    dense_arm,
    fixed_arm,
    schedule_arm,
    tokens_by_arm,
    units_of_work,
)
from sparrow_sglang.calibration.prompts import UNSCORED
from sparrow_sglang.command_line import OneLineParser, at_least, count
from sparrow_sglang.hf_config import head_dim_of
from sparrow_sglang.mismatch.token_bins import whole_pages
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE, PAGE_SIZES, BudgetSchedule

DESCRIPTION = """\
Measure how acceptance rates are distributed over tokens: under fixed budgets and densely, and with
larger pages under budgets that read as many bytes.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.acceptance_distribution
  python -m sparrow_sglang.benchmarks.rollouts.acceptance_distribution --budgets 512 --page-sizes 16
"""
RESPONSES = "sampled by the policy of each row, at temperature 1"


def rate_row(sample: Sample, draws: Bootstrap) -> dict[str, Any]:
    """The distribution of a sample's rates; the fields of the Beta fit are None without a fit."""
    fit = fit_beta(sample.rates)
    return {
        "tokens": len(sample),
        "prompts": len(set(sample.prompts.tolist())),
        **draws.mean(sample, sample.rates > AGREEMENT).fields("share_above_0.999"),
        **draws.mean(sample, sample.rates > 0.99).fields("share_above_0.99"),
        **draws.mean(sample, sample.rates).fields("mean"),
        **draws.tail(sample).fields("tail"),
        "beta_a": fit and fit.a,
        "beta_b": fit and fit.b,
        "beta_ks": fit and fit.ks,
        "beta_tokens": fit and fit.tokens,
        "histogram": histogram(sample.rates),
    }


def budget_rows(
    budget: int | None,
    sample: Sample,
    bin_tokens: int,
    min_tokens: int,
    draws: Bootstrap,
) -> Iterator[dict[str, Any]]:
    """Rows of one budget, None for dense decode: all tokens, correlations, each bin.

    Bins of fewer than `min_tokens` tokens are left out. Correlations of bins also leave out bins
    that begin below the budget, where some steps are dense.
    """
    bins = {
        index: inside
        for index, inside in sample.bins(bin_tokens, PAGE_SIZE).items()
        if len(inside) >= min_tokens
    }
    whole = [index for index in bins if index * bin_tokens >= (budget or 0)]
    name = {"budget_tokens": budget}
    yield {"kind": "all tokens", **name, **rate_row(sample, draws)}
    of_tokens = draws.correlation(sample)
    of_bins = draws.correlation_of_bins(
        [bins[index] for index in whole], [(index + 0.5) * bin_tokens for index in whole]
    )
    yield {
        "kind": "correlation",
        **name,
        "bins": len(whole),
        **(of_tokens.fields("tokens_r") if of_tokens else {}),
        **(of_bins[0].fields("tails_r") if of_bins else {}),
        **(of_bins[1].fields("means_r") if of_bins else {}),
    }
    for index, inside in bins.items():
        yield {"kind": "bin", **name, **span(index, bin_tokens), **rate_row(inside, draws)}


def page_job(job: Job, page_size: int, arms: Sequence[Arm], schedules: Sequence[Path]) -> Job:
    """The job with these arms at a page size; `schedules` are the files of the arms' schedules."""
    options = job.options
    whole = whole_pages(job.context, page_size)
    named = [arm.schedule.model_dump(mode="json") for arm in arms]
    return replace(
        job,
        page_size=page_size,
        units=units_of_work(
            job.prompts, arms, options.samples, options.new_tokens, job.context - UNSCORED
        ),
        settings=job.settings | {"page_size": page_size, "schedules": named},
        folder=options.work / f"page{page_size}",
        engine_args=job.engine_args
        | {
            "page_size": page_size,
            "sparrow_schedule": ",".join([f"fixed-{whole}", *map(str, schedules)]),
        },
    )


def measured(job: Job, names: Sequence[str]) -> dict[str, Sample]:
    """Measure what the job's folder lacks; return each arm's tokens by the name of its schedule."""
    measure_missing(job)
    arms = tokens_by_arm(job.units, job.work)
    return {name: Sample.of(tokens, names) for name, tokens in arms.items()}


def measure(
    options: argparse.Namespace,
    job: Job,
    larger_pages: Mapping[int, Sequence[BudgetSchedule]],
    results: Results,
) -> None:
    """Measure all rows, and write them after the budgets and at the end.

    `larger_pages` are the schedules to compare with the reference budget, by page size. Raises
    `CalibrationError` where `measure_missing` does.
    """
    start = time.perf_counter()
    names = list(dict.fromkeys(prompt.name for prompt in job.prompts))
    draws = Bootstrap(len(names))
    budgets = sorted({*options.budgets, options.reference_budget})
    fixed = {budget: fixed_arm(budget, PAGE_SIZE) for budget in budgets}
    dense = dense_arm(whole_pages(job.context, PAGE_SIZE), PAGE_SIZE)
    found = measured(page_job(job, PAGE_SIZE, [*fixed.values(), dense], []), names)
    for budget, arm in {**fixed, None: dense}.items():
        if sample := found.get(arm.schedule.name):
            results.add(
                *budget_rows(budget, sample, job.bin_tokens, options.min_tokens, draws),
            )
    results.save(seconds=time.perf_counter() - start)
    reference = fixed[options.reference_budget].schedule
    others = []
    for page_size, schedules in larger_pages.items():
        files = [options.work / f"{schedule.name}.json" for schedule in schedules]
        for schedule, file in zip(schedules, files, strict=True):
            schedule.save(file)
        arms = [schedule_arm(schedule) for schedule in schedules]
        found |= measured(page_job(job, page_size, arms, files), names)
        others += [(each, found[each.name]) for each in schedules if each.name in found]
    if others and reference.name in found:
        results.add(
            *page_size_rows(
                (reference, found[reference.name]),
                others,
                job.bin_tokens,
                options.min_tokens,
                head_dim_of(job.hf_config),
                draws,
            )
        )
    results.save(seconds=time.perf_counter() - start)


def _parser() -> OneLineParser:
    parser = benchmark_parser(
        "rollouts.acceptance_distribution", DESCRIPTION, EXAMPLES, "acceptance_distribution.json"
    )
    add = parser.add_argument
    add("--model-path", default=EMBEDDED_MODEL_NAME, help="default: %(default)s")
    add("--budgets", type=count, nargs="+", default=[256, 512, 1024], help="default: 256 512 1024")
    add(
        "--page-sizes",
        type=int,
        nargs="+",
        choices=PAGE_SIZES,
        default=list(PAGE_SIZES),
        help=f"to compare with pages of {PAGE_SIZE} (default: 16 32 64)",
    )
    add(
        "--reference-budget",
        type=count,
        default=512,
        help=f"with pages of {PAGE_SIZE}, whose bytes other page sizes may read (default 512)",
    )
    # 512 is the bin width of the demo model's shipped schedules.
    add("--bin-tokens", type=count, default=512, help="positions per bin (default 512)")
    add("--prompts-per-bin", type=count, default=24, help="of the built-in set (default 24)")
    add("--prompts", type=Path, help="JSONL file, as of sparrow calibrate (default: built-in ones)")
    add("--samples", type=count, default=1, help="per prompt and budget (default 1)")
    add("--new-tokens", type=at_least(2), default=128, help="per generation, at most (default 128)")
    add("--min-tokens", type=count, default=500, help="for a bin to be reported (default 500)")
    add("--batch", type=count, default=256, help="generations at a time (default 256)")
    add("--seed", type=int, default=0, help="of built-in prompts and sampling (default 0)")
    add("--work", type=Path, default=Path("acceptance-distribution"), help="folder, to go on from")
    add_engine_arguments(parser)
    return parser


def _require_sizes(parser: OneLineParser, options: argparse.Namespace, context: int) -> None:
    """End with exit code 2 if budgets, context, bins and page sizes do not fit together."""
    for budget in (*options.budgets, options.reference_budget):
        BudgetSchedule.fixed(budget, PAGE_SIZE)
        if budget >= context:
            parser.error(
                f"budget {budget}: expected fewer than the context of {context} tokens, all of"
                " which it would read"
            )
    if options.bin_tokens % max(options.page_sizes):
        parser.error(
            f"--bin-tokens {options.bin_tokens}: expected a multiple of the page size"
            f" {max(options.page_sizes)}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options."""
    parser = _parser()
    options = parser.parse_args(argv)
    recorded = settings(options)
    try:
        options.engine_args = engine_arguments(options.engine_args)
        published = {"page_size": PAGE_SIZE, "rule": PUBLISHED, "target": None}
        job = calibration_job(
            argparse.Namespace(**vars(options) | published | {"out": Path("schedule.json")})
        )
        _require_sizes(parser, options, job.context)
        larger_pages = equal_cost_schedules(
            options.reference_budget, options.page_sizes, job.context, options.bin_tokens
        )
        prepare_out(parser, options.out)
        options.work.mkdir(parents=True, exist_ok=True)
        results = Results(
            options.out,
            settings=recorded,
            model=job.model,
            responses=RESPONSES,
            num_prompts=len(job.prompts),
            prompts_sha256=job.settings["prompts_sha256"],
            context=job.context,
            edges=list(EDGES),
        )
        measure(options, job, larger_pages, results)
    except (ModelError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
