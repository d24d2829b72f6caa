"""The tables of docs/benchmarks.md, generated from the committed JSON files.

`python -m sparrow_sglang.benchmarks.tables`, in a checkout, rewrites the part of that page between
two marker lines from all files under benchmarks/results, with the template tables.md.j2. The module
imports neither torch nor SGLang.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jinja2 import Environment, FileSystemLoader

from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT, load_runs
from sparrow_sglang.benchmarks.training.distill_result import PAIRS, gains
from sparrow_sglang.renamed import current_names
from sparrow_sglang.report.page import ReportError
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.report.step_pairs import Pair, pair_rows, reading_order

PAGE = Path("docs/benchmarks.md")
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
COMMAND = "python -m sparrow_sglang.benchmarks.tables"

SCORED_BY = {
    "attention": "attention",
    "query": "the query",
    "kv_head": "a matrix per KV head",
    "query_head": "a matrix per query head",
}

_STAGES = ("step", "rollout", "logprobs", "mismatch", "update", "sync")
_VERL_STAGES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")

Row = dict[str, Any]


def number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def schedule_name(schedule: str) -> str:
    """A schedule's name; for a .json file, its file name without the suffix."""
    return Path(schedule).name.removesuffix(".json")


def sides(run: Run) -> list[tuple[Row, Row | None]]:
    """Each sparse row of a run with the dense row, if that was measured."""
    dense = next((row for row in run.rows if not row["schedule"]), None)
    return [(row, dense) for row in run.rows if row["schedule"]]


def learning_rows(run: Run) -> list[list[str]]:
    """Cells of each arm of a run of `learning_curves`."""
    curves = [current_names(row["curves"]) for row in run.rows]
    last = max(set.intersection(*({step for step, _ in c["eval/pass_rate"]} for c in curves)))
    table = []
    arms = [row.get("arm") or schedule_name(row["schedule"]) for row in run.rows]
    for arm in dict.fromkeys(arms):
        rows = [row for row, its in zip(run.rows, arms, strict=True) if its == arm]
        seeds = [curve for curve, its in zip(curves, arms, strict=True) if its == arm]
        rates = [dict(seed["eval/pass_rate"]) for seed in seeds]
        before, then = ([rate[step] for rate in rates] for step in (0, last))
        tail, read, cached = (
            [value for seed in seeds for _, value in seed[f"sparrow/{metric}"]]
            for metric in ("accept_p05", "kv_tokens_read", "kv_tokens_cached")
        )
        table.append(
            [
                arm,
                str(len(seeds)),
                str(last),
                *(f"{mean(values):.3f} ± {stdev(values):.3f}" for values in (before, then)),
                f"{mean(tail):.3f}" if tail else "–",
                f"{mean(read):.0f} of {mean(cached):.0f}" if read else "–",
                *(
                    number(mean(row["seconds_per_step"][f"timing_s/{stage}"] for row in rows), 1)
                    for stage in _STAGES
                ),
            ]
        )
    return table


def step_time_rows(run: Run) -> list[list[str]]:
    """Cells of each arm of a run of `step_times`."""
    dense = next((row for row in run.rows if row["arm"] == "dense"), None)
    return [
        [
            row["model"],
            row["arm"] + (f", {schedule_name(row['schedule'])}" if row["schedule"] else ""),
            str(row["ranks"]),
            str(row["sequences"]),
            number(mean(row["trained_tokens"]) / row["sequences"], 0),
            number(max(row["longest"]), 0),
            str(row["steps"]),
            *(number(mean(row["seconds"].get(stage, [0.0])), 1) for stage in _STAGES),
            number(row["trained_tokens_per_s"], 0),
            f"{row['trained_tokens_per_s'] / dense['trained_tokens_per_s']:.2f}×" if dense else "–",
        ]
        for row in run.rows
    ]


def verl_rows(run: Run) -> list[list[str]]:
    """Cells of each run of `verl_runs`; means leave out the first step."""
    return [_verl_row(row) for row in run.rows if row["steps"] > 1]


def _verl_row(row: Row) -> list[str]:
    def after_the_first(metric: str) -> list[float]:
        return [value for step, value in row["curves"].get(metric, []) if step > 1]

    scores = after_the_first("critic/score/mean")
    tenth = max(1, len(scores) // 10)
    tail = after_the_first("sparrow/accept_p05")
    return [
        schedule_name(row["schedule"]),
        str(row["seed"]),
        str(row["steps"]),
        f"{mean(scores[:tenth]):.3f} → {mean(scores[-tenth:]):.3f}",
        number(mean(after_the_first("response_length/mean")), 0),
        f"{mean(tail):.3f}, {min(tail):.3f}" if tail else "–",
        *(
            number(mean(values), digits) if (values := after_the_first(metric)) else "–"
            for metric, digits in (("rollout_corr/kl", 4), ("rollout_corr/rollout_is_mean", 3))
        ),
        *(
            number(row["seconds_per_step"].get(f"timing_s/{stage}", 0.0), 1)
            for stage in _VERL_STAGES
        ),
        number(row["tokens_per_s"], 0),
    ]


def rates_of_budget(run: Run, budget: int | None) -> tuple[Row, Row, list[float]]:
    """From an `acceptance_distribution` run: the all-tokens row, the correlation row, and the KS
    distance of each bin, under one budget."""
    rows = [row for row in run.rows if row.get("budget_tokens") == budget]
    of_kind = {row["kind"]: row for row in rows}
    distances = [row["beta_ks"] for row in rows if row["kind"] == "bin" and row["beta_ks"]]
    return of_kind["all tokens"], of_kind["correlation"], distances


def model_name(run: Run) -> str:
    return str(run.content["settings"]["model"]).rstrip("/").rpartition("/")[2]


def generate(root: Path = ROOT) -> str:
    """All tables as Markdown, from the results under `root`."""
    pairs = sorted(pair_rows(step_runs := load_runs(root, "step_ms")), key=reading_order)
    cited = {run.path: run for pair in pairs for run in (pair.run, pair.dense_run) if run}
    numbers = {path: index for index, path in enumerate(sorted(cited), 1)}

    def citation(pair: Pair) -> str:
        """Numbers of the pair's runs in the list below the tables."""
        words = str(numbers[pair.run.path])
        if pair.dense_run and pair.dense_run != pair.run:
            words += f", dense {numbers[pair.dense_run.path]}"
        return words

    distilled = load_runs(root, "trained_under")
    curves = load_runs(root, "curves")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "mean": mean, "schedule_name": schedule_name}
    text = environment.get_template("tables.md.j2").render(
        PAIRS=PAIRS,
        SCORED_BY=SCORED_BY,
        gains=gains,
        sides=sides,
        learning_rows=learning_rows,
        step_time_rows=step_time_rows,
        model_name=model_name,
        citation=citation,
        steps=[pair for pair in pairs if not pair.sparse["case"].startswith("fill:")],
        fills=[pair for pair in pairs if pair.sparse["case"].startswith("fill:")],
        step_runs=[run for run in step_runs if run.path in numbers],
        rollouts=load_runs(root, "ended_s"),
        servers=load_runs(root, "bench_serving"),
        training=load_runs(root, "step_peak_gib"),
        step_times=load_runs(root, "trained_tokens"),
        verl=[run for run in curves if "frameworks" in run.content],
        verl_rows=verl_rows,
        turns=load_runs(root, "turn_tokens"),
        learning=[run for run in curves if "frameworks" not in run.content],
        slime=load_runs(root, "weight_versions"),
        distilled=distilled,
        # The cost is measured last, and missing in a result that was cut short.
        costs=[run for run in distilled if "cost" in run.content],
        adapters=load_runs(root, "averaged"),
        selections=load_runs(root, "recall_ranked"),
        audits=load_runs(root, "served_s"),
        distributions=load_runs(root, "histogram"),
        rates_of_budget=rates_of_budget,
        rules=load_runs(root, "kv_tokens_read"),
        kernels=load_runs(root, "floor_us"),
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def replace_tables(page: str, tables: str) -> str:
    """The page with `tables` between the markers; links to results become relative to docs/.

    Raises `ReportError` unless the page has each marker exactly once.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ReportError(f"{PAGE}: expected one line {BEGIN} and, below it, one line {END}")
    linked = tables.replace(f"]({RESULTS.as_posix()}/", f"](../{RESULTS.as_posix()}/")
    return f"{before}{BEGIN}\n{linked}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the page of this checkout."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=f"Rewrite the tables of {PAGE} from {RESULTS}."
    )
    parser.parse_args(argv)
    page = ROOT / PAGE
    try:
        page.write_text(replace_tables(page.read_text("utf-8"), generate()), "utf-8")
    except (ReportError, OSError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
