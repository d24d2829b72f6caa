"""The model of bytes, which training runs learn a task of their own with."""

from collections.abc import Iterator

import ascii_task
import pytest
from engines import import_for_fork

from sparrow_sglang.rl.tasks import TASKS


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import_for_fork()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
        yield ascii_task.save_model_of_bytes(tmp_path_factory.mktemp("bytes"))
