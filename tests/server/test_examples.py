"""The small examples in the "README.md" of examples/, run as they are with a tiny model."""

import ast
import json
import math
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapted_models import save_model_of_words, words
from engines import start_engine
from servers import start_server

from sparrow_sglang import get_schedule

FOLDER = Path(__file__).parents[2] / "examples"
SERVED = {"skip_tokenizer_init": False, "grammar_backend": "none", "sparrow_schedule": "fixed-64"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_of_words(tmp_path_factory.mktemp("words"))


def reports(printed: str) -> Iterator[dict[str, Any]]:
    """Reports of the KV read, as the examples print them: one a line, in a list or not."""
    for line in printed.splitlines():
        if line.startswith(("{", "[{")):
            value = ast.literal_eval(line)
            yield from value if isinstance(value, list) else [value]


def test_serve_and_ask(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started = []

    class Running:
        """In place of `sparrow serve`: the server is forked from this process, to save time."""

        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def terminate(self) -> None:
            started.append(["terminated"])

    with start_server(model, attention_backend="sparrow", **SERVED) as url:
        port = url.rpartition(":")[2]
        monkeypatch.setattr(subprocess, "Popen", Running)
        monkeypatch.setattr(sys, "argv", ["serve_and_ask.py", "--model-path", model])
        monkeypatch.setenv("PORT", port)
        runpy.run_path(str(FOLDER / "serve_and_ask.py"), run_name="__main__")
    assert started == [["sparrow", "serve", "--port", port, "--model-path", model], ["terminated"]]
    [report] = reports(capfd.readouterr().out)
    assert report["schedule"] == "fixed-64"
    assert 0 < report["kv_tokens_read_mean"] < report["kv_tokens_cached_mean"]


def test_offline_engine(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import sglang

    with ExitStack() as stack:
        # The example's own shutdown would end the servers of other tests, too.
        monkeypatch.setattr(
            "sglang.srt.entrypoints.engine.kill_process_tree", lambda *_, **__: None
        )
        monkeypatch.setattr(
            sglang,
            "Engine",
            lambda model_path, **given: stack.enter_context(
                start_engine(model_path, **given, **SERVED)
            ),
        )
        monkeypatch.setattr(sys, "argv", ["offline_engine.py", model])
        runpy.run_path(str(FOLDER / "offline_engine.py"), run_name="__main__")
    sparse, dense = reports(capfd.readouterr().out)
    assert (sparse["schedule"], dense["schedule"]) == ("fixed-64", None)
    assert 0 < sparse["kv_tokens_read_mean"] < sparse["kv_tokens_cached_mean"]
    assert dense["kv_tokens_read_mean"] == dense["kv_tokens_cached_mean"]


LAST_IS_EVEN = """
def reward(prompt, text):
    return float(int(text.split()[-1][1:]) % 2 == 0)
"""
COMPARED = """
run_dir = "unused"
model.path = "{model}"
[task]
name = "files"
train_path = "{folder}/train.jsonl"
heldout_path = "{folder}/heldout.jsonl"
options = {{ reward = "last_is_even:reward" }}
[evaluation]
temperature = 0
prompts = 0
max_new_tokens = 8
"""


def test_compare_answers(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    texts = [words([draw.randrange(1, 60) for _ in range(300)]) for _ in range(16)]
    (tmp_path / "heldout.jsonl").write_text("\n".join(json.dumps({"prompt": t}) for t in texts))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "w1"}))
    (tmp_path / "run.toml").write_text(COMPARED.format(model=model, folder=tmp_path))
    (tmp_path / "last_is_even.py").write_text(LAST_IS_EVEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "answers.json"

    def compare(url: str, *options: str) -> None:
        given = ["compare_answers.py", str(tmp_path / "run.toml"), url, "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(str(FOLDER / "compare_answers.py"), run_name="__main__")

    def passes(url: str, option: dict[str, Any]) -> list[bool]:
        """Asks through the route of chats, one prompt at a time."""
        results = []
        for text in texts:
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": 8,
                "custom_params": {"sparrow": option},
            }
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            content = answer["choices"][0]["message"]["content"]
            results.append(int(content.split()[-1][1:]) % 2 == 0)
        return results

    with start_server(model, attention_backend="sparrow", **SERVED) as url:
        compare(url, "--schedules", "dense", "fixed-48")
        assert get_schedule(url).name == "fixed-64"
        compare(url, "--name", "again")
        dense = passes(url, {"dense": True})
        sparse = passes(url, {"kv_budget_tokens": 48})
        served = passes(url, {"kv_budget_tokens": 64})
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "fixed-48", "again"]
    for row, expected in zip(rows, (dense, sparse, served), strict=True):
        pairs = list(zip(dense, expected, strict=True))
        better, worse = pairs.count((False, True)), pairs.count((True, False))
        found = row["compared"]
        assert (found["prompts"], found["pass_rate"]) == (16, sum(expected) / 16)
        assert (found["better"], found["worse"]) == (better, worse)
        assert found["difference"] == pytest.approx((better - worse) / 16)
        low, high = found["difference_interval"]
        assert low < found["difference"] < high or better == worse
        changed = better + worse
        tail = sum(math.comb(changed, k) for k in range(min(better, worse) + 1)) / 2**changed
        assert found["p_value"] == pytest.approx(min(1, 2 * tail))
    assert rows[1]["compared"]["better"] + rows[1]["compared"]["worse"] > 0
    assert rows[1]["kv_tokens_read"] < rows[0]["kv_tokens_read"]
    # Errors of a user end in a line, and leave the rows as they are.
    before = out.read_text()
    with pytest.raises(SystemExit, match="not running"):
        compare(url)
    (tmp_path / "run.toml").write_text(
        COMPARED.format(model=model, folder=tmp_path).replace("heldout_path", "# heldout_path")
    )
    with pytest.raises(SystemExit, match="heldout"):
        compare(url)
    assert out.read_text() == before
    assert len(capfd.readouterr().out.splitlines()) >= 3
