"""Break the code in known ways, one at a time, and see that the tests notice.

    .venv/bin/python tools/mutants.py [WORD]

tests/mutants.toml lists the breaks: a file, the text that is replaced, once, by another one, and
the tests that must fail for it. WORD chooses those whose name or file holds it. Exits with 1 if
tests pass although the code is broken, or if a text is not there any more.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def outcome(file: Path, old: str, new: str, tests: list[str]) -> str:
    """What the tests make of this break: "noticed", or what is wrong with the tests."""
    code = file.read_text("utf-8")
    if code.count(old) != 1:
        return f"OUT OF DATE: the text occurs {code.count(old)} times in the file"
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
    try:
        file.write_text(code.replace(old, new), "utf-8")
        status = subprocess.run(pytest, cwd=ROOT, capture_output=True).returncode
    finally:
        file.write_text(code, "utf-8")
    # 1 means that tests ran and one of them failed.
    return {0: "SURVIVED", 1: "noticed"}.get(status, f"ERROR: pytest ended with {status}")


def main(words: list[str]) -> int:
    listed = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))["mutant"]
    chosen = [each for each in listed if all(w in each["name"] + each["file"] for w in words)]
    missed = 0
    for each in chosen:
        result = outcome(ROOT / each["file"], each["old"], each["new"], each["tests"])
        missed += result != "noticed"
        print(f"{result:9}  {each['file']}: {each['name']}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return int(missed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
