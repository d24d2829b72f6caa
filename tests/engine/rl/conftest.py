"""Training runs start engines, forked from this process."""

import forked_workers
import pytest
from engines import import_for_fork

forked_workers.start_forking()


@pytest.fixture(scope="module")
def byte_model(byte_model: str) -> str:
    import_for_fork()
    return byte_model
