"""Time to send weights to a Ray engine.

`python -m sparrow_sglang.benchmarks.training.weight_sync` runs it.

The benchmark runs `sparrow train` once per transfer method, with the trainer on one GPU and an
engine on another of this machine. Out: seconds of sync per step and tokens/s of the rollouts, as
JSON.
"""

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparrow_sglang.benchmarks.options import (
    MODELS,
    benchmark_parser,
    known_models,
    prepare_out,
    settings,
)
from sparrow_sglang.benchmarks.processes import ProcessFailed, free_port, log_end, logged_process
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.training.parallel_runs import toml_lines
from sparrow_sglang.command_line import count
from sparrow_sglang.models import embedded_model, model_folder
from sparrow_sglang.run_folder import METRICS_FILE

TRANSFERS = ("broadcast", "object_store")
CLUSTER_START_S = 120.0

DESCRIPTION = """\
Train a few steps with one engine on Ray, and measure how long the weights take to get there. One
GPU is the trainer's, the other the engine's. A model of models/ has random weights.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.weight_sync --trainer-gpu 0 --engine-gpu 1
  python -m sparrow_sglang.benchmarks.training.weight_sync --model qwen3-1.7b --steps 20
"""


def run_config(options: argparse.Namespace, model: str, transfer: str, folder: Path) -> Any:
    """The run's configuration, to be written as its TOML file."""
    server_args: dict[str, Any] = {"disable_prefill_cuda_graph": True, "grammar_backend": "none"}
    if torch.cuda.is_available():
        server_args |= {"mem_fraction_static": 0.8, "max_running_requests": 128}
    else:
        server_args |= {"max_total_tokens": 8192, "max_running_requests": 8}
    return {
        "run_dir": str(folder / transfer),
        "steps": options.steps,
        "task": {"name": "story", "reward_workers": 2},
        "model": {"path": model},
        "engine": {
            "kind": "ray",
            "num_engines": 1,
            "schedule": options.schedule,
            "transfer": transfer,
            "server_args": server_args,
        },
        "rollout": {
            "prompts_per_step": options.prompts,
            "samples_per_prompt": 8,
            "max_prompt_tokens": 256,
            "max_new_tokens": options.new_tokens,
        },
        "mismatch": {"sequences": 0},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "logging": {"tensorboard": False},
    }


def prepare_model(name: str, folder: Path) -> str:
    """Path or name of the model to train; shapes of models/ get random weights and a tokenizer."""
    if name not in known_models():
        return name
    shapes = MODELS / name
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    target = folder / name
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(shapes), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(embedded_model()).save_pretrained(target)
    return str(target)


@contextmanager
def cluster(gpu: str, log: Path) -> Iterator[dict[str, str]]:
    """Run a Ray head with one GPU, or without a GPU if `gpu` is empty; yield the environment
    variables with which clients find it."""
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]
    command += [f"--num-gpus={int(bool(gpu))}"]
    # By default Ray's workers have a low priority, at which engines starve beside a busy trainer.
    ours = {"CUDA_VISIBLE_DEVICES": gpu, "RAY_worker_niceness": "0"}
    # Ray's default depends on whether an earlier run has left a token in the user's folder.
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with logged_process(command, log, os.environ | ours | access) as process:
        deadline = time.monotonic() + CLUSTER_START_S
        while "runtime started" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed(f"Ray did not start:\n{log_end(log)}")
            time.sleep(0.2)
        yield access | {"RAY_ADDRESS": f"127.0.0.1:{port}"}


def run(options: argparse.Namespace, model: str, transfer: str, folder: Path) -> dict[str, Any]:
    """One training run; raises `ProcessFailed`."""
    on_gpu = torch.cuda.is_available()
    config = folder / f"{transfer}.toml"
    values = run_config(options, model, transfer, folder)
    config.write_text("".join(f"{line}\n" for line in toml_lines(values)), "utf-8")
    log = options.out.with_suffix(f".{transfer}.log")
    engine_gpu = options.engine_gpu if on_gpu else ""
    with cluster(engine_gpu, options.out.with_suffix(f".{transfer}.ray.log")) as access:
        ours = access | {"CUDA_VISIBLE_DEVICES": options.trainer_gpu if on_gpu else ""}
        command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(config)]
        with logged_process(command, log, os.environ | ours) as process:
            try:
                status = f"status {process.wait(options.limit_s)}"
            except subprocess.TimeoutExpired:
                status = f"not done within {options.limit_s} s"
    if status != "status 0":
        raise ProcessFailed(f"{transfer}: {status}; {log}:\n{log_end(log)}")
    lines = (folder / transfer / METRICS_FILE).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    shutil.rmtree(folder / transfer)
    return {"transfer": transfer} | measured([row for row in rows if "timing_s/sync" in row])


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all steps of a run, and its first sync, which includes connecting."""
    sync = [row["timing_s/sync"] for row in rows]
    return {
        "steps": len(rows),
        "sync_s": {"median": statistics.median(sync), "max": max(sync), "first": sync[0]},
        "sync_s_by_step": sync,
        "step_s": statistics.median(row["timing_s/step"] for row in rows),
        "rollout_tokens_per_s": statistics.median(
            row["sparrow/rollout_tokens_per_s"] for row in rows
        ),
    }


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("training.weight_sync", DESCRIPTION, EXAMPLES, "weight_sync.json")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="embedded model, folder of models/, or path")
    add("--schedule", default="fixed-256", help="of the rollouts")
    add("--steps", type=count, default=20)
    add("--prompts", type=count, default=16, help="per step, with 8 responses each")
    add("--new-tokens", type=count, default=256, help="longest response")
    add("--transfers", nargs="+", default=list(TRANSFERS), choices=TRANSFERS)
    add("--trainer-gpu", default="0", help="as CUDA_VISIBLE_DEVICES names it")
    add("--engine-gpu", default="1", help="as CUDA_VISIBLE_DEVICES names it")
    add("--limit-s", type=float, default=900.0, help="seconds that one run may take")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 1 if a run failed, 2 without usable options."""
    parser = _parser()
    options = parser.parse_args(argv)
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        parser.error(
            "expected two GPUs on this machine, one for the trainer and one for the engine"
        )
    prepare_out(parser, options.out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = prepare_model(options.model, folder)
        files = Path(model_folder(model)).glob("*.safetensors")
        weight_bytes = sum(file.stat().st_size for file in files)
        results = Results(options.out, settings=settings(options), weight_bytes=weight_bytes)
        for transfer in options.transfers:
            try:
                results.add(run(options, model, transfer, folder))
            except ProcessFailed as error:
                print(f"{parser.prog}: error: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
