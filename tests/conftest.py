"""Fixtures that more than one test file uses."""

import signal
from collections.abc import Iterator

import pytest
import torch
from engines import SCHEDULE, save_tiny_model

# Engines are forked from this process, and a child hangs in its first parallel region if the parent
# has started OpenMP threads.
torch.set_num_threads(1)


@pytest.fixture
def sigterm_restored() -> Iterator[None]:
    """For tests of commands that handle SIGTERM until they end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def sharp_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("sharp-llama"), spread=0.15)


@pytest.fixture(scope="session")
def schedule_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of `engines.SCHEDULE`."""
    path = tmp_path_factory.mktemp("schedule") / "test.json"
    SCHEDULE.save(path)
    return str(path)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3", spread=0.15)
