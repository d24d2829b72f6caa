"""Prompts of your data files, rewarded by a function of yours.

The reward finds all columns of its row in `prompt.payload`.
"""

from collections.abc import Mapping
from typing import Any

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import FileOptions, Render, Task, load_files, parse_options
from sparrow_sglang.rl.tasks.imported import imported


class OwnRewardOptions(FileOptions):
    """Settings of this task."""

    reward: str
    """module:function."""


def load(config: TaskSource, render: Render) -> Task:
    """Prompts from `config`'s files.

    Raises `InputError` as `base.load_files` does, and if the reward cannot be imported.
    """
    options = parse_options(OwnRewardOptions, config)
    reward = imported("task.options.reward", options.reward)
    return load_files(config, render, _payload, options, reward)


def _payload(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if name != "prompt"}
