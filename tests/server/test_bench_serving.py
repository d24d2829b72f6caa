"""`sparrow bench serving`: real servers driven by SGLang's own client."""

import argparse
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import servers
from engines import import_for_fork, save_tiny_model
from small_benchmarks import INPUT, OUTPUT, REQUESTS, SERVING

from sparrow_sglang.benchmarks import serving
from sparrow_sglang.benchmarks.common import Comparison, Side
from sparrow_sglang.benchmarks.serving import running_server
from sparrow_sglang.commands import cli, serve


@contextmanager
def forked_server(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """The server of this command line, read by SGLang's parser, without its minute of imports."""
    import_for_fork()
    from sglang.srt.server_args import ServerArgs

    assert command[:2] == [sys.executable, "-m"]
    if command[2] == "sparrow_sglang.commands.cli":
        assert command[3] == "serve"
        words = serve.with_defaults(command[4:])
    else:
        assert command[2] == "sglang.launch_server"
        words = list(command[3:])
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = vars(parser.parse_args(words))
    chosen = {key: value for key, value in given.items() if value != parser.get_default(key)}
    # The harness picks a port itself; here the command line has.
    with (
        mock.patch.object(servers, "free_port", lambda: chosen["port"]),
        servers.start_server(**{"skip_tokenizer_init": False} | chosen) as started,
    ):
        assert started == url
        yield


def forked_client(command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
    """SGLang's client, run as its command does, but without its half minute of imports."""
    assert list(command[:2]) == [sys.executable, "-m"]
    said, told = multiprocessing.Pipe(duplex=False)
    # Import the client here, once for both sides.
    importlib.import_module(command[2])

    def run() -> None:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__")

    client = multiprocessing.get_context("fork").Process(target=run)
    client.start()
    told.close()
    with open(said.fileno(), closefd=False, encoding="utf-8") as output:
        text = output.read()
    client.join()
    return subprocess.CompletedProcess(list(command), client.exitcode or 0, stdout=text)


def test_bench_serving_measures_both_servers_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny"
    save_tiny_model(model, "qwen3", spread=0.15)
    config = json.loads((model / "config.json").read_text())
    (model / "model.safetensors").unlink()
    # The shapes alone, as the command has them on a GPU.
    compared = Comparison(
        "tiny", model, False, config, (Side("sparrow", "fixed-64"), Side("torch_native", None))
    )
    monkeypatch.setattr(serving, "running_server", forked_server)
    forked = SimpleNamespace(run=forked_client, PIPE=None, STDOUT=None)
    monkeypatch.setattr(serving, "subprocess", forked)
    monkeypatch.setattr(serving, "comparison", lambda options: compared)
    monkeypatch.setattr(serving, "require_cuda", lambda *needs: None)
    out = tmp_path / "serving.json"
    assert (
        cli.main(["bench", "serving", *SERVING, "--out", str(out), "--", "--skip-server-warmup"])
        == 0
    )
    result = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    sparse, dense = result["rows"]
    assert [(row["backend"], row["schedule"]) for row in (sparse, dense)] == [
        ("sparrow", "fixed-64"),
        ("torch_native", None),
    ]
    for row in (sparse, dense):
        measured = row["bench_serving"]
        assert measured["completed"] == REQUESTS
        assert measured["total_input_tokens"] == REQUESTS * INPUT
        assert measured["total_output_tokens"] == REQUESTS * OUTPUT
        # Counted again from the text that the client got.
        assert measured["total_output_tokens_retokenized"] == REQUESTS * OUTPUT
        assert measured["output_throughput"] == pytest.approx(
            REQUESTS * OUTPUT / measured["duration"]
        )
    one, other = (row["bench_serving"] for row in (sparse, dense))
    assert result["compared"] == {
        "throughput_ratio": pytest.approx(one["output_throughput"] / other["output_throughput"]),
        "tpot_ratio": pytest.approx(other["median_tpot_ms"] / one["median_tpot_ms"]),
        "ttft_ratio": pytest.approx(other["median_ttft_ms"] / one["median_ttft_ms"]),
    }


def test_a_server_that_does_not_start_fails_the_command(
    tiny_qwen3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def dies(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
        with running_server([sys.executable, "-c", "raise SystemExit('bad flag')"], url, log):
            yield

    monkeypatch.setattr(serving, "running_server", dies)
    out = tmp_path / "serving.json"
    words = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SERVING, "--out", str(out)]
    assert cli.main(["bench", "serving", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sparrow bench serving: error: sparse: the server did not start")
    assert "bad flag" in error and json.loads(out.read_text())["rows"] == []
