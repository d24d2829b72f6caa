"""The built-in story task with a reward that differs between the responses of any model. With
rewards of 0 and 1, all responses of a small step often have the same, and it learns nothing."""

from dataclasses import replace

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks import story
from sparrow_sglang.rl.tasks.base import Render, Task
from sparrow_sglang.rl.types import Prompt


def load(config: TaskSource, render: Render) -> Task:
    return replace(story.load(config, render), reward=reward)


def reward(prompt: Prompt, text: str) -> float:
    """The share of vowels."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))
