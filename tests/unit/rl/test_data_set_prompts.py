"""Rows of the data sets that docs/training.md names, and answers in the form that each asks for."""

from pathlib import Path
from typing import Any

import pytest
from task_files import jsonl, load, verl_row

QUESTION = "Natalia sold 48 clips in April, and half as many in May. How many altogether?"
# A page with values of its own, formulas, a box and a program that are not the answer.
WORKING = (
    "Let me think. In April 48 were sold.\n\n**Step 1.** $\\frac{48}{2} = \\boxed{24}$ in May.\n"
    "A first answer is 48, so the result is 48 + 24.\n```python\nx = input()\n```\n"
    "Step 2: 48/2 = 24, and <<48+24=72>>. The solution: add both.\n\n"
) * 12
BOX = "Let's think step by step and output the final answer within \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n%s\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
GSM8K = 'Let\'s think step by step and output the final answer after "####".'
NO_BOX = WORKING.replace("\\boxed{24}", "24")


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


MATH_ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "DAPO-Math-17k": (
        verl_row("72", chat(DAPO % QUESTION)),
        ("Answer: {}", "Answer: ${}$", "**Answer:** {}", "Answer:\n{}", "Answer: m+n = {}"),
    ),
    "Skywork-OR1": (verl_row('["72"]', chat(f"{QUESTION} {BOX}")), ("\\boxed{{{}}}",)),
    "Eurus": (
        verl_row(
            "72", chat(f"{QUESTION}\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}")
        ),
        ("$$\\boxed{{{}}}$$", "The answer is $\\boxed{{{}}}$."),
    ),
    "verl's GSM8K": (
        verl_row("72", chat(f"{QUESTION} {GSM8K}")),
        ("#### {}", "#### {}\n", "####{}"),
    ),
    "GSM8K": (
        {"question": QUESTION, "answer": "48/2 = <<48/2=24>>24\n#### 72"},
        ("#### {}", "The answer is {}.", "\\boxed{{{}}}"),
    ),
    "Polaris": ({"problem": QUESTION, "answer": "72", "difficulty": "3/8"}, ("\\boxed{{{}}}",)),
    "OpenR1": (
        {"problem": QUESTION, "answer": "72", "solution": "...", "messages": chat(QUESTION)},
        ("\\boxed{{{}}}",),
    ),
    "NuminaMath-CoT": ({"problem": QUESTION, "solution": "so \\boxed{72}."}, ("\\boxed{{{}}}",)),
    "reasoning-gym": (
        {"prompt": QUESTION, "answer": 72},
        ("<answer>{}</answer>", "<answer>\n{}\n</answer>"),
    ),
}


@pytest.mark.parametrize("name", MATH_ROWS)
def test_answers_in_the_form_of_the_prompt_are_read_after_a_page_of_working(
    name: str, tmp_path: Path
) -> None:
    row, forms = MATH_ROWS[name]
    task = load("math", jsonl(tmp_path / "rows.jsonl", [row]))
    (prompt,) = task.train
    for form in forms:
        working = WORKING if "box" in form else NO_BOX
        for answer, reward in (("72", 1), ("24", 0), ("48 24", 0), ("48+24", 0)):
            for thinking in ("", f"<think>{WORKING}\\boxed{{5}}</think>"):
                text = thinking + working + form.format(answer)
                assert (text, task.reward(prompt, text)) == (text, reward)
