"""Responses of a run's policy: the best and the worst of some groups, as text.

In: the folder of a run. Out: `Excerpt`s, from the first step to the last.
"""

from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.report.page import Excerpt, number, reading
from sparrow_sglang.report.run_files import json_lines
from sparrow_sglang.run_folder import RESPONSES_FILE

_STEPS = 4
_HEAD, _END = 4000, 2000


def response_excerpts(folder: Path) -> list[Excerpt]:
    """Best and worst response of one group in each of at most four steps.

    Raises `ReportError` if the file is damaged.
    """
    path = folder / RESPONSES_FILE
    rows = json_lines(path)
    steps = sorted({row["step"] for row in rows})
    shown = np.unique(np.linspace(0, len(steps) - 1, _STEPS).round().astype(int)) if steps else ()
    excerpts = []
    with reading(path, "sparrow train"):
        for step in (steps[index] for index in shown):
            of_step = [row for row in rows if row["step"] == step]
            first = of_step[0]["task"], of_step[0]["prompt_id"]
            group = [row for row in of_step if (row["task"], row["prompt_id"]) == first]
            group.sort(key=lambda row: row["reward"], reverse=True)
            excerpts += [_excerpt(row) for row in ([group[0], group[-1]] if group[1:] else group)]
    return excerpts


def _excerpt(row: dict[str, Any]) -> Excerpt:
    facts = [
        f"Step {row['step']}",
        f"{row['task']}/{row['prompt_id']}",
        f"reward {number(row['reward'])}",
        *(f"{name} {number(value)}" for name, value in row["scores"].items()),
        f"{row['length']:,} tokens",
        row["finish_reason"],
    ]
    if row["tail"] is not None:
        facts.append(f"tail {number(row['tail'])}")
    text = row["text"]
    left_out = len(text) - _HEAD - _END
    if left_out > 0:
        text = f"{text[:_HEAD]}\n[… {left_out:,} characters …]\n{text[-_END:]}"
    return Excerpt(", ".join(facts), text)
