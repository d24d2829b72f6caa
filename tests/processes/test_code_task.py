"""Rewards of the code task, by programs that are run."""

import shutil
from pathlib import Path

import pytest
from task_files import jsonl, load

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.sandbox.run import KINDS, Kind, sandbox_problem, weaknesses
from sparrow_sglang.rl.tasks import code

WHICH = shutil.which
DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "-7\n", "output": "-14\n"}]


@pytest.mark.parametrize("kind", KINDS)
def test_code_must_pass_all_its_tests(tmp_path: Path, kind: Kind) -> None:
    problem = sandbox_problem(kind)
    if problem:
        pytest.skip(f"{kind}: {problem}")
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "Double it.", "tests": DOUBLE}] * 10)
    prompt = load("code", path, options={"sandbox": kind}).train[0]
    right = "Here:\n```python\nprint(2 * int(input()))\n```\nDone."
    assert code.reward(prompt, right) == 1.0
    assert code.reward(prompt, right.replace("python", "")) == 1.0
    assert code.reward(prompt, "```python\nprint(4)\n```") == 0.0
    assert code.reward(prompt, "print(2 * int(input()))") == 0.0
    assert code.reward(prompt, "```python\nprint(\n```" + right) == 1.0
    assert code.reward(prompt, right + "\n```python\nprint(\n```") == 0.0
    for before in ("```text\n3\n```\n", "```bash\npython main.py\n```\nSo ", "```\n3\n```\n"):
        assert code.reward(prompt, before + right) == 1.0
    for after in ("```text\n6\n```", "```text\n3\n```\n```text\n6\n```", "```\n6\n```"):
        assert code.reward(prompt, f"{right}\n{after}") == 1.0
    for label in ("python3", "Python", "py", "python\r"):
        assert code.reward(prompt, right.replace("python", label)) == 1.0
    # The right output, but the program fails afterwards.
    assert code.reward(prompt, right.replace("))\n", "))\n1/0\n")) == 0.0


def test_a_run_without_bubblewrap_is_refused_unless_it_asks_for_the_weak_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # Other tests may have changed the logger's handlers and levels.
    monkeypatch.setattr(code.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr("sparrow_sglang.rl.sandbox.run.shutil.which", no_bubblewrap)
    # The sandbox is refused before the task's files are read.
    with pytest.raises(InputError, match="task.options.sandbox='bubblewrap'") as caught:
        load("code", tmp_path / "not-there.jsonl")
    assert "\n" not in str(caught.value) and 'sandbox = "weak"' in str(caught.value)
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "Double it.", "tests": DOUBLE}] * 10)
    task = load("code", path, options={"sandbox": "weak"})
    assert all(weakness in said[0] for weakness in weaknesses())
    assert code.reward(task.train[0], "```python\nprint(2 * int(input()))\n```") == 1.0
    with pytest.raises(InputError, match="options.sandbox='none' is .*'bubblewrap' or 'weak'"):
        load("code", path, options={"sandbox": "none"})


def no_bubblewrap(program: str, path: str | None = None) -> str | None:
    return None if program == "bwrap" else WHICH(program, path=path)
