"""Another SGLang than the supported one is refused before anything is loaded, in one line."""

import logging
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparrow_sglang import sglang_versions
from sparrow_sglang.commands.serve import ServeError, parse_server_args
from sparrow_sglang.plugin import refusals, server_args
from sparrow_sglang.plugin.refusals import UnsupportedError

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the environment says is installed."""
    monkeypatch.setattr(sglang_versions, "version", lambda package: "9.9.9")
    return re.escape("SGLang 9.9.9: expected 0.5.17") + ".*; pip install sglang==0.5.17$"


def test_one_version_everywhere() -> None:
    pins = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert f"sglang=={sglang_versions.SUPPORTED[-1]}" in pins
    assert sglang_versions.SUPPORTED == ("0.5.17",)


def test_the_installed_version_is_no_problem() -> None:
    assert sglang_versions.version_problems() == []


def test_the_error_is_one_line_and_reads_no_field_of_that_version(newer: str) -> None:
    # A ServerArgs without any of the fields that the other rules look at.
    (problem,) = refusals.server_problems(SimpleNamespace())
    assert re.match(newer, problem) and "\n" not in problem


def test_an_sglang_that_pip_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise sglang_versions.PackageNotFoundError(package)

    monkeypatch.setattr(sglang_versions, "version", missing)
    (problem,) = sglang_versions.version_problems()
    assert problem.startswith("SGLang of an unknown version: expected 0.5.17")


def test_arguments_of_an_engine(newer: str, tiny_llama: str) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(UnsupportedError, match=newer):
        ServerArgs(model_path=tiny_llama, attention_backend="sparrow", sparrow_schedule="fixed-512")
    # People who use another backend keep their SGLang.
    ServerArgs(model_path=tiny_llama, attention_backend="torch_native")


def test_no_hook_is_put_into_another_version(newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sparrow_sglang.plugin.registration import register
    from sparrow_sglang.plugin.state import PROCESS

    monkeypatch.setattr(PROCESS, "error", None)
    monkeypatch.setattr(PROCESS, "hooks", PROCESS.hooks)
    registered: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: registered.append(target))
    with pytest.raises(UnsupportedError, match=newer):
        register()
    assert registered == []


def test_a_scheduler_does_not_start(newer: str) -> None:
    from sparrow_sglang.plugin.registration import build_backend

    with pytest.raises(UnsupportedError, match=newer):
        build_backend(SimpleNamespace())


def test_serve_says_so_before_anything_else(newer: str) -> None:
    with pytest.raises(ServeError, match=newer):
        parse_server_args(["--no-such-flag"])


def test_what_does_not_fit_into_another_version_is_one_line(
    newer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AttributeError("ServerArgs has changed")

    monkeypatch.setattr(server_args, "install", fail)
    # Servers that other tests have started set up logging anew.
    monkeypatch.setattr(server_args.logger, "disabled", False)
    with caplog.at_level(logging.WARNING, server_args.logger.name):
        server_args._install_or_log()
    [line] = caplog.messages
    assert re.search(newer, line) and "\n" not in line
