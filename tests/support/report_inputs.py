"""Small results for `sparrow report`, written by the commands that write them for users."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparrow_sglang.calibration import measure
from sparrow_sglang.calibration.samples import Sample, Tokens, WorkFolder
from sparrow_sglang.commands import cli
from sparrow_sglang.rl.acceptance import acceptance_metrics
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.log import RunLog
from sparrow_sglang.rl.runs.run import record_start
from sparrow_sglang.run_folder import RESPONSES_FILE
from sparrow_sglang.schedule_names import load_schedule

BIN = 64
TARGETS = ("0.75", "0.86")
SCHEDULE = "smollm2-135m-0.86"


def _rates(sample: Sample, cached: NDArray[np.int64]) -> NDArray[np.float64]:
    """Acceptance rates that fall as a larger share of the cached KV is not read."""
    budgets = np.array([sample.schedule.kv_budget_tokens(int(n)) for n in cached])
    left_out = 1 - budgets / cached
    draw = np.random.default_rng(sample.number)
    return 1 - np.clip(left_out, 0, 1) * draw.beta(1, 4, len(cached))


def _measure(
    engine: Any, samples: Sequence[Sample], work: WorkFolder, batch: int, progress: Any
) -> None:
    """Stand-in for `calibration.measure.measure` with a known distribution instead of an engine."""
    for sample in samples:
        cached = len(sample.prompt.input_ids) + 1 + np.arange(sample.new_tokens - 1)
        rates = _rates(sample, cached)
        work.add({sample.number: Tokens(sample.prompt.name, cached, rates)})
        progress.advance(1)


def write_calibration(folder: Path, model: str) -> None:
    """Schedules for `TARGETS`, m-<target>.json, and their check, check.json."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    lengths = range(40, 260, 6)
    prompts.write_text("".join(f'{{"input_ids": {[5] * length}}}\n' for length in lengths))
    command = ["calibrate", "--model-path", model, "--prompts", str(prompts), "--min-tokens", "100",
               "--new-tokens", "60", "--engine-args", '{"context_length": 320}']  # fmt: skip
    sizes = ["--rule", "published", "--bin-tokens", str(BIN), "--budgets", "64", "128", "192"]
    out = ["--target", *TARGETS, "--out", str(folder / "m.json"), "--work", str(folder / "work")]
    schedules = [str(folder / f"m-{target}.json") for target in TARGETS]
    check = ["--check", *schedules, "--out", str(folder / "check.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "running_engine", lambda *_: nullcontext())
        patch.setattr(measure, "measure", _measure)
        assert cli.main([*command, *sizes, *out]) == 0
        assert cli.main([*command, *check]) in (0, 1)


def write_run(folder: Path, steps: int) -> None:
    """A run of `steps` steps under a schedule for a tail of 0.86."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig.parse(
        {
            "run_dir": folder,
            "steps": steps,
            "task": {"name": "story"},
            "rollout": {"max_new_tokens": 3000},
            "engine": {"schedule": SCHEDULE},
            "logging": {"tensorboard": False},
        }
    )
    record_start(config, config.engine, 0, load_schedule(SCHEDULE, 16))
    log = RunLog(config, 0)
    for step in range(steps):
        if step % 4 == 0:
            log.write_evaluation(step, {"eval/pass_rate": 0.3 + 0.02 * step}, [])
        log.keep(RESPONSES_FILE, step, responses(step))
        log.write(step, step_metrics(step))
    log.write_evaluation(steps, {"eval/pass_rate": 0.75}, [])
    log.close()


def responses(step: int) -> list[dict[str, Any]]:
    """A group of four responses; the second has the highest reward, the third the lowest, and the
    last one could not be scored."""
    return [
        {
            "task": "story",
            "prompt_id": f"p{step}",
            "prompt": f"<i>Tell story {step}.</i>",
            "sample": sample,
            "reward": reward,
            "scores": {"format": 0.25},
            "length": 1000 + sample,
            "finish_reason": "stop",
            "tail": None if sample else 0.875,
            "text": f"<b>{step}</b> " + "once upon a time " * 1000 * sample + "the end",
        }
        for sample, reward in enumerate((0.5, 1.0, 0.0, None))
    ]


def step_metrics(step: int) -> dict[str, float]:
    draw = np.random.default_rng(step)
    length = 900 + 10 * step
    alpha = 1 - draw.beta(1, 8, 400)
    seconds = {"sync": 1.0, "rollout": 9 + draw.random(), "reward": 0.4, "update": 4.0}
    return {
        "critic/score/mean": 0.3 + 0.01 * step,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "response_length/mean": float(length),
        "response_length/max": float(2 * length),
        "response_length/clip_ratio": 0.25,
        "rollout_corr/k3_kl": 0.01 + 0.001 * draw.random(),
        "actor/entropy": 0.5 - 0.01 * step,
        **acceptance_metrics(alpha, np.arange(400) // 200),
        "sparrow/kv_tokens_read": 500.0 + step,
        "sparrow/kv_tokens_cached": 1100.0 + 5 * step,
        "sparrow/rollout_tokens_per_s": 1000 * length / seconds["rollout"],
        **{f"timing_s/{stage}": value for stage, value in seconds.items()},
        "timing_s/step": sum(seconds.values()) + 0.5,
    }
