"""Files of tasks, and tasks loaded from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks import Task, load_task

CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


def render(messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    return tuple("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())


def load(name: str, path: Path | None = None, **fields: Any) -> Task:
    return load_task(TaskConfig(name=name, train_path=path, **fields), render)


def single_with_reasons(prompt: Any, text: str, finish_reasons: Any) -> float:
    return 0.0


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_row(truth: Any, prompt: Any = CHAT, index: int = 0) -> dict[str, Any]:
    """A row in the layout of verl's data."""
    return {
        "data_source": "math_dapo",
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{index}"},
    }
