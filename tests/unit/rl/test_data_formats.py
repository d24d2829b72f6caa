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
    ("answer", "choices"),
    [
        ({"answer": 1}, {"choices": ["3", "4"]}),
        ({"answer": "B", "answer_index": 1}, {"options": ["3", "4"]}),
    ],
    ids=["MMLU", "MMLU-Pro"],
)
def test_choices_are_in_the_prompt_and_the_answer_is_a_letter(
    answer: dict[str, Any], choices: dict[str, Any], tmp_path: Path
) -> None:
    row = {"question": "2 + 2?"} | answer | choices
    task = load("math", jsonl(tmp_path / "a.jsonl", [row]))
    assert bytes(task.train[0].input_ids) == b"<user>2 + 2?\nA. 3\nB. 4"
    assert task.train[0].payload["answer"] == "B"


@pytest.mark.parametrize(
    ("name", "row"),
    {
        "DAPO-Math-17k, Eurus": verl_row("72"),
        "Skywork-OR1": verl_row('["72"]'),
        "GSM8K": {"question": "?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
        "OpenR1": {"problem": "?", "answer": "72", "solution": "...", "messages": CHAT},
        "NuminaMath-CoT": {"problem": "?", "solution": "so \\boxed{72}."},
        "reasoning-gym": {"prompt": "?", "answer": 72},
    }.items(),
)
def test_answers_are_read_by_their_columns(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    assert load("math", jsonl(tmp_path / "a.jsonl", [row])).train[0].payload["answer"] == "72", name


CASES = [{"input": "2", "output": "4"}]
IN_OUT = {"question": "Double.", "input_output": json.dumps(LINES)}


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("math", {"question": "?", "options": ["A)1", "B)2"], "correct": "B"}, "options=.*letter"),
        (
            "math",
            {"question": "?", "choices": {"text": ["1"], "label": ["A"]}, "answerKey": "A"},
            "choices=.*a list",
        ),
        ("math", {"question": "?", "choices": ["1", "2"], "answer": 2}, "choices=.*index from 0"),
        ("math", verl_row(["2", "3"]), "reward_model.ground_truth=.*expected one answer"),
        ("math", {"question": "?", "final_answer": ["2", "3"]}, "final_answer=.*one answer"),
        (
            "math",
            {"prompt": "?", "answer": "print(4)", "test_cases": CASES},
            "test_cases=.*'tests'",
        ),
        ("code", {"prompt": "?", "test_list": ["assert f(2) == 4"]}, "test_list=.*'tests'"),
        ("math", verl_row(json.dumps(ADD)), "no examples for task 'math'"),
        ("code", verl_row('{"functional": "assert f(2) == 4"}'), "tests=.*inputs and outputs"),
        ("math", verl_row("assert f(2) == 4") | {"ability": "code"}, "no examples for task 'math'"),
        ("math", {"Body": "Two apples.", "Question": "Twice?", "Answer": 4}, "Body=.*'prompt'"),
        ("math", {"question": "?", "answer": "4", "images": ["a.png"]}, "images=.*text only"),
        ("code", IN_OUT | {"checker": "def check"}, "checker='def check'.*special checker"),
        ("code", IN_OUT | {"special_judge": True}, "special_judge=True.*special checker"),
        ("code", {"prompt": "?", "tests": CASES, "spj": "x"}, "spj='x'.*special checker"),
        ("code", {"prompt": "?", "tests": LINES | {"checker": "x"}}, "checker='x'.*special"),
        (
            "code",
            QUESTION | {"public_test_cases": json.dumps(TESTS), "interactor": "x"},
            "interactor='x'.*special checker",
        ),
    ],
)
def test_rows_that_would_be_read_wrongly_are_refused_by_column(
    name: str, row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        load(name, jsonl(tmp_path / "a.jsonl", [row]))


def test_a_list_of_answers_is_refused_by_a_column_of_the_settings(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "?", "gold": '["2", "3"]'}])
    with pytest.raises(InputError, match="gold=.*expected one answer"):
        load("math", path, columns={"answer": "gold"})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Double.", "tests": CASES},
        {"problem": "Double.", "tests": CASES},
        IN_OUT,
        QUESTION | {"question_content": "Double.", "public_test_cases": json.dumps(TESTS)},
    ],
)
def test_the_prompt_has_the_starter_code(row: dict[str, Any], tmp_path: Path) -> None:
    row = row | {"starter_code": "def double(n):\n    "}
    prompt = load("code", jsonl(tmp_path / "a.jsonl", [row])).train[0]
    text = "Double.\n\nStart from this code:\n```python\ndef double(n):\n```"
    assert bytes(prompt.input_ids).decode() == f"<user>{text}"


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
    assert "800 rows, verl (reward_model), 760 that repeat a prompt (merged)" in merged.notes[0]
    train, heldout = prompts_of(kept := load("math", tmp_path / "a.parquet", duplicates="keep"))
    assert (len(train), len(heldout), set(train) & set(heldout)) == (720, 4, set())
    assert "760 that repeat a prompt (kept)" in kept.notes[0]
