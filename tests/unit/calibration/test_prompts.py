"""Prompts of calibration: read from files, or made from texts of the package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration import prompts as calibration_prompts
from sparrow_sglang.calibration.choice import bin_tails, shortage
from sparrow_sglang.calibration.prompts import builtin_prompts, read_prompts
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.mismatch.tail import BinTail


def words(text: str | list[dict[str, Any]]) -> list[int]:
    """A tokenizer without a model: one token per word, by content."""
    flat = text if isinstance(text, str) else " ".join(m["content"] for m in text)
    return [sum(word.encode()) + 1 for word in flat.split()]


def test_prompts_are_read_in_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n'
        '{"input_ids": [7, 8, 9]}\n'
    )
    read = [prompt.input_ids for prompt in read_prompts(path, words, 12)]
    assert read == [(98, 99), (100,), (7, 8, 9)]


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_line_breaks_end_a_line(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"a{separator}b"}, {"prompt": "c"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    assert len(read_prompts(path, words, 12)) == 2


def test_lines_with_the_same_prompt_are_one_cluster(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = '{"prompt": "a"}\n{"input_ids": [98]}\n'
    path.write_text(lines * 14)
    cached, rates = np.full(100, 20), np.linspace(0, 1, 100)

    def tail() -> BinTail:
        found = [Tokens(prompt.name, cached, rates) for prompt in read_prompts(path, words, 12)]
        return bin_tails(found, 64, 16)[0]

    assert not not shortage(tail(), 100)
    with path.open("a") as file:
        file.writelines(f'{{"prompt": "{letter}"}}\n' for letter in "bcdefghijkl")
    assert not shortage(tail(), 100)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"input_ids": [1]}\nnot json\n',
        '{"input_ids": []}',
        '{"input_ids": [true]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        "[" * 100_000,
        f'{{"input_ids": [{"9" * 5000}]}}',
        '{"prompt": "a", "response": "b c"}',
        json.dumps({"input_ids": [1] * 2}),
    ],
)
def test_wrong_prompts_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=str(path)):
        read_prompts(path, words, 10)


def test_builtin_prompts_reach_every_bin_and_the_two_parts_differ() -> None:
    parts = {
        part: builtin_prompts(words, 4096, 512, 64, 4, part) for part in ("calibration", "check")
    }
    for prompts in parts.values():
        lengths = [len(prompt.input_ids) for prompt in prompts]
        assert max(lengths) <= 4096 - 64
        assert {length // 512 for length in lengths} == set(range(8)) and len(lengths) == 8 * 4
    assert not {p.name for p in parts["calibration"]} & {p.name for p in parts["check"]}
    corpora = [calibration_prompts._corpus(part) for part in parts]
    assert not set(corpora[0].split("\n\n")) >= set(corpora[1].split("\n\n"))
