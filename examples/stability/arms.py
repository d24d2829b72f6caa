"""The runs of the study: ordinary `sparrow train` configurations, several under way at a time.

In: settings, the pretrained model and the calibrated schedules. Out: a folder per run with its
metrics. A run that was stopped goes on from its last checkpoint when the study is started again.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from study_settings import CALIBRATED, StudySettings

from sparrow_sglang.rl.config import TrainConfig

METRICS = "metrics.jsonl"
_LOOK_S = 1.0


class RunFailed(RuntimeError):
    """A run of the study has ended with an error; the message says which and where its log is."""


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
        # Not `with_suffix`, to which a name such as calibrated-0.86 has a suffix already.
        return self.config.run_dir.with_name(self.config.run_dir.name + suffix)

    def is_complete(self) -> bool:
        """Whether the last evaluation, which follows the last step, is in the metrics."""
        path = self.config.run_dir / METRICS
        rows = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(row) for row in rows if row.endswith("\n")]
        return bool(whole) and whole[-1]["step"] == self.config.steps


def plan_runs(
    settings: StudySettings, model: Path, schedules: Mapping[str, Path], runs: Path
) -> list[RunPlan]:
    """All runs, the first seed of every arm before the second.

    `schedules` are the files of the calibrated ones by the names that arms use. Raises
    `ConfigError` if a setting of `train` is not allowed.
    """
    plans = []
    for seed in settings.seeds:
        for arm, how in settings.arms.items():
            calibrated = how.schedule.startswith(CALIBRATED)
            schedule = str(schedules[how.schedule]) if calibrated else how.schedule
            ours = {
                "run_dir": str(runs / f"{arm}-seed{seed}"),
                "seed": seed,
                "model": {"path": str(model)},
                "task": {"name": "graph_walk:load", "options": settings.walk.model_dump()},
                "engine": {"schedule": schedule, "server_args": settings.server_args},
                "rollout": {
                    "max_prompt_tokens": settings.walk.prompt_tokens(),
                    "max_new_tokens": settings.walk.response_tokens(),
                },
                "distill": {"enabled": how.distill},
            }
            values = _merged(settings.train, ours)
            config = TrainConfig.parse(values, f"study.toml, arm {arm}")
            plans.append(RunPlan(arm, seed, config, values))
    return plans


def run_all(plans: list[RunPlan], parallel: int) -> None:
    """Train until all runs are complete, at most `parallel` at a time.

    Raises `RunFailed` as soon as one fails; the others are asked to write a checkpoint and end.
    """
    waiting = [plan for plan in plans if not plan.is_complete()]
    print(f"runs: {len(plans) - len(waiting)} of {len(plans)} are complete", flush=True)
    running: list[tuple[RunPlan, subprocess.Popen[bytes], TextIO]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                running.append(_start(waiting.pop(0)))
            time.sleep(_LOOK_S)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                plan, process, log = entry
                running.remove(entry)
                log.close()
                if process.returncode or not plan.is_complete():
                    raise RunFailed(
                        f"run {plan.name} has ended with status {process.returncode}: see"
                        f" {log.name}; repeat the command to go on"
                    )
                print(f"runs: {plan.name} is complete", flush=True)
    finally:
        for _, process, _ in running:
            process.terminate()
        for _, process, log in running:
            process.wait()
            log.close()


def _start(plan: RunPlan) -> tuple[RunPlan, "subprocess.Popen[bytes]", TextIO]:
    folder = plan.config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    file = plan.beside(".toml")
    file.write_text("".join(f"{line}\n" for line in _toml(plan.values)), "utf-8")
    log = open(plan.beside(".log"), "a", encoding="utf-8")
    command = [sys.executable, "-m", "sparrow_sglang.cli", "train", str(file), "--resume"]
    # Where the task's module is; judges are started with the same path.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    print(f"runs: {plan.name} starts, {log.name}", flush=True)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return plan, process, log


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _toml(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines of dotted keys; numbers, texts, truth values and lists are the same in JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"
