"""`sparrow bench all`: what the pages quote, on one GPU at one commit, in parts with a limit."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.common import NGRAM, STOCK, STOCK_16, read_result
from sparrow_sglang.command_line import OneLineParser, table
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.processes import exit_on_sigterm

CODER, INT4 = "qwen2.5-coder-1.5b", "qwen3-1.7b-int4.json"
LONGEST_S = 590
"""A part with a longer limit is run side by side, or a few sides at a time."""
SAME = ("device", "commit", "packages")

DESCRIPTION = """\
Make the results that the pages quote, by part: a command of `sparrow bench` each, with the seconds
that an H200 takes by side, engine starts included. A part ends after twice as long, 590 s at most.
Result files PART.json, or PART.SIDES.json of some sides, go to --folder; --merge joins the latter.
SPARROW_COMMIT names the commit where git is absent.
"""
EXAMPLES = """\
examples:
  sparrow bench all --list
  sparrow bench all --part steps-8b rollout-8b-3k --folder results
  sparrow bench all --part rollout-8b-8k --sides sparrow stock --folder results
  sparrow bench all --merge --folder results
"""


class Part(NamedTuple):
    """Words of `sparrow bench`, and expected seconds by side; "" where there are no sides."""

    words: str
    seconds: Mapping[str, int]


def _three(ours: int, stock: int) -> dict[str, int]:
    return {BACKEND: ours, STOCK: stock, STOCK_16: stock}


_QUICK = """ --engine-args '{"disable_prefill_cuda_graph": true}'"""
_LOSSLESS = "--drafts 8 --acceptance-rate 0.94"
_ROUNDS = "--schedules drafts --drafts 8 0+3 6+2 --acceptance-rate 0.94 --prefills 0 --repeats 2"
PARTS = {
    "rollout-8b-3k": Part(
        f"rollout --model qwen3-8b --mean-tokens 3072 --max-tokens 8192 {_LOSSLESS}{_QUICK}",
        _three(110, 125),
    ),
    "rollout-8b-8k": Part(
        f"rollout --model qwen3-8b --mean-tokens 8192 --max-tokens 32768 {_LOSSLESS}{_QUICK}",
        _three(250, 380),
    ),
    "rollout-1.7b-4k": Part(
        f"rollout --model qwen3-1.7b --mean-tokens 4096 --max-tokens 16384 {_LOSSLESS}{_QUICK}",
        _three(95, 110),
    ),
    "rollout-coder": Part(
        f"rollout --model-path {CODER} --sizes 1 16 64 --drafts 8{_QUICK}",
        _three(90, 100) | {NGRAM: 100},
    ),
    "steps-8b": Part(
        "step --models qwen3-8b --cases 1x1024 4x4096 16x8192 8x32768 64x1024 64x4096"
        f" {_ROUNDS}{_QUICK}",
        _three(220, 150),
    ),
    "sparse-1.7b": Part(
        f"step --models qwen3-1.7b --schedules qwen3-1.7b-0.86 {INT4} --cases 16x32768"
        f" --prefills 0 --repeats 2{_QUICK}",
        _three(130, 70),
    ),
    "sparse-coder": Part(
        f"step --models {CODER} --schedules {CODER}-int4-0.86 --cases 16x30720 --prefills 0"
        f" --repeats 2{_QUICK}",
        _three(60, 60),
    ),
    "steps-30b": Part(
        f"step --models qwen3-30b-a3b --cases 1x4096 16x8192 {_ROUNDS}{_QUICK}",
        _three(130, 100),
    ),
    "prefill-8b": Part(
        "step --models qwen3-8b --cases 1x1024 16x4096 64x1024 --schedules drafts --drafts 8"
        f" --repeats 1{_QUICK}",
        _three(80, 75),
    ),
    "attention": Part("attention", {"": 240}),
    "distill": Part(f"distill --model-path {CODER}", {"": 240}),
}


def limit_s(part: Part, sides: Sequence[str]) -> int:
    return min(LONGEST_S, 2 * sum(part.seconds[side] for side in sides))


def run_part(name: str, sides: Sequence[str], folder: Path, model_path: Path | None) -> bool:
    """Run a part in `folder`, so that results name no folder of this machine; whether it ended
    well. With `sides`, of those only."""
    part = PARTS[name]
    every = tuple(part.seconds)
    chosen = tuple(side for side in every if side in sides) if any(every) and sides else every
    if not chosen:
        raise ValueError(f"--sides {' '.join(sides)}: expected some of {' '.join(every)} in {name}")
    file = f"{name}.json" if chosen == every else f"{name}.{'+'.join(chosen)}.json"
    words = [*shlex.split(part.words), "--out", file]
    words += ["--sides", *chosen] if any(every) else []
    links = {INT4: Path(__file__).parent / "schedules" / INT4}
    if f"--model-path {CODER}" in part.words:
        if model_path is None:
            raise ValueError(f"--model-path: expected the folder of {CODER} for {name}")
        links[CODER] = model_path.absolute()
    for link, target in links.items():
        Path(folder, link).unlink(missing_ok=True)
        Path(folder, link).symlink_to(target)
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "bench", *words]
    limit = limit_s(part, chosen)
    print(f"{name}: sparrow bench {shlex.join(words)} (at most {limit} s)", flush=True)
    process = subprocess.Popen(command, cwd=folder)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {limit} s", file=sys.stderr, flush=True)
    finally:
        process.terminate()
        process.wait()
        for link in links:
            Path(folder, link).unlink()
    return process.returncode == 0


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """One result of several that are of the same device, commit and packages: rows one behind the
    other, with the commands of all. Raises `InputError` if they differ."""
    first, *others = contents = [read_result(file) for file in files]
    for file, content in zip(files[1:], others, strict=True):
        for field in SAME:
            if content[field] != first[field]:
                raise InputError(
                    f"{file}: {field} is {content[field]!r}, expected {first[field]!r} as in"
                    f" {files[0]}"
                )
    rows = [row for content in contents for row in content["rows"]]
    return first | {"command": "; ".join(each["command"] for each in contents), "rows": rows}


def merge_all(folder: Path) -> None:
    """Join the files of some sides, into that of the part."""
    for name in PARTS:
        files = sorted(folder.glob(f"{name}.*.json"))
        if not files:
            continue
        whole = folder / f"{name}.json"
        write_json(whole, merged([whole, *files] if whole.exists() else files))
        for file in files:
            file.unlink()
        print(f"{whole}: {len(read_result(whole)['rows'])} rows")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sparrow bench all",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the parts, and exit")
    add("--merge", action="store_true", help="join result files of some sides, and exit")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--sides", nargs="+", default=[], help="sides of the parts that have some; default: all")
    add("--folder", type=Path, default=Path("results"), help="of result files (default: results)")
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
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.merge:
        merge_all(options.folder)
        return 0
    exit_on_sigterm()
    ran = [
        run_part(name, options.sides, options.folder, options.model_path) for name in options.part
    ]
    return int(not all(ran))
