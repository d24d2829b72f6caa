"""Command lines that are refused within a second or two: no torch, no SGLang, no model."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = "run_dir = 'run'\n[task]\nname = 'math'\ntrain_path = 'rows.jsonl'\n"
LIGHT = """
import sys
from sparrow_sglang.commands.cli import main
code = main(sys.argv[1:])
slow = {"torch", "sglang", "transformers"} & set(sys.modules)
sys.exit(f"imported {slow}" if slow else code)
"""


@pytest.mark.parametrize(
    ("argv", "content", "message"),
    [
        (["serve", "--port", "99999"], "", "--port 99999: expected a port from 1 to 65535"),
        (["serve", "--model-path", "./gone"], "", "./gone: no such folder (relative to {cwd})"),
        (["bench", "serving", "--model-path", "gone"], "", "--model-path gone: expected the"),
        (["bench", "rollout", "--model-path", "gone"], "", "--model-path gone: expected the"),
        (["bench", "step", "--models", "gone"], "", "--models 'gone': expected some of"),
        (["train", "gone.toml"], "", "gone.toml (relative to {cwd}): cannot be read"),
        (["train", "run.toml"], "steps = 0\n" + RUN, "steps=0 is not allowed"),
        (["train", "run.toml"], RUN.replace("math", "maths"), "did you mean 'math'?"),
        (["train", "run.toml"], RUN, "rows.jsonl:2: not JSON"),
        (["train", "run.toml"], RUN.replace("rows", "gone"), "train_path='gone.jsonl': No such"),
        (
            ["train", "run.toml"],
            RUN + "[engine]\nschedule = 'fixd-512'\n",
            "engine.schedule: schedule",
        ),
        (
            ["train", "run.toml"],
            RUN + "[engine]\nschedule = 'dense'\nserver_args = {tp_sise = 2}\n",
            "engine.server_args.tp_sise is no argument of SGLang: did you mean 'tp_size'",
        ),
        (["calibrate", "--prompts", "gone.jsonl"], "", "--prompts gone.jsonl (relative to {cwd})"),
        (["calibrate", "--prompts", "rows.jsonl"], "", "rows.jsonl:1: "),
        (
            ["calibrate", "--check", "gone.json"],
            "",
            "gone.json (relative to {cwd}): cannot be read",
        ),
        (["calibrate", "--out", "m.yaml"], "", "--out m.yaml: expected the name of a .json file"),
        (["calibrate", "--engine-args", '{"tp_sise": 2}'], "", "did you mean 'tp_size'"),
        (
            ["calibrate", "--check", "m.json", "--rule", "calibrated"],
            "",
            "--rule calibrated has no meaning with --check",
        ),
    ],
)
def test_cheap_mistakes_are_found_before_anything_slow_is_imported(
    tmp_path: Path, argv: list[str], content: str, message: str
) -> None:
    (tmp_path / "run.toml").write_text(content)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n{"prompt": \n')
    if argv[0] == "calibrate":
        (tmp_path / "rows.jsonl").write_text('{"text": "no prompt"}\n')
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *argv],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert message.format(cwd=tmp_path) in done.stderr
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
