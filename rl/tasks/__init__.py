"""The registry of tasks: where prompts come from, and how responses to them are rewarded.

A task is one function, `(TaskConfig, Render) -> Task`, and one line in `TASKS`; or it lies in a
module of the user's, and `task.name` is "module:function".
"""

import importlib
import inspect
from collections.abc import Callable

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks import code, math, story
from sparrow_sglang.rl.tasks.base import Render, Task, chat_render
from sparrow_sglang.validation import nearest_first

__all__ = ["TASKS", "Render", "Task", "chat_render", "load_task"]

Load = Callable[[TaskConfig, Render], Task]

TASKS: dict[str, Load] = {
    "math": math.load,
    "code": code.load,
    "story": story.load,
}


def load_task(config: TaskConfig, render: Render) -> Task:
    """The task that `config.name` names, with its prompts rendered to token ids.

    Raises `InputError` if there is none of that name, or if its files or options are wrong.
    """
    if ":" in config.name:
        return _imported(config.name)(config, render)
    if config.name not in TASKS:
        near = nearest_first(config.name, TASKS)[0]
        raise InputError(
            f"task.name={config.name!r} is not known: did you mean {near!r}? Known tasks:"
            f" {', '.join(TASKS)}; one of your own is module:function"
        )
    return TASKS[config.name](config, render)


def _imported(name: str) -> Load:
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"task.name={name!r}: {error}; expected module:function, of a module that Python can"
            " import: add its folder to PYTHONPATH"
        ) from None
    load: Load | None = getattr(module, function, None)
    if not callable(load):
        functions = [
            key
            for key, value in inspect.getmembers(module, inspect.isfunction)
            if value.__module__ == module_name
        ]
        raise InputError(
            f"task.name={name!r}: {module_name} has no function {function!r}; it has"
            f" {', '.join(functions) or 'none'}"
        )
    return load
