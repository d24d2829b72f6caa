"""Rows in the layouts of public data sets: what is read, skipped, merged and held out."""

import base64
import json
import math
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from task_files import CHAT, jsonl, load, verl_row

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.tasks import Task, code
from sparrow_sglang.rl.tasks.formats import read_rows

TESTS = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TESTS)))).decode()
QUESTION = {"question_title": "Double", "question_content": "Double it.", "starter_code": ""}
ADD = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}
LINES = {"inputs": ["2\n", ["3", "4"]], "outputs": ["4", "7"]}
EURUS = {"data_source": "taco", "prompt": CHAT, "ability": "code"}


@pytest.fixture(autouse=True)
def any_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are not run, only read."""
    monkeypatch.setattr(code, "check_sandbox", lambda sandbox: None)


@pytest.mark.parametrize(
    ("row", "answer", "name"),
    [
        (verl_row("34"), "34", "verl"),
        (verl_row('["34"]'), "34", "verl"),
        ({"problem": "2 + 2?", "answer": "34", "difficulty": "3/8"}, "34", "problem and answer"),
        (
            {"problem": "2?", "solution": "...", "answer": "34", "messages": CHAT, "uuid": "x"},
            "34",
            "problem and answer",
        ),
        (
            {"problem": "2?", "solution": r"so \boxed{\frac{1}{2}}.", "source": "aops"},
            r"\frac{1}{2}",
            "a box",
        ),
        ({"question": "2?", "answer": "We add.\n#### 34"}, "34", "GSM8K"),
        ({"prompt": "2?", "answer": 34}, "34", "prompt and answer"),
    ],
)
def test_math_rows_are_read_by_their_columns(
    row: dict[str, Any], answer: str, name: str, tmp_path: Path
) -> None:
    task = load("math", jsonl(tmp_path / "a.jsonl", [row]))
    assert [prompt.payload["answer"] for prompt in task.train] == [answer]
    assert name in task.notes[0] and "1 rows" in task.notes[0]


@pytest.mark.parametrize(
    ("row", "tests", "function"),
    [
        (EURUS | {"reward_model": {"ground_truth": json.dumps(ADD)}}, ["[1, 2]", "[3, 4]"], "add"),
        ({"question": "Add.", "input_output": json.dumps(ADD)}, ["[1, 2]", "[3, 4]"], "add"),
        (
            {"question": "?", "input_output": json.dumps(LINES)},
            ["2\n", "3\n4"],
            None,
        ),
        (
            QUESTION | {"public_test_cases": json.dumps(TESTS), "private_test_cases": PACKED},
            ["2\n", "2\n"],
            None,
        ),
        (
            QUESTION
            | {
                "public_test_cases": json.dumps(
                    [{"input": '[1, 2]\n"x"', "output": "3", "testtype": "functional"}]
                ),
                "private_test_cases": "[]",
                "metadata": '{"func_name": "add"}',
            },
            ['[[1, 2], "x"]'],
            "add",
        ),
        ({"prompt": "?", "tests": json.dumps(TESTS)}, ["2\n"], None),
        ({"prompt": "?", "tests": [{"input": "3", "output": "4", "fn_name": "f"}]}, ["[3]"], "f"),
    ],
)  # fmt: skip
def test_code_rows_are_read_by_their_columns(
    row: dict[str, Any], tests: list[str], function: str | None, tmp_path: Path
) -> None:
    payload = load("code", jsonl(tmp_path / "a.jsonl", [row])).train[0].payload
    assert [test["input"] for test in payload["tests"]] == tests
    assert payload["fn_name"] == function


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "Prove it.", "answer": "proof"}, "answer='proof' cannot be compared"),
        ({"problem": "2?", "solution": "no box"}, "the solution has no box"),
        ({"prompt": "2?", "answer": ""}, "answer='': expected a number or a string"),
        ({"prompt": " ", "answer": "2"}, "prompt=' ': expected a string"),
        # As pandas writes rows without an answer.
        ({"prompt": "2?", "answer": math.nan}, "field 'answer' is missing"),
        ({"problem": "2?", "answer": "nan"}, "answer='nan' cannot be compared"),
        (verl_row(math.nan, "2?"), "answer=nan: expected a number"),
        ({"prompt": "half a character: \ud800", "answer": "2"}, "surrogates not allowed"),
    ],
)
def test_few_rows_that_cannot_be_used_are_skipped_and_told(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(150)]
    path = jsonl(tmp_path / "a.jsonl", [*rows[:7], row, *rows[7:]])
    task = load("math", path)
    assert len(task.train) + len(task.heldout) == 150
    (skipped,) = task.skipped
    assert skipped.where == f"{path}:8" and reason in skipped.reason
    assert "1 skipped" in task.notes[0] and reason in task.notes[0]
    path = jsonl(path, [*rows, row, row])
    with pytest.raises(InputError, match=r"2 of 152 rows cannot be used, task.max_bad_rows=0.01"):
        load("math", path)
    assert len(load("math", path, max_bad_rows=0.05).skipped) == 2


def test_a_folder_holds_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a folder; expected .jsonl or .parquet"):
        list(read_rows(tmp_path))


def test_a_pickle_that_is_no_text_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("run",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    row = QUESTION | {"public_test_cases": "[]", "private_test_cases": packed}
    with pytest.raises(InputError, match="builtins.print is no text"):
        load("code", jsonl(tmp_path / "a.jsonl", [row]))


def prompts_of(task: Task) -> tuple[list[bytes], list[bytes]]:
    assert isinstance(task.heldout, tuple)
    return [bytes(p.input_ids) for p in task.train], [bytes(p.input_ids) for p in task.heldout]


def test_a_repeated_prompt_is_never_trained_on_and_held_out(tmp_path: Path) -> None:
    rows = [
        verl_row(str(i % 40), [{"role": "user", "content": f"{i % 40}?"}], i) for i in range(800)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    train, heldout = prompts_of(merged := load("math", tmp_path / "a.parquet"))
    assert (len(train), len(heldout), set(train) & set(heldout)) == (36, 4, set())
    assert "760 that repeat a prompt (merged)" in merged.notes[0]
    train, heldout = prompts_of(kept := load("math", tmp_path / "a.parquet", duplicates="keep"))
    assert (len(train), len(heldout), set(train) & set(heldout)) == (720, 4, set())
    assert "760 that repeat a prompt (kept)" in kept.notes[0]
