"""Rewards of the code task, by programs that are run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from sandbox_server import sandbox_server
from task_files import jsonl, load

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.sandbox.run import BUBBLEWRAP, sandbox_problem
from sparrow_sglang.rl.tasks import code
from sparrow_sglang.rl.types import Prompt

PROBLEM = sandbox_problem(BUBBLEWRAP)
contained = pytest.mark.skipif(PROBLEM is not None, reason=f"no sandbox: {PROBLEM}")
DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "-7\n", "output": "-14\n"}]
RIGHT = "Here:\n```python\nprint(2 * int(input()))\n```\nDone."


def prompt_of(
    folder: Path, tests: Any, fields: dict[str, Any] | None = None, **options: Any
) -> Prompt:
    row = {"prompt": "Solve it.", "tests": tests} | (fields or {})
    # A busy machine takes seconds to start a program.
    options = {"wall_clock_s": 60.0, "response_s": 200.0} | options
    return load("code", jsonl(folder / "a.jsonl", [row]), options=options).train[0]


@contained
def test_code_must_pass_all_its_tests(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, DOUBLE)

    def score(text: str) -> float:
        return code.reward(prompt, text)["score"]

    assert score(RIGHT) == 1.0
    assert score("```python\nprint(4)\n```") == 0.0
    # The right output, but the program fails afterwards.
    assert score(RIGHT.replace("))\n", "))\n1/0\n")) == 0.0
    assert score(RIGHT.replace("int(input())", "sum(deque([int(input())]))")) == 1.0


@contained
def test_functions_are_called_with_the_arguments_of_a_test(tmp_path: Path) -> None:
    tests = [{"input": '[1, 2]\n"x"', "output": '["x", 3]'}]
    prompt = prompt_of(tmp_path, tests, {"fn_name": "join"})
    method = """```python
class Solution:
    def join(self, numbers: List[int], word: str) -> List:
        print("noise")
        return word, sum(numbers)
```"""
    plain = "```py\ndef join(numbers, word):\n    return [word, sum(numbers)]\n```"
    for text in (method, plain, f"{plain}\nA check:\n```python\nassert join([], 'a')\n```"):
        assert code.reward(prompt, text)["score"] == 1.0
    for text in (
        plain.replace("join", "joined"),
        plain.replace("sum", "max"),
        "```py\nprint(3)\n```",
    ):
        assert code.reward(prompt, text)["score"] == 0.0


@contained
def test_a_fraction_of_the_tests_may_count_and_time_is_limited_for_all(tmp_path: Path) -> None:
    tests = [*DOUBLE, {"input": "3\n", "output": "0\n"}, {"input": "x\n", "output": ""}]
    score = {"score": 0.5, "tests_passed": 0.5, "tests_failed": 0.25, "tests_late": 0.0}
    assert code.reward(prompt_of(tmp_path, tests, score="fraction"), RIGHT) == score
    assert code.reward(prompt_of(tmp_path, tests), RIGHT)["tests_failed"] == 0.0
    slow = "```python\nimport time; time.sleep(60)\n```"
    late = prompt_of(tmp_path, DOUBLE, score="fraction", response_s=0.5)
    assert code.run_tests(late.payload, slow[10:-4]) == ["late", "skipped"]


def test_programs_can_be_judged_by_a_server(tmp_path: Path) -> None:
    with sandbox_server() as (url, requests):
        prompt = prompt_of(tmp_path, DOUBLE, sandbox=url)
        assert code.reward(prompt, RIGHT)["score"] == 1.0
        assert requests[-1]["stdin"] == "-7\n" and requests[-1]["language"] == "python"
        assert code.reward(prompt, "```python\nprint(4)\n```")["score"] == 0.0
    with pytest.raises(InputError, match=f"task.options.sandbox='{url}': .*refused"):
        load("code", tmp_path / "a.jsonl", options={"sandbox": url})


def test_a_run_without_a_sandbox_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    # Before the task's files are read.
    with pytest.raises(InputError, match="task.options.sandbox='bubblewrap'") as caught:
        load("code", tmp_path / "not-there.jsonl")
    assert "\n" not in str(caught.value) and "SandboxFusion" in str(caught.value)
    with pytest.raises(InputError, match="sandbox='none' is .*'bubblewrap' or the URL"):
        load("code", tmp_path / "a.jsonl", options={"sandbox": "none"})
