"""Rows of data files and of Hugging Face data sets, recognised by their columns: verl's layout
(DAPO-Math, Skywork-OR1, PRIME's Eurus), LiveCodeBench, TACO and APPS, tables of problems and
answers (Polaris, OpenR1, NuminaMath, GSM8K, MATH), and this project's own."""

import base64
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import quoted, read_text
from sparrow_sglang.rl.tasks.answers import last_box
from sparrow_sglang.rl.tasks.code_tests import CHECKERS

KINDS = (".jsonl", ".parquet")
_DATA_SET = re.compile(r"hf:(?P<name>[^:@]+)(:(?P<config>[^:@]+))?(@(?P<split>.+))?")

_MESSAGES_AS_JSON = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')

Message = dict[str, str]
Example = dict[str, Any]
_QUESTIONS = ("problem", "question", "Problem", "Question", "question_content")
_ANSWERS = ("answer", "final_answer", "Answer", "answerKey")
_SOLUTIONS = ("solution", "Solution")
# Answers that cannot be compared: of NuminaMath, and of pandas where one is missing.
_NO_ANSWER = ("proof", "notfound", "not found", "n/a", "nan")

# Columns that a prompt or its judgement would lack, and what is read instead.
_UNREAD = {
    "text only": "image images",
    "the whole problem in a column 'prompt'": "body Body context passage table",
    "a column 'tests' of objects with input and output": (
        "test_cases test_list unit_tests public_tests private_tests"
    ),
}


def is_hub(path: Path) -> bool:
    return str(path).startswith("hf:")


Row = tuple[str, int, dict[str, Any] | ValueError]


def read_rows(path: Path) -> Iterator[Row]:
    """File and line, line number from 1, fields or what is wrong with them. Raises `InputError`."""
    if is_hub(path):
        yield from _dataset_rows(str(path))
        return
    if path.suffix not in KINDS:
        what = "it is a folder" if path.is_dir() else f"kind {path.suffix!r} is not read"
        raise InputError(f"{path}: {what}; expected {' or '.join(KINDS)}, or hf:NAME")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if "\\u" in line:
                # Half a character, which JSON may hold, can be neither tokenized nor printed.
                json.dumps(example, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            example = ValueError(f"not JSON ({error}); expected one object per line")
        if not isinstance(example, dict | ValueError):
            kind = type(example).__name__
            example = ValueError(f"holds a {kind}; expected a JSON object")
        yield f"{path}:{number}", number, example


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        # In batches, as data sets with tests have gigabytes.
        rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path} row {number}", number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _dataset_rows(address: str) -> Iterator[Row]:
    parts = _DATA_SET.fullmatch(address)
    if parts is None:
        raise InputError(f"{address}: expected hf:NAME, hf:NAME:CONFIG, or either with @SPLIT")
    import datasets

    name, split = parts["name"], parts["split"] or "train"
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").exists():
            folder /= split
        if (folder / "state.json").exists():
            rows = datasets.load_from_disk(folder)
        else:
            rows = datasets.load_dataset(name, parts["config"], split=split)
    # Any exception, as a hub's network or a data set's own files may raise many kinds.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{address}: cannot be loaded ({reason})") from None
    for number, row in enumerate(rows, 1):
        yield f"{address} row {number}", number, row


def read_example(row: Mapping[str, Any]) -> tuple[str, Example]:
    """The format of a row and its fields; raises `ValueError` if the row cannot be used."""
    # pandas writes a missing value as NaN, the only value that is not equal to itself.
    row = {name: value if value == value else None for name, value in row.items()}
    layout, example = _by_layout(row)
    has_tests = example.get("tests") is not None
    given = ["'prompt'"] * (row.get("prompt") is not None) + ["'tests'"] * has_tests
    for what, names in _UNREAD.items():
        name = next(filter(row.get, names.split()), None)
        if name and not any(field in what for field in given):
            raise ValueError(f"{name}={quoted(row[name])}: is not read; expected {what}")
    if not has_tests:
        column = next((name for name in _ANSWERS if name in row), "reward_model.ground_truth")
        example = _with_choices(row, with_one_answer(example, column))
    return layout, example | {name: row[name] for name in CHECKERS if row.get(name)}


def _by_layout(row: Mapping[str, Any]) -> tuple[str, Example]:
    if isinstance(row.get("reward_model"), Mapping):
        return "verl (reward_model)", _of_verl(row)
    if "public_test_cases" in row:
        return "LiveCodeBench (public_test_cases)", _of_livecodebench(row)
    if "input_output" in row:
        tests = {"tests": row["input_output"] or None}
        return "TACO or APPS (input_output)", {"prompt": _with_starter(row)} | tests
    if row.get("prompt") is None and _first(row, _QUESTIONS) is not None:
        return _of_table(row)
    if row.get("prompt") is None:
        raise ValueError(
            "field 'prompt' is missing: expected it, 'problem' or task.columns.prompt; found"
            f" {', '.join(row) or 'none'}"
        )
    return "prompt and answer or tests", _by_field(row)


def _of_verl(row: Mapping[str, Any]) -> Example:
    truth = decoded = row["reward_model"].get("ground_truth")
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        with suppress(ValueError):
            decoded = json.loads(truth)
    first = decoded[0] if isinstance(decoded, list) and decoded else decoded
    if isinstance(first, Mapping) or str(row.get("ability")).startswith("cod"):
        return _by_field(row) | {"tests": decoded}
    return _by_field(row) | {"answer": truth}


def _of_livecodebench(row: Mapping[str, Any]) -> Example:
    tests = _test_cases(row["public_test_cases"]) + _test_cases(row.get("private_test_cases"))
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return {"prompt": _with_starter(row), "tests": tests, "fn_name": name}


def _test_cases(value: Any) -> list[Any]:
    """Tests as a list, as JSON, or as JSON that is pickled, compressed and coded in base 64."""
    if not value:
        return []
    if isinstance(value, str):
        try:
            if not value.lstrip().startswith("["):
                packed = zlib.decompress(base64.b64decode(value))
                value = _TextUnpickler(io.BytesIO(packed)).load()
            value = json.loads(value)
        except (ValueError, TypeError, zlib.error, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"test cases cannot be decoded ({error})") from None
    if not isinstance(value, list):
        raise ValueError(f"public_test_cases holds a {type(value).__name__}: expected a list")
    return value


class _TextUnpickler(pickle.Unpickler):
    """Reads pickled texts; a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _of_table(row: Mapping[str, Any]) -> tuple[str, Example]:
    if row.get("tests") is not None:
        return "problem and tests", _by_field(row)
    # Without their ids, which not all data sets keep unique.
    example = {"prompt": _with_starter(row)}
    answer, solution = _first(row, _ANSWERS), _first(row, _SOLUTIONS)
    if isinstance(answer, str) and "####" in answer:
        answer = answer.rpartition("####")[2].strip()
        return "GSM8K (question, answer after ####)", example | {"answer": answer}
    if answer is None and isinstance(solution, str):
        box = last_box(solution)
        if box is None or not box[0].strip():
            raise ValueError("the solution has no box: expected one with the answer")
        return "problem and solution with a box", example | {"answer": box[0]}
    if isinstance(answer, str) and answer.strip().lower() in _NO_ANSWER:
        raise ValueError(f"answer={quoted(answer)} cannot be compared")
    return "problem and answer", example | {"answer": answer}


def _by_field(row: Mapping[str, Any]) -> Example:
    names = ("id", "answer", "tests", "fn_name", "tolerance")
    fields = {name: row[name] for name in names if row.get(name) is not None}
    return {"prompt": _with_starter(row)} | fields


def _with_starter(row: Mapping[str, Any]) -> Any:
    question, starter = _first(row, ("prompt", *_QUESTIONS)), row.get("starter_code")
    if not starter or not isinstance(question, str):
        return question
    return f"{question}\n\nStart from this code:\n```python\n{starter.rstrip()}\n```"


def with_one_answer(example: Example, column: str) -> Example:
    """With an answer that is alone in a list, or in one as JSON, as Skywork-OR1 has it."""
    answers = example.get("answer")
    if isinstance(answers, str) and answers.lstrip().startswith('["'):
        with suppress(ValueError):
            answers = json.loads(answers)
    if not isinstance(answers, list):
        return example
    if len(answers) != 1:
        raise ValueError(f"{column}={quoted(answers)}: expected one answer")
    return example | {"answer": answers[0]}


def _with_choices(row: Mapping[str, Any], example: Example) -> Example:
    """With the choices of MMLU in the prompt, and the right one's letter as the answer."""
    column = next((name for name in ("choices", "options") if row.get(name)), None)
    if column is None or not isinstance(example["prompt"], str):
        return example
    choices, answer = row[column], example.get("answer")
    letters = ascii_uppercase[: len(choices)] if isinstance(choices, list) else ""
    if type(answer) is int and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or answer not in [*letters]:
        raise ValueError(
            f"{column}={quoted(choices)}: expected a list, and as answer a letter or an index from"
            " 0"
        )
    lines = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
    return example | {"prompt": "\n".join([example["prompt"], *lines]), "answer": answer}


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def value_at(row: Mapping[str, Any], field: str, column: str) -> Any:
    """Raises `ValueError` if nothing is at the dotted path."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            present = ", ".join(map(str, value)) if isinstance(value, Mapping) else repr(value)
            raise ValueError(
                f"task.columns.{field}={column!r}: there is no {name!r}; found {present or 'none'}"
            )
        value = value[name]
    return value


def messages_of(
    example: Mapping[str, Any], instruction: str = "", system: str | None = None
) -> list[Message]:
    """The prompt as chat messages; `instruction` and `system` are added to one that is a text."""
    prompt = require(example, "prompt", (str, list), "a string or a list of chat messages")
    if isinstance(prompt, str) and _MESSAGES_AS_JSON.match(prompt):
        with suppress(ValueError):
            prompt = json.loads(prompt)
    if isinstance(prompt, str):
        first = [{"role": "system", "content": system}] if system else []
        text = f"{prompt}\n{instruction}" if instruction else prompt
        return [*first, {"role": "user", "content": text}]
    messages: list[Message] = []
    for message in prompt:
        fields = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if fields == [None, None] or message is None:
            # Parquet pads messages with fields of others, and lists with nothing.
            continue
        if not fields or not all(isinstance(field, str) for field in fields):
            raise ValueError(f"prompt holds {quoted(message)}: expected strings role and content")
        messages.append({name: value for name, value in message.items() if value is not None})
    if not messages:
        raise ValueError(f"prompt={quoted(prompt)}: expected a string or a list of chat messages")
    return messages


def require(example: Mapping[str, Any], field: str, kinds: tuple[type, ...], expected: str) -> Any:
    """A field that must be there and not be empty; raises `ValueError` saying what is expected."""
    if field not in example:
        raise ValueError(
            f"field {field!r} is missing: expected {expected}; found {', '.join(example) or 'none'}"
        )
    value = example[field]
    empty = not value.strip() if isinstance(value, str) else value == []
    # pandas writes a missing value as NaN.
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, kinds) or isinstance(value, bool) or empty or not finite:
        raise ValueError(f"{field}={quoted(value)}: expected {expected}, not empty")
    return value
