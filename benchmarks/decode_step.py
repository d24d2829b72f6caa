"""Time of one decode step of stock SGLang, dense and sparse, on random weights.

Each (model, backend) runs in a process of its own with CUDA graphs and the overlap scheduler on.
A step's time is the difference of two generations that share their prompts through the prefix
cache, over the difference of their lengths, so that prefill and request handling cancel.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.record import copy_bandwidth, provenance, write_result
from sparrow_sglang.benchmarks.roofline import ModelShape, dense_step_bytes, sparse_step_bytes
from sparrow_sglang.schedule import load_schedule

MODELS = Path(__file__).parent / "models"
SHORT, LONG = 16, 144
PAGE_SIZE = 16


def batch_lengths(case: str) -> list[int]:
    """Sequence lengths of a case: `BATCHxLENGTH`, or `fill:LOW-HIGH:TOKENS` drawn uniformly."""
    if not case.startswith("fill:"):
        batch, length = case.split("x")
        return [int(length)] * int(batch)
    _, span, tokens = case.split(":")
    low, high = (int(end) for end in span.split("-"))
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) + high < int(tokens):
        lengths.append(draw.randint(low, high))
    return lengths


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
    folder = MODELS / options.model
    shape = ModelShape.from_config(folder)
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": options.backend,
        "page_size": PAGE_SIZE,
        "context_length": 40960,
        "mem_fraction_static": options.memory_fraction,
        "cuda_graph_max_bs_decode": max(len(batch_lengths(case)) for case in options.cases),
        "max_running_requests": max(len(batch_lengths(case)) for case in options.cases),
        "log_level": "error",
        **json.loads(options.engine_args),
    }
    schedule = load_schedule(options.schedule, PAGE_SIZE)
    if options.backend == "sparrow":
        arguments["sparrow_schedule"] = options.schedule
    rows = []
    with sglang.Engine(**arguments) as engine:
        for case in options.cases:
            lengths = batch_lengths(case)
            row = {"model": options.model, "backend": options.backend, "case": case}
            row |= time_steps(engine, lengths, shape.vocab_size, options.repeats)
            bytes_read = (
                sparse_step_bytes(shape, lengths, schedule)
                if options.backend == "sparrow"
                else dense_step_bytes(shape, lengths)
            )
            row |= {
                "schedule": options.schedule if options.backend == "sparrow" else None,
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
    table = []
    for row in rows:
        if row["backend"] != "sparrow":
            continue
        dense = [
            other["step_ms"]
            for other in rows
            if other["backend"] != "sparrow"
            and (other["model"], other["case"]) == (row["model"], row["case"])
        ]
        if dense:
            table.append(
                {
                    "model": row["model"],
                    "case": row["case"],
                    "schedule": row["schedule"],
                    "dense_ms": min(dense),
                    "sparse_ms": row["step_ms"],
                    "floor_ms": row["floor_ms"],
                    "speedup": min(dense) / row["step_ms"],
                }
            )
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-1.7b", help="comma-separated folders of models/")
    parser.add_argument("--backends", default="flashinfer,sparrow")
    parser.add_argument("--cases", nargs="+", default=["16x32768"], help=batch_lengths.__doc__)
    parser.add_argument("--schedules", nargs="+", default=["{model}-0.86"], metavar="SCHEDULE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-fraction", type=float, default=0.88)
    parser.add_argument(
        "--engine-args", default="{}", help="JSON of further sglang.Engine arguments"
    )
    parser.add_argument("--out", type=Path, default=Path("decode_step.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        options.model, options.backend, options.schedule = options.one.split(",")
        run_engine(options)
        return
    rows: list[dict[str, Any]] = []
    for model, backend in itertools.product(options.models.split(","), options.backends.split(",")):
        schedules = [name.format(model=model) for name in options.schedules]
        # The dense backends ignore the schedule.
        for schedule in schedules if backend == "sparrow" else schedules[:1]:
            part = options.out.with_suffix(f".{model}.{backend}.part")
            command = [sys.executable, "-m", __spec__.name, *(argv or sys.argv[1:])]
            command += ["--one", f"{model},{backend},{schedule}", "--out", str(part)]
            if subprocess.run(command).returncode or not part.exists():
                print(f"{model} {backend} {schedule}: failed, left out", flush=True)
                continue
            rows += json.loads(part.read_text())
            part.unlink()
            write_result(options.out, {**provenance(), "rows": rows, "speedups": speedups(rows)})
    for row in speedups(rows):
        print(
            f"{row['model']:12} {row['schedule']:16} {row['case']:22} {row['dense_ms']:7.2f} ->"
            f" {row['sparse_ms']:6.2f} ms  {row['speedup']:5.2f}x  (floor {row['floor_ms']:.2f})"
        )


if __name__ == "__main__":
    main()
