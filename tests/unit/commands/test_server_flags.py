"""Flags of `sparrow serve` that are looked at before SGLang is imported."""

import socket

import pytest

from sparrow_sglang.commands.cli import main
from sparrow_sglang.commands.server_flags import check_flags, check_port
from sparrow_sglang.errors import InputError


@pytest.mark.parametrize("argv", [[], ["--tp", "2"], ["m/n", "--sparrow-schedule=auto,fixed-512"]])
def test_what_may_be_right_is_left_to_sglang(argv: list[str]) -> None:
    check_flags(argv)


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
        said = capsys.readouterr().err
        assert f"--port {port}: another process listens on 127.0.0.1:{port}" in said
        assert said.count("\n") == 1
        for host in ("0.0.0.0", "localhost"):
            with pytest.raises(InputError, match="another process listens"):
                check_port([f"--port={port}", "--host", host])
    check_port(["--port", port])
