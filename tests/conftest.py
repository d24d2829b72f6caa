"""Fixtures that more than one test file uses."""

import gc
import os

# Set before NumPy and torch are imported, for all processes that tests start. Arrays are small, and
# threads that wait for each other on a busy machine take several times as long as one. Engines are
# forked from this process, and a child hangs in its first parallel region if the parent has started
# OpenMP threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Importing torch and SGLang makes millions of objects, which the garbage collector would traverse
# again and again.
gc.set_threshold(100_000)

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ascii_task
import pytest
from engines import save_tiny_model

from sparrow_sglang.rl.tasks import TASKS
from sparrow_sglang.sglang_compat.arguments import resolve


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True)
def sigterm_restored() -> Iterator[None]:
    """Restore the handler of SIGTERM after a test of a command that sets its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings that this package logs."""
    logger = logging.getLogger("sparrow_sglang")
    logger.addHandler(caplog.handler)
    # Engines change the level of the root logger and do not restore it.
    caplog.set_level(logging.WARNING, logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for the embedded model, which does not exist yet."""
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def sharp_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("sharp-llama"), spread=0.15)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3", spread=0.15)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A byte-level model; the task that training runs learn with it is registered meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
        yield ascii_task.save_model_of_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def make_args(tiny_llama: str) -> Callable[..., Any]:
    """Build ServerArgs as a user would; nothing but SGLang has been imported for it."""
    from sglang.srt.server_args import ServerArgs

    def make(model_path: str = tiny_llama, **fields: Any) -> Any:
        fields.setdefault("attention_backend", "sparrow")
        fields.setdefault("sparrow_schedule", "fixed-512")
        args = ServerArgs(model_path=model_path, **fields)
        resolve(args)
        return args

    return make
