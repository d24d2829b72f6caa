"""Rewards of the code task, by programs that are run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_server import sandbox_server
from task_files import jsonl, load

from sparrow_sglang.rl.sandbox.run import BUBBLEWRAP, SandboxResult, sandbox_problem
from sparrow_sglang.rl.tasks import code
from sparrow_sglang.rl.types import Prompt

PROBLEM = sandbox_problem(BUBBLEWRAP)
contained = pytest.mark.skipif(PROBLEM is not None, reason=f"no sandbox: {PROBLEM}")
DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "-7\n", "output": "-14\n"}]
RIGHT = "Here:\n```python\nprint(2 * int(input()))\n```\nDone."


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that runs programs."""
    with sandbox_server() as (url, _):
        yield url


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


def test_values_that_are_equal_pass_whatever_their_type(tmp_path: Path, server: str) -> None:
    values = {
        "np.int64(2)": "2",
        "np.array([1, 2])": "[1, 2]",
        "np.bool_(True)": "true",
        "Decimal('1.5')": "1.5",
        "10**5000": f"1{'0' * 5000}",
        "''": '""',
        "None": "null",
        # The recursion of LiveCodeBench's checker.
        "deep(40_000)": "40000",
    }
    text = (
        "```python\nimport numpy as np\nfrom decimal import Decimal\n"
        "def deep(n): return n and 1 + deep(n - 1)\n"
        f"def f(n): return [{', '.join(values)}][n]\n```"
    )
    numbers = ", ".join(f"[{number}]" for number in range(len(values)))
    tests = f'{{"inputs": [{numbers}], "outputs": [{", ".join(values.values())}], "fn_name": "f"}}'
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "?", "tests": {tests}}}\n')
    options = {"sandbox": server, "score": "fraction", "wall_clock_s": 60.0, "response_s": 200.0}
    prompt = load("code", path, options=options).train[0]
    assert code.reward(prompt, text)["score"] == 1.0
    assert code.reward(prompt, text.replace("return [", "return 7, ["))["score"] == 0.0
    assert code.reward(prompt, text.replace("return", "1 / 0; return"))["tests_failed"] == 1.0
    nines = prompt_of(tmp_path, [{"input": "9" * 4999, "output": f"1{'0' * 4999}"}], sandbox=server)
    assert code.reward(nines, RIGHT.replace("2 *", "1 +"))["score"] == 1.0
    empty = prompt_of(tmp_path, [{"input": "", "output": None}], sandbox=server)
    assert code.reward(empty, "```python\npass\n```")["score"] == 1.0
    assert code.reward(empty, "```python\nprint(1)\n```")["score"] == 0.0


def test_hundreds_of_tests_share_a_few_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers = []

    def doubles_below_200(source: str, inputs: list[str], *rest: Any) -> list[SandboxResult]:
        containers.append(len(inputs))
        numbers = map(int, inputs)
        return [SandboxResult(0, str(2 * n if n < 200 else 0)) for n in numbers]

    monkeypatch.setattr(code, "check_sandbox", lambda sandbox: None)
    monkeypatch.setattr(code, "run_inputs", doubles_below_200)
    tests = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(250)]
    assert code.reward(prompt_of(tmp_path, tests[:200]), RIGHT)["score"] == 1.0
    # Most wrong programs fail in the first, which is small.
    assert (sum(containers), containers[0]) == (200, 1) and len(containers) <= 10
    outcomes = code.run_tests(prompt_of(tmp_path, tests).payload, "")
    assert outcomes[199:201] == ["passed", "wrong"] and outcomes[-1] in ("wrong", "skipped")
    few = prompt_of(tmp_path, tests, max_tests=3).payload["tests"]
    assert [test["input"] for test in few] == ["0\n", "83\n", "166\n"]


def test_a_fraction_of_the_tests_may_count_and_time_is_limited_for_all(
    tmp_path: Path, server: str
) -> None:
    tests = [*DOUBLE, {"input": "3\n", "output": "0\n"}, {"input": "x\n", "output": ""}]
    score = {"score": 0.5, "tests_passed": 0.5, "tests_failed": 0.25, "tests_late": 0.0}
    assert code.reward(prompt_of(tmp_path, tests, score="fraction", sandbox=server), RIGHT) == score
    assert code.reward(prompt_of(tmp_path, tests, sandbox=server), RIGHT)["tests_failed"] == 0.0
    slow = RIGHT.replace("print", "import time; time.sleep(1)\nprint")
    # Nothing is wrong with it as far as it ran.
    short = prompt_of(tmp_path, DOUBLE * 5, response_s=3.0, sandbox=server)
    assert code.reward(short, slow)["score"] is None
    assert code.reward(short, slow.replace("2 *", "3 *"))["score"] == 0.0
    late = prompt_of(tmp_path, DOUBLE, wall_clock_s=0.5, sandbox=server)
    assert code.reward(late, slow)["score"] == 0.0
