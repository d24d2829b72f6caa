"""The study in examples/stability, small enough for a test."""

from pathlib import Path
from typing import Any

import graph_walk
from graph_walk import WalkOptions
from study_settings import StudySettings

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks import chat_render, load_task

FOLDER = Path(__file__).parents[2] / "examples" / "stability"


def task_of(options: WalkOptions) -> Any:
    tokenizer = graph_walk.make_tokenizer(options)
    config = TaskConfig(name="graph_walk:load", options=options.model_dump())
    return load_task(config, chat_render(tokenizer)), tokenizer


def tiny(**changes: Any) -> StudySettings:
    settings = StudySettings.load(FOLDER / "study.toml", "tiny").model_dump()
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            settings[section][key] = value
        else:
            settings[section] = value
    return StudySettings.model_validate(settings)
