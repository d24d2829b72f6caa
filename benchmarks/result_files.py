"""Committed result files of benchmarks, and the pieces of Markdown that show them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")

_PACKAGES = {
    "sglang": "SGLang",
    "torch": "torch",
    "triton": "Triton",
    "flashinfer-python": "FlashInfer",
}
_STARTED_AS = {
    "cli.py": "sparrow",
    "decode_step.py": "sparrow bench step",
    "kernels.py": "sparrow bench kernels",
    "rollout_replay.py": "sparrow bench rollout",
    "serving.py": "sparrow bench serving",
    "train_memory.py": "python -m sparrow_sglang.benchmarks.training.train_memory",
    "learning_curves.py": "python -m sparrow_sglang.benchmarks.training.learning_curves",
    "distill_gain.py": "python -m sparrow_sglang.benchmarks.training.distill_gain",
    "audit_overhead.py": "python -m sparrow_sglang.benchmarks.rollouts.audit_overhead",
    "weight_sync.py": "python -m sparrow_sglang.benchmarks.training.weight_sync",
    "soak.py": "python -m sparrow_sglang.benchmarks.rollouts.soak",
    "sanitize.py": "python -m sparrow_sglang.benchmarks.kernels.sanitize",
    "crash_probes.py": "python -m sparrow_sglang.benchmarks.kernels.crash_probes",
}


class TableError(ValueError):
    """The tables cannot be made; the message names the file and what is allowed."""


@dataclass(frozen=True)
class Run:
    """One result file: `path` from the root of the checkout, and its content."""

    path: str
    content: dict[str, Any]

    @property
    def device(self) -> str:
        return str(self.content["device"]).removeprefix("NVIDIA ")

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    @property
    def source(self) -> str:
        """Device, versions, commit, file and command."""
        packages = self.content["packages"]
        versions = [f"{name} {packages[key]}" for key, name in _PACKAGES.items() if packages[key]]
        return (
            f"{self.content['device']}, {', '.join(versions)}, commit"
            f" `{self.content['commit']}`, [results]({self.path}):"
            f" `{rerun_command(self.content['command'])}`"
        )


def rerun_command(recorded: str) -> str:
    """The recorded command as one types it: by `sparrow bench`, JSON quoted, without its --out."""
    program, _, options = recorded.partition(" ")
    options = re.sub(r" ?--out[ =]\S+", "", options)
    options = re.sub(r"(?<!')(\{[^{}']*\"[^{}']*\})(?!')", r"'\1'", options)
    return f"{_STARTED_AS.get(program, program)} {options.strip()}".strip()


def load_runs(root: Path, key: str) -> list[Run]:
    """Result files under `root` whose rows have `key`, by path; sweeps of variants are left out.

    Raises `TableError` on a file that is not JSON, or that lacks what a result carries.
    """
    runs = []
    for path in sorted((root / RESULTS).rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise TableError(f"{path}: not JSON ({error}); expected a benchmark's result") from None
        rows = content.get("rows") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not rows or key not in rows[0]:
            continue
        missing = {"device", "packages", "commit", "command"} - content.keys()
        if missing:
            raise TableError(f"{path}: lacks {', '.join(sorted(missing))}; measure it again")
        if "--sweep" not in content["command"]:
            runs.append(Run(path.relative_to(root).as_posix(), content))
    return runs


def number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def markdown_table(heads: str, words: int, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but its first `words` columns are aligned to the right."""
    columns = heads.split("|")
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def cited_table(
    text: str,
    heads: str,
    words: int,
    runs: Sequence[Run],
    lines: Callable[[Run], Iterator[list[str]]],
) -> str:
    """A table of the runs' lines, each with device and run; below it what each run was."""
    if not runs:
        return ""
    cells = [
        [*line, run.device, str(index)] for index, run in enumerate(runs, 1) for line in lines(run)
    ]
    sources = "\n".join(f"{index}. {run.source}" for index, run in enumerate(runs, 1))
    return "\n\n".join([text, markdown_table(heads, words, cells), sources])
