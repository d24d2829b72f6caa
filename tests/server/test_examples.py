"""The small examples in the "README.md" of examples/, run as they are with a tiny model."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from adapted_models import save_model_of_words
from engines import start_engine
from servers import start_server

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
