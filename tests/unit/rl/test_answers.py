"""What responses answer, and which answers are the same, by the cases in math_cases.jsonl."""

import itertools
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from sparrow_sglang.rl.tasks import expressions, math
from sparrow_sglang.rl.tasks.answers import conclusion, last_program
from sparrow_sglang.rl.tasks.equality import equal
from sparrow_sglang.rl.tasks.reward_worker import import_libraries
from sparrow_sglang.rl.tasks.time_limit import holds_within
from sparrow_sglang.rl.types import Prompt

CASES = [json.loads(line) for line in (Path(__file__).parent / "math_cases.jsonl").open()]
RULES = sorted({case["rule"] for case in CASES})
FENCED = "```python\nprint(int(input()) * 2)\n```"
PROGRAM = "print(int(input()) * 2)\n"


@pytest.mark.parametrize("rule", RULES)
def test_answers_are_judged_as_the_field_expects(rule: str) -> None:
    def reward(case: dict[str, str]) -> float:
        return math.reward(Prompt("p", "math", (1,), {"answer": case["answer"]}), case["response"])

    cases = [case for case in CASES if case["rule"] == rule]
    assert [case for case in cases if reward(case) != case["reward"]] == []


# What changes nothing in print, or spacing only.
SAME: list[Callable[[str], str]] = [
    lambda text: f" {text} ",
    lambda text: f"\\displaystyle {text}",
    lambda text: f"\\({text}\\)",
    lambda text: rf"\,{text}\;",
    lambda text: f"{text}.",
    lambda text: text.replace(r"\frac", r"\dfrac"),
    lambda text: text.replace(r"\cdot", r"\times "),
    lambda text: text.replace("pmatrix", "bmatrix"),
    lambda text: re.sub(r"(?<!\\)([=+])", r" \1 ", text),
    lambda text: re.sub(r"(?<=[\da-z}])\\\\(?=[-\da-z\\])", r"\\\\ ", text),
]
BOXED = [
    (case, content[1])
    for case in CASES
    if (content := re.fullmatch(r"\\boxed\{(.*\S.*)\}", case["response"]))
]


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(BOXED), st.lists(st.sampled_from(SAME), min_size=1, max_size=3))
def test_spacing_and_wrappers_change_no_reward(
    boxed: tuple[dict[str, str], str], changes: list[Callable[[str], str]]
) -> None:
    case, text = boxed
    for change in changes:
        text = change(text)
    prompt = Prompt("p", "math", (1,), {"answer": case["answer"]})
    assert math.reward(prompt, rf"\boxed{{{text}}}") == case["reward"]


@pytest.mark.timeout(120)
def test_hostile_expressions_earn_0_soon() -> None:
    towers = [r"9^{9^{9^9}}", "1000000!", "(x+1)^{100000}", r"\binom{1000000}{500000}"]
    towers += [r"((((2^{9})^{9})^{9})^{9})^{9}", r"\prod_{k=1}^{1000000} k", "1" + "0" * 5000]
    math.reward(Prompt("p", "math", (1,), {"answer": "1"}), r"\boxed{2}")
    before = time.monotonic()
    # The library multiplies these out for minutes.
    sums = ["(x+y+z)^{200}", "(x+y+z+1)^{200}", "(x+y)^{70}(x+z)^{70}(y+z)^{70}"]
    pairs = [("1", tower) for tower in towers] + list(itertools.permutations(sums, 2))
    for expected, given in pairs:
        prompt = Prompt("p", "math", (1,), {"answer": expected})
        assert math.reward(prompt, rf"\boxed{{{given}}}") == 0
    assert time.monotonic() - before < 20
    assert equal(sums[1], "(1+z+y+x)^{200}")


class Swallower:
    """An alarm that arrives in a destructor is lost."""

    def __del__(self) -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_holds_where_an_alarm_is_lost_and_keeps_the_timer_of_others() -> None:
    def judge() -> bool:
        Swallower()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            pass
        return True

    outer = signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        assert not holds_within(0.1, judge)
        assert 80 < signal.getitimer(signal.ITIMER_REAL)[0] < 99.9
        assert holds_within(60, lambda: True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_a_prompt_that_opens_the_thinking_needs_its_end() -> None:
    prompt = Prompt("p", "math", (1,), {"answer": "4", "thinking": True})
    assert math.reward(prompt, r"so \boxed{4}") == 0
    assert math.reward(prompt, r"so 5?</think>\boxed{4}") == 1
    assert math.reward(prompt, r"so 5?</think>\boxed{4}, but", finish_reason="length") == 0
    assert conclusion("a</think>b", "length") is None and conclusion("a</think>b") == "b"


def test_a_reward_worker_imports_sympy_before_it_is_timed() -> None:
    expressions.library.cache_clear()
    import_libraries({"sums": math.reward})
    assert expressions.library.cache_info().currsize == 1


def reads_input(program: str) -> bool:
    return "input" in program


@pytest.mark.parametrize(
    "text",
    [
        FENCED,
        FENCED.replace("```", "~~~"),
        FENCED.replace("python", 'python title="a.py"'),
        FENCED.replace("python", "py"),
        FENCED.replace("python", "Python3"),
        FENCED.replace("python", "pypy3"),
        FENCED.replace("python", ""),
        FENCED.replace("python", "python\r"),
        "1. So:\n" + "".join(f"   {line}\n" for line in FENCED.split("\n")),
        FENCED.removesuffix("```"),
        PROGRAM,
        f"```python\nprint(4)\n```\nBetter:\n{FENCED}",
        f"{FENCED}\nA check:\n```python\nassert 2 * 2 == 4\n```",
        f"```text\n2\n```\n{FENCED}\nIt prints\n```\n4\n```",
        f"```bash\npython main.py\n```\n{FENCED}\n```cpp\nint main() {{ input }}\n```",
        FENCED.replace("```", "````"),
    ],
)
def test_the_program_of_a_response_is_found(text: str) -> None:
    program = last_program(text, reads_input)
    assert program is not None and program.strip() == PROGRAM.strip()


@pytest.mark.parametrize("text", ["I do not know.", "", "```cpp\nint main() {}\n```"])
def test_a_response_without_a_program_has_none(text: str) -> None:
    assert last_program(text, reads_input) is None
