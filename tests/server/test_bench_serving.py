"""`sparrow bench serving`: real servers driven by SGLang's own client, and their life and end."""

import argparse
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import servers
from command_lines import refusal
from engines import import_for_fork, save_tiny_model
from servers import free_port

from sparrow_sglang.benchmarks.result_files import RESULTS
from sparrow_sglang.benchmarks.rollouts import serving
from sparrow_sglang.benchmarks.rollouts.server_process import ServerFailed, running_server
from sparrow_sglang.benchmarks.rollouts.word_tokenizer import save_word_tokenizer
from sparrow_sglang.benchmarks.steps.comparison import Comparison, Side
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.commands import cli, serve

REQUESTS, INPUT, OUTPUT = 3, 40, 60
SMALL = ["--num-prompts", str(REQUESTS), "--input-len", str(INPUT), "--output-len", str(OUTPUT)]


# -- servers as processes

SERVER = """
import http.server, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
born = time.monotonic()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/health" and time.monotonic() - born > 0.7
        self.send_response(200 if ready else 503)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_server_is_waited_for_and_ends_with_its_workers(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    start = time.monotonic()
    with running_server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}", log):
        assert time.monotonic() - start > 0.7
        worker = int(log.read_text().split()[1])
        assert psutil.pid_exists(worker)
    assert wait_until_gone(worker)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('\\n'.join(f'line {i}' for i in range(100))); raise SystemExit('no such model')"
    with pytest.raises(ServerFailed, match="ended with code 1") as failed:
        with running_server(
            [sys.executable, "-c", code], f"http://127.0.0.1:{free_port()}", tmp_path / "log"
        ):
            pytest.fail("it never was healthy")
    message = str(failed.value)
    assert "line 99" in message and "no such model" in message and "line 50\n" not in message


def test_sigterm_of_the_benchmark_ends_its_server(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    code = f"""
import sys, time
from pathlib import Path
from sparrow_sglang.benchmarks.command import exit_on_sigterm
from sparrow_sglang.benchmarks.rollouts.server_process import running_server
exit_on_sigterm()
command = [sys.executable, "-c", {SERVER!r}, "{port}"]
with running_server(command, "http://127.0.0.1:{port}", Path({str(log)!r})):
    print("running", flush=True)
    time.sleep(600)
"""
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None and bench.stdout.readline() == "running\n"
    worker = int(log.read_text().split()[1])
    os.kill(bench.pid, signal.SIGTERM)
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    bench.stdout.close()
    assert wait_until_gone(worker)


# -- the tokenizer of models without one


def test_any_token_ids_survive_the_way_to_text_and_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_word_tokenizer(tmp_path, 3000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.num_special_tokens_to_add()) == (3000, 0)
    ids = [0, 2999, 17, 17, *range(0, 3000, 7)]
    assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True)) == ids


# -- both sides


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
    # Once, for both sides.
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
    monkeypatch.setattr(serving, "comparison", lambda options, on_gpu: compared)
    monkeypatch.setattr(serving, "require_cuda", lambda *needs: None)
    out = tmp_path / RESULTS / "serving.json"
    assert (
        cli.main(["bench", "serving", *SMALL, "--out", str(out), "--", "--skip-server-warmup"]) == 0
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
    }
    assert f"| tiny | fixed-64 | {REQUESTS} | {INPUT} | {OUTPUT} |" in generate(tmp_path)


# -- what goes wrong


def test_requests_that_were_not_answered_are_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        out = Path(command[command.index("--output-file") + 1])
        out.write_text(json.dumps({"completed": 2, "server_info": {}}) + "\n")
        return subprocess.CompletedProcess(command, 0, stdout="refused: queue is full")

    monkeypatch.setattr(
        serving, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=None)
    )
    options = serving._parser().parse_args(SMALL)
    with pytest.raises(serving.ServingError, match="(?s)2 of 3 requests.*queue is full"):
        serving.drive("http://127.0.0.1:1", tmp_path, options, tmp_path)


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
    words = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SMALL, "--out", str(out)]
    assert cli.main(["bench", "serving", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sparrow bench serving: error: sparse: the server ended with code 1")
    assert "bad flag" in error and not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts 0: expected 1 or more"),
        (["--max-concurrency", "0"], "--max-concurrency 0: expected 1 or more"),
        (["--range-ratio", "1.5"], "--range-ratio 1.5: expected a share from 0 to 1"),
        (["--request-rate", "0"], "--request-rate 0.0: expected more than 0"),
        (["--request-rate", "nan"], "--request-rate nan: expected more than 0"),
        (["--input-len", "4096"], "do not fit into the model's context of 4096"),
        (["--schedule", "fixed-1x"], "schedule 'fixed-1x' is not known"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_a_server_starts(
    words: list[str],
    message: str,
    tiny_qwen3: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "running_server", None)
    usual = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SMALL]
    assert message in refusal(["bench", "serving", *usual, *words], capsys)
