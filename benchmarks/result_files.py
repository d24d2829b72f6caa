"""Result files: those that a benchmark writes, and those that are committed in this checkout."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.errors import InputError
from sparrow_sglang.provenance import provenance
from sparrow_sglang.report.page import ReportError, number, scalars
from sparrow_sglang.report.result_files import Run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")


class Results:
    """The rows of a benchmark; `out` is rewritten with all rows so far whenever rows are added.

    The file holds `fields` and the output of `provenance` beside the rows.
    """

    def __init__(self, out: Path, **fields: Any) -> None:
        self.out = out
        self.fields = fields
        self.rows: list[dict[str, Any]] = []
        # Read at the start: the working tree may change while this code runs.
        self.provenance = provenance()

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, write the file, and print the scalar values of the new rows."""
        self.rows += rows
        self.save()
        for row in rows:
            values = {name: value for name, value in scalars(row).items() if value is not None}
            words = (
                f"{name} {value if isinstance(value, str | bool) else number(value)}"
                for name, value in values.items()
            )
            print("  ".join(words), flush=True)

    def save(self, **fields: Any) -> None:
        """Write all rows, with further fields."""
        self.fields |= fields
        write_json(self.out, self.provenance | self.fields | {"rows": self.rows})


def resumed(out: Path, fields: Mapping[str, Any], measured: Sequence[str] = ()) -> Results:
    """The results in `out`, to go on with, or new ones.

    A run starts from `fields`; `measured` names further fields that the earlier run wrote and that
    are kept. Earlier commands that wrote rows are kept under `earlier_commands`. Raises
    `InputError` if `out` is of another run, or of another device, commit or package.
    """
    results = Results(out, **fields)
    try:
        content = json.loads(out.read_text())
    except FileNotFoundError:
        return results
    except ValueError:
        content = None
    if not isinstance(content, dict):
        content = {}
    expected = "expected no file, or one to go on with; name another, or delete it"
    differing = [name for name, value in fields.items() if content.get(name) != value]
    if differing:
        raise InputError(
            f"--out {out}: holds something else, or was measured with other {differing[0]}:"
            f" {expected}"
        )
    measured_by = _versions(content)
    for name, now in _versions({**results.provenance, **fields}).items():
        if (then := measured_by.get(name)) != now:
            raise InputError(
                f"--out {out}: was measured with {name} {then}, this run has {now}: {expected}"
            )
    results.rows = content["rows"]
    print(f"{out}: has {len(results.rows)} rows, which are not measured again", flush=True)
    results.fields = {**fields, **{name: content[name] for name in measured}}
    commands = [*content.get("earlier_commands", []), content["command"]]
    if earlier := [each for each in commands if each != results.provenance["command"]]:
        results.fields["earlier_commands"] = earlier
    return results


def _versions(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the rows of a file must share besides the settings."""
    return {"device": content["device"], "commit": content["commit"], **content["packages"]}


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file that is being written; a last line without its newline is skipped.

    The list is empty if the file does not exist.
    """
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def load_runs(root: Path, key: str) -> list[Run]:
    """Result files under `root` whose rows have `key`, by path; sweeps of variants are left out.

    Raises `ReportError` on a file that is not JSON, or that lacks a field every result has.
    """
    runs = []
    for path in sorted((root / RESULTS).rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ReportError(
                f"{path}: not JSON ({error}); expected a benchmark's result"
            ) from None
        rows = content.get("rows") if isinstance(content, dict) else None
        if isinstance(rows, list) and rows and key in rows[0]:
            run = Run.checked(path.relative_to(root).as_posix(), content)
            runs += [run] if "--sweep" not in content["command"] else []
    return runs
