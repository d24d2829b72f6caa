"""The tables of docs/benchmarks.md, generated from the committed JSON files.

`python -m sparrow_sglang.benchmarks.table`, in a checkout, rewrites the part of that page between
two marker lines from all that lies under benchmarks/results. Imports neither torch nor SGLang.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.comparison_tables import (
    audit_table,
    learning_table,
    rollout_table,
    serving_table,
    training_table,
)
from sparrow_sglang.benchmarks.result_files import (
    RESULTS,
    ROOT,
    Run,
    TableError,
    load_runs,
    markdown_table,
    number,
    times,
)
from sparrow_sglang.benchmarks.steps.decode_step import dense_partner
from sparrow_sglang.benchmarks.training.distill_result import cost_table, gain_table

PAGE = Path("docs/benchmarks.md")
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
COMMAND = "python -m sparrow_sglang.benchmarks.table"

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


@dataclass(frozen=True)
class Pair:
    """A sparse row, the dense row it is compared to, and the runs that they are from."""

    sparse: dict[str, Any]
    run: Run
    dense: dict[str, Any] | None
    dense_run: Run | None

    @property
    def speedup(self) -> float | None:
        return self.dense["step_ms"] / self.sparse["step_ms"] if self.dense else None

    def dense_cell(self, key: str, digits: int) -> str:
        """A number of the dense row, with its backend unless that is `flashinfer`."""
        if self.dense is None:
            return "–"
        backend = self.dense["backend"]
        return number(self.dense[key], digits) + (
            f" ({backend})" if backend != "flashinfer" else ""
        )

    def cited(self, numbers: dict[str, int]) -> str:
        """Numbers of the two runs in the list below the tables."""
        cited = str(numbers[self.run.path])
        if self.dense_run and self.dense_run != self.run:
            cited += f", dense {numbers[self.dense_run.path]}"
        return cited


def pair_rows(runs: list[Run]) -> list[Pair]:
    """Each sparse row with the dense row of its own run, or else of another one on its device."""
    pairs = []
    for run in runs:
        others = [other for other in runs if other != run and other.device == run.device]
        for row in run.rows:
            if row["backend"] != "sparrow":
                continue
            dense, dense_run = dense_partner(row, run.rows), run
            if dense is None:
                dense = dense_partner(row, [each for other in others for each in other.rows])
                # By identity: equal rows may stand in two files.
                holders = (o for o in others if any(each is dense for each in o.rows))
                dense_run = next(holders, run)
            pairs.append(Pair(row, run, dense, dense_run if dense else None))
    return sorted(pairs, key=_order)


def _order(pair: Pair) -> tuple[Any, ...]:
    row = pair.sparse
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", row["model"])]
    # A model's own schedules stand before fixed ones.
    fixed = row["schedule"].startswith("fixed-")
    budget = int(row["schedule"].rpartition("-")[2]) if fixed else 0
    context = row["cached_tokens"] / row["batch"]
    return (pair.run.device, numbers, fixed, budget, row["schedule"], row["batch"], context)


def step_tables(runs: list[Run]) -> str:
    """Decode steps, snapshots of a rollout, and the list of runs that both cite."""
    pairs = pair_rows(runs)
    if not pairs:
        return ""
    used = {run.path for pair in pairs for run in (pair.run, pair.dense_run) if run}
    numbers = {path: number for number, path in enumerate(sorted(used), 1)}
    fill = [pair for pair in pairs if pair.sparse["case"].startswith("fill:")]
    steps = [pair for pair in pairs if pair not in fill]
    parts = []
    if steps:
        heads = "model|schedule|batch × context|dense ms|sparse ms|speed-up|floor ms|device|run"
        parts += [
            _STEP_TEXT,
            markdown_table(heads, 3, (_step_cells(pair, numbers) for pair in steps)),
        ]
    if fill:
        heads = "model|schedule|lengths|sequences|cached tokens|dense tokens/s|sparse tokens/s"
        heads += "|speed-up|floor tokens/s|device|run"
        parts += [
            _FILL_TEXT,
            markdown_table(heads, 3, (_fill_cells(pair, numbers) for pair in fill)),
        ]
    cited = [f"{numbers[run.path]}. {run.source}" for run in runs if run.path in numbers]
    return "\n\n".join([*parts, "Runs:", "\n".join(cited)])


def _step_cells(pair: Pair, numbers: dict[str, int]) -> list[str]:
    row = pair.sparse
    return [
        row["model"],
        row["schedule"],
        row["case"].replace("x", " × "),
        pair.dense_cell("step_ms", 2),
        number(row["step_ms"], 2),
        times(pair.speedup),
        number(row["floor_ms"], 2),
        pair.run.device,
        pair.cited(numbers),
    ]


def _fill_cells(pair: Pair, numbers: dict[str, int]) -> list[str]:
    row = pair.sparse
    return [
        row["model"],
        row["schedule"],
        row["case"].split(":")[1].replace("-", " to "),
        str(row["batch"]),
        number(row["cached_tokens"], 0),
        pair.dense_cell("tokens_per_s", 0),
        number(row["tokens_per_s"], 0),
        times(pair.speedup),
        number(row["batch"] / row["floor_ms"] * 1e3, 0),
        pair.run.device,
        pair.cited(numbers),
    ]


def kernel_table(run: Run) -> str:
    """Our kernels of one run, each with the libraries that were timed on the same inputs."""
    peers: dict[str, list[str]] = {}
    for row in run.rows:
        ours, _, peer = row["name"].partition(": ")
        if peer:
            peers.setdefault(ours, []).append(f"{peer} {_measured(row)}")
    lines = [
        [
            row["name"],
            number(row["floor_us"], 1),
            _measured(row),
            f"{row['floor_us'] / row['us']:.0%}" if "us" in row else "–",
            "; ".join(peers.get(row["name"], [])) or "–",
        ]
        for row in run.rows
        if ": " not in row["name"]
    ]
    table = markdown_table("kernel|floor µs|measured µs|of floor|other libraries, µs", 1, lines)
    bandwidth = f"copy {run.content['copy_bandwidth'] / 1e12:.2f} TB/s"
    summary = f"<summary>Kernels on one {run.device}</summary>"
    return "\n\n".join(
        [
            f"<details>{summary}",
            _KERNEL_TEXT,
            table,
            f"{bandwidth}; {run.source}",
            "</details>",
        ]
    )


def _measured(row: dict[str, Any]) -> str:
    return number(row["us"], 1) if "us" in row else "failed"


def generate(root: Path = ROOT) -> str:
    """All tables as Markdown, from the results under `root`."""
    distilled = load_runs(root, "trained_under")
    parts = [
        step_tables(load_runs(root, "step_ms")),
        rollout_table(load_runs(root, "ended_s")),
        serving_table(load_runs(root, "bench_serving")),
        training_table(load_runs(root, "step_peak_gib")),
        learning_table(load_runs(root, "curves")),
        gain_table(distilled),
        cost_table(distilled),
        audit_table(load_runs(root, "served_s")),
    ]
    parts += [kernel_table(run) for run in load_runs(root, "floor_us")]
    return "\n\n".join(part for part in parts if part)


def replace_tables(page: str, tables: str) -> str:
    """The page's text with `tables` between the markers; paths of results lead there from docs/.

    Raises `TableError` unless both markers stand there once.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or page.count(BEGIN) != 1 or page.count(END) != 1:
        raise TableError(f"{PAGE}: expected one line {BEGIN} and, below it, one line {END}")
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
    except (TableError, OSError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
