"""What `sparrow serve` hands to SGLang's own parser, and what it refuses."""

import socket
from pathlib import Path

import pytest
import torch
from ports import free_port

from sparrow_sglang.commands import cli, serve
from sparrow_sglang.errors import InputError

# Without a GPU torch takes twice as long in the bfloat16 of most checkpoints.
CPU = [] if torch.cuda.is_available() else ["--dtype", "float32"]
DEFAULTS = ["--attention-backend", "sparrow", *CPU, "--log-level", "warning"]
NAMED = [*DEFAULTS, "--served-model-name", "smollm2-135m"]
FOLDER = ["--model-path", "/cache/model"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], [*NAMED, *FOLDER]),
        (["--port", "1"], [*NAMED, "--port", "1", *FOLDER]),
        (["smollm2-135m"], [*NAMED, "--model-path", "smollm2-135m", *FOLDER]),
        (["--model=smollm2-135m"], [*NAMED, "--model=smollm2-135m", *FOLDER]),
        (["--model-path", "my/model"], [*DEFAULTS, "--model-path", "my/model"]),
        (["my/model", "--port", "1"], [*DEFAULTS, "--model-path", "my/model", "--port", "1"]),
        (["--config=a.yaml"], [*DEFAULTS, "--config", "a.yaml"]),
        # A model's name that is another flag's value is not taken for the model.
        (
            ["--model", "m", "--served-model-name", "smollm2-135m"],
            [*DEFAULTS, "--model", "m", "--served-model-name", "smollm2-135m"],
        ),
    ],
)
def test_defaults_come_before_the_users_flags(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: list[str]
) -> None:
    folders = {"smollm2-135m": "/cache/model", "gemma3-270m": "/cache/gemma"}
    monkeypatch.setattr(serve, "model_folder", lambda name: folders.get(name, name))
    assert serve.with_defaults(argv) == expected


def test_a_config_file_overrides_our_defaults_and_is_overridden(
    tiny_llama: str, tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    lines = "attention-backend: torch_native\nport: 8001\ndtype: bfloat16\n"
    config.write_text(f"model-path: {tiny_llama}\n{lines}")
    for words in (["--config", str(config)], [f"--config={config}"]):
        args = serve.parse_server_args(serve.with_defaults([*words, "--port", "8002"]))
        seen = args.model_path, args.attention_backend, args.dtype, args.port
        assert seen == (tiny_llama, "torch_native", "bfloat16", 8002)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attention-backend", "sparow"], "'sparow'"),
        (["--prot", "1"], "unrecognized arguments: --prot 1 (did you mean --port?)"),
        (["--mem-fraction-static", "x"], "--mem-fraction-static: invalid float value: 'x'"),
        (["--config", "gone.yaml"], "gone.yaml"),
        (["--page-size", "32", "--sparrow-schedule", "qwen3-4b-0.86"], "page_size=16"),
        (["--speculative-algorithm", "NGRAM"], "speculative_algorithm='NGRAM'"),
        (["--enable-lora"], "--max-lora-rank"),
        (["--sparrow-draft-weights", "fp4"], "weights fp4: expected auto, model, fp8"),
        (["--sparrow-audit-rate", "nan"], "rate nan: expected 0 to 1"),
        # SGLang asserts it without a message.
        (["--tp", "3", "--dp", "2", "--enable-dp-attention"], "tp_size %"),
    ],
)
def test_a_wrong_flag_is_one_line(
    tiny_llama: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    usual = ["--model-path", tiny_llama, "--sparrow-schedule", "fixed-512"]
    usual += ["--port", str(free_port())]
    assert cli.main(["serve", *usual, *argv]) == 2
    error = capsys.readouterr().err
    assert "sparrow serve: error: " in error and message in error


def test_beginnings_of_our_flags_are_accepted() -> None:
    serve.check_flags(["--sparrow-sched=fixed-512", "--sparrow-audit-r", "0.1", "-h"])


def test_a_port_in_use_is_refused_unless_a_file_may_name_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--port", str(taken.getsockname()[1])]
        serve.check_flags(["--config", "server.yaml", *flags])
        with pytest.raises(InputError, match=f"--port {flags[1]} of --host 127.0.0.1"):
            serve.check_flags(flags)
