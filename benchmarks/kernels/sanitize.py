"""Sparse decode under NVIDIA's compute-sanitizer.

`python -m sparrow_sglang.benchmarks.kernels.sanitize` runs it.

In: workloads and the sanitizer's tools. Out: errors that each tool has found, as JSON. A workload
is a process of its own, small enough for the sanitizer: the step's kernels with random lengths,
aborts and retraction, launched one by one or as replayed CUDA graphs, or a whole small engine.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.kernels.sanitize_workloads import WORKLOADS
from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, require_cuda
from sparrow_sglang.provenance import provenance

MEMORY_GB = 8.0
TOOLS = ("memcheck", "racecheck", "initcheck")
_SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
)
_PASSED = "workload passed"

DESCRIPTION = """\
Run small workloads under compute-sanitizer and count what it finds. memcheck looks for accesses out
of bounds, racecheck for hazards in shared memory, initcheck for reads of memory never written.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.kernels.sanitize
  python -m sparrow_sglang.benchmarks.kernels.sanitize --workloads engine --tools memcheck
"""


def environment(workload: str) -> dict[str, str]:
    """Of the workload's process."""
    ours = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    if workload == "kernels":
        # One allocation per tensor: in torch's cache, one that is exceeded borders on another. A
        # captured graph needs the cache.
        ours["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return dict(os.environ) | ours


def run(sanitizer: str, tool: str, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload under one tool; `errors` is None where the tool said nothing."""
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    command += ["--launch-timeout", "300"]
    command += [
        sys.executable,
        "-m",
        "sparrow_sglang.benchmarks.kernels.sanitize_workloads",
        workload,
    ]
    log = options.out.with_suffix(f".{workload}.{tool}.log")
    start = time.monotonic()
    with log.open("w") as file:
        try:
            code: int | None = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(workload),
                timeout=options.limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    text = log.read_text(errors="replace")
    found = [int(number) for pattern in _SUMMARIES for number in pattern.findall(text)]
    return {
        "workload": workload,
        "tool": tool,
        "errors": sum(found) if found else None,
        "processes": len(found),
        "passed": _PASSED in text,
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
    }


def line(row: dict[str, Any]) -> str:
    errors = "no summary" if row["errors"] is None else f"{row['errors']} errors"
    state = "passed" if row["passed"] else f"did not pass (exit code {row['exit_code']})"
    return f"{row['tool']:10} {row['workload']:8} {errors}, workload {state}, {row['seconds']} s"


def is_clean(row: dict[str, Any]) -> bool:
    return row["errors"] == 0 and bool(row["passed"])


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("kernels.sanitize", DESCRIPTION, EXAMPLES, "sanitize.json")
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    add("--tools", nargs="+", default=list(TOOLS[:2]), choices=TOOLS)
    add("--sanitizer", help="path of compute-sanitizer (default: of PATH or /usr/local/cuda/bin)")
    add("--limit-s", type=float, default=540.0, help="seconds for one workload under one tool")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; the exit code is 1 if anything was found or a workload failed."""
    parser = _parser()
    options = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    known = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
    candidates = [options.sanitizer] if options.sanitizer else known
    sanitizer = next((path for name in candidates if (path := shutil.which(name))), None)
    if sanitizer is None:
        parser.error(
            f"{' and '.join(candidates)} not found: expected NVIDIA's compute-sanitizer, a part of"
            " the CUDA toolkit; name it by --sanitizer"
        )
    require_cuda(parser, MEMORY_GB, "a small engine")
    prepare_out(parser, options.out)
    rows = []
    for workload in options.workloads:
        for tool in options.tools:
            rows.append(run(sanitizer, tool, workload, options))
            write_json(options.out, {**provenance(), "sanitizer": sanitizer, "rows": rows})
            print(line(rows[-1]), flush=True)
    return int(not all(map(is_clean, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
