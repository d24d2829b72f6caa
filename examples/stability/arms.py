"""The runs of the study: ordinary `sparrow train` configurations.

In: settings, the pretrained model and the calibrated schedules. Out: one plan per arm and seed.
"""

from collections.abc import Mapping
from pathlib import Path

from study_settings import StudySettings

from sparrow_sglang.benchmarks.training.parallel_runs import RunPlan, merged
from sparrow_sglang.rl.config import TrainConfig


def plan_runs(
    settings: StudySettings, model: Path, schedules: Mapping[str, Path], runs: Path
) -> list[RunPlan]:
    """All runs, the first seed of every arm before the second.

    `schedules` are the files of the calibrated ones by the names that arms use. Raises
    `InputError` if a setting of `train` is not allowed.
    """
    plans = []
    for seed in settings.seeds:
        for arm, how in settings.arms.items():
            schedule = str(schedules.get(how.schedule, how.schedule))
            server_args = dict(settings.server_args)
            if how.attention_backend:
                server_args["attention_backend"] = how.attention_backend
            ours = {
                "run_dir": str(runs / f"{arm}-seed{seed}"),
                "seed": seed,
                "model": {"path": str(model)},
                "task": {"name": "graph_walk:load", "options": settings.walk.model_dump()},
                "engine": {"schedule": schedule, "server_args": server_args},
                "rollout": {
                    "max_prompt_tokens": settings.walk.prompt_tokens(),
                    "max_new_tokens": settings.walk.response_tokens(),
                },
                "distill": {"enabled": how.distill},
            }
            values = merged(settings.train, ours)
            config = TrainConfig.parse(values, f"study.toml, arm {arm}")
            plans.append(RunPlan(arm, seed, config, values))
    return plans
