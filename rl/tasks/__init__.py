"""The registry of tasks: where prompts come from, and how responses to them are judged.

A task is one function, `(TaskConfig, Render) -> Task`, and one line in `TASKS`.
"""

import difflib
from collections.abc import Callable

from sparrow_sglang.config import ConfigError
from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks import code, math, story
from sparrow_sglang.rl.tasks.base import Render, Task, chat_render

__all__ = ["TASKS", "Render", "Task", "chat_render", "load_task"]

TASKS: dict[str, Callable[[TaskConfig, Render], Task]] = {
    "math": math.load,
    "code": code.load,
    "story": story.load,
}


def load_task(config: TaskConfig, render: Render) -> Task:
    """The task that `config.name` names, with its prompts rendered to token ids.

    Raises `ConfigError` if there is none of that name, or if its files or options are wrong.
    """
    if config.name not in TASKS:
        near = difflib.get_close_matches(config.name, TASKS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"task.name={config.name!r} is not known: did you mean {near!r}? Known tasks:"
            f" {', '.join(TASKS)}"
        )
    return TASKS[config.name](config, render)
