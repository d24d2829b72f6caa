"""The registry of tasks: where prompts come from, and how responses to them are rewarded. A task is
a function `(TaskConfig, Render) -> Task` in `TASKS`, or `task.name` is "module:function"."""

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from pydantic import ValidationError

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import quoted
from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks import code, math, story
from sparrow_sglang.rl.tasks.base import (
    ChatRender,
    FileOptions,
    Render,
    SkippedRow,
    Task,
    load_files,
    parse_options,
)
from sparrow_sglang.rl.tasks.reward_worker import Reward
from sparrow_sglang.rl.tasks.rewards import Names, names_of_call
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.validation import first_problem, nearest_first

__all__ = ["TASKS", "Render", "Task", "ChatRender", "load_task"]

_FILE_TASKS = ("math", "code", "files")
_EXPECTED = (
    "expected module:function, of a module that Python can import: add its folder to PYTHONPATH"
)

Load = Callable[[TaskSource, Render], Task]


def load_task(config: TaskSource, render: Render) -> Task:
    """Raises `InputError` if there is none of that name, or if its files or options are wrong."""
    if ":" in config.name:
        load = imported("task.name", config.name)
        _require_parameters(
            f"task.name={config.name!r}", load, lambda _: (("config", "render"), "")
        )
        return _checked(config.name, load(config, render))
    if config.name not in TASKS:
        near = nearest_first(config.name, TASKS)[0]
        raise InputError(
            f"task.name={config.name!r}: did you mean {near!r}? Expected one of {', '.join(TASKS)},"
            " or module:function"
        )
    keys = {"train_path", "heldout_path", "heldout_sets", "columns"}
    for key, value in config.model_dump(mode="json", include=keys).items():
        if value and config.name not in _FILE_TASKS:
            raise InputError(
                f"task.{key}={quoted(value)}: only the tasks {', '.join(_FILE_TASKS)} read files"
            )
    return TASKS[config.name](config, render)


def require_module(key: str, name: str) -> None:
    """Raises `InputError` if its package is not there; imports nothing."""
    package = name.partition(":")[0].partition(".")[0]
    if package not in sys.modules and not (package and find_spec(package)):
        raise InputError(f"{key}={name!r}: there is no module {package!r}; {_EXPECTED}")


def imported(key: str, name: str) -> Callable[..., Any]:
    """Raises `InputError`."""
    try:
        value = resolve_name(name)
        if not callable(value):
            raise ValueError("it is no function")
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(f"{key}={name!r}: {error}; {_EXPECTED}") from None
    function: Callable[..., Any] = value
    return function


def _require_parameters(
    named: str, function: Callable[..., Any], names_of: Callable[..., Names] = names_of_call
) -> None:
    """Raises `InputError` if the function takes other parameters than it is called with."""
    values, optional = names_of({})
    try:
        signature = inspect.signature(function)
        values, optional = names_of(signature.parameters)
        signature.bind(*values, **dict.fromkeys({optional} & signature.parameters.keys()))
    except (TypeError, ValueError) as error:
        raise InputError(f"{named}: {error}; expected a function ({', '.join(values)})") from None


def _checked(name: str, task: Any) -> Task:
    if not isinstance(task, Task):
        raise InputError(f"task.name={name!r} returned {quoted(task)}: expected a Task")
    rewards = task.reward.values() if isinstance(task.reward, Mapping) else [task.reward]
    for function in rewards:
        named = f"task.name={name!r}: reward {quoted(function)}"
        if not (callable(function) and _can_be_sent(function)):
            raise InputError(f"{named}, expected a function of a module")
        _require_parameters(named, function)
    return task


def _can_be_sent(function: object) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class OwnRewardOptions(FileOptions):
    reward: str
    """module:function."""


def _load_own(config: TaskSource, render: Render) -> Task:
    """Prompts of your data files, and your reward, which receives the row as `payload`."""
    options = parse_options(OwnRewardOptions, config)
    reward = imported("task.options.reward", options.reward)
    _require_parameters(f"task.options.reward={options.reward!r}", reward)
    return load_files(config, render, _payload, options, reward)


def _payload(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if name != "prompt"}


def _load_mix(config: TaskSource, render: Render) -> Task:
    """`options` maps a name to the settings of each task, which becomes the `Prompt.task` of its
    prompts and names its held-out set."""
    train: list[Prompt] = []
    heldout: dict[str, tuple[Prompt, ...]] = {}
    rewards: dict[str, Reward] = {}
    notes: list[str] = []
    skipped: list[SkippedRow] = []
    if not config.options:
        raise InputError("task.options holds no tasks: task 'mix' expects [task.options.NAME]")
    for label, fields in config.options.items():
        try:
            source = TaskSource.model_validate(fields)
            task = load_task(source, render)
        except ValidationError as error:
            problem = first_problem(error, TaskSource, prefix=f"task.options.{label}")
            raise InputError(problem) from None
        except InputError as error:
            raise InputError(f"task.options.{label}: {error}") from None
        if isinstance(task.reward, Mapping):
            raise InputError(f"task.options.{label}.name={source.name!r}: expected no mix in a mix")
        rewards[label] = task.reward
        notes += [f"{label}: {note}" for note in task.notes]
        skipped += task.skipped
        train += _labelled(task.train, label)
        sets = task.heldout if isinstance(task.heldout, Mapping) else {"": task.heldout}
        for name, prompts in sets.items():
            heldout[f"{label}/{name}".rstrip("/")] = _labelled(prompts, label)
    return Task(tuple(train), heldout, rewards, tuple(notes), tuple(skipped))


def _labelled(prompts: Sequence[Prompt], label: str) -> tuple[Prompt, ...]:
    return tuple(replace(prompt, task=label) for prompt in prompts)


TASKS: dict[str, Load] = {
    "math": math.load,
    "code": code.load,
    "story": story.load,
    "files": _load_own,
    "mix": _load_mix,
}
