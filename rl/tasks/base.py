"""Shared parts of tasks: the class `Task`, rendering by a chat template, and reading of data files.

Each row of a data file holds an example. "prompt" is a string, which becomes the user's message, or
a list of chat messages; "id" is optional. The other fields depend on the task.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import relative_note
from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.reward_worker import Reward
from sparrow_sglang.rl.tasks.rows import KINDS, is_hub, read_rows
from sparrow_sglang.rl.turns import Reply
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.validation import first_problem, unknown_key

Message = dict[str, str]
# Chat messages -> token ids of the prompt, ready for the assistant's turn.
Render = Callable[[Sequence[Message]], tuple[int, ...]]
# Fields of one example -> `Prompt.payload`. Raises `ValueError` that says what is allowed.
ReadPayload = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# One held-out set, or several by name.
Heldout = tuple[Prompt, ...] | Mapping[str, tuple[Prompt, ...]]

HELDOUT_SHARE = 0.1
MAX_HELDOUT = 512
SPLIT_SEED = 0


@dataclass(frozen=True)
class Task:
    """Prompts to train on and others to evaluate on, and `reward(prompt, text)`, 0 to 1.

    `heldout` is one set, or several by name. `reward` is a function of a module, as it is sent to
    other processes by name, or a mapping with one such function for each `Prompt.task`;
    `reward_worker.Reward` documents parameters and return values. With a `reply`, or a mapping of
    replies, responses have several turns; see `turns.Reply`.
    """

    train: tuple[Prompt, ...]
    heldout: Heldout
    reward: Reward | Mapping[str, Reward]
    reply: Reply | Mapping[str, Reply] | None = None


class Options(BaseModel):
    """Base of a task's own settings, `task.options`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True
    )


class FileOptions(Options):
    """Settings of tasks that read files."""

    instruction: str = ""
    """Put after each prompt that is a string, on a line of its own."""
    system: str | None = Field(default=None, min_length=1)
    """System message before each prompt that is a string."""


OptionsT = TypeVar("OptionsT", bound=Options)


def chat_render(tokenizer: Any, **variables: Any) -> Render:
    """Rendering by the chat template of a transformers tokenizer, with its `variables` set."""

    def render(messages: Sequence[Message]) -> tuple[int, ...]:
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    return render


def parse_options(kind: type[OptionsT], config: TaskSource) -> OptionsT:
    """`config.options`, checked; raises `InputError` with field, value and what is allowed."""
    try:
        return kind(**config.options)
    except ValidationError as error:
        raise InputError(first_problem(error, kind, prefix="task.options")) from None


def load_files(
    config: TaskSource,
    render: Render,
    read_payload: ReadPayload,
    options: FileOptions,
    fields: Sequence[str] = (),
) -> tuple[tuple[Prompt, ...], Heldout]:
    """Training and held-out prompts from `config`'s files.

    Rows have `fields` besides "prompt" and "id"; without `fields`, any. Without a held-out file a
    tenth of the examples, 512 at most, is held out, the same ones each time. Raises `InputError`
    with file, line, field and what is allowed.
    """
    if config.train_path is None:
        raise InputError(
            f"task.train_path is not set: task {config.name!r} needs a .jsonl or .parquet file, or"
            " hf:NAME"
        )
    known = ("prompt", "id", *fields)
    for field, column in config.columns.items():
        if fields and field not in known:
            raise InputError(f"task.columns.{field}={column!r}: {unknown_key(field, known)}")
    sets = {f"heldout_sets.{name}": path for name, path in config.heldout_sets.items()}
    paths = {"train_path": config.train_path, "heldout_path": config.heldout_path} | sets
    for key, path in paths.items():
        if path is not None and path.suffix in KINDS and not is_hub(path) and not path.exists():
            raise InputError(
                f"task.{key}={str(path)!r}: No such file{relative_note(path)}; expected a .jsonl or"
                " .parquet file"
            )

    def read(path: Path) -> tuple[Prompt, ...]:
        return _read_prompts(path, config, render, read_payload, options)

    train = read(config.train_path)
    if config.heldout_sets:
        return train, {name: read(path) for name, path in config.heldout_sets.items()}
    if config.heldout_path is not None:
        return train, read(config.heldout_path)
    order = list(train)
    random.Random(SPLIT_SEED).shuffle(order)
    # Of fewer than ten examples none is held out, which a run without evaluation does not need.
    kept = min(MAX_HELDOUT, int(len(order) * HELDOUT_SHARE))
    heldout = {prompt.id for prompt in order[:kept]}
    return tuple(prompt for prompt in train if prompt.id not in heldout), tuple(order[:kept])


def _read_prompts(
    path: Path, config: TaskSource, render: Render, read_payload: ReadPayload, options: FileOptions
) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for where, number, row in read_rows(path):
        try:
            example = row | {
                field: _column(row, field, column) for field, column in config.columns.items()
            }
            messages = _messages(example, options)
            payload = read_payload(example)
            name = str(example.get("id") or f"{path.stem}-{number}")
            if name in prompts:
                raise ValueError(f"id {name!r} is used twice: expected a unique id, or none")
            rendered = render(messages)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        prompts[name] = Prompt(name, config.name, rendered, payload)
    if not prompts:
        raise InputError(f"{path}: holds no examples; expected one JSON object per line or row")
    return tuple(prompts.values())


def _column(row: Mapping[str, Any], field: str, column: str) -> Any:
    """The value at the dotted path `column`; raises `ValueError` if there is none."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            there = ", ".join(map(str, value)) if isinstance(value, Mapping) else repr(value)
            raise ValueError(
                f"task.columns.{field}={column!r}: there is no {name!r}; found {there or 'none'}"
            )
        value = value[name]
    return value


def _messages(example: Mapping[str, Any], options: FileOptions) -> list[Message]:
    prompt = require(example, "prompt", (str, list), "a string or a list of chat messages")
    if isinstance(prompt, str):
        system = [{"role": "system", "content": options.system}] if options.system else []
        text = f"{prompt}\n{options.instruction}" if options.instruction else prompt
        return [*system, {"role": "user", "content": text}]
    for message in prompt:
        fields = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not fields or not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"prompt holds {message!r}: expected messages with the strings role and content"
            )
    return prompt


def require(example: Mapping[str, Any], field: str, kinds: tuple[type, ...], expected: str) -> Any:
    """A field that must be there and not be empty; raises `ValueError` saying what is expected."""
    if field not in example:
        raise ValueError(
            f"field {field!r} is missing: expected {expected}; found {', '.join(example) or 'none'}"
        )
    value = example[field]
    if not isinstance(value, kinds) or isinstance(value, bool) or value in ("", []):
        raise ValueError(f"{field}={value!r}: expected {expected}, not empty")
    return value
