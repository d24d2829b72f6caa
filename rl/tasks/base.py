"""What tasks share: their shape, rendering through a chat template, and reading of data files.

Data files hold one object per line (.jsonl) or row (.parquet). "prompt" is a string, which becomes
the user's message, or a list of chat messages; "id" is optional. The other fields are the task's.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import relative_note
from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.validation import first_problem

Message = dict[str, str]
# Chat messages -> token ids of the prompt, ready for the assistant's turn.
Render = Callable[[Sequence[Message]], tuple[int, ...]]
# Fields of one example -> what the reward needs. Raises `ValueError` with what is allowed.
ReadPayload = Callable[[Mapping[str, Any]], Mapping[str, Any]]

KINDS = (".jsonl", ".parquet")
HELDOUT_SHARE = 0.1
MAX_HELDOUT = 512
SPLIT_SEED = 0


@dataclass(frozen=True)
class Task:
    """Prompts to train on and others to evaluate on, and `reward(prompt, text)`, 0 to 1.

    `reward` is a function of a module, as it is sent to other processes by name. If it has a
    parameter `finish_reason`, it gets "stop", or "length" for a response that was cut.
    """

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    reward: Callable[..., float]


class Options(BaseModel):
    """Base of a task's own settings, `task.options`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FileOptions(Options):
    """Settings of tasks that read files."""

    instruction: str = ""
    """Put after each prompt that is a string, on a line of its own."""
    system: str | None = Field(default=None, min_length=1)
    """System message before each prompt that is a string."""


OptionsT = TypeVar("OptionsT", bound=Options)


def chat_render(tokenizer: Any) -> Render:
    """Rendering by the chat template of a transformers tokenizer."""

    def render(messages: Sequence[Message]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    return render


def parse_options(kind: type[OptionsT], config: TaskConfig) -> OptionsT:
    """`config.options`, checked; raises `InputError` with field, value and what is allowed."""
    try:
        return kind(**config.options)
    except ValidationError as error:
        raise InputError(first_problem(error, kind, prefix="task.options")) from None


def load_files(
    config: TaskConfig, render: Render, read_payload: ReadPayload, options: FileOptions
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts out of `config`'s files.

    Without a held-out file a tenth of the examples, 512 at most, is kept apart, the same ones each
    time. Raises `InputError` with file, line, field and what is allowed.
    """
    if config.train_path is None:
        raise InputError(
            f"task.train_path is not set: task {config.name!r} needs a .jsonl or .parquet file"
        )
    for key in ("train_path", "heldout_path"):
        path = getattr(config, key)
        if path is not None and path.suffix in KINDS and not path.exists():
            raise InputError(
                f"task.{key}={str(path)!r}: No such file{relative_note(path)}; expected a .jsonl or"
                " .parquet file"
            )
    train = _read_prompts(config.train_path, config.name, render, read_payload, options)
    if config.heldout_path is not None:
        return train, _read_prompts(config.heldout_path, config.name, render, read_payload, options)
    order = list(train)
    random.Random(SPLIT_SEED).shuffle(order)
    kept = min(MAX_HELDOUT, int(len(order) * HELDOUT_SHARE))
    if kept == 0:
        raise InputError(
            f"{config.train_path}: {len(order)} examples are too few to keep some apart for"
            f" evaluation: expected at least {int(1 / HELDOUT_SHARE)}, or set task.heldout_path"
        )
    heldout = {prompt.id for prompt in order[:kept]}
    return tuple(prompt for prompt in train if prompt.id not in heldout), tuple(order[:kept])


def _read_prompts(
    path: Path, task: str, render: Render, read_payload: ReadPayload, options: FileOptions
) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for where, number, example in _examples(path):
        try:
            messages = _messages(example, options)
            payload = read_payload(example)
            name = str(example.get("id") or f"{path.stem}-{number}")
            if name in prompts:
                raise ValueError(f"id {name!r} is used twice: expected a unique id, or none")
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        prompts[name] = Prompt(name, task, render(messages), payload)
    if not prompts:
        raise InputError(f"{path}: holds no examples; expected one JSON object per line or row")
    return tuple(prompts.values())


def _examples(path: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """(file and line, line number from 1, fields) of each example."""
    if path.suffix not in KINDS:
        raise InputError(f"{path}: kind {path.suffix!r} is not read; use .jsonl or .parquet")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; expected one JSON object per line") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}:{number}: not JSON ({error}); expected one object per line"
            ) from None
        if not isinstance(example, dict):
            raise InputError(
                f"{path}:{number}: holds a {type(example).__name__}; expected a JSON object"
            )
        yield f"{path}:{number}", number, example


def _parquet_rows(path: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from None
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", number, row


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
