"""The tables of docs/benchmarks.md, generated from the committed JSON files.

`python -m sparrow_sglang.benchmarks.tables`, in a checkout, rewrites the part of that page between
two marker lines from all that lies under benchmarks/results. Imports neither torch nor SGLang.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT, ResultError, load_runs
from sparrow_sglang.benchmarks.training.distill_result import PAIRS, gains
from sparrow_sglang.renamed import current_names
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.report.step_pairs import Pair, pair_rows, reading_order

PAGE = Path("docs/benchmarks.md")
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
COMMAND = "python -m sparrow_sglang.benchmarks.tables"

_STEP_TEXT = """\
One decode step of stock SGLang with random weights in the model's shapes, dense (`flashinfer`)
against sparse. Floor: the bytes that the sparse step must read over the copy bandwidth measured in
that run."""
_FILL_TEXT = """\
A rollout in its steady state: sequences of mixed length that fill the KV pool to the cached tokens
given, decoding together."""
_KERNEL_TEXT = """\
The kernels of one layer (8 KV heads of 128, pages of 16) and other libraries on the same inputs.
Floor: the bytes to move over the copy bandwidth. Not every library does all of the work: what it
leaves out is described in `benchmarks/kernels/peers.py`."""
_ROLLOUT_TEXT = """\
A replayed rollout (`sparrow bench rollout`): all sequences start together in stock SGLang and
generate until the last one is done. Generated tokens over wall time, prefill included; weights are
random unless the command names a model."""
_SERVING_TEXT = """\
SGLang's own `bench_serving` against a server of each kind (`sparrow bench serving`). TTFT, TPOT:
median time to the first token and per further token."""
_TRAINING_TEXT = """\
One training step of the dense policy on one long sequence: peak memory of forward, backward and
optimizer, and the faster of the timed steps; then the same of a step of a DistillSparse adapter,
its target included."""
_LEARNING_TEXT = """\
GRPO from dense and from sparse rollouts, from the same start: held-out pass rate before training
and at the last evaluation that all runs reached (mean and standard deviation over seeds, dense
decode), tail of the acceptance rate and KV tokens read of those cached while rolling out, and where
the seconds of a step went. All runs shared one GPU, so that a step alone takes less."""
_GAIN_TEXT = """\
DistillSparse alone, the model frozen (`benchmarks.distill_gain`): the 5th percentile of the exact
acceptance rate of fresh responses to held-out prompts, by position, without the adapter and with
it. Raised: in so many bins the 95 % intervals lie apart; reached: in so many the tail is at least
as high."""
_COST_TEXT = """\
What that adapter costs: decode with it merged into the weights and unmerged (LoRA), a batch of
requests end to end; the acceptance rate between these two distributions; and an adapter step beside
a dense update on the same responses."""
_AUDIT_TEXT = """\
What `--sparrow-audit-rate` costs a server: output tokens/s of the same load without and with it,
means over the rounds, and the share lost, mean over the pairs of rounds."""

_STAGES = ("step", "rollout", "logprobs", "mismatch", "update", "sync")

Row = dict[str, Any]
Cells = Mapping[str, str]
"""Cells of a row by the head of their column."""


def number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def markdown_table(rows: Iterable[Cells], words: int) -> str:
    """A Markdown table; all but its first `words` columns are aligned to the right."""
    rows = list(rows)
    heads = list(rows[0])
    rule = ["---"] * words + ["---:"] * (len(heads) - words)
    return "\n".join(f"| {' | '.join(r)} |" for r in (heads, rule, *(r.values() for r in rows)))


def cited_table(
    text: str, words: int, runs: Sequence[Run], cells: Callable[[Run], Iterable[Cells]]
) -> str:
    """A table of the runs' rows, each with device and run; below it what each run was."""
    numbered = list(enumerate(runs, 1))
    rows = [
        {**row, "device": run.device, "run": str(index)}
        for index, run in numbered
        for row in cells(run)
    ]
    if not rows:
        return ""
    sources = "\n".join(f"{index}. {run.source}" for index, run in numbered)
    return "\n\n".join([text, markdown_table(rows, words), sources])


def step_tables(runs: Sequence[Run]) -> str:
    """Decode steps, snapshots of a rollout, and the list of runs that both cite."""
    pairs = sorted(pair_rows(runs), key=reading_order)
    if not pairs:
        return ""
    used = {run.path for pair in pairs for run in (pair.run, pair.dense_run) if run}
    numbers = {path: index for index, path in enumerate(sorted(used), 1)}
    parts = []
    for text, cells, is_fill in ((_STEP_TEXT, _step_cells, False), (_FILL_TEXT, _fill_cells, True)):
        rows = [
            {**cells(pair), "device": pair.run.device, "run": _citation(pair, numbers)}
            for pair in pairs
            if pair.sparse["case"].startswith("fill:") is is_fill
        ]
        parts += [text, markdown_table(rows, words=3)] if rows else []
    cited = [f"{numbers[run.path]}. {run.source}" for run in runs if run.path in numbers]
    return "\n\n".join([*parts, "Runs:", "\n".join(cited)])


def _step_cells(pair: Pair) -> Cells:
    row = pair.sparse
    return {
        "model": row["model"],
        "schedule": row["schedule"],
        "batch × context": row["case"].replace("x", " × "),
        "dense ms": _dense_cell(pair, "step_ms", 2),
        "sparse ms": number(row["step_ms"], 2),
        "speed-up": times(pair.speedup),
        "floor ms": number(row["floor_ms"], 2),
    }


def _fill_cells(pair: Pair) -> Cells:
    row = pair.sparse
    return {
        "model": row["model"],
        "schedule": row["schedule"],
        "lengths": row["case"].split(":")[1].replace("-", " to "),
        "sequences": str(row["batch"]),
        "cached tokens": number(row["cached_tokens"], 0),
        "dense tokens/s": _dense_cell(pair, "tokens_per_s", 0),
        "sparse tokens/s": number(row["tokens_per_s"], 0),
        "speed-up": times(pair.speedup),
        "floor tokens/s": number(row["batch"] / row["floor_ms"] * 1e3, 0),
    }


def _dense_cell(pair: Pair, key: str, digits: int) -> str:
    """A number of the dense row, with its backend unless that is `flashinfer`."""
    if pair.dense is None:
        return "–"
    backend = pair.dense["backend"]
    named = f" ({backend})" if backend != "flashinfer" else ""
    return number(pair.dense[key], digits) + named


def _citation(pair: Pair, numbers: Mapping[str, int]) -> str:
    """Numbers of the pair's runs in the list below the tables."""
    cited = str(numbers[pair.run.path])
    if pair.dense_run and pair.dense_run != pair.run:
        cited += f", dense {numbers[pair.dense_run.path]}"
    return cited


def _sides(run: Run) -> Iterator[tuple[Row, Row | None]]:
    """Each sparse row of a run with the dense row, if that was measured."""
    dense = next((row for row in run.rows if not row["schedule"]), None)
    return ((row, dense) for row in run.rows if row["schedule"])


def _measured(row: Row | None, key: str, digits: int) -> str:
    return number(row[key], digits) if row else "–"


def _rollout_cells(run: Run) -> Iterator[Cells]:
    for sparse, dense in _sides(run):
        yield {
            "model": sparse["model"],
            "schedule": sparse["schedule"],
            "sequences": str(sparse["sequences"]),
            "mean tokens": number(sparse["output_tokens"] / sparse["sequences"], 0),
            "longest": number(sparse["longest"], 0),
            "dense s": _measured(dense, "seconds", 1),
            "sparse s": _measured(sparse, "seconds", 1),
            "dense tokens/s": _measured(dense, "tokens_per_s", 0),
            "sparse tokens/s": _measured(sparse, "tokens_per_s", 0),
            "speed-up": times(sparse["tokens_per_s"] / dense["tokens_per_s"] if dense else None),
        }


def _serving_cells(run: Run) -> Iterator[Cells]:
    for sparse_row, dense_row in _sides(run):
        sparse = sparse_row["bench_serving"]
        dense = dense_row["bench_serving"] if dense_row else None

        def both(key: str, digits: int, sides: Sequence[Row | None] = (dense, sparse)) -> str:
            return ", ".join(_measured(side, key, digits) for side in sides)

        key = "output_throughput"
        yield {
            "model": sparse_row["model"],
            "schedule": sparse_row["schedule"],
            "requests": str(sparse["completed"]),
            "prompt": number(sparse["random_input_len"], 0),
            "new tokens": number(sparse["random_output_len"], 0),
            "TTFT ms dense, sparse": both("median_ttft_ms", 0),
            "TPOT ms dense, sparse": both("median_tpot_ms", 2),
            "dense tokens/s": _measured(dense, key, 0),
            "sparse tokens/s": _measured(sparse, key, 0),
            "speed-up": times(sparse[key] / dense[key] if dense else None),
        }


def _training_cells(run: Run) -> Iterator[Cells]:
    for row in run.rows:
        yield {
            "model": run.content["model"],
            "weights": row["dtype"],
            "tokens": number(row["tokens"], 0),
            "weights GiB": number(row["weights_gib"], 1),
            "step peak GiB": number(row["step_peak_gib"], 1),
            "step s": number(min(row["step_s"]), 2),
            "scoring s": number(row["score_s"], 2),
            "adapter peak GiB": number(row["adapter_peak_gib"], 1),
            "adapter step s": number(min(row["adapter_step_s"]), 2),
        }


def _learning_cells(run: Run) -> Iterator[Cells]:
    curves = [current_names(row["curves"]) for row in run.rows]
    last = max(set.intersection(*({step for step, _ in c["eval/pass_rate"]} for c in curves)))
    for schedule in dict.fromkeys(row["schedule"] for row in run.rows):
        rows = [row for row in run.rows if row["schedule"] == schedule]
        seeds = [c for c, row in zip(curves, run.rows, strict=True) if row["schedule"] == schedule]

        def spread(step: int, seeds: Sequence[Row] = seeds) -> str:
            rates = [dict(seed["eval/pass_rate"])[step] for seed in seeds]
            return f"{mean(rates):.3f} ± {stdev(rates):.3f}"

        tail, read, cached = (
            [value for seed in seeds for _, value in seed[f"sparrow/{metric}"]]
            for metric in ("accept_p05", "kv_tokens_read", "kv_tokens_cached")
        )
        yield {
            "schedule": Path(schedule).name.removesuffix(".json"),
            "seeds": str(len(seeds)),
            "step": str(last),
            "pass rate before": spread(0),
            "pass rate then": spread(last),
            "tail": f"{mean(tail):.3f}" if tail else "–",
            "KV read of cached": f"{mean(read):.0f} of {mean(cached):.0f}" if read else "–",
        } | {
            {"step": "step s", "logprobs": "log-probs"}.get(stage, stage): number(
                mean(row["seconds_per_step"][f"timing_s/{stage}"] for row in rows), 1
            )
            for stage in _STAGES
        }


def _gain_cells(run: Run) -> Iterator[Cells]:
    names = {which: schedule["name"] for which, schedule in run.content["schedules"].items()}
    for row in run.rows:
        tails = row["tails"][-1]
        for old, new in PAIRS:
            bins = gains(run.content["before"][old], tails[new])
            yield {
                "model": _model_name(run),
                "before → after": f"{names[old]} → {names[new]}",
                "lr": f"{row['lr']:g}",
                "responses": str(tails["after"]["responses"]),
                "tail before → after, by bin": ", ".join(
                    f"{gain['before']:.3f} → {gain['after']:.3f}" for gain in bins
                ),
                "raised": f"{sum(gain['raised'] for gain in bins)} of {len(bins)}",
                "reached": f"{sum(gain['reached'] for gain in bins)} of {len(bins)}",
            }


def _cost_cells(run: Run) -> Iterator[Cells]:
    merged, lora = (run.content["decode"][delivery] for delivery in ("merged", "lora"))
    agreement, cost = run.content["agreement"]["merged"], run.content["cost"]
    yield {
        "model": _model_name(run),
        "requests × new tokens": f"{merged['requests']} × {merged['new_tokens']}",
        "merged tokens/s": number(merged["tokens_per_s"], 0),
        "LoRA tokens/s": number(lora["tokens_per_s"], 0),
        "merged step ms": number(merged["step_ms"], 2),
        "LoRA step ms": number(lora["step_ms"], 2),
        "acceptance between, mean": number(agreement["mean"], 4),
        "tail": number(agreement["tail"], 4),
        "adapter step s": number(cost["adapter_step_s"], 2),
        "dense update s": number(cost["dense_update_s"], 2),
    }


def _model_name(run: Run) -> str:
    return str(run.content["settings"]["model"]).rstrip("/").rpartition("/")[2]


def _audit_cells(run: Run) -> Iterator[Cells]:
    settings = run.content["settings"]
    without, audited = (
        mean(row["tokens_per_s"] for row in run.rows if bool(row["rate"]) is is_audited)
        for is_audited in (False, True)
    )
    yield {
        "model": settings["model"],
        "schedule": settings["schedule"],
        "audited": f"{settings['rate']:.1%}",
        "requests × new tokens": f"{settings['requests']} × {settings['new_tokens']}",
        "tokens/s without": number(without, 0),
        "tokens/s with": number(audited, 0),
        "lost": f"{mean(run.content['lost']):.2%}",
    }


def kernel_table(run: Run) -> str:
    """Our kernels of one run, each with the libraries that were timed on the same inputs."""

    def measured(row: Row) -> str:
        return number(row["us"], 1) if "us" in row else "failed"

    peers: dict[str, list[str]] = {}
    for row in run.rows:
        kernel, _, peer = row["name"].partition(": ")
        if peer:
            peers.setdefault(kernel, []).append(f"{peer} {measured(row)}")
    rows = [
        {
            "kernel": row["name"],
            "floor µs": number(row["floor_us"], 1),
            "measured µs": measured(row),
            "of floor": f"{row['floor_us'] / row['us']:.0%}" if "us" in row else "–",
            "other libraries, µs": "; ".join(peers.get(row["name"], [])) or "–",
        }
        for row in run.rows
        if ": " not in row["name"]
    ]
    summary = f"<details><summary>Kernels on one {run.device}</summary>"
    bandwidth = f"copy {run.content['copy_bandwidth'] / 1e12:.2f} TB/s; {run.source}"
    parts = [summary, _KERNEL_TEXT, markdown_table(rows, 1), bandwidth, "</details>"]
    return "\n\n".join(parts)


def generate(root: Path = ROOT) -> str:
    """All tables as Markdown, from the results under `root`."""
    distilled = load_runs(root, "trained_under")
    # The cost is measured last, and missing in a result that was cut short.
    costs = [run for run in distilled if "cost" in run.content]
    tables = [
        step_tables(load_runs(root, "step_ms")),
        cited_table(_ROLLOUT_TEXT, 2, load_runs(root, "ended_s"), _rollout_cells),
        cited_table(_SERVING_TEXT, 2, load_runs(root, "bench_serving"), _serving_cells),
        cited_table(_TRAINING_TEXT, 2, load_runs(root, "step_peak_gib"), _training_cells),
        cited_table(_LEARNING_TEXT, 1, load_runs(root, "curves"), _learning_cells),
        cited_table(_GAIN_TEXT, 2, distilled, _gain_cells),
        cited_table(_COST_TEXT, 1, costs, _cost_cells),
        cited_table(_AUDIT_TEXT, 2, load_runs(root, "served_s"), _audit_cells),
        *(kernel_table(run) for run in load_runs(root, "floor_us")),
    ]
    return "\n\n".join(table for table in tables if table)


def replace_tables(page: str, tables: str) -> str:
    """The page's text with `tables` between the markers; paths of results lead there from docs/.

    Raises `ResultError` unless both markers stand there once.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ResultError(f"{PAGE}: expected one line {BEGIN} and, below it, one line {END}")
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
    except (ResultError, OSError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
