"""`sparrow bench step`: time of one decode step of stock SGLang, dense and sparse.

Each (model, backend) runs in a process of its own with CUDA graphs and the overlap scheduler on.
A step's time is the difference of two generations that share their prompts through the prefix
cache, over the difference of their lengths, so that prefill and request handling cancel.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.gpu_times import copy_bandwidth
from sparrow_sglang.benchmarks.options import (
    add_engine_arguments,
    benchmark_parser,
    prepare_out,
    require_cuda,
)
from sparrow_sglang.command_line import count
from sparrow_sglang.planning.cost_model import ModelShape, step_costs
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.provenance import provenance
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.report.step_pairs import pair_rows
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule, load_schedule

# Named in full because each (model, backend) starts it again, however it was started itself.
MODULE = "sparrow_sglang.benchmarks.steps.decode_step"
MODELS = Path(__file__).parents[1] / "models"
SHORT, LONG = 16, 144
CONTEXT = 40960

DESCRIPTION = """\
Time one decode step of stock SGLang, dense and with sparrow, in the shapes of real models with
random weights (nothing is downloaded). The floor is the bytes that a step must read over the copy
bandwidth measured in the same run.
"""
EXAMPLES = """\
  sparrow bench step                                       Qwen3-1.7B, 16 sequences of 32K tokens
  sparrow bench step --cases 16x32768 16x16384 16x8192 16x496
  sparrow bench step --backends sparrow --schedules fixed-1024 --cases 16x32768 8x32768
  sparrow bench step --models qwen3-4b,qwen3-8b --out larger.json
  sparrow bench step --cases fill:1024-32768:900000        sequences of mixed length in a full pool
"""
CASES = """\
BATCHxLENGTH: BATCH sequences of LENGTH cached tokens; fill:LOW-HIGH:TOKENS: as many sequences, of
random length from LOW to HIGH, as fit into TOKENS cached tokens
"""


def batch_lengths(case: str) -> list[int]:
    """Sequence lengths of a case: `BATCHxLENGTH`, or `fill:LOW-HIGH:TOKENS` drawn uniformly.

    Raises `ValueError` on another form, and on lengths that a step cannot be timed at.
    """
    same = re.fullmatch(r"(\d+)x(\d+)", case, re.ASCII)
    mixed = re.fullmatch(r"fill:(\d+)-(\d+):(\d+)", case, re.ASCII)
    if same:
        batch, low = (int(number) for number in same.groups())
        high, tokens = low, batch * low
    elif mixed:
        low, high, tokens = (int(number) for number in mixed.groups())
    else:
        raise ValueError(
            f"case {case!r}: expected BATCHxLENGTH or fill:LOW-HIGH:TOKENS, e.g. 16x32768 or"
            " fill:1024-32768:900000"
        )
    if not LONG < low <= high <= CONTEXT:
        raise ValueError(
            f"case {case!r}: expected lengths of {LONG + 1} to {CONTEXT} tokens, the shorter first;"
            f" the last {LONG} tokens of a length are generated"
        )
    if same:
        if not batch:
            raise ValueError(f"case {case!r}: expected 1 or more sequences")
        return [low] * batch
    if tokens <= high:
        raise ValueError(
            f"case {case!r}: expected room for more than one sequence of {high} tokens"
        )
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) + high < tokens:
        lengths.append(draw.randint(low, high))
    return lengths


def model_shape(model: str) -> ModelShape:
    """Shapes of one of the folders of `models/`."""
    return ModelShape.from_config(json.loads((MODELS / model / "config.json").read_text()))


def step_bytes(shape: ModelShape, lengths: list[int], schedule: BudgetSchedule | None) -> int:
    """Bytes that one decode step must read: the weights once, KV and landmarks per sequence."""
    return round(float(step_costs(shape, lengths, len(lengths), schedule).bytes.sum()))


def time_steps(engine: Any, lengths: list[int], vocab_size: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a decode step at about `lengths` cached tokens."""
    draw = random.Random(1)
    prompts = [
        [draw.randrange(1000, vocab_size - 1000) for _ in range(length - LONG)]
        for length in lengths
    ]

    def generate(new_tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0},
        )
        return time.perf_counter() - start

    prefill_s = generate(1)
    generate(SHORT)
    steps_ms = [(generate(LONG) - generate(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(repeats)]
    engine.flush_cache()
    return {
        "batch": len(lengths),
        "cached_tokens": sum(lengths),
        "step_ms": statistics.median(steps_ms),
        "step_ms_all": steps_ms,
        "prefill_s": prefill_s,
    }


def run_engine(options: argparse.Namespace) -> None:
    """Measure one (model, backend) and write its rows to `options.out`."""
    bandwidth = copy_bandwidth()
    import sglang
    import torch

    torch.cuda.empty_cache()
    shape = model_shape(options.model)
    arguments: dict[str, Any] = {
        "model_path": str(MODELS / options.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": options.backend,
        "page_size": PAGE_SIZE,
        "context_length": CONTEXT,
        "mem_fraction_static": options.memory_fraction,
        "cuda_graph_max_bs_decode": max(len(batch_lengths(case)) for case in options.cases),
        "max_running_requests": max(len(batch_lengths(case)) for case in options.cases),
        "log_level": "error",
        **engine_arguments(options.engine_args),
    }
    schedule = None
    if options.backend == "sparrow":
        arguments["sparrow_schedule"] = options.schedule
        schedule = load_schedule(options.schedule, PAGE_SIZE)
    rows = []
    with sglang.Engine(**arguments) as engine:
        for case in options.cases:
            lengths = batch_lengths(case)
            row = {"model": options.model, "backend": options.backend, "case": case}
            row |= time_steps(engine, lengths, shape.vocab_size, options.repeats)
            bytes_read = step_bytes(shape, lengths, schedule)
            row |= {
                "schedule": options.schedule if schedule else None,
                "bytes": bytes_read,
                "bandwidth_tb_s": bandwidth / 1e12,
                "floor_ms": bytes_read / bandwidth * 1e3,
                "tokens_per_s": len(lengths) / row["step_ms"] * 1e3,
            }
            print(
                f"{options.model:12} {options.backend:11} {case:22} {row['step_ms']:7.2f} ms"
                f"  floor {row['floor_ms']:6.2f}  {row['tokens_per_s']:8.0f} tok/s",
                flush=True,
            )
            rows.append(row)
    Path(options.out).write_text(json.dumps(rows))


def speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sparse against the fastest dense backend of the same model and case."""
    return [
        {key: pair.sparse[key] for key in ("model", "case", "schedule", "floor_ms")}
        | {
            "dense_ms": pair.dense["step_ms"],
            "sparse_ms": pair.sparse["step_ms"],
            "speedup": pair.speedup,
        }
        for pair in pair_rows([Run("", {"device": "", "rows": rows})])
        if pair.dense
    ]


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("step", DESCRIPTION, EXAMPLES, "decode_step.json")
    known = ", ".join(sorted(folder.name for folder in MODELS.iterdir()))
    parser.add_argument(
        "--models", default="qwen3-1.7b", help=f"comma-separated, of {known} (default: %(default)s)"
    )
    parser.add_argument(
        "--backends",
        default="flashinfer,sparrow",
        help="of SGLang, e.g. fa3 (default: %(default)s)",
    )
    parser.add_argument(
        "--cases", nargs="+", default=["16x32768"], metavar="CASE", help=CASES.strip()
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["{model}-0.86"],
        metavar="SCHEDULE",
        help="for sparrow: shipped names, .json files or fixed-<tokens>; {model} is filled in"
        " (default: {model}-0.86)",
    )
    parser.add_argument("--repeats", type=count, default=3, help="the median of them counts")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.88, help="SGLang's mem_fraction_static"
    )
    add_engine_arguments(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def _check(options: argparse.Namespace) -> float:
    """GB that the largest case keeps in memory; `ValueError` names an option that cannot work."""
    most = 0.0
    engine_arguments(options.engine_args)
    known = sorted(folder.name for folder in MODELS.iterdir())
    for model in options.models.split(","):
        if model not in known:
            raise ValueError(f"--models {model!r}: expected some of {', '.join(known)}")
        for schedule in options.schedules:
            load_schedule(schedule.replace("{model}", model), PAGE_SIZE)
        for case in options.cases:
            # A dense step reads all that is in memory.
            most = max(most, step_bytes(model_shape(model), batch_lengths(case), None) / 1e9)
    return most


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 1 if a run failed, 2 without options or a GPU."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(words)
    try:
        memory_gb = _check(options)
    except ValueError as error:
        parser.error(str(error))
    require_cuda(parser, memory_gb, "the largest case")
    if options.one:
        options.model, options.backend, options.schedule = options.one.split(",")
        run_engine(options)
        return 0
    prepare_out(parser, options.out)
    rows: list[dict[str, Any]] = []
    failed = False
    for model, backend in itertools.product(options.models.split(","), options.backends.split(",")):
        schedules = [name.replace("{model}", model) for name in options.schedules]
        # The dense backends ignore the schedule.
        for schedule in schedules if backend == "sparrow" else schedules[:1]:
            part = options.out.with_suffix(f".{model}.{backend}.part")
            command = [sys.executable, "-m", MODULE, *words]
            command += ["--one", f"{model},{backend},{schedule}", "--out", str(part)]
            if subprocess.run(command).returncode or not part.exists():
                print(f"{model} {backend} {schedule}: failed, left out", flush=True)
                failed = True
                continue
            rows += json.loads(part.read_text())
            part.unlink()
            write_json(options.out, {**provenance(), "rows": rows, "speedups": speedups(rows)})
    for row in speedups(rows):
        print(
            f"{row['model']:12} {row['schedule']:16} {row['case']:22} {row['dense_ms']:7.2f} ->"
            f" {row['sparse_ms']:6.2f} ms  {row['speedup']:5.2f}x  (floor {row['floor_ms']:.2f})"
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
