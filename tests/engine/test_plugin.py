"""Every channel reaches the scheduler of a real SGLang with the same effect, or nothing starts."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points

import psutil
import pytest
import requests
from engines import import_for_fork, sparse, start_engine
from ports import free_port
from programs import run
from servers import forked
from waiting import wait_until

from sparrow_sglang.commands import cli
from sparrow_sglang.schedules.schedule import BudgetSchedule

PROMPT = random.Random(0).choices(range(3, 256), k=150)
NEW_TOKENS = 24
SAMPLING = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
START_UP = "sparse decode with schedule"


def answer(engine) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs; the prompt is longer than the budget of 64."""
    return read(engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True))


def read(output: dict) -> tuple[list[int], list[float]]:
    values = output["meta_info"]["output_token_logprobs"]
    return output["output_ids"], [value for value, *_ in values]


def assert_same(got: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]):
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.fixture(scope="module")
def schedule_file(tmp_path_factory) -> str:
    """The same budget as fixed-64, under another name."""
    path = tmp_path_factory.mktemp("schedule") / "mine.json"
    fields = BudgetSchedule.fixed(64).model_dump()
    BudgetSchedule(**(fields | {"name": "mine", "calibrated": True})).save(path)
    return str(path)


@pytest.fixture(scope="module")
def by_keyword(sharp_llama) -> tuple[list[int], list[float]]:
    with start_engine(sharp_llama, **sparse("fixed-64")) as engine:
        assert engine.get_server_info()["page_size"] == 16
        return answer(engine)


def test_environment(sharp_llama, schedule_file, by_keyword, monkeypatch, capfd):
    monkeypatch.setenv("SPARROW_SCHEDULE", schedule_file)
    with start_engine(sharp_llama, attention_backend="sparrow") as engine:
        assert engine.get_server_info()["page_size"] == 16
        assert_same(answer(engine), by_keyword)
    [line] = [line for line in capfd.readouterr().err.splitlines() if START_UP in line]
    assert line.endswith(
        f"{START_UP} mine (calibrated): KV budget 64..64 tokens, sparse"
        " from 65 tokens on, page size 16, dense layers [0, 1]"
    )


# A process that has imported SGLang, and has not let it load plugins.
FOREIGN = """
import argparse, dataclasses, json, pickle, sys, types
import sglang
from sglang.srt.server_args import ServerArgs
from sglang.srt import plugins
from sparrow_sglang.plugin.state import PROCESS

model, schedule = sys.argv[1:]

class Prefixed(argparse.ArgumentParser):
    def add_argument(self, *names, **options):
        names = ["--sglang-" + name[2:] if name.startswith("--") else name for name in names]
        options.pop("dest", None)
        return super().add_argument(*names, **options)

plain, prefixed = argparse.ArgumentParser(), Prefixed(add_help=False)
for parser in (plain, prefixed):
    ServerArgs.add_cli_args(parser)
flags = ["model-path", model, "attention-backend", "sparrow", "sparrow-schedule", schedule]
by_cli = ServerArgs.from_cli_args(
    plain.parse_args([x if i % 2 else "--" + x for i, x in enumerate(flags)])
)
parsed = prefixed.parse_args([x if i % 2 else "--sglang-" + x for i, x in enumerate(flags)])
struct = getattr(ServerArgs, "__struct_fields__", None)
names = struct or {field.name for field in dataclasses.fields(ServerArgs)}
by_prefix = ServerArgs(
    **{k[7:]: v for k, v in vars(parsed).items() if k.startswith("sglang_") and k[7:] in names}
)
by_call = ServerArgs(
    model_path=model, attention_backend="sparrow", sparrow_schedule=schedule, log_level="error"
)
built = [by_cli, by_prefix, by_call, pickle.loads(pickle.dumps(by_call))]
for args in built:
    if struct:
        args.resolve_once()
as_dict = by_call.resolved_dict() if struct else dataclasses.asdict(by_call)
default = ServerArgs(model_path=model)
if struct:
    default.resolve_once()
    default = types.SimpleNamespace(**default.resolved_dict())
print("RESULT" + json.dumps({
    "plugins_loaded": plugins._plugins_loaded,
    "registered": bool(PROCESS.hooks),
    "built": [[a.attention_backend, a.sparrow_schedule, a.page_size] for a in built],
    "as_dict": as_dict["sparrow_schedule"],
    "default": default.page_size,
}))
"""


def server_flags(model: str) -> list[str]:
    return [
        *("--model-path", model, "--attention-backend", "sparrow", "--dtype", "float32"),
        *("--skip-tokenizer-init", "--log-level", "error", "--max-total-tokens", "4096"),
        *("--nccl-port", str(free_port())),
    ]


def test_foreign_process(sharp_llama, schedule_file):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPARROW")}
    printed = run(sys.executable, "-c", FOREIGN, sharp_llama, schedule_file, env=inherited)
    result = json.loads(printed.rsplit("RESULT", 1)[1])
    assert result["plugins_loaded"] is False
    assert result["registered"] is False
    assert result["built"] == [["sparrow", schedule_file, 16]] * 4
    assert result["as_dict"] == schedule_file
    assert result["default"] == 1


def test_sparrow_serve_says_when_it_is_ready_and_ends_by_ctrl_c(sharp_llama, by_keyword, capfd):
    import_for_fork()
    port = free_port()
    words = ["serve", *server_flags(sharp_llama), "--sparrow-schedule", "fixed-64"]

    def serve() -> None:
        # Ctrl-C works as in a terminal, even where the tests were started with it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(cli.main([*words, "--port", str(port)]))

    others = set(multiprocessing.active_children())
    with forked(port, serve) as url:
        assert_served(url, "fixed-64", by_keyword)
        logged: list[str] = []
        wait_until(lambda: logged.append(capfd.readouterr().err) or "ready on" in "".join(logged))
        assert f"ready on {url}" in "".join(logged) and "fixed-64" in "".join(logged)
        [server] = set(multiprocessing.active_children()) - others
        os.killpg(server.pid, signal.SIGINT)
        server.join(120)
        assert server.exitcode == 0


def test_sigterm_ends_what_a_server_has_started_before_it_serves(sharp_llama):
    """A process of SGLang's ends with its parent only once it has imported SGLang."""
    import_for_fork()
    from sglang.srt.entrypoints import http_server

    reader, writer = multiprocessing.Pipe(duplex=False)
    words = ["serve", *server_flags(sharp_llama), "--sparrow-schedule", "fixed-64"]

    def starting(server_args, launch_callback):
        writer.send(subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)

    def serve() -> None:
        os.setsid()
        http_server.launch_server = starting
        sys.exit(cli.main([*words, "--port", str(free_port())]))

    server = multiprocessing.get_context("fork").Process(target=serve)
    server.start()
    writer.close()
    child = psutil.Process(reader.recv())
    server.terminate()
    server.join(60)
    assert server.exitcode == 128 + signal.SIGTERM
    child.wait(10)


def test_sglang_serve(sharp_llama, schedule_file, by_keyword, monkeypatch, capfd):
    import_for_fork()
    port = free_port()
    flags = ["--sparrow-schedule", schedule_file, "--port", str(port)]
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", *server_flags(sharp_llama), *flags])
    [command] = entry_points(group="console_scripts", name="sglang")
    with forked(port, command.load()) as url:
        assert_served(url, schedule_file, by_keyword)
    assert f"{START_UP} mine (calibrated)" in capfd.readouterr().err


def assert_served(url: str, schedule: str, expected: tuple[list[int], list[float]]) -> None:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    chosen = [info[name] for name in ("attention_backend", "sparrow_schedule", "page_size")]
    assert chosen == ["sparrow", schedule, 16]
    request = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    output = requests.post(f"{url}/generate", json=request, timeout=60).json()
    assert_same(read(output), expected)


def test_a_hook_that_sglang_could_not_apply(tiny_llama, monkeypatch, capfd):
    """SGLang logs what goes wrong in a plugin and goes on; the scheduler must not."""
    # SGLang loads its plugins in this process.
    import_for_fork()
    from sparrow_sglang.plugin.state import PROCESS

    target = "sglang.srt.mem_cache.common.kv_to_page_num"
    [first, *rest] = PROCESS.hooks
    monkeypatch.setattr(PROCESS, "error", None)
    monkeypatch.setattr(PROCESS, "hooks", (first._replace(target=target), *rest))
    with pytest.raises(RuntimeError) as refused:
        with start_engine(tiny_llama, **sparse("fixed-64")):
            pass
    logged = capfd.readouterr().err + str(refused.value)
    assert f"SGLang did not apply these hooks of sparrow-sglang: ['{target}']" in logged
    assert START_UP not in logged
