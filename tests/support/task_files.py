"""Files of tasks, and tasks loaded from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks import Task, load_task


def render(messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    return tuple("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())


def load(name: str, path: Path | None = None, **fields: Any) -> Task:
    return load_task(TaskConfig(name=name, train_path=path, **fields), render)


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
