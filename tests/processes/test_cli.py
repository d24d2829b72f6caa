"""The command `sparrow`: its words and exit codes, and that mistakes are found within a second. All
command lines run in one process, before anything that takes longer to import than to answer."""

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ports import free_port

RUN = "run_dir = 'run'\n[task]\nname = 'math'\ntrain_path = 'rows.jsonl'\n"
STORY = "run_dir = 'run'\n[task]\nname = 'story'\n[task.options]\nwords = 8\n"
MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-1.7b"
ANSWERED = [
    (["--help"], ["sparrow serve", "sparrow doctor", "KV pages"]),
    (["serve", "--help"], ["examples:", "--help-all", "sparrow doctor"]),
    (["plan"], ["qwen3-1.7b on H200", "by schedule qwen3-1.7b-0.86"]),
    (["bench", "--help"], ["examples", "sparrow bench step --models", "NVIDIA GPU"]),
    (["--version"], [version("sparrow-sglang")]),
]
OTHER_SERVER = socket.create_server(("0.0.0.0", free_port()))
FREE, TAKEN = str(free_port()), str(OTHER_SERVER.getsockname()[1])
# A command line, the run.toml in its folder, and the error.
REFUSED = [
    (["srve"], "", "invalid choice: 'srve' (choose from 'serve', 'doctor'"),
    ([], "", "required: COMMAND"),
    (["plan", "--model-path", "m", "--tp", "3"], "", "sparrow plan: error: unrecognized"),
    (["bench"], "", "required: benchmark"),
    (["bench", "stp"], "", "'stp' (choose from 'step', 'rollout'"),
    (["bench", "--", "step"], "", "without --"),
    (["serve", "--sparrow-shedule", "a"], "", "did you mean --sparrow-schedule?"),
    (["serve", "--sparrow-audit-rate", "x"], "", "--sparrow-audit-rate x: expected 0 to 1"),
    (["serve", "--port", "99999999"], "", "--port 99999999: expected 1 to 65535"),
    (["serve", "--port", TAKEN], "", f"--port {TAKEN} of --host 127.0.0.1: Address already in use"),
    (["serve", "--host", "192.0.2.1"], "", "--port 30000 of --host 192.0.2.1: Cannot assign"),
    (["serve", "./gone", "--port", FREE], "", "no such folder (relative to {cwd}); expected"),
    (["bench", "rollout", "--model-path", "gone"], "", "gone"),
    (["bench", "step", "--acceptance-rate", "1.5"], "", "--acceptance-rate: expected 0 to 1"),
    (["bench", "step", "--models", "gone"], "", "--models 'gone': expected some of gemma3-12b"),
    (["train", "gone.toml"], "", "gone.toml (relative to {cwd}): cannot be read"),
    (["train", "run.toml"], "steps = 0\n" + RUN, "steps=0 is not allowed"),
    (["train", "run.toml"], RUN.replace("math", "maths"), "did you mean 'math'?"),
    (["train", "run.toml"], RUN, "rows.jsonl:2: not JSON"),
    (["train", "run.toml"], RUN.replace("math", "gone_task:load"), "no module 'gone_task'"),
    (["train", "run.toml"], RUN.replace("rows", "gone"), "train_path='gone.jsonl': No such"),
    (["train", "run.toml"], RUN + "[engine]\nschedule = 'fixd-512'\n", "engine.schedule: schedule"),
    (
        ["train", "run.toml"],
        STORY + "[engine.server_args]\nquantization = 'fp8'\n",
        "engine.server_args.quantization='fp8': expected none",
    ),
    (["train", "run.toml"], STORY + "train = 999999999\n", "task.options.train=999999999"),
    (["calibrate", "--model-path", "a/b"], "", "--model-path a/b: no such folder"),
    (["calibrate", "--prompts", "gone.jsonl"], "", "--prompts gone.jsonl (relative to {cwd})"),
    (["calibrate", "--prompts", "texts.jsonl"], "", "texts.jsonl:1: "),
    (["calibrate", "--check", "gone.json"], "", "gone.json (relative to {cwd}): cannot be read"),
    (["calibrate", "--out", "m.yaml"], "", "--out m.yaml: expected the name of a .json file"),
    (["calibrate", "--out", "/typo/x.json"], "", "existing folder, got /typo/x.json"),
    (["calibrate", "--work", "typo/x"], "", "existing folder, got typo/x"),
    (["bench", "step", "--out", "/typo/x.json"], "", "existing folder, got /typo/x.json"),
    (["report", ".", "--out", "/typo/x.html"], "", "existing folder, got /typo/x.html"),
    (["calibrate", "--check", "m.json", "--out", "m.json"], "", "--out m.json"),
    (["calibrate", "--check", "m.json", "--rule", "calibrated"], "", "--rule"),
    (["calibrate", "--check", "m.json", "--page-size", "16"], "", "--page-size"),
    (["calibrate", "--prompts", "p", "--prompts-per-bin", "9"], "", "--prompts-per-bin"),
    (["calibrate", "--engine-args", '{"dp_size": 2}'], "", "--engine-args dp_size"),
    (["calibrate", "--samples", "999999999"], "", "--samples: expected 1 to 1024"),
    (["bench", "rollout", "--model-path", str(MODEL), "--drafts", "8", "--acceptance-rate", "0.9"],
     "", "--acceptance-rate 0.9"),
    (["bench", "rollout", "--prompts", "p"], "", "--prompts p: expected with --model-path only"),
    (["bench", "rollout", "--sides", "ngram"], "", "--sides ngram: random weights repeat no text"),
    (["bench", "step", "--drafts", "30+9"], "", "expected K or K+M, 1 to 32"),
    (["bench", "all", "--part", "rollout-coder"], "", "--model-path: expected the folder"),
    (["bench", "rollout", "--sequences", "800000000"], "", "--sequences: expected 1 to 65536"),
    (["plan", "--model-path", str(MODEL), "--batch", "9" * 400], "", "--batch: expected 1 to"),
    (["plan", "--schedule", "qwen3-1.7b-0.87"], "", "is not known"),
    (["plan", "--schedule", "fixed-100"], "", "budget_tokens[0]=100"),
]  # fmt: skip
PROGRAM = """
import contextlib, io, json, os, pathlib, sys
from sparrow_sglang.commands.cli import main

for argv, config in json.load(sys.stdin):
    pathlib.Path("run.toml").write_text(config)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code
    slow = {"torch", "sglang", "transformers", "scipy"} & set(sys.modules)
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(slow)]))
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str
    imported: list[str]


class Answers(NamedTuple):
    folder: Path
    answered: list[Said]
    refused: list[Said]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("here")
    (folder / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n{"prompt": \n')
    (folder / "texts.jsonl").write_text('{"text": "no prompt"}\n')
    lines: list[Any] = [(argv, "") for argv, _ in ANSWERED]
    lines += [(argv, config) for argv, config, _ in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        # Where the small model has not been converted yet.
        env=os.environ | {"SPARROW_CACHE": str(folder / "cache")},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = [Said(*json.loads(line)) for line in done.stdout.splitlines()]
    return Answers(folder, said[: len(ANSWERED)], said[len(ANSWERED) :])


@pytest.mark.parametrize("number", range(len(ANSWERED)), ids=[" ".join(a) for a, _ in ANSWERED])
def test_what_is_asked_is_answered(answers: Answers, number: int) -> None:
    said, (_, words) = answers.answered[number], ANSWERED[number]
    assert (said.code, said.err, said.imported) == (0, "", [])
    assert all(word in said.out for word in words)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(a) for a, *_ in REFUSED])
def test_a_mistake_is_one_line_before_anything_slow_is_imported(
    answers: Answers, number: int
) -> None:
    said, (*_, message) = answers.refused[number], REFUSED[number]
    assert message.format(cwd=answers.folder) in said.err
    assert (said.code, said.out, said.imported) == (2, "", [])
    assert said.err.count("\n") == 1
