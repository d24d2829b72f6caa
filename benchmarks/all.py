"""`sparrow bench all`: what the pages quote, on one GPU at one commit, in parts with a limit."""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.common import NGRAM, STOCK, STOCK_16, bench_parser, read_result
from sparrow_sglang.command_line import table
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.processes import exit_on_sigterm

CODER, INT4 = "qwen2.5-coder-1.5b", "qwen3-1.7b-int4.json"
LONGEST_S = 590
SAME = ("device", "commit", "packages")

DESCRIPTION = """\
Make the results that the pages quote, by part: a command of `sparrow bench` each, with the seconds
that an H200 takes by side, cold starts of engines included. A part ends after twice as long, 590 s
at most, and keeps the rows that it has. Run one with a longer limit a side at a time.
Result files PART.json, or PART.SIDES.json of some sides, go to --folder; --merge joins the latter.
SPARROW_COMMIT names the commit where git is absent.
"""
EXAMPLES = """\
  sparrow bench all --list
  sparrow bench all --part rollout-8b-8k --sides sparrow stock --folder results
  sparrow bench all --merge --folder results
"""


class Part(NamedTuple):
    """Words of `sparrow bench`, and expected seconds by side; "" where there are no sides."""

    words: str
    seconds: Mapping[str, int]


def _three(words: str, ours: int, stock: int, **others: int) -> Part:
    return Part(words, {BACKEND: ours, STOCK: stock, STOCK_16: stock, **others})


_8B, _1B = "rollout --model qwen3-8b", "rollout --model qwen3-1.7b"
_ROUNDS = "--schedules drafts --drafts 8 0+3 0+8 1+2 3+5"
# Steps are the same without graphs of prefills, and engines start earlier.
_STEPS = """--prefills 0 --repeats 2 --engine-args '{"disable_prefill_cuda_graph": true}'"""
_STEPS_TP2 = _STEPS.replace("{", '{"tp_size": 2, ')
_TP2 = "step --models qwen3-8b --cases 1x4096 8x32768 64x1024"
_8B_CASES = "1x1024 4x4096 16x8192 8x32768 64x1024 64x4096"
_SPARSE_CASES = "1x1024 1x32768 4x32768 16x32768"
_SPARSE = f"step --models qwen3-1.7b --schedules qwen3-1.7b-0.86 {INT4} --cases {_SPARSE_CASES}"
_SPARSE_8B = "step --models qwen3-8b --schedules qwen3-8b-0.86 --cases 1x32768 16x32768"
_SPARSE_CODER = (
    f"step --models {CODER} --schedules {CODER}-int4-0.86 --cases 1x14336 16x30720 64x8192"
)
_HYBRID = "step --models qwen3.5-2b --schedules fixed-2048 --cases 1x32768 16x32768"
_PREFILLS = "--cases 1x1024 16x4096 64x1024 --schedules drafts --drafts 8 --repeats 1"
PARTS = {
    "rollout-8b-3k": _three(f"{_8B} --mean-tokens 3072 --max-tokens 8192 --drafts 8", 225, 140),
    "rollout-8b-8k": _three(f"{_8B} --mean-tokens 8192 --max-tokens 32768 --drafts 8", 350, 455),
    "rollout-1.7b-4k": _three(f"{_1B} --mean-tokens 4096 --max-tokens 16384 --drafts 8", 180, 130),
    "rollout-coder": _three(
        f"rollout --model-path {CODER} --sequences 1 16 64 --drafts 8", 130, 115, **{NGRAM: 200}
    ),
    "steps-8b": _three(f"step --models qwen3-8b --cases {_8B_CASES} {_ROUNDS} {_STEPS}", 290, 115),
    "steps-8b-tp2": _three(f"{_TP2} {_ROUNDS} {_STEPS_TP2}", 225, 80),
    "sparse-1.7b": _three(f"{_SPARSE} {_STEPS}", 265, 110),
    "sparse-8b": _three(f"{_SPARSE_8B} {_STEPS}", 130, 110),
    "sparse-coder": _three(f"{_SPARSE_CODER} {_STEPS}", 120, 100),
    "sparse-hybrid": _three(f"{_HYBRID} {_STEPS}", 140, 120),
    "steps-30b": _three(
        f"step --models qwen3-30b-a3b --cases 1x4096 16x8192 {_ROUNDS} {_STEPS}", 220, 140
    ),
    "prefill-8b": _three(f"step --models qwen3-8b {_PREFILLS}", 160, 110),
    "attention": Part("attention", {"": 240}),
    "distill": Part(f"distill --model-path {CODER}", {"": 415}),
}


def limit_s(part: Part, sides: Sequence[str]) -> int:
    return min(LONGEST_S, 2 * sum(part.seconds[side] for side in sides))


def chosen_sides(name: str, sides: Sequence[str]) -> tuple[str, ...]:
    """Those of `sides` that the part has; without `sides`, or where a part has none, all."""
    every = tuple(PARTS[name].seconds)
    chosen = tuple(side for side in every if side in sides) if any(every) and sides else every
    if not chosen:
        raise InputError(f"--sides {' '.join(sides)}: expected some of {' '.join(every)} in {name}")
    return chosen


def run_part(name: str, chosen: Sequence[str], folder: Path, model_path: Path | None) -> bool:
    """Run the `chosen` sides of a part; whether it ended well, or at its limit with some rows. It
    runs beside links in a folder of its own, so that results name no folder of this machine."""
    part = PARTS[name]
    file = f"{name}.json" if len(chosen) == len(part.seconds) else f"{name}.{'+'.join(chosen)}.json"
    words = [*shlex.split(part.words), "--out", f"../{file}"]
    words += ["--sides", *chosen] if any(chosen) else []
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "bench", *words]
    limit, cut = limit_s(part, chosen), False
    print(f"{name}: sparrow bench {shlex.join(words)} (at most {limit} s)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        Path(beside, INT4).symlink_to(Path(__file__).parent / "schedules" / INT4)
        if model_path is not None:
            Path(beside, CODER).symlink_to(model_path.absolute())
        process = subprocess.Popen(command, cwd=beside)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            cut = True
        finally:
            process.terminate()
            process.wait()
    if cut:
        rows = read_result(folder / file)["rows"] if Path(folder, file).exists() else []
        print(f"{name}: cut after {limit} s, with {len(rows)} rows", file=sys.stderr, flush=True)
        return bool(rows)
    return process.returncode == 0


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """One result of several that are of the same device, commit and packages: rows one behind the
    other, those of a side by the last file that has it, with the commands of all. Raises
    `InputError` if they differ, or if the last file of a side has fewer rows, as of a part that was
    cut."""
    contents, rows = [read_result(file) for file in files], list[dict[str, Any]]()
    first = contents[0]
    for file, content in zip(files, contents, strict=True):
        for field in SAME:
            if content[field] != first[field]:
                raise InputError(
                    f"{file}: {field} is {content[field]!r}, expected {first[field]!r} as in"
                    f" {files[0]}"
                )
        before, measured = (
            Counter(row.get("side") for row in of) for of in (rows, content["rows"])
        )
        if cut := [side for side, count in measured.items() if count < before[side]]:
            raise InputError(
                f"{file}: {measured[cut[0]]} rows of side {cut[0]}, expected {before[cut[0]]} as"
                " measured before, or more; delete it, or measure again"
            )
        rows = [row for row in rows if row.get("side") not in measured] + content["rows"]
    return first | {"command": "; ".join(str(each["command"]) for each in contents), "rows": rows}


def merge_all(folder: Path) -> None:
    """Join the files of some sides, into that of the part. Raises `InputError`."""
    parts = {name: sorted(folder.glob(f"{name}.*.json")) for name in PARTS}
    if not any(parts.values()):
        raise InputError(f"--folder {folder}: nothing to merge; expected files PART.SIDES.json")
    for name, files in parts.items():
        whole = folder / f"{name}.json"
        if files:
            write_json(whole, merged([whole, *files] if whole.exists() else files))
        for file in files:
            file.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("all", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--list", action="store_true", help="print the parts, and exit")
    add("--merge", action="store_true", help="join result files of some sides, and exit")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--sides", nargs="+", default=[], help="sides of the parts that have some (default: all)")
    add("--folder", type=Path, default=Path("results"), help="of result files")
    add("--model-path", type=Path, help=f"folder of {CODER} with its weights, for its parts")
    return parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.list:
        rows = [("part", "limit s", "seconds by side", "sparrow bench")]
        for name, part in PARTS.items():
            seconds = ", ".join(f"{side} {s}".strip() for side, s in part.seconds.items())
            rows.append((name, str(limit_s(part, list(part.seconds))), seconds, part.words))
        print(table(rows))
        return 0
    if options.merge:
        merge_all(options.folder)
        return 0
    # Before the first of them runs for minutes.
    sides = {name: chosen_sides(name, options.sides) for name in options.part}
    real = [name for name in options.part if f"--model-path {CODER}" in PARTS[name].words]
    folder, model_path = options.folder, options.model_path
    if real and not (model_path and Path(model_path, "config.json").is_file()):
        given = f" {model_path}" if model_path else ""
        raise InputError(
            f"--model-path{given}: expected the folder of {CODER} for {' '.join(real)}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--folder {folder}: cannot be written ({error.strerror})") from None
    exit_on_sigterm()
    return int(not all([run_part(name, sides[name], folder, model_path) for name in sides]))
