"""Shared parts of tasks: `Task`, rendering by a chat template, and reading of data files. A row's
"prompt" is a string, the user's message, or a list of chat messages; "id" is optional."""

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jinja2
from pydantic import Field, ValidationError

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import relative_note
from sparrow_sglang.rl.config import Section, TaskSource
from sparrow_sglang.rl.tasks.formats import (
    KINDS,
    Message,
    is_hub,
    messages_of,
    read_example,
    read_rows,
    value_at,
    with_one_answer,
)
from sparrow_sglang.rl.tasks.reward_worker import Reward
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.validation import first_problem, unknown_key

logger = logging.getLogger(__name__)

# Chat messages -> token ids of the prompt, ready for the assistant's turn.
Render = Callable[[Sequence[Message]], tuple[int, ...]]
# Fields of one example -> `Prompt.payload`. Raises `ValueError` that says what is allowed.
ReadPayload = Callable[[Mapping[str, Any]], Mapping[str, Any]]

Kind = Literal["math", "code"]
# Fields of an example; the third is what responses are compared with.
_FIELDS: dict[Kind, tuple[str, ...]] = {
    "math": ("prompt", "id", "answer"),
    "code": ("prompt", "id", "tests", "fn_name", "tolerance"),
}

# One held-out set, or several by name.
Heldout = tuple[Prompt, ...] | Mapping[str, tuple[Prompt, ...]]

HELDOUT_SHARE = 0.1
MAX_HELDOUT = 512
SPLIT_SEED = 0


@dataclass(frozen=True)
class SkippedRow:
    """A row of a data file that cannot be used: file and line, and why."""

    where: str
    reason: str

    def line(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Task:
    """`heldout` is one set, or several by name. `reward` is a function of a module, or a mapping
    with one for each `Prompt.task`; see `reward_worker.Reward`. `notes` are lines for the log."""

    train: tuple[Prompt, ...]
    heldout: Heldout
    reward: Reward | Mapping[str, Reward]
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()


class FileOptions(Section):
    instruction: str = ""
    """Put after each prompt that is a string, on a line of its own."""
    system: str | None = Field(default=None, min_length=1)
    """System message before each prompt that is a string."""


OptionsT = TypeVar("OptionsT", bound=Section)


class ChatRender:
    """Renders by a chat template. `opens_thinking`: the last prompt ended with <think>."""

    def __init__(self, tokenizer: Any, **variables: Any) -> None:
        self._tokenizer, self._variables = tokenizer, variables
        self._opening: str | None = None
        self.opens_thinking = False

    def __call__(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Raises `ValueError` if the template refuses the messages, or renders nothing of them."""
        try:
            text = self._rendered(messages, opening=True)
            if self._opening is None:
                self._opening = text.removeprefix(self._rendered(messages, opening=False))
                if not self._opening:
                    logger.warning("the model's chat template has no generation prompt")
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
        if not text.strip() or text == self._opening:
            raise ValueError("the model's chat template renders nothing of the messages")
        self.opens_thinking = text.rstrip().endswith(("<think>", "<thinking>"))
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _rendered(self, messages: Sequence[Message], opening: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opening, **self._variables
        )
        return text


def parse_options(kind: type[OptionsT], config: TaskSource) -> OptionsT:
    """Raises `InputError`."""
    try:
        return kind(**config.options)
    except ValidationError as error:
        raise InputError(first_problem(error, kind, prefix="task.options")) from None


def load_files(
    config: TaskSource,
    render: Render,
    read_payload: ReadPayload,
    options: FileOptions,
    reward: Reward,
    kind: Kind | None = None,
) -> Task:
    """Rows are read by `formats` if `kind` is given, those of the other kind left out; otherwise as
    they are. Without a held-out file a tenth of the prompts, 512 at most, is held out, the same
    ones each time. Raises `InputError` if too many rows cannot be used."""
    if config.train_path is None:
        raise InputError("task.train_path is not set: expected a .jsonl or .parquet, or hf:NAME")
    for field, column in config.columns.items():
        if kind and field not in _FIELDS[kind]:
            known = unknown_key(field, _FIELDS[kind])
            raise InputError(f"task.columns.{field}={column!r}: {known}")
    sets = {f"heldout_sets.{name}": path for name, path in config.heldout_sets.items()}
    paths = {"train_path": config.train_path, "heldout_path": config.heldout_path} | sets
    for key, path in paths.items():
        if path is not None and path.suffix in KINDS and not is_hub(path) and not path.exists():
            raise InputError(f"task.{key}={str(path)!r}: No such file{relative_note(path)}")
    notes: list[str] = []
    skipped: list[SkippedRow] = []

    def read(path: Path) -> tuple[Prompt, ...]:
        file = _File(path, config, options, kind)
        prompts = file.prompts(render, read_payload)
        notes.append(file.note())
        skipped.extend(file.skipped)
        return prompts

    train = read(config.train_path)
    if config.heldout_sets or config.heldout_path is not None:
        sources: Mapping[str, Path | None] = config.heldout_sets or {"": config.heldout_path}
        heldout = {name: read(path) for name, path in sources.items() if path is not None}
        notes += _overlaps(train, heldout)
        chosen: Heldout = heldout if config.heldout_sets else heldout[""]
    else:
        train, chosen = _split(train)
    return Task(train, chosen, reward, tuple(notes), tuple(skipped))


def _split(prompts: tuple[Prompt, ...]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Prompts to train on and to hold out; the same prompt is never in both."""
    order = list({prompt.input_ids: prompt for prompt in reversed(prompts)}.values())[::-1]
    random.Random(SPLIT_SEED).shuffle(order)
    # Fewer than ten examples are all trained on, which suffices without evaluation.
    heldout = order[: min(MAX_HELDOUT, int(len(order) * HELDOUT_SHARE))]
    ids = {prompt.input_ids for prompt in heldout}
    return tuple(prompt for prompt in prompts if prompt.input_ids not in ids), tuple(heldout)


def _overlaps(train: Sequence[Prompt], heldout: Mapping[str, Sequence[Prompt]]) -> list[str]:
    trained = {prompt.input_ids for prompt in train}
    return [
        f"{count} of {len(prompts)} held-out prompts{' of ' + name if name else ''} are also"
        " trained on"
        for name, prompts in heldout.items()
        if (count := sum(prompt.input_ids in trained for prompt in prompts))
    ]


@contextmanager
def _long_integers() -> Iterator[None]:
    """Without Python's limit on the digits of an integer, which tests of programs exceed."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


class _File:
    def __init__(
        self, path: Path, config: TaskSource, options: FileOptions, kind: Kind | None
    ) -> None:
        self.skipped: list[SkippedRow] = []
        self._path, self._config, self._options, self._kind = path, config, options, kind
        self._formats: Counter[str] = Counter()
        self._rows = self._others = self._repeated = 0

    @_long_integers()
    def prompts(self, render: Render, read_payload: ReadPayload) -> tuple[Prompt, ...]:
        prompts: dict[str, Prompt] = {}
        seen: set[str] = set()
        for where, number, row in read_rows(self._path):
            self._rows += 1
            try:
                if isinstance(row, ValueError):
                    raise row
                example = self._example(row)
                if example is None:
                    self._others += 1
                    continue
                messages = messages_of(example, self._options.instruction, self._options.system)
                text = json.dumps(messages)
                if text in seen and self._config.duplicates == "merge":
                    self._repeated += 1
                    continue
                payload = read_payload(example)
                name = str(example.get("id") or f"{self._path.stem}-{number}")
                if name in prompts:
                    raise ValueError(f"id {name!r} is used twice: expected a unique id, or none")
                rendered = render(messages)
            except (ValueError, RecursionError) as error:
                self.skipped.append(SkippedRow(where, str(error)))
                continue
            self._repeated += text in seen
            seen.add(text)
            if getattr(render, "opens_thinking", False):
                payload = {**payload, "thinking": True}
            prompts[name] = Prompt(name, self._config.name, rendered, payload)
        self._check(len(prompts))
        return tuple(prompts.values())

    def note(self) -> str:
        kinds = " and ".join(self._formats) or "rows as they are"
        merged = "merged" if self._config.duplicates == "merge" else "kept"
        unused = {
            "of another kind": self._others,
            f"that repeat a prompt ({merged})": self._repeated,
            "skipped": len(self.skipped),
        }
        more = "".join(f", {count} {what}" for what, count in unused.items() if count)
        first = f": {self.skipped[0].line()}" if self.skipped else ""
        return f"{self._path}: {self._rows} rows, {kinds}{more}{first}"

    def _example(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The fields of a row, None if it is of the other kind."""
        columns = self._config.columns
        mapped = {field: value_at(row, field, column) for field, column in columns.items()}
        fields = {**row, **mapped}
        if self._kind is None:
            return fields
        if mapped and {"prompt", _FIELDS[self._kind][2]} <= fields.keys():
            name, example = (
                "columns of the settings",
                with_one_answer(fields, columns.get("answer", "answer")),
            )
        else:
            name, example = read_example(fields)
        is_code = example.get("tests") is not None
        if is_code != (self._kind == "code") and (is_code or example.get("answer") is not None):
            return None
        self._formats[name] += 1
        return example

    def _check(self, usable: int) -> None:
        limit = self._config.max_bad_rows
        if self.skipped and (len(self.skipped) > limit * self._rows or not usable):
            count = f"{len(self.skipped)} of {self._rows} rows cannot be used"
            more = f" ({count}, task.max_bad_rows={limit:g})" if len(self.skipped) > 1 else ""
            raise InputError(f"{self.skipped[0].line()}{more}")
        if not usable:
            others = f" for task {self._kind!r}" if self._others else ""
            raise InputError(f"{self._path}: holds no examples{others}")
