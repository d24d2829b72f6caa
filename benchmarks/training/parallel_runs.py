"""Several runs of `sparrow train` at a time, each in a process of its own and on one GPU.

In: configurations by arm and seed. Out: a folder per run with its metrics. A run that was stopped
goes on from its last checkpoint when it is asked for again.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from sparrow_sglang.benchmarks.processes import ProcessFailed, with_modules
from sparrow_sglang.benchmarks.result_files import whole_rows
from sparrow_sglang.errors import InputError
from sparrow_sglang.renamed import current_names
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.run_folder import METRICS_FILE

_LOOK_S = 1.0


@dataclass(frozen=True)
class RunPlan:
    """One run: an arm under one seed."""

    arm: str
    seed: int
    config: TrainConfig
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"

    def beside(self, suffix: str) -> Path:
        """A file of the run's name beside its folder."""
        # `with_suffix` would replace the end of a name such as calibrated-0.86.
        return self.config.run_dir.with_name(self.config.run_dir.name + suffix)

    def rows(self) -> list[dict[str, Any]]:
        """Whole rows of the metrics so far."""
        return [*map(current_names, whole_rows(self.config.run_dir / METRICS_FILE))]

    def toml(self) -> str:
        """The configuration as TOML, as it is written to the run's file."""
        return "".join(f"{line}\n" for line in toml_lines(self.values))

    def is_complete(self) -> bool:
        """Whether the last evaluation, which follows the last step, is in the metrics."""
        rows = self.rows()
        return bool(rows) and rows[-1]["step"] == self.config.steps

    def require_same_settings(self) -> None:
        """Raise `InputError` if the run is complete, but was made with other settings.

        Settings of an incomplete run are checked by `sparrow train` when it resumes the run.
        """
        file = self.beside(".toml")
        if not file.exists() or not self.is_complete():
            return
        if _settings(file.read_text("utf-8")) != _settings(self.toml()):
            raise InputError(
                f"run {self.name}: {self.config.run_dir} is complete with other settings, those of"
                f" {file}; name another folder, or delete it"
            )


@dataclass(frozen=True, eq=False)
class _Run:
    """A plan and the process that runs it; `gpu` is a value of CUDA_VISIBLE_DEVICES."""

    plan: RunPlan
    gpu: str
    process: "subprocess.Popen[bytes]"
    log: TextIO


def run_all(plans: Sequence[RunPlan], parallel: int, modules: Sequence[Path] = ()) -> None:
    """Train until all runs are complete, at most `parallel` at a time on each visible GPU.

    Without a GPU, at most `parallel` run in total. `modules` are folders of task modules outside
    the package. Raises `InputError` where `require_same_settings` does, and `ProcessFailed` as soon
    as a run fails; the other runs then get SIGTERM, on which they write a checkpoint and end.
    """
    for plan in plans:
        plan.require_same_settings()
    waiting = [plan for plan in plans if not plan.is_complete()]
    print(f"runs: {len(plans) - len(waiting)} of {len(plans)} are complete", flush=True)
    free = parallel * visible_gpus()
    running: list[_Run] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.pop(0), free.pop(0), modules))
            time.sleep(_LOOK_S)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                run.log.close()
                if run.process.returncode or not run.plan.is_complete():
                    raise ProcessFailed(
                        f"run {run.plan.name} has ended with status {run.process.returncode}: see"
                        f" {run.log.name}; repeat the command to go on"
                    )
                print(f"runs: {run.plan.name} is complete", flush=True)
                free.append(run.gpu)
    finally:
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()
            run.log.close()


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them; without a GPU, one empty name, which hides all."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else map(str, range(count))
    return list(names)[:count] or [""]


def _start(plan: RunPlan, gpu: str, modules: Sequence[Path]) -> _Run:
    folder = plan.config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    file = plan.beside(".toml")
    file.write_text(plan.toml(), "utf-8")
    log = open(plan.beside(".log"), "a", encoding="utf-8")
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(file), "--resume"]
    # Reward workers inherit this PYTHONPATH.
    environment = with_modules(*modules) | {"CUDA_VISIBLE_DEVICES": gpu}
    print(f"runs: {plan.name} starts, {log.name}", flush=True)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return _Run(plan, gpu, process, log)


def _settings(text: str) -> dict[str, Any]:
    """Settings in a run's file, without its folder."""
    return {key: value for key, value in tomllib.loads(text).items() if key != "run_dir"}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        result[key] = value
    return result


def toml_lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines of dotted keys; numbers, strings, booleans and lists are written as in JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from toml_lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"
