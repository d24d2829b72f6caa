"""Every channel reaches the scheduler of a real SGLang with the same effect, or nothing starts."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from engines import import_for_fork, start_engine, unused_model_files
from ports import free_port
from servers import forked

from sparrow_sglang.schedule import BudgetSchedule

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
    with start_engine(
        sharp_llama, attention_backend="sparrow", sparrow_schedule="fixed-64"
    ) as engine:
        assert engine.get_server_info()["page_size"] == 16
        return answer(engine)


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen]:
    """A fresh process in the state that a user would start it in; killed at the end."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPARROW")}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited | environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class TestEngineChannels:
    def test_sparse_decode_differs_from_dense(self, sharp_llama, by_keyword):
        with start_engine(sharp_llama, attention_backend="torch_native", page_size=16) as engine:
            dense = answer(engine)
        difference = [abs(a - b) for a, b in zip(dense[1], by_keyword[1], strict=True)]
        assert max(difference) > 0.01

    @pytest.mark.parametrize(
        ("keywords", "environment", "source"),
        [
            ({"sparrow_schedule": "FILE"}, {}, "--sparrow-schedule"),
            ({}, {"SPARROW_SCHEDULE": "FILE"}, "SPARROW_SCHEDULE"),
        ],
    )
    def test_channel(
        self,
        sharp_llama,
        schedule_file,
        by_keyword,
        monkeypatch,
        capfd,
        keywords,
        environment,
        source,
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("FILE", schedule_file))
        keywords = {name: value.replace("FILE", schedule_file) for name, value in keywords.items()}
        with start_engine(sharp_llama, attention_backend="sparrow", **keywords) as engine:
            assert engine.get_server_info()["page_size"] == 16
            assert_same(answer(engine), by_keyword)
        [line] = [line for line in capfd.readouterr().err.splitlines() if START_UP in line]
        assert line.endswith(
            f"{START_UP} mine (calibrated), from {source}: KV budget 64..64 tokens, sparse from"
            " 65 tokens on, page size 16, dense layers [0, 1]"
        )

    def test_config_file_and_ready_made_server_args(self, sharp_llama, schedule_file, by_keyword):
        """What `--config` and frameworks that build ServerArgs themselves do."""
        from sglang.srt.server_args import prepare_server_args

        path = Path(schedule_file).with_name("server.yaml")
        path.write_text(f"attention-backend: sparrow\nsparrow-schedule: {schedule_file}\n")
        arguments = f"--model-path {sharp_llama} --skip-tokenizer-init --dtype float32 --config"
        server_args = prepare_server_args([*arguments.split(), str(path)])
        with start_engine(sharp_llama, server_args=server_args) as engine:
            assert_same(answer(engine), by_keyword)


# A process that has imported SGLang, and has not let it load plugins.
FOREIGN = """
import argparse, dataclasses, json, pickle, sys, types
import sglang
from sglang.srt.server_args import ServerArgs
from sglang.srt import plugins

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
    "plugin_imported": "sparrow_sglang.plugin.registration" in sys.modules,
    "built": [[a.attention_backend, a.sparrow_schedule, a.page_size] for a in built],
    "as_dict": as_dict["sparrow_schedule"],
    "default": default.page_size,
}))
"""


# Ctrl-C works as in a terminal, even where the tests were started with it ignored.
SERVE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from sparrow_sglang.commands.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def processes(sharp_llama, schedule_file):
    """Started at once, because each spends half a minute importing SGLang."""
    port = free_port()
    flags = [*server_flags(sharp_llama), "--sparrow-schedule", "fixed-64", "--port", str(port)]
    commands = {
        "serve": [sys.executable, "-c", SERVE, "serve", *flags],
        "foreign": [sys.executable, "-c", FOREIGN, sharp_llama, schedule_file],
    }
    environment = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_model_files())}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(process(*command, **environment))
            for name, command in commands.items()
        }
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", **started)


def server_flags(model: str) -> list[str]:
    return [
        *("--model-path", model, "--attention-backend", "sparrow", "--dtype", "float32"),
        *("--skip-tokenizer-init", "--log-level", "error", "--max-total-tokens", "4096"),
        *("--nccl-port", str(free_port())),
    ]


class TestProcesses:
    def test_foreign_process(self, processes, schedule_file):
        output, _ = processes.foreign.communicate(timeout=300)
        result = json.loads(output.rsplit("RESULT", 1)[1])
        assert result["plugins_loaded"] is False
        assert result["plugin_imported"] is False
        assert result["built"] == [["sparrow", schedule_file, 16]] * 4
        assert result["as_dict"] == schedule_file
        assert result["default"] == 1

    def test_sparrow_serve_says_when_it_is_ready_and_ends_by_ctrl_c(self, processes, by_keyword):
        server = processes.serve
        wait_until_healthy(server, processes.url)
        assert_served(processes.url, "fixed-64", by_keyword)
        logged = ""
        while "ready on" not in logged:
            logged += (line := server.stdout.readline())
            assert line, logged
        assert f"ready on {processes.url}, {START_UP} fixed-64" in logged
        os.killpg(server.pid, signal.SIGINT)
        logged, _ = server.communicate(timeout=120)
        assert server.returncode == 0 and "Traceback" not in logged, logged


def wait_until_healthy(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 300
    while not is_healthy(url):
        assert server.poll() is None, server.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(1)


def test_sglang_serve(sharp_llama, schedule_file, by_keyword, monkeypatch, capfd):
    import_for_fork()
    port = free_port()
    flags = ["--sparrow-schedule", schedule_file, "--port", str(port)]
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", *server_flags(sharp_llama), *flags])
    [command] = entry_points(group="console_scripts", name="sglang")
    with forked(port, command.load()) as url:
        assert_served(url, schedule_file, by_keyword)
    assert f"{START_UP} mine (calibrated), from --sparrow-schedule" in capfd.readouterr().err


def assert_served(url: str, schedule: str, expected: tuple[list[int], list[float]]) -> None:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    chosen = [info[name] for name in ("attention_backend", "sparrow_schedule", "page_size")]
    assert chosen == ["sparrow", schedule, 16]
    request = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    output = requests.post(f"{url}/generate", json=request, timeout=60).json()
    assert_same(read(output), expected)


def is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


class TestBrokenPlugin:
    """SGLang logs what goes wrong in a plugin and goes on; the scheduler must not."""

    @pytest.fixture
    def registration(self, monkeypatch, tiny_llama):
        with start_engine(tiny_llama):
            pass  # From here on SGLang has loaded its plugins in this process.
        from sparrow_sglang.plugin.state import PROCESS

        monkeypatch.setattr(PROCESS, "error", None)
        monkeypatch.setattr(PROCESS, "hooks", PROCESS.hooks)
        return PROCESS

    def start_and_fail(self, path: str, capfd) -> str:
        with pytest.raises(RuntimeError) as refused:
            with start_engine(path, attention_backend="sparrow", sparrow_schedule="fixed-64"):
                pass
        return capfd.readouterr().err + str(refused.value)

    def test_plugin_raises(self, registration, tiny_llama, monkeypatch, capfd):
        from sparrow_sglang.plugin import registration as plugin

        def fail() -> None:
            raise AttributeError("SGLang has changed")

        monkeypatch.setattr(plugin.server_args, "install", fail)
        with pytest.raises(AttributeError):
            plugin.register()
        logged = self.start_and_fail(tiny_llama, capfd)
        assert "sparrow-sglang could not be registered: AttributeError('SGLang has" in logged
        assert START_UP not in logged

    def test_hook_that_sglang_could_not_apply(self, registration, tiny_llama, capfd):
        [first, *rest] = registration.hooks
        misspelt = first._replace(target="sglang.srt.mem_cache.common.kv_to_page_num")
        registration.hooks = (misspelt, *rest)
        logged = self.start_and_fail(tiny_llama, capfd)
        assert (
            "SGLang did not apply these hooks of sparrow-sglang:"
            " ['sglang.srt.mem_cache.common.kv_to_page_num']" in logged
        )
        assert START_UP not in logged
