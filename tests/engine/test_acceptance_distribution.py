"""The benchmark of acceptance rates with engines of a tiny model, one for each page size."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ascii_task import save_model_of_bytes
from engines import save_tiny_model, start_engine

from sparrow_sglang.benchmarks.rollouts import acceptance_distribution
from sparrow_sglang.calibration import engine


@contextmanager
def forked_engine(model_path: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    extra = {"attention_backend": "sparrow", "max_running_requests": 40, "max_total_tokens": 12288}
    with start_engine(model_path, **(extra | engine_args)) as started:
        yield started


def test_smaller_budgets_agree_on_fewer_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "running_engine", forked_engine)
    save_model_of_bytes(tmp_path)
    # With these weights it matters which pages are read.
    model = save_tiny_model(tmp_path, spread=0.15)
    draw = random.Random(0)
    prompts = [{"input_ids": [draw.randrange(3, 200) for _ in range(260)]} for _ in range(8)]
    file, out = tmp_path / "p.jsonl", tmp_path / "rates.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    arguments = f"""--model-path {model} --prompts {file} --budgets 64 192 --reference-budget 192
        --page-sizes 16 32 --bin-tokens 64 --new-tokens 40 --min-tokens 100 --batch 32
        --work {tmp_path / "work"} --out {out} --engine-args {{"context_length":384}}"""
    assert acceptance_distribution.main(arguments.split()) == 0
    rows = json.loads(out.read_text())["rows"]
    every = {row["budget_tokens"]: row for row in rows if row["kind"] == "all tokens"}
    # 39 of 40 tokens of each response come out of decode.
    assert {row["tokens"] for row in every.values()} == {8 * 39}
    assert every[None]["share_above_0.999"] == 1
    assert every[64]["mean"] < every[192]["mean"] < every[None]["mean"]
    assert every[64]["tail"] < every[192]["tail"]
    cells = {row["schedule"]: row for row in rows if row["kind"] == "page size"}
    assert set(cells) == {"fixed-192", "page32-down", "page32-up"}
    assert {row["bin"] for row in cells.values()} == {4}
    read = [cells[name]["bytes_read"] for name in ("page32-down", "fixed-192", "page32-up")]
    assert read == sorted(read)
    assert [row["bins"] for row in rows if row["kind"] == "difference"] == [1, 1]
